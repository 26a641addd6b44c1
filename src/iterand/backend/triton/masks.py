"""Masked weights of all layers in one launch, and the update of all scores in another."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from iterand.backend.triton.cuts import FindCuts
from iterand.backend.triton.layers import BLOCK, EXACT, floats, kept_at, launching_on, locate, pointers, to_device_async


class ApplyMasks:
    """``reference.apply_mask`` for all layers in one launch, in the precision that the network computes in.

    All tensors of a layer lie in memory in the same order.
    """

    def __init__(self, cuts: FindCuts, weights: Sequence[Tensor], masked: Sequence[Tensor]) -> None:
        self._cuts = cuts
        self._weights, self._masked = pointers(weights), pointers(masked)
        self._halves = halves(masked)

    def run(self) -> None:
        """Mask the weights by the current cuts."""
        cuts, layers = self._cuts, self._cuts.layers
        with launching_on(layers.device):
            _apply[(layers.blocks,)](
                layers.owner, layers.table, cuts.scores, self._weights, self._masked, self._halves, cuts.thresholds,
                cuts.lasts, BLOCK=BLOCK, MAGNITUDE=cuts.magnitude, **EXACT,
            )  # fmt: skip


class UpdateScores:
    """``reference.update_scores`` for all layers in one launch.

    The operations and their rounding are those of ``torch.optim.SGD``. Gradients have the dtypes of ``masked``.
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
        """Update the scores by the gradients of the masked weights, of which the addresses are given.

        The learning rate (float32) is on the device, so that a graph need not know it.
        """
        layers = self._cuts.layers
        with launching_on(layers.device):
            _update[(layers.blocks,)](
                layers.owner, layers.table, self._cuts.scores, self._weights, self._buffers, gradients,
                self._halves, learning_rate, momentum, weight_decay,
                BLOCK=BLOCK, MAGNITUDE=self._cuts.magnitude, DECAYS=weight_decay != 0, MOVES=momentum != 0,
                **EXACT,
            )  # fmt: skip


def halves(tensors: Sequence[Tensor]) -> Tensor:
    """Which of these are bfloat16; the others are float32."""
    return to_device_async(
        torch.tensor([tensor.dtype == torch.bfloat16 for tensor in tensors]).int(), tensors[0].device
    )


@triton.jit
def _apply(
    owner, table, scores, weights, masked, halves, thresholds, lasts,
    BLOCK: tl.constexpr, MAGNITUDE: tl.constexpr,
):  # fmt: skip
    layer, start, left = locate(owner, table, tl.program_id(0), BLOCK)
    lane = tl.arange(0, BLOCK)
    exists = lane < left
    kept = kept_at(scores, table, layer, start, lane, exists, thresholds, lasts, MAGNITUDE)
    weight = tl.load(floats(weights, layer) + start + lane, mask=exists, other=0.0)
    threshold = tl.load(thresholds + layer)
    # A threshold that is NaN spreads instead of leaving a silent network of zeros.
    result = tl.where(kept, weight, tl.where(threshold == threshold, 0.0, threshold))
    if tl.load(halves + layer) != 0:
        target = tl.load(masked + layer).to(tl.pointer_type(tl.bfloat16))
        tl.store(target + start + lane, result.to(tl.bfloat16), mask=exists)
    else:
        tl.store(floats(masked, layer) + start + lane, result, mask=exists)


@triton.jit
def _update(
    owner, table, scores, weights, buffers, gradients, halves, learning_rate,
    momentum, weight_decay,
    BLOCK: tl.constexpr, MAGNITUDE: tl.constexpr, DECAYS: tl.constexpr, MOVES: tl.constexpr,
):  # fmt: skip
    layer, start, left = locate(owner, table, tl.program_id(0), BLOCK)
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
    if MAGNITUDE:  # what is ranked is |s|
        step = step * tl.where(score > 0, 1.0, tl.where(score < 0, -1.0, 0.0))
    if DECAYS:
        step = tl.fma(score, tl.zeros_like(score) + weight_decay, step)
    if MOVES:
        at_buffer = floats(buffers, layer) + start + lane
        step = tl.load(at_buffer, mask=exists, other=0.0) * momentum + step
        tl.store(at_buffer, step, mask=exists)
    tl.store(at_score, tl.fma(step, tl.zeros_like(score) - tl.load(learning_rate), score), mask=exists)
