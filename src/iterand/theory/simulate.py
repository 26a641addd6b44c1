"""Monte-Carlo of the events in the proof, from the draws a pruned model would make, with exact confidence intervals."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from iterand import memory, philox
from iterand.theory import bounds, exact
from iterand.theory.exact import Tolerance
from iterand.theory.search import Progress, check_draws, expected_draws, search, silent

_WEIGHT_BYTES = 40  # index, center, tolerance, draw and value of a simulated weight


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
    """How many draws ``HalfDraws`` makes, in the mean."""
    bounds.check_count("trials", trials)
    hits = [exact.hit_probability(1.0, tolerance.u), *(exact.hit_probability(w, tolerance.v) for w in weights)]
    return 2 * trials * copies * sum(expected_draws(hit, rounds) for hit in hits)


class HalfDraws:
    """Simulated halves of Lemma A.5: at which draw each weight first comes within its tolerance.

    A half has ``copies`` hidden neurons; each has one u, which must come near 1, and one v for each of ``weights``. The
    other half of the proof asks the same of other weights (near −1 and −w), so it is two halves that make a trial.
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
        memory.require(_WEIGHT_BYTES * size, f"simulating {trials} trials", "lower the number of trials")
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
        """Whether each half (trials × 2) fails with its first ``rounds`` draws only."""
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


def width_draws(epsilon: float, rounds: int, *, weight: float = 1.0, trials: int) -> float:
    """How many draws ``simulated_width`` makes, in the mean."""
    bounds.check_count("trials", trials)
    tolerance = exact.scalar_tolerance(epsilon)
    hit_u, hit_v = exact.hit_probability(1.0, tolerance.u), exact.hit_probability(weight, tolerance.v)
    draws_u, draws_v = expected_draws(hit_u, rounds), expected_draws(hit_v, rounds)
    serving = _serving(epsilon, rounds, weight)
    block = _block(serving, 2 * trials)
    found = serving * expected_draws(serving, block)  # the share of halves that are done with a block
    neurons = 2 * trials * block / found
    return neurons * (draws_u + draws_u * hit_u * draws_v)


def _block(serving: float, halves: int) -> int:
    """How many neurons of each half are looked at together: so many that most find one that serves, if they fit."""
    return max(1, min(math.ceil(2 / serving), philox.CHUNK // halves))


def _serving(epsilon: float, rounds: int, weight: float) -> float:
    """The probability that a neuron serves: one of R draws of u hits, and one of v."""
    tolerance = exact.scalar_tolerance(epsilon)
    hits = exact.hit_probability(1.0, tolerance.u), exact.hit_probability(weight, tolerance.v)
    return math.prod(hit * expected_draws(hit, rounds) for hit in hits)


def simulated_width(
    epsilon: float,
    delta: float,
    rounds: int,
    *,
    weight: float = 1.0,
    trials: int = 1_000,
    seed: int = 0,
    progress: Progress = silent,
) -> int:
    """The width that was enough for f(x) = w·x in a share 1 − δ of simulated trials, by the event of Lemma A.4.

    Every half takes new neurons until one serves; a trial needs the larger number of its two halves, for each half.
    """
    bounds.check_delta(delta)
    for name, value in (("rounds", rounds), ("trials", trials)):
        bounds.check_count(name, value)
    tolerance = exact.scalar_tolerance(epsilon)
    what = f"simulating the width for epsilon {epsilon:g} and {rounds} rounds"
    check_draws(width_draws(epsilon, rounds, weight=weight, trials=trials), what)
    memory.require(2 * trials * _WEIGHT_BYTES, f"simulating {trials} trials", "lower the number of trials")
    key = philox.key(seed, "theory.width")
    needed = torch.zeros(2 * trials, dtype=torch.int64)
    active = torch.arange(2 * trials)
    serving = _serving(epsilon, rounds, weight)
    while active.numel():
        block = _block(serving, active.numel())
        neurons = needed[active, None] + torch.arange(block)
        # The weights of neuron n of half h: an index no other neuron has, 2·(h + n·halves) for u and the next for v.
        index = 2 * (active[:, None] + neurons * needed.numel()).reshape(-1)
        served = torch.zeros(index.numel(), dtype=torch.bool)
        served[_hits(index, 1.0, tolerance.u, rounds, key, progress)] = True
        candidates = served.nonzero().squeeze(1)
        served[candidates] = False
        served[candidates[_hits(index[candidates] + 1, weight, tolerance.v, rounds, key, progress)]] = True
        done = served.view(-1, block)
        needed[active] += torch.where(done.any(dim=1), done.to(torch.uint8).argmax(dim=1) + 1, block)
        active = active[~done.any(dim=1)]
    copies = needed.view(trials, 2).amax(dim=1).sort().values
    return 2 * int(copies[math.ceil((1 - delta) * trials) - 1])


def _hits(index: Tensor, center: float, tolerance: float, rounds: int, key: philox.Key, progress: Progress) -> Tensor:
    if not index.numel():
        return index
    at, within = (torch.full(index.shape, value, dtype=torch.float64) for value in (center, tolerance))
    return search(index, at, within, rounds, key, progress).hit.nonzero().squeeze(1)
