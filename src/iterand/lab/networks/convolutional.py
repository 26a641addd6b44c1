"""Conv6, VGG11, a small network for the digits, and the layers and initialization that all networks share."""

import math
from collections import OrderedDict

import torch
from torch import nn

VGG11_WIDTHS = ((64,), (128,), (256, 256), (512, 512), (512, 512))
"""The widths of the convolutions of each stage at ρ = 1."""


def conv6(*, width_factor: float = 1.0, classes: int = 10) -> nn.Sequential:
    """Six convolutions 64ρ 64ρ M 128ρ 128ρ M 256ρ 256ρ M and three linear layers 256ρ, 256ρ, classes."""
    narrow, middle, wide = (scaled(width, width_factor) for width in (64, 128, 256))
    return nn.Sequential(
        OrderedDict(
            convolutions=nn.Sequential(
                convolution_stage(3, narrow), convolution_stage(narrow, middle), convolution_stage(middle, wide)
            ),
            flatten=nn.Flatten(),
            classifier=nn.Sequential(
                nn.Linear(4 * 4 * wide, wide), nn.ReLU(), nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, classes)
            ),
        )
    )


def vgg11(*, width_factor: float = 1.0, classes: int = 10) -> nn.Sequential:
    """Eight 3×3 convolutions, max pooling between the stages, average pooling after the last, a linear layer."""
    layers: list[nn.Module] = []
    inputs = 3
    for stage in VGG11_WIDTHS:
        if layers:
            layers.append(nn.MaxPool2d(2))
        for width in stage:
            outputs = scaled(width, width_factor)
            layers += [normalized_convolution(inputs, outputs, 3), nn.ReLU()]
            inputs = outputs
    return nn.Sequential(OrderedDict(convolutions=nn.Sequential(*layers)) | average_classifier(inputs, classes))


def digits_conv(*, width_factor: float = 1.0, classes: int = 10) -> nn.Sequential:
    """Four convolutions 16ρ 16ρ M 32ρ 32ρ M and a linear layer; input 1×8×8."""
    narrow, wide = scaled(16, width_factor), scaled(32, width_factor)
    return nn.Sequential(
        OrderedDict(
            convolutions=nn.Sequential(convolution_stage(1, narrow), convolution_stage(narrow, wide)),
            flatten=nn.Flatten(),
            classifier=nn.Linear(2 * 2 * wide, classes),
        )
    )


def convolution_stage(inputs: int, outputs: int) -> nn.Sequential:
    """Two 3×3 convolutions with biases, each followed by ReLU, then max pooling (Appendix B, Conv6)."""
    return nn.Sequential(
        nn.Conv2d(inputs, outputs, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(outputs, outputs, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
    )


def normalized_convolution(inputs: int, outputs: int, kernel: int, stride: int = 1) -> nn.Sequential:
    """A convolution with "a batch normalization layer right after" it (Appendix B), which makes a bias pointless."""
    return nn.Sequential(
        OrderedDict(
            convolution=nn.Conv2d(inputs, outputs, kernel, stride, padding=kernel // 2, bias=False),
            normalization=nn.BatchNorm2d(outputs),
        )
    )


def average_classifier(inputs: int, classes: int) -> OrderedDict[str, nn.Module]:
    """The last layers of a network with batch normalization: average pooling and a linear layer."""
    return OrderedDict(
        pooling=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        classifier=nn.Linear(inputs, classes),
    )


def scaled(width: int, width_factor: float) -> int:
    """`width` times ρ, rounded, at least 1."""
    if not (math.isfinite(width_factor) and width_factor > 0):
        raise ValueError(f"width_factor is {width_factor}, but it must be a positive number")
    return max(1, round(width * width_factor))


@torch.no_grad()
def kaiming_uniform_(network: nn.Module, *, seed: int) -> None:
    """Draw all weights uniformly from ±sqrt(6 / fan_in) and set all biases to zero, except in normalization layers.

    Weights are drawn on the CPU in the order of the parameters, so a seed gives the same weights on every device.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            parameter.copy_(nn.init.kaiming_uniform_(drawn, nonlinearity="relu", generator=generator))
        elif name.rpartition(".")[2].startswith("bias"):  # those of an LSTM are called bias_ih_l0, ...
            parameter.zero_()
