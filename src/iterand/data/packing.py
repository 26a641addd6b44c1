"""Write a part of a tree of images into one file; what was begun is continued."""

import hashlib
import io
import os
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch

from iterand.data.contents import read
from iterand.data.folders import ClassFolders
from iterand.data.packed import END, INDEX, LONGEST, MAGIC, RECORD, Header, read_header
from iterand.data.partial import PART, alone
from iterand.data.prefetch import prefetched
from iterand.data.processors import processors
from iterand.errors import DataError, extra

Progress = Callable[[int, int], None]
"""Told how many images are in the file, and of how many."""

QUALITY = 95
_TOGETHER = 256  # images read before they are written
_AHEAD = 2


@dataclass(frozen=True)
class Scaling:
    """Images are scaled to this short side, if theirs is longer, and compressed again: faster, but other pixels."""

    short_side: int
    quality: int = QUALITY

    def __post_init__(self) -> None:
        if not 224 <= self.short_side <= 4096:
            raise ValueError(f"the short side is {self.short_side}; it is from 224, what networks see, to 4096 pixels")
        if not 1 <= self.quality <= 100:
            raise ValueError(f"the quality is {self.quality}; it is that of a JPEG file, from 1 to 100")

    def __call__(self, content: bytes) -> bytes:
        """The image scaled; one that is small enough or cannot be decoded as it is."""
        with extra("lab", "scaling images"):
            from PIL import Image
        try:
            with Image.open(io.BytesIO(content)) as file:
                short = min(file.size)
                if short <= self.short_side:
                    return content
                width, height = (self.short_side * side // short for side in file.size)
                scaled = file.convert("RGB").resize((width, height), Image.Resampling.BILINEAR)
        except Exception:  # a damaged file can raise anything; who uses the pack is told
            return content
        written = io.BytesIO()
        scaled.save(written, "JPEG", quality=self.quality)
        return written.getvalue()


def header_of(images: ClassFolders, scaling: Scaling | None) -> Header:
    """What a pack of these images starts with."""
    counts = torch.bincount(images.labels, minlength=len(images.classes)).tolist()
    classes = dict(zip(images.classes, counts))
    if scaling is None:
        return Header(classes, images.digest())
    return Header(classes, images.digest(), scaling.short_side, scaling.quality)


def write_pack(path: Path, images: ClassFolders, header: Header, scaling: Scaling | None, progress: Progress) -> None:
    """Write the pack beside its place and rename it; a ``.part`` file of the same images and settings is continued."""
    part = path.with_name(path.name + PART)
    with alone(path, "packed"):
        part.touch()
        with part.open("r+b") as file:
            records = _continued(file, header, progress)
            for content in _contents(images, len(records), scaling):
                checksum = zlib.crc32(content)
                file.write(RECORD.pack(len(content), checksum))
                records.append((file.tell(), len(content), checksum))
                file.write(content)
                progress(len(records), header.images)
            index = np.array(records, INDEX).tobytes() + os.fsencode("\0".join(images.files))
            digest = hashlib.sha256(header.to_bytes() + index).digest()
            place = file.tell()
            file.write(index)
            file.write(END.pack(place, len(index) - INDEX.itemsize * len(records), digest, MAGIC))
            file.flush()
            os.fsync(file.fileno())
        part.replace(path)


def _continued(file: BinaryIO, header: Header, progress: Progress) -> list[tuple[int, int, int]]:
    """Start, length and checksum of the images that are in the file already; what follows the last whole one is cut."""
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
    """The bytes of all images from ``start`` on, as they are to be packed."""

    def content(path: str) -> bytes:
        found = read(path)
        if len(found) > LONGEST:
            raise DataError(f"{path} has {len(found):,} bytes; no image is that large: remove it")
        return found if scaling is None else scaling(found)

    groups = (images.contents(index) for index in torch.split(torch.arange(start, len(images.files)), _TOGETHER))
    for group in prefetched(content, groups, workers=processors(), ahead=_AHEAD):
        yield from group
