"""Gradients of scores, of one size for all layers (docs/beyond.md)."""

import math

import torch
from torch import nn

from iterand.checks import positive
from iterand.masking import require_masked_layers
from iterand.parametrization import Mask


@torch.no_grad()
def normalize_gradients_(model: nn.Module, size: float = 0.01) -> None:
    """Scale the gradient of each masked layer's scores, as if that of its weights were ``size``; before the optimizer.

    The gradient of a score is its weight times the gradient of the masked weight. Of the latter the root mean square
    becomes ``size`` in every layer, so that scores ranked over the whole network compete by what their weights can do,
    and not by how large gradients happen to be where a layer sits. A gradient that is zero stays zero.
    """
    positive("size", size, "the root mean square of a layer's gradient")
    for layer in require_masked_layers(model).values():
        gradient = layer.score.grad
        if gradient is not None:
            # Squares are added up in float64, so that their order does not matter to what is rounded in the end.
            mean = gradient.double().square().sum() / gradient.numel()
            factor = torch.where(mean > 0, score_gradient_size(layer.parametrization, size) / mean.sqrt(), 1.0)
            gradient.mul_(factor.to(gradient.dtype))


def score_gradient_size(mask: Mask, size: float) -> float:
    """The root mean square of the gradient of a layer's scores: ``size`` times that of weights of its fan-in."""
    return size * math.sqrt(2 / mask.settings.fan_in)
