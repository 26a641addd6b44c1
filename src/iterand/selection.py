"""Which weights are kept: CalculateMask (Section 2), and which scores compete with which.

The cut through the scores is found in `iterand.backend`.
"""

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from iterand import backend
from iterand.backend import Cut, RankBy, reference
from iterand.checks import check_fraction, shown

if TYPE_CHECKING:
    from iterand.backend.triton.cuts import FindCuts

RankingChoice = Literal["layer", "global"]


def kept_count(count: int, sparsity: float) -> int:
    """How many of ``count`` weights are kept at this sparsity p: exactly n − round(p·n)."""
    return count - round(sparsity * count)


def floor_count(count: int, floor: float) -> int:
    """How many of ``count`` weights a floor guarantees: rounded up, but not for a rounding error's sake."""
    return math.ceil(floor * count - 1e-9)


def check_sparsity(sparsity: float, what: str = "sparsity") -> float:
    """The sparsity itself, if it is one."""
    return check_fraction(what, sparsity, "the share of weights pruned")


def calculate_mask(scores: Tensor, sparsity: float, *, rank_by: RankBy = "score") -> Tensor:
    """CalculateMask(s): true for the top 100(1 − p) % of the scores.

    ``rank_by="magnitude"`` ranks |s| instead (Ramanujan et al.).
    """
    if not isinstance(scores, Tensor):
        raise ValueError(f"scores is {shown(scores)}; it must be a tensor")
    if scores.is_complex():
        raise ValueError(f"scores are {scores.dtype}, which has no order; they must be real numbers")
    ranked = reference.ranking_key(scores.detach(), rank_by)
    if ranked.dtype not in (torch.float32, torch.float64):
        ranked = ranked.float() if ranked.is_floating_point() else ranked.long()
    if ranked.isnan().any():
        raise reference.nan_error("scores")
    kept = torch.tensor(kept_count(scores.numel(), check_sparsity(sparsity)), device=scores.device)
    return reference.mask_of(ranked, reference.cut(ranked, kept))


class Ranked(Protocol):
    """What a ranking needs to know of a masked tensor."""

    score: torch.nn.Parameter
    kept: Tensor
    given: Tensor | None

    @property
    def is_standard(self) -> bool:
        """Whether its masked weights follow from the cut alone, as in the paper."""
        ...

    @property
    def coats(self) -> int:
        """How many nested masks there are; the same in all tensors of a model."""
        ...

    @property
    def name(self) -> str:
        """Its qualified name."""
        ...

    @property
    def rank_by(self) -> RankBy:
        """What is ranked; the same in all tensors of a model."""
        ...

    @property
    def floor_count(self) -> int:
        """How many weights a global ranking must leave to it."""
        ...

    @property
    def attached_weight(self) -> Tensor:
        """θ, the weights that it masks."""
        ...


Member = TypeVar("Member", bound=Ranked)


