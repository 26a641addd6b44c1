"""The training loop: epochs, batches, learning rate, validation, checkpoints, batch-norm statistics."""

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from iterand import philox
from iterand.checks import counted
from iterand.errors import IterandError
from iterand.lab.data import Batch, Dataset, Split
from iterand.lab.data.text import arranged
from iterand.lab.training.environment import Interrupted, StopRequest
from iterand.lab.training.folder import RunFolder
from iterand.lab.training.recipe import LearningRateRecipe, Recipe
from iterand.lab.training.session import Session, follow_best
from iterand.lab.training.steps import Step, forward

CHECKPOINT_SECONDS = 10.0  # at most this much work, or one step, is lost when a run is killed
_QUICK_SAVE_SECONDS = 0.5  # checkpoints that take longer are written less often, in at most 5 % of the time


class Observer(Protocol):
    """Callbacks of the training loop."""

    def step(self, session: Session) -> None:
        """Called after each step."""
        ...

    def epoch(self, session: Session, metrics: dict[str, Any]) -> None:
        """Called after each epoch."""
        ...


class NullObserver:
    """An observer that does nothing."""

    def step(self, session: Session) -> None:
        """Do nothing."""

    def epoch(self, session: Session, metrics: dict[str, Any]) -> None:
        """Do nothing."""


def train(
    session: Session, step: Step, data: Dataset[Split], folder: RunFolder, observer: Observer, request: StopRequest
) -> None:
    """Train from the current step of the session to the last epoch, with checkpoints on the way."""
    recipe, ranks = session.recipe, session.ranks
    checkpoints = _Checkpoints(session, folder)
    started = time.monotonic() - session.seconds
    compiled = session.device.type != "cuda"
    while session.epoch < recipe.training.epochs:
        for batch in _begin_epoch(session, data.train):
            before = time.monotonic()
            step.train(batch)
            if not compiled:  # the first step compiles, which is not counted as training time
                started, compiled = started + time.monotonic() - before, True
            session.advance(ranks.whole(len(batch.labels)))  # the steppers: randomization, sparsity schedule
            session.seconds = time.monotonic() - started
            observer.step(session)
            stop = ranks.any(request.asked)
            if stop or (checkpoints.due() and session.step < session.steps_per_epoch):
                checkpoints.save()
            if stop:
                raise Interrupted
        last = session.epoch + 1 == recipe.training.epochs
        if last and recipe.training.recomputes_norms:
            checkpoints.save()
            batches = _batches(session, data.train, recipe.training.epochs)
            recompute_norms_(session, _until_stopped(request, session, batches))
        ranks.compare(session.model, f"after epoch {session.epoch + 1}")
        metrics = _end_epoch(session, step, data.validation)
        follow_best(session, last=last)
        session.seconds = time.monotonic() - started
        folder.log(metrics)
        observer.epoch(session, metrics)
        if session.epoch == 1 or last or checkpoints.due():
            checkpoints.save()


class _Checkpoints:
    """Writes a checkpoint from time to time."""

    def __init__(self, session: Session, folder: RunFolder) -> None:
        self._session, self._folder = session, folder
        self._saved_at, self._took = time.monotonic(), 0.0

    def due(self) -> bool:
        """Whether the last checkpoint is old enough."""
        return time.monotonic() - self._saved_at > CHECKPOINT_SECONDS * max(1.0, self._took / _QUICK_SAVE_SECONDS)

    def save(self) -> None:
        """Write a checkpoint."""
        started = time.monotonic()
        self._folder.save(self._session.capture())
        self._saved_at = time.monotonic()
        self._took = self._saved_at - started


# Epochs and batches


def steps_per_epoch(recipe: Recipe, data: Dataset[Split], ranks: int = 1) -> int:
    """The number of batches in an epoch; refuses batches with fewer examples than there are ranks."""
    count, size = len(data.train), recipe.training.batch_size
    if size > count and recipe.data.drop_last:
        there = "is only" if count == 1 else "are only"
        raise ValueError(
            f"training.batch_size is {size}, but there {there} {counted(count, 'training example')}; lower it"
        )
    smallest = size if recipe.data.drop_last else count % size or size
    if smallest < ranks:
        raise ValueError(
            f"an epoch has a batch of {counted(smallest, 'example')}, which {ranks} ranks cannot share; start "
            "fewer ranks, raise training.batch_size, or set data.drop_last=true if it is the last one"
        )
    return count // size if recipe.data.drop_last else math.ceil(count / size)


