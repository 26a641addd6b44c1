"""Subnetworks of random ±c networks: a target at two layers for each of its own.

Weights are ±√(2 / fan_in), as everywhere in this package. ReLU is positively homogeneous, so the steps of Theorem D
are set by gains: positive factors of the outputs, which change no decision.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from iterand import distributions, philox
from iterand.checks import counted
from iterand.lab.theory import bounds, exact, signed
from iterand.lab.theory.construct import (
    LARGEST,
    Construction,
    Experiment,
    State,
    linear_names,
    prune_to_states_,
    random_network,
)
from iterand.lab.theory.signed_simulate import first_draws, sign_draws
from iterand.lab.theory.simulate import MOST_ROUNDS, Progress, silent
from iterand.lab.theory.target import layer_widths, matrices

_CERTIFIED_POINTS = 256


def construct(
    target: nn.Sequential,
    epsilon: float,
    delta: float,
    rounds: int | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Construction:
    """Approximate a target within ε for all ‖x‖∞ ≤ 1 with probability 1 − δ, by Theorem D.

    Every input gets as many hidden neurons as its largest weight needs. ``rounds`` is by default the R from which all
    signs that are needed are drawn.
    """
    plan = _plan(target, epsilon, delta, rounds)
    return build(matrices(target), plan.steps, plan.copies, plan.rounds, seed, progress)


def build(
    weights: Sequence[Tensor],
    steps: Sequence[float],
    copies: Sequence[Sequence[int]],
    rounds: int,
    seed: int,
    progress: Progress = silent,
) -> Construction:
    """Draw the random network and keep the units that every weight needs, or as many as there are."""
    hidden = [2 * sum(layer) for layer in copies]
    model = random_network(weights, hidden)
    names = linear_names(model)
    states: dict[str, State] = {}
    gains, held = [], True
    for number, (weight, step, layer, width) in enumerate(zip(weights, steps, copies, hidden)):
        pair = names[2 * number : 2 * number + 2]
        keys = [philox.key(seed, name) for name in pair]
        first, second, reached = _layer_pair(weight, step, layer, rounds, keys, progress)
        states |= zip(pair, (first, second))
        held &= reached
        gains.append(step / (_constant(weight.shape[1]) * _constant(width)))
    for name, (mask, _) in states.items():
        if not mask.any():
            raise ValueError(
                f"seed {seed} draws no sign of {name} that is needed, so nothing would be kept; take more rounds than "
                f"{rounds}, or another seed"
            )
    prune_to_states_(model, states, "signed_constant", rounds, seed)
    return Construction(model, held, gains)


def _layer_pair(
    weight: Tensor, step: float, copies: Sequence[int], rounds: int, keys: Sequence[philox.Key], progress: Progress
) -> tuple[State, State, bool]:
    """The two layers that replace one layer of the target, and whether every weight has all its units."""
    outputs, inputs = weight.shape
    neurons = torch.tensor(copies)
    own_input = torch.arange(inputs).repeat_interleave(2 * neurons)
    hidden = own_input.numel()
    neuron = torch.arange(hidden)
    begin = (2 * neurons).cumsum(0) - 2 * neurons
    prefers_right = neuron - begin[own_input] < neurons[own_input]
    u = first_draws(neuron * inputs + own_input, rounds, keys[0], progress)
    right = prefers_right == (u.of(prefers_right) < rounds)  # u > 0, so the neuron serves x > 0

    needed = (weight.T[own_input] > 0) == right[:, None]  # the sign of v, hidden × outputs
    v = first_draws(neuron[:, None] + hidden * torch.arange(outputs), rounds, keys[1], progress).of(needed)
    # Of the neurons of one input and side every output keeps the first ones with the sign that it needs.
    units = torch.tensor([[signed.units(w, step) for w in row] for row in weight.double().tolist()]).T
    place = 2 * own_input + ~right
    order = place.argsort(stable=True)
    good = v < rounds
    before = torch.cat([torch.zeros(1, outputs, dtype=torch.int64), good[order].long().cumsum(0)])
    start = torch.searchsorted(place[order], torch.arange(2 * inputs + 1))
    rank = torch.empty(hidden, outputs, dtype=torch.int64)
    rank[order] = before[1:] - before[start[place[order]]]
    v_mask = good & (rank <= units[own_input])
    there = (before[start[1:]] - before[start[:-1]]).view(inputs, 2, outputs)

    last = rounds - 1  # a pruned weight is redrawn in every round
    u_mask = torch.zeros(hidden, inputs, dtype=torch.bool)
    u_mask[neuron, own_input] = v_mask.any(dim=1)
    u_state = State(u_mask, torch.where(u_mask, u.of(right)[:, None], last))
    v_state = State(v_mask.T, torch.where(v_mask, v, last).T)
    return u_state, v_state, bool((there >= units[:, None]).all())


def _constant(fan_in: int) -> float:
    return distributions.get_distribution("signed_constant").unit32(fan_in)


class _Plan(NamedTuple):
    rounds: int
    steps: list[float]
    copies: list[list[int]]


def _plan(target: nn.Sequential, epsilon: float, delta: float, rounds: int | None) -> _Plan:
    """The steps of Theorem D, and the exact number of copies that every input needs for its share of δ."""
    widths = layer_widths(target)
    steps = signed.network_steps(epsilon, widths)
    if rounds is None:
        rounds = signed.bound_rounds(epsilon, delta, widths)
    bounds.check_count("rounds", rounds, most=MOST_ROUNDS)
    counts = []
    for weight, step in zip(matrices(target), steps):
        counts.append([[signed.units(w, step) for w in column] for column in weight.double().T.tolist()])
        if not any(map(any, counts[-1])):
            raise ValueError(f"a layer of the target is within epsilon {epsilon:g} of 0, so nothing would be kept")
    least = [[max(column) for column in layer] for layer in counts]
    _check_size(least, widths, "even with all signs drawn, the construction has", "raise epsilon")
    copies = [
        [signed.column_copies(column, delta / (len(steps) * len(layer)), rounds) for column in layer]
        for layer in counts
    ]
    _check_size(copies, widths, f"building with {counted(rounds, 'round')} takes", "raise epsilon, or take more rounds")
    return _Plan(rounds, steps, copies)


def _check_size(copies: Sequence[Sequence[int]], widths: Sequence[int], what: str, way_out: str) -> None:
    size = sum(2 * sum(layer) * (inputs + outputs) for layer, (inputs, outputs) in zip(copies, bounds.layers(widths)))
    if size > LARGEST:
        raise ValueError(f"{what} {size} random weights, and at most {LARGEST} are built; {way_out}")


class SignedExperiment(Experiment):
    """``Experiment`` with signed constants, by Theorem D."""

    points = _CERTIFIED_POINTS

    def _prepare(self, rounds: int | None) -> None:
        self.plan = _plan(self.target, self.epsilon, self.delta, rounds)
        self.rounds = self.plan.rounds

    @property
    def draws(self) -> float:
        """How many draws a construction makes on average, roughly."""
        signs = (2 * sum(layer) * (1 + outputs) for layer, outputs in zip(self.plan.copies, self.widths[1:]))
        return sign_draws(sum(signs), self.rounds)

    @property
    def hidden_widths(self) -> list[int]:
        """The widths of layers 1, 3, …"""
        return [2 * sum(layer) for layer in self.plan.copies]

    @property
    def exact_failure(self) -> float:
        """The exact probability that some weight does not get all its units."""
        failures = [
            signed.column_failure([signed.units(w, step) for w in column], count, self.rounds)
            for weight, step, layer in zip(matrices(self.target), self.plan.steps, self.plan.copies)
            for column, count in zip(weight.double().T.tolist(), layer)
            if count
        ]
        return exact.any_failure(failures)

    def construct(self, seed: int, progress: Progress = silent) -> Construction:
        """One construction."""
        return build(matrices(self.target), self.plan.steps, self.plan.copies, self.rounds, seed, progress)
