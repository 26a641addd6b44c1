"""Randomize (Section 3): redraw pruned weights, Eq. (2) and Eq. (3); and when to do it, Algorithm 3."""

from typing import Any

import torch
from torch import nn

from iterand import philox
from iterand.checks import share, whole
from iterand.masking import MaskedLayer, require_masked_layers
from iterand.parametrization import calculate_masks


def check_rate(rate: float) -> float:
    """The rate itself, if it is one."""
    return share("rate", rate, "the share of pruned weights redrawn")


def randomize_(model: nn.Module, rate: float = 1.0) -> None:
    """Redraw pruned weights of all masked layers, each with probability ``rate``, in place.

    Partial randomization, Eq. (3), with r = ``rate``; at r = 1 every pruned weight is redrawn: naive randomization,
    Eq. (2). Kept weights never change. The k-th call gives draw k of the weights whose coin b_r falls in round k, so
    what changes is a function of seed, round and mask alone.
    """
    threshold = philox.coin_threshold(check_rate(rate))
    layers = require_masked_layers(model)
    masks = calculate_masks([layer.parametrization for layer in layers.values()])
    for layer, mask in zip(layers.values(), masks):
        _randomize_layer_(layer, mask, threshold)


@torch.no_grad()
def _randomize_layer_(layer: MaskedLayer, mask: torch.Tensor, threshold: int) -> None:
    state = layer.parametrization
    number = state.rounds + 1
    key, distribution, fan_in = state.key, state.distribution, state.settings.fan_in
    kept, draw = mask.view(-1), layer.draw.view(-1)
    weight = layer.weight.reshape(-1).clone()  # in the order of the indices; the weights may lie in another
    for part in philox.chunks(draw.numel(), draw.device):
        words = philox.philox(philox.indices(part, draw.device), number, key)
        redraw = philox.coins(words[1], threshold) & ~kept[part]
        draw[part] = torch.where(redraw, number, draw[part])
        weight[part] = torch.where(redraw, distribution.values(words, fan_in).to(weight.dtype), weight[part])
    layer.weight.copy_(weight.view(layer.weight.shape))
    state.add_round(threshold)


class IterativeRandomization:
    """Lines 5-7 of Algorithm 3 as a stepper: call ``step()`` after the optimizer's, once an iteration.

    Every K_per-th step (``period``) the weights that the updated scores prune are randomized at rate r (``rate``).
    """

    def __init__(self, model: nn.Module, period: int = 300, rate: float = 0.1) -> None:
        require_masked_layers(model)
        self.model = model
        self.period = whole("period", period, "a number of iterations, at least 1", low=1)
        self.rate = check_rate(rate)
        self.iteration = 0

    def step(self) -> None:
        """Count one iteration; randomize if k + 1 can be divided by K_per."""
        self.iteration += 1
        if self.iteration % self.period == 0:
            randomize_(self.model, self.rate)

    def state_dict(self) -> dict[str, Any]:
        """The count of iterations; the rounds themselves are the model's state."""
        return {"iteration": self.iteration}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.iteration = int(state["iteration"])
