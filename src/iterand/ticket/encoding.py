"""Masked tensors into a ticket: what tells their kept weights, checked against them, and the coded stream."""

import hashlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iterand.masking import MaskedLayer
from iterand.parametrization import Mask, calculate_masks
from iterand.ticket import codec, draws, format
from iterand.ticket.draws import History
from iterand.ticket.header import LayerHeader

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
        return codec.entropy(list(self.counts.values()))


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
    mask_bits = sum(codec.entropy([mask.numel() - len(index), len(index)]) for mask, index in zip(masks, indices))
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


def _by_level(state: Mask, weight: Bits, dtype: torch.dtype) -> _Told | None:
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


def _by_draw(state: Mask, index: Tensor, numbers: Bits, by_place: bool) -> _Told:
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


def _expected_bits(state: Mask, draw: Bits) -> dict[str, float]:
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
