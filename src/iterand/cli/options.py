"""Options that several commands have, and names for help and tab completion, without importing torch."""

from collections.abc import Callable, Iterable
from importlib.resources import files
from pathlib import Path
from typing import Annotated

import typer

DATA_VARIABLE = "ITERAND_DATA"

DataDir = Annotated[
    Path | None, typer.Option(help=f"Folder of the data sets (default: ${DATA_VARIABLE}, else ./data).")
]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

BENCHMARKS = ("step", "loop", "select", "randomize", "augment", "epoch", "ticket", "tasks", "inference")
DATASETS = ("digits", "cifar10", "imagenet", "imdb")
EXPERIMENTS = (
    "digits",
    "figure1",
    "figure2",
    "figure3",
    "figure3-curves",
    "period",
    "period-rate",
    "overhead",
    "sparsity",
    "imp",
    "width",
    "large",
    "imdb",
    "best",
    "few-labels",
    "long",
    "ablation",
    "gain",
    "family",
    "claims",
)
PROFILES = ("paper", "text", "best")
SCALES = ("full", "tiny")
QUALITY = 95  # JPEG quality of packed images that were scaled


def named(path: Path | None) -> Path | None:
    """An option callback for files and folders to write: refuse -, which means stdout elsewhere."""
    if path == Path("-"):
        raise ValueError("- is not the name of a file or folder, and this is not written to stdout; give a name")
    return path


def recipes() -> list[str]:
    """The recipes of the package."""
    found = (entry.name for entry in (files("iterand") / "lab" / "experiments" / "recipes").iterdir())
    return sorted(name.removesuffix(".toml") for name in found if name.endswith(".toml"))


def completing(names: Iterable[str] | Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """A completion function for typer: the names that start with the typed text."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in (names() if callable(names) else names) if name.startswith(incomplete)]

    return complete
