"""torch.compile: the same numbers as without it, and masks that are found anew in every call."""

import copy
import shutil

import pytest
import torch
from torch import nn

import iterand
from pruned import INPUTS, network, plain_output, shake

# torch warns of itself while it traces and compiles: an autograd.Function is instantiated to be looked at, the gradient
# of a tensor that is no leaf is asked for, and inductor still uses torch.jit.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.* is deprecated:DeprecationWarning"),
]

inductor = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="torch's inductor needs a C++ compiler"
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_every_kind_of_model(example):
    model = iterand.prune_(example.build(), 0.6)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        gradients = torch.autograd.grad(example.loss(compiled), iterand.scores(model))
        expected = torch.autograd.grad(example.loss(model), iterand.scores(model))
        torch.testing.assert_close(gradients, expected)
        shake(model)
        iterand.randomize_(model, 0.5)


@pytest.mark.parametrize(
    "options", [{}, {"ranking": "global"}, {"ranking": "global", "floor": 0.1}], ids=["layer", "global", "floor"]
)
def test_nothing_is_baked_in(options):
    """Scores, weights, the sparsity and the training mode change; one compiled model follows them all."""
    model = network(**options)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(INPUTS), plain_output(model))
    shake(model)
    torch.testing.assert_close(compiled(INPUTS), plain_output(model))
    iterand.randomize_(model, 1.0)
    torch.testing.assert_close(compiled(INPUTS), plain_output(model))
    schedule = iterand.SparsitySchedule(model, "linear", steps=2)
    torch.testing.assert_close(compiled(INPUTS), iterand.fold_(copy.deepcopy(model))(INPUTS))
    schedule.step()
    schedule.step()
    torch.testing.assert_close(compiled(INPUTS), plain_output(model))
    other = network(**options, seed=5)
    with pytest.warns(UserWarning, match="the state has seed="):
        model.load_state_dict(other.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(compiled(INPUTS), plain_output(other))


def test_channels_last():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ConvTranspose2d(8, 3, 3)).to(memory_format=torch.channels_last)
    iterand.prune_(model, 0.6)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    images = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    for _ in range(2):
        output, expected = compiled(images), model(images)
        torch.testing.assert_close(output, expected)
        assert output.stride() == expected.stride()
        gradients = torch.autograd.grad(output.square().sum(), iterand.scores(model))
        torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), iterand.scores(model)))
        shake(model)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=inductor)])
def test_training_is_the_same(backend):
    model = network(ranking="global")
    twin = copy.deepcopy(model)
    compiled = torch.compile(model, backend=backend)
    for pruned, forward in ((model, compiled), (twin, twin)):
        optimizer = torch.optim.SGD(iterand.scores(pruned), lr=1.0, momentum=0.9)
        randomizer = iterand.IterativeRandomization(pruned, period=2, rate=0.5)
        for _ in range(4):
            optimizer.zero_grad()
            forward(INPUTS).square().sum().backward()
            optimizer.step()
            randomizer.step()
    for a, b in zip(iterand.masked_layers(model).values(), iterand.masked_layers(twin).values()):
        torch.testing.assert_close(a.score, b.score)
        assert torch.equal(a.draw, b.draw)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=inductor)])
def test_bernoulli_masks_are_the_same(backend):
    """Two layers have different keys, which compiled code must not take for one number that varies."""
    model, twin, other = (
        iterand.prune_(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), 0.5, mask="bernoulli", seed=seed)
        for seed in (0, 0, 5)
    )
    twin.load_state_dict(model.state_dict())
    compiled, inputs = torch.compile(model, backend=backend), torch.ones(4, 8)
    for _ in range(2):
        output, expected = compiled(inputs), twin(inputs)
        torch.testing.assert_close(output, expected)
        gradients = torch.autograd.grad(output.square().sum(), iterand.scores(model))
        torch.testing.assert_close(gradients, torch.autograd.grad(expected.square().sum(), iterand.scores(twin)))
    if backend == "aot_eager" and not torch.__version__.startswith("2.6."):  # compiling is quick; 2.6 fails to
        with pytest.warns(UserWarning, match="the state has seed="):
            model.load_state_dict(other.state_dict())
        torch.testing.assert_close(compiled(inputs), other(inputs))


def test_folding_a_compiled_model():
    model = network(ranking="global")
    compiled = torch.compile(model, backend="aot_eager")
    expected = compiled(INPUTS)
    iterand.fold_(compiled)
    assert type(model[0]) is nn.Linear
    torch.testing.assert_close(compiled(INPUTS), expected)


def test_compiling_in_place():
    model = network(ranking="global")
    model.compile(backend="aot_eager")
    for _ in range(2):
        torch.testing.assert_close(model(INPUTS), plain_output(model))
        shake(model)


def test_autocast_inside_a_compiled_model():
    model = network()
    compiled = torch.compile(model, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(INPUTS), model(INPUTS))
    shake(model)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(compiled(INPUTS), model(INPUTS))
