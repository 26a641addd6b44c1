"""All experiments by name."""

from dataclasses import replace

from iterand.checks import unknown
from iterand.lab.experiments import extras, paper
from iterand.lab.experiments.experiment import Cell, Experiment, PaperNumber
from iterand.lab.experiments.library import adapt, check_profile
from iterand.lab.training.recipe import SCALES, Recipe

_BATCH = {"imagenet": 2}
_STEPS = {"imagenet": 2}  # an epoch, of which there are three
_WIDTH = {  # what is left of a network's width; at p = 0.99 every layer must still have a weight to keep
    "digits_conv": 1.0,
    "resnet20": 1 / 2,
    "lstm": 1 / 8,
    "bilstm": 1 / 8,
}


def tiny(recipe: Recipe) -> Recipe:
    """A recipe of the same shape that takes a second or two, and says that it is tiny.

    Cells that differ still do: widths shrink by a factor, and a period becomes the number of its digits, so that
    K_per = 1, 30, 300 and 3000 all come round in four steps.
    """
    batch = _BATCH.get(recipe.data.name, 8)
    warms_up = recipe.learning_rate.schedule == "warmup_cosine"
    width = _WIDTH.get(recipe.network.name, 1 / 16 if recipe.data.name == "imagenet" else 1 / 8)
    return replace(
        recipe,
        name=f"tiny-{recipe.name}",
        scale="tiny",
        data=replace(recipe.data, limit=batch * _STEPS.get(recipe.data.name, 4)),
        network=replace(recipe.network, width_factor=recipe.network.width_factor * width),
        method=replace(recipe.method, period=len(str(recipe.method.period))),
        learning_rate=replace(recipe.learning_rate, warmup_epochs=1, final_epochs=1),
        training=replace(
            recipe.training,
            epochs=recipe.phases * (3 if warms_up else 1),
            batch_size=batch,
            precision="float32",
            channels_last=False,
            threads=1,
        ),
    )


__all__ = ["Cell", "Experiment", "PaperNumber", "experiment_names", "find_experiment"]

_EXPERIMENTS = {
    "digits": extras.digits,
    "figure1": paper.figure1,
    "figure2": paper.figure2,
    "figure3": paper.figure3,
    "figure3-curves": paper.figure3_curves,
    "period": paper.period,
    "period-rate": paper.period_rate,
    "overhead": paper.overhead,
    "sparsity": paper.sparsity,
    "imp": paper.imp,
    "width": paper.width,
    "large": paper.large,
    "imdb": paper.imdb,
    "best": extras.best,
    "parts": extras.parts,
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
