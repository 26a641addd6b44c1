"""From records to a report: assign each record to the cells with its recipe."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path

from iterand.lab.experiments.catalog import experiment_names, find_experiment
from iterand.lab.experiments.experiment import Cell, Experiment
from iterand.lab.experiments.library import find_recipe, profile_names, recipe_names
from iterand.lab.experiments.sweep import gpu_minutes, has_estimate
from iterand.lab.report.formatting import Comparison, Summary, compare, summarize
from iterand.lab.report.records import Record, Sharing, Superseded, group, identity, read_records
from iterand.lab.training import recipe_file
from iterand.lab.training.recipe import Recipe

_TIMED: tuple[Sharing, ...] = ("unknown", "shared", "cpu")  # of these, the first kind with runs is compared


@dataclass(frozen=True)
class Measure:
    """A number of each run that an experiment compares."""

    title: str
    of: Callable[[Record], float]
    lower_is_better: bool = False


_MEASURES = {
    "test_accuracy": Measure("test accuracy (%)", lambda record: float(record.result["test_accuracy"])),
    "last_validation_accuracy": Measure(
        "validation accuracy (%)", lambda record: float(record.metrics[-1]["validation_accuracy"])
    ),
    "seconds": Measure("training time (s)", lambda record: record.seconds, lower_is_better=True),
}


def measure(experiment: Experiment) -> Measure:
    """The measure of an experiment."""
    return _MEASURES[experiment.measure]


@dataclass(frozen=True)
class RunTime:
    """The mean time of some runs of a cell."""

    sharing: Sharing
    n: int
    seconds: float


@dataclass(frozen=True)
class CellOutcome:
    """A cell, its runs and their mean."""

    cell: Cell
    runs: tuple[Record, ...]
    summary: Summary | None
    comparison: Comparison | None
    """With the paper, where both have a number; not of times, which depend on the hardware."""

    def mean(self, key: str) -> float | None:
        """The mean of an entry of the runs' results, where all have it."""
        numbers = [number for run in self.runs if (number := run.number(key)) is not None]
        return sum(numbers) / len(numbers) if numbers and len(numbers) == len(self.runs) else None

    @property
    def times(self) -> tuple[RunTime, ...]:
        """The mean time of a run, separately for runs that shared a GPU and others."""
        return tuple(
            RunTime(sharing, len(members), sum(run.seconds for run in members) / len(members))
            for sharing, members in _by_sharing(self.runs).items()
        )


@dataclass(frozen=True)
class Outcome:
    """An experiment and the results of its cells."""

    experiment: Experiment
    cells: tuple[CellOutcome, ...]

    @cached_property
    def runs(self) -> tuple[Record, ...]:
        """All its runs, each once, though two cells may share one."""
        return tuple({id(run): run for cell in self.cells for run in cell.runs}.values())

    @property
    def finished(self) -> tuple[CellOutcome, ...]:
        """The cells with a result."""
        return tuple(cell for cell in self.cells if cell.summary)

    @property
    def open(self) -> tuple[CellOutcome, ...]:
        """The cells without a result."""
        return tuple(cell for cell in self.cells if not cell.summary)

    @cached_property
    def missing(self) -> tuple[Recipe, ...]:
        """The recipes of the runs that are missing: a cell has as many runs as the experiment has seeds."""
        found = list[Recipe]()
        for cell in self.cells:
            seeds = {run.recipe.seed for run in cell.runs}
            others = [recipe for recipe in cell.cell.runs(self.experiment.seeds) if recipe.seed not in seeds]
            found += others[: max(0, self.experiment.seeds - len(cell.runs))]
        return tuple(found)

    @property
    def done(self) -> int:
        """How many cells have a result."""
        return len(self.finished)

    def verdicts(self, *kinds: str) -> int:
        """How many cells have one of these verdicts."""
        return sum(cell.comparison is not None and cell.comparison.verdict in kinds for cell in self.cells)


@dataclass(frozen=True)
class Unmatched:
    """A record whose settings match no cell here, and the profiles in which they match one."""

    record: Record
    profiles: tuple[str, ...]

    @property
    def settings(self) -> list[str]:
        """Its sparsity and what differs from the recipe of its name, if the package has one."""
        recipe = self.record.recipe
        sparsity = [f"method.sparsity={recipe.method.sparsity}"] if recipe.method.name != "sgd" else []
        if recipe.name.removeprefix("tiny-") not in recipe_names():
            return sparsity
        original = find_recipe(recipe.name.removeprefix("tiny-"), sparsity)
        changed = recipe_file.changes(replace(original, seed=recipe.seed), recipe)
        return sparsity + [f"{key}={after}" for key, (_, after) in changed.items()]


