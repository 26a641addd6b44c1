"""Simulation of the sampling lemmas: draws until a hit, failures and widths.

``rounds`` is R, the number of draws of every weight, as in ``bounds.py``.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from scipy import stats
from torch import Tensor

from iterand import distributions, memory, philox
from iterand.checks import counted
from iterand.lab.theory import bounds, exact
from iterand.lab.theory.exact import Tolerance
from iterand.philox import Key

MOST_DRAWS = 1e11
"""The most draws of one computation: hours on one core."""

MOST_ROUNDS = 1 << 31
"""The most draws of a weight: a model stores the number of a draw in 31 bits."""

_WEIGHT_BYTES = 40  # index, center, tolerance, draw and value of a simulated weight

Progress = Callable[[int], None]
"""Called with the number of draws made since the last call."""


def silent(draws: int) -> None:
    """Report no progress."""


def check_draws(draws: float, what: str, hint: str = "raise epsilon, or lower the number of trials") -> None:
    """Raise ValueError for a computation of more than ``MOST_DRAWS`` draws."""
    if draws > MOST_DRAWS:
        raise ValueError(f"{what} takes about {draws:.0e} draws, and at most {MOST_DRAWS:.0e} are made; {hint}")


def expected_draws(probability: float, rounds: int) -> float:
    """The mean number of draws until one hits, of at most R: (1 − (1 − p)^R) / p."""
    bounds.check_count("rounds", rounds)
    if probability <= 0:
        return float(rounds)
    return -math.expm1(rounds * math.log1p(-probability)) / probability if probability < 1 else 1.0


class Found(NamedTuple):
    """For every weight: the number of its chosen draw, its value, and whether it is within the tolerance."""

    draw: Tensor
    value: Tensor
    hit: Tensor


def uniform(index: Tensor, draw: Tensor, key: Key) -> Tensor:
    """Draws from U[-1, 1] (Section 4), the same as in a model pruned with ``weights="uniform"``."""
    distribution = distributions.get_distribution("uniform")
    return distribution.values(philox.philox(index, draw, key), fan_in=1)


def search(
    index: Tensor, center: Tensor, tolerance: Tensor, rounds: int, key: Key, progress: Progress = silent
) -> Found:
    """For every weight its first draw of 0, …, R − 1 within the tolerance of its center, else the nearest draw.

    Iterative randomization can do this: a weight is redrawn while it is pruned and stays once it is kept (Eq. 2). All
    tensors are flat and of one length.
    """
    bounds.check_count("rounds", rounds, most=MOST_ROUNDS)
    parts = [
        _search_part(index[part], center[part], tolerance[part], rounds, key, progress)
        for part in philox.chunks(index.numel())
    ]
    return Found(*(torch.cat(column) for column in zip(*parts)))


def _search_part(index: Tensor, center: Tensor, tolerance: Tensor, rounds: int, key: Key, progress: Progress) -> Found:
    draw = torch.zeros_like(index)
    distance = torch.full(index.shape, torch.inf, dtype=torch.float64)
    center = center.to(torch.float64)
    active = torch.arange(index.numel())
    start = 0
    while active.numel() and start < rounds:
        # The fewer weights are left, the more draws of each are made at once.
        count = min(max(1, philox.CHUNK // active.numel()), rounds - start)
        draws = torch.arange(start, start + count).expand(active.numel(), count)
        values = uniform(index[active, None].expand_as(draws).reshape(-1), draws.reshape(-1), key)
        distances = (values.view(draws.shape) - center[active, None]).abs_()
        near = distances <= tolerance[active, None]
        hit = near.any(dim=1)
        best = torch.where(hit, near.to(torch.uint8).argmax(dim=1), distances.argmin(dim=1))
        found = distances.gather(1, best[:, None]).squeeze(1)
        better = hit | (found < distance[active])
        draw[active[better]] = best[better] + start
        distance[active[better]] = found[better]
        active = active[~hit]
        start += count
        progress(int(torch.where(hit, best + 1, count).sum()))
    return Found(draw, uniform(index, draw, key), distance <= tolerance)


@dataclass(frozen=True)
class Estimate:
    """A probability from counts, with its Clopper-Pearson interval."""

    value: float
    low: float
    high: float
    count: int
    trials: int


def estimate(count: int, trials: int, confidence: float = 0.99) -> Estimate:
    """The share of ``count`` in ``trials`` with its Clopper-Pearson interval."""
    interval = stats.binomtest(count, trials).proportion_ci(confidence, method="exact")
    return Estimate(count / trials, float(interval.low), float(interval.high), count, trials)


def half_draws(weights: Sequence[float], tolerance: Tolerance, rounds: int, *, copies: int = 1, trials: int) -> float:
    """How many draws ``HalfDraws`` makes on average."""
    bounds.check_count("trials", trials)
    hits = [exact.hit_probability(1.0, tolerance.u), *(exact.hit_probability(w, tolerance.v) for w in weights)]
    return 2 * trials * copies * sum(expected_draws(hit, rounds) for hit in hits)


class HalfDraws:
    """Simulated halves of Lemma A.5: at which draw each weight first comes within its tolerance.

    A half has ``copies`` hidden neurons. Each has one u, which must be near 1, and one v for each of ``weights``. The
    other half of the proof needs other weights near −1 and −w, so a trial is two halves.
    """

    def __init__(
        self,
        weights: Sequence[float],
        tolerance: Tolerance,
        rounds: int,
        *,
        copies: int = 1,
        trials: int = 10_000,
        seed: int = 0,
        progress: Progress = silent,
    ) -> None:
        for name, value in (("rounds", rounds), ("copies", copies), ("trials", trials)):
            bounds.check_count(name, value)
        check_draws(half_draws(weights, tolerance, rounds, copies=copies, trials=trials), "simulating halves")
        size = 2 * trials * copies * (1 + len(weights))
        memory.require(_WEIGHT_BYTES * size, f"simulating {counted(trials, 'trial')}", "lower the number of trials")
        self.rounds = rounds
        centers = torch.tensor([1.0, *weights], dtype=torch.float64)
        tolerances = torch.tensor([tolerance.u] + [tolerance.v] * len(weights), dtype=torch.float64)
        signs = torch.tensor([1.0, -1.0], dtype=torch.float64).view(2, 1, 1)
        shape = (trials, 2, copies, len(centers))
        found = search(
            torch.arange(math.prod(shape)),
            (signs * centers).expand(shape).reshape(-1),
            tolerances.expand(shape).reshape(-1),
            rounds,
            philox.key(seed, "theory.simulate"),
            progress,
        )
        self.first = torch.where(found.hit, found.draw, rounds).view(shape)

    def failed(self, rounds: int) -> Tensor:
        """Whether each half (trials × 2) fails with its first ``rounds`` draws."""
        if not 1 <= rounds <= self.rounds:
            raise ValueError(f"rounds is {rounds}; these halves were simulated for 1 to {self.rounds}")
        good = self.first < rounds
        served = (good[..., :1] & good[..., 1:]).any(dim=2)
        return ~served.all(dim=2)

    def half_failure(self, rounds: int) -> Estimate:
        """The failure of one half."""
        failed = self.failed(rounds)
        return estimate(int(failed.sum()), failed.numel())

    def failure(self, rounds: int) -> Estimate:
        """The failure of a trial: of at least one of its two halves."""
        failed = self.failed(rounds).any(dim=1)
        return estimate(int(failed.sum()), failed.numel())


def width_draws(epsilon: float, rounds: int, *, trials: int) -> float:
    """How many draws ``simulated_width`` makes on average."""
    bounds.check_count("trials", trials)
    hit = exact.hit_probability(1.0, exact.scalar_tolerance(epsilon).u)  # the same for u and v
    each = expected_draws(hit, rounds)
    serving = _serving(epsilon, rounds)
    block = _block(serving, 2 * trials)
    found = serving * expected_draws(serving, block)  # the share of halves that a block completes
    neurons = 2 * trials * block / found
    return neurons * (each + each * hit * each)


def _block(serving: float, halves: int) -> int:
    """How many neurons of each half are drawn at once: usually enough to include one that serves, if they fit."""
    return max(1, min(math.ceil(2 / serving), philox.CHUNK // halves))


def _serving(epsilon: float, rounds: int) -> float:
    """The probability that a neuron serves: one of R draws of u hits, and one of v."""
    hit = exact.hit_probability(1.0, exact.scalar_tolerance(epsilon).u)
    return (hit * expected_draws(hit, rounds)) ** 2


def simulated_width(
    epsilon: float,
    delta: float,
    rounds: int,
    *,
    trials: int = 1_000,
    seed: int = 0,
    progress: Progress = silent,
) -> int:
    """The width that was enough for f(x) = x in a share 1 − δ of simulated trials, by the event of Lemma A.4.

    Every half draws new neurons until one serves; the width of a trial is twice the larger number of its two halves.
    """
    bounds.check_delta(delta)
    for name, value in (("rounds", rounds), ("trials", trials)):
        bounds.check_count(name, value)
    what = f"simulating the width for epsilon {epsilon:g} and {counted(rounds, 'round')}"
    check_draws(width_draws(epsilon, rounds, trials=trials), what)
    memory.require(2 * trials * _WEIGHT_BYTES, f"simulating {counted(trials, 'trial')}", "lower the number of trials")
    key = philox.key(seed, "theory.width")
    needed = torch.zeros(2 * trials, dtype=torch.int64)
    active = torch.arange(2 * trials)
    serving, tolerance = _serving(epsilon, rounds), exact.scalar_tolerance(epsilon)
    while active.numel():
        block = _block(serving, active.numel())
        neurons = needed[active, None] + torch.arange(block)
        # Neuron n of half h has the unique index 2·(h + n·halves) for u, and the next one for v.
        index = 2 * (active[:, None] + neurons * needed.numel()).reshape(-1)
        served = torch.zeros(index.numel(), dtype=torch.bool)
        served[_hits(index, tolerance.u, rounds, key, progress)] = True
        candidates = served.nonzero().squeeze(1)
        served[candidates] = False
        served[candidates[_hits(index[candidates] + 1, tolerance.v, rounds, key, progress)]] = True
        done = served.view(-1, block)
        needed[active] += torch.where(done.any(dim=1), done.to(torch.uint8).argmax(dim=1) + 1, block)
        active = active[~done.any(dim=1)]
    copies = needed.view(trials, 2).amax(dim=1).sort().values
    return 2 * int(copies[math.ceil((1 - delta) * trials) - 1])


def _hits(index: Tensor, tolerance: float, rounds: int, key: Key, progress: Progress) -> Tensor:
    """Which of these weights come near 1."""
    if not index.numel():
        return index
    at, within = (torch.full(index.shape, value, dtype=torch.float64) for value in (1.0, tolerance))
    return search(index, at, within, rounds, key, progress).hit.nonzero().squeeze(1)
