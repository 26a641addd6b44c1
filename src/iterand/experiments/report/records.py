"""Records of runs, read back from wherever they are kept; a damaged one is named, never guessed at."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iterand.errors import IterandError
from iterand.experiments.running import RECORD_FORMAT
from iterand.training import recipe_file
from iterand.training.folder import RECORD
from iterand.training.recipe import Recipe

PER_EPOCH = ("epoch", "train_accuracy", "validation_accuracy")
"""What is read of each epoch."""

_FAMILY = RECORD_FORMAT.rpartition(" ")[0]


@dataclass(frozen=True, eq=False)
class Record:
    """One complete run."""

    path: Path
    recipe: Recipe
    result: Mapping[str, Any]
    metrics: tuple[Mapping[str, float], ...]
    seconds: float
    environment: Mapping[str, Any]
    written: float
    """When its file was last written, to tell the newer of two."""

    def number(self, key: str) -> float | None:
        """An entry of the result, where it has such a number."""
        return _number(self.result.get(key))


@dataclass(frozen=True)
class Records:
    """What a folder holds: the records, and a sentence for each file that is a damaged one."""

    found: tuple[Record, ...]
    damaged: tuple[str, ...]


def read_records(folder: Path) -> Records:
    """All records under ``folder``, in the order of their paths; other JSON files are passed over."""
    if not folder.is_dir():
        raise IterandError(f"{folder} is not a folder; name the one that holds the runs or their records")
    found, damaged = list[Record](), list[str]()
    for path in sorted(folder.rglob("*.json")):
        try:
            record = _read(path, folder)
        except (IterandError, OverflowError) as error:  # a recipe may hold a whole number beyond all floats
            damaged.append(f"{path.relative_to(folder)}: {error}")
        else:
            found += [record] if record else []
    return Records(tuple(found), tuple(damaged))


def _read(path: Path, folder: Path) -> Record | None:
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        value, written = json.loads(text), path.stat().st_mtime
    except (OSError, ValueError, RecursionError) as error:
        if path.name == RECORD or _FAMILY in text:
            raise IterandError(f"it cannot be read: {error}") from None
        return None
    kind = value.get("format") if isinstance(value, dict) else None
    if kind == RECORD_FORMAT:
        return _checked(value, path.relative_to(folder), written)
    if path.name == RECORD or str(kind).startswith(_FAMILY):
        raise IterandError(f"its format is {kind!r}; this version reads {RECORD_FORMAT!r}")
    return None


def _checked(value: dict[str, Any], path: Path, written: float) -> Record:
    recipe, result, metrics, environment = (
        _part(value, key, kind)
        for key, kind in (("recipe", dict), ("result", dict), ("metrics", list), ("environment", dict))
    )
    if not metrics or not all(isinstance(epoch, dict) for epoch in metrics):
        raise IterandError("its metrics are not one table an epoch")
    seconds = _required("seconds", value.get("seconds"))
    _required("result.test_accuracy", result.get("test_accuracy"))
    curves = [{key: _required(f"metrics.{key}", epoch.get(key)) for key in PER_EPOCH} for epoch in metrics]
    return Record(path, recipe_file.from_dict(recipe), result, tuple(curves), seconds, environment, written)


def _part(value: dict[str, Any], key: str, kind: type) -> Any:
    if not isinstance(value.get(key), kind):
        raise IterandError(f"it has no {key}")
    return value[key]


def _required(name: str, value: object) -> float:
    number = _number(value)
    if number is None:
        raise IterandError(f"its {name} is {value!r}; it must be a number")
    return number


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        return float(value) if math.isfinite(value) else None
    except OverflowError:  # a whole number beyond all floats
        return None
