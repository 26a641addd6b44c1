"""Reading files: members of folders and tar archives, and byte ranges of packs."""

import functools
import os
import sys
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from iterand import memory
from iterand.errors import DataError

PORTION = 1 << 26
"""After so many bytes, the free memory is checked again."""


class _Member(NamedTuple):
    name: str
    size: int
    read: Callable[[], bytes]


def members(path: Path, patterns: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file that matches one of the patterns, such as ``train/pos/*.txt``.

    The name has as many parts as its pattern: what an archive calls its outermost folder does not matter.
    """
    found = _in_folder(path, patterns) if path.is_dir() else _in_tar(path, patterns)
    unchecked = 0
    try:
        for member in found:
            unchecked += member.size
            if unchecked >= PORTION:
                require_memory(unchecked, path)
                unchecked = 0
            yield member.name, member.read()
    except (tarfile.TarError, EOFError, zlib.error) as error:
        raise damaged(path, error) from None
    except OSError as error:
        raise damaged(path, error) if error.errno is None else unreadable(path, error) from None


def require_memory(size: int, path: Path) -> None:
    """Refuse to read more of a data set than there is memory for."""
    memory.require(size, f"reading more of {path}", "a smaller data set, or more memory, is needed")


def damaged(path: Path, error: Exception) -> DataError:
    """The error for a file that is cut short or changed."""
    return DataError(f"{path} is cut short or damaged ({error}); remove it and fetch it again")


def unreadable(path: Path, error: OSError) -> DataError:
    """The error for a file that the operating system cannot read."""
    return DataError(f"cannot read {error.filename or path}: {error.strerror or error}")


def _in_folder(folder: Path, patterns: Sequence[str]) -> Iterator[_Member]:
    for pattern in patterns:
        for file in sorted(folder.glob(pattern)):
            if _wanted(PurePosixPath(file), pattern):
                yield _Member(file.relative_to(folder).as_posix(), file.stat().st_size, file.read_bytes)


def _in_tar(path: Path, patterns: Sequence[str]) -> Iterator[_Member]:
    with tarfile.open(path, "r|*") as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            pattern = next((pattern for pattern in patterns if _wanted(name, pattern)), None)
            content = archive.extractfile(member) if pattern and member.isfile() else None
            if pattern and content:
                inner = "/".join(name.parts[-len(PurePosixPath(pattern).parts) :])
                yield _Member(inner, member.size, content.read)


def _wanted(name: PurePosixPath, pattern: str) -> bool:
    return name.match(pattern) and not name.name.startswith(".")  # macOS puts a hidden file beside each


class ByteRange(NamedTuple):
    """Some bytes of a file with their CRC-32; ``changed`` is when the file was last changed, in nanoseconds."""

    path: str
    start: int
    length: int
    checksum: int
    changed: int


Content = str | ByteRange
"""The path of a file, or a byte range of one."""

_seeking = threading.Lock()


def read(content: Content) -> bytes:
    """Read the bytes. Failure is an error, since it would affect more than one image."""
    try:
        if isinstance(content, str):
            with open(content, "rb") as file:  # noqa: PTH123 - a million paths an epoch stay strings
                return file.read()
        # Not a memory map: if the file is truncated while in use, accessing the map kills the process.
        found = _read_at(_opened(content.path, content.changed), content.start, content.length)
    except OSError as error:
        raise unreadable(Path(content if isinstance(content, str) else content.path), error) from None
    if len(found) != content.length:
        raise DataError(f"{content.path} was cut short while it was in use; start again")
    return found


@functools.lru_cache(maxsize=4)
def _opened(path: str, changed: int) -> int:
    """A file descriptor that stays open: on a network file system, opening costs more than reading."""
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_BINARY", 0))
    if os.fstat(handle).st_mtime_ns != changed:
        os.close(handle)
        raise DataError(f"{path} was replaced while it was in use; start again")
    return handle


def _read_at(handle: int, start: int, length: int) -> bytes:
    if sys.platform == "win32":
        with _seeking:  # threads share the file position
            os.lseek(handle, start, os.SEEK_SET)
            return os.read(handle, length)
    else:
        return os.pread(handle, length, start)
