"""Decoding batches of images in the background: worker processes of torch's DataLoader, or threads."""

import atexit
import gc
import multiprocessing
import os
import signal
import sys
import threading
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate

from iterand.checks import counted
from iterand.errors import DataError, IterandError
from iterand.lab.data.decoding import SIZE, Decoded, Pixels, Task, decode_part

VARIABLE = "ITERAND_WORKERS"

DecodedBatch = tuple[Pixels, dict[int, str]]
"""Pixels [images, SIZE, SIZE, 3], valid until the next batch, and why some are gray, by number in the batch."""

_FEWEST = 500  # images for which worker processes are started; fewer are decoded by threads in the same time
_AHEAD = 2  # batches that are decoded in advance
_DYING = 5.0  # seconds that the end of a worker may take
_START_METHOD = "fork" if sys.platform == "linux" else "spawn"

Item = TypeVar("Item")
Result = TypeVar("Result")


def decoded(
    tasks: Iterable[Task], *, size: int, images: int, workers: int | None = None
) -> Generator[DecodedBatch, None, None]:
    """Decode each task, of at most ``size`` of these ``images``, in the background. Pixels do not depend on workers.

    ``workers`` is the number of processes, or 0 for threads. None chooses by the number of images on Linux. On other
    systems it chooses threads: processes are spawned there, which runs the caller's script again unless it is guarded
    by ``if __name__ == "__main__"``.
    """
    chosen = chosen_workers(workers)
    count = processors() if chosen is None else chosen
    if chosen is None:
        by_processes = _START_METHOD == "fork" and (images >= _FEWEST or bool(_idle_pools(count)))
    else:
        by_processes = chosen > 0
    return _decoded_by_processes(tasks, size, count) if by_processes else _decoded_by_threads(tasks)


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


def _decoded_by_threads(tasks: Iterable[Task]) -> Generator[DecodedBatch, None, None]:
    groups = ([(task, index) for index in range(len(task.contents))] for task in tasks)
    for results in prefetched(_decode, groups, workers=processors(), ahead=_AHEAD):
        pixels = np.stack([result.pixels for result in results]) if results else np.empty((0, SIZE, SIZE, 3), np.uint8)
        yield pixels, {index: result.problem for index, result in enumerate(results) if result.problem}


def _decode(item: tuple[Task, int]) -> Decoded:
    return decode_part(*item)


_pools: dict[tuple[int, int], list["WorkerPool"]] = {}
_running: "weakref.WeakSet[Generator[DecodedBatch, None, None]]" = weakref.WeakSet()
_started: "weakref.WeakSet[WorkerPool]" = weakref.WeakSet()


def _idle_pools(workers: int) -> list["WorkerPool"]:
    """The pools of this process with so many workers that no reader uses; a forked process has none."""
    return _pools.setdefault((os.getpid(), workers), [])


def _decoded_by_processes(tasks: Iterable[Task], size: int, workers: int) -> Generator[DecodedBatch, None, None]:
    """A stream of batches from a pool that is used again afterwards, unless it failed or was interrupted."""

    def stream() -> Generator[DecodedBatch, None, None]:
        idle = _idle_pools(workers)
        pool = idle.pop() if idle else WorkerPool(workers)
        try:
            yield from pool.decoded(tasks, size)
        except GeneratorExit:
            idle.append(pool)
            raise
        idle.append(pool)

    batches = stream()
    _running.add(batches)
    return batches


@atexit.register
def close_pools() -> None:
    """End the workers of this process; not those of its parent, if it was forked."""
    for batches in list(_running):
        batches.close()
    for key in [key for key in _pools if key[0] == os.getpid()]:
        del _pools[key]
    for pool in _started:  # what is left belongs to readers that failed; Python would wait for it forever at exit
        if pool.owner == os.getpid():
            for process in pool.processes:
                process.kill()


