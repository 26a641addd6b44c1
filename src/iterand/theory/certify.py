"""How far a construction is from its target: the largest error found, and one that cannot be exceeded.

The proven bound is computed from the weights that are there, not from ε. A pair of layers of the construction computes
P·σ(x) + Q·σ(−x), because every hidden neuron looks at one input. Its distance to the target's F·x is therefore
(F − P)·σ(x) − (F + Q)·σ(−x), whose size is bounded by norms and by intervals; what the first layers got wrong goes
through the later ones with at most their spectral norm.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from iterand import philox
from iterand.theory.search import uniform
from iterand.theory.target import matrices

_ROUNDING = 1 + 1e-9  # far more than float64 can lose in the bound, far less than anybody reads


@dataclass(frozen=True)
class Certificate:
    """What is known about sup ‖f(x) − g(x)‖₂ over ‖x‖∞ ≤ 1: measured ≤ sup ≤ proven."""

    measured: float
    proven: float


def certify(target: nn.Sequential, model: nn.Sequential, *, points: int = 4096, seed: int = 0) -> Certificate:
    """Measure and bound the error of a construction, masked or folded, in the exact arithmetic of its weights."""
    wanted = [weight.double() for weight in matrices(target)]
    given = [module.weight.detach().double() for module in model if isinstance(module, nn.Linear)]
    return Certificate(measured_error(wanted, given, points, seed), proven_error(wanted, given))


@torch.no_grad()
def unprotected(target: nn.Sequential, images: Tensor, error: float) -> float:
    """The share of images whose decision an error of this 2-norm could change; on no others can accuracy differ.

    An error e moves the difference of two outputs by at most √2·‖e‖.
    """
    first, second = target(images).topk(2, dim=1).values.unbind(dim=1)
    return float((first - second <= 2**0.5 * error).double().mean())


def measured_error(wanted: Sequence[Tensor], given: Sequence[Tensor], points: int, seed: int = 0) -> float:
    """The largest error at random points, at random corners, and at corners climbed to from there."""
    inputs = wanted[0].shape[1]
    index = torch.arange(points * inputs)
    inside = uniform(index, torch.zeros_like(index), philox.key(seed, "theory.certify")).view(points, inputs).double()
    corner = inside.sign()
    largest = float(_squares(wanted, given, inside).max())
    for _ in range(8):
        corner.requires_grad_(True)
        squares = _squares(wanted, given, corner)
        (slope,) = torch.autograd.grad(squares.sum(), corner)
        largest = max(largest, float(squares.detach().max()))
        # The corner the error grows towards; where it does not depend on an input, stay.
        corner = torch.where(slope == 0, corner.detach(), slope.sign())
    return math.sqrt(largest)


def _squares(wanted: Sequence[Tensor], given: Sequence[Tensor], x: Tensor) -> Tensor:
    return (_forward(wanted, x) - _forward(given, x)).square().sum(dim=1)


def _forward(weights: Sequence[Tensor], x: Tensor) -> Tensor:
    for weight in weights[:-1]:
        x = (x @ weight.T).relu()
    return x @ weights[-1].T


def proven_error(wanted: Sequence[Tensor], given: Sequence[Tensor]) -> float:
    """An upper bound on the error over the whole box ‖x‖∞ ≤ 1."""
    inputs = wanted[0].shape[1]
    error = 0.0
    # What x, and then the activations of the construction, can be: a 2-norm and a bound for every coordinate; and the
    # 2-norm of the target's.
    radius, high = inputs**0.5, torch.ones(inputs, dtype=torch.float64)
    wanted_radius = radius
    for layer, weight in enumerate(wanted):
        positive, negative = _sides(given[2 * layer], given[2 * layer + 1])
        off_positive, off_negative = weight - positive, weight + negative
        if layer > 0:  # what comes out of a ReLU has no negative side
            negative = off_negative = torch.zeros_like(weight)
        error = _spectral(weight) * error + _largest(off_positive, off_negative, radius, high)
        high = torch.maximum(positive, negative).clamp(min=0) @ high
        wanted_radius *= _spectral(weight)
        radius = min(_spectral(positive, negative) * radius, float(high.norm()), wanted_radius + error)
    return error * _ROUNDING


def _sides(first: Tensor, second: Tensor) -> tuple[Tensor, Tensor]:
    if (first.count_nonzero(dim=1) > 1).any():
        raise ValueError("a hidden neuron looks at several inputs, so this is no network that construct made")
    return second @ first.clamp(min=0), second @ (-first).clamp(min=0)


def _largest(positive: Tensor, negative: Tensor, radius: float, high: Tensor) -> float:
    """The largest ‖positive·σ(x) − negative·σ(−x)‖ over ‖x‖₂ ≤ radius and |x| ≤ high, by the best of three bounds."""
    spectral = _spectral(positive, negative) * radius
    columns = float(torch.maximum(positive.norm(dim=0), negative.norm(dim=0)).norm()) * radius
    interval = float((torch.maximum(positive.abs(), negative.abs()) @ high).norm())
    return min(spectral, columns, interval)


def _spectral(*parts: Tensor) -> float:
    return float(torch.linalg.matrix_norm(torch.cat(parts, dim=1), ord=2))
