"""The best choice of draws and masks: how near it comes to f(x) = w·x, and how often it fails.

``rounds`` is R, the number of draws of every weight, as in ``bounds.py``.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from iterand import memory, philox
from iterand.checks import counted
from iterand.lab.theory import bounds
from iterand.lab.theory.simulate import MOST_ROUNDS, Estimate, Progress, check_draws, estimate, silent, uniform

STATES = 1 << 20
"""The most choices of draws and masks of an exhaustive search."""

_DRAW_BYTES = 24  # index, number and value of a draw


def draws(width: int, rounds: int, trials: int, seed: int = 0, first_trial: int = 0) -> tuple[Tensor, Tensor]:
    """The R draws of u and v of ``width`` hidden neurons, each trials × width × rounds."""
    for name, value in (("width", width), ("trials", trials)):
        bounds.check_count(name, value)
    bounds.check_count("rounds", rounds, most=MOST_ROUNDS)
    weights = 2 * width
    index = torch.arange(first_trial * weights, (first_trial + trials) * weights)
    draw = torch.arange(rounds).expand(index.numel(), rounds)
    values = uniform(index[:, None].expand_as(draw).reshape(-1), draw.reshape(-1), philox.key(seed, "theory.best"))
    u, v = values.view(trials, 2, width, rounds).unbind(1)
    return u, v


def best_error(u: Tensor, v: Tensor, weight: float) -> Tensor:
    """The smallest error of each trial, by exhaustive search: each neuron takes any of its draws or is pruned."""
    width, rounds = u.shape[1:]
    states = (rounds**2 + 1) ** width
    if states > STATES:
        raise ValueError(
            f"width {width} with {rounds} draws a weight has {states} choices; at most {STATES} are tried one by one, "
            "so take fewer neurons or draws"
        )
    return torch.stack([_best_error_of_trial(*trial, weight) for trial in zip(u.double(), v.double())])


def _best_error_of_trial(u: Tensor, v: Tensor, weight: float) -> Tensor:
    slopes = torch.zeros(1, 2, dtype=torch.float64)
    for own_u, own_v in zip(u, v):
        product = (own_u[:, None] * own_v).reshape(-1)
        positive = (own_u > 0)[:, None].expand(-1, own_v.numel()).reshape(-1)
        choices = torch.stack([product * positive, product * ~positive], dim=1)
        choices = torch.cat([choices.new_zeros(1, 2), choices])
        slopes = (slopes[:, None] + choices).reshape(-1, 2)
    return (slopes - weight).abs().amax(dim=1).min()


def best_error_width_two(u: Tensor, v: Tensor, weight: float) -> Tensor:
    """``best_error`` at width 2, faster: prune both neurons, or give one side to each, with u·v nearest to w."""
    sides = torch.stack([_nearest_product(u, v, weight, u > 0), _nearest_product(u, v, weight, u < 0)], dim=2)
    straight = torch.maximum(sides[:, 0, 0], sides[:, 1, 1])
    crossed = torch.maximum(sides[:, 0, 1], sides[:, 1, 0])
    return torch.minimum(straight, crossed).clamp(max=abs(weight))


def _nearest_product(u: Tensor, v: Tensor, weight: float, allowed: Tensor) -> Tensor:
    u, ordered = u.double(), v.double().sort(dim=2).values
    above = torch.searchsorted(ordered, (weight / u).contiguous()).clamp(max=v.shape[2] - 1)
    nearest = torch.minimum(
        (weight - u * ordered.gather(2, above)).abs(),
        (weight - u * ordered.gather(2, (above - 1).clamp(min=0))).abs(),
    )
    return nearest.where(allowed, torch.inf).amin(dim=2)


def construction_error(u: Tensor, v: Tensor, weight: float) -> Tensor:
    """The error of the proof's construction: u nearest ±1, v nearest ±w, the best neuron of each half."""
    halves = []
    for sign, half_u, half_v in zip((1.0, -1.0), u.double().chunk(2, dim=1), v.double().chunk(2, dim=1)):
        near_u, near_v = _nearest(half_u, sign), _nearest(half_v, sign * weight)
        slope = torch.where(sign * near_u > 0, near_u * near_v, 0.0)
        halves.append((slope - weight).abs().amin(dim=1))
    return torch.maximum(*halves)


def _nearest(values: Tensor, center: float) -> Tensor:
    return values.gather(2, (values - center).abs().argmin(dim=2, keepdim=True)).squeeze(2)


def best_draws(rounds: Sequence[int], *, trials: int) -> float:
    """How many draws ``best_failures`` makes, plus those that it sorts for each R."""
    bounds.check_count("trials", trials)
    return 4.0 * trials * (max(rounds) + sum(rounds))


def best_failures(
    epsilon: float,
    rounds: Sequence[int],
    *,
    weight: float = 1.0,
    trials: int = 2_000,
    seed: int = 0,
    progress: Progress = silent,
) -> list[Estimate]:
    """How often the best choice of draws and masks at width 2 has an error above ε, for each R of ``rounds``."""
    bounds.check_epsilon(epsilon)
    for count in rounds:
        bounds.check_count("rounds", count)
    most = max(rounds)
    what = f"finding the best of {counted(most, 'round')}"
    check_draws(best_draws(rounds, trials=trials), what)
    memory.require(4 * most * _DRAW_BYTES, what, "raise epsilon, or give fewer rounds")
    failures = [0] * len(rounds)
    step = max(1, philox.CHUNK // (4 * most))
    for start in range(0, trials, step):
        together = min(step, trials - start)
        u, v = draws(2, most, together, seed, start)
        progress(4 * together * most)
        for row, count in enumerate(rounds):
            progress(4 * together * count)
            errors = best_error_width_two(u[..., :count].contiguous(), v[..., :count].contiguous(), weight)
            failures[row] += int((errors > epsilon).sum())
    return [estimate(count, trials) for count in failures]
