"""The operations of a network for inference: what is found, what is folded, what is refused."""

import copy
import re
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import iterand
from inference_networks import CASES, RELU, MadeUp, Wired, conv, norm, scramble_
from iterand.errors import IterandError
from iterand.inference.graph import FoldedModule, trace, without_unread_channels
from iterand.inference.nodes import (
    Add,
    Affine,
    AveragePool,
    Concatenate,
    Convolution,
    Flatten,
    Linear,
    MaxPool,
    Node,
    Value,
)
from iterand.lab.networks import build_network

TICKETS = Path(__file__).parents[1] / "results" / "tickets"
LAYERS = "convolution, linear, batch norm, ReLU, max and average pooling, add, concatenate and flatten"


def calculate(graph, images):
    """The output by the formulas of the nodes, in float64."""
    values = {graph.input: images.double()}
    for node in graph.nodes:
        first, *others = (values[value] for value in node.inputs)
        planes = first.unsqueeze(2) if first.ndim == 3 else first
        per_channel = (-1, *[1] * (len(node.output.shape) - 1))
        if isinstance(node, Convolution):
            weight = torch.tensor(node.weight).double()
            output = F.conv2d(planes, weight, None, node.stride, node.padding, node.dilation, node.groups)
        elif isinstance(node, Linear):
            output = first @ torch.tensor(node.weight).double().T
        elif isinstance(node, MaxPool):
            output = F.max_pool2d(planes, node.kernel, node.stride, node.padding)
        elif isinstance(node, AveragePool):
            counted = node.count_include_pad
            output = F.avg_pool2d(planes, node.kernel, node.stride, node.padding, count_include_pad=counted)
        elif isinstance(node, Concatenate):
            output, others = torch.cat([first, *others], 1), []
        else:
            assert isinstance(node, (Affine, Add, Flatten))
            output = first
        output = output.reshape(len(images), *node.output.shape)
        if isinstance(node, (Convolution, Linear, Affine)):
            scale, shift = (torch.tensor(array).double().reshape(per_channel) for array in (node.scale, node.shift))
            output = scale * output + shift
        assert len(others) <= (not isinstance(node, (Affine, Flatten, MaxPool, AveragePool)))
        output = output + others[0] if others else output
        values[node.output] = output.clamp(min=0) if getattr(node, "relu", False) else output
    return values[graph.output]


def close(found, expected):
    assert found.shape == expected.shape
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()


