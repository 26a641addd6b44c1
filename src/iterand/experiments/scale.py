"""Dry runs: every experiment in seconds on a CPU, to see the whole machinery work; what comes out means nothing."""

from dataclasses import replace

from iterand.training.recipe import Recipe

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
