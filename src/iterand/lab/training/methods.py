"""Iterative magnitude pruning with rewinding (Frankle & Carbin), the baseline of Appendix C.3 that does train weights.

A run is ``rounds`` + 1 trainings of equally many epochs. After each but the last the smallest of the weights that are
left are pruned, over the whole network, and everything else goes back to where it started. The last one is tested.

The methods: what each does to a network before the loop, and once an iteration within it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from iterand import IterativeRandomization, SparsitySchedule, prune_, scores, surgery
from iterand.backend.reference import cut_together, keeps
from iterand.lab.networks.lstm import LSTMClassifier
from iterand.lab.training.recipe import Recipe
from iterand.selection import kept_count

_SUFFIX = "_pruned"  # of the buffer beside a weight that says what of it is pruned


def round_sparsity(sparsity: float, number: int, rounds: int) -> float:
    """The share pruned after round ``number``: each round leaves the same share of what the one before left."""
    return sparsity if number == rounds else 1 - (1 - sparsity) ** (number / rounds)


def pruned_count(model: nn.Module) -> int:
    """How many weights of a model are pruned in this way."""
    return sum(int(buffer.sum()) for name, buffer in model.named_buffers() if name.endswith(_SUFFIX))


class IterativeMagnitudePruning:
    """Keeps pruned weights at zero, and prunes and rewinds between the trainings.

    It prunes what the other methods mask: the weights of linear, convolution, embedding and recurrent layers. What is
    pruned is in buffers of the model, so a checkpoint of the model has it.
    """

    def __init__(self, model: nn.Module, sparsity: float, rounds: int, phase_epochs: int) -> None:
        self.model = model
        self.sparsity = sparsity
        self.rounds = rounds
        self.phase_epochs = phase_epochs
        self._initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self._weights: dict[str, nn.Parameter] = {}
        self._pruned: dict[str, Tensor] = {}
        for name, owners in surgery.choose(model, None, (), ()).items():
            module, attribute = owners[0].module, owners[0].attribute
            self._weights[name] = owners[0].parameter
            self._pruned[name] = torch.zeros_like(owners[0].parameter, dtype=torch.bool)
            module.register_buffer(attribute + _SUFFIX, self._pruned[name])
        self._count = sum(weight.numel() for weight in self._weights.values())
        if kept_count(self._count, sparsity) == 0:
            raise ValueError(f"sparsity {sparsity:g} leaves none of the {self._count} weights; lower it")

    @torch.no_grad()
    def constrain(self) -> None:
        """Put pruned weights back to zero, whatever the optimizer made of them."""
        for name, weight in self._weights.items():
            weight.masked_fill_(self._pruned[name], 0.0)

    def begin_epoch(self, epoch: int, optimizer: Optimizer) -> None:
        """Before the first epoch of every training but the first: prune, rewind, and forget the momentum."""
        number, inside = divmod(epoch, self.phase_epochs)
        if inside == 0 and 1 <= number <= self.rounds:
            self._prune(number)
            self.model.load_state_dict(self._initial, strict=False)
            self.constrain()
            for state in optimizer.state.values():  # in place: whoever holds the buffers still does
                for value in state.values():
                    value.zero_()

    @torch.no_grad()
    def _prune(self, number: int) -> None:
        # A pruned weight ranks below every other, a weight of zero included.
        sizes = [weight.abs().masked_fill(self._pruned[name], -1.0) for name, weight in self._weights.items()]
        kept = kept_count(self._count, round_sparsity(self.sparsity, number, self.rounds))
        cuts = cut_together(sizes, torch.tensor(kept, device=sizes[0].device), [0] * len(sizes), list(self._weights))
        for pruned, size, cut in zip(self._pruned.values(), sizes, cuts):
            pruned.copy_(~keeps(size, cut))


class Stepper(Protocol):
    """What advances once an iteration, as torch's schedulers do."""

    def step(self) -> None:
        """Advance."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What to keep."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from it."""
        ...


@dataclass(frozen=True)
class Prepared:
    """A network ready for the loop.

    What the optimizer trains, what steps after it, what is done between epochs, and to the parameters after an update.
    """

    parameters: list[nn.Parameter]
    steppers: list[Stepper] = field(default_factory=list)
    begin_epoch: Callable[[int, Optimizer], None] = lambda epoch, optimizer: None
    constrain: Callable[[], None] = lambda: None


def prepare(model: nn.Module, recipe: Recipe, iterations: int) -> Prepared:
    """Make a freshly built network ready for the method of a recipe."""
    method: Any = recipe.method  # choices are checked when a recipe is read, so they need no types here
    if method.trains_weights:
        parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if method.name == "sgd":
            return Prepared(parameters)
        pruning = IterativeMagnitudePruning(model, method.sparsity, method.rounds, recipe.phase_epochs)
        return Prepared(parameters, begin_epoch=pruning.begin_epoch, constrain=pruning.constrain)
    prune_(
        model,
        method.sparsity,
        weights=method.weight_distribution,
        scores=method.score_distribution,
        seed=recipe.seed,
        ranking=method.ranking,
        rank_by=method.rank_by,
        allocation=method.allocation,
        floor=method.floor,
        norms=method.norms,
    )
    if isinstance(model, LSTMClassifier):
        model.set_gates_()  # again: with the other biases they became zero
    steppers: list[Stepper] = []
    if method.name == "iterand":
        steppers.append(
            IterativeRandomization(
                model,
                method.period,
                method.rate,
                candidates=method.candidates,
                redrawn_scores=method.redrawn_scores,
            )
        )
    if method.sparsity_schedule != "constant":
        steps = max(1, round(method.sparsity_schedule_share * iterations))
        steppers.append(SparsitySchedule(model, method.sparsity_schedule, steps=steps))
    return Prepared(scores(model), steppers)
