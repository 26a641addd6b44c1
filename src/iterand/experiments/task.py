"""A run to do, and what is heard of it: the language of all engines."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from iterand.training.execution import Execution
from iterand.training.recipe import Recipe


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
