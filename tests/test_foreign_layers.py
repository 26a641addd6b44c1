"""Norms, layer scales and linear layers that are not torch's, as libraries and users write them."""

import copy
import logging
import math

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import iterand
from iterand import distributions
from test_planning import snapshot

ROWS = torch.randn(3, 4, 6, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(3, 6, 4, 4, generator=torch.Generator().manual_seed(1))


# --- Norms ----------------------------------------------------------------------------------------------------------


class RootMeanSquareNorm(nn.Module):
    """As in Llama and T5."""

    offset = 0

    def __init__(self, size: int = 6, start: float = 0.5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((size,), start))
        self.variance_epsilon = 1e-6

    def forward(self, rows: Tensor) -> Tensor:
        scaled = rows.float() * torch.rsqrt(rows.float().pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return (self.offset + self.weight) * scaled.to(rows.dtype)


class OffsetNorm(RootMeanSquareNorm):
    """As in Gemma: the factor is one plus the weight."""

    offset = 1


class OffsetLayerNorm(nn.LayerNorm):
    """As in Nemotron: a subclass of torch's norm with another factor."""

    def forward(self, rows: Tensor) -> Tensor:
        return F.layer_norm(rows, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class ChannelsFirst(nn.LayerNorm):
    """As in timm: torch's norm for images."""

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Annotated(nn.Module):
    """As in The Annotated Transformer: neither the class nor its parameters are called what they are elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.a_2 = nn.Parameter(torch.ones(6))
        self.b_2 = nn.Parameter(torch.full((6,), 0.25))
        self.eps = 1e-6

    def forward(self, rows: Tensor) -> Tensor:
        return self.a_2 * (rows - rows.mean(-1, keepdim=True)) / (rows.std(-1, keepdim=True) + self.eps) + self.b_2


class ImageNorm(nn.Module):
    """Parameters with axes of length one, and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(1, 6, 1, 1))
        self.gamma = nn.Parameter(torch.full((1, 6, 1, 1), 3.0))

    def forward(self, images: Tensor) -> Tensor:
        return F.relu(F.normalize(images, dim=1) * self.gamma + self.beta)


class GatedNorm(RootMeanSquareNorm):
    """As in Mamba 2: a second input is optional."""

    def forward(self, rows: Tensor, gate: Tensor | None = None) -> Tensor:
        return super().forward(rows if gate is None else rows * F.silu(gate))


NORMS = {
    "rms": (RootMeanSquareNorm, ROWS, {"weight": 1.0}),
    "offset": (OffsetNorm, ROWS, {"weight": 0.0}),
    "offset of torch's": (lambda: OffsetLayerNorm(6), ROWS, {"weight": 0.0, "bias": 0.0}),
    "channels first": (lambda: ChannelsFirst(6), IMAGES, {"weight": 1.0, "bias": 0.0}),
    "annotated": (Annotated, ROWS, {"a_2": 1.0, "b_2": 0.0}),
    "images": (ImageNorm, IMAGES, {"gamma": 1.0, "beta": 0.0}),
    "gated": (GatedNorm, ROWS, {"weight": 1.0}),
}


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_are_known_by_what_they_do(name, dtype, tmp_path):
    build, inputs, expected = NORMS[name]
    model = nn.ModuleDict({"norm": build(), "head": nn.Linear(6, 6)}).to(dtype)
    state, generator = copy.deepcopy(model["norm"]).state_dict(), torch.get_rng_state()
    iterand.prune_(copy.deepcopy(model), 0.5, norms="keep", strict=True)
    assert all(torch.equal(value, state[name]) for name, value in model["norm"].state_dict().items())
    iterand.prune_(model, 0.5, strict=True)
    assert torch.equal(torch.get_rng_state(), generator)
    norm = model["norm"]
    for parameter, value in expected.items():
        assert norm.get_parameter(parameter).unique().tolist() == [value]
        assert not norm.get_parameter(parameter).requires_grad
    assert len(expected) == len(list(norm.parameters()))
    assert norm(inputs.to(dtype)).float().std() > 0.2
    iterand.save_ticket(model, tmp_path / "a.ticket")
    plain = nn.ModuleDict({"norm": build(), "head": nn.Linear(6, 6)}).to(dtype)
    iterand.load_ticket(tmp_path / "a.ticket", plain)
    iterand.fold_(model)
    assert all(parameter.requires_grad for parameter in norm.parameters())
    for one, other in zip(plain.state_dict().values(), model.state_dict().values()):
        assert torch.equal(one, other)


def test_a_norm_without_memory_is_known_too():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(6, 6), OffsetNorm())
    iterand.prune_(model, 0.5, strict=True)
    assert not model[1].weight.requires_grad


@pytest.mark.parametrize("name", ["annotated", "images"])
def test_what_such_a_norm_adds_can_be_shifted(name):
    build, inputs, expected = NORMS[name]
    factor, shift = expected
    model = iterand.prune_(nn.ModuleDict({"norm": build(), "head": nn.Linear(6, 6)}), 0.5, norms="shifted", strict=True)
    layers = iterand.masked_layers(model)
    assert sorted(layers) == ["head.weight", f"norm.{shift}"]
    assert layers[f"norm.{shift}"].parametrization.settings.fan_in == 8
    assert not model["norm"].get_parameter(factor).requires_grad
    model["norm"](inputs).square().sum().backward()
    assert layers[f"norm.{shift}"].score.grad.any()


class ResponseNorm(nn.Module):
    """As in ConvNeXt V2: it adds to its input, so no value of its parameters makes it a plain norm."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(6))
        self.bias = nn.Parameter(torch.zeros(6))
        self.eps = 1e-6

    def forward(self, rows: Tensor) -> Tensor:
        norm = rows.norm(dim=1, keepdim=True)
        return rows + self.bias + self.weight * rows * norm / (norm.mean(-1, keepdim=True) + self.eps)


class ConditionalNorm(RootMeanSquareNorm):
    def forward(self, rows: Tensor, condition: Tensor) -> Tensor:
        return super().forward(rows) * condition


class NormalNoise(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.deviation = nn.Parameter(torch.ones(6))

    def forward(self, rows: Tensor) -> Tensor:
        return rows + self.deviation * torch.randn_like(rows)


class Multiplied(nn.Module):
    """It has an epsilon, and does not normalize."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(6))
        self.eps = 1e-6

    def forward(self, rows: Tensor) -> Tensor:
        return rows * (self.weight + self.eps * self.weight)


class ThreeVectors(RootMeanSquareNorm):
    def __init__(self) -> None:
        super().__init__()
        self.rate, self.bias = nn.Parameter(torch.ones(6)), nn.Parameter(torch.ones(6))


@pytest.mark.parametrize("kind", [ResponseNorm, ConditionalNorm, NormalNoise, Multiplied, ThreeVectors])
def test_what_is_no_plain_norm_is_left_alone_and_named(kind):
    model, plain = nn.Sequential(nn.Linear(6, 6), kind()), kind()
    generator = torch.get_rng_state()
    with pytest.warns(iterand.UnmaskedWarning, match=r"parameters in 1\.(weight|deviation) \(6\)"):
        iterand.prune_(model, 0.5)
    assert torch.equal(torch.get_rng_state(), generator)
    for name, parameter in plain.named_parameters():
        assert torch.equal(model[1].get_parameter(name), parameter)
        assert model[1].get_parameter(name).requires_grad


# --- Layer scales ---------------------------------------------------------------------------------------------------


class LayerScale(nn.Module):
    def __init__(self, size: int = 6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((size,), 1e-5))

    def forward(self, rows: Tensor) -> Tensor:
        return rows * self.scale


class Block(nn.Module):
    """A residual branch that a layer scale switches off."""

    def __init__(self, name: str = "gamma", *, scale: Tensor | None = None) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.name = name
        self.register_parameter(name, nn.Parameter(torch.full((6,), 1e-6) if scale is None else scale))

    def forward(self, rows: Tensor) -> Tensor:
        return rows + getattr(self, self.name) * self.linear(rows)


NAMES = [
    "gamma",
    "gamma_1",
    "gamma2",
    "gamma_xca",
    "ffn_gamma",
    "lambda1",
    "lambda_2",
    "layer_scale_parameter",
    "layerscale",
    "ls1",
]


@pytest.mark.parametrize("name", NAMES)
def test_layer_scales_are_set_to_one(name, caplog):
    model = Block(name)
    with caplog.at_level(logging.INFO, "iterand"):
        iterand.prune_(model, 0.5, strict=True)
    assert caplog.messages == [f"layer scales are set to one and frozen: 6 parameters in {name} (6)"]
    scale = getattr(model, name)
    assert scale.tolist() == [1.0] * 6
    assert not scale.requires_grad
    assert not torch.allclose(model(ROWS), ROWS, atol=0.01)
    assert iterand.summary(model).left_alone == 0
    outputs = model(ROWS)
    iterand.fold_(model)
    assert getattr(model, name).requires_grad
    assert torch.equal(model(ROWS), outputs)


def test_layer_scales_are_known_by_their_module_or_its_class():
    model = nn.ModuleDict({"linear": nn.Linear(6, 6), "by_class": LayerScale()})
    model["layer_scale1"] = nn.ParameterDict({"scale": nn.Parameter(torch.full((6, 1, 1), 0.1))})
    iterand.prune_(model, 0.5, strict=True)
    assert model["by_class"].scale.tolist() == [1.0] * 6
    assert model["layer_scale1"]["scale"].flatten().tolist() == [1.0] * 6


@pytest.mark.parametrize(
    "model",
    [
        Block(scale=torch.arange(6.0)),  # trained, or no scale at all
        Block(scale=torch.ones(6, 6)),
        Block(scale=torch.tensor(0.5)),
        Block("token", scale=torch.ones(6)),
        Block("lambdas", scale=torch.ones(6)),
    ],
    ids=["trained", "matrix", "single number", "another name", "a longer name"],
)
def test_other_parameters_are_no_layer_scales(model):
    before = copy.deepcopy(model)
    with pytest.warns(iterand.UnmaskedWarning, match=f"parameters? in {model.name} "):
        iterand.prune_(model, 0.5)
    assert torch.equal(getattr(model, model.name), getattr(before, model.name))


def test_layer_scales_stay_with_norms_and_by_name():
    for options in ({"norms": "keep"}, {"exclude": "gamma"}):
        model = iterand.prune_(Block(), 0.5, strict=True, **options)
        assert torch.equal(model.gamma, torch.full((6,), 1e-6))
        assert model.gamma.requires_grad
    with pytest.raises(ValueError, match="include pattern 'gamma' matches nothing that can be masked"):
        iterand.prune_(Block(), 0.5, include="gamma")


# --- Linear layers with weights of shape (in, out) ------------------------------------------------------------------


class Conv1D(nn.Module):
    """As in GPT-2 of Hugging Face."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.bias = nn.Parameter(torch.randn(nf))

    def forward(self, rows: Tensor) -> Tensor:
        return rows @ self.weight + self.bias


class OwnConv1D(Conv1D):
    pass


@pytest.mark.parametrize("kind", [Conv1D, OwnConv1D])
@pytest.mark.parametrize("options", [{}, {"include": "1.weight"}], ids=["by default", "named"])
def test_weights_of_shape_in_out_have_their_fan_in_first(kind, options, tmp_path):
    model = iterand.prune_(nn.Sequential(nn.Linear(6, 8), kind(2, 8)), 0.5, weights="signed_constant", **options)
    assert ("0.weight" in iterand.masked_layers(model)) == (not options)
    layer = iterand.masked_layers(model)["1.weight"]
    assert layer.parametrization.settings.fan_in == 8
    torch.testing.assert_close(layer.weight.abs(), torch.full((8, 2), math.sqrt(2 / 8)))
    assert not model[1].bias.any()
    iterand.save_ticket(model, tmp_path / "a.ticket")
    loaded = iterand.load_ticket(tmp_path / "a.ticket", nn.Sequential(nn.Linear(6, 8), kind(2, 8)))
    assert torch.equal(loaded(ROWS), model(ROWS))


def test_a_convolution_of_that_name_is_another():
    class Conv1D(nn.Conv1d):
        nf = 4

    layer = Conv1D(3, 4, 5)
    assert distributions.fan_in(layer, layer.weight) == 15
    matrix = nn.Module()
    matrix.weight = nn.Parameter(torch.ones(8, 2))
    assert distributions.fan_in(matrix, matrix.weight) == 2


@pytest.mark.parametrize(("transposed", "fan_in"), [(False, 6), (True, 10)])
def test_experts_are_stacks_of_matrices(transposed, fan_in):
    experts = nn.Module()
    experts.is_transposed = transposed
    experts.gate_up_proj = nn.Parameter(torch.ones(4, 10, 6))
    model = iterand.prune_(nn.ModuleDict({"experts": experts}), 0.5, include="*")
    assert iterand.masked_layers(model)["experts.gate_up_proj"].parametrization.settings.fan_in == fan_in


def test_a_refused_model_is_as_it_was():
    model = nn.Sequential(OffsetNorm(), Block(), Conv1D(2, 6), nn.Embedding(5, 2, padding_idx=1))
    model.register_parameter("token", nn.Parameter(torch.ones(6)))
    before = snapshot(model)
    with pytest.raises(ValueError, match="strict is True"):
        iterand.prune_(model, 0.5, strict=True)
    assert snapshot(model) == before
