"""Targets: ReLU networks as Section 4.1 has them, one of them trained on digits."""

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from iterand.errors import extra
from iterand.theory import bounds


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
    """Divide every layer by its Frobenius norm where that is above 1, in place; no decision changes."""
    for module in target:
        if isinstance(module, nn.Linear):
            module.weight /= module.weight.double().norm().clamp(min=1.0).to(module.weight.dtype)
    return target


def empty_linear(inputs: int, outputs: int) -> nn.Linear:
    """A layer whose weights are to be set; torch's own would move its global generator."""
    return cast(nn.Linear, nn.utils.skip_init(nn.Linear, inputs, outputs, bias=False))  # type: ignore[no-untyped-call]


class Part(NamedTuple):
    """Vectors in the box ‖x‖∞ ≤ 1, and their classes."""

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


def trained_target(data: Part, hidden: int = 12, *, steps: int = 300, seed: int = 0) -> nn.Sequential:
    """A two-layer network trained to tell the classes, then scaled to unit norms.

    The penalty on the norms is what leaves room for ε: an error has to overcome the margin relative to the norms.
    """
    bounds.check_count("hidden", hidden)
    inputs, classes = data.inputs.shape[1], int(data.labels.max()) + 1
    target = nn.Sequential(empty_linear(inputs, hidden), nn.ReLU(), empty_linear(hidden, classes))
    generator = torch.Generator().manual_seed(seed)
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
    """The share of decisions that are right."""
    return float((model(part.inputs).argmax(dim=1) == part.labels).double().mean())
