"""The training loop: epochs, learning rate, validation, checkpoints."""

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from iterand import philox
from iterand.errors import IterandError
from iterand.lab.data import Batch, Dataset, Split
from iterand.lab.data.text import arranged
from iterand.lab.training.environment import Interrupted, StopRequest
from iterand.lab.training.folder import RunFolder
from iterand.lab.training.recipe import LearningRateRecipe, Recipe
from iterand.lab.training.session import Session, follow_best
from iterand.lab.training.steps import Step, forward


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


def check_norms(session: Session) -> None:
    """Refuse to recompute statistics of a network that has none."""
    if session.recipe.training.norm_statistics == "recomputed" and not _norms(session):
        name = session.recipe.network.name
        raise ValueError(f"training.norm_statistics is 'recomputed', but {name} has no batch norm; leave it out")


@torch.no_grad()
def recompute_norms_(session: Session, batches: Iterable[Batch]) -> None:
    """Replace running averages by means over these batches, all examples alike, for the network as it is."""
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


def _norms(session: Session) -> list[_BatchNorm]:
    modules = session.model.modules()
    return [module for module in modules if isinstance(module, _BatchNorm) and module.track_running_stats]


CHECKPOINT_SECONDS = 10.0  # at most this much work, or one step, is lost when a run is killed
_QUICK_SAVING = 0.5  # seconds; what takes longer to save is saved less often, so that it takes 5 % of the time at most


class Observer(Protocol):
    """Who watches a run."""

    def step(self, session: Session) -> None:
        """A step is done."""
        ...

    def epoch(self, session: Session, metrics: dict[str, Any]) -> None:
        """An epoch is done."""
        ...


class Silent:
    """An observer that does nothing."""

    def step(self, session: Session) -> None:
        """Nothing."""

    def epoch(self, session: Session, metrics: dict[str, Any]) -> None:
        """Nothing."""


def steps_per_epoch(recipe: Recipe, data: Dataset[Split]) -> int:
    """How many batches an epoch has."""
    count, size = len(data.train), recipe.training.batch_size
    if size > count and recipe.data.drop_last:
        raise ValueError(f"training.batch_size is {size}, but there are only {count} training examples; lower it")
    return count // size if recipe.data.drop_last else math.ceil(count / size)


def train(
    session: Session, step: Step, data: Dataset[Split], folder: RunFolder, observer: Observer, request: StopRequest
) -> None:
    """Train from wherever the session stands to the end, saving as it goes."""
    recipe, ranks = session.recipe, session.ranks
    saving = _Saving(session, folder)
    started = time.monotonic() - session.seconds
    compiled = session.device.type != "cuda"
    while session.epoch < recipe.training.epochs:
        for batch in _begin_epoch(session, data.train):
            before = time.monotonic()
            step.train(batch)
            if not compiled:  # left out of the time, since a process that knows the network does not compile it again
                started, compiled = started + time.monotonic() - before, True
            session.advance(ranks.whole(len(batch.labels)))
            session.seconds = time.monotonic() - started
            observer.step(session)
            stop = ranks.any(request.asked)
            if stop or (saving.due() and session.step < session.steps_per_epoch):
                saving.save()
            if stop:
                raise Interrupted
        last = session.epoch + 1 == recipe.training.epochs
        if last and recipe.training.norm_statistics == "recomputed":
            recompute_norms_(session, _heeding(request, session, _batches(session, data.train, recipe.training.epochs)))
        ranks.compare(session.model, f"after epoch {session.epoch + 1}")
        metrics = _end_epoch(session, step.evaluate(data.validation))
        follow_best(session, last=last)
        session.seconds = time.monotonic() - started
        folder.log(metrics)
        observer.epoch(session, metrics)
        if session.epoch == 1 or last or saving.due():
            saving.save()


class _Saving:
    """Saves a session from time to time."""

    def __init__(self, session: Session, folder: RunFolder) -> None:
        self._session, self._folder = session, folder
        self._saved_at, self._took = time.monotonic(), 0.0

    def due(self) -> bool:
        """Whether the last time is long enough ago."""
        return time.monotonic() - self._saved_at > CHECKPOINT_SECONDS * max(1.0, self._took / _QUICK_SAVING)

    def save(self) -> None:
        """Write a checkpoint."""
        started = time.monotonic()
        self._folder.save(self._session.capture())
        self._saved_at = time.monotonic()
        self._took = self._saved_at - started


def _begin_epoch(session: Session, split: Split) -> Iterator[Batch]:
    """Set the epoch's learning rate; give this rank's part of the batches that are left of it."""
    recipe = session.recipe
    rate = learning_rate(recipe.learning_rate, session.epoch % recipe.phase_epochs, recipe.phase_epochs)
    session.set_learning_rate(rate)
    return _batches(session, split, session.epoch, session.step)


def _batches(session: Session, split: Split, epoch: int, first: int = 0) -> Iterator[Batch]:
    """This rank's part of the batches of an epoch, from one of them on."""
    recipe, size = session.recipe, session.recipe.training.batch_size
    drawn = philox.permutation(len(split), philox.key(recipe.seed, "data order"), epoch, session.device)
    order = arranged(split, drawn, size)
    key = philox.key(recipe.seed, "augmentation")
    left = order[first * size : session.steps_per_epoch * size]
    return session.ranks.batches(split, left, size, lambda index: philox.philox(index, epoch, key, philox.DATA))


def _heeding(request: StopRequest, session: Session, batches: Iterator[Batch]) -> Iterator[Batch]:
    """The batches, until a stop is asked for; what was saved last is before them."""
    for batch in batches:
        if session.ranks.any(request.asked):
            raise Interrupted
        yield batch


def _end_epoch(session: Session, measured: dict[str, float]) -> dict[str, Any]:
    loss = float(session.loss_sum) / session.seen
    if math.isnan(loss):
        raise IterandError(
            f"the loss became NaN in epoch {session.epoch + 1}; lower learning_rate.initial and start with --fresh"
        )
    metrics = {
        "epoch": session.epoch + 1,
        "learning_rate": session.learning_rate,
        "train_loss": loss,
        "train_accuracy": 100 * int(session.correct) / session.seen,
        "validation_loss": measured["loss"],
        "validation_accuracy": measured["accuracy"],
    }
    session.metrics.append(metrics)
    session.begin_epoch(session.epoch + 1)
    return metrics
