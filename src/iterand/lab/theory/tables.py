"""Tables and plots of widths, failures and errors over R, the number of draws of every weight (``rounds``)."""

from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backend_bases import FigureCanvasBase
from matplotlib.figure import Figure

from iterand import files
from iterand.lab.theory import best_choice, bounds, exact
from iterand.lab.theory.construct import ErrorRow
from iterand.lab.theory.simulate import (
    Estimate,
    HalfDraws,
    Progress,
    check_draws,
    half_draws,
    silent,
    simulated_width,
    width_draws,
)

SCALAR = (1, 1)  # the widths of f(x) = w·x
CLAIM, TRUTH, MEASURED, BEST = "#c44e52", "#4c72b0", "#222222", "#55a868"  # colours of the plots


@dataclass(frozen=True)
class WidthRow:
    """The hidden widths that are enough at one R."""

    rounds: int
    paper: list[int]
    repaired: list[int]
    simulated: int | None
    """For f(x) = x only: the width that was enough in a share 1 − δ of trials."""


@dataclass(frozen=True)
class FailureRow:
    """The probability that the event of the proof fails at width 2 and one R."""

    rounds: int
    paper_half: float
    exact_half: float
    simulated_half: Estimate
    exact: float
    simulated: Estimate
    best: Estimate
    """How often the best choice of draws and masks has an error above ε."""


@dataclass(frozen=True)
class BestRow:
    """The median error over trials for f(x) = w·x, of the best choice and of the construction."""

    width: int
    rounds: int
    best: float
    construction: float


def claimed_rounds(epsilon: float, delta: float, widths: Sequence[int] = SCALAR) -> int:
    """The paper's R for twice the width: Proposition 4.3 for f(x) = w·x (half the theorem's R), else Theorem 4.1."""
    if tuple(widths) == SCALAR:
        return bounds.scalar_rounds(epsilon, delta)
    return bounds.network_rounds(epsilon, delta, widths)


def rounds_over(epsilon: float, delta: float, widths: Sequence[int] = SCALAR) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, … up to where twice the width is enough, with the paper's and the repaired R."""
    last = exact.repaired_rounds(epsilon, delta, widths)
    return sorted({*grid(last), claimed_rounds(epsilon, delta, widths)})


