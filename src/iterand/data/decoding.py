"""From the bytes of image files to pixels of one size."""

import io
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from iterand.data.boxes import resized_crop
from iterand.data.contents import Content, Stretch, read
from iterand.errors import extra

if TYPE_CHECKING:
    from PIL.Image import Image

GRAY = (124, 116, 104)
"""The mean colour of ImageNet: what stands in for an image that cannot be decoded."""

SIZE = 224
_SHORT_SIDE = 256

Pixels = NDArray[np.uint8]
Words = NDArray[np.int64]

DecodedBatch = tuple[Pixels, dict[int, str]]
"""Pixels [images, SIZE, SIZE, 3], valid until the next batch is asked for, and what was wrong with some by place."""


@dataclass(frozen=True)
class Task:
    """Images to decode together, with the random words of each, [images, words], if they are to be augmented."""

    contents: Sequence[Content]
    words: Words | None

    def part(self, start: int, stop: int) -> "Task":
        """Some of the images."""
        return Task(self.contents[start:stop], None if self.words is None else self.words[start:stop])


@dataclass(frozen=True)
class Decoded:
    """Pixels [SIZE, SIZE, 3], and what was wrong if they are not those of the file."""

    pixels: Pixels
    problem: str | None = None


def decode(content: bytes, words: Sequence[int] | None) -> Decoded:
    """A random resized crop by the words of the example; without words the middle."""
    with extra("lab", "decoding images"):
        import PIL.Image
    try:
        with PIL.Image.open(io.BytesIO(content)) as file:
            image = file if file.mode == "RGB" else file.convert("RGB")
            image.load()
    except Exception as error:  # a damaged file can raise anything
        return _gray(str(error) or type(error).__name__)
    return Decoded(np.asarray(_middle(image) if words is None else _resized_crop(image, words)))


def decode_part(task: Task, index: int) -> Decoded:
    """Read and decode one image of a task."""
    content = task.contents[index]
    found = read(content)
    if isinstance(content, Stretch) and zlib.crc32(found) != content.checksum:
        return _gray("its bytes are not those that were packed")
    return decode(found, None if task.words is None else task.words[index].tolist())


def _gray(problem: str) -> Decoded:
    return Decoded(np.full((SIZE, SIZE, 3), GRAY, np.uint8), problem)


def _resized_crop(image: "Image", words: Sequence[int]) -> "Image":
    from PIL.Image import Resampling, Transpose

    top, left, height, width, flip = resized_crop(words, image.height, image.width)
    view = image.crop((left, top, left + width, top + height)).resize((SIZE, SIZE), Resampling.BILINEAR)
    return view.transpose(Transpose.FLIP_LEFT_RIGHT) if flip else view


def _middle(image: "Image") -> "Image":
    """The short side scaled to 256, then the middle 224 × 224."""
    from PIL.Image import Resampling

    short = min(image.size)
    width, height = (_SHORT_SIDE * side // short for side in image.size)
    left, top = round((width - SIZE) / 2), round((height - SIZE) / 2)
    scaled = image.resize((width, height), Resampling.BILINEAR)
    return scaled.crop((left, top, left + SIZE, top + SIZE))
