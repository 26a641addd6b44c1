"""Size of a ticket by part, compared with float32 and with the entropy bound; and the tensors without a mask."""

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


_REAL = ("F64", "F32", "F16", "BF16")
# Statistics of norms, which are no parameters. They are in every ticket of a network with batch norms.
_STATISTICS = ("running_mean", "running_var")


def unmasked(ticket: Ticket) -> tuple[dict[str, tuple[int, ...]], float]:
    """The shapes of the tensors that are stored in full, and the share of matrices that is masked.

    Statistics of norms, integers and constants such as frozen biases are left out. The share is that of the elements
    of tensors with two axes or more.
    """
    header = ticket.header
    real = {name: one.shape for name, one in header.tensors.items() if one.dtype in _REAL}
    stored = {name: shape for name, shape in real.items() if name.rpartition(".")[2] not in _STATISTICS}
    constant = [one.shape for one in header.filled.values() if one.dtype in _REAL]
    masked = sum(layer.size for layer in header.layers if len(layer.shape) > 1)
    of_base = [one.shape for one in header.base_tensors.values() if one.dtype in _REAL]
    others = sum(math.prod(shape) for shape in [*stored.values(), *constant, *of_base] if len(shape) > 1)
    return stored, masked / max(masked + others, 1)


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
            bits=sum(entropy(model.counts) for model in layer.header.models),
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
