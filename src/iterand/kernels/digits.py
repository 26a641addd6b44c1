"""Finding the cut from nowhere: the bits of scores, and of indices where scores are equal, eleven at a time."""

import triton
import triton.language as tl

from iterand.kernels.layers import index_of, locate
from iterand.kernels.ranking import (
    ABOVE,
    BRACKET,
    FAILED,
    FOUND,
    MISSES,
    NAN,
    WIDTH,
    aim,
    kept_of,
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
def _digit(key, index, number, INDICES: tl.constexpr):
    """Eleven bits of (key, index) in the order in which scores are kept; the later the round, the lower the bits."""
    shifted = (key ^ -2147483648).to(tl.uint32, bitcast=True) >> _shift(number)
    digit = (shifted & tl.where(number == 2, 1023, 2047)).to(tl.int32)
    if INDICES:
        of_index = (0x1FFFFFFFF - index) >> (11 * tl.minimum(5 - number, 2)) & 2047
        digit = tl.where(number < 3, digit, of_index.to(tl.int32))
    return digit


@triton.jit
def _chosen_digit(digits, need, DIGITS: tl.constexpr):
    """The digit of the ``need``-th highest, how many of these are left to find, and how many share the digit."""
    value = tl.arange(0, DIGITS)
    count = tl.load(digits + value).to(tl.int64)
    total = tl.sum(count, 0)
    down = total - tl.cumsum(count, 0)  # with a higher digit
    chosen = tl.max(tl.where(down + count >= need, value, -1), 0)
    here = value == chosen
    return chosen, need - tl.sum(tl.where(here, down, 0), 0), tl.sum(tl.where(here, count, 0), 0)


@triton.jit(do_not_specialize=["number"])
def count_digits(
    owner, table, scores, members, first_thresholds, first_lasts, ranges,
    kept, numbers, any_failed, digits, blocks, number,
    INDICES: tl.constexpr, ROUNDS: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr,
    MAGNITUDE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Count the digits of a round among the scores whose digits before are those of the cut.

    The round is no constant, so that two kernels are compiled and not six: one for scores, one for ``INDICES`` too.
    """
    if tl.load(any_failed) != 0:
        share = tl.cdiv(blocks, tl.num_programs(0))
        begin = tl.program_id(0) * share
        for block in range(begin, tl.minimum(begin + share, blocks)):
            layer, start, left = locate(owner, table, block, BLOCK)
            lane = tl.arange(0, BLOCK)
            exists = lane < left
            group = tl.load(members + layer * 2)
            if tl.load(numbers + group * 6 + FAILED) != 0:
                key, _nan = ranked(
                    scores, table, layer, start, lane, exists, first_thresholds, first_lasts, MAGNITUDE, FIRST
                )  # fmt: skip
                index = lane
                if INDICES:
                    index = index_of(table, layer, start, lane) + tl.load(members + layer * 2 + 1)
                need = kept_of(ranges, kept, group)
                rows = digits + group * (ROUNDS * DIGITS)
                for before in range(0, number):
                    chosen, need, _many = _chosen_digit(rows + before * DIGITS, need, DIGITS)
                    exists = exists & (_digit(key, index, before, INDICES) == chosen)
                digit = tl.where(exists, _digit(key, index, number, INDICES), 0)
                place = rows + number * DIGITS
                many = tl.sum(exists.to(tl.int32), 0)
                if many > BLOCK // 8:
                    count = tl.histogram(digit, DIGITS)
                    count -= tl.where(tl.arange(0, DIGITS) == 0, BLOCK - many, 0)
                    tl.atomic_add(place + tl.arange(0, DIGITS), count, mask=count > 0, sem="relaxed")
                elif many > 0:
                    tl.atomic_add(place + digit, 1, mask=exists, sem="relaxed")


@triton.jit
def settle(
    members, ranges, kept, bracket, numbers, any_failed, digits,
    thresholds, lasts,
    ROUNDS: tl.constexpr, DIGITS: tl.constexpr, WANTED: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Put the cut together from its digits, where these were counted, and make ready for the next time."""
    group = tl.program_id(0)
    row = numbers + group * 6
    need = kept_of(ranges, kept, group)
    if need == 0:
        write_nothing(ranges, group, thresholds, lasts)
    elif tl.load(row + FAILED) != 0:
        rows = digits + group * (ROUNDS * DIGITS)
        high, need, many = _chosen_digit(rows, need, DIGITS)
        high = high << 21
        key = high ^ -2147483648
        for number in range(1, 3):
            digit, need, _many = _chosen_digit(rows + number * DIGITS, need, DIGITS)
            key |= digit << _shift(number)
        index = 0x1FFFFFFFF + need - need
        for number in range(3, ROUNDS):
            digit, need, _many = _chosen_digit(rows + number * DIGITS, need, DIGITS)
            index -= digit.to(tl.int64) << (11 * (5 - number))
        threshold = unordered(key)
        if key == 0x7FFFFFFF:
            write_nothing(ranges, group, thresholds, lasts)
        else:
            write_cut(members, ranges, group, threshold, index, thresholds, lasts)
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
