"""Find cuts near the previous ones: count the scores above a bracket around the expected threshold, rank those inside.

``collect`` counts and collects, ``compare`` ranks. After a miss (the cut is outside the bracket) see ``radix_select``.
"""

import triton
import triton.language as tl

from iterand.backend.triton.layers import (
    ABOVE,
    BRACKET,
    CENTRE,
    COLUMNS,
    FAILED,
    FOUND,
    NAN,
    WIDTH,
    index_of,
    kept_total,
    locate,
    move_bracket,
    ordered,
    ranked,
    unordered,
    write_cut,
    write_empty_cut,
)


@triton.jit
def collect(
    block_layer, table, scores, members, first_thresholds, first_lasts, ranges,
    bracket, numbers, keys, positions,
    CANDIDATES: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, MAGNITUDE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Count the scores above the bracket and collect the candidates inside. A program handles PARTS blocks."""
    program = tl.program_id(0)
    layer, start, left = locate(block_layer, table, program, BLOCK * PARTS)
    lane = tl.arange(0, BLOCK)
    group = tl.load(members + layer * 2)
    centre = tl.load(bracket + group * BRACKET + CENTRE)
    width = tl.load(bracket + group * BRACKET + WIDTH)
    low = ordered(centre - width, False)
    high = ordered(centre + width, False)
    counts = tl.zeros([BLOCK], tl.int32)
    missing = tl.zeros([BLOCK], tl.int32)
    for part in tl.static_range(PARTS):
        exists = lane < left - part * BLOCK
        key, nan = ranked(
            scores, table, layer, start + part * BLOCK, lane, exists, first_thresholds, first_lasts, MAGNITUDE, FIRST
        )
        counts += tl.where(exists & (key >= high), 1, 0) + tl.where(exists & (key >= low) & (key < high), 1 << 16, 0)
        missing += tl.where(nan, 1, 0)
    # One reduction instead of three: scores above, inside and NaN.
    total = tl.sum(counts.to(tl.int64) + (missing.to(tl.int64) << 32), 0)
    row = numbers + group * COLUMNS
    above = total & 0xFFFF
    many = (total >> 16) & 0xFFFF
    if above > 0:
        tl.atomic_add(row + ABOVE, above, sem="relaxed")
    if (total >> 32) > 0:
        tl.atomic_add(row + NAN, 1, sem="relaxed")
    if many > 0:
        # If there are far more than fit, count them as a miss instead of collecting them.
        fit = (many <= BLOCK * PARTS // 8) | (tl.load(table + layer * 4) <= 8 * CANDIDATES)
        slot = tl.atomic_add(row + FOUND, tl.where(fit, many, CANDIDATES + 1), sem="relaxed") - 1
        if fit:
            for again in range(0, PARTS):
                exists = lane < left - again * BLOCK
                offset = start + again * BLOCK
                key, _ = ranked(
                    scores, table, layer, offset, lane, exists, first_thresholds, first_lasts, MAGNITUDE, FIRST
                )  # fmt: skip
                inside = exists & (key >= low) & (key < high)
                candidate = slot + tl.cumsum(inside.to(tl.int32), 0)
                fits = inside & (candidate < CANDIDATES)
                tl.store(keys + group * CANDIDATES + candidate, key, mask=fits)
                position = program.to(tl.int64) * (BLOCK * PARTS) + again * BLOCK + lane
                tl.store(positions + group * CANDIDATES + candidate, position, mask=fits)
                slot += tl.sum(inside.to(tl.int32), 0)


@triton.jit
def _index_in_group(block_layer, table, members, position, mask, BLOCK: tl.constexpr):
    """Index in the group of the candidates with these positions (block · BLOCK + lane)."""
    block = position // BLOCK
    layer = tl.load(block_layer + block, mask=mask, other=0)
    start = (block - tl.load(table + layer * 4 + 1)) * BLOCK
    return index_of(table, layer, start, (position % BLOCK).to(tl.int32)) + tl.load(members + layer * 2 + 1)


@triton.jit
def compare(
    block_layer, table, members, ranges, kept, bracket, numbers, any_failed,
    keys, positions, thresholds, lasts,
    CANDIDATES: tl.constexpr, WANTED: tl.constexpr, TILE: tl.constexpr, OTHERS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Find the cut among the candidates by comparing each with all others, and adjust the bracket."""
    group = tl.program_id(0)
    start = tl.program_id(1) * TILE
    row = numbers + group * COLUMNS
    found = tl.load(row + FOUND)
    if (start > 0) & (start >= found):
        return
    above = tl.load(row + ABOVE)
    need = kept_total(ranges, kept, group) - above
    centre = tl.load(bracket + group * BRACKET + CENTRE)
    if (need == 0) & (above > 0) & (centre != centre):  # with a NaN centre, only scores that rank first are above
        if start == 0:
            write_empty_cut(ranges, group, thresholds, lasts)
    elif (need < 1) | (need > found) | (found > CANDIDATES):
        if (start == 0) & (need + above > 0):
            tl.store(row + FAILED, 1)
            tl.store(any_failed, 1)
    else:
        keys += group * CANDIDATES
        positions += group * CANDIDATES
        candidate = start + tl.arange(0, TILE)
        exists = candidate < found
        key = tl.load(keys + candidate, mask=exists, other=-2147483648)
        compared = tl.zeros([TILE, OTHERS], tl.int32)
        for offset in range(0, found, OTHERS):
            other = offset + tl.arange(0, OTHERS)
            valid = (other < found)[None, :]
            others = tl.load(keys + other, mask=other < found, other=-2147483648)[None, :]
            compared += tl.where(valid & (others > key[:, None]), 1 << 16, 0)
            compared += tl.where(valid & (others == key[:, None]), 1, 0)
        counts = tl.sum(compared, 1)
        higher = counts >> 16
        equal = counts & 0xFFFF
        chosen = exists & (higher < need) & (need <= higher + equal)
        if tl.max(chosen.to(tl.int32), 0) > 0:
            index = _index_in_group(
                block_layer, table, members, tl.load(positions + candidate, mask=exists, other=0), exists, BLOCK
            )
            if tl.max(tl.where(chosen, equal, 0), 0) > 1:  # ties: the lower index ranks first
                before = tl.zeros([TILE], tl.int32)
                for offset in range(0, found, OTHERS):
                    other = offset + tl.arange(0, OTHERS)
                    valid = other < found
                    others = tl.load(keys + other, mask=valid, other=-2147483648)
                    position = tl.load(positions + other, mask=valid, other=0)
                    indices = _index_in_group(block_layer, table, members, position, valid, BLOCK)
                    same = valid[None, :] & (others[None, :] == key[:, None]) & (indices[None, :] < index[:, None])
                    before += tl.sum(same.to(tl.int32), 1)
                chosen = chosen & (higher + before + 1 == need)
            if tl.max(chosen.to(tl.int32), 0) > 0:
                best = tl.max(tl.where(chosen, key, -2147483648), 0)
                threshold = unordered(best)
                last = tl.max(tl.where(chosen, index, 0), 0)
                write_cut(members, ranges, group, threshold, last, thresholds, lasts)
                bracket += group * BRACKET
                width = tl.load(bracket + WIDTH)
                error = tl.abs(threshold - centre)
                share = found.to(tl.float32)
                # Narrow slowly: a threshold may move little in one step and far in the next.
                wanted = tl.maximum(tl.maximum(width * (WANTED / share), 4 * error), 0.9 * width)
                tl.store(bracket + WIDTH, tl.minimum(wanted, width * (0.7 * CANDIDATES / share)))
                move_bracket(bracket, threshold)
