"""A training step on a GPU: ``iterand.make_step`` with fused layers or a compiled network, and captured evaluation."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cached_property, partial
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from iterand.engine.convolution import narrow_
from iterand.engine.fusion import fuse_
from iterand.engine.graph import GraphCache
from iterand.engine.step import TrainingStep
from iterand.errors import first_line
from iterand.lab.data import Batch, Split
from iterand.lab.networks.external import is_external
from iterand.lab.networks.resnet import ResidualBlock
from iterand.lab.training.recipe import Recipe
from iterand.lab.training.session import Session
from iterand.lab.training.steps import (
    EVALUATION_BATCH,
    Sums,
    Teacher,
    count_correct,
    forward,
    to_layout,
    training_loss,
)
from iterand.masking import skeleton

logger = logging.getLogger("iterand")


class FusedStep:
    """Trains and evaluates the model of a session with kernels for all masked layers, captured as CUDA graphs."""

    def __init__(self, session: Session, *, compile: bool, graph: bool = True, teacher: Teacher | None = None) -> None:
        self._session = session
        self._teacher = teacher
        self._network = None if is_external(session.recipe.network.name) else _Network.of(session, compile)
        self._step = TrainingStep(
            session.model,
            session.optimizer,
            self._loss,
            precision=torch.bfloat16 if session.recipe.training.precision == "bfloat16" else None,
            capture=graph,
            forward=None if self._network is None else self._network.train,
        )
        self._sums = Sums(session.device)
        self._evaluation = GraphCache("of the evaluation", session.device, enabled=graph)

    @property
    def way(self) -> str:
        """How it is executed, by the name that ``iterand bench step`` uses."""
        compiled = self._network is not None and self._network.compiles
        return " ".join(["compiled"] * compiled + ["graph"] * self._step.replays) or "fused"

    def train(self, batch: Batch) -> None:
        """Forward, backward, update; add loss and hits to the sums of the epoch."""
        if not self._session.model.training:
            self._session.model.train()
        inputs = batch.inputs if self._network is not None else to_layout(batch.inputs, self._session.recipe)
        self._step(inputs, batch.labels, *([] if self._teacher is None else inputs))

    def evaluate(self, split: Split) -> dict[str, float]:
        """Mean loss and accuracy in percent on a split of the data."""
        self._sums.reset()
        self._session.model.eval()
        with torch.no_grad(), self._step.evaluating() as tensors:
            for batch in split.batches(torch.arange(len(split)), EVALUATION_BATCH):
                work = partial(self._evaluate, tensors)
                self._evaluation.run(self._step.preparations, work, (*batch.inputs, batch.labels))
        return self._sums.means(len(split))

    def _loss(self, outputs: Tensor, labels: Tensor, *inputs: Tensor) -> Tensor:
        outputs = outputs.float()
        taught = None if self._teacher is None else self._teacher(inputs)
        loss = training_loss(outputs, labels, self._session.recipe.training, taught)
        self._session.count(loss, count_correct(outputs.detach(), labels), len(labels))
        return loss

    def _evaluate(self, tensors: dict[str, Tensor], batch: Sequence[Tensor]) -> Tensor:
        *inputs, labels = batch
        network = self._session.model if self._network is None else partial(self._network.evaluate, tensors)
        self._sums.add(forward(network, tuple(inputs), self._session.recipe), labels)
        return self._sums.loss


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
        self.compiles = compile
        """Whether the compiler is used; not if it has failed."""

    @classmethod
    def of(cls, session: Session, compile: bool) -> "_Network":
        """The network of a session."""
        recipe = session.recipe
        settings = recipe.training
        training = settings.precision, settings.channels_last
        method = recipe.method
        choice = method.trains_weights, method.norms, method.train_norms, method.include, method.exclude
        key = json.dumps((asdict(recipe.network), training, choice, recipe.data.name, compile))
        if key not in cls._known:
            cls._known[key] = cls(recipe, skeleton(session.model), compile)
        return cls._known[key]

    def train(self, tensors: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        """The outputs in training mode."""
        self.skeleton.train()
        inputs = to_layout(inputs, self._recipe)
        if self.compiles:
            try:
                return self._compiled(tensors, *inputs)
            except Exception as error:  # whatever a compiler may raise
                logger.warning("without compiling, so slower than it could be: %s", first_line(error))
                self.compiles = False
        return self._call(tensors, *inputs)

    def evaluate(self, tensors: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        """The outputs in evaluation mode."""
        self.skeleton.eval()
        return self._call(tensors, *inputs)

    @cached_property
    def _compiled(self) -> Callable[..., Tensor]:
        compiled: Callable[..., Tensor] = torch.compile(self._call, dynamic=False)
        return compiled

    def _call(self, tensors: dict[str, Tensor], *inputs: Tensor) -> Tensor:
        used = {name: tensor for name, tensor in tensors.items() if name in self._names}
        output: Tensor = functional_call(self.skeleton, used, inputs)
        return output
