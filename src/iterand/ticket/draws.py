"""The round in which a weight was drawn, stored as an ordinal among the rounds in which its coin came up.

A weight can be redrawn in round k only if its coin b_r comes up in round k, Eq. (3). Seed and rates determine in which
rounds it does: about r·R of R. So the ordinal of the draw among those rounds (0 for the initial weight) costs
log2(1/r) bits less than the round number. Ordinals are counted from the first of these rounds or from the latest:
weights that settled early have small ordinals from the first, weights that were still redrawn late from the latest.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iterand import philox
from iterand.summarizing import entropy
from iterand.ticket import codec

ALWAYS = 1 << 32  # threshold of a coin that always comes up
MAX_ROUNDS = 1 << 24

# Limit on the coins a reader tosses: a constant (a second or two), plus a multiple of the file size.
_COINS_ALLOWANCE = 1 << 25
_COINS_PER_BYTE = 1 << 10

_MAX_EXACT_ROUNDS = 2048  # of an exact estimate; above it, use the expected number of coins that come up


def allowed_coins(size: int) -> int:
    """Maximum number of coins that a reader tosses for a file of ``size`` bytes."""
    return _COINS_ALLOWANCE + _COINS_PER_BYTE * size


@dataclass(frozen=True)
class History:
    """The rounds of randomization so far."""

    runs: tuple[tuple[int, int], ...]
    """Run-length encoded: (coin threshold, number of consecutive rounds with it)."""

    @cached_property
    def rounds(self) -> int:
        """R: number of rounds."""
        return sum(count for _, count in self.runs)

    @cached_property
    def rounds_with_coins(self) -> int:
        """Number of rounds with a rate above 0."""
        return sum(count for threshold, count in self.runs if threshold)

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """The runs as an array [run, 2]."""
        return np.array(self.runs, dtype=np.int64).reshape(-1, 2)

    def thresholds(self) -> NDArray[np.int64]:
        """The coin threshold of every round."""
        return self.array[:, 0].repeat(self.array[:, 1])


def ordinals(index: Tensor, draw: Tensor, key: philox.Key, history: History, *, latest: bool) -> Tensor:
    """Ordinal, from 1, of each draw among the rounds in which its coin came up. 0 if it did not in that round."""
    sign = -1 if latest else 1
    ordinal = torch.zeros_like(draw)
    came_up_then = torch.zeros_like(draw, dtype=torch.bool)

    def advance(pending: Tensor, rounds: Tensor, came_up: Tensor) -> Tensor:
        wanted = draw[pending]
        ordinal[pending] += (came_up & (sign * rounds <= sign * wanted)).sum(0)
        came_up_then[pending] |= (came_up & (rounds == wanted)).any(0)
        return sign * wanted > sign * rounds[-1]

    _toss(index, key, history, latest, advance)
    return ordinal * came_up_then


def draws(index: Tensor, ordinal: Tensor, key: philox.Key, history: History, *, latest: bool) -> Tensor:
    """The inverse of ``ordinals``: the round with each ordinal, from 1. 0 if the coin did not come up that often."""
    draw = torch.zeros_like(ordinal)
    hits = torch.zeros_like(ordinal)

    def advance(pending: Tensor, rounds: Tensor, came_up: Tensor) -> Tensor:
        reached = came_up.cumsum(0).add_(hits[pending]) >= ordinal[pending]
        hits[pending] += came_up.sum(0)
        draw[pending] = torch.where(reached[-1], rounds[reached.to(torch.uint8).argmax(0), 0], 0)
        return ~reached[-1]

    _toss(index, key, history, latest, advance)
    return draw


def _toss(
    index: Tensor, key: philox.Key, history: History, latest: bool, advance: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> None:
    """Toss the coins of these weights, a chunk of rounds at a time, until all weights are done.

    Rounds go forward from the first, or backward from the latest. ``advance`` gets the pending weights, the rounds of
    the chunk [rounds, 1], and which coins came up [rounds, weights]. It returns which weights are still pending.
    """
    if not len(index):
        return
    device = index.device
    runs = torch.from_numpy(history.array).to(device)
    firsts = runs[:, 1].cumsum(0) - runs[:, 1] + 1  # number of the first round of each run
    runs, firsts = runs[runs[:, 0] > 0], firsts[runs[:, 0] > 0]  # a coin of rate 0 never comes up
    ends = runs[:, 1].cumsum(0)
    total = history.rounds_with_coins
    for part in philox.chunks(len(index), device):
        pending = philox.indices(part, device)
        start = 0
        while len(pending) and start < total:
            stop = min(total, start + max(1, philox.chunk_size(device) // len(pending)))
            tossed = torch.arange(start, stop, device=device)
            tossed = total - 1 - tossed if latest else tossed
            run = torch.searchsorted(ends, tossed, right=True)
            rounds = (firsts[run] + tossed - ends[run] + runs[run, 1])[:, None]
            words = philox.philox(index[pending].repeat(len(rounds)), rounds.repeat(1, len(pending)).view(-1), key)
            came_up = words[1].view(len(rounds), -1) < runs[run, :1]
            pending = pending[advance(pending, rounds, came_up)]
            start = stop


def kept_indices(mask: Tensor) -> Tensor:
    """Indices of the kept weights, ascending."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))  # several times faster than torch.nonzero


def update(digest: "hashlib._Hash", mask: codec.Symbols, values: codec.Symbols, weights: Tensor) -> None:
    """Add a layer to a digest: the coded symbols of mask and kept weights, then the weights as float32."""
    for part in (mask, values, weights.numpy()):
        digest.update(part.astype(part.dtype.newbyteorder("<"), copy=False).data)


def ordinal_bits(draw_counts: NDArray[np.integer[Any]], history: History) -> dict[str, float]:
    """Estimated bits of the ordinals, counted from the first and from the latest, given how often each draw occurs.

    Uses the rates only, so no coin is tossed for the encoding that is not chosen.
    """
    initial, redrawn = draw_counts[:1], draw_counts[1:].astype(np.float64)
    counts: dict[str, NDArray[Any]]
    if history.rounds > _MAX_EXACT_ROUNDS:
        before = np.concatenate([[0.0], (history.thresholds() / ALWAYS).cumsum()])
        after = before[-1] - before[1:]
        expected = {"first": before[: len(redrawn)], "latest": after[: len(redrawn)]}
        counts = {encoding: np.bincount(expected[encoding].round().astype(np.int64), redrawn) for encoding in expected}
    else:
        forwards, backwards = _hit_counts(history)
        hits = {"first": forwards, "latest": backwards}
        counts = {encoding: redrawn @ hits[encoding][: len(redrawn)] for encoding in hits}
    return {encoding: entropy(np.concatenate([initial, count])) for encoding, count in counts.items()}


@lru_cache(maxsize=4)
def _hit_counts(history: History) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Probability that a coin comes up n times before a round, and after it: two arrays [round, n]."""
    rates = history.thresholds() / ALWAYS
    mean = rates.sum()
    most = min(len(rates), int(mean + 8 * mean**0.5 + 8))
    return _before(rates, most), _before(rates[::-1], most)[::-1]


def _before(rates: NDArray[np.float64], most: int) -> NDArray[np.float64]:
    probability = np.zeros((len(rates), most + 1))
    probability[:1, 0] = 1
    for number, rate in enumerate(rates[:-1]):
        probability[number + 1] = probability[number] * (1 - rate)
        probability[number + 1, 1:] += probability[number, :-1] * rate
    return probability
