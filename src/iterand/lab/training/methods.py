"""The methods of a recipe: SGD, edge-popup, IteRand, and iterative magnitude pruning (IMP) with rewinding.

``prepare`` gives a method's parameters, steppers and hooks to the one training loop that all of them share.
"""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from iterand import IterativeRandomization, ScoreFreezing, SparsitySchedule, maskable, prune_, scores
from iterand.backend.reference import cut_together, keeps
from iterand.errors import UnmaskedWarning
from iterand.freezing import freeze_norms_
from iterand.lab.networks.lstm import LSTMClassifier
from iterand.lab.training.recipe import MethodRecipe, Recipe
from iterand.masking import left_alone
from iterand.parameter_kinds import Owner, list_tensors, owners
from iterand.planning import recommended_gain
from iterand.randomization import Stepper
from iterand.selection import kept_count


@dataclass(frozen=True)
class Prepared:
    """What a method gives to the training loop."""

    parameters: list[nn.Parameter]
    """What the optimizer updates: scores or weights."""
    steppers: list[Stepper] = field(default_factory=list)
    """Stepped after each iteration."""
    begin_epoch: Callable[[int, Optimizer], None] = lambda epoch, optimizer: None
    """Called before each epoch but the first."""
    constrain: Callable[[], None] = lambda: None
    """Called after each update of the parameters."""


def prepare(model: nn.Module, recipe: Recipe, iterations: int) -> Prepared:
    """Prepare a new network, in place, for the method of a recipe and this many iterations."""
    if recipe.method.trains_weights:
        return _prepare_training(model, recipe)
    _mask_(model, recipe)
    if isinstance(model, LSTMClassifier):
        model.set_gates_()  # again: prune_ has set all biases to zero
    steppers = _steppers(model, recipe.method, iterations)
    return Prepared(_searched_parameters(model, recipe.method), steppers)


def _prepare_training(model: nn.Module, recipe: Recipe) -> Prepared:
    """Prepare a network whose weights are trained."""
    method = recipe.method
    if not method.train_norms:
        affine = _norm_owners(model)
        if not affine:
            raise ValueError("method.train_norms is false, but the network has no norm that learns; leave it out")
        freeze_norms_(affine)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if not parameters:
        raise ValueError(
            f"method.name is {method.name!r}, but the network has no parameter that requires a gradient; unfreeze some"
        )
    if method.name == "sgd":
        return Prepared(parameters)
    pruning = IterativeMagnitudePruning(model, method.sparsity, method.rounds, recipe.phase_epochs)
    return Prepared(parameters, begin_epoch=pruning.begin_epoch, constrain=pruning.constrain)


def _mask_(model: nn.Module, recipe: Recipe) -> None:
    """Mask the network of a search; a warning names what is neither masked nor trained."""
    method: Any = recipe.method  # choices are checked when a recipe is read, so they need no types here
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UnmaskedWarning)  # which names options of prune_
        prune_(
            model,
            method.sparsity,
            weights=method.weight_distribution,
            gain=method.gain or recommended_gain(method.sparsity),
            scores=method.score_distribution,
            seed=recipe.seed,
            ranking=method.ranking,
            rank_by=method.rank_by,
            mask=method.mask,
            coats=method.coats,
            binarize=method.binarize,
            share=method.share,
            include=method.include or None,
            exclude=method.exclude,
            allocation=method.allocation,
            floor=method.floor,
            norms=method.norms,
        )
    if unmasked := left_alone(model):
        warnings.warn(
            f"the network has {list_tensors(unmasked)}, neither masked nor trained: they stay as they are "
            "built, and a ticket stores them in full; mask them too with method.include = ['*'], or name them in "
            "method.exclude",
            UnmaskedWarning,
            stacklevel=3,
        )


def _steppers(model: nn.Module, method: Any, iterations: int) -> list[Stepper]:
    """The steppers of a search."""
    steppers: list[Stepper] = []
    if method.name == "iterand":
        steppers.append(
            IterativeRandomization(
                model,
                method.period,
                method.rate,
                candidates=method.candidates,
                redrawn_scores=method.redrawn_scores,
                redraw_from=method.redraw_from,
                steps=None if method.late_rounds else iterations,
            )
        )
    if method.sparsity_schedule != "constant":
        steps = max(1, round(method.sparsity_schedule_share * iterations))
        steppers.append(SparsitySchedule(model, method.sparsity_schedule, steps=steps))
    if method.mask == "gem_miner":
        steppers.append(ScoreFreezing(model, method.freezing_period))
    return steppers


