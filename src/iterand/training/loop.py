"""The loop: Algorithm 1, and with the randomizer among its steppers Algorithm 3; plain SGD is the same loop too."""

import math
import time
from collections.abc import Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from iterand import philox
from iterand.data import Batch, Dataset, Split
from iterand.errors import IterandError
from iterand.training import checkpoint
from iterand.training.folder import RunFolder
from iterand.training.interrupt import Interrupted, stop_request
from iterand.training.learning_rate import learning_rate
from iterand.training.recipe import Recipe
from iterand.training.session import Session

CHECKPOINT_SECONDS = 10.0  # at most this much work, or one step, is lost when a run is killed
EVALUATION_BATCH = 250  # long reviews and large images must fit too


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


def train(session: Session, data: Dataset[Split], folder: RunFolder, observer: Observer) -> None:
    """Train from wherever the session stands to the end, saving as it goes."""
    recipe = session.recipe
    saved_at = time.monotonic()
    started = saved_at - session.seconds
    with stop_request() as request:
        while session.epoch < recipe.training.epochs:
            for batch in _begin_epoch(session, data.train):
                _train_step(session, batch)
                session.seconds = time.monotonic() - started
                observer.step(session)
                due = time.monotonic() - saved_at > CHECKPOINT_SECONDS
                if request.asked or (due and session.step < session.steps_per_epoch):
                    checkpoint.write(folder.path, session.capture())
                    saved_at = time.monotonic()
                if request.asked:
                    raise Interrupted
            metrics = _end_epoch(session, data.validation)
            folder.log(metrics)
            observer.epoch(session, metrics)
            last = session.epoch == recipe.training.epochs
            if session.epoch == 1 or last or time.monotonic() - saved_at > CHECKPOINT_SECONDS:
                checkpoint.write(folder.path, session.capture())
                saved_at = time.monotonic()


def evaluate(model: nn.Module, split: Split, recipe: Recipe) -> dict[str, float]:
    """Mean loss and accuracy in percent over one part of the data."""
    model.eval()
    loss = correct = 0.0
    with torch.no_grad():
        for batch in split.batches(torch.arange(len(split)), EVALUATION_BATCH):
            outputs = _forward(model, batch, recipe)
            loss += float(_loss(outputs, batch.labels, reduction="sum"))
            correct += int(_correct(outputs, batch.labels))
    return {"loss": loss / len(split), "accuracy": 100 * correct / len(split)}


def _begin_epoch(session: Session, split: Split) -> Iterator[Batch]:
    """Set the epoch's learning rate; give the batches that are left of it."""
    recipe = session.recipe
    rate = learning_rate(recipe.learning_rate, session.epoch % recipe.phase_epochs, recipe.phase_epochs)
    for group in session.optimizer.param_groups:
        group["lr"] = rate
    session.model.train()
    size, epoch = recipe.training.batch_size, session.epoch
    order = philox.permutation(len(split), philox.key(recipe.seed, "data order"), epoch)
    key = philox.key(recipe.seed, "augmentation")
    left = order[session.step * size : session.steps_per_epoch * size]
    return split.batches(left, size, lambda index: philox.philox(index, epoch, key, philox.DATA))


def _train_step(session: Session, batch: Batch) -> None:
    session.optimizer.zero_grad()
    outputs = _forward(session.model, batch, session.recipe)
    loss = _loss(outputs, batch.labels)
    loss.backward()  # type: ignore[no-untyped-call]
    session.optimizer.step()
    for stepper in session.steppers:
        stepper.step()
    session.loss_sum += loss.detach().double() * len(batch.labels)
    session.correct += _correct(outputs.detach(), batch.labels)
    session.seen += len(batch.labels)
    session.step += 1


def _end_epoch(session: Session, validation: Split) -> dict[str, Any]:
    loss = float(session.loss_sum) / session.seen
    if math.isnan(loss):
        raise IterandError(
            f"the loss became NaN in epoch {session.epoch + 1}; lower learning_rate.initial and start with --fresh"
        )
    measured = evaluate(session.model, validation, session.recipe)
    metrics = {
        "epoch": session.epoch + 1,
        "learning_rate": session.optimizer.param_groups[0]["lr"],
        "train_loss": loss,
        "train_accuracy": 100 * int(session.correct) / session.seen,
        "validation_loss": measured["loss"],
        "validation_accuracy": measured["accuracy"],
    }
    session.metrics.append(metrics)
    session.begin_epoch(session.epoch + 1)
    return metrics


def _forward(model: nn.Module, batch: Batch, recipe: Recipe) -> Tensor:
    # Images come in whatever layout their source has; the recipe decides, since sums depend on it.
    layout = torch.channels_last if recipe.training.channels_last else torch.contiguous_format
    inputs = tuple(one.contiguous(memory_format=layout) if one.dim() == 4 else one for one in batch.inputs)
    with torch.autocast(batch.labels.device.type, torch.bfloat16, enabled=recipe.training.precision == "bfloat16"):
        outputs: Tensor = model(*inputs)
    return outputs.float()


def _loss(outputs: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    if outputs.shape[1] == 1:  # one logit for two classes
        return F.binary_cross_entropy_with_logits(outputs.squeeze(1), labels.float(), reduction=reduction)
    return F.cross_entropy(outputs, labels, reduction=reduction)


def _correct(outputs: Tensor, labels: Tensor) -> Tensor:
    said = outputs.squeeze(1) > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
    return (said == labels).sum()
