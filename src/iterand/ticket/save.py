"""Writing a ticket: from a masked model to bytes."""

import hashlib
import json
import os
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from iterand import __version__, distributions, surgery
from iterand.checks import is_text
from iterand.files import atomic_write
from iterand.masking import refuse_computed_further
from iterand.parametrization import MaskedLayer, MaskedParametrization, calculate_masks, require_masked_layers, unwrap
from iterand.summarizing import entropy
from iterand.ticket import codec, draws, format
from iterand.ticket.draws import History
from iterand.ticket.header import FilledTensor, Header, LayerHeader, StoredTensor, to_json
from iterand.ticket.read import parse

Bits = NDArray[np.integer[Any]]

# Draws are told in place of levels, where that is smaller, only if this many calls of the generator give them back: a
# second, which the last few percent of a file are not worth more than.
_QUICK = 1 << 24
_MAX_LEVELS = 256  # of a distribution with more, draws are the cheaper thing to store


class _Told(NamedTuple):
    """What tells the kept weights of one layer."""

    stored: str
    symbols: codec.Symbols
    counts: dict[int, int]
    """Level, place or round → how many weights have it; the symbols are the positions in here."""
    weights: Tensor
    """Float32: of levels one for each of the counts, of draws one for each kept weight."""

    @property
    def bits(self) -> float:
        """What it costs at least."""
        return entropy(list(self.counts.values()))


class Encoded(NamedTuple):
    """All masked tensors of a model."""

    layers: list[LayerHeader]
    weights_sha256: str
    stream: bytes


