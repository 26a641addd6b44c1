"""Packs: the images of a tree in one file with an index."""

import hashlib
import io
import json
import os
import struct
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iterand.errors import DataError, extra
from iterand.lab.data.dataset import Progress
from iterand.lab.data.decoding import as_rgb
from iterand.lab.data.download import PART, exclusive
from iterand.lab.data.reading import ByteRange, ClassFolders, read, unreadable
from iterand.lab.data.workers import prefetched, processors

MAGIC = b"ITERPACK"
VERSION = 1
LONGEST = (1 << 32) - 1  # bytes of an image
START = struct.Struct("<8sII")
RECORD = struct.Struct("<II")
END = struct.Struct("<QQ32s8s")
INDEX = np.dtype([("start", "<u8"), ("length", "<u4"), ("checksum", "<u4")])


@dataclass(frozen=True)
class Header:
    """The number of images of each class and the digest of the tree that a pack was written from.

    The images are the unchanged files, or scaled to ``short_side`` and compressed again with ``quality``.
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
        """The number of images."""
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
        """The name of the class of each label."""
        return tuple(self.header.classes)

    def path(self, index: int) -> Path:
        """The path of the pack with the name that the image had in the tree."""
        return self.root / self.classes[int(self.labels[index])] / self.files[index]

    def contents(self, index: Tensor) -> list[ByteRange]:
        """The byte ranges of some images."""
        path = str(self.root)
        entries = self.index[index.numpy()].tolist()
        return [ByteRange(path, start, length, checksum, self.changed) for start, length, checksum in entries]


def open_pack(path: Path) -> PackedImages:
    """Read the index of a pack; an incomplete or damaged pack is refused."""
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


QUALITY = 95
_TOGETHER = 256  # images that are read before they are written
_AHEAD = 2  # such groups that are read in advance


@dataclass(frozen=True)
class Scaling:
    """Scale images to this short side, if theirs is longer, and compress them again: faster, but other pixels."""

    short_side: int
    quality: int = QUALITY

    def __post_init__(self) -> None:
        if not 224 <= self.short_side <= 4096:
            raise ValueError(f"the short side is {self.short_side}; it is from 224, what networks see, to 4096 pixels")
        if not 1 <= self.quality <= 100:
            raise ValueError(f"the quality is {self.quality}; it is that of a JPEG file, from 1 to 100")

    def __call__(self, content: bytes) -> bytes:
        """The scaled file; unchanged if the image is small enough or cannot be decoded."""
        with extra("lab", "scaling images"):
            from PIL import Image
        try:
            with Image.open(io.BytesIO(content)) as file:
                short = min(file.size)
                if short <= self.short_side:
                    return content
                width, height = (self.short_side * side // short for side in file.size)
                scaled = as_rgb(file).resize((width, height), Image.Resampling.BILINEAR)
        except Exception:  # a damaged file can raise anything; loading it gives a warning
            return content
        written = io.BytesIO()
        scaled.save(written, "JPEG", quality=self.quality)
        return written.getvalue()


def header_of(images: ClassFolders, scaling: Scaling | None) -> Header:
    """The header of a pack of these images."""
    counts = torch.bincount(images.labels, minlength=len(images.classes)).tolist()
    classes = dict(zip(images.classes, counts))
    if scaling is None:
        return Header(classes, images.digest())
    return Header(classes, images.digest(), scaling.short_side, scaling.quality)


def write_pack(path: Path, images: ClassFolders, header: Header, scaling: Scaling | None, progress: Progress) -> None:
    """Write a ``.part`` file and rename it; if there is one of the same images and settings, resume it."""
    part = path.with_name(path.name + PART)
    with exclusive(path, "packed"):
        part.touch()
        with part.open("r+b") as file:
            records = _resume(file, header, progress)
            for content in _contents(images, len(records), scaling):
                checksum = zlib.crc32(content)
                file.write(RECORD.pack(len(content), checksum))
                records.append((file.tell(), len(content), checksum))
                file.write(content)
                progress(len(records), header.images)
            index = np.array(records, INDEX).tobytes() + os.fsencode("\0".join(images.files))
            digest = hashlib.sha256(header.to_bytes() + index).digest()
            index_start = file.tell()
            file.write(index)
            file.write(END.pack(index_start, len(index) - INDEX.itemsize * len(records), digest, MAGIC))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


def _resume(file: BinaryIO, header: Header, progress: Progress) -> list[tuple[int, int, int]]:
    """Start, length and checksum of the images that are complete in the file; anything after them is cut off."""
    file.seek(0)
    records: list[tuple[int, int, int]] = []
    try:
        found, start = read_header(file)
    except ValueError:
        found, start = None, b""
    if found != header:
        file.seek(0)
        file.truncate()
        file.write(header.to_bytes())
        return records
    end = len(start)
    while len(records) < header.images:
        record = file.read(RECORD.size)
        if len(record) < RECORD.size:
            break
        length, checksum = RECORD.unpack(record)
        content = file.read(length)
        if len(content) < length or zlib.crc32(content) != checksum:
            break
        records.append((end + RECORD.size, length, checksum))
        end += RECORD.size + length
        progress(len(records), header.images)
    file.seek(end)
    file.truncate()
    return records


def _contents(images: ClassFolders, start: int, scaling: Scaling | None) -> Iterator[bytes]:
    """The bytes of all images from number ``start`` on, as they go into the pack."""

    def content(path: str) -> bytes:
        found = read(path)
        if len(found) > LONGEST:
            raise DataError(f"{path} has {len(found):,} bytes; no image is that large: remove it")
        return found if scaling is None else scaling(found)

    groups = (images.contents(index) for index in torch.split(torch.arange(start, len(images.files)), _TOGETHER))
    for group in prefetched(content, groups, workers=processors(), ahead=_AHEAD):
        yield from group
