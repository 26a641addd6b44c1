"""The experiments: which runs make up each."""

import difflib
from dataclasses import dataclass, replace

from iterand.experiments.library import find_recipe
from iterand.training import recipe_file
from iterand.training.recipe import Recipe


@dataclass(frozen=True)
class PaperNumber:
    """What the paper has for a cell, and where."""

    mean: float
    std: float | None
    where: str


@dataclass(frozen=True)
class Cell:
    """One cell of a table: a recipe, to be run with several seeds."""

    label: str
    recipe: Recipe
    axes: tuple[tuple[str, str | float], ...] = ()
    """Where the cell stands in tables and plots: ("network", "conv6"), ("method", "IteRand"), ("width", 0.5), …"""
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
    """How it is drawn: bars, curves (accuracy over ``across``), parameters, training, heat map, or none."""
    across: str = ""
    """The axis that runs along the horizontal of a plot."""


def _digits() -> Experiment:
    iterand = find_recipe("digits")
    edge_popup = recipe_file.override(iterand, ["method.name=edge_popup"])
    sgd = recipe_file.override(iterand, ["method.name=sgd", "learning_rate.initial=0.02"])
    cells = (Cell("SGD", sgd), Cell("edge-popup", edge_popup), Cell("IteRand", iterand))
    return Experiment("digits", "The point of the paper on a laptop: three methods, one narrow network", cells, seeds=5)


_EXPERIMENTS = {"digits": _digits}


def experiment_names() -> list[str]:
    """The names of all experiments."""
    return sorted(_EXPERIMENTS)


def find_experiment(name: str) -> Experiment:
    """The experiment of this name."""
    if name not in _EXPERIMENTS:
        close = difflib.get_close_matches(name, _EXPERIMENTS, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(experiment_names())}"
        raise ValueError(f"unknown experiment {name!r}; {hint}")
    return _EXPERIMENTS[name]()
