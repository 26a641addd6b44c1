"""What a ticket costs: bytes and bits a weight, beside float32 and beside the least there could be."""

import math
from dataclasses import dataclass

from iterand.summarizing import entropy
from iterand.ticket.read import Ticket


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
    bits: float
    """The entropy of mask and kept weights under their measured frequencies."""

    @property
    def weights(self) -> int:
        """How many there are."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Cost:
    """What a ticket costs, in bytes."""

    layers: tuple[LayerCost, ...]
    file: int
    stream: int
    """The masks and kept weights of all layers, coded."""
    other_tensors: int
    """Batch-norm statistics and the like."""
    header: int
    """Everything else: names, settings, counts, recipe, checksum."""
    float32: int
    """Its tensors in float32: a state dict as usually saved."""
    bound: float
    """The least there could be: entropy of masks and kept weights, and the other tensors as they are stored."""


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
