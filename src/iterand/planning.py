"""What ``prune_`` does to a model: its options, and everything decided and checked before the model is changed."""

import numbers
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn

from iterand import distributions, existing, mask_kinds, maskable, surgery
from iterand.backend import RankBy
from iterand.checks import shown, unknown
from iterand.distributions import EXISTING, MAGNITUDES, MagnitudeScores
from iterand.mask_kinds import MaskKind
from iterand.parameter_kinds import Owner, owners
from iterand.parametrization import MaskedParametrization
from iterand.selection import GlobalRanking, LayerRanking, Ranking, RankingChoice, check_sparsity
from iterand.settings import Settings
from iterand.sparsity import (
    Allocation,
    allocate,
    mapped_sparsities,
    own_sparsities,
    refuse_beside_mapping,
    refuse_empty,
)
from iterand.surgery import masked_layers, unwrap

_Value = TypeVar("_Value")
Patterns = Sequence[str] | str
Norms = Literal["fixed", "shifted", "keep"]
Biases = Literal["zero", "keep"]

SMALLEST_GAIN, LARGEST_GAIN = 1e-6, 1e6
_Planned = tuple[list[Owner], Settings, Ranking[MaskedParametrization]]
"""The owners of a tensor that is to be masked, its settings, and what it is ranked with."""

_AFFINE = ("norm", "shift", "scale")
_SHIFT_FAN_IN = 8
"""The fan-in from which shifts of normalized activations are drawn: with SC they are ±0.5 standard deviations."""


@dataclass(frozen=True)
class PruningOptions:
    """The arguments of ``prune_`` beside model and sparsity."""

    weights: str
    gain: float | None
    """None for the gain of each tensor's own sparsity, ``recommended_gain``."""
    scores: str
    seed: int
    ranking: RankingChoice
    rank_by: RankBy
    mask: MaskKind
    coats: int
    binarize: bool
    share: list[str]
    allocation: Allocation
    floor: float
    include: list[str] | None
    exclude: list[str]
    overrides: dict[str, float | str]
    trainable: list[str]
    biases: Biases
    norms: Norms

    @property
    def existing(self) -> bool:
        """Whether the weights are those that the model has."""
        return self.weights == EXISTING

    def __post_init__(self) -> None:
        for name, value, known in (
            ("ranking", self.ranking, get_args(RankingChoice)),
            ("rank_by", self.rank_by, get_args(RankBy)),
            ("allocation", self.allocation, get_args(Allocation)),
            ("biases", self.biases, get_args(Biases)),
            ("norms", self.norms, get_args(Norms)),
        ):
            if value not in known:
                raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
        if not self.existing:
            distributions.get_distribution(self.weights)
            if self.scores in MAGNITUDES or self.trainable:
                what = f"scores is {self.scores!r}" if self.scores in MAGNITUDES else f"trainable is {self.trainable}"
                other = "leave it out" if self.scores in MAGNITUDES else "exclude= leaves parameters trainable here"
                raise ValueError(f"{what}, which goes with weights='existing' only; {other}")
        elif self.biases != "keep" or self.norms != "keep":
            what = f"biases is {self.biases!r}" if self.biases != "keep" else f"norms is {self.norms!r}"
            raise ValueError(
                f"{what}, but existing weights need the biases and norms that they were trained with; leave it out, or "
                "name those to train in trainable="
            )
        starts = (*(MAGNITUDES if self.existing else ()), *distributions.distribution_names())
        if self.scores not in starts:
            raise ValueError(unknown("distribution of scores", self.scores, starts))
        if self.existing and (self.mask != "binary" or self.binarize or self.share):
            what = f"share is {self.share}" if self.share else "binarize is True" if self.binarize else ""
            raise ValueError(
                f"{what or f'mask is {self.mask!r}'}, but existing weights are kept as they are or pruned; leave it "
                "out, or prune_ with random weights"
            )
        if self.existing and self.gain != 1:
            raise ValueError(f"gain is {self.gain!r}, but existing weights stay as they are; leave it out")
        if self.mask == "gem_miner" and (self.scores != "unit_uniform" or self.rank_by != "score"):
            what = f"scores is {self.scores!r}" if self.scores != "unit_uniform" else f"rank_by is {self.rank_by!r}"
            raise ValueError(f"{what}, but GEM-Miner rounds scores that begin between 0 and 1; leave it out")
        if self.mask == "bernoulli" and self.rank_by != "score":
            raise ValueError(f"rank_by is {self.rank_by!r}, but a Bernoulli mask keeps likely weights; leave it out")


@dataclass(frozen=True)
class PruningPlan:
    """What ``prune_`` does to a model: all of it decided and checked, nothing of it done."""

    root: nn.Module
    groups: list[list[Owner]]
    """The owners of each masked tensor; more than one if it is tied."""
    masks: list[MaskedParametrization]
    weights: list[Tensor | None]
    """The first draw of each masked tensor; None if it keeps its weights."""
    rankings: list[Ranking[MaskedParametrization]]
    zeroed_biases: list[Owner]
    frozen_norms: list[Owner]
    """The affine part of norms, and layer scales."""
    frozen_values: list[Owner]
    """Everything that is not masked beside existing weights, but for what stays trainable."""
    left_alone: list[Owner]
    """Bare parameters that no argument names: neither masked nor frozen."""


