"""The network of a recipe, made for the recipe's data; one that cannot learn from them is refused in words."""

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from iterand.data import Dataset, Split
from iterand.data.dataset import TensorSplit
from iterand.data.images import ImageSplit
from iterand.data.sequences import TextSplit
from iterand.networks import build_network, network_names, takes_texts
from iterand.training.recipe import Recipe


def fitting_network(recipe: Recipe, data: Dataset[Split]) -> nn.Module:
    """The network, with random weights."""
    try:
        network = build_network(**network_options(recipe, data), seed=recipe.seed)
    except RuntimeError as error:  # torch has no kind of its own for this one on a CPU
        if "allocate memory" not in str(error):
            raise
        width = recipe.network.width_factor
        raise ValueError(f"network.width_factor is {width:g}, which asks for more memory than there is") from None
    _check_images(network, recipe, data)
    return network


def network_options(recipe: Recipe, data: Dataset[Split]) -> dict[str, Any]:
    """Name and options of the network; what the recipe leaves open the data decide."""
    options = asdict(recipe.network)
    name, words = recipe.network.name, len(data.train.vocabulary) if isinstance(data.train, TextSplit) else 0
    if name in network_names() and takes_texts(name) != bool(words):
        kind = "texts" if words else "images"
        raise ValueError(f"network.name is {name!r}, but data.name is {recipe.data.name!r}, which has {kind}")
    for key, least in (("classes", data.classes), ("vocabulary_size", words)):
        if 0 < options[key] < least:
            raise ValueError(f"network.{key} is {options[key]}, but {recipe.data.name} has {least}; leave it out")
        options[key] = options[key] or least
    plain = {"vocabulary_size": 0, "forget_bias": 0.0, "word_scale": 1.0}  # not every network has them
    return {name: value for name, value in options.items() if name not in plain or value != plain[name]}


def _check_images(network: nn.Module, recipe: Recipe, data: Dataset[Split]) -> None:
    """Refuse a network that is made for images of another size, before torch does it in words of its own."""
    if isinstance(data.train, TensorSplit):
        shape = data.train.inputs.shape[1:]
    elif isinstance(data.train, ImageSplit):
        shape = data.train.images.shape[1:]
    else:  # images of any size, or texts
        return
    try:
        with torch.no_grad():
            network.eval()(torch.zeros(1, *shape))
    except RuntimeError:
        name, images = recipe.network.name, "×".join(map(str, shape))
        raise ValueError(
            f"network.name is {name!r}, which is not made for the images of {recipe.data.name}, {images}"
        ) from None
    network.train()
