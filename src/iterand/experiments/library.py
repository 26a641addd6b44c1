"""The recipes that come with the package, by name."""

from functools import cache
from importlib.resources import files
from pathlib import Path

from iterand.checks import unknown
from iterand.errors import RecipeError
from iterand.training import recipe_file
from iterand.training.recipe import Recipe

_FOLDER = files("iterand.experiments") / "recipes"


def recipe_names() -> list[str]:
    """The names of all recipes in the package."""
    return list(_names())


@cache
def _names() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml"))


def find_recipe(name_or_path: str) -> Recipe:
    """A recipe of the package by name, or one's own by path; either may extend one of the package."""
    if name_or_path.endswith(".toml") or "/" in name_or_path:
        return recipe_file.read(Path(name_or_path), _of_package)
    return _of_package(name_or_path)


@cache
def _of_package(name: str) -> Recipe:
    if name not in recipe_names():
        sentence = unknown("recipe", name, recipe_names())
        raise RecipeError(f"{sentence} (an own recipe is given as a path to a .toml file)")
    text = (_FOLDER / f"{name}.toml").read_text(encoding="utf-8")
    return recipe_file.from_toml(text, f"recipe {name}", _of_package)
