"""Distributions of weights and scores, from random bits: D_param and D_score of the paper.

A weight is an integer level, computed from random bits, times one float32 unit per tensor. Integer arithmetic is exact
and one IEEE multiplication rounds the same way on every device, so weights are bit-equal on every machine.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn

from iterand import philox
from iterand.checks import shown, unknown
from iterand.philox import Key, Words


@dataclass(frozen=True)
class Distribution:
    """A distribution of random weights: ``weight = levels(words) · unit(fan_in)``, with whole numbers as levels."""

    name: str
    levels: Callable[[Words], Tensor]
    """Integers of magnitude up to 2²⁴ (exact in float32), from the four random words of each element."""
    unit: Callable[[int], float]
    """The value of level 1 for a layer with this fan-in. Rounded to float32 before use."""
    support: tuple[int, ...] | None = None
    """All levels, if there are few: a ticket then stores levels instead of draws."""
    kind: int | None = None
    """Number of this distribution in ``backend.triton.redraw``. None if there is no kernel for it."""

    def values(self, words: Words, fan_in: int, scale: float = 1.0) -> Tensor:
        """float32 weights for these random words, whose unit is multiplied by ``scale``."""
        levels = self.levels(words)
        if levels.dtype.is_floating_point or levels.dtype == torch.bool:
            raise ValueError(f"distribution {self.name!r} gave {levels.dtype} levels; they must be whole numbers")
        return levels.to(torch.float32).mul_(self.unit32(fan_in, scale))

    def unit32(self, fan_in: int, scale: float = 1.0) -> float:
        """The unit, rounded to float32."""
        return float(np.float32(self.unit(fan_in) * scale))


def _uniform_levels(words: Words) -> Tensor:
    # 2²⁴ odd numbers, symmetric around zero.
    return (words[0] >> 8 << 1).add_(1 - (1 << 24))


def _unit_uniform_levels(words: Words) -> Tensor:
    # 2²³ odd numbers from 1.
    return (words[0] >> 9 << 1).add_(1)


def _sign_levels(words: Words) -> Tensor:
    return (words[0] >> 31 << 1).sub_(1)


_NORMAL_BITS = 20  # a level is 2⁻²⁰ standard deviations
_NORMAL_TABLE_SHA256 = "6c12f7acf7f7e10eb2af51cc74e34c8a024d1a62ca76ac0cc2f65ee4a41ffa2f"


@lru_cache
def _normal_table(device: torch.device) -> Tensor:
    """2¹⁶ equally likely levels of the normal distribution: its quantiles, rounded."""
    quantile = NormalDist().inv_cdf
    upper = [round(quantile(0.5 + (i + 0.5) / (1 << 16)) * (1 << _NORMAL_BITS)) for i in range(1 << 15)]
    table = np.array([-value for value in reversed(upper)] + upper, dtype="<i8")
    if hashlib.sha256(table.tobytes()).hexdigest() != _NORMAL_TABLE_SHA256:
        raise RuntimeError(
            "this machine's logarithm gives other normal quantiles than the ones kaiming_normal is defined by; "
            "use another distribution here, and please report the platform"
        )
    return torch.from_numpy(table).to(device)


@lru_cache
def normal_levels(device: torch.device) -> Tensor:
    """The table as int32, for kernels. Copied with a host sync, since any stream may read it next."""
    return _normal_table(torch.device("cpu")).int().to(device)


def _normal_levels(words: Words) -> Tensor:
    return _normal_table(words[0].device)[words[0] >> 16]


_REGISTRY: dict[str, Distribution] = {}


WeightDistribution = Literal["kaiming_uniform", "signed_constant", "kaiming_normal", "uniform"] | str
"""A built-in name, which an editor completes, or the name of a registered distribution."""
EXISTING = "existing"
"""In place of a distribution: the weights that a model has already."""
MagnitudeScores = Literal["magnitude_rank", "magnitude"]
"""The scores that existing weights start with."""
MAGNITUDES: tuple[str, ...] = get_args(MagnitudeScores)


def register_distribution(distribution: Distribution) -> None:
    """Make a distribution of your own available by its name.

    Register it in every program that uses it, before ``prune_`` or ``load_ticket``. Weights of four levels:

    ```python
    four = iterand.Distribution(
        "four_levels",
        levels=lambda words: (words[0] >> 30) * 2 - 3,  # -3, -1, 1 or 3, from the two highest of 32 random bits
        unit=lambda fan_in: math.sqrt(2 / (5 * fan_in)),  # the mean square of these levels is 5
        support=(-3, -1, 1, 3),
    )
    iterand.register_distribution(four)
    iterand.prune_(model, sparsity=0.5, weights="four_levels")
    ```
    """
    if not isinstance(distribution, Distribution):
        raise ValueError(f"distribution is {shown(distribution)}; it must be an iterand.Distribution")
    if distribution.name in _REGISTRY or distribution.name in (EXISTING, *MAGNITUDES):
        raise ValueError(f"a distribution named {distribution.name!r} is registered already; choose another name")
    if ":" in distribution.name:
        raise ValueError(f"a distribution is named {distribution.name!r}; its name must not contain a colon")
    _REGISTRY[distribution.name] = distribution


def get_distribution(name: str) -> Distribution:
    """The distribution with this name."""
    if not isinstance(name, str) or name not in _REGISTRY:
        raise ValueError(unknown("distribution", name, distribution_names()))
    return _REGISTRY[name]


def distribution_names() -> list[str]:
    """The names of all distributions."""
    return sorted(_REGISTRY)


# KU of Section 5: uniform on ±sqrt(6 / fan_in).
register_distribution(
    Distribution("kaiming_uniform", _uniform_levels, lambda fan: math.sqrt(6 / fan) / (1 << 24), kind=0)
)
# SC of Section 5: ±sqrt(2 / fan_in) with equal chances.
register_distribution(
    Distribution("signed_constant", _sign_levels, lambda fan: math.sqrt(2 / fan), support=(-1, 1), kind=1)
)
# U[-1, 1] of Section 4.
register_distribution(Distribution("uniform", _uniform_levels, lambda fan: 1 / (1 << 24), kind=0))
register_distribution(
    Distribution("kaiming_normal", _normal_levels, lambda fan: math.sqrt(2 / fan) / (1 << _NORMAL_BITS), kind=2)
)


BUILT_IN = frozenset(_REGISTRY)
"""The built-in distributions. Every reader of a ticket knows their levels and units."""

# U[0, 1]: the initial scores of GEM-Miner.
register_distribution(Distribution("unit_uniform", _unit_uniform_levels, lambda fan: 1 / (1 << 24)))


def sample(
    distribution: Distribution,
    count: int,
    fan_in: int,
    key: Key,
    *,
    draw: int = 0,
    stream: int = philox.WEIGHT,
    device: torch.device | str | None = None,
) -> Tensor:
    """The values of elements 0 … count − 1 in one draw, as a flat float32 tensor."""
    values = torch.empty(count, dtype=torch.float32, device=device)
    for part in philox.chunks(count, device):
        values[part] = distribution.values(philox.philox(philox.indices(part, device), draw, key, stream), fan_in)
    return values


def fan_in(module: nn.Module, tensor: Tensor) -> int:
    """Number of weights per output: c_fanin of Section 5.

    The weight of a transposed convolution has shape (in, out / groups, ...), and it sums over its input channels. The
    weight of Hugging Face's ``Conv1D`` has shape (in, out). Its experts are stacks of matrices (expert, out, in), or
    (expert, in, out) where ``is_transposed``. The fan-in of an embedding is its dimension, as in torch; that of a
    vector is its length.
    """
    if is_conv1d(module) and tensor.dim() == 2:
        return tensor.shape[0]
    transposed = getattr(module, "is_transposed", None)
    if isinstance(transposed, bool) and tensor.dim() == 3:
        return tensor.shape[1 if transposed else 2]
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return tensor.shape[0] // module.groups * math.prod(tensor.shape[2:])
    return shape_fan_in(tensor.shape)


def is_conv1d(module: nn.Module) -> bool:
    """Whether a module is Hugging Face's ``Conv1D``: the linear layer of GPT-2, with a weight of shape (in, out).

    It is known by its name and by ``nf``, the number of its outputs, since transformers need not be installed. Where
    the class is defined says nothing: it has moved, and code that goes back to GPT-2 has copies of it.
    """
    if not any(kind.__name__ == "Conv1D" for kind in type(module).__mro__):
        return False
    weight, outputs = getattr(module, "weight", None), getattr(module, "nf", None)
    return isinstance(weight, Tensor) and weight.dim() == 2 and weight.shape[1] == outputs


def shape_fan_in(shape: Sequence[int]) -> int:
    """The fan-in of a weight of shape (out, in, ...), or of a vector."""
    return math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
