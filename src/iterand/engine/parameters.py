"""What a fused step trains, laid out for it: weights as they are, or scores with masked weights as leaves."""

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

_INSIDE = ".parametrizations."


class CannotFuse(Exception):
    """A model whose layers cannot all be worked on in one launch."""


class DenseParameters:
    """Weights, trained by torch's optimizer."""

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
        """Nothing: weights are what they are."""

    def prepare(self) -> None:
        """Nothing: weights are what they are."""

    def update(self, gradients: tuple[Tensor, ...]) -> None:
        """A step of the optimizer."""
        for leaf, gradient in zip(self.leaves, gradients):
            leaf.grad = gradient
        self._optimizer.step()
        self._constrain()
        for leaf in self.leaves:
            leaf.grad = None

    def end(self) -> None:
        """Nothing: nothing depends on the weights."""

    def captured(self) -> None:
        """Nothing: the graph holds the optimizer's own addresses of the gradients."""


class MaskedParameters:
    """Scores, trained through masked weights: mask, later update and cut, one launch each for all layers.

    A step ends with the cuts of the updated scores. They are what a randomization that follows prunes by, and what the
    next step begins with: found once. Where a schedule changes how many weights are kept between two steps, there is no
    such cut, and a step begins with finding its own.

    Versions tell whether cuts are known: torch counts what it writes to scores and counts, and kernels that write past
    it say so. Only a write through ``.data`` would go unseen; while a step lives, nobody else does that to its scores.
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
        # What norms add stays in float32, as under autocast.
        kinds = [torch.bfloat16 if half and weight.dim() > 1 else torch.float32 for weight in weights]
        self.leaves: list[Tensor] = [
            torch.zeros_like(weight, dtype=kind).requires_grad_() for weight, kind in zip(weights, kinds)
        ]
        self._apply = ApplyMasks(self._cuts, weights, self.leaves)
        momenta = momentum_buffers(optimizer)
        self._update = UpdateScores(self._cuts, weights, momenta, self.leaves)
        self.state: list[Tensor] = [*self._scores, *momenta]
        others = dict(model.named_parameters()) | dict(model.named_buffers())
        self.tensors: dict[str, Tensor] = {name: tensor for name, tensor in others.items() if _INSIDE not in name}
        self.tensors |= zip(layers, self.leaves)
        settings = optimizer.param_groups[0]
        self._momentum, self._weight_decay = settings["momentum"], settings["weight_decay"]
        device = weights[0].device
        self._learning_rate = torch.tensor(learning_rate, device=device)
        for group in optimizer.param_groups:
            group["lr"] = self._learning_rate
        self._captured = torch.zeros(len(layers), dtype=torch.int64, device=device)
        normal_levels(device)  # copied with a host sync, which no step should have
        for stepper in steppers:
            if isinstance(stepper, IterativeRandomization):
                stepper.known_cuts = self.cuts

    def cuts(self) -> FindCuts:
        """The cuts of the scores as they are, found unless they are known."""
        versions = self._versions()
        if self._cut_versions != versions:
            self._cuts.run()
            self._cut_versions = versions
        return self._cuts

    def begin(self) -> None:
        """Have the cuts ready, if ``prepare`` does not find them."""
        if not self._kept_changes:
            self.cuts()

    def prepare(self) -> None:
        """Mask the weights."""
        if self._kept_changes:
            self._cuts.run()
        self._apply.run()

    def update(self, gradients: tuple[Tensor, ...]) -> None:
        """Update the scores by the gradients of the masked weights, and find their cuts."""
        self._cut_versions = None  # until the end
        gradients = tuple(
            gradient if same_order(gradient, leaf) else torch.empty_like(leaf).copy_(gradient)
            for gradient, leaf in zip(gradients, self.leaves)
        )
        addresses = self._captured
        if self._learning_rate.is_cuda and torch.cuda.is_current_stream_capturing():
            self._gradients = gradients  # nothing may be written to the device now
        else:
            addresses = pointers(gradients)
        self._update.run(addresses, self._learning_rate, self._momentum, self._weight_decay)
        if not self._kept_changes:
            self._cuts.run()

    def end(self) -> None:
        """The scores are others now, of which neither kernels nor graphs tell torch; their cuts were found."""
        bump_version(self._scores)
        if not self._kept_changes:
            self._cut_versions = self._versions()

    def captured(self) -> None:
        """Tell the graph where its gradients are."""
        self._captured.copy_(pointers(self._gradients))

    def _versions(self) -> list[int]:
        return backend.versions((*self._scores, *self._kept))


def optimized(optimizer: Optimizer) -> list[Tensor]:
    """The parameters of an optimizer."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def momentum_buffers(optimizer: Optimizer) -> list[Tensor]:
    """The momentum of every parameter, in its layout; zero where there is none yet, which changes no first step."""
    found = []
    for parameter in optimized(optimizer):
        state = optimizer.state[parameter]
        buffer = torch.zeros_like(parameter.detach())
        if state.get("momentum_buffer") is not None:
            buffer.copy_(state["momentum_buffer"])
        state["momentum_buffer"] = buffer
        found.append(buffer)
    return found
