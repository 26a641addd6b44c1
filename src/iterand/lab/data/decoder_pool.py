"""Batches of images decoded by worker processes into shared memory, a few batches ahead. Not on Windows."""

import atexit
import itertools
import os
import select
import subprocess
import sys
import tempfile
import threading
from collections import deque
from collections.abc import Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from pathlib import Path
from socket import socketpair
from typing import IO

from iterand.errors import DataError
from iterand.lab.data.decoder_process import Close, Done, Open, Rows, Work
from iterand.lab.data.decoding import DecodedBatch, Task

assert sys.platform != "win32", "processes cannot be given open files there; threads decode"


_SHARES = 4  # a batch is dealt out in so many pieces to a worker, for a worker that is slow
_MOST = 32  # images in a piece, so that a message fits into a connection even if paths are as long as they may be
_ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
_PACKAGE = "iterand.lab.data"
# The package without its __init__, which imports torch: that takes two seconds and 200 MB in every worker.
_PROGRAM = """
import sys, types
sys.modules[{package!r}] = types.ModuleType({package!r})
sys.modules[{package!r}].__path__ = [{folder!r}]
from {package}.decoder_process import serve
serve({handle})
"""


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    connection: Connection
    images: int = 0
    """How many it has not finished."""


@dataclass
class _Batch:
    start: int
    images: int
    left: int
    problems: dict[int, str] = field(default_factory=dict)
    error: str | None = None


@dataclass
class _Stream:
    rows: Rows
    free: list[int]
    batches: dict[int, _Batch] = field(default_factory=dict)


