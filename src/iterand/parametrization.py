"""The parametrization of one masked tensor: weight ⊙ mask forward, straight-through gradient to the score.

The mask is computed from the scores each time the tensor is read, so there is none that could be stale.
"""

import json
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from iterand import distributions, philox, selection
from iterand.selection import Cut


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
    ranking: str
    rank_by: str
    floor: float


class _MaskedWeight(torch.autograd.Function):
    """θ ⊙ m, and in the backward pass ∂L/∂s = θ ⊙ ∂L/∂(θ ⊙ m) (Algorithm 2, line 3)."""

    generate_vmap_rule = True

    @staticmethod
    def forward(weight: Tensor, ranked: Tensor, threshold: Tensor, last: Tensor) -> Tensor:
        # Not a product: that would leave −0 for pruned negative weights. A threshold that is NaN spreads instead of
        # leaving a silent network of zeros.
        zero = torch.where(threshold.isnan(), threshold, 0.0).to(weight.dtype)
        # The layout is that of the mask if the two differ.
        return torch.where(match_layout(selection.keeps(ranked, Cut(threshold, last)), weight), weight, zero)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        return None, gradient.float() * weight.float(), None, None


class Ranking(ABC):
    """Which scores compete with which.

    A forward pass of the pruned model may find all cuts at once when it begins, and drops them when it ends, however it
    ends. Any other reading of a tensor (a submodule called by itself, say) finds its cut anew: slower, never stale.
    """

    def __init__(self) -> None:
        self.members: list[MaskedParametrization] = []
        self._passes: dict[int, _Pass] = {}

    @abstractmethod
    def cuts(self, masks: Sequence["MaskedParametrization"]) -> list[Cut]:
        """The cuts of these members under the present scores."""

    @abstractmethod
    def rivals(self, mask: "MaskedParametrization") -> Sequence["MaskedParametrization"]:
        """All whose scores a member's cut depends on."""

    def cut(self, mask: "MaskedParametrization") -> Cut:
        """The cut of one member: that of the pass under way, unless the pass itself has changed a score."""
        current = self._passes.get(_thread())
        if current is not None:
            place = self.members.index(mask)
            if _versions(self.rivals(mask)) == current.versions[place]:
                return current.cuts[place]
        return self.cuts([mask])[0]

    def begin(self) -> "_Pass | None":
        """Begin a forward pass; gives the one around it, if any, to be handed to ``end``."""
        around = self._passes.get(_thread())
        versions = [_versions(self.rivals(mask)) for mask in self.members]
        self._passes[_thread()] = _Pass(versions, self.cuts(self.members))
        return around

    def end(self, around: "_Pass | None") -> None:
        """End the pass that began last."""
        if around is None:
            self._passes.pop(_thread(), None)
        else:
            self._passes[_thread()] = around


class LayerRanking(Ranking):
    """Scores compete within their tensor (the paper's experiments)."""

    def cuts(self, masks: Sequence["MaskedParametrization"]) -> list[Cut]:
        """Each one's own."""
        return _cut_layers(masks)

    def rivals(self, mask: "MaskedParametrization") -> Sequence["MaskedParametrization"]:
        """Only its own."""
        return [mask]

    def begin(self) -> "_Pass | None":
        """Begin a forward pass; only on a GPU is it faster to find all cuts at once."""
        return super().begin() if self.members[0].score.is_cuda else self._passes.get(_thread())


class GlobalRanking(Ranking):
    """Scores compete across the whole network (the paper's text)."""

    def cuts(self, masks: Sequence["MaskedParametrization"]) -> list[Cut]:
        """The cuts of these members, by the scores of all."""
        floors = [mask.floor_count for mask in self.members]
        found = _cut_layers(self.members, together=True, floors=floors)
        return [found[self.members.index(mask)] for mask in masks]

    def rivals(self, mask: "MaskedParametrization") -> Sequence["MaskedParametrization"]:
        """All members."""
        return self.members


