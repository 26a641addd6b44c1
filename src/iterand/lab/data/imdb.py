"""IMDB film reviews: read from the archive or CSV files, tokenized and cached."""

import contextlib
import csv
import gzip
import hashlib
import io
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from iterand.errors import DataError
from iterand.files import atomic_write, user_cache
from iterand.lab.data.dataset import Dataset, Located, Options, Progress, find_layout, fixed_order, limited
from iterand.lab.data.download import ARCHIVES, md5
from iterand.lab.data.reading import PORTION, damaged, members, require_memory, unreadable
from iterand.lab.data.text import TextSplit, Vocabulary

PUBLISHED = 25_000
"""The number of reviews in ``train``, and in ``test``."""

_VERSION = 1  # of the tokenizer, the vocabulary and the split: part of the cache's name

_LABELS = {"neg": 0, "pos": 1}
_LAYOUTS = {
    "aclImdb": "folder",
    "train.csv": "csv",
    "train.csv.gz": "csv",
    "aclImdb_v1.tar.gz": "tar",
    "aclImdb_v1.tar": "tar",
}
_PATTERNS = [f"{part}/{label}/*.txt" for part in ("train", "test") for label in _LABELS]

Value = TypeVar("Value")


def locate(root: Path) -> Located | None:
    """Find IMDB in this folder, in any of its layouts."""
    found = find_layout(root, "imdb", _LAYOUTS)
    if found and found.layout == "csv":
        return Located(root, found.path.parent, "csv")
    return found


def load(located: Located, device: torch.device, options: Options) -> Dataset[TextSplit]:
    """17,500 / 7,500 / 25,000 reviews; the validation reviews are the same in all runs."""
    encoded = cached(
        located.root,
        f"imdb-{_VERSION}-{digest(located)[:32]}.safetensors",
        lambda: _encode(read(located)),
        _dump,
        _parse,
    )

    def part(name: str, limit: int | None = None) -> TextSplit:
        found = encoded.parts[name]
        chosen = limited(limited(torch.arange(len(found.labels)), limit), options.limit)
        pieces = torch.split(found.tokens, found.lengths.tolist())
        tokens = torch.cat([pieces[index] for index in chosen.tolist()])
        labels = found.labels[chosen].to(device)
        return TextSplit(tokens.to(device), found.lengths[chosen], labels, encoded.vocabulary)

    return Dataset(part("train", options.train_limit), part("validation"), part("test"), classes=2)


