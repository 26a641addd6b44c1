"""The cuts of a model's layers on the device, whatever their ranking; what was made ready once is used again."""

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from iterand.kernels.layers import is_dense
from iterand.kernels.selection import Selection

_REMEMBERED = 32  # sets of layers


class FlooredSelection(Selection):
    """Tensors ranked as one, of which each keeps its floor in any case (``selection.cut_together``)."""

    def __init__(self, scores: Sequence[Tensor], kept: Sequence[Tensor], floors: Sequence[int], **options: Any) -> None:
        self._counts = torch.tensor(floors, dtype=torch.int64).to(scores[0].device)
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


_known: OrderedDict[tuple[Any, ...], Selection] = OrderedDict()


def supported(scores: Sequence[Tensor]) -> bool:
    """Whether kernels can rank these: float32 on one CUDA device, without gaps."""
    return all(
        score.is_cuda and score.dtype == torch.float32 and score.numel() and is_dense(score) for score in scores
    )  # fmt: skip


def selection(
    scores: Sequence[Tensor],
    kept: Sequence[Tensor],
    *,
    together: bool = False,
    floors: Sequence[int] = (),
    magnitude: bool = False,
) -> Selection:
    """The selection over these tensors; for the same places in memory it is the same one."""
    key = (
        together,
        magnitude,
        tuple(floors),
        *((score.data_ptr(), score.numel(), score.stride()) for score in scores),
        *(count.data_ptr() for count in kept),
    )
    found = _known.get(key)
    if found is None:
        if together and any(floors):
            found = FlooredSelection(scores, kept, floors, magnitude=magnitude)
        else:
            found = Selection(scores, kept, together=together, magnitude=magnitude)
        _known[key] = found
        while len(_known) > _REMEMBERED:
            _known.popitem(last=False)
    _known.move_to_end(key)
    return found