class DecoderPool:
    """Worker processes that serve any number of streams of batches.

    Each worker has a connection of its own: there is no lock that a killed one could take with it.
    """

    def __init__(self, workers: int) -> None:
        self._workers: list[_Worker] = []
        self._streams: dict[int, _Stream] = {}
        self._numbers = itertools.count()
        self._lock = threading.RLock()
        self.closed = False
        try:
            for _ in range(workers):
                self._workers.append(_start())
        except OSError as error:
            self.close()
            raise DataError(f"cannot start {workers} workers to decode images: {error.strerror or error}") from None

    def decoded(self, tasks: Iterable[Task], size: int, ahead: int) -> Generator[DecodedBatch, None, None]:
        """Each task, of at most ``size`` images, decoded; ``ahead`` of them are begun before they are asked for."""
        number, slots = next(self._numbers), ahead + 1
        stream = self._open(number, slots, size)
        waiting: deque[int] = deque()
        try:
            for batch, task in enumerate(tasks):
                self._submit(number, batch, task)
                waiting.append(batch)
                if len(waiting) > ahead:
                    yield self._finished(stream, waiting[0])
                    stream.free.append(stream.batches.pop(waiting.popleft()).start)
            while waiting:
                yield self._finished(stream, waiting.popleft())
        except KeyboardInterrupt:
            self.close()  # half a message may be on its way
            raise
        finally:
            self._close(number)

    def close(self) -> None:
        """End the workers."""
        with self._lock:
            self.closed = True
            for stream in self._streams.values():
                stream.rows.abandon()
            for worker in self._workers:
                worker.connection.close()
            for worker in self._workers:
                _end(worker.process)

    def _open(self, number: int, slots: int, size: int) -> _Stream:
        with self._lock, _shared_memory(Rows.size(slots * size)) as file:
            rows = Rows(file.fileno(), slots * size)
            self._streams[number] = _Stream(rows, [slot * size for slot in range(slots)])
            for worker in self._workers:
                self._send(worker, Open(number, slots * size))
                try:
                    send_handle(worker.connection, file.fileno(), None)
                except OSError:
                    raise self._lost() from None
            return self._streams[number]

    def _submit(self, number: int, batch: int, task: Task) -> None:
        stream, images = self._streams[number], len(task.contents)
        start = stream.free.pop()
        with self._lock:
            stream.batches[batch] = _Batch(start, images, images)
            piece = min(_MOST, -(-images // (_SHARES * len(self._workers))))
            for first in range(0, images, max(1, piece)):
                part = task.part(first, first + piece)
                worker = min(self._workers, key=lambda worker: worker.images)
                worker.images += len(part.contents)
                self._send(worker, Work(number, batch, first, start + first, part))

    def _finished(self, stream: _Stream, number: int) -> DecodedBatch:
        batch = stream.batches[number]
        while batch.left:
            with self._lock:
                if batch.left:
                    self._receive(None)
        if batch.error:
            raise DataError(batch.error)
        return stream.rows.pixels[batch.start : batch.start + batch.images], batch.problems

    def _close(self, number: int) -> None:
        with self._lock:
            self._streams.pop(number).rows.abandon()
            if not self.closed:
                for worker in self._workers:
                    with suppress(DataError):  # who goes on with another stream will hear of it
                        self._send(worker, Close(number))

    def _send(self, worker: _Worker, message: Open | Work | Close) -> None:
        """Send as soon as there is room; until then take what comes, or both sides might wait for each other."""
        while not self._receive(worker):
            pass
        try:
            worker.connection.send(message)
        except OSError:
            raise self._lost() from None

    def _receive(self, writable: _Worker | None) -> bool:
        """Wait until work is done, or that worker has room for more: say whether it has."""
        if self.closed:
            raise self._lost()
        poll = select.poll()
        for worker in self._workers:
            poll.register(worker.connection.fileno(), select.POLLIN | (select.POLLOUT if worker is writable else 0))
        events = dict(poll.poll())
        for worker in self._workers:
            if events.get(worker.connection.fileno(), 0) & ~select.POLLOUT:
                try:
                    self._note(worker, worker.connection.recv())
                except (EOFError, OSError):
                    raise self._lost() from None
        return writable is not None and bool(events.get(writable.connection.fileno(), 0) & select.POLLOUT)

    def _note(self, worker: _Worker, done: Done) -> None:
        worker.images -= done.images
        stream = self._streams.get(done.stream)  # one that was left early is gone
        if stream is not None:
            batch = stream.batches[done.batch]
            batch.left -= done.images
            batch.problems |= done.problems
            batch.error = batch.error or done.error

    def _lost(self) -> DataError:
        self.close()
        return DataError(
            f"one of {len(self._workers)} worker processes that decode images has died, perhaps for want of memory; "
            f"the same command goes on from the last checkpoint, and $ITERAND_WORKERS sets how many there are"
        )


_pools: dict[tuple[int, int], DecoderPool] = {}


def shared_pool(workers: int) -> DecoderPool:
    """The pool of this process with so many workers; it is started once, since imports take seconds."""
    key = os.getpid(), workers  # a forked process must not talk on its parent's connections
    if key not in _pools or _pools[key].closed:
        _pools[key] = DecoderPool(workers)
        atexit.register(_pools[key].close)
    return _pools[key]


def running(workers: int) -> bool:
    """Whether there is such a pool already."""
    return (os.getpid(), workers) in _pools and not _pools[os.getpid(), workers].closed


def _start() -> _Worker:
    # Not multiprocessing: its children run the user's script again, and want it written for that.
    ours, theirs = socketpair()
    with ours, theirs:
        program = _PROGRAM.format(package=_PACKAGE, folder=str(Path(__file__).parent), handle=theirs.fileno())
        environment = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "PYTHONWARNINGS": "ignore"}
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", program],  # -P: not what happens to lie in the working folder
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=os.environ | environment | _ONE_THREAD,
            pass_fds=[theirs.fileno()],
        )
        return _Worker(process, Connection(ours.detach()))


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _shared_memory(size: int) -> IO[bytes]:
    """A file without a name: it goes with the last process that has it, and needs no room in /dev/shm."""
    file: IO[bytes]
    if sys.platform == "linux" and hasattr(os, "memfd_create"):
        file = os.fdopen(os.memfd_create("iterand-data", os.MFD_CLOEXEC), "r+b")
    else:
        file = tempfile.TemporaryFile()  # noqa: SIM115
    file.truncate(size)
    return file
