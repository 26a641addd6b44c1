"""The four operations of a search step in plain torch, on any device: the definition of what a backend computes.

`backend.triton` does the same for all layers of a model at once, to the bit.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

RankBy = Literal["score", "magnitude"]
RANK_BY: tuple[str, ...] = get_args(RankBy)


class Cut(NamedTuple):
    """A mask in two numbers: threshold t and last index c (0-dimensional tensors, so that no host sync is needed).

        m_i = 1  if  s_i > t  or  (s_i = t and i ≤ c)

    The number of kept weights is exact whatever the ties: among equal scores the lower index wins.
    """

    threshold: Tensor
    last: Tensor


# 1. Find the cuts: CalculateMask of Section 2.


def find_cuts(
    scores: Sequence[Tensor],
    kept: Sequence[Tensor],
    names: Sequence[str],
    *,
    together: bool = False,
    floors: Sequence[int] = (),
    rank_by: RankBy = "score",
) -> list[Cut]:
    """The cuts that keep the highest ``kept`` (0-dimensional tensors) scores of each layer.

    With ``together``, layers are ranked as one: the sum of ``kept`` over all layers, and of each layer at least its
    floor. ``names`` are for error messages.
    """
    ranked = [ranking_key(score.detach(), rank_by) for score in scores]
    if together:
        return cut_together(ranked, torch.stack(list(kept)).sum(), floors, names)
    return [cut(score, count, name) for score, count, name in zip(ranked, kept, names)]


def ranking_key(scores: Tensor, rank_by: str) -> Tensor:
    """What is ranked: the score s (the paper), or its magnitude |s| (Ramanujan et al.)."""
    if rank_by not in RANK_BY:
        raise ValueError(f"rank_by is {rank_by!r}; it must be one of {', '.join(RANK_BY)}")
    return scores.abs() if rank_by == "magnitude" else scores


def cut(scores: Tensor, kept: Tensor, name: str = "scores") -> Cut:
    """The cut that keeps the highest ``kept`` scores of one layer."""
    return Cut(*_cut(scores.detach().reshape(-1), kept, name))


def cut_together(scores: Sequence[Tensor], kept: Tensor, floors: Sequence[int], names: Sequence[str]) -> list[Cut]:
    """The cuts of several layers ranked as one: ``kept`` of all their scores, and of each layer at least its floor.

    A layer's floor is met by its own highest scores; the rest of the budget goes to the highest scores of the network.
    Either way a layer keeps its own top, so the result is again one cut per layer.
    """
    sizes = [score.numel() for score in scores]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    if scores[0].device.type == "cpu" and not any(floors) and all(map(holds_numbers, scores)):
        threshold, last = _cut_by_partition([score.detach().reshape(-1) for score in scores], int(kept), names)
        return [Cut(threshold, torch.where(kept > 0, last - offset, -1)) for offset in offsets]
    own = [_cut_floor(score.detach(), floor, name) for score, floor, name in zip(scores, floors, names)]
    keys = [ordered(score.detach()).masked_fill(keeps(score, floor), _FIRST) for score, floor in zip(scores, own)]
    key, last = cut(torch.cat([key.reshape(-1) for key in keys]), kept, "the network")
    threshold = torch.where(key >= _FIRST, math.inf, unordered(key))
    threshold = torch.where(torch.stack([floor.threshold for floor in own]).isnan().any(), math.nan, threshold)
    cuts = []
    for offset, floor in zip(offsets, own):
        local = torch.where(key >= _FIRST, -1, last - offset)
        wider = (floor.threshold < threshold) | ((floor.threshold == threshold) & (floor.last > local))
        cuts.append(Cut(torch.where(wider, floor.threshold, threshold), torch.where(wider, floor.last, local)))
    return cuts


def nan_error(name: str) -> ValueError:
    """The error for scores that cannot be ranked."""
    return ValueError(
        f"the scores of {name!r} contain NaN, so they cannot be ranked; an input or the loss was not finite, or the "
        "learning rate is too high"
    )


@torch.library.custom_op("iterand::cut", mutates_args=())
def _cut(scores: Tensor, kept: Tensor, name: str) -> tuple[Tensor, Tensor]:
    # A custom operator, so that torch.compile does not trace into it.
    if scores.device.type == "cpu":
        return _cut_by_partition([scores], int(kept), [name])
    return _cut_by_sort(scores, kept)


@_cut.register_fake
def _(scores: Tensor, kept: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return scores.new_empty(()), kept.new_empty(())


def _cut_by_partition(scores: Sequence[Tensor], kept: int, names: Sequence[str]) -> tuple[Tensor, Tensor]:
    """The cut of several tensors as one."""
    first = scores[0]
    values = first.numpy() if len(scores) == 1 else np.concatenate([score.numpy() for score in scores])
    highest = np.partition(values, values.size - kept)[values.size - kept :] if kept else values
    if first.dtype.is_floating_point and np.isnan(highest.max(initial=0)):  # NumPy sorts NaN to the end
        raise nan_error(next(name for name, score in zip(names, scores) if score.isnan().any()))
    if kept == 0:
        return torch.tensor(_highest(first), dtype=first.dtype), torch.tensor(-1)
    threshold = highest[0]
    tied = np.flatnonzero(values == threshold)
    return torch.tensor(threshold), torch.tensor(tied[np.count_nonzero(highest == threshold) - 1])


def _cut_by_sort(scores: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    # Without a host sync NaN cannot raise: it becomes the threshold, and from there the value of every weight.
    values, order = torch.sort(scores, descending=True, stable=True)
    position = (kept - 1).clamp(min=0).reshape(1)
    threshold, last = values[position].squeeze(0), order[position].squeeze(0)
    threshold = torch.where(kept > 0, threshold, _highest(scores))
    return torch.where(values[0].isnan(), values[0], threshold), torch.where(kept > 0, last, -1)


def _highest(scores: Tensor) -> float:
    return math.inf if scores.dtype.is_floating_point else torch.iinfo(scores.dtype).max


def _cut_floor(scores: Tensor, floor: int, name: str) -> Cut:
    kept = torch.full((), floor, device=scores.device)  # a kernel launch, not a copy from the host, which would sync
    if floor or scores.device.type == "cpu":
        return cut(scores, kept, name)
    return Cut(torch.where(scores.isnan().any(), math.nan, math.inf), kept - 1)


_FIRST = 1 << 40  # ranks before the key of any score


def ordered(scores: Tensor) -> Tensor:
    """Integers in the order of float32 scores; −0 and +0 are equal."""
    bits = (scores.float() + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)


def unordered(key: Tensor) -> Tensor:
    """The inverse of ``ordered``."""
    bits = key.to(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)


# 2. Apply the masks.


def keeps(scores: Tensor, cut: Cut) -> Tensor:
    """The mask m of a cut, for scores as they are ranked: true where the weight is kept."""
    kind = torch.int32 if scores.numel() < 1 << 31 else torch.int64
    index = torch.arange(scores.numel(), dtype=kind, device=scores.device).view(scores.shape)
    return (scores > cut.threshold) | ((scores == cut.threshold) & (index <= cut.last))


def mask_of(scores: Tensor, cut: Cut) -> Tensor:
    """``keeps`` outside of autograd: on a CPU equal scores are compared by position, without a tensor of indices."""
    if scores.device.type != "cpu":
        return keeps(scores, cut)
    values, threshold, following = scores.reshape(-1).numpy(), cut.threshold.numpy(), max(int(cut.last) + 1, 0)
    mask = np.empty(values.shape, dtype=np.bool_)
    np.greater_equal(values[:following], threshold, out=mask[:following])
    np.greater(values[following:], threshold, out=mask[following:])
    return torch.from_numpy(mask).view(scores.shape)


def count_kept(scores: Sequence[Tensor], cuts: Sequence[Cut]) -> int:
    """How many scores these cuts keep, on a CPU."""
    return sum(int(np.count_nonzero(mask_of(score, cut).numpy())) for score, cut in zip(scores, cuts))


def apply_mask(weight: Tensor, ranked: Tensor, cut: Cut) -> Tensor:
    """θ ⊙ m, in the memory format of θ.

    Pruned weights become +0 (a product would leave −0 for negative ones). A threshold that is NaN becomes the value of
    every pruned weight instead of leaving a silent network of zeros.
    """
    if weight.device.type == "cpu" and all(map(holds_numbers, (weight, ranked))):  # NaN raises where its cut is found
        mask = match_layout(mask_of(ranked.detach(), cut), weight)
        bits = bit_patterns(weight.detach()) & mask.view(torch.int8).neg()  # faster than where
        return bits.view(weight.dtype)
    zero = torch.where(cut.threshold.isnan(), cut.threshold, 0.0).to(weight.dtype)
    return torch.where(match_layout(keeps(ranked, cut), weight), weight, zero)


def bit_patterns(weight: Tensor) -> Tensor:
    """The bits of floating-point weights, as integers."""
    return weight.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.itemsize])


def holds_numbers(tensor: Tensor) -> bool:
    """Whether a tensor holds numbers that Python can look at: not traced, not batched by vmap, not fake."""
    return (
        type(tensor) in (Tensor, torch.nn.Parameter)
        and not torch.compiler.is_compiling()
        and not torch._C._are_functorch_transforms_active()
    )


def match_layout(value: Tensor, weight: Tensor) -> Tensor:
    """The value with the strides of the weights, such as channels_last: torch picks its algorithms by them."""
    strides = weight.stride()
    if value.stride() == strides:
        return value
    # As the axes lie in memory; of those with one stride, axes of length one come last, so that they keep it.
    order = sorted(range(weight.dim()), key=lambda axis: (-strides[axis], -weight.shape[axis]))
    back = [order.index(axis) for axis in range(weight.dim())]
    flat = value.permute(order).reshape(-1)  # a copy only if the value lies in another order
    return flat.view([weight.shape[axis] for axis in order]).permute(back)


# 3. Update the scores: Algorithm 2, with SGD.


def score_gradient(weight: Tensor, gradient: Tensor) -> Tensor:
    """The straight-through gradient of what is ranked (Algorithm 2, line 3), from that of the masked weights.

    ∂L/∂s = θ ⊙ ∂L/∂(θ ⊙ m)
    """
    return gradient.float() * weight.float()


def update_scores(
    score: Tensor,
    weight: Tensor,
    gradient: Tensor,
    buffer: Tensor,
    learning_rate: float,
    *,
    momentum: float,
    weight_decay: float,
    rank_by: RankBy = "score",
) -> tuple[Tensor, Tensor]:
    """One step of ``torch.optim.SGD`` on the scores; gives the new scores s and the new momentum buffer v.

    g = θ ⊙ ∂L/∂(θ ⊙ m)      (times sign(s) where |s| is ranked)
    v ← μ v + g + λ s
    s ← s − η v
    """
    step = score_gradient(weight, gradient)
    if rank_by == "magnitude":
        step = step * score.sign()
    buffer = momentum * buffer + step.add(score, alpha=weight_decay)
    return score.add(buffer, alpha=-learning_rate), buffer


# 4. Redraw: Section 3.


def redraw(
    weight: Tensor,
    draw: Tensor,
    score: Tensor,
    mask: Tensor,
    fresh: Tensor,
    coin: Tensor,
    number: int,
    *,
    negative: bool = False,
    follow: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Partial randomization, Eq. (3): redraw pruned weights whose coin b_r came up.

        θ ← m ⊙ θ + (1 − m) ⊙ ((1 − b_r) ⊙ θ + b_r ⊙ θ̃),   θ̃ ~ D_param

    Kept weights never change. ``draw`` records the round (``number``) in which each weight was last drawn, which is
    all that a ticket needs to know about it. ``negative`` redraws only weights whose score is below zero; ``follow``
    flips the sign of a score when its weight changes sign. Gives weights, draws and scores.
    """
    chosen = coin & ~mask
    if negative:
        chosen &= score < 0
    if follow:
        score = torch.where(chosen & ((fresh < 0) != (weight < 0)), -score, score)
    return torch.where(chosen, fresh, weight), torch.where(chosen, number, draw), score
