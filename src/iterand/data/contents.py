"""The bytes of one image: a file of its own, or a stretch of a packed one."""

import functools
import os
import sys
import threading
from pathlib import Path
from typing import NamedTuple

from iterand.data.archives import unreadable
from iterand.errors import DataError


class Stretch(NamedTuple):
    """Some bytes of a file that was last changed at ``changed`` (in nanoseconds), and their CRC-32."""

    path: str
    start: int
    length: int
    checksum: int
    changed: int


Content = str | Stretch
"""A file by its path, or a stretch of one."""

_seeking = threading.Lock()


def read(content: Content) -> bytes:
    """The bytes; that they cannot be had is an error, since it would not stay with one image."""
    try:
        if isinstance(content, str):
            with open(content, "rb") as file:  # noqa: PTH123 - a million paths an epoch stay strings
                return file.read()
        # Not a memory map: where a file is cut short while it is in use, touching one kills the process.
        found = _read_at(_opened(content.path, content.changed), content.start, content.length)
    except OSError as error:
        raise unreadable(Path(content if isinstance(content, str) else content.path), error) from None
    if len(found) != content.length:
        raise DataError(f"{content.path} was cut short while it was in use; start again")
    return found


@functools.lru_cache(maxsize=4)
def _opened(path: str, changed: int) -> int:
    """A handle that stays open: on a network file system, opening costs more than reading."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    if os.fstat(handle).st_mtime_ns != changed:
        os.close(handle)
        raise DataError(f"{path} was replaced while it was in use; start again")
    return handle


def _read_at(handle: int, start: int, length: int) -> bytes:
    if sys.platform == "win32":
        with _seeking:  # threads share the place in the file
            os.lseek(handle, start, os.SEEK_SET)
            return os.read(handle, length)
    else:
        return os.pread(handle, length, start)
