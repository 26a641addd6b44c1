"""What must be kept of a network: the tensors of the ordinary model that a masked one stands for, by name."""

from collections import defaultdict
from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor, nn

from iterand import freezing
from iterand.masking import MaskedLayer, refuse_computed_further, require_masked_layers, unwrap


@dataclass(frozen=True)
class Content:
    """The state dict of the ordinary model, apart: masked tensors, all others, and second names of tied ones."""

    layers: dict[str, MaskedLayer]
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    """Second name → the name among ``layers`` or ``tensors``."""


def content(model: nn.Module) -> Content:
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
    return Content(layers, tensors, aliases)


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
