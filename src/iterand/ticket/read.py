"""Open a ticket (``read_ticket``): header, masks, draws, weights and other tensors, decoded when first used."""

import hashlib
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from iterand import distributions, existing, memory
from iterand.checks import check_path
from iterand.errors import TicketError
from iterand.settings import draw_weights
from iterand.ticket import codec, draws, format, resume
from iterand.ticket.header import Header, LayerHeader, from_json

# Limit on the elements a ticket describes: a constant, plus a multiple of the file size. It bounds the memory and time
# that an untrusted file can take.
_ELEMENTS_ALLOWANCE = 1 << 22
_ELEMENTS_PER_BYTE = 1 << 14


@dataclass(frozen=True)
class Ticket:
    """The content of a ticket."""

    header: Header
    layers: dict[str, "TicketLayer"]
    """The masked tensors by name: ``header`` with the settings, ``mask``, ``draws()``, ``levels()``, ``weight()``."""
    stored: dict[str, Tensor]
    """The other tensors in their stored dtype."""
    size: int
    """File size in bytes."""
    stream: "Stream"
    """The coded masks and kept weights of all layers."""

    @property
    def recipe(self) -> dict[str, Any] | None:
        """How the network was made, as given to ``save_ticket``."""
        return self.header.recipe

    @property
    def base(self) -> str | None:
        """The name of the base, if it is a ticket on existing weights: it holds masks, and not these weights."""
        return self.header.base

    @property
    def metrics(self) -> dict[str, Any] | None:
        """Results such as the accuracy, as given to ``save_ticket``."""
        return self.header.metrics

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """dtype and shape of every tensor of the unmasked model."""
        return {name: (format.DTYPES[dtype], shape) for name, (dtype, shape) in self.header.shapes().items()}

    def state_dict(self, base: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
        """The state dict of the unmasked model. Tied tensors are one tensor under several names.

        A ticket on existing weights needs ``base``, a state dict with these weights.
        """
        if self.base is not None:
            self.check_base(base)
        needed = sum(dtype.itemsize * math.prod(shape) for dtype, shape in self.shapes().values())
        memory.require(needed, "the network of this ticket", "free some, or use a machine with more")
        state: dict[str, Tensor] = {}
        digest = hashlib.sha256()
        for name, layer in self.layers.items():
            state[name] = layer.weight(digest, None if base is None else base.get(name))
        self._check_weights(digest)
        state |= self.other_tensors()
        if base is not None:
            state |= {name: base[name] for name in self.header.base_tensors}
        return state | {name: state[described] for name, described in self.header.aliases.items()}

    def decode_layers(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """The masks of the layers whose weights are those of the base, and the masked weights of the other layers."""
        masks: dict[str, Tensor] = {}
        weights: dict[str, Tensor] = {}
        digest = hashlib.sha256()
        for name, layer in self.layers.items():
            if layer.header.stored == "base":
                masks[name] = layer.mask
                draws.update(digest, *layer.symbols, torch.empty(0, device="cpu"))
            else:
                weights[name] = layer.weight(digest)
        self._check_weights(digest)
        return masks, weights

    def _check_weights(self, digest: "hashlib._Hash") -> None:
        """Refuse masks and weights that are not the ones that were saved."""
        if self.header.weights_sha256 != digest.hexdigest():
            names = {layer.settings.weight_distribution for layer in self.header.layers}
            raise TicketError(
                "the weights it gives here are not the ones that were saved; are the distributions "
                f"{', '.join(map(repr, sorted(names)))} the same as there?"
            )

    def check_base(self, base: Mapping[str, Tensor] | None, digest: Callable[[str], str] | None = None) -> None:
        """Refuse a state dict that does not have the weights of the base; ``digest`` gives the digest of a tensor."""
        if base is None:
            raise TicketError(
                f"it is a mask on the weights of {self.base!r}, which it does not hold; load it into a model that has "
                "them"
            )
        expected = {layer.name: layer.digest for layer in self.header.layers if layer.stored == "base"}
        expected |= {name: tensor.digest for name, tensor in self.header.base_tensors.items()}
        for name in expected:
            if name not in base:
                raise TicketError(f"the base has no tensor {name!r}; is it a ticket on another model?")
            if base[name].is_meta:
                raise TicketError(f"{name!r} of the base is on the meta device, without weights; load them first")
        find = digest or (lambda name: existing.digest(base[name]))
        others = [name for name, wanted in expected.items() if find(name) != wanted]
        if others:
            more = f" (and {len(others) - 1} more)" if len(others) > 1 else ""
            raise TicketError(
                f"{others[0]!r}{more} of the model differs from the base {self.base!r} that it was saved on; load "
                "these weights first, or switch between tickets with TaskSet"
            )

    def other_tensors(self) -> dict[str, Tensor]:
        """The tensors that are stored and not masked, in the dtype of the model."""
        header = self.header
        tensors = {name: tensor.to(format.DTYPES[header.tensors[name].dtype]) for name, tensor in self.stored.items()}
        return tensors | {name: format.full(*filled) for name, filled in header.filled.items()}

    def resume_(self, model: nn.Module) -> None:
        """Resume the search from a ticket, on a model masked with the same ``prune_`` arguments.

        Mask, kept weights, rounds and batch-norm statistics come from the ticket. If the model has a higher sparsity,
        its mask is a subset of the ticket's. Where a schedule was still raising the sparsity, the model keeps as many
        weights as the ticket, until a schedule or ``set_sparsity_`` changes that.

        A ticket contains neither scores nor pruned weights: kept weights get the highest of the model's initial scores,
        and pruned weights their initial values.
        """
        resume.resume_(model, self.layers, self.other_tensors())

    def hold_zeros_(self, model: nn.Module) -> list[RemovableHandle]:
        """Keep the pruned weights of an unmasked model at zero while an optimizer trains the others.

        Hooks set their gradients to zero, so the optimizer must update each weight by its own gradients, as SGD and
        AdamW do; Muon mixes those of a matrix. A copy of the model has no hooks: call this again for it. Call
        ``remove()`` on the returned handles to train all weights again.
        """
        return resume.hold_zeros_(model, self.layers)


class Stream:
    """The coded masks and kept weights of all layers. All are decoded at the first access."""

    def __init__(self, data: bytes, layers: Sequence[LayerHeader]) -> None:
        self.data = data
        self._models = [model for layer in layers for model in (layer.mask_model, layer.value_model)]
        multiplied = [layer.multiplier_model for layer in layers]
        self.multipliers = {number: len(self._models) + place for place, number in enumerate(
            number for number, model in enumerate(multiplied) if model is not None
        )}  # fmt: skip
        """The number of the sequence of multipliers, by that of the layer."""
        self._models += [model for model in multiplied if model is not None]

    @cached_property
    def symbols(self) -> list[codec.Symbols]:
        """The coded symbols: mask and kept weights of the first layer, of the second, and so on; then multipliers."""
        try:
            return codec.decode(self.data, self._models)
        except ValueError as error:
            raise TicketError(f"its coded stream cannot be read: {error}") from None


@dataclass(frozen=True)
class TicketLayer:
    """One masked tensor, decoded when first used."""

    header: LayerHeader
    stream: Stream
    number: int
    """Index of the layer in the ticket."""

    @property
    def mask(self) -> Tensor:
        """m: true where the weight is kept."""
        model = self.header.mask_model
        if model.alphabet < 2:
            return torch.full(self.header.shape, self.header.kept > 0, device="cpu")
        return torch.from_numpy(self._join("mask", model, 2 * self.number).view(np.bool_)).view(self.header.shape)

    def levels(self) -> Tensor | None:
        """The level of every kept weight, in index order. None if the ticket stores draws."""
        return self._stored_values() if self.header.stored == "level" else None

    def draws(self, mask: Tensor | None = None) -> Tensor | None:
        """The draw of every kept weight, in index order. None if the ticket stores levels."""
        if self.header.stored == "level":
            return None
        stored = self._stored_values()
        if self.header.stored == "round":
            return stored
        redrawn = stored.nonzero().squeeze(1)
        index = draws.kept_indices(self.mask if mask is None else mask)[redrawn]
        latest = self.header.stored == "latest"
        found = draws.draws(index, stored[redrawn], self.header.settings.key, self.header.history, latest=latest)
        if not found.all():
            raise TicketError(f"layer {self.header.name!r} holds a draw of a round in which the weight was not redrawn")
        stored[redrawn] = found
        return stored

    def values(self, mask: Tensor | None = None) -> Tensor:
        """The kept weights in index order, float32, times what they are multiplied by."""
        if self.header.stored == "level":
            return self._lookup(self._level_weights())
        if self.header.stored == "base":
            raise TicketError(f"layer {self.header.name!r} is a mask on weights of a base, which it does not hold")
        mask = self.mask if mask is None else mask
        draw, index = cast(Tensor, self.draws(mask)), draws.kept_indices(mask)
        drawn = draw_weights(self.header.settings, self._distribution(), index, draw, self.header.size)
        multipliers = self.multipliers()
        return drawn if multipliers is None else drawn.to(format.DTYPES[self.header.dtype]).float() * multipliers

    def multipliers(self) -> Tensor | None:
        """What each kept weight is multiplied by, in index order. None if the ticket stores levels, or all are 1."""
        model = self.header.multiplier_model
        if model is None:
            return None
        values = np.array([value for value, _ in self.header.multipliers], dtype=np.int8)
        return torch.from_numpy(values.take(self._join("multipliers", model, self.stream.multipliers[self.number])))

    def weight(self, digest: "hashlib._Hash | None" = None, base: Tensor | None = None) -> Tensor:
        """θ ⊙ m in the dtype of the model. Adds the symbols and the weights to ``digest``.

        ``base`` are the weights θ, if the ticket does not hold them.
        """
        mask = self.mask
        if self.header.stored == "base" and base is not None:
            if digest is not None:
                draws.update(digest, *self.symbols, torch.empty(0, device="cpu"))
            return torch.where(mask, base.detach().to("cpu"), 0.0)
        values = self.values(mask)
        if digest is not None:
            weights = torch.from_numpy(self._level_weights()) if self.header.stored == "level" else values
            draws.update(digest, *self.symbols, weights)
        dense = torch.zeros(self.header.size, dtype=torch.float32, device="cpu")
        dense.index_copy_(0, draws.kept_indices(mask), values)
        return dense.view(self.header.shape).to(format.DTYPES[self.header.dtype])

    @property
    def symbols(self) -> tuple[codec.Symbols, codec.Symbols]:
        """The coded symbols of mask and kept weights."""
        return self.stream.symbols[2 * self.number], self.stream.symbols[2 * self.number + 1]

    def _distribution(self) -> distributions.Distribution:
        header = self.header
        try:
            distribution = distributions.get_distribution(header.settings.weight_distribution)
        except ValueError as error:
            raise TicketError(f"layer {header.name!r}: {error}; register_distribution an own one first") from None
        if header.settings.unit32(distribution) != header.unit:
            raise TicketError(
                f"layer {header.name!r} was drawn from a {distribution.name!r} of unit {header.unit}; the one "
                f"registered here has {header.settings.unit32(distribution)}"
            )
        return distribution

    def _level_weights(self) -> NDArray[np.float32]:
        """The weight of each level in ``header.counts``."""
        return np.array([level for level, _ in self.header.counts], dtype=np.float32) * np.float32(self.header.unit)

    def _stored_values(self) -> Tensor:
        """The level, round or ordinal of every kept weight."""
        return self._lookup(np.array([value for value, _ in self.header.counts], dtype=np.int64))

    def _lookup(self, values: NDArray[Any]) -> Tensor:
        """``values[symbol]`` for every kept weight."""
        if not self.header.kept:
            return torch.from_numpy(values)
        sequence = self._join("kept weights", self.header.value_model, 2 * self.number + 1)
        return torch.from_numpy(values.take(sequence))

    def _join(self, what: str, model: codec.Model, sequence: int) -> codec.Symbols:
        """A sequence of the stream by its number."""
        try:
            return model.join(self.stream.symbols[sequence])
        except ValueError as error:
            raise TicketError(f"the {what} of layer {self.header.name!r} cannot be read: {error}") from None


def read_ticket(path: str | os.PathLike[str]) -> Ticket:
    """Open a ticket. Checks checksum, structure and limits; masks and weights are decoded when first used.

    A file that is no ticket, or damaged, raises ``TicketError``; a missing one ``FileNotFoundError``.
    """
    check_path("path", path)
    try:
        if Path(path).is_dir():
            raise TicketError("this is a folder; that of a run holds its ticket as model.ticket")
        if Path(path).exists() and not Path(path).is_file():
            raise TicketError("this is no regular file")
        return parse(Path(path).read_bytes())
    except TicketError as error:
        raise TicketError(f"ticket {str(path)!r}: {error}") from None


def parse(data: bytes) -> Ticket:
    """Open a ticket from its bytes."""
    loaded, body = format.unpack(data)
    header = from_json(loaded, len(data))
    _check_limits(header, len(data))
    described = [(tensor.saved_as, tensor.shape) for tensor in header.tensors.values()]
    tensors, coded = format.unpack_tensors(body, described, header.planes)
    stream = Stream(coded, header.layers)
    layers = {layer.name: TicketLayer(layer, stream, number) for number, layer in enumerate(header.layers)}
    return Ticket(header, layers, dict(zip(header.tensors, tensors)), len(data), stream)


def _check_limits(header: Header, size: int) -> None:
    """Refuse a file that would take far more memory or time than its size suggests."""
    elements = sum(math.prod(shape) for name, (_, shape) in header.shapes().items() if not header.is_of_base(name))
    allowed = _ELEMENTS_ALLOWANCE + _ELEMENTS_PER_BYTE * size
    if elements > allowed:
        raise TicketError(f"it describes {elements} elements in {size} bytes; the limit is {allowed}")
    coins = sum(layer.coins for layer in header.layers)
    if coins > draws.allowed_coins(size):
        limit = draws.allowed_coins(size)
        raise TicketError(f"its draws need up to {coins} coins to be tossed; the limit for its size is {limit}")
