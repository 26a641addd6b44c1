"""What a fused step trains, laid out for it: weights as they are, or scores with masked weights as leaves."""

import torch
from torch import Tensor

from iterand.distributions import normal_levels
from iterand.kernels.layers import pointers, same_order
from iterand.kernels.masking import MaskedWeights, ScoreUpdate
from iterand.masking import masked_layers
from iterand.parametrization import selection_on_device
from iterand.training.session import Session

_INSIDE = ".parametrizations."


class CannotFuse(Exception):
    """A model whose layers cannot all be worked on in one launch."""


class DenseParameters:
    """Weights, trained by torch's optimizer."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.leaves: list[Tensor] = list(session.parameters)
        self.tensors: dict[str, Tensor] = dict(session.model.named_parameters()) | dict(session.model.named_buffers())
        momenta = momentum_buffers(session)
        self.state: list[Tensor] = [*self.leaves, *momenta]
        for group in session.optimizer.param_groups:
            group["lr"] = torch.tensor(session.learning_rate, device=session.device)

    def prepare(self) -> None:
        """Nothing: weights are what they are."""

    def update(self, gradients: tuple[Tensor, ...]) -> None:
        """A step of the optimizer."""
        for leaf, gradient in zip(self.leaves, gradients):
            leaf.grad = gradient
        self._session.optimizer.step()
        self._session.constrain()
        for leaf in self.leaves:
            leaf.grad = None

    def recorded(self) -> None:
        """Nothing: the optimizer has recorded where the gradients are."""


class MaskedParameters:
    """Scores, trained through masked weights: cut, mask, and later update, one launch each for all layers."""

    def __init__(self, session: Session) -> None:
        layers = masked_layers(session.model)
        masks = [layer.parametrization for layer in layers.values()]
        weights = [layer.weight.detach() for layer in layers.values()]
        for mask, weight in zip(masks, weights):
            mask.lie_as_(weight)
        scores = [mask.score.detach() for mask in masks]
        if len({mask.ranking for mask in masks}) > 1 or any(weight.dtype != torch.float32 for weight in weights):
            raise CannotFuse("layers are ranked in different ways, or weights are not float32")
        self._cuts = selection_on_device(masks)
        half = session.recipe.training.precision == "bfloat16"
        # What norms add stays in float32, as under autocast.
        kinds = [torch.bfloat16 if half and weight.dim() > 1 else torch.float32 for weight in weights]
        self.leaves: list[Tensor] = [
            torch.zeros_like(weight, dtype=kind).requires_grad_() for weight, kind in zip(weights, kinds)
        ]
        self._masked = MaskedWeights(self._cuts, weights, self.leaves)
        momenta = momentum_buffers(session)
        self._step = ScoreUpdate(self._cuts, weights, momenta, self.leaves)
        self.state: list[Tensor] = [*scores, *momenta]
        model = session.model
        others = dict(model.named_parameters()) | dict(model.named_buffers())
        self.tensors: dict[str, Tensor] = {name: tensor for name, tensor in others.items() if _INSIDE not in name}
        self.tensors |= zip(layers, self.leaves)
        self._settings = session.recipe.optimizer
        self._learning_rate = torch.tensor(session.learning_rate, device=session.device)
        for group in session.optimizer.param_groups:
            group["lr"] = self._learning_rate
        self._recorded = torch.zeros(len(layers), dtype=torch.int64, device=session.device)
        normal_levels(weights[0].device)  # sent with a wait, which no step should have

    def prepare(self) -> None:
        """Find the cuts of the scores as they are, and mask the weights."""
        self._cuts.find()
        self._masked.compute()

    def update(self, gradients: tuple[Tensor, ...]) -> None:
        """Update the scores by the gradients of the masked weights."""
        gradients = tuple(
            gradient if same_order(gradient, leaf) else torch.empty_like(leaf).copy_(gradient)
            for gradient, leaf in zip(gradients, self.leaves)
        )
        addresses = self._recorded
        if self._learning_rate.is_cuda and torch.cuda.is_current_stream_capturing():
            self._gradients = gradients  # nothing may be written to the device now
        else:
            addresses = pointers(gradients)
        self._step.run(addresses, self._learning_rate, self._settings.momentum, self._settings.weight_decay)

    def recorded(self) -> None:
        """Tell the graph where its gradients are."""
        self._recorded.copy_(pointers(self._gradients))


def momentum_buffers(session: Session) -> list[Tensor]:
    """The momentum of every parameter, in its layout; zero where there is none yet, which changes no first step."""
    found = []
    for parameter in session.parameters:
        state = session.optimizer.state[parameter]
        laid_out = torch.zeros_like(parameter.detach())
        if state.get("momentum_buffer") is not None:
            laid_out.copy_(state["momentum_buffer"])
        state["momentum_buffer"] = laid_out
        found.append(laid_out)
    return found
