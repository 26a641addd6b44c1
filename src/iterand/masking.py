"""Attach masks to any model (``prune_``), and fold them back into an ordinary module (``fold_``)."""

import copy
import logging
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, TypeVar, get_args

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from iterand import existing, freezing, mask_kinds, parameter_kinds, philox, surgery
from iterand.backend import RankBy, reference
from iterand.checks import check_fraction, shown
from iterand.distributions import EXISTING, MagnitudeScores, WeightDistribution
from iterand.errors import UnmaskedWarning
from iterand.mask_kinds import MaskKind
from iterand.parameter_kinds import Owner, list_tensors, parametrized
from iterand.parametrization import calculate_multipliers
from iterand.planning import (
    Biases,
    Norms,
    Patterns,
    PruningOptions,
    PruningPlan,
    as_list,
    as_mapping,
    check_gain,
    plan_pruning,
)
from iterand.selection import GlobalRanking, RankingChoice
from iterand.sparsity import Allocation, set_kept_
from iterand.surgery import MaskedLayer, masked_layers, require_masked_layers, unwrap

logger = logging.getLogger("iterand")

Model = TypeVar("Model", bound=nn.Module)
Preset = Literal["paper", "recommended"]
Weights = WeightDistribution | Literal["existing"]
Scores = WeightDistribution | MagnitudeScores

_LEFT_ALONE = "_iterand_left_alone"  # attribute of a masked model


