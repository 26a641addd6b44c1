import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iterand import summarizing
from iterand.ticket import codec
from iterand.ticket.codec import Model

ALPHABETS = st.lists(st.integers(1, 100), min_size=1, max_size=40)
# Of two symbols: about as many of each, some more of one, and one that is rare, either of them.
PAIRS = st.tuples(st.integers(1, 1000), st.integers(1, 1000)).map(list)
SEVERAL = st.lists(st.one_of(ALPHABETS, PAIRS), min_size=1, max_size=5)


def shuffled(counts: list[int], seed: int) -> np.ndarray:
    symbols = np.repeat(np.arange(len(counts)), counts).astype(np.uint16)
    np.random.default_rng(seed).shuffle(symbols)
    return symbols


def encoded(sequences: list[np.ndarray], models: list[Model]) -> bytes:
    return codec.encode([model.cut(sequence) for model, sequence in zip(models, sequences)], models)


def decoded(data: bytes, models: list[Model]) -> list[list[int]]:
    return [model.join(coded).tolist() for model, coded in zip(models, codec.decode(data, models))]


@given(SEVERAL, st.integers(0, 10))
def test_what_is_coded_is_decoded(all_counts, seed):
    models = [Model(counts) for counts in all_counts]
    sequences = [shuffled(counts, seed + number) for number, counts in enumerate(all_counts)]
    assert decoded(encoded(sequences, models), models) == [sequence.tolist() for sequence in sequences]


@pytest.mark.parametrize("alphabet", [256, 257, 300, 5000, codec.MAX_ALPHABET])
def test_large_alphabets_come_back_too(alphabet):
    counts = [1 + number % 3 for number in range(alphabet)]
    symbols, models = shuffled(counts, 0), [Model(counts)]
    assert decoded(encoded([symbols], models), models) == [symbols.tolist()]


@pytest.mark.parametrize("kept", [1, 3, 40, 5000, 90_000, 100_000, 150_000, 199_000, 199_999])
def test_many_lanes_take_turns(kept):
    counts = [[200_000 - kept, kept], [300_000, 250_000, 50_000]]
    models = [Model(each) for each in counts]
    sequences = [shuffled(each, kept) for each in counts]
    assert codec.lane_count(models) > 50
    assert decoded(encoded(sequences, models), models) == [sequence.tolist() for sequence in sequences]


@pytest.mark.parametrize(
    ("counts", "kind"),
    [
        ([], "constant"), ([9], "constant"), ([50, 50], "bits"), ([17, 15], "bits"), ([18, 14], "groups"),
        ([700, 101], "groups"), ([700, 100], "runs"), ([1, 900], "runs"), ([30, 30, 30], "groups"),
    ],
)  # fmt: skip
def test_a_sequence_is_cut_by_how_often_its_symbols_occur(counts, kind):
    assert Model(counts).kind == kind


@pytest.mark.parametrize(("alphabet", "group"), [(2, 8), (3, 5), (4, 4), (6, 3), (7, 2), (16, 2), (17, 1), (300, 1)])
def test_groups_are_as_long_as_256_numbers_allow(alphabet, group):
    assert Model([1] * alphabet).group_size == group


def test_runs_are_cut_at_255():
    sequence = np.zeros(2000, dtype=np.uint8)
    sequence[[0, 1, 256, 257, 767, 1999]] = 1  # after runs of 0, 0, 254, 0, 509 and 1231
    model = Model([1994, 6])
    expected = [0, 0, 254, 0, 255, 254, 255, 255, 255, 255, 211]
    assert model.cut(sequence).tolist() == expected
    assert model.join(np.array(expected, dtype=np.uint8)).tolist() == sequence.tolist()
    assert Model([6, 1994]).cut(1 - sequence).tolist() == expected


