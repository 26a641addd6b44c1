"""What an experiment is: a table of cells, each a recipe to be run with several seeds, and the paper's numbers."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from iterand.lab.training.recipe import Recipe

Axis = tuple[str, str | float]


@dataclass(frozen=True)
class PaperNumber:
    """What the paper has for a cell, and where."""

    mean: float
    std: float | None
    where: str
    parameters: float | None = None
    """How many weights the network keeps, in millions, where the table says so."""


@dataclass(frozen=True)
class Cell:
    """One cell of a table: a recipe, to be run with several seeds."""

    label: str
    recipe: Recipe
    axes: tuple[Axis, ...] = ()
    """Where the cell stands in tables and plots: ("network", "Conv6"), ("method", "IteRand (SC)"), ("width", 0.5), …"""
    paper: PaperNumber | None = None

    def runs(self, seeds: int) -> list[Recipe]:
        """The recipe with seeds 0 … seeds − 1."""
        return [replace(self.recipe, seed=seed) for seed in range(seeds)]


@dataclass(frozen=True)
class Experiment:
    """A table of cells."""

    name: str
    title: str
    cells: tuple[Cell, ...]
    seeds: int
    where: str = ""
    """Which figure or table of the paper it is."""
    plot: str = "bars"
    """How it is drawn: bars, curves (over ``across``), parameters, training, heat map, or none."""
    across: str = ""
    """The axis that runs along the horizontal of a plot."""
    measure: str = "test_accuracy"
    """What is compared: test_accuracy, last_validation_accuracy (of the last epoch), or seconds."""


_VALUES = ("mean", "std", "parameters")


def find_number(table: str, axes: Mapping[str, str | float]) -> PaperNumber | None:
    """The number at this place of a table, if the paper has one."""
    return _tables().get(table, {}).get(frozenset(axes.items()))


def table_numbers(table: str) -> dict[frozenset[Axis], PaperNumber]:
    """All numbers of a table by their places."""
    return dict(_tables()[table])


@cache
def _tables() -> dict[str, dict[frozenset[Axis], PaperNumber]]:
    text = (files("iterand.lab.experiments") / "paper.toml").read_text(encoding="utf-8")
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
