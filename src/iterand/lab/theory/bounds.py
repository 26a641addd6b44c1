"""The paper's claims: Theorem 4.1 and the lemmas of Appendix A as functions, and the prior work it compares with.

Each function is derived from the previous one by the reduction that the proof uses. For R > 1 the claims rest on a
step that is false: ``exact.py`` has the correct probabilities, ``docs/explanation/theory.md`` the proofs.

``rounds`` is R in this package: the number of draws of every weight, the first one and R − 1 redraws, so ``rounds=1``
means no redraws. Elsewhere (``rounds`` of a masked layer) it counts redraws only.
"""

import math
from collections.abc import Sequence
from itertools import pairwise

from iterand.checks import shown


def claimed_half_failure(epsilon: float, rounds: int, copies: int = 1) -> float:
    """Lemma A.4: the claimed bound (1 − ε²/16)^(d'R²) for one half of the hidden neurons, with d' of them.

    At R = 1 this is Lemma A.3, and correct.
    """
    check_epsilon(epsilon)
    check_count("rounds", rounds)
    check_count("copies", copies)
    return (1 - epsilon**2 / 16) ** (copies * rounds**2)


def scalar_width(epsilon: float, delta: float, rounds: int = 1) -> int:
    """Lemmas A.3 and A.4 (Lemma 4.2, Proposition 4.3): the width claimed for f(x) = w·x."""
    return vector_width(epsilon, delta, 1, rounds)


def scalar_rounds(epsilon: float, delta: float) -> int:
    """Proposition 4.3: the R from which width 2 is claimed for f(x) = w·x."""
    return vector_rounds(epsilon, delta, 1)


def vector_width(epsilon: float, delta: float, outputs: int, rounds: int = 1) -> int:
    """Lemma A.5: the width claimed for a linear map of one variable to ``outputs``."""
    check_count("rounds", rounds)
    return 2 * math.ceil(_vector_rounds_squared(epsilon, delta, outputs) / rounds**2)


def vector_rounds(epsilon: float, delta: float, outputs: int) -> int:
    """Lemma A.5: the R from which width 2 is claimed for a linear map of one variable."""
    return math.ceil(math.sqrt(_vector_rounds_squared(epsilon, delta, outputs)))


def matrix_width(epsilon: float, delta: float, inputs: int, outputs: int, rounds: int = 1) -> int:
    """Lemma A.6: the width claimed for a linear map; every input gets ε/d_0 and δ/d_0."""
    check_count("inputs", inputs)
    return inputs * vector_width(epsilon / inputs, delta / inputs, outputs, rounds)


def matrix_rounds(epsilon: float, delta: float, inputs: int, outputs: int) -> int:
    """Lemma A.6: the R from which width 2·d_0 is claimed for a linear map."""
    check_count("inputs", inputs)
    return vector_rounds(epsilon / inputs, delta / inputs, outputs)


def network_widths(epsilon: float, delta: float, widths: Sequence[int], rounds: int = 1) -> list[int]:
    """Theorem 4.1: the widths of layers 1, 3, ... of g claimed for a target with ``widths`` d_0, …, d_l."""
    share = _layer_share(epsilon, delta, widths)
    return [matrix_width(*share, inputs, outputs, rounds) for inputs, outputs in layers(widths)]


def network_rounds(epsilon: float, delta: float, widths: Sequence[int]) -> int:
    """Theorem 4.1: the R from which twice the width of the target is claimed to be enough."""
    share = _layer_share(epsilon, delta, widths)
    return max(matrix_rounds(*share, inputs, outputs) for inputs, outputs in layers(widths))


