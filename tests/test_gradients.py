"""Gradients of scores, layer by layer of one size."""

import pytest
import torch
from torch import nn

import iterand


def model():
    torch.manual_seed(0)
    pruned = iterand.prune_(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 4)), 0.5)
    pruned(torch.randn(8, 6)).square().sum().backward()
    return pruned


@pytest.mark.parametrize("size", [1e-3, 2.0, 1])
def test_every_layer_gets_a_size_and_keeps_its_direction(size):
    pruned = model()
    before = [score.grad.clone() for score in iterand.scores(pruned)]
    assert before[0].square().mean() != before[1].square().mean()
    iterand.normalize_gradients_(pruned, size)
    for score, gradient in zip(iterand.scores(pruned), before):
        fan_in = score.shape[1]
        assert score.grad.square().mean().sqrt().item() == pytest.approx(size * (2 / fan_in) ** 0.5)
        cosine = torch.cosine_similarity(score.grad.flatten(), gradient.flatten(), dim=0)
        assert cosine.item() == pytest.approx(1)


def test_zero_stays_zero_and_none_stays_none():
    pruned = model()
    first, second = iterand.scores(pruned)
    first.grad.zero_()
    second.grad = None
    iterand.normalize_gradients_(pruned)
    assert first.grad.abs().sum() == 0
    assert second.grad is None


@pytest.mark.parametrize("size", [0, -1, float("nan"), float("inf"), "1", True])
def test_a_bad_size_is_refused(size):
    with pytest.raises(ValueError, match=r"size is .*; it is the root mean square of a layer's gradient, a number"):
        iterand.normalize_gradients_(model(), size)


def test_a_model_that_is_not_pruned():
    with pytest.raises(ValueError, match="prune_"):
        iterand.normalize_gradients_(nn.Linear(2, 2))
