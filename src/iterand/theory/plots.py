"""The tables as pictures: width over R, failure over R, error over R."""

from collections.abc import Sequence
from io import BytesIO
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from iterand import files
from iterand.theory.simulate import Estimate
from iterand.theory.tables import FailureRow, WidthRow
from iterand.theory.trials import ErrorRow

_CLAIM, _TRUTH, _MEASURED, _BEST = "#c44e52", "#4c72b0", "#222222", "#55a868"


def kind_of(path: Path) -> str:
    """The kind of picture that the ending of a file name asks for."""
    kind = path.suffix.removeprefix(".").lower()
    known = FigureCanvasBase.get_supported_filetypes()
    if kind not in known:
        raise ValueError(f"{str(path)!r} has no ending for a picture; use one of {', '.join(sorted(known))}")
    return kind


def draw_widths(rows: Sequence[WidthRow], path: Path) -> None:
    """The hidden width that is enough over R; for several layers the widest."""
    figure, axes = _axes("R, draws of every weight", "hidden width that is enough")
    rounds = [row.rounds for row in rows]
    axes.plot(rounds, [max(row.paper) for row in rows], "--", color=_CLAIM, label="paper")
    axes.plot(rounds, [max(row.repaired) for row in rows], color=_TRUTH, label="repaired")
    simulated = [(row.rounds, row.simulated) for row in rows if row.simulated is not None]
    if simulated:
        axes.plot(*zip(*simulated), "o", color=_MEASURED, markersize=4, label="simulated")
    _save(figure, axes, path)


def draw_failures(rows: Sequence[FailureRow], path: Path) -> None:
    """The probability over R that the event fails, and that even the best choice of draws and masks does."""
    figure, axes = _axes("R, draws of every weight", "probability of failure at width 2")
    axes.set(xscale="linear", ylim=(1e-4, 2))
    rounds = [row.rounds for row in rows]
    axes.plot(rounds, [min(1.0, 2 * row.paper_half) for row in rows], "--", color=_CLAIM, label="paper's bound")
    axes.plot(rounds, [row.exact for row in rows], color=_TRUTH, label="exact")
    _plot_estimates(axes, rounds, [row.simulated for row in rows], _MEASURED, "simulated")
    _plot_estimates(axes, rounds, [row.best for row in rows], _BEST, "simulated, best draws and masks")
    _save(figure, axes, path)


def _plot_estimates(axes: Axes, rounds: Sequence[int], estimates: Sequence[Estimate], color: str, label: str) -> None:
    seen = [(count, estimate) for count, estimate in zip(rounds, estimates) if estimate.count]
    values = [estimate.value for _, estimate in seen]
    below = [estimate.value - estimate.low for _, estimate in seen]
    above = [estimate.high - estimate.value for _, estimate in seen]
    axes.errorbar([count for count, _ in seen], values, [below, above], fmt="o", color=color, markersize=4, label=label)


def draw_errors(rows: Sequence[ErrorRow], path: Path) -> None:
    """The error of the construction over R, found and proven."""
    figure, axes = _axes("R, draws of every weight", "error ‖f(x) − g(x)‖ over the box")
    rounds = [row.rounds for row in rows]
    axes.plot(rounds, [row.proven for row in rows], color=_TRUTH, label="proven for the weights found")
    axes.plot(rounds, [row.measured for row in rows], "o-", color=_MEASURED, markersize=4, label="largest found")
    _save(figure, axes, path)


def _axes(x: str, y: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel=x, ylabel=y, xscale="log", yscale="log")
    axes.grid(color="#dddddd")
    return figure, axes


def _save(figure: Figure, axes: Axes, path: Path) -> None:
    axes.legend(frameon=False)
    kind = kind_of(path)
    picture = BytesIO()
    # The same picture gives the same bytes: no date, and names that do not depend on the run.
    with matplotlib.rc_context({"svg.hashsalt": "iterand", "svg.fonttype": "none"}):
        figure.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else None)
    files.atomic_write(path, picture.getvalue())
