"""What no choice of draws and masks can beat: width 2 for f(x) = x, the case that refutes Proposition 4.3.

With two hidden neurons one must carry x > 0 and the other x < 0, each with u·v ≥ 1 − ε. Write q for the probability
that the R draws of a neuron allow that on one given side, and c for both: then failure has probability 1 − 2q² + c²,
whatever is chosen, and c ≥ max(0, 2q − 1). Proof: ``docs/theory.md``.
"""

import math

from scipy import integrate

from iterand.theory import bounds


def side_failure(epsilon: float, rounds: int) -> float:
    """1 − q: no two of the R draws of u and of v of a neuron have u > 0 and u·v ≥ 1 − ε."""
    bounds.check_epsilon(epsilon)
    bounds.check_count("rounds", rounds)

    def too_small_v(quantile: float) -> float:
        # The largest of R draws has distribution function ((1 + t)/2)^R, so a uniform quantile gives the largest u.
        largest_u = 2 * quantile ** (1 / rounds) - 1
        return float(((1 + (1 - epsilon) / largest_u) / 2) ** rounds)

    too_small_u = (1 - epsilon / 2) ** rounds
    rest, _ = integrate.quad(too_small_v, too_small_u, 1.0, epsabs=0.0, epsrel=1e-9)
    return float(too_small_u + rest)


def width_two_failure(epsilon: float, rounds: int) -> float:
    """A lower bound on the failure at width 2 for w = 1, over all choices of draws and masks."""
    failure = side_failure(epsilon, rounds)
    # 1 − 2q² + (2q − 1)² is 2(1 − q)², without the cancellation.
    return 2 * failure**2 if failure < 0.5 else 1 - 2 * (1 - failure) ** 2


def width_two_rounds(epsilon: float, delta: float) -> int:
    """A lower bound on the R that width 2 needs for w = 1 and δ < 1/2: linear in log(1/δ), whatever is chosen."""
    bounds.check_epsilon(epsilon)
    bounds.check_delta(delta)
    if delta >= 0.5:
        return 1  # the bound says nothing here
    return math.ceil(math.log(2 / delta) / (-2 * math.log1p(-epsilon / 2)))
