"""The recipes of the package by name, and the profiles that adapt them."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path

from iterand.checks import unknown
from iterand.errors import RecipeError
from iterand.lab.training import recipe_file
from iterand.lab.training.recipe import Recipe


def adapt(recipe: Recipe, profile: str) -> Recipe:
    """The recipe in a profile; where nothing changes it is the same run, so it keeps its name."""
    changes = _PROFILES[check_profile(profile)](recipe)
    adapted = recipe_file.override(recipe, changes) if changes else recipe
    return adapted if adapted == recipe else replace(adapted, name=_renamed(recipe.name, profile))


def check_profile(name: str) -> str:
    """The name itself, if it is a profile's."""
    if name not in _PROFILES:
        raise ValueError(f"unknown profile {name!r}; there are {', '.join(_PROFILES)}")
    return name


def profile_names() -> list[str]:
    """The names of all profiles."""
    return list(_PROFILES)


def _renamed(name: str, profile: str) -> str:
    return name if name.startswith(f"{profile}-") else f"{profile}-{name}"


def _paper_changes(recipe: Recipe) -> list[str]:
    return []


def _text_changes(recipe: Recipe) -> list[str]:
    """Appendix B names no augmentation, but follows Ramanujan et al., who crop, flip, and normalise by CIFAR-10."""
    if not _authors_cifar10(recipe):
        return []
    changes = ["augmentation=crop", "normalization=cifar10"]
    if recipe.network.name == "conv6" and not recipe.method.trains_weights:
        changes.append("learning_rate.initial=0.2")
    return changes


def _best_changes(recipe: Recipe) -> list[str]:
    """What docs/beyond.md recommends; Conv6 has no batch norm to even out layers of different density."""
    changes = ["augmentation=crop_cutout"] if _authors_cifar10(recipe) else []
    if recipe.data.name != "cifar10" or recipe.method.trains_weights:
        return changes
    if recipe.method.name == "iterand":
        changes += ["candidates=negative", "redrawn_scores=follow"]
        if recipe.method.weight_distribution == "signed_constant":  # of two values a draw finds the right one soon
            changes.append("rate=1.0")
    if recipe.network.name != "conv6":
        changes += ["ranking=global", "norms=shifted", "sparsity_schedule=cubic", "sparsity_schedule_share=0.5"]
        changes += ["learning_rate.initial=0.5", "learning_rate.schedule=cosine", "weight_decay=1e-4"]
    return changes + _by_sparsity(recipe.network.name, recipe.method.sparsity)


def _by_sparsity(network: str, sparsity: float) -> list[str]:
    """Where much is kept, a wide network is held back and searched longer; where little, what is left speaks louder."""
    changes = []
    if network == "resnet20" or (network == "vgg11" and sparsity <= 0.9):  # the others were not tried with it
        changes.append("norm_statistics=recomputed")
    if network == "vgg11" and sparsity <= 0.9:
        changes.append("label_smoothing=0.1")
    if network == "vgg11" and sparsity <= 0.7:
        changes += ["ranking=layer", "augmentation=crop_cutout"]
    if network in ("vgg11", "resnet20") and sparsity <= 0.5:  # magnitude pruning trains for 640
        changes.append("epochs=320")
    elif network == "vgg11" and sparsity <= 0.7:
        changes.append("epochs=480")
    if network == "resnet20" and sparsity >= 0.99:
        changes += ["augmentation=none", "epochs=320", "sparsity_schedule_share=0.8", "period=1000"]
        # Gradients are four times as large then, so the rate is a quarter and what scores forget stays.
        changes += ["temperature=0.25", "learning_rate.initial=0.125", "weight_decay=4e-4"]
    return changes


def _authors_cifar10(recipe: Recipe) -> bool:
    return recipe.data.name == "cifar10" and recipe.data.augmentation == "resized_crop"


_PROFILES: dict[str, Callable[[Recipe], list[str]]] = {
    "paper": _paper_changes,
    "text": _text_changes,
    "best": _best_changes,
}


_FOLDER = files("iterand.lab.experiments") / "recipes"
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
