import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iterand.ticket import coding

ALPHABETS = st.lists(st.integers(1, 400), min_size=1, max_size=40)


def coded(counts: list[int], seed: int) -> tuple[np.ndarray, bytes]:
    symbols = np.repeat(np.arange(len(counts)), counts).astype(np.uint32)
    np.random.default_rng(seed).shuffle(symbols)
    return symbols, coding.encode(symbols, counts)


def decoded(data: bytes, counts: list[int]) -> list[int]:
    return coding.decode(data, counts, np.arange(len(counts))).tolist()


@given(ALPHABETS, st.integers(0, 10))
def test_what_is_coded_is_decoded(counts, seed):
    symbols, data = coded(counts, seed)
    assert decoded(data, counts) == symbols.tolist()


@pytest.mark.parametrize("alphabet", [256, 257, 300, 5000])
def test_large_alphabets_come_back_too(alphabet):
    counts = [1 + number % 3 for number in range(alphabet)]
    symbols, data = coded(counts, 0)
    assert decoded(data, counts) == symbols.tolist()


@pytest.mark.parametrize(("alphabet", "group"), [(2, 8), (3, 5), (4, 4), (6, 3), (7, 2), (16, 2), (17, 1), (300, 1)])
def test_groups_are_as_long_as_256_numbers_allow(alphabet, group):
    assert coding.group_size(alphabet) == group


@given(ALPHABETS.filter(lambda counts: len(counts) > 1))
def test_frequencies_are_those_of_a_plain_loop(counts):
    size, total = coding.group_size(len(counts)), sum(counts)
    shares = [(1 << 24) - len(counts) ** size]
    for _ in range(size):
        shares = [share * count // total for share in shares for count in counts]
    expected = [share + 1 for share in shares]
    expected[shares.index(max(shares))] += (1 << 24) - sum(expected)
    assert coding.frequencies(counts).tolist() == expected
    assert sum(expected) == 1 << 24
    assert min(expected) >= 1


@pytest.mark.parametrize("share", [0.5, 0.3, 0.1, 0.01, 0.001])
def test_a_mask_costs_its_entropy(share):
    kept = round(200_000 * share)
    counts = [200_000 - kept, kept]
    _, data = coded(counts, 1)
    bits = -sum(count * math.log2(count / 200_000) for count in counts)
    assert bits == pytest.approx(coding.entropy(counts))
    assert 0 <= 8 * len(data) - bits < 0.002 * bits + 64


def test_one_symbol_costs_nothing():
    assert coding.encode(np.zeros(1000, dtype=np.uint8), [1000]) == b""
    assert decoded(b"", [1000]) == [0] * 1000
    assert coding.entropy([1000]) == 0


COUNTS = [700, 300]


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "not a multiple of 4"),
        (lambda data: data + bytes(4), "last word is zero"),
        (lambda data: data + b"\1\0\0\0", "goes on after its last symbol|as often as"),
        (lambda data: data[4:], "goes on after|as often as"),
        (lambda data: b"", "as often as"),
        (lambda data: bytes([data[0] ^ 1]) + data[1:], "goes on after|as often as"),
        (lambda data: data[:-4] + b"\xff\xff\xff\xff", "goes on after|as often as"),
    ],
)
def test_a_damaged_stream_is_refused(damage, message):
    _, data = coded(COUNTS, 2)
    with pytest.raises(ValueError, match=message):
        decoded(damage(data), COUNTS)


def test_a_stream_where_none_belongs_is_refused():
    with pytest.raises(ValueError, match="should be empty"):
        decoded(b"\1\0\0\0", [5])


def test_a_last_group_that_is_not_filled_with_zeros_is_refused():
    symbols = np.array([1, 0, 1, 0, 0, 0, 0, 0, 1], dtype=np.uint8)  # the ninth begins a second group of eight
    longer = np.append(symbols, [0, 1]).astype(np.uint8)
    with pytest.raises(ValueError, match="as often as"):
        decoded(coding.encode(longer, [6, 3]), [6, 3])
