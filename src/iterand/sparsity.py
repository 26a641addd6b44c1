"""How much of each layer is pruned: allocation over layers, floors, and schedules over time."""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal, cast, get_args

import torch
from torch import nn

from iterand import maskable
from iterand.checks import check_int
from iterand.parameter_kinds import Owner
from iterand.parametrization import MaskedParametrization, calculate_masks
from iterand.selection import GlobalRanking, Ranking, check_sparsity, floor_count, kept_count
from iterand.settings import Settings
from iterand.stepping import CountingStepper
from iterand.surgery import require_masked_layers, require_whole_rankings

Allocation = Literal["uniform", "erk"]
Schedule = Literal["constant", "linear", "cubic", "geometric"]
ALLOCATIONS: tuple[str, ...] = get_args(Allocation)
SCHEDULES: tuple[str, ...] = get_args(Schedule)


def allocate(
    shapes: Mapping[str, Sequence[int]], sparsity: float, allocation: Allocation = "uniform"
) -> dict[str, float]:
    """The sparsity of every layer, so that the network as a whole has this one.

    ``uniform``: the same everywhere (the paper). ``erk``: Erdős-Rényi-Kernel (Evci et al., 2020), density in
    proportion to Σ dims / Π dims, so that small layers keep more; a layer that would keep more than all is dense.
    """
    if allocation == "uniform":
        return dict.fromkeys(shapes, sparsity)
    sizes = {name: math.prod(shape) for name, shape in shapes.items()}
    weight = {name: sum(shape) / max(sizes[name], 1) for name, shape in shapes.items()}
    dense: set[str] = set()
    budget = (1 - sparsity) * sum(sizes.values())
    while True:
        free = budget - sum(sizes[name] for name in dense)
        share = sum(weight[name] * sizes[name] for name in shapes if name not in dense)
        factor = free / share if share else 0.0
        full = {name for name in shapes if name not in dense and factor * weight[name] >= 1}
        if not full:
            break
        dense |= full
    return {name: 0.0 if name in dense else min(1.0, max(0.0, 1 - factor * weight[name])) for name in shapes}


def split_kept(sizes: Sequence[int], sparsity: float) -> list[int]:
    """Shares of the kept weights for layers ranked together; they add up to exactly n − round(p·n) of all n."""
    totals = [kept_count(end, sparsity) for end in itertools.accumulate(sizes)]
    return [total - before for total, before in zip(totals, [0, *totals])]


