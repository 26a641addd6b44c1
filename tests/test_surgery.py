"""Attaching and folding as an algebra: whatever happens in between, what comes back computes the same."""

import copy
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import parametrize

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
        with pytest.warns(UserWarning, match="the state has seed="):
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


# --- A root with parametrizations of its own ------------------------------------------------------------------------

ROWS = torch.randn(3, 8, generator=torch.Generator().manual_seed(4))


class Doubled(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return 2 * value

    def right_inverse(self, value: Tensor) -> Tensor:
        return value / 2


class Scaled(nn.Module):
    """A root with a layer and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.arange(8.0))

    def forward(self, rows: Tensor) -> Tensor:
        return self.linear(rows) * self.scale


ROOTS = {
    "linear": (lambda: nn.Linear(8, 8), "bias"),
    "own parameter": (Scaled, "scale"),
    "rnn": (lambda: nn.RNN(8, 8, num_layers=2), "bias_hh_l1"),
}


@pytest.mark.parametrize("root", list(ROOTS))
@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_folding_keeps_what_else_is_computed_in_the_root(root, early):
    build, attribute = ROOTS[root]
    model = build()

    def run(model: nn.Module) -> Tensor:
        output = model(ROWS)
        return output if isinstance(output, Tensor) else output[0]

    if early:
        parametrize.register_parametrization(model, attribute, Doubled())
    iterand.prune_(model, 0.5, biases="keep", ranking="global", exclude=f"*{attribute}*")
    if not early:
        parametrize.register_parametrization(model, attribute, Doubled())
    expected = run(model)
    folded = iterand.fold_(copy.deepcopy(model))
    assert torch.equal(run(folded), expected)
    assert torch.equal(run(model), expected)  # what a copy shares with it is still there
    assert parametrize.is_parametrized(folded, attribute)
    assert torch.equal(getattr(folded, attribute), getattr(model, attribute))
    run(folded).sum().backward()
    assert getattr(folded.parametrizations, attribute).original.grad is not None
    iterand.fold_(model)
    parametrize.remove_parametrizations(model, attribute)
    assert type(model) is type(build())
    assert {name: value.shape for name, value in model.named_parameters()} == {
        name: value.shape for name, value in build().named_parameters()
    }
    assert torch.equal(run(model), expected)


@pytest.mark.parametrize("early", [True, False], ids=["before", "after"])
def test_a_parametrization_of_the_root_can_be_removed_while_it_is_masked(early):
    model = nn.Linear(8, 8)
    if early:
        parametrize.register_parametrization(model, "bias", Doubled())
    iterand.prune_(model, 0.5, biases="keep", exclude="*bias*")
    if not early:
        parametrize.register_parametrization(model, "bias", Doubled())
    expected = model(ROWS)
    parametrize.remove_parametrizations(model, "bias")
    assert torch.equal(model(ROWS), expected)
    iterand.fold_(model)
    assert type(model) is nn.Linear
    assert [name for name, _ in model.named_parameters()] == ["weight", "bias"]
    assert torch.equal(model(ROWS), expected)


def test_a_class_made_on_top_of_a_masked_module_stays():
    """As torch's fully_shard does it."""

    class Marked:
        pass

    model = iterand.prune_(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 0.5, ranking="global")
    for module in (model, model[0]):
        module.__class__ = type(f"Marked{type(module).__name__}", (Marked, type(module)), {})
    expected = model(ROWS)
    iterand.fold_(model)
    assert torch.equal(model(ROWS), expected)
    assert [type(module).__mro__[1:3] for module in (model, model[0])] == [(Marked, nn.Sequential), (Marked, nn.Linear)]


def test_a_model_folded_part_by_part_can_be_pruned_again():
    model = iterand.prune_(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 0.5, ranking="global")
    for part in model:
        iterand.fold_(part)
    iterand.prune_(model, 0.75, ranking="global")
    expected = model(ROWS)
    iterand.fold_(model)
    assert type(model) is nn.Sequential
    assert torch.equal(model(ROWS), expected)
