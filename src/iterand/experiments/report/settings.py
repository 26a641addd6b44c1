"""What an experiment's runs have in common, and what is each cell's own."""

from collections.abc import Iterable
from dataclasses import asdict

from iterand.experiments.experiment import Cell
from iterand.training.recipe import SECTIONS, Recipe

_APART = ("name", "description", "seed")


def flat(recipe: Recipe) -> dict[str, str]:
    """Every setting that decides a result, but for the seed, as ``key: value``."""
    settings: dict[str, str] = {}
    for key, value in asdict(recipe).items():
        if key in SECTIONS:
            settings |= {f"{key}.{name}": _words(entry) for name, entry in value.items()}
        elif key not in _APART:
            settings[key] = _words(value)
    return settings


def common(cells: Iterable[Cell]) -> dict[str, str]:
    """The settings in which all cells agree: the base of an experiment."""
    all_settings = [flat(cell.recipe) for cell in cells]
    first = all_settings[0]
    return {key: value for key, value in first.items() if all(other[key] == value for other in all_settings)}


def own(recipe: Recipe, base: dict[str, str]) -> dict[str, str]:
    """The settings of a recipe that are not in the base."""
    return {key: value for key, value in flat(recipe).items() if key not in base}


def _words(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)
