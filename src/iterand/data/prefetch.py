"""Work on the next groups in the background while one is used."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

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
