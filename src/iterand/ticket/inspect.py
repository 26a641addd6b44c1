"""Size of a ticket by part, compared with float32 and with the entropy bound."""

import math
from dataclasses import dataclass

from iterand.summarizing import entropy
from iterand.ticket.read import Ticket


@dataclass(frozen=True)
class LayerCost:
    """Size of one masked tensor."""

    name: str
    shape: tuple[int, ...]
    kept: int
    rounds: int
    """R: number of randomization rounds."""
    redrawn: int | None
    """Number of kept weights that were redrawn. None if the ticket stores levels."""
    stored: str
    bits: float
    """The entropy of mask and kept weights under their measured frequencies."""

    @property
    def weights(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Cost:
    """Size of a ticket, in bytes."""

    layers: tuple[LayerCost, ...]
    file: int
    stream: int
    """Coded masks and kept weights of all layers."""
    other_tensors: int
    """Batch-norm statistics and the like."""
    header: int
    """Everything else: names, settings, counts, recipe, checksum."""
    float32: int
    """All tensors in float32, as in a saved state dict."""
    bound: float
    """Lower bound: entropy of masks and kept weights, plus the other tensors as stored."""


def cost(ticket: Ticket) -> Cost:
    """Compute the size of each part of a ticket."""
    layers = tuple(
        LayerCost(
            name=layer.header.name,
            shape=layer.header.shape,
            kept=layer.header.kept,
            rounds=layer.header.rounds,
            redrawn=layer.header.redrawn,
            stored=layer.header.stored,
            bits=entropy(layer.header.mask_model.counts) + entropy(layer.header.value_model.counts),
        )
        for layer in ticket.layers.values()
    )
    stream, other = len(ticket.stream.data), sum(ticket.header.planes)
    shapes = ticket.shapes()
    elements = sum(math.prod(shape) for name, (_, shape) in shapes.items() if name not in ticket.header.aliases)
    return Cost(
        layers=layers,
        file=ticket.size,
        stream=stream,
        other_tensors=other,
        header=ticket.size - stream - other,
        float32=4 * elements,
        bound=sum(layer.bits for layer in layers) / 8 + other,
    )
