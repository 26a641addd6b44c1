"""Attach masks to any model (``prune_``), and fold them back into an ordinary module (``fold_``)."""

import copy
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from iterand import distributions, existing, freezing, mask_kinds, maskable, philox, surgery
from iterand.backend import RankBy, reference
from iterand.checks import check_fraction
from iterand.distributions import EXISTING, MAGNITUDES, MagnitudeScores, WeightDistribution
from iterand.errors import UnmaskedWarning
from iterand.mask_kinds import MaskKind
from iterand.maskable import Owner, list_tensors
from iterand.parametrization import MaskedParametrization, calculate_multipliers
from iterand.selection import GlobalRanking, LayerRanking, Ranking, RankingChoice, check_sparsity
from iterand.settings import Settings
from iterand.sparsity import (
    Allocation,
    allocate,
    mapped_sparsities,
    own_sparsities,
    refuse_beside_mapping,
    refuse_empty,
    set_sparsity_,
)
from iterand.surgery import MaskedLayer, masked_layers, require_masked_layers, unwrap

logger = logging.getLogger("iterand")

Model = TypeVar("Model", bound=nn.Module)
_Value = TypeVar("_Value")
Patterns = Sequence[str] | str
Preset = Literal["paper", "recommended"]
Norms = Literal["fixed", "shifted", "keep"]
Biases = Literal["zero", "keep"]
Weights = WeightDistribution | Literal["existing"]
Scores = WeightDistribution | MagnitudeScores

_AFFINE = ("norm", "shift", "scale")
_LEFT_ALONE = "_iterand_left_alone"  # attribute of a masked model
_SHIFT_FAN_IN = 8
"""The fan-in from which shifts of normalized activations are drawn: with SC they are ±0.5 standard deviations."""


