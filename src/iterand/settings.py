"""What a masked tensor is made from (``Settings``), and its weights as a function of that and of draws."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from iterand import distributions, mask_kinds, philox
from iterand.backend import RankBy
from iterand.mask_kinds import MaskKind
from iterand.selection import RankingChoice

RedrawFrom = Literal["fresh", "kept"]
"""Where the values of redrawn weights come from: fresh draws, or kept weights of the tensor (weight recycling)."""


@dataclass(frozen=True)
class Settings:
    """What a masked tensor is made from; with its draws it says everything about the weights."""

    name: str
    """Qualified name in the pruned model: the tensor's identity for the generator."""
    seed: int
    weight_distribution: str
    score_distribution: str
    fan_in: int
    sparsity: float
    """p once any schedule has run out."""
    ranking: RankingChoice
    rank_by: RankBy
    floor: float
    mask: MaskKind = "binary"
    gain: float = 1.0
    """The factor of the weights beside their distribution."""
    coats: int = 1
    """How many masks a ``multicoat`` mask is the sum of."""
    binarize: bool = False
    """Whether all kept weights of the tensor have one magnitude, the mean of theirs."""
    shared: str = ""
    """The name of the first tensor that has the same weights, if this one shares them."""
    redraw_from: RedrawFrom = "fresh"

    @property
    def is_standard(self) -> bool:
        """Whether the masked weights are θ ⊙ m with a mask of {0, 1} from the cut alone, as in the paper."""
        return self.mask == "binary" and not self.binarize

    @property
    def follows_from_cuts(self) -> bool:
        """Whether a masked weight is a function of its weight, its score and the cuts alone."""
        return self.mask != "bernoulli" and not self.binarize

    @property
    def key(self) -> philox.Key:
        """The key of the generator for the weights."""
        return philox.key(self.seed, self.shared or self.name)

    @property
    def scale(self) -> float:
        """The factor of the weights' unit, from the gain and the coats."""
        return self.gain * mask_kinds.coat_scale(self.coats)

    def unit32(self, distribution: distributions.Distribution) -> float:
        """The value of level 1."""
        return distribution.unit32(self.fan_in, self.scale)

    def levels(self, support: Sequence[int] | None) -> list[int]:
        """The levels of masked weights, ascending, from those of the distribution; empty if there are too many."""
        return mask_kinds.levels((-1, 1) if self.binarize else support or (), self.mask, self.coats)


def draw_weights(
    settings: Settings, distribution: distributions.Distribution, index: Tensor, draw: Tensor, count: int
) -> Tensor:
    """The float32 weights at these indices in these draws, of a tensor of ``count`` weights."""
    values = torch.empty(len(index), dtype=torch.float32, device=index.device)
    for part in philox.chunks(len(index), index.device):
        where, number = index[part], draw[part]
        if settings.redraw_from == "kept":
            where = torch.where(number > 0, source_index(settings.key, where, number, count), where)
            number = torch.zeros_like(number)
        words = philox.philox(where, number, settings.key)
        values[part] = distribution.values(words, settings.fan_in, settings.scale)
    return values


def source_index(key: philox.Key, index: Tensor, number: Tensor | int, count: int) -> Tensor:
    """Where a weight takes its value from, if it is recycled in a round: a random index of its tensor."""
    return philox.philox(index, number, key, philox.SOURCE)[0] * count >> 32