@given(ALPHABETS.filter(lambda counts: Model(counts).kind == "groups"))
def test_frequencies_of_groups_are_those_of_a_plain_loop(counts):
    size, total = Model(counts).group_size, sum(counts)
    shares = [((1 << 16) - len(counts) ** size) << 16]
    for _ in range(size):
        shares = [share * count // total for share in shares for count in counts]
    shares = [share >> 16 for share in shares]
    expected = [share + 1 for share in shares]
    expected[shares.index(max(shares))] += (1 << 16) - sum(expected)
    assert Model(counts).frequencies.tolist() == expected
    assert (sum(expected), min(expected) >= 1) == (1 << 16, True)


@given(st.integers(1, 1 << 20), st.integers(1, 1 << 20))
def test_frequencies_of_runs_are_near_the_geometric_distribution(rare, others):
    model = Model([7 * rare + others, rare])
    frequencies, chance = model.frequencies.tolist(), rare / (8 * rare + others)
    assert (len(frequencies), sum(frequencies), min(frequencies) >= 1) == (256, 1 << 16, True)
    expected = [chance * (1 - chance) ** run for run in range(255)] + [(1 - chance) ** 255]
    likeliest = max(range(256), key=lambda run: expected[run])
    for run, (frequency, probability) in enumerate(zip(frequencies, expected)):
        allowed = 260 if run == likeliest else 2  # what rounding leaves over goes there
        assert abs(frequency - 1 - probability * ((1 << 16) - 256)) < allowed


@pytest.mark.parametrize("share", [0.5, 0.47, 0.3, 0.1, 0.01, 0.001, 0.999])
def test_a_mask_costs_its_entropy(share):
    kept = round(400_000 * share)
    counts = [400_000 - kept, kept]
    data = encoded([shuffled(counts, 1)], [Model(counts)])
    bits = -sum(count * math.log2(count / 400_000) for count in counts)
    assert bits == pytest.approx(summarizing.entropy(counts))
    assert -1 <= 8 * len(data) - bits < 0.005 * bits + 64


def test_one_symbol_costs_nothing():
    models = [Model([1000])]
    assert encoded([np.zeros(1000, dtype=np.uint8)], models) == b""
    assert decoded(b"", models) == [[0] * 1000]
    assert summarizing.entropy([1000]) == 0


MODELS = [Model([700, 300]), Model([990, 10]), Model([500, 500]), Model([300, 200, 100])]


def test_every_changed_bit_is_refused_or_changes_a_symbol():
    """The final state and the counts leave no byte that does not matter."""
    models = [Model([counts // 4 for counts in model.counts]) for model in MODELS]
    assert [model.kind for model in models] == [model.kind for model in MODELS]
    sequences = [shuffled(list(model.counts), 5) for model in models]
    data = encoded(sequences, models)
    expected = [sequence.tolist() for sequence in sequences]
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            try:
                assert decoded(bytes(changed), models) != expected
            except ValueError:
                continue


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda data: data[:-1], "states of 4 and words of 2 are expected"),
        (lambda data: data[:100], "states of 4 and words of 2 are expected"),
        (lambda data: data + b"\1\0", "goes on after its last symbol"),
        (lambda data: data[:-2], "ends before its last symbol"),
        (lambda data: b"", "states of 4 and words of 2 are expected"),
        (lambda data: b"\xff" + data[1:], "as often as the header says"),
        (lambda data: data[:125] + b"\1\0\0\0" + data[129:], "one of its states is too small"),
        (lambda data: data[:125] + b"\1\2\3\4" + data[129:], "as often as|goes on after|ends before|longer than"),
    ],
)
def test_a_damaged_stream_is_refused(damage, message):
    data = encoded([shuffled(list(model.counts), 2) for model in MODELS], MODELS)
    with pytest.raises(ValueError, match=message):
        decoded(damage(data), MODELS)


def test_a_stream_where_none_belongs_is_refused():
    with pytest.raises(ValueError, match="goes on after its last symbol"):
        decoded(b"\1\0", [Model([5])])


@pytest.mark.parametrize("counts", [[6, 3], [5, 4]])
def test_a_last_group_that_is_not_filled_with_zeros_is_refused(counts):
    symbols = np.array([1, 0, 1, 0, 0, 0, 0, 0, 1], dtype=np.uint8)  # the ninth begins a second group of eight
    longer = np.packbits(np.append(symbols, [0, 1]))
    with pytest.raises(ValueError, match="as often as"):
        Model(counts).join(longer)


def test_runs_beyond_the_end_are_refused():
    model = Model([99, 1])
    assert model.join(np.array([99], dtype=np.uint8)).tolist() == [0] * 99 + [1]
    with pytest.raises(ValueError, match="its runs are longer than the tensor"):
        model.join(np.array([100], dtype=np.uint8))
