"""One masked tensor in a ticket: from its streams back to mask, draws and weights."""

import hashlib
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from iterand import distributions, philox
from iterand.errors import TicketError
from iterand.parametrization import Settings
from iterand.ticket import coding, container, draws
from iterand.ticket.header import LayerHeader


@dataclass(frozen=True)
class TicketLayer:
    """One masked tensor; nothing is decoded before it is asked for."""

    header: LayerHeader
    mask_stream: bytes
    value_stream: bytes

    def mask(self) -> Tensor:
        """m: true where the weight is kept."""
        size, kept = self.header.size, self.header.kept
        values = np.array([False, True] if 0 < kept < size else [kept > 0])
        flat = self._decoded("mask", self.mask_stream, mask_counts(size, kept), values)
        return torch.from_numpy(flat).view(self.header.shape)

    def levels(self) -> Tensor | None:
        """The level of every kept weight in the order of their indices, if that is what the ticket holds."""
        return self._told() if self.header.stored == "level" else None

    def draws(self, mask: Tensor | None = None) -> Tensor | None:
        """The draw of every kept weight in the order of their indices, unless the ticket holds levels."""
        if self.header.stored == "level":
            return None
        told = self._told()
        if self.header.stored == "round":
            return told
        redrawn = told.nonzero().squeeze(1)
        index = kept_indices(self.mask() if mask is None else mask)[redrawn]
        latest = self.header.stored == "latest"
        found = draws.draws(index, told[redrawn], self._key, self.header.history, latest=latest)
        if not found.all():
            raise TicketError(
                f"layer {self.header.name!r} holds a draw of a round in which the weight's coin stayed up"
            )
        told[redrawn] = found
        return told

    def values(self, mask: Tensor | None = None) -> Tensor:
        """The kept weights in the order of their indices, float32."""
        if self.header.stored == "level":
            levels = torch.tensor([level for level, _ in self.header.counts], dtype=torch.float32)
            return self._streamed((levels * self.header.unit).numpy())
        mask = self.mask() if mask is None else mask
        draw = cast(Tensor, self.draws(mask))
        return drawn(self.header.settings, self._distribution(), kept_indices(mask), draw)

    def weight(self, digest: "hashlib._Hash | None" = None) -> Tensor:
        """θ ⊙ m in the type of the model; what it is made of goes to the digest."""
        mask = self.mask()
        values = self.values(mask)
        if digest is not None:
            update(digest, mask, values)
        dense = torch.zeros(self.header.size)
        dense[kept_indices(mask)] = values
        return dense.view(self.header.shape).to(container.DTYPES[self.header.dtype])

    @property
    def _key(self) -> philox.Key:
        return philox.key(self.header.settings.seed, self.header.settings.name)

    def _distribution(self) -> distributions.Distribution:
        header = self.header
        try:
            distribution = distributions.get_distribution(header.settings.weight_distribution)
        except ValueError as error:
            raise TicketError(f"layer {header.name!r}: {error}; register_distribution an own one first") from None
        if distribution.unit32(header.settings.fan_in) != header.unit:
            raise TicketError(
                f"layer {header.name!r} was drawn from a {distribution.name!r} of unit {header.unit}; the one "
                f"registered here has {distribution.unit32(header.settings.fan_in)}"
            )
        return distribution

    def _told(self) -> Tensor:
        return self._streamed(np.array([value for value, _ in self.header.counts], dtype=np.int64))

    def _streamed(self, values: NDArray[coding.Value]) -> Tensor:
        counts = [count for _, count in self.header.counts]
        return torch.from_numpy(self._decoded("value", self.value_stream, counts, values))

    def _decoded(
        self, what: str, stream: bytes, counts: list[int], values: NDArray[coding.Value]
    ) -> NDArray[coding.Value]:
        try:
            return coding.decode(stream, counts, values)
        except ValueError as error:
            raise TicketError(f"the {what} stream of layer {self.header.name!r} cannot be read: {error}") from None


def update(digest: "hashlib._Hash", mask: Tensor, values: Tensor) -> None:
    """Take a layer into the digest: its mask, eight weights a byte, then the kept weights as float32."""
    digest.update(np.packbits(mask.numpy()).data)
    digest.update(values.numpy().astype("<f4", copy=False).data)


def kept_indices(mask: Tensor) -> Tensor:
    """The indices of the kept weights, ascending."""
    return torch.from_numpy(np.flatnonzero(mask.numpy()))  # several times faster than torch's own


def mask_counts(size: int, kept: int) -> list[int]:
    """How many weights are pruned and kept; one number if it is all of them."""
    return [count for count in (size - kept, kept) if count]


def drawn(settings: Settings, distribution: distributions.Distribution, index: Tensor, draw: Tensor) -> Tensor:
    """The weights at these indices in these draws, float32."""
    key = philox.key(settings.seed, settings.name)
    values = torch.empty(len(index))
    for part in philox.chunks(len(index)):
        values[part] = distribution.values(philox.philox(index[part], draw[part], key), settings.fan_in)
    return values
