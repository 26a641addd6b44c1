"""What a run refuses before its first step: settings that would fail in it, or after the last one."""

import torch
from torch import nn

from iterand.checks import counted
from iterand.errors import IterandError, RecipeError
from iterand.lab.data import Dataset, Split
from iterand.lab.training import recipe_file
from iterand.lab.training.distributed import Ranks
from iterand.lab.training.loop import check_norm_statistics
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.session import Session
from iterand.lab.training.steps import Teacher, forward
from iterand.surgery import masked_layers
from iterand.ticket.codec import MAX_ALPHABET
from iterand.ticket.encode import holds_rounds


def check_ranks(ranks: Ranks, recipe: Recipe, data: Dataset[Split] | None = None) -> None:
    """Refuse ranks with other settings or data than the first: they would wait for each other, or train in vain."""
    sizes = [len(split) for split in (data.train, data.validation, data.test)] if data else []
    (first, wanted), *others = ranks.from_all((recipe_file.as_dict(recipe), sizes))
    for number, (theirs, found) in enumerate(others, start=1):
        different = recipe_file.difference(recipe_file.from_dict(first), recipe_file.from_dict(theirs))
        if found != wanted:
            different += [f"training, validation and test data have {found} examples here and {wanted} there"]
        if different:
            what = "; ".join(different)
            raise IterandError(f"rank {number} differs from rank 0: {what}; give all ranks the same recipe and data")


def check_session(session: Session, teacher: Teacher | None, data: Dataset[Split]) -> None:
    """Refuse batch-norm statistics, a teacher or a period that do not fit the network."""
    check_norm_statistics(session)
    if teacher is not None:
        _check_teacher(session, teacher, data)
    method = session.recipe.method
    steps = session.recipe.training.epochs * session.steps_per_epoch
    if method.name == "iterand":
        for name, layer in masked_layers(session.model).items():
            if not holds_rounds(layer.parametrization, steps // method.period):
                raise RecipeError(
                    f"method.period is {method.period}: {steps // method.period} rounds give more different draws of "
                    f"{name!r} than a ticket holds; set it to {steps // MAX_ALPHABET + 1} or more"
                )


def _check_teacher(session: Session, teacher: Teacher, data: Dataset[Split]) -> None:
    """Refuse a teacher that has other outputs than the network."""
    inputs = next(iter(data.validation.batches(torch.arange(1), 1))).inputs
    with torch.no_grad():
        ours = forward(session.model.eval(), inputs, session.recipe).shape[1]
    session.model.train()
    theirs = teacher(inputs).shape[1]
    if theirs != ours:
        raise RecipeError(
            f"the teacher {session.recipe.training.teacher} has {counted(theirs, 'output')}, but the network {ours}; "
            "choose a teacher of the same classes"
        )


def check_convolutions(session: Session) -> None:
    """Refuse what torch computes wrongly: with AVX2, these weight gradients overrun a buffer (oneDNN issue 6035)."""
    training = session.recipe.training
    with_avx2 = session.device.type == "cpu" and torch.backends.cpu.get_cpu_capability() == "AVX2"
    if not (with_avx2 and training.channels_last and training.precision == "float32"):
        return
    for name, layer in session.model.named_modules():
        strided = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and layer.stride != (1, 1)
        if strided and layer.groups == 1 and layer.in_channels < 8:
            raise RecipeError(
                f"with channels_last = true, torch computes wrong gradients on this processor for {name!r}, a strided "
                f"1x1 convolution of {counted(layer.in_channels, 'channel')}; set channels_last = false"
            )
