"""Gradients of scores, layer by layer of one size (docs/beyond.md)."""

import torch
from torch import nn

from iterand.checks import positive
from iterand.masking import scores


@torch.no_grad()
def normalize_gradients_(model: nn.Module, size: float = 1e-3) -> None:
    """Scale the gradient of each masked layer's scores to ``size``, its root mean square; call it before the optimizer.

    Scores that are ranked over the whole network then compete by how their gradients point, and not by how large
    gradients happen to be where a layer sits. A gradient that is zero stays zero.
    """
    positive("size", size, "the root mean square of a layer's gradient")
    for score in scores(model):
        if score.grad is not None:
            score.grad.mul_(factor(score.grad, size))


def factor(gradient: torch.Tensor, size: float) -> torch.Tensor:
    """What a gradient must be multiplied by. Squares are added up in float64, so that their order does not matter."""
    mean = gradient.double().square().sum() / gradient.numel()
    return torch.where(mean > 0, size / mean.sqrt(), 1.0).to(gradient.dtype)
