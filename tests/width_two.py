"""A lower bound on the failure at width 2 for f(x) = x, the case that refutes Proposition 4.3.

``docs/explanation/theory.md`` has the proof.
"""

from scipy import integrate


def side_failure(epsilon: float, rounds: int) -> float:
    """1 − q: no two of the R draws of u and of v of a neuron have u > 0 and u·v ≥ 1 − ε."""

    def too_small_v(quantile: float) -> float:
        # The largest of R draws has distribution function ((1 + t)/2)^R, so a uniform quantile gives the largest u.
        largest_u = 2 * quantile ** (1 / rounds) - 1
        return float(((1 + (1 - epsilon) / largest_u) / 2) ** rounds)

    too_small_u = (1 - epsilon / 2) ** rounds
    rest, _ = integrate.quad(too_small_v, too_small_u, 1.0, epsabs=0.0, epsrel=1e-9)
    return float(too_small_u + rest)


def least_failure(epsilon: float, rounds: int) -> float:
    """A lower bound on the failure over all choices of draws and masks: 1 − 2q² + c² with c ≥ max(0, 2q − 1)."""
    failure = side_failure(epsilon, rounds)
    # 1 − 2q² + (2q − 1)² is 2(1 − q)², without the cancellation.
    return 2 * failure**2 if failure < 0.5 else 1 - 2 * (1 - failure) ** 2
