"""Random bits as a pure function of (seed, tensor, index, draw): Philox4x32-10 in integer tensor operations.

A counter-based generator has no state: its four 32-bit output words are a function of counter and key. So they are the
same on every device, for every memory layout and chunk size (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", 2011). The counter of one element is

    (index mod 2³², index div 2³², draw, stream)

and the key of a tensor is the first eight bytes of SHA-256(seed as 8 bytes, little endian ‖ name in UTF-8), read as two
little-endian 32-bit words.
"""

import hashlib
from collections.abc import Iterator

import torch
from torch import Tensor

from iterand.checks import check_int

Key = tuple[int, int]
Words = tuple[Tensor, Tensor, Tensor, Tensor]

# Streams: independent random numbers for different purposes.
WEIGHT = 0
SCORE = 1
DATA = 2
SAMPLE = 3
SOURCE = 4

CHUNK = 1 << 16  # elements per step on a CPU: temporaries fit its cache
_DEVICE_CHUNK = 1 << 22  # elements per step on other devices: fewer launches

_MASK = 0xFFFFFFFF
_ROUNDS = 10
# The multipliers minus 2³²: the product with a 32-bit word x fits int64, and its high word plus x is the high word of
# the unsigned product.
_MULTIPLIERS = (0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32))
_WEYL = (0x9E3779B9, 0xBB67AE85)


def check_seed(seed: int) -> int:
    """The seed as an int. Raises ValueError unless 0 ≤ seed < 2⁶³."""
    return check_int("seed", seed, "a whole number, at least 0 and below 2**63", low=0, high=1 << 63)


def key(seed: int, name: str) -> Key:
    """The key of the tensor with this seed and qualified name."""
    seed = check_seed(seed)
    digest = hashlib.sha256(seed.to_bytes(8, "little") + name.encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def philox(index: Tensor, draw: Tensor | int, key: Key, stream: int = WEIGHT) -> Words:
    """Four 32-bit words (as int64) per element. ``index`` is int64, ``draw`` one number or one per element."""
    c0, c1 = index & _MASK, (index >> 32) & _MASK
    c2 = draw.to(torch.int64) if isinstance(draw, Tensor) else torch.full_like(index, draw)
    c3 = torch.full_like(index, stream)
    k0, k1 = key
    for _ in range(_ROUNDS):
        product0, product1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        high0 = (product0 >> 32).add_(c0)
        high1 = (product1 >> 32).add_(c2)
        c0, c2 = high1.bitwise_xor_(c1).bitwise_xor_(k0), high0.bitwise_xor_(c3).bitwise_xor_(k1)
        c1, c3 = product1.bitwise_and_(_MASK), product0.bitwise_and_(_MASK)
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def chunk_size(device: torch.device | str | None = None) -> int:
    """Number of elements per chunk on a device."""
    return CHUNK if torch.device(device or "cpu").type == "cpu" else _DEVICE_CHUNK


def chunks(count: int, device: torch.device | str | None = None) -> Iterator[slice]:
    """Consecutive slices of ``chunk_size(device)`` elements that cover ``count`` elements."""
    size = chunk_size(device)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def indices(part: slice, device: torch.device | str | None = None) -> Tensor:
    """The indices of a slice."""
    return torch.arange(part.start, part.stop, device=device)


def permutation(count: int, key: Key, draw: int, device: torch.device | str | None = None) -> Tensor:
    """A random permutation of ``range(count)``."""
    high, low, *_ = philox(torch.arange(count, device=device), draw, key, DATA)
    return torch.argsort(high << 31 | low >> 1, stable=True)


def coins(word: Tensor, threshold: int) -> Tensor:
    """Bernoulli trials from one word per element: true with probability ``threshold`` / 2³²."""
    return word < threshold


def coin_threshold(rate: float) -> int:
    """The threshold of a coin that comes up with probability ``rate``: ``rate`` · 2³², rounded."""
    return round(rate * (1 << 32))
