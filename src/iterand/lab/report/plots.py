"""The plot of one panel of a figure: curves, rows of dots, a heat map, or metrics over the epochs.

Ours is solid and filled, with one standard deviation; the paper's is dashed and hollow.
"""

import statistics
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from iterand.lab.experiments.experiment import PaperNumber
from iterand.lab.report import formatting
from iterand.lab.report.assembly import CellOutcome
from iterand.lab.report.formatting import Summary
from iterand.lab.report.layout import (
    GRID,
    MUTED,
    PANEL_AXIS,
    SURFACE,
    Panel,
    Position,
    Style,
    Styles,
    coordinates,
    position,
)

_CLOSE = 0.1  # of two ticks closer than this share of the axis, only one gets a label
_ROW_NAME = 30  # characters; a longer name of a row goes on in another line, so that the plot keeps its room

Number = Summary | PaperNumber


def curves(axes: Axes, panel: Panel, styles: Styles, across: str, y_label: str) -> None:
    """Lines over a numeric axis."""
    known = sorted({entry for cell in panel.cells if isinstance(entry := position(cell, across), (int, float))})
    x = dict(zip(known, coordinates(known)))
    for series in panel.series:
        cells = [(x[entry], cell) for cell in series.cells if (entry := position(cell, across)) in x]
        _lines(axes, cells, styles[series.name])
    _ticks(axes, list(x.values()), [formatting.value(entry) for entry in known])
    axes.set_xlabel(formatting.axis(across))
    axes.set_ylabel(y_label)


def sizes(axes: Axes, panel: Panel, styles: Styles, y_label: str) -> None:
    """Lines over the number of parameters, with the network's name at each point."""
    highest: dict[tuple[Position, float], float] = {}
    for series in panel.series:
        cells = [(x, cell) for cell in series.cells if (x := _millions(cell)) is not None]
        _lines(axes, cells, styles[series.name])
        for x, cell in cells:
            point = _at(cell, PANEL_AXIS), x
            means = [number.mean for number in (cell.summary, cell.cell.paper) if number]
            highest[point] = max(*means, highest.get(point, 0.0))
    for (name, x), y in highest.items():  # to the left, since curves rise to the right
        axes.annotate(
            formatting.value(name), (x, y), (-6, 2), textcoords="offset points", ha="right", fontsize=8, color=MUTED,
            bbox={"facecolor": SURFACE, "edgecolor": "none", "alpha": 0.8, "pad": 0.6}, zorder=4,
        )  # fmt: skip
    axes.margins(0.2, 0.1)
    axes.set_xlabel("parameters (millions)")
    axes.set_ylabel(y_label)


def dots(axes: Axes, panel: Panel, styles: Styles, across: str, x_label: str) -> None:
    """A row for each position on an axis, or for each cell where there is no such axis."""
    rows = row_names(panel, across)
    step = 0.7 / len(panel.series) if across else 0.5
    apart = step / 4 if any(cell.cell.paper for cell in panel.cells) else 0.0
    for number, series in enumerate(panel.series):
        shift = step * (number - (len(panel.series) - 1) / 2) if across else 0.0
        for cell in filter(_has_number, series.cells):
            y = rows.index(_row(cell, panel, across)) + shift
            style = styles[series.name if across else formatting.value(_at(cell, "method"))]
            _dot(axes, y - apart, cell.summary, style, ours=True)
            _dot(axes, y + apart, cell.cell.paper, style, ours=False)
    axes.set_yticks(range(len(rows)), rows)
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.margins(x=0.1)
    axes.grid(axis="y", visible=False)
    axes.set_xlabel(x_label)
    if across:
        axes.set_ylabel(formatting.axis(across))


def row_names(panel: Panel, across: str) -> list[str]:
    """The rows of ``dots``: all positions on an axis, or the cells with a number, ours or the paper's."""
    return list(dict.fromkeys(_row(cell, panel, across) for cell in panel.cells if across or _has_number(cell)))


def dots_height(panel: Panel, across: str) -> float:
    """The height of ``dots`` in inches: all rows have the room of the one with the most series or lines."""
    rows = row_names(panel, across)
    lines = max(name.count("\n") + 1 for name in rows)
    return 0.75 + len(rows) * max(0.32, 0.2 * lines, 0.19 * len(panel.series) if across else 0.0)


