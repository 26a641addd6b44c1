"""A ticket that was opened (``read_ticket``): everything about it can be asked, nothing is decoded before it is."""

import hashlib
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from iterand.errors import TicketError
from iterand.ticket import container, resuming
from iterand.ticket.header import Filled, Header, from_json
from iterand.ticket.layers import TicketLayer

# A ticket may describe this many elements, and more only if its bytes account for them: what it takes to open a file
# from a stranger is bounded by the file.
FREE_ELEMENTS = 1 << 26
ELEMENTS_A_BYTE = 1 << 10


@dataclass(frozen=True)
class Ticket:
    """What a ticket holds."""

    header: Header
    layers: dict[str, TicketLayer]
    """The masked tensors by name: settings in ``header``, and ``mask()``, ``draws()``, ``levels()``, ``weight()``."""
    stored: dict[str, Tensor]
    """Other tensors, as they are stored."""
    size: int
    """Bytes of the file."""

    @property
    def recipe(self) -> dict[str, Any] | None:
        """Where the network comes from."""
        return self.header.recipe

    @property
    def metrics(self) -> dict[str, Any] | None:
        """How good it is."""
        return self.header.metrics

    def shapes(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Type and shape of every tensor of the ordinary model."""
        header = self.header
        shapes = {layer.name: (layer.dtype, layer.shape) for layer in header.layers}
        shapes |= {name: (filled.dtype, filled.shape) for name, filled in header.filled.items()}
        for name, tensor in self.stored.items():
            shapes[name] = header.cast.get(name, container.DTYPE_NAMES[tensor.dtype]), tuple(tensor.shape)
        shapes |= {name: shapes[described] for name, described in header.aliases.items()}
        return {name: (container.DTYPES[dtype], shape) for name, (dtype, shape) in shapes.items()}

    def state_dict(self) -> dict[str, Tensor]:
        """The tensors of the ordinary model; tied ones are one tensor under several names."""
        state: dict[str, Tensor] = {}
        digest = hashlib.sha256()
        for name, layer in self.layers.items():
            state[name] = layer.weight(digest)
        if digest.hexdigest() != self.header.weights_sha256:
            raise TicketError(
                "the weights it gives here are not the ones that were saved; are the distributions "
                f"{', '.join(map(repr, self.header.supports))} the same as there?"
            )
        state |= self.other_tensors()
        return state | {name: state[described] for name, described in self.header.aliases.items()}

    def other_tensors(self) -> dict[str, Tensor]:
        """The tensors that are not masked, in the type of the model."""
        cast = {name: container.DTYPES[dtype] for name, dtype in self.header.cast.items()}
        tensors = {name: tensor.to(cast.get(name, tensor.dtype)) for name, tensor in self.stored.items()}
        return tensors | {name: _full(filled) for name, filled in self.header.filled.items()}

    def resume_(self, model: nn.Module) -> None:
        """Bring a model that was masked by the same ``prune_`` to where the ticket left off, to go on searching.

        Mask, kept weights, rounds and batch-norm statistics are the ticket's, and of a model with a higher sparsity the
        mask is a part of it. The scores are not in it: the kept
        weights get the highest of the initial ones. Nor are the pruned weights: they are the initial ones.
        """
        resuming.resume_(model, self.layers, self.other_tensors())

    def hold_zeros_(self, model: nn.Module) -> list[RemovableHandle]:
        """Keep the pruned weights of an ordinary model at zero while the others are trained, by any optimizer.

        Their gradients become zero; ``remove()`` the handles to set them free.
        """
        return resuming.hold_zeros_(model, self.layers)


def read_ticket(path: str | os.PathLike[str]) -> Ticket:
    """Open a ticket: checksum, structure and limits are checked, streams are left as they are."""
    try:
        if Path(path).is_dir():
            raise TicketError("this is a folder; that of a run holds its ticket as model.ticket")
        return parse(Path(path).read_bytes())
    except TicketError as error:
        raise TicketError(f"ticket {str(path)!r}: {error}") from None


def parse(data: bytes) -> Ticket:
    """The ticket with these bytes."""
    loaded, tensors = container.unpack(data)
    header = from_json(loaded)
    stored = {name.removeprefix("tensor:"): tensors.pop(name) for name in list(tensors) if name.startswith("tensor:")}
    _check_stored(header, stored)
    streams = _bytes(tensors.pop("streams", torch.empty(0, dtype=torch.uint8)))
    for name in tensors:
        raise TicketError(f"it has a tensor {name!r}, which no ticket has")
    expected = sum(sum(layer.streams) for layer in header.layers)
    if len(streams) != expected:
        raise TicketError(f"the streams of its layers have {expected} bytes, and there are {len(streams)}")
    layers: dict[str, TicketLayer] = {}
    start = 0
    for layer in header.layers:
        middle, end = start + layer.streams[0], start + sum(layer.streams)
        layers[layer.name] = TicketLayer(layer, streams[start:middle], streams[middle:end])
        start = end
    ticket = Ticket(header, layers, stored, len(data))
    elements = sum(math.prod(shape) for _, shape in ticket.shapes().values())
    allowed = FREE_ELEMENTS + ELEMENTS_A_BYTE * len(data)
    if elements > allowed:
        raise TicketError(f"it describes {elements} elements in {len(data)} bytes; the limit is {allowed}")
    return ticket


def _check_stored(header: Header, stored: Mapping[str, Tensor]) -> None:
    described = {layer.name for layer in header.layers} | set(header.filled)
    for name, tensor in stored.items():
        if name in described or name in header.aliases:
            raise TicketError(f"it describes {name!r} twice")
        if tensor.dtype not in container.DTYPE_NAMES:
            raise TicketError(f"tensor {name!r} is {tensor.dtype}, which no ticket holds")
        if tensor.dtype == torch.bool and (tensor.view(torch.uint8) > 1).any():
            raise TicketError(f"tensor {name!r} is of truth values, but has others than 0 and 1")
    for name, dtype in header.cast.items():
        if name not in stored or stored[name].dtype != torch.float16 or dtype not in ("F32", "F64"):
            raise TicketError(f"it says that {name!r} is a {dtype} stored as F16, and that is not so")
    for name, target in header.aliases.items():
        if target not in described and target not in stored:
            raise TicketError(f"it says that {name!r} is tied to {target!r}, which it does not hold")
    for name, filled in header.filled.items():
        if filled.dtype == "BOOL" and filled.element[0] > 1:
            raise TicketError(f"tensor {name!r} is of truth values, but has others than 0 and 1")


def _bytes(streams: Tensor) -> bytes:
    if streams.dtype != torch.uint8 or streams.dim() != 1:
        raise TicketError(
            f"its streams are {streams.dtype} of shape {list(streams.shape)}; they must be a list of bytes"
        )
    return streams.numpy().tobytes()


def _full(filled: Filled) -> Tensor:
    element = torch.frombuffer(bytearray(container.native(filled.element)), dtype=container.DTYPES[filled.dtype])
    return element.squeeze(0).expand(filled.shape).clone(memory_format=torch.contiguous_format)
