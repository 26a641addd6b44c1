"""Running experiments: the runs of their cells, estimates of GPU time, and the results."""

import difflib
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from iterand.lab.experiments.experiment import Cell, Experiment
from iterand.lab.experiments.local import Event, Task, run_tasks
from iterand.lab.training import recipe_file
from iterand.lab.training.folder import default_path
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.steps import Execution

MULTIPLY_ADDS = {  # of the forward pass of one example at ρ = 1; for IMDB a review of mean length
    "digits_conv": 0.4e6,
    "conv6": 154e6,
    "resnet18_cifar": 555e6,
    "resnet34_cifar": 1_159e6,
    "resnet20": 41e6,
    "vgg11": 153e6,
    "resnet18_imagenet": 1_814e6,
    "resnet34_imagenet": 3_664e6,
    "resnet50_imagenet": 4_089e6,
    "resnet101_imagenet": 7_801e6,
    "wide_resnet50_2": 11_398e6,
    "lstm": 100e6,
    "bilstm": 200e6,
}
TRAINING_EXAMPLES = {"digits": 1_197, "cifar10": 45_000, "imagenet": 1_268_355, "imdb": 17_500}

_OPERATIONS_A_SECOND = 1e14  # of convolutions in bfloat16 on a data-centre GPU
_SHORTEST_STEP = 2e-3  # seconds to launch the kernels of a step
_RECURRENT_STEP = 4e-2  # seconds of a step of an LSTM, which is sequential

Engine = Callable[[Sequence[Task], int], Iterator[Event]]


class Sweep:
    """The runs of some experiments; a run that several cells share is done once."""

    def __init__(
        self,
        experiments: Sequence[Experiment],
        base: Path,
        *,
        device: str,
        data_dir: Path | None = None,
        seeds: int | None = None,
        execution: Execution | None = None,
    ) -> None:
        self.results = {
            entry.name: [CellResult(cell, entry.measure) for cell in entry.cells] for entry in experiments
        }  # fmt: skip
        self.failures: dict[str, list[Task]] = {}
        """The runs that failed, by their error."""
        self._owners: dict[str, list[CellResult]] = {}
        self._tasks: dict[str, Task] = {}
        for entry in experiments:
            for cell, result in zip(entry.cells, self.results[entry.name]):
                for recipe in cell.runs(seeds or entry.seeds):
                    run = recipe_file.digest(recipe)
                    label = f"{entry.name}/{cell.label}, seed {recipe.seed}"
                    folder = default_path(recipe, base)
                    task = Task(label, recipe, folder, device, data_dir, execution or Execution())
                    self._tasks.setdefault(run, task)
                    self._owners.setdefault(run, []).append(result)

    def __len__(self) -> int:
        return len(self._tasks)

    @property
    def tasks(self) -> list[Task]:
        """The runs, each once."""
        return list(self._tasks.values())

    def run(
        self, jobs: int, listen: Callable[[Event], None] = lambda event: None, engine: Engine | None = None
    ) -> None:
        """Do every run with an engine, by default the local one; skip complete runs, continue after failed ones."""
        for event in (engine or run_tasks)(self.tasks, jobs):
            listen(event)
            if event.kind == "failed":
                self.failures.setdefault(event.value["error"], []).append(event.task)
            for result in self._owners[recipe_file.digest(event.task.recipe)]:
                if event.kind == "done":
                    result.records.append(event.value)
                elif event.kind == "failed":
                    result.errors.append(f"{event.task.label}: {event.value['error']}")
        for cells in self.results.values():
            for result in cells:
                result.records.sort(key=lambda record: record["recipe"]["seed"])