def scheduled_sparsity(schedule: Schedule, start: float, final: float, done: float) -> float:
    """The sparsity on the way from ``start`` to ``final`` after this share of the steps.

    ``linear``; ``cubic``, fast first and slow at the end; ``geometric``: the share that is kept falls by the same
    factor in each step; ``constant``: the final one at once.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule is {schedule!r}; it must be one of {', '.join(SCHEDULES)}")
    done, start = min(max(done, 0.0), 1.0), min(start, final)
    if schedule == "geometric":
        between = 1 - float((1 - start) ** (1 - done) * (1 - final) ** done)
    else:
        share = done if schedule == "linear" else 1 - (1 - done) ** 3 if schedule == "cubic" else 1.0
        between = start * (1 - share) + final * share
    return min(max(between, start), final)  # rounding may lead out of the interval


def set_sparsity_(model: nn.Module, sparsity: float) -> None:
    """Prune this share of the weights from now on, but in no layer more than its final sparsity."""
    masks = _whole_rankings(model)
    set_kept_(masks, _check_reached("sparsity", sparsity, masks))


def _whole_rankings(model: nn.Module) -> list[MaskedParametrization]:
    """The masks of a model, with all that they are ranked together with."""
    layers = require_masked_layers(model)
    require_whole_rankings(model, layers)
    return [layer.parametrization for layer in layers.values()]


def _check_reached(name: str, sparsity: float, masks: Iterable[MaskedParametrization]) -> float:
    """Refuse a sparsity that no layer reaches."""
    final = max(mask.settings.sparsity for mask in masks)
    if check_sparsity(sparsity, name) > final:
        raise ValueError(f"{name} is {sparsity}, but the model was pruned with {final:g}; prune_ it with a higher one")
    return sparsity


def kept_at(masks: Iterable[MaskedParametrization], sparsity: float) -> dict[MaskedParametrization, int]:
    """How many weights of each mask, and of all that is ranked with it, are kept at this sparsity; at 1 the fewest."""
    counts: dict[MaskedParametrization, int] = {}
    for mask in masks:
        if mask not in counts:
            members = mask.ranking.members if isinstance(mask.ranking, GlobalRanking) else [mask]
            final = min(sparsity, mask.settings.sparsity)
            counts |= zip(members, split_kept([member.score.numel() for member in members], final))
    return counts


def set_kept_(masks: Sequence[MaskedParametrization], sparsity: float) -> None:
    """``set_sparsity_`` for all masks of a model, with every member of their rankings, without a host sync."""
    counts = kept_at(masks, sparsity)
    kept = [mask.kept for mask in masks]
    values = torch.tensor([counts[mask] for mask in masks], pin_memory=kept[0].is_cuda)
    torch._foreach_copy_(kept, list(values.to(kept[0].device, non_blocking=True).unbind()))


class SparsitySchedule(CountingStepper):
    """Raise the sparsity from ``start`` to its final value over ``steps`` steps; call ``step()`` once an iteration.

    ``linear``, ``cubic`` (Zhu and Gupta, 2017: fast first, slow at the end) or ``geometric`` (each step keeps the same
    share of what is left). Each layer goes as far as its own final sparsity. A global ranking has one sparsity, so all
    its layers must be in the model.

    Like torch's learning-rate schedulers, it sets its first value when it is constructed: from then on the model prunes
    only ``start`` of its weights, until ``step()`` is called. The count of iterations is part of the model's state
    dict: a schedule for a model that has loaded one begins there.
    """

    kind = "sparsity_schedule"

    def __init__(self, model: nn.Module, schedule: Schedule = "cubic", *, steps: int, start: float = 0.0) -> None:
        scheduled_sparsity(schedule, 0, 1, 0)
        self.model = model
        self._masks = _whole_rankings(model)
        if any(mask.settings.mask == "bernoulli" for mask in self._masks):
            raise ValueError(
                "Bernoulli masks are sampled by their scores alone while training, whatever the sparsity; leave out "
                "the schedule"
            )
        self.schedule = schedule
        self.steps = check_int("steps", steps, "a number of iterations, at least 1", low=1)
        self.start = _check_reached("start", start, self._masks)
        super().__init__(self._masks)
        self._applied = self.iteration
        """The iteration whose sparsity was set."""
        self._apply()

    @property
    def final(self) -> float:
        """The highest final sparsity of any layer; a state that the model loads may bring another."""
        return max(mask.settings.sparsity for mask in self._masks)

    def step(self) -> None:
        """Count one iteration and set the sparsity it calls for."""
        is_set = self._applied == self.iteration  # not if the model has loaded another count
        self._advance()
        if self.iteration <= self.steps or not is_set:
            self._apply()
        self._applied = self.iteration

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume from a state, and set the sparsity it calls for."""
        super().load_state_dict(state)
        self._apply()

    def _apply(self) -> None:
        done = self.iteration / self.steps
        set_kept_(self._masks, scheduled_sparsity(self.schedule, self.start, self.final, done))
        self._applied = self.iteration


class ScoreFreezing(CountingStepper):
    """Project and freeze the scores of GEM-Miner masks; call ``step()`` after the optimizer's, once an iteration.

    It goes with ``prune_(..., mask="gem_miner")``. Each step projects the scores to [0, 1]. Every ``period`` steps the
    weights whose scores are too low for the current sparsity are frozen: pruned for good, with a score of −1. So it
    goes with a ``SparsitySchedule``, as a rule ``"geometric"``. Sreenivasan et al. (2022) also decay the scores.
    """

    kind = "score_freezing"

    def __init__(self, model: nn.Module, period: int) -> None:
        masks = _whole_rankings(model)
        self._masks = [mask for mask in masks if mask.settings.mask == "gem_miner"]
        self.period = check_int("period", period, "a number of iterations, at least 1", low=1)
        if not self._masks:
            raise ValueError(
                f"{masks[0].name!r} has a mask that is {masks[0].settings.mask}, whose scores are not frozen; prune_ "
                "with mask='gem_miner'"
            )
        super().__init__(self._masks)

    @torch.no_grad()
    def step(self) -> None:
        """Count one iteration; project the scores, and freeze if it is time."""
        self._advance()
        for mask in self._masks:
            mask.score.copy_(torch.where(mask.frozen, -1.0, mask.score.clamp(0.0, 1.0)))
        if self.iteration % self.period == 0:
            for mask, live in zip(self._masks, calculate_masks(self._masks, limited=False)):
                mask.frozen |= ~live
                mask.score.masked_fill_(mask.frozen, -1.0)


