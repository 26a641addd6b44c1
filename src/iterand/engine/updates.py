"""From the gradients of a step to updated parameters: the caller's optimizer without a host sync."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.optim import SGD, Optimizer

from iterand.engine.parameters import MaskedWeights

_RATES = ("params", "lr", "initial_lr")


class Update:
    """Updates the parameters of an optimizer in a step that may be captured as a CUDA graph.

    Learning rates are read from tensors on the device, to which ``begin`` copies those of the parameter groups. SGD
    with momentum and weight decay is done by one kernel for the scores of all layers, unless masks are sampled or
    weights binarized; anything else by the optimizer.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        masked: MaskedWeights,
        others: Sequence[nn.Parameter],
        *,
        accumulates: bool,
        max_norm: float | None,
    ) -> None:
        self._optimizer, self._masked, self._others = optimizer, masked, others
        self._accumulates, self._max_norm = accumulates, max_norm
        self._parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        device = self._parameters[0].device
        self._rates = [torch.zeros((), device=device) for _ in optimizer.param_groups]
        self._copied: list[float | None] = [None] * len(self._rates)
        self.problem: str | None = None
        """Why the update cannot be captured."""
        if not isinstance(optimizer, SGD) and "capturable" not in optimizer.defaults:
            self.problem = f"{type(optimizer).__name__} has no option capturable"
        for layer in masked.layers:
            layer.score.grad = None
        for parameter in self._parameters:  # fused implementations and kernels take one layout only
            _match_layout_(optimizer.state.get(parameter, {}), parameter)
        self._sums = [torch.zeros_like(parameter) for parameter in others] if accumulates else []
        self._kernel = None if accumulates or max_norm is not None else _plain_sgd(optimizer, masked)
        if self._kernel is not None:
            masked.use_momentum([_momentum_buffer(optimizer, layer.score) for layer in masked.layers])
        elif self.problem is None and not isinstance(optimizer, SGD):
            _make_capturable(optimizer)

    def settings(self) -> list[Any]:
        """The settings of the optimizer that a captured graph has as constants."""
        return [
            id(value) if isinstance(value, Tensor) else value
            for group in self._optimizer.param_groups
            for name, value in group.items()
            if name not in _RATES
        ]

    def begin(self) -> None:
        """Copy learning rates that have changed to the device."""
        for number, (group, rate) in enumerate(zip(self._optimizer.param_groups, self._rates)):
            given = group["lr"]
            if isinstance(given, Tensor):
                rate.copy_(given, non_blocking=True)
            elif given != self._copied[number]:
                rate.fill_(given)
                self._copied[number] = given

    def run(
        self, scores: Sequence[Tensor | None], others: Sequence[Tensor | None], *, first: bool, last: bool
    ) -> None:  # fmt: skip
        """Update by gradients of the masked weights and of the other parameters; they are added up until the last."""
        if self._kernel is not None:
            group = self._optimizer.param_groups[self._kernel]
            self._masked.update(scores, self._rates[self._kernel], group["momentum"], group["weight_decay"])
        else:
            self._masked.gradients(scores, add=not first)
        for number, (parameter, gradient) in enumerate(zip(self._others, others)):
            if gradient is None:
                parameter.grad = None
            elif not self._accumulates:
                parameter.grad = _in_layout(gradient, parameter)
            else:
                parameter.grad = self._sums[number]
                parameter.grad.copy_(gradient) if first else parameter.grad.add_(gradient)
        if last:
            self._step()
            if not self._accumulates:
                for parameter in self._others:
                    parameter.grad = None

    def _step(self) -> None:
        if self._max_norm is not None:
            nn.utils.clip_grad_norm_(self._parameters, self._max_norm)
        if self._kernel is None or self._others:
            with self._on_device():
                self._optimizer.step()

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """Let the optimizer read learning rates from the device, in its implementation that does not wait for them."""
        groups = self._optimizer.param_groups
        if self.problem is not None:
            yield
            return
        fused: dict[str, Any] = {"fused": True, "foreach": False}
        before = [{name: group[name] for name in ("lr", *fused) if name in group} for group in groups]
        try:
            for group, rate in zip(groups, self._rates):
                group.update(fused if _fuses(self._optimizer, group) else {}, lr=rate)
            yield
        finally:
            for group, own in zip(groups, before):
                group.update(own)

    def end(self) -> None:
        """Record what neither torch nor a kernel has: that parameters were written, and that the optimizer stepped."""
        for parameter in self._parameters:
            increment_version(parameter)
        self._optimizer._opt_called = True  # type: ignore[attr-defined]  # torch's schedulers warn without it


def _plain_sgd(optimizer: Optimizer, masked: MaskedWeights) -> int | None:
    """The number of the parameter group with all scores, if a kernel can do what the optimizer does with it."""
    if type(optimizer) is not SGD or not masked.layers or not masked.has_kernels:
        return None
    scores = {id(layer.score) for layer in masked.layers}
    for number, group in enumerate(optimizer.param_groups):
        if scores <= {id(parameter) for parameter in group["params"]}:
            unusual = group["nesterov"] or group["dampening"] or group["maximize"] or group["differentiable"]
            return None if unusual else number
    return None


def _momentum_buffer(optimizer: Optimizer, parameter: nn.Parameter) -> Tensor:
    """The momentum buffer of a parameter. A missing one becomes zero, which is equivalent."""
    state = optimizer.state[parameter]
    if state.get("momentum_buffer") is None:
        state["momentum_buffer"] = torch.zeros_like(parameter.detach())
    buffer: Tensor = state["momentum_buffer"]
    return buffer


def _fuses(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    """Whether to take torch's fused implementation: always for SGD, which waits for the device in the others."""
    return isinstance(optimizer, SGD) or group.get("fused", False) is group.get("foreach", True) is None


def _in_layout(gradient: Tensor, parameter: Tensor) -> Tensor:
    """A gradient in the memory layout of its parameter."""
    if gradient.stride() == parameter.stride():
        return gradient
    return torch.empty_like(parameter).copy_(gradient)


def _match_layout_(state: dict[str, Any], parameter: Tensor) -> None:
    """Give an optimizer's state of a parameter its memory layout."""
    for name, value in state.items():
        if isinstance(value, Tensor) and value.shape == parameter.shape and value.stride() != parameter.stride():
            state[name] = torch.empty_like(parameter.detach(), dtype=value.dtype).copy_(value)


def _make_capturable(optimizer: Optimizer) -> None:
    """Let an optimizer count its steps on the device."""
    for group in optimizer.param_groups:
        group["capturable"] = True
        for parameter in group["params"]:
            step = optimizer.state.get(parameter, {}).get("step")
            if isinstance(step, Tensor):
                optimizer.state[parameter]["step"] = step.to(parameter.device, torch.float32)
