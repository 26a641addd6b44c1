"""The draw a weight holds, told by its place among the rounds in which the weight's coin fell.

A weight can have been redrawn in round k only if its coin b_r fell in round k (Eq. 3), and seed and rates say in which
rounds it did. Of R rounds about r·R are left, so the place among them (0 for the initial weight) costs log2(1/r) bits
less than the round itself. Places are counted from the first fall or from the latest: weights that settled early have
low places from the first, weights of a mask that never settled have low ones from the latest.
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

from iterand import distributions, philox
from iterand.parametrization import Settings
from iterand.summarizing import entropy
from iterand.ticket import codec

ALWAYS = 1 << 32  # the threshold of a coin that falls in any case
MAX_ROUNDS = 1 << 24

# Coins a file may ask its reader to toss: a second or two, and more only if the bytes of the file account for them.
_FREE_COINS = 1 << 25
_COINS_PER_BYTE = 1 << 10

_MOST_ROUNDS = 2048  # for an estimate; beyond, each coin is taken to fall exactly as often as expected


def allowed_coins(size: int) -> int:
    """How many coins a reader tosses for a file of this many bytes."""
    return _FREE_COINS + _COINS_PER_BYTE * size


@dataclass(frozen=True)
class History:
    """The rounds of randomization so far."""

    runs: tuple[tuple[int, int], ...]
    """Run-length coded: (coin threshold of a round, how many rounds in a row had it)."""

    @cached_property
    def rounds(self) -> int:
        """R: how many rounds there were."""
        return sum(count for _, count in self.runs)

    @cached_property
    def rounds_with_coins(self) -> int:
        """How many of them had a coin that could fall."""
        return sum(count for threshold, count in self.runs if threshold)

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """The runs as an array [run, 2]."""
        return np.array(self.runs, dtype=np.int64).reshape(-1, 2)

    def thresholds(self) -> NDArray[np.int64]:
        """The coin threshold of every round."""
        return self.array[:, 0].repeat(self.array[:, 1])


def places(index: Tensor, draw: Tensor, key: philox.Key, history: History, *, latest: bool) -> Tensor:
    """The place, from 1, of each redrawn weight's draw among its coin's falls; 0 if it did not fall in that round."""
    sign = -1 if latest else 1
    place = torch.zeros_like(draw)
    fell_then = torch.zeros_like(draw, dtype=torch.bool)

    def advance(open_: Tensor, rounds: Tensor, fell: Tensor) -> Tensor:
        wanted = draw[open_]
        place[open_] += (fell & (sign * rounds <= sign * wanted)).sum(0)
        fell_then[open_] |= (fell & (rounds == wanted)).any(0)
        return sign * wanted > sign * rounds[-1]

    _toss(index, key, history, latest, advance)
    return place * fell_then


def draws(index: Tensor, place: Tensor, key: philox.Key, history: History, *, latest: bool) -> Tensor:
    """The draw that stands at each weight's place, from 1, among its coin's falls; 0 if it did not fall so often."""
    draw = torch.zeros_like(place)
    falls = torch.zeros_like(place)

    def advance(open_: Tensor, rounds: Tensor, fell: Tensor) -> Tensor:
        reached = fell.cumsum(0).add_(falls[open_]) >= place[open_]
        falls[open_] += fell.sum(0)
        draw[open_] = torch.where(reached[-1], rounds[reached.to(torch.uint8).argmax(0), 0], 0)
        return ~reached[-1]

    _toss(index, key, history, latest, advance)
    return draw


def _toss(
    index: Tensor, key: philox.Key, history: History, latest: bool, advance: Callable[[Tensor, Tensor, Tensor], Tensor]
) -> None:
    """Toss the coins of these weights, some rounds at a time from the first or the latest, while any is left open.

    ``advance`` is told which weights are open, which rounds are tossed [rounds, 1], and which coins fell [rounds,
    weights]; it says which weights stay open.
    """
    if not len(index):
        return
    device = index.device
    runs = torch.from_numpy(history.array).to(device)
    firsts = runs[:, 1].cumsum(0) - runs[:, 1] + 1  # the number of the first round of each run
    runs, firsts = runs[runs[:, 0] > 0], firsts[runs[:, 0] > 0]  # a coin of rate 0 never falls
    ends = runs[:, 1].cumsum(0)
    total = history.rounds_with_coins
    for part in philox.chunks(len(index), device):
        open_ = philox.indices(part, device)
        start = 0
        while len(open_) and start < total:
            stop = min(total, start + max(1, philox.chunk_size(device) // len(open_)))
            tossed = torch.arange(start, stop, device=device)
            tossed = total - 1 - tossed if latest else tossed
            run = torch.searchsorted(ends, tossed, right=True)
            rounds = (firsts[run] + tossed - ends[run] + runs[run, 1])[:, None]
            words = philox.philox(index[open_].repeat(len(rounds)), rounds.repeat(1, len(open_)).view(-1), key)
            fell = words[1].view(len(rounds), -1) < runs[run, :1]
            open_ = open_[advance(open_, rounds, fell)]
            start = stop


def kept_indices(mask: Tensor) -> Tensor:
    """The indices of the kept weights, ascending."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))  # several times faster than torch's own


def drawn(settings: Settings, distribution: distributions.Distribution, index: Tensor, draw: Tensor) -> Tensor:
    """The weights at these indices in these draws, float32."""
    key = philox.key(settings.seed, settings.name)
    values = torch.empty(len(index))
    for part in philox.chunks(len(index)):
        values[part] = distribution.values(philox.philox(index[part], draw[part], key), settings.fan_in)
    return values


def update(digest: "hashlib._Hash", mask: codec.Symbols, values: codec.Symbols, weights: Tensor) -> None:
    """Take a layer into the digest: the coded symbols of both sequences, then weights as float32."""
    for part in (mask, values, weights.numpy()):
        digest.update(part.astype(part.dtype.newbyteorder("<"), copy=False).data)


def place_bits(draw_counts: NDArray[np.integer[Any]], history: History) -> dict[str, float]:
    """About what the places of draws cost that occur so often, counted from the first fall and from the latest.

    It takes the rates alone, so that coins are tossed only for the way that will be taken.
    """
    initial, redrawn = draw_counts[:1], draw_counts[1:].astype(np.float64)
    counts: dict[str, NDArray[Any]]
    if history.rounds > _MOST_ROUNDS:
        before = np.concatenate([[0.0], (history.thresholds() / ALWAYS).cumsum()])
        after = before[-1] - before[1:]
        expected = {"first": before[: len(redrawn)], "latest": after[: len(redrawn)]}
        counts = {way: np.bincount(expected[way].round().astype(np.int64), redrawn) for way in expected}
    else:
        forwards, backwards = _fall_counts(history)
        falls = {"first": forwards, "latest": backwards}
        counts = {way: redrawn @ falls[way][: len(redrawn)] for way in falls}
    return {way: entropy(np.concatenate([initial, count])) for way, count in counts.items()}


@lru_cache(maxsize=4)
def _fall_counts(history: History) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[round, n]: the probability that a coin falls n times before the round, and after it."""
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
