"""Schema of a ticket's header: the rule and the default of every entry, and tables stored by column."""

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, get_args

import numpy as np

from iterand import distributions
from iterand.backend import RankBy
from iterand.checks import is_text
from iterand.errors import TicketError
from iterand.ticket import codec, draws, format

Check = Callable[[Any], bool]
Row = dict[str, Any]


class Column(NamedTuple):
    """One entry of a header, or one column of a table."""

    fits: Check
    rule: str
    default: Callable[[Row], Any] | None = None
    """The default of an entry if the column is left out. None if the column is required."""
    read: Callable[[Any], Any] = lambda value: value
    write: Callable[[Any], Any] = lambda value: value


def to_columns(rows: Sequence[Row], columns: Mapping[str, Column]) -> dict[str, list[Any]]:
    """Turn rows into columns. A column of equal entries is stored as one entry, a column of defaults is left out."""
    table = {}
    for key, column in columns.items():
        entries = [column.write(row[key]) for row in rows]
        if column.default and all(entry == column.write(column.default(row)) for entry, row in zip(entries, rows)):
            continue
        table[key] = entries[:1] if all(entry == entries[0] for entry in entries) else entries
    return table


def to_rows(where: str, table: Mapping[str, Any], columns: Mapping[str, Column]) -> list[Row]:
    """Turn columns into rows and check every entry. A column of one entry applies to all rows."""
    for key in table.keys() - columns.keys():
        raise TicketError(f"{where} has an unknown column {key!r}")
    for key, entries in table.items():
        if not isinstance(entries, list) or not entries:
            raise TicketError(f"column {key!r} of {where} is {str(entries)[:60]!r}; it must be a list with an entry")
    if not table:
        return []
    count = len(table.get("name", ()))
    rows: list[Row] = [{} for _ in range(count)]
    for key, column in columns.items():
        if key not in table:
            if column.default is None:
                raise TicketError(f"{where} has no column {key!r}")
            for row in rows:
                row[key] = column.default(row)
            continue
        if len(table[key]) not in (1, count):
            raise TicketError(f"column {key!r} of {where} has {len(table[key])} entries for {count} rows")
        for entry in table[key]:
            if not column.fits(entry):
                raise TicketError(f"{where} has {key} {str(entry)[:60]!r}; it must be {column.rule}")
        entries = [column.read(entry) for entry in table[key]]
        for row, entry in zip(rows, itertools.cycle(entries)):
            row[key] = entry
    return rows


def check_object(where: str, loaded: Mapping[str, Any], keys: Mapping[str, Column]) -> Row:
    """Check an object with exactly these keys and fill in defaults."""
    for key in loaded.keys() - keys.keys():
        raise TicketError(f"{where} has an unknown key {key!r}")
    found: Row = {}
    for key, column in keys.items():
        if key in loaded and not column.fits(loaded[key]):
            raise TicketError(f"{where} has {key} {str(loaded[key])[:60]!r}; it must be {column.rule}")
        if key not in loaded and column.default is None:
            raise TicketError(f"{where} has no {key!r}")
        found[key] = loaded[key] if key in loaded else column.default(found)  # type: ignore[misc]
    return found


def _integer(lowest: int, highest: int = (1 << 63) - 1) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _fraction(value: Any) -> bool:
    return _number(value) and 0 <= value <= 1


def _float32(value: Any) -> bool:
    return _number(value) and abs(value) <= _LARGEST and float(np.float32(value)) == value


def _text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 4096 and is_text(value)


def _one_of(*words: str) -> Check:
    return lambda value: isinstance(value, str) and value in words


def _hexadecimal(*sizes: int) -> Check:
    return lambda value: (
        isinstance(value, str)
        and re.fullmatch("[0-9a-f]*", value) is not None
        and len(value) // 2 in sizes
        and not len(value) % 2
    )


def _list_of(fits: Check, most: int) -> Check:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(fits, value))


def _map_of(fits: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(_text, value)) and all(map(fits, value.values()))


