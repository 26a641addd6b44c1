"""IMDB: 50,000 film reviews, liked or not (Appendix C.6)."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import safetensors
import safetensors.torch
import torch
from torch import Tensor

from iterand.data import reviews
from iterand.data.cache import cached
from iterand.data.dataset import Dataset
from iterand.data.download import md5
from iterand.data.location import Located
from iterand.data.options import Options
from iterand.data.parts import fixed_order, limited
from iterand.data.reviews import Review, locate
from iterand.data.sequences import TextSplit
from iterand.data.sources import ARCHIVES
from iterand.data.text import Vocabulary
from iterand.errors import DataError

__all__ = ["check", "load", "locate"]

PUBLISHED = 25_000
"""How many reviews there are for training, and how many for testing."""

_VERSION = 1  # of the tokenizer, the vocabulary and the split: part of the cache's name


@dataclass(frozen=True)
class _Part:
    """Encoded reviews, one after the other."""

    tokens: Tensor
    lengths: Tensor
    labels: Tensor


@dataclass(frozen=True)
class _Encoded:
    parts: dict[str, _Part]
    vocabulary: Vocabulary


def load(located: Located, device: torch.device, options: Options) -> Dataset[TextSplit]:
    """17,500 / 7,500 / 25,000 reviews; which are for validation is the same in all runs."""
    encoded = cached(
        located.root,
        f"imdb-{_VERSION}-{reviews.digest(located)[:32]}.safetensors",
        lambda: _encode(reviews.read(located)),
        _dump,
        _parse,
    )

    def part(name: str) -> TextSplit:
        found = encoded.parts[name]
        chosen = limited(torch.arange(len(found.labels)), options.limit)
        pieces = torch.split(found.tokens, found.lengths.tolist())
        tokens = torch.cat([pieces[index] for index in chosen.tolist()])
        return TextSplit(
            tokens.to(device), found.lengths[chosen], found.labels[chosen].to(device), encoded.vocabulary
        )  # fmt: skip

    return Dataset(part("train"), part("validation"), part("test"), classes=2)


def check(located: Located, progress: Callable[[int, int], None]) -> str:
    """Compare the archive's checksum with the published one, and count the reviews."""
    archive = ARCHIVES["imdb"]
    if located.path.name == archive.name and md5(located.path) != archive.md5:
        raise DataError(
            f"{located.path} differs from the published file (MD5 {archive.md5}); remove it and fetch it again"
        )
    found = reviews.read(located)
    for part, entries in found.items():
        liked = sum(entry.label for entry in entries)
        if (len(entries), liked) != (PUBLISHED, PUBLISHED // 2):
            raise DataError(
                f"{located.path} has {liked:,} positive of {len(entries):,} reviews for {part}, "
                f"but {PUBLISHED // 2:,} of {PUBLISHED:,} were published; fetch it again"
            )
    return f"{sum(map(len, found.values())):,} reviews, half of them positive"


def _encode(found: reviews.Reviews) -> _Encoded:
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