def plan_pruning(model: nn.Module, sparsity: float | Mapping[str, float | str], options: PruningOptions) -> PruningPlan:
    """Decide and check everything; the model is only read."""
    root = unwrap(model)
    _refuse_model(model, root)
    sparsity = _checked_sparsity(sparsity, options)
    everything = owners(root)
    if options.norms == "shifted" and all(owner.kind != "shift" for owner in everything):
        raise ValueError(f"norms is 'shifted', but {type(root).__name__} has no norm that adds anything; leave it out")
    usual = ("weight", "shift") if options.norms == "shifted" else ("weight",)
    trainable = [
        owner for pattern in options.trainable for owner in maskable.matching(pattern, everything, "trainable")
    ]
    exclude = [*options.exclude, *options.trainable]
    chosen = maskable.choose(root, options.include, exclude, list(options.overrides), usual)
    if options.existing:
        maskable.refuse_lazy(everything)
        existing.refuse_nan(group[0] for group in chosen.values())
    by_layer, together = LayerRanking[MaskedParametrization](), GlobalRanking[MaskedParametrization]()
    tensors: list[_Planned] = [
        (chosen[settings.name], settings, by_layer if settings.ranking == "layer" else together)
        for settings in _settings(chosen, sparsity, options)
    ]
    refuse_empty(tensors, together)
    surgery.check_classes([root, *(owner.module for group in chosen.values() for owner in group)])
    masks = _masks(tensors, options)
    rankings: list[Ranking[MaskedParametrization]] = []
    for rank in (by_layer, together):
        rank.members = [mask for mask in masks if mask.ranking is rank]
        rankings += [rank] if rank.members else []
    modules = {id(owner.module) for group in chosen.values() for owner in group}
    parameters = {id(owner.parameter) for group in chosen.values() for owner in group}
    others = [owner for owner in everything if not any(map(owner.matches, options.exclude))]
    biases = [owner for owner in others if owner.kind == "bias" and id(owner.module) in modules]
    norms = [owner for owner in others if owner.kind in _AFFINE and id(owner.parameter) not in parameters]
    kept = parameters | {id(owner.parameter) for owner in trainable}
    frozen_values = [owner for owner in everything if id(owner.parameter) not in kept] if options.existing else []
    settled = options.existing or options.include is not None
    return PruningPlan(
        root=root,
        groups=list(chosen.values()),
        masks=masks,
        weights=[None if mask.is_existing else mask.weight() for mask in masks],
        rankings=rankings,
        zeroed_biases=biases if options.biases == "zero" else [],
        frozen_norms=norms if options.norms != "keep" else [],
        frozen_values=frozen_values,
        left_alone=[] if settled else maskable.left_over(everything, options.exclude, parameters),
    )


def _settings(
    chosen: Mapping[str, list[Owner]], sparsity: float | Mapping[str, float | str], options: PruningOptions
) -> list[Settings]:
    """The settings of each tensor that is masked."""
    shared = _shared(chosen, options.share)
    alone = _sparsities_alone(chosen, sparsity, options)
    found = []
    for name, group in chosen.items():
        dense = alone.get(name) == 0.0 and sparsity != 0.0
        gain = options.gain
        if gain is None:  # layers that share their weights have one
            gain = recommended_gain(alone.get(shared.get(name, name), cast(float, sparsity)))
        settings = Settings(
            name=name,
            seed=options.seed,
            weight_distribution=options.weights,
            score_distribution=options.scores,
            fan_in=_fan_in(group[0]),
            sparsity=alone.get(name, cast(float, sparsity)),
            ranking="layer" if name in alone else "global",
            rank_by=mask_kinds.ranked_by(options.mask, options.rank_by),
            floor=0.0 if name in alone else options.floor,
            mask=mask_kinds.of_dense(options.mask) if dense else options.mask,
            gain=1.0 if group[0].kind == "shift" else gain,
            coats=options.coats,
            binarize=options.binarize,
            shared=shared.get(name, ""),
        )
        found.append(settings)
    return found


def _sparsities_alone(
    chosen: Mapping[str, list[Owner]], sparsity: float | Mapping[str, float | str], options: PruningOptions
) -> dict[str, float]:
    """The sparsities of the tensors that are ranked by themselves."""
    alone = own_sparsities(chosen, options.overrides, "overrides")
    free = {name: group for name, group in chosen.items() if name not in alone}
    if isinstance(sparsity, Mapping):
        return alone | mapped_sparsities(free, sparsity, chosen)
    if options.ranking == "layer":
        shapes = {name: group[0].parameter.shape for name, group in free.items()}
        return alone | allocate(shapes, sparsity, options.allocation)
    return alone


