"""Decoding one image file: for ImageNet a random resized crop or the centre crop; else a square of any size."""

import functools
import io
import math
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from iterand.errors import extra
from iterand.lab.data.reading import ByteRange, Content, read

if TYPE_CHECKING:
    from PIL.Image import Image

SIZE = 224
"""Height and width of a decoded image."""

GRAY = (124, 116, 104)
"""The mean colour of ImageNet, which replaces an image that cannot be decoded."""

_SHORT_SIDE = 256
_UP_TO_16_BITS = ("PNG", "PPM")  # formats without wider integers, whatever mode Pillow reads them in

Pixels = NDArray[np.uint8]
Words = NDArray[np.int64]


@dataclass(frozen=True)
class Task:
    """The images of a batch to decode; ``words`` [images, words] are their random words if they are to be augmented."""

    contents: Sequence[Content]
    words: Words | None

    def part(self, start: int, stop: int) -> "Task":
        """The images from ``start`` to ``stop``."""
        return Task(self.contents[start:stop], None if self.words is None else self.words[start:stop])


@dataclass(frozen=True)
class Decoded:
    """Pixels [SIZE, SIZE, 3]; ``problem`` says why they are gray if the file could not be decoded."""

    pixels: Pixels
    problem: str | None = None


def decode_part(task: Task, index: int) -> Decoded:
    """Read and decode one image of a task."""
    content = task.contents[index]
    found = read(content)
    if isinstance(content, ByteRange) and zlib.crc32(found) != content.checksum:
        return _gray("its bytes are not those that were packed")
    return decode(found, None if task.words is None else task.words[index].tolist())


def decode(content: bytes, words: Sequence[int] | None) -> Decoded:
    """Decode a file: the random resized crop that ``words`` determine, or the centre crop without them."""
    with extra("lab", "decoding images"):
        import PIL.Image
    try:
        with PIL.Image.open(io.BytesIO(content)) as file:
            image = as_rgb(file)
            image.load()
    except Exception as error:  # a damaged file can raise anything
        return _gray(str(error) or type(error).__name__)
    return Decoded(np.asarray(_centre_crop(image) if words is None else _resized_crop(image, words)))


def _gray(problem: str) -> Decoded:
    return Decoded(np.full((SIZE, SIZE, 3), GRAY, np.uint8), problem)


def _centre_crop(image: "Image") -> "Image":
    """Scale the short side to 256, then cut out the middle 224 × 224."""
    from PIL.Image import Resampling

    short = min(image.size)
    width, height = (_SHORT_SIDE * side // short for side in image.size)
    left, top = round((width - SIZE) / 2), round((height - SIZE) / 2)
    scaled = image.resize((width, height), Resampling.BILINEAR)
    return scaled.crop((left, top, left + SIZE, top + SIZE))


def _resized_crop(image: "Image", words: Sequence[int]) -> "Image":
    from PIL.Image import Resampling, Transpose

    top, left, height, width, flip = resized_crop(words, image.height, image.width)
    view = image.crop((left, top, left + width, top + height)).resize((SIZE, SIZE), Resampling.BILINEAR)
    return view.transpose(Transpose.FLIP_LEFT_RIGHT) if flip else view


def decode_square(content: bytes, size: int) -> Pixels:
    """Decode a file of any format, mode and orientation: resize the short side to ``size``, cut out the middle square.

    A ValueError says why a file cannot be decoded.
    """
    with extra("lab", "decoding images"):
        import PIL.Image
        import PIL.ImageOps
    try:
        with PIL.Image.open(io.BytesIO(content)) as file:
            file.draft(None, (2 * size, 2 * size))  # a large JPEG is decoded at a fraction of its size
            PIL.ImageOps.exif_transpose(file, in_place=True)
            image = as_rgb(file)
            image.load()
    except PIL.UnidentifiedImageError:
        raise ValueError("it is no image in a format that Pillow knows") from None
    except Exception as error:  # a damaged file can raise anything
        raise ValueError(str(error) or type(error).__name__) from None
    return np.asarray(PIL.ImageOps.fit(image, (size, size), PIL.Image.Resampling.BILINEAR))


def as_rgb(image: "Image") -> "Image":
    """Three channels of 8 bits: gray is repeated, transparency is dropped, 16 bits lose the lower 8."""
    import PIL.Image

    if image.mode == "F":
        raise ValueError("its pixels are floating-point numbers, whose range is unknown")
    if image.mode == "I" and image.format not in _UP_TO_16_BITS:
        raise ValueError("its pixels are signed or 32-bit integers, whose range is unknown")
    if image.mode.startswith("I"):  # gray with 16 bits
        image = PIL.Image.fromarray((np.asarray(image) >> 8).clip(0, 255).astype(np.uint8))
    elif image.mode == "P":
        image = image.convert("RGBA")  # a palette may have transparent colours
    return image if image.mode == "RGB" else image.convert("RGB")


ATTEMPTS = 10
"""How many boxes are drawn before the largest one in the middle is taken, if none of them fits into the image."""

TWO_16 = 1 << 16


def resized_crop(words: Sequence[int], height: int, width: int) -> list[int]:
    """Top, left, height, width and flip of the random resized crop of one image.

    The same as :func:`iterand.lab.data.images.resized_crops`, which takes a batch of images of one size. This is plain
    Python, because a tensor of one image takes a hundred times as long.
    """
    for word in words[4 : 4 + ATTEMPTS]:
        share = 16 * TWO_16 + 92 * (2 * (word >> 16) + 1)
        side = math.sqrt(share * (height * width) / (200 * TWO_16))
        stretch = stretches()[word & (TWO_16 - 1)]
        box_height, box_width = round(side / stretch), round(side * stretch)
        if 1 <= box_height <= height and 1 <= box_width <= width:
            top = words[1] * (height - box_height + 1) >> 32
            left = words[2] * (width - box_width + 1) >> 32
            break
    else:
        box_height, box_width = largest_box(height, width)
        top, left = (height - box_height) // 2, (width - box_width) // 2
    return [top, left, box_height, box_width, words[0] >> 31]


def largest_box(height: int, width: int) -> tuple[int, int]:
    """Height and width of the largest box with an aspect ratio from 3/4 to 4/3."""
    return min(height, round(width * 4 / 3)), min(width, round(height * 4 / 3))


@functools.cache
def stretches() -> tuple[float, ...]:
    """The square roots of all 2¹⁶ aspect ratios: a table, because devices differ in the last bit of exp."""
    logarithms = (((2 * step + 1) / TWO_16 - 1) * math.log(4 / 3) for step in range(TWO_16))
    return tuple(math.exp(logarithm / 2) for logarithm in logarithms)
