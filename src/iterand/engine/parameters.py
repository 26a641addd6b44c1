"""What a fused step trains: dense weights, or scores with the masked weights as autograd leaves."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from iterand import backend
from iterand.backend.triton.cuts import FindCuts
from iterand.backend.triton.layers import bump_version, pointers, same_order
from iterand.backend.triton.masks import ApplyMasks, UpdateScores
from iterand.distributions import normal_levels
from iterand.parametrization import masked_layers
from iterand.randomization import IterativeRandomization

_PARAMETRIZATIONS = ".parametrizations."


class CannotFuse(Exception):
    """The layers of the model do not fit one launch."""


class DenseParameters:
    """Dense weights, trained by a torch optimizer."""

    def __init__(
        self, model: nn.Module, optimizer: Optimizer, learning_rate: float, constrain: Callable[[], None]
    ) -> None:
        self._optimizer, self._constrain = optimizer, constrain
        self.leaves = optimized(optimizer)
        self.tensors: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
        momenta = momentum_buffers(optimizer)
        self.state: list[Tensor] = [*self.leaves, *momenta]
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(learning_rate, device=self.leaves[0].device)

    def begin(self) -> None:
        """Nothing to do for dense weights."""

    def prepare(self) -> None:
        """Nothing to do for dense weights."""

    def update(self, gradients: tuple[Tensor, ...]) -> None:
        """One optimizer step."""
        for leaf, gradient in zip(self.leaves, gradients):
            leaf.grad = gradient
        self._optimizer.step()
        self._constrain()
        for leaf in self.leaves:
            leaf.grad = None

    def end(self) -> None:
        """Nothing to do for dense weights."""

    def captured(self) -> None:
        """Nothing to do: the captured optimizer step has the addresses of the gradients."""


class MaskedParameters:
    """Scores, trained through masked weights. Apply masks, update scores and find cuts take one launch each.

    A step ends with finding the cuts of the updated scores. A randomization after the step and the next step reuse
    them. If a schedule changes the number of kept weights between steps, a step begins with finding its cuts instead.

    Version counters tell whether the cuts are stale: torch counts its writes to scores and kept counts, and kernels
    count theirs with ``bump_version``. A write to the scores through ``.data`` goes unnoticed, so there must be none.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        learning_rate: float,
        *,
        steppers: Iterable[object],
        half: bool,
        kept_changes: bool,
    ) -> None:
        layers = masked_layers(model)
        masks = [layer.parametrization for layer in layers.values()]
        weights = [layer.weight.detach() for layer in layers.values()]
        for mask, weight in zip(masks, weights):
            mask.match_layout_(weight)
        self._scores: list[Tensor] = [mask.score.detach() for mask in masks]
        if len({mask.ranking for mask in masks}) > 1 or any(weight.dtype != torch.float32 for weight in weights):
            raise CannotFuse("layers are ranked in different ways, or weights are not float32")
        self._kept = [mask.kept for mask in masks]
        self._kept_changes = kept_changes
        self._cuts = masks[0].ranking.prepare_cuts(masks)
        self._cut_versions: list[int] | None = None
        # The bias of a norm stays in float32, as under autocast.
        dtypes = [torch.bfloat16 if half and weight.dim() > 1 else torch.float32 for weight in weights]
        self.leaves: list[Tensor] = [
            torch.zeros_like(weight, dtype=dtype).requires_grad_() for weight, dtype in zip(weights, dtypes)
        ]
        self._apply = ApplyMasks(self._cuts, weights, self.leaves)
        momenta = momentum_buffers(optimizer)
        self._update = UpdateScores(self._cuts, weights, momenta, self.leaves)
        self.state: list[Tensor] = [*self._scores, *momenta]
        others = dict(model.named_parameters()) | dict(model.named_buffers())
        self.tensors: dict[str, Tensor] = {
            name: tensor for name, tensor in others.items() if _PARAMETRIZATIONS not in name
        }
        self.tensors |= zip(layers, self.leaves)
        settings = optimizer.param_groups[0]
        self._momentum, self._weight_decay = settings["momentum"], settings["weight_decay"]
        device = weights[0].device
        self._learning_rate = torch.tensor(learning_rate, device=device)
        for group in optimizer.param_groups:
            group["lr"] = self._learning_rate
        self._gradient_addresses = torch.zeros(len(layers), dtype=torch.int64, device=device)
        normal_levels(device)  # the first call has a host sync, which a step must not have
        for stepper in steppers:
            if isinstance(stepper, IterativeRandomization):
                stepper.known_cuts = self.cuts

    def cuts(self) -> FindCuts:
        """The cuts of the current scores. Finds them if they are stale."""
        versions = self._versions()
        if self._cut_versions != versions:
            self._cuts.run()
            self._cut_versions = versions
        return self._cuts

    def begin(self) -> None:
        """Find the cuts before the step, unless ``prepare`` does."""
        if not self._kept_changes:
            self.cuts()

    def prepare(self) -> None:
        """Apply the masks."""
        if self._kept_changes:
            self._cuts.run()
        self._apply.run()

    def update(self, gradients: tuple[Tensor, ...]) -> None:
        """Update the scores from the gradients of the masked weights, and find the new cuts."""
        self._cut_versions = None  # stale until ``end``
        gradients = tuple(
            gradient if same_order(gradient, leaf) else torch.empty_like(leaf).copy_(gradient)
            for gradient, leaf in zip(gradients, self.leaves)
        )
        addresses = self._gradient_addresses
        if self._learning_rate.is_cuda and torch.cuda.is_current_stream_capturing():
            self._gradients = gradients  # no copy from the host during capture; see ``captured``
        else:
            addresses = pointers(gradients)
        self._update.run(addresses, self._learning_rate, self._momentum, self._weight_decay)
        if not self._kept_changes:
            self._cuts.run()

    def end(self) -> None:
        """Bump the versions of the scores, which kernels and graphs do not do, and mark the cuts as current."""
        bump_version(self._scores)
        if not self._kept_changes:
            self._cut_versions = self._versions()

    def captured(self) -> None:
        """Write the addresses of the gradients to the buffer that the captured graph reads."""
        self._gradient_addresses.copy_(pointers(self._gradients))

    def _versions(self) -> list[int]:
        return backend.versions((*self._scores, *self._kept))


def optimized(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def momentum_buffers(optimizer: Optimizer) -> list[Tensor]:
    """The momentum buffer of every parameter, in its layout. A missing one becomes zero, which is equivalent."""
    buffers = []
    for parameter in optimized(optimizer):
        state = optimizer.state[parameter]
        buffer = torch.zeros_like(parameter.detach())
        if state.get("momentum_buffer") is not None:
            buffer.copy_(state["momentum_buffer"])
        state["momentum_buffer"] = buffer
        buffers.append(buffer)
    return buffers
