"""A part of a set of small images: one uint8 tensor on the device, augmented there."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from iterand.data.dataset import Batch, Random
from iterand.data.normalization import Normalizer
from iterand.data.resampling import Resampler
from iterand.data.views import crops, outside_holes, resized_crops, words_of

PADDING = 4
"""Black pixels around an image before it is cropped."""

_AT_A_TIME = 1024  # images augmented together on a GPU, where launching the work costs more than the work


class ImageSplit:
    """Square images [examples, channel, side, side]; ``augmentation`` is none, crop, crop_cutout or resized_crop."""

    def __init__(self, images: Tensor, labels: Tensor, normalize: Normalizer, augmentation: str) -> None:
        self.images = images
        self.labels = labels
        self._normalize = normalize
        self._augmentation = augmentation
        self._side: int = images.shape[-1]
        self._resample = None if augmentation == "none" else Resampler(self._side, PADDING, images.device)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """What a network gets of each image."""
        return tuple(self.images.shape[1:])

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, order: Tensor, size: int, random: Random | None = None) -> Iterator[Batch]:
        """Batches of normalised float32 images; nothing in here waits for the device but the copy of ``order``."""
        order = order.to(self.labels.device)
        words = None if random is None or self._resample is None else words_of(order, random)
        views = None if words is None else self._views(words)
        together = size * math.ceil(_AT_A_TIME / size) if order.is_cuda else size
        for start in range(0, len(order), together):
            index = order[start : start + together]
            pixels = self.images[index]
            if self._resample is not None and views is not None:
                pixels = self._resample(pixels, views[start : start + together])
            images = self._normalize(pixels)
            if words is not None and self._augmentation == "crop_cutout":
                images *= outside_holes(words[start : start + together], self._side)
            for image, label in zip(torch.split(images, size), torch.split(self.labels[index], size)):
                yield Batch((image,), label)

    def _views(self, words: Tensor) -> Tensor:
        """The views of all examples of the order, drawn at once."""
        framed = self._side + 2 * PADDING
        if self._augmentation == "resized_crop":
            return resized_crops(words, framed, framed)
        return crops(words, framed, framed, self._side)
