"""The recipes of the package by name, and the profiles that adapt them.

A recipe of the package is a TOML file in ``recipes/``. It may extend another one, and say what changes with the
sparsity in tables ``[[when]]``::

    [[when]]
    sparsity = "<= 0.7"         # <, <=, > or >= and a number
    method.ranking = "layer"    # any settings
    training.epochs = 480

All tables whose condition holds for the sparsity of the run apply, in the order of the file, after the other settings
of the file. Settings of a recipe that extends it, and those of the user (``--set``), win.
"""

import hashlib
import json
import operator
import os
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from iterand.checks import shown, unknown
from iterand.errors import RecipeError
from iterand.lab.data import DATASETS, IMAGE_FOLDER
from iterand.lab.data.image_folder import fingerprint
from iterand.lab.networks import network_names
from iterand.lab.networks.external import UserCode, names_file
from iterand.lab.training import recipe_file
from iterand.lab.training.checkpoint import CHECKPOINT
from iterand.lab.training.recipe import METHODS, Recipe

_FOLDER = files("iterand.lab.experiments") / "recipes"
_COMPARISONS = {"<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge}


def recipe_names() -> list[str]:
    """The names of all recipes in the package."""
    return list(_names())


def find_recipe(name_or_path: str, settings: Sequence[str] = ()) -> Recipe:
    """A recipe of the package by name, or another one by path, with ``key=value`` settings applied.

    The sparsity is read first, since it decides which ``[[when]]`` tables of the package's recipes apply. Relative
    paths in a file are relative to it, those in settings to the working folder; in the recipe they are absolute.
    """
    of_sparsity = [one for one in settings if one.partition("=")[0].strip() in ("sparsity", "method.sparsity")]
    sparsity = _read(name_or_path, of_sparsity, _of_package).method.sparsity
    return _read(name_or_path, settings, lambda name: _of_package(name, sparsity))


def pin(recipe: Recipe, code: UserCode | None) -> Recipe:
    """The recipe with the digests of the user's images, network and teacher, so that a run of others is not resumed.

    Digests that the recipe has already, such as that of a run folder, must be the same.
    """
    data, network, training = recipe.data, recipe.network, recipe.training
    if data.name == IMAGE_FOLDER:
        if not data.path:
            raise RecipeError(
                f"data.name is '{IMAGE_FOLDER}', but data.path is missing; it is the folder of the images"
            )
        found = fingerprint(Path(data.path))
        _check_same("data.sha256", data.sha256, found, f"the images in {data.path}")
        data = replace(data, sha256=found)
    if code is not None:
        found = code.sha256
        _check_same("network.sha256", network.sha256, found, str(code.file))
        network = replace(network, sha256=found)
    if training.teacher:
        found = _network_sha256(Path(training.teacher))
        _check_same("training.teacher_sha256", training.teacher_sha256, found, f"the teacher {training.teacher}")
        training = replace(training, teacher_sha256=found)
    return replace(recipe, data=data, network=network, training=training)


def _network_sha256(path: Path) -> str:
    """SHA-256 of the file that has the network: a ticket, or the checkpoint of a run folder."""
    file = path / CHECKPOINT if path.is_dir() else path
    if not file.is_file():
        raise RecipeError(f"training.teacher is {path}, which is neither a ticket nor a run folder with a checkpoint")
    with file.open("rb") as opened:
        return hashlib.file_digest(opened, "sha256").hexdigest()


def _check_same(key: str, wanted: str, found: str, what: str) -> None:
    if wanted not in ("", found):
        raise RecipeError(f"{key} is {shown(wanted)} in the recipe, but {found!r} now: {what} changed; leave {key} out")


def _read(name_or_path: str, settings: Sequence[str], of_package: Callable[[str], Recipe]) -> Recipe:
    is_path = _is_path(name_or_path)
    recipe = _read_file(Path(name_or_path), of_package) if is_path else of_package(name_or_path)
    changed = recipe_file.override(recipe, settings) if settings else recipe
    if changed.name != recipe.name:
        _check_name(changed.name)
    return _with_absolute_paths(changed, Path.cwd())


def _check_name(name: str) -> None:
    """Refuse a new name of a recipe that the user meant for its method, network or data."""
    known = {"method": METHODS, "network": network_names(), "data": (*DATASETS, IMAGE_FOLDER)}
    for section, names in known.items():
        if name in names:
            raise RecipeError(f"name is {name!r}, but name only names the run; write {section}.name={name}")


def _is_path(name: str) -> bool:
    return name.endswith(".toml") or "/" in name


def _read_file(path: Path, of_package: Callable[[str], Recipe], extending: tuple[Path, ...] = ()) -> Recipe:
    """The recipe in a file; one that it extends is of the package, or a path relative to this file."""
    here = path.absolute()
    chain = (*extending, here.resolve())
    if chain[-1] in extending:
        names = " → ".join(each.name for each in chain[chain.index(chain[-1]) :])
        raise RecipeError(f"extends goes in a circle: {names}; one of them must not extend another")

    def find(name: str) -> Recipe:
        return _read_file(here.parent / name, of_package, chain) if _is_path(name) else of_package(name)

    return _with_absolute_paths(recipe_file.read(path, find), here.parent)


def _with_absolute_paths(recipe: Recipe, folder: Path) -> Recipe:
    """The recipe with relative paths of the user's images, network and teacher taken from this folder."""
    data, network, training = recipe.data, recipe.network, recipe.training
    if data.path:
        data = replace(data, path=_absolute(data.path, folder))
    if names_file(network.name):
        source, _, function = network.name.rpartition(":")
        network = replace(network, name=f"{_absolute(source, folder)}:{function}")
    if training.teacher:
        training = replace(training, teacher=_absolute(training.teacher, folder))
    return replace(recipe, data=data, network=network, training=training)


def _absolute(path: str, folder: Path) -> str:
    return os.path.normpath(folder / os.path.expanduser(path))  # noqa: PTH111 - Path's raises for users that do not exist


@cache
def _names() -> list[str]:
    return sorted(entry.name.removesuffix(".toml") for entry in _FOLDER.iterdir() if entry.name.endswith(".toml"))


@cache
def _of_package(name: str, sparsity: float | None = None) -> Recipe:
    """A recipe of the package, with the ``[[when]]`` tables that hold at a sparsity; without a sparsity none do."""
    if name not in recipe_names():
        sentence = unknown("recipe", name, recipe_names())
        raise RecipeError(f"{sentence} (an own recipe is given as a path to a .toml file)")
    values = tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))
    base = _of_package(values.pop("extends"), sparsity) if "extends" in values else Recipe()
    cases = values.pop("when", [])
    settings = _as_settings(values)
    for case in cases:
        condition = case.pop("sparsity")
        if sparsity is not None and _holds(condition, sparsity):
            settings += _as_settings(case)
    return recipe_file.override(base, settings)


