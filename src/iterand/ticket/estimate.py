"""What the places of draws will cost, from the rates alone: to toss the coins only for the way that will be taken."""

from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from iterand.ticket import coding, draws

_MOST_ROUNDS = 2048  # beyond, each coin is taken to fall exactly as often as expected


def place_bits(draw_counts: coding.Symbols, history: tuple[tuple[int, int], ...]) -> dict[str, float]:
    """About what the places of draws cost that occur so often, counted from the first fall and from the latest."""
    initial, redrawn = draw_counts[:1], draw_counts[1:].astype(np.float64)
    counts: dict[str, NDArray[Any]]
    rates = draws.thresholds(history).numpy() / draws.ALWAYS
    if len(rates) > _MOST_ROUNDS:
        before = np.concatenate([[0.0], rates.cumsum()])
        after = before[-1] - before[1:]
        expected = {"first": before[: len(redrawn)], "latest": after[: len(redrawn)]}
        counts = {way: np.bincount(expected[way].round().astype(np.int64), redrawn) for way in expected}
    else:
        forwards, backwards = _fall_counts(history)
        falls = {"first": forwards, "latest": backwards}
        counts = {way: redrawn @ falls[way][: len(redrawn)] for way in falls}
    return {way: coding.entropy(np.concatenate([initial, count])) for way, count in counts.items()}


@lru_cache(maxsize=4)
def _fall_counts(history: tuple[tuple[int, int], ...]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[round, n]: the probability that a coin falls n times before the round, and after it."""
    rates = draws.thresholds(history).numpy() / draws.ALWAYS
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
