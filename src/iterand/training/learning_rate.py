"""The learning rate η of an epoch (Appendix B); it is set once an epoch."""

import math

from iterand.training.recipe import LearningRateRecipe


def learning_rate(recipe: LearningRateRecipe, epoch: int, epochs: int) -> float:
    """η in ``epoch``, counted from 0, of ``epochs``."""
    if recipe.schedule == "cosine":
        return _cosine(recipe.initial, epoch, epochs)
    if recipe.schedule == "multi_step":
        return recipe.initial * recipe.factor ** sum(epoch >= milestone for milestone in recipe.milestones)
    if recipe.schedule == "warmup_cosine":
        if epoch < recipe.warmup_epochs:
            return recipe.initial * (epoch + 1) / recipe.warmup_epochs
        if epoch >= epochs - recipe.final_epochs:
            return recipe.final
        return _cosine(
            recipe.initial, epoch - recipe.warmup_epochs, epochs - recipe.warmup_epochs - recipe.final_epochs
        )
    return recipe.initial


def _cosine(initial: float, epoch: int, epochs: int) -> float:
    return 0.5 * initial * (1 + math.cos(math.pi * epoch / epochs))