def _masks(tensors: Sequence[_Planned], options: PruningOptions) -> list[MaskedParametrization]:
    """The masks of these tensors, with their initial scores."""
    initial: dict[str, Tensor] = {}
    if options.scores in MAGNITUDES:
        initial = existing.initial_scores(
            {settings.name: group[0].parameter for group, settings, _ in tensors},
            {settings.name: rank for _, settings, rank in tensors},
            cast(MagnitudeScores, options.scores),
        )
    return [
        MaskedParametrization(
            group[0].parameter,
            settings,
            rank,
            padding=None if options.existing else _padding(group),
            scores=initial.get(settings.name),
        )
        for group, settings, rank in tensors
    ]


def _refuse_model(model: nn.Module, root: nn.Module) -> None:
    """Refuse a model that is made from another, wrapped too early, or masked already, and tensors that cannot train."""
    if torch.is_inference_mode_enabled():
        raise ValueError("scores that are made under torch.inference_mode cannot be trained; call prune_ outside of it")
    if isinstance(root, (torch.jit.ScriptModule, torch.fx.GraphModule)):
        raise ValueError("model was traced or scripted, so it is made from another module; prune_ that one")
    if root is not model and any(isinstance(part, nn.parallel.DistributedDataParallel) for part in model.modules()):
        raise ValueError("the model is wrapped in DistributedDataParallel already; prune_ it first, then wrap it")
    for name in masked_layers(root):
        raise ValueError(f"{name!r} is masked already; fold_ the model first")


def _checked_sparsity(
    sparsity: float | Mapping[str, float | str], options: PruningOptions
) -> float | dict[str, float | str]:
    """The sparsity, or what patterns are mapped to; refuses options that do not go with it or with each other."""
    if isinstance(sparsity, Mapping):
        refuse_beside_mapping(options.ranking, options.allocation, options.floor)
        return as_mapping("sparsity", sparsity)
    sparsity = check_sparsity(sparsity)
    if options.allocation != "uniform" and options.ranking == "global":
        raise ValueError(
            f"allocation is {options.allocation!r}, which needs ranking='layer'; set that, or leave it out"
        )
    if options.floor and options.ranking != "global":
        raise ValueError(
            f"floor is {options.floor!r}, which only counts with ranking='global'; set that, or leave floor out"
        )
    return sparsity


def check_gain(value: Any) -> float:
    """The gain as a float; refuses what would make weights vanish or overflow."""
    number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not number or not SMALLEST_GAIN <= value <= LARGEST_GAIN:
        raise ValueError(f"gain is {value!r}; it is a number from {SMALLEST_GAIN:g} to {LARGEST_GAIN:g}")
    return float(value)


def recommended_gain(sparsity: float) -> float:
    """(1 − p)^(−1/4) to two decimals, for a model without norms: pruning makes activations smaller in every layer."""
    return round((1 - sparsity) ** -0.25, 2) if sparsity < 1 else 1.0


def _fan_in(owner: Owner) -> int:
    return _SHIFT_FAN_IN if owner.kind == "shift" else distributions.fan_in(owner.module, owner.parameter)


def _shared(chosen: Mapping[str, list[Owner]], patterns: Sequence[str]) -> dict[str, str]:
    """The names of tensors that share their weights with an earlier one, and the name of that one."""
    shared: dict[str, str] = {}
    for pattern in patterns:
        names = [name for name, group in chosen.items() if any(owner.matches(pattern) for owner in group)]
        if len(names) < 2:
            raise ValueError(f"share has {pattern!r}, which names {len(names)} of the masked tensors; name two or more")
        for name in names:
            first, other = chosen[names[0]][0], chosen[name][0]
            if other.parameter.shape != first.parameter.shape or _fan_in(other) != _fan_in(first):
                shapes = f"{list(first.parameter.shape)} and {list(other.parameter.shape)}"
                raise ValueError(
                    f"{names[0]!r} and {name!r} have shapes {shapes}, so they cannot share their weights; name layers "
                    "of one shape in share"
                )
            if _padding(chosen[name]) != _padding(chosen[names[0]]):
                raise ValueError(
                    f"{names[0]!r} and {name!r} have other padding rows, so they cannot share their weights"
                )
            if shared.get(name, names[0]) != names[0]:
                raise ValueError(f"two patterns of share name {name!r}; name it once")
            shared[name] = names[0]
    return shared


def _padding(group: Iterable[Owner]) -> int | None:
    """The padding row of an embedding, which stays zero."""
    embeddings = [owner.module for owner in group if isinstance(owner.module, (nn.Embedding, nn.EmbeddingBag))]
    return next((one.padding_idx for one in embeddings if one.padding_idx is not None), None)


def as_list(what: str, patterns: Patterns) -> list[str]:
    """Glob patterns as a list."""
    if isinstance(patterns, str):
        return [patterns]
    listed: list[Any] = list(patterns) if isinstance(patterns, Iterable) else [patterns]
    if not all(isinstance(pattern, str) for pattern in listed):
        raise ValueError(f"{what} is {shown(patterns)}; it must be a glob pattern over names, or a list of them")
    return listed


def as_mapping(what: str, given: Mapping[str, _Value]) -> dict[str, _Value]:
    """What glob patterns are mapped to, as a dict."""
    if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
        raise ValueError(f"{what} is {shown(given)}; it must be a mapping from glob patterns over names to a sparsity")
    return dict(given)
