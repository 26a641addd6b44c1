"""CalculateMask against a sort in plain Python, whatever the ties, zeros, denormals and infinities."""

import copy
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import iterand
import reference
from iterand import selection
from iterand.backend import reference as operations
from iterand.backend.reference import Cut

# A few values of float32 make ties; the rest of it makes everything else.
AWKWARD = [0.0, -0.0, 1.0, -1.0, 2.0**-149, -(2.0**-149), 3.4028234663852886e38, math.inf, -math.inf]
SCORE = st.sampled_from(AWKWARD) | st.floats(width=32, allow_nan=False)
SCORES = st.lists(SCORE, min_size=1, max_size=60)
SPARSITY = st.floats(0, 1)


def kept_indices(mask: Tensor) -> set[int]:
    assert mask.dtype == torch.bool
    return set(mask.reshape(-1).nonzero().flatten().tolist())


@given(scores=SCORES, sparsity=SPARSITY)
def test_mask_is_the_top_of_a_sort(scores, sparsity):
    kept = len(scores) - round(sparsity * len(scores))
    mask = iterand.calculate_mask(torch.tensor(scores), sparsity)
    assert kept_indices(mask) == reference.kept_by_sort(scores, kept)


@given(scores=SCORES, sparsity=SPARSITY)
def test_magnitude_ranks_absolute_values(scores, sparsity):
    kept = len(scores) - round(sparsity * len(scores))
    mask = iterand.calculate_mask(torch.tensor(scores), sparsity, rank_by="magnitude")
    assert kept_indices(mask) == reference.kept_by_sort([abs(score) for score in scores], kept)


@given(scores=SCORES, data=st.data())
def test_both_ways_to_find_the_cut_agree(scores, data):
    """The CPU selects and the GPU sorts: two algorithms, one cut."""
    kept, tensor = data.draw(st.integers(0, len(scores))), torch.tensor(scores)
    selected = Cut(*operations._cut_by_partition([tensor], kept, ["scores"]))
    by_sort = Cut(*operations._cut_by_sort(tensor, torch.tensor(kept)))
    assert selected.threshold == by_sort.threshold
    assert kept_indices(operations.keeps(tensor, selected)) == kept_indices(operations.keeps(tensor, by_sort))


@given(scores=SCORES, data=st.data())
def test_a_cut_is_two_numbers(scores, data):
    """m_i = 1 if s_i > t or (s_i = t and i ≤ c), evaluated here by hand."""
    kept = data.draw(st.integers(0, len(scores)))
    threshold, last = (number.item() for number in operations.cut(torch.tensor(scores), torch.tensor(kept)))
    values = torch.tensor(scores).tolist()
    by_hand = {i for i, s in enumerate(values) if s > threshold or (s == threshold and i <= last)}
    assert by_hand == reference.kept_by_sort(values, kept)


@pytest.mark.parametrize(
    ("count", "sparsity", "kept"),
    [(10, 0.6, 4), (10, 0.0, 10), (10, 1.0, 0), (5, 0.5, 3), (7, 0.5, 3), (1, 0.5, 1), (1, 0.51, 0), (1000, 0.999, 1)],
)
def test_the_kept_count_is_exact(count, sparsity, kept):
    """n − round(p·n); halves go to the even neighbour, as Python rounds."""
    assert selection.kept_count(count, sparsity) == kept
    assert int(iterand.calculate_mask(torch.randn(count), sparsity).sum()) == kept
    assert iterand.calculate_mask(torch.zeros(count), sparsity).tolist() == [True] * kept + [False] * (count - kept)


def test_one_element():
    assert iterand.calculate_mask(torch.tensor([-3.0]), 0.5).tolist() == [True]
    assert iterand.calculate_mask(torch.tensor([3.0]), 1.0).tolist() == [False]
    assert iterand.calculate_mask(torch.tensor(2.0), 0.0).item() is True


def test_no_element():
    assert iterand.calculate_mask(torch.empty(0, 3), 0.5).shape == (0, 3)


