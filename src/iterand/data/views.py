"""How an example is looked at: random words to the box that is cut out of its image, and whether it is mirrored.

A view is one row (top, left, height, width, flip) of an int64 tensor. All of it is integer arithmetic, or float64
arithmetic that IEEE 754 rounds in one way only, so that a seed gives the same views on every device.
"""

import functools
import math

import torch
from torch import Tensor

from iterand.data.boxes import ATTEMPTS, SIXTEEN, largest, stretches
from iterand.data.dataset import Random


def words_of(index: Tensor, random: Random) -> Tensor:
    """The random words of each example that a view may need, [examples, words].

    Word 0 decides the flip, word 1 the top and word 2 the left edge of the box, word 3 the place of a hole,
    word 4 + k the shape of attempt k.
    """
    blocks = torch.arange(1 + math.ceil(ATTEMPTS / 4), device=index.device) << 32
    words = random((index[:, None] + blocks).flatten())
    return torch.stack(tuple(words), dim=1).view(len(index), 4 * len(blocks))


def crops(words: Tensor, height: int, width: int, size: int) -> Tensor:
    """Views of ``size``² anywhere in images of this height and width, mirrored or not."""
    extent = torch.full_like(words[:, 0], size)
    return _placed(words, height, width, extent, extent)


def resized_crops(words: Tensor, height: int, width: int) -> Tensor:
    """Views of 8-100 % of the area with an aspect (width to height) of 3/4-4/3, mirrored or not.

    The area is uniform and so is the logarithm of the aspect, each by 16 bits of the attempt's word; the first attempt
    that fits into the image counts.
    """
    attempts = words[:, 4 : 4 + ATTEMPTS]
    # 8 % + 92 % · (a + 1/2) / 2¹⁶ of the area, over the common denominator 200 · 2¹⁶.
    share = 16 * SIXTEEN + 92 * (2 * (attempts >> 16) + 1)
    side = (share * (height * width)).double().div(200 * SIXTEEN).sqrt()
    stretch = _stretches_on(words.device)[attempts & (SIXTEEN - 1)]
    widths = (side * stretch).round().long()
    heights = (side / stretch).round().long()
    fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
    first = fits.int().argmax(dim=1, keepdim=True)
    some = fits.any(dim=1)
    middle_height, middle_width = largest(height, width)
    box_height = torch.where(some, heights.gather(1, first).squeeze(1), middle_height)
    box_width = torch.where(some, widths.gather(1, first).squeeze(1), middle_width)
    placed = _placed(words, height, width, box_height, box_width)
    top = torch.where(some, placed[:, 0], (height - middle_height) // 2)
    left = torch.where(some, placed[:, 1], (width - middle_width) // 2)
    return torch.stack((top, left, *placed.unbind(1)[2:]), dim=1)


def outside_holes(words: Tensor, size: int) -> Tensor:
    """What is left of views of ``size``² without a square of half their side, [examples, 1, size, size] of booleans.

    Its centre may be any pixel (DeVries and Taylor 2017), so that up to three quarters of it lie outside.
    """
    pixels = torch.arange(size, device=words.device)
    inside = []
    for centre in ((words[:, 3] >> 16) * size >> 16, (words[:, 3] & (SIXTEEN - 1)) * size >> 16):
        start = centre[:, None] - size // 4
        inside.append((pixels >= start) & (pixels < start + size // 2))
    return ~(inside[0][:, None, :, None] & inside[1][:, None, None, :])


def _placed(words: Tensor, height: int, width: int, box_height: Tensor, box_width: Tensor) -> Tensor:
    """Boxes at a uniformly random place: word · places / 2³², rounded down."""
    top = words[:, 1] * (height - box_height + 1) >> 32
    left = words[:, 2] * (width - box_width + 1) >> 32
    return torch.stack((top, left, box_height, box_width, words[:, 0] >> 31), dim=1)


@functools.cache
def _stretches_on(device: torch.device) -> Tensor:
    return torch.tensor(stretches(), dtype=torch.float64, device=device)
