"""A run to do, what is heard of it, and doing it: what all engines share."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from iterand.errors import IterandError
from iterand.training.environment import choose_device
from iterand.training.execution import Execution
from iterand.training.folder import RunFolder
from iterand.training.interrupt import Interrupted, StopRequest
from iterand.training.loop import Observer
from iterand.training.recipe import Recipe
from iterand.training.running import run


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
