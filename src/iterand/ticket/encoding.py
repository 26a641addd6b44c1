"""One masked tensor into a ticket: what tells its kept weights, checked against them, as streams."""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from iterand.masking import MaskedLayer
from iterand.parametrization import Mask, calculate_masks
from iterand.ticket import coding, container, draws, estimate, schema
from iterand.ticket.header import LayerHeader
from iterand.ticket.layers import TicketLayer, drawn, kept_indices, mask_counts, update

# Draws are told in place of levels, where that is smaller, only if this many calls of the generator give them back: a
# second, which the last few percent of a file are not worth more than.
_QUICK = 1 << 24


class _Told(NamedTuple):
    """What tells the kept weights of one layer."""

    stored: str
    symbols: coding.Symbols
    counts: dict[int, int]
    """Level, place or round → how many weights have it; the symbols are the positions in here."""
    values: Tensor
    """The weights it gives, float32."""

    @property
    def bits(self) -> float:
        """What it costs at least."""
        return coding.entropy(list(self.counts.values()))


def encode_layers(layers: Mapping[str, MaskedLayer]) -> tuple[list[TicketLayer], str]:
    """All masked tensors, and the SHA-256 of what they hold."""
    masks = [mask.to("cpu") for mask in calculate_masks([layer.parametrization for layer in layers.values()])]
    indices = [kept_indices(mask) for mask in masks]
    kept_draws = [_at(layer.draw, index) for layer, index in zip(layers.values(), indices)]
    coins = sum(
        int(draw.count_nonzero()) * layer.parametrization.rounds for layer, draw in zip(layers.values(), kept_draws)
    )
    weights = sum(map(len, indices))
    encoded = []
    digest = hashlib.sha256()
    for layer, mask, index, draw in zip(layers.values(), masks, indices, kept_draws):
        told = _tell(layer, index, draw, by_place=coins <= draws.MAX_COINS, quick=weights + coins <= _QUICK)
        encoded.append(_encode(layer, mask, told))
        update(digest, mask, told.values)
    return encoded, digest.hexdigest()


def _encode(layer: MaskedLayer, mask: Tensor, told: _Told) -> TicketLayer:
    if len(told.counts) > schema.MAX_ALPHABET:
        raise ValueError(f"{layer.name!r} holds {len(told.counts)} different draws; the limit is {schema.MAX_ALPHABET}")
    state = layer.parametrization
    size, kept = mask.numel(), len(told.symbols)
    mask_stream = coding.encode(mask.reshape(-1).numpy().view(np.uint8), mask_counts(size, kept))
    value_stream = coding.encode(told.symbols, list(told.counts.values()))
    header = LayerHeader(
        name=layer.name,
        shape=tuple(mask.shape),
        dtype=container.DTYPE_NAMES[layer.weight.dtype],
        settings=state.settings,
        unit=state.distribution.unit32(state.settings.fan_in),
        history=tuple(state.history),
        stored=told.stored,
        counts=tuple(told.counts.items()),
        streams=(len(mask_stream), len(value_stream)),
    )
    return TicketLayer(header, mask_stream, value_stream)


def _tell(layer: MaskedLayer, index: Tensor, draw: Tensor, *, by_place: bool, quick: bool) -> _Told:
    """The cheapest way to tell the kept weights, checked to give exactly them."""
    state = layer.parametrization
    weight = _at(layer.weight.detach(), index)
    best = _by_level(state, weight)
    if best is None or (quick and min(_expected_bits(state, draw).values()) < best.bits):
        by_draw = _by_draw(state, index, draw.to(torch.int64), by_place)
        best = by_draw if best is None or by_draw.bits < best.bits else best
    _check_weights(layer.name, weight, best.values)
    return best


def _by_level(state: Mask, weight: Tensor) -> _Told | None:
    """The level of each weight, if all are levels of a distribution that has few."""
    if state.distribution.support is None:
        return None
    levels = sorted(state.distribution.support)
    table = torch.tensor(levels, dtype=torch.float32) * state.distribution.unit32(state.settings.fan_in)
    exact = torch.promote_types(weight.dtype, torch.float32)  # in which torch can search
    found = torch.searchsorted(table.to(weight.dtype).to(exact), weight.to(exact), out_int32=True)
    found.clamp_(max=len(levels) - 1)
    values = table[found]
    if not _same(values.to(weight.dtype), weight):
        return None
    symbols, present = _compact(found.numpy())
    return _Told("level", symbols, {levels[number]: count for number, count in present.items()}, values)


def _by_draw(state: Mask, index: Tensor, draw: Tensor, by_place: bool) -> _Told:
    """The draw of each weight: its place among the coin's falls, or the round itself."""
    values = drawn(state.settings, state.distribution, index, draw)
    redrawn = draw.nonzero().squeeze(1)
    if by_place and any(threshold < draws.ALWAYS for threshold, _ in state.history):
        expected = _expected_bits(state, draw)
        stored = min(expected, key=lambda way: expected[way])
        # Where the model is: tens of millions of coins take seconds on a CPU, and no time on a GPU.
        index, draw_then = (tensor[redrawn].to(state.score.device) for tensor in (index, draw))
        place = draws.places(index, draw_then, state.key, state.history, latest=stored == "latest").to("cpu")
        if place.all():
            told = torch.zeros_like(draw).index_copy_(0, redrawn, place)
            return _Told(stored, *_compact(told.numpy()), values)
    return _Told("round", *_compact(draw.numpy()), values)


def _expected_bits(state: Mask, draw: Tensor) -> dict[str, float]:
    return estimate.place_bits(np.bincount(draw.numpy(), minlength=1), tuple(state.history))


def _compact(numbers: coding.Symbols) -> tuple[coding.Symbols, dict[int, int]]:
    """Each number as a position among those that occur, and how often each of those does."""
    counts = np.bincount(numbers)
    present = np.flatnonzero(counts)
    symbol: coding.Symbols = np.zeros(len(counts), dtype=np.uint32)
    if len(present) <= 256:
        symbol = symbol.astype(np.uint8)
    symbol[present] = np.arange(len(present))
    return symbol[numbers], dict(zip(present.tolist(), counts[present].tolist()))


def _at(tensor: Tensor, index: Tensor) -> Tensor:
    return tensor.to("cpu").reshape(-1)[index]


def _check_weights(name: str, weight: Tensor, values: Tensor) -> None:
    given = values.to(weight.dtype)
    if not _same(given, weight):
        first = int((_bits(given) != _bits(weight)).nonzero()[0])
        raise ValueError(
            f"the kept weights of {name!r} are not the ones its seed and draws give (the first that differs is "
            f"{weight[first].item():g}, drawn was {given[first].item():g}); a ticket holds random weights only: keep "
            "trained ones with torch.save"
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(_bits(a), _bits(b))


def _bits(weight: Tensor) -> Tensor:
    return weight.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[weight.itemsize])
