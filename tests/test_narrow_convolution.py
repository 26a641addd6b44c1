"""Convolutions with few channels are those of torch, on a GPU or through Triton's interpreter."""

import pytest
import torch
from torch import nn
from torch.nn import functional

import kernel_cases  # noqa: F401 - makes the interpreter quicker

pytest.importorskip("triton", reason="the kernels are written in Triton")
from iterand.engine import convolution
from iterand.engine import pooling as kernel_images
from iterand.engine.convolution import NarrowConvolution, convolve, narrow_

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TYPES = [torch.float32, *([torch.bfloat16] if ON_GPU else [])]  # the interpreter multiplies no bfloat16


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    if not ON_GPU:
        monkeypatch.setattr(convolution, "_PARTS", 3)


def case(inputs, outputs, kernel, side, kind=torch.float32, batch=3):
    generator = torch.Generator().manual_seed(inputs + outputs)
    images = torch.randn(batch, inputs, side, side, generator=generator)
    weight = torch.randn(outputs, inputs, kernel, kernel, generator=generator) / (inputs * kernel * kernel) ** 0.5
    return [
        tensor.to(DEVICE, kind).to(memory_format=torch.channels_last).requires_grad_() for tensor in (images, weight)
    ]


@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize(
    ("inputs", "outputs", "kernel", "side"),
    [(16, 16, 3, 8), (3, 16, 3, 9), (16, 32, 1, 8), (5, 20, 3, 7), (20, 5, 3, 7)],
)
@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_convolution_and_its_gradients(inputs, outputs, kernel, side, stride, kind):
    images, weight = case(inputs, outputs, kernel, side, kind)
    result = convolve(images, weight, stride)
    wanted = functional.conv2d(images.double(), weight.double(), stride=stride, padding=kernel // 2)
    # float32 may be computed by tensor cores with ten bits
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if kind == torch.bfloat16 or ON_GPU else {"rtol": 1e-5, "atol": 1e-5}
    torch.testing.assert_close(result.double(), wanted, **tolerance)
    given = torch.randn_like(result)
    found = torch.autograd.grad(result, [images, weight], given)
    right = torch.autograd.grad(wanted, [images, weight], given.double())
    for gradient, other in zip(found, right):
        assert gradient.is_contiguous(memory_format=torch.channels_last)
        scale = other.abs().max().item()
        torch.testing.assert_close(gradient.double() / scale, other.double() / scale, **tolerance)


def test_images_without_gradient(monkeypatch):
    monkeypatch.setattr(convolution, "_input_gradient", None)  # which would compute it
    images, weight = case(3, 4, 3, 6)
    convolve(images.detach(), weight, 1).sum().backward()
    other = weight.detach().double().requires_grad_()
    functional.conv2d(images.detach().double(), other, padding=1).sum().backward()
    torch.testing.assert_close(weight.grad.double(), other.grad, rtol=1e-2, atol=1e-2)


def test_only_what_it_knows_becomes_narrow():
    wide = convolution.WIDEST // 8 + 1
    kinds = {
        nn.Conv2d(3, 8, 3, padding=1, bias=False): True,
        nn.Conv2d(8, 8, 1, 2, bias=False): True,
        nn.Conv2d(8, 8, 3, padding=1): True,
        nn.Conv2d(8, 8, 3, bias=False): False,
        nn.Conv2d(8, wide, 3, padding=1, bias=False): False,
        nn.Conv2d(8, 8, 3, padding=1, groups=2, bias=False): False,
        nn.Conv2d(8, 8, (3, 1), padding=(1, 0), bias=False): False,
        nn.Conv2d(3, 8, 7, padding=3, bias=False): False,
        nn.Conv2d(1, 129, 1, bias=False): False,
        nn.Conv2d(8, 8, 3, padding=2, dilation=2, bias=False): False,
        nn.Conv2d(8, 8, 3, padding=1, bias=False, padding_mode="reflect"): False,
    }
    narrow_(nn.Sequential(*kinds))
    assert [isinstance(layer, NarrowConvolution) for layer in kinds] == list(kinds.values())


@pytest.mark.parametrize("biased", [True, False])
def test_as_a_layer(biased):
    layer = nn.Conv2d(3, 8, 3, padding=1, bias=biased, device=DEVICE, dtype=torch.bfloat16)
    layer.to(memory_format=torch.channels_last)
    images = torch.randn(2, 3, 6, 6, device=DEVICE).to(memory_format=torch.channels_last)
    wanted = layer.float()(images)
    narrow_(nn.Sequential(layer))
    if not ON_GPU:
        pytest.skip("the interpreter multiplies no bfloat16")
    torch.testing.assert_close(layer(images).float(), wanted, rtol=2e-2, atol=2e-2)


def test_memory_in_another_order_is_refused():
    images, weight = case(4, 4, 3, 5)
    with pytest.raises(ValueError, match="does not lie channels last"):
        convolve(images.contiguous(), weight, 1)


def test_images_that_are_too_many_are_left_to_torch(monkeypatch):
    layer = nn.Conv2d(3, 8, 3, padding=1, device=DEVICE)
    images = torch.randn(2, 3, 6, 6, device=DEVICE)
    wanted = layer(images)
    narrow_(nn.Sequential(layer))
    assert isinstance(layer, NarrowConvolution)
    monkeypatch.setattr(kernel_images, "_MAX_ELEMENTS", 8 * 2 * 6 * 6)
    assert torch.equal(layer(images), wanted)


def test_no_images():
    images, weight = case(4, 4, 3, 5, batch=0)
    convolve(images, weight, 1).sum().backward()
    assert weight.grad.abs().sum() == 0
    assert images.grad.shape == images.shape


def test_as_torch_registers_it():
    images, weight = case(4, 4, 3, 5)
    torch.library.opcheck(convolve, (images, weight, 1))