def test_shape_and_layout_do_not_matter():
    scores = torch.randint(4, (2, 3, 4, 5)).float()
    expected = iterand.calculate_mask(scores.flatten(), 0.7).view(scores.shape)
    assert torch.equal(iterand.calculate_mask(scores, 0.7), expected)
    assert torch.equal(iterand.calculate_mask(scores.to(memory_format=torch.channels_last), 0.7), expected)
    assert torch.equal(iterand.calculate_mask(scores.mT.contiguous().mT, 0.7), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_other_precisions(dtype):
    scores = torch.randn(100).to(dtype)
    mask = iterand.calculate_mask(scores, 0.3)
    assert kept_indices(mask) == reference.kept_by_sort(scores.tolist(), 70)


def test_double_precision_is_not_rounded():
    scores = torch.tensor([1 + i * 1e-12 for i in range(10)], dtype=torch.float64)
    assert iterand.calculate_mask(scores, 0.5).tolist() == [False] * 5 + [True] * 5


@pytest.mark.parametrize("sparsity", [0.5, 1.0])
def test_whole_numbers_are_not_rounded(sparsity):
    large = torch.tensor([1 << 24, (1 << 24) + 1, -(1 << 62), (1 << 62) + 1, 1 << 62, 0])
    kept = sorted(large.tolist(), reverse=True)[: 3 if sparsity < 1 else 0]
    assert sorted(large[iterand.calculate_mask(large, sparsity)].tolist(), reverse=True) == kept


def test_complex_scores_are_refused():
    with pytest.raises(ValueError, match=r"scores are torch.complex64, which has no order"):
        iterand.calculate_mask(torch.tensor([1j, 2j]), 0.5)


def test_scores_are_left_alone_and_get_no_gradient():
    scores = torch.randn(9, requires_grad=True)
    before = scores.detach().clone()
    assert not iterand.calculate_mask(scores, 0.5).requires_grad
    assert torch.equal(scores, before)


def test_a_default_device_does_not_matter():
    scores = torch.randn(9)
    with torch.device("meta"):
        mask = iterand.calculate_mask(scores, 0.5)
    assert torch.equal(mask, iterand.calculate_mask(scores, 0.5))


@pytest.mark.parametrize("sparsity", [-0.1, 1.5, math.nan, math.inf, "0.5", None, True])
def test_what_is_no_sparsity_is_refused(sparsity):
    with pytest.raises(ValueError, match=r"sparsity is .*; it is the share of weights pruned, from 0 to 1"):
        iterand.calculate_mask(torch.randn(4), sparsity)


def test_numbers_of_numpy_are_numbers():
    assert int(iterand.calculate_mask(torch.randn(4), np.float32(0.5)).sum()) == 2


def test_scores_that_are_no_tensor_are_refused():
    with pytest.raises(ValueError, match=r"scores is \[1, 2\]; it must be a tensor"):
        iterand.calculate_mask([1, 2], 0.5)


def test_an_unknown_ranking_is_refused():
    with pytest.raises(ValueError, match="rank_by is 'size'; it must be one of score, magnitude"):
        iterand.calculate_mask(torch.randn(4), 0.5, rank_by="size")


@pytest.mark.parametrize("position", [0, 50, 99])
@pytest.mark.parametrize("others", [0.0, math.inf, -math.inf, 1e38])
def test_nan_cannot_be_ranked(position, others):
    scores = torch.full((100,), others)
    scores[position] = math.nan
    with pytest.raises(ValueError, match="the scores of 'scores' contain NaN"):
        iterand.calculate_mask(scores, 0.5)
    with pytest.raises(ValueError, match=r"the scores of 'conv\.weight' contain NaN"):
        operations.cut(scores, torch.tensor(50), "conv.weight")


def test_infinite_scores_are_no_nan():
    scores = torch.tensor([math.inf, -math.inf] * 50)
    assert iterand.calculate_mask(scores, 0.5).tolist() == [True, False] * 50


# --- Layers ranked together -----------------------------------------------------------------------------------------

LAYERS = st.lists(st.lists(SCORE, min_size=1, max_size=12), min_size=1, max_size=5)


def together(layers: list[list[float]], kept: int, floors: list[int]) -> list[set[int]]:
    tensors, names = [torch.tensor(layer) for layer in layers], [f"layer{n}" for n in range(len(layers))]
    cuts = operations.cut_together(tensors, torch.tensor(kept), floors, names)
    return [kept_indices(operations.keeps(tensor, cut)) for tensor, cut in zip(tensors, cuts)]


@given(layers=LAYERS, data=st.data())
def test_layers_ranked_together_are_one_long_layer(layers, data):
    kept = data.draw(st.integers(0, sum(map(len, layers))))
    assert together(layers, kept, [0] * len(layers)) == reference.kept_together(layers, kept, [0] * len(layers))


@given(layers=LAYERS, data=st.data())
def test_a_floor_is_met_and_the_count_stays_exact(layers, data):
    floors = [data.draw(st.integers(0, len(layer))) for layer in layers]
    kept = data.draw(st.integers(sum(floors), sum(map(len, layers))))
    assert together(layers, kept, floors) == reference.kept_together(layers, kept, floors)


def test_equal_infinite_scores_beyond_the_floor_stay_exact():
    inf = math.inf
    assert together([[inf, inf, inf, 0.0], [1.0, 0.0, 0.0, 0.0]], 3, [1, 1]) == [{0, 1}, {0}]


@pytest.mark.parametrize("floors", [[0, 0, 0], [1, 1, 1]])
def test_nan_names_the_layer_that_has_it(floors):
    layers = [torch.randn(5), torch.tensor([1.0, math.nan]), torch.randn(5)]
    with pytest.raises(ValueError, match="the scores of 'second' contain NaN"):
        operations.cut_together(layers, torch.tensor(6), floors, ["first", "second", "third"])


# --- Size -----------------------------------------------------------------------------------------------------------


def test_a_hundred_million_scores():
    count = 100_000_000
    scores = torch.empty(count).uniform_(-1, 1, generator=torch.Generator().manual_seed(0))
    scores[12_345_678] = 2.0
    cut = operations.cut(scores, torch.tensor(count // 10))
    mask = operations.keeps(scores, cut)
    assert int(mask.count_nonzero()) == count // 10
    assert mask[12_345_678]
    assert scores[cut.last] == cut.threshold  # so the count is made of s > t and of ties up to the last one
    del mask
    scores.fill_(0.5)
    assert operations.cut(scores, torch.tensor(77_777_777)) == (0.5, 77_777_776)


def test_equal_scores_are_kept_in_order_across_layers():
    """The last kept of equal scores may be in another layer: the count of the whole network is exact all the same."""
    for sparsity, counts in ((0.75, [8, 0]), (0.5, [16, 0]), (0.25, [16, 8]), (0.0, [16, 16]), (0.9, [3, 0])):
        layers = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model = iterand.prune_(layers, sparsity, ranking="global")
        with torch.no_grad():
            for score in iterand.scores(model):
                score.fill_(0.5)
        assert [int(layer.mask.sum()) for layer in iterand.masked_layers(model).values()] == counts
        folded = iterand.fold_(copy.deepcopy(model))
        assert [int(layer.weight.count_nonzero()) for layer in folded] == counts
        assert torch.equal(model(torch.eye(4)), folded(torch.eye(4)))


@pytest.mark.parametrize("ranking", ["layer", "global"])
def test_evaluation_finds_its_cuts_once_and_never_uses_stale_ones(ranking, monkeypatch):
    torch.manual_seed(0)
    model = iterand.prune_(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)), 0.5, ranking=ranking).eval()
    inputs = torch.randn(3, 8)
    found, find = [], selection.backend.find_cuts

    def outputs():
        """Of the model, and how often it has found cuts."""
        found.clear()
        with monkeypatch.context() as patch, torch.no_grad():
            patch.setattr(selection.backend, "find_cuts", lambda *a, **options: found.append(1) or find(*a, **options))
            result = model(inputs)
        assert torch.equal(result, iterand.fold_(copy.deepcopy(model))(inputs))
        return len(found)

    first, second = iterand.scores(model)
    once = outputs()
    assert once == (2 if ranking == "layer" else 1)
    assert outputs() == 0
    with torch.no_grad():
        first.neg_()  # torch counts this
    assert outputs() == 1
    assert outputs() == 0
    second.data.neg_()  # but not this
    outputs()
    second.data[:, :3] += 5.0
    outputs()
    iterand.set_sparsity_(model, 0.25)
    assert outputs() == once
