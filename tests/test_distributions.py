"""From bits to weights, against independent formulas; the first values of every distribution are pinned."""

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import reference
from iterand import distributions, philox
from iterand.distributions import Distribution, distribution_names, get_distribution, register_distribution, sample

WORD = st.integers(0, (1 << 32) - 1)
FAN_IN = st.integers(1, 10**7)
GOLDEN = json.loads((Path(__file__).parent / "golden" / "distributions.json").read_text())


@pytest.fixture(autouse=True)
def own_registry(monkeypatch):
    """What a test registers is gone after it."""
    monkeypatch.setattr(distributions, "_REGISTRY", dict(distributions._REGISTRY))


def value(name: str, word: int, fan_in: int) -> float:
    """The weight for one word; only the first of the four counts."""
    words = tuple(torch.tensor([w]) for w in (word, 0, 0, 0))
    return get_distribution(name).values(words, fan_in).item()


# --- Values ---------------------------------------------------------------------------------------------------------


@given(word=WORD, fan_in=FAN_IN)
def test_kaiming_uniform_is_one_rounded_product(word, fan_in):
    result = value("kaiming_uniform", word, fan_in)
    assert result == reference.uniform(word, math.sqrt(6 / fan_in))
    assert 0 < abs(result) <= np.float32(math.sqrt(6 / fan_in))


@given(word=WORD, fan_in=FAN_IN)
def test_uniform_needs_no_rounding(word, fan_in):
    level = 2 * (word >> 8) + 1 - (1 << 24)
    assert Fraction(value("uniform", word, fan_in)) == Fraction(level, 1 << 24)


@given(word=WORD, fan_in=FAN_IN)
def test_signed_constant_is_a_sign(word, fan_in):
    constant = float(np.float32(math.sqrt(2 / fan_in)))
    assert value("signed_constant", word, fan_in) == (constant if word >= 1 << 31 else -constant)


@given(word=WORD, fan_in=FAN_IN)
def test_kaiming_normal_is_the_quantile_of_its_word(word, fan_in):
    result = value("kaiming_normal", word, fan_in)
    deviation = float(np.float32(math.sqrt(2 / fan_in) / (1 << 20))) * (1 << 20)
    share = 0.5 * (1 + math.erf(result / deviation / math.sqrt(2)))
    assert share == pytest.approx(((word >> 16) + 0.5) / (1 << 16), abs=1e-6)
    assert result == -value("kaiming_normal", (1 << 32) - 1 - word, fan_in)


@pytest.mark.parametrize("name", sorted(GOLDEN["values"]))
def test_first_values_are_pinned(name):
    pinned = GOLDEN["values"][name]
    values = sample(get_distribution(name), len(pinned), GOLDEN["fan_in"], philox.key(GOLDEN["seed"], GOLDEN["name"]))
    assert [f"{bits:08x}" for bits in values.numpy().view(np.uint32)] == pinned


def test_every_distribution_is_pinned():
    assert sorted(GOLDEN["values"]) == distribution_names()


@pytest.mark.parametrize("name", ["kaiming_uniform", "uniform"])
def test_pinned_uniform_values_follow_from_a_plain_loop(name):
    bound = 1.0 if name == "uniform" else math.sqrt(6 / GOLDEN["fan_in"])
    for index, bits in enumerate(GOLDEN["values"][name]):
        word = reference.words(index, 0, GOLDEN["seed"], GOLDEN["name"])[0]
        assert np.uint32(int(bits, 16)).view(np.float32) == reference.uniform(word, bound)


# --- Moments --------------------------------------------------------------------------------------------------------

COUNT = 1 << 18


@pytest.mark.parametrize(
    ("name", "variance", "kurtosis"),
    [
        ("kaiming_uniform", 6 / 24 / 3, 9 / 5),
        ("uniform", 1 / 3, 9 / 5),
        ("signed_constant", 2 / 24, 1),
        ("kaiming_normal", 2 / 24, 3),
    ],
)
def test_moments(name, variance, kurtosis):
    values = sample(get_distribution(name), COUNT, 24, philox.key(1, "moments")).double().numpy()
    error = math.sqrt(kurtosis - 1) / math.sqrt(COUNT)  # of the second moment, relative
    assert abs(values.mean()) < 5 * math.sqrt(variance / COUNT)
    assert (values**2).mean() == pytest.approx(variance, rel=5 * error + 1e-4)
    assert (values**4).mean() / variance**2 == pytest.approx(kurtosis, rel=0.04)
    assert abs(np.mean(values[1:] * values[:-1])) < 5 * variance / math.sqrt(COUNT)  # neighbours are independent


def test_the_uniform_fills_its_interval():
    counts, _ = np.histogram(sample(get_distribution("uniform"), COUNT, 1, (0, 0)).numpy(), bins=64, range=(-1, 1))
    assert ((counts - COUNT / 64) ** 2 / (COUNT / 64)).sum() < 63 + 5 * math.sqrt(126)  # chi-squared


def test_the_coin_says_nothing_of_the_value():
    """b_r and the fresh value of Eq. (3) come from one call of the generator."""
    words = philox.philox(torch.arange(COUNT), 1, (3, 4))
    fallen = philox.coins(words[1], philox.coin_threshold(0.1))
    values = get_distribution("uniform").values(words, 1)
    assert abs(values[fallen].double().mean()) < 5 * math.sqrt(1 / 3 / int(fallen.sum()))


# --- Sampling -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", distribution_names())
@pytest.mark.parametrize("size", [1, 13, 99, 1 << 20])
def test_chunking_does_not_matter(monkeypatch, name, size):
    whole = sample(get_distribution(name), 100, 5, (1, 2))
    monkeypatch.setattr(philox, "CHUNK", size)
    assert torch.equal(sample(get_distribution(name), 100, 5, (1, 2)), whole)


