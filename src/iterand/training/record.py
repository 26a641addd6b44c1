"""The record of a complete run, read back from a file that may be damaged, newer, or another program's."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from iterand.checks import is_text, shown
from iterand.errors import IterandError
from iterand.training import recipe_file

FORMAT = "iterand record 1"
FAMILY = FORMAT.rpartition(" ")[0]
"""How the formats of all versions begin."""

PER_EPOCH = {"epoch": 1e9, "train_accuracy": 100.0, "validation_accuracy": 100.0}
"""What is read of each epoch, and the largest it can be."""

_RESULT = {"test_accuracy": 100.0}
_OPTIONAL = {
    "validation_accuracy": 100.0,
    "weights": 1e18,
    "kept": 1e18,
    "float32_bytes": 1e18,
    "ticket_bytes": 1e18,
    "tested_epoch": 1e9,
}
_SECONDS = 1e12
_DEEPEST = 20  # tables within tables
_LONGEST = 1 << 26  # bytes of a file


def read(path: Path) -> Any:
    """The JSON value in a file; an IterandError says why it cannot be read."""
    try:
        if not path.is_file():
            raise IterandError("it is no file")
        if path.stat().st_size > _LONGEST:
            raise IterandError(f"it has more than {_LONGEST:,} bytes")
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise IterandError(f"it cannot be read: {error}") from None


def check(value: Any) -> dict[str, Any]:
    """The value itself, if it is a record in the format of this version, with everything that is read of one."""
    kind = value.get("format") if isinstance(value, dict) else None
    if kind != FORMAT:
        raise IterandError(f"its format is {shown(kind)}; this version reads {FORMAT!r}")
    record: dict[str, Any] = value
    _check_plain(record)
    for key, wanted in (("recipe", dict), ("result", dict), ("metrics", list), ("environment", dict)):
        if not isinstance(record.get(key), wanted):
            raise IterandError(f"it has no {key}")
    if not record["metrics"] or not all(isinstance(epoch, dict) for epoch in record["metrics"]):
        raise IterandError("its metrics are not one table an epoch")
    for epoch in record["metrics"]:
        _check_numbers("metrics.", epoch, PER_EPOCH)
    result = record["result"]
    _check_numbers("result.", result, _RESULT | {key: most for key, most in _OPTIONAL.items() if key in result})
    _check_numbers("", record, {"seconds": _SECONDS})
    if record.get("randomization_milliseconds") is not None:
        _check_numbers("", record, {"randomization_milliseconds": 1000 * _SECONDS})
    recipe_file.from_dict(record["recipe"])
    return record


def check_complete(value: Any) -> dict[str, Any]:
    """The same of a record whose run is shown again, of which more is read."""
    record = check(value)
    needed = ("validation_accuracy", "weights", "kept", "float32_bytes")
    _check_numbers("result.", record["result"], {key: _OPTIONAL[key] for key in needed})
    loss = record["result"].get("test_loss")
    if isinstance(loss, bool) or not isinstance(loss, (int, float)):
        raise IterandError(f"its result.test_loss is {shown(loss)}; it must be a number")
    return record


def _check_numbers(prefix: str, table: Mapping[str, Any], largest: Mapping[str, float]) -> None:
    for key, most in largest.items():
        number = table.get(key)
        if isinstance(number, bool) or not isinstance(number, (int, float)) or not 0 <= number <= most:
            raise IterandError(f"its {prefix}{key} is {shown(number)}; it must be a number from 0 to {most:g}")


def _check_plain(record: dict[str, Any]) -> None:
    """Refuse what could be read, but not shown: tables too deep, and characters that are none."""
    left: list[tuple[Any, int]] = [(record, 0)]
    while left:
        value, depth = left.pop()
        if depth > _DEEPEST:
            raise IterandError(f"its tables are nested more than {_DEEPEST} deep")
        if isinstance(value, dict):
            left += [(entry, depth + 1) for pair in value.items() for entry in pair]
        elif isinstance(value, list):
            left += [(entry, depth + 1) for entry in value]
        elif isinstance(value, str) and not is_text(value):
            raise IterandError(f"it holds {shown(value)}, which UTF-8 cannot hold")
