"""The weights of a layer as lists: for each output channel the inputs to add and those to subtract.

An input is listed as often as its weight is large: a weight of 2c twice.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from iterand.errors import IterandError
from iterand.inference.nodes import Convolution, Linear

ESCAPE = 255  # the code that stands for no weight
_INTEGERS = 127
_MOST_TIMES = 8  # that an input is added for one weight


class _Levels(NamedTuple):
    """Weights as multiples of one magnitude per channel."""

    counts: NDArray[np.float32]
    magnitudes: NDArray[np.float32]


def _small_levels(rows: NDArray[np.float32]) -> _Levels | None:
    """The weights as small multiples of the smallest of their row, or else of all rows; None if they are neither."""
    sizes = np.abs(rows)
    smallest = np.where(sizes > 0, sizes, np.inf).min(1, initial=np.inf)
    for least in (smallest, np.full_like(smallest, smallest.min(initial=np.inf))):
        magnitudes = np.where(np.isfinite(least), least, 0).astype(np.float32)
        counts = np.rint(sizes / np.where(magnitudes > 0, magnitudes, 1)[:, None]).astype(np.float32)
        if (counts * magnitudes[:, None] == sizes).all() and (counts <= _MOST_TIMES).all():
            return _Levels(counts, magnitudes)
    return None


def _repeated(counts: NDArray[np.float32]) -> NDArray[np.int64]:
    """The positions, each as often as its count says."""
    return np.repeat(np.arange(len(counts)), counts.astype(np.int64))


class Lists:
    """The weights of a layer that are not zero.

    If the weights of a channel are not small multiples of one magnitude, all are added, after multiplying with
    ``values``.

    Args:
        node: The layer.
        integers: Whether sums are integers: then ``values`` are too, and no scale is negative.
    """

    values: NDArray[np.float32] | None
    scale: NDArray[np.float64]
    """What a sum is multiplied by, per channel."""
    total: NDArray[np.float64]
    """The sum of the weights of a channel, in units of ``scale``."""

    def __init__(self, node: Convolution | Linear, integers: bool) -> None:
        self._inputs = node.weight.shape[1]
        rows = node.weight.reshape(len(node.weight), -1)
        scale = node.scale.astype(np.float64)
        levels, magnitudes = _small_levels(rows), np.abs(rows).max(1, initial=0)
        if integers:
            rows = rows * np.where(scale < 0, -1, 1)[:, None]
            scale = np.abs(scale)
        if levels is not None:
            rows, scale = np.sign(rows) * levels.counts, scale * levels.magnitudes
            self._places = [(_repeated(np.maximum(row, 0)), _repeated(np.maximum(-row, 0))) for row in rows]
        else:
            if integers:
                steps = np.where(magnitudes > 0, magnitudes / _INTEGERS, 1).astype(np.float64)
                rows, scale = np.rint(rows / steps[:, None]), scale * steps
            self._places = [(np.flatnonzero(row), np.flatnonzero(row != row)) for row in rows]
        self.counts = [len(places) for both in self._places for places in both]
        if max(self.counts) >= 1 << 16:
            raise IterandError(
                f"a channel of {node.where!r} keeps {max(self.counts):,} weights; inference in C has at most 65,535"
            )
        self.values = None if levels is not None else np.concatenate([row[row != 0] for row in rows])
        self.scale = scale
        self.total = rows.sum(1, dtype=np.float64)

    def offsets(self, taps: NDArray[np.int64], channel: int, groups: int) -> list[int]:
        """Where the inputs lie."""
        size, found = len(self._places) // groups, []
        for number, both in enumerate(self._places):
            for places in both:
                channels = places // len(taps) + number // size * self._inputs
                found += (channels * channel + taps[places % len(taps)]).tolist()
        return found

    def codes(self, taps: int) -> list[int]:
        """The same as codes of a byte; see layers.h."""
        found = []
        for places in (places for both in self._places for places in both):
            base = 0
            for place in places.tolist():
                while place - base >= ESCAPE:
                    found.append(ESCAPE)
                    base += ESCAPE // taps * taps
                found.append(place - base)
                base = place // taps * taps
        return found
