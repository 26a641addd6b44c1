"""Decoding image files, in threads or processes."""

import io
import os
import sys
import zlib
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from numpy.typing import NDArray

from iterand.errors import DataError, extra
from iterand.lab.data.boxes import resized_crop
from iterand.lab.data.reading import Content, Stretch, read

Item = TypeVar("Item")
Result = TypeVar("Result")


def prefetched(
    work: Callable[[Item], Result], groups: Iterable[Sequence[Item]], *, workers: int, ahead: int
) -> Iterator[list[Result]]:
    """The results of each group, in order; at most ``ahead`` groups are begun before they are asked for.

    Threads, since what they are for (reading and decoding) mostly leaves the interpreter alone. If the reader stops
    early or work fails, what has not begun is dropped.
    """
    waiting: deque[list[Future[Result]]] = deque()
    pool = ThreadPoolExecutor(workers, thread_name_prefix="iterand-data")
    try:
        for group in groups:
            waiting.append([pool.submit(work, item) for item in group])
            if len(waiting) > ahead:
                yield [future.result() for future in waiting.popleft()]
        while waiting:
            yield [future.result() for future in waiting.popleft()]
    finally:
        pool.shutdown(cancel_futures=True)


VARIABLE = "ITERAND_WORKERS"


def chosen_workers(given: int | None) -> int | None:
    """The given number of worker processes, else $ITERAND_WORKERS; none if neither says one."""
    text = os.environ.get(VARIABLE)
    if given is not None or not text:
        return given
    if not text.isascii() or not text.isdigit():
        raise DataError(f"${VARIABLE} is {text!r}; it is a number of worker processes, or 0 for threads")
    return int(text)


def processors() -> int:
    """How many processors this process may use; those of a machine are shared by the ranks torchrun starts on it."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, here // max(1, int(ranks))) if ranks.isdigit() else here


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


if sys.platform != "win32":
    from iterand.lab.data.decoder_pool import running, shared_pool

_WORTH = 500  # images: fewer are decoded by threads in the time it takes to start processes
_AHEAD = 2  # batches decoded before they are asked for
_AHEAD_EACH = 8  # and as many images for each worker


def decoded(
    tasks: Iterable[Task], *, size: int, images: int, workers: int | None = None
) -> Generator[DecodedBatch, None, None]:
    """Each task, of at most ``size`` of these ``images``, decoded in the background; who does it changes no pixel.

    ``workers`` processes do it, or with 0 the threads of this one; None chooses by how much there is to do. On Windows,
    where a process cannot be given open files, threads do it in any case.
    """
    chosen = chosen_workers(workers)
    count = processors() if chosen is None else chosen
    ahead = max(_AHEAD, -(-_AHEAD_EACH * count // size))
    if sys.platform != "win32":
        by_processes = chosen != 0 and (chosen is not None or images >= _WORTH or running(count))
        if by_processes:
            return shared_pool(count).decoded(tasks, size, ahead)
    return _by_threads(tasks, ahead)


def _by_threads(tasks: Iterable[Task], ahead: int) -> Generator[DecodedBatch, None, None]:
    groups = ([(task, index) for index in range(len(task.contents))] for task in tasks)
    for results in prefetched(_decode, groups, workers=processors(), ahead=ahead):
        pixels = np.stack([result.pixels for result in results]) if results else np.empty((0, SIZE, SIZE, 3), np.uint8)
        yield pixels, {index: result.problem for index, result in enumerate(results) if result.problem}


def _decode(item: tuple[Task, int]) -> Decoded:
    return decode_part(*item)