def check(located: Located, progress: Progress) -> str:
    """Compare the archive's checksum with the published one, and count the reviews."""
    archive = ARCHIVES["imdb"]
    if located.path.name == archive.name and md5(located.path) != archive.md5:
        raise DataError(
            f"{located.path} differs from the published file (MD5 {archive.md5}); remove it and fetch it again"
        )
    found = read(located)
    for part, entries in found.items():
        positive = sum(entry.label for entry in entries)
        if (len(entries), positive) != (PUBLISHED, PUBLISHED // 2):
            raise DataError(
                f"{located.path} has {positive:,} positive of {len(entries):,} reviews for {part}, "
                f"but {PUBLISHED // 2:,} of {PUBLISHED:,} were published; fetch it again"
            )
    return f"{sum(map(len, found.values())):,} reviews, half of them positive"


@dataclass(frozen=True)
class Review:
    """A text with its label, 1 for positive and 0 for negative; ``name`` is class/number_rating."""

    name: str
    text: str
    label: int


Reviews = dict[str, list[Review]]
"""The reviews of ``train`` and ``test``, sorted by name, so that all layouts give the same order."""


def digest(located: Located) -> str:
    """SHA-256 of all files of the data set."""
    total = hashlib.sha256()
    for name, content in _contents(located):
        total.update(f"{name} {len(content)}\n".encode() + content)
    return total.hexdigest()


def read(located: Located) -> Reviews:
    """Read all reviews that have a label."""
    if located.layout == "csv":
        found = {part: _read_csv(path) for part, path in zip(("train", "test"), _files(located))}
    else:
        found = {"train": [], "test": []}
        for name, content in members(located.path, _PATTERNS):
            part, label, file = name.split("/")
            text = _decoded(content, f"{name} in {located.path}")
            found[part].append(Review(f"{label}/{file.removesuffix('.txt')}", text, _LABELS[label]))
    for part, reviews in found.items():
        for kind, number in _LABELS.items():
            if not any(review.label == number for review in reviews):
                raise DataError(f"{located.path} has no review of the class {kind} for {part}; fetch it again")
        reviews.sort(key=lambda review: review.name)
    return found


def _contents(located: Located) -> Iterator[tuple[str, bytes]]:
    if located.layout == "folder":
        yield from members(located.path, _PATTERNS)
    else:
        for path in _files(located):
            yield path.name, _bytes(path)


def _files(located: Located) -> list[Path]:
    if located.layout == "tar":
        return [located.path]
    found = [[located.path / f"{part}{end}" for end in (".csv", ".csv.gz")] for part in ("train", "test")]
    for choices in found:
        if not any(path.exists() for path in choices):
            raise DataError(f"{located.path} has no {choices[0].name} nor {choices[1].name}; put one there")
    return [next(path for path in choices if path.exists()) for choices in found]


def _read_csv(path: Path) -> list[Review]:
    content = _bytes(path)
    try:
        text = _decoded(_decompressed(content, path) if path.suffix == ".gz" else content, str(path))
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise damaged(path, error) from None
    rows = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    try:
        return [_review(row, f"line {rows.line_num} of {path}") for row in rows]
    except csv.Error as error:
        raise DataError(f"line {rows.line_num} of {path} is no csv ({error}); fetch it again") from None


def _review(row: dict[str, str | None], where: str) -> Review:
    name, text, label = row.get("id"), row.get("text"), row.get("label")
    if name is None or text is None or label is None:
        raise DataError(f"{where} lacks one of the columns id, label, text")
    if label not in ("0", "1"):
        raise DataError(f"{where} has label {label!r}, but labels are 0 (negative) and 1 (positive)")
    return Review(name, text, int(label))


def _bytes(path: Path) -> bytes:
    try:
        require_memory(2 * path.stat().st_size, path)  # as bytes and as text
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None


def _decompressed(content: bytes, path: Path) -> bytes:
    """Decompress in portions, checking the memory: the result can be a thousand times as large."""
    found = []
    with gzip.GzipFile(fileobj=io.BytesIO(content)) as file:
        while portion := file.read(PORTION):
            require_memory(2 * len(portion), path)
            found.append(portion)
    return b"".join(found)


def _decoded(content: bytes, where: str) -> str:
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{where} is not UTF-8 ({error.reason} at byte {error.start}); fetch it again") from None


@dataclass(frozen=True)
class _Part:
    """The encoded reviews of a split, concatenated."""

    tokens: Tensor
    lengths: Tensor
    labels: Tensor


@dataclass(frozen=True)
class _Encoded:
    parts: dict[str, _Part]
    vocabulary: Vocabulary


def _encode(found: Reviews) -> _Encoded:
    train = found["train"]
    order = fixed_order(len(train)).tolist()
    held_out = len(train) * 3 // 10
    parts = {
        "train": [train[index] for index in order[held_out:]],
        "validation": [train[index] for index in order[:held_out]],
        "test": found["test"],
    }
    vocabulary = Vocabulary.most_frequent(review.text for review in parts["train"])
    return _Encoded({name: _encode_part(part, vocabulary) for name, part in parts.items()}, vocabulary)


def _encode_part(part: list[Review], vocabulary: Vocabulary) -> _Part:
    if not part:
        raise DataError("there are too few reviews: of those to train on three in ten are held out, at least one")
    encoded = [vocabulary.encode(review.text) for review in part]
    return _Part(
        torch.from_numpy(np.concatenate(encoded)),
        torch.tensor([len(tokens) for tokens in encoded]),
        torch.tensor([review.label for review in part]),
    )


def _dump(encoded: _Encoded) -> bytes:
    words = "\n".join(encoded.vocabulary.words).encode()
    tensors = {"words": torch.tensor(list(words), dtype=torch.uint8)}
    for name, part in encoded.parts.items():
        tensors |= {f"{name}.{key}": value for key, value in vars(part).items()}
    return safetensors.torch.save(tensors)


def _parse(content: bytes) -> _Encoded:
    try:
        tensors = safetensors.torch.load(content)
        words = tensors["words"].numpy().tobytes().decode().split("\n")
        parts = {
            name: _Part(*(tensors[f"{name}.{key}"] for key in ("tokens", "lengths", "labels")))
            for name in ("train", "validation", "test")
        }
    except (safetensors.SafetensorError, KeyError) as error:
        raise ValueError(f"the cache is damaged: {error}") from None
    return _Encoded(parts, Vocabulary(words))


def cached(
    root: Path,
    name: str,
    make: Callable[[], Value],
    dump: Callable[[Value], bytes],
    parse: Callable[[bytes], Value],
) -> Value:
    """The result of ``make``, from the cache file of this name if it can be parsed.

    The name must contain a digest of everything that the value depends on, so that a cache file is never stale.
    """
    paths = [folder / name for folder in (root / "cache", user_cache()) if folder]
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            return parse(path.read_bytes())
    value = make()
    for path in paths:
        with contextlib.suppress(OSError):
            atomic_write(path, dump(value))
            break
    return value