def _searched_parameters(model: nn.Module, method: MethodRecipe) -> list[nn.Parameter]:
    """What a search updates: the scores, and norms that are kept. Everything else takes no gradients from now on."""
    parameters = scores(model)
    if method.norms == "keep":
        found = [one for one in _norm_owners(model) if not any(map(one.matches, method.exclude))]
        norms = {id(one.parameter): one.parameter for one in found}
        parameters += [parameter for parameter in norms.values() if parameter.requires_grad]
    trained = set(map(id, parameters))
    for parameter in model.parameters():
        if id(parameter) not in trained:
            parameter.requires_grad_(False)  # a gradient of it would never be used, nor be cleared
    return parameters


def _norm_owners(model: nn.Module) -> list[Owner]:
    """The scales and shifts of the norms of a model."""
    return [owner for owner in owners(model) if owner.kind in ("norm", "shift")]


# Iterative magnitude pruning

_SUFFIX = "_pruned"  # of the boolean buffer beside a weight that marks what is pruned


def round_sparsity(sparsity: float, number: int, rounds: int) -> float:
    """The sparsity after round ``number``: each round keeps the same share of the weights that are left."""
    return sparsity if number == rounds else 1 - (1 - sparsity) ** (number / rounds)


def pruned_count(model: nn.Module) -> int:
    """How many weights of a model iterative magnitude pruning has pruned."""
    return sum(int(buffer.sum()) for name, buffer in model.named_buffers() if name.endswith(_SUFFIX))


class IterativeMagnitudePruning:
    """Iterative magnitude pruning with rewinding (Frankle & Carbin), the baseline of Appendix C.3 that trains weights.

    A run is ``rounds`` + 1 trainings of ``phase_epochs`` epochs each. After each but the last, the smallest of the
    remaining weights of the whole network are pruned, and all others are rewound to their initial values. It prunes the
    tensors that other methods mask: the weights of linear, convolution, embedding and recurrent layers. What is pruned
    is kept in buffers of the model, so checkpoints of the model contain it.
    """

    def __init__(self, model: nn.Module, sparsity: float, rounds: int, phase_epochs: int) -> None:
        self.model = model
        self.sparsity = sparsity
        self.rounds = rounds
        self.phase_epochs = phase_epochs
        self._initial = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self._weights: dict[str, nn.Parameter] = {}
        self._pruned: dict[str, Tensor] = {}
        for name, group in maskable.choose(model, None, (), ()).items():
            module, attribute = group[0].module, group[0].attribute
            self._weights[name] = group[0].parameter
            self._pruned[name] = torch.zeros_like(group[0].parameter, dtype=torch.bool)
            module.register_buffer(attribute + _SUFFIX, self._pruned[name])
        self._count = sum(weight.numel() for weight in self._weights.values())
        if kept_count(self._count, sparsity) == 0:
            raise ValueError(f"sparsity {sparsity:g} leaves none of the {self._count} weights; lower it")

    @torch.no_grad()
    def constrain(self) -> None:
        """Set pruned weights to zero again after the optimizer has changed them."""
        for name, weight in self._weights.items():
            weight.masked_fill_(self._pruned[name], 0.0)

    def begin_epoch(self, epoch: int, optimizer: Optimizer) -> None:
        """Before the first epoch of every training but the first: prune, rewind, and reset the momentum."""
        number, inside = divmod(epoch, self.phase_epochs)
        if inside == 0 and 1 <= number <= self.rounds:
            self._prune(number)
            self.model.load_state_dict(self._initial, strict=False)
            self.constrain()
            for state in optimizer.state.values():  # in place: a CUDA graph holds the buffers
                for value in state.values():
                    value.zero_()

    @torch.no_grad()
    def _prune(self, number: int) -> None:
        # Pruned weights rank below all others, including weights of zero.
        sizes = [weight.abs().masked_fill(self._pruned[name], -1.0) for name, weight in self._weights.items()]
        kept = kept_count(self._count, round_sparsity(self.sparsity, number, self.rounds))
        cuts = cut_together(sizes, torch.tensor(kept, device=sizes[0].device), [0] * len(sizes), list(self._weights))
        for pruned, size, cut in zip(self._pruned.values(), sizes, cuts):
            pruned.copy_(~keeps(size, cut))
