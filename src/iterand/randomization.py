"""Randomize (Section 3): redraw pruned weights, Eq. (2) and Eq. (3); and when to do it, Algorithm 3."""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import nn

from iterand import philox
from iterand.checks import share, whole
from iterand.distributions import normal_levels
from iterand.masking import MaskedLayer, require_masked_layers
from iterand.parametrization import Ranking, calculate_masks, selection_on_device
from iterand.selection import on_device


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
    layers = list(require_masked_layers(model).values())
    for group in _ranked_alike(layers):
        if _on_device(group):
            _randomize_on_device_(group, threshold)
        else:
            masks = calculate_masks([layer.parametrization for layer in group])
            for layer, mask in zip(group, masks):
                _randomize_layer_(layer, mask, threshold)
    for layer in layers:
        layer.parametrization.add_round(threshold)


def _ranked_alike(layers: Sequence[MaskedLayer]) -> list[list[MaskedLayer]]:
    groups: dict[Ranking, list[MaskedLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.parametrization.ranking, []).append(layer)
    return list(groups.values())


@torch.no_grad()
def _randomize_layer_(layer: MaskedLayer, mask: torch.Tensor, threshold: int) -> None:
    state = layer.parametrization
    number = state.rounds + 1
    key, distribution, fan_in = state.key, state.distribution, state.settings.fan_in
    # In the order of the indices; the tensors may lie in another.
    kept, draw, weight = mask.reshape(-1), layer.draw.reshape(-1).clone(), layer.weight.reshape(-1).clone()
    for part in philox.chunks(draw.numel(), draw.device):
        words = philox.philox(philox.indices(part, draw.device), number, key)
        redraw = philox.coins(words[1], threshold) & ~kept[part]
        draw[part] = torch.where(redraw, number, draw[part])
        weight[part] = torch.where(redraw, distribution.values(words, fan_in).to(weight.dtype), weight[part])
    layer.draw.copy_(draw.view(layer.draw.shape))
    layer.weight.copy_(weight.view(layer.weight.shape))


def _on_device(layers: Sequence[MaskedLayer]) -> bool:
    """Whether ``iterand.kernels`` can do it: everything float32 and in one order on a GPU, known distributions."""
    if not on_device([layer.score.detach() for layer in layers]):
        return False
    from iterand.kernels.layers import is_dense, same_order

    return all(
        layer.parametrization.distribution.kind is not None
        and layer.weight.dtype == torch.float32
        and is_dense(layer.weight)
        and same_order(layer.score, layer.draw)
        for layer in layers
    )


@torch.no_grad()
def _randomize_on_device_(layers: Sequence[MaskedLayer], threshold: int) -> None:
    """All layers in one launch; the host does not wait, so scores that are NaN do not raise here."""
    from iterand.kernels import cuts
    from iterand.kernels.layers import sent

    masks = [layer.parametrization for layer in layers]
    found = selection_on_device(masks)
    found.find()
    origins = [
        (*mask.key, cast(int, mask.distribution.kind), mask.distribution.unit32(mask.settings.fan_in)) for mask in masks
    ]
    device = layers[0].weight.device
    numbers = sent(torch.tensor([mask.rounds + 1 for mask in masks]), device)
    redraw = cuts.redraw(
        found, [layer.weight for layer in layers], [layer.draw for layer in layers], origins, normal_levels(device)
    )
    redraw.run(numbers, threshold)


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
