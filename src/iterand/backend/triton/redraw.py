"""``Redraw``: partial randomization, Eq. (3), of all layers in one launch.

Random bits and weights are bit-equal to `iterand.philox` and `iterand.distributions`.
"""

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from iterand.backend.triton.cuts import FindCuts
from iterand.backend.triton.layers import (
    BLOCK,
    EXACT,
    Layers,
    addresses,
    cached,
    floats,
    index_of,
    kept_at,
    launching_on,
    locate,
    offset_of,
    pointers,
    same_order,
    to_device_async,
)


@triton.jit
def words(index, draw, key0, key1):
    """The first two Philox words of the elements with these indices in this draw."""
    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    word0, word1, _, _ = tl.philox(key0 | key1 << 32, low, high, draw.to(tl.uint32) + zero, zero)
    return word0, word1


@triton.jit
def value(word, kind, unit, normal):
    """level · unit, where the level is computed from the word; ``kind`` is ``Distribution.kind``."""
    if kind == 0:
        level = ((word >> 8) * 2).to(tl.int32) - 16777215
    elif kind == 1:
        level = ((word >> 31) * 2).to(tl.int32) - 1
    else:
        level = tl.load(normal + (word >> 16).to(tl.int32))
    return level.to(tl.float32) * unit


Origin = tuple[int, int, int, float]
"""How the weights of a layer are drawn: the two words of the key, ``Distribution.kind``, the unit."""


class Redraw:
    """``reference.redraw`` for all layers in one launch.

    Weights may have another memory layout than scores and draws. All draws have one dtype: uint8, int16 or int32.
    """

    def __init__(
        self,
        cuts: FindCuts,
        weights: Sequence[Tensor],
        draws: Sequence[Tensor],
        origins: Sequence[Origin],
        normal: Tensor,
    ) -> None:
        self._cuts = cuts
        self._weights, self._draws = pointers(weights), pointers(draws)
        self._origins, self._normal = _table(origins, cuts.layers.device), normal
        self._table = Layers(weights).table
        self._same = all(same_order(weight, draw) for weight, draw in zip(weights, draws))
        (self._bytes,) = {draw.itemsize for draw in draws}

    def run(self, numbers: Tensor, threshold: int, *, negative: bool = False, follow: bool = False) -> None:
        """One round by the current cuts: the round number of every layer, and the coin threshold (rate · 2³²).

        ``negative`` redraws only weights whose score is below zero. ``follow`` flips the sign of a score when its
        weight changes sign.
        """
        cuts, layers = self._cuts, self._cuts.layers
        with launching_on(layers.device):
            _redraw[(layers.blocks,)](
                layers.block_layer, layers.table, cuts.scores, self._weights, self._draws, self._origins, self._normal,
                self._table, cuts.thresholds, cuts.lasts, numbers, threshold,
                BLOCK=BLOCK, MAGNITUDE=cuts.magnitude, SAME=self._same, NEGATIVE=negative, FOLLOW=follow,
                DRAW_BYTES=self._bytes, **EXACT,
            )  # fmt: skip


def prepare(
    cuts: FindCuts,
    weights: Sequence[Tensor],
    draws: Sequence[Tensor],
    origins: Sequence[Origin],
    normal: Tensor,
) -> Redraw:
    """The operation for these tensors, cached by their addresses."""
    key = (id(cuts), *origins, *addresses(weights), *addresses(draws))
    return cached(key, lambda: Redraw(cuts, weights, draws, origins, normal))


def _table(origins: Sequence[Origin], device: torch.device) -> Tensor:
    rows = [(*rest, int(np.float32(unit).view(np.int32))) for *rest, unit in origins]
    return to_device_async(torch.tensor(rows), device)


@triton.jit
def _fresh(origin, normal, layer, index, draw):
    """The word of the coin and the fresh weight of each element in a draw."""
    row = origin + layer * 4
    first, second = words(index, draw, tl.load(row), tl.load(row + 1))
    unit = tl.load(row + 3).to(tl.int32).to(tl.float32, bitcast=True)
    return second, value(first, tl.load(row + 2), unit, normal)


@triton.jit
def _redraw(
    block_layer, table, scores, weights, draws, origin, normal, weight_table,
    thresholds, lasts, numbers, coin,
    BLOCK: tl.constexpr, MAGNITUDE: tl.constexpr, SAME: tl.constexpr, NEGATIVE: tl.constexpr, FOLLOW: tl.constexpr,
    DRAW_BYTES: tl.constexpr,
):  # fmt: skip
    """One block of ``reference.redraw``. SAME: weights have the memory layout of the scores."""
    layer, start, left = locate(block_layer, table, tl.program_id(0), BLOCK)
    lane = tl.arange(0, BLOCK)
    exists = lane < left
    kept = kept_at(scores, table, layer, start, lane, exists, thresholds, lasts, MAGNITUDE)
    number = tl.load(numbers + layer).to(tl.int32)
    index = index_of(table, layer, start, lane)
    word, fresh = _fresh(origin, normal, layer, index, number)
    redraw = exists & (kept == 0) & (word.to(tl.int64) < coin)
    offset = start + lane
    if not SAME:
        offset = offset_of(weight_table, layer, index)
    score = floats(scores, layer) + start + lane
    if NEGATIVE:
        redraw = redraw & (tl.load(score, mask=exists, other=0.0) < 0)
    if FOLLOW:
        old = tl.load(floats(weights, layer) + offset, mask=redraw, other=0.0)
        tl.store(score, -tl.load(score, mask=redraw, other=0.0), mask=redraw & ((fresh < 0) != (old < 0)))
    tl.store(floats(weights, layer) + offset, fresh, mask=redraw)
    kind: tl.constexpr = tl.uint8 if DRAW_BYTES == 1 else tl.int16 if DRAW_BYTES == 2 else tl.int32
    draw = tl.load(draws + layer).to(tl.pointer_type(kind))
    tl.store(draw + start + lane, (tl.zeros_like(lane) + number).to(kind), mask=redraw)
