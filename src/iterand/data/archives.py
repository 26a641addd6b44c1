"""The files inside a folder or a tar archive; nothing is ever unpacked to the disk."""

import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from iterand import memory
from iterand.errors import DataError

PORTION = 1 << 26
"""Bytes after which it is asked whether there is memory for more."""


class _Member(NamedTuple):
    name: str
    size: int
    read: Callable[[], bytes]


def members(path: Path, patterns: Sequence[str]) -> Iterator[tuple[str, bytes]]:
    """Name and content of every file that matches one of the patterns, such as ``train/pos/*.txt``.

    The name has as many parts as its pattern: what an archive calls its outermost folder does not matter.
    """
    found = _in_folder(path, patterns) if path.is_dir() else _in_tar(path, patterns)
    unasked = 0
    try:
        for member in found:
            unasked += member.size
            if unasked >= PORTION:
                require_memory(unasked, path)
                unasked = 0
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
    """The error for a file the system will not give."""
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
    return name.match(pattern) and not name.name.startswith(".")  # some systems put shadow files beside real ones
