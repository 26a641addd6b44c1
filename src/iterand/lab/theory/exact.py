"""The exact probability of the event in the proof, and the width and R that are enough (the repaired theorem).

The proof of Theorem 4.1 needs a hidden neuron with one of its R draws of u near ±1 and one of its R draws of v near w.
The R² pairs share their draws, so they are not independent. The R draws of one weight are independent, and so are
different weights; nothing else is used here. ``rounds`` is R, as in ``bounds.py``.
``docs/explanation/theory.md`` has the proofs.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scipy import stats
from torch import Tensor

from iterand.lab.theory import bounds


@dataclass(frozen=True)
class Tolerance:
    """How close a draw must be: u to ±1, v to the weight w it replaces; then |w − v·u| ≤ v + u·|w|."""

    u: float
    v: float


def hit_probability(center: float, tolerance: float) -> float:
    """P(|X − center| ≤ tolerance) for X from U[-1, 1]: from tolerance/2 at ±1 to tolerance inside."""
    if not -1 <= center <= 1:
        raise ValueError(f"a weight is {center:g}; a draw can only come near weights from -1 to 1, so scale the target")
    return (min(tolerance, 1 - center) + min(tolerance, 1 + center)) / 2


def miss_probability(probability: float, rounds: int) -> float:
    """The probability (1 − p)^R that none of R draws hits."""
    bounds.check_count("rounds", rounds)
    return math.exp(rounds * math.log1p(-probability)) if probability < 1 else 0.0


def half_failure(weights: Sequence[float], tolerance: Tolerance, rounds: int, copies: int = 1) -> float:
    """The exact failure of one half: one input, one sign, ``copies`` = d' hidden neurons, ``weights`` to its outputs.

    For one weight this is [1 − (1 − (1 − p_u)^R)(1 − (1 − p_v)^R)]^d' (Lemma A.4). For several (Lemma A.5) all outputs
    share the u of a neuron, so they are independent only given which neurons have a good u.
    """
    bounds.check_count("copies", copies)
    miss_u = miss_probability(hit_probability(1.0, tolerance.u), rounds)
    misses = [miss_probability(hit_probability(weight, tolerance.v), rounds) for weight in weights]
    if len(misses) == 1:
        return (miss_u + misses[0] - miss_u * misses[0]) ** copies
    good = range(copies + 1)
    chances = stats.binom.pmf(good, copies, 1 - miss_u)
    return float(sum(chance * any_failure(miss**count for miss in misses) for chance, count in zip(chances, good)))


def network_failure(
    target: Sequence[Tensor], tolerances: Sequence[Tolerance], rounds: int, copies: Sequence[int]
) -> float:
    """The exact failure of the whole construction for these weight matrices F_1, …, F_l."""
    halves = [
        half_failure(column, tolerance, rounds, count)
        for matrix, tolerance, count in zip(target, tolerances, copies)
        for column in matrix.T.tolist()
    ]
    # The two halves of an input use different weights with the same probabilities: -w is as far from the nearer end of
    # [-1, 1] as w.
    return any_failure(halves + halves)


def scalar_tolerance(epsilon: float) -> Tolerance:
    """The tolerance ε/2 of Lemmas A.3 and A.4."""
    bounds.check_epsilon(epsilon)
    return Tolerance(epsilon / 2, epsilon / 2)


def network_tolerances(epsilon: float, widths: Sequence[int]) -> list[Tolerance]:
    """The tolerances of the repaired theorem, one for each layer of the target.

    Layer i gets ε/l, divided by √d_0 + (i − 1)ε/l, the largest norm of its inputs: half of that for u, whose error is
    multiplied by ‖F_i‖ ≤ 1, half for v, whose error is multiplied by √(d_(i−1)·d_i).
    """
    bounds.check_epsilon(epsilon)
    sizes = bounds.layers(widths)
    share = epsilon / len(sizes)
    tolerances = []
    for layer, (inputs, outputs) in enumerate(sizes):
        radius = math.sqrt(widths[0]) + layer * share
        half = share / (2 * radius)
        tolerances.append(Tolerance(half, half / math.sqrt(inputs * outputs)))
    return tolerances


def repaired_widths(epsilon: float, delta: float, widths: Sequence[int], rounds: int = 1) -> list[int]:
    """The repaired theorem: widths of layers 1, 3, ... of g that are enough.

    For ``widths=(1, 1)`` this is the repaired Proposition 4.3.
    """
    copies = repaired_copies(epsilon, delta, widths, rounds)
    return [2 * inputs * count for (inputs, _), count in zip(bounds.layers(widths), copies)]


def repaired_copies(epsilon: float, delta: float, widths: Sequence[int], rounds: int = 1) -> list[int]:
    """How many hidden neurons every half of every input needs for that, one number for each layer of the target."""
    enough = _rounds_by_layer(epsilon, delta, widths)
    sizes = bounds.layers(widths)
    copies = []
    for (inputs, outputs), tolerance, single in zip(sizes, network_tolerances(epsilon, widths), enough):
        if rounds >= single:
            copies.append(1)
        else:
            # The logarithm of half_failure([1.0], tolerance, rounds), exact for values near 1 too.
            hits = (hit_probability(1.0, near) for near in (tolerance.u, tolerance.v))
            served = math.prod(_any_hit(hit, rounds) for hit in hits)
            copies.append(math.ceil(math.log(2 * len(sizes) * inputs * outputs / delta) / -math.log1p(-served)))
    return copies


def repaired_rounds(epsilon: float, delta: float, widths: Sequence[int]) -> int:
    """The repaired theorem: the R from which twice the width of the target is enough."""
    return max(_rounds_by_layer(epsilon, delta, widths))


def _any_hit(probability: float, rounds: int) -> float:
    """The probability 1 − (1 − p)^R that one of R draws hits."""
    bounds.check_count("rounds", rounds)
    return -math.expm1(rounds * math.log1p(-probability))


def _rounds_by_layer(epsilon: float, delta: float, widths: Sequence[int]) -> list[int]:
    bounds.check_delta(delta)
    sizes = bounds.layers(widths)
    return [
        math.ceil(math.log(2 * len(sizes) * inputs * (outputs + 1) / delta) / -math.log1p(-tolerance.v / 2))
        for (inputs, outputs), tolerance in zip(sizes, network_tolerances(epsilon, widths))
    ]


def any_failure(failures: Iterable[float]) -> float:
    """The probability that at least one of independent events happens; exact for tiny ones too."""
    logarithms = [math.log1p(-failure) if failure < 1 else -math.inf for failure in failures]
    return -math.expm1(math.fsum(logarithms))
