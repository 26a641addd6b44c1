"""The bits of ``iterand.philox`` and ``iterand.distributions`` in Triton, whose generator is the same one."""

import triton
import triton.language as tl


@triton.jit
def words(index, draw, key0, key1):
    """The first two words of the weight at this index in this draw."""
    low, high = index.to(tl.uint32), (index >> 32).to(tl.uint32)
    zero = tl.zeros_like(low)
    word0, word1, _, _ = tl.philox(key0 | key1 << 32, low, high, draw.to(tl.uint32) + zero, zero)
    return word0, word1


@triton.jit
def value(word, kind, unit, normal):
    """level · unit, with the level that the word stands for; ``kind`` is that of the ``Distribution``."""
    if kind == 0:
        level = ((word >> 8) * 2).to(tl.int32) - 16777215
    elif kind == 1:
        level = ((word >> 31) * 2).to(tl.int32) - 1
    else:
        level = tl.load(normal + (word >> 16).to(tl.int32))
    return level.to(tl.float32) * unit
