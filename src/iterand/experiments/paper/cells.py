"""From a row and a column of a table to a cell: its recipe, its label, the paper's number."""

from dataclasses import replace

from iterand.experiments.experiment import Cell
from iterand.experiments.library import find_recipe, recipe_names
from iterand.experiments.numbers import find_number
from iterand.training import recipe_file
from iterand.training.recipe import Recipe

CIFAR10 = {"Conv6": "conv6", "ResNet18": "resnet18", "ResNet34": "resnet34"}
"""The networks of Figure 2, and the recipe each starts from."""

_METHODS = {"IteRand": "iterand", "edge-popup": "edge_popup", "SGD": "sgd", "IMP": "imp"}
_WEIGHTS = {"SC": "signed_constant", "KU": "kaiming_uniform"}
_SETTINGS = {  # axes that are settings, with their symbol in the paper
    "width": ("network.width_factor", "ρ"),
    "sparsity": ("method.sparsity", "p"),
    "period": ("method.period", "K_per"),
    "rate": ("method.rate", "r"),
}


def start(base: str, method: str) -> Recipe:
    """The recipe for a method as the tables call it, such as ``edge-popup (KU)``.

    It is ``BASE-METHOD`` where there is such a recipe, since the method has settings of its own there.
    """
    name, _, weights = method.removesuffix(")").partition(" (")
    own = f"{base}-{_METHODS[name]}"
    recipe = find_recipe(own if own in recipe_names() else base)
    changed = replace(recipe.method, name=_METHODS[name])
    if weights:
        changed = replace(changed, weight_distribution=_WEIGHTS[weights])
    return replace(recipe, method=changed)


def cell(table: str, recipe: Recipe, **axes: str | float) -> Cell:
    """A cell at this place of a table; axes that are settings change the recipe."""
    settings = [f"{_SETTINGS[axis][0]}={value}" for axis, value in axes.items() if axis in _SETTINGS]
    words = [f"{_SETTINGS[axis][1]} = {value:g}" if axis in _SETTINGS else value for axis, value in axes.items()]
    return Cell(
        ", ".join(map(str, words)),
        recipe_file.override(recipe, settings),
        tuple(axes.items()),
        find_number(table, axes),
    )
