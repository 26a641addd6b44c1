"""Decoding batches of images in the background, by worker processes or by threads."""

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from iterand.errors import DataError
from iterand.lab.data.decoding import SIZE, Decoded, DecodedBatch, Task, decode_part

if sys.platform != "win32":
    from iterand.lab.data.decoder_pool import running, shared_pool

VARIABLE = "ITERAND_WORKERS"

_FEWEST = 500  # images for which worker processes are started; fewer are decoded by threads in the same time
_AHEAD = 2  # batches that are decoded in advance
_AHEAD_PER_WORKER = 8  # images that are decoded in advance, if that is more

Item = TypeVar("Item")
Result = TypeVar("Result")


def decoded(
    tasks: Iterable[Task], *, size: int, images: int, workers: int | None = None
) -> Generator[DecodedBatch, None, None]:
    """Decode each task, of at most ``size`` of these ``images``, in the background. Pixels do not depend on workers.

    ``workers`` is the number of processes, or 0 for threads; None chooses by the number of images. Windows always uses
    threads, because a process there cannot be given open files.
    """
    chosen = chosen_workers(workers)
    count = processors() if chosen is None else chosen
    ahead = max(_AHEAD, -(-_AHEAD_PER_WORKER * count // size))
    if sys.platform != "win32":
        by_processes = chosen != 0 and (chosen is not None or images >= _FEWEST or running(count))
        if by_processes:
            return shared_pool(count).decoded(tasks, size, ahead)
    return _decoded_by_threads(tasks, ahead)


def chosen_workers(given: int | None) -> int | None:
    """The given number of worker processes, else $ITERAND_WORKERS, else None."""
    text = os.environ.get(VARIABLE)
    if given is not None or not text:
        return given
    if not text.isascii() or not text.isdigit():
        raise DataError(f"${VARIABLE} is {text!r}; it is a number of worker processes, or 0 for threads")
    return int(text)


def processors() -> int:
    """How many processors this process may use: its share, if torchrun started several ranks on the machine."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, here // max(1, int(ranks))) if ranks.isdigit() else here


def prefetched(
    work: Callable[[Item], Result], groups: Iterable[Sequence[Item]], *, workers: int, ahead: int
) -> Iterator[list[Result]]:
    """The results of each group, in order, computed by threads; at most ``ahead`` groups are computed in advance.

    Reading and decoding release the interpreter lock most of the time. If the caller stops early or work fails, work
    that has not started is cancelled.
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


def _decoded_by_threads(tasks: Iterable[Task], ahead: int) -> Generator[DecodedBatch, None, None]:
    groups = ([(task, index) for index in range(len(task.contents))] for task in tasks)
    for results in prefetched(_decode, groups, workers=processors(), ahead=ahead):
        pixels = np.stack([result.pixels for result in results]) if results else np.empty((0, SIZE, SIZE, 3), np.uint8)
        yield pixels, {index: result.problem for index, result in enumerate(results) if result.problem}


def _decode(item: tuple[Task, int]) -> Decoded:
    return decode_part(*item)
