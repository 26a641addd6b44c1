"""Target networks of the theorem, and certified errors of their approximations."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from iterand import philox
from iterand.errors import extra
from iterand.lab.theory import bounds
from iterand.lab.theory.simulate import uniform

_ROUNDING = 1 + 1e-9  # far more than the rounding error of the bound in float64


def matrices(target: nn.Sequential) -> list[Tensor]:
    """The matrices F_1, …, F_l of f(x) = F_l σ(F_(l−1) σ(… F_1 x)), if the network has this form and ‖F_i‖ ≤ 1."""
    modules = list(target)
    form = "a target is Linear, ReLU, Linear, …, Linear"
    if len(modules) % 2 == 0:
        raise ValueError(f"the target has {len(modules)} modules; {form}, so it has an odd number of them")
    found = []
    for number, module in enumerate(modules):
        kind = nn.Linear if number % 2 == 0 else nn.ReLU
        if not isinstance(module, kind):
            raise ValueError(f"module {number} of the target is a {type(module).__name__}; {form}")
        if isinstance(module, nn.Linear):
            if "bias" in dict(module.named_parameters()):
                raise ValueError(f"layer {number} of the target has a bias; make it with Linear(..., bias=False)")
            found.append(module.weight.detach())
            _check_norm(number, module.weight)
    return found


def layer_widths(target: nn.Sequential) -> list[int]:
    """The widths d_0, …, d_l of a target."""
    weights = matrices(target)
    return [weights[0].shape[1], *(weight.shape[0] for weight in weights)]


def _check_norm(number: int, weight: Tensor) -> None:
    norm = float(weight.detach().double().norm())
    if not norm <= 1 + 1e-6:
        raise ValueError(
            f"layer {number} of the target has Frobenius norm {norm:.4g} and Theorem 4.1 needs at most 1; "
            f"divide its weight by {norm:.4g}, which divides the outputs by the same and changes no decision"
        )


@torch.no_grad()
def normalize_(target: nn.Sequential) -> nn.Sequential:
    """Divide every layer by its Frobenius norm where that is above 1, in place; decisions do not change."""
    for module in target:
        if isinstance(module, nn.Linear):
            module.weight /= module.weight.double().norm().clamp(min=1.0).to(module.weight.dtype)
    return target


def empty_linear(inputs: int, outputs: int) -> nn.Linear:
    """A layer without initial weights; torch's initialization would advance the global generator."""
    return cast(nn.Linear, nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False))  # type: ignore[no-untyped-call]


class Part(NamedTuple):
    """Inputs in the box ‖x‖∞ ≤ 1, and their classes."""

    inputs: Tensor
    labels: Tensor


def digits() -> tuple[Part, Part]:
    """Scikit-learn's digits with pixels from -1 to 1, for training and (every fifth image) for testing."""
    with extra("lab", "the digits data set"):
        from sklearn.datasets import load_digits  # takes as long to import as torch

    images, labels = load_digits(return_X_y=True)
    whole = Part(torch.tensor(images, dtype=torch.float32) / 8 - 1, torch.tensor(labels))
    test = torch.arange(len(labels)) % 5 == 0
    return Part(whole.inputs[~test], whole.labels[~test]), Part(whole.inputs[test], whole.labels[test])


def trained_target(data: Part, hidden: int = 12, *, steps: int = 300) -> nn.Sequential:
    """A two-layer network trained to classify, then scaled to norms of at most 1.

    Weight decay keeps the margin large relative to the norms, so that an error of ε changes few decisions.
    """
    bounds.check_count("hidden", hidden)
    inputs, classes = data.inputs.shape[1], int(data.labels.max()) + 1
    target = nn.Sequential(empty_linear(inputs, hidden), nn.ReLU(), empty_linear(hidden, classes))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for weight in target.parameters():
            weight.copy_(torch.randn(weight.shape, generator=generator) * (2 / weight.shape[1]) ** 0.5)
    optimizer = torch.optim.Adam(target.parameters(), lr=0.02, weight_decay=2e-3)
    for _ in range(steps):
        optimizer.zero_grad()
        functional.cross_entropy(target(data.inputs), data.labels).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return normalize_(target)


@torch.no_grad()
def accuracy(model: nn.Module, part: Part) -> float:
    """The share of correct decisions."""
    return float((model(part.inputs).argmax(dim=1) == part.labels).double().mean())


@dataclass(frozen=True)
class Certificate:
    """Bounds on the error sup ‖f(x) − g(x)‖₂ over ‖x‖∞ ≤ 1: measured ≤ sup ≤ proven."""

    measured: float
    proven: float


def certify(
    target: nn.Sequential,
    model: nn.Sequential,
    *,
    gains: Sequence[float] | None = None,
    points: int = 4096,
) -> Certificate:
    """Measure and bound the error of a construction, masked or folded, in float64; ``gains`` multiply layers 2, 4, …"""
    wanted = [weight.double() for weight in matrices(target)]
    given = [module.weight.detach().double() for module in model if isinstance(module, nn.Linear)]
    for layer, gain in enumerate(gains or ()):
        given[2 * layer + 1] *= gain
    return Certificate(measured_error(wanted, given, points), proven_error(wanted, given))


@torch.no_grad()
def unprotected(target: nn.Sequential, images: Tensor, error: float) -> float:
    """The share of images whose decision an error of this 2-norm could change.

    An error e changes the difference of two outputs by at most √2·‖e‖.
    """
    first, second = target(images).topk(2, dim=1).values.unbind(dim=1)
    return float((first - second <= 2**0.5 * error).double().mean())


def measured_error(wanted: Sequence[Tensor], given: Sequence[Tensor], points: int) -> float:
    """The largest error found: at random points and corners of the box, and by gradient ascent over corners."""
    inputs = wanted[0].shape[1]
    index = torch.arange(points * inputs)
    inside = uniform(index, torch.zeros_like(index), philox.key(0, "theory.certify")).view(points, inputs).double()
    corner = inside.sign()
    largest = float(_squares(wanted, given, inside).max())
    for _ in range(8):
        corner.requires_grad_(True)
        squares = _squares(wanted, given, corner)
        (slope,) = torch.autograd.grad(squares.sum(), corner)
        largest = max(largest, float(squares.detach().max()))
        # The corner in the direction of the gradient; an input with gradient 0 stays.
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
    # Bounds on x, and then on the activations of the construction: the 2-norm and every coordinate; and on the 2-norm
    # of the target's activations.
    radius, high = inputs**0.5, torch.ones(inputs, dtype=torch.float64)
    wanted_radius = radius
    for layer, weight in enumerate(wanted):
        positive, negative = _sides(given[2 * layer], given[2 * layer + 1])
        off_positive, off_negative = weight - positive, weight + negative
        if layer > 0:  # outputs of a ReLU are never negative
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
    """A bound on ‖positive·σ(x) − negative·σ(−x)‖ over ‖x‖₂ ≤ radius and |x| ≤ high: the least of three."""
    spectral = _spectral(positive, negative) * radius
    columns = float(torch.maximum(positive.norm(dim=0), negative.norm(dim=0)).norm()) * radius
    interval = float((torch.maximum(positive.abs(), negative.abs()) @ high).norm())
    return min(spectral, columns, interval)


def _spectral(*parts: Tensor) -> float:
    return float(torch.linalg.matrix_norm(torch.cat(parts, dim=1), ord=2))