def encode_layers(layers: Mapping[str, MaskedLayer]) -> Encoded:
    """Headers of all masked tensors, the SHA-256 of masks and kept weights, and the coded stream."""
    masks = [mask.to("cpu") for mask in calculate_masks([layer.parametrization for layer in layers.values()])]
    indices = [draws.kept_indices(mask) for mask in masks]
    kept_draws = [_at(layer.draw, index) for layer, index in zip(layers.values(), indices)]
    coins = sum(
        int(np.count_nonzero(draw)) * layer.parametrization.rounds for draw, layer in zip(kept_draws, layers.values())
    )
    mask_bits = sum(entropy([mask.numel() - len(index), len(index)]) for mask, index in zip(masks, indices))
    by_place = coins <= draws.allowed_coins(int(mask_bits) // 8)  # the file will not be smaller than its masks
    quick = sum(map(len, indices)) + coins <= _QUICK
    headers, sequences, models = [], [], []
    digest = hashlib.sha256()
    for layer, mask, index, draw in zip(layers.values(), masks, indices, kept_draws):
        told = _tell(layer, index, draw, by_place=by_place, quick=quick)
        header = _header(layer, mask, told)
        headers.append(header)
        mask_symbols = header.mask_model.cut(mask.reshape(-1).numpy().view(np.uint8))
        value_symbols = header.value_model.cut(told.symbols)
        draws.update(digest, mask_symbols, value_symbols, told.weights)
        sequences += [mask_symbols, value_symbols]
        models += [header.mask_model, header.value_model]
    return Encoded(headers, digest.hexdigest(), codec.encode(sequences, models))


def _header(layer: MaskedLayer, mask: Tensor, told: _Told) -> LayerHeader:
    if len(told.counts) > codec.MAX_ALPHABET:
        raise ValueError(f"{layer.name!r} holds {len(told.counts)} different draws; the limit is {codec.MAX_ALPHABET}")
    state = layer.parametrization
    return LayerHeader(
        name=layer.name,
        shape=tuple(mask.shape),
        dtype=format.DTYPE_NAMES[layer.weight.dtype],
        settings=state.settings,
        unit=state.distribution.unit32(state.settings.fan_in),
        history=History(tuple(state.history)),
        stored=told.stored,
        counts=tuple(told.counts.items()),
    )


def _tell(layer: MaskedLayer, index: Tensor, draw: Bits, *, by_place: bool, quick: bool) -> _Told:
    """The cheapest way to tell the kept weights, checked to give exactly them."""
    state = layer.parametrization
    weight = _at(_bits(layer.weight.detach()), index)
    best = _by_level(state, weight, layer.weight.dtype)
    if best is None or (quick and min(_expected_bits(state, draw).values()) < best.bits):
        by_draw = _by_draw(state, index, draw, by_place)
        if best is None:
            _check_weights(layer, weight, by_draw.weights)
        best = by_draw if best is None or by_draw.bits < best.bits else best
    return best


def _by_level(state: MaskedParametrization, weight: Bits, dtype: torch.dtype) -> _Told | None:
    """The level of each weight, if all are levels of a distribution that has few."""
    levels = sorted(state.distribution.support or ())
    if not 0 < len(levels) <= _MAX_LEVELS:
        return None
    values = torch.tensor(levels, dtype=torch.float32) * state.distribution.unit32(state.settings.fan_in)
    symbols = np.zeros(weight.shape, dtype=np.uint8)
    counts: dict[int, int] = {}
    for level, bits in zip(levels, _bits(values.to(dtype)).tolist()):
        holds = weight == bits
        if count := int(np.count_nonzero(holds)):
            if counts:  # the first symbol is 0
                symbols += holds.view(np.uint8) * np.uint8(len(counts))
            counts[level] = count
    if sum(counts.values()) < len(weight):
        return None
    present = torch.tensor([level in counts for level in levels])
    return _Told("level", symbols, counts, values[present])


def _by_draw(state: MaskedParametrization, index: Tensor, numbers: Bits, by_place: bool) -> _Told:
    """The draw of each weight: its place among the coin's falls, or the round itself."""
    draw = torch.from_numpy(numbers).to(torch.int64)
    drawn = draws.drawn(state.settings, state.distribution, index, draw)
    redrawn = draw.nonzero().squeeze(1)
    history = History(tuple(state.history))
    if by_place and any(threshold < draws.ALWAYS for threshold, _ in history.runs):
        expected = _expected_bits(state, numbers)
        stored = min(expected, key=lambda way: expected[way])
        # Where the model is: tens of millions of coins take seconds on a CPU, and no time on a GPU.
        index, draw_then = (tensor[redrawn].to(state.score.device) for tensor in (index, draw))
        place = draws.places(index, draw_then, state.key, history, latest=stored == "latest").to("cpu")
        if place.all():
            told = torch.zeros_like(draw).index_copy_(0, redrawn, place)
            return _Told(stored, *_compact(told.numpy()), drawn)
    return _Told("round", *_compact(numbers), drawn)


def _expected_bits(state: MaskedParametrization, draw: Bits) -> dict[str, float]:
    return draws.place_bits(np.bincount(draw, minlength=1), History(tuple(state.history)))


def _compact(numbers: Bits) -> tuple[codec.Symbols, dict[int, int]]:
    """Each number as a position among those that occur, and how often each of those does."""
    counts = np.bincount(numbers)
    present = np.flatnonzero(counts)
    symbol: codec.Symbols = np.zeros(len(counts), dtype=np.min_scalar_type(max(len(present) - 1, 0)))
    symbol[present] = np.arange(len(present))
    return symbol[numbers], dict(zip(present.tolist(), counts[present].tolist()))


def _check_weights(layer: MaskedLayer, weight: Bits, drawn: Tensor) -> None:
    dtype = layer.weight.dtype
    given = _bits(drawn.to(dtype)).numpy()
    if not np.array_equal(given, weight):
        first = int(np.flatnonzero(given != weight)[0])
        held, expected = (torch.tensor(bits[first]).view(dtype).item() for bits in (weight, given))
        raise ValueError(
            f"the kept weights of {layer.name!r} are not the ones its seed and draws give (the first that differs is "
            f"{held:g}, drawn was {expected:g}); a ticket holds random weights only: keep trained ones with torch.save"
        )


def _at(tensor: Tensor, index: Tensor) -> Bits:
    found: Bits = tensor.to("cpu").reshape(-1).numpy()[index.numpy()]
    return found


def _bits(weight: Tensor) -> Tensor:
    """The weights as integers, which are equal only if all their bits are."""
    return weight.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.itemsize])


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
        path: The file to write, in a folder that exists. A file of that name is replaced once the new one is whole.
        recipe: Where the model comes from, as JSON. ``recipe["network"]`` is the name and the options of one of the
            project's own networks, and lets ``load_ticket`` build the model by itself.
        metrics: How good it is, as JSON.
        half: Store the other tensors, such as batch-norm statistics, in float16: smaller, no longer bit-equal.
    """
    folder = Path(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder that exists; create it, or give another path")
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
        package=__version__,
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
        for attribute, value in surgery.dropped(module).items()
    }


def _identity(value: Tensor) -> tuple[object, ...]:
    """What two names of one tied tensor have in common."""
    where = value.device, value.untyped_storage().data_ptr(), value.storage_offset()
    return *where, value.shape, value.stride(), value.dtype
