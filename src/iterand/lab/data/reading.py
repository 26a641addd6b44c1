"""Reading folders and archives: members of tar files, byte ranges, and trees of class folders."""

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


_ENDINGS = (".jpeg", ".jpg", ".png")


class Images(Protocol):
    """Images with their labels, sorted by class and name."""

    @property
    def root(self) -> Path:
        """The folder or file that contains them."""
        ...

    @property
    def classes(self) -> tuple[str, ...]:
        """The name of the class of each label."""
        ...

    @property
    def files(self) -> tuple[str, ...]:
        """The name of each image."""
        ...

    @property
    def labels(self) -> Tensor:
        """The label of each image: the index of its class."""
        ...

    def path(self, index: int) -> Path:
        """The path of an image, to name it in messages."""
        ...

    def contents(self, index: Tensor) -> Sequence[Content]:
        """What to read for some of the images."""
        ...


@dataclass(frozen=True)
class ClassFolders:
    """The images of ``root``/CLASS/, sorted by class and name; a label is the index of its class."""

    root: Path
    classes: tuple[str, ...]
    files: tuple[str, ...]
    labels: Tensor

    def path(self, index: int) -> Path:
        """The path of an image."""
        return self.root / self.classes[int(self.labels[index])] / self.files[index]

    def contents(self, index: Tensor) -> list[str]:
        """The paths of some images."""
        return [f"{self.root}/{name}" for name in self._names(index)]

    def digest(self) -> str:
        """A digest of all names and sizes, to tell whether two trees hold the same files."""
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
        return [f"{self.classes[label]}/{self.files[number]}" for label, number in zip(labels, index.tolist())]


def scan(root: Path) -> ClassFolders:
    """Find all images of a tree; a class without images is an error."""
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
    """Refuse two trees whose class folders differ, since their labels would have different meanings."""
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
