"""CalculateMask (Section 2): which weights are kept, as an exact cut through the scores.

The mask that keeps the top of n scores is described by two numbers, a threshold t and the last index c that still gets
in where scores are equal:

    m_i = 1  if  s_i > t  or  (s_i = t and i ≤ c)

so the number of kept weights is exact whatever the ties: the lower index wins.
"""

import importlib.util
import inspect
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from iterand.checks import check_fraction

HAS_TRITON = importlib.util.find_spec("triton") is not None
"""Whether there is Triton, which the kernels are written in; it comes with torch for CUDA."""


# The operator keeps tables on the device, which inductor's own CUDA graphs would put where they reuse memory.
_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)
_TAKES_TAGS = "tags" in inspect.signature(torch.library.custom_op).parameters
_NOT_RECORDED: dict[str, Any] = {"tags": (_TAG,)} if _TAG is not None and _TAKES_TAGS else {}


class Cut(NamedTuple):
    """A mask in two numbers (0-dimensional tensors, so that finding one never waits for a device)."""

    threshold: Tensor
    last: Tensor


def kept_count(count: int, sparsity: float) -> int:
    """How many of ``count`` weights are kept at this sparsity p: exactly n − round(p·n)."""
    return count - round(sparsity * count)


def check_sparsity(sparsity: float, what: str = "sparsity") -> float:
    """The sparsity itself, if it is one."""
    return check_fraction(what, sparsity, "the share of weights pruned")


def nan_error(name: str) -> ValueError:
    """What to say of scores that cannot be ranked."""
    return ValueError(f"the scores of {name!r} contain NaN, so they cannot be ranked; lower the learning rate")


@torch.library.custom_op("iterand::cut", mutates_args=())
def _cut(scores: Tensor, kept: Tensor, name: str) -> tuple[Tensor, Tensor]:
    # An operator of its own, so that torch.compile takes it as it is.
    if scores.device.type == "cpu":
        return _cut_by_partition(scores, int(kept), name)
    return _cut_by_sort(scores, kept)


@_cut.register_fake
def _(scores: Tensor, kept: Tensor, name: str) -> tuple[Tensor, Tensor]:
    return scores.new_empty(()), kept.new_empty(())


def _highest(scores: Tensor) -> float:
    return math.inf if scores.dtype.is_floating_point else torch.iinfo(scores.dtype).max


def _cut_by_partition(scores: Tensor, kept: int, name: str) -> tuple[Tensor, Tensor]:
    values = scores.numpy()
    highest = np.partition(values, values.size - kept)[values.size - kept :] if kept else values
    if scores.dtype.is_floating_point and np.isnan(highest.max(initial=0)):  # NumPy sorts NaN to the end
        raise nan_error(name)
    if kept == 0:
        return torch.tensor(_highest(scores), dtype=scores.dtype), torch.tensor(-1)
    threshold = highest[0]
    tied = np.flatnonzero(values == threshold)
    return torch.tensor(threshold), torch.tensor(tied[np.count_nonzero(highest == threshold) - 1])


