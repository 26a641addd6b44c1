"""A run to do, what is heard of it, and doing it: what all engines share.

The local engine: several processes at a time on this machine, each with one run after another.

A process goes on to the next run of its network, which it need not compile again. A run that fails is noted and does
not touch the others: after an error that nobody foresaw the process ends, since it may have spoilt more."""

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

from iterand.errors import IterandError
from iterand.lab.training.environment import Interrupted, StopRequest, choose_device, stop_request
from iterand.lab.training.folder import RunFolder
from iterand.lab.training.loop import Observer
from iterand.lab.training.recipe import NetworkRecipe, Recipe
from iterand.lab.training.run import run
from iterand.lab.training.session import Session
from iterand.lab.training.steps import Execution


@dataclass(frozen=True)
class Task:
    """One run to do."""

    label: str
    recipe: Recipe
    folder: Path
    device: str
    data_dir: Path | None = None
    execution: Execution = field(default_factory=Execution)


@dataclass(frozen=True)
class Event:
    """What is heard of a task: ``started``, ``progress``, ``done`` (with its record) or ``failed`` (with its error)."""

    kind: str
    task: Task
    value: dict[str, Any]


class UnforeseenError(Exception):
    """A run ended by an error that may have damaged its process."""


def do(task: Task, observer: Observer, request: StopRequest | None = None) -> Event:
    """Do the run of a task; errors that nobody foresaw are raised as UnforeseenError."""
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
        return Event("failed", task, {"error": str(error)})
    except Exception as error:
        raise UnforeseenError(f"{type(error).__name__}: {error}") from error


logger = logging.getLogger("iterand")

if sys.platform == "win32":  # which cannot fork: children begin from nothing
    from multiprocessing.connection import PipeConnection as Connection

    _CONTEXT = multiprocessing.get_context("spawn")
else:
    from multiprocessing.connection import Connection

    _CONTEXT = multiprocessing.get_context("forkserver")


@dataclass
class _Running:
    process: BaseProcess
    connection: Connection
    task: Task
    ended: bool = False
    """Whether its task is done or has failed."""
    idle: bool = False
    """Whether it waits for another."""


def run_tasks(tasks: Sequence[Task], jobs: int) -> Iterator[Event]:
    """Do the tasks in ``jobs`` processes at a time, and say how they go."""
    # Children are forked from a server that has imported torch and touched no GPU. On a CPU it also imports what every
    # optimizer needs and takes seconds; whether that looks for a GPU is torch's own business.
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
                        entry.connection.close()  # which ends its loop
                        entry.process.join()
    finally:
        _stop(running)


def threads_each(tasks: Sequence[Task], jobs: int) -> int:
    """How many threads each process gets; 0 for as many as torch likes.

    On a CPU sums depend on their number, so there it is the recipe's business. Where a GPU does the sums, threads only
    help to write tickets and the like, and many times more of them than there are cores wait for each other.
    """
    if any(task.device == "cpu" for task in tasks):
        return 0
    return max(1, torch.get_num_threads() // min(jobs, max(1, len(tasks))))


def _start_server() -> None:
    """Start what children are forked from, deaf to Ctrl-C: that is the business of this process alone."""
    if threading.current_thread() is not threading.main_thread():
        return  # only there signals can be set
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, before)


def _give(entry: _Running, task: Task) -> Event:
    """Give a process something to do."""
    entry.task, entry.ended, entry.idle = task, False, False
    with suppress(OSError):  # it was killed: that is heard next
        entry.connection.send(task)
    return Event("started", task, {})


def _by_network(tasks: Sequence[Task]) -> list[Task]:
    """The tasks with those of one network after another, so that it is compiled once."""
    alike: dict[NetworkRecipe, list[Task]] = {}
    for task in tasks:
        alike.setdefault(task.recipe.network, []).append(task)
    return list(itertools.chain.from_iterable(alike.values()))


def _listen(entry: _Running, running: list[_Running]) -> Iterator[Event]:
    """All that a process has said; one that can say nothing more is no longer running."""
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
    """Let the runs save themselves; what does not end soon is ended."""
    if running:
        logger.warning("stopping: runs that go on are being saved")
    for entry in running:
        if entry.process.pid is not None:
            entry.process.terminate()  # SIGTERM: a run saves itself at the next step
        entry.connection.close()
    deadline = time.monotonic() + 30
    for entry in running:
        entry.process.join(max(0.0, deadline - time.monotonic()))
        if entry.process.is_alive():
            logger.warning("a run did not get to its next step within 30 s; it goes on from its last checkpoint")
            entry.process.kill()


class Reporter:
    """An observer that tells how far a run is, a few times a second."""

    def __init__(self, tell: Callable[[dict[str, Any]], None]) -> None:
        self._tell = tell
        self._said = 0.0

    def step(self, session: Session) -> None:
        """Tell how far the run is, if the last time was a while ago."""
        now = time.monotonic()
        if now - self._said > 0.3:
            self._said = now
            # Reading the loss would make the host wait for a GPU, and the GPU then for the host.
            known = {} if session.device.type == "cuda" else {"loss": float(session.loss_sum) / max(session.seen, 1)}
            self._report(session, **known)

    def epoch(self, session: Session, metrics: dict[str, Any]) -> None:
        """Tell that an epoch is done."""
        self._report(session, loss=metrics["train_loss"], validation_accuracy=metrics["validation_accuracy"])

    def _report(self, session: Session, **more: float) -> None:
        steps = session.steps_per_epoch
        done = session.epoch * steps + session.step
        self._tell({"done": done, "total": steps * session.recipe.training.epochs, **more})


def _work(connection: Connection, threads: int) -> None:
    def say(kind: str, value: dict[str, Any]) -> None:
        with suppress(OSError):  # nobody listens any more: the run goes on all the same
            connection.send((kind, value))

    if threads:
        torch.set_num_threads(threads)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which asks with SIGTERM
    with stop_request() as request:
        while True:
            try:
                task = connection.recv()
            except (EOFError, OSError):
                return
            if request.asked:
                return
            try:
                event = do(task, Reporter(lambda value: say("progress", value)), request)
            except UnforeseenError as error:
                say("failed", {"error": str(error)})
                return
            say(event.kind, event.value)
            gc.collect()  # a recorded graph and its memory
            say("idle", {})
