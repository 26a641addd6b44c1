"""Signed constants at two layers: how wide a random ±c network must be to contain a target, with and without redraws.

A pair of layers with constants c_1 and c_2 computes w·x by counting: every kept hidden neuron adds ±c_1·c_2 to the
slope for x > 0 or to the slope for x < 0. So slopes are whole multiples of the *step* s = c_1·c_2, and a weight w
needs ``units(w, s)`` neurons on each side. A redraw can only turn a sign: one of R draws has a given sign with
probability 1 − 2^−R. ``rounds`` is R, as in ``bounds.py``. ``docs/explanation/theory-signed.md`` has the proofs.
"""

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import numpy as np
from scipy import stats

from iterand.lab.theory import bounds

MOST_UNITS = 10_000
"""The most neurons on one side for which exact probabilities are computed."""


def units(weight: float, step: float) -> int:
    """The least number m of steps with |w − m·s| ≤ s/2: ⌈|w|/s − 1/2⌉."""
    return math.ceil(Fraction(abs(weight)) / Fraction(step) - Fraction(1, 2))


def scalar_units(epsilon: float, weight: float = 1.0) -> int:
    """``units`` at the coarsest step that is within ε of every weight, s = 2ε: ⌈(1 − ε) / (2ε)⌉ for w = 1.

    Twice this many hidden neurons are necessary at two layers, whatever R is.
    """
    bounds.check_epsilon(epsilon)
    if not -1 <= weight <= 1:
        raise ValueError(f"a weight is {weight:g}; it must lie between -1 and 1, so scale the target")
    return units(weight, 2 * epsilon)


def miss_probability(rounds: int) -> float:
    """The probability q = 2^−R that none of R draws has a given sign."""
    bounds.check_count("rounds", rounds)
    return math.ldexp(1.0, -min(rounds, 2000))


def best_failure(width: int, count: int, rounds: int) -> float:
    """The exact probability that no draws and masks of ``width`` neurons reach ``count`` units on both sides, w > 0.

    A neuron serves x > 0 if u and v both have a draw +, and x < 0 if both have a draw −. It can serve no side with
    probability 2q², only x > 0 with q(2 − 3q), only x < 0 with the same, and either with (1 − 2q)². If k neurons
    serve some side, m on each side exist if and only if k ≥ 2m and at most k − m serve only the one or only the other.
    """
    bounds.check_count("width", width)
    _check_units(count)
    q = miss_probability(rounds)
    useless = np.arange(max(0, width - 2 * count + 1))
    serving = width - useless
    one_side = stats.binom.sf(serving - count, serving, q * (2 - 3 * q) / (1 - 2 * q * q))
    too_few = stats.binom.sf(width - 2 * count, width, 2 * q * q)
    return min(1.0, float(too_few + 2 * np.sum(stats.binom.pmf(useless, width, 2 * q * q) * one_side)))


def best_width(count: int, delta: float, rounds: int) -> int:
    """The exact width at which ``best_failure`` is at most δ."""
    bounds.check_delta(delta)
    _check_units(count)
    return least(lambda width: best_failure(width, count, rounds) <= delta, 2 * count)


def column_failure(counts: Sequence[int], copies: int, rounds: int) -> float:
    """The exact failure of the construction for one input: 2·``copies`` neurons, ``counts`` units for its outputs.

    The first half of the neurons prefers u > 0, the second u < 0; a neuron without a draw of the preferred sign serves
    the other side. So X − X' + copies neurons serve x > 0 with X and X' binomial. Given that number all signs of v are
    independent, and an output fails if fewer than its units have a draw of the sign that it needs.
    """
    bounds.check_count("copies", copies)
    q = miss_probability(rounds)
    flipped = stats.binom.pmf(np.arange(copies + 1), copies, q)
    positive = np.convolve(flipped[::-1], flipped)  # the probabilities of 0, …, 2·copies neurons with u > 0
    served = np.arange(2 * copies + 1)
    logarithm = np.zeros(len(served))
    with np.errstate(divide="ignore"):
        for count in counts:
            missed = stats.binom.sf(served - count, served, q)  # fewer than count of them have a draw of one sign
            logarithm += np.log1p(-missed)
    return min(1.0, float(np.sum(positive * -np.expm1(logarithm + logarithm[::-1]))))