def prune_(
    model: Model,
    sparsity: float | Mapping[str, float],
    *,
    preset: Preset = "paper",
    weights: Weights | None = None,
    scores: Scores | None = None,
    seed: int = 0,
    ranking: RankingChoice | None = None,
    rank_by: RankBy = "score",
    mask: MaskKind = "binary",
    coats: int | None = None,
    binarize: bool = False,
    share: Patterns = (),
    allocation: Allocation = "uniform",
    floor: float = 0.0,
    include: Patterns | None = None,
    exclude: Patterns = (),
    overrides: Mapping[str, float | str] | None = None,
    trainable: Patterns = (),
    biases: Biases | None = None,
    norms: Norms | None = None,
    strict: bool = False,
) -> Model:
    """Fill a model with random weights and mask them by trainable scores (Algorithm 1, line 1), in place.

    With ``weights="existing"`` the weights that the model has are masked instead, and never change. Everything that is
    not masked keeps its value and is frozen, but for what ``trainable`` names.

    Weights of linear, convolution, embedding, recurrent and attention layers are masked; afterwards only the scores,
    and what was left alone, take gradients. An ``UnmaskedWarning`` names what was left alone unasked. An embedding's
    padding row stays zero. A model that is refused is left as it was.

    Args:
        model: Any module.
        sparsity: p, the share of weights pruned; or a mapping from patterns to it that covers every layer. A mapping
            ranks each layer by itself, so it goes with neither ``ranking="global"``, ``floor`` nor ``allocation``; to
            take single layers out of a global ranking, give one sparsity and ``overrides``.
        preset: Where ``weights``, ``ranking`` and ``norms`` come from if they are not given. ``"paper"``:
            ``"kaiming_uniform"``, ``"layer"``, ``"fixed"``. ``"recommended"``: ``"signed_constant"``, and for a model
            with norms ``"global"`` and ``"shifted"``; ``recommended_steppers`` goes with it.
        weights: D_param, the distribution of the weights; or ``"existing"``.
        scores: D_score, the distribution of the initial scores. For existing weights ``"magnitude_rank"`` (the default)
            or ``"magnitude"``: their magnitudes, as ranks up to 0.1 or as they are; the first mask keeps the largest.
        seed: With a tensor's qualified name and an index, all that a weight depends on; parts of a model that are
            pruned one by one have names of their own, so give them different seeds.
        ranking: ``"layer"``: scores compete within their tensor; ``"global"``: over the whole network.
        rank_by: ``"score"``: the raw score; ``"magnitude"``: its absolute value.
        mask: What a weight is multiplied by, from its score: ``"binary"`` masks of {0, 1} as in the paper;
            ``"bernoulli"``, sampled while training; ``"signed"``, of {−1, 0, 1}; ``"multicoat"``, of {0, 1, …, coats};
            ``"gem_miner"``, rounded scores, with ``ScoreFreezing``. The guide "Other kinds of masks" has the formulas.
        coats: Of a ``"multicoat"`` mask: how many nested masks are added (2 if left out).
        binarize: Replace the kept weights of a tensor by their signs times their mean magnitude (biprop; Diffenderfer
            and Kailkhura, 2021). Scores are trained as if all weights had this magnitude.
        share: Glob patterns: the tensors that one of them names have the same random weights and masks of their own,
            for example the blocks of a stage (hidden-fold networks; García-Arias et al., 2021). A shared weight is
            redrawn only where all masks prune it.
        allocation: ``"uniform"`` or ``"erk"``: how the sparsity is spread over layers that are ranked one by one.
        floor: With global ranking, the share of its weights that every layer keeps in any case.
        include: Glob patterns over qualified names of parameters or their modules: mask only these. Bare parameters
            are masked only if a pattern, here or in ``overrides``, names them.
        exclude: Glob patterns: leave these alone altogether. An override must not name what is left alone. With
            existing weights: these are not masked, only frozen.
        overrides: Glob pattern → an own sparsity, or ``"dense"``: weights that are all kept. The last match counts;
            such a layer is ranked by itself.
        trainable: With existing weights, glob patterns: leave these alone altogether, such as a new head, biases or
            norms that are trained with the scores.
        biases: ``"zero"``: those of masked layers are set to zero and frozen; ``"keep"``: left as they are. With
            existing weights they keep their values, and so do norms.
        norms: ``"fixed"``: batch norm made non-affine, the affine part of other norms frozen at one and zero;
            ``"shifted"``: the same, but what a norm adds is random and masked like a weight, so convert norms to
            ``SyncBatchNorm`` first; ``"keep"``: left as they are. Layer scales are frozen at one with the norms.
        strict: Refuse a model of which parameters would be left alone unasked, instead of warning.
    """
    if preset not in get_args(Preset):
        raise ValueError(f"preset is {preset!r}; it must be one of {', '.join(get_args(Preset))}")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r}; it must be a torch.nn.Module")
    recommended = preset == "recommended"
    if weights is None:
        weights = "signed_constant" if recommended else "kaiming_uniform"
    exists = weights == EXISTING
    with_norms = recommended and not exists and not isinstance(sparsity, Mapping) and maskable.has_shifts(unwrap(model))
    if ranking is None:
        ranking = "global" if with_norms else "layer"
    if norms is None:
        norms = "keep" if exists else "shifted" if with_norms else "fixed"
    if biases is None:
        biases = "keep" if exists else "zero"
    if scores is None:
        usual = "unit_uniform" if mask == "gem_miner" else "kaiming_uniform"
        scores = "magnitude_rank" if exists else usual
    if coats is None:
        coats = 2 if mask == "multicoat" else 1
    options = _Options(
        weights=weights,
        scores=scores,
        seed=philox.check_seed(seed),
        ranking=ranking,
        rank_by=rank_by,
        mask=mask,
        coats=coats,
        binarize=bool(binarize),
        share=_as_list("share", share),
        allocation=allocation,
        floor=check_fraction("floor", floor, "the share of its weights that a layer keeps"),
        include=None if include is None else _as_list("include", include),
        exclude=_as_list("exclude", exclude),
        overrides={} if overrides is None else _as_mapping("overrides", overrides),
        trainable=_as_list("trainable", trainable),
        biases=biases,
        norms=norms,
    )
    plan = _plan(model, sparsity, options)
    unmasked = _describe_left_alone(plan) if plan.left_alone else None
    if unmasked and strict:
        raise ValueError(f"strict is True, but {unmasked}")
    _apply(plan)
    if unmasked:
        warnings.warn(unmasked, UnmaskedWarning, stacklevel=2)
    return model


