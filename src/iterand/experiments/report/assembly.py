"""The report's content: every experiment with its cells, and what became of every record."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from iterand.experiments.catalog import experiment_names, find_experiment
from iterand.experiments.experiment import Cell, Experiment
from iterand.experiments.profiles import profile_names
from iterand.experiments.report.matching import SetAside, group, identity
from iterand.experiments.report.measures import measure
from iterand.experiments.report.records import Record, read_records
from iterand.experiments.report.statistics import Comparison, Summary, compare, summarize


@dataclass(frozen=True)
class CellOutcome:
    """A cell, its runs and what they say."""

    cell: Cell
    runs: tuple[Record, ...]
    summary: Summary | None
    comparison: Comparison | None
    """Against the paper, where both have a number."""

    def mean(self, key: str) -> float | None:
        """The mean of an entry of the runs' results, where all have it."""
        numbers = [number for run in self.runs if (number := run.number(key)) is not None]
        return sum(numbers) / len(numbers) if numbers and len(numbers) == len(self.runs) else None

    @property
    def seconds(self) -> float | None:
        """How long a run took, in the mean."""
        return sum(run.seconds for run in self.runs) / len(self.runs) if self.runs else None


@dataclass(frozen=True)
class Outcome:
    """An experiment and what became of its cells."""

    experiment: Experiment
    cells: tuple[CellOutcome, ...]

    @cached_property
    def runs(self) -> tuple[Record, ...]:
        """All its runs, each once, though two cells may share one."""
        return tuple({id(run): run for cell in self.cells for run in cell.runs}.values())

    @property
    def done(self) -> int:
        """How many cells have a result."""
        return sum(cell.summary is not None for cell in self.cells)

    def verdicts(self, *kinds: str) -> int:
        """How many cells compare like this with the paper."""
        return sum(cell.comparison is not None and cell.comparison.verdict in kinds for cell in self.cells)


@dataclass(frozen=True)
class Stranger:
    """A record whose settings are those of no cell here, and the profiles in which they are."""

    record: Record
    profiles: tuple[str, ...]


@dataclass(frozen=True)
class Report:
    """Everything a reader may ask for."""

    profile: str
    scale: str
    outcomes: tuple[Outcome, ...]
    dry: tuple[Outcome, ...]
    """The experiments of which there are dry runs; these never count as results."""
    strangers: tuple[Stranger, ...]
    """What belongs to no cell."""
    set_aside: tuple[SetAside, ...]
    damaged: tuple[str, ...]

    @cached_property
    def runs(self) -> tuple[Record, ...]:
        """All runs that count, each once."""
        return tuple({id(run): run for outcome in self.outcomes for run in outcome.runs}.values())

    @property
    def started(self) -> tuple[Outcome, ...]:
        """The experiments with at least one result."""
        return tuple(outcome for outcome in self.outcomes if outcome.done)

    @property
    def open(self) -> tuple[Outcome, ...]:
        """The experiments without a result."""
        return tuple(outcome for outcome in self.outcomes if not outcome.done)

    def command(self, outcome: Outcome) -> str:
        """The command that runs what is missing of an experiment."""
        profile = "" if self.profile == "paper" else f" --profile {self.profile}"
        scale = "" if self.scale == "full" else f" --scale {self.scale}"
        return f"iterand reproduce {outcome.experiment.name}{profile}{scale}"


def read_report(folder: Path, *, profile: str = "paper", scale: str = "full") -> Report:
    """Read the records under ``folder`` and lay them beside the experiments."""
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
    strangers = [run for runs in groups.by_identity.values() for run in runs if id(run) not in taken]
    return Report(profile, scale, results, dry, _strangers(strangers), groups.set_aside, records.damaged)


def _experiments(profile: str, scale: str) -> list[Experiment]:
    return [find_experiment(name, profile=profile, scale=scale) for name in experiment_names()]


def _strangers(runs: Sequence[Record]) -> tuple[Stranger, ...]:
    if not runs:
        return ()
    known = {
        (profile, scale): {identity(cell.recipe) for entry in _experiments(profile, scale) for cell in entry.cells}
        for profile in profile_names()
        for scale in {run.recipe.scale for run in runs}
    }
    return tuple(
        Stranger(run, tuple(p for p in profile_names() if identity(run.recipe) in known[p, run.recipe.scale]))
        for run in sorted(runs, key=lambda run: run.path)
    )


def _outcome(experiment: Experiment, cell: Cell, runs: tuple[Record, ...]) -> CellOutcome:
    summary = summarize([measure(experiment).of(run) for run in runs])
    comparison = compare(summary, cell.paper) if summary and cell.paper else None
    return CellOutcome(cell, runs, summary, comparison)
