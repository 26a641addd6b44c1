"""Many runs: do what is missing of an experiment, and put the results of each cell together."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from iterand.errors import IterandError
from iterand.experiments.catalog import Cell, Experiment
from iterand.experiments.running import run
from iterand.training.folder import RunFolder, default_path
from iterand.training.loop import Observer
from iterand.training.recipe import Recipe


@dataclass
class CellResult:
    """What came out of a cell's runs."""

    label: str
    results: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Mean ± standard deviation (of a sample) of the test accuracy, and what is the same in all runs."""
        accuracies = [result["test_accuracy"] for result in self.results]
        first = self.results[0] if self.results else {}
        return {
            "label": self.label,
            "method": first.get("method"),
            "n": len(accuracies),
            "seeds": [result["seed"] for result in self.results],
            "test_accuracy_mean": statistics.mean(accuracies) if accuracies else None,
            "test_accuracy_std": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
            "test_accuracies": accuracies,
            "weights": first.get("weights"),
            "kept": first.get("kept"),
            "float32_bytes": first.get("float32_bytes"),
            "ticket_bytes": first.get("ticket_bytes"),
            "errors": self.errors,
        }


def run_experiment(
    experiment: Experiment,
    base: Path,
    *,
    device: torch.device,
    data_dir: Path | None = None,
    seeds: int | None = None,
    observe: Callable[[Cell, Recipe], Observer] | None = None,
) -> list[CellResult]:
    """Run every cell with every seed; complete runs are not done again, a failed one does not stop the others."""
    cells = []
    for cell in experiment.cells:
        outcome = CellResult(cell.label)
        cells.append(outcome)
        for recipe in cell.runs(seeds or experiment.seeds):
            observer = observe(cell, recipe) if observe else None
            folder = RunFolder(default_path(recipe, base))
            try:
                outcome.results.append(run(recipe, folder, device=device, data_dir=data_dir, observer=observer))
            except (IterandError, ValueError) as error:
                outcome.errors.append(f"{cell.label}, seed {recipe.seed}: {error}")
    return cells
