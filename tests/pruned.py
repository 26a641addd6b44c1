"""A small pruned network, and what it should compute, by a sort in plain Python."""

import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import iterand
import reference

GENERATOR = torch.Generator().manual_seed(3)
INPUTS = torch.randn(5, 8, generator=GENERATOR)
RANKINGS = pytest.mark.parametrize(
    "options",
    [{"ranking": "layer"}, {"ranking": "global"}, {"ranking": "global", "floor": 0.1}, {"rank_by": "magnitude"}],
    ids=["layer", "global", "floor", "magnitude"],
)


def network(**options: object) -> nn.Sequential:
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
    return iterand.prune_(model, 0.6, **options)


def plain_masks(model: nn.Module) -> list[list[bool]]:
    """The masks the present scores ask for, by a sort in plain Python."""
    states = [tensor.parametrization for tensor in iterand.masked_layers(model).values()]
    flat = [state.score.detach().flatten().tolist() for state in states]
    if states[0].settings.rank_by == "magnitude":
        flat = [[abs(score) for score in scores] for scores in flat]
    count = [len(scores) for scores in flat]
    if states[0].settings.ranking == "global":
        floors = [math.ceil(state.settings.floor * n) for state, n in zip(states, count)]
        kept = reference.kept_together(flat, sum(count) - round(0.6 * sum(count)), floors)
    else:
        kept = [reference.kept_by_sort(scores, n - round(0.6 * n)) for scores, n in zip(flat, count)]
    return [[i in indices for i in range(n)] for indices, n in zip(kept, count)]


def plain_output(model: nn.Sequential, inputs: Tensor = INPUTS) -> Tensor:
    """f(x; θ ⊙ m), with the mask of the present scores."""
    masks = plain_masks(model)
    layers = iterand.masked_layers(model).values()
    first, second = (
        torch.where(torch.tensor(mask).view(layer.weight.shape), layer.weight, 0.0)
        for mask, layer in zip(masks, layers)
    )
    return F.linear(F.relu(F.linear(inputs, first)), second)


def shake(model: nn.Module) -> None:
    """Other scores, written past autograd."""
    for score in iterand.scores(model):
        score.data.copy_(torch.randn(score.shape, generator=GENERATOR))


def score_gradients(model: nn.Module, inputs: Tensor = INPUTS) -> list[Tensor]:
    for score in iterand.scores(model):
        score.grad = None
    model(inputs).square().sum().backward()
    return [score.grad for score in iterand.scores(model)]
