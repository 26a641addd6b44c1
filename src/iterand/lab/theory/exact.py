"""What is true: the exact probability of the event in the proof, and the width and R that follow from it.

The proof of Theorem 4.1 asks of a hidden neuron that one of its R draws of u comes near ±1 and one of its R draws of v
near w. The R² pairs share their draws, so they are not independent; but the R draws of one weight are, and so are
different weights. That is all that is used here. Proofs: ``docs/theory.md``."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from scipy import stats
from torch import Tensor

from iterand.lab.theory import bounds


@dataclass(frozen=True)
class Tolerance:
    """How near a draw has to come: u to ±1, v to the weight w it stands for; then |w − v·u| ≤ v + u·|w|."""

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

    For one weight this is [1 − (1 − (1 − p_u)^R)(1 − (1 − p_v)^R)]^d' (Lemma A.4). For several (Lemma A.5) the u of a
    neuron serves all outputs at once, so the outputs depend on each other; given which neurons have a good u they do
    not.
    """
    bounds.check_count("copies", copies)
    miss_u = miss_probability(hit_probability(1.0, tolerance.u), rounds)
    misses = [miss_probability(hit_probability(weight, tolerance.v), rounds) for weight in weights]
    if len(misses) == 1:
        return (miss_u + misses[0] - miss_u * misses[0]) ** copies
    good = range(copies + 1)
    chances = stats.binom.pmf(good, copies, 1 - miss_u)
    return float(sum(chance * _any_failure(miss**count for miss in misses) for chance, count in zip(chances, good)))


def network_failure(
    target: Sequence[Tensor], tolerances: Sequence[Tolerance], rounds: int, copies: Sequence[int]
) -> float:
    """The exact failure of the whole construction for these weight matrices F_1, …, F_l."""
    halves = [
        half_failure(column, tolerance, rounds, count)
        for matrix, tolerance, count in zip(target, tolerances, copies)
        for column in matrix.T.tolist()
    ]
    # Both halves of an input ask the same of different weights: -w lies as far from the nearer end of [-1, 1] as w.
    return _any_failure(halves + halves)


def scalar_tolerance(epsilon: float) -> Tolerance:
    """The tolerance ε/2 of Lemmas A.3 and A.4."""
    bounds.check_epsilon(epsilon)
    return Tolerance(epsilon / 2, epsilon / 2)


def network_tolerances(epsilon: float, widths: Sequence[int]) -> list[Tolerance]:
    """The tolerances of the repaired theorem, one a layer of the target.

    Layer i gets ε/l, divided by the norm √d_0 + (i − 1)ε/l its inputs can have: half of that for u, whose error is
    multiplied by ‖F_i‖ ≤ 1, half for v, whose error counts √(d_(i−1)·d_i) times.
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
    """The repaired theorem: these widths of layers 1, 3, ... of g are enough.

    For ``widths=(1, 1)`` this is the repaired Proposition 4.3.
    """
    copies = repaired_copies(epsilon, delta, widths, rounds)
    return [2 * inputs * count for (inputs, _), count in zip(bounds.layers(widths), copies)]


def repaired_copies(epsilon: float, delta: float, widths: Sequence[int], rounds: int = 1) -> list[int]:
    """How many hidden neurons every half of every input needs for that, one number a layer of the target."""
    enough = _rounds_by_layer(epsilon, delta, widths)
    sizes = bounds.layers(widths)
    copies = []
    for (inputs, outputs), tolerance, single in zip(sizes, network_tolerances(epsilon, widths), enough):
        if rounds >= single:
            copies.append(1)
        else:
            # The logarithm of half_failure([1.0], tolerance, rounds), exact also where that is nearly 1.
            hits = (hit_probability(1.0, near) for near in (tolerance.u, tolerance.v))
            served = math.prod(_any_hit(hit, rounds) for hit in hits)
            copies.append(math.ceil(math.log(2 * len(sizes) * inputs * outputs / delta) / -math.log1p(-served)))
    return copies


def repaired_rounds(epsilon: float, delta: float, widths: Sequence[int]) -> int:
    """The repaired theorem: from this R on, twice the width of the target is enough."""
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


def _any_failure(failures: Iterable[float]) -> float:
    """The probability that at least one of independent events happens, exact also where it is tiny."""
    logarithms = [math.log1p(-failure) if failure < 1 else -math.inf for failure in failures]
    return -math.expm1(math.fsum(logarithms))
