"""Records and experiments for the tests of the report: small, and with numbers one can work out by hand."""

import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from iterand.lab.experiments.experiment import Cell, Experiment, PaperNumber
from iterand.lab.report import assembly
from iterand.lab.training import recipe_file
from iterand.lab.training.folder import RECORD_FORMAT
from iterand.lab.training.recipe import MethodRecipe, NetworkRecipe, Recipe, TrainingRecipe

ENVIRONMENT = {
    "iterand": "0.1.0",
    "commit": "0123456789abcdef",
    "python": "3.11.9",
    "torch": "2.6.0",
    "platform": "Linux",
    "device": "cpu",
    "hardware": {"cpu": "A processor", "cores": 2, "threads": 1},
    "command": "iterand reproduce widths",
    "date": "2026-11-14T09:30:00+00:00",
}


def recipe(method: str = "iterand", *, network: str = "conv6", width: float = 1.0, **settings: Any) -> Recipe:
    """A recipe that is never run."""
    return Recipe(
        name=f"{network}-{method}",
        network=NetworkRecipe(network, width),
        method=MethodRecipe(name=method, **settings),
        training=TrainingRecipe(epochs=3),
    )


def as_record(of: Recipe, accuracy: float, **changes: Any) -> dict[str, Any]:
    """A record as a run writes it."""
    epochs = [
        {"epoch": epoch, "train_accuracy": accuracy - 9 + 3 * epoch, "validation_accuracy": accuracy - 6 + 2 * epoch}
        for epoch in (1, 2, 3)
    ]
    result = {"test_accuracy": accuracy, "weights": 2_000_000, "kept": 1_000_000, "ticket_bytes": 424_000}
    record = {
        "format": RECORD_FORMAT,
        "recipe": asdict(of),
        "result": result,
        "metrics": epochs,
        "seconds": 90.0,
        "environment": ENVIRONMENT,
    }
    return record | changes


def write(path: Path, value: object, *, age: float = 0.0) -> Path:
    """A JSON file, written ``age`` seconds before a moment that is the same for all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


def write_runs(folder: Path, of: Recipe, *accuracies: float) -> None:
    """A run folder for each accuracy, with seeds 0, 1, …"""
    for seed, accuracy in enumerate(accuracies):
        write(
            folder / f"{of.name}-{recipe_file.digest(of)}-{seed}" / "record.json",
            as_record(replace(of, seed=seed), accuracy),
        )


def widths() -> Experiment:
    """Two methods at two widths, with numbers of a paper."""
    cells = tuple(
        Cell(
            f"{name}, ρ = {width:g}",
            recipe(method, width=width),
            (("method", name), ("width", width)),
            PaperNumber(paper, 0.3, "Table 4"),
        )
        for name, method, papers in (("IteRand", "iterand", (88.0, 90.0)), ("SGD", "sgd", (89.0, 91.0)))
        for width, paper in zip((0.5, 1.0), papers)
    )
    return Experiment("widths", "Varying the width", cells, 3, "Table 4", "curves", "width")


def tiny(experiment: Experiment) -> Experiment:
    """The experiment as a dry run."""
    cells = (replace(cell, recipe=replace(cell.recipe, scale="tiny")) for cell in experiment.cells)
    return replace(experiment, cells=tuple(cells))


def install(monkeypatch: Any, *experiments: Experiment) -> None:
    """Let the report know these experiments only."""
    known = {experiment.name: experiment for experiment in experiments}

    def find(name: str, *, profile: str = "paper", scale: str = "full") -> Experiment:
        return tiny(known[name]) if scale == "tiny" else known[name]

    monkeypatch.setattr(assembly, "find_experiment", find)
    monkeypatch.setattr(assembly, "experiment_names", lambda: list(known))
