"""The paper's numbers (``paper.toml``) by table, and by where they stand in it."""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any

from iterand.experiments.experiment import Axis, PaperNumber

_VALUES = ("mean", "std", "parameters")


def find_number(table: str, axes: Mapping[str, str | float]) -> PaperNumber | None:
    """The number at this place of a table, if the paper has one."""
    return _tables().get(table, {}).get(frozenset(axes.items()))


def table_numbers(table: str) -> dict[frozenset[Axis], PaperNumber]:
    """All numbers of a table by their places."""
    return dict(_tables()[table])


@cache
def _tables() -> dict[str, dict[frozenset[Axis], PaperNumber]]:
    text = (files("iterand.experiments") / "paper.toml").read_text(encoding="utf-8")
    tables = tomllib.loads(text)
    return {
        name: {
            place: number for row in table["rows"] for place, number in _spread(row, table["where"])
        }
        for name, table in tables.items()
    }  # fmt: skip


def _spread(row: Mapping[str, Any], where: str) -> list[tuple[frozenset[Axis], PaperNumber]]:
    """The numbers of a row: what is a list has an entry for each, what is not holds for all."""
    count = len(row["mean"]) if isinstance(row["mean"], list) else 1
    columns = {key: value if isinstance(value, list) else [value] * count for key, value in row.items()}
    found = []
    for entries in zip(*columns.values(), strict=True):
        entry = dict(zip(columns, entries))
        mean, std, parameters = (entry.pop(key, None) for key in _VALUES)
        found.append((frozenset(entry.items()), PaperNumber(mean, std, where, parameters)))
    return found
