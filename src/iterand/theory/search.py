"""Looking through the draws of a weight for one that is near enough: what re-sampling does in the proof."""

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from iterand import distributions, philox
from iterand.philox import Key
from iterand.theory import bounds

MOST_DRAWS = 1e11
"""How many draws a computation may take: hours on one core."""

MOST_ROUNDS = 1 << 31
"""The generator counts the draws of a weight in 32 bits, and a model keeps the number of each in 31."""

Progress = Callable[[int], None]
"""Hears how many draws were looked at since the last time."""


def silent(draws: int) -> None:
    """Nothing."""


def check_draws(draws: float, what: str, hint: str = "raise epsilon, or lower the number of trials") -> None:
    """Refuse a computation that would not end within a day."""
    if draws > MOST_DRAWS:
        raise ValueError(f"{what} takes about {draws:.0e} draws, and at most {MOST_DRAWS:.0e} are made; {hint}")


def expected_draws(probability: float, rounds: int) -> float:
    """How many draws it takes in the mean until one hits, if R are made at most: (1 − (1 − p)^R) / p."""
    bounds.check_count("rounds", rounds)
    if probability <= 0:
        return float(rounds)
    return -math.expm1(rounds * math.log1p(-probability)) / probability if probability < 1 else 1.0


class Found(NamedTuple):
    """For every weight: which draw it stops at, its value there, and whether that is within the tolerance."""

    draw: Tensor
    value: Tensor
    hit: Tensor


def uniform(index: Tensor, draw: Tensor, key: Key) -> Tensor:
    """U[-1, 1] of Section 4, as the weights of a model pruned with ``weights="uniform"`` have it."""
    distribution = distributions.get_distribution("uniform")
    return distribution.values(philox.philox(index, draw, key), fan_in=1)


def search(
    index: Tensor, center: Tensor, tolerance: Tensor, rounds: int, key: Key, progress: Progress = silent
) -> Found:
    """For every weight its first draw of 0, …, R − 1 within the tolerance of its center, else the nearest of all.

    A weight needs no memory for this: it is redrawn until it is near enough and kept from then on, as pruned weights
    are redrawn and kept ones are not (Eq. 2). All tensors are flat and of one length.
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
        # The fewer weights are left, the more draws of each are looked at in one go.
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
