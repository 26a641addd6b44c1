"""Summary of a masked model: kept and redrawn weights and entropy in bits, per layer; and what is not masked."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from iterand.checks import counted
from iterand.freezing import is_frozen
from iterand.masking import masked_weights
from iterand.parameter_kinds import is_layer_scale, list_tensors
from iterand.parametrization import calculate_multipliers
from iterand.surgery import MaskedLayer, require_masked_layers, unwrap


@dataclass(frozen=True)
class LayerSummary:
    """Summary of one masked tensor."""

    name: str
    shape: tuple[int, ...]
    total: int
    kept: int
    redrawn: int
    """Number of kept weights that were redrawn."""
    bits: float
    """Entropy of mask and kept weights: about the smallest size in a ticket."""


@dataclass(frozen=True)
class UnmaskedParameter:
    """A parameter without a mask."""

    name: str
    shape: tuple[int, ...]
    frozen: bool
    """Whether ``prune_`` froze it: a bias, a norm or a layer scale, or anything beside existing weights."""
    layer_scale: bool
    """Whether it is a layer scale, frozen at one."""


@dataclass(frozen=True)
class Summary:
    """Summary of all masked tensors of a model, and of its other parameters. ``print`` shows a table."""

    layers: tuple[LayerSummary, ...]
    rounds: int
    """R: number of randomization rounds so far."""
    unmasked: tuple[UnmaskedParameter, ...] = ()
    """The parameters without a mask."""

    @property
    def total(self) -> int:
        """Number of weights."""
        return sum(layer.total for layer in self.layers)

    @property
    def kept(self) -> int:
        """Number of kept weights."""
        return sum(layer.kept for layer in self.layers)

    @property
    def bits(self) -> float:
        """Entropy of all layers in bits: about what a ticket needs for them."""
        return sum(layer.bits for layer in self.layers)

    @property
    def left_alone(self) -> int:
        """Number of parameters that are neither masked nor frozen."""
        return sum(math.prod(one.shape) for one in self.unmasked if not one.frozen)

    @property
    def masked_share(self) -> float:
        """The share of the parameters in matrices (of two axes or more) that are masked."""
        masked = sum(layer.total for layer in self.layers if len(layer.shape) > 1)
        others = sum(math.prod(one.shape) for one in self.unmasked if len(one.shape) > 1)
        return masked / max(masked + others, 1)

    def to_dict(self) -> dict[str, Any]:
        """The summary as a JSON-serializable dict."""
        totals = {"total": self.total, "kept": self.kept, "bits": self.bits}
        return asdict(self) | totals | {"left_alone": self.left_alone, "masked_share": self.masked_share}

    def __str__(self) -> str:
        whole = LayerSummary("all", (), self.total, self.kept, sum(one.redrawn for one in self.layers), self.bits)
        rows = [("layer", "shape", "kept / total", "kept", "redrawn", "bits per weight")]
        for layer in (*self.layers, whole):
            rows.append(
                (
                    layer.name,
                    "×".join(map(str, layer.shape)),
                    f"{layer.kept:,} / {layer.total:,}",
                    f"{100 * layer.kept / layer.total:.1f} %",
                    f"{100 * layer.redrawn / max(layer.kept, 1):.1f} %",
                    f"{layer.bits / layer.total:.2f}",
                )
            )
        widths = [max(map(len, column)) for column in zip(*rows)]
        lines = ["  ".join(_pad(cell, width, i) for i, (cell, width) in enumerate(zip(row, widths))) for row in rows]
        rounds = f"{counted(self.rounds, 'round')} of randomization"
        sizes = f"about {self.bits / 8e3:,.1f} kB in a ticket, {self.total / 250:,.1f} kB as float32"
        ending = f"{rounds}; masked weights: {sizes}"
        return "\n".join([*lines[:-1], "-" * len(lines[0]), lines[-1], ending, *self._notes()])

    def _notes(self) -> list[str]:
        """What a reader would not expect of the other parameters."""
        scales = {one.name: one.shape for one in self.unmasked if one.frozen and one.layer_scale}
        free = {one.name: one.shape for one in self.unmasked if not one.frozen}
        notes = [f"layer scales, frozen at one: {list_tensors(scales)}"] if scales else []
        if free:
            share = f"{100 * self.masked_share:.1f} % of the parameters in matrices are masked"
            notes.append(f"neither masked nor frozen: {list_tensors(free)}; {share}")
        return notes


def summary(model: nn.Module) -> Summary:
    """Summarize the masked layers of a model."""
    layers = list(require_masked_layers(model).values())
    states = [layer.parametrization for layer in layers]
    if states[0].score.is_meta:
        raise ValueError("the model is on the meta device, so there is nothing to count; load its state first")
    for state in states:
        state.follow_source_()
    masks = [state.clear_padding_(mask) for state, mask in zip(states, calculate_multipliers(states))]
    summaries = tuple(_summarize(layer, mask) for layer, mask in zip(layers, masks))
    rounds = max(state.rounds for state in states)
    return Summary(summaries, rounds, tuple(_unmasked(unwrap(model), layers)))


def _unmasked(root: nn.Module, layers: list[MaskedLayer]) -> list[UnmaskedParameter]:
    """The parameters of a model that are not masked. A tied one has its first name, and is frozen if any is."""
    masked = {id(parameter) for layer in layers for parameter in (layer.weight, layer.score)}
    existing = any(layer.parametrization.is_existing for layer in layers)  # then nothing is frozen at one
    found: dict[int, UnmaskedParameter] = {}
    for path, module in root.named_modules():
        for attribute, parameter in module._parameters.items():
            if parameter is not None and id(parameter) not in masked:
                name = f"{path}.{attribute}" if path else attribute
                first = found.get(id(parameter), UnmaskedParameter(name, tuple(parameter.shape), False, False))
                if is_frozen(module, attribute):
                    scale = not existing and is_layer_scale(path, module, attribute)
                    first = replace(first, frozen=True, layer_scale=scale)
                found[id(parameter)] = first
    return list(found.values())


def _summarize(layer: MaskedLayer, multipliers: Tensor) -> LayerSummary:
    state, mask = layer.parametrization, multipliers != 0
    total, kept = mask.numel(), int(mask.sum())
    draws = layer.draw[mask]
    of_weights = _entropy_of(draws) + _entropy_of(multipliers[mask])
    support = None if state.is_existing else state.distribution.support
    if not state.is_standard and (support is not None or state.settings.binarize):
        of_weights = _entropy_of(masked_weights([layer])[0][mask])  # few values, so these are stored
    elif support is not None:
        of_weights = min(of_weights, kept * math.log2(len(support)))
    bits = entropy([kept, total - kept]) + of_weights
    return LayerSummary(layer.name, tuple(mask.shape), total, kept, int((draws > 0).sum()), bits)


def _entropy_of(values: Tensor) -> float:
    return entropy(torch.unique(values, return_counts=True)[1].tolist())


def entropy(counts: ArrayLike) -> float:
    """Entropy in bits of a sequence with these symbol counts: −Σ n log2(n / N)."""
    counted = np.array(counts, dtype=np.float64)
    counted = counted[counted > 0]
    return abs(float((counted * np.log2(counted / counted.sum())).sum()))


def _pad(cell: str, width: int, column: int) -> str:
    return cell.ljust(width) if column < 2 else cell.rjust(width)
