"""All experiments by name, in a profile and at a scale."""

from dataclasses import replace
from functools import cache

from iterand.checks import unknown
from iterand.lab.experiments import extras, paper
from iterand.lab.experiments.experiment import Experiment
from iterand.lab.experiments.library import adapt, check_profile
from iterand.lab.training.recipe import SCALES, Recipe

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
    "few-labels": extras.few_labels,
    "long": extras.long,
    "ablation": extras.ablation,
    "gain": extras.gain,
    "family": extras.family,
    "claims": extras.claims,
}

_TINY_BATCH = {"imagenet": 2}
_TINY_STEPS = {"imagenet": 2}  # in each of three epochs
_TINY_WIDTH = {  # factors on the width; at p = 0.99 every layer must still keep a weight
    "digits_conv": 1.0,
    "resnet20": 1 / 2,
    "lstm": 1 / 8,
    "bilstm": 1 / 8,
}


def experiment_names() -> list[str]:
    """The names of all experiments."""
    return list(_EXPERIMENTS)


@cache
def find_experiment(name: str, profile: str = "paper", scale: str = "full") -> Experiment:
    """The experiment of this name, in a profile, at a scale; profiles do not change the experiments of our own."""
    if name not in _EXPERIMENTS:
        raise ValueError(unknown("experiment", name, _EXPERIMENTS))
    if scale not in SCALES:
        raise ValueError(f"unknown scale {scale!r}; there are {', '.join(SCALES)}")
    check_profile(profile)
    experiment = _built(name)
    ours = experiment.where == "ours"
    cells = tuple(cell if ours else replace(cell, recipe=adapt(cell.recipe, profile)) for cell in experiment.cells)
    if scale == "tiny":
        cells = tuple(replace(cell, recipe=tiny(cell.recipe)) for cell in cells)
        return replace(experiment, cells=cells, seeds=1)
    return replace(experiment, cells=cells)


@cache
def _built(name: str) -> Experiment:
    return _EXPERIMENTS[name]()


def tiny(recipe: Recipe) -> Recipe:
    """A dry run of a recipe: the same network and method, narrow and on little data, in a second or two.

    Cells with different settings stay different: widths shrink by a factor, and a period becomes the number of its
    digits, so that K_per = 1, 30, 300 and 3000 all randomize within four steps.
    """
    batch = _TINY_BATCH.get(recipe.data.name, 8)
    warms_up = recipe.learning_rate.schedule == "warmup_cosine"
    width = _TINY_WIDTH.get(recipe.network.name, 1 / 16 if recipe.data.name == "imagenet" else 1 / 8)
    return replace(
        recipe,
        name=f"tiny-{recipe.name}",
        scale="tiny",
        data=replace(recipe.data, limit=batch * _TINY_STEPS.get(recipe.data.name, 4)),
        network=replace(recipe.network, width_factor=recipe.network.width_factor * width),
        method=replace(
            recipe.method,
            period=len(str(recipe.method.period)),
            freezing_period=len(str(recipe.method.freezing_period)),
        ),
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
