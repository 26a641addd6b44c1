"""Data sets, their splits and batches; normalization, options, and where the files of a data set are."""

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

VARIABLE = "ITERAND_DATA"

Progress = Callable[[int, int], None]
"""Called with the number of images or files that are done, and the total."""

Random = Callable[[Tensor], Sequence[Tensor]]
"""Four random 32-bit words (in int64) for each int64 index: the same for an index whatever batch it is in.

The words of example i are those of index i; further words of it are those of i + k·2³², k = 1, 2, ...
"""


@dataclass(frozen=True)
class Batch:
    """The inputs of a network and the labels it should predict, on the device."""

    inputs: tuple[Tensor, ...]
    labels: Tensor


class Split(Protocol):
    """The training, validation or test part of a data set."""

    def __len__(self) -> int: ...

    def batches(self, order: Tensor, size: int, random: Random | None = None) -> Iterator[Batch]:
        """Batches of ``size`` (the last may be smaller) of the examples in ``order``; ``random`` augments them."""
        ...


Part = TypeVar("Part", bound=Split, covariant=True)


@dataclass(frozen=True)
class Dataset(Generic[Part]):
    """The three splits of a data set; ``classes`` is the number of labels."""

    train: Part
    validation: Part
    test: Part
    classes: int


@dataclass(frozen=True)
class TensorSplit:
    """A split that is two tensors on the device."""

    inputs: Tensor
    labels: Tensor

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of one image as a network gets it."""
        return tuple(self.inputs.shape[1:])

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, order: Tensor, size: int, random: Random | None = None) -> Iterator[Batch]:
        """Batches by indexing, without augmentation."""
        for index in torch.split(order.to(self.labels.device), size):
            yield Batch((self.inputs[index],), self.labels[index])


def fixed_order(count: int) -> Tensor:
    """A random order of ``range(count)`` that never changes.

    It sorts raw words of PCG64: NumPy guarantees those, but may change its permutations.
    """
    words = np.random.PCG64(0).random_raw(count)
    return torch.from_numpy(np.argsort(words, kind="stable"))


def limited(order: Tensor, limit: int | None) -> Tensor:
    """At most ``limit`` of these, evenly spaced, so that each class of a sorted split keeps its share."""
    if limit is None or limit >= len(order):
        return order
    return order[torch.arange(limit) * len(order) // limit]


Statistics = tuple[tuple[float, float, float], tuple[float, float, float]]

_IMAGENET: Statistics = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STATISTICS: dict[str, Statistics] = {  # mean and standard deviation of each channel, for pixels from 0 to 1
    "default": _IMAGENET,
    "imagenet": _IMAGENET,
    "cifar10": ((0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)),
}


class Normalizer:
    """Normalizes images by the channel statistics of a data set, which are kept on the device."""

    def __init__(self, name: str, device: torch.device) -> None:
        mean, deviation = torch.tensor(STATISTICS[name], dtype=torch.float64).mul(255).float().to(device)
        self.mean: Tensor = mean.view(-1, 1, 1)
        self.deviation: Tensor = deviation.view(-1, 1, 1)

    def __call__(self, pixels: Tensor) -> Tensor:
        """Normalize pixels [batch, channel, height, width] from 0 to 255 of any type, to float32."""
        return pixels.float().sub(self.mean).div_(self.deviation)


AUGMENTATIONS = ("none", "crop", "crop_cutout", "resized_crop")
NORMALIZATIONS = tuple(STATISTICS)
SMALLEST_IMAGE, LARGEST_IMAGE = 8, 1024
"""Limits of the side to which images are resized."""


@dataclass(frozen=True)
class Options:
    """How training examples are augmented, how inputs are normalized, and how many examples of each split are used.

    ``train_limit`` is how many training examples are used, the other splits being whole.
    ``workers`` is the number of processes that decode images: 0 uses threads, None lets the loader choose.
    ``image_size`` is the side to which the images of ``image_folder`` are resized.
    """

    augmentation: str = "none"
    normalization: str = "default"
    limit: int | None = None
    workers: int | None = None
    image_size: int = 64
    train_limit: int | None = None

    def __post_init__(self) -> None:
        for key, what in {"limit": "examples of each part", "train_limit": "training examples"}.items():
            given = getattr(self, key)
            if given is not None and (type(given) is not int or given < 1):
                raise ValueError(f"{key} is {given!r}; it is how many {what} to use, at least 1")
        if self.workers is not None and (type(self.workers) is not int or self.workers < 0):
            raise ValueError(f"workers is {self.workers!r}; it is a number of processes, or 0 for threads")
        if type(self.image_size) is not int or not SMALLEST_IMAGE <= self.image_size <= LARGEST_IMAGE:
            raise ValueError(
                f"image_size is {self.image_size!r}; it is a whole number of pixels from {SMALLEST_IMAGE} to "
                f"{LARGEST_IMAGE}"
            )

    def check(self, name: str, augmentations: tuple[str, ...], normalizations: tuple[str, ...]) -> None:
        """Refuse an augmentation or normalization that the data set of this name does not have."""
        known = {"augmentation": augmentations, "normalization": normalizations}
        for key, choices in known.items():
            if getattr(self, key) not in choices:
                raise ValueError(f"{key} is {getattr(self, key)!r}; {name} knows {', '.join(choices)}")


@dataclass(frozen=True)
class Located:
    """Where a data set was found: the folder of all data sets, its own folder or file, and which layout that has."""

    root: Path
    path: Path
    layout: str


def data_folder(given: str | os.PathLike[str] | None = None) -> Path:
    """The folder of all data sets: the given one, else $ITERAND_DATA, else ``data`` in the working folder."""
    return Path(given if given is not None else os.environ.get(VARIABLE) or "data")


def find_layout(root: Path, name: str, layouts: dict[str, str]) -> Located | None:
    """The first of the paths (with their layouts) that exists in ``root`` or in its subfolder ``name``."""
    for folder in (root, root / name):
        for path, layout in layouts.items():
            if (folder / path).exists():
                return Located(root, folder / path, layout)
    return None
