"""The recipes that come with the package, by name: a file each, and ours, which are the profile ``best`` of some."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from iterand.checks import unknown
from iterand.errors import RecipeError
from iterand.experiments.profiles import adapt
from iterand.training import recipe_file
from iterand.training.recipe import Recipe

_FOLDER = files("iterand.experiments") / "recipes"
_BEST = {f"best-{base}": base for base in ("conv6", "resnet18", "resnet20", "resnet34", "vgg11")}


def recipe_names() -> list[str]:
    """The names of all recipes in the package."""
    return list(_names())


@cache
def _names() -> list[str]:
    of_files = [entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml")]
    return sorted([*of_files, *_BEST])


def find_recipe(name_or_path: str, settings: Sequence[str] = ()) -> Recipe:
    """A recipe of the package by name, or one's own by path, with other settings; either may extend one of the package.

    What the recipes ``best-*`` are depends on the sparsity, so that is set before all else.
    """
    of_sparsity = [one for one in settings if one.partition("=")[0].strip() in ("sparsity", "method.sparsity")]
    sparsity = _found(name_or_path, of_sparsity, _of_package).method.sparsity
    return _found(name_or_path, settings, lambda name: _best(name, sparsity) if name in _BEST else _of_package(name))


def _found(name_or_path: str, settings: Sequence[str], of_package: Callable[[str], Recipe]) -> Recipe:
    is_path = name_or_path.endswith(".toml") or "/" in name_or_path
    recipe = recipe_file.read(Path(name_or_path), of_package) if is_path else of_package(name_or_path)
    return recipe_file.override(recipe, settings)


@cache
def _of_package(name: str) -> Recipe:
    if name not in recipe_names():
        sentence = unknown("recipe", name, recipe_names())
        raise RecipeError(f"{sentence} (an own recipe is given as a path to a .toml file)")
    if name in _BEST:
        return _best(name, _of_package(_BEST[name]).method.sparsity)
    text = (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    return recipe_file.from_toml(text, f"recipe {name}", _of_package)


def _best(name: str, sparsity: float) -> Recipe:
    of_paper = recipe_file.override(_of_package(_BEST[name]), [f"sparsity={sparsity}"])
    title = of_paper.description.partition(" with ")[0]
    return replace(adapt(of_paper, "best"), description=f"{title} as we recommend it (docs/beyond.md), IteRand")
