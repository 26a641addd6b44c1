"""An experiment: a table of cells, each a recipe to run with several seeds, and the paper's number for it."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any

from iterand.lab.training.recipe import Recipe

Axis = tuple[str, str | float]
"""An axis of a table and a cell's position on it, such as ("width", 0.5)."""


@dataclass(frozen=True)
class PaperNumber:
    """The paper's number for a cell, and the table it is from."""

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
    """Its positions in tables and plots: ("network", "Conv6"), ("method", "IteRand (SC)"), ("width", 0.5), …"""
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
    """Which figure or table of the paper it is; "ours" for experiments beyond the paper."""
    plot: str = "bars"
    """The kind of plot: bars, curves (over ``across``), parameters, training, heat map, or none."""
    across: str = ""
    """The horizontal axis of a plot."""
    measure: str = "test_accuracy"
    """What is compared: test_accuracy, validation_accuracy (of the last epoch), or seconds."""


def find_number(table: str, axes: Mapping[str, str | float]) -> PaperNumber | None:
    """The number of the cell with these axis positions in a table of ``paper.toml``, if the paper has one."""
    return _tables().get(table, {}).get(frozenset(axes.items()))


@cache
def _tables() -> dict[str, dict[frozenset[Axis], PaperNumber]]:
    tables = tomllib.loads((files("iterand.lab.experiments") / "paper.toml").read_text(encoding="utf-8"))
    return {
        name: {axes: number for row in table["rows"] for axes, number in _row_cells(row, table["where"])}
        for name, table in tables.items()
    }


def _row_cells(row: Mapping[str, Any], where: str) -> list[tuple[frozenset[Axis], PaperNumber]]:
    """The cells of a row: a list has an entry for each cell, any other value is the same for all."""
    count = len(row["mean"]) if isinstance(row["mean"], list) else 1
    columns = {key: value if isinstance(value, list) else [value] * count for key, value in row.items()}
    cells = []
    for values in zip(*columns.values(), strict=True):
        axes = dict(zip(columns, values))
        mean, std, parameters = (axes.pop(key, None) for key in ("mean", "std", "parameters"))
        cells.append((frozenset(axes.items()), PaperNumber(mean, std, where, parameters)))
    return cells
