"""The coded sequences of a ticket as C: an exported network that decodes its weights before it runs."""

from collections.abc import Mapping
from dataclasses import replace
from importlib import resources

import numpy as np
from numpy.typing import NDArray

from iterand.errors import IterandError
from iterand.inference.nodes import Convolution, Graph, Linear
from iterand.ticket import Ticket
from iterand.ticket.codec import Model, lane_count
from iterand.ticket.header import stored_distribution
from iterand.ticket.read import TicketLayer

_STORED = ("level", "round", "first", "latest")
_ALWAYS = 1 << 30  # see streams.h
_MOST_TAPS = 254  # of a kernel whose weights are codes of a byte
_LINE = 28  # bytes


class Streams:
    """The masks and signs of a ticket, and the layers of a network that are decoded from them.

    Args:
        ticket: The ticket.
        graph: The network of the ticket.
        kept: The channels that are not left out, by the names of the values that lose some.
        positive: Whether a channel with a negative scale has the signs of its weights swapped.
    """

    def __init__(self, ticket: Ticket, graph: Graph, kept: Mapping[str, NDArray[np.bool_]], positive: bool) -> None:
        self._ticket = ticket
        self._kept = kept
        self._positive = positive
        self._layers = list(ticket.layers.values())
        self._used = _match(self._layers, graph)
        self._description = b"".join(_describe(layer, layer in self._used.values()) for layer in self._layers)
        models = [model for layer in self._layers for model in (layer.header.mask_model, layer.header.value_model)]
        self._lanes = lane_count(models)
        self._bit_bytes = sum(-(-model.length // 8) for model in models if model.kind == "bits")
        self._draws = any(layer.header.stored != "level" for layer in self._used.values())
        self._bits = {node: self._channel_bits(node) for node in self._used}
        bits = sum(len(bits) for parts in self._bits.values() for bits in parts.values())
        self.bytes = len(self._description) + len(ticket.stream.data) + bits
        """Of constant data."""
        self.arena = 4 * (self._lanes + max(_words(layer) for layer in self._layers))
        """Bytes of memory that are needed while the weights are decoded."""
        self.names = frozenset(f"{node.output.name}_{part}" for node in self._used for part in ("codes", "counts"))
        """The arrays that are decoded."""

    def code(self) -> str:
        """Data and functions, for the end of network.c."""
        folder = resources.files("iterand.inference.c")
        sources = [folder.joinpath(name).read_text(encoding="utf-8") for name in ("streams.h", "weights.h")]
        used = sorted(self._used.items(), key=lambda item: item[1].number)
        rows, bits = [], []
        for node, layer in used:
            out, parts = node.output.name, self._bits[node]
            bits += [_array(f"{out}_{name}", data) for name, data in parts.items()]
            arrays = [f"{out}_{name}" if name in parts else "NULL" for name in ("rows", "swapped", "inputs")]
            numbers = [layer.number, node.weight[0].size, _taps(node), *arrays, f"{out}_codes", f"{out}_counts"]
            rows.append(f"    {{{', '.join(map(str, numbers))}}},")
        destinations = "\n".join(["static const destination network_destinations[] = {", *rows, "};"])
        settings = f"#define TICKET_STREAM_FUNCTIONS\n#define NETWORK_DRAWS {int(self._draws)}"
        layers, coded = _array("network_layers", self._description), _array("network_ticket", self._ticket.stream.data)
        init = _INIT.format(
            layers=len(self._layers), bytes=len(self._ticket.stream.data), bits=self._bit_bytes, lanes=self._lanes,
            count=len(used),
        )  # fmt: skip
        return "\n\n".join([settings, *sources, layers, coded, *bits, destinations, init])

    def _channel_bits(self, node: Convolution | Linear) -> dict[str, bytes]:
        """What is special about channels of a layer: those left out, and those with swapped signs."""
        swapped = node.scale < 0 if self._positive else np.zeros(0, np.bool_)
        found = {
            "rows": self._kept.get(node.output.name),
            "swapped": swapped if swapped.any() else None,
            "inputs": self._kept.get(node.inputs[0].name),
        }
        return {name: np.packbits(bits).tobytes() for name, bits in found.items() if bits is not None}


_INIT = """\
int network_init(void *arena) {{
    return decode_weights(network_layers, {layers}, network_ticket, {bytes}, {bits}, {lanes},
                          network_destinations, {count}, arena);
}}"""


def _match(layers: list[TicketLayer], graph: Graph) -> dict[Convolution | Linear, TicketLayer]:
    """The layer of the ticket that each layer of the network has its weights from."""
    if any(layer.header.stored == "base" for layer in layers):
        raise IterandError("the ticket holds masks of a base and not its weights; export it with offsets instead")
    weights = [(layer, layer.weight().float().numpy()) for layer in layers if len(layer.header.shape) > 1]
    used = {}
    for node in graph.nodes:
        if not isinstance(node, (Convolution, Linear)):
            continue
        for layer, weight in weights:
            if weight.size == node.weight.size and np.array_equal(weight.reshape(node.weight.shape), node.weight):
                _check(layer, node)
                used[node] = layer
                break
    if not used:
        raise IterandError("no layer of the network has its weights from the ticket; export it with offsets instead")
    return used


def _check(layer: TicketLayer, node: Convolution | Linear) -> None:
    name, distribution = layer.header.name, stored_distribution(replace(layer.header.settings, gain=1.0))
    if distribution != "signed_constant":
        raise IterandError(
            f"{name!r} has weights of {distribution}; a program decodes signed_constant only; export it with offsets "
            "instead"
        )
    if _taps(node) > _MOST_TAPS:
        raise IterandError(
            f"{name!r} has a kernel of {_taps(node)} weights; a program decodes at most {_MOST_TAPS}; export it with "
            "offsets instead"
        )


def _taps(node: Convolution | Linear) -> int:
    return int(np.prod(node.weight.shape[2:]))


def _describe(layer: TicketLayer, used: bool) -> bytes:
    """A layer as weights.h has it. Of a layer that the network does not use only the sizes are right."""
    header = layer.header
    counts = header.value_model.counts
    numbers = [header.size, len(counts), *counts]
    values = [value for value, _ in header.counts]
    if header.stored == "level" or not used:
        plus = sum(1 << number for number, value in enumerate(values) if used and value > 0)
        return _numbers([*numbers, 0, plus])
    runs = header.history.runs
    history = [number for threshold, rounds in runs for number in (
        (rounds + _ALWAYS, 0) if threshold >> 32 else (rounds, threshold)
    )]  # fmt: skip
    key = header.settings.key
    return _numbers([*numbers, _STORED.index(header.stored), *key, len(runs), header.history.rounds, *history, *values])


def _numbers(numbers: list[int]) -> bytes:
    """Seven bits in a byte, the lowest first."""
    found = bytearray()
    for number in numbers:
        while number > 127:
            found.append(number & 127 | 128)
            number >>= 7
        found.append(number)
    return bytes(found)


def _words(layer: TicketLayer) -> int:
    """Words of memory to decode a layer."""
    header = layer.header
    alphabet = header.value_model.alphabet
    draws = 0 if header.stored == "level" else 2 + 2 * len(header.history.runs) + alphabet
    bits = -(-header.size // 32) - (-header.kept // 32)
    return bits + alphabet + 2 + draws + max(map(_table, (header.mask_model, header.value_model)))


def _table(model: Model) -> int:
    """Words for the frequencies of a sequence."""
    return 256 if model.kind == "runs" else model.alphabet**model.group_size if model.kind == "groups" else 0


def _array(name: str, data: bytes) -> str:
    lines = (data[start : start + _LINE] for start in range(0, len(data), _LINE))
    rows = ["    " + " ".join(f"{byte}," for byte in line) for line in lines] or ["    0,"]
    return "\n".join([f"static const uint8_t {name}[] = {{", *rows, "};"])
