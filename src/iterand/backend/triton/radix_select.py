"""Find cuts by radix selection, after a miss of the bracket: 11 bits of the keys per round, then of the indices.

Three rounds of ``count_digits`` find the key of the threshold, highest digit first; three more find the last index
among equal scores. They return at once if no bracket missed. ``finish`` assembles the cut and resets the counters.
"""

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
    index_of,
    kept_total,
    locate,
    move_bracket,
    ranked,
    unordered,
    write_cut,
    write_empty_cut,
)


@triton.jit
def _shift(number):
    """Bits to the right of the digit of a round, for keys: 11, 11 and 10 bits wide."""
    return tl.maximum(21 - 11 * number, 0)


@triton.jit
def _index_shift(number):
    """Bits to the right of the digit of a round, for indices: rounds 3, 4 and 5, 11 bits each."""
    return 11 * (5 - number)


@triton.jit
def _reversed(index):
    """2³³ − 1 − index, so that lower indices rank first; its own inverse."""
    return 0x1FFFFFFFF - index


@triton.jit
def _chosen_digit(digits, need, DIGITS: tl.constexpr):
    """Digit of the ``need``-th highest element, its rank among those with that digit, and their number."""
    value = tl.arange(0, DIGITS)
    count = tl.load(digits + value).to(tl.uint32, bitcast=True).to(tl.int64)
    total = tl.sum(count, 0)
    above = total - tl.cumsum(count, 0)  # elements with a higher digit
    chosen = tl.max(tl.where(above + count >= need, value, -1), 0)
    equal = value == chosen
    return chosen, need - tl.sum(tl.where(equal, above, 0), 0), tl.sum(tl.where(equal, count, 0), 0)


@triton.jit
def _cut_prefix(rows, need, number, DIGITS: tl.constexpr):
    """Key and index of the cut from the digits before a round; the remaining bits are zero."""
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
    """Add the counts of a program to the digit counts of its group; −1 is no group."""
    if group >= 0:
        target = digits + (group * ROUNDS + number) * DIGITS + tl.arange(0, DIGITS)
        tl.atomic_add(target, counts, mask=counts > 0, sem="relaxed")


@triton.jit(do_not_specialize=["number"])
def count_digits(
    block_layer, table, scores, members, first_thresholds, first_lasts, ranges,
    kept, numbers, any_failed, digits, blocks, number,
    INDICES: tl.constexpr, ROUNDS: tl.constexpr, DIGITS: tl.constexpr, BLOCK: tl.constexpr,
    MAGNITUDE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Count the digits of a round among the scores whose earlier digits are those of the cut.

    A program sums over all its blocks before an atomic add. The round is not a compile-time constant, so that only two
    kernels are compiled instead of six: one for keys, one for ``INDICES``.
    """
    if tl.load(any_failed) != 0:
        share = tl.cdiv(blocks, tl.num_programs(0))
        begin = tl.program_id(0) * share
        lane = tl.arange(0, BLOCK)
        value = tl.arange(0, DIGITS)
        counts = tl.zeros([DIGITS], tl.int32)
        # The group that is being counted; −1 is none.
        current = tl.load(members) * 0 - 1
        cut_key = current * 0
        cut_index = current * 0
        for block in range(begin, tl.minimum(begin + share, blocks)):
            layer, start, left = locate(block_layer, table, block, BLOCK)
            group = tl.load(members + layer * 2)
            if tl.load(numbers + group * COLUMNS + FAILED) != 0:
                if group != current:
                    _add(digits, current, number, counts, ROUNDS, DIGITS)
                    counts = tl.zeros([DIGITS], tl.int32)
                    current = group
                    rows = digits + group * (ROUNDS * DIGITS)
                    cut_key, cut_index = _cut_prefix(rows, kept_total(ranges, kept, group), number, DIGITS)
                exists = lane < left
                ordered_key, _nan = ranked(
                    scores, table, layer, start, lane, exists, first_thresholds, first_lasts, MAGNITUDE, FIRST
                )  # fmt: skip
                bits = (ordered_key ^ -2147483648).to(tl.uint32, bitcast=True).to(tl.int64)
                shift = _shift(number)
                # Keep elements whose earlier digits equal those of the cut; later digits are shifted out.
                exists = exists & ((bits ^ cut_key) >> _shift(number - 1) == 0)
                if tl.max(exists.to(tl.int32), 0) > 0:
                    if INDICES:
                        bits = _reversed(index_of(table, layer, start, lane) + tl.load(members + layer * 2 + 1))
                        exists = exists & ((bits ^ cut_index) >> _index_shift(number - 1) == 0)
                        shift = _index_shift(number)
                    digit = ((bits >> shift) & tl.where(number == 2, 1023, 2047)).to(tl.int32)
                    others = BLOCK - tl.sum(exists.to(tl.int32), 0)
                    counts += tl.histogram(tl.where(exists, digit, 0), DIGITS) - tl.where(value == 0, others, 0)
        _add(digits, current, number, counts, ROUNDS, DIGITS)


@triton.jit
def finish(
    members, ranges, kept, bracket, numbers, any_failed, digits,
    thresholds, lasts,
    ROUNDS: tl.constexpr, DIGITS: tl.constexpr, WANTED: tl.constexpr, CANDIDATES: tl.constexpr,
):  # fmt: skip
    """Assemble the cut of a group from its digits after a miss, set a new bracket, and reset all counters."""
    group = tl.program_id(0)
    row = numbers + group * COLUMNS
    need = kept_total(ranges, kept, group)
    if need == 0:
        write_empty_cut(ranges, group, thresholds, lasts)
    elif tl.load(row + FAILED) != 0:
        rows = digits + group * (ROUNDS * DIGITS)
        first, _need, many = _chosen_digit(rows, need, DIGITS)
        high = first << 21
        bits, index = _cut_prefix(rows, need, ROUNDS, DIGITS)
        key = bits.to(tl.int32) ^ -2147483648
        threshold = unordered(key)
        if key == 0x7FFFFFFF:
            write_empty_cut(ranges, group, thresholds, lasts)
        else:
            write_cut(members, ranges, group, threshold, _reversed(index), thresholds, lasts)
        # Width for WANTED scores, if their density is the average over the first digit. If too many were inside the
        # old bracket, the density is higher than that.
        bottom = unordered(high ^ -2147483648)
        top = unordered((high | 0x1FFFFF) ^ -2147483648)
        width = (top - bottom) * (0.5 * WANTED / many.to(tl.float32))
        bracket += group * BRACKET
        if tl.load(row + FOUND) > CANDIDATES:
            width = tl.minimum(width, 0.5 * tl.load(bracket + WIDTH))
        tl.store(bracket + WIDTH, width)
        move_bracket(bracket, threshold)
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
