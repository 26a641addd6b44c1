"""The networks of the paper by name: plain modules without masks."""

import difflib
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from iterand.checks import shown
from iterand.lab.networks.convolutional import conv6, digits_conv, kaiming_uniform_, vgg11
from iterand.lab.networks.lstm import LSTMClassifier
from iterand.lab.networks.resnet import (
    RESNET18,
    RESNET34,
    RESNET50,
    RESNET101,
    WIDE_RESNET50_2,
    cifar_resnet,
    imagenet_resnet,
    resnet20,
)

__all__ = ["build_network", "kaiming_uniform_", "network_names", "network_outline", "require_known", "takes_texts"]

_BUILDERS: dict[str, Callable[..., nn.Module]] = {
    "conv6": conv6,
    "resnet18_cifar": partial(cifar_resnet, RESNET18),
    "resnet34_cifar": partial(cifar_resnet, RESNET34),
    "resnet18_imagenet": partial(imagenet_resnet, RESNET18),
    "resnet34_imagenet": partial(imagenet_resnet, RESNET34),
    "resnet50_imagenet": partial(imagenet_resnet, RESNET50),
    "resnet101_imagenet": partial(imagenet_resnet, RESNET101),
    "wide_resnet50_2": partial(imagenet_resnet, WIDE_RESNET50_2),
    "resnet20": resnet20,
    "vgg11": vgg11,
    "lstm": partial(LSTMClassifier, bidirectional=False),
    "bilstm": partial(LSTMClassifier, bidirectional=True),
    "digits_conv": digits_conv,
}


def network_names() -> tuple[str, ...]:
    """All names that `build_network` accepts."""
    return tuple(_BUILDERS)


def takes_texts(name: str) -> bool:
    """Whether the network of this name is called with tokens and lengths, not with images."""
    return "vocabulary_size" in _options(_BUILDERS[name])


def build_network(
    name: str, *, width_factor: float = 1.0, classes: int | None = None, seed: int = 0, **options: object
) -> nn.Module:
    """Build a network at width ρ, its weights drawn from KU under `seed`.

    `classes` defaults to the number of the network's data set. `options` go to the network: `vocabulary_size`,
    `forget_bias` and `word_scale` of an LSTM. torch's global generator is not changed.
    """
    require_known(name)
    if classes is not None and classes < 2:
        raise ValueError(f"classes is {classes}, but a classifier needs at least 2")
    builder = _BUILDERS[name]
    allowed = _options(builder)
    for option in options:
        if option not in allowed:
            raise ValueError(f"network {name!r} has no option {option!r}; it takes {', '.join(allowed) or 'none'}")
    if classes is not None:
        options["classes"] = classes
    with torch.random.fork_rng(devices=[]):  # torch's layers draw weights, which are overwritten below
        network = builder(width_factor=width_factor, **options)
    kaiming_uniform_(network, seed=seed)
    if isinstance(network, LSTMClassifier):
        network.set_gates_()
    return network


def require_known(name: str) -> None:
    """Refuse a name that is not of a network of the package."""
    if name not in _BUILDERS:
        longer = [known for known in _BUILDERS if name and known.startswith(name)]
        close = longer or difflib.get_close_matches(name, _BUILDERS, n=1)
        if name.endswith(".py"):
            close = [f"{name}:FUNCTION"]
        suggestion = f" did you mean {' or '.join(map(repr, close))}?" if close else ""
        raise ValueError(f"no network is called {shown(name)};{suggestion} the names are {', '.join(_BUILDERS)}")


def network_outline(name: str, **options: Any) -> nn.Module:
    """The network that `build_network` would build, on the meta device: shapes and types without memory."""
    with torch.device("meta"), _OnMetaDevice():
        return build_network(name, **options)


class _OnMetaDevice(TorchFunctionMode):
    """Creates every tensor on the meta device, even if another device is given."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the function with its device replaced."""
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        return function(*args, **kwargs)


def _options(builder: Callable[..., nn.Module]) -> list[str]:
    """The options of a network: its keywords except those that its name fixes or that all networks have."""
    fixed = {"width_factor", "classes", *(builder.keywords if isinstance(builder, partial) else ())}
    parameters = inspect.signature(builder).parameters.values()
    return [one.name for one in parameters if one.kind is one.KEYWORD_ONLY and one.name not in fixed]
