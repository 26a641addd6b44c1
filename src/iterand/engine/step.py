"""``make_step``: a training step of any model and optimizer; on CUDA one graph, with kernels for all masked layers."""

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from iterand.checks import check_int, shown
from iterand.engine.graph import GraphCache
from iterand.randomization import Stepper
from iterand.surgery import masked_layers, unwrap

logger = logging.getLogger("iterand")

Loss = Callable[..., Tensor]
Forward = Callable[..., Any]

_CHANGES = 3  # of settings other than learning rates, after which a step is not captured again


def make_step(
    model: nn.Module,
    optimizer: Optimizer,
    loss_fn: Loss,
    *,
    steppers: Sequence[Stepper] = (),
    precision: torch.dtype | None = None,
    accumulation_steps: int = 1,
    max_grad_norm: float | None = None,
    capture: bool = True,
) -> "TrainingStep":
    """A training step as one call: forward, loss, backward, optimizer and steppers.

    ``step(inputs, *targets)`` trains on a batch and returns ``loss_fn(model(inputs), *targets)``, detached. A tuple or
    list of inputs is unpacked, a mapping is passed as keywords.

    On a CPU it is the plain loop. On CUDA, masks, cuts and gradients of all layers take one launch each, and the whole
    step is captured as a CUDA graph: a shape of batches that comes three times in a row is captured and replayed from
    then on, any other runs directly. What cannot be captured (a model that waits for the GPU, an optimizer whose state
    is on the host) runs directly too, and the log says why.

    Args:
        model: Any module, pruned or dense. Its training mode is the caller's.
        optimizer: Over parameters of the model; scores that take gradients must be among them. SGD and optimizers with
            an option ``capturable`` (Adam, AdamW, …) are captured. Learning rates are read at each step, so torch's
            schedulers work as usual.
        loss_fn: Computes a scalar from the outputs of the model and the targets.
        steppers: Called after each step of the optimizer, such as ``IterativeRandomization``.
        precision: ``torch.bfloat16`` runs model and loss under autocast.
        accumulation_steps: How many batches make a step of the optimizer; their losses are averaged.
        max_grad_norm: Clip the norm of all gradients, as ``torch.nn.utils.clip_grad_norm_``.
        capture: False: never capture, for debugging.
    """
    return TrainingStep(
        model,
        optimizer,
        loss_fn,
        steppers=steppers,
        precision=precision,
        accumulation_steps=accumulation_steps,
        max_grad_norm=max_grad_norm,
        capture=capture,
    )


