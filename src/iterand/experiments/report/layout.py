"""How cells become panels, series and points: by the axes on which they stand."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from iterand.experiments.experiment import Experiment
from iterand.experiments.report.assembly import CellOutcome, Outcome
from iterand.experiments.report.formatting import value

PANEL_AXIS = "network"
"""The axis that splits a figure into panels, as in the paper's figures."""

Place = str | float


@dataclass(frozen=True)
class Series:
    """Cells of one kind, drawn in one colour."""

    name: str
    cells: tuple[CellOutcome, ...]


@dataclass(frozen=True)
class Panel:
    """One plot."""

    title: str
    series: tuple[Series, ...]

    @property
    def cells(self) -> tuple[CellOutcome, ...]:
        """All its cells."""
        return tuple(cell for series in self.series for cell in series.cells)


def place(outcome: CellOutcome, axis: str) -> Place | None:
    """Where a cell stands on an axis."""
    return dict(outcome.cell.axes).get(axis)


def axes(experiment: Experiment) -> tuple[str, ...]:
    """The axes of an experiment's table: those on which not all cells stand at the same place."""
    names = dict.fromkeys(name for cell in experiment.cells for name, _ in cell.axes)
    return tuple(name for name in names if len({dict(cell.axes).get(name) for cell in experiment.cells}) > 1)


def panels(outcome: Outcome, *along: str) -> tuple[Panel, ...]:
    """The panels of a figure whose points lie along these axes; what is left of the axes makes the series."""
    names = axes(outcome.experiment)
    networks = {place(cell, PANEL_AXIS) for cell in outcome.cells}
    by_panel = PANEL_AXIS in names and PANEL_AXIS not in along and len(outcome.cells) >= 2 * len(networks)
    kinds = [name for name in names if name not in along and not (by_panel and name == PANEL_AXIS)]
    return tuple(
        Panel(title, tuple(Series(name, tuple(cells)) for name, cells in _split(members, kinds)))
        for title, members in _split(outcome.cells, [PANEL_AXIS] if by_panel else [])
    )


def _split(cells: Iterable[CellOutcome], names: Sequence[str]) -> list[tuple[str, list[CellOutcome]]]:
    parts: dict[str, list[CellOutcome]] = {}
    for cell in cells:
        places = (place(cell, name) for name in names)
        parts.setdefault(", ".join(value(entry) for entry in places if entry is not None), []).append(cell)
    return list(parts.items())


def positions(places: Sequence[float]) -> list[float]:
    """Where the places of an axis are drawn: straight, as logarithms, or one beside the other, whichever is more even.

    Widths ¼, ½, 1, 2 and periods 1, 30, 300 are steps of a ratio; a zero among such steps has no logarithm.
    """
    ordered = sorted(set(places))
    positive = [entry for entry in ordered if entry > 0]
    logarithms = [math.log(entry) for entry in positive]
    if len(positive) < 3 or _unevenness(ordered) <= _unevenness(logarithms):
        return [float(entry) for entry in places]
    if len(positive) == len(ordered):
        return [math.log(entry) for entry in places]
    return [float(ordered.index(entry)) for entry in places]


def _unevenness(ordered: Sequence[float]) -> float:
    gaps = [after - before for before, after in pairwise(ordered)]
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    return sum((gap / mean - 1) ** 2 for gap in gaps) / len(gaps) if mean else 0.0
