"""Who decodes: threads of this process, or worker processes where there is enough to do."""

import sys
from collections.abc import Generator, Iterable

import numpy as np

from iterand.data.decoding import SIZE, Decoded, DecodedBatch, Task, decode_part
from iterand.data.prefetch import prefetched
from iterand.data.processors import chosen_workers, processors

if sys.platform != "win32":
    from iterand.data.decoder_pool import running, shared_pool

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
