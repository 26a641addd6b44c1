"""A training step on a GPU as one CUDA graph, with kernels for all layers at once."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import cached_property, partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call

from iterand.engine.convolution import narrow_
from iterand.engine.fusion import fuse_
from iterand.engine.graph import CannotCapture, CapturedGraph
from iterand.engine.parameters import CannotFuse, DenseParameters, MaskedParameters
from iterand.lab.data import Batch, Split
from iterand.lab.networks.resnet import ResidualBlock
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.session import Session
from iterand.lab.training.steps import EVALUATION_BATCH, Sums, count_correct, forward, to_layout, training_loss
from iterand.masking import skeleton

__all__ = ["CannotFuse", "FusedStep"]

logger = logging.getLogger("iterand")

Losses = Callable[[dict[str, Tensor], tuple[Tensor, ...], Tensor], tuple[Tensor, Tensor]]
"""Computes the loss and the number of hits from tensors, inputs and labels."""


class Trainable(Protocol):
    """The parameters that a step trains: prepared before the forward pass, updated after the backward pass."""

    tensors: dict[str, Tensor]
    """All tensors of the network, by name."""
    leaves: list[Tensor]
    """Those that require gradients."""
    state: list[Tensor]
    """The tensors that an update changes."""

    def begin(self) -> None:
        """Called before a step or an evaluation, outside of the graph."""
        ...

    def prepare(self) -> None:
        """Compute the leaves, for instance masked weights."""
        ...

    def update(self, gradients: tuple[Tensor, ...]) -> None:
        """Update by the gradients of the leaves."""
        ...

    def end(self) -> None:
        """Called after a step, outside of the graph."""
        ...

    def captured(self) -> None:
        """Called after a graph of a step was captured."""
        ...


class FusedStep:
    """Replays a captured step; batches of another size, and steps that cannot be captured, run directly."""

    def __init__(self, session: Session, *, compile: bool, graph: bool = True) -> None:
        self._session = session
        recipe = session.recipe
        self._network = _Network.of(session, compile)
        self._trainable: Trainable = (
            DenseParameters(session.model, session.optimizer, session.learning_rate, session.constrain)
            if recipe.method.trains_weights
            else MaskedParameters(
                session.model,
                session.optimizer,
                session.learning_rate,
                steppers=session.steppers,
                half=recipe.training.precision == "bfloat16",
                kept_changes=recipe.method.sparsity_schedule != "constant",
            )
        )
        self._compile = compile
        self._graph = graph
        self._sums = Sums(session.device)
        self._graphs: dict[str, CapturedGraph | None] = {}
        # A batch of another size comes once an epoch: it is not worth compiling the network for.
        self._direct: Losses = self._network.compiled if compile and not graph else self._network.losses

    @property
    def way(self) -> str:
        """How it is executed, by the name that ``iterand bench step`` uses."""
        captured = self._graphs.get("train") is not None
        return " ".join(["compiled"] * self._compile + ["graph"] * captured) or "fused"

    def train(self, batch: Batch) -> None:
        """Forward, backward, update; add loss and hits to the sums of the epoch."""
        whole = len(batch.labels) == self._session.recipe.training.batch_size
        self._trainable.begin()
        if whole and self._graph and "train" not in self._graphs:
            self._graphs["train"] = self._capture_training(self._tensors(batch))
            self._trainable.begin()  # the warm-up steps of a capture are undone
        captured = self._graphs.get("train")
        if captured is not None and captured.fits((*batch.inputs, batch.labels)):
            captured.replay((*batch.inputs, batch.labels))
        else:
            self._train(self._tensors(batch), self._direct)
        self._trainable.end()

    def evaluate(self, split: Split) -> dict[str, float]:
        """Mean loss and accuracy in percent on a split of the data."""
        self._trainable.begin()
        self._trainable.prepare()
        self._sums.reset()
        with torch.no_grad():
            for batch in split.batches(torch.arange(len(split)), EVALUATION_BATCH):
                if "evaluate" not in self._graphs and self._graphs.get("train") is not None:
                    self._graphs["evaluate"] = self._capture_evaluation(self._tensors(batch))
                captured = self._graphs.get("evaluate")
                if captured is not None and captured.fits((*batch.inputs, batch.labels)):
                    captured.replay((*batch.inputs, batch.labels))
                else:
                    self._evaluate(self._tensors(batch))
        return self._sums.means(len(split))

    def _tensors(self, batch: Batch) -> tuple[Tensor, ...]:
        return *to_layout(batch.inputs, self._session.recipe), batch.labels

    def _capture_training(self, batch: tuple[Tensor, ...]) -> CapturedGraph | None:
        """The graph of a step, compiled if that works; what does not work is logged."""
        session, network = self._session, self._network
        state = [*self._trainable.state, *session.model.buffers(), session.loss_sum, session.correct]
        for losses in (network.compiled, network.losses) if self._compile else (network.losses,):
            try:
                captured = CapturedGraph(partial(self._train, losses=losses), batch, state)
            except CannotCapture as error:
                self._direct = losses
                _warn("a CUDA graph", error)
                return None
            except Exception as error:  # whatever a compiler may raise
                if losses == network.losses:
                    raise
                _warn("compiling", error)
                self._compile = False
            else:
                self._trainable.captured()
                return captured
        return None

    def _capture_evaluation(self, batch: tuple[Tensor, ...]) -> CapturedGraph | None:
        try:
            return CapturedGraph(self._evaluate, batch, [self._sums.loss, self._sums.correct])
        except Exception as error:  # no memory for another graph, most likely
            _warn("a CUDA graph for evaluation", error)
            return None

    def _train(self, batch: tuple[Tensor, ...], losses: Losses) -> None:
        *inputs, labels = batch
        self._network.skeleton.train()
        trainable = self._trainable
        trainable.prepare()
        loss, correct = losses(trainable.tensors, tuple(inputs), labels)
        trainable.update(torch.autograd.grad(loss, trainable.leaves))
        self._session.count(loss, correct, len(labels))

    def _evaluate(self, batch: tuple[Tensor, ...]) -> None:
        *inputs, labels = batch
        self._network.skeleton.eval()
        self._sums.add(self._network.outputs(self._trainable.tensors, tuple(inputs)), labels)


def _warn(what: str, error: Exception) -> None:
    reason = (str(error) or type(error).__name__).splitlines()[0]
    logger.warning("without %s, so slower than it could be: %s", what, reason)


class _Network:
    """A network as a function of its tensors, shared by runs of the same settings, so that it is compiled once."""

    _known: ClassVar[dict[str, "_Network"]] = {}

    def __init__(self, recipe: Recipe, bare: nn.Module, compile: bool) -> None:
        if recipe.training.precision == "bfloat16" and recipe.training.channels_last:
            # torch's compiler fuses layers itself, and faster for large images.
            if compile:
                narrow_(bare)
            else:
                fuse_(bare, ResidualBlock)
        self.skeleton = bare
        self._names = {name for name, _ in (*bare.named_parameters(), *bare.named_buffers())}
        self._recipe = recipe

    @cached_property
    def compiled(self) -> Losses:
        compiled: Losses = torch.compile(self.losses, dynamic=False)
        return compiled

    @classmethod
    def of(cls, session: Session, compile: bool) -> "_Network":
        recipe = session.recipe
        settings = recipe.training
        training = settings.precision, settings.channels_last, settings.label_smoothing, settings.temperature
        method = recipe.method.trains_weights, recipe.method.norms
        pieces = (asdict(recipe.network), training, method, recipe.data.name, compile)
        key = json.dumps(pieces)
        if key not in cls._known:
            cls._known[key] = cls(recipe, skeleton(session.model), compile)
        return cls._known[key]

    def outputs(self, tensors: dict[str, Tensor], inputs: tuple[Tensor, ...]) -> Tensor:
        used = {name: tensor for name, tensor in tensors.items() if name in self._names}
        return forward(lambda *given: functional_call(self.skeleton, used, given), inputs, self._recipe)

    def losses(
        self, tensors: dict[str, Tensor], inputs: tuple[Tensor, ...], labels: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        outputs = self.outputs(tensors, inputs)
        return training_loss(outputs, labels, self._recipe.training), count_correct(outputs.detach(), labels)
