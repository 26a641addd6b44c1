"""A process that decodes images into memory it shares with the process that asked for them. Not on Windows.

It ends when its connection does: whatever happens to the process at the other end, none is left behind. What it imports
takes a tenth of a second, as long as torch is not among it."""

import mmap
import os
import signal
import sys
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle

import numpy as np

from iterand.errors import IterandError
from iterand.lab.data.decoding import SIZE, Pixels, Task, decode_part

assert sys.platform != "win32", "processes cannot be given open files there; threads decode"

_HEAD = 64  # the first byte says that nobody waits any more; the rest keeps the pixels aligned
_LONGEST = 300  # characters of what is wrong with an image


@dataclass(frozen=True)
class Open:
    """Memory for a stream of batches, so many images long; its handle comes next."""

    stream: int
    rows: int


@dataclass(frozen=True)
class Work:
    """Images to decode into the memory of a stream from ``row`` on; they are the ``first`` and next of their batch."""

    stream: int
    batch: int
    first: int
    row: int
    task: Task


@dataclass(frozen=True)
class Close:
    """A stream has ended."""

    stream: int


@dataclass(frozen=True)
class Done:
    """So many images of a batch are done; what was wrong with some by their place in it, or why none will follow."""

    stream: int
    batch: int
    images: int
    problems: dict[int, str]
    error: str | None = None


class Rows:
    """The memory of a stream: one row an image."""

    def __init__(self, handle: int, rows: int) -> None:
        self._memory = mmap.mmap(handle, self.size(rows))
        self.pixels: Pixels = np.frombuffer(self._memory, np.uint8, offset=_HEAD).reshape(rows, SIZE, SIZE, 3)

    @staticmethod
    def size(rows: int) -> int:
        """How many bytes so many rows take."""
        return _HEAD + rows * SIZE * SIZE * 3

    @property
    def abandoned(self) -> bool:
        """Whether nobody waits for the stream any more."""
        return self._memory[0] != 0

    def abandon(self) -> None:
        """Let workers skip what they have not begun."""
        self._memory[0] = 1


def serve(handle: int) -> None:
    """Work until the connection ends."""
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the process that asked, which may have work to save
        signal.signal(number, signal.SIG_IGN)
    with suppress(EOFError, OSError):
        _answer(Connection(handle))


def _answer(connection: Connection) -> None:
    streams: dict[int, Rows] = {}
    while True:
        match connection.recv():
            case Open(stream, rows):
                handle = recv_handle(connection)
                streams[stream] = Rows(handle, rows)
                os.close(handle)
            case Work() as work:
                connection.send(_decode(work, streams[work.stream]))
            case Close(stream):
                del streams[stream]


def _decode(work: Work, rows: Rows) -> Done:
    images, problems, error = len(work.task.contents), dict[int, str](), None
    try:
        for index in range(images):
            if rows.abandoned:
                break
            decoded = decode_part(work.task, index)
            rows.pixels[work.row + index] = decoded.pixels
            if decoded.problem:
                problems[work.first + index] = decoded.problem[:_LONGEST]
    except IterandError as known:
        error = str(known)
    except Exception as unknown:  # a traceback in a worker would be seen by nobody who can use it
        error = f"a worker failed while decoding images ({type(unknown).__name__}: {unknown})"
    return Done(work.stream, work.batch, images, problems, error)
