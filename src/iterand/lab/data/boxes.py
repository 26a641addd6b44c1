"""The box that is cut out of one image, in plain numbers; :mod:`iterand.data.views` has the same for whole batches.

Workers that decode images need this file, and start ten times faster without torch: nothing here may import it."""

import functools
import math
from collections.abc import Sequence

ATTEMPTS = 10
"""How often a box that does not fit is drawn again before the largest one in the middle is taken."""

SIXTEEN = 1 << 16


def resized_crop(words: Sequence[int], height: int, width: int) -> list[int]:
    """The view of one example: what :func:`iterand.data.views.resized_crops` gives, in plain numbers.

    Where every image has its own size a tensor would hold one view only, and take a hundred times as long.
    """
    for word in words[4 : 4 + ATTEMPTS]:
        share = 16 * SIXTEEN + 92 * (2 * (word >> 16) + 1)
        side = math.sqrt(share * (height * width) / (200 * SIXTEEN))
        stretch = stretches()[word & (SIXTEEN - 1)]
        box_height, box_width = round(side / stretch), round(side * stretch)
        if 1 <= box_height <= height and 1 <= box_width <= width:
            top = words[1] * (height - box_height + 1) >> 32
            left = words[2] * (width - box_width + 1) >> 32
            break
    else:
        box_height, box_width = largest(height, width)
        top, left = (height - box_height) // 2, (width - box_width) // 2
    return [top, left, box_height, box_width, words[0] >> 31]


def largest(height: int, width: int) -> tuple[int, int]:
    """Height and width of the largest box with an aspect of 3/4-4/3."""
    return min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))


@functools.cache
def stretches() -> tuple[float, ...]:
    """The square roots of all 2¹⁶ aspects; a table, since devices differ in the last bit of exp."""
    logarithms = (((2 * step + 1) / SIXTEEN - 1) * math.log(4 / 3) for step in range(SIXTEEN))
    return tuple(math.exp(logarithm / 2) for logarithm in logarithms)
