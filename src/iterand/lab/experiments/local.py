"""Tasks and events, which all engines share, and the local engine: several processes on this machine.

A process does one run after another, preferably of the same network, which is compiled once. A run that fails does not
stop the others. After an unexpected error the process ends, since its state may be damaged.
"""

import gc
import itertools
import logging
import multiprocessing
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

from iterand.errors import DataError, IterandError, sentence
from iterand.files import require_writable
from iterand.lab.data.catalog import located
from iterand.lab.data.dataset import data_folder
from iterand.lab.training.environment import Interrupted, StopRequest, choose_device, stop_request
from iterand.lab.training.folder import RECORD, RunFolder
from iterand.lab.training.loop import Observer
from iterand.lab.training.recipe import NetworkRecipe, Recipe
from iterand.lab.training.run import run
from iterand.lab.training.session import Session
from iterand.lab.training.steps import Execution

logger = logging.getLogger("iterand")
if sys.platform == "win32":  # no fork
    from multiprocessing.connection import PipeConnection as Connection

    _CONTEXT = multiprocessing.get_context("spawn")
else:
    from multiprocessing.connection import Connection

    _CONTEXT = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Task:
    """A run to do: recipe, folder and device."""

    label: str
    recipe: Recipe
    folder: Path
    device: str
    data_dir: Path | None = None
    execution: Execution = field(default_factory=Execution)


@dataclass(frozen=True)
class Event:
    """News of a task: ``started``, ``progress``, ``done`` (with its record) or ``failed`` (with its error)."""

    kind: str
    task: Task
    value: dict[str, Any]


class UnexpectedError(Exception):
    """An unexpected error of a run, which may have damaged its process."""


def do(task: Task, observer: Observer, request: StopRequest | None = None) -> Event:
    """Do the run of a task; unexpected errors are raised as UnexpectedError."""
    try:
        record = run(
            task.recipe,
            RunFolder(task.folder),
            device=choose_device(task.device),
            data_dir=task.data_dir,
            observer=observer,
            execution=task.execution,
            request=request,
        )
        return Event("done", task, record)
    except Interrupted:
        return Event("failed", task, {"error": "stopped and saved"})
    except (IterandError, ValueError, OSError) as error:
        return Event("failed", task, {"error": sentence(error)})
    except Exception as error:
        raise UnexpectedError(f"{type(error).__name__}: {error}") from error


class Reporter:
    """An observer that reports the progress of a run, a few times a second."""

    def __init__(self, send: Callable[[dict[str, Any]], None]) -> None:
        self._send = send
        self._reported = 0.0

    def step(self, session: Session) -> None:
        """Report progress, unless the last report is recent."""
        now = time.monotonic()
        if now - self._reported > 0.3:
            self._reported = now
            # Reading the loss would synchronize with a GPU.
            known = {} if session.device.type == "cuda" else {"loss": float(session.loss_sum) / max(session.seen, 1)}
            self._report(session, **known)

    def epoch(self, session: Session, metrics: dict[str, Any]) -> None:
        """Report the metrics of an epoch."""
        self._report(session, loss=metrics["train_loss"], validation_accuracy=metrics["validation_accuracy"])

    def _report(self, session: Session, **more: float) -> None:
        steps = session.steps_per_epoch
        done = session.epoch * steps + session.step
        self._send({"done": done, "total": steps * session.recipe.training.epochs, **more})


@dataclass
class _Running:
    process: BaseProcess
    connection: Connection
    task: Task
    ended: bool = False
    """Whether its task has ended, done or failed."""
    idle: bool = False
    """Whether it waits for another task."""


def run_tasks(tasks: Sequence[Task], jobs: int) -> Iterator[Event]:
    """Do the tasks in ``jobs`` processes at a time, and yield their events.

    Raises an OSError, before any run, if a folder that runs would be written to is read-only, and a DataError if all
    runs lack their data set. If only some do, they fail first.
    """
    without_data = _without_data(tasks)
    if tasks and len(without_data) == len(tasks):
        raise DataError("; ".join(dict.fromkeys(map(str, without_data.values()))))
    for task, error in without_data.items():
        yield Event("failed", task, {"error": sentence(error)})
    tasks = [task for task in tasks if task not in without_data]
    for folder in {task.folder.parent for task in tasks if not (task.folder / RECORD).exists()}:
        require_writable(folder)
    # Children are forked from a server that has imported torch and has not initialized CUDA. On a CPU the server also
    # imports torch._dynamo, which every optimizer needs and which takes seconds; it might initialize CUDA.
    on_cpu = all(task.device == "cpu" for task in tasks)
    _CONTEXT.set_forkserver_preload(["iterand.lab.training.run", *(["torch._dynamo"] if on_cpu else [])])
    threads = threads_each(tasks, jobs)
    waiting, running = _by_network(tasks), list[_Running]()
    if sys.platform != "win32":
        _start_server()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                ours, theirs = _CONTEXT.Pipe()
                process = _CONTEXT.Process(target=_work, args=(theirs, threads), daemon=True)
                process.start()
                theirs.close()
                running.append(_Running(process, ours, waiting[0]))
                yield _give(running[-1], waiting.pop(0))
            wait([entry.connection for entry in running])
            for entry in list(running):
                yield from _listen(entry, running)
                if entry.idle:
                    alike = [task for task in waiting if task.recipe.network == entry.task.recipe.network]
                    if alike:
                        waiting.remove(alike[0])
                        yield _give(entry, alike[0])
                    else:
                        running.remove(entry)
                        entry.connection.close()  # ends its loop
                        entry.process.join()
    finally:
        _stop(running)


