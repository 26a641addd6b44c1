"""Save a masked model as a ticket (``save_ticket``).

The tensors of the model are split into masked ones and others. Masks and kept weights are entropy-coded
(`iterand.ticket.encode`). The other tensors, such as batch-norm statistics, are stored as byte planes.
"""

import json
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import numpy as np
import torch
from torch import Tensor, nn

from iterand import __version__, distributions, existing, freezing
from iterand.checks import check_path, is_text, shown
from iterand.errors import UnmaskedWarning
from iterand.files import atomic_write
from iterand.masking import left_alone, refuse_computed_further
from iterand.parameter_kinds import list_tensors
from iterand.parametrization import MaskedParametrization
from iterand.sparsity import SparsitySchedule, kept_at
from iterand.surgery import MaskedLayer, require_masked_layers, unwrap
from iterand.ticket import format
from iterand.ticket.encode import encode_layers
from iterand.ticket.header import (
    BaseTensor,
    FilledTensor,
    Header,
    StoredTensor,
    stored_distribution,
    to_json,
)
from iterand.ticket.read import parse


def save_ticket(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    recipe: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    base: str | None = None,
    half: bool | Literal["exact"] = False,
) -> None:
    """Save a masked model as a ticket: one file of about one bit per weight.

    Parameters without a mask are stored in full. An ``UnmaskedWarning`` names those that ``prune_`` left alone
    although no argument names them. Of a model with existing weights, a ticket holds masks, digests of the weights, and
    the tensors that have changed, such as a trained head.

    Args:
        model: A model that ``prune_`` masked; wrapped, compiled, on any device.
        path: The file to write, in an existing folder. An existing file is replaced atomically.
        recipe: How the model was made, JSON-serializable. With ``recipe["network"]``, the name and the options of a
            network of ``iterand.lab.networks``, ``load_ticket`` needs no model.
        metrics: Results such as the accuracy, JSON-serializable. A number that is not finite becomes None.
        base: With existing weights, what to call them in messages, such as the name on the Hugging Face Hub (the
            default is the class of the model).
        half: Store the other tensors, such as batch-norm statistics, in float16: smaller, but not bit-equal. With
            ``"exact"`` only those of which float16 holds every element exactly.
    """
    check_path("path", path)
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder that exists; create it, or give another path")
    atomic_write(path, ticket_bytes(model, recipe=recipe, metrics=metrics, base=base, half=half))
    _warn_of_schedule([layer.parametrization for layer in require_masked_layers(model).values()], Path(path).name)
    if unmasked := left_alone(model):
        what = f"{Path(path).name} stores {list_tensors(unmasked)} in full, neither masked nor frozen"
        warnings.warn(f"{what}; prune_ with include='*', or name them in exclude=", UnmaskedWarning, stacklevel=2)


def _warn_of_schedule(masks: Sequence[MaskedParametrization], name: str) -> None:
    """Warn of a sparsity that a schedule has not raised to its final value."""
    if any(SparsitySchedule.kind in mask.iterations for mask in masks):
        final = kept_at(masks, 1.0)
        kept, fewest = sum(int(mask.kept) for mask in masks), sum(final[mask] for mask in masks)
        if kept > fewest:
            what = f"{name} keeps {kept:,} weights, and not the {fewest:,} of the sparsity that prune_ was given"
            warnings.warn(f"{what}; save after the last step of the model's SparsitySchedule", stacklevel=3)


@torch.no_grad()
def ticket_bytes(
    model: nn.Module,
    *,
    recipe: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    base: str | None = None,
    half: bool | Literal["exact"] = False,
) -> bytes:
    """The bytes of a ticket."""
    if half not in (False, True, "exact"):
        raise ValueError(f"half is {half!r}; it must be True, False or 'exact'")
    content = _split_state(model)
    base = _check_base(base, content, type(unwrap(model)).__name__)
    encoded = encode_layers(content.layers)
    filled: dict[str, FilledTensor] = {}
    described: dict[str, StoredTensor] = {}
    stored: list[Tensor] = []
    base_tensors = {
        name: BaseTensor(format.DTYPE_NAMES[content.tensors[name].dtype], tuple(content.tensors[name].shape), digest)
        for name, digest in content.unchanged.items()
    }
    for name, value in content.tensors.items():
        if value.dtype not in format.DTYPE_NAMES:
            raise ValueError(f"{name!r} is {value.dtype}, which a ticket cannot hold; convert it before saving")
    converted = {
        name: _to_half(value, exact=half == "exact") if half else value for name, value in content.tensors.items()
    }
    # Similar tensors compress better next to each other: all means, then all variances.
    for name in sorted(converted, key=lambda name: (str(converted[name].dtype), name.rpartition(".")[2])):
        if name in base_tensors:
            continue
        value = content.tensors[name]
        dtype, shape = format.DTYPE_NAMES[value.dtype], tuple(value.shape)
        same = _single_element(value)
        if same is not None:
            filled[name] = FilledTensor(dtype, shape, same)
            continue
        stored.append(converted[name])
        described[name] = StoredTensor(dtype, shape, format.DTYPE_NAMES[stored[-1].dtype])
    data, planes = format.pack_tensors(stored)
    header = Header(
        layers=tuple(encoded.layers),
        package=__version__,
        weights_sha256=encoded.weights_sha256,
        levels=_custom_levels(content.layers),
        tensors=described,
        planes=tuple(planes),
        filled=filled,
        aliases=content.aliases,
        base=base,
        base_tensors=base_tensors,
        recipe=_to_plain_json(recipe, "recipe"),
        metrics=_to_plain_json(metrics, "metrics"),
    )
    packed = format.pack(to_json(header), data + encoded.stream)
    parse(packed)  # raises if a reader would refuse the file
    return packed


