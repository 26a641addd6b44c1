"""The process of a run: stop signals, device, threads, and their description in the record.

The command line imports this module for help and usage errors too, so torch is imported when it is needed.
"""

import os
import platform
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from iterand import __version__

if TYPE_CHECKING:
    import torch


class Interrupted(Exception):
    """The run was asked to stop, and has saved a checkpoint."""


class StopRequest:
    """Whether a run should stop."""

    def __init__(self) -> None:
        self.asked = False


@contextmanager
def stop_request() -> Iterator[StopRequest]:
    """Turn the first Ctrl-C or SIGTERM into a stop request; a second one ends the process as usual."""
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


def choose_device(name: str) -> "torch.device":
    """The device of this name; ``auto`` is a GPU if there is one."""
    import torch

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
    """Set the number of threads of torch (0: leave it) and flush denormals to zero; both are reset at the end.

    Gradients that vanish over a long text become denormals, with which a CPU is many times slower. Flushing is set per
    thread: for this one, and for those that torch starts from now on. oneDNN is reset too: torch turns it off for the
    whole process when an ARM processor without bfloat16 multiplies it, so a later run would give other bits.
    """
    import numpy as np
    import torch

    before, was_flushing, onednn = torch.get_num_threads(), _flushes_denormals(), torch.backends.mkldnn.enabled
    for kind in (np.float32, np.float64):
        np.finfo(kind)  # cached by NumPy, which would warn if it found denormals flushed
    torch.set_flush_denormal(True)
    if threads not in (0, before):
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)
        torch.set_flush_denormal(was_flushing)
        torch.backends.mkldnn.set_flags(onednn)  # type: ignore[no-untyped-call]


def has_bfloat16() -> bool:
    """Whether this CPU multiplies bfloat16. Where it does not, torch needs tens of times as long as in float32."""
    import torch

    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())


def _flushes_denormals() -> bool:
    import torch

    return float(torch.tensor(1e-38) * torch.tensor(0.01)) == 0.0


def describe(device: "torch.device", world_size: int = 1) -> dict[str, Any]:
    """Date, versions, commit, hardware, device and command, as they appear in records."""
    import torch

    hardware: dict[str, Any] = {"cpu": _processor(), "cores": os.cpu_count(), "threads": torch.get_num_threads()}
    if device.type == "cuda":
        hardware["gpu"] = torch.cuda.get_device_name(device)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
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
    """The name of the processor, which Linux has in its list of processors, but not on ARM."""
    for command in (["cat", "/proc/cpuinfo"], ["lscpu"], ["sysctl", "machdep.cpu.brand_string"]):
        for line in _answer(command).splitlines():
            name, _, value = line.partition(":")
            if name.strip().lower() in ("model name", "machdep.cpu.brand_string"):
                return value.strip()
    return platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the source tree the package runs from; a copy without its repository gets it from a variable."""
    if os.environ.get("ITERAND_COMMIT"):
        return os.environ["ITERAND_COMMIT"]
    here = Path(__file__).resolve()
    if not _git(here.parent, "ls-files", here.name):  # another project's repository, in which we are installed
        return None
    return _git(here.parent, "rev-parse", "HEAD") or None


def _git(folder: Path, *arguments: str) -> str:
    return _answer(["git", *arguments], folder).strip()


def _answer(command: Sequence[str], folder: Path | None = None) -> str:
    """What a program prints, in English; nothing if it fails."""
    try:
        answer = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, timeout=5, env=os.environ | {"LC_ALL": "C"}
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout
