"""Many runs: what is missing of an experiment is done, and the records of each cell are put together."""

import statistics
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from iterand.experiments.catalog import Experiment
from iterand.experiments.local import Event, Task, run_tasks
from iterand.training.folder import default_path


@dataclass
class CellResult:
    """What came out of a cell's runs."""

    label: str
    method: str
    records: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Mean ± standard deviation (of a sample) of the test accuracy, and what is the same in all runs."""
        results = [record["result"] for record in self.records]
        accuracies = [result["test_accuracy"] for result in results]
        first = results[0] if results else {}
        same = {key: first.get(key) for key in ("weights", "kept", "float32_bytes", "ticket_bytes")}
        return {
            "label": self.label,
            "method": self.method,
            "n": len(accuracies),
            "seeds": [record["recipe"]["seed"] for record in self.records],
            "test_accuracy_mean": statistics.mean(accuracies) if accuracies else None,
            "test_accuracy_std": statistics.stdev(accuracies) if len(accuracies) > 1 else None,
            "test_accuracies": accuracies,
            "seconds": [record["seconds"] for record in self.records],
            **same,
            "errors": self.errors,
        }


def run_experiment(
    experiment: Experiment,
    base: Path,
    *,
    device: str,
    jobs: int,
    data_dir: Path | None = None,
    seeds: int | None = None,
    listen: Callable[[Event], None] = lambda event: None,
) -> list[CellResult]:
    """Run every cell with every seed; complete runs are not done again, a failed one does not stop the others."""
    cells = [CellResult(cell.label, cell.recipe.method.name) for cell in experiment.cells]
    owner: dict[Task, CellResult] = {}
    for cell, outcome in zip(experiment.cells, cells):
        for recipe in cell.runs(seeds or experiment.seeds):
            label = f"{cell.label}, seed {recipe.seed}"
            owner[Task(label, recipe, default_path(recipe, base), device, data_dir)] = outcome
    for event in run_tasks(list(owner), jobs):
        listen(event)
        if event.kind == "done":
            owner[event.task].records.append(event.value)
        elif event.kind == "failed":
            owner[event.task].errors.append(f"{event.task.label}: {event.value['error']}")
    for outcome in cells:
        outcome.records.sort(key=lambda record: record["recipe"]["seed"])
    return cells
