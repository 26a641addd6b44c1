"""What every word of a ticket's header must be."""

import itertools
import re
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from iterand import selection
from iterand.errors import TicketError
from iterand.ticket import container, draws

MAX_ALPHABET = 1 << 20
MAX_LAYERS = 1 << 16

Check = Callable[[Any], bool]
Fields = Mapping[str, tuple[Check, str]]


def checked(where: str, loaded: Mapping[str, Any], fields: Fields) -> Mapping[str, Any]:
    """The object itself, if it has exactly these fields and each is as it must be."""
    for key in fields.keys() - loaded.keys():
        raise TicketError(f"{where} has no {key!r}")
    for key in loaded.keys() - fields.keys():
        raise TicketError(f"{where} has an unknown key {key!r}")
    for key, (fits, rule) in fields.items():
        if not fits(loaded[key]):
            raise TicketError(f"{where} has {key} {str(loaded[key])[:60]!r}; it must be {rule}")
    return loaded


def _whole(lowest: int, highest: int = (1 << 63) - 1) -> Check:
    return lambda value: isinstance(value, int) and not isinstance(value, bool) and lowest <= value <= highest


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _share(value: Any) -> bool:
    return _number(value) and 0 <= value <= 1


def _float32(value: Any) -> bool:
    return _number(value) and abs(value) <= _LARGEST and float(np.float32(value)) == value


def _text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 4096


def _one_of(*words: str) -> Check:
    return lambda value: isinstance(value, str) and value in words


def _digits(count: int) -> Check:
    return lambda value: isinstance(value, str) and re.fullmatch(f"[0-9a-f]{{{count}}}", value) is not None


def _list_of(fits: Check, most: int) -> Check:
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(fits, value))


def _map_of(fits: Check) -> Check:
    return lambda value: isinstance(value, dict) and all(map(_text, value)) and all(map(fits, value.values()))


def _counted(fits: Check, most: int) -> Check:
    count = _whole(1)
    return _list_of(lambda pair: isinstance(pair, list) and len(pair) == 2 and fits(pair[0]) and count(pair[1]), most)


def _filled(value: Any) -> bool:
    if not (isinstance(value, list) and len(value) == 3 and _dtype(value[0]) and _any_shape(value[1])):
        return False
    return _digits(2 * container.DTYPES[value[0]].itemsize)(value[2])


def _counts(value: Any) -> bool:
    fits = _counted(_whole(-_HIGHEST_LEVEL, _HIGHEST_LEVEL), MAX_ALPHABET)(value)
    return fits and all(a[0] < b[0] for a, b in itertools.pairwise(value))


def _levels(value: Any) -> bool:
    fits = value is None or _list_of(_whole(-_HIGHEST_LEVEL, _HIGHEST_LEVEL), 1 << 16)(value)
    return fits and (value is None or len(value) > 0)


def _object(value: Any) -> bool:
    return isinstance(value, dict)


def _object_or_null(value: Any) -> bool:
    return value is None or _object(value)


_HIGHEST_LEVEL = 1 << 24  # and the highest draw
_LARGEST = float(np.finfo(np.float32).max)
_dtype = _one_of(*container.DTYPES)
_any_shape = _list_of(_whole(0, 1 << 40), 16)

SETTINGS: Fields = {
    "seed": (_whole(0), "a whole number of at least 0"),
    "weight_distribution": (_text, "a name"),
    "score_distribution": (_text, "a name"),
    "fan_in": (_whole(1, 1 << 40), "a whole number of at least 1"),
    "sparsity": (_share, "a number from 0 to 1"),
    "ranking": (_one_of("layer", "global"), "'layer' or 'global'"),
    "rank_by": (_one_of(*selection.RANK_BY), " or ".join(map(repr, selection.RANK_BY))),
    "floor": (_share, "a number from 0 to 1"),
}
SHARED: Fields = {
    "dtype": (_one_of("F64", "F32", "F16", "BF16"), "'F64', 'F32', 'F16' or 'BF16'"),
    **SETTINGS,
    "unit": (_float32, "a float32 number"),
    "history": (_counted(_whole(0, draws.ALWAYS), 1 << 20), "a list of [threshold, rounds]"),
    "stored": (_one_of("level", "round", "first", "latest"), "'level', 'round', 'first' or 'latest'"),
}
LAYER: Fields = {
    "name": (_text, "a name"),
    "identity": (_text, "a name"),
    "shape": (_list_of(_whole(1, 1 << 40), 16), "a list of whole numbers of at least 1"),
    **SHARED,
    "counts": (_counts, "an ascending list of [value, count]"),
    "streams": (lambda value: _any_shape(value) and len(value) == 2, "two numbers of bytes"),
}
TOP: Fields = {
    "format": (_whole(1), "a whole number"),
    "iterand": (_text, "a version"),
    "distributions": (_map_of(_levels), "an object of lists of levels"),
    "weights_sha256": (_digits(64), "64 hexadecimal digits"),
    "shared": (_object, "an object"),
    "layers": (lambda value: _list_of(_object, MAX_LAYERS)(value) and len(value) > 0, "a list of objects"),
    "filled": (_map_of(_filled), "an object of [type, shape, element]"),
    "aliases": (_map_of(_text), "an object of names"),
    "cast": (_map_of(_dtype), "an object of types"),
    "recipe": (_object_or_null, "an object or null"),
    "metrics": (_object_or_null, "an object or null"),
}
