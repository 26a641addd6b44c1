"""Entropy coding of a sequence whose symbols are counted beforehand: an ANS coder under measured frequencies.

The frequencies the coder works with come from the counts by whole-number arithmetic alone, so that every reader finds
the same ones. Symbols of a small alphabet are coded several at a time: it is faster, and no less tight.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import constriction
import numpy as np
from numpy.typing import NDArray

Symbols = NDArray[np.integer[Any]]
Value = TypeVar("Value", bound=np.generic)

PRECISION = 24  # frequencies are multiples of 2⁻²⁴
_GROUPED = 256  # so many symbols a group of symbols may have


def group_size(alphabet: int) -> int:
    """How many symbols of this alphabet are coded as one: the most that leave no more than 256 groups."""
    size = 1
    while alphabet ** (size + 1) <= _GROUPED:
        size += 1
    return size


def frequencies(counts: Sequence[int]) -> NDArray[np.uint64]:
    """How many of the 2²⁴ states belong to each group of symbols, the first symbol of a group weighing most.

    A group's share is the product of its symbols'; each group gets one state beyond it, so that none has none; what
    rounding leaves over goes to the likeliest group.
    """
    counted = np.array(counts, dtype=np.uint64)
    size = group_size(len(counts))
    share = np.array([(1 << PRECISION) - len(counts) ** size], dtype=np.uint64)
    for _ in range(size):
        share = (share[:, None] * counted // counted.sum()).reshape(-1)
    frequency = share + np.uint64(1)
    frequency[share.argmax()] += np.uint64(1 << PRECISION) - frequency.sum()
    return frequency


def encode(symbols: Symbols, counts: Sequence[int]) -> bytes:
    """The symbols 0 … len(counts) − 1, which occur so often, as little-endian 32-bit words."""
    if len(counts) < 2:
        return b""
    size = group_size(len(counts))
    padded = np.zeros(-(-symbols.size // size) * size, dtype=symbols.dtype)
    padded[: symbols.size] = symbols
    groups = padded[::size].astype(np.int32)
    for place in range(1, size):
        groups *= len(counts)
        groups += padded[place::size]
    coder = constriction.stream.stack.AnsCoder()
    coder.encode_reverse(groups, _model(counts))
    words: NDArray[np.uint32] = coder.get_compressed()
    return words.astype("<u4").tobytes()


def decode(data: bytes, counts: Sequence[int], values: NDArray[Value]) -> NDArray[Value]:
    """What ``values`` gives for the symbols behind ``data``; a ValueError if ``encode`` writes no such data."""
    length, alphabet = sum(counts), len(counts)
    if alphabet < 2:
        if data:
            raise ValueError("it should be empty")
        return values.repeat(length)
    if len(data) % 4:
        raise ValueError(f"it has {len(data)} bytes, not a multiple of 4")
    words = np.frombuffer(data, dtype="<u4").astype(np.uint32)
    if words.size and words[-1] == 0:
        raise ValueError("its last word is zero")
    size = group_size(alphabet)
    coder = constriction.stream.stack.AnsCoder(words)
    groups = coder.decode(_model(counts), -(-length // size))
    if not coder.is_empty():
        raise ValueError("it goes on after its last symbol")
    members = np.arange(alphabet**size)[:, None] // alphabet ** np.arange(size - 1, -1, -1) % alphabet
    padding = len(groups) * size - length
    found = np.zeros(alphabet, dtype=np.int64)
    np.add.at(found, members, np.bincount(groups, minlength=len(members))[:, None])
    found[0] -= padding
    if members[groups[-1], size - padding :].any() or not np.array_equal(found, counts):
        raise ValueError("its symbols do not occur as often as the header says")
    decoded: NDArray[Value] = values[members][groups].reshape(-1)[:length]
    return decoded


def entropy(counts: Sequence[int] | Symbols | NDArray[np.float64]) -> float:
    """The bits a sequence with these counts costs at least, under one frequency for all of it."""
    counted = np.array(counts, dtype=np.float64)
    counted = counted[counted > 0]
    return abs(float((counted * np.log2(counted / counted.sum())).sum()))


def _model(counts: Sequence[int]) -> constriction.stream.model.Categorical:
    # constriction gives every symbol one state and shares the rest out in proportion; a sum that is the rest itself
    # leaves it nothing to round.
    rest = frequencies(counts) - np.uint64(1)
    return constriction.stream.model.Categorical(rest.astype(np.float64), perfect=False)
