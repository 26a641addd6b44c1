"""How an example is looked at: random words to the box that is cut out of its image, and whether it is mirrored.

A view is one row (top, left, height, width, flip) of an int64 tensor. All of it is integer arithmetic, or float64
arithmetic that IEEE 754 rounds in one way only, so that a seed gives the same views on every device.
"""

import functools
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from iterand.data.dataset import Random

ATTEMPTS = 10
"""How often a box that does not fit is drawn again before the largest one in the middle is taken."""

_SIXTEEN = 1 << 16


def words_of(index: Tensor, random: Random) -> Tensor:
    """The random words of each example that a view may need, [examples, words].

    Word 0 decides the flip, word 1 the top and word 2 the left edge of the box, word 4 + k the shape of attempt k.
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
    share = 16 * _SIXTEEN + 92 * (2 * (attempts >> 16) + 1)
    side = (share * (height * width)).double().div(200 * _SIXTEEN).sqrt()
    stretch = _stretches_on(words.device)[attempts & (_SIXTEEN - 1)]
    widths = (side * stretch).round().long()
    heights = (side / stretch).round().long()
    fits = (widths >= 1) & (widths <= width) & (heights >= 1) & (heights <= height)
    first = fits.int().argmax(dim=1, keepdim=True)
    some = fits.any(dim=1)
    middle_height, middle_width = _largest(height, width)
    box_height = torch.where(some, heights.gather(1, first).squeeze(1), middle_height)
    box_width = torch.where(some, widths.gather(1, first).squeeze(1), middle_width)
    placed = _placed(words, height, width, box_height, box_width)
    top = torch.where(some, placed[:, 0], (height - middle_height) // 2)
    left = torch.where(some, placed[:, 1], (width - middle_width) // 2)
    return torch.stack((top, left, *placed.unbind(1)[2:]), dim=1)


def resized_crop(words: Sequence[int], height: int, width: int) -> list[int]:
    """The view of one example: what :func:`resized_crops` gives, in plain numbers.

    Where every image has its own size a tensor would hold one view only, and take a hundred times as long.
    """
    for word in words[4 : 4 + ATTEMPTS]:
        share = 16 * _SIXTEEN + 92 * (2 * (word >> 16) + 1)
        side = math.sqrt(share * (height * width) / (200 * _SIXTEEN))
        stretch = _stretches()[word & (_SIXTEEN - 1)]
        box_height, box_width = round(side / stretch), round(side * stretch)
        if 1 <= box_height <= height and 1 <= box_width <= width:
            top = words[1] * (height - box_height + 1) >> 32
            left = words[2] * (width - box_width + 1) >> 32
            break
    else:
        box_height, box_width = _largest(height, width)
        top, left = (height - box_height) // 2, (width - box_width) // 2
    return [top, left, box_height, box_width, words[0] >> 31]


def _placed(words: Tensor, height: int, width: int, box_height: Tensor, box_width: Tensor) -> Tensor:
    """Boxes at a uniformly random place: word · places / 2³², rounded down."""
    top = words[:, 1] * (height - box_height + 1) >> 32
    left = words[:, 2] * (width - box_width + 1) >> 32
    return torch.stack((top, left, box_height, box_width, words[:, 0] >> 31), dim=1)


def _largest(height: int, width: int) -> tuple[int, int]:
    """Height and width of the largest box with an aspect of 3/4-4/3."""
    return min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))


@functools.cache
def _stretches() -> tuple[float, ...]:
    """The square roots of all 2¹⁶ aspects; a table, since devices differ in the last bit of exp."""
    logarithms = (((2 * step + 1) / _SIXTEEN - 1) * math.log(4 / 3) for step in range(_SIXTEEN))
    return tuple(math.exp(logarithm / 2) for logarithm in logarithms)


@functools.cache
def _stretches_on(device: torch.device) -> Tensor:
    return torch.tensor(_stretches(), dtype=torch.float64, device=device)
