"""Save a masked model as a ticket (``save_ticket``).

The tensors of the model are split into masked ones and others. Masks and kept weights are entropy-coded
(``encode_layers``); a kept weight is stored as its level or as its draw, whichever takes fewer bits. The other tensors,
such as batch-norm statistics, are stored as byte planes.
"""

import hashlib
import json
import os
import warnings
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from iterand import __version__, distributions, existing, freezing
from iterand.checks import is_text
from iterand.errors import UnmaskedWarning
from iterand.files import atomic_write
from iterand.maskable import list_tensors
from iterand.masking import left_alone, refuse_computed_further
from iterand.parametrization import MaskedLayer, MaskedParametrization, calculate_masks, require_masked_layers, unwrap
from iterand.summarizing import entropy
from iterand.ticket import codec, draws, format
from iterand.ticket.draws import History
from iterand.ticket.header import BaseTensor, FilledTensor, Header, LayerHeader, StoredTensor, to_json
from iterand.ticket.read import parse


def save_ticket(
    model: nn.Module,
    path: str | os.PathLike[str],
    *,
    recipe: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    base: str | None = None,
    half: bool = False,
) -> None:
    """Save a masked model as a ticket: one file of about one bit per weight.

    Parameters without a mask are stored in full. An ``UnmaskedWarning`` names those that ``prune_`` left
    alone unasked. Of a model with existing weights, a ticket holds masks, digests of the weights, and the tensors that
    have changed, such as a trained head.

    Args:
        model: A model that ``prune_`` masked; wrapped, compiled, on any device.
        path: The file to write, in an existing folder. An existing file is replaced atomically.
        recipe: How the model was made, JSON-serializable. With ``recipe["network"]``, the name and the options of a
            network of ``iterand.lab.networks``, ``load_ticket`` needs no model.
        metrics: Results such as the accuracy, JSON-serializable.
        base: With existing weights, what to call them in messages, such as the name on the Hugging Face Hub (the
            default is the class of the model).
        half: Store the other tensors, such as batch-norm statistics, in float16: smaller, but not bit-equal.
    """
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder that exists; create it, or give another path")
    atomic_write(path, ticket_bytes(model, recipe=recipe, metrics=metrics, base=base, half=half))
    if unmasked := left_alone(model):
        what = f"{Path(path).name} stores {list_tensors(unmasked)} in full, since they are neither masked nor frozen"
        warnings.warn(f"{what}; prune_ with include='*', or name them in exclude=", UnmaskedWarning, stacklevel=2)


@torch.no_grad()
def ticket_bytes(
    model: nn.Module,
    *,
    recipe: Mapping[str, Any] | None = None,
    metrics: Mapping[str, Any] | None = None,
    base: str | None = None,
    half: bool = False,
) -> bytes:
    """The bytes of a ticket."""
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
    # Similar tensors compress better next to each other: all means, then all variances.
    for name, value in sorted(
        content.tensors.items(), key=lambda item: (str(item[1].dtype), item[0].rpartition(".")[2])
    ):
        if value.dtype not in format.DTYPE_NAMES:
            raise ValueError(f"{name!r} is {value.dtype}, which a ticket cannot hold; convert it before saving")
        if name in base_tensors:
            continue
        dtype, shape = format.DTYPE_NAMES[value.dtype], tuple(value.shape)
        same = _single_element(value)
        if same is not None:
            filled[name] = FilledTensor(dtype, shape, same)
            continue
        stored.append(_to_half(value) if half else value)
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
    """The levels of custom distributions that have a small support."""
    states = [layer.parametrization for layer in layers.values()]
    used = {state.distribution for state in states if not state.is_existing}
    return {
        custom.name: tuple(sorted(custom.support))
        for custom in used
        if custom.support is not None and custom.name not in distributions.BUILT_IN
    }


def _single_element(value: Tensor) -> bytes | None:
    """The bytes of one element if all elements are bit-equal, else None."""
    if value.numel() == 0:
        return None
    first = value.reshape(-1)[:1]
    elements = value.reshape(-1).view(torch.uint8).view(value.numel(), -1)
    return format.element_bytes(first) if (elements == elements[0]).all() else None


def _to_half(value: Tensor) -> Tensor:
    """The tensor in float16. Integers stay as they are, and so do tensors that would overflow."""
    if value.dtype not in (torch.float32, torch.float64):
        return value
    half = value.to(torch.float16)
    return half if torch.equal(half.isfinite(), value.isfinite()) else value


