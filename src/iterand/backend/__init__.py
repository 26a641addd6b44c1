"""The four operations of a search step, and the only place that chooses which backend does them.

    find_cuts      scores → a cut for each layer, which says what is kept    CalculateMask
    apply_masks    weights and cuts → masked weights θ ⊙ m
    update_scores  gradients of masked weights → scores                      Algorithm 2
    redraw         pruned weights → fresh ones                               Eq. (3)

`reference` defines them in plain torch; `triton` does them for all layers of a model in one launch each, on CUDA.
"""

import functools
import importlib.util
import inspect
import logging
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from iterand.backend import reference
from iterand.backend.reference import Cut, RankBy
from iterand.errors import first_line

if TYPE_CHECKING:
    from iterand.backend.triton.cuts import FindCuts

__all__ = ["Cut", "RankBy", "apply_masks", "find_cuts", "reference", "triton_problem", "uses_triton", "versions"]

logger = logging.getLogger("iterand")

_HAS_TRITON = importlib.util.find_spec("triton") is not None  # it comes with torch for CUDA


@functools.cache
def triton_problem(device: torch.device) -> str | None:
    """Why Triton's kernels cannot run on a device; none if they can."""
    if not _HAS_TRITON:
        return "Triton is not installed; pip install triton"
    from iterand.backend.triton.cuts import FindCuts  # only where there is Triton

    try:
        score, kept = torch.zeros(8, device=device), torch.ones((), dtype=torch.int64, device=device)
        FindCuts([score], [kept]).run()
    except Exception as error:  # whatever a compiler or a driver may raise: Triton needs a C compiler and a recent GPU
        logger.warning("without Triton's kernels, so slower than it could be: %s", first_line(error))
        return "Triton does not work here"
    return None


def uses_triton(scores: Sequence[Tensor], weights: Sequence[Tensor] = (), draws: Sequence[Tensor] = ()) -> bool:
    """Whether Triton's kernels work on these tensors: float32 on one CUDA device, without gaps in memory.

    Weights may lie in another order than scores; draws may not.
    """
    device = scores[0].device
    if device.type != "cuda" or not _HAS_TRITON:
        return False
    from iterand.backend.triton.layers import is_dense, same_order

    fit = all(
        tensor.device == device and tensor.dtype == torch.float32 and tensor.numel() > 0 and is_dense(tensor)
        for tensor in (*scores, *weights)
    ) and all(same_order(score, draw) for score, draw in zip(scores, draws))
    return fit and (torch.compiler.is_compiling() or triton_problem(device) is None)


def find_cuts(
    scores: Sequence[Tensor],
    kept: Sequence[Tensor],
    names: Sequence[str],
    *,
    together: bool = False,
    floors: Sequence[int] = (),
    rank_by: RankBy = "score",
) -> list[Cut]:
    """``reference.find_cuts`` by the backend that fits the tensors."""
    scores = [score.detach() for score in scores]
    if scores and uses_triton(scores):
        found = _find_cuts_by_triton(scores, kept, list(floors), together, rank_by == "magnitude")
        return [Cut(*numbers) for numbers in zip(found[0].unbind(), found[1].unbind())]
    return reference.find_cuts(scores, kept, names, together=together, floors=floors, rank_by=rank_by)


def apply_masks(cuts: "FindCuts", weights: Sequence[Tensor]) -> tuple[list[Cut], list[Tensor]]:
    """Find the cuts of tensors that `uses_triton`, and give them with the masked weights, all in a few launches."""
    from iterand.backend.triton import masks

    cuts.run()
    masked = masks.prepare(cuts, [weight.detach() for weight in weights]).masked_weights()
    return [Cut(*numbers) for numbers in zip(cuts.thresholds.clone().unbind(), cuts.lasts.clone().unbind())], masked


# The operator keeps tables on the device, which inductor's own CUDA graphs would put where they reuse memory.
_TAG = getattr(torch.Tag, "cudagraph_unsafe", None)
_TAKES_TAGS = "tags" in inspect.signature(torch.library.custom_op).parameters
_NOT_CAPTURED: dict[str, Any] = {"tags": (_TAG,)} if _TAG is not None and _TAKES_TAGS else {}


# torch 2.6 cannot infer a schema from collections.abc.Sequence.
_SCHEMA = "(Tensor[] scores, Tensor[] kept, int[] floors, bool together, bool magnitude) -> (Tensor, Tensor)"


@torch.library.custom_op("iterand::find_cuts_by_triton", mutates_args=(), schema=_SCHEMA, **_NOT_CAPTURED)
def _find_cuts_by_triton(
    scores: Sequence[Tensor], kept: Sequence[Tensor], floors: Sequence[int], together: bool, magnitude: bool
) -> tuple[Tensor, Tensor]:
    from iterand.backend.triton import cuts

    found = cuts.prepare(scores, kept, together=together, floors=floors, magnitude=magnitude)
    found.run()
    return found.thresholds.clone(), found.lasts.clone()


@_find_cuts_by_triton.register_fake
def _(
    scores: Sequence[Tensor], kept: Sequence[Tensor], floors: Sequence[int], together: bool, magnitude: bool
) -> tuple[Tensor, Tensor]:
    return scores[0].new_empty(len(scores)), kept[0].new_empty(len(scores))


def versions(tensors: Iterable[Tensor]) -> list[tuple[int, int]]:
    """Which tensor each is, and a counter that grows whenever it is written: cuts found under others are stale.

    torch counts its own writes; kernels count theirs with ``bump_version``. A write through ``.data`` goes unseen.
    """
    if torch.compiler.is_compiling():
        return []
    listed = [*tensors]
    try:
        return [(id(tensor), tensor._version) for tensor in listed]
    except RuntimeError:  # writes to inference tensors are not counted
        return [(id(tensor), 0 if tensor.is_inference() else tensor._version) for tensor in listed]
