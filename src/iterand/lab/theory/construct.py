"""The construction of Theorem 4.1 as a program, and trials of it on a trained network."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn

from iterand import masking, philox
from iterand.checks import counted
from iterand.lab.theory import exact
from iterand.lab.theory.bounds import check_count, layers
from iterand.lab.theory.exact import Tolerance
from iterand.lab.theory.simulate import Found, Progress, check_draws, expected_draws, search, silent
from iterand.lab.theory.target import (
    Part,
    accuracy,
    certify,
    digits,
    empty_linear,
    layer_widths,
    matrices,
    trained_target,
    unprotected,
)
from iterand.surgery import MaskedLayer, masked_layers

LARGEST = 1 << 24  # weights of a random network
_PENALTY = 4.0  # more than any distance of two numbers from -1 to 1


class State(NamedTuple):
    """The mask of a tensor, and the number of the draw that each of its weights has."""

    mask: Tensor
    draw: Tensor


class Construction(NamedTuple):
    """A masked model, and whether the event of the proof happened while it was drawn."""

    model: nn.Sequential
    held: bool
    """Whether all weights that the proof keeps were drawn; the error is then at most ε by the theorem."""
    gains: Sequence[float] | None = None
    """Factors of layers 2, 4, …, if the model is a construction up to positive factors."""


def construct(
    target: nn.Sequential,
    epsilon: float,
    delta: float,
    rounds: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Construction:
    """Approximate a target within ε for all ‖x‖∞ ≤ 1 with probability 1 − δ, by the repaired theorem.

    Args:
        target: Linear layers without bias and of Frobenius norm at most 1, with ReLU between them.
        epsilon: ε, the largest error in the 2-norm.
        delta: δ, the largest probability of failure.
        rounds: R, the number of draws of every weight (R − 1 redraws). The smaller R, the wider the network. By
            default the R from which twice the width of the target is enough.
        seed: Of the random network.
        progress: Called with the number of draws as they are made.
    """
    widths = layer_widths(target)
    if rounds is None:
        rounds = exact.repaired_rounds(epsilon, delta, widths)
    copies = exact.repaired_copies(epsilon, delta, widths, rounds)
    hidden = exact.repaired_widths(epsilon, delta, widths, rounds)
    size = sum(width * (inputs + outputs) for width, (inputs, outputs) in zip(hidden, layers(widths)))
    if size > LARGEST:
        raise ValueError(
            f"building with {counted(rounds, 'round')} takes {size} random weights, and at most {LARGEST} are built; "
            f"{exact.repaired_rounds(epsilon, delta, widths)} rounds need no more than twice the target's width"
        )
    return build(matrices(target), exact.network_tolerances(epsilon, widths), rounds, copies, seed, progress)


def build_draws(
    weights: Sequence[Tensor], tolerances: Sequence[Tolerance], rounds: int, copies: Sequence[int]
) -> float:
    """How many draws ``build`` makes on average, roughly."""
    total = 0.0
    for weight, tolerance, count in zip(weights, tolerances, copies):
        outputs, inputs = weight.shape
        of_u, of_v = expected_draws(tolerance.u / 2, rounds), expected_draws(tolerance.v, rounds)
        total += 2 * inputs * count * (of_u + outputs * of_v)
    return total


def build(
    weights: Sequence[Tensor],
    tolerances: Sequence[Tolerance],
    rounds: int,
    copies: Sequence[int],
    seed: int,
    progress: Progress = silent,
) -> Construction:
    """Draw the random network, search the draws of its weights, and keep the weights that the proof keeps.

    Where no draw is within its tolerance, the nearest one is taken. If all draws of a layer have the wrong sign, there
    is no weight to keep: a ValueError.
    """
    check_count("rounds", rounds)
    expected = build_draws(weights, tolerances, rounds, copies)
    check_draws(expected, f"building with up to {counted(rounds, 'round')}", "raise epsilon, or give fewer rounds")
    hidden = [2 * weight.shape[1] * count for weight, count in zip(weights, copies)]
    model = random_network(weights, hidden)
    names = linear_names(model)
    states: dict[str, State] = {}
    held = True
    for number, (weight, tolerance, count) in enumerate(zip(weights, tolerances, copies)):
        pair = names[2 * number : 2 * number + 2]
        keys = [philox.key(seed, name) for name in pair]
        first, second, pair_held = _layer_pair(weight, tolerance, rounds, count, keys, progress)
        if not first.mask.any():
            raise ValueError(
                f"seed {seed} draws no weight of layer {number} with the sign that the proof needs, so nothing would "
                f"be kept; take more rounds than {rounds}, more copies than {count}, or another seed"
            )
        states |= zip(pair, (first, second))
        held &= pair_held
    prune_to_states_(model, states, "uniform", rounds, seed)
    return Construction(model, held)


def random_network(weights: Sequence[Tensor], hidden: Sequence[int]) -> nn.Sequential:
    """The network g for a target: between the layers of the target hidden layers of these widths."""
    widths = [weights[0].shape[1]]
    for weight, width in zip(weights, hidden):
        widths += [width, weight.shape[0]]
    return layered(widths)


def layered(widths: Sequence[int]) -> nn.Sequential:
    """Linear layers of these widths with ReLU between them."""
    modules: list[nn.Module] = []
    for inputs, outputs in layers(widths):
        modules += [empty_linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*modules[:-1])


def linear_names(model: nn.Sequential) -> list[str]:
    """The names of the weights of the linear layers."""
    return [f"{number}.weight" for number, module in enumerate(model) if isinstance(module, nn.Linear)]


def prune_to_states_(
    model: nn.Sequential, states: Mapping[str, State], distribution: str, rounds: int, seed: int
) -> None:
    """Prune a model to given masks and draws."""
    sparsity = {name: 1 - int(mask.sum()) / mask.numel() for name, (mask, _) in states.items()}
    masking.prune_(model, sparsity, weights=distribution, seed=seed)
    for name, layer in masked_layers(model).items():
        _set_state(layer, states[name], rounds)


def _layer_pair(
    weight: Tensor, tolerance: Tolerance, rounds: int, copies: int, keys: Sequence[philox.Key], progress: Progress
) -> tuple[State, State, bool]:
    """The two random layers that replace one layer of the target (Lemma A.6), and whether the event held."""
    outputs, inputs = weight.shape
    hidden = 2 * inputs * copies
    # Hidden neurons in the order (input, half, copy): the blocks on the diagonal of N in Lemma A.6.
    neuron = torch.arange(hidden)
    own_input = neuron // (2 * copies)
    sign = torch.where(neuron // copies % 2 == 0, 1.0, -1.0).double()
    u = search(neuron * inputs + own_input, sign, torch.full_like(sign, tolerance.u), rounds, keys[0], progress)

    center = sign[:, None] * weight.T.double()[own_input]  # of v, hidden × outputs
    v_index = neuron[:, None] + hidden * torch.arange(outputs)
    within = torch.full_like(center, tolerance.v)
    found = search(v_index.view(-1), center.view(-1), within.view(-1), rounds, keys[1], progress)
    v = Found(*(column.view(hidden, outputs) for column in found))

    # Of the copies of a neuron one is kept for each output: the nearest of those within the tolerances, else the
    # nearest of all. All outputs of a neuron share its u.
    scale = u.value.double() * sign
    distance = (center - v.value * scale[:, None]).abs().where(scale[:, None] > 0, torch.inf)
    penalized = torch.where(u.hit[:, None] & v.hit, distance, distance + _PENALTY).view(-1, copies, outputs)
    chosen = penalized.argmin(dim=1, keepdim=True) == torch.arange(copies).view(-1, 1)
    v_mask = (chosen & penalized.isfinite()).view(hidden, outputs)

    last = rounds - 1  # a pruned weight is redrawn in every round
    u_mask = torch.zeros(hidden, inputs, dtype=torch.bool)
    u_mask[neuron, own_input] = v_mask.any(dim=1)
    u_state = State(u_mask, torch.where(u_mask, u.draw[:, None], last))
    v_state = State(v_mask.T, torch.where(v_mask, v.draw, last).T)
    return u_state, v_state, bool((penalized.amin(dim=1) < _PENALTY).all())


@torch.no_grad()
def _set_state(layer: MaskedLayer, state: State, rounds: int) -> None:
    layer.score.copy_(torch.where(state.mask, 1.0, -1.0))
    layer.parametrization.hold_draws_up_to(rounds - 1)
    layer.draw.copy_(state.draw)
    layer.weight.copy_(layer.parametrization.weight())
    if rounds > 1:
        layer.parametrization.set_history_([(philox.coin_threshold(1.0), rounds - 1)])


@dataclass(frozen=True)
class Trial:
    """One construction from one seed."""

    seed: int
    held: bool
    """Whether the event of the proof happened."""
    measured: float
    proven: float
    accuracy: float
    unprotected: float
    """The share of test images whose decision the proven error could change."""


@dataclass(frozen=True)
class Summary:
    """Many trials together."""

    target_widths: list[int]
    target_accuracy: float
    hidden_widths: list[int]
    rounds: int
    exact_failure: float
    trials: int
    within_epsilon: int
    """Trials whose proven error is at most ε."""
    event_held: int
    largest_measured: float
    largest_proven: float
    lowest_accuracy: float
    highest_accuracy: float
    largest_unprotected: float


class Experiment:
    """A target, its test data, and the ε, δ and R of the theorem."""

    points = 4096
    """Points at which errors are measured."""

    def __init__(
        self, target: nn.Sequential, test: Part, epsilon: float, delta: float, rounds: int | None = None
    ) -> None:
        self.target, self.test, self.epsilon, self.delta = target, test, epsilon, delta
        self.widths = layer_widths(target)
        self._prepare(rounds)

    def _prepare(self, rounds: int | None) -> None:
        self.rounds = exact.repaired_rounds(self.epsilon, self.delta, self.widths) if rounds is None else rounds

    @property
    def draws(self) -> float:
        """How many draws a construction makes on average, roughly."""
        tolerances = exact.network_tolerances(self.epsilon, self.widths)
        copies = exact.repaired_copies(self.epsilon, self.delta, self.widths, self.rounds)
        return build_draws(matrices(self.target), tolerances, self.rounds, copies)

    @property
    def hidden_widths(self) -> list[int]:
        """The widths of layers 1, 3, …"""
        return exact.repaired_widths(self.epsilon, self.delta, self.widths, self.rounds)

    @property
    def exact_failure(self) -> float:
        """The exact probability that the event of the proof fails."""
        tolerances = exact.network_tolerances(self.epsilon, self.widths)
        copies = exact.repaired_copies(self.epsilon, self.delta, self.widths, self.rounds)
        return exact.network_failure(matrices(self.target), tolerances, self.rounds, copies)

    def construct(self, seed: int, progress: Progress = silent) -> Construction:
        """One construction."""
        return construct(self.target, self.epsilon, self.delta, self.rounds, seed, progress)

    def run(self, seed: int, progress: Progress = silent) -> tuple[Trial, nn.Sequential]:
        """One construction with its certificate, and the masked model."""
        made = self.construct(seed, progress)
        certificate = certify(self.target, made.model, gains=made.gains, points=self.points)
        trial = Trial(
            seed=seed,
            held=made.held,
            measured=certificate.measured,
            proven=certificate.proven,
            accuracy=accuracy(made.model, self.test),
            unprotected=unprotected(self.target, self.test.inputs, certificate.proven),
        )
        return trial, made.model

    def summary(self, trials: Sequence[Trial]) -> Summary:
        """These trials together."""
        return Summary(
            target_widths=self.widths,
            target_accuracy=accuracy(self.target, self.test),
            hidden_widths=self.hidden_widths,
            rounds=self.rounds,
            exact_failure=self.exact_failure,
            trials=len(trials),
            within_epsilon=sum(trial.proven <= self.epsilon for trial in trials),
            event_held=sum(trial.held for trial in trials),
            largest_measured=max(trial.measured for trial in trials),
            largest_proven=max(trial.proven for trial in trials),
            lowest_accuracy=min(trial.accuracy for trial in trials),
            highest_accuracy=max(trial.accuracy for trial in trials),
            largest_unprotected=max(trial.unprotected for trial in trials),
        )


def digits_experiment(
    hidden: int, epsilon: float, delta: float, rounds: int | None = None, kind: type[Experiment] = Experiment
) -> Experiment:
    """The experiment whose target is a network with one hidden layer, trained on digits."""
    check_count("hidden", hidden)
    check_count("rounds", 1 if rounds is None else rounds)
    train, test = digits()
    sizes = layers((train.inputs.shape[1], hidden, int(train.labels.max()) + 1))
    least = sum(2 * inputs * (inputs + outputs) for inputs, outputs in sizes)  # at twice the width, with all the rounds
    if least > LARGEST:
        raise ValueError(
            f"hidden has {hidden}; its construction has at least {least} random weights, and at most {LARGEST} are "
            "built, so lower it"
        )
    return kind(trained_target(train, hidden), test, epsilon, delta, rounds)


@dataclass(frozen=True)
class ErrorRow:
    """The error of the construction with the nearest of R draws, at twice the width of the target."""

    rounds: int
    measured: float
    proven: float


def error_rows(target: nn.Sequential, rounds: Sequence[int], seed: int = 0) -> Iterator[ErrorRow]:
    """The error over R at twice the width of the target, row by row."""
    weights = matrices(target)
    nearest = [Tolerance(0.0, 0.0)] * len(weights)
    for count in rounds:
        made = build(weights, nearest, count, [1] * len(weights), seed)
        certificate = certify(target, made.model)
        yield ErrorRow(count, certificate.measured, certificate.proven)
