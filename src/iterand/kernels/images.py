"""Images as kernels go through them: pixel by pixel, the channels of each side by side."""

import torch
from torch import Tensor

_LARGEST = 1 << 31  # places are numbers of 32 bits


def fits(elements: int) -> bool:
    """Whether kernels can count so many; what is more is left to torch."""
    return elements < _LARGEST


def extent(images: Tensor) -> tuple[int, int]:
    """How many pixels some images have in all, and how many channels."""
    shape = tuple(images.shape)
    if not fits(images.numel()):
        raise ValueError(f"images of shape {shape} have 2³¹ elements or more; lower the batch size")
    if not images.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(f"images of shape {shape} do not lie channels last")
    return images.numel() // max(1, shape[1]), shape[1]
