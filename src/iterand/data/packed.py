"""A part of a tree of images in one file: its format, and how it is read.

    "ITERPACK", version (u32), length of the header (u32)
    header: a JSON object, see :class:`Header`
    for each image, sorted by class and name: length (u32), CRC-32 (u32), bytes
    index, for each image: where its bytes start (u64), their length (u32), their CRC-32 (u32)
    names: those of the files, with a zero byte between them
    where the index starts (u64), length of the names (u64), SHA-256 of header, index and names, "ITERPACK"

Numbers are little-endian. The end is written last: a file that was cut short does not have it.
"""

import hashlib
import json
import os
import struct
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iterand.data.archives import unreadable
from iterand.data.contents import Stretch
from iterand.errors import DataError

MAGIC = b"ITERPACK"
VERSION = 1
LONGEST = (1 << 32) - 1  # bytes of an image
START = struct.Struct("<8sII")
RECORD = struct.Struct("<II")
END = struct.Struct("<QQ32s8s")
INDEX = np.dtype([("start", "<u8"), ("length", "<u4"), ("checksum", "<u4")])


@dataclass(frozen=True)
class Header:
    """What a pack holds: images of these classes, so many of each, of a tree with this digest.

    Images are the files as they are, or scaled to a short side and compressed again.
    """

    classes: dict[str, int]
    tree: str
    short_side: int | None = None
    quality: int | None = None

    def to_bytes(self) -> bytes:
        """The start of the file."""
        text = json.dumps(asdict(self)).encode()
        return START.pack(MAGIC, VERSION, len(text)) + text

    @property
    def images(self) -> int:
        """How many there are."""
        return sum(self.classes.values())


@dataclass(frozen=True)
class PackedImages:
    """The images of a pack."""

    root: Path
    header: Header
    files: tuple[str, ...]
    index: NDArray[np.void]
    labels: Tensor
    changed: int

    @property
    def classes(self) -> tuple[str, ...]:
        """What the labels stand for."""
        return tuple(self.header.classes)

    def path(self, index: int) -> Path:
        """The pack, and what the image was called in the tree."""
        return self.root / self.classes[int(self.labels[index])] / self.files[index]

    def contents(self, index: Tensor) -> list[Stretch]:
        """Where to read some of the images."""
        path = str(self.root)
        entries = self.index[index.numpy()].tolist()
        return [Stretch(path, start, length, checksum, self.changed) for start, length, checksum in entries]


def open_pack(path: Path) -> PackedImages:
    """Read the index of a pack; one that is not whole is refused."""
    try:
        with path.open("rb") as file:
            return _read(file, path)
    except OSError as error:
        raise unreadable(path, error) from None


def read_header(file: BinaryIO) -> tuple[Header, bytes]:
    """The header at the start of a file, and its bytes; a ValueError says what is wrong with it."""
    start = file.read(START.size)
    if len(start) < START.size or not start.startswith(MAGIC):
        raise ValueError("it does not start as a pack does")
    _, version, length = START.unpack(start)
    if version != VERSION:
        raise ValueError(f"it has version {version}, and this iterand reads version {VERSION}")
    text = file.read(min(length, os.fstat(file.fileno()).st_size))
    try:
        header = Header(**json.loads(text))
    except (TypeError, ValueError, RecursionError):
        raise ValueError("its header cannot be read") from None
    counts = header.classes.values() if isinstance(header.classes, dict) else [-1]
    if any(type(count) is not int or count < 0 for count in counts):
        raise ValueError("its header cannot be read")
    return header, start + text


def _read(file: BinaryIO, path: Path) -> PackedImages:
    try:
        header, start = read_header(file)
        index, names = _read_end(file, header, start)
    except ValueError as error:
        raise DataError(f"{path} is not a whole pack: {error}; remove it, and write it again if you like") from None
    labels = torch.repeat_interleave(torch.tensor(list(header.classes.values()), dtype=torch.int64))
    files = tuple(os.fsdecode(names).split("\0"))
    return PackedImages(path, header, files, index, labels, os.fstat(file.fileno()).st_mtime_ns)


def _read_end(file: BinaryIO, header: Header, start: bytes) -> tuple[NDArray[np.void], bytes]:
    size = os.fstat(file.fileno()).st_size
    file.seek(max(len(start), size - END.size))
    end = file.read()
    if len(end) != END.size or not end.endswith(MAGIC):
        raise ValueError("it is cut short")
    index_start, names_length, digest, _ = END.unpack(end)
    index_length = INDEX.itemsize * header.images
    if index_start + index_length + names_length + END.size != size or index_start < len(start):
        raise ValueError("its parts do not make up its length")
    file.seek(index_start)
    content = file.read(index_length + names_length)
    if hashlib.sha256(start + content).digest() != digest:
        raise ValueError("its index is damaged")
    index, names = np.frombuffer(content[:index_length], INDEX), content[index_length:]
    ends = index["start"] + index["length"]
    if names.count(b"\0") + 1 != header.images or (index["start"] < len(start)).any() or (ends > index_start).any():
        raise ValueError("its index is damaged")
    return index, names