def _cut_by_sort(scores: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
    # No wait for the device here, so NaN cannot raise: it becomes the threshold, and from there every weight's value.
    values, order = torch.sort(scores, descending=True, stable=True)
    position = (kept - 1).clamp(min=0).reshape(1)
    threshold, last = values[position].squeeze(0), order[position].squeeze(0)
    threshold = torch.where(kept > 0, threshold, _highest(scores))
    return torch.where(values[0].isnan(), values[0], threshold), torch.where(kept > 0, last, -1)


def cut(scores: Tensor, kept: Tensor, name: str = "scores") -> Cut:
    """The cut that keeps ``kept`` (a whole number in a tensor) of the scores of one layer."""
    return Cut(*_cut(scores.detach().reshape(-1), kept, name))


def cut_layers(
    scores: Sequence[Tensor],
    kept: Sequence[Tensor],
    names: Sequence[str],
    *,
    together: bool = False,
    floors: Sequence[int] = (),
    rank_by: str = "score",
) -> list[Cut]:
    """The cuts of several layers: each ranked by itself, or all ``together`` with their floors."""
    scores = [score.detach() for score in scores]
    if scores and on_device(scores):
        found = _cut_on_device(scores, kept, list(floors), together, rank_by == "magnitude")
        return [Cut(*numbers) for numbers in zip(found[0].unbind(), found[1].unbind())]
    ranked = [ranking_key(score, rank_by) for score in scores]
    if together:
        return cut_together(ranked, torch.stack(list(kept)).sum(), floors, names)
    return [cut(score, count, name) for score, count, name in zip(ranked, kept, names)]


def on_device(scores: Sequence[Tensor]) -> bool:
    """Whether ``iterand.backend.triton`` can rank these: float32 on a GPU, without gaps in memory."""
    if not (scores[0].is_cuda and HAS_TRITON):
        return False
    from iterand.backend.triton import cuts  # only where there is Triton

    return cuts.supported(scores) and (torch.compiler.is_compiling() or cuts.working(scores[0].device))


@torch.library.custom_op("iterand::cut_on_device", mutates_args=(), **_NOT_RECORDED)
def _cut_on_device(
    scores: Sequence[Tensor], kept: Sequence[Tensor], floors: Sequence[int], together: bool, magnitude: bool
) -> tuple[Tensor, Tensor]:
    from iterand.backend.triton import cuts

    found = cuts.selection(scores, kept, together=together, floors=floors, magnitude=magnitude)
    found.find()
    return found.thresholds.clone(), found.lasts.clone()


@_cut_on_device.register_fake
def _(
    scores: Sequence[Tensor], kept: Sequence[Tensor], floors: Sequence[int], together: bool, magnitude: bool
) -> tuple[Tensor, Tensor]:
    return scores[0].new_empty(len(scores)), kept[0].new_empty(len(scores))


def cut_together(scores: Sequence[Tensor], kept: Tensor, floors: Sequence[int], names: Sequence[str]) -> list[Cut]:
    """The cuts of several layers ranked as one: ``kept`` of all their scores, and of each layer at least its floor.

    A layer's floor is met by its own highest scores; the rest of the budget goes to the highest scores of the network.
    Either way a layer keeps its own top, so what comes out is again one cut a layer.
    """
    sizes = [score.numel() for score in scores]
    offsets = [sum(sizes[:i]) for i in range(len(sizes))]
    own = [_cut_floor(score.detach(), floor, name) for score, floor, name in zip(scores, floors, names)]
    keys = [_ordered(score.detach()).masked_fill(keeps(score, floor), _FIRST) for score, floor in zip(scores, own)]
    key, last = cut(torch.cat([key.reshape(-1) for key in keys]), kept, "the network")
    threshold = torch.where(key >= _FIRST, math.inf, _unordered(key))
    threshold = torch.where(torch.stack([floor.threshold for floor in own]).isnan().any(), math.nan, threshold)
    cuts = []
    for offset, floor in zip(offsets, own):
        local = torch.where(key >= _FIRST, -1, last - offset)
        wider = (floor.threshold < threshold) | ((floor.threshold == threshold) & (floor.last > local))
        cuts.append(Cut(torch.where(wider, floor.threshold, threshold), torch.where(wider, floor.last, local)))
    return cuts


def _cut_floor(scores: Tensor, floor: int, name: str) -> Cut:
    kept = torch.full((), floor, device=scores.device)  # a launch, not a copy that would wait
    if floor or scores.device.type == "cpu":
        return cut(scores, kept, name)
    return Cut(torch.where(scores.isnan().any(), math.nan, math.inf), kept - 1)


_FIRST = 1 << 40  # ranks before the key of any score


def _ordered(scores: Tensor) -> Tensor:
    """Whole numbers in the order of float32 scores; the two zeros are one."""
    bits = (scores.float() + 0.0).view(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(torch.int64)


def _unordered(key: Tensor) -> Tensor:
    """The score of a key."""
    bits = key.to(torch.int32)
    return torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).view(torch.float32)


def keeps(scores: Tensor, cut: Cut) -> Tensor:
    """The mask m of a cut: true where the weight is kept."""
    kind = torch.int32 if scores.numel() < 1 << 31 else torch.int64
    index = torch.arange(scores.numel(), dtype=kind, device=scores.device).view(scores.shape)
    return (scores > cut.threshold) | ((scores == cut.threshold) & (index <= cut.last))


def mask_of(scores: Tensor, cut: Cut) -> Tensor:
    """The same where no gradient is needed: on a CPU equal scores are compared by where they lie, without indices."""
    if scores.device.type != "cpu":
        return keeps(scores, cut)
    values, threshold, following = scores.reshape(-1).numpy(), cut.threshold.numpy(), int(cut.last) + 1
    mask = np.empty(values.shape, dtype=np.bool_)
    np.greater_equal(values[:following], threshold, out=mask[:following])
    np.greater(values[following:], threshold, out=mask[following:])
    return torch.from_numpy(mask).view(scores.shape)


def calculate_mask(scores: Tensor, sparsity: float, *, rank_by: str = "score") -> Tensor:
    """CalculateMask(s): true for the top 100(1 − p) % of the scores.

    ``rank_by="magnitude"`` ranks |s| instead (Ramanujan et al.).
    """
    ranked = ranking_key(scores.detach(), rank_by)
    ranked = ranked if ranked.dtype in (torch.float32, torch.float64) else ranked.float()
    if ranked.isnan().any():
        raise nan_error("scores")
    kept = torch.tensor(kept_count(scores.numel(), check_sparsity(sparsity)), device=scores.device)
    return mask_of(ranked, cut(ranked, kept))


RANK_BY = ("score", "magnitude")


def ranking_key(scores: Tensor, rank_by: str) -> Tensor:
    """What is ranked: the raw scores (the paper), or their magnitude."""
    if rank_by not in RANK_BY:
        raise ValueError(f"rank_by is {rank_by!r}; it must be one of {', '.join(RANK_BY)}")
    return scores.abs() if rank_by == "magnitude" else scores
