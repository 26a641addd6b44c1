"""The records under a folder, grouped by recipe."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from iterand.checks import is_text
from iterand.errors import IterandError
from iterand.lab.training import recipe_file
from iterand.lab.training.folder import PER_EPOCH, RECORD, RECORD_FAMILY, check_record, read_record
from iterand.lab.training.recipe import Recipe

_BEGINNING = 1 << 20  # characters of a file that are searched for the format of records

Sharing = Literal["cpu", "unknown", "shared"]
"""Whether a run on a GPU shared it with other runs, as far as its record tells; "cpu" for a run without a GPU."""


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
    """When its file was last written: of two records of one run the newer counts."""

    @property
    def date(self) -> str | None:
        """The day of the run, such as ``2026-11-16``; None where the record has no date."""
        try:
            return datetime.fromisoformat(self.environment["date"]).date().isoformat()
        except (KeyError, TypeError, ValueError):
            return None

    @cached_property
    def sharing(self) -> Sharing:
        """Whether the run shared its GPU: its command may say that several runs used one at a time."""
        hardware = self.environment.get("hardware")
        if not isinstance(hardware, dict) or not hardware.get("gpu"):
            return "cpu"
        words = str(self.environment.get("command")).replace("=", " ").split()
        options = dict(pairwise(words))
        jobs, share = _number(options.get("--jobs")), _number(options.get("--gpus-per-run"))
        return "shared" if (jobs is not None and jobs > 1) or (share is not None and share < 1) else "unknown"

    def number(self, key: str) -> float | None:
        """An entry of the result, where it has such a number."""
        value = self.result.get(key)
        return None if value is None else float(value)


def _number(text: str | None) -> float | None:
    try:
        return None if text is None else float(text)
    except ValueError:
        return None


@dataclass(frozen=True)
class Records:
    """The records of a folder, and a sentence for each damaged one."""

    found: tuple[Record, ...]
    damaged: tuple[str, ...]


def read_records(folder: Path) -> Records:
    """All records under ``folder``, in the order of their paths; other JSON files are ignored."""
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
    """The value in a file that is, or should be, a record; None for other files."""
    try:
        value = read_record(path)
    except IterandError:
        if path.name == RECORD or _names_format(path):
            raise
        return None
    kind = value.get("format") if isinstance(value, dict) else None
    return value if path.name == RECORD or str(kind).startswith(RECORD_FAMILY) else None


def _names_format(path: Path) -> bool:
    """Whether a file that cannot be read begins like a record."""
    if not path.is_file():
        return False
    with path.open(encoding="utf-8", errors="replace") as file:
        return RECORD_FAMILY in file.read(_BEGINNING)


def _record(value: Any, name: Path, written: float) -> Record:
    record = check_record(value)
    if not is_text(str(name)):
        raise IterandError("its path is not UTF-8, so no page can name it; rename its folder")
    curves = tuple({key: float(epoch[key]) for key in PER_EPOCH} for epoch in record["metrics"])
    recipe = recipe_file.from_dict(record["recipe"])
    return Record(name, recipe, record["result"], curves, float(record["seconds"]), record["environment"], written)


def _as_text(name: Path) -> str:
    return str(name).encode("utf-8", "backslashreplace").decode()


@cache
def identity(recipe: Recipe) -> str:
    """The digest of a recipe without its seed, name and description: cells and records are matched by it."""
    return recipe_file.digest(replace(recipe, seed=0))


@dataclass(frozen=True)
class Superseded:
    """A record that does not count, since a newer one has the same recipe and seed."""

    record: Record
    newer: Record


@dataclass(frozen=True)
class Groups:
    """Records by the identity of their recipe, each seed once."""

    by_identity: Mapping[str, tuple[Record, ...]]
    superseded: tuple[Superseded, ...]

    def of(self, recipe: Recipe) -> tuple[Record, ...]:
        """The records of a cell with this recipe, in the order of their seeds."""
        return self.by_identity.get(identity(recipe), ())


def group(records: Iterable[Record]) -> Groups:
    """Group records by recipe; of two records with one recipe and seed the newer counts."""
    newest: dict[tuple[str, int], Record] = {}
    older: list[tuple[tuple[str, int], Record]] = []
    for record in sorted(records, key=lambda record: (-record.written, record.path)):
        key = identity(record.recipe), record.recipe.seed
        if key in newest:
            older.append((key, record))
        else:
            newest[key] = record
    groups: dict[str, list[Record]] = {}
    for (name, _), record in sorted(newest.items()):
        groups.setdefault(name, []).append(record)
    return Groups(
        {name: tuple(members) for name, members in groups.items()},
        tuple(Superseded(record, newest[key]) for key, record in older),
    )