def check(model, *shape, batch=3):
    """Trace the model, compare outputs with those of torch, and check what every graph has to be."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    graph = trace(model, torch.zeros(1, *shape))
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())

    values = [graph.input, *(node.output for node in graph.nodes)]
    assert [value.name for value in values] == [f"v{number}" for number in range(len(values))]
    assert graph.input.shape == shape
    for number, node in enumerate(graph.nodes, 1):
        assert set(node.inputs) <= set(values[:number])
        for name in ("weight", "scale", "shift"):
            array = getattr(node, name, None)
            assert array is None or (array.dtype == np.float32 and array.flags.c_contiguous)
        for name in ("kernel", "stride", "padding", "dilation"):
            pair = getattr(node, name, (1, 1))
            assert isinstance(pair, tuple)
            assert [type(size) for size in pair] == [int, int]
        if isinstance(node, Convolution):
            assert node.weight.ndim == 4

    images = torch.randn(batch, *shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = copy.deepcopy(model).eval()(images.clone())
        close(calculate(graph, images).float(), expected)
        close(FoldedModule(graph)(images), expected)
    return graph


def kinds(graph):
    return [type(node).__name__ for node in graph.nodes]


# The networks of the lab, and tickets.


@pytest.mark.parametrize(
    ("name", "width_factor", "shape", "counted"),
    [
        ("conv6", 0.1, (3, 32, 32), {Convolution: 6, MaxPool: 3, Flatten: 1, Linear: 3}),
        ("digits_conv", 0.5, (1, 8, 8), {Convolution: 4, MaxPool: 2, Flatten: 1, Linear: 1}),
        ("vgg11", 0.05, (3, 32, 32), {Convolution: 8, MaxPool: 4, AveragePool: 1, Flatten: 1, Linear: 1}),
        ("resnet20", 0.5, (3, 32, 32), {Convolution: 21, AveragePool: 1, Flatten: 1, Linear: 1}),
        ("resnet18_cifar", 0.05, (3, 16, 16), {Convolution: 21, AveragePool: 1, Flatten: 1, Linear: 1}),
        ("resnet34_cifar", 0.05, (3, 16, 16), {Convolution: 37, AveragePool: 1, Flatten: 1, Linear: 1}),
        ("resnet50_imagenet", 0.05, (3, 64, 64), {Convolution: 53, MaxPool: 1, AveragePool: 1, Flatten: 1, Linear: 1}),
    ],
)
def test_networks_of_the_lab(name, width_factor, shape, counted):
    """All norms, ReLUs and additions are folded."""
    graph = check(scramble_(build_network(name, width_factor=width_factor)), *shape)
    assert Counter(type(node) for node in graph.nodes) == counted
    if name == "resnet20":
        first = graph.nodes[0]
        assert (first.where, first.inputs, first.relu) == ("stem.0.convolution", (graph.input,), True)
        assert [len(node.inputs) for node in graph.nodes[1:5]] == [1, 2, 1, 2]
        assert graph.nodes[4].inputs[1] == graph.nodes[2].output
        assert graph.nodes[-1].where == "classifier"
        assert graph.nodes[-1].output == graph.output == Value("v24", (10,))


@pytest.mark.parametrize("name", ["best-resnet20-e21621f5ed", "best-vgg11-f5591dd60a"])
def test_tickets_of_the_repository(name):
    """Norms are shifted; weights stay the ticket's: 0, c and −c for one c a layer."""
    network = iterand.load_ticket(TICKETS / f"{name}.ticket")
    graph = check(network, 3, 32, 32)
    state = network.state_dict()
    layers = [node for node in graph.nodes if isinstance(node, (Convolution, Linear))]
    assert len(layers) == len(iterand.read_ticket(TICKETS / f"{name}.ticket").layers) - sum(
        isinstance(module, nn.BatchNorm2d) for module in network.modules()
    )
    for node in layers:
        assert np.array_equal(node.weight, state[f"{node.where}.weight"].numpy())
        assert len(np.unique(np.abs(node.weight[node.weight != 0]))) == 1
    assert not any(isinstance(node, (Affine, Add)) for node in graph.nodes)


# Operations and folds, by small networks of their own.


@pytest.mark.parametrize("name", CASES)
def test_operations_and_folds(name):
    build, shape, expected = CASES[name]
    torch.manual_seed(0)
    graph = check(scramble_(build()), *shape)
    if expected is not None:
        assert " ".join(kinds(graph)) == expected


def test_scale_and_shift_are_rounded_once():
    """They are computed in float64 from the values that torch has."""
    torch.manual_seed(0)
    model = scramble_(nn.Sequential(nn.Conv1d(3, 64, 3), nn.BatchNorm1d(64, eps=1e-3), nn.BatchNorm1d(64)))
    (node,) = trace(model, torch.zeros(1, 3, 8)).nodes
    layer, *norms = model
    scale, shift = np.ones(64), layer.bias.detach().double().numpy()
    for one in norms:
        mean, variance, factor, bias = (
            tensor.detach().double().numpy() for tensor in (one.running_mean, one.running_var, one.weight, one.bias)
        )
        factor = factor / np.sqrt(variance + one.eps)
        scale, shift = scale * factor, (shift - mean) * factor + bias
    for found, exact in ((node.scale, scale), (node.shift, shift)):
        assert (np.abs(found - exact) <= 0.501 * np.spacing(np.abs(found))).all()
    assert np.array_equal(node.weight[:, :, 0], layer.weight.detach().numpy())


def test_layers_of_one_module_share_an_array_that_the_model_does_not():
    model = Wired(lambda m, x: m.a(m.a(x)), a=conv())
    first, second = trace(model, torch.zeros(1, 4, 5, 5)).nodes
    assert first.weight is second.weight
    before = first.weight.copy()
    with torch.no_grad():
        model.a.weight.zero_()
    assert np.array_equal(first.weight, before)


def test_the_sum_is_computed_when_both_operands_are_known():
    """The later layer gets the residual; a layer moves behind a residual that is computed after it."""
    model = Wired(lambda m, x: F.relu(m.a(x) + F.relu(m.b(x))), a=conv(), b=conv())
    b, a = trace(model, torch.zeros(1, 4, 5, 5)).nodes
    assert (a.where, b.where, a.inputs[1]) == ("a", "b", b.output)
    model = Wired(lambda m, x: m.b(x) + m.a(x), a=conv(), b=conv())
    b, a = trace(model, torch.zeros(1, 4, 5, 5)).nodes
    assert (a.where, b.where, a.inputs[1], b.inputs) == ("a", "b", b.output, a.inputs[:1])


