"""The local engine: several processes at a time on this machine, each with one run or several side by side.

A process does one run after another, since a network that is compiled once need not be compiled again. A run that fails
is noted and does not touch the others; neither does a process that is killed, except those it shared.
"""

import gc
import multiprocessing
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from iterand.experiments.side_by_side import run_side_by_side
from iterand.experiments.task import Event, Task
from iterand.training.recipe import NetworkRecipe
from iterand.training.session import Session


@dataclass
class _Running:
    tasks: list[Task]
    """Those it has not said the last word of."""
    process: BaseProcess
    connection: Connection
    network: NetworkRecipe | None = None
    """What it knows already."""


def run_tasks(tasks: Sequence[Task], jobs: int, together: int = 1) -> Iterator[Event]:
    """Do the tasks in ``jobs`` processes at a time, ``together`` in each, and say how they go."""
    # Children are forked from a server that has imported torch and touched no GPU. On a CPU it also imports what every
    # optimizer needs and takes seconds; whether that looks for a GPU is torch's own business.
    context = multiprocessing.get_context("forkserver")
    on_cpu = all(task.device == "cpu" for task in tasks)
    context.set_forkserver_preload(["iterand.experiments.running", *(["torch._dynamo"] if on_cpu else [])])
    waiting, running = _portions(tasks, together), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(theirs,), daemon=True)
                process.start()
                theirs.close()
                running.append(_Running([], process, ours))
                yield from _next(running[-1], waiting)
            wait([entry.connection for entry in running])
            for entry in list(running):
                yield from _listen(entry, running)
                if entry in running and not entry.tasks:
                    if waiting:
                        yield from _next(entry, waiting)
                    else:
                        running.remove(entry)
                        _dismiss(entry)
    finally:
        _stop(running)


def _next(entry: _Running, waiting: list[list[Task]]) -> Iterator[Event]:
    """Give a process something to do, a network that it knows if there is one."""
    known = [portion for portion in waiting if portion[0].recipe.network == entry.network]
    portion = (known or waiting)[0]
    waiting.remove(portion)
    entry.tasks, entry.network = list(portion), portion[0].recipe.network
    with suppress(OSError):  # it was killed: that is heard next
        entry.connection.send(portion)
    for task in portion:
        yield Event("started", task, {})


def _portions(tasks: Sequence[Task], together: int) -> list[list[Task]]:
    """What each process does; runs of the same network go together, so that it is compiled once."""
    alike: dict[Any, list[Task]] = {}
    for task in tasks:
        alike.setdefault(task.recipe.network, []).append(task)
    return [group[start : start + together] for group in alike.values() for start in range(0, len(group), together)]


def _listen(entry: _Running, running: list[_Running]) -> Iterator[Event]:
    """All that a process has said; one that can say nothing more is no longer running."""
    try:
        while entry.tasks and entry.connection.poll():
            task, kind, value = entry.connection.recv()
            if kind != "progress":
                entry.tasks.remove(task)
            yield Event(kind, task, value)
    except (EOFError, OSError):
        running.remove(entry)
        entry.process.join()
        for task in entry.tasks:
            yield Event("failed", task, {"error": f"its process ended with exit code {entry.process.exitcode}"})


def _dismiss(entry: _Running) -> None:
    entry.connection.close()  # which ends its loop
    entry.process.join()


def _stop(running: list[_Running]) -> None:
    """Let the runs save themselves; what does not end soon is ended."""
    for entry in running:
        if entry.process.pid is not None:
            entry.process.terminate()  # SIGTERM: a run saves itself at the next step
        entry.connection.close()
    deadline = time.monotonic() + 30
    for entry in running:
        entry.process.join(max(0.0, deadline - time.monotonic()))
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


def _work(connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which asks with SIGTERM

    def tell(task: Task, kind: str, value: dict[str, Any]) -> None:
        with suppress(OSError):  # nobody listens any more: the run goes on all the same
            connection.send((task, kind, value))

    with suppress(EOFError, OSError):
        while True:
            portion = connection.recv()
            run_side_by_side(portion, lambda task: Reporter(lambda value: tell(task, "progress", value)), tell)
            gc.collect()  # a recorded graph and its memory