def refuse_beside_mapping(ranking: str, allocation: str, floor: float) -> None:
    """Refuse what cannot be asked for together with a sparsity for each layer."""
    asked: list[tuple[str, object, object]] = [
        ("ranking", ranking, "layer"),
        ("allocation", allocation, "uniform"),
        ("floor", floor, 0.0),
    ]
    for name, value, usual in asked:
        if value != usual:
            raise ValueError(
                f"{name} is {value!r}, but a sparsity mapping gives every layer a sparsity and a ranking of its own; "
                f"leave {name} out, or give one sparsity, and overrides= for single layers"
            )


def own_sparsities(
    chosen: Mapping[str, list[Owner]], given: Mapping[str, float | str], argument: str
) -> dict[str, float]:
    """The sparsity of each layer that a pattern of this argument names; the last one that does counts."""
    own: dict[str, float] = {}
    named: dict[str, set[str]] = {pattern: set() for pattern in given}
    for name, group in chosen.items():
        asked: dict[str, float] = {}
        for owner in group:
            for pattern, value in given.items():
                if owner.matches(pattern):
                    dense = isinstance(value, str) and value == "dense"
                    what = f"{argument}[{pattern!r}]"
                    asked[owner.name] = 0.0 if dense else check_sparsity(cast(float, value), what)
                    named[pattern].add(name)
        if len(set(asked.values())) > 1:
            (a, p), (b, q), *_ = asked.items()
            raise ValueError(f"{a!r} and {b!r} are one tied tensor, but ask for sparsity {p} and {q}; give one")
        if asked:
            own[name] = next(iter(asked.values()))
    for first, later in itertools.combinations(given, 2):
        if named[first] and named[first] < named[later]:
            raise ValueError(
                f"{argument} pattern {first!r} has no effect, since {later!r} names more and the last match counts; "
                f"put {first!r} after it, or leave it out"
            )
    return own


def mapped_sparsities(
    chosen: Mapping[str, list[Owner]], sparsity: Mapping[str, float | str], everything: Mapping[str, list[Owner]]
) -> dict[str, float]:
    """The sparsity of every layer from an explicit map, whose patterns name some of ``everything``."""
    own = own_sparsities(chosen, sparsity, "sparsity")
    for name in chosen:
        if name not in own:
            raise ValueError(
                f"the sparsity map says nothing of {name!r}; add it, or begin with '*' for the rest, or exclude it"
            )
    for pattern in sparsity:
        maskable.matching(pattern, [owner for group in everything.values() for owner in group], "sparsity")
    return own


def refuse_empty(
    plan: Iterable[tuple[list[Owner], Settings, Ranking[MaskedParametrization]]],
    together: GlobalRanking[MaskedParametrization],
) -> None:
    """Refuse settings that leave a layer without weights, or promise more than there is; shifts may all go."""
    pooled = floors = 0
    sparsity = 0.0
    for group, settings, rank in plan:
        count = group[0].parameter.numel()
        if rank is together:
            pooled, floors = pooled + count, floors + floor_count(count, settings.floor)
            sparsity = settings.sparsity
        elif group[0].kind != "shift" and kept_count(count, settings.sparsity) == 0:
            raise ValueError(
                f"sparsity {settings.sparsity:g} leaves none of the {count} weights of {settings.name!r}; "
                "lower it, rank over the whole network, keep the layer dense, or exclude it"
            )
    kept = kept_count(pooled, sparsity)
    if pooled and kept < max(floors, 1):
        asked = f"and floor= asks for {floors}; lower either" if floors else "so nothing to search; lower it"
        raise ValueError(f"sparsity {sparsity:g} leaves {kept} of {pooled} weights, {asked}")
