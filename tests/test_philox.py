"""Random bits against the published known answers and against a plain Python Philox."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import reference
from iterand import philox

WORD = st.integers(0, (1 << 32) - 1)
PI = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)


def signed(low: int, high: int) -> int:
    """The int64 index whose two halves are these words."""
    return int.from_bytes(((high << 32) | low).to_bytes(8, "little"), "little", signed=True)


def words_of(index: int, draw: int, key: tuple[int, int], stream: int = 0) -> tuple[int, ...]:
    return tuple(int(word) for word in philox.philox(torch.tensor([index]), draw, key, stream))


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (PI, (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
    ],
)
def test_known_answers_of_random123(counter, key, answer):
    low, high, draw, stream = counter
    assert words_of(signed(low, high), draw, key, stream) == answer
    assert reference.philox(counter, key) == answer


@given(low=WORD, high=WORD, draw=WORD, stream=WORD, key=st.tuples(WORD, WORD))
def test_equals_plain_philox(low, high, draw, stream, key):
    assert words_of(signed(low, high), draw, key, stream) == reference.philox((low, high, draw, stream), key)


def test_indices_beyond_32_bits_do_not_wrap():
    key = (1, 2)
    for index in (1 << 31, (1 << 32) - 1, 1 << 32, (1 << 32) + 1, 10**12):
        assert words_of(index, 3, key) == reference.philox((index % (1 << 32), index >> 32, 3, 0), key)
    assert words_of(1 << 32, 0, key) != words_of(0, 0, key)


def test_one_draw_an_element():
    index, draw, key = torch.arange(50), torch.arange(50, dtype=torch.int32) % 7, (5, 6)
    together = torch.stack(philox.philox(index, draw, key), dim=1).tolist()
    assert together == [list(reference.philox((i, 0, i % 7, 0), key)) for i in range(50)]


def test_arguments_are_left_alone():
    index, draw = torch.arange(9), torch.arange(9)
    philox.philox(index, draw, (1, 2))
    assert torch.equal(index, torch.arange(9))
    assert torch.equal(draw, torch.arange(9))


@pytest.mark.parametrize("arrange", [lambda t: t.to(memory_format=torch.channels_last), lambda t: t.mT.contiguous().mT])
def test_memory_layout_does_not_matter(arrange):
    index = torch.arange(2 * 3 * 4 * 5).view(2, 3, 4, 5)
    other = arrange(index)
    assert other.stride() != index.stride()
    for a, b in zip(philox.philox(index, 1, (3, 4)), philox.philox(other, 1, (3, 4))):
        assert torch.equal(a, b)


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_chunks_cover_everything_once(monkeypatch, size):
    monkeypatch.setattr(philox, "CHUNK", size)
    for count in (0, 1, 63, 64, 65, 200):
        seen = [index for part in philox.chunks(count) for index in philox.indices(part).tolist()]
        assert seen == list(range(count))


@given(seed=st.integers(0, (1 << 63) - 1), name=st.text(alphabet=st.characters(exclude_categories=["Cs"])))
def test_key_is_the_head_of_a_sha256(seed, name):
    assert philox.key(seed, name) == reference.key(seed, name)


def test_a_pinned_key():
    # The first eight bytes of sha256(bytes(8) + b"conv.weight"); a change would break every ticket.
    assert philox.key(0, "conv.weight") == (2631465145, 1853469333)


@pytest.mark.parametrize("seed", [-1, 1 << 63, 1.5, True, "0", None])
def test_a_bad_seed_is_refused(seed):
    with pytest.raises(ValueError, match="seed is"):
        philox.key(seed, "weight")


def test_streams_draws_names_and_seeds_differ():
    index = torch.arange(1000)
    variants = [
        philox.philox(index, draw, philox.key(seed, name), stream)[0]
        for draw in (0, 1)
        for seed in (0, 1)
        for name in ("a", "b")
        for stream in (philox.WEIGHT, philox.SCORE, philox.DATA)
    ]
    for i, a in enumerate(variants):
        assert all(int((a == b).sum()) <= 1 for b in variants[:i])


def test_coins_fall_at_their_rate():
    assert [philox.coin_threshold(rate) for rate in (0.0, 0.25, 0.5, 1.0)] == [0, 1 << 30, 1 << 31, 1 << 32]
    extremes = torch.tensor([0, 1, (1 << 32) - 1])
    assert philox.coins(extremes, philox.coin_threshold(0.0)).tolist() == [False, False, False]
    assert philox.coins(extremes, philox.coin_threshold(1.0)).tolist() == [True, True, True]
    word = philox.philox(torch.arange(100_000), 1, (8, 9))[1]
    fallen = int(philox.coins(word, philox.coin_threshold(0.1)).sum())
    assert abs(fallen - 10_000) < 5 * 95  # five standard deviations


@pytest.mark.parametrize("count", [0, 1, 2, 1000])
def test_a_permutation_sorts_64_random_bits(count):
    order = philox.permutation(count, (1, 2), draw=3).tolist()
    drawn = [reference.philox((i, 0, 3, 2), (1, 2)) for i in range(count)]
    assert order == sorted(range(count), key=lambda i: ((drawn[i][0] << 31) + (drawn[i][1] >> 1), i))


def test_permutations_are_fair():
    orders = [tuple(philox.permutation(3, (1, 2), draw).tolist()) for draw in range(3000)]
    counts = [orders.count(order) for order in set(orders)]
    assert len(counts) == 6
    assert all(abs(count - 500) < 5 * 21 for count in counts)
