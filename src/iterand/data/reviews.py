"""The layouts of IMDB: the folder aclImdb, its tar archive, or two csv files."""

import csv
import gzip
import hashlib
import io
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from iterand.data.archives import PORTION, damaged, members, require_memory, unreadable
from iterand.data.location import Located, first_there
from iterand.errors import DataError

_LABELS = {"neg": 0, "pos": 1}
_LAYOUTS = {
    "aclImdb": "folder",
    "train.csv": "csv",
    "train.csv.gz": "csv",
    "aclImdb_v1.tar.gz": "tar",
    "aclImdb_v1.tar": "tar",
}
_PATTERNS = [f"{part}/{label}/*.txt" for part in ("train", "test") for label in _LABELS]


@dataclass(frozen=True)
class Review:
    """What somebody wrote (``name`` is class/number_rating) and whether they liked it (1) or not (0)."""

    name: str
    text: str
    label: int


Reviews = dict[str, list[Review]]
"""The reviews of ``train`` and ``test``, sorted by name, so that all layouts give the same."""


def locate(root: Path) -> Located | None:
    """IMDB in this folder, in whatever layout."""
    found = first_there(root, "imdb", _LAYOUTS)
    if found and found.layout == "csv":
        return Located(root, found.path.parent, "csv")
    return found


def digest(located: Located) -> str:
    """SHA-256 of everything that is read."""
    total = hashlib.sha256()
    for name, content in _contents(located):
        total.update(f"{name} {len(content)}\n".encode() + content)
    return total.hexdigest()


def read(located: Located) -> Reviews:
    """All reviews with a label."""
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
    """The bytes, of which there may be a thousand times as many."""
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
