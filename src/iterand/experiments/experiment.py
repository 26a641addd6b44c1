"""What an experiment is: a table of cells, each a recipe to be run with several seeds."""

from dataclasses import dataclass, replace

from iterand.training.recipe import Recipe

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
    """What is compared: test_accuracy, validation_accuracy (of the last epoch), or seconds."""
