"""A small network of the Conv6 kind for scikit-learn's 8×8 digits; not in the paper."""

from collections import OrderedDict

from torch import nn

from .layers import convolution_stage, scaled


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