def _run(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and _threshold(value[0]) and _positive(value[1])


def _counts(value: Any) -> bool:
    """Positive counts and negative gaps; no gap is last or next to another gap."""
    if not _list_of(_integer(-draws.MAX_ROUNDS), 2 * codec.MAX_ALPHABET)(value) or 0 in value:
        return False
    gap_ends = all(following > 0 for number, following in itertools.pairwise([*value, -1]) if number < 0)
    return gap_ends and sum(number > 0 for number in value) <= codec.MAX_ALPHABET


def _levels(value: Any) -> bool:
    fits = _list_of(_integer(-_HIGHEST_LEVEL, _HIGHEST_LEVEL), 1 << 16)(value)
    return fits and len(value) > 0 and all(a < b for a, b in itertools.pairwise(value))


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _default_fan_in(row: Row) -> int:
    return distributions.shape_fan_in(row["shape"])


def default_unit(row: Row) -> float | None:
    """The unit of a layer if its distribution is built in, else None. Existing weights have no levels, so no unit.

    A distribution with tags (``mask_kinds.tags``) is not built in.
    """
    name = row["weight_distribution"]
    if name == distributions.EXISTING:
        return 0.0
    return distributions.get_distribution(name).unit32(row["fan_in"]) if name in distributions.BUILT_IN else None


_HIGHEST_LEVEL = 1 << 24
_LARGEST = float(np.finfo(np.float32).max)
_dtype = _one_of(*format.DTYPES)
_positive = _integer(1)
_threshold = _integer(0, draws.ALWAYS)
_NAME = Column(_text, "a name of at most 4096 characters")
_DTYPE = Column(_dtype, "a type of tensors", lambda row: "F32")
_SHAPE = Column(_list_of(_integer(0, 1 << 40), 16), "a list of sizes", None, tuple, list)

SETTINGS = {
    "seed": Column(_integer(0), "an integer of at least 0"),
    "weight_distribution": _NAME,
    "score_distribution": Column(_text, "a name", lambda row: "kaiming_uniform"),
    "fan_in": Column(_integer(1, 1 << 40), "an integer of at least 1", _default_fan_in),
    "sparsity": Column(_fraction, "a number from 0 to 1"),
    "ranking": Column(_one_of("layer", "global"), "'layer' or 'global'", lambda row: "layer"),
    "rank_by": Column(_one_of(*get_args(RankBy)), "'score' or 'magnitude'", lambda row: "score"),
    "floor": Column(_fraction, "a number from 0 to 1", lambda row: 0.0),
}
TABLES = {
    "layers": {
        "name": _NAME,
        "shape": Column(_list_of(_integer(1, 1 << 40), 16), "a list of sizes of at least 1", None, tuple, list),
        "dtype": Column(_one_of("F64", "F32", "F16", "BF16"), "F64, F32, F16 or BF16", lambda row: "F32"),
        "identity": Column(_text, "a name", lambda row: row["name"]),
        **SETTINGS,
        "unit": Column(_float32, "a float32 number", default_unit),
        "history": Column(
            _list_of(_run, 1 << 20),
            "a list of [threshold, rounds]",
            lambda row: draws.History(()),
            lambda runs: draws.History(tuple(map(tuple, runs))),
            lambda history: list(map(list, history.runs)),
        ),
        "stored": Column(_one_of("level", "round", "first", "latest", "base"), "level, round, first, latest or base"),
        "counts": Column(_counts, "a list of counts and gaps"),
        "digest": Column(_hexadecimal(0, 16), "32 hexadecimal digits, or none", lambda row: ""),
        "multipliers": Column(_counts, "a list of counts and gaps", lambda row: []),
    },
    "filled": {
        "name": _NAME,
        "shape": _SHAPE,
        "dtype": _DTYPE,
        "element": Column(
            _hexadecimal(1, 2, 4, 8),
            "the bytes of an element in hexadecimal",
            None,
            bytes.fromhex,
            bytes.hex,
        ),
    },
    "tensors": {
        "name": _NAME,
        "shape": _SHAPE,
        "dtype": _DTYPE,
        "saved_as": Column(_dtype, "a type of tensors", lambda row: row["dtype"]),
    },
    "base_tensors": {
        "name": _NAME,
        "shape": _SHAPE,
        "dtype": _DTYPE,
        "digest": Column(_hexadecimal(16), "32 hexadecimal digits"),
    },
}
TOP = {
    "iterand": Column(_text, "a version"),
    "layers": Column(_object, "a table"),
    "filled": Column(_object, "a table", lambda found: {}),
    "tensors": Column(_object, "a table", lambda found: {}),
    "base": Column(_text, "a name of at most 4096 characters", lambda found: None),
    "base_tensors": Column(_object, "a table", lambda found: {}),
    "planes": Column(_list_of(_integer(0), 1 << 16), "a list of sizes", lambda found: []),
    "weights_sha256": Column(_hexadecimal(32), "64 hexadecimal digits"),
    "aliases": Column(_map_of(_text), "an object of names", lambda found: {}),
    "levels": Column(_map_of(_levels), "an object of ascending levels", lambda found: {}),
    "recipe": Column(_object, "an object", lambda found: None),
    "metrics": Column(_object, "an object", lambda found: None),
}