def grid(last: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, … up to ``last``."""
    powers = [1 << power for power in range(last.bit_length())]
    return sorted({*powers, *(3 * power for power in powers if 3 * power < last), last})


def width_rows_draws(epsilon: float, widths: Sequence[int], rounds: Sequence[int], trials: int) -> float:
    """How many draws ``width_row`` makes for all of these R on average."""
    if tuple(widths) != SCALAR:
        return 0.0
    return sum(width_draws(epsilon, count, trials=trials) for count in rounds)


def width_row(
    epsilon: float,
    delta: float,
    widths: Sequence[int],
    rounds: int,
    trials: int,
    seed: int = 0,
    progress: Progress = silent,
) -> WidthRow:
    """The widths at one R; for f(x) = w·x the paper's is that of Proposition 4.3."""
    repaired = exact.repaired_widths(epsilon, delta, widths, rounds)
    if tuple(widths) != SCALAR:
        return WidthRow(rounds, bounds.network_widths(epsilon, delta, widths, rounds), repaired, None)
    simulated = simulated_width(epsilon, delta, rounds, trials=trials, seed=seed, progress=progress)
    return WidthRow(rounds, [bounds.scalar_width(epsilon, delta, rounds)], repaired, simulated)


def failure_rows_draws(epsilon: float, rounds: Sequence[int], *, weight: float = 1.0, trials: int) -> float:
    """How many draws ``failure_rows`` makes on average."""
    halves = half_draws([weight], exact.scalar_tolerance(epsilon), max(rounds), trials=trials)
    return halves + best_choice.best_draws(rounds, trials=trials)


def failure_rows(
    epsilon: float,
    rounds: Sequence[int],
    *,
    weight: float = 1.0,
    trials: int = 20_000,
    seed: int = 0,
    progress: Progress = silent,
) -> list[FailureRow]:
    """The failure at width 2 over R, for f(x) = w·x."""
    tolerance = exact.scalar_tolerance(epsilon)
    exact_halves = [exact.half_failure([weight], tolerance, count) for count in rounds]
    check_draws(failure_rows_draws(epsilon, rounds, weight=weight, trials=trials), f"simulating epsilon {epsilon:g}")
    halves = HalfDraws([weight], tolerance, max(rounds), trials=trials, seed=seed, progress=progress)
    best_of_all = best_choice.best_failures(epsilon, rounds, weight=weight, trials=trials, seed=seed, progress=progress)
    rows = []
    for count, half, best_failure in zip(rounds, exact_halves, best_of_all):
        rows.append(
            FailureRow(
                rounds=count,
                paper_half=bounds.claimed_half_failure(epsilon, count),
                exact_half=half,
                simulated_half=halves.half_failure(count),
                exact=2 * half - half**2,
                simulated=halves.failure(count),
                best=best_failure,
            )
        )
    return rows


def best_rows(
    weight: float,
    *,
    cases: Sequence[tuple[int, int]] = ((2, 1), (2, 4), (4, 1), (4, 4)),
    trials: int = 200,
    seed: int = 0,
) -> list[BestRow]:
    """The best choice, by exhaustive search, against the construction, for small (width, R)."""
    rows = []
    for width, rounds in cases:
        u, v = best_choice.draws(width, rounds, trials, seed)
        errors = best_choice.best_error(u, v, weight), best_choice.construction_error(u, v, weight)
        rows.append(BestRow(width, rounds, *(float(error.median()) for error in errors)))
    return rows


def kind_of(path: Path) -> str:
    """The image format of a file name's extension."""
    kind = path.suffix.removeprefix(".").lower()
    known = FigureCanvasBase.get_supported_filetypes()
    if kind not in known:
        raise ValueError(f"{str(path)!r} has no ending for a picture; use one of {', '.join(sorted(known))}")
    return kind


def draw_widths(rows: Sequence[WidthRow], path: Path) -> None:
    """The hidden width that is enough over R; for several layers the widest."""
    figure, axes = new_axes("R, draws of every weight", "hidden width that is enough")
    rounds = [row.rounds for row in rows]
    axes.plot(rounds, [max(row.paper) for row in rows], "--", color=CLAIM, label="paper")
    axes.plot(rounds, [max(row.repaired) for row in rows], color=TRUTH, label="repaired")
    simulated = [(row.rounds, row.simulated) for row in rows if row.simulated is not None]
    if simulated:
        axes.plot(*zip(*simulated), "o", color=MEASURED, markersize=4, label="simulated")
    save_plot(figure, axes, path)


def draw_failures(rows: Sequence[FailureRow], path: Path) -> None:
    """The probability of failure over R: of the event, and of the best choice of draws and masks."""
    figure, axes = new_axes("R, draws of every weight", "probability of failure at width 2")
    axes.set(xscale="linear", ylim=(1e-4, 2))
    rounds = [row.rounds for row in rows]
    axes.plot(rounds, [min(1.0, 2 * row.paper_half) for row in rows], "--", color=CLAIM, label="paper's bound")
    axes.plot(rounds, [row.exact for row in rows], color=TRUTH, label="exact")
    plot_estimates(axes, rounds, [row.simulated for row in rows], MEASURED, "simulated")
    plot_estimates(axes, rounds, [row.best for row in rows], BEST, "simulated, best draws and masks")
    save_plot(figure, axes, path)


def plot_estimates(axes: Axes, rounds: Sequence[int], estimates: Sequence[Estimate], color: str, label: str) -> None:
    """Points with their intervals, where something was counted."""
    seen = [(count, estimate) for count, estimate in zip(rounds, estimates) if estimate.count]
    values = [estimate.value for _, estimate in seen]
    below = [estimate.value - estimate.low for _, estimate in seen]
    above = [estimate.high - estimate.value for _, estimate in seen]
    axes.errorbar([count for count, _ in seen], values, [below, above], fmt="o", color=color, markersize=4, label=label)


def draw_errors(rows: Sequence[ErrorRow], path: Path) -> None:
    """The error of the construction over R, found and proven."""
    figure, axes = new_axes("R, draws of every weight", "error ‖f(x) − g(x)‖ over the box")
    rounds = [row.rounds for row in rows]
    axes.plot(rounds, [row.proven for row in rows], color=TRUTH, label="proven for the weights found")
    axes.plot(rounds, [row.measured for row in rows], "o-", color=MEASURED, markersize=4, label="largest found")
    save_plot(figure, axes, path)


def new_axes(x: str, y: str) -> tuple[Figure, Axes]:
    """An empty plot with logarithmic axes."""
    figure = Figure(figsize=(6, 4), layout="constrained")
    axes = figure.add_subplot(xlabel=x, ylabel=y, xscale="log", yscale="log")
    axes.grid(color="#dddddd")
    return figure, axes


def save_plot(figure: Figure, axes: Axes, path: Path) -> None:
    """Write a plot in the format of the file's name."""
    axes.legend(frameon=False)
    kind = kind_of(path)
    picture = BytesIO()
    # No date and fixed ids, so that the same rows give the same bytes.
    with matplotlib.rc_context({"svg.hashsalt": "iterand", "svg.fonttype": "none"}):
        figure.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else None)
    files.atomic_write(path, picture.getvalue())