def _without_data(tasks: Sequence[Task]) -> dict[Task, DataError]:
    """The runs without a record whose data set is not there, and their errors."""
    found = {}
    for task in tasks:
        data = task.recipe.data
        try:
            if not (task.folder / RECORD).exists():
                located(data.name, data_folder(data.path or task.data_dir))
        except DataError as error:
            found[task] = error
    return found


def threads_each(tasks: Sequence[Task], jobs: int) -> int:
    """How many threads each process gets; 0 for torch's default.

    On a CPU results depend on the number of threads, so the recipe decides. On a GPU threads only help to write tickets
    and the like, and more threads than cores slow each other down.
    """
    if any(task.device == "cpu" for task in tasks):
        return 0
    return max(1, torch.get_num_threads() // min(jobs, max(1, len(tasks))))


def _start_server() -> None:
    """Start the server that children are forked from. It ignores Ctrl-C, which this process handles."""
    if threading.current_thread() is not threading.main_thread():
        return  # signal handlers can only be set in the main thread
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _by_network(tasks: Sequence[Task]) -> list[Task]:
    """The tasks grouped by network, so that each is compiled once."""
    alike: dict[NetworkRecipe, list[Task]] = {}
    for task in tasks:
        alike.setdefault(task.recipe.network, []).append(task)
    return list(itertools.chain.from_iterable(alike.values()))


def _give(entry: _Running, task: Task) -> Event:
    """Send a task to a process."""
    entry.task, entry.ended, entry.idle = task, False, False
    with suppress(OSError):  # it was killed, which _listen reports next
        entry.connection.send(task)
    return Event("started", task, {})


def _listen(entry: _Running, running: list[_Running]) -> Iterator[Event]:
    """The events of a process so far; a process that has ended is removed from ``running``."""
    try:
        while not entry.idle and entry.connection.poll():
            kind, value = entry.connection.recv()
            entry.idle = kind == "idle"
            if not entry.idle:
                entry.ended = kind != "progress"
                yield Event(kind, entry.task, value)
    except (EOFError, OSError):
        running.remove(entry)
        entry.process.join()
        if not entry.ended:
            yield Event("failed", entry.task, {"error": f"its process ended with exit code {entry.process.exitcode}"})


def _stop(running: list[_Running]) -> None:
    """Ask the runs to save and stop; kill those that do not end within 30 s."""
    if running:
        logger.warning("stopping: checkpoints of the running runs are being saved")
    for entry in running:
        if entry.process.pid is not None:
            entry.process.terminate()  # SIGTERM: the run saves a checkpoint at the next step
        entry.connection.close()
    deadline = time.monotonic() + 30
    for entry in running:
        entry.process.join(max(0.0, deadline - time.monotonic()))
        if entry.process.is_alive():
            logger.warning("a run did not get to its next step within 30 s; it resumes from its last checkpoint")
            entry.process.kill()


def _work(connection: Connection, threads: int) -> None:
    """The loop of a process: receive a task, do it, send events."""

    def send(kind: str, value: dict[str, Any]) -> None:
        with suppress(OSError):  # the parent is gone; the run continues
            connection.send((kind, value))

    if threads:
        torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C and sends SIGTERM
    with stop_request() as request:
        while True:
            try:
                task = connection.recv()
            except (EOFError, OSError):
                return
            if request.asked:
                return
            try:
                event = do(task, Reporter(lambda value: send("progress", value)), request)
            except UnexpectedError as error:
                send("failed", {"error": str(error)})
                return
            send(event.kind, event.value)
            gc.collect()  # frees a captured graph and its memory
            send("idle", {})