def _check_base(base: str | None, content: "_Content", default: str) -> str | None:
    """The name of the base, if the model has one."""
    if not any(layer.parametrization.is_existing for layer in content.layers.values()):
        if base is not None:
            raise ValueError(f"base is {base!r}, but no weight of the model is an existing one; leave it out")
        return None
    name = default if base is None else base
    if not isinstance(name, str) or not 0 < len(name) <= 4096 or not is_text(name):
        raise ValueError(f"base is {base!r}; it must be a name of at most 4096 characters")
    return name


def _custom_levels(layers: Mapping[str, MaskedLayer]) -> dict[str, tuple[int, ...]]:
    """The levels of distributions that have a small support and are not built in."""
    found = {}
    for state in (layer.parametrization for layer in layers.values() if not layer.parametrization.is_existing):
        name, levels = stored_distribution(state.settings), state.settings.levels(state.distribution.support)
        if levels and name not in distributions.BUILT_IN:
            found[name] = tuple(levels)
    return found


def _single_element(value: Tensor) -> bytes | None:
    """The bytes of one element if all elements are bit-equal, else None."""
    if value.numel() == 0:
        return None
    first = value.reshape(-1)[:1]
    elements = _bits(value).view(value.numel(), -1)
    return format.element_bytes(first) if (elements == elements[0]).all() else None


def _bits(value: Tensor) -> Tensor:
    return value.reshape(-1).view(torch.uint8)


def _to_half(value: Tensor, *, exact: bool) -> Tensor:
    """The tensor in float16; as it is if it has integers or would overflow, or, if ``exact``, would change."""
    if value.dtype not in (torch.float32, torch.float64):
        return value
    half = value.to(torch.float16)
    if exact:  # conversions may change the bits of a NaN
        same = not value.isnan().any() and torch.equal(_bits(half.to(value.dtype)), _bits(value))
    else:
        same = torch.equal(half.isfinite(), value.isfinite())
    return half if same else value


def _to_plain_json(given: Mapping[str, Any] | None, what: str) -> dict[str, Any] | None:
    """The mapping after a round trip through JSON. Non-finite numbers become null."""
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise ValueError(f"{what} is {shown(given)}; it must be a mapping")
    try:
        text = json.dumps(dict(given), default=_scalar)
    except (TypeError, ValueError, RuntimeError) as error:  # RuntimeError: a tensor with several elements
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
    raise TypeError(f"{value!r} is of type {type(value).__name__}")


# The tensors of a model: masked, other, tied.


@dataclass(frozen=True)
class _Content:
    """The state dict of the unmasked model, split into masked tensors, other tensors, and aliases of tied ones."""

    layers: dict[str, MaskedLayer]
    tensors: dict[str, Tensor]
    aliases: dict[str, str]
    """Tied tensors: other name → the name in ``layers`` or ``tensors``."""
    unchanged: dict[str, str]
    """Beside existing weights: the names in ``tensors`` of what has not changed either, with their digests."""


def _split_state(model: nn.Module) -> _Content:
    """The content of a masked model under the names it has after ``fold_``. Does not change the model."""
    root = unwrap(model)
    layers = require_masked_layers(root)
    refuse_computed_further(layers.values())
    paths = defaultdict(list)
    for path, module in root.named_modules(remove_duplicate=False):
        paths[id(module)].append(f"{path}." if path else "")

    aliases: dict[str, str] = {}
    masked: list[str] = []
    state = root.state_dict()
    for name, layer in layers.items():
        for module, attribute in layer.owners:
            for path in paths[id(module)]:
                masked.append(f"{path}parametrizations.{attribute}.")
                if masked[-1] + "original" not in state:
                    raise ValueError(
                        f"{path + attribute!r} has another name in the model's state_dict, so no model could load its "
                        "ticket; take away the wrapper or hook that renames it, such as checkpoint_wrapper"
                    )
                if path + attribute != name:
                    aliases[path + attribute] = name

    state = {name: value for name, value in state.items() if not name.startswith(tuple(masked))}
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
        for attribute, value in _removed_affine(module).items():
            for path in paths[id(module)]:
                state[path + attribute] = value

    tensors: dict[str, Tensor] = {}
    first: dict[tuple[object, ...], str] = {}
    for name, value in state.items():
        described = first.setdefault(_storage_key(value), name) if value.numel() else name
        if described == name:
            tensors[name] = value.detach().to("cpu", copy=True).contiguous()  # views of one storage become copies
        else:
            aliases[name] = described
    beside = any(layer.parametrization.is_existing for layer in layers.values())
    same = existing.unchanged(root, tensors) if beside else {}
    return _Content(layers, tensors, aliases, {name: same[name] for name in tensors if name in same})


def _removed_affine(module: nn.Module) -> dict[str, Tensor]:
    """The affine parameters that freezing removed from a batch norm, as ``fold_`` restores them: one and zero."""
    return {
        attribute: torch.full_like(cast(Tensor, module.running_mean), value, device="cpu")
        for attribute, value in freezing.dropped(module).items()
    }


def _storage_key(value: Tensor) -> tuple[object, ...]:
    """A key that is equal for two names of one tied tensor."""
    where = value.device, value.untyped_storage().data_ptr(), value.storage_offset()
    return *where, value.shape, value.stride(), value.dtype