class TrainingStep:
    """What ``make_step`` returns.

    ``forward`` is called instead of the model, as ``forward(tensors, *inputs)`` with the tensors of the model by the
    names that they have without masks.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        loss_fn: Loss,
        *,
        steppers: Sequence[Stepper] = (),
        precision: torch.dtype | None = None,
        accumulation_steps: int = 1,
        max_grad_norm: float | None = None,
        capture: bool = True,
        forward: Forward | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ValueError(f"model is {shown(model)}; it must be a torch.nn.Module")
        if not isinstance(optimizer, Optimizer):
            raise ValueError(f"optimizer is {shown(optimizer)}; it must be an optimizer of torch.optim over the model")
        if isinstance(optimizer, torch.optim.LBFGS):
            raise ValueError("LBFGS evaluates the loss several times in a step; take another optimizer")
        if not callable(loss_fn) or isinstance(loss_fn, type):
            raise ValueError(f"loss_fn is {shown(loss_fn)}; it must be a function of the outputs and the targets")
        if precision not in (None, torch.float32, torch.bfloat16):
            raise ValueError(f"precision is {precision}; it must be torch.bfloat16, or None for the model's own")
        if max_grad_norm is not None:
            _check_norm(max_grad_norm)
        self.model, self.optimizer = model, optimizer
        self._loss_fn, self._forward = loss_fn, forward
        self._steppers = _check_steppers(model, steppers)
        self._precision = precision if precision == torch.bfloat16 else None
        self._accumulation = check_int(
            "accumulation_steps", accumulation_steps, "a number of batches, at least 1", low=1
        )
        self._max_norm = max_grad_norm
        self._batches = 0
        """Of the current step of the optimizer."""
        self.preparations = 0
        """How often kernels were prepared, at first and whenever tensors have moved."""
        self._structure: pytree.TreeSpec | None = None
        _check_optimizer(model, optimizer)
        self._device = self._parameters[0].device
        self._modules = list(model.modules())
        self._capture = capture
        self._on_device = _has_kernels(self._device) and not _is_distributed(model)
        if _has_kernels(self._device) and not self._on_device:
            logger.warning("without a CUDA graph of the step, so slower than it could be: the model is distributed")
        if self._on_device:
            self._prepare()
            _prepare_again_after_loading(optimizer, weakref.ref(self))

    @property
    def _parameters(self) -> list[nn.Parameter]:
        """Those of the optimizer, which may get more of them."""
        return [parameter for group in self.optimizer.param_groups for parameter in group["params"]]

    @property
    def replays(self) -> bool:
        """Whether a CUDA graph of the step has been captured."""
        return self._on_device and self._graphs.replays

    def __call__(self, inputs: Any, *targets: Any) -> Tensor:
        """Train on a batch; gives the loss, detached."""
        inputs = {name: inputs[name] for name in sorted(inputs)} if isinstance(inputs, Mapping) else inputs
        leaves, structure = self._flatten((inputs, targets))
        self._batches += 1
        last = self._batches == self._accumulation
        first = self._batches == 1
        try:
            if self._on_device:
                loss = self._run_on_device(leaves, structure, first, last)
            else:
                loss = self._run_plainly(inputs, targets, first, last)
        except BaseException:
            self._batches = 0
            raise
        self._structure = structure
        if last:
            self._batches = 0
            for stepper in self._steppers:
                stepper.step()
        return loss

    @contextmanager
    def evaluating(self) -> Iterator[dict[str, Tensor]]:
        """Let the model read its masked weights under the current scores, as a training step does.

        Gives the tensors of the model by the names that they have without masks.
        """
        if self._tensors_now() != self._prepared_for:
            self._prepare()
        self._masked.prepare()
        with self._masked.attached():
            yield self._tensors

    # The plain loop

    def _run_plainly(self, inputs: Any, targets: Sequence[Any], first: bool, last: bool) -> Tensor:
        if first:
            self.optimizer.zero_grad()
        loss = self._loss(inputs, targets)
        (loss if self._accumulation == 1 else loss / self._accumulation).backward()  # type: ignore[no-untyped-call]
        if any(parameter.grad is None for parameter in self._parameters):
            _check_optimizer(self.model, self.optimizer)  # the model may have been pruned or folded since
        if last:
            if self._max_norm is not None:
                nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
            self.optimizer.step()
        return loss.detach()

    def _loss(self, inputs: Any, targets: Sequence[Any], call: Forward | None = None) -> Tensor:
        call = call or self.model
        with torch.autocast(self._device.type, torch.bfloat16, enabled=self._precision is not None):
            if isinstance(inputs, dict):
                outputs = call(**inputs)
            else:
                outputs = call(*inputs) if isinstance(inputs, (tuple, list)) else call(inputs)
            loss = self._loss_fn(outputs, *targets)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            kind = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ValueError(f"loss_fn returned {kind}; it must return a scalar tensor, such as the mean of the losses")
        if not loss.requires_grad:
            raise ValueError(
                "the loss does not depend on a parameter that takes gradients; is the model frozen, or is this inside "
                "torch.no_grad?"
            )
        return loss.reshape(())

    # On the device

    def _prepare(self) -> None:
        """Prepare kernels and graphs for tensors as they are now."""
        from iterand.engine.parameters import MaskedWeights
        from iterand.engine.updates import Update

        self._masked = MaskedWeights(unwrap(self.model), self._precision)
        mine = {id(layer.score) for layer in self._masked.layers}
        self._others = [one for one in self._parameters if id(one) not in mine and one.requires_grad]
        self._tensors = self._masked.tensors(unwrap(self.model))
        """By the names that they have without masks."""
        self.preparations += 1
        self._update = Update(
            self.optimizer, self._masked, self._others, accumulates=self._accumulation > 1, max_norm=self._max_norm
        )
        capture = self._capture
        if capture and self._update.problem is not None:
            logger.warning("without a CUDA graph of the step, so slower than it could be: %s", self._update.problem)
            capture = False
        self._graphs = GraphCache("of the step", self._device, enabled=capture, capturing=self._masked.capturing)
        self._prepared_for = self._tensors_now()
        self._settings = self._update.settings()
        self._changes = 0

    def _run_on_device(self, leaves: list[Any], structure: pytree.TreeSpec, first: bool, last: bool) -> Tensor:
        if self._tensors_now() != self._prepared_for:
            self._prepare()
        settings = self._update.settings()
        if settings != self._settings:
            self._settings, self._changes = settings, self._changes + 1
            self._graphs.clear()
            if self._changes == _CHANGES:
                logger.warning("without a CUDA graph of the step, so slower than it could be: "
                               "settings of the optimizer other than learning rates change")  # fmt: skip
                self._graphs = GraphCache("of the step", self._device, enabled=False)
        self._update.begin()
        modes = tuple(module.training for module in self._modules)
        work = partial(self._work, structure=structure, first=first, last=last)
        if all(isinstance(leaf, Tensor) and leaf.device == self._device for leaf in leaves):
            loss = self._graphs.run((first, last, modes), work, leaves)
        else:  # lengths of sequences on the host, say: part of the work, so the next batch differs
            loss = work(leaves)
        if last:
            self._update.end()
        return loss

    def _tensors_now(self) -> list[Any]:
        """Where tensors are and which take gradients: kernels and graphs are prepared for that."""
        return [*self._masked.addresses(), *((one.data_ptr(), one.requires_grad) for one in self._parameters)]

    def _work(self, tensors: Sequence[Any], *, structure: pytree.TreeSpec, first: bool, last: bool) -> Tensor:
        inputs, targets = pytree.tree_unflatten(list(tensors), structure)
        self._masked.prepare()
        whole = len(self._masked.layers) == len(masked_layers(self.model))
        forward = partial(self._forward, self._tensors) if self._forward is not None and whole else None
        with self._masked.attached():
            loss = self._loss(inputs, targets, forward)
            leaves = [leaf for leaf in self._masked.leaves if leaf.requires_grad]
            scaled = loss if self._accumulation == 1 else loss / self._accumulation
            found = torch.autograd.grad(scaled, [*leaves, *self._others], allow_unused=True)
        if any(gradient is None for gradient in found):
            _check_optimizer(self.model, self.optimizer)  # the model may have been pruned or folded since
        gradients = iter(found)
        scores = [next(gradients) if leaf.requires_grad else None for leaf in self._masked.leaves]
        self._update.run(scores, list(gradients), first=first, last=last)
        return loss.detach()

    # Batches

    def _flatten(self, batch: tuple[Any, ...]) -> tuple[list[Any], pytree.TreeSpec]:
        leaves, structure = pytree.tree_flatten(batch)
        if self._structure is not None and structure != self._structure:
            first = self._structure.unflatten([None] * self._structure.num_leaves)
            raise ValueError(
                f"the batch is {_outline(batch)}, but the first was {_outline(first)}; "
                "give all batches one structure, or make another step"
            )
        away = [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.device != self._device]
        on_host = len(away) < len(leaves) and all(tensor.device.type == "cpu" for tensor in away)  # lengths, say
        if away and not on_host:
            raise ValueError(f"the batch is on {away[0].device}, the model on {self._device}; move it there first")
        return leaves, structure


def _outline(batch: tuple[Any, ...]) -> str:
    """What a batch consists of, without its numbers."""
    inputs, targets = batch
    return f"{_kind(inputs)} with {' and '.join(map(_kind, targets)) or 'nothing'} as targets"


def _kind(part: Any) -> str:
    if isinstance(part, dict):
        return f"a dict of {', '.join(map(str, part))}"
    if isinstance(part, (tuple, list)):
        return f"a {type(part).__name__} of {len(part)}"
    return "one tensor"


def _check_norm(value: Any) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"max_grad_norm is {value!r}; it must be a number greater than 0, or None")


def _check_steppers(model: nn.Module, steppers: Any) -> list[Stepper]:
    found: list[Any] = list(steppers) if isinstance(steppers, Iterable) else [None]
    if not all(callable(getattr(one, "step", None)) and not isinstance(one, type) for one in found):
        raise ValueError(
            f"steppers is {shown(steppers)}; it must be a list of objects with a method step, such as "
            "[IterativeRandomization(model)]"
        )
    mine = {layer.parametrization for layer in masked_layers(model).values()}
    for one in found:
        stepped = getattr(one, "model", None)
        theirs = masked_layers(stepped).values() if isinstance(stepped, nn.Module) else ()
        if theirs and mine.isdisjoint(layer.parametrization for layer in theirs):
            raise ValueError(
                f"the {type(one).__name__} in steppers is of another model; make it for the model that is trained"
            )
    return found


def _check_optimizer(model: nn.Module, optimizer: Optimizer) -> None:
    """Refuse an optimizer that does not train this model."""
    parameters: list[nn.Parameter] = [one for group in optimizer.param_groups for one in group["params"]]
    known = {id(parameter) for parameter in model.parameters()}
    strangers = sum(id(parameter) not in known for parameter in parameters)
    scores = {name: layer.score for name, layer in masked_layers(model).items() if layer.score.requires_grad}
    way_out = "make it over iterand.scores(model), after prune_" if scores else "make it over model.parameters()"
    if not parameters:
        raise ValueError(f"the optimizer has no parameters; {way_out}")
    if strangers:
        raise ValueError(
            f"{strangers} of the {len(parameters)} tensors of the optimizer are no parameters of the model; {way_out}"
        )
    mine = {id(parameter) for parameter in parameters}
    for name, score in scores.items():
        if id(score) not in mine:
            raise ValueError(f"the optimizer does not train the scores of {name!r}; {way_out}")
    frozen = sum(not parameter.requires_grad for parameter in parameters)
    if frozen == len(parameters):
        raise ValueError(f"none of the {frozen} tensors of the optimizer takes gradients; {way_out}")


def _prepare_again_after_loading(optimizer: Optimizer, step: "weakref.ref[TrainingStep]") -> None:
    """Loading replaces the tensors of the optimizer's state. The optimizer does not keep the step alive."""

    def prepare(optimizer: Optimizer) -> None:
        if (mine := step()) is not None:
            mine._prepare()

    optimizer.register_load_state_dict_post_hook(prepare)


def _has_kernels(device: torch.device) -> bool:
    """Whether a step on this device is more than the plain loop."""
    return device.type == "cuda"


def _is_distributed(model: nn.Module) -> bool:
    return any(isinstance(part, (nn.parallel.DistributedDataParallel, nn.DataParallel)) for part in model.modules())