@dataclass(frozen=True)
class _Options:
    """The arguments of ``prune_`` beside model and sparsity."""

    weights: str
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
        if self.scores not in MAGNITUDES:
            distributions.get_distribution(self.scores)
        mask_kinds.check_kind(self.mask, self.coats)
        if self.existing and (self.mask != "binary" or self.binarize or self.share):
            what = f"share is {self.share}" if self.share else "binarize is True" if self.binarize else ""
            raise ValueError(
                f"{what or f'mask is {self.mask!r}'}, but existing weights are kept as they are or pruned; leave it "
                "out, or prune_ with random weights"
            )
        if self.mask == "gem_miner" and (self.scores != "unit_uniform" or self.rank_by != "score"):
            what = f"scores is {self.scores!r}" if self.scores != "unit_uniform" else f"rank_by is {self.rank_by!r}"
            raise ValueError(f"{what}, but GEM-Miner rounds scores that begin between 0 and 1; leave it out")


@dataclass(frozen=True)
class _Plan:
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


def _plan(model: nn.Module, sparsity: float | Mapping[str, float], options: _Options) -> _Plan:
    """Decide and check everything; the model is only read."""
    root = unwrap(model)
    if isinstance(root, (torch.jit.ScriptModule, torch.fx.GraphModule)):
        raise ValueError("model was traced or scripted, so it is made from another module; prune_ that one")
    if root is not model and any(isinstance(part, nn.parallel.DistributedDataParallel) for part in model.modules()):
        raise ValueError("the model is wrapped in DistributedDataParallel already; prune_ it first, then wrap it")
    for name in masked_layers(root):
        raise ValueError(f"{name!r} is masked already; fold_ the model first")
    if isinstance(sparsity, Mapping):
        refuse_beside_mapping(options.ranking, options.allocation, options.floor)
        sparsity = _as_mapping("sparsity", sparsity)
    else:
        sparsity = check_sparsity(sparsity)
    if options.allocation != "uniform" and options.ranking == "global":
        raise ValueError(
            f"allocation is {options.allocation!r}, which needs ranking='layer'; set that, or leave it out"
        )
    if options.floor and options.ranking != "global":
        raise ValueError(
            f"floor is {options.floor!r}, which only counts with ranking='global'; set that, or leave floor out"
        )
    if options.norms == "shifted" and not maskable.has_shifts(root):
        raise ValueError(f"norms is 'shifted', but {type(root).__name__} has no norm that adds anything; leave it out")
    usual = ("weight", "shift") if options.norms == "shifted" else ("weight",)
    everything = maskable.owners(root)
    trainable = [
        owner for pattern in options.trainable for owner in maskable.matching(pattern, everything, "trainable")
    ]
    exclude = [*options.exclude, *options.trainable]
    chosen = maskable.choose(root, options.include, exclude, list(options.overrides), usual)
    if options.existing:
        existing.refuse_nan(group[0] for group in chosen.values())
    shared = _shared(chosen, options.share)
    alone = own_sparsities(chosen, options.overrides, "overrides")
    free = [name for name in chosen if name not in alone]
    if isinstance(sparsity, Mapping):
        alone |= mapped_sparsities({name: chosen[name] for name in free}, sparsity)
    elif options.ranking == "layer":
        shapes = {name: chosen[name][0].parameter.shape for name in free}
        alone |= allocate(shapes, sparsity, options.allocation)
    by_layer, together = LayerRanking[MaskedParametrization](), GlobalRanking[MaskedParametrization]()
    tensors: list[tuple[list[Owner], Settings, Ranking[MaskedParametrization]]] = []
    for name, group in chosen.items():
        settings = Settings(
            name=name,
            seed=options.seed,
            weight_distribution=options.weights,
            score_distribution=options.scores,
            fan_in=_fan_in(group[0]),
            sparsity=alone[name] if name in alone else cast(float, sparsity),
            ranking="layer" if name in alone else "global",
            rank_by=mask_kinds.ranked_by(options.mask, options.rank_by),
            floor=0.0 if name in alone else options.floor,
            mask=options.mask,
            coats=options.coats,
            binarize=options.binarize,
            shared=shared.get(name, ""),
        )
        tensors.append((group, settings, by_layer if name in alone else together))
    refuse_empty(tensors, together)
    surgery.check_classes([root, *(owner.module for group in chosen.values() for owner in group)])
    initial: dict[str, Tensor] = {}
    if options.scores in MAGNITUDES:
        ranked = {settings.name: (group[0].parameter, rank) for group, settings, rank in tensors}
        initial = existing.initial_scores(
            {name: weight for name, (weight, _) in ranked.items()},
            {name: rank for name, (_, rank) in ranked.items()},
            cast(MagnitudeScores, options.scores),
        )
    masks = [
        MaskedParametrization(
            group[0].parameter,
            settings,
            rank,
            padding=None if options.existing else _padding(group),
            scores=initial.get(settings.name),
        )
        for group, settings, rank in tensors
    ]
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
    return _Plan(
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


def _apply(plan: _Plan) -> None:
    """Change the model; nothing is refused here."""
    for module in plan.root.modules():
        surgery.stop_caching_cuts_(module)  # whose parts were folded one by one
    for group, mask, weight in zip(plan.groups, plan.masks, plan.weights):
        surgery.attach(group, mask, weight)
    if any(isinstance(ranking, GlobalRanking) for ranking in plan.rankings):
        set_sparsity_(plan.root, 1.0)
    surgery.cache_cuts_(plan.root, plan.rankings)
    freezing.freeze_biases_(plan.zeroed_biases)
    freezing.freeze_norms_(plan.frozen_norms)
    freezing.freeze_values_(plan.frozen_values)
    if any(mask.is_existing for mask in plan.masks):
        existing.note_before_(plan.root, plan.frozen_values)
    if plan.left_alone:
        setattr(plan.root, _LEFT_ALONE, _shapes(plan.left_alone))
    scales = [owner for owner in plan.frozen_norms if owner.kind == "scale"]
    if scales:
        logger.info("layer scales are set to one and frozen: %s", list_tensors(_shapes(scales)))


def _describe_left_alone(plan: _Plan) -> str:
    matrices = sum(one.numel() for one in plan.root.parameters() if not is_lazy(one) and one.dim() > 1)
    masked = sum(mask.score.numel() for mask in plan.masks if mask.score.dim() > 1)
    trained = any(owner.parameter.requires_grad for owner in plan.left_alone)
    effect = "they keep their values" + " and stay trainable" * trained
    return (
        f"{type(plan.root).__name__} has {list_tensors(_shapes(plan.left_alone))} that are neither masked nor frozen: "
        f"{effect} ({100 * masked / max(matrices, 1):.1f} % of the parameters in matrices are masked); mask them too "
        "with include='*' or overrides=, or name them in exclude="
    )


def _shapes(owners: Iterable[Owner]) -> dict[str, tuple[int, ...]]:
    return {owner.name: tuple(owner.parameter.shape) for owner in owners}


def left_alone(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the parameters that ``prune_`` left alone unasked."""
    shapes: dict[str, tuple[int, ...]] = getattr(unwrap(model), _LEFT_ALONE, {})
    return shapes


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
                raise ValueError(f"{names[0]!r} and {name!r} have shapes {shapes}, so they cannot share their weights")
            if shared.get(name, names[0]) != names[0]:
                raise ValueError(f"two patterns of share name {name!r}; name it once")
            shared[name] = names[0]
    return shared


def _padding(group: Iterable[Owner]) -> int | None:
    """The padding row of an embedding, which stays zero."""
    embeddings = [owner.module for owner in group if isinstance(owner.module, (nn.Embedding, nn.EmbeddingBag))]
    return next((one.padding_idx for one in embeddings if one.padding_idx is not None), None)


def scores(model: nn.Module) -> list[nn.Parameter]:
    """The scores s of all masked layers: what an optimizer trains instead of weights."""
    return [layer.score for layer in require_masked_layers(model).values()]


@torch.no_grad()
def fold_(model: Model) -> Model:
    """Replace every masked tensor by its masked weights, in place: an ordinary module again.

    What took gradients before ``prune_`` takes them again, and tensors keep their memory format.
    """
    root = unwrap(model)
    layers = list(require_masked_layers(root).values())
    refuse_computed_further(layers)
    _replace(root, layers, masked_weights(layers))
    freezing.thaw_(root)
    if hasattr(root, _LEFT_ALONE):
        delattr(root, _LEFT_ALONE)
    existing.forget_before_(root)
    return model


@torch.no_grad()
def masked_weights(layers: Sequence[MaskedLayer]) -> list[Tensor]:
    """The masked weights of several tensors, as a forward pass in eval mode has them."""
    states = [layer.parametrization for layer in layers]
    found = []
    for layer, state, multipliers in zip(layers, states, calculate_multipliers(states)):
        weight = layer.weight
        if state.is_plain:
            masked = torch.where(multipliers != 0, weight, 0.0)
        else:
            base = state.binarized(weight, multipliers) if state.settings.binarize else weight
            masked = mask_kinds.apply_multipliers(base, multipliers, weight.new_zeros(()), weight.dtype)
        found.append(reference.match_layout(masked, weight))
    return found


def refuse_computed_further(layers: Iterable[MaskedLayer]) -> None:
    """Refuse tensors that are not their masked weights, since something else is computed from these."""
    for layer in layers:
        if any(len(surgery.parametrizations(*owner)) > 1 for owner in layer.owners):
            raise ValueError(f"{layer.name!r} has another parametrization on top of its mask; remove that one first")


def skeleton(model: nn.Module) -> nn.Module:
    """A copy of a model without masks and without memory: what it computes, for ``torch.func.functional_call``."""
    root = unwrap(model)
    empty: dict[int, Tensor] = {}
    for tensor in (*root.parameters(), *root.buffers()):
        hollow = torch.empty_like(tensor, device="meta")
        is_parameter = isinstance(tensor, nn.Parameter)
        empty[id(tensor)] = nn.Parameter(hollow, tensor.requires_grad) if is_parameter else hollow
    bare = copy.deepcopy(root, empty)
    layers = list(masked_layers(bare).values())
    _replace(bare, layers, [layer.weight.detach() for layer in layers])
    return bare


def _replace(root: nn.Module, layers: Iterable[MaskedLayer], values: Iterable[Tensor]) -> None:
    """Replace masked tensors by ordinary parameters."""
    for module in root.modules():
        surgery.stop_caching_cuts_(module)
    for layer, value in zip(layers, values):
        parameter = nn.Parameter(value, requires_grad=layer.parametrization.trained)
        for module, attribute in layer.owners:
            surgery.detach(module, attribute, parameter)


def _as_list(what: str, patterns: Patterns) -> list[str]:
    if isinstance(patterns, str):
        return [patterns]
    listed: list[Any] = list(patterns) if isinstance(patterns, Iterable) else [patterns]
    if not all(isinstance(pattern, str) for pattern in listed):
        raise ValueError(f"{what} is {patterns!r}; it must be a glob pattern over names, or a list of them")
    return listed


def _as_mapping(what: str, given: Mapping[str, _Value]) -> dict[str, _Value]:
    if not isinstance(given, Mapping) or not all(isinstance(pattern, str) for pattern in given):
        raise ValueError(f"{what} is {given!r}; it must be a mapping from glob patterns over names to a sparsity")
    return dict(given)
