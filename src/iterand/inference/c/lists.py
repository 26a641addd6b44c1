"""The weights of a layer as lists: for each output channel the inputs to add and those to subtract."""

import numpy as np
from numpy.typing import NDArray

from iterand.errors import IterandError
from iterand.inference.nodes import Convolution, Linear

ESCAPE = 255  # the code that stands for no weight
_INTEGERS = 127


class Lists:
    """The weights of a layer that are not zero.

    If the weights of a channel differ by more than their sign, all are added, after multiplying with ``values``.

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
        magnitudes = np.abs(rows).max(1, initial=0)
        only_signs = bool(((rows == 0) | (np.abs(rows) == magnitudes[:, None])).all())
        scale = node.scale.astype(np.float64)
        if integers:
            rows = rows * np.where(scale < 0, -1, 1)[:, None]
            scale = np.abs(scale)
        if only_signs:
            rows, scale = np.sign(rows), scale * magnitudes
        elif integers:
            steps = np.where(magnitudes > 0, magnitudes / _INTEGERS, 1).astype(np.float64)
            rows, scale = np.rint(rows / steps[:, None]), scale * steps
        masks = [(row > 0, row < 0) if only_signs else (row != 0, row != row) for row in rows]
        self._places = [(np.flatnonzero(plus), np.flatnonzero(minus)) for plus, minus in masks]
        self.counts = [len(places) for both in self._places for places in both]
        if max(self.counts) >= 1 << 16:
            raise IterandError(
                f"a channel of {node.where!r} keeps {max(self.counts):,} weights; inference in C has at most 65,535"
            )
        self.values = None if only_signs else np.concatenate([row[row != 0] for row in rows])
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
