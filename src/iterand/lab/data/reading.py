"""Reading folders and archives: members of tar files, byte ranges, folders of classes."""

import functools
import hashlib
import os
import sys
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

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


_ENDINGS = (".jpeg", ".jpg", ".png")


class Images(Protocol):
    """Images with their labels, which count the classes; sorted by class and name."""

    @property
    def root(self) -> Path:
        """The folder or file they lie in."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """What the labels stand for."""
        ...

    @property
    def files(self) -> tuple[str, ...]:
        """Their names."""
        ...

    @property
    def labels(self) -> Tensor:
        """The class of each."""
        ...

    def path(self, index: int) -> Path:
        """What to call an image."""
        ...

    def contents(self, index: Tensor) -> Sequence[Content]:
        """Where to read some of them."""
        ...


@dataclass(frozen=True)
class ClassFolders:
    """The images of ``root``/CLASS/, sorted by class and name; ``labels`` counts the classes in the same order."""

    root: Path
    classes: tuple[str, ...]
    files: tuple[str, ...]
    labels: Tensor

    def path(self, index: int) -> Path:
        """Where an image lies."""
        return self.root / self.classes[int(self.labels[index])] / self.files[index]

    def contents(self, index: Tensor) -> list[str]:
        """The files of some images."""
        return [f"{self.root}/{name}" for name in self._names(index)]

    def digest(self) -> str:
        """A digest of all names and sizes: equal if two trees hold the same files."""
        found = hashlib.sha256()
        try:
            for name in self._names(torch.arange(len(self.files))):
                size = os.stat(f"{self.root}/{name}").st_size  # noqa: PTH116 - a million paths stay strings
                found.update(os.fsencode(f"{name}\0{size}\n"))
        except OSError as error:
            raise unreadable(self.root, error) from None
        return found.hexdigest()

    def _names(self, index: Tensor) -> list[str]:
        labels = self.labels[index].tolist()
        return [f"{self.classes[label]}/{self.files[place]}" for label, place in zip(labels, index.tolist())]


def scan(root: Path) -> ClassFolders:
    """Find all images; a class without any is an error."""
    try:
        classes = tuple(sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and entry.name[0] != "."))
        files = [_images(root / name) for name in classes]
    except OSError as error:
        raise unreadable(root, error) from None
    if not classes:
        raise DataError(f"{root} has no class folders; sort its images into one folder for each class")
    labels = torch.repeat_interleave(torch.tensor([len(names) for names in files]))
    return ClassFolders(root, classes, tuple(name for names in files for name in names), labels)


def same_classes(train: Images, test: Images) -> None:
    """Refuse two trees whose class folders differ, since their labels would not mean the same."""
    for one, other in ((train, test), (test, train)):
        absent = sorted(set(one.classes) - set(other.classes))
        if absent:
            raise DataError(f"{other.root} has no class folder {absent[0]}, but {one.root} has; they must be the same")


def _images(folder: Path) -> list[str]:
    names = sorted(entry.name for entry in os.scandir(folder) if entry.name.lower().endswith(_ENDINGS))
    names = [name for name in names if name[0] != "."]
    if not names:
        raise DataError(f"{folder} has no images ({', '.join(_ENDINGS)}); put some there or remove the folder")
    return names
