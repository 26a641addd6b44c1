"""Attaching and folding as an algebra: whatever happens in between, what comes back computes the same."""

import copy
from itertools import pairwise

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import iterand
import reference

WIDTHS = st.lists(st.integers(1, 6), min_size=2, max_size=5)
OPTIONS = st.fixed_dictionaries(
    {
        "sparsity": st.floats(0, 1),
        "seed": st.integers(0, 5),
        "rank_by": st.sampled_from(["score", "magnitude"]),
        "weights": st.sampled_from(iterand.distribution_names()),
        "biases": st.sampled_from(["zero", "keep"]),
        "norms": st.sampled_from(["fixed", "keep"]),
    }
)
RANKING = st.just({"ranking": "layer"}) | st.floats(0, 0.5).map(lambda floor: {"ranking": "global", "floor": floor})
ACTIONS = st.lists(st.sampled_from(["shake", "tie", "randomize", "copy", "reload", "double", "refold"]), max_size=6)


def network(widths: list[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Linear(before, after, bias=before % 2 == 0), nn.LayerNorm(after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def anatomy(model: nn.Module) -> list[object]:
    return [
        [(name, parameter.shape, parameter.requires_grad) for name, parameter in model.named_parameters()],
        [type(module) for module in model.modules()],
        [sorted(vars(module)) for module in model.modules()],
    ]


def act(action: str, model: nn.Module, widths: list[int], options: dict[str, object]) -> nn.Module:
    """Something that may happen to a pruned model; gives the model to go on with."""
    if action == "shake":
        for n, score in enumerate(iterand.scores(model)):
            score.data.copy_(torch.randn(score.shape, generator=torch.Generator().manual_seed(n)))
    elif action == "tie":
        for score in iterand.scores(model):
            score.data.round_()
    elif action == "randomize":
        iterand.randomize_(model, 0.5)
    elif action == "copy":
        return copy.deepcopy(model)
    elif action == "reload":
        other = iterand.prune_(network(widths), **{**options, "seed": 77})
        other.load_state_dict(model.state_dict())
        return other
    elif action == "double":
        model.double().float()
    elif action == "refold":
        iterand.fold_(copy.deepcopy(model))
    return model


@settings(max_examples=60)
@given(widths=WIDTHS, options=OPTIONS, ranking=RANKING, actions=ACTIONS)
def test_whatever_happens_folding_gives_back_a_model_that_computes_the_same(widths, options, ranking, actions):
    options = options | ranking
    model = network(widths)
    before, values = anatomy(model), {name: value.clone() for name, value in model.state_dict().items()}
    try:
        iterand.prune_(model, **options)
    except ValueError:  # no weight would be left: refused, and left as it was
        assert anatomy(model) == before
        assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
        return
    for action in actions:
        model = act(action, model, widths, options)

    layers = list(iterand.masked_layers(model).values())
    sizes, total = [layer.weight.numel() for layer in layers], sum(layer.weight.numel() for layer in layers)
    kept = [int(layer.mask.sum()) for layer in layers]
    if options["ranking"] == "layer":
        assert kept == [size - round(options["sparsity"] * size) for size in sizes]
    else:
        assert sum(kept) == total - round(options["sparsity"] * total)
        assert all(count >= options["floor"] * size - 1e-6 for count, size in zip(kept, sizes))
    for layer in layers:
        assert torch.equal(layer.parametrization.weight(), layer.weight)
        ranked = layer.score.abs() if options["rank_by"] == "magnitude" else layer.score
        top = reference.kept_by_sort(ranked.flatten().tolist(), int(layer.mask.sum()))
        assert set(layer.mask.flatten().nonzero().flatten().tolist()) == top

    inputs = torch.randn(3, widths[0], generator=torch.Generator().manual_seed(0))
    expected = model(inputs)
    iterand.fold_(model)
    assert torch.equal(model(inputs), expected)
    assert anatomy(model) == before
