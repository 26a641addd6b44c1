"""Names and defaults for help texts and tab completion, which must not import torch."""

from collections.abc import Callable, Iterable
from importlib.resources import files

BENCHMARKS = ("step", "select", "randomize", "augment", "epoch", "ticket")
DATASETS = ("digits", "cifar10", "imagenet", "imdb")
EXPERIMENTS = (
    "digits",
    "figure1",
    "figure2",
    "figure3",
    "figure3-curves",
    "period",
    "period-rate",
    "overhead",
    "sparsity",
    "imp",
    "width",
    "large",
    "imdb",
    "best",
    "parts",
)
PROFILES = ("paper", "text", "best")
SCALES = ("full", "tiny")
DATA_VARIABLE = "ITERAND_DATA"
QUALITY = 95  # JPEG quality of scaled images in packs
_BEST = ("best-conv6", "best-resnet18", "best-resnet20", "best-resnet34", "best-vgg11")


def recipes() -> list[str]:
    """The names of the recipes in the package."""
    found = (entry.name for entry in (files("iterand") / "lab" / "experiments" / "recipes").iterdir())
    return sorted([*(name.removesuffix(".toml") for name in found if name.endswith(".toml")), *_BEST])


def completing(names: Iterable[str] | Callable[[], Iterable[str]]) -> Callable[[str], list[str]]:
    """A completion function for typer: the names that begin with the incomplete word."""

    def complete(incomplete: str) -> list[str]:
        return [name for name in (names() if callable(names) else names) if name.startswith(incomplete)]

    return complete
