"""``ApplyMasks`` and ``UpdateScores``: masked weights and SGD step of the scores, one launch each for all layers."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from iterand.backend.triton.cuts import FindCuts
from iterand.backend.triton.layers import BLOCK, EXACT, floats, kept_at, launching_on, locate, pointers, to_device_async


class ApplyMasks:
    """``reference.apply_mask`` for all layers in one launch, rounded to the dtype of ``masked``: float32 or bfloat16.

    All tensors of a layer have the same memory layout.
    """

    def __init__(self, cuts: FindCuts, weights: Sequence[Tensor], masked: Sequence[Tensor]) -> None:
        self._cuts = cuts
        self._weights, self._masked = pointers(weights), pointers(masked)
        self._halves = halves(masked)

    def run(self) -> None:
        """Write the masked weights by the current cuts."""
        cuts, layers = self._cuts, self._cuts.layers
        with launching_on(layers.device):
            _apply[(layers.blocks,)](
                layers.block_layer, layers.table, cuts.scores, self._weights, self._masked, self._halves,
                cuts.thresholds, cuts.lasts, BLOCK=BLOCK, MAGNITUDE=cuts.magnitude, **EXACT,
            )  # fmt: skip


class UpdateScores:
    """``reference.update_scores`` for all layers in one launch.

    Operations and rounding are those of ``torch.optim.SGD``. Gradients have the dtypes of ``masked``.
    """

    def __init__(
        self,
        cuts: FindCuts,
        weights: Sequence[Tensor],
        momentum_buffers: Sequence[Tensor],
        masked: Sequence[Tensor],
    ) -> None:
        self._cuts = cuts
        self._weights, self._buffers = pointers(weights), pointers(momentum_buffers)
        self._halves = halves(masked)

    def run(self, gradients: Tensor, learning_rate: Tensor, momentum: float, weight_decay: float) -> None:
        """Update the scores. ``gradients`` are the addresses of the gradients of the masked weights.

        The learning rate is a float32 tensor on the device, so that it may change between replays of a graph.
        """
        layers = self._cuts.layers
        with launching_on(layers.device):
            _update[(layers.blocks,)](
                layers.block_layer, layers.table, self._cuts.scores, self._weights, self._buffers, gradients,
                self._halves, learning_rate, momentum, weight_decay,
                BLOCK=BLOCK, MAGNITUDE=self._cuts.magnitude, DECAYS=weight_decay != 0, MOVES=momentum != 0,
                **EXACT,
            )  # fmt: skip


def halves(tensors: Sequence[Tensor]) -> Tensor:
    """int32 flags on the device: 1 for bfloat16 tensors, 0 for float32."""
    return to_device_async(
        torch.tensor([tensor.dtype == torch.bfloat16 for tensor in tensors]).int(), tensors[0].device
    )


@triton.jit
def _apply(
    block_layer, table, scores, weights, masked, halves, thresholds, lasts,
    BLOCK: tl.constexpr, MAGNITUDE: tl.constexpr,
):  # fmt: skip
    """One block of ``reference.apply_mask``."""
    layer, start, left = locate(block_layer, table, tl.program_id(0), BLOCK)
    lane = tl.arange(0, BLOCK)
    exists = lane < left
    kept = kept_at(scores, table, layer, start, lane, exists, thresholds, lasts, MAGNITUDE)
    weight = tl.load(floats(weights, layer) + start + lane, mask=exists, other=0.0)
    threshold = tl.load(thresholds + layer)
    # A NaN threshold becomes the value of pruned weights, as in the reference.
    result = tl.where(kept, weight, tl.where(threshold == threshold, 0.0, threshold))
    if tl.load(halves + layer) != 0:
        target = tl.load(masked + layer).to(tl.pointer_type(tl.bfloat16))
        tl.store(target + start + lane, result.to(tl.bfloat16), mask=exists)
    else:
        tl.store(floats(masked, layer) + start + lane, result, mask=exists)


@triton.jit
def _update(
    block_layer, table, scores, weights, buffers, gradients, halves, learning_rate,
    momentum, weight_decay,
    BLOCK: tl.constexpr, MAGNITUDE: tl.constexpr, DECAYS: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    """One block of ``reference.update_scores``. DECAYS: weight decay is not 0. MOVES: momentum is not 0."""
    layer, start, left = locate(block_layer, table, tl.program_id(0), BLOCK)
    lane = tl.arange(0, BLOCK)
    exists = lane < left
    if tl.load(halves + layer) != 0:
        source = tl.load(gradients + layer).to(tl.pointer_type(tl.bfloat16))
        gradient = tl.load(source + start + lane, mask=exists, other=0.0).to(tl.float32)
    else:
        gradient = tl.load(floats(gradients, layer) + start + lane, mask=exists, other=0.0)
    at_score = floats(scores, layer) + start + lane
    score = tl.load(at_score, mask=exists, other=0.0)
    step = gradient * tl.load(floats(weights, layer) + start + lane, mask=exists, other=0.0)
    if MAGNITUDE:  # d|s|/ds = sign(s)
        step = step * tl.where(score > 0, 1.0, tl.where(score < 0, -1.0, 0.0))
    if DECAYS:
        step = tl.fma(score, tl.zeros_like(score) + weight_decay, step)
    if MOVES:
        at_buffer = floats(buffers, layer) + start + lane
        step = tl.load(at_buffer, mask=exists, other=0.0) * momentum + step
        tl.store(at_buffer, step, mask=exists)
    tl.store(at_score, tl.fma(step, tl.zeros_like(score) - tl.load(learning_rate), score), mask=exists)
