"""The cut of all layers on the device, exact and without a wait: find it near the last one, or digit by digit.

Scores move little between two steps, so the cut lies close to where it was. One pass over the scores counts those
above a bracket around the last threshold and collects the few inside; comparing these with each other gives the cut.
Where the counts say that the cut is not inside, it is found from the bits of the scores, eleven at a time, and of the
indices where scores are equal. Either way the cut is the same: the bracket only decides how long it takes.
"""

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from iterand.kernels.layers import BLOCK, Layers, floats, index_of, locate, pointers

CANDIDATES = 4096
"""How many scores may lie in a bracket."""
_WANTED = 1024  # scores that a bracket is made for
_TILE = 128
_DIGITS = 2048
_ROUNDS = 6
_PROGRAMS = 264  # of a round that usually has nothing to do

# Columns of a group's numbers.
_COLUMNS = 6
_ABOVE, _FOUND, _NAN, _FAILED, _MISSES = (tl.constexpr(column) for column in range(5))


class Selection:
    """The cuts of several tensors of scores (float32): each on its own, or all ranked as one.

    ``kept`` are 0-dimensional tensors, one for each tensor of scores; of tensors ranked as one their sum counts. Only
    the addresses of the tensors are kept here, so whoever asks for cuts must keep the tensors.
    ``thresholds`` and ``lasts`` hold the result: the numbers of a ``Cut`` for every tensor.
    """

    def __init__(
        self,
        scores: Sequence[Tensor],
        kept: Sequence[Tensor],
        *,
        together: bool = False,
        magnitude: bool = False,
        before: "Selection | None" = None,
    ) -> None:
        layers = Layers(scores)
        device, count = layers.device, len(scores)
        self.layers = layers
        self.scores, self._kept = pointers(scores), pointers(kept)
        self.thresholds = torch.zeros(count, dtype=torch.float32, device=device)
        self.lasts = torch.zeros(count, dtype=torch.int64, device=device)
        self.magnitude = magnitude
        self._before = before
        sizes = [sum(layers.sizes)] if together else layers.sizes
        ranges = [(0, count)] if together else [(i, 1) for i in range(count)]
        offsets = [sum(layers.sizes[:i]) if together else 0 for i in range(count)]
        group = [0] * count if together else list(range(count))
        self._members = torch.tensor(list(zip(group, offsets)), dtype=torch.int64).to(device)
        self._ranges = torch.tensor(ranges, dtype=torch.int64).to(device)
        self._groups = len(sizes)
        widths = [torch.inf if size <= CANDIDATES else 0.0 for size in sizes]
        self._bracket = torch.tensor([(0.0, width) for width in widths]).to(device)
        self._numbers = torch.zeros(self._groups, _COLUMNS, dtype=torch.int64, device=device)
        self._any_failed = torch.zeros(1, dtype=torch.int32, device=device)
        self._keys = torch.empty(self._groups, CANDIDATES, dtype=torch.int32, device=device)
        self._places = torch.empty(self._groups, CANDIDATES, dtype=torch.int64, device=device)
        self._digits = torch.zeros(self._groups, _ROUNDS, _DIGITS, dtype=torch.int32, device=device)

    def find(self) -> None:
        """Find the cuts of the scores as they are now."""
        layers, before = self.layers, self._before
        places = (layers.owner, layers.table, self.scores, self._members)
        first = (before.thresholds, before.lasts) if before else (self.thresholds, self.lasts)
        options = {"BLOCK": BLOCK, "MAGNITUDE": self.magnitude, "FIRST": before is not None}
        _collect[(layers.blocks,)](
            *places, *first, self._ranges, self._bracket, self._numbers, self._keys, self._places,
            CANDIDATES=CANDIDATES, **options,
        )  # fmt: skip
        results = (self.thresholds, self.lasts)
        _compare[(self._groups, CANDIDATES // _TILE)](
            layers.owner, layers.table, self._members, self._ranges, self._kept, self._bracket, self._numbers,
            self._any_failed, self._keys, self._places, *results,
            CANDIDATES=CANDIDATES, WANTED=_WANTED, TILE=_TILE, BLOCK=BLOCK,
        )  # fmt: skip
        programs = min(_PROGRAMS, layers.blocks)
        for number in range(_ROUNDS):
            _count_digits[(programs,)](
                *places, *first, self._ranges, self._kept, self._numbers, self._any_failed, self._digits,
                layers.blocks, ROUND=number, ROUNDS=_ROUNDS, DIGITS=_DIGITS, **options,
            )  # fmt: skip
        _settle[(self._groups,)](
            self._members, self._ranges, self._kept, self._bracket, self._numbers, self._any_failed, self._digits,
            *results, ROUNDS=_ROUNDS, DIGITS=_DIGITS, WANTED=_WANTED,
        )  # fmt: skip

    def misses(self) -> Tensor:
        """How often, for every group, the cut was not in the bracket."""
        return self._numbers[:, int(_MISSES.value)]


@triton.jit
def ordered(score: Any, MAGNITUDE: tl.constexpr) -> Any:
    """Whole numbers in the order of float32 scores; the two zeros are one."""
    bits = score.to(tl.int32, bitcast=True)
    if MAGNITUDE:
        bits = bits & 0x7FFFFFFF
    return tl.where(bits < 0, tl.where(bits == -2147483648, 0, bits ^ 0x7FFFFFFF), bits)


@triton.jit
def unordered(key: Any) -> Any:
    """The score of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def keeps(key: Any, threshold: Any, last: Any, table: Any, layer: Any, position: Any, exists: Any) -> Any:
    """The mask of a cut; indices are only looked at where scores equal the threshold."""
    limit = ordered(threshold, False)
    kept = key > limit
    tied = (key == limit) & exists
    if tl.max(tied.to(tl.int32), 0) > 0:
        kept = kept | (tied & (index_of(table, layer, position) <= last))
    return kept


@triton.jit
def _ranked(
    scores: Any, table: Any, layer: Any, position: Any, exists: Any, thresholds: Any, lasts: Any,
    MAGNITUDE: tl.constexpr, FIRST: tl.constexpr,
) -> Any:  # fmt: skip
    """Keys of the scores at these positions; what another cut keeps ranks first."""
    score = tl.load(floats(scores, layer) + position, mask=exists, other=0.0)
    key = ordered(score, MAGNITUDE)
    nan = exists & (score != score)
    if FIRST:
        kept = keeps(key, tl.load(thresholds + layer), tl.load(lasts + layer), table, layer, position, exists)
        key = tl.where(kept, 0x7FFFFFFF, key)
    return key, nan


@triton.jit
def _kept_of(ranges: Any, kept: Any, group: Any) -> Any:
    """How many scores of a group are kept."""
    first = tl.load(ranges + group * 2)
    total = first - first
    for member in range(first, first + tl.load(ranges + group * 2 + 1)):
        total += tl.load(tl.load(kept + member).to(tl.pointer_type(tl.int64)))
    return total


@triton.jit
def _write(members: Any, ranges: Any, group: Any, threshold: Any, last: Any, thresholds: Any, lasts: Any) -> Any:
    first = tl.load(ranges + group * 2)
    for member in range(first, first + tl.load(ranges + group * 2 + 1)):
        tl.store(thresholds + member, threshold)
        tl.store(lasts + member, last - tl.load(members + member * 2 + 1))


@triton.jit
def _write_nothing(ranges: Any, group: Any, thresholds: Any, lasts: Any) -> Any:
    """No score is kept, or none but those that rank first."""
    first = tl.load(ranges + group * 2)
    for member in range(first, first + tl.load(ranges + group * 2 + 1)):
        tl.store(thresholds + member, float("inf"))
        tl.store(lasts + member, -1)


@triton.jit
def _collect(
    owner: Any, table: Any, scores: Any, members: Any, first_thresholds: Any, first_lasts: Any, ranges: Any,
    bracket: Any, numbers: Any, keys: Any, places: Any,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, MAGNITUDE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Count the scores above the bracket and note those inside."""
    block = tl.program_id(0)
    layer, position, exists = locate(owner, table, block, BLOCK)
    group = tl.load(members + layer * 2)
    key, nan = _ranked(
        scores, table, layer, position, exists, first_thresholds, first_lasts, MAGNITUDE, FIRST
    )  # fmt: skip
    center = tl.load(bracket + group * 2)
    width = tl.load(bracket + group * 2 + 1)
    high = ordered(center + width, False)
    inside = exists & (key >= ordered(center - width, False)) & (key < high)
    row = numbers + group * 6
    tl.atomic_add(row + _ABOVE, tl.sum((exists & (key >= high)).to(tl.int64), 0))
    if tl.max(nan.to(tl.int32), 0) > 0:
        tl.atomic_add(row + _NAN, 1)
    many = tl.sum(inside.to(tl.int32), 0)
    if many > 0:
        alone = tl.load(ranges + group * 2 + 1) == 1
        if (many <= BLOCK // 8) | (alone & (tl.load(table + layer * 4) <= 8 * CANDIDATES)):
            slot = tl.atomic_add(row + _FOUND + tl.zeros_like(position), 1, mask=inside)
            fits = inside & (slot < CANDIDATES)
            tl.store(keys + group * CANDIDATES + slot, key, mask=fits)
            tl.store(places + group * CANDIDATES + slot, block * BLOCK + tl.arange(0, BLOCK), mask=fits)
        else:  # far more than there is room for
            tl.atomic_add(row + _FOUND, CANDIDATES + 1)


@triton.jit
def _index_in_group(owner: Any, table: Any, members: Any, place: Any, mask: Any, BLOCK: tl.constexpr) -> Any:
    block = place // BLOCK
    layer = tl.load(owner + block, mask=mask, other=0)
    position = (block - tl.load(table + layer * 4 + 1)) * BLOCK + place % BLOCK
    return index_of(table, layer, position) + tl.load(members + layer * 2 + 1)


@triton.jit
def _compare(
    owner: Any, table: Any, members: Any, ranges: Any, kept: Any, bracket: Any, numbers: Any, any_failed: Any,
    keys: Any, places: Any, thresholds: Any, lasts: Any,
    CANDIDATES: tl.constexpr, WANTED: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the cut among the scores inside the bracket by comparing each with all, if it is there."""
    group = tl.program_id(0)
    start = tl.program_id(1) * TILE
    row = numbers + group * 6
    above = tl.load(row + _ABOVE)
    found = tl.load(row + _FOUND)
    need = _kept_of(ranges, kept, group) - above
    if (need < 1) | (need > found) | (found > CANDIDATES):
        if (start == 0) & (need + above > 0):
            tl.store(row + _FAILED, 1)
            tl.store(any_failed, 1)
    elif start < found:
        keys += group * CANDIDATES
        places += group * CANDIDATES
        own = start + tl.arange(0, TILE)
        exists = own < found
        key = tl.load(keys + own, mask=exists, other=-2147483648)
        higher = tl.zeros([TILE], tl.int32)
        equal = tl.zeros([TILE], tl.int32)
        for at in range(0, found, TILE):
            other = at + tl.arange(0, TILE)
            there = (other < found)[None, :]
            others = tl.load(keys + other, mask=other < found, other=-2147483648)[None, :]
            higher += tl.sum((there & (others > key[:, None])).to(tl.int32), 1)
            equal += tl.sum((there & (others == key[:, None])).to(tl.int32), 1)
        chosen = exists & (higher < need) & (need <= higher + equal)
        if tl.max(chosen.to(tl.int32), 0) > 0:
            index = _index_in_group(owner, table, members, tl.load(places + own, mask=exists, other=0), exists, BLOCK)
            if tl.max(tl.where(chosen, equal, 0), 0) > 1:  # the lower index goes first
                before = tl.zeros([TILE], tl.int32)
                for at in range(0, found, TILE):
                    other = at + tl.arange(0, TILE)
                    there = other < found
                    others = tl.load(keys + other, mask=there, other=-2147483648)
                    place = tl.load(places + other, mask=there, other=0)
                    indices = _index_in_group(owner, table, members, place, there, BLOCK)
                    same = there[None, :] & (others[None, :] == key[:, None]) & (indices[None, :] < index[:, None])
                    before += tl.sum(same.to(tl.int32), 1)
                chosen = chosen & (higher + before + 1 == need)
            if tl.max(chosen.to(tl.int32), 0) > 0:
                best = tl.max(tl.where(chosen, key, -2147483648), 0)
                threshold = unordered(best)
                if best == 0x7FFFFFFF:
                    _write_nothing(ranges, group, thresholds, lasts)
                else:
                    last = tl.max(tl.where(chosen, index, 0), 0)
                    _write(members, ranges, group, threshold, last, thresholds, lasts)
                width = tl.load(bracket + group * 2 + 1)
                moved = tl.abs(threshold - tl.load(bracket + group * 2))
                share = found.to(tl.float32)
                wanted = tl.minimum(tl.maximum(width * (WANTED / share), 4 * moved), width * (0.7 * CANDIDATES / share))
                tl.store(bracket + group * 2, threshold)
                tl.store(bracket + group * 2 + 1, wanted)


@triton.jit
def _digit(key: Any, index: Any, ROUND: tl.constexpr) -> Any:
    """Eleven bits of (key, index) in the order in which scores are kept; the later the round, the lower the bits."""
    if ROUND < 3:
        shifted = (key ^ -2147483648).to(tl.uint32, bitcast=True)
        if ROUND == 0:
            digit = shifted >> 21
        elif ROUND == 1:
            digit = (shifted >> 10) & 2047
        else:
            digit = shifted & 1023
    else:
        digit = (0x1FFFFFFFF - index) >> (11 * (5 - ROUND)) & 2047
    return digit.to(tl.int32)


@triton.jit
def _chosen_digit(digits: Any, need: Any, DIGITS: tl.constexpr) -> Any:
    """The digit of the ``need``-th highest, how many of these are left to find, and how many share the digit."""
    value = tl.arange(0, DIGITS)
    count = tl.load(digits + value).to(tl.int64)
    total = tl.sum(count, 0)
    down = total - tl.cumsum(count, 0)  # with a higher digit
    chosen = tl.max(tl.where(down + count >= need, value, -1), 0)
    here = value == chosen
    return chosen, need - tl.sum(tl.where(here, down, 0), 0), tl.sum(tl.where(here, count, 0), 0)


@triton.jit
def _count_digits(
    owner: Any, table: Any, scores: Any, members: Any, first_thresholds: Any, first_lasts: Any, ranges: Any,
    kept: Any, numbers: Any, any_failed: Any, digits: Any, blocks: Any,
    ROUND: tl.constexpr, ROUNDS: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr,
    MAGNITUDE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Count the digits of a round among the scores whose digits before are those of the cut."""
    if tl.load(any_failed) != 0:
        share = tl.cdiv(blocks, tl.num_programs(0))
        start = tl.program_id(0) * share
        for block in range(start, tl.minimum(start + share, blocks)):
            layer, position, exists = locate(owner, table, block, BLOCK)
            group = tl.load(members + layer * 2)
            if tl.load(numbers + group * 6 + _FAILED) != 0:
                key, _ = _ranked(
                    scores, table, layer, position, exists, first_thresholds, first_lasts, MAGNITUDE, FIRST
                )  # fmt: skip
                index = position
                if ROUND >= 3:
                    index = index_of(table, layer, position) + tl.load(members + layer * 2 + 1)
                need = _kept_of(ranges, kept, group)
                rows = digits + group * (ROUNDS * DIGITS)
                for number in tl.static_range(ROUND):
                    chosen, need, _ = _chosen_digit(rows + number * DIGITS, need, DIGITS)
                    exists = exists & (_digit(key, index, number) == chosen)
                digit = tl.where(exists, _digit(key, index, ROUND), 0)
                count = tl.histogram(digit, DIGITS)
                count -= tl.where(tl.arange(0, DIGITS) == 0, BLOCK - tl.sum(exists.to(tl.int32), 0), 0)
                place = rows + ROUND * DIGITS + tl.arange(0, DIGITS)
                tl.atomic_add(place, count, mask=count > 0)


@triton.jit
def _settle(
    members: Any, ranges: Any, kept: Any, bracket: Any, numbers: Any, any_failed: Any, digits: Any,
    thresholds: Any, lasts: Any,
    ROUNDS: tl.constexpr, DIGITS: tl.constexpr, WANTED: tl.constexpr,
):  # fmt: skip
    """Put the cut together from its digits, where these were counted, and make ready for the next time."""
    group = tl.program_id(0)
    row = numbers + group * 6
    need = _kept_of(ranges, kept, group)
    if need == 0:
        _write_nothing(ranges, group, thresholds, lasts)
    elif tl.load(row + _FAILED) != 0:
        rows = digits + group * (ROUNDS * DIGITS)
        high, need, many = _chosen_digit(rows, need, DIGITS)
        middle, need, _ = _chosen_digit(rows + DIGITS, need, DIGITS)
        low, need, _ = _chosen_digit(rows + 2 * DIGITS, need, DIGITS)
        index = 0x1FFFFFFFF + need - need
        for number in tl.static_range(3, ROUNDS):
            digit, need, _ = _chosen_digit(rows + number * DIGITS, need, DIGITS)
            index -= digit.to(tl.int64) << (11 * (5 - number))
        key = ((high << 21) | (middle << 10) | low) ^ -2147483648
        threshold = unordered(key)
        if key == 0x7FFFFFFF:
            _write_nothing(ranges, group, thresholds, lasts)
        else:
            _write(members, ranges, group, threshold, index, thresholds, lasts)
        # As wide as holds the wanted number, if scores lie as densely as around their first digit.
        bottom = unordered((high << 21) ^ -2147483648)
        top = unordered(((high << 21) | 0x1FFFFF) ^ -2147483648)
        tl.store(bracket + group * 2, threshold)
        tl.store(bracket + group * 2 + 1, (top - bottom) * (0.5 * WANTED / many.to(tl.float32)))
        tl.store(row + _MISSES, tl.load(row + _MISSES) + 1)
        for number in tl.static_range(ROUNDS):
            tl.store(rows + number * DIGITS + tl.arange(0, DIGITS), tl.zeros([DIGITS], tl.int32))
    if tl.load(row + _NAN) != 0:
        _write(members, ranges, group, float("nan"), 0, thresholds, lasts)
    tl.store(row + _ABOVE, 0)
    tl.store(row + _FOUND, 0)
    tl.store(row + _NAN, 0)
    tl.store(row + _FAILED, 0)
    tl.store(any_failed, 0)
