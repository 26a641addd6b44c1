"""Tables and plots for signed constants: widths and failures over R, widths over depth, and exhaustive search."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from iterand.lab.theory import signed, signed_depth, signed_simulate
from iterand.lab.theory.simulate import Estimate, Progress, check_draws, silent
from iterand.lab.theory.tables import BEST, CLAIM, MEASURED, SCALAR, TRUTH, grid, new_axes, plot_estimates, save_plot

SMALL = ((4,), (6,), (4, 4), (6, 6), (3, 3, 3), (4, 4, 4), (3, 3, 3, 3))
"""Hidden widths of the exhaustive search."""


@dataclass(frozen=True)
class SignedWidthRow:
    """The hidden widths that are enough at one R."""

    rounds: int
    bound: list[int]
    """By Theorem D, for every target."""
    exact: int | None
    """For f(x) = w·x only: with the best choice of draws and masks."""
    simulated: int | None


@dataclass(frozen=True)
class DepthRow:
    """The hidden width of L layers for f(x) = w·x."""

    layers: int
    base: int
    redrawn: int
    """Enough if all signs can be drawn (Theorem E)."""
    rounds: int
    """The R for that."""
    single: int
    """Enough without redraws, exactly."""
    failure: float
    """The exact failure at that width."""
    simulated: Estimate
    necessary: int
    """Whatever R is."""


@dataclass(frozen=True)
class SignedFailureRow:
    """The probability at one R that no draws and masks are within ε, at two widths."""

    rounds: int
    narrow: float
    narrow_simulated: Estimate
    wide: float
    wide_simulated: Estimate


@dataclass(frozen=True)
class SlopeRow:
    """The largest M such that a network of these hidden widths has all slopes 0, …, M."""

    widths: tuple[int, ...]
    best: int
    """By exhaustive search."""
    digits: int
    """By Theorem E."""
    bound: int
    """No network has more."""


def rounds_over(epsilon: float, delta: float, widths: Sequence[int] = SCALAR) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12, … up to where all signs that are needed are drawn."""
    return grid(signed.bound_rounds(epsilon, delta, widths))


def width_rows_draws(epsilon: float, widths: Sequence[int], rounds: Sequence[int], trials: int) -> float:
    """How many draws ``width_row`` makes for all of these R on average, roughly."""
    if tuple(widths) != SCALAR:
        return 0.0
    count = signed.scalar_units(epsilon)
    return sum(signed_simulate.width_draws(count, r, trials=trials) for r in rounds)


def width_row(
    epsilon: float,
    delta: float,
    widths: Sequence[int],
    rounds: int,
    trials: int,
    seed: int = 0,
    progress: Progress = silent,
) -> SignedWidthRow:
    """The widths at one R."""
    bound = signed.bound_widths(epsilon, delta, widths, rounds)
    if tuple(widths) != SCALAR:
        return SignedWidthRow(rounds, bound, None, None)
    count = signed.scalar_units(epsilon)
    exact = signed.best_width(count, delta, rounds)
    simulated = signed_simulate.simulated_width(count, delta, rounds, trials=trials, seed=seed, progress=progress)
    return SignedWidthRow(rounds, bound, exact, simulated)


def depth_rows(epsilon: float, delta: float, trials: int, seed: int = 0) -> list[DepthRow]:
    """Two layers, and more up to where base 2 is enough."""
    count = signed.scalar_units(epsilon)
    rows: list[DepthRow] = []
    layers = 2
    while not rows or rows[-1].base > 2:
        base = signed_depth.least_base(count, layers)
        pool = signed_depth.pool_for(count, layers, delta, rounds=1)
        rows.append(
            DepthRow(
                layers=layers,
                base=base,
                redrawn=signed_depth.digit_width(base, layers),
                rounds=signed_depth.digit_rounds(base, layers, delta),
                single=pool.width,
                failure=signed_depth.pool_failure(pool, base, layers, rounds=1),
                simulated=signed_simulate.pool_failures(pool, base, layers, 1, trials=trials, seed=seed),
                necessary=signed_depth.necessary_width(count, layers),
            )
        )
        layers += 1
    return rows


