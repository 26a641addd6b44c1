"""What a network says of a batch, and how wrong that is."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from iterand.training.recipe import Recipe, TrainingRecipe


def laid_out(inputs: tuple[Tensor, ...], recipe: Recipe) -> tuple[Tensor, ...]:
    """Images in the layout of the recipe, since sums depend on it; they come in whatever layout their source has."""
    layout = torch.channels_last if recipe.training.channels_last else torch.contiguous_format
    return tuple(one.contiguous(memory_format=layout) if one.dim() == 4 else one for one in inputs)


def outputs_of(model: Callable[..., Tensor], inputs: tuple[Tensor, ...], recipe: Recipe) -> Tensor:
    """The network's outputs in float32, computed in the precision of the recipe."""
    with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=recipe.training.precision == "bfloat16"):
        outputs = model(*laid_out(inputs, recipe))
    return outputs.float()


def loss_of(outputs: Tensor, labels: Tensor, smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
    """Cross entropy, of which a share may be with all classes alike; one output stands for two classes."""
    if outputs.shape[1] == 1:
        wanted = labels.float() * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(outputs.squeeze(1), wanted, reduction=reduction)
    return F.cross_entropy(outputs, labels, reduction=reduction, label_smoothing=smoothing)


def training_loss_of(outputs: Tensor, labels: Tensor, training: TrainingRecipe) -> Tensor:
    """The loss that is searched or trained with: outputs as hot, labels as smooth as the recipe says."""
    tempered = outputs if training.temperature == 1 else outputs / training.temperature
    return loss_of(tempered, labels, training.label_smoothing)


def correct_of(outputs: Tensor, labels: Tensor) -> Tensor:
    """How many labels the outputs say right."""
    said = outputs.squeeze(1) > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
    return (said == labels).sum()
