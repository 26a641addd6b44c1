"""How much is pruned, over layers and over time."""

import itertools
import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn

import iterand
from iterand import sparsity

SHAPE = st.lists(st.integers(1, 40), min_size=1, max_size=4).map(tuple)
SHAPES = st.dictionaries(st.text("abc", min_size=1, max_size=3), SHAPE, min_size=1, max_size=6)


def kept(model: nn.Module) -> dict[str, int]:
    return {name: int(layer.mask.sum()) for name, layer in iterand.masked_layers(model).items()}


# --- Allocation -----------------------------------------------------------------------------------------------------


def test_uniform_is_the_same_everywhere():
    assert sparsity.allocate({"a": (3, 4), "b": (5,)}, 0.7) == {"a": 0.7, "b": 0.7}


@given(shapes=SHAPES, share=st.floats(0.0, 1.0))
def test_erk_keeps_as_much_as_asked_in_proportion(shapes, share):
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    density = {name: 1 - p for name, p in sparsity.allocate(shapes, share, "erk").items()}
    assert all(0 <= value <= 1 for value in density.values())
    total = sum(density[name] * size for name, size in sizes.items())
    assert total == pytest.approx((1 - share) * sum(sizes.values()), abs=1e-6 * sum(sizes.values()))
    scale = {name: density[name] * sizes[name] / sum(shape) for name, shape in shapes.items()}
    sparse = [scale[name] for name in shapes if density[name] < 1 - 1e-9]
    assume(sparse)
    assert max(sparse) == pytest.approx(min(sparse), rel=1e-6, abs=1e-12)
    # A dense layer is dense because its share would have been more than all of it.
    assert all(scale[name] <= max(sparse) * (1 + 1e-6) for name in shapes)


def test_erk_worked_out_by_hand():
    # Σ dims / Π dims: 20 / 100 and 110 / 1000; 220 of 1100 kept: ε · (20 + 110) = 220, so ε · 20 = 33.8 and 186.2.
    allocated = sparsity.allocate({"small": (10, 10), "large": (100, 10)}, 0.8, "erk")
    assert allocated == {
        "small": pytest.approx(1 - 220 / 130 * 20 / 100),
        "large": pytest.approx(1 - 220 / 130 * 110 / 1000),
    }
    assert sparsity.allocate({"tiny": (2, 2), "large": (100, 100)}, 0.5, "erk")["tiny"] == 0.0


def test_erk_in_a_model():
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 100))
    assert kept(iterand.prune_(model, 0.8, allocation="erk")) == {"0.weight": 34, "1.weight": 186}


@given(sizes=st.lists(st.integers(1, 100), min_size=1, max_size=20), share=st.floats(0, 1))
def test_layers_ranked_together_split_the_exact_count(sizes, share):
    shares = sparsity.split_kept(sizes, share)
    assert sum(shares) == sum(sizes) - round(share * sum(sizes))
    assert len(shares) == len(sizes)


# --- Global ranking with a floor ------------------------------------------------------------------------------------


def lopsided(**options: object) -> nn.Sequential:
    """Two layers of 100 weights, of which the first has all the high scores."""
    model = nn.Sequential(nn.Linear(10, 10), nn.Linear(10, 10))
    iterand.prune_(model, 0.6, ranking="global", **options)
    with torch.no_grad():
        iterand.scores(model)[0].add_(100)
    return model


def test_a_global_ranking_may_leave_a_layer_without_weights():
    assert kept(lopsided()) == {"0.weight": 80, "1.weight": 0}


@pytest.mark.parametrize(
    ("floor", "expected"), [(0.01, [79, 1]), (0.07, [73, 7]), (0.25, [55, 25]), (0.4, [40, 40]), (0.001, [79, 1])]
)
def test_a_floor_prevents_it(floor, expected):
    assert list(kept(lopsided(floor=floor)).values()) == expected


def test_the_count_is_exact_over_all_layers():
    """10 − round(5.0) of two layers of 5, where each by itself would keep 3."""
    model = nn.Sequential(nn.Linear(5, 1), nn.Linear(1, 5))
    assert sum(kept(iterand.prune_(model, 0.5, ranking="global", floor=0.2)).values()) == 5
    with pytest.raises(ValueError, match="leaves 5 of 10 weights, and floor= asks for 6"):
        iterand.prune_(iterand.fold_(model), 0.5, ranking="global", floor=0.6)


def test_layers_of_one_weight_are_pruned_together():
    model = nn.Sequential(*[nn.Linear(1, 1) for _ in range(4)])
    assert sum(kept(iterand.prune_(model, 0.6, ranking="global")).values()) == 2
    with pytest.raises(ValueError, match=r"leaves none of the 1 weights of '0\.weight'; lower it, .*, or exclude it$"):
        iterand.prune_(iterand.fold_(model), 0.6, ranking="layer")


# --- Schedules ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [0.5, 0.5, 0.5, 0.5, 0.5]),
        ("linear", [0, 0.125, 0.25, 0.375, 0.5]),
        ("cubic", [0, 0.2890625, 0.4375, 0.4921875, 0.5]),
        ("geometric", [0, 1 - 2**-0.25, 1 - 2**-0.5, 1 - 2**-0.75, 0.5]),
    ],
)
def test_scheduled_sparsity(schedule, expected):
    found = [sparsity.scheduled_sparsity(schedule, 0.0, 0.5, done) for done in (0, 0.25, 0.5, 0.75, 1)]
    assert found == pytest.approx(expected, abs=1e-12)
    assert sparsity.scheduled_sparsity(schedule, 0.0, 0.5, -1) == expected[0]
    assert sparsity.scheduled_sparsity(schedule, 0.0, 0.5, 2) == 0.5
    assert sparsity.scheduled_sparsity(schedule, 0.9, 0.5, 0.5) == 0.5


def test_a_geometric_schedule_keeps_the_same_share_in_each_step():
    kept = [1 - sparsity.scheduled_sparsity("geometric", 0.2, 0.9, step / 10) for step in range(11)]
    assert [after / before for before, after in itertools.pairwise(kept)] == pytest.approx([(0.1 / 0.8) ** 0.1] * 10)


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="schedule is 'cubc'; it must be one of constant, linear, cubic"):
        sparsity.scheduled_sparsity("cubc", 0.0, 0.5, 0.5)
