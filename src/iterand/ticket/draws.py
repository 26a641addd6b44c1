"""The draw a weight holds, told by its place among the rounds in which the weight's coin fell.

A weight can have been redrawn in round k only if its coin b_r fell in round k (Eq. 3), and seed and rates say in which
rounds it did. Of R rounds about r·R are left, so the place among them (0 for the initial weight) costs log2(1/r) bits
less than the round itself. Places are counted from the first fall or from the latest: weights that settled early have
low places from the first, weights of a mask that never settled have low ones from the latest.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from iterand import philox

History = Sequence[tuple[int, int]]
"""Run-length coded: (coin threshold of a round, how many rounds in a row had it)."""

ALWAYS = 1 << 32  # the threshold of a coin that falls in any case
MAX_ROUNDS = 1 << 24
MAX_COINS = 1 << 32  # coins a ticket may ask its reader to toss: minutes, not hours


def round_count(history: History) -> int:
    """R: how many rounds of randomization there were."""
    return sum(count for _, count in history)


def thresholds(history: History) -> Tensor:
    """The coin threshold of every round."""
    runs = torch.tensor(list(history), dtype=torch.int64).reshape(-1, 2)
    return torch.repeat_interleave(runs[:, 0], runs[:, 1])


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
    device = index.device
    coins = thresholds(history).to(device)
    tossed = coins.nonzero().squeeze(1)  # a coin of rate 0 never falls
    tossed = tossed.flip(0) if latest else tossed
    for part in philox.chunks(len(index), device):
        open_ = philox.indices(part, device)
        start = 0
        while len(open_) and start < len(tossed):
            numbers = tossed[start : start + max(1, philox.chunk_size(device) // len(open_))]
            start += len(numbers)
            rounds = numbers[:, None] + 1
            words = philox.philox(index[open_].repeat(len(rounds)), rounds.repeat(1, len(open_)).view(-1), key)
            fell = words[1].view(len(rounds), -1) < coins[numbers][:, None]
            open_ = open_[advance(open_, rounds, fell)]