@dataclass(frozen=True)
class Report:
    """All experiments with their records, in one profile and at one scale."""

    profile: str
    scale: str
    outcomes: tuple[Outcome, ...]
    dry: tuple[Outcome, ...]
    """The experiments of which there are dry runs; these never count as results."""
    unmatched: tuple[Unmatched, ...]
    """Records that match no cell."""
    superseded: tuple[Superseded, ...]
    damaged: tuple[str, ...]

    @cached_property
    def runs(self) -> tuple[Record, ...]:
        """All runs that count, each once."""
        return _distinct_runs(self.outcomes)

    @property
    def dry_runs(self) -> tuple[Record, ...]:
        """All dry runs, each once."""
        return _distinct_runs(self.dry)

    @cached_property
    def dates(self) -> tuple[str, ...]:
        """The days of the runs that count, the first one first; runs without a date are left out."""
        return tuple(sorted(date for run in self.runs if (date := run.date) is not None))

    @property
    def started(self) -> tuple[Outcome, ...]:
        """The experiments with at least one result."""
        return tuple(outcome for outcome in self.outcomes if outcome.done)

    @property
    def unfinished(self) -> tuple[Outcome, ...]:
        """The experiments of which runs are missing."""
        return tuple(outcome for outcome in self.outcomes if outcome.missing)

    @property
    def missing(self) -> tuple[Recipe, ...]:
        """The recipes of all missing runs, each once, though two experiments may share one."""
        missing = {recipe_file.digest(one): one for outcome in self.outcomes for one in outcome.missing}
        return tuple(missing.values())

    def command(self, outcome: Outcome) -> str:
        """The command that runs what is missing of an experiment."""
        profile = "" if self.profile == "paper" else f" --profile {self.profile}"
        scale = "" if self.scale == "full" else f" --scale {self.scale}"
        return f"iterand reproduce {outcome.experiment.name}{profile}{scale}"


def _distinct_runs(outcomes: Iterable[Outcome]) -> tuple[Record, ...]:
    """The runs of some experiments, each once, though two of them may share one."""
    return tuple({id(run): run for outcome in outcomes for run in outcome.runs}.values())


def gpu_seconds(recipes: Sequence[Recipe]) -> float | None:
    """An estimate of the time of these runs on one GPU; None if it is not known for one of them."""
    return 60 * gpu_minutes(recipes) if all(map(has_estimate, recipes)) else None


def read_report(folder: Path, *, profile: str = "paper", scale: str = "full") -> Report:
    """Read the records under ``folder`` and assign them to the cells of the experiments."""
    records = read_records(folder)
    groups = group(records.found)

    def outcomes(scale: str) -> tuple[Outcome, ...]:
        return tuple(
            Outcome(entry, tuple(_outcome(entry, cell, groups.of(cell.recipe)) for cell in entry.cells))
            for entry in _experiments(profile, scale)
        )

    results = outcomes(scale)
    dry = tuple(outcome for outcome in outcomes("tiny") if outcome.done) if scale == "full" else ()
    taken = {id(run) for outcome in (*results, *dry) for run in outcome.runs}
    others = [run for runs in groups.by_identity.values() for run in runs if id(run) not in taken]
    return Report(profile, scale, results, dry, _unmatched(others), groups.superseded, records.damaged)


def _experiments(profile: str, scale: str) -> list[Experiment]:
    return [find_experiment(name, profile=profile, scale=scale) for name in experiment_names()]


def _unmatched(runs: Sequence[Record]) -> tuple[Unmatched, ...]:
    if not runs:
        return ()
    known = {
        (profile, scale): {identity(cell.recipe) for entry in _experiments(profile, scale) for cell in entry.cells}
        for profile in profile_names()
        for scale in {run.recipe.scale for run in runs}
    }
    return tuple(
        Unmatched(run, tuple(p for p in profile_names() if identity(run.recipe) in known[p, run.recipe.scale]))
        for run in sorted(runs, key=lambda run: run.path)
    )


def _outcome(experiment: Experiment, cell: Cell, runs: tuple[Record, ...]) -> CellOutcome:
    counted, timed = runs, experiment.measure == "seconds"
    if timed:  # never the mean of runs that shared a GPU and others
        kinds = _by_sharing(runs)
        counted = next((tuple(kinds[kind]) for kind in _TIMED if kind in kinds), ())
    summary = summarize([measure(experiment).of(run) for run in counted])
    comparison = compare(summary, cell.paper) if summary and cell.paper and not timed else None
    return CellOutcome(cell, runs, summary, comparison)


def _by_sharing(runs: Iterable[Record]) -> dict[Sharing, list[Record]]:
    kinds: dict[Sharing, list[Record]] = {}
    for run in runs:
        kinds.setdefault(run.sharing, []).append(run)
    return kinds
