"""Records of runs, read back from wherever they are kept; a damaged one is named, never guessed at."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from iterand.checks import is_text
from iterand.errors import IterandError
from iterand.training import recipe_file
from iterand.training import record as record_file
from iterand.training.folder import RECORD
from iterand.training.recipe import Recipe

_BEGINNING = 1 << 20  # characters


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
        value = self.result.get(key)
        return None if value is None else float(value)


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
        name = path.relative_to(folder)
        try:
            value = _read(path)
            if value is not None:
                found.append(_record(value, name, path.stat().st_mtime))
        except (IterandError, OSError) as error:
            damaged.append(f"{_as_text(name)}: {error}")
    return Records(tuple(found), tuple(damaged))


def _read(path: Path) -> Any:
    """What a file holds that is, or should be, a record; None for another file."""
    try:
        value = record_file.read(path)
    except IterandError:
        if path.name == RECORD or _names_format(path):
            raise
        return None
    kind = value.get("format") if isinstance(value, dict) else None
    return value if path.name == RECORD or str(kind).startswith(record_file.FAMILY) else None


def _names_format(path: Path) -> bool:
    """Whether a file that cannot be read begins like a record."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return record_file.FAMILY in file.read(_BEGINNING)


def _record(value: Any, name: Path, written: float) -> Record:
    record = record_file.check(value)
    if not is_text(str(name)):
        raise IterandError("its path is not UTF-8, so no page can name it; rename its folder")
    curves = tuple({key: float(epoch[key]) for key in record_file.PER_EPOCH} for epoch in record["metrics"])
    recipe = recipe_file.from_dict(record["recipe"])
    return Record(name, recipe, record["result"], curves, float(record["seconds"]), record["environment"], written)


def _as_text(name: Path) -> str:
    return str(name).encode("utf-8", "backslashreplace").decode()
