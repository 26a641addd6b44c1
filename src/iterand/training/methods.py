"""The methods: what each does to a network before the loop, and once an iteration within it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from torch import nn
from torch.optim import Optimizer

from iterand import IterativeRandomization, SparsitySchedule, prune_, scores
from iterand.networks.lstm import LSTMClassifier
from iterand.training.imp import IterativeMagnitudePruning
from iterand.training.recipe import Recipe


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
    method = recipe.method
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
