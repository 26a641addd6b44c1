"""From a masked model to a ticket (``save_ticket``)."""

import json
import os
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from iterand.files import atomic_write
from iterand.ticket import container
from iterand.ticket.content import content
from iterand.ticket.encoding import encode_layers
from iterand.ticket.header import Filled, Header, to_json
from iterand.ticket.reading import parse
from iterand.version import VERSION


def save_ticket(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    recipe: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    half: bool = False,
) -> None:
    """Write what cannot be recomputed of a masked model to one file, about a bit a weight.

    Args:
        model: A model that ``prune_`` masked; wrapped, compiled, on any device.
        path: Where to; a file that is there is replaced once the new one is whole.
        recipe: Where the model comes from, as JSON. ``recipe["network"]`` is the name and the options of one of the
            project's own networks, and lets ``load_ticket`` build the model by itself.
        metrics: How good it is, as JSON.
        half: Store the other tensors, such as batch-norm statistics, in float16: smaller, no longer bit-equal.
    """
    atomic_write(path, ticket_bytes(model, recipe=recipe, metrics=metrics, half=half))


@torch.no_grad()
def ticket_bytes(
    model: nn.Module,
    *,
    recipe: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    half: bool = False,
) -> bytes:
    """The bytes of a ticket."""
    kept = content(model)
    layers, digest = encode_layers(kept.layers)
    tensors: dict[str, Tensor] = {}
    streams = bytearray().join(layer.mask_stream + layer.value_stream for layer in layers)
    if streams:
        tensors["streams"] = torch.frombuffer(streams, dtype=torch.uint8)
    filled: dict[str, Filled] = {}
    cast: dict[str, str] = {}
    for name, value in kept.tensors.items():
        if value.dtype not in container.DTYPE_NAMES:
            raise ValueError(f"{name!r} is {value.dtype}, which a ticket cannot hold; convert it before saving")
        same = _filled(value)
        if same is not None:
            filled[name] = same
            continue
        stored = _halved(value) if half else value
        if stored.dtype != value.dtype:
            cast[name] = container.DTYPE_NAMES[value.dtype]
        tensors[f"tensor:{name}"] = stored
    header = Header(
        layers=tuple(layer.header for layer in layers),
        supports={
            layer.parametrization.distribution.name: layer.parametrization.distribution.support
            for layer in kept.layers.values()
        },
        weights_sha256=digest,
        package=VERSION,
        filled=filled,
        aliases=kept.aliases,
        cast=cast,
        recipe=_plain(recipe, "recipe"),
        metrics=_plain(metrics, "metrics"),
    )
    data = container.pack(to_json(header), tensors)
    parse(data)  # whoever writes keeps to the limits that readers set
    return data


def _filled(value: Tensor) -> Filled | None:
    """The tensor as one element, if all are the same to the last bit."""
    if value.numel() == 0 or value.is_complex():
        return None
    elements = value.reshape(-1).view(torch.uint8).view(value.numel(), -1)
    if not (elements == elements[0]).all():
        return None
    element = container.native(bytes(elements[0].tolist()))
    return Filled(container.DTYPE_NAMES[value.dtype], tuple(value.shape), element)


def _halved(value: Tensor) -> Tensor:
    """The tensor in float16, unless that would lose whole numbers or overflow."""
    if value.dtype not in (torch.float32, torch.float64):
        return value
    half = value.to(torch.float16)
    return half if torch.equal(half.isfinite(), value.isfinite()) else value


def _plain(given: Mapping[str, Any] | None, what: str) -> dict[str, Any] | None:
    """The mapping as JSON has it; numbers that are not finite become null."""
    if given is None:
        return None
    try:
        text = json.dumps(dict(given), default=_scalar)
    except (TypeError, ValueError, RuntimeError) as error:  # the last from a tensor with more than one number
        raise ValueError(f"{what} cannot be written as JSON: {error}") from None
    loaded: dict[str, Any] = json.loads(text, parse_constant=lambda constant: None)
    return loaded


def _scalar(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, (Tensor, np.generic)):
        return value.item()
    raise TypeError(f"{value!r} is a {type(value).__name__}")
