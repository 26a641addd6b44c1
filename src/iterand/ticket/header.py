"""What a ticket says of itself, to JSON and back."""

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from iterand.errors import TicketError
from iterand.parametrization import Settings
from iterand.ticket import draws, schema

FORMAT = 1
MAX_SHARED_RUNS = 1 << 22  # runs of the history times layers that share it


class Filled(NamedTuple):
    """A tensor whose elements are all the same."""

    dtype: str
    shape: tuple[int, ...]
    element: bytes
    """One element, little endian."""


@dataclass(frozen=True)
class LayerHeader:
    """One masked tensor: what it was made from, and how often what occurs in its streams."""

    name: str
    """Its qualified name in the model; ``settings.name`` is the one its weights were drawn under."""
    shape: tuple[int, ...]
    dtype: str
    settings: Settings
    unit: float
    """The float32 number that levels are multiplied with."""
    history: tuple[tuple[int, int], ...]
    stored: str
    """What tells a kept weight: its ``level``, the ``round`` of its draw, or the draw's place among its coin's falls,
    counted from the ``first`` or the ``latest``."""
    counts: tuple[tuple[int, int], ...]
    """(level, place or round; how many kept weights have it), ascending."""
    streams: tuple[int, int]
    """How many bytes the streams of mask and values have."""

    @cached_property
    def size(self) -> int:
        """How many weights there are."""
        return math.prod(self.shape)

    @cached_property
    def kept(self) -> int:
        """How many weights are kept."""
        return sum(count for _, count in self.counts)

    @cached_property
    def rounds(self) -> int:
        """R: how often the pruned weights were randomized."""
        return draws.round_count(self.history)

    @property
    def redrawn(self) -> int | None:
        """How many kept weights are not the initial ones, where the ticket knows."""
        return None if self.stored == "level" else sum(count for value, count in self.counts if value > 0)

    @property
    def coins(self) -> int:
        """How many coins must at most be tossed to find the draws."""
        return (self.redrawn or 0) * self.rounds if self.stored in ("first", "latest") else 0


@dataclass(frozen=True)
class Header:
    """Everything in a ticket but its streams and raw tensors."""

    layers: tuple[LayerHeader, ...]
    supports: dict[str, tuple[int, ...] | None]
    """The levels of each distribution, where they are few."""
    weights_sha256: str
    """SHA-256 of masks and kept weights of all layers, as they come out of the streams."""
    package: str
    filled: dict[str, Filled] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Name of a tied tensor → the name it is described under."""
    cast: dict[str, str] = field(default_factory=dict)
    """Name of a tensor that is stored in float16 → its type in the model."""
    recipe: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None


def to_json(header: Header) -> dict[str, Any]:
    """The JSON object; what all layers have in common is said once."""
    layers = [_layer_to_json(layer) for layer in header.layers]
    shared = {key: layers[0][key] for key in schema.SHARED if all(layer[key] == layers[0][key] for layer in layers)}
    return {
        "format": FORMAT,
        "iterand": header.package,
        "distributions": {name: levels and list(levels) for name, levels in header.supports.items()},
        "weights_sha256": header.weights_sha256,
        "shared": shared,
        "layers": [{key: layer[key] for key in layer if key not in shared} for layer in layers],
        "filled": {
            name: [dtype, list(shape), element.hex()] for name, (dtype, shape, element) in header.filled.items()
        },
        "aliases": header.aliases,
        "cast": header.cast,
        "recipe": header.recipe,
        "metrics": header.metrics,
    }


def from_json(loaded: Mapping[str, Any]) -> Header:
    """The header of a ticket, or a TicketError that names what is wrong."""
    version = loaded.get("format")
    if version != FORMAT:
        raise TicketError(f"it is a ticket of format {version!r}; this iterand reads format {FORMAT}, so upgrade it")
    top = schema.checked("the header", loaded, schema.TOP)
    shared = schema.checked("'shared'", top["shared"], {key: schema.SHARED.get(key, _UNKNOWN) for key in top["shared"]})
    if len(shared.get("history", ())) * len(top["layers"]) > MAX_SHARED_RUNS:
        raise TicketError(
            f"{len(top['layers'])} layers share {len(shared['history'])} runs of rounds; that is too much"
        )
    supports = {name: None if levels is None else tuple(levels) for name, levels in top["distributions"].items()}
    header = Header(
        layers=tuple(_layer_from_json({**shared, **layer}, supports) for layer in top["layers"]),
        supports=supports,
        weights_sha256=top["weights_sha256"],
        package=top["iterand"],
        filled={name: Filled(each[0], tuple(each[1]), bytes.fromhex(each[2])) for name, each in top["filled"].items()},
        aliases=top["aliases"],
        cast=top["cast"],
        recipe=top["recipe"],
        metrics=top["metrics"],
    )
    _check_whole(header)
    return header


_UNKNOWN = (lambda value: False, "left out")


def _check_whole(header: Header) -> None:
    coins = sum(layer.coins for layer in header.layers)
    if coins > draws.MAX_COINS:
        raise TicketError(f"its draws need up to {coins} coins to be tossed; the limit is {draws.MAX_COINS}")
    names = [layer.name for layer in header.layers] + [*header.filled, *header.aliases]
    for name, times in Counter(names).items():
        if times > 1:
            raise TicketError(f"it describes {name!r} {times} times")


def _layer_to_json(layer: LayerHeader) -> dict[str, Any]:
    settings = asdict(layer.settings)
    identity = settings.pop("name")
    return {
        "name": layer.name,
        **({"identity": identity} if identity != layer.name else {}),
        "shape": list(layer.shape),
        "dtype": layer.dtype,
        **settings,
        "unit": layer.unit,
        "history": [list(run) for run in layer.history],
        "stored": layer.stored,
        "counts": [list(pair) for pair in layer.counts],
        "streams": list(layer.streams),
    }


def _layer_from_json(loaded: Mapping[str, Any], supports: Mapping[str, tuple[int, ...] | None]) -> LayerHeader:
    where = f"layer {str(loaded.get('name'))[:100]!r}"
    known = schema.checked(where, {"identity": loaded.get("name"), **loaded}, schema.LAYER)
    layer = LayerHeader(
        name=known["name"],
        shape=tuple(known["shape"]),
        dtype=known["dtype"],
        settings=Settings(name=known["identity"], **{key: known[key] for key in schema.SETTINGS}),
        unit=float(known["unit"]),
        history=tuple((threshold, count) for threshold, count in known["history"]),
        stored=known["stored"],
        counts=tuple((value, count) for value, count in known["counts"]),
        streams=(known["streams"][0], known["streams"][1]),
    )
    if layer.kept > layer.size:
        raise TicketError(f"{where} keeps {layer.kept} of {layer.size} weights")
    if layer.rounds > draws.MAX_ROUNDS:
        raise TicketError(f"{where} was randomized {layer.rounds} times; the limit is {draws.MAX_ROUNDS}")
    if layer.settings.weight_distribution not in supports:
        raise TicketError(f"{where} has distribution {layer.settings.weight_distribution!r}, which is not described")
    levels = set(supports[layer.settings.weight_distribution] or ())
    for value, _ in layer.counts:
        if layer.stored == "level" and value not in levels:
            raise TicketError(f"{where} has level {value}, which is none of its distribution's")
        if layer.stored != "level" and not 0 <= value <= layer.rounds:
            raise TicketError(f"{where} has draw {value} after {layer.rounds} rounds")
    return layer