def failure_widths(epsilon: float, weight: float = 1.0) -> tuple[int, int]:
    """The least width 2m for f(x) = w·x, and 4m, which the signs of one draw fill on average."""
    count = signed.scalar_units(epsilon, weight)
    if not count:
        raise ValueError(f"a weight is {weight:g}; 0 is within epsilon {epsilon:g} of it, so nothing needs to be kept")
    return 2 * count, 4 * count


def failure_rows_draws(epsilon: float, rounds: Sequence[int], *, weight: float = 1.0, trials: int) -> float:
    """How many draws ``failure_rows`` makes on average."""
    widths = failure_widths(epsilon, weight)
    return signed_simulate.sign_draws(2.0 * trials * sum(widths), max(rounds))


def failure_rows(
    epsilon: float,
    rounds: Sequence[int],
    *,
    weight: float = 1.0,
    trials: int = 20_000,
    seed: int = 0,
    progress: Progress = silent,
) -> list[SignedFailureRow]:
    """The failure of the best draws and masks over R at the two ``failure_widths``, for f(x) = w·x."""
    widths = failure_widths(epsilon, weight)
    check_draws(failure_rows_draws(epsilon, rounds, weight=weight, trials=trials), f"simulating epsilon {epsilon:g}")
    count = signed.scalar_units(epsilon, weight)
    simulated = [
        signed_simulate.best_failures(width, count, rounds, trials=trials, seed=seed, progress=progress)
        for width in widths
    ]
    rows = []
    for r, narrow, wide in zip(rounds, *simulated):
        exact = (signed.best_failure(width, count, r) for width in widths)
        rows.append(SignedFailureRow(r, next(exact), narrow, next(exact), wide))
    return rows


def slope_rows() -> list[SlopeRow]:
    """The best possible network with free signs, by exhaustive search, against digits and the bound."""
    rows = []
    for widths in SMALL:
        layers, half = len(widths) + 1, min(widths) // 2
        digits = half if layers == 2 else signed_depth.largest(half - 1, layers) if half > 1 else 0
        bound = math.prod(widths) // (2 if layers == 2 else 4)
        rows.append(SlopeRow(widths, signed_depth.best_slope(widths), digits, bound))
    return rows


def draw_widths(rows: Sequence[SignedWidthRow], path: Path) -> None:
    """The hidden width that is enough over R; for several layers the widest."""
    figure, axes = new_axes("R, draws of every weight", "hidden width that is enough")
    rounds = [row.rounds for row in rows]
    axes.plot(rounds, [max(row.bound) for row in rows], "--", color=CLAIM, label="Theorem D")
    points = [(row.rounds, row.exact, row.simulated) for row in rows if row.exact is not None]
    if points:
        counts, exact, simulated = zip(*points)
        axes.plot(counts, exact, color=TRUTH, label="exact")
        axes.plot(counts, simulated, "o", color=MEASURED, markersize=4, label="simulated")
    save_plot(figure, axes, path)


def draw_failures(rows: Sequence[SignedFailureRow], widths: tuple[int, int], path: Path) -> None:
    """The probability over R that no draws and masks are within ε."""
    figure, axes = new_axes("R, draws of every weight", "probability of failure")
    axes.set(xscale="linear", ylim=(1e-5, 2))
    rounds = [row.rounds for row in rows]
    axes.plot(rounds, [row.narrow for row in rows], color=TRUTH, label=f"exact, width {widths[0]}")
    axes.plot(rounds, [row.wide for row in rows], "--", color=BEST, label=f"exact, width {widths[1]}")
    plot_estimates(axes, rounds, [row.narrow_simulated for row in rows], MEASURED, "simulated")
    plot_estimates(axes, rounds, [row.wide_simulated for row in rows], MEASURED, "_")
    save_plot(figure, axes, path)
