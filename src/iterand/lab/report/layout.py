"""Layout and style of figures: panels, series, axes, colours, and SVG in the colours of the page."""

import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from iterand.lab.experiments.experiment import Experiment
from iterand.lab.report.assembly import CellOutcome, Outcome
from iterand.lab.report.formatting import value

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# matplotlib needs colours as numbers. These are placeholders, which _themed replaces by CSS variables of the page.
INK, MUTED, GRID, SURFACE = "#000001", "#000002", "#000003", "#000004"
_HUES, _SHADES = 8, 2
_SERIES = {(hue, shade): f"#0000{hue}{shade}" for hue in range(1, _HUES + 1) for shade in range(1, _SHADES + 1)}
_NAMES = {INK: "ink", MUTED: "muted", GRID: "grid", SURFACE: "surface"} | {
    colour: f"series-{hue}-{shade}" for (hue, shade), colour in _SERIES.items()
}
_MARKERS = {"circle": "o", "square": "s", "triangle": "^", "diamond": "D", "tip": "v"}
_METHODS = ("IteRand", "edge-popup", "SGD", "IMP")
"""Methods with the same hue in every report; a series without a name is IteRand with varied settings."""

_SETTINGS: Any = {
    "svg.fonttype": "none",
    "text.parse_math": False,  # names may contain dollar signs
    "font.size": 9.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.labelsize": 9.5,
    "axes.edgecolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "xtick.major.size": 3,
    "ytick.major.size": 0,
    "xtick.minor.size": 0,
    "lines.linewidth": 1.7,
    "lines.markersize": 5,
    "lines.markeredgewidth": 1.2,
    "errorbar.capsize": 0,
}


@dataclass(frozen=True)
class Style:
    """Colour and marker of a series, in the plots and in their legend."""

    colour: str
    marker: str

    @property
    def marker_code(self) -> str:
        """matplotlib's name of the marker."""
        return _MARKERS[self.marker]

    @property
    def variable(self) -> str:
        """The CSS variable of the colour."""
        return _NAMES[self.colour]


class Styles:
    """A style for each series name, the same in all figures of a page: a hue for a method, a shade for its variant."""

    def __init__(self) -> None:
        self._hues = {name: number for number, name in enumerate(_METHODS)} | {"": 0}
        self._variants: dict[str, list[str]] = {}

    def __getitem__(self, name: str) -> Style:
        method, *variant = re.split(r", | \(", name, maxsplit=1)  # "IteRand, SC" and "IteRand (SC)"
        hue = self._hues.setdefault(method, len(self._hues) - 1)
        known = self._variants.setdefault(method, [])
        known += [entry for entry in variant if entry not in known]
        number = known.index(variant[0]) if variant else 0
        marker = list(_MARKERS)[(hue + len(_METHODS) * number) % len(_MARKERS)]
        return Style(_SERIES[hue % _HUES + 1, number % _SHADES + 1], marker)


def render(draw: "Callable[[Axes], None]", *, key: str, title: str, height: float = 3.0) -> str:
    """Draw on new axes and return the SVG; ``key`` makes its ids unique on the page."""
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(_SETTINGS | {"svg.hashsalt": key}):
        figure = Figure(figsize=(4.4, height), layout="constrained")
        draw(figure.add_subplot())
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", transparent=True, metadata={"Date": None})
    return _themed(buffer.getvalue(), title)


def _themed(svg: str, title: str) -> str:
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>|<style.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r' font-family: [^;"]*;?', "", svg)
    svg = re.sub(r'<g id="[^"]*"', "<g", svg)
    svg = re.sub(r"\s*\n\s*", " ", svg)
    for colour, name in _NAMES.items():
        svg = svg.replace(colour, f"var(--{name})")
    box = re.search(r'viewBox="([^"]*)"', svg)
    assert box is not None
    label = escape(title)
    opening = f'<svg viewBox="{box[1]}" role="img" aria-label="{label}"><title>{label}</title>'
    return re.sub(r"<svg[^>]*>", lambda _: opening, svg, count=1).strip()


PANEL_AXIS = "network"
"""The axis that splits a figure into panels, as in the paper's figures."""

Position = str | float


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


def position(outcome: CellOutcome, axis: str) -> Position | None:
    """The position of a cell on an axis, if it has one."""
    return dict(outcome.cell.axes).get(axis)


def axes(experiment: Experiment) -> tuple[str, ...]:
    """The axes of an experiment's table: those on which not all cells have the same position."""
    names = dict.fromkeys(name for cell in experiment.cells for name, _ in cell.axes)
    return tuple(name for name in names if len({dict(cell.axes).get(name) for cell in experiment.cells}) > 1)


def panels(outcome: Outcome, *along: str) -> tuple[Panel, ...]:
    """The panels of a figure with points along these axes; the other axes make the series."""
    names = axes(outcome.experiment)
    networks = {position(cell, PANEL_AXIS) for cell in outcome.cells}
    by_panel = PANEL_AXIS in names and PANEL_AXIS not in along and len(outcome.cells) >= 2 * len(networks)
    kinds = [name for name in names if name not in along and not (by_panel and name == PANEL_AXIS)]
    return tuple(
        Panel(title, tuple(Series(name, tuple(cells)) for name, cells in _split(members, kinds)))
        for title, members in _split(outcome.cells, [PANEL_AXIS] if by_panel else [])
    )


def _split(cells: Iterable[CellOutcome], names: Sequence[str]) -> list[tuple[str, list[CellOutcome]]]:
    parts: dict[str, list[CellOutcome]] = {}
    for cell in cells:
        found = (position(cell, name) for name in names)
        parts.setdefault(", ".join(value(entry) for entry in found if entry is not None), []).append(cell)
    return list(parts.items())


def coordinates(positions: Sequence[float]) -> list[float]:
    """Coordinates of the positions on an axis: linear, logarithmic, or evenly spaced, whichever is most even.

    Widths ¼, ½, 1, 2 and periods 1, 30, 300 are logarithmic; with a zero among them, which has no logarithm, they are
    evenly spaced.
    """
    ordered = sorted(set(positions))
    positive = [entry for entry in ordered if entry > 0]
    logarithms = [math.log(entry) for entry in positive]
    if len(positive) < 3 or _unevenness(ordered) <= _unevenness(logarithms):
        return [float(entry) for entry in positions]
    if len(positive) == len(ordered):
        return [math.log(entry) for entry in positions]
    return [float(ordered.index(entry)) for entry in positions]


def _unevenness(ordered: Sequence[float]) -> float:
    gaps = [after - before for before, after in pairwise(ordered)]
    mean = sum(gaps) / len(gaps) if gaps else 0.0
    return sum((gap / mean - 1) ** 2 for gap in gaps) / len(gaps) if mean else 0.0
