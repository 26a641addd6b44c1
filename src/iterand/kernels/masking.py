"""θ ⊙ m for all layers in one pass, and the update of all scores in another."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from iterand.kernels.layers import BLOCK, EXACT, floats, launching_on, locate, pointers, sent
from iterand.kernels.ranking import kept_at
from iterand.kernels.selection import Selection


class MaskedWeights:
    """The masked weights of several layers, in the precision that the network computes in.

    All tensors of a layer lie in memory in the same order.
    """

    def __init__(self, selection: Selection, weights: Sequence[Tensor], masked: Sequence[Tensor]) -> None:
        self._selection = selection
        self._weights, self._masked = pointers(weights), pointers(masked)
        self._halves = halves(masked)

    def compute(self) -> None:
        """Multiply the weights by the masks of the cuts as they are."""
        found, layers = self._selection, self._selection.layers
        with launching_on(layers.device):
            _apply[(layers.blocks,)](
                layers.owner, layers.table, found.scores, self._weights, self._masked, self._halves, found.thresholds,
                found.lasts, BLOCK=BLOCK, MAGNITUDE=found.magnitude, **EXACT,
            )  # fmt: skip


class ScoreUpdate:
    """∂L/∂s = θ ⊙ ∂L/∂(θ ⊙ m), weight decay, momentum and step of SGD for all layers: one pass over memory.

    The operations and their rounding are those of ``torch.optim.SGD``. Gradients are as precise as ``masked``. With
    ``sizes``, one for each layer, they are first scaled to these, which takes another pass.
    """

    def __init__(
        self,
        selection: Selection,
        weights: Sequence[Tensor],
        momentum_buffers: Sequence[Tensor],
        masked: Sequence[Tensor],
        sizes: Sequence[float] = (),
    ) -> None:
        self._selection = selection
        self._weights, self._buffers = pointers(weights), pointers(momentum_buffers)
        self._halves = halves(masked)
        self._scales = bool(sizes)
        self._sizes = sent(torch.tensor(sizes, dtype=torch.float64), weights[0].device)
        self._squares = torch.zeros(len(weights), dtype=torch.float64, device=weights[0].device)

    def run(self, gradients: Tensor, learning_rate: Tensor, momentum: float, weight_decay: float) -> None:
        """Update the scores by the gradients of the masked weights, of which the addresses are given.

        The learning rate (float32) is on the device, so that a graph need not know it.
        """
        layers = self._selection.layers
        places = (
            layers.owner, layers.table, self._selection.scores, self._weights, gradients, self._halves, self._squares
        )  # fmt: skip
        options = {"BLOCK": BLOCK, "MAGNITUDE": self._selection.magnitude, **EXACT}
        with launching_on(layers.device):
            if self._scales:
                self._squares.zero_()
                _measure[(layers.blocks,)](*places, **options)
            _update[(layers.blocks,)](
                *places, self._buffers, learning_rate, momentum, weight_decay, self._sizes,
                DECAYS=weight_decay != 0, MOVES=momentum != 0, SCALES=self._scales, **options,
            )  # fmt: skip


def halves(tensors: Sequence[Tensor]) -> Tensor:
    """Which of these are bfloat16; the others are float32."""
    return sent(torch.tensor([tensor.dtype == torch.bfloat16 for tensor in tensors]).int(), tensors[0].device)


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
def _gradient(
    scores, weights, gradients, halves, layer, at, exists, MAGNITUDE: tl.constexpr
):  # fmt: skip
    """Scores at these places, and the gradient of what they are ranked by."""
    if tl.load(halves + layer) != 0:
        source = tl.load(gradients + layer).to(tl.pointer_type(tl.bfloat16))
        gradient = tl.load(source + at, mask=exists, other=0.0).to(tl.float32)
    else:
        gradient = tl.load(floats(gradients, layer) + at, mask=exists, other=0.0)
    score = tl.load(floats(scores, layer) + at, mask=exists, other=0.0)
    gradient = gradient * tl.load(floats(weights, layer) + at, mask=exists, other=0.0)
    if MAGNITUDE:  # what is ranked is |s|
        gradient = gradient * tl.where(score > 0, 1.0, tl.where(score < 0, -1.0, 0.0))
    return score, gradient


@triton.jit
def _measure(
    owner, table, scores, weights, gradients, halves, squares,
    BLOCK: tl.constexpr, MAGNITUDE: tl.constexpr,
):  # fmt: skip
    """Add up the squares of each layer's gradients, in float64: in any order they round to the same float32."""
    layer, start, left = locate(owner, table, tl.program_id(0), BLOCK)
    lane = tl.arange(0, BLOCK)
    _, gradient = _gradient(scores, weights, gradients, halves, layer, start + lane, lane < left, MAGNITUDE)
    gradient = gradient.to(tl.float64)
    tl.atomic_add(squares + layer, tl.sum(gradient * gradient, 0), sem="relaxed")


@triton.jit
def _update(
    owner, table, scores, weights, gradients, halves, squares,
    buffers, learning_rate, momentum, weight_decay, sizes,
    BLOCK: tl.constexpr, MAGNITUDE: tl.constexpr, DECAYS: tl.constexpr, MOVES: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    layer, start, left = locate(owner, table, tl.program_id(0), BLOCK)
    lane = tl.arange(0, BLOCK)
    exists = lane < left
    score, step = _gradient(scores, weights, gradients, halves, layer, start + lane, exists, MAGNITUDE)
    if SCALES:
        mean = tl.load(squares + layer) / tl.load(table + layer * 4).to(tl.float64)
        step = step * tl.where(mean > 0, tl.load(sizes + layer) / tl.sqrt(mean), 1.0).to(tl.float32)
    if DECAYS:
        step = tl.fma(score, tl.zeros_like(score) + weight_decay, step)
    if MOVES:
        at_buffer = floats(buffers, layer) + start + lane
        step = tl.load(at_buffer, mask=exists, other=0.0) * momentum + step
        tl.store(at_buffer, step, mask=exists)
    moved = tl.fma(step, tl.zeros_like(score) - tl.load(learning_rate), score)
    tl.store(floats(scores, layer) + start + lane, moved, mask=exists)
