"""The cuts of a model's layers on the device, whatever their ranking; what was made ready once is used again."""

import functools
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from iterand.kernels.layers import is_dense, sent
from iterand.kernels.randomization import Origin, Redraw
from iterand.kernels.selection import Selection

_REMEMBERED = 64  # sets of layers


class FlooredSelection(Selection):
    """Tensors ranked as one, of which each keeps its floor in any case (``selection.cut_together``)."""

    def __init__(self, scores: Sequence[Tensor], kept: Sequence[Tensor], floors: Sequence[int], **options: Any) -> None:
        self._counts = sent(torch.tensor(floors), scores[0].device)
        self._own = Selection(scores, self._counts.unbind(), **options)
        super().__init__(scores, kept, together=True, before=self._own, **options)

    def find(self) -> None:
        """Find each tensor's floor, then the cut of all, and take the wider of both."""
        self._own.find()
        super().find()
        own, both = self._own, (self.thresholds, self.lasts)
        wider = (own.thresholds < both[0]) | ((own.thresholds == both[0]) & (own.lasts > both[1]))
        both[0].copy_(torch.where(wider, own.thresholds, both[0]))
        both[1].copy_(torch.where(wider, own.lasts, both[1]))


def supported(scores: Sequence[Tensor]) -> bool:
    """Whether kernels can rank these: float32 on one CUDA device, without gaps."""
    return all(
        score.is_cuda
        and score.device == scores[0].device
        and score.dtype == torch.float32
        and score.numel() > 0
        and is_dense(score)
        for score in scores
    )


@functools.cache
def working(device: torch.device) -> bool:
    """Whether kernels can be compiled for a device: Triton needs a C compiler, and a GPU that is not too old."""
    try:
        score, kept = torch.zeros(8, device=device), torch.ones((), dtype=torch.int64, device=device)
        Selection([score], [kept]).find()
    except Exception as error:  # whatever a compiler or a driver may raise
        reason = (str(error) or type(error).__name__).splitlines()[0]
        logging.getLogger("iterand").warning("without Triton's kernels, so slower than it could be: %s", reason)
        return False
    return True


def selection(
    scores: Sequence[Tensor],
    kept: Sequence[Tensor],
    *,
    together: bool = False,
    floors: Sequence[int] = (),
    magnitude: bool = False,
) -> Selection:
    """The selection over these tensors; for the same places in memory it is the same one."""

    def make() -> Selection:
        if together and any(floors):
            return FlooredSelection(scores, kept, floors, magnitude=magnitude)
        return Selection(scores, kept, together=together, magnitude=magnitude)

    key = (together, magnitude, tuple(floors) if together else (), *_places(scores), *_places(kept))
    return _remembered(key, make)


def redraw(
    selection: Selection,
    weights: Sequence[Tensor],
    draws: Sequence[Tensor],
    origins: Sequence[Origin],
    normal: Tensor,
) -> Redraw:
    """What redraws the weights that this selection prunes; for the same places in memory it is the same one."""
    key = (id(selection), *origins, *_places(weights), *_places(draws))
    return _remembered(key, lambda: Redraw(selection, weights, draws, origins, normal))


def forget() -> None:
    """Drop all that was made ready."""
    _known.clear()


Made = TypeVar("Made")
_known: OrderedDict[tuple[Any, ...], Any] = OrderedDict()


def _remembered(key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
    """What was made for this key before, or now; kernels read addresses, so the key must say all of them."""
    if key not in _known:
        _known[key] = make()
        while len(_known) > _REMEMBERED:
            _known.popitem(last=False)
    _known.move_to_end(key)
    made: Made = _known[key]
    return made


def _places(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    return [(tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride()) for tensor in tensors]
