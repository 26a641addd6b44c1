"""Entropy coder of tickets: interleaved rANS. Encoder and decoder derive the frequencies from the symbol counts.

Section 4 of ``docs/reference/ticket-format.md`` specifies it. A sequence of symbols is first cut into *coded symbols*:
groups of several symbols, or the runs between occurrences of a rare one. All sequences of a ticket share one coder with
many interleaved lanes: NumPy codes one symbol of every lane per step. Frequencies are computed with integers only, so
they are the same on every machine.
"""

import itertools
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Symbols = NDArray[np.unsignedinteger[Any]]
Kind = Literal["constant", "bits", "runs", "groups"]

PRECISION = 16  # frequencies are multiples of 2⁻¹⁶
MAX_ALPHABET = 1 << PRECISION  # every symbol has a frequency of at least 1
MAX_LENGTH = (1 << 32) - 1  # keeps the products of the frequencies within 64 bits

_BITS, _MASK, _LOW = np.uint32(16), np.uint32(0xFFFF), np.uint32(1 << 16)  # states stay in [2¹⁶, 2³²)
_MAX_LANES = 2048
_SYMBOLS_PER_LANE = 2048
_MAX_GROUPS = 256
_LONGEST_RUN = 255


class Model:
    """The symbol counts of a sequence over 0 … A − 1, and all coding parameters derived from them."""

    def __init__(self, counts: Sequence[int]) -> None:
        self.counts = tuple(counts)
        self.length = sum(self.counts)
        self.alphabet = len(self.counts)

    @cached_property
    def kind(self) -> Kind:
        """How the sequence is cut. Two symbols of similar frequency are stored as raw bits, bypassing the coder."""
        if self.alphabet < 2:
            return "constant"
        if self.alphabet == 2 and 16 * abs(self.counts[0] - self.counts[1]) <= self.length:
            return "bits"
        return "runs" if self.alphabet == 2 and 8 * min(self.counts) <= self.length else "groups"

    @property
    def rare(self) -> int:
        """The rarer of two symbols."""
        return 1 if self.counts[1] <= self.counts[0] else 0

    @cached_property
    def group_size(self) -> int:
        """Number of symbols coded as one: the largest that gives at most 256 different groups."""
        size = 1
        while self.alphabet ** (size + 1) <= _MAX_GROUPS:
            size += 1
        return size

    @property
    def min_coded(self) -> int:
        """Minimum number of coded symbols: all groups, or one run per rare symbol."""
        if self.kind == "groups":
            return -(-self.length // self.group_size)
        return self.counts[self.rare] if self.kind == "runs" else 0

    @property
    def max_coded(self) -> int:
        """Maximum number of coded symbols: a run above 254 takes several."""
        return self.min_coded + ((self.length - self.min_coded) // _LONGEST_RUN if self.kind == "runs" else 0)

    @cached_property
    def frequencies(self) -> NDArray[np.uint32]:
        """Frequency of each coded symbol in units of 2⁻¹⁶; at least 1."""
        share = self._group_shares() if self.kind == "groups" else self._run_shares()
        frequency = share + np.uint64(1)
        frequency[share.argmax()] += np.uint64(1 << PRECISION) - frequency.sum()
        return frequency.astype(np.uint32)

    @cached_property
    def slots(self) -> NDArray[np.uint32]:
        """Cumulative frequency F (upper 16 bits) and frequency f (lower 16 bits) of each coded symbol."""
        first = self.frequencies.cumsum(dtype=np.uint32) - self.frequencies
        return first << _BITS | self.frequencies

    def _group_shares(self) -> NDArray[np.uint64]:
        counts = np.array(self.counts, dtype=np.uint64)
        groups = self.alphabet**self.group_size
        share = np.array([(1 << PRECISION) - groups << PRECISION], dtype=np.uint64)
        for _ in range(self.group_size):
            share = (share[:, None] * counts // np.uint64(self.length)).reshape(-1)
        return share >> np.uint64(PRECISION)

    def _run_shares(self) -> NDArray[np.uint64]:
        chance = (min(self.counts) << 32) // self.length
        left = [1 << 32]  # probability of a run at least this long, in units of 2⁻³²
        for _ in range(_LONGEST_RUN):
            left.append(left[-1] * ((1 << 32) - chance) >> 32)
        probability = [longer - shorter for longer, shorter in itertools.pairwise(left)] + left[-1:]
        return np.array([((1 << PRECISION) - len(left)) * each >> 32 for each in probability], dtype=np.uint64)

    def cut(self, sequence: Symbols) -> Symbols:
        """Cut a sequence with these counts into coded symbols."""
        if self.kind == "constant":
            return np.empty(0, dtype=np.uint8)
        if self.kind == "runs":
            gaps = np.diff(np.flatnonzero(sequence == self.rare), prepend=-1) - 1
            ends = np.cumsum(gaps // _LONGEST_RUN + 1) - 1
            runs = np.full(ends[-1] + 1, _LONGEST_RUN, dtype=np.uint8)
            runs[ends] = gaps % _LONGEST_RUN
            return runs
        if self.alphabet == 2:  # eight symbols per byte
            return np.packbits(sequence)
        padded = np.zeros(
            self.min_coded * self.group_size, dtype=np.min_scalar_type(self.alphabet**self.group_size - 1)
        )
        padded[: self.length] = sequence
        groups = padded[:: self.group_size].copy()
        for position in range(1, self.group_size):
            groups *= self.alphabet
            groups += padded[position :: self.group_size]
        return groups

    def join(self, coded: Symbols) -> Symbols:
        """The inverse of ``cut``. Raises ValueError if the sequence does not have these counts."""
        if self.kind == "constant":
            return np.zeros(self.length, dtype=np.uint8)
        return self._join_runs(coded) if self.kind == "runs" else self._join_groups(coded)

    def _join_runs(self, coded: Symbols) -> Symbols:
        ends = coded < _LONGEST_RUN
        positions = (np.cumsum(coded, dtype=np.int64) + np.cumsum(ends))[ends] - 1
        if positions[-1] >= self.length:
            raise ValueError("its runs are longer than the tensor")
        sequence = np.full(self.length, 1 - self.rare, dtype=np.uint8)
        sequence[positions] = self.rare
        return sequence

    def _join_groups(self, coded: Symbols) -> Symbols:
        size = self.group_size
        weights = self.alphabet ** np.arange(size - 1, -1, -1)
        members = np.arange(self.alphabet**size)[:, None] // weights % self.alphabet
        padding = len(coded) * size - self.length
        found = np.zeros(self.alphabet, dtype=np.int64)
        np.add.at(found, members, np.bincount(coded, minlength=len(members))[:, None])
        found[0] -= padding
        if members[coded[-1], size - padding :].any() or not np.array_equal(found, self.counts):
            raise ValueError("its symbols do not occur as often as the header says")
        if self.alphabet == 2:
            return np.unpackbits(coded, count=self.length)
        small = members.astype(np.min_scalar_type(self.alphabet - 1))
        sequence: Symbols = small[coded].reshape(-1)[: self.length]
        return sequence


def lane_count(models: Sequence[Model]) -> int:
    """Number of interleaved lanes: enough for NumPy to be fast, few enough that their states cost little."""
    symbols = sum(model.min_coded for model in models)
    return min(_MAX_LANES, -(-symbols // _SYMBOLS_PER_LANE))


def encode(sequences: Sequence[Symbols], models: Sequence[Model]) -> bytes:
    """Encode coded symbols: raw bits, then the states of all lanes, then the words in decoding order."""
    state = np.full(lane_count(models), _LOW, dtype=np.uint32)
    bits: list[bytes] = []
    words: list[bytes] = []
    # rANS decodes in the reverse order of encoding, so encode from the end.
    for coded, model in zip(reversed(sequences), reversed(models)):
        if not model.min_coded:
            bits.append(coded.tobytes())
            continue
        numbers = coded.astype(np.intp)
        for start in range((len(numbers) - 1) // len(state) * len(state), -1, -len(state)):
            slots = model.slots.take(numbers[start : start + len(state)])
            x = state[: len(slots)]
            frequency, first = slots & _MASK, slots >> _BITS
            full = np.flatnonzero(x >> _BITS >= frequency)  # these states would overflow
            words.append(x[full].astype("<u2").tobytes())
            x[full] >>= _BITS
            # x becomes (x // f) · 2¹⁶ + F + x % f.
            x += x // frequency * (_LOW - frequency) + first
    return b"".join([*reversed(bits), state.astype("<u4").tobytes(), *reversed(words)])


def decode(data: bytes, models: Sequence[Model]) -> list[Symbols]:
    """The inverse of ``encode``: the coded symbols of every sequence. Raises ValueError for malformed data."""
    sizes = [-(-model.length // 8) if model.kind == "bits" else 0 for model in models]
    lanes, start = lane_count(models), sum(sizes)
    if len(data) < start + 4 * lanes or (len(data) - start) % 2:
        raise ValueError(f"it has {len(data)} bytes; {start}, {lanes} states of 4 and words of 2 are expected")
    state = np.frombuffer(data, dtype="<u4", count=lanes, offset=start).astype(np.uint32)
    if (state < _LOW).any():
        raise ValueError("one of its states is too small")
    bits = np.split(np.frombuffer(data, dtype=np.uint8, count=start), np.cumsum(sizes)[:-1])
    words = _Words(np.frombuffer(data, dtype="<u2", offset=start + 4 * lanes).astype(np.uint32))
    decoded = [_decode(model, state, words) if model.min_coded else stored for model, stored in zip(models, bits)]
    if not words.all_taken or (state != _LOW).any():
        raise ValueError("it goes on after its last symbol")
    return decoded


class _Words:
    """Sequential reader of 16-bit words."""

    def __init__(self, words: NDArray[np.uint32]) -> None:
        self._words = words
        self._taken = 0

    def take(self, count: int) -> NDArray[np.uint32]:
        self._taken += count
        if self._taken > len(self._words):
            raise ValueError("it ends before its last symbol")
        return self._words[self._taken - count : self._taken]

    @property
    def all_taken(self) -> bool:
        return self._taken == len(self._words)


def _decode(model: Model, state: NDArray[np.uint32], words: _Words) -> Symbols:
    count = len(model.frequencies)
    symbol_at = np.arange(count, dtype=np.min_scalar_type(count - 1)).repeat(model.frequencies)
    parts = []
    lane, missing, allowed = 0, model.min_coded, model.max_coded
    while missing:
        x = state[lane : lane + missing]
        slot = x & _MASK
        symbols = symbol_at.take(slot)
        slots = model.slots.take(symbols)
        # x becomes f · (x // 2¹⁶) + slot − F.
        x >>= _BITS
        x *= slots & _MASK
        x += slot - (slots >> _BITS)
        low = np.flatnonzero(x < _LOW)
        x[low] = x[low] << _BITS | words.take(len(low))
        parts.append(symbols)
        allowed -= len(symbols)
        if allowed < 0:
            raise ValueError("its runs are longer than the tensor")
        lane = (lane + len(symbols)) % len(state)
        missing -= int(np.count_nonzero(symbols < _LONGEST_RUN)) if model.kind == "runs" else len(symbols)
    return np.concatenate(parts)