def _begin_epoch(session: Session, split: Split) -> Iterator[Batch]:
    """Set the learning rate of the epoch; returns this rank's part of its remaining batches."""
    recipe = session.recipe
    rate = learning_rate(recipe.learning_rate, session.epoch % recipe.phase_epochs, recipe.phase_epochs)
    session.set_learning_rate(rate)
    return _batches(session, split, session.epoch, session.step)


def _batches(session: Session, split: Split, epoch: int, first: int = 0) -> Iterator[Batch]:
    """This rank's part of the batches of an epoch, shuffled and augmented, starting with batch ``first``."""
    recipe, size = session.recipe, session.recipe.training.batch_size
    shuffled = philox.permutation(len(split), philox.key(recipe.seed, "data order"), epoch, session.device)
    order = arranged(split, shuffled, size)
    key = philox.key(recipe.seed, "augmentation")
    left = order[first * size : session.steps_per_epoch * size]
    return session.ranks.batches(split, left, size, lambda index: philox.philox(index, epoch, key, philox.DATA))


def _until_stopped(request: StopRequest, session: Session, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches; a stop request raises, and the run resumes from the checkpoint before them."""
    for batch in batches:
        if session.ranks.any(request.asked):
            raise Interrupted
        yield batch


def _end_epoch(session: Session, step: Step, split: Split) -> dict[str, Any]:
    """Validate, add the metrics of the epoch to the session and go to the next epoch."""
    loss = float(session.loss_sum) / session.seen
    if not math.isfinite(loss):
        raise IterandError(
            f"the loss became NaN or infinite in epoch {session.epoch + 1}; lower learning_rate.initial and start with "
            "--fresh"
        )
    validation = step.evaluate(split)
    metrics = {
        "epoch": session.epoch + 1,
        "learning_rate": session.learning_rate,
        "train_loss": loss,
        "train_accuracy": 100 * int(session.correct) / session.seen,
        "validation_loss": validation["loss"],
        "validation_accuracy": validation["accuracy"],
    }
    session.metrics.append(metrics)
    session.begin_epoch(session.epoch + 1)
    return metrics


# Learning rate


def learning_rate(recipe: LearningRateRecipe, epoch: int, epochs: int) -> float:
    """The learning rate η in ``epoch``, counted from 0, of ``epochs``."""
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


# Batch-norm statistics


def check_norm_statistics(session: Session) -> None:
    """Refuse to recompute batch-norm statistics of a network that has none."""
    training, name = session.recipe.training, session.recipe.network.name
    if training.recomputes_norms and not _norms(session):
        chosen = training.norm_statistics
        raise ValueError(f"training.norm_statistics is {chosen!r}, but {name} has no batch norm; leave it out")


@torch.no_grad()
def recompute_norms_(session: Session, batches: Iterable[Batch]) -> None:
    """Replace the running averages of batch norms by means over these batches, all examples weighted equally.

    In half precision, they are rounded to float16, so that the tested network is the one a ticket stores in two bytes
    per number.
    """
    norms = _norms(session)
    momenta = [norm.momentum for norm in norms]
    for norm in norms:
        norm.reset_running_stats()
    session.model.train()
    seen = 0
    for batch in batches:
        examples = session.ranks.whole(len(batch.labels))
        seen += examples
        for norm in norms:
            norm.momentum = examples / seen
        forward(session.model, batch.inputs, session.recipe)
    for norm, momentum in zip(norms, momenta):
        norm.momentum = momentum
        if session.recipe.training.norm_statistics == "recomputed_half":
            _round_to_half_(norm)


def _round_to_half_(norm: _BatchNorm) -> None:
    """Round statistics to float16, unless this would change what the norm computes by more than rounding does."""
    mean, variance = cast(Tensor, norm.running_mean), cast(Tensor, norm.running_var)
    spread = variance + norm.eps
    for values, scale in ((mean, mean.abs() + spread.sqrt()), (variance, spread)):
        half = values.half().to(values.dtype)
        if ((half - values).abs() <= scale / 2048).all():
            values.copy_(half)


def _norms(session: Session) -> list[_BatchNorm]:
    modules = session.model.modules()
    return [module for module in modules if isinstance(module, _BatchNorm) and module.track_running_stats]
