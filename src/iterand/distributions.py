"""From random bits to weights and scores: D_param and D_score of the paper.

A distribution is a whole number for every pattern of bits, times one float32 unit a tensor. Whole numbers do not depend
on the device and one IEEE multiplication rounds alike everywhere, so two machines cannot disagree on a weight by a
rounding: there is nothing else to round.
"""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from iterand import philox
from iterand.checks import unknown
from iterand.philox import Key, Words


@dataclass(frozen=True)
class Distribution:
    """One distribution: ``weight = levels(words) · unit(fan_in)``."""

    name: str
    levels: Callable[[Words], Tensor]
    """Whole numbers of magnitude up to 2²⁴ (so that float32 holds them), from the four words of each element."""
    unit: Callable[[int], float]
    """The value of level 1 for a layer of this fan-in; rounded to float32 before use."""
    support: tuple[int, ...] | None = None
    """All levels there are, where they are few: a ticket then names the level instead of the draw."""
    kind: int | None = None
    """What ``backend.triton.redraw`` calls this way from bits to levels; none if it does not know it."""

    def values(self, words: Words, fan_in: int) -> Tensor:
        """Float32 weights for these words."""
        levels = self.levels(words)
        if levels.dtype.is_floating_point or levels.dtype == torch.bool:
            raise ValueError(f"distribution {self.name!r} gave {levels.dtype} levels; they must be whole numbers")
        return levels.to(torch.float32).mul_(self.unit32(fan_in))

    def unit32(self, fan_in: int) -> float:
        """The unit as the float32 number that is multiplied with."""
        return float(np.float32(self.unit(fan_in)))


def _uniform_levels(words: Words) -> Tensor:
    # 2²⁴ odd numbers, symmetric about zero and without it.
    return (words[0] >> 8 << 1).add_(1 - (1 << 24))


def _sign_levels(words: Words) -> Tensor:
    return (words[0] >> 31 << 1).sub_(1)


_NORMAL_BITS = 20  # a level is 2⁻²⁰ of a standard deviation
_NORMAL_TABLE_SHA256 = "6c12f7acf7f7e10eb2af51cc74e34c8a024d1a62ca76ac0cc2f65ee4a41ffa2f"


@lru_cache
def _normal_table(device: torch.device) -> Tensor:
    """The 2¹⁶ equally likely values of the normal distribution: its quantiles, rounded to a level."""
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
    """The same in 32 bits, as kernels read it; copied with a wait, since any stream may read it next."""
    return _normal_table(torch.device("cpu")).int().to(device)


def _normal_levels(words: Words) -> Tensor:
    return _normal_table(words[0].device)[words[0] >> 16]


_REGISTRY: dict[str, Distribution] = {}


WeightDistribution = Literal["kaiming_uniform", "signed_constant", "kaiming_normal", "uniform"] | str
"""The built-in names, which an editor completes, or that of a registered distribution."""


def register_distribution(distribution: Distribution) -> None:
    """Make an own distribution usable by its name."""
    if distribution.name in _REGISTRY:
        raise ValueError(f"a distribution named {distribution.name!r} is registered already; choose another name")
    _REGISTRY[distribution.name] = distribution


def get_distribution(name: str) -> Distribution:
    """The distribution of this name."""
    if name not in _REGISTRY:
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
"""The distributions that come with the package, whose levels and units every reader of a ticket knows."""


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
    """The values of elements 0 … count − 1 in one draw, flat and float32."""
    values = torch.empty(count, dtype=torch.float32, device=device)
    for part in philox.chunks(count, device):
        values[part] = distribution.values(philox.philox(philox.indices(part, device), draw, key, stream), fan_in)
    return values


def fan_in(module: nn.Module, tensor: Tensor) -> int:
    """How many weights meet in one output: c_fanin of Section 5.

    A transposed convolution is laid out (in, out / groups, ...) and sums over its in-channels; an embedding has torch's
    fan-in, its dimension; a bare vector has its length.
    """
    if isinstance(module, (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)):
        return tensor.shape[0] // module.groups * math.prod(tensor.shape[2:])
    return shape_fan_in(tensor.shape)


def shape_fan_in(shape: Sequence[int]) -> int:
    """The fan-in of a weight that is laid out (out, in, ...), as most are, or of a bare vector."""
    return math.prod(shape[1:]) if len(shape) > 1 else math.prod(shape)