def test_places_are_paths_of_modules():
    model = nn.Sequential(nn.Sequential(conv(), norm(), nn.Sequential(conv())), nn.MaxPool2d(2), RELU)
    assert [node.where for node in trace(model, torch.zeros(1, 4, 4, 4)).nodes] == ["0.0", "0.2.0", "1"]


def test_changes_in_place_are_seen_by_later_reads():
    def wiring(m, x):
        y = m.a(x)
        F.relu(y, inplace=True)
        y += x
        return m.a(y) + y

    assert kinds(check(Wired(wiring, a=conv()), 4, 5, 5)) == ["Convolution", "Add", "Convolution"]

    def of_the_input(m, x):
        F.relu_(x)
        return m.a(x)

    assert kinds(check(Wired(of_the_input, a=conv()), 4, 5, 5)) == ["Affine", "Convolution"]


def test_a_model_in_train_mode_that_is_wrapped():
    torch.manual_seed(0)
    model = scramble_(nn.Sequential(conv(), norm(), nn.Dropout(0.5), RELU)).train()
    graph = check(model, 4, 5, 5)
    assert model.training
    wrapped = trace(nn.DataParallel(model), torch.zeros(1, 4, 5, 5))
    assert np.array_equal(wrapped.nodes[0].scale, graph.nodes[0].scale)
    assert wrapped.nodes[0].where == "0"


# Networks made up at random.


@pytest.mark.parametrize("seed", range(10))
def test_networks_made_up_at_random(seed):
    model = MadeUp(seed).eval()
    check(model, *model.shape)


# Refusals.


class Branching(nn.Linear):
    def forward(self, images):
        return super().forward(images) if images.sum() > 0 else images


class TwoInputs(nn.Linear):
    def forward(self, images, others):
        return super().forward(images) + others


def wired(wiring, **layers):
    return lambda: Wired(wiring, **layers)


