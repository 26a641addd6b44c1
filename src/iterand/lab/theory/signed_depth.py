"""Signed constants at more than two layers: digits in base h, the exact failure of pools, and exhaustive search.

L layers count in base h. On each side of x every hidden layer has copies of one number p, which the next layer adds
up h at a time, and a sum y, to which it adds a digit from 0 to h times p. Slopes are whole multiples of the step s, the
product of all L constants, from 0 to h + h² + … + h^(L−1). L = 2 is the counting of ``signed.py``. ``rounds`` is R, as
in ``bounds.py``. ``docs/explanation/theory-signed.md`` has the proofs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from iterand.lab.theory import bounds
from iterand.lab.theory.signed import least, miss_probability

MOST_CHOICES = 1 << 20
"""The most sets of hidden neurons of an exhaustive search."""

Floats = NDArray[np.float64]
Slopes = tuple[int, int]
"""Slopes of a neuron along x > 0 and along −x > 0, in steps."""


@dataclass(frozen=True)
class Pool:
    """Hidden neurons on one side: ``copies`` of p and ``sums`` of y; the first hidden layer has only copies of p."""

    copies: int
    sums: int

    @property
    def width(self) -> int:
        """Hidden neurons of a layer, on both sides."""
        return 2 * (self.copies + self.sums)


def largest(base: int, layers: int) -> int:
    """The largest slope h + h² + … + h^(L−1) of L layers, in steps."""
    bounds.check_count("base", base)
    check_layers(layers)
    return int(sum(base**power for power in range(1, layers)))


def least_base(count: int, layers: int) -> int:
    """The least base h in which L layers reach ``count`` steps."""
    check_layers(layers)
    return least(lambda base: largest(base, layers) >= count, 1)


def digit_width(base: int, layers: int, inputs: int = 1, outputs: int = 1) -> int:
    """Theorem E: the hidden width of a linear map if all signs can be drawn, 2(h·d + d'), and 2h·d at two layers."""
    check_layers(layers)
    return 2 * (base * inputs + (outputs if layers > 2 else 0))


def digit_rounds(base: int, layers: int, delta: float, inputs: int = 1, outputs: int = 1) -> int:
    """Theorem E: the R from which all signs are drawn with probability 1 − δ at the width of ``digit_width``."""
    bounds.check_delta(delta)
    check_layers(layers)
    between = inputs * base**2 + outputs * (inputs * base + 1)
    signs = 2 * (inputs * base * (1 + outputs) + (layers - 2) * between)
    return math.ceil(math.log2(signs / delta))


def necessary_width(count: int, layers: int) -> int:
    """The least width that any draws and masks of L layers need for ``count`` steps: 2m ≤ n, and 4m ≤ n^(L−1)."""
    check_layers(layers)
    return 2 * count if layers == 2 else least(lambda width: width ** (layers - 1) >= 4 * count, 1)


def pool_failure(pool: Pool, base: int, layers: int, rounds: int) -> float:
    """The exact probability that a chain of pools fails to have all its digits equal to h, the hardest weight.

    A neuron of the next layer can copy p if h of the copies that exist reach it with a draw +, and add a digit h if h
    copies and one of the sums do. Given how many copies and sums a layer has, its outgoing signs are fresh, so these
    numbers are a Markov chain; both sides are independent given how many u > 0 the first layer has.
    """
    check_layers(layers)
    q = miss_probability(rounds)
    first = pool.copies + pool.sums
    total = np.arange(2 * first + 1)
    if layers == 2:
        side = _misses(total, base, q)
    else:
        no_sum = np.asarray(q ** np.arange(pool.sums + 1), dtype=np.float64)
        missed = _misses(np.arange(pool.copies + 1), base, q)[:, None]
        failure = missed + (1 - missed) * no_sum
        for _ in range(layers - 3):
            failure = _step(failure, np.arange(pool.copies + 1), base, no_sum, q)
        side = _step(failure, total, base, np.zeros(1), q)[:, 0]
    flipped = stats.binom.pmf(np.arange(first + 1), first, q)
    positive = np.convolve(flipped[::-1], flipped)
    return min(1.0, float(np.sum(positive * (side + side[::-1] - side * side[::-1]))))


def pool_for(count: int, layers: int, delta: float, rounds: int) -> Pool:
    """The least pool whose exact failure for every weight of up to ``count`` steps is at most δ."""
    bounds.check_delta(delta)
    base = least_base(count, layers)

    def holds(copies: int, sums: int) -> bool:
        return pool_failure(Pool(copies, sums), base, layers, rounds) <= delta

    if layers == 2:
        return Pool(least(lambda copies: holds(copies, 0), base), 0)
    # More copies or sums never hurt. With base 0 copies are free, so this many sums are necessary.
    sums = least(lambda sums: pool_failure(Pool(1, sums), 0, layers, rounds) < delta, 1)
    best = Pool(least(lambda copies: holds(copies, sums), base), sums)
    while base + sums + 1 < best.width // 2:
        sums += 1
        while best.width // 2 - sums > base and holds(best.width // 2 - sums - 1, sums):
            best = Pool(best.width // 2 - sums - 1, sums)
    return best


def _misses(there: NDArray[np.int64], needed: int, q: float) -> Floats:
    """P(fewer than ``needed`` of those that are there have a draw +)."""
    missed = np.asarray(stats.binom.sf(there - needed, there, q), dtype=np.float64)
    return np.where(missed < 1e-250, 0.0, missed)  # scipy's binomials overflow at subnormal probabilities


def _step(failure: Floats, there: NDArray[np.int64], base: int, no_sum: Floats, q: float) -> Floats:
    """The failure before a layer, by copies and sums there, from the ``failure`` after it."""
    copies, sums = (size - 1 for size in failure.shape)
    dead = np.arange(copies + 1)
    too_few = _misses(there, base, q)[:, None]
    next_copies = stats.binom.pmf(dead, copies, too_few)[:, ::-1]
    missed = too_few + (1 - too_few) * no_sum
    next_sums = stats.binom.pmf(np.arange(sums + 1), sums, missed[:, :, None])[:, :, ::-1]
    return np.asarray(np.einsum("ac,ayz,cz->ay", next_copies, next_sums, failure), dtype=np.float64)


def best_slope(widths: Sequence[int]) -> int:
    """The largest M such that all of 0, …, M are slopes of a network with these hidden widths, by exhaustive search.

    All weights are free in {−1, 0, 1}, as after many redraws. The slopes along x > 0 and x < 0 must be equal.
    """
    for width in widths:
        bounds.check_count("widths", width)
    # A pruned neuron is never better than an idle one, so every neuron of the first layer sees x.
    layers = {((1, 0),) * positive + ((0, 1),) * (widths[0] - positive) for positive in range(widths[0] + 1)}
    for width in widths[1:-1]:
        choices = {_next_neurons(layer) for layer in layers}
        count = sum(math.comb(len(choice) + width - 1, width) for choice in choices)
        if count > MOST_CHOICES:
            raise ValueError(
                f"hidden widths {tuple(widths)} have {count} sets of neurons in one layer; at most {MOST_CHOICES} are "
                "tried one by one, so take fewer neurons or layers"
            )
        layers = {layer for choice in choices for layer in combinations_with_replacement(choice, width)}
    if len(widths) == 1:  # every neuron has slope 1 on one side, so the smaller side decides
        return widths[0] // 2
    reached: set[int] = set()
    for choice in {_next_neurons(layer) for layer in layers}:
        reached |= _odd_slopes(choice, widths[-1])
    return next(slope for slope in range(len(reached) + 1) if slope + 1 not in reached)


def _next_neurons(layer: Iterable[Slopes]) -> tuple[Slopes, ...]:
    """All neurons that a layer allows, but the idle one."""
    sums = {(0, 0)}
    for right, left in layer:
        sums |= {(a + sign * right, b + sign * left) for a, b in sums for sign in (-1, 1)}
    return tuple(sorted({(max(a, 0), max(b, 0)) for a, b in sums} - {(0, 0)}))


def _odd_slopes(choice: Sequence[Slopes], width: int) -> set[int]:
    """The N such that ``width`` neurons, each one of ``choice`` with sign + or − or pruned, add up to (N, −N)."""
    most = width * max((max(neuron) for neuron in choice), default=0)
    row = 2 * most + 1
    reached = 1 << most * row + most  # bit (a + most)·row + b + most is the sum (a, b)
    for _ in range(width):
        before = reached
        for a, b in choice:
            reached |= before << a * row + b | before >> a * row + b
    return {slope for slope in range(most + 1) if reached >> (most + slope) * row + most - slope & 1}


def check_layers(layers: int) -> None:
    """Raise ValueError unless there are at least two layers, and no more than floats can count in."""
    if isinstance(layers, bool) or not isinstance(layers, int) or not 2 <= layers <= 1000:
        raise ValueError(f"layers has {layers!r}; it must be a whole number from 2 to 1000")
