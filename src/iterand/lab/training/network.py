"""Build the network of a recipe for its data; a network that does not fit the data or the memory is refused."""

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from iterand import memory
from iterand.errors import NotEnoughMemoryError
from iterand.lab.data import Dataset, Split
from iterand.lab.data.text import TextSplit
from iterand.lab.networks import build_network, network_names, network_outline, takes_texts
from iterand.lab.networks.lstm import LSTMClassifier
from iterand.lab.training.recipe import Recipe

_CPU = torch.device("cpu")
_NUMBER = 4  # bytes of a weight, a score, a draw, a gradient or a momentum


def build_for_data(recipe: Recipe, data: Dataset[Split], device: torch.device = _CPU, ranks: int = 1) -> nn.Module:
    """The network with random weights, in main memory; one that is too large to be trained on the device is refused."""
    options = network_options(recipe, data)
    more = _check_network_size(options, recipe, device)
    network = build_network(**options, seed=recipe.seed)
    batch = min(recipe.training.batch_size, len(data.train)) // ranks
    memory.require(
        more + batch * _example_bytes(network, recipe, data),
        f"training.batch_size is {recipe.training.batch_size}; a step of {recipe.network.name} with it",
        "lower training.batch_size or network.width_factor",
        device,
    )
    return network


def network_options(recipe: Recipe, data: Dataset[Split]) -> dict[str, Any]:
    """Name and options of the network; the data decide what the recipe leaves out."""
    options = asdict(recipe.network)
    name, words = recipe.network.name, len(data.train.vocabulary) if isinstance(data.train, TextSplit) else 0
    if name in network_names() and takes_texts(name) != bool(words):
        kind = "texts" if words else "images"
        raise ValueError(f"network.name is {name!r}, but data.name is {recipe.data.name!r}, which has {kind}")
    for key, least in (("classes", data.classes), ("vocabulary_size", words)):
        if 0 < options[key] < least:
            raise ValueError(f"network.{key} is {options[key]}, but {recipe.data.name} has {least}; leave it out")
        options[key] = options[key] or least
    optional = {"vocabulary_size": 0, "forget_bias": 0.0, "word_scale": 1.0}  # not every network has them
    return {name: value for name, value in options.items() if name not in optional or value != optional[name]}


def _check_network_size(options: dict[str, Any], recipe: Recipe, device: torch.device) -> int:
    """Refuse a network that does not fit; returns how many bytes training takes on the device, once it is built."""
    chosen = recipe.network
    sizes = ("width_factor", "classes", "vocabulary_size")
    settings = [f"network.{key} is {value:g}" for key in sizes if (value := getattr(chosen, key))]
    what, hint = f"{' and '.join(settings)}; training such a {chosen.name}", "make the network smaller"
    try:
        outline = network_outline(**options)
    except RuntimeError:  # more numbers than torch can count
        raise NotEnoughMemoryError(f"{what} takes more memory than any machine has; {hint}") from None
    whole: int = sum(tensor.numel() for tensor in outline.state_dict().values())
    parameters = sum(parameter.numel() for parameter in outline.parameters())
    weights = sum(parameter.numel() for parameter in outline.parameters() if parameter.ndim > 1)
    momentum = int(recipe.optimizer.momentum > 0)
    if recipe.method.trains_weights:
        rewound = int(recipe.method.name == "imp")  # keeps the initial weights
        held, saved = whole + (rewound + 1 + momentum) * parameters, whole + momentum * parameters
    else:  # of each weight its score, draw, gradient and momentum; a checkpoint leaves out gradient and weight
        held, saved = whole + (3 + momentum) * weights, (2 + momentum) * weights
    # The network is built, and checkpoints are copied and then written, in main memory.
    on_host = held if device.type == "cpu" else 0
    memory.require(_NUMBER * max(whole, on_host + 2 * saved), what, hint)
    if device.type != "cpu":
        memory.require(_NUMBER * held, what, hint, device)
    return _NUMBER * (on_host - whole if on_host else held)


def _example_bytes(network: nn.Module, recipe: Recipe, data: Dataset[Split]) -> int:
    """A lower bound of the bytes that a step keeps for the backward pass, per example."""
    if isinstance(network, LSTMClassifier) and isinstance(data.train, TextSplit):
        # A batch with the longest text is padded to its length.
        return data.train.longest * network.embedding.embedding_dim * _NUMBER
    inputs: dict[int, Tensor] = {}  # of layers, for the gradients of their weights; layers may share one

    def remember(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        inputs[id(arguments[0])] = arguments[0]

    layers = [module for module in network.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    hooks = [layer.register_forward_pre_hook(remember) for layer in layers]
    try:
        _try_image(network, recipe, data)
    finally:
        for hook in hooks:
            hook.remove()
    number = 2 if recipe.training.precision == "bfloat16" else _NUMBER
    return number * sum(tensor.numel() for tensor in inputs.values())


def _try_image(network: nn.Module, recipe: Recipe, data: Dataset[Split]) -> None:
    """Refuse a network that is made for images of another size, with a clearer message than torch's."""
    shape: tuple[int, ...] | None = getattr(data.train, "image_shape", None)
    if shape is None:
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
