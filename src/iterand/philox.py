"""Random bits as a pure function of (seed, tensor, index, draw): Philox4x32-10 in integer tensor operations.

A counter-based generator has no state. The four 32-bit words it gives for a counter depend on nothing else, so they
are the same on every device, for every memory layout and in any chunking (Salmon et al., "Parallel random numbers: as
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

# Streams keep what is drawn for different purposes apart.
WEIGHT = 0
SCORE = 1
DATA = 2

CHUNK = 1 << 16  # elements drawn at a time: the temporaries stay in a CPU's cache, and memory stays bounded
_DEVICE_CHUNK = 1 << 22  # on other devices, where many small launches would take longer

_MASK = 0xFFFFFFFF
_ROUNDS = 10
# The multipliers less 2³²: a product with a 32-bit word then fits a signed 64-bit integer, and its high word is short
# of the unsigned one by exactly that word.
_MULTIPLIERS = (0xD2511F53 - (1 << 32), 0xCD9E8D57 - (1 << 32))
_WEYL = (0x9E3779B9, 0xBB67AE85)


def check_seed(seed: int) -> int:
    """The seed as an int, if it is one that a key can be made of."""
    return check_int("seed", seed, "a whole number, at least 0 and below 2**63", low=0, high=1 << 63)


def key(seed: int, name: str) -> Key:
    """The key of the tensor with this qualified name under this seed."""
    seed = check_seed(seed)
    digest = hashlib.sha256(seed.to_bytes(8, "little") + name.encode()).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:8], "little")


def philox(index: Tensor, draw: Tensor | int, key: Key, stream: int = WEIGHT) -> Words:
    """Four 32-bit words (in int64) for each element: ``index`` is int64, ``draw`` one number or one an element."""
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
    """How many elements suit the device at a time."""
    return CHUNK if torch.device(device or "cpu").type == "cpu" else _DEVICE_CHUNK


def chunks(count: int, device: torch.device | str | None = None) -> Iterator[slice]:
    """Slices that cover ``count`` elements in order, as large as suits the device."""
    size = chunk_size(device)
    for start in range(0, count, size):
        yield slice(start, min(start + size, count))


def indices(part: slice, device: torch.device | str | None = None) -> Tensor:
    """The indices of a slice."""
    return torch.arange(part.start, part.stop, device=device)


def permutation(count: int, key: Key, draw: int, device: torch.device | str | None = None) -> Tensor:
    """A random order of ``range(count)``."""
    high, low, *_ = philox(torch.arange(count, device=device), draw, key, DATA)
    return torch.argsort(high << 31 | low >> 1, stable=True)


def coins(word: Tensor, threshold: int) -> Tensor:
    """Bernoulli trials from one word an element: true for ``threshold`` of the 2³² words."""
    return word < threshold


def coin_threshold(rate: float) -> int:
    """How many of the 2³² words make a coin of this rate fall."""
    return round(rate * (1 << 32))
