"""The local engine: several runs at a time on this machine, each in a process of its own.

A run that fails, or whose process is killed, is noted and does not touch the others.
"""

import multiprocessing
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from iterand.errors import IterandError
from iterand.experiments.running import run
from iterand.training.environment import choose_device
from iterand.training.folder import RunFolder
from iterand.training.interrupt import Interrupted
from iterand.training.recipe import Recipe
from iterand.training.session import Session


@dataclass(frozen=True)
class Task:
    """One run to do."""

    label: str
    recipe: Recipe
    folder: Path
    device: str
    data_dir: Path | None = None


@dataclass(frozen=True)
class Event:
    """What is heard of a task: ``started``, ``progress``, ``done`` (with its record) or ``failed`` (with its error)."""

    kind: str
    task: Task
    value: dict[str, Any]


@dataclass
class _Running:
    task: Task
    process: BaseProcess
    connection: Connection


def run_tasks(tasks: Sequence[Task], jobs: int) -> Iterator[Event]:
    """Do the tasks, ``jobs`` at a time, and say how they go."""
    # Children are forked from a server that has imported torch and touched no GPU. On a CPU it also imports what every
    # optimizer needs and takes seconds; whether that looks for a GPU is torch's own business.
    context = multiprocessing.get_context("forkserver")
    on_cpu = all(task.device == "cpu" for task in tasks)
    context.set_forkserver_preload(["iterand.experiments.running", *(["torch._dynamo"] if on_cpu else [])])
    waiting, running = list(tasks), list[_Running]()
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.pop(0)
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(target=_work, args=(task, theirs), daemon=True)
                process.start()
                theirs.close()
                running.append(_Running(task, process, ours))
                yield Event("started", task, {})
            wait([entry.connection for entry in running])
            for entry in list(running):
                yield from _listen(entry, running)
    finally:
        _stop(running)


def _listen(entry: _Running, running: list[_Running]) -> Iterator[Event]:
    """All that a run has said; once it has said its last word it is no longer running."""
    try:
        while entry.connection.poll():
            kind, value = entry.connection.recv()
            if kind != "progress":
                running.remove(entry)
                entry.process.join()
                yield Event(kind, entry.task, value)
                return
            yield Event(kind, entry.task, value)
    except (EOFError, OSError):
        running.remove(entry)
        entry.process.join()
        yield Event("failed", entry.task, {"error": f"its process ended with exit code {entry.process.exitcode}"})


def _stop(running: list[_Running]) -> None:
    """Let the runs save themselves; what does not end soon is ended."""
    for entry in running:
        if entry.process.pid is not None:
            entry.process.terminate()  # SIGTERM: a run saves itself at the next step
    deadline = time.monotonic() + 30
    for entry in running:
        entry.process.join(max(0.0, deadline - time.monotonic()))
        entry.process.kill()


class _Reporter:
    """An observer that tells the parent, a few times a second."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._said = 0.0

    def step(self, session: Session) -> None:
        """Tell how far the run is, if the last time was a while ago."""
        now = time.monotonic()
        if now - self._said > 0.3:
            self._said = now
            self._tell(session, float(session.loss_sum) / max(session.seen, 1))

    def epoch(self, session: Session, metrics: dict[str, Any]) -> None:
        """Tell that an epoch is done."""
        self._tell(session, metrics["train_loss"], validation_accuracy=metrics["validation_accuracy"])

    def _tell(self, session: Session, loss: float, **more: float) -> None:
        steps = session.steps_per_epoch
        done = session.epoch * steps + session.step
        value = {"done": done, "total": steps * session.recipe.training.epochs, "loss": loss, **more}
        with suppress(BrokenPipeError):  # nobody listens any more: the run goes on all the same
            self.connection.send(("progress", value))


def _work(task: Task, connection: Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the parent, which asks with SIGTERM
    try:
        device = choose_device(task.device)
        folder = RunFolder(task.folder)
        record = run(task.recipe, folder, device=device, data_dir=task.data_dir, observer=_Reporter(connection))
        message = ("done", record)
    except Interrupted:
        message = ("failed", {"error": "stopped and saved"})
    except (IterandError, ValueError, OSError) as error:
        message = ("failed", {"error": str(error)})
    except Exception as error:
        message = ("failed", {"error": f"{type(error).__name__}: {error}"})
    with suppress(BrokenPipeError):
        connection.send(message)
