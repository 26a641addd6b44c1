"""Attach masks to any model (``prune_``), look at them, and fold them back into an ordinary module (``fold_``)."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from iterand import distributions, philox, selection, surgery
from iterand import sparsity as sparsities
from iterand.checks import check_fraction
from iterand.parametrization import (
    GlobalRanking,
    LayerRanking,
    MaskedParametrization,
    Ranking,
    Settings,
    calculate_masks,
    match_layout,
)
from iterand.sparsity import mapped_sparsities, own_sparsities, refuse_beside_mapping, refuse_empty
from iterand.surgery import Owner

Model = TypeVar("Model", bound=nn.Module)
_Value = TypeVar("_Value")
Patterns = Sequence[str] | str
RANKINGS = ("layer", "global")
NORMS = ("fixed", "shifted", "keep")

_SHIFT_FAN_IN = 8
"""What normalised activations are shifted by is drawn as if so many weights met there: ±0.5 of a deviation for SC."""


def prune_(
    model: Model,
    sparsity: float | Mapping[str, float],
    *,
    weights: str = "kaiming_uniform",
    scores: str = "kaiming_uniform",
    seed: int = 0,
    ranking: str = "layer",
    rank_by: str = "score",
    allocation: str = "uniform",
    floor: float = 0.0,
    include: Patterns | None = None,
    exclude: Patterns = (),
    overrides: Mapping[str, float | str] | None = None,
    biases: str = "zero",
    norms: str = "fixed",
) -> Model:
    """Fill a model with random weights and mask them by trainable scores (Algorithm 1, line 1), in place.

    Weights of linear, convolution, embedding, recurrent and attention layers are masked; afterwards only the scores,
    and what was left alone, take gradients. A model that is refused is left as it was.

    Args:
        model: Any module.
        sparsity: p, the share of weights pruned; or a mapping from patterns to it that covers every layer. A mapping
            ranks each layer by itself, so it goes with neither ``ranking="global"``, ``floor`` nor ``allocation``; to
            take single layers out of a global ranking, give one sparsity and ``overrides``.
        weights: D_param, the distribution of the weights.
        scores: D_score, the distribution of the initial scores.
        seed: With a tensor's qualified name and an index, all that a weight depends on; parts of a model that are
            pruned one by one have names of their own, so give them different seeds.
        ranking: ``"layer"``: scores compete within their tensor; ``"global"``: over the whole network.
        rank_by: ``"score"``: the raw score; ``"magnitude"``: its absolute value.
        allocation: ``"uniform"`` or ``"erk"``: how the sparsity is spread over layers that are ranked one by one.
        floor: With global ranking, the share of its weights that every layer keeps in any case.
        include: Glob patterns over qualified names of parameters or their modules: mask only these. Bare parameters
            are masked only if a pattern, here or in ``overrides``, names them.
        exclude: Glob patterns: leave these alone altogether. An override must not name what is left alone.
        overrides: Glob pattern → an own sparsity, or ``"dense"``: random weights that are all kept. The last match
            counts; such a layer is ranked by itself.
        biases: ``"zero"``: those of masked layers are set to zero and frozen; ``"keep"``: left as they are.
        norms: ``"fixed"``: batch norm made non-affine, the affine part of other norms frozen at one and zero;
            ``"shifted"``: the same, but what a norm adds is random and masked like a weight, so convert norms to
            ``SyncBatchNorm`` first; ``"keep"``: left as they are.
    """
    for name, value, known in (
        ("ranking", ranking, RANKINGS),
        ("rank_by", rank_by, selection.RANK_BY),
        ("allocation", allocation, sparsities.ALLOCATIONS),
        ("biases", biases, ("zero", "keep")),
        ("norms", norms, NORMS),
    ):
        if value not in known:
            raise ValueError(f"{name} is {value!r}; it must be one of {', '.join(known)}")
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {model!r}; it must be a torch.nn.Module")
    if isinstance(unwrap(model), (torch.jit.ScriptModule, torch.fx.GraphModule)):
        raise ValueError("model was traced or scripted, so it is made from another module; prune_ that one")
    seed = philox.check_seed(seed)
    if isinstance(sparsity, Mapping):
        refuse_beside_mapping(ranking, allocation, floor)
        sparsity = _as_mapping("sparsity", sparsity)
    else:
        sparsity = selection.check_sparsity(sparsity)
    if allocation != "uniform" and ranking == "global":
        raise ValueError(f"allocation is {allocation!r}, which needs ranking='layer'; set that, or leave it out")
    floor = check_fraction("floor", floor, "the share of its weights that a layer keeps")
    if floor and ranking != "global":
        raise ValueError(f"floor is {floor!r}, which only counts with ranking='global'; set that, or leave floor out")
    for distribution in (weights, scores):
        distributions.get_distribution(distribution)
    root = unwrap(model)
    if root is not model and any(isinstance(part, nn.parallel.DistributedDataParallel) for part in model.modules()):
        raise ValueError("the model is wrapped in DistributedDataParallel already; prune_ it first, then wrap it")
    for name in masked_layers(root):
        raise ValueError(f"{name!r} is masked already; fold_ the model first")

    overrides = {} if overrides is None else _as_mapping("overrides", overrides)
    left_out = _as_list("exclude", exclude)
    usual = ("weight", "shift") if norms == "shifted" else ("weight",)
    if norms == "shifted" and not any(owner.kind == "shift" for owner in surgery.owners(root)):
        raise ValueError(f"norms is 'shifted', but {type(root).__name__} has no norm that adds anything; leave it out")
    only = None if include is None else _as_list("include", include)
    chosen = surgery.choose(root, only, left_out, list(overrides), usual)
    alone = own_sparsities(chosen, overrides, "overrides")
    free = [name for name in chosen if name not in alone]
    if isinstance(sparsity, Mapping):
        alone |= mapped_sparsities({name: chosen[name] for name in free}, sparsity)
    elif ranking == "layer":
        shapes = {name: chosen[name][0].parameter.shape for name in free}
        alone |= sparsities.allocate(shapes, sparsity, allocation)
    by_layer, together = LayerRanking(), GlobalRanking()
    plan: list[tuple[list[Owner], Settings, Ranking]] = []
    for name, group in chosen.items():
        settings = Settings(
            name=name,
            seed=seed,
            weight_distribution=weights,
            score_distribution=scores,
            fan_in=_fan_in(group[0]),
            sparsity=alone[name] if name in alone else cast(float, sparsity),
            ranking="layer" if name in alone else "global",
            rank_by=rank_by,
            floor=0.0 if name in alone else floor,
        )
        plan.append((group, settings, by_layer if name in alone else together))
    refuse_empty(plan, together)
    surgery.check_classes([root, *(owner.module for group in chosen.values() for owner in group)])
    masks = [MaskedParametrization(group[0].parameter, settings, rank) for group, settings, rank in plan]
    drawn = [mask.weight() for mask in masks]

    # Nothing was changed so far; from here on nothing is refused.
    for module in root.modules():
        surgery.stop_caching_cuts_(module)  # whose parts were folded one by one
    masked = {id(owner.module) for group in chosen.values() for owner in group}
    places = [place for place in surgery.owners(root) if not any(map(place.matches, left_out))]
    for (group, _, _), mask, weight in zip(plan, masks, drawn):
        surgery.attach(group, mask, weight)
    for rank in (by_layer, together):
        rank.members = [mask for mask in masks if mask.ranking is rank]
    if together.members:
        set_sparsity_(root, 1.0)
    surgery.cache_cuts_(root, [rank for rank in (by_layer, together) if rank.members])
    if biases == "zero":
        surgery.freeze_biases_([place for place in places if place.kind == "bias" and id(place.module) in masked])
    if norms != "keep":
        drawn_from = {id(owner.parameter) for group in chosen.values() for owner in group}
        of_norms = [place for place in places if place.kind in ("norm", "shift")]
        surgery.freeze_norms_([place for place in of_norms if id(place.parameter) not in drawn_from])
    return model


def _fan_in(owner: Owner) -> int:
    return _SHIFT_FAN_IN if owner.kind == "shift" else distributions.fan_in(owner.module, owner.parameter)


@dataclass(frozen=True)
class MaskedLayer:
    """One masked tensor of a model, with everything there is to know about it."""

    name: str
    """Its qualified name in this model."""
    parametrization: MaskedParametrization
    weight: Tensor
    """θ, the random weights, kept and pruned."""
    owners: tuple[tuple[nn.Module, str], ...]
    """The modules that hold it, and under which attribute; more than one if it is tied."""

    @property
    def mask(self) -> Tensor:
        """m: true where the weight is kept."""
        return self.parametrization.mask()

    @property
    def score(self) -> nn.Parameter:
        """s."""
        return self.parametrization.score

    @property
    def draw(self) -> Tensor:
        """The round in which each weight was drawn last; 0 for the initial weights."""
        return self.parametrization.draw


def masked_layers(model: nn.Module) -> dict[str, MaskedLayer]:
    """The masked tensors of a model by qualified name; a tied tensor once."""
    found: dict[MaskedParametrization, MaskedLayer] = {}
    for path, module in unwrap(model).named_modules():
        if "parametrizations" not in module._modules or not parametrize.is_parametrized(module):
            continue  # the first alone would do, but that it is private; the second takes its time to say no
        for attribute, parametrizations in cast(nn.ModuleDict, module.parametrizations).items():
            mask = cast(nn.ModuleList, parametrizations)[0]
            if not isinstance(mask, MaskedParametrization):
                continue
            name = f"{path}.{attribute}" if path else attribute
            first = found.get(mask)
            owners = (*(first.owners if first else ()), (module, attribute))
            weight = cast(Tensor, parametrizations.original)
            found[mask] = MaskedLayer(first.name if first else name, mask, weight, owners)
    return {layer.name: layer for layer in found.values()}


def require_masked_layers(model: nn.Module) -> dict[str, MaskedLayer]:
    """The masked tensors of a model that must have some."""
    layers = masked_layers(model)
    if not layers:
        raise ValueError(f"{type(unwrap(model)).__name__} has no masked layer; call prune_ on it first")
    return layers


def require_whole_rankings(model: nn.Module, layers: Mapping[str, MaskedLayer]) -> None:
    """Refuse layers that are ranked together with others that are not among them, since they share one count."""
    masks = {layer.parametrization for layer in layers.values()}
    for layer in layers.values():
        for rival in layer.parametrization.ranking.rivals(layer.parametrization):
            if rival not in masks:
                raise ValueError(
                    f"{layer.name!r} is ranked together with {rival.settings.name!r}, which is not masked in "
                    f"{type(unwrap(model)).__name__}; give the whole model that was pruned"
                )


def scores(model: nn.Module) -> list[nn.Parameter]:
    """The scores s of all masked layers: what an optimizer trains instead of weights."""
    return [layer.score for layer in require_masked_layers(model).values()]


def set_sparsity_(model: nn.Module, sparsity: float) -> None:
    """Prune this share from now on, but in no layer more than its final sparsity."""
    layers = require_masked_layers(model)
    require_whole_rankings(model, layers)
    set_kept_([layer.parametrization for layer in layers.values()], sparsity)


def set_kept_(masks: Sequence[MaskedParametrization], sparsity: float) -> None:
    """The same for all masks of a model, with every member of their rankings; the host does not wait."""
    counts: dict[MaskedParametrization, int] = {}
    for mask in masks:
        if mask not in counts:
            members = mask.ranking.members if isinstance(mask.ranking, GlobalRanking) else [mask]
            final = min(sparsity, mask.settings.sparsity)
            counts |= zip(members, sparsities.split_kept([member.score.numel() for member in members], final))
    kept = [mask.kept for mask in masks]
    values = torch.tensor([counts[mask] for mask in masks], pin_memory=kept[0].is_cuda)
    torch._foreach_copy_(kept, list(values.to(kept[0].device, non_blocking=True).unbind()))


@torch.no_grad()
def fold_(model: Model) -> Model:
    """Replace every masked tensor by its masked weights, in place: an ordinary module again.

    What took gradients before ``prune_`` takes them again, and tensors keep their memory format.
    """
    root = unwrap(model)
    layers = list(require_masked_layers(root).values())
    refuse_computed_further(layers)
    masks = calculate_masks([layer.parametrization for layer in layers])
    folded = [match_layout(torch.where(mask, layer.weight, 0.0), layer.weight) for layer, mask in zip(layers, masks)]
    _replace(root, layers, folded)
    surgery.thaw_(root)
    return model


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
    """Put ordinary parameters in the place of masked tensors."""
    for module in root.modules():
        surgery.stop_caching_cuts_(module)
    for layer, value in zip(layers, values):
        parameter = nn.Parameter(value, requires_grad=layer.parametrization.trained)
        for module, attribute in layer.owners:
            surgery.detach(module, attribute, parameter)


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and data-parallel wrappers."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = cast(nn.Module, model._orig_mod)
        else:
            return model


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