REFUSED = {
    "activation": (
        lambda: nn.Sequential(conv(), nn.Sequential(nn.SiLU())),
        (4, 5, 5),
        f"the network uses aten.silu at '1.0', which inference in C does not have; it has {LAYERS}",
    ),
    "activation in place": (
        lambda: nn.Sequential(conv(), nn.ReLU6(inplace=True)),
        (4, 5, 5),
        f"the network uses aten.hardtanh_ at '1', which inference in C does not have; it has {LAYERS}",
    ),
    "ReLU6": (
        wired(lambda m, x: F.hardtanh(x)),
        (4,),
        f"the network uses aten.hardtanh in its own forward, which inference in C does not have; it has {LAYERS}",
    ),
    "3d convolution": (
        wired(lambda m, x: m.a(x.unsqueeze(1)), a=nn.Conv3d(1, 1, 1)),
        (4, 5, 5),
        f"the network uses aten.conv3d at 'a', which inference in C does not have; it has {LAYERS}",
    ),
    "transposed convolution": (
        lambda: nn.ConvTranspose2d(4, 4, 3),
        (4, 5, 5),
        f"the network uses aten.conv_transpose2d in its own forward, which inference in C does not have; "
        f"it has {LAYERS}",
    ),
    "random numbers": (
        wired(lambda m, x: x + torch.rand(4)),
        (4,),
        f"the network uses aten.rand in its own forward, which inference in C does not have; it has {LAYERS}",
    ),
    "result written elsewhere": (
        wired(lambda m, x: torch.add(x, x, out=torch.empty(2, 4))),
        (4,),
        f"the network uses aten.add in its own forward, which inference in C does not have; it has {LAYERS}",
    ),
    "maximum with indices": (
        lambda: nn.Sequential(nn.AdaptiveMaxPool2d(1)),
        (4, 5, 5),
        f"the network uses aten.adaptive_max_pool2d at '0', which inference in C does not have; it has {LAYERS}",
    ),
    "padding mode": (
        lambda: nn.Sequential(conv(padding_mode="circular")),
        (4, 5, 5),
        "the network uses aten.pad at '0' with mode 'circular'; inference in C pads with zeros only",
    ),
    "padding by itself": (
        lambda: nn.Sequential(nn.ConstantPad2d(1, 0.0), conv()),
        (4, 5, 5),
        "the network uses aten.pad at '0' with mode 'constant'; inference in C pads only within a layer; give the next "
        "layer the padding",
    ),
    "padding of one side": (
        lambda: nn.Sequential(conv(kernel=4, padding="same")),
        (4, 5, 5),
        "the network uses aten.conv2d at '0' with more padding on one side; inference in C pads both sides alike",
    ),
    "images without a batch": (
        lambda: nn.Sequential(nn.Conv2d(2, 3, 1), nn.ReLU()),
        (4, 5),
        "the network uses aten.conv2d at '0' across the batch; inference in C computes each input of a batch by itself",
    ),
    "pooling without a batch": (
        lambda: nn.MaxPool2d(1),
        (4, 5),
        "the network uses aten.max_pool2d in its own forward on a tensor of shape (4, 5); "
        "inference in C needs (channels, height, width)",
    ),
    "weight from the input": (
        wired(lambda m, x: F.linear(x, m.a(x).mean((1, 2), keepdim=True).flatten(1)), a=conv()),
        (4, 5, 5),
        "the network uses aten.mean in its own forward with dim=[1, 2]; inference in C averages over height and width",
    ),
    "computed weight": (
        wired(lambda m, x: F.linear(x, m.a(x)), a=nn.Linear(4, 4)),
        (4,),
        "the network uses aten.linear in its own forward with a weight that is computed from the input; "
        "inference in C needs a constant",
    ),
    "statistics of the batch": (
        lambda: nn.Sequential(nn.BatchNorm1d(4, track_running_stats=False)),
        (4, 3),
        "the network uses aten.batch_norm at '0' with the statistics of the batch; "
        "inference in C needs running statistics",
    ),
    "linear along the last dimension": (
        lambda: nn.Sequential(nn.Linear(5, 4)),
        (3, 5),
        "the network uses aten.linear at '0' on a tensor of shape (3, 5); inference in C needs (features,)",
    ),
    "constant summand": (
        wired(lambda m, x: x + 1),
        (4,),
        "the network uses aten.add in its own forward with a constant; "
        "inference in C adds what is computed from the input",
    ),
    "shapes that are broadcast": (
        wired(lambda m, x: x + x.mean((2, 3), keepdim=True)),
        (4, 5, 5),
        "the network uses aten.add in its own forward on shapes (4, 5, 5) and (4, 1, 1); "
        "inference in C adds equal shapes",
    ),
    "factor of a sum": (
        wired(lambda m, x: torch.add(x, x, alpha=2)),
        (4,),
        "the network uses aten.add in its own forward with alpha=2; inference in C adds without a factor",
    ),
    "concatenated rows": (
        wired(lambda m, x: torch.cat([x, x], 2)),
        (4, 5, 5),
        "the network uses aten.cat in its own forward with dim=2; inference in C concatenates channels, dim=1",
    ),
    "concatenated batches": (
        wired(lambda m, x: torch.cat([x, x])),
        (4,),
        "the network uses aten.cat in its own forward across the batch; "
        "inference in C computes each input of a batch by itself",
    ),
    "concatenated constant": (
        wired(lambda m, x: torch.cat([x, torch.zeros(2, 4)], 1)),
        (4,),
        "the network uses aten.cat in its own forward with a constant; "
        "inference in C concatenates what is computed from the input",
    ),
    "dilated pooling": (
        lambda: nn.Sequential(nn.MaxPool2d(2, dilation=2)),
        (4, 6, 6),
        "the network uses aten.max_pool2d at '0' with dilation (2, 2); inference in C has max pooling of dilation 1",
    ),
    "ceil_mode": (
        lambda: nn.Sequential(nn.MaxPool2d(2, ceil_mode=True)),
        (4, 5, 5),
        "the network uses aten.max_pool2d at '0' with ceil_mode and windows beyond the edge; "
        "inference in C has windows inside it",
    ),
    "divisor": (
        lambda: nn.Sequential(nn.AvgPool2d(2, divisor_override=3)),
        (4, 5, 5),
        "the network uses aten.avg_pool2d at '0' with divisor_override; inference in C divides by the size of a window",
    ),
    "unequal windows": (
        lambda: nn.Sequential(nn.AdaptiveAvgPool2d(2)),
        (4, 5, 6),
        "the network uses aten.adaptive_avg_pool2d at '0' from size (5, 6) to (2, 2); "
        "inference in C has windows of equal size",
    ),
    "mean of columns": (
        wired(lambda m, x: x.mean(2)),
        (4, 5, 5),
        "the network uses aten.mean in its own forward with dim=[2]; inference in C averages over height and width",
    ),
    "mean of everything": (
        wired(lambda m, x: x.mean()),
        (4,),
        "the network uses aten.mean in its own forward across the batch; "
        "inference in C computes each input of a batch by itself",
    ),
    "another view": (
        wired(lambda m, x: F.relu(x.view(len(x), 2, -1))),
        (4, 5, 5),
        "the network uses aten.view in its own forward from shape (4, 5, 5) to (2, 50); inference in C only flattens",
    ),
    "another view as the output": (
        wired(lambda m, x: x.flatten(2)),
        (4, 5, 5),
        "the network uses aten.flatten in its own forward from shape (4, 5, 5) to (4, 25); "
        "inference in C only flattens",
    ),
    "dropout that stays": (
        wired(lambda m, x: F.dropout(x, training=True)),
        (4,),
        "the network uses aten.dropout in its own forward with training=True; inference in C has no dropout",
    ),
    "float64 inside": (
        wired(lambda m, x: x.double().float()),
        (4,),
        "the network uses aten.to in its own forward for torch.float64; inference in C computes in float32",
    ),
    "float64 weights": (
        lambda: nn.Sequential(nn.Linear(4, 3).double()),
        (4,),
        "'0.weight' of the network is torch.float64; inference takes float32: model.float()",
    ),
    "lazy weights": (
        lambda: nn.Sequential(nn.LazyLinear(3)),
        (4,),
        "'0.weight' of the network has no values yet; load a ticket into it first",
    ),
    "weights on the meta device": (
        lambda: nn.Sequential(nn.Linear(4, 3, device="meta")),
        (4,),
        "'0.weight' of the network has no values yet; load a ticket into it first",
    ),
    "several inputs": (
        lambda: TwoInputs(4, 4),
        (4,),
        "TwoInputs does not run on one input of shape (4,): "
        "TwoInputs.forward() missing 1 required positional argument: 'others'",
    ),
    "several outputs": (
        wired(lambda m, x: (x, x)),
        (4,),
        "Wired gives a tuple; inference takes a network that gives one tensor",
    ),
    "an input of another size": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(12, 3)),
        (2, 5),
        "Sequential does not run on one input of shape (2, 5): "
        "mat1 and mat2 shapes cannot be multiplied (2x10 and 12x3)",
    ),
    "constant output": (
        wired(lambda m, x: torch.zeros(2, 3)),
        (4,),
        "the output of the network does not depend on its input",
    ),
    "view of a changed tensor": (
        wired(lambda m, x: (y := m.a(x), z := y.flatten(1), y.relu_(), m.b(z))[-1], a=conv(), b=nn.Linear(36, 2)),
        (4, 3, 3),
        "the network reads a view in its own forward after it has changed the tensor in place; "
        "use clone() before the change",
    ),
    "changed view of a tensor": (
        wired(lambda m, x: (y := m.a(x), z := m.d(y), z.relu_(), y + z)[-1], a=conv(), d=nn.Dropout()),
        (4, 3, 3),
        "the network reads a view at 'a' after it has changed the tensor in place; use clone() before the change",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_supported_is_refused_in_one_sentence(name, capfd):
    build, shape, sentence = REFUSED[name]
    with pytest.raises(IterandError) as caught:
        trace(build(), torch.zeros(1, *shape))
    assert str(caught.value) == sentence
    assert capfd.readouterr() == ("", "")


def test_what_torch_cannot_trace_is_refused_with_its_reason(capfd):
    with pytest.raises(IterandError, match=r"^torch.export cannot trace Branching: \S") as caught:
        trace(Branching(4, 4), torch.zeros(1, 4))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_wrong_arguments():
    masked = iterand.prune_(nn.Linear(4, 3), 0.5)
    sentence = "the model is masked; inference takes an ordinary one, from load_ticket or fold_"
    with pytest.raises(ValueError, match=f"^{sentence}$"):
        trace(masked, torch.zeros(1, 4))
    check(iterand.fold_(masked), 4)
    rule = "it must be a float32 tensor with a batch dimension and 1 to 3 others"
    for example, shown in [
        ([1.0], "[1.0]"),
        (torch.zeros(1, 4, dtype=torch.float64), "torch.float64 of shape (1, 4)"),
        (torch.zeros(4), "torch.float32 of shape (4,)"),
        (torch.zeros(1, 1, 1, 1, 1), "torch.float32 of shape (1, 1, 1, 1, 1)"),
    ]:
        with pytest.raises(ValueError, match=f"^{re.escape(f'example is {shown}; {rule}')}$"):
            trace(nn.Linear(4, 3), example)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["0.weight", "0.bias", "1.running_var", "1.running_mean", "3.running_mean"])
