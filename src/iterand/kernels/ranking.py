"""Scores as whole numbers in their order, and what several kernels do with them."""

import triton
import triton.language as tl

from iterand.kernels.layers import floats, index_of

# Columns of a group's numbers: scores above the bracket and inside, NaN among them, whether the cut was not inside, and
# how often that was so.
ABOVE, FOUND, NAN, FAILED, MISSES = (tl.constexpr(column) for column in range(5))
COLUMNS = tl.constexpr(5)
# Columns of a group's bracket: its centre, half its width, the last threshold, and its distance from the one before.
CENTRE, WIDTH, LAST, DRIFT = (tl.constexpr(column) for column in range(4))
BRACKET = tl.constexpr(4)


@triton.jit
def ordered(score, MAGNITUDE: tl.constexpr):
    """Whole numbers in the order of float32 scores; the two zeros are one."""
    bits = score.to(tl.int32, bitcast=True)
    if MAGNITUDE:
        bits = bits & 0x7FFFFFFF
    return tl.where(bits < 0, tl.where(bits == -2147483648, 0, bits ^ 0x7FFFFFFF), bits)


@triton.jit
def unordered(key):
    """The score of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def keeps(key, threshold, last, table, layer, start, lane, exists):
    """The mask of a cut; indices are only looked at where scores equal the threshold."""
    limit = ordered(threshold, False)
    kept = key > limit
    tied = (key == limit) & exists
    if tl.max(tied.to(tl.int32), 0) > 0:
        kept = kept | (tied & (index_of(table, layer, start, lane) <= last))
    return kept


@triton.jit
def kept_at(scores, table, layer, start, lane, exists, thresholds, lasts, MAGNITUDE: tl.constexpr):
    """The mask at these places, by the cuts as they are."""
    score = tl.load(floats(scores, layer) + start + lane, mask=exists, other=0.0)
    threshold = tl.load(thresholds + layer)
    return keeps(ordered(score, MAGNITUDE), threshold, tl.load(lasts + layer), table, layer, start, lane, exists)


@triton.jit
def ranked(
    scores, table, layer, start, lane, exists, thresholds, lasts,
    MAGNITUDE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Keys of the scores at these places; what another cut keeps ranks first."""
    score = tl.load(floats(scores, layer) + start + lane, mask=exists, other=0.0)
    key = ordered(score, MAGNITUDE)
    nan = exists & (score != score)
    if FIRST:
        kept = keeps(key, tl.load(thresholds + layer), tl.load(lasts + layer), table, layer, start, lane, exists)
        key = tl.where(kept, 0x7FFFFFFF, key)
    return key, nan


@triton.jit
def kept_of(ranges, kept, group):
    """How many scores of a group are kept."""
    first = tl.load(ranges + group * 2)
    total = first - first
    for member in range(first, first + tl.load(ranges + group * 2 + 1)):
        total += tl.load(tl.load(kept + member).to(tl.pointer_type(tl.int64)))
    return total


@triton.jit
def write_cut(members, ranges, group, threshold, last, thresholds, lasts):
    """Give every member of a group its cut; indices are counted within it."""
    first = tl.load(ranges + group * 2)
    for member in range(first, first + tl.load(ranges + group * 2 + 1)):
        tl.store(thresholds + member, threshold)
        tl.store(lasts + member, last - tl.load(members + member * 2 + 1))


@triton.jit
def write_nothing(ranges, group, thresholds, lasts):
    """No score is kept, or none but those that rank first."""
    first = tl.load(ranges + group * 2)
    for member in range(first, first + tl.load(ranges + group * 2 + 1)):
        tl.store(thresholds + member, float("inf"))
        tl.store(lasts + member, -1)


@triton.jit
def aim(bracket, threshold):
    """Centre a bracket where the next threshold is expected: they drift, but one that jumped does not go on jumping."""
    drift = threshold - tl.load(bracket + LAST)
    before = tl.load(bracket + DRIFT)
    less = tl.where(tl.abs(drift) < tl.abs(before), drift, before)
    tl.store(bracket + CENTRE, threshold + tl.where(drift * before > 0, less, 0.0))
    tl.store(bracket + LAST, threshold)
    tl.store(bracket + DRIFT, drift)
