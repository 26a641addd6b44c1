"""From a masked model to a ticket (``save_ticket``)."""

import json
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from iterand import distributions, freezing
from iterand.checks import is_text
from iterand.files import atomic_write
from iterand.masking import MaskedLayer, refuse_computed_further, require_masked_layers, unwrap
from iterand.ticket import format
from iterand.ticket.encoding import encode_layers
from iterand.ticket.header import FilledTensor, Header, StoredTensor, to_json
from iterand.ticket.read import parse
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
    kept = _content(model)
    encoded = encode_layers(kept.layers)
    filled: dict[str, FilledTensor] = {}
    described: dict[str, StoredTensor] = {}
    stored: list[Tensor] = []
    # Planes hold tensors of one type together, and the compressor likes what is alike: all means, then all variances.
    for name, value in sorted(kept.tensors.items(), key=lambda item: (str(item[1].dtype), item[0].rpartition(".")[2])):
        if value.dtype not in format.DTYPE_NAMES:
            raise ValueError(f"{name!r} is {value.dtype}, which a ticket cannot hold; convert it before saving")
        dtype, shape = format.DTYPE_NAMES[value.dtype], tuple(value.shape)
        same = _same_element(value)
        if same is not None:
            filled[name] = FilledTensor(dtype, shape, same)
            continue
        stored.append(_halved(value) if half else value)
        described[name] = StoredTensor(dtype, shape, format.DTYPE_NAMES[stored[-1].dtype])
    data, planes = format.pack_tensors(stored)
    header = Header(
        layers=tuple(encoded.layers),
        package=VERSION,
        weights_sha256=encoded.weights_sha256,
        levels=_own_levels(kept.layers),
        tensors=described,
        planes=tuple(planes),
        filled=filled,
        aliases=kept.aliases,
        recipe=_plain(recipe, "recipe"),
        metrics=_plain(metrics, "metrics"),
    )
    packed = format.pack(to_json(header), data + encoded.stream)
    parse(packed)  # whoever writes keeps to the limits that readers set
    return packed


def _own_levels(layers: Mapping[str, MaskedLayer]) -> dict[str, tuple[int, ...]]:
    """The levels of distributions that have few and do not come with the package."""
    used = {layer.parametrization.distribution for layer in layers.values()}
    return {
        own.name: tuple(sorted(own.support))
        for own in used
        if own.support is not None and own.name not in distributions.BUILT_IN
    }


def _same_element(value: Tensor) -> bytes | None:
    """The one element of a tensor whose elements are the same to the last bit."""
    if value.numel() == 0:
        return None
    first = value.reshape(-1)[:1]
    elements = value.reshape(-1).view(torch.uint8).view(value.numel(), -1)
    return format.element_bytes(first) if (elements == elements[0]).all() else None


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
    if not is_text(json.dumps(json.loads(text), ensure_ascii=False)):
        raise ValueError(f"{what} holds half of a surrogate pair, which is no text")
    loaded: dict[str, Any] = json.loads(text, parse_constant=lambda constant: None)
    return loaded


def _scalar(value: Any) -> Any:
    if isinstance(value, os.PathLike):
        return str(value)
    if isinstance(value, (Tensor, np.generic)):
        return value.item()
    raise TypeError(f"{value!r} is a {type(value).__name__}")


@dataclass(frozen=True)
class _Content:
    """The state dict of the ordinary model, apart: masked tensors, all others, and second names of tied ones."""

    layers: dict[str, MaskedLayer]
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    """Second name → the name among ``layers`` or ``tensors``."""


def _content(model: nn.Module) -> _Content:
    """What a masked model holds, under the names it would have once folded; the model is left as it is."""
    root = unwrap(model)
    layers = require_masked_layers(root)
    refuse_computed_further(layers.values())
    paths = defaultdict(list)
    for path, module in root.named_modules(remove_duplicate=False):
        paths[id(module)].append(f"{path}." if path else "")

    aliases: dict[str, str] = {}
    masked: list[str] = []
    for name, layer in layers.items():
        for module, attribute in layer.owners:
            for path in paths[id(module)]:
                masked.append(f"{path}parametrizations.{attribute}.")
                if path + attribute != name:
                    aliases[path + attribute] = name

    state = {name: value for name, value in root.state_dict().items() if not name.startswith(tuple(masked))}
    for name, value in state.items():
        if not isinstance(value, Tensor):
            raise ValueError(
                f"{name!r} in the model's state is a {type(value).__name__}; a ticket holds tensors only, so let "
                "get_extra_state return one"
            )
        if not is_text(name):
            raise ValueError(f"{name!r} in the model's state is half of a surrogate pair, which is no name")
        if value.layout is not torch.strided or value.is_meta:
            kind = "has no memory" if value.is_meta else f"is {value.layout}"
            raise ValueError(f"{name!r} in the model's state {kind}; a ticket holds dense tensors only")
    for module in root.modules():
        for attribute, value in _dropped(module).items():
            for path in paths[id(module)]:
                state[path + attribute] = value

    tensors: dict[str, Tensor] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, value in state.items():
        described = first.setdefault(_identity(value), name) if value.numel() else name
        if described == name:
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()  # views of one memory part here
        else:
            aliases[name] = described
    return _Content(layers, tensors, aliases)


def _dropped(module: nn.Module) -> dict[str, Tensor]:
    """The affine part that freezing took out of a batch norm, as folding will put it back: one and zero."""
    return {
        attribute: torch.full_like(cast(Tensor, module.running_mean), value, device="cpu")
        for attribute, value in freezing.dropped(module).items()
    }


def _identity(value: Tensor) -> tuple[object, ...]:
    """What two names of one tied tensor have in common."""
    where = value.device, value.untyped_storage().data_ptr(), value.storage_offset()
    return *where, value.shape, value.stride(), value.dtype