def heat_map(axes: Axes, panel: Panel, across: str, up: str) -> None:
    """A tile for each pair of positions, with our mean and, in brackets, the paper's."""
    columns, rows = _positions(panel, across), _positions(panel, up)
    means = [cell.summary.mean for cell in panel.cells if cell.summary]
    colours = matplotlib.colormaps["YlGnBu"]
    for cell in panel.cells:
        x, y = columns.index(_at(cell, across)), rows.index(_at(cell, up))
        words, text, face = "open", MUTED, None
        if cell.summary:
            words = f"{cell.summary.mean:.2f}"
            share = (cell.summary.mean - min(means)) / (max(means) - min(means) or 1.0)
            # Tiles have fixed colours in light and dark mode, so their text has too.
            text, face = "white" if share > 0.55 else "black", colours(0.1 + 0.8 * share)
        _tile(axes, x, y, face)
        _text(axes, words, x, y, color=text)
        if cell.cell.paper:
            _text(axes, f"({cell.cell.paper.mean:.2f})", x, y, below=True, color=text)
    axes.set_xlim(-0.5, len(columns) - 0.5)
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_xticks(range(len(columns)), [formatting.value(entry) for entry in columns])
    axes.set_yticks(range(len(rows)), [formatting.value(entry) for entry in rows])
    axes.grid(visible=False)
    axes.spines[:].set_visible(False)
    axes.set_xlabel(formatting.axis(across))
    axes.set_ylabel(formatting.axis(up))


def training(axes: Axes, panel: Panel, styles: Styles, metric: str, y_label: str) -> None:
    """A metric over the epochs: the mean of the runs, and one standard deviation as a band."""
    for series in panel.series:
        for cell in series.cells:
            curves = [[epoch[metric] for epoch in run.metrics] for run in cell.runs]
            steps = list(zip(*curves))
            if not steps:
                continue
            epochs, colour = range(1, len(steps) + 1), styles[series.name].colour
            means = [statistics.fmean(values) for values in steps]
            axes.plot(epochs, means, color=colour)
            if len(curves) > 1:
                spread = [statistics.stdev(values) for values in steps]
                low, high = ([mean + sign * std for mean, std in zip(means, spread)] for sign in (-1, 1))
                axes.fill_between(epochs, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.margins(x=0.02)
    axes.set_xlabel("epoch")
    axes.set_ylabel(y_label)


def _lines(axes: Axes, cells: list[tuple[float, CellOutcome]], style: Style) -> None:
    cells = sorted(cells, key=lambda pair: pair[0])
    for ours in (False, True):
        numbers = [(x, cell.summary if ours else cell.cell.paper) for x, cell in cells]
        known = [(x, number) for x, number in numbers if number]
        if known:
            spread = [number.std or 0.0 for _, number in known]
            xs, means = [x for x, _ in known], [number.mean for _, number in known]
            axes.errorbar(xs, means, spread if ours else None, **_look(style, ours))


def _dot(axes: Axes, y: float, number: Number | None, style: Style, *, ours: bool) -> None:
    if number:
        axes.errorbar(number.mean, y, xerr=number.std or 0.0, **_look(style, ours))


def _look(style: Style, ours: bool) -> dict[str, Any]:
    look: dict[str, Any] = {"color": style.colour, "marker": style.marker_code, "elinewidth": 1.2}
    if ours:
        return look | {"zorder": 3}
    return look | {"linestyle": (0, (4, 2.5)), "linewidth": 1.1, "markerfacecolor": SURFACE, "zorder": 2}


def _ticks(axes: Axes, at: Sequence[float], names: Sequence[str]) -> None:
    """A tick at each position, and a label where there is room, from the last to the first."""
    span = (max(at) - min(at) or 1.0) if at else 1.0
    shown, last = list[str](), float("inf")
    for where, name in sorted(zip(at, names), reverse=True):
        fits = (last - where) / span >= _CLOSE
        last = where if fits else last
        shown.append(name if fits else "")
    axes.set_xticks(sorted(at), shown[::-1])


def _millions(cell: CellOutcome) -> float | None:
    """The parameters of a cell's network, as the paper counts them, or else what its runs kept."""
    if cell.cell.paper and cell.cell.paper.parameters:
        return cell.cell.paper.parameters
    kept = cell.mean("kept")
    return None if kept is None else kept / 1e6


def _positions(panel: Panel, axis: str) -> list[Position]:
    return sorted({_at(cell, axis) for cell in panel.cells}, key=lambda entry: (isinstance(entry, str), entry))


def _at(cell: CellOutcome, axis: str) -> Position:
    entry = position(cell, axis)
    return "" if entry is None else entry


def _has_number(cell: CellOutcome) -> bool:
    return bool(cell.summary or cell.cell.paper)


def _row(cell: CellOutcome, panel: Panel, across: str) -> str:
    if across:
        return formatting.value(_at(cell, across))
    name = cell.cell.label.removeprefix(f"{panel.title}, ").replace(" = ", "\u00a0=\u00a0")  # which no line breaks
    return textwrap.fill(name, _ROW_NAME, break_on_hyphens=False)


def _tile(axes: Axes, x: float, y: float, face: Any) -> None:
    look = {"facecolor": "none", "edgecolor": GRID} if face is None else {"facecolor": face, "edgecolor": "none"}
    axes.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, **look))


def _text(axes: Axes, words: str, x: float, y: float, *, color: str, below: bool = False) -> None:
    offset, align, font = ((0, -7), "top", 8) if below else ((0, 0), "center", 9)
    axes.annotate(
        words, (x, y), offset, textcoords="offset points", ha="center", va=align, fontsize=font, color=color
    )  # fmt: skip