def _to_plain_json(given: Mapping[str, Any] | None, what: str) -> dict[str, Any] | None:
    """The mapping after a round trip through JSON. Non-finite numbers become null."""
    if given is None:
        return None
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
    raise TypeError(f"{value!r} is a {type(value).__name__}")


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


# Encoding of masks and kept weights.

Bits = NDArray[np.integer[Any]]

# Draws replace levels, where that is smaller, only if a reader finds them with this many calls of the generator: about
# a second. They save only a few percent of a file.
_MAX_GENERATOR_CALLS = 1 << 24
_MAX_LEVELS = 256  # with a larger support, draws take fewer bits than levels


class _KeptWeights(NamedTuple):
    """The kept weights of one layer in one encoding."""

    stored: str
    symbols: codec.Symbols
    counts: dict[int, int]
    """Level, ordinal or round → number of weights. A symbol is a position in this dict."""
    weights: Tensor
    """float32: one weight per level, or one per kept weight if draws are stored."""

    @property
    def bits(self) -> float:
        """Entropy of the symbols."""
        return entropy(list(self.counts.values()))


class Encoded(NamedTuple):
    """The masked tensors of a model, encoded."""

    layers: list[LayerHeader]
    weights_sha256: str
    stream: bytes


def encode_layers(layers: Mapping[str, MaskedLayer]) -> Encoded:
    """Encode masks and kept weights: the header of each layer, one SHA-256 and one coded stream."""
    states = [layer.parametrization for layer in layers.values()]
    for state in states:
        state.follow_source_()
    masks = [state.clear_padding_(mask).to("cpu") for state, mask in zip(states, calculate_masks(states))]
    indices = [draws.kept_indices(mask) for mask in masks]
    kept_draws = [_take(layer.draw.int(), index) for layer, index in zip(layers.values(), indices)]
    coins = sum(
        int(np.count_nonzero(draw)) * layer.parametrization.rounds for draw, layer in zip(kept_draws, layers.values())
    )
    mask_bits = sum(entropy([mask.numel() - len(index), len(index)]) for mask, index in zip(masks, indices))
    as_ordinals = coins <= draws.allowed_coins(int(mask_bits) // 8)  # the masks alone take this many bytes
    affordable = sum(map(len, indices)) + coins <= _MAX_GENERATOR_CALLS
    headers, sequences, models = [], [], []
    digest = hashlib.sha256()
    for layer, mask, index, draw in zip(layers.values(), masks, indices, kept_draws):
        kept = _stored_symbols(layer, index, draw, as_ordinals=as_ordinals, affordable=affordable)
        header = _header(layer, mask, kept)
        headers.append(header)
        mask_symbols = header.mask_model.cut(mask.reshape(-1).numpy().view(np.uint8))
        value_symbols = header.value_model.cut(kept.symbols)
        draws.update(digest, mask_symbols, value_symbols, kept.weights)
        sequences += [mask_symbols, value_symbols]
        models += [header.mask_model, header.value_model]
    return Encoded(headers, digest.hexdigest(), codec.encode(sequences, models))


def _header(layer: MaskedLayer, mask: Tensor, kept: _KeptWeights) -> LayerHeader:
    if len(kept.counts) > codec.MAX_ALPHABET:
        raise ValueError(f"{layer.name!r} holds {len(kept.counts)} different draws; the limit is {codec.MAX_ALPHABET}")
    state = layer.parametrization
    return LayerHeader(
        name=layer.name,
        shape=tuple(mask.shape),
        dtype=format.DTYPE_NAMES[layer.weight.dtype],
        settings=state.settings,
        unit=0.0 if state.is_existing else state.distribution.unit32(state.settings.fan_in),
        history=History(tuple(state.history)),
        stored=kept.stored,
        counts=tuple(kept.counts.items()),
        digest=existing.digest(layer.weight) if state.is_existing else "",
    )


def _stored_symbols(
    layer: MaskedLayer, index: Tensor, draw: Bits, *, as_ordinals: bool, affordable: bool
) -> _KeptWeights:
    """The smallest encoding of the kept weights. Checks that it reproduces them bit for bit."""
    state = layer.parametrization
    if state.is_existing:
        symbols: codec.Symbols = np.zeros(len(index), dtype=np.uint8)
        return _KeptWeights("base", symbols, {0: len(index)} if len(index) else {}, torch.empty(0))
    weight = _take(_bits(layer.weight.detach()), index)
    best = _encode_levels(state, weight, layer.weight.dtype)
    if best is None or (affordable and min(_expected_bits(state, draw).values()) < best.bits):
        by_draw = _encode_draws(state, index, draw, as_ordinals)
        if best is None:
            _check_weights(layer, weight, by_draw.weights)
        best = by_draw if best is None or by_draw.bits < best.bits else best
    return best


def _encode_levels(state: MaskedParametrization, weight: Bits, dtype: torch.dtype) -> _KeptWeights | None:
    """Encode each weight as its level. None if the support is too large or a weight is not a level."""
    levels = sorted(state.distribution.support or ())
    if not 0 < len(levels) <= _MAX_LEVELS:
        return None
    values = torch.tensor(levels, dtype=torch.float32) * state.distribution.unit32(state.settings.fan_in)
    symbols = np.zeros(weight.shape, dtype=np.uint8)
    counts: dict[int, int] = {}
    for level, bits in zip(levels, _bits(values.to(dtype)).tolist()):
        equal = weight == bits
        if count := int(np.count_nonzero(equal)):
            if counts:  # the first symbol is 0
                symbols += equal.view(np.uint8) * np.uint8(len(counts))
            counts[level] = count
    if sum(counts.values()) < len(weight):
        return None
    present = torch.tensor([level in counts for level in levels])
    return _KeptWeights("level", symbols, counts, values[present])


def _encode_draws(state: MaskedParametrization, index: Tensor, numbers: Bits, as_ordinals: bool) -> _KeptWeights:
    """Encode each weight as its draw: as an ordinal (``iterand.ticket.draws``) or as the round."""
    draw = torch.from_numpy(numbers).to(torch.int64)
    drawn = draws.weights_at(state.settings, state.distribution, index, draw)
    redrawn = draw.nonzero().squeeze(1)
    history = History(tuple(state.history))
    if as_ordinals and any(threshold < draws.ALWAYS for threshold, _ in history.runs):
        expected = _expected_bits(state, numbers)
        stored = min(expected, key=lambda encoding: expected[encoding])
        # On the device of the model: tens of millions of coins take seconds on a CPU.
        index, redrawn_draw = (tensor[redrawn].to(state.score.device) for tensor in (index, draw))
        ordinal = draws.ordinals(index, redrawn_draw, state.key, history, latest=stored == "latest").to("cpu")
        if ordinal.all():
            values = torch.zeros_like(draw).index_copy_(0, redrawn, ordinal)
            return _KeptWeights(stored, *_to_symbols(values.numpy()), drawn)
    return _KeptWeights("round", *_to_symbols(numbers), drawn)


def _expected_bits(state: MaskedParametrization, draw: Bits) -> dict[str, float]:
    """Estimated size of the draws as ordinals, by encoding."""
    return draws.ordinal_bits(np.bincount(draw, minlength=1), History(tuple(state.history)))


def _to_symbols(numbers: Bits) -> tuple[codec.Symbols, dict[int, int]]:
    """Map numbers to symbols 0, 1, … in ascending order. Returns the symbols and number → count."""
    counts = np.bincount(numbers)
    present = np.flatnonzero(counts)
    symbol: codec.Symbols = np.zeros(len(counts), dtype=np.min_scalar_type(max(len(present) - 1, 0)))
    symbol[present] = np.arange(len(present))
    return symbol[numbers], dict(zip(present.tolist(), counts[present].tolist()))


def _check_weights(layer: MaskedLayer, weight: Bits, drawn: Tensor) -> None:
    """Refuse weights that differ from the drawn ones, for instance trained weights."""
    dtype = layer.weight.dtype
    given = _bits(drawn.to(dtype)).numpy()
    if not np.array_equal(given, weight):
        first = int(np.flatnonzero(given != weight)[0])
        held, expected = (torch.tensor(bits[first]).view(dtype).item() for bits in (weight, given))
        raise ValueError(
            f"the kept weights of {layer.name!r} are not the ones its seed and draws give (the first that differs is "
            f"{held:g}, drawn was {expected:g}); a ticket holds random weights only: keep trained ones with torch.save"
        )


def _take(tensor: Tensor, index: Tensor) -> Bits:
    """The elements at these flat indices, on the host."""
    found: Bits = tensor.to("cpu").reshape(-1).numpy()[index.numpy()]
    return found


def _bits(weight: Tensor) -> Tensor:
    """The bit patterns of the weights, as integers."""
    return weight.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.itemsize])