def test_a_longer_tensor_begins_alike():
    uniform = get_distribution("uniform")
    assert torch.equal(sample(uniform, 200_000, 5, (1, 2))[:1000], sample(uniform, 1000, 5, (1, 2)))


def test_draws_and_streams_are_other_numbers():
    uniform = get_distribution("uniform")
    first = sample(uniform, 1000, 1, (1, 2))
    assert (sample(uniform, 1000, 1, (1, 2), draw=1) != first).all()
    assert (sample(uniform, 1000, 1, (1, 2), stream=philox.SCORE) != first).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_values_are_float32_whatever_the_default(dtype):
    expected = sample(get_distribution("kaiming_normal"), 10, 3, (1, 2))
    torch.set_default_dtype(dtype)
    try:
        values = sample(get_distribution("kaiming_normal"), 10, 3, (1, 2))
    finally:
        torch.set_default_dtype(torch.float32)
    assert values.dtype == torch.float32
    assert torch.equal(values, expected)


# --- Fan-in ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_fan_in_of_a_convolution_is_what_meets_in_one_output(dimensions, transposed, groups):
    """With weights and inputs of one, an output away from the border is the number of weights that meet in it."""
    kind = getattr(nn, f"Conv{'Transpose' if transposed else ''}{dimensions}d")
    kernel = (3, 2, 4)[:dimensions]
    layer = kind(6, 8, kernel, groups=groups, bias=False)
    nn.init.ones_(layer.weight)
    output = layer(torch.ones(1, 6, *[9] * dimensions))
    middle = output[(0, 0, *[output.shape[-1] // 2] * dimensions)].item()
    assert distributions.fan_in(layer, layer.weight) == middle == 6 // groups * math.prod(kernel)


def test_fan_in_of_linear_layers():
    linear, bilinear = nn.Linear(7, 3), nn.Bilinear(4, 5, 3)
    assert distributions.fan_in(linear, linear.weight) == 7
    assert distributions.fan_in(bilinear, bilinear.weight) == 20


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_fan_in_of_an_embedding_is_its_dimension(kind):
    layer = kind(100, 12)
    assert distributions.fan_in(layer, layer.weight) == 12


def test_fan_in_of_recurrent_layers():
    lstm = nn.LSTM(5, 7, num_layers=2, bidirectional=True, proj_size=3)
    expected = {"weight_ih_l0": 5, "weight_hh_l0": 3, "weight_hr_l0": 7, "weight_ih_l1": 6, "weight_hh_l1_reverse": 3}
    assert {name: distributions.fan_in(lstm, getattr(lstm, name)) for name in expected} == expected
    for kind in (nn.GRU, nn.RNN, nn.GRUCell, nn.LSTMCell, nn.RNNCell):
        layer = kind(5, 7)
        name = "weight_ih" if isinstance(layer, nn.RNNCellBase) else "weight_ih_l0"
        assert distributions.fan_in(layer, getattr(layer, name)) == 5


def test_fan_in_of_attention():
    attention = nn.MultiheadAttention(8, 2)
    assert distributions.fan_in(attention, attention.in_proj_weight) == 8
    cross = nn.MultiheadAttention(8, 2, kdim=3, vdim=5)
    names = ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    assert [distributions.fan_in(cross, getattr(cross, name)) for name in names] == [8, 3, 5]


def test_fan_in_of_bare_parameters():
    holder = nn.Module()
    for shape, expected in (((), 1), ((9,), 9), ((3, 4), 4), ((2, 3, 4, 5), 60)):
        assert distributions.fan_in(holder, torch.empty(shape)) == expected


# --- Registration ---------------------------------------------------------------------------------------------------


def test_an_own_distribution_is_used_by_its_name():
    register_distribution(Distribution("thirds", lambda words: words[0] % 3 - 1, lambda fan_in: 1 / fan_in))
    assert "thirds" in distribution_names()
    values = sample(get_distribution("thirds"), 300, 4, (1, 2))
    assert values.unique().tolist() == [-0.25, 0.0, 0.25]
    with pytest.raises(ValueError, match="'thirds' is registered already"):
        register_distribution(Distribution("thirds", lambda words: words[0], lambda fan_in: 1.0))
    with pytest.raises(ValueError, match=r"distribution is 3; it must be an iterand\.Distribution"):
        register_distribution(3)


@pytest.mark.parametrize("levels", [lambda words: words[0] / 3, lambda words: words[0].half(), lambda w: w[0] > 5])
def test_levels_that_are_not_whole_are_refused(levels):
    with pytest.raises(ValueError, match="must be whole numbers"):
        sample(Distribution("rounded", levels, lambda fan_in: 1.0), 10, 1, (1, 2))


def test_an_unknown_name_gets_a_suggestion():
    with pytest.raises(ValueError, match="unknown distribution 'kaming_uniform'; did you mean 'kaiming_uniform'"):
        get_distribution("kaming_uniform")
    with pytest.raises(ValueError, match="there are kaiming_normal, kaiming_uniform, signed_constant, uniform"):
        get_distribution("zzz")


def test_a_machine_with_another_logarithm_is_refused(monkeypatch):
    monkeypatch.setattr(distributions, "_NORMAL_TABLE_SHA256", "0" * 64)
    distributions._normal_table.cache_clear()
    with pytest.raises(RuntimeError, match="other normal quantiles"):
        sample(get_distribution("kaiming_normal"), 1, 1, (1, 2))
