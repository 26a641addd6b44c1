"""Images on the device: crops, resized crops, flips and cutout, with the same pixels on every device."""

import functools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from iterand.lab.data.dataset import Batch, Normalizer, Random
from iterand.lab.data.decoding import ATTEMPTS, TWO_16, largest_box, stretches

PADDING = 4
"""Width of the black border around an image before it is cropped."""

_AT_A_TIME = 1024 * 32 * 32  # pixels that are augmented together on a GPU, where launching kernels costs the most
_LARGEST_TABLE = 40  # side of the largest images for which the weights of all boxes are kept
_ONE = 1 << 22  # the weights of pixels are multiples of 1 / _ONE


class ImageSplit:
    """Square images [examples, channel, side, side]; ``augmentation`` is none, crop, crop_cutout or resized_crop."""

    def __init__(self, images: Tensor, labels: Tensor, normalize: Normalizer, augmentation: str) -> None:
        self.images = images
        self.labels = labels
        self._normalize = normalize
        self._augmentation = augmentation
        self._side: int = images.shape[-1]
        self._resample = None if augmentation == "none" else _resampler(self._side, PADDING, images.device)

    @property
    def image_shape(self) -> tuple[int, ...]:
        """The shape of one image as a network gets it."""
        return tuple(self.images.shape[1:])

    def __len__(self) -> int:
        return len(self.labels)

    def batches(self, order: Tensor, size: int, random: Random | None = None) -> Iterator[Batch]:
        """Batches of normalized float32 images; only the copy of ``order`` synchronizes with the device."""
        order = order.to(self.labels.device)
        words = None if random is None or self._resample is None else words_of(order, random)
        views = None if words is None else self._views(words)
        together = size * math.ceil(_AT_A_TIME / (size * self._side**2)) if order.is_cuda else size
        for start in range(0, len(order), together):
            index = order[start : start + together]
            pixels = self.images[index]
            if self._resample is not None and views is not None:
                pixels = self._resample(pixels, views[start : start + together])
            images = self._normalize(pixels)
            if words is not None and self._augmentation == "crop_cutout":
                images *= cutout_masks(words[start : start + together], self._side)
            for image, label in zip(torch.split(images, size), torch.split(self.labels[index], size)):
                yield Batch((image,), label)

    def _views(self, words: Tensor) -> Tensor:
        """The views of all examples, drawn at once: rows of top, left, height, width and flip."""
        padded = self._side + 2 * PADDING
        if self._augmentation == "resized_crop":
            return resized_crops(words, padded, padded)
        return crops(words, padded, padded, self._side)


def words_of(index: Tensor, random: Random) -> Tensor:
    """All random words that augmentation may need, [examples, words].

    Word 0 decides the flip, words 1 and 2 the top and left edge of the box, word 3 the centre of the cutout, word 4 + k
    the shape of attempt k.
    """
    blocks = torch.arange(1 + math.ceil(ATTEMPTS / 4), device=index.device) << 32
    words = random((index[:, None] + blocks).flatten())
    return torch.stack(tuple(words), dim=1).view(len(index), 4 * len(blocks))


def crops(words: Tensor, height: int, width: int, size: int) -> Tensor:
    """Views of ``size``² at a random position in images of this height and width, randomly flipped."""
    extent = torch.full_like(words[:, 0], size)
    return _placed(words, height, width, extent, extent)


