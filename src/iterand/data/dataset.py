"""A data set in memory: training, validation and test parts as whole tensors."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor


@dataclass(frozen=True)
class Split:
    """One part of a data set."""

    inputs: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Self:
        """The same part on a device."""
        return type(self)(self.inputs.to(device), self.labels.to(device))


@dataclass(frozen=True)
class Dataset:
    """The parts of a data set; ``classes`` is how many labels there are."""

    train: Split
    validation: Split
    test: Split
    classes: int

    def to(self, device: torch.device) -> Self:
        """The same data on a device."""
        return type(self)(self.train.to(device), self.validation.to(device), self.test.to(device), self.classes)
