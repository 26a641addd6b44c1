"""The process of a run: device, threads, signals, and what the record says about them."""

import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np
import torch

from iterand import __version__


class Interrupted(Exception):
    """The run was asked to stop and has saved itself."""


class StopRequest:
    """Whether a stop was asked for."""

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM into a request; a second one ends the process as usual."""
    request = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def ask(number: int, frame: FrameType | None) -> None:
        request.asked = True
        signal.signal(number, before[signal.Signals(number)])

    for number in before:
        signal.signal(number, ask)
    try:
        yield request
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def choose_device(name: str) -> torch.device:
    """The device of this name; ``auto`` is a GPU where there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (number and not (kind == "cuda" and number.isdecimal())):
        raise ValueError(f"device is {name!r}; it must be auto, cpu, cuda or cuda:N")
    if kind == "cuda":
        count = torch.cuda.device_count()
        if int(number or 0) >= count:
            raise ValueError(f"device is {name!r}, but torch sees {count} CUDA devices here; use --device cpu")
    return torch.device(name)


@contextmanager
def compute_settings(threads: int) -> Iterator[None]:
    """Compute with this many threads for a while, 0 for as many as there are; what float32 barely holds is zero.

    Gradients that fade on their way through a long text end in numbers with which a CPU takes many times as long. Which
    numbers count is a matter of each thread: this one's, and of those that torch starts from now on.
    """
    before, was_flushing = torch.get_num_threads(), _flushes_denormals()
    for kind in (np.float32, np.float64):
        np.finfo(kind)  # NumPy keeps what it finds; later it would find that there are no denormals, and warn
    torch.set_flush_denormal(True)
    if threads not in (0, before):
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
        torch.set_flush_denormal(was_flushing)


def _flushes_denormals() -> bool:
    return float(torch.tensor(1e-38) * torch.tensor(0.01)) == 0.0


def describe(device: torch.device, world_size: int = 1) -> dict[str, Any]:
    """What a reader of the results needs to know of the machine, and over how many ranks a run was spread."""
    hardware: dict[str, Any] = {"cpu": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name(device)
    return {
        "iterand": __version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "device": str(device),
        "world_size": world_size,
        "hardware": hardware,
        "command": shlex.join(["iterand", *sys.argv[1:]]),
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source tree the package runs from; a copy without its repository says it in a variable."""
    if os.environ.get("ITERAND_COMMIT"):
        return os.environ["ITERAND_COMMIT"]
    here = Path(__file__).resolve()
    if not _git(here.parent, "ls-files", here.name):  # another project's repository, in which we are installed
        return None
    return _git(here.parent, "rev-parse", "HEAD") or None


def _git(folder: Path, *arguments: str) -> str:
    try:
        answer = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip()
