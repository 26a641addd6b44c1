"""Encode masks and kept weights (``encode_layers``).

A kept weight is stored as its level or as its draw, whichever takes fewer bits.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iterand import existing, mask_kinds
from iterand.backend.reference import bit_patterns
from iterand.masking import masked_weight
from iterand.parametrization import MaskedParametrization, calculate_multipliers
from iterand.settings import draw_weights
from iterand.summarizing import entropy
from iterand.surgery import MaskedLayer
from iterand.ticket import codec, draws, format
from iterand.ticket.draws import History
from iterand.ticket.header import LayerHeader

Bits = NDArray[np.integer[Any]]

# Draws replace levels, where that is smaller, only if a reader finds them with this many calls of the generator: about
# a second. They save only a few percent of a file.
_MAX_GENERATOR_CALLS = 1 << 24
_MAX_LEVELS = 256  # with a larger support, draws take fewer bits than levels


@dataclass(frozen=True)
class _Masked:
    """What a mask makes of one layer, on the host: everything that is to be stored."""

    layer: MaskedLayer
    index: Tensor
    """Of the kept weights."""
    draw: Bits
    """Of the kept weights."""
    multipliers: NDArray[np.int8]
    """Of the kept weights, if they are multiplied by other numbers than 1."""
    masked: Tensor
    """The kept weights times their multipliers, in the dtype of the layer."""
    unit: float

    @property
    def state(self) -> MaskedParametrization:
        """Settings and history."""
        return self.layer.parametrization


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


def holds_rounds(state: MaskedParametrization, rounds: int) -> bool:
    """Whether a ticket can hold the kept weights of a layer after this many rounds, whichever they are."""
    few = 0 < len(state.settings.levels(state.distribution.support)) <= _MAX_LEVELS
    return few or min(rounds + 1, state.score.numel()) <= codec.MAX_ALPHABET


def encode_layers(layers: Mapping[str, MaskedLayer]) -> Encoded:
    """Encode masks and kept weights: the header of each layer, one SHA-256 and one coded stream."""
    for layer in layers.values():
        layer.parametrization.follow_source_()
    found = _mask_layers(list(layers.values()))
    coins = sum(int(np.count_nonzero(one.draw)) * one.state.rounds for one in found)
    sizes = [(one.layer.score.numel(), len(one.index)) for one in found]
    mask_bits = sum(entropy([size - kept, kept]) for size, kept in sizes)
    as_ordinals = coins <= draws.allowed_coins(int(mask_bits) // 8)  # the masks alone take this many bytes
    affordable = sum(kept for _, kept in sizes) + coins <= _MAX_GENERATOR_CALLS
    headers, sequences, models = [], [], []
    factors, factor_models = [], []
    digest = hashlib.sha256()
    for one in found:
        kept = _stored_symbols(one, as_ordinals=as_ordinals, affordable=affordable)
        multiplied = kept.stored != "level" and mask_kinds.has_multipliers(one.state.settings.mask)
        header = _header(one, kept, multiplied)
        headers.append(header)
        mask = np.zeros(header.size, np.uint8)
        mask[one.index.numpy()] = 1
        mask_symbols = header.mask_model.cut(mask)
        value_symbols = header.value_model.cut(kept.symbols)
        weights = kept.weights
        if header.multiplier_model is not None:
            present = np.array([value for value, _ in header.multipliers])
            factors.append(header.multiplier_model.cut(np.searchsorted(present, one.multipliers).astype(np.uint8)))
            factor_models.append(header.multiplier_model)
            weights = weights.to(one.layer.weight.dtype).float() * torch.from_numpy(one.multipliers)
        draws.update(digest, mask_symbols, value_symbols, weights)
        sequences += [mask_symbols, value_symbols]
        models += [header.mask_model, header.value_model]
    stream = codec.encode([*sequences, *factors], [*models, *factor_models])
    return Encoded(headers, digest.hexdigest(), stream)


def _mask_layers(layers: Sequence[MaskedLayer]) -> list[_Masked]:
    states = [layer.parametrization for layer in layers]
    found = []
    for layer, state, multipliers in zip(layers, states, calculate_multipliers(states)):
        masked = layer.weight if state.is_standard else masked_weight(layer, multipliers)  # equal where it is kept
        index = draws.kept_indices((state.clear_padding_(multipliers) != 0).to("cpu"))
        if state.is_existing:
            unit = 0.0
        elif state.settings.binarize:
            unit = float(mask_kinds.mean_magnitude(layer.weight, multipliers != 0, state.unit))
        else:
            unit = state.unit
        kept = torch.from_numpy(_take(bit_patterns(masked), index)).view(masked.dtype)
        multiplied = mask_kinds.has_multipliers(state.settings.mask)
        taken = cast(NDArray[np.int8], _take(multipliers, index)) if multiplied else np.ones(0, np.int8)
        found.append(_Masked(layer, index, _take(layer.draw, index).astype(np.int32), taken, kept, unit))
    return found


def _header(one: _Masked, kept: _KeptWeights, multiplied: bool) -> LayerHeader:
    layer, state = one.layer, one.state
    if len(kept.counts) > codec.MAX_ALPHABET:
        raise ValueError(
            f"{layer.name!r} holds {len(kept.counts)} different draws; a ticket holds {codec.MAX_ALPHABET}: "
            "randomize less often, or fold_ the model and save that"
        )
    values, counts = np.unique(one.multipliers, return_counts=True)
    return LayerHeader(
        name=layer.name,
        shape=tuple(layer.score.shape),
        dtype=format.DTYPE_NAMES[layer.weight.dtype],
        settings=state.settings,
        unit=one.unit,
        history=History(tuple(state.history.runs)),
        stored=kept.stored,
        counts=tuple(kept.counts.items()),
        digest=existing.digest(layer.weight) if state.is_existing else "",
        multipliers=tuple(zip(values.tolist(), counts.tolist())) if multiplied else (),
    )


def _stored_symbols(one: _Masked, *, as_ordinals: bool, affordable: bool) -> _KeptWeights:
    """The smallest encoding of the kept weights. Checks that it reproduces them bit for bit."""
    state, count = one.state, len(one.index)
    if state.is_existing:
        symbols: codec.Symbols = np.zeros(count, dtype=np.uint8)
        return _KeptWeights("base", symbols, {0: count} if count else {}, torch.empty(0, device="cpu"))
    best = _encode_levels(one)
    if best is None and state.settings.binarize:
        raise ValueError(f"the masked weights of {one.layer.name!r} have more than one magnitude; fold_ and save those")
    # Levels are those of masked weights, so with a mask of more than zeros and ones nothing else need be stored.
    by_levels = state.settings.binarize or mask_kinds.has_multipliers(state.settings.mask)
    affordable = affordable and not by_levels
    if best is None or (affordable and min(_expected_bits(state, one.draw).values()) < best.bits):
        by_draw = _encode_draws(one, as_ordinals)
        if best is None:
            _check_weights(one, by_draw.weights)
        best = by_draw if best is None or by_draw.bits < best.bits else best
    return best


def _encode_levels(one: _Masked) -> _KeptWeights | None:
    """Encode each masked weight as its level. None if the support is too large or a weight is not a level."""
    levels = one.state.settings.levels(one.state.distribution.support)
    if not 0 < len(levels) <= _MAX_LEVELS:
        return None
    values = torch.tensor(levels, dtype=torch.float32, device="cpu") * one.unit
    weight = bit_patterns(one.masked).numpy()
    symbols = np.zeros(weight.shape, dtype=np.uint8)
    counts: dict[int, int] = {}
    for level, bits in zip(levels, bit_patterns(values.to(one.masked.dtype)).tolist()):
        equal = weight == bits
        if count := int(np.count_nonzero(equal)):
            if counts:  # the first symbol is 0
                symbols += equal.view(np.uint8) * np.uint8(len(counts))
            counts[level] = count
    if sum(counts.values()) < len(weight):
        return None
    present = torch.tensor([level in counts for level in levels], device="cpu")
    return _KeptWeights("level", symbols, counts, values[present])


def _encode_draws(one: _Masked, as_ordinals: bool) -> _KeptWeights:
    """Encode each weight as its draw: as an ordinal (``iterand.ticket.draws``) or as the round."""
    state, index, numbers = one.state, one.index, one.draw
    draw = torch.from_numpy(numbers).to(torch.int64)
    drawn = draw_weights(state.settings, state.distribution, index, draw, one.layer.score.numel())
    redrawn = draw.nonzero().squeeze(1)
    history = History(tuple(state.history.runs))
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
    return draws.ordinal_bits(np.bincount(draw, minlength=1), History(tuple(state.history.runs)))


def _to_symbols(numbers: Bits) -> tuple[codec.Symbols, dict[int, int]]:
    """Map numbers to symbols 0, 1, … in ascending order. Returns the symbols and number → count."""
    counts = np.bincount(numbers)
    present = np.flatnonzero(counts)
    symbol: codec.Symbols = np.zeros(len(counts), dtype=np.min_scalar_type(max(len(present) - 1, 0)))
    symbol[present] = np.arange(len(present))
    return symbol[numbers], dict(zip(present.tolist(), counts[present].tolist()))


def _check_weights(one: _Masked, drawn: Tensor) -> None:
    """Refuse weights that differ from the drawn ones, for instance trained weights."""
    dtype = one.layer.weight.dtype
    weight = _take(bit_patterns(one.layer.weight.detach()), one.index)
    given = bit_patterns(drawn.to(dtype)).numpy()
    if not np.array_equal(given, weight):
        first = int(np.flatnonzero(given != weight)[0])
        pair = [torch.tensor(bits[first], device="cpu").view(dtype) for bits in (weight, given)]
        # NumPy prints as many digits as tell the two apart.
        held, expected = (one.to(torch.promote_types(dtype, torch.float32)).numpy()[()] for one in pair)
        raise ValueError(
            f"the kept weights of {one.layer.name!r} are not the ones its seed and draws give (the first that differs "
            f"is {held!s}, drawn was {expected!s}); a ticket holds random weights only: keep trained ones with "
            "torch.save"
        )


def _take(tensor: Tensor, index: Tensor) -> Bits:
    """The elements at these flat indices, on the host."""
    found: Bits = tensor.to("cpu").reshape(-1).numpy()[index.numpy()]
    return found
