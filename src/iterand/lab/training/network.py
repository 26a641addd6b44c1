"""Build the network of a recipe for its data; a network that does not fit the data or the memory is refused."""

import contextlib
import functools
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from iterand import memory
from iterand.errors import IterandError, NotEnoughMemoryError
from iterand.lab.data import IMAGE_FOLDER, Dataset, Split
from iterand.lab.data.catalog import find
from iterand.lab.data.text import TextSplit
from iterand.lab.networks import build_network, network_names, network_outline, require_known, takes_texts
from iterand.lab.networks.external import UserCode, build_timm, is_external, names_code
from iterand.lab.networks.lstm import LSTMClassifier
from iterand.lab.training.recipe import Recipe

_CPU = torch.device("cpu")
_SMALLER = "make the network smaller"
_NUMBER = 4  # bytes of a weight, a score, a draw, a gradient or a momentum


def build_for_data(
    recipe: Recipe, data: Dataset[Split], device: torch.device = _CPU, ranks: int = 1, code: UserCode | None = None
) -> nn.Module:
    """The network with random weights, in main memory; one that is too large to be trained on the device is refused.

    ``code`` is the user's code, where ``network.name`` names some; without it, such a network is refused.
    """
    options, own = network_options(recipe, data), is_external(recipe.network.name)
    if own:
        network, more = _build_external(recipe, data, options["classes"], code, device)
    else:
        more = _check_package_network(options, recipe, device)
        network = build_network(**options, seed=recipe.seed)
    batch = min(recipe.training.batch_size, len(data.train)) // ranks
    memory.require(
        more + batch * _example_bytes(network, recipe, data),
        f"training.batch_size is {recipe.training.batch_size}; a step of {recipe.network.name} with it",
        f"lower training.batch_size or {'data.image_size' if own else 'network.width_factor'}",
        device,
    )
    return network


def check_names(recipe: Recipe) -> bool:
    """Refuse a network and data that do not exist; returns whether one of them is the user's own."""
    find(recipe.data.name)
    if is_external(recipe.network.name):
        return True
    require_known(recipe.network.name)
    return recipe.data.name == IMAGE_FOLDER


def _build_external(
    recipe: Recipe, data: Dataset[Split], classes: int, code: UserCode | None, device: torch.device
) -> tuple[nn.Module, int]:
    """The network of timm or of the user's code, tried with an image of zeros; and the bytes that training takes."""
    name, arguments = recipe.network.name, recipe.network.arguments
    what = f"training {name}"
    shape: tuple[int, ...] | None = getattr(data.train, "image_shape", None)
    if shape is None:
        raise ValueError(f"network.name is {name!r}, but data.name is {recipe.data.name!r}, which has texts")
    if not names_code(name):
        build = functools.partial(build_timm, name, classes, shape[0], arguments, recipe.seed)
        with contextlib.suppress(ValueError), torch.device("meta"):  # not every model can be built there
            _check_network_size(build(), recipe, device, what)
        network = build()
    elif code is None or code.name != name:
        raise IterandError(
            f"network.name is {name!r}: code, which runs only where you name the recipe's file, as in "
            "'iterand train my.toml'; in Python, iterand.load_ticket(path, model) fills a model of yours"
        )
    else:
        network = code.build(classes, arguments, recipe.seed)
    _check_outputs(network, name, shape, classes, code)
    return network, _check_network_size(network, recipe, device, what)


def _check_outputs(
    network: nn.Module, name: str, shape: tuple[int, ...], classes: int, code: UserCode | None
) -> None:  # fmt: skip
    """Refuse a network that does not take the images, or that has other outputs than one per class."""
    images = "×".join(map(str, shape))
    try:
        with torch.no_grad():
            outputs = network.eval()(torch.zeros(1, *shape))
    except Exception as error:  # whatever a network may raise
        reason, where = " ".join(str(error).split()) or type(error).__name__, code.where(error) if code else ""
        raise ValueError(
            f"network.name is {name!r}, which does not take images of {images}: {reason}{where}; change the network, "
            "network.arguments or data.image_size"
        ) from error
    found = f"shape {list(outputs.shape)}" if isinstance(outputs, Tensor) else f"type {type(outputs).__name__}"
    if not isinstance(outputs, Tensor) or outputs.shape not in ((1, classes), (1, 1 if classes == 2 else classes)):
        raise ValueError(
            f"network.name is {name!r}, whose output for one image of {images} has {found}; it must be a tensor of "
            f"shape [1, {classes}], a number for each class"
        )
    network.train()


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
    optional: dict[str, Any] = {"vocabulary_size": 0, "forget_bias": 0.0, "word_scale": 1.0}  # not all have them
    if is_external(name):
        for key, default in (optional | {"width_factor": 1.0}).items():
            if options[key] != default:
                raise ValueError(f"network.{key} is {options[key]:g}, which is not for {name!r}; set it to {default:g}")
        options.pop("width_factor")
    optional |= {"arguments": {}, "sha256": ""}
    return {name: value for name, value in options.items() if name not in optional or value != optional[name]}


def ticket_options(recipe: Recipe, data: Dataset[Split]) -> dict[str, Any]:
    """Name and options of the network as a ticket holds them, with the number of channels for timm."""
    options = network_options(recipe, data)
    if is_external(recipe.network.name) and not names_code(recipe.network.name):
        channels = {"in_chans": data.train.image_shape[0]}  # type: ignore[attr-defined]
        options["arguments"] = {**options.get("arguments", {}), **channels}
    return options


def _check_package_network(options: dict[str, Any], recipe: Recipe, device: torch.device) -> int:
    """Refuse a network of this package that does not fit, before it is built; see ``_check_network_size``."""
    chosen = recipe.network
    sizes = ("width_factor", "classes", "vocabulary_size")
    settings = [f"network.{key} is {value:g}" for key in sizes if (value := getattr(chosen, key))]
    what = f"{' and '.join(settings)}; training such a {chosen.name}"
    try:
        outline = network_outline(**options)
    except RuntimeError:  # more numbers than torch can count
        raise NotEnoughMemoryError(f"{what} takes more memory than any machine has; {_SMALLER}") from None
    return _check_network_size(outline, recipe, device, what)


def _check_network_size(outline: nn.Module, recipe: Recipe, device: torch.device, what: str) -> int:
    """Refuse a network that does not fit; returns how many bytes training takes on the device, once it is built."""
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
    memory.require(_NUMBER * max(whole, on_host + 2 * saved), what, _SMALLER)
    if device.type != "cpu":
        memory.require(_NUMBER * held, what, _SMALLER, device)
    return _NUMBER * (on_host - whole if on_host else held)


def _example_bytes(network: nn.Module, recipe: Recipe, data: Dataset[Split]) -> int:
    """A lower bound of the bytes that a step keeps for the backward pass, per example."""
    if isinstance(network, LSTMClassifier) and isinstance(data.train, TextSplit):
        # A batch with the longest text is padded to its length.
        return data.train.longest * network.embedding.embedding_dim * _NUMBER
    inputs: dict[int, Tensor] = {}  # of layers, for the gradients of their weights; layers may share one

    def remember(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
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
        way_out = "choose another" + (" or change data.image_size" if recipe.data.name == IMAGE_FOLDER else "")
        raise ValueError(
            f"network.name is {name!r}, which is not made for the images of {recipe.data.name}, {images}; {way_out}"
        ) from None
    network.train()
