"""What a ticket costs: bytes and bits a weight, beside float32 and beside the least there could be."""

import math
from dataclasses import dataclass

from iterand.ticket import coding
from iterand.ticket.header import LayerHeader
from iterand.ticket.layers import mask_counts
from iterand.ticket.reading import Ticket


@dataclass(frozen=True)
class LayerCost:
    """What one masked tensor costs."""

    name: str
    shape: tuple[int, ...]
    kept: int
    rounds: int
    """R: how often its pruned weights were randomized."""
    redrawn: int | None
    """How many kept weights are not the initial ones; None if the ticket holds levels, which do not tell."""
    stored: str
    bits: int
    """Of its streams."""
    bound: float
    """Bits: the entropy of mask and kept weights under their measured frequencies."""

    @property
    def weights(self) -> int:
        """How many there are."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Cost:
    """What a ticket costs, in bytes."""

    layers: tuple[LayerCost, ...]
    file: int
    streams: int
    other_tensors: int
    """Batch-norm statistics and the like."""
    header: int
    """Everything that is not stream or tensor: names, settings, counts, recipe."""
    float32: int
    """Its tensors in float32: a state dict as usually saved."""
    bound: float
    """The least there could be: entropy of masks and kept weights, and the other tensors as they are stored."""


def entropy_bound(layer: LayerHeader) -> float:
    """Bits: the entropy of the mask and of what tells the kept weights, under their measured frequencies."""
    return coding.entropy(mask_counts(layer.size, layer.kept)) + coding.entropy([count for _, count in layer.counts])


def cost(ticket: Ticket) -> Cost:
    """What this ticket costs."""
    layers = tuple(
        LayerCost(
            name=layer.header.name,
            shape=layer.header.shape,
            kept=layer.header.kept,
            rounds=layer.header.rounds,
            redrawn=layer.header.redrawn,
            stored=layer.header.stored,
            bits=8 * (len(layer.mask_stream) + len(layer.value_stream)),
            bound=entropy_bound(layer.header),
        )
        for layer in ticket.layers.values()
    )
    streams = sum(layer.bits for layer in layers) // 8
    other = sum(tensor.nbytes for tensor in ticket.stored.values())
    shapes = ticket.shapes()
    elements = sum(math.prod(shape) for name, (_, shape) in shapes.items() if name not in ticket.header.aliases)
    return Cost(
        layers=layers,
        file=ticket.size,
        streams=streams,
        other_tensors=other,
        header=ticket.size - streams - other,
        float32=4 * elements,
        bound=sum(layer.bound for layer in layers) / 8 + other,
    )
