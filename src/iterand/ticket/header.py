"""The header of a ticket: masked layers, other tensors, recipe and metrics; to and from JSON."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

from iterand import distributions, mask_kinds
from iterand.errors import TicketError
from iterand.settings import Settings
from iterand.ticket import codec, draws, format, schema
from iterand.ticket.schema import Row

# Limit on the counts in a header: a constant, plus a multiple of the file size. Every counted value takes up space in
# the coded stream.
_COUNTS_ALLOWANCE = 1 << 16
_COUNTS_PER_BYTE = 8


class StoredTensor(NamedTuple):
    """A tensor stored element by element."""

    dtype: str
    """dtype in the model."""
    shape: tuple[int, ...]
    saved_as: str
    """dtype in the file."""


class FilledTensor(NamedTuple):
    """A tensor whose elements are all equal, stored as one element."""

    dtype: str
    shape: tuple[int, ...]
    element: bytes
    """The little-endian bytes of one element."""


class BaseTensor(NamedTuple):
    """A tensor that the ticket does not hold, since it is that of the base."""

    dtype: str
    shape: tuple[int, ...]
    digest: str
    """That of its elements; see ``existing.digest``."""


@dataclass(frozen=True)
class LayerHeader:
    """One masked tensor: its settings, and the symbol counts of its mask and of its kept weights."""

    name: str
    """Qualified name in the model. ``settings.name`` is the name its weights were drawn under."""
    shape: tuple[int, ...]
    dtype: str
    settings: Settings
    unit: float
    """The float32 factor of levels: weight = level · unit."""
    history: draws.History
    stored: str
    """How a kept weight is stored: as its ``level``, as the ``round`` it was drawn in, or as the ordinal of that round
    among the rounds in which its coin came up, counted from the ``first`` or from the ``latest``. ``base``: not at
    all, since it is that of the base."""
    counts: tuple[tuple[int, int], ...]
    """Pairs (value, number of kept weights), values ascending. A value is a level, a round, an ordinal, or 0."""
    digest: str = ""
    """That of the base's weights, pruned ones included; see ``existing.digest``."""
    multipliers: tuple[tuple[int, int], ...] = ()
    """Pairs (multiplier, number of kept weights), multipliers ascending, of a mask that has others than 1; none if
    levels are stored, which are those of the masked weights."""

    @cached_property
    def size(self) -> int:
        """Number of weights."""
        return math.prod(self.shape)

    @cached_property
    def kept(self) -> int:
        """Number of kept weights."""
        return sum(count for _, count in self.counts)

    @property
    def rounds(self) -> int:
        """R: number of randomization rounds."""
        return self.history.rounds

    @cached_property
    def mask_model(self) -> codec.Model:
        """Symbol counts of the mask: 0 pruned, 1 kept. One symbol if all or none are kept."""
        return codec.Model([count for count in (self.size - self.kept, self.kept) if count])

    @cached_property
    def value_model(self) -> codec.Model:
        """Symbol counts of the kept weights."""
        return codec.Model([count for _, count in self.counts])

    @cached_property
    def multiplier_model(self) -> codec.Model | None:
        """Symbol counts of the multipliers, if they are stored."""
        return codec.Model([count for _, count in self.multipliers]) if self.multipliers else None

    @property
    def models(self) -> list[codec.Model]:
        """The symbol counts of everything that is coded of the layer."""
        coded = (self.mask_model, self.value_model, self.multiplier_model)
        return [model for model in coded if model is not None]

    @property
    def redrawn(self) -> int | None:
        """Number of kept weights that were redrawn. None if levels are stored."""
        return None if self.stored == "level" else sum(count for value, count in self.counts if value > 0)

    @property
    def coins(self) -> int:
        """Upper bound on the coins a reader tosses to find the draws."""
        return (self.redrawn or 0) * self.rounds if self.stored in ("first", "latest") else 0