class Ranking(ABC, Generic[Member]):
    """Which scores compete with which.

    A forward pass of the pruned model may find all cuts at once when it begins, and on a GPU the masked weights too; it
    drops them when it ends, however it ends. Any other read of a tensor (a submodule called by itself, say) finds its
    cut again: slower, never stale.
    """

    def __init__(self) -> None:
        self.members: list[Member] = []
        self._passes: dict[int, _Pass] = {}
        self._found: dict[tuple[Member, int], _Found] = {}

    @abstractmethod
    def cuts(self, masks: Sequence[Member], coat: int = 0) -> list[Cut]:
        """The cuts of these members under the current scores; coat j of k keeps (k − j)/k of what the first keeps."""

    @abstractmethod
    def prepare_cuts(self, masks: Sequence[Member], coat: int = 0, kept: Sequence[Tensor] = ()) -> "FindCuts":
        """The same for tensors that `backend.uses_triton`: an operation to be run whenever scores have changed.

        It reads the counts of kept weights from ``kept``, or from the members.
        """

    @abstractmethod
    def rivals(self, mask: Member) -> Sequence[Member]:
        """All members whose scores a member's cut depends on."""

    def kept_by_coats(self, masks: Sequence[Member]) -> Tensor:
        """How many weights each coat (row) keeps of each tensor (column); coat j of k keeps (k − j)/k of the first."""
        return _shares_of_coats(torch.stack([mask.kept for mask in masks]), masks[0].coats)

    def cut(self, mask: Member, coat: int = 0) -> Cut:
        """The cut of one member: that of the current pass, unless the pass itself has changed a score."""
        current, index = self._current(mask)
        return self.cuts([mask], coat)[0] if current is None else current.cuts[coat][index]

    def masked_weight(self, mask: Member) -> Tensor | None:
        """θ ⊙ m of one member outside of autograd, if the current pass has it."""
        begun = self._passes.get(_thread())
        if begun is None or begun.masked is None:
            return None
        current, index = self._current(mask)
        return None if current is None or current.masked is None else current.masked[index]

    def _current(self, mask: Member) -> tuple["_Pass | None", int]:
        """The current pass and the number of a member in it; None if there is none, or it has changed a tensor."""
        current = self._passes.get(_thread())
        if current is None or mask not in self.members:
            return None, 0
        index = self.members.index(mask)
        rivals, own = self.rivals(mask), slice(index, index + 1)
        found_for = current.versions if rivals is self.members else current.versions[own]
        fresh = _versions(rivals) == found_for and _weight_versions([mask]) == current.weight_versions[own]
        return (current if fresh else None), index

    def begin(self) -> "_Pass | None":
        """Begin a forward pass; gives the enclosing one, if any, to be handed to ``end``."""
        enclosing = self._passes.get(_thread())
        if all(mask.given is not None for mask in self.members):
            return enclosing
        versions, weight_versions = _versions(self.members), _weight_versions(self.members)
        if enclosing is not None and (enclosing.versions, enclosing.weight_versions) == (versions, weight_versions):
            return enclosing  # as the forward pass inside a Lightning module's training step
        weights = [mask.attached_weight for mask in self.members]
        scores, standard = [mask.score for mask in self.members], all(mask.is_standard for mask in self.members)
        if standard and not torch.compiler.is_compiling() and backend.uses_triton(scores, weights):
            first, masked = backend.apply_masks(self.prepare_cuts(self.members), weights)
            coats = [first]
        else:
            coats, masked = [self.cuts(self.members, coat) for coat in range(self.members[0].coats)], None
        self._passes[_thread()] = _Pass(versions, weight_versions, coats, masked)
        return enclosing

    def end(self, enclosing: "_Pass | None") -> None:
        """End the pass that began last."""
        if enclosing is None:
            self._passes.pop(_thread(), None)
        else:
            self._passes[_thread()] = enclosing

    def _find(self, rivals: Sequence[Member], coat: int, **options: Any) -> list[Cut]:
        """The cuts of members that are ranked together. On a CPU those found last, if they are still right.

        They are if they keep the right number of scores: each of these is higher than all others. Counting is much
        faster than finding, and sees writes that version counters do not, so it is tried where these are unchanged.
        """
        scores, kept = [mask.score.detach() for mask in rivals], [mask.kept for mask in rivals]
        if coat:
            kept = list(self.kept_by_coats(rivals)[coat].unbind())
        rank_by = rivals[0].rank_by
        if scores[0].device.type != "cpu" or not all(map(reference.holds_numbers, scores)):
            return backend.find_cuts(scores, kept, [mask.name for mask in rivals], rank_by=rank_by, **options)
        versions, known = _versions(rivals), self._found.get((rivals[0], coat))
        if known is not None and known.versions == versions and not any(options.get("floors", ())):
            ranked = [reference.ranking_key(score, rank_by) for score in scores]
            if reference.count_kept(ranked, known.cuts) == int(sum(kept)):
                return known.cuts
        cuts = backend.find_cuts(scores, kept, [mask.name for mask in rivals], rank_by=rank_by, **options)
        self._found[rivals[0], coat] = _Found(versions, cuts)
        return cuts


