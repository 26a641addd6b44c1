"""What the library computes, once more, as plain loops over Python numbers: the other side of the comparisons."""

import hashlib
from collections.abc import Sequence

import numpy as np

Words = tuple[int, int, int, int]


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox4x32-10 as its paper has it (Salmon et al., 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c0, 1 << 32)
        high1, low1 = divmod(0xCD9E8D57 * c2, 1 << 32)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % (1 << 32), (k1 + 0xBB67AE85) % (1 << 32)
    return c0, c1, c2, c3


def key(seed: int, name: str) -> tuple[int, int]:
    """The key of a tensor: the head of SHA-256 over the seed and the name."""
    digest = hashlib.sha256(seed.to_bytes(8, "little") + name.encode("utf-8")).digest()
    return int.from_bytes(digest[0:4], "little"), int.from_bytes(digest[4:8], "little")


def words(index: int, draw: int, seed: int, name: str, stream: int = 0) -> Words:
    """The four words of one element."""
    return philox((index % (1 << 32), index >> 32, draw, stream), key(seed, name))


def uniform(word: int, bound: float) -> float:
    """One of 2²⁴ values, symmetric about zero, inside ±bound: a whole number times a unit rounded once to float32."""
    level = 2 * (word >> 8) + 1 - (1 << 24)
    unit = float(np.float32(bound / (1 << 24)))
    return float(np.float32(level * unit))  # 25 + 24 bits: exact in double, so rounded once


def kept_by_sort(scores: Sequence[float], kept: int) -> set[int]:
    """The indices of the highest scores; among equal ones the lower index wins."""
    return set(sorted(range(len(scores)), key=lambda i: (-scores[i], i))[:kept])


def kept_together(layers: Sequence[Sequence[float]], kept: int, floors: Sequence[int]) -> list[set[int]]:
    """The indices kept of each layer if all compete, but each layer has the floor of its own best for certain."""
    certain = [kept_by_sort(scores, floor) for scores, floor in zip(layers, floors)]
    others = [(-s, n, i) for n, scores in enumerate(layers) for i, s in enumerate(scores) if i not in certain[n]]
    result = [set(indices) for indices in certain]
    for _, n, i in sorted(others)[: kept - sum(map(len, certain))]:
        result[n].add(i)
    return result