@dataclass(frozen=True)
class Header:
    """Everything in a ticket except the coded stream and the elements of stored tensors."""

    layers: tuple[LayerHeader, ...]
    package: str
    weights_sha256: str
    """SHA-256 of masks and kept weights of all layers, as decoded from the stream."""
    levels: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """Levels of custom distributions that have a small support."""
    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    planes: tuple[int, ...] = ()
    """Number of bytes of each byte plane of ``tensors``."""
    filled: dict[str, FilledTensor] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    """Tied tensors: other name → the name in ``layers``, ``tensors``, ``filled`` or ``base_tensors``."""
    base: str | None = None
    """The name of the base, if there is one: the model whose weights are masked."""
    base_tensors: dict[str, BaseTensor] = field(default_factory=dict)
    """The tensors of the base that are neither masked nor changed."""
    recipe: dict[str, Any] | None = None
    metrics: dict[str, Any] | None = None

    def is_of_base(self, name: str) -> bool:
        """Whether a tensor is one of the base's, so that no memory is needed for it."""
        return self.aliases.get(name, name) in self.base_tensors

    def support(self, layer: LayerHeader) -> Sequence[int]:
        """The levels that masked weights of a layer may have, ascending. Empty if its support is not small."""
        return _support(stored_distribution(layer.settings), self.levels)

    def shapes(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """dtype and shape of every tensor of the unmasked model."""
        shapes = {layer.name: (layer.dtype, layer.shape) for layer in self.layers}
        shapes |= {name: (tensor.dtype, tensor.shape) for name, tensor in self.filled.items()}
        shapes |= {name: (tensor.dtype, tensor.shape) for name, tensor in self.tensors.items()}
        shapes |= {name: (tensor.dtype, tensor.shape) for name, tensor in self.base_tensors.items()}
        return shapes | {name: shapes[described] for name, described in self.aliases.items()}


def to_json(header: Header) -> dict[str, Any]:
    """The header as a JSON object. Empty entries are left out."""
    rows = {
        "layers": [_layer_to_row(layer, header.levels) for layer in header.layers],
        "filled": [{"name": name, **tensor._asdict()} for name, tensor in header.filled.items()],
        "tensors": [{"name": name, **tensor._asdict()} for name, tensor in header.tensors.items()],
        "base_tensors": [{"name": name, **tensor._asdict()} for name, tensor in header.base_tensors.items()],
    }
    parts = {
        "iterand": header.package,
        **{key: schema.to_columns(table, schema.TABLES[key]) if table else {} for key, table in rows.items()},
        "base": header.base,
        "planes": list(header.planes),
        "weights_sha256": header.weights_sha256,
        "aliases": header.aliases,
        "levels": {name: list(levels) for name, levels in header.levels.items()},
        "recipe": header.recipe,
        "metrics": header.metrics,
    }
    return {key: value for key, value in parts.items() if value}


def from_json(loaded: Mapping[str, Any], size: int) -> Header:
    """Check and parse the header of a ticket of ``size`` bytes. Raises TicketError."""
    top = schema.check_object("the header", loaded, schema.TOP)
    rows = {key: schema.to_rows(f"table {key!r}", top[key], columns) for key, columns in schema.TABLES.items()}
    if not rows["layers"]:
        raise TicketError("it has no layers")
    counts = sum(len(row["counts"]) for row in rows["layers"])
    if counts > _COUNTS_ALLOWANCE + _COUNTS_PER_BYTE * size:  # a row may share the counts of all others
        limit = _COUNTS_ALLOWANCE + _COUNTS_PER_BYTE * size
        raise TicketError(f"its layers have {counts} counts in {size} bytes; the limit is {limit}")
    names = [row["name"] for table in rows.values() for row in table]
    names_of_base = [row["name"] for row in rows["base_tensors"]]
    for name, times in Counter([*names, *top["aliases"]]).items():
        if times > 1:
            raise TicketError(f"it describes {name!r} {times} times")
    for name, target in top["aliases"].items():
        if target not in names:
            raise TicketError(f"it says that {name!r} is tied to {target!r}, which it does not hold")
    on_base = [row["name"] for row in rows["layers"] if row["stored"] == "base"] + names_of_base
    if on_base and top["base"] is None:
        raise TicketError(f"it says that {on_base[0][:100]!r} is that of a base, and names none")
    if not on_base and top["base"] is not None:
        raise TicketError(f"it names a base, {top['base'][:100]!r}, and holds all tensors itself")
    levels = {name: tuple(each) for name, each in top["levels"].items()}
    for name in levels.keys() & distributions.BUILT_IN:
        raise TicketError(f"it has its own levels for {name!r}, whose levels are known")
    return Header(
        layers=tuple(_layer_from_row(row, levels) for row in rows["layers"]),
        package=top["iterand"],
        weights_sha256=top["weights_sha256"],
        levels=levels,
        tensors={row.pop("name"): _tensor_from_row(row) for row in rows["tensors"]},
        planes=tuple(top["planes"]),
        filled={row.pop("name"): _filled_from_row(row) for row in rows["filled"]},
        aliases=top["aliases"],
        base=top["base"],
        base_tensors={row.pop("name"): BaseTensor(**row) for row in rows["base_tensors"]},
        recipe=top["recipe"],
        metrics=top["metrics"],
    )


def _layer_to_row(layer: LayerHeader, levels: Mapping[str, tuple[int, ...]]) -> Row:
    settings = asdict(layer.settings)
    tagged = stored_distribution(layer.settings)
    return {
        **settings,
        "weight_distribution": tagged,
        "name": layer.name,
        "identity": settings["shared"] or settings["name"],
        "shape": layer.shape,
        "dtype": layer.dtype,
        "unit": layer.unit,
        "history": layer.history,
        "stored": layer.stored,
        "counts": _with_gaps(layer.counts, _values(layer.stored, tagged, levels)),
        "digest": layer.digest,
        "multipliers": _with_gaps(layer.multipliers, _possible(layer.settings)),
    }


def _layer_from_row(row: Row, levels: Mapping[str, tuple[int, ...]]) -> LayerHeader:
    where, distribution = f"layer {row['name'][:100]!r}", row["weight_distribution"]
    untagged, special = mask_kinds.without_tags(distribution)
    default = schema.default_unit(row)
    if row["unit"] is None:
        raise TicketError(f"{where} has distribution {distribution!r}, which is not the package's, and no unit")
    if default not in (None, row["unit"]):
        raise TicketError(f"{where} has its own unit of {distribution!r}, whose unit is known")
    if len({row["stored"] == "base", distribution == distributions.EXISTING, bool(row["digest"])}) > 1:
        raise TicketError(f"{where} must have stored 'base', distribution 'existing' and a digest, or none of these")
    values = _values(row["stored"], distribution, levels)
    settings = Settings(
        name=row["identity"],
        **{key: row[key] for key in schema.SETTINGS} | {"weight_distribution": untagged} | special,
    )
    layer = LayerHeader(
        name=row["name"],
        shape=row["shape"],
        dtype=row["dtype"],
        settings=settings,
        unit=float(row["unit"]),
        history=row["history"],
        stored=row["stored"],
        counts=tuple(_without_gaps(where, row["counts"], values)),
        digest=row["digest"],
        multipliers=tuple(_without_gaps(where, row["multipliers"], _possible(settings))),
    )
    if sum(count for _, count in layer.multipliers) != (layer.kept if _multiplies(layer) else 0):
        raise TicketError(f"{where} keeps {layer.kept} weights, and has another number of multipliers")
    if layer.kept > layer.size:
        raise TicketError(f"{where} keeps {layer.kept} of {layer.size} weights")
    if layer.size > codec.MAX_LENGTH:
        raise TicketError(f"{where} has {layer.size} weights; the limit is {codec.MAX_LENGTH}")
    if layer.history.rounds > draws.MAX_ROUNDS:
        raise TicketError(f"{where} was randomized {layer.history.rounds} times; the limit is {draws.MAX_ROUNDS}")
    if layer.stored != "level" and layer.counts and layer.counts[-1][0] > layer.history.rounds:
        raise TicketError(f"{where} has draw {layer.counts[-1][0]} after {layer.history.rounds} rounds")
    return layer


def stored_distribution(settings: Settings) -> str:
    """The distribution of masked weights as a ticket names it: that of the weights, with tags if a mask changes it."""
    recycled = settings.redraw_from == "kept"
    return settings.weight_distribution + mask_kinds.tags(
        settings.mask, settings.coats, settings.gain, settings.binarize, recycled
    )


def _possible(settings: Settings) -> Sequence[int]:
    return mask_kinds.possible(settings.mask, settings.coats)


def _multiplies(layer: LayerHeader) -> bool:
    """Whether kept weights are stored without what they are multiplied by."""
    return layer.stored != "level" and mask_kinds.has_multipliers(layer.settings.mask)


def _values(stored: str, distribution: str, levels: Mapping[str, tuple[int, ...]]) -> Sequence[int]:
    """The values that are counted, ascending: the levels of the distribution, all rounds and ordinals, or 0."""
    if stored == "base":
        return range(1)
    return _support(distribution, levels) if stored == "level" else range(draws.MAX_ROUNDS + 1)


def _support(distribution: str, levels: Mapping[str, tuple[int, ...]]) -> Sequence[int]:
    if distribution in distributions.BUILT_IN:
        return sorted(distributions.get_distribution(distribution).support or ())
    return levels.get(distribution, ())


def _with_gaps(counts: Iterable[tuple[int, int]], values: Sequence[int]) -> list[int]:
    """The counts in the order of ``values``; −n stands for n values that do not occur."""
    numbers: list[int] = []
    following = 0
    for value, count in counts:
        position = values.index(value)
        numbers += [following - position] * (position > following) + [count]
        following = position + 1
    return numbers


def _without_gaps(where: str, numbers: Iterable[int], values: Sequence[int]) -> Iterator[tuple[int, int]]:
    """The inverse of ``_with_gaps``."""
    position = 0
    for number in numbers:
        if number > 0:
            if position >= len(values):
                raise TicketError(f"{where} counts more values than the {len(values)} there are")
            yield values[position], number
        position += max(-number, 1)


def _tensor_from_row(row: Row) -> StoredTensor:
    tensor = StoredTensor(**row)
    if tensor.saved_as != tensor.dtype and not (tensor.saved_as == "F16" and tensor.dtype in ("F32", "F64")):
        raise TicketError(f"it has a {tensor.dtype} tensor saved as {tensor.saved_as}; only F32 and F64 become F16")
    return tensor


def _filled_from_row(row: Row) -> FilledTensor:
    tensor = FilledTensor(**row)
    if len(tensor.element) != format.DTYPES[tensor.dtype].itemsize:
        raise TicketError(f"it has a {tensor.dtype} tensor filled with {len(tensor.element)} bytes")
    if tensor.dtype == "BOOL" and tensor.element[0] > 1:
        raise TicketError("it has a tensor of truth values filled with another one than 0 and 1")
    return tensor