class LayerRanking(Ranking[Member]):
    """Scores compete within their tensor (the paper's experiments)."""

    def cuts(self, masks: Sequence[Member], coat: int = 0) -> list[Cut]:
        """Each by its own scores."""
        if masks[0].score.device.type == "cpu":
            return [cut for mask in masks for cut in self._find([mask], coat)]
        return self._find(masks, coat)

    def prepare_cuts(self, masks: Sequence[Member], coat: int = 0, kept: Sequence[Tensor] = ()) -> "FindCuts":
        """Each by its own scores."""
        return _prepare_cuts(masks, kept)

    def rivals(self, mask: Member) -> Sequence[Member]:
        """Only the member itself."""
        return [mask]

    def begin(self) -> "_Pass | None":
        """Begin a forward pass; only on a GPU is it faster to find all cuts at once."""
        return super().begin() if self.members[0].score.is_cuda else self._passes.get(_thread())


class GlobalRanking(Ranking[Member]):
    """Scores compete across the whole network (the paper's text)."""

    def cuts(self, masks: Sequence[Member], coat: int = 0) -> list[Cut]:
        """The cuts of these members, by the scores of all."""
        for mask in masks:
            if mask not in self.members:
                raise ValueError(
                    f"{mask.name!r} is ranked over the whole network, of which nn.DataParallel copies each layer by "
                    "itself; use DistributedDataParallel, or prune_ with ranking='layer'"
                )
        found = self._find(self.members, coat, together=True, floors=_floors(self.members, coat))
        return [found[self.members.index(mask)] for mask in masks]

    def prepare_cuts(self, masks: Sequence[Member], coat: int = 0, kept: Sequence[Tensor] = ()) -> "FindCuts":
        """The cuts of these members, which must be all."""
        return _prepare_cuts(masks, kept, together=True, floors=_floors(masks, coat))

    def kept_by_coats(self, masks: Sequence[Member]) -> Tensor:
        """As many as each coat keeps of all tensors together, spread over them."""
        totals = _shares_of_coats(torch.stack([mask.kept for mask in masks]).cumsum(0), masks[0].coats)
        return totals.diff(dim=1, prepend=torch.zeros_like(totals[:, :1]))

    def rivals(self, mask: Member) -> Sequence[Member]:
        """All members."""
        return self.members


def _shares_of_coats(kept: Tensor, coats: int) -> Tensor:
    """What each coat (row) keeps of the counts that the first keeps, rounded down."""
    return kept * torch.arange(coats, 0, -1, device=kept.device)[:, None] // coats


def _floors(masks: Sequence[Ranked], coat: int) -> list[int]:
    return [0 if coat else mask.floor_count for mask in masks]  # a floor is one of the first coat


def _prepare_cuts(masks: Sequence[Ranked], kept: Sequence[Tensor], **options: Any) -> "FindCuts":
    from iterand.backend.triton import cuts  # only where there is Triton

    scores, kept = [mask.score.detach() for mask in masks], kept or [mask.kept for mask in masks]
    return cuts.prepare(scores, kept, magnitude=masks[0].rank_by == "magnitude", **options)


@dataclass(frozen=True)
class _Pass:
    """What a forward pass has found for each member when it began."""

    versions: list[tuple[int, int]]
    """Of the scores."""
    weight_versions: list[tuple[int, int]]
    cuts: list[list[Cut]]
    """For each coat."""
    masked: list[Tensor] | None


@dataclass(frozen=True)
class _Found:
    """The cuts of members that are ranked together, and the versions of the scores they were found for."""

    versions: list[tuple[int, int]]
    cuts: list[Cut]


def _versions(masks: Sequence[Ranked]) -> list[tuple[int, int]]:
    return backend.versions(mask.score for mask in masks)


def _weight_versions(masks: Sequence[Ranked]) -> list[tuple[int, int]]:
    return backend.versions(mask.attached_weight for mask in masks)


def _thread() -> int:
    return 0 if torch.compiler.is_compiling() else threading.get_ident()