def prune_(
    model: Model,
    sparsity: float | Mapping[str, float | str],
    *,
    preset: Preset = "paper",
    weights: Weights | None = None,
    gain: float | None = None,
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

    Weights of linear, convolution, embedding, recurrent and attention layers are masked, frozen ones
    (``requires_grad=False``) too; an embedding's padding row stays zero. Afterwards only the scores, and parameters
    that were left alone, take gradients. An ``UnmaskedWarning`` names those that were left alone although no argument
    names them.

    With ``weights="existing"`` the weights that the model has are masked instead, and never change. Everything that is
    not masked keeps its value and is frozen, except what ``trainable`` names.

    If an argument is refused, the model is left as it was.

    Args:
        model: Any module.
        sparsity: p, the share of weights pruned; or a mapping from patterns to it, or to ``"dense"``, that covers every
            layer. A mapping ranks each layer by itself, so it goes with neither ``ranking="global"``, ``floor`` nor
            ``allocation``; to take single layers out of a global ranking, give one sparsity and ``overrides``.
        preset: The defaults of ``weights``, ``gain``, ``ranking`` and ``norms``. ``"paper"``: ``"kaiming_uniform"``, 1,
            ``"layer"`` and ``"fixed"``. ``"recommended"``: ``"signed_constant"``, and for a model with normalization
            layers ``"global"``, and ``"shifted"`` if one of them has a shift; for a model without them a gain of
            (1 − p)^(−1/4). With a mapping as ``sparsity``, ranking and norms are as in ``"paper"``. Use it with
            ``recommended_steppers``, and not with existing weights.
        weights: D_param, the distribution of the weights: ``"kaiming_uniform"`` (between ±√(6 / fan_in)),
            ``"kaiming_normal"``, ``"signed_constant"`` (±√(2 / fan_in) with equal chances), ``"uniform"`` (between ±1)
            or one of your own; or ``"existing"``.
        gain: A factor of the random weights. Above 1 it helps a model without normalization layers, in which pruning
            makes activations smaller from layer to layer.
        scores: D_score, the distribution of the initial scores: ``"kaiming_uniform"`` if not given, and for a
            ``"gem_miner"`` mask ``"unit_uniform"``, which it needs. For existing weights ``"magnitude_rank"`` (the
            default) or ``"magnitude"``: their magnitudes, as ranks from 0 to 0.1 or as they are, so the first mask
            keeps the largest weights.
        seed: Decides weights and scores, together with the names of the tensors. Give different seeds to parts of a
            model that are pruned separately: layers of the same name would get the same weights and scores.
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
        strict: Raise an error where an ``UnmaskedWarning`` would be given.
    """
    if preset not in get_args(Preset):
        raise ValueError(f"preset is {preset!r}; it must be one of {', '.join(get_args(Preset))}")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {shown(model)}; it must be a torch.nn.Module")
    recommended = preset == "recommended"
    if weights is None:
        weights = "signed_constant" if recommended else "kaiming_uniform"
    exists = weights == EXISTING
    if exists and recommended:
        raise ValueError("preset is 'recommended', but weights is 'existing': it is for random weights; leave it out")
    has_norms = recommended and parameter_kinds.has_norms(unwrap(model))
    balanced = has_norms and not isinstance(sparsity, Mapping)
    if ranking is None:
        ranking = "global" if balanced else "layer"
    if norms is None:
        shifted = balanced and parameter_kinds.has_shifts(unwrap(model))
        norms = "keep" if exists else "shifted" if shifted else "fixed"
    if gain is None and (has_norms or not recommended):
        gain = 1.0
    if biases is None:
        biases = "keep" if exists else "zero"
    if scores is None:
        usual = "unit_uniform" if mask == "gem_miner" else "kaiming_uniform"
        scores = "magnitude_rank" if exists else usual
    if coats is None:
        coats = 2 if mask == "multicoat" else 1
    for what, choice in (("binarize", binarize), ("strict", strict)):
        if not isinstance(choice, bool):
            raise ValueError(f"{what} is {choice!r}; it must be True or False")
    options = PruningOptions(
        weights=weights,
        gain=None if gain is None else check_gain(gain),
        scores=scores,
        seed=philox.check_seed(seed),
        ranking=ranking,
        rank_by=rank_by,
        mask=mask,
        coats=mask_kinds.check_kind(mask, coats),
        binarize=binarize,
        share=as_list("share", share),
        allocation=allocation,
        floor=check_fraction("floor", floor, "the share of its weights that a layer keeps"),
        include=None if include is None else as_list("include", include),
        exclude=as_list("exclude", exclude),
        overrides={} if overrides is None else as_mapping("overrides", overrides),
        trainable=as_list("trainable", trainable),
        biases=biases,
        norms=norms,
    )
    plan = plan_pruning(model, sparsity, options)
    unmasked = _describe_left_alone(plan) if plan.left_alone else None
    if unmasked and strict:
        raise ValueError(f"strict is True, but {unmasked}")
    _apply(plan)
    if unmasked:
        warnings.warn(unmasked, UnmaskedWarning, stacklevel=2)
    return model


def _apply(plan: PruningPlan) -> None:
    """Change the model; nothing is refused here."""
    surgery.restore_roots_(plan.root)  # whose parts were folded one by one
    for group, mask, weight in zip(plan.groups, plan.masks, plan.weights):
        surgery.attach(group, mask, weight)
    if any(isinstance(ranking, GlobalRanking) for ranking in plan.rankings):
        set_kept_(plan.masks, 1.0)  # each to its final sparsity
    surgery.adapt_root_(plan.root, plan.rankings)
    freezing.freeze_(plan.zeroed_biases)
    freezing.freeze_norms_(plan.frozen_norms)
    freezing.freeze_(plan.frozen_values, fill=False)
    if any(mask.is_existing for mask in plan.masks):
        existing.note_before_(plan.root, plan.frozen_values)
    if plan.left_alone:
        setattr(plan.root, _LEFT_ALONE, _shapes(plan.left_alone))
    scales = [owner for owner in plan.frozen_norms if owner.kind == "scale"]
    if scales:
        logger.info("layer scales are set to one and frozen: %s", list_tensors(_shapes(scales)))


def _describe_left_alone(plan: PruningPlan) -> str:
    matrices = sum(one.numel() for one in plan.root.parameters() if not is_lazy(one) and one.dim() > 1)
    masked = sum(mask.score.numel() for mask in plan.masks if mask.score.dim() > 1)
    trained = any(owner.parameter.requires_grad for owner in plan.left_alone)
    effect = "kept as is" + ", and trainable" * trained
    return (
        f"{type(plan.root).__name__} has {list_tensors(_shapes(plan.left_alone))}, neither masked nor frozen: "
        f"{effect} ({100 * masked / max(matrices, 1):.1f} % of the parameters in matrices are masked); mask them too "
        "with include='*' or overrides=, or name them in exclude="
    )


def _shapes(owners: Iterable[Owner]) -> dict[str, tuple[int, ...]]:
    return {owner.name: tuple(owner.parameter.shape) for owner in owners}


def left_alone(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """The names and shapes of the parameters that ``prune_`` left alone although no argument names them."""
    shapes: dict[str, tuple[int, ...]] = getattr(unwrap(model), _LEFT_ALONE, {})
    return shapes


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
    vars(root).pop(_LEFT_ALONE, None)
    existing.forget_before_(root)
    return model


@torch.no_grad()
def masked_weights(layers: Sequence[MaskedLayer]) -> list[Tensor]:
    """The masked weights of several tensors, as a forward pass in eval mode has them."""
    multipliers = calculate_multipliers([layer.parametrization for layer in layers])
    return [masked_weight(*one) for one in zip(layers, multipliers)]


def masked_weight(layer: MaskedLayer, multipliers: Tensor) -> Tensor:
    """The masked weights of a tensor, given what its weights are multiplied by."""
    weight, state = layer.weight, layer.parametrization
    if state.is_standard:
        masked = torch.where(multipliers != 0, weight, 0.0)
    else:
        base = state.binarized(weight, multipliers) if state.settings.binarize else weight
        masked = mask_kinds.apply_multipliers(base, multipliers, weight.new_zeros(()), weight.dtype)
    return reference.match_layout(masked, weight)


def refuse_computed_further(layers: Iterable[MaskedLayer]) -> None:
    """Refuse tensors that are not their masked weights, since something else is computed from these."""
    for layer in layers:
        for module, attribute in layer.owners:
            if len(parametrized(module)[attribute]) > 1:
                raise ValueError(
                    f"{layer.name!r} has another parametrization on top of its mask; remove that one first, with del "
                    f"module.parametrizations.{attribute}[-1], since remove_parametrizations removes the mask, too"
                )


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
    surgery.restore_roots_(root)
    for layer, value in zip(layers, values):
        parameter = nn.Parameter(value, requires_grad=layer.parametrization.trained)
        layer.parametrization.iterations.clear()
        for module, attribute in layer.owners:
            surgery.detach(module, attribute, parameter)