def width_two_rounds(epsilon: float, delta: float) -> int:
    """A lower bound on the R that width 2 needs for w = 1 and δ < 1/2, for any choice of draws and masks.

    It is linear in log(1/δ), which refutes Proposition 4.3. With two hidden neurons one must carry x > 0 and the other
    x < 0, each with u·v ≥ 1 − ε. Let q be the probability that the R draws of a neuron allow that on one given side,
    and c on both sides. Then the failure has probability 1 − 2q² + c², and c ≥ max(0, 2q − 1).
    ``docs/explanation/theory.md`` has the proof.
    """
    check_epsilon(epsilon)
    check_delta(delta)
    if delta >= 0.5:
        return 1  # no bound here
    return math.ceil(math.log(2 / delta) / (-2 * math.log1p(-epsilon / 2)))


def malach_width_scale(epsilon: float, delta: float, width: int, depth: int) -> float:
    """The order d⁵l²/ε² · log(dl/δ) of the width without re-sampling by Malach et al. (2020).

    They state a polynomial; its order is the one that Pensia et al. (2020) quote. The constant is 1 here, so only the
    growth is meaningful.
    """
    _check_scale(epsilon, delta, width, depth)
    return width**5 * depth**2 / epsilon**2 * math.log(width * depth / delta)


def pensia_width_scale(epsilon: float, delta: float, width: int, depth: int) -> float:
    """The order d · log(d²l / min(ε, δ)) of the width without re-sampling by Pensia et al. (2020, Theorem 1).

    Its universal constant is not given and is 1 here, so only the growth is meaningful.
    """
    _check_scale(epsilon, delta, width, depth)
    return width * math.log(width**2 * depth / min(epsilon, delta))


def layers(widths: Sequence[int]) -> list[tuple[int, int]]:
    """The (inputs, outputs) of each linear layer of a target with these widths."""
    if len(widths) < 2:
        raise ValueError(f"widths are {list(widths)}; name at least two, the inputs and the outputs of one layer")
    for width in widths:
        check_count("widths", width, most=10**9)
    return list(pairwise(widths))


def check_epsilon(epsilon: float) -> None:
    """Raise ValueError unless ε is between 0 and 1 and its square is a float."""
    if not 0 < epsilon < 1:
        raise ValueError(
            f"epsilon is {epsilon:g}; it must lie between 0 and 1, so divide it and the target's outputs by one factor"
        )
    if epsilon < 1e-100:
        raise ValueError(f"epsilon is {epsilon:g}; it must be at least 1e-100, or the width is no number")


def check_delta(delta: float) -> None:
    """Raise ValueError unless δ is a probability and its inverse is a float."""
    if not 0 < delta < 1:
        raise ValueError(f"delta is {delta:g}; it is a probability of failure, so it must lie between 0 and 1")
    if delta < 1e-100:
        raise ValueError(f"delta is {delta:g}; it must be at least 1e-100, or the width is no number")


def check_count(name: str, value: int, most: int = 10**150) -> None:
    """Raise ValueError unless a value is a positive whole number whose square is a float."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        hint = "; 1 means without re-sampling" if name == "rounds" else ""
        raise ValueError(f"{name} has {value!r}; it must be a whole number of at least 1{hint}")
    if value > most:
        raise ValueError(f"{name} has {shown(value)}; it must be at most {most:.0e}")


def _vector_rounds_squared(epsilon: float, delta: float, outputs: int) -> float:
    check_epsilon(epsilon)
    check_delta(delta)
    check_count("outputs", outputs)
    return 16 * outputs / epsilon**2 * math.log(2 * outputs / delta)


def _layer_share(epsilon: float, delta: float, widths: Sequence[int]) -> tuple[float, float]:
    # Half of ε is spent on scaling the inputs of later layers from ‖x‖ ≤ 1 to ‖x‖ ≤ 2 (proof of Theorem 4.1).
    check_epsilon(epsilon)
    check_delta(delta)
    depth = len(layers(widths))
    return epsilon / (2 * depth), delta / depth


def _check_scale(epsilon: float, delta: float, width: int, depth: int) -> None:
    check_epsilon(epsilon)
    check_delta(delta)
    check_count("width", width)
    check_count("depth", depth)