def test_numbers_that_are_not_finite_are_refused(name, number):
    model = nn.Sequential(conv(), norm(), RELU, norm()).eval()
    model.state_dict()[name].view(-1)[0] = number
    if name == "1.running_var" and number == float("inf"):
        check(model, 4, 5, 5)  # a scale of zero
        return
    place = "3" if name.startswith("3") else "0"
    sentence = f"the network has NaN or infinity among the weights, biases or norm statistics of '{place}'; "
    with pytest.raises(IterandError, match=f"^{sentence}inference in C needs finite numbers$"):
        trace(model, torch.zeros(1, 4, 5, 5))


# Running a graph with torch.


def test_the_folded_module_has_buffers_and_takes_any_batch():
    torch.manual_seed(0)
    model = scramble_(nn.Sequential(conv(), norm(), RELU, nn.AdaptiveAvgPool2d(1), norm(), nn.Flatten())).eval()
    folded = FoldedModule(trace(model, torch.zeros(1, 4, 6, 6)))
    assert list(folded.state_dict()) == ["v1_weight", "v1_shift", "v3_scale", "v3_shift"]
    assert not list(folded.parameters())
    for batch in (1, 2, 7):
        images = torch.randn(batch, 4, 6, 6)
        with torch.no_grad():
            close(folded(images), model(images))
    assert folded(torch.zeros(0, 4, 6, 6)).shape == (0, 4)
    copied = FoldedModule(trace(scramble_(copy.deepcopy(model), seed=1), torch.zeros(1, 4, 6, 6)))
    copied.load_state_dict(folded.state_dict())
    assert torch.equal(copied(images), folded(images))


