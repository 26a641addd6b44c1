"""A training step: how it is executed, and the forward pass, loss and accuracy of a batch."""

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from iterand import backend
from iterand.checks import counted
from iterand.errors import IterandError
from iterand.lab.data import Batch, Dataset, Split
from iterand.lab.data.text import TextSplit, arranged
from iterand.lab.training.distributed import ALONE, Ranks
from iterand.lab.training.recipe import Recipe, TrainingRecipe
from iterand.lab.training.session import Session

EVALUATION_BATCH = 250  # long reviews and large images must fit too
_MANY_STEPS = 30_000  # compiling takes a minute and saves 2 ms a step

logger = logging.getLogger("iterand")


class Step(Protocol):
    """Trains and evaluates the model of a session, batch by batch."""

    @property
    def way(self) -> str:
        """How it is executed, by the name that ``iterand bench step`` uses."""
        ...

    def train(self, batch: Batch) -> None:
        """Forward, backward, update; add loss and hits to the sums of the epoch."""
        ...

    def evaluate(self, split: Split) -> dict[str, float]:
        """Mean loss and accuracy in percent on a split of the data."""
        ...


@dataclass(frozen=True)
class Execution:
    """On a GPU: whether to capture a step as a CUDA graph, and to compile the network."""

    compile: bool | None = None
    """None: where it saves time."""
    graph: bool = True


class Teacher:
    """A trained network whose outputs a run learns beside the labels (distillation; Hinton et al., 2015)."""

    def __init__(self, model: nn.Module, recipe: Recipe) -> None:
        self._model = model.eval().requires_grad_(False)
        self._recipe = recipe

    @torch.no_grad()
    def __call__(self, inputs: tuple[Tensor, ...]) -> Tensor:
        """Its outputs, at the temperature with which it was trained."""
        return forward(self._model, inputs, self._recipe) / self._recipe.training.temperature


def choose_step(session: Session, data: Dataset[Split], execution: Execution, teacher: Teacher | None = None) -> Step:
    """The fastest step that works on this device for this model; on a GPU, a slower one is logged with the reason."""
    # A fused step updates scores as their gradients come; over several ranks these are averaged first.
    if session.device.type != "cuda" or session.ranks.count > 1:
        return EagerStep(session, teacher)
    reason = "texts differ in length" if isinstance(data.train, TextSplit) else backend.triton_problem(session.device)
    if reason is None:
        from iterand.lab.training.fused import FusedStep

        compile = execution.compile
        if compile is None:
            compile = compiling_pays(session.recipe, session.steps_per_epoch * session.recipe.training.epochs)
        return FusedStep(session, compile=compile, graph=execution.graph, teacher=teacher)
    logger.warning("without fused steps, so slower than it could be: %s", reason)
    return EagerStep(session, teacher)


def compiling_pays(recipe: Recipe, steps: int) -> bool:
    """Whether a run of this many steps is faster with its network compiled, which takes a minute.

    For large images a compiled network is a tenth faster; for small ones the fused layers are faster
    (docs/explanation/engine.md).
    """
    return recipe.data.name == "imagenet" and steps >= _MANY_STEPS


class EagerStep:
    """One operation after the other, in plain torch."""

    way = "eager"

    def __init__(self, session: Session, teacher: Teacher | None = None) -> None:
        self._session = session
        self._teacher = teacher

    def train(self, batch: Batch) -> None:
        """Forward, backward, update; add loss and hits to the sums of the epoch."""
        session, ranks = self._session, self._session.ranks
        ranks.seed(session.recipe.seed, session.epoch * session.steps_per_epoch + session.step)
        session.model.train()
        session.optimizer.zero_grad()
        outputs = forward(session.parallel, batch.inputs, session.recipe)
        taught = None if self._teacher is None else self._teacher(batch.inputs)
        loss = training_loss(outputs, batch.labels, session.recipe.training, taught)
        ranks.weighted(loss, len(batch.labels)).backward()  # type: ignore[no-untyped-call]
        ranks.require_gradients(session.model)
        session.optimizer.step()
        session.count(loss, count_correct(outputs.detach(), batch.labels), len(batch.labels))

    def evaluate(self, split: Split) -> dict[str, float]:
        """Mean loss and accuracy in percent on a split of the data."""
        session = self._session
        return evaluate(session.model, split, session.recipe, session.device, session.ranks)


