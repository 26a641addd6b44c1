"""The experiments by name: the paper's, in its order, and our own."""

from dataclasses import replace

from iterand.checks import unknown
from iterand.experiments import own
from iterand.experiments.experiment import Cell, Experiment, PaperNumber
from iterand.experiments.paper import ablations, imagenet, overhead, sparsities, text, widths
from iterand.experiments.profiles import adapt, check_profile
from iterand.experiments.scale import tiny
from iterand.training.recipe import SCALES

__all__ = ["Cell", "Experiment", "PaperNumber", "experiment_names", "find_experiment"]

_EXPERIMENTS = {
    "digits": own.digits,
    "figure1": ablations.figure1,
    "figure2": widths.figure2,
    "figure3": imagenet.figure3,
    "figure3-curves": imagenet.figure3_curves,
    "period": ablations.period,
    "period-rate": ablations.period_rate,
    "overhead": overhead.overhead,
    "sparsity": sparsities.sparsity,
    "imp": sparsities.imp,
    "width": widths.width,
    "large": imagenet.large,
    "imdb": text.imdb,
    "best": own.best,
    "parts": own.parts,
}


def experiment_names() -> list[str]:
    """The names of all experiments."""
    return list(_EXPERIMENTS)


def find_experiment(name: str, profile: str = "paper", scale: str = "full") -> Experiment:
    """The experiment of this name, in a profile, at a scale."""
    if name not in _EXPERIMENTS:
        raise ValueError(unknown("experiment", name, _EXPERIMENTS))
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}; there are {', '.join(SCALES)}")
    check_profile(profile)
    experiment = _EXPERIMENTS[name]()
    ours = experiment.where == "ours"  # whose recipes are what they are
    cells = tuple(cell if ours else replace(cell, recipe=adapt(cell.recipe, profile)) for cell in experiment.cells)
    if scale == "tiny":
        cells = tuple(replace(cell, recipe=tiny(cell.recipe)) for cell in cells)
        return replace(experiment, cells=cells, seeds=1)
    return replace(experiment, cells=cells)