def test_the_folded_module_refuses_another_size_and_another_node():
    folded = FoldedModule(trace(conv(), torch.zeros(1, 4, 6, 6)))
    for shape in ((2, 4, 6, 5), (4, 6, 6)):
        sentence = f"the input has shape {shape}; the network takes (batch, 4, 6, 6)"
        with pytest.raises(ValueError, match=f"^{re.escape(sentence)}$"):
            folded(torch.zeros(shape))
    node = Node((folded.graph.input,), folded.graph.input, "")
    with pytest.raises(ValueError, match="Node is no operation of a graph"):
        folded.compute(node, torch.zeros(2, 4, 6, 6))


# Channels that nothing reads.


def test_channels_without_readers_are_left_out():
    """Of 6 and 5 channels 4 and 3 are read, through a pooling too; the residual and the output keep all of theirs."""
    torch.manual_seed(0)
    layers = {"a": conv(4, 6), "b": conv(6, 5), "c": conv(5, 4), "d": conv(4, 4)}
    model = Wired(lambda m, x: m.d(y := F.relu(m.c(F.max_pool2d(F.relu(m.b(F.relu(m.a(x)))), 2)))) + y, **layers)
    scramble_(model)
    with torch.no_grad():
        layers["b"].weight[:, [0, 3]] = 0
        layers["c"].weight[:, [1, 4]] = 0
        layers["d"].weight[:, 2] = 0
    graph = trace(model.eval(), torch.zeros(1, 4, 6, 6))
    smaller = without_unread_channels(graph)
    assert [node.output.shape[0] for node in graph.nodes] == [6, 5, 5, 4, 4]
    assert [node.output.shape[0] for node in smaller.nodes] == [4, 3, 3, 4, 4]
    assert [node.weight.shape[1] for node in smaller.nodes if isinstance(node, Convolution)] == [4, 4, 3, 4]
    images = torch.randn(2, 4, 6, 6)
    torch.testing.assert_close(FoldedModule(smaller)(images), FoldedModule(graph)(images))


def test_a_network_that_reads_everything_is_as_it_was():
    graph = trace(build_network("resnet20").eval(), torch.zeros(1, 3, 32, 32))
    for one, other in zip(without_unread_channels(graph).nodes, graph.nodes):
        assert (one.inputs, one.output) == (other.inputs, other.output)
