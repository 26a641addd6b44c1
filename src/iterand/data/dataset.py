"""What the training loop asks of data: parts with a length, and batches of them in a given order."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

Random = Callable[[Tensor], Sequence[Tensor]]
"""Four random 32-bit words (in int64) for each int64 index: the same for an index whatever batch it is in.

The words of example i are those of index i; who needs more takes those of i + k·2³², k = 1, 2, ...
"""


@dataclass(frozen=True)
class Batch:
    """What a network is called with, and what it should say; on the device."""

    inputs: tuple[Tensor, ...]
    labels: Tensor


class Split(Protocol):
    """One part of a data set."""

    def __len__(self) -> int: ...

    def batches(self, order: Tensor, size: int, random: Random | None = None) -> Iterator[Batch]:
        """Batches of ``size`` (the last may be smaller) of the examples ``order`` names, augmented if ``random``."""
        ...


Part = TypeVar("Part", bound=Split, covariant=True)


@dataclass(frozen=True)
class Dataset(Generic[Part]):
    """The parts of a data set; ``classes`` is how many labels there are."""

    train: Part
    validation: Part
    test: Part
    classes: int


@dataclass(frozen=True)
class TensorSplit:
    """A part that lives on the device as whole tensors."""

    inputs: Tensor
    labels: Tensor

    @property
    def image_shape(self) -> tuple[int, ...]:
        """What a network gets of each image."""
        return tuple(self.inputs.shape[1:])

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, order: Tensor, size: int, random: Random | None = None) -> Iterator[Batch]:
        """Batches by indexing; nothing is augmented."""
        for index in torch.split(order.to(self.labels.device), size):
            yield Batch((self.inputs[index],), self.labels[index])