@dataclass
class CellResult:
    """The records and errors of the runs of a cell."""

    cell: Cell
    measure: str = "test_accuracy"
    records: list[dict[str, Any]] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)

    def summary(self) -> dict[str, Any]:
        """Mean and sample standard deviation of the measure, and the values that all runs share."""
        results = [record["result"] for record in self.records]
        accuracies = [result["test_accuracy"] for result in results]
        values = [_measured(record, self.measure) for record in self.records]
        first = results[0] if results else {}
        same = {key: first.get(key) for key in ("weights", "kept", "float32_bytes")}
        tickets = [result["ticket_bytes"] for result in results if "ticket_bytes" in result]
        return {
            "label": self.cell.label,
            "method": self.cell.recipe.method.name,
            "trains_weights": self.cell.recipe.method.trains_weights,
            "n": len(values),
            "seeds": [record["recipe"]["seed"] for record in self.records],
            "measure": self.measure,
            "mean": _mean(values),
            "std": _deviation(values),
            "paper": asdict(self.cell.paper) if self.cell.paper else None,
            "test_accuracy_mean": _mean(accuracies),
            "test_accuracy_std": _deviation(accuracies),
            "test_accuracies": accuracies,
            "seconds": [record["seconds"] for record in self.records],
            "randomization_milliseconds": _mean(_randomizations(self.records)),
            **same,
            "ticket_bytes": _mean(tickets),
            "errors": self.errors,
        }


def _measured(record: dict[str, Any], measure: str) -> float:
    if measure == "last_validation_accuracy":
        return float(record["metrics"][-1]["validation_accuracy"])
    return float(record["seconds"] if measure == "seconds" else record["result"][measure])


def _randomizations(records: list[dict[str, Any]]) -> list[float]:
    found = (record.get("randomization_milliseconds") for record in records)
    return [milliseconds for milliseconds in found if milliseconds is not None]


def _mean(values: list[float]) -> float | None:
    return statistics.mean(values) if values else None


def _deviation(values: list[float]) -> float | None:
    return statistics.stdev(values) if len(values) > 1 else None


def distinct_runs(experiments: Sequence[Experiment]) -> list[Recipe]:
    """The recipes of all runs, each once."""
    recipes = (recipe for entry in experiments for cell in entry.cells for recipe in cell.runs(entry.seeds))
    return list({recipe_file.digest(recipe): recipe for recipe in recipes}.values())


def only(experiments: Sequence[Experiment], *patterns: str) -> list[Experiment]:
    """The experiments with only the cells whose EXPERIMENT/LABEL matches one of these glob patterns.

    Of a single experiment the LABEL is enough.
    """
    names = [f"{entry.name}/{cell.label}" for entry in experiments for cell in entry.cells]

    def called(name: str) -> list[str]:
        return [name, name.partition("/")[2]] if len(experiments) == 1 else [name]

    def fits(name: str, patterns: Sequence[str] = patterns) -> bool:
        return any(fnmatchcase(one, pattern) for one in called(name) for pattern in patterns)

    for pattern in patterns:
        if not any(fits(name, [pattern]) for name in names):
            starts = {one[: len(pattern)].lower(): name for name in reversed(names) for one in called(name)}
            close = difflib.get_close_matches(pattern.lower(), starts, n=1)
            like = starts[close[0]] if close else names[0]
            raise ValueError(f"no cell fits the pattern {pattern!r}; cells are called like {like!r}")

    left = [
        replace(entry, cells=tuple(cell for cell in entry.cells if fits(f"{entry.name}/{cell.label}")))
        for entry in experiments
    ]
    return [entry for entry in left if entry.cells]


def has_estimate(recipe: Recipe) -> bool:
    """Whether ``gpu_minutes`` knows the network and the data."""
    return recipe.network.name in MULTIPLY_ADDS and recipe.data.name in TRAINING_EXAMPLES


def gpu_minutes(recipes: Iterable[Recipe]) -> float:
    """An estimate of the minutes of all these runs on one GPU, one after the other."""
    return sum(_seconds(recipe) for recipe in recipes) / 60


def _seconds(recipe: Recipe) -> float:
    network, data, training = recipe.network, recipe.data, recipe.training
    examples = TRAINING_EXAMPLES[data.name]
    used = min(examples, data.limit or examples, data.train_limit or examples)
    steps = used / training.batch_size * training.epochs
    # The backward pass costs twice the forward pass; a multiply-add is two operations.
    operations = 6 * MULTIPLY_ADDS[network.name] * network.width_factor**2 * training.batch_size
    shortest = _RECURRENT_STEP if data.name == "imdb" else _SHORTEST_STEP
    return float(steps * max(shortest, operations / _OPERATIONS_A_SECOND))