def evaluate(
    model: nn.Module, split: Split, recipe: Recipe, device: torch.device, ranks: Ranks = ALONE
) -> dict[str, float]:
    """Mean loss and accuracy in percent of any model; each rank evaluates its share of the examples."""
    model.eval()
    sums = Sums(device)
    mine = arranged(split, ranks.share_of(len(split)), EVALUATION_BATCH)
    with torch.no_grad():
        for batch in split.batches(mine, EVALUATION_BATCH) if len(mine) else ():
            sums.add(forward(model, batch.inputs, recipe), batch.labels)
    ranks.sum_(sums.loss)
    ranks.sum_(sums.correct)
    return sums.means(len(split))


class Sums:
    """Sums of loss and hits, on the device."""

    def __init__(self, device: torch.device) -> None:
        self.loss = torch.zeros((), dtype=torch.float64, device=device)
        self.correct = torch.zeros((), dtype=torch.int64, device=device)

    def reset(self) -> None:
        """Set the sums to zero."""
        self.loss.zero_()
        self.correct.zero_()

    def add(self, outputs: Tensor, labels: Tensor) -> None:
        """Add a batch."""
        self.loss += loss(outputs, labels, reduction="sum")
        self.correct += count_correct(outputs, labels)

    def means(self, count: int) -> dict[str, float]:
        """Mean loss and accuracy in percent; refused where the loss is not finite, as neither means anything."""
        loss = float(self.loss) / count
        if not math.isfinite(loss):
            raise IterandError(
                f"in evaluation mode, the loss of {counted(count, 'example')} is NaN or infinite; correct what the "
                "network computes in that mode, or train it with a lower learning rate"
            )
        return {"loss": loss, "accuracy": 100 * int(self.correct) / count}


# Forward pass, loss and accuracy


def to_layout(inputs: tuple[Tensor, ...], recipe: Recipe) -> tuple[Tensor, ...]:
    """Images in the memory layout of the recipe, on which floating-point sums depend, whatever layout they come in."""
    layout = torch.channels_last if recipe.training.channels_last else torch.contiguous_format
    return tuple(tensor.contiguous(memory_format=layout) if tensor.dim() == 4 else tensor for tensor in inputs)


def forward(model: Callable[..., Tensor], inputs: tuple[Tensor, ...], recipe: Recipe) -> Tensor:
    """The outputs of the network in float32, computed in the precision of the recipe."""
    with torch.autocast(inputs[0].device.type, torch.bfloat16, enabled=recipe.training.precision == "bfloat16"):
        outputs = model(*to_layout(inputs, recipe))
    return outputs.float()


def loss(outputs: Tensor, labels: Tensor, smoothing: float = 0.0, reduction: str = "mean") -> Tensor:
    """Cross entropy with label smoothing; a network with one output has two classes."""
    if outputs.shape[1] == 1:
        targets = labels.float() * (1 - smoothing) + smoothing / 2
        return F.binary_cross_entropy_with_logits(outputs.squeeze(1), targets, reduction=reduction)
    return F.cross_entropy(outputs, labels, reduction=reduction, label_smoothing=smoothing)


def training_loss(outputs: Tensor, labels: Tensor, training: TrainingRecipe, taught: Tensor | None = None) -> Tensor:
    """The loss of training, with the temperature and label smoothing of the recipe and the outputs of a teacher."""
    scaled = outputs if training.temperature == 1 else outputs / training.temperature
    of_labels = loss(scaled, labels, training.label_smoothing)
    if taught is None:
        return of_labels
    of_teacher = distillation_loss(scaled, taught, training.teacher_temperature)
    return (1 - training.teacher_weight) * of_labels + training.teacher_weight * of_teacher


def distillation_loss(outputs: Tensor, taught: Tensor, temperature: float) -> Tensor:
    """T² KL(teacher ‖ network) of the outputs divided by T, so that gradients do not shrink with T."""
    if outputs.shape[1] == 1:  # two classes
        outputs, taught = F.pad(outputs, (1, 0)), F.pad(taught, (1, 0))
    logs, wanted = ((each / temperature).log_softmax(1) for each in (outputs, taught))
    return temperature**2 * F.kl_div(logs, wanted, reduction="batchmean", log_target=True)


def count_correct(outputs: Tensor, labels: Tensor) -> Tensor:
    """How many examples are classified correctly."""
    predicted = outputs.squeeze(1) > 0 if outputs.shape[1] == 1 else outputs.argmax(1)
    return (predicted == labels).sum()
