"""Philox4x32-10 and the distributions in Triton: the bits of ``iterand.philox`` and ``iterand.distributions``."""

import triton
import triton.language as tl


@triton.jit
def words(index, draw, key0, key1):
    """The first two words of the weight at this index in this draw."""
    c0 = index.to(tl.uint32)
    c1 = (index >> 32).to(tl.uint32)
    c2 = draw.to(tl.uint32) + tl.zeros_like(c0)
    c3 = tl.zeros_like(c0)
    k0 = key0.to(tl.uint32)
    k1 = key1.to(tl.uint32)
    for _ in tl.static_range(10):
        high0 = tl.umulhi(c0, 0xD2511F53)
        low0 = c0 * 0xD2511F53
        high1 = tl.umulhi(c2, 0xCD9E8D57)
        low1 = c2 * 0xCD9E8D57
        c0 = high1 ^ c1 ^ k0
        c2 = high0 ^ c3 ^ k1
        c1 = low1
        c3 = low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1


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
