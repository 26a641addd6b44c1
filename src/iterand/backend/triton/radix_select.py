"""Finding the cut from nowhere: the bits of scores, and of indices where scores are equal, eleven at a time."""

import triton
import triton.language as tl

from iterand.backend.triton.layers import (
    ABOVE,
    BRACKET,
    COLUMNS,
    FAILED,
    FOUND,
    MISSES,
    NAN,
    WIDTH,
    aim,
    index_of,
    kept_of,
    locate,
    ranked,
    unordered,
    write_cut,
    write_nothing,
)


@triton.jit
def _shift(number):
    """How far a digit of a key lies from its end: those of the last round are ten bits."""
    return tl.maximum(21 - 11 * number, 0)


@triton.jit
def _index_shift(number):
    """The same for the digits of an index, whose rounds come after those of keys."""
    return 11 * (5 - number)


@triton.jit
def _reversed(index):
    """Lower indices are kept first: how far each is from the last of 33 bits, three digits; and back."""
    return 0x1FFFFFFFF - index


@triton.jit
def _chosen_digit(digits, need, DIGITS: tl.constexpr):
    """The digit of the ``need``-th highest, how many of these are left to find, and how many share the digit."""
    value = tl.arange(0, DIGITS)
    count = tl.load(digits + value).to(tl.uint32, bitcast=True).to(tl.int64)
    total = tl.sum(count, 0)
    down = total - tl.cumsum(count, 0)  # with a higher digit
    chosen = tl.max(tl.where(down + count >= need, value, -1), 0)
    here = value == chosen
    return chosen, need - tl.sum(tl.where(here, down, 0), 0), tl.sum(tl.where(here, count, 0), 0)


@triton.jit
def _known(rows, need, number, DIGITS: tl.constexpr):
    """The cut as far as its digits before a round tell: of its key and of its index, the rest of their bits zero."""
    key = need - need
    index = need - need
    for before in range(0, tl.minimum(number, 3)):
        chosen, need, _many = _chosen_digit(rows + before * DIGITS, need, DIGITS)
        key |= chosen.to(tl.int64) << _shift(before)
    for before in range(3, number):
        chosen, need, _many = _chosen_digit(rows + before * DIGITS, need, DIGITS)
        index |= chosen.to(tl.int64) << _index_shift(before)
    return key, index


@triton.jit
def _add(digits, group, number, counts, ROUNDS: tl.constexpr, DIGITS: tl.constexpr):
    """Add a program's counts to those of all, if it has counted for a group."""
    if group >= 0:
        place = digits + (group * ROUNDS + number) * DIGITS + tl.arange(0, DIGITS)
        tl.atomic_add(place, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["number"])
def count_digits(
    owner, table, scores, members, first_thresholds, first_lasts, ranges,
    kept, numbers, any_failed, digits, blocks, number,
    INDICES: tl.constexpr, ROUNDS: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr,
    MAGNITUDE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Count the digits of a round among the scores whose digits before are those of the cut.

    A program counts over all its blocks before it adds to the counts of others. The round is no constant, so that two
    kernels are compiled and not six: one for scores, one for ``INDICES`` too.
    """
    if tl.load(any_failed) != 0:
        share = tl.cdiv(blocks, tl.num_programs(0))
        begin = tl.program_id(0) * share
        lane = tl.arange(0, BLOCK)
        value = tl.arange(0, DIGITS)
        counts = tl.zeros([DIGITS], tl.int32)
        # Of the group that is being counted; none yet.
        present = tl.load(members) * 0 - 1
        cut_key = present * 0
        cut_index = present * 0
        for block in range(begin, tl.minimum(begin + share, blocks)):
            layer, start, left = locate(owner, table, block, BLOCK)
            group = tl.load(members + layer * 2)
            if tl.load(numbers + group * COLUMNS + FAILED) != 0:
                if group != present:
                    _add(digits, present, number, counts, ROUNDS, DIGITS)
                    counts = tl.zeros([DIGITS], tl.int32)
                    present = group
                    rows = digits + group * (ROUNDS * DIGITS)
                    cut_key, cut_index = _known(rows, kept_of(ranges, kept, group), number, DIGITS)
                exists = lane < left
                ordered_key, _nan = ranked(
                    scores, table, layer, start, lane, exists, first_thresholds, first_lasts, MAGNITUDE, FIRST
                )  # fmt: skip
                bits = (ordered_key ^ -2147483648).to(tl.uint32, bitcast=True).to(tl.int64)
                shift = _shift(number)
                # The digits that are known must be those of the cut; what follows them is shifted away.
                exists = exists & ((bits ^ cut_key) >> _shift(number - 1) == 0)
                if tl.max(exists.to(tl.int32), 0) > 0:
                    if INDICES:
                        bits = _reversed(index_of(table, layer, start, lane) + tl.load(members + layer * 2 + 1))
                        exists = exists & ((bits ^ cut_index) >> _index_shift(number - 1) == 0)
                        shift = _index_shift(number)
                    digit = ((bits >> shift) & tl.where(number == 2, 1023, 2047)).to(tl.int32)
                    others = BLOCK - tl.sum(exists.to(tl.int32), 0)
                    counts += tl.histogram(tl.where(exists, digit, 0), DIGITS) - tl.where(value == 0, others, 0)
        _add(digits, present, number, counts, ROUNDS, DIGITS)


@triton.jit
def settle(
    members, ranges, kept, bracket, numbers, any_failed, digits,
    thresholds, lasts,
    ROUNDS: tl.constexpr, DIGITS: tl.constexpr, WANTED: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Put the cut together from its digits, where these were counted, and make ready for the next time."""
    group = tl.program_id(0)
    row = numbers + group * COLUMNS
    need = kept_of(ranges, kept, group)
    if need == 0:
        write_nothing(ranges, group, thresholds, lasts)
    elif tl.load(row + FAILED) != 0:
        rows = digits + group * (ROUNDS * DIGITS)
        first, _need, many = _chosen_digit(rows, need, DIGITS)
        high = first << 21
        bits, index = _known(rows, need, ROUNDS, DIGITS)
        key = bits.to(tl.int32) ^ -2147483648
        threshold = unordered(key)
        if key == 0x7FFFFFFF:
            write_nothing(ranges, group, thresholds, lasts)
        else:
            write_cut(members, ranges, group, threshold, _reversed(index), thresholds, lasts)
        # As wide as holds the wanted number, if scores lie as densely as around their first digit. If too many were
        # inside, they lie more densely than that.
        bottom = unordered(high ^ -2147483648)
        top = unordered((high | 0x1FFFFF) ^ -2147483648)
        width = (top - bottom) * (0.5 * WANTED / many.to(tl.float32))
        bracket += group * BRACKET
        if tl.load(row + FOUND) > CANDIDATES:
            width = tl.minimum(width, 0.5 * tl.load(bracket + WIDTH))
        tl.store(bracket + WIDTH, width)
        aim(bracket, threshold)
        tl.store(row + MISSES, tl.load(row + MISSES) + 1)
        for number in range(0, ROUNDS):
            tl.store(rows + number * DIGITS + tl.arange(0, DIGITS), tl.zeros([DIGITS], tl.int32))
    if tl.load(row + NAN) != 0:
        write_cut(members, ranges, group, float("nan"), 0, thresholds, lasts)
    tl.store(row + ABOVE, 0)
    tl.store(row + FOUND, 0)
    tl.store(row + NAN, 0)
    tl.store(row + FAILED, 0)
    tl.store(any_failed, 0)
