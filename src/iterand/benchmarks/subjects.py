"""What is measured: the networks of recipes, and random data of the shape that they take."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iterand.data import Batch
from iterand.experiments.library import find_recipe
from iterand.networks import build_network
from iterand.training import recipe_file
from iterand.training.recipe import Recipe

_SHORT = {"resnet50": "imagenet-resnet50"}
_SHAPES = {"digits": (1, 8, 10), "cifar10": (3, 32, 10), "imagenet": (3, 224, 1000)}  # channels, side, classes


@dataclass(frozen=True)
class Subject:
    """A recipe whose data are images, and what these look like."""

    name: str
    recipe: Recipe
    channels: int
    side: int
    classes: int

    def network(self) -> nn.Module:
        """Its network, on the CPU."""
        chosen = self.recipe.network
        return build_network(chosen.name, width_factor=chosen.width_factor, classes=chosen.classes or self.classes)

    def images(self, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random pixels (uint8) and labels, on the generator's device."""
        shape, device = (count, self.channels, self.side, self.side), generator.device
        pixels = torch.randint(256, shape, dtype=torch.uint8, device=device, generator=generator)
        return pixels, torch.randint(self.classes, (count,), device=device, generator=generator)

    def batches(self, count: int, size: int, device: torch.device) -> list[Batch]:
        """Random batches, on the device."""
        generator = torch.Generator(device).manual_seed(0)
        drawn = [self.images(size, generator) for _ in range(count)]
        return [Batch(((pixels.float() - 127.5) / 73.9,), labels) for pixels, labels in drawn]


def subject(name: str, settings: tuple[str, ...] = ()) -> Subject:
    """The subject of a recipe's name, with some settings changed; ``resnet50`` is ImageNet's."""
    recipe = recipe_file.override(find_recipe(_SHORT.get(name, name)), settings)
    if recipe.data.name not in _SHAPES:
        known = ", ".join(_SHAPES)
        raise ValueError(f"{name} is trained on {recipe.data.name}; benchmarks know the shapes of {known}")
    return Subject(name, recipe, *_SHAPES[recipe.data.name])
