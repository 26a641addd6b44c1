"""The Kaiming uniform start of ordinary training (KU, Section 5)."""

import torch
from torch import nn


@torch.no_grad()
def kaiming_uniform_(network: nn.Module, *, seed: int) -> None:
    """Draw all weights uniformly from ±sqrt(6 / fan_in) and set all biases to zero; normalization layers stay.

    Drawn on the CPU in the order of the parameters, so a seed gives the same weights whatever the device.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in network.named_parameters():
        if parameter.ndim > 1:
            drawn = torch.empty(parameter.shape, dtype=parameter.dtype, device="cpu")
            parameter.copy_(nn.init.kaiming_uniform_(drawn, nonlinearity="relu", generator=generator))
        elif name.rpartition(".")[2].startswith("bias"):  # an LSTM's are called bias_ih_l0, ...
            parameter.zero_()
