"""Pieces that several networks are made of."""

import math
from collections import OrderedDict

from torch import nn


def scaled(width: int, width_factor: float) -> int:
    """`width` times ρ, rounded, at least 1."""
    if not (math.isfinite(width_factor) and width_factor > 0):
        raise ValueError(f"width_factor is {width_factor}, but it must be a positive number")
    return max(1, round(width * width_factor))


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
    """How a network with batch normalization ends: the average over all positions, and a linear layer."""
    return OrderedDict(
        pooling=nn.AdaptiveAvgPool2d(1),
        flatten=nn.Flatten(),
        classifier=nn.Linear(inputs, classes),
    )