def resized_crops(words: Tensor, height: int, width: int) -> Tensor:
    """Views of 8-100 % of the area with an aspect ratio (width to height) of 3/4-4/3, randomly flipped.

    The area and the logarithm of the aspect ratio are uniform, each from 16 bits of the word of an attempt. The first
    attempt that fits into the image is used.
    """
    attempts = words[:, 4 : 4 + ATTEMPTS]
    # 8 % + 92 % · (a + 1/2) / 2¹⁶ of the area, over the common denominator 200 · 2¹⁶.
    share = 16 * TWO_16 + 92 * (2 * (attempts >> 16) + 1)
    side = (share * (height * width)).double().div(200 * TWO_16).sqrt()
    stretch = _stretches_on(words.device)[attempts & (TWO_16 - 1)]
    widths = (side * stretch).round().long()
    heights = (side / stretch).round().long()
    fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
    first = fits.int().argmax(dim=1, keepdim=True)
    some = fits.any(dim=1)
    middle_height, middle_width = largest_box(height, width)
    box_height = torch.where(some, heights.gather(1, first).squeeze(1), middle_height)
    box_width = torch.where(some, widths.gather(1, first).squeeze(1), middle_width)
    placed = _placed(words, height, width, box_height, box_width)
    top = torch.where(some, placed[:, 0], (height - middle_height) // 2)
    left = torch.where(some, placed[:, 1], (width - middle_width) // 2)
    return torch.stack((top, left, *placed.unbind(1)[2:]), dim=1)


def _placed(words: Tensor, height: int, width: int, box_height: Tensor, box_width: Tensor) -> Tensor:
    """Boxes at a uniformly random position: word · positions / 2³², rounded down."""
    top = words[:, 1] * (height - box_height + 1) >> 32
    left = words[:, 2] * (width - box_width + 1) >> 32
    return torch.stack((top, left, box_height, box_width, words[:, 0] >> 31), dim=1)


@functools.cache
def _stretches_on(device: torch.device) -> Tensor:
    return torch.tensor(stretches(), dtype=torch.float64, device=device)


def cutout_masks(words: Tensor, size: int) -> Tensor:
    """Cutout: False in a square of half the side, True elsewhere, [examples, 1, size, size].

    Its centre may be any pixel (DeVries and Taylor 2017), so that up to three quarters of it are outside the image.
    """
    pixels = torch.arange(size, device=words.device)
    inside = []
    for centre in ((words[:, 3] >> 16) * size >> 16, (words[:, 3] & (TWO_16 - 1)) * size >> 16):
        start = centre[:, None] - size // 4
        inside.append((pixels >= start) & (pixels < start + size // 2))
    return ~(inside[0][:, None, :, None] & inside[1][:, None, None, :])


class Resampler:
    """Crops of square images of ``side`` pixels with a black border of ``padding``, resized to the same side.

    A small image has few possible boxes, so a table holds the weights of all: [flip, start, extent, target, source].
    For larger images, the weights of each box are computed.
    """

    def __init__(self, side: int, padding: int, device: torch.device) -> None:
        self._side, self._padding = side, padding
        self._table: Tensor | None = None
        if side <= _LARGEST_TABLE:
            weights = box_weights(side, padding)
            self._table = torch.stack((weights, weights.flip(2))).to(device)

    def __call__(self, images: Tensor, views: Tensor) -> Tensor:
        """Cut ``views`` out of uint8 images [batch, channel, side, side]; gives integers from 0 to 255 in float32."""
        batch, channels, side, _ = images.shape
        top, left, height, width, flip = views.unbind(1)
        columns = self._weights(left, width, flip)
        rows = self._weights(top, height, torch.zeros_like(flip))
        pixels = images.reshape(batch, channels * side, side).double() @ columns.transpose(1, 2)
        pixels = _rounded(pixels).view(batch, channels, side, side).transpose(1, 2)
        pixels = _rounded(rows @ pixels.reshape(batch, side, channels * side))
        pixels = pixels.view(batch, side, channels, side).transpose(1, 2)
        return pixels.to(torch.float32, memory_format=torch.contiguous_format)

    def _weights(self, start: Tensor, extent: Tensor, flip: Tensor) -> Tensor:
        """The weights of one box per image along one axis, [batch, target, source]."""
        if self._table is not None:
            return self._table[flip, start, extent - 1]
        weights = _bilinear(start.view(-1, 1, 1), extent.view(-1, 1, 1), self._side, self._padding)
        return torch.where(flip.view(-1, 1, 1) > 0, weights.flip(1), weights)


@functools.lru_cache(maxsize=1)
def _resampler(side: int, padding: int, device: torch.device) -> Resampler:
    """The resampler that all splits of a data set share, since its table takes time and memory."""
    return Resampler(side, padding, device)


def box_weights(side: int, padding: int) -> Tensor:
    """The weights of bilinear resizing with antialiasing, for every box: [start, extent - 1, target, source]."""
    padded = side + 2 * padding
    start = torch.arange(padded).view(-1, 1, 1, 1)
    return _bilinear(start, torch.arange(1, padded + 1).view(-1, 1, 1), side, padding)


def _bilinear(start: Tensor, extent: Tensor, side: int, padding: int) -> Tensor:
    """The weights of boxes, [..., target, source]; ``start`` and ``extent`` are [..., 1, 1].

    The pixels of the border have weights too, which are left out because these pixels are black. Distances between the
    centres of pixels are in units of 1 / (2 · side), so that they are integers.
    """
    target = torch.arange(side, device=start.device).view(-1, 1)
    source = torch.arange(side + 2 * padding, device=start.device) - start
    distance = (2 * side * source + side - (2 * target + 1) * extent).abs()
    share = (2 * extent.clamp(min=side) - distance).clamp(min=0) * ((source >= 0) & (source < extent))
    total = share.sum(dim=-1, keepdim=True).clamp(min=1)
    weights = (share * (2 * _ONE) + total) // (2 * total)
    return weights[..., padding : padding + side].double() / _ONE


def _rounded(pixels: Tensor) -> Tensor:
    return pixels.add_(0.5).floor_()