def _cut_layers(masks: Sequence["MaskedParametrization"], **options: Any) -> list[Cut]:
    scores, kept = [mask.score for mask in masks], [mask.kept for mask in masks]
    rank_by = masks[0].settings.rank_by  # one for all of a model
    return selection.cut_layers(scores, kept, [mask.settings.name for mask in masks], rank_by=rank_by, **options)


def selection_on_device(masks: Sequence["MaskedParametrization"]) -> Any:
    """The selection of ``iterand.backend.triton`` over masks that are ranked alike."""
    from iterand.backend.triton import cuts  # only where there is Triton

    return cuts.selection(
        [mask.score.detach() for mask in masks],
        [mask.kept for mask in masks],
        together=isinstance(masks[0].ranking, GlobalRanking),
        floors=[mask.floor_count for mask in masks],
        magnitude=masks[0].settings.rank_by == "magnitude",
    )


def _versions(masks: Sequence["MaskedParametrization"]) -> list[int]:
    if torch.compiler.is_compiling():
        return []
    return [0 if mask.score.is_inference() else mask.score._version for mask in masks]


@dataclass(frozen=True)
class _Pass:
    versions: list[list[int]]
    """Of the scores that each member's cut depends on."""
    cuts: list[Cut]


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()


class MaskedParametrization(nn.Module):
    """The state of one masked tensor: its scores s, the draw every weight holds, and how many weights are kept."""

    draw: Tensor
    kept: Tensor

    def __init__(self, weight: Tensor, settings: Settings, ranking: Ranking) -> None:
        super().__init__()
        self.settings = settings
        self.ranking = ranking
        self.trained = weight.requires_grad
        """Whether the tensor took gradients before it was masked, and will again."""
        self.history: list[tuple[int, int]] = []
        """Randomization so far, run-length coded: (coin threshold of a round, how many rounds in a row had it)."""
        scores = distributions.sample(
            distributions.get_distribution(settings.score_distribution),
            weight.numel(),
            settings.fan_in,
            self.key,
            stream=philox.SCORE,
            device=weight.device,
        )
        self.score = nn.Parameter(scores.view(weight.shape))
        self.register_buffer("draw", torch.zeros(weight.shape, dtype=torch.int32, device=weight.device))
        kept = selection.kept_count(weight.numel(), settings.sparsity)
        self.register_buffer("kept", torch.tensor(kept, device=weight.device))

    def forward(self, weight: Tensor) -> Tensor:
        """θ ⊙ m for the weights θ, in their memory format."""
        threshold, last = self.ranking.cut(self)
        masked: Tensor = _MaskedWeight.apply(weight, self.ranked(), threshold, last)  # type: ignore[no-untyped-call]
        return match_layout(masked, weight)

    def ranked(self) -> Tensor:
        """What is ranked of the scores."""
        return selection.ranking_key(self.score, self.settings.rank_by)

    def mask(self) -> Tensor:
        """m: true where the weight is kept."""
        return calculate_masks([self])[0]

    @property
    def distribution(self) -> distributions.Distribution:
        """D_param."""
        return distributions.get_distribution(self.settings.weight_distribution)

    @property
    def key(self) -> philox.Key:
        """The tensor's key of the generator."""
        return philox.key(self.settings.seed, self.settings.name)

    @property
    def origin(self) -> tuple[int, int, int, float]:
        """Where the weights come from, as kernels read it: key, kind and unit of a distribution that they know."""
        return *self.key, self.distribution.kind or 0, self.distribution.unit32(self.settings.fan_in)

    @property
    def rounds(self) -> int:
        """R: how often the pruned weights were randomized."""
        return sum(count for _, count in self.history)

    @property
    def floor_count(self) -> int:
        """How many weights a global ranking must leave to this tensor."""
        return floor_count(self.score.numel(), self.settings.floor)

    def lie_as_(self, weight: Tensor) -> None:
        """Put scores and draws in the order of the weights, so that a pass over memory meets all of one at a place."""
        self.score.data = torch.empty_like(weight.detach()).copy_(self.score.detach())
        self.draw = torch.empty_like(weight.detach(), dtype=self.draw.dtype).copy_(self.draw)

    def add_round(self, threshold: int) -> None:
        """Note a round of randomization with this coin."""
        if self.history and self.history[-1][0] == threshold:
            self.history[-1] = (threshold, self.history[-1][1] + 1)
        else:
            self.history.append((threshold, 1))

    @torch.no_grad()
    def weight(self) -> Tensor:
        """θ in float32, computed from the draws alone."""
        draw = self.draw.reshape(-1)
        values = torch.empty(draw.numel(), dtype=torch.float32, device=draw.device)
        for part in philox.chunks(draw.numel(), draw.device):
            words = philox.philox(philox.indices(part, draw.device), draw[part], self.key)
            values[part] = self.distribution.values(words, self.settings.fan_in)
        return values.view(self.draw.shape)

    def get_extra_state(self) -> Tensor:
        """Settings and history as JSON in bytes: a tensor, so that any safe format can hold it."""
        text = json.dumps({"settings": asdict(self.settings), "history": self.history})
        return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Become what the state says: its weights were drawn under these settings."""
        loaded = json.loads(bytes(state.cpu().tolist()))
        settings = Settings(**loaded["settings"])
        if settings.ranking != self.settings.ranking:
            raise ValueError(
                f"{self.settings.name!r} is ranked per {self.settings.ranking}, the state per {settings.ranking}; "
                f"prune_ with ranking={settings.ranking!r}"
            )
        self.settings = settings
        self.history = [(threshold, count) for threshold, count in loaded["history"]]

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        # Scores stay float32 and every tensor stays in the order of its indices, whatever .to() asks of the weights.
        score, gradient = self.score.data, self.score.grad
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = self.score.device
        if self.score.dtype != torch.float32:
            self.score.grad = None
            self.score.data = score.to(device)
            self.score.grad = None if gradient is None else gradient.to(device, torch.float32)
        self.score.data = self.score.data.contiguous()
        self.draw = self.draw.contiguous()
        return self

    def extra_repr(self) -> str:
        """One line for print(model)."""
        settings = self.settings
        return f"{settings.weight_distribution}, sparsity={settings.sparsity}, ranking={settings.ranking}"


def calculate_masks(masks: Sequence[MaskedParametrization]) -> list[Tensor]:
    """The masks m of several tensors; those ranked together are cut once."""
    cuts: dict[MaskedParametrization, Cut] = {}
    with torch.no_grad():
        for mask in masks:
            if mask.score.device.type != "cpu" and mask.score.isnan().any():  # on a CPU finding the cut raises
                raise selection.nan_error(mask.settings.name)
            if mask not in cuts:
                group = [other for other in masks if other.ranking is mask.ranking]
                cuts |= zip(group, mask.ranking.cuts(group))
        return [selection.mask_of(mask.ranked(), cuts[mask]) for mask in masks]


def match_layout(value: Tensor, weight: Tensor) -> Tensor:
    """The value with the strides of the weights, such as channels_last: torch picks its algorithms by them."""
    strides = weight.stride()
    if value.stride() == strides:
        return value
    order = sorted(range(weight.dim()), key=lambda axis: -strides[axis])  # as the axes lie in memory
    back = [order.index(axis) for axis in range(weight.dim())]
    flat = value.permute(order).reshape(-1)  # a copy only if the value lies in another order
    return flat.view([weight.shape[axis] for axis in order]).permute(back)


def floor_count(count: int, floor: float) -> int:
    """How many of ``count`` weights a floor guarantees: rounded up, but not for a rounding error's sake."""
    return math.ceil(floor * count - 1e-9)