class WorkerPool:
    """Worker processes that decode one stream of batches at a time: a DataLoader that keeps its workers."""

    def __init__(self, workers: int) -> None:
        self.processes: list[multiprocessing.process.BaseProcess] = []
        self.owner = os.getpid()
        _started.add(self)
        self._workers = workers
        self._sampler = _Pieces()
        with warnings.catch_warnings(action="ignore"):  # torch: more workers than processors
            self._loader = DataLoader(
                _Decoder(),
                batch_size=None,
                sampler=self._sampler,
                collate_fn=_unchanged,
                num_workers=workers,
                prefetch_factor=_AHEAD,
                persistent_workers=True,
                worker_init_fn=_prepare_worker,
                generator=torch.Generator(),  # so that no number is drawn from the global one
                multiprocessing_context=_START_METHOD,
            )

    def decoded(self, tasks: Iterable[Task], size: int) -> Generator[DecodedBatch, None, None]:
        """Decode each task, of at most ``size`` images; each is divided among all workers."""
        pieces: deque[int] = deque()  # of each batch that was handed out
        self._sampler.pieces = _divided(tasks, -(-size // self._workers), pieces)
        buffer = np.empty((size, SIZE, SIZE, 3), np.uint8)
        try:
            answers = self._start()
            while (first := next(answers, None)) is not None:
                yield _joined([first, *(next(answers) for _ in range(pieces.popleft() - 1))], buffer)
        except (RuntimeError, OSError, EOFError):
            # A worker that is dying closes its connections before it counts as dead.
            if not wait([process.sentinel for process in self.processes], timeout=_DYING):
                raise
            raise DataError(
                f"one of {self._workers} worker processes that decode images has died, perhaps for want of memory; "
                f"run the same command again to resume, and ${VARIABLE} sets how many there are"
            ) from None

    def _start(self) -> Iterator["_Answer"]:
        """Start to decode; the first time, start the workers."""
        if self.processes:
            return iter(self._loader)
        others = set(multiprocessing.active_children())
        try:
            with warnings.catch_warnings(action="ignore"), _unchanged_handler():  # Python: a fork with threads
                answers = iter(self._loader)
        except OSError as error:
            raise DataError(
                f"cannot start {counted(self._workers, 'worker')} to decode images: {error.strerror or error}"
            ) from None
        self.processes = [process for process in multiprocessing.active_children() if process not in others]
        return answers


@contextmanager
def _unchanged_handler() -> Iterator[None]:
    """Keep the handler of SIGCHLD: torch's raises an error anywhere in the program when a worker dies.

    Without it the error is raised where the next batch is needed.
    """
    if sys.platform != "win32" and threading.current_thread() is threading.main_thread():
        handler = signal.getsignal(signal.SIGCHLD)
        try:
            yield
        finally:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL if handler is None else handler)
    else:
        yield  # torch sets no handler here


class _Pieces:
    """The sampler of a DataLoader: gives the pieces of the current stream."""

    def __init__(self) -> None:
        self.pieces: Iterator[Task] = iter(())

    def __iter__(self) -> Iterator[Task]:
        return self.pieces


def _divided(tasks: Iterable[Task], size: int, pieces: deque[int]) -> Iterator[Task]:
    """Each task in pieces of ``size`` images; their number is appended to ``pieces``."""
    for task in tasks:
        starts = range(0, max(1, len(task.contents)), size)
        pieces.append(len(starts))
        yield from (task.part(start, start + size) for start in starts)


@dataclass(frozen=True)
class _Answer:
    """Decoded images of a piece, why some are gray, or why none could be decoded."""

    pixels: Tensor
    problems: dict[int, str]
    error: str | None = None


def _joined(answers: list[_Answer], buffer: Pixels) -> DecodedBatch:
    """The pieces of a batch, copied into ``buffer`` if there are several."""
    problems: dict[int, str] = {}
    images = 0
    for answer in answers:
        if answer.error:
            raise DataError(answer.error)
        problems |= {images + index: problem for index, problem in answer.problems.items()}
        if len(answers) > 1:
            buffer[images : images + len(answer.pixels)] = answer.pixels.numpy()
        images += len(answer.pixels)
    return buffer[:images] if len(answers) > 1 else answers[0].pixels.numpy(), problems


class _Decoder(Dataset[_Answer]):
    """What a worker does: decode the images of a piece; in a worker, ``default_collate`` makes shared memory."""

    def __getitem__(self, task: Task) -> _Answer:
        empty = torch.empty(0, SIZE, SIZE, 3, dtype=torch.uint8)
        try:
            results = [decode_part(task, index) for index in range(len(task.contents))]
        except IterandError as known:
            return _Answer(empty, {}, str(known))
        except Exception as unknown:  # the DataLoader would add a traceback to the message
            return _Answer(empty, {}, f"a worker failed while decoding images ({type(unknown).__name__}: {unknown})")
        pixels = default_collate([result.pixels for result in results]) if results else empty
        return _Answer(pixels, {index: result.problem for index, result in enumerate(results) if result.problem})


def _unchanged(answer: Any) -> Any:
    return answer


def _prepare_worker(_: int) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the main process, which may have work to save
        signal.signal(number, signal.SIG_IGN)
    warnings.simplefilter("ignore")
    gc.freeze()  # a forked worker must not free what it inherited, such as CUDA graphs