def column_copies(counts: Sequence[int], delta: float, rounds: int) -> int:
    """The least ``copies`` at which ``column_failure`` is at most δ; 0 if no output needs a unit."""
    bounds.check_delta(delta)
    _check_units(max(counts))
    if not any(counts):
        return 0
    return least(lambda copies: column_failure(counts, copies, rounds) <= delta, max(counts))


def network_steps(epsilon: float, widths: Sequence[int]) -> list[float]:
    """The step s_i = 2ε / (l ρ_i √(d_(i−1) d_i)) of every layer, ρ_i = √d_0 + (i − 1)ε/l (Theorem D)."""
    bounds.check_epsilon(epsilon)
    sizes = bounds.layers(widths)
    share = epsilon / len(sizes)
    return [
        2 * share / ((math.sqrt(widths[0]) + layer * share) * math.sqrt(inputs * outputs))
        for layer, (inputs, outputs) in enumerate(sizes)
    ]


def mean_units(epsilon: float, widths: Sequence[int]) -> list[float]:
    """A bound m̄_i on the mean over the inputs of the units that an input of layer i needs: 1 / (s_i √d_(i−1)) + 1/2.

    It holds for every target of Frobenius norms at most 1. For one input it is rounded down to a whole number.
    """
    return [
        1 / (step * math.sqrt(inputs)) + 0.5 if inputs > 1 else float(units(1.0, step))
        for step, (inputs, _) in zip(network_steps(epsilon, widths), bounds.layers(widths))
    ]


def enough_copies(count: float, logarithm: float, rounds: int) -> float:
    """Chernoff's bound (m + Λ + √(Λ² + 2mΛ)) / (1 − 2^−R) on the copies for m units and a failure of e^−Λ."""
    return (count + logarithm + math.sqrt(logarithm**2 + 2 * count * logarithm)) / (1 - miss_probability(rounds))


def bound_widths(epsilon: float, delta: float, widths: Sequence[int], rounds: int = 1) -> list[int]:
    """Theorem D: the widths of layers 1, 3, … of a ±c network that are enough, one for each layer of the target."""
    enough = _rounds_by_layer(epsilon, delta, widths)
    sizes = bounds.layers(widths)
    hidden = []
    for (inputs, outputs), mean, single in zip(sizes, mean_units(epsilon, widths), enough):
        copies = enough_copies(mean, math.log(2 * len(sizes) * inputs * outputs / delta), rounds)
        if rounds >= single:
            hidden.append(2 * math.floor(inputs * mean))
        else:
            hidden.append(2 * math.ceil(copies) if inputs == 1 else 2 * math.floor(inputs * (copies + 1)))
    return hidden


def bound_rounds(epsilon: float, delta: float, widths: Sequence[int]) -> int:
    """Theorem D: the R from which every sign that is needed is drawn, so that the least width is enough."""
    return max(_rounds_by_layer(epsilon, delta, widths))


def kaiming_widths(epsilon: float, widths: Sequence[int]) -> list[int]:
    """The widths at which constants √(2 / fan_in) are fine enough: d_i (l ρ_i / ε)², where the step is 2 / √(d·d̃)."""
    return [
        math.ceil(4 / (step**2 * inputs) * (1 - 1e-12))  # the roots in a step are rounded
        for step, (inputs, _) in zip(network_steps(epsilon, widths), bounds.layers(widths))
    ]


def least(holds: Callable[[int], bool], low: int) -> int:
    """The least number from ``low`` on at which a property holds that stays once it holds."""
    low = max(1, low)
    high = low
    while not holds(high):
        low, high = high + 1, 2 * high
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return high


def _rounds_by_layer(epsilon: float, delta: float, widths: Sequence[int]) -> list[int]:
    bounds.check_delta(delta)
    sizes = bounds.layers(widths)
    signs = (
        2 * math.floor(inputs * mean) * (1 + outputs)
        for (inputs, outputs), mean in zip(sizes, mean_units(epsilon, widths))
    )
    return [max(1, math.ceil(math.log2(len(sizes) * count / delta))) if count else 1 for count in signs]


def _check_units(count: int) -> None:
    if count > MOST_UNITS:
        raise ValueError(
            f"a weight takes {count} neurons on each side, and exact widths are computed up to {MOST_UNITS}; "
            "raise epsilon"
        )
