"""Masked weights, gradients of the scores and an SGD step of the scores: one launch each for all layers."""

from collections.abc import Sequence

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
    to_device_async,
)

_ALIGNMENT = 512  # bytes


class ApplyMasks:
    """``reference.apply_mask`` for all layers in one launch, rounded to the given dtypes: float32 or bfloat16.

    Masked weights have the memory layout of the weights, which may be another one than that of the scores. Other kinds
    of masks (`iterand.mask_kinds`): ``coats`` are the cuts of further coats, ``signed`` turns weights whose score is
    negative, and ``rounded`` keeps no score below 0.5.
    """

    def __init__(
        self,
        cuts: FindCuts,
        weights: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        *,
        coats: Sequence[FindCuts] = (),
        signed: bool = False,
        rounded: bool = False,
    ) -> None:
        self._cuts = cuts
        self._coats = [cuts, *coats]
        self._thresholds, self._lasts = cuts.thresholds, cuts.lasts
        if coats:
            self._thresholds = torch.stack([one.thresholds for one in self._coats])
            self._lasts = torch.stack([one.lasts for one in self._coats])
        self._kind = {"COATS": len(self._coats), "SIGNED": signed, "ROUNDED": rounded}
        layers = Layers(weights)
        self._weights, self._table = pointers(weights), layers.table
        self._same = layers.layouts == cuts.layers.layouts
        self._halves = halves(dtypes, cuts.layers.device)
        # The outputs of ``masked_weights``: where each begins in one block of memory, aligned as torch aligns tensors.
        self._like = [(weight.shape, weight.stride(), dtype) for weight, dtype in zip(weights, dtypes)]
        sizes = [-(-weight.numel() * dtype.itemsize // _ALIGNMENT) for weight, dtype in zip(weights, dtypes)]
        self._starts = [_ALIGNMENT * sum(sizes[:i]) for i in range(len(sizes) + 1)]
        self._offsets = to_device_async(torch.tensor(self._starts[:-1]), cuts.layers.device)

    def run(self, masked: Tensor) -> None:
        """Write the masked weights of the current cuts to these addresses."""
        cuts, layers = self._cuts, self._cuts.layers
        if len(self._coats) > 1:
            for number, coat in enumerate(self._coats):
                self._thresholds[number].copy_(coat.thresholds)
                self._lasts[number].copy_(coat.lasts)
        with launching_on(layers.device):
            _apply[(layers.blocks,)](
                layers.block_layer, layers.table, cuts.scores, self._weights, masked, self._halves, self._table,
                self._thresholds, self._lasts, len(layers.sizes),
                BLOCK=BLOCK, MAGNITUDE=cuts.magnitude, SAME=self._same, **self._kind, **EXACT,
            )  # fmt: skip

    def masked_weights(self) -> list[Tensor]:
        """The masked weights of the current cuts, as new tensors. Nothing is copied from the host."""
        memory = torch.empty(self._starts[-1], dtype=torch.uint8, device=self._cuts.layers.device)
        self.run(self._offsets + memory.data_ptr())
        return [
            memory[start : start + shape.numel() * dtype.itemsize].view(dtype).as_strided(shape, stride)
            for start, (shape, stride, dtype) in zip(self._starts, self._like)
        ]


def prepare(cuts: FindCuts, weights: Sequence[Tensor]) -> ApplyMasks:
    """The operation for these tensors, in the dtypes of the weights, cached by their addresses."""
    key = ("masks", id(cuts), *addresses(weights))
    return cached(key, lambda: ApplyMasks(cuts, weights, [weight.dtype for weight in weights]))


class ScoreGradients:
    """``reference.score_gradient`` for all layers in one launch, times sign(s) if it is that of a ``magnitude`` |s|.

    Gradients come in ``dtypes``; all tensors of a layer have the same memory layout. A layer whose gradient has the
    address 0 is left out.
    """

    def __init__(
        self, cuts: FindCuts, weights: Sequence[Tensor], dtypes: Sequence[torch.dtype], *, magnitude: bool
    ) -> None:
        self._cuts, self._magnitude = cuts, magnitude
        self._weights = pointers(weights)
        self._halves = halves(dtypes, cuts.layers.device)

    def run(self, gradients: Tensor, results: Tensor, *, add: bool) -> None:
        """Compute from the gradients at these addresses; write float32 to the others, or ``add`` to what is there."""
        layers = self._cuts.layers
        with launching_on(layers.device):
            _differentiate[(layers.blocks,)](
                layers.block_layer, layers.table, self._cuts.scores, self._weights, gradients, results, self._halves,
                BLOCK=BLOCK, MAGNITUDE=self._magnitude, ADD=add, **EXACT,
            )  # fmt: skip


class UpdateScores:
    """``reference.update_scores`` for all layers in one launch.

    Operations and rounding are those of ``torch.optim.SGD``; the rest is as in ``ScoreGradients``.
    """

    def __init__(
        self,
        cuts: FindCuts,
        weights: Sequence[Tensor],
        momentum_buffers: Sequence[Tensor],
        dtypes: Sequence[torch.dtype],
        *,
        magnitude: bool,
    ) -> None:
        self._cuts, self._magnitude = cuts, magnitude
        self._weights, self._buffers = pointers(weights), pointers(momentum_buffers)
        self._halves = halves(dtypes, cuts.layers.device)

    def run(self, gradients: Tensor, learning_rate: Tensor, momentum: float, weight_decay: float) -> None:
        """Update the scores. ``gradients`` are the addresses of the gradients of the masked weights.

        The learning rate is a float32 tensor on the device, so that it may change between replays of a graph.
        """
        layers = self._cuts.layers
        with launching_on(layers.device):
            _update[(layers.blocks,)](
                layers.block_layer, layers.table, self._cuts.scores, self._weights, self._buffers, gradients,
                self._halves, learning_rate, momentum, weight_decay,
                BLOCK=BLOCK, MAGNITUDE=self._magnitude, DECAYS=weight_decay != 0, MOVES=momentum != 0,
                **EXACT,
            )  # fmt: skip


def halves(dtypes: Sequence[torch.dtype], device: torch.device) -> Tensor:
    """int32 flags on the device: 1 for bfloat16, 0 for float32."""
    return to_device_async(torch.tensor([dtype == torch.bfloat16 for dtype in dtypes]).int(), device)


@triton.jit
def _apply(
    block_layer, table, scores, weights, masked, halves, weight_table, thresholds, lasts, count,
    BLOCK: tl.constexpr, MAGNITUDE: tl.constexpr, SAME: tl.constexpr,
    COATS: tl.constexpr, SIGNED: tl.constexpr, ROUNDED: tl.constexpr,
):  # fmt: skip
    """One block of ``reference.apply_mask``. SAME: weights have the memory layout of the scores.

    The cuts of each coat follow those of the last, ``count`` layers each.
    """
    layer, start, left = locate(block_layer, table, tl.program_id(0), BLOCK)
    lane = tl.arange(0, BLOCK)
    exists = lane < left
    kept = kept_at(scores, table, layer, start, lane, exists, thresholds, lasts, MAGNITUDE)
    offset = start + lane
    if not SAME:
        offset = offset_of(weight_table, layer, index_of(table, layer, start, lane))
    weight = tl.load(floats(weights, layer) + offset, mask=exists, other=0.0)
    if SIGNED or ROUNDED:
        score = tl.load(floats(scores, layer) + start + lane, mask=exists, other=0.0)
        if SIGNED:
            weight = tl.where(score < 0, -weight, weight)
        if ROUNDED:
            kept = kept & (score >= 0.5)
    if COATS > 1:
        level = tl.full((BLOCK,), 1.0, tl.float32)
        for coat in tl.static_range(1, COATS):
            at = coat * count
            also = kept_at(scores, table, layer, start, lane, exists, thresholds + at, lasts + at, MAGNITUDE)
            level += tl.where(also, 1.0, 0.0)
        weight = weight * level
    threshold = tl.load(thresholds + layer)
    # A NaN threshold becomes the value of pruned weights, as in the reference.
    result = tl.where(kept, weight, tl.where(threshold == threshold, 0.0, threshold))
    if tl.load(halves + layer) != 0:
        target = tl.load(masked + layer).to(tl.pointer_type(tl.bfloat16))
        tl.store(target + offset, result.to(tl.bfloat16), mask=exists)
    else:
        tl.store(floats(masked, layer) + offset, result, mask=exists)


@triton.jit
def _gradient(score, weights, gradients, halves, layer, offset, exists, MAGNITUDE: tl.constexpr):
    """Gradients of the scores at these offsets."""
    if tl.load(halves + layer) != 0:
        source = tl.load(gradients + layer).to(tl.pointer_type(tl.bfloat16))
        gradient = tl.load(source + offset, mask=exists, other=0.0).to(tl.float32)
    else:
        gradient = tl.load(floats(gradients, layer) + offset, mask=exists, other=0.0)
    gradient = gradient * tl.load(floats(weights, layer) + offset, mask=exists, other=0.0)
    if MAGNITUDE:  # d|s|/ds = sign(s)
        gradient = gradient * tl.where(score > 0, 1.0, tl.where(score < 0, -1.0, 0.0))
    return gradient


@triton.jit
def _differentiate(
    block_layer, table, scores, weights, gradients, results, halves,
    BLOCK: tl.constexpr, MAGNITUDE: tl.constexpr, ADD: tl.constexpr,
):  # fmt: skip
    """One block of ``reference.score_gradient``. ADD: to the numbers that are there."""
    layer, start, left = locate(block_layer, table, tl.program_id(0), BLOCK)
    lane = tl.arange(0, BLOCK)
    exists = lane < tl.where(tl.load(gradients + layer) != 0, left, 0)
    score = tl.load(floats(scores, layer) + start + lane, mask=exists, other=0.0)
    result = _gradient(score, weights, gradients, halves, layer, start + lane, exists, MAGNITUDE)
    target = floats(results, layer) + start + lane
    if ADD:
        result = tl.load(target, mask=exists, other=0.0) + result
    tl.store(target, result, mask=exists)


@triton.jit
def _update(
    block_layer, table, scores, weights, buffers, gradients, halves, learning_rate,
    momentum, weight_decay,
    BLOCK: tl.constexpr, MAGNITUDE: tl.constexpr, DECAYS: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    """One block of ``reference.update_scores``. DECAYS: weight decay is not 0. MOVES: momentum is not 0."""
    layer, start, left = locate(block_layer, table, tl.program_id(0), BLOCK)
    lane = tl.arange(0, BLOCK)
    exists = lane < tl.where(tl.load(gradients + layer) != 0, left, 0)
    at_score = floats(scores, layer) + start + lane
    score = tl.load(at_score, mask=exists, other=0.0)
    step = _gradient(score, weights, gradients, halves, layer, start + lane, exists, MAGNITUDE)
    if DECAYS:
        step = tl.fma(score, tl.zeros_like(score) + weight_decay, step)
    if MOVES:
        at_buffer = floats(buffers, layer) + start + lane
        step = tl.load(at_buffer, mask=exists, other=0.0) * momentum + step
        tl.store(at_buffer, step, mask=exists)
    tl.store(at_score, tl.fma(step, tl.zeros_like(score) - tl.load(learning_rate), score), mask=exists)