def _holds(condition: str, value: float) -> bool:
    """Whether a condition such as ``<= 0.7`` holds for a value."""
    comparison, _, limit = condition.partition(" ")
    return bool(_COMPARISONS[comparison](value, float(limit)))


def _as_settings(values: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Nested tables as ``key=value`` settings."""
    settings: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            settings += _as_settings(value, f"{prefix}{key}.")
        else:
            settings.append(f"{prefix}{key}={json.dumps(value)}")
    return settings


def profile_names() -> list[str]:
    """The names of all profiles."""
    return list(_PROFILES)


def check_profile(name: str) -> str:
    """The name itself, if it is a profile's."""
    if name not in _PROFILES:
        raise ValueError(f"unknown profile {name!r}; there are {', '.join(_PROFILES)}")
    return name


def adapt(recipe: Recipe, profile: str) -> Recipe:
    """The recipe in a profile; where nothing changes it is the same run, so it keeps its name."""
    changes = _PROFILES[check_profile(profile)](recipe)
    adapted = recipe_file.override(recipe, changes) if changes else recipe
    return adapted if adapted == recipe else replace(adapted, name=f"{profile}-{recipe.name}")


def _paper_changes(recipe: Recipe) -> list[str]:
    """The recipes are the paper's."""
    return []


def _text_changes(recipe: Recipe) -> list[str]:
    """Appendix B names no augmentation, but follows Ramanujan et al., who crop, flip, and normalise by CIFAR-10."""
    if recipe.data.name != "cifar10" or recipe.data.augmentation != "resized_crop":
        return []
    changes = ["augmentation=crop", "normalization=cifar10"]
    if recipe.network.name == "conv6" and not recipe.method.trains_weights:
        changes.append("learning_rate.initial=0.2")
    return changes


def _best_changes(recipe: Recipe) -> list[str]:
    """What the recipe ``best-X`` of a network changes of the paper's recipe ``X``, where it makes sense.

    Where weights are trained, that is the data, whatever the sparsity. Without redrawing, no setting of redrawing
    changes. The rate 1 is for signed constants: of two values, a draw soon finds the right one.
    """
    base = recipe.network.name.removesuffix("_cifar")
    if recipe.data.name != "cifar10" or f"best-{base}" not in recipe_names():
        return []
    trains_weights = recipe.method.trains_weights
    at = [] if trains_weights else [f"sparsity={recipe.method.sparsity}"]
    before, after = (_flat(find_recipe(name, at)) for name in (base, f"best-{base}"))
    changes = {key: value for key, value in after.items() if value != before[key]}
    if trains_weights:
        changes = {key: value for key, value in changes.items() if key.startswith("data.")}
    if recipe.method.name != "iterand":
        changes = {key: value for key, value in changes.items() if key not in _REDRAWING}
    if recipe.method.weight_distribution != "signed_constant":
        changes.pop("method.rate", None)
    return [f"{key}={json.dumps(value)}" for key, value in changes.items()]


_REDRAWING = ("method.candidates", "method.redrawn_scores", "method.rate")


def _flat(recipe: Recipe) -> dict[str, Any]:
    tables = {section: table for section, table in recipe_file.as_dict(recipe).items() if isinstance(table, dict)}
    return {f"{section}.{key}": value for section, table in tables.items() for key, value in table.items()}


_PROFILES: dict[str, Callable[[Recipe], list[str]]] = {
    "paper": _paper_changes,
    "text": _text_changes,
    "best": _best_changes,
}
