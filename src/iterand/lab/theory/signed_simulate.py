"""Simulation of signed constants: the signs of real draws, the best choice at two layers, and pools of many layers.

``rounds`` is R, the number of draws of every weight, as in ``bounds.py``.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from iterand import distributions, memory, philox
from iterand.checks import counted
from iterand.lab.theory import bounds
from iterand.lab.theory.signed import miss_probability
from iterand.lab.theory.signed_depth import Pool
from iterand.lab.theory.simulate import Estimate, Progress, check_draws, estimate, silent
from iterand.philox import Key

_SIGN_BYTES = 40  # index and first draws of a simulated sign
_SIGNS = 1 << 21  # signs of trials that are simulated together


class FirstDraws(NamedTuple):
    """For every weight: the number of its first draw + and of its first draw −, or R where there is none."""

    plus: Tensor
    minus: Tensor

    def of(self, positive: Tensor) -> Tensor:
        """The first draw of the given sign."""
        return torch.where(positive, self.plus, self.minus)


def first_draws(index: Tensor, rounds: int, key: Key, progress: Progress = silent) -> FirstDraws:
    """The first draws of both signs, the same as in a model pruned with ``weights="signed_constant"``."""
    bounds.check_count("rounds", rounds)
    levels = distributions.get_distribution("signed_constant").levels
    flat = index.reshape(-1)
    first = torch.full((2, flat.numel()), rounds)
    for part in philox.chunks(flat.numel()):
        active, draw = torch.arange(part.start, part.stop), 0
        while active.numel() and draw < rounds:
            minus = (levels(philox.philox(flat[active], draw, key)) < 0).long()
            first[minus, active] = first[minus, active].clamp(max=draw)
            progress(active.numel())
            active = active[(first[:, active] == rounds).any(dim=0)]
            draw += 1
    return FirstDraws(*first.view(2, *index.shape))


def sign_draws(signs: float, rounds: int) -> float:
    """How many draws ``first_draws`` makes on average: 3 − 2^(2−R) for each sign."""
    return signs * (3 - 4 * miss_probability(rounds))


def best_failures(
    width: int,
    count: int,
    rounds: Sequence[int],
    *,
    trials: int,
    seed: int = 0,
    progress: Progress = silent,
) -> list[Estimate]:
    """How often no draws and masks of ``width`` neurons reach ``count`` units on both sides, for each R."""
    for name, value in (("width", width), ("trials", trials)):
        bounds.check_count(name, value)
    check_draws(
        sign_draws(2 * width * trials, max(rounds)), f"simulating {counted(trials, 'network')} of width {width}"
    )
    failures = [0] * len(rounds)
    for start, together in _batches(trials, 2 * width):
        index = torch.arange(2 * width * start, 2 * width * (start + together)).view(together, width, 2)
        first = first_draws(index, max(rounds), philox.key(seed, "theory.signed"), progress)
        for row, r in enumerate(rounds):
            right, left, either = (kind.sum(dim=1) for kind in _kinds(first, r))
            failures[row] += int((~_reached(right, left, either, count)).sum())
    return [estimate(failed, trials) for failed in failures]


def simulated_width(
    count: int, delta: float, rounds: int, *, trials: int, seed: int = 0, progress: Progress = silent
) -> int:
    """The width that was enough for ``count`` units on both sides in a share 1 − δ of simulated trials."""
    bounds.check_delta(delta)
    bounds.check_count("trials", trials)
    check_draws(width_draws(count, rounds, trials=trials), f"simulating {counted(trials, 'network')}")
    memory.require(_SIGN_BYTES * trials, f"simulating {counted(trials, 'trial')}", "lower the number of trials")
    key = philox.key(seed, "theory.signed_width")
    needed = torch.zeros(trials, dtype=torch.int64)
    counts = torch.zeros(3, trials, dtype=torch.int64)  # neurons that serve x > 0 only, x < 0 only, either
    active = torch.arange(trials)
    while active.numel():
        block = max(1, min(count, _SIGNS // active.numel()))
        neurons = needed[active, None] + torch.arange(block)
        index = 2 * (active[:, None] + neurons * trials)
        first = first_draws(torch.stack([index, index + 1], dim=2), rounds, key, progress)
        running = torch.stack(_kinds(first, rounds)).cumsum(dim=2) + counts[:, active, None]
        done = _reached(running[0], running[1], running[2], count)
        finished = done.any(dim=1)
        needed[active] += torch.where(finished, done.to(torch.uint8).argmax(dim=1) + 1, block)
        counts[:, active] = running[..., -1]
        active = active[~finished]
    return int(needed.sort().values[math.ceil((1 - delta) * trials) - 1])


def width_draws(count: int, rounds: int, *, trials: int) -> float:
    """How many draws ``simulated_width`` makes on average, roughly."""
    q = miss_probability(rounds)
    return sign_draws(2 * trials * (2 * count / (1 - 2 * q * q) + count / 2), rounds)


def pool_failures(pool: Pool, base: int, layers: int, rounds: int, *, trials: int, seed: int = 0) -> Estimate:
    """How often a random network has no chain with all digits equal to h in these pools, for w > 0."""
    bounds.check_count("trials", trials)
    sizes = _signs_by_layer(pool, layers)
    check_draws(
        sign_draws(sum(sizes) * trials, rounds),
        f"simulating {counted(trials, 'network')} of {counted(layers, 'layer')}",
    )
    failed = 0
    for start, together in _batches(trials, max(sizes)):
        failed += int((~_chains(pool, base, layers, rounds, seed, start, together)).sum())
    return estimate(failed, trials)


def _chains(pool: Pool, base: int, layers: int, rounds: int, seed: int, start: int, trials: int) -> Tensor:
    """Whether each trial has both of its chains."""

    def seen(layer: int, *shape: int) -> FirstDraws:
        size = math.prod(shape)
        index = torch.arange(start * size, (start + trials) * size).view(trials, *shape)
        key = philox.key(seed, f"theory.signed_depth.{layer}")
        return FirstDraws(*(draw < rounds for draw in first_draws(index, rounds, key)))

    half = pool.width // 2
    u = seen(0, 2 * half)
    right = torch.where(torch.arange(2 * half) < half, u.plus, ~u.minus)
    copies = torch.stack([right, ~right], dim=1)  # trials × side × neuron
    sums = torch.ones(trials, 2, 1, dtype=torch.bool)
    for layer in range(1, layers - 1):
        plus = seen(layer, 2, half, copies.shape[2] + sums.shape[2]).plus
        from_copies, from_sums = plus[..., : copies.shape[2]], plus[..., copies.shape[2] :]
        enough = (from_copies & copies[:, :, None]).sum(dim=3) >= base
        joined = (from_sums & sums[:, :, None]).any(dim=3) | (layer == 1)
        copies, sums = enough[..., : pool.copies], (enough & joined)[..., pool.copies :]
    last = seen(layers, 2, copies.shape[2] + sums.shape[2])
    wanted = torch.stack([last.plus[:, 0], last.minus[:, 1]], dim=1)
    from_copies, from_sums = wanted[..., : copies.shape[2]], wanted[..., copies.shape[2] :]
    joined = (from_sums & sums).any(dim=2) | (layers == 2)
    enough = (from_copies & copies).sum(dim=2) >= base
    return (enough & joined).all(dim=1)


def _signs_by_layer(pool: Pool, layers: int) -> list[int]:
    half = pool.width // 2
    between = [2 * half * (2 * half + 1)] + [2 * half * half] * (layers - 3) if layers > 2 else []
    return [2 * half, *between, 2 * (half if layers > 2 else 2 * half + 1)]


def _batches(trials: int, signs: int) -> Iterator[tuple[int, int]]:
    """The first and the number of trials that are simulated together."""
    step = max(1, _SIGNS // signs)
    memory.require(_SIGN_BYTES * signs * min(step, trials), "simulating a trial", "raise epsilon")
    for start in range(0, trials, step):
        yield start, min(step, trials - start)


def _kinds(first: FirstDraws, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Neurons that can serve x > 0 only, x < 0 only, and either, for w > 0; the last dimension is u and v."""
    right, left = ((draws < rounds).all(dim=-1) for draws in first)
    return right & ~left, left & ~right, right & left


def _reached(right: Tensor, left: Tensor, either: Tensor, count: int) -> Tensor:
    """Whether both sides get ``count`` neurons: what they lack alone, the neurons that serve either side supply."""
    return (count - right).clamp(min=0) + (count - left).clamp(min=0) <= either
