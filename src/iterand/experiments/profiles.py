"""Profiles: the same experiments with the authors' settings, with the text's, or with ours."""

from collections.abc import Callable
from dataclasses import replace

from iterand.training import recipe_file
from iterand.training.recipe import Recipe


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


def _paper(recipe: Recipe) -> list[str]:
    return []


def _text(recipe: Recipe) -> list[str]:
    """Appendix B names no augmentation, but follows Ramanujan et al., who crop, flip, and normalise by CIFAR-10."""
    if not _authors_cifar10(recipe):
        return []
    changes = ["augmentation=crop", "normalization=cifar10"]
    if recipe.network.name == "conv6" and not recipe.method.trains_weights:
        changes.append("learning_rate.initial=0.2")
    return changes


def _best(recipe: Recipe) -> list[str]:
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


_PROFILES: dict[str, Callable[[Recipe], list[str]]] = {"paper": _paper, "text": _text, "best": _best}
