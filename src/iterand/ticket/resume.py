"""Go on from a ticket: resume its search on a masked model, or train an unmasked one with its zeros held."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from iterand import distributions, existing, selection
from iterand.backend import RankBy, reference
from iterand.errors import TicketError
from iterand.parametrization import MaskedParametrization
from iterand.settings import draw_weights
from iterand.sparsity import split_kept
from iterand.surgery import MaskedLayer, masked_layers, require_masked_layers, require_whole_rankings, unwrap
from iterand.ticket.draws import kept_indices

if TYPE_CHECKING:
    from iterand.ticket.read import TicketLayer

# Settings that determine the weights. The others (sparsity, ranking, …) may differ when a search is resumed.
_DRAWN_UNDER = ("name", "seed", "weight_distribution", "fan_in", "gain")


@torch.no_grad()
def resume_(model: nn.Module, layers: Mapping[str, "TicketLayer"], state: Mapping[str, Tensor]) -> None:
    """Resume the search of a ticket on a masked model; see ``Ticket.resume_``."""
    root = unwrap(model)
    masked = require_masked_layers(root)
    require_whole_rankings(root, masked)
    _check_settings(masked, layers)
    masks = {name: layers[name].mask for name in masked}
    kept = _check_counts(masked, layers, masks)
    draws = _all_draws(masked, layers, masks)  # may raise, before any change
    for name, layer in masked.items():
        parametrization = layer.parametrization
        source = layers[name].header.settings.redraw_from
        parametrization.settings = replace(parametrization.settings, redraw_from=source)
        parametrization.set_history_(list(layers[name].header.history.runs))
        parametrization.hold_draws_up_to(max(parametrization.rounds, int(draws[name].max())))
        parametrization.draw.copy_(draws[name])
        if not parametrization.is_existing:
            layer.weight.copy_(parametrization.weight())
    for group in _ranked_together(masked):
        _rank_kept_first_([(masked[name].parametrization, masks[name]) for name in group])
    for name, layer in masked.items():
        layer.parametrization.kept.fill_(kept[name])
    for name, tensor in root.state_dict().items():
        if name in state:
            tensor.copy_(state[name])


def _check_settings(masked: Mapping[str, MaskedLayer], layers: Mapping[str, "TicketLayer"]) -> None:
    for name in masked.keys() ^ layers.keys():
        raise TicketError(f"{name!r} is masked in only one of model and ticket; prune_ the model as it was")
    for name, layer in masked.items():
        header, settings = layers[name].header, layer.parametrization.settings
        if tuple(layer.weight.shape) != header.shape:
            raise TicketError(
                f"{name!r} has shape {list(header.shape)} in the ticket and {list(layer.weight.shape)} in the model"
            )
        if not (settings.is_standard and header.settings.is_standard):
            raise TicketError(
                f"{name!r} has a mask that is not binary, or binarized weights, and a ticket holds no scores; resume "
                "from a checkpoint, which has them"
            )
        if settings.sparsity < header.settings.sparsity:
            raise TicketError(
                f"{name!r} has sparsity {header.settings.sparsity:g} in the ticket and {settings.sparsity:g} in the "
                "model; prune_ it with the same or a higher one"
            )
        if header.digest and settings.weight_distribution == distributions.EXISTING:
            if existing.digest(layer.weight) != header.digest:
                raise TicketError(f"the weights of {name!r} are not those that it masks; load the weights of its base")
            continue
        for field in _DRAWN_UNDER:
            ours, theirs = getattr(settings, field), getattr(header.settings, field)
            if field == "name" and settings.shared:
                ours = settings.shared
            if ours != theirs:
                raise TicketError(
                    f"{name!r} has {field} {theirs!r} in the ticket and {ours!r} in the model; prune_ it as it was"
                )


def _check_counts(
    masked: Mapping[str, MaskedLayer], layers: Mapping[str, "TicketLayer"], masks: Mapping[str, Tensor]
) -> dict[str, int]:
    """How many weights each layer counts as kept; a model that keeps more than the ticket is refused.

    Pruned weights would come back there. A ticket may keep more than its sparsity says, if a schedule was raising it.
    Then the model does, too, unless it has a higher sparsity.
    """
    # A ticket prunes the padding row of an embedding, of which the model keeps as much as its scores say.
    kept = {name: int(mask.sum()) + masked[name].parametrization.padding_size for name, mask in masks.items()}
    found = dict[str, int]()
    for group in _ranked_together(masked):
        ours = [masked[name].parametrization for name in group]
        sizes, sparsity = [mask.score.numel() for mask in ours], ours[0].settings.sparsity
        everything = f"all that is ranked together with {group[0]!r}" if len(group) > 1 else repr(group[0])
        counts = [(everything, sum(kept[name] for name in group), selection.kept_count(sum(sizes), sparsity))]
        counts += [(repr(name), kept[name], mask.floor_count) for name, mask in zip(group, ours)]
        theirs = layers[group[0]].header.settings.ranking
        for what, held, wanted in counts:
            if wanted > held:
                hint = "as it was" if theirs == ours[0].settings.ranking else f"with ranking={theirs!r}, as it was"
                raise TicketError(
                    f"it keeps {held} weights of {what}, and the model {wanted}, so that pruned ones would come back; "
                    f"prune_ it {hint}"
                )
        is_sparser = any(layers[name].header.settings.sparsity < sparsity for name in group)
        keeps_more = sum(int(masks[name].sum()) for name in group) > selection.kept_count(sum(sizes), sparsity)
        if keeps_more and not is_sparser:
            found |= {name: kept[name] for name in group}
        else:
            found |= zip(group, split_kept(sizes, sparsity))
    return found


def _ranked_together(masked: Mapping[str, MaskedLayer]) -> list[list[str]]:
    """The names of the layers, grouped by which are ranked together."""
    groups: dict[MaskedParametrization, list[str]] = {}
    for name, layer in masked.items():
        first = layer.parametrization.ranking.rivals(layer.parametrization)[0]
        groups.setdefault(first, []).append(name)
    return list(groups.values())


def _all_draws(
    masked: Mapping[str, MaskedLayer], layers: Mapping[str, "TicketLayer"], masks: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """A draw for each weight. Layers with the same weights have the draws that any of them keeps."""
    found, shared = {}, dict[str, Tensor]()
    for name, mask in masks.items():
        draw = torch.zeros(mask.numel(), dtype=torch.int32, device="cpu")
        draw[kept_indices(mask)] = _find_draws(layers[name], mask)
        found[name] = draw.view(mask.shape)
        if first := masked[name].parametrization.settings.shared:
            shared[first] = torch.maximum(shared.get(first, found[name]), found[name])
    return {name: shared.get(masked[name].parametrization.settings.shared, draw) for name, draw in found.items()}


def _find_draws(layer: "TicketLayer", mask: Tensor) -> Tensor:
    """A draw for each kept weight that reproduces the weight."""
    known = layer.draws(mask)
    if known is not None:
        return known.to(torch.int32)
    # The ticket stores levels. The first draw with the same level reproduces the weight.
    index, values, settings = kept_indices(mask), layer.values(mask), layer.header.settings
    distribution = distributions.get_distribution(settings.weight_distribution)
    draw = torch.zeros(len(index), dtype=torch.int32, device="cpu")
    pending = torch.arange(len(index), device="cpu")
    for number in range(layer.header.rounds + 1):
        numbers = torch.full_like(pending, number)
        given = draw_weights(settings, distribution, index[pending], numbers, layer.header.size)
        draw[pending] = number
        pending = pending[given != values[pending]]
    if len(pending):
        raise TicketError(f"{layer.header.name!r} holds weights that none of its {layer.header.rounds} rounds gave")
    return draw


def _rank_kept_first_(group: list[tuple[MaskedParametrization, Tensor]]) -> None:
    """Permute the scores of layers that are ranked together, so that kept weights have the highest.

    A ticket contains no scores. The initial scores keep their relative order among kept and among pruned weights. Those
    of a padding row come next to the kept ones, since the row is zero whether it is kept or not.
    """
    ranked = torch.cat([mask.ranked().reshape(-1).to("cpu") for mask, _ in group])
    scores = torch.cat([mask.score.detach().reshape(-1).to("cpu") for mask, _ in group])
    padding = torch.cat([(~mask.clear_padding_(torch.ones_like(keeps))).reshape(-1) for mask, keeps in group])
    kept = 2 * torch.cat([keeps.reshape(-1) for _, keeps in group]).int() + padding
    best_first = ranked.argsort(descending=True, stable=True)
    kept_first = best_first[kept[best_first].argsort(descending=True, stable=True)]
    scores[kept_first] = scores[best_first]
    for least in (1, 2):  # padding from pruned weights, then kept ones from both
        _separate_(scores, kept >= least, group[0][0].rank_by)
    for (mask, _), part in zip(group, torch.split(scores, [mask.score.numel() for mask, _ in group])):
        mask.score.copy_(part.view(mask.score.shape))


def _separate_(scores: Tensor, kept: Tensor, rank_by: RankBy) -> None:
    """Raise kept scores that equal the highest pruned one, since among equal scores a lower index would win."""
    ranked = reference.ranking_key(scores, rank_by)
    if kept.all():
        return
    tied = kept & (ranked == ranked[~kept].max())
    above = torch.nextafter(ranked[tied], torch.full_like(ranked[tied], math.inf))
    raised = torch.where(ranked[tied] == 0, torch.finfo(scores.dtype).tiny, above)  # and no denormal
    scores[tied] = torch.copysign(raised, scores[tied]) if rank_by == "magnitude" else raised


# Train an unmasked model further.


def hold_zeros_(model: nn.Module, layers: Mapping[str, "TicketLayer"]) -> list[RemovableHandle]:
    """Keep pruned weights of an unmasked model at zero during training; see ``Ticket.hold_zeros_``."""
    root = unwrap(model)
    if masked_layers(root):
        raise ValueError("the model is masked; hold_zeros_ is for ordinary ones, which load_ticket fills")
    parameters, kind = dict(root.named_parameters()), type(root).__name__
    pruned = {}
    for name, layer in layers.items():
        if name not in parameters:
            raise TicketError(f"it holds {name!r}, which {kind} does not have")
        pruned[name] = ~layer.mask.to(parameters[name].device)
        if parameters[name].shape != pruned[name].shape or parameters[name].detach()[pruned[name]].any():
            raise TicketError(f"{name!r} of {kind} is not zero where it prunes; fill it with load_ticket first")
    return [_zero_gradient(parameters[name], where) for name, where in pruned.items()]


def _zero_gradient(parameter: nn.Parameter, pruned: Tensor) -> RemovableHandle:
    def zeroed(gradient: Tensor) -> Tensor:
        if not gradient.is_sparse:
            return gradient.masked_fill(pruned, 0)
        rows = gradient.coalesce()  # of an embedding with sparse=True
        values = rows.values().masked_fill(pruned[rows.indices()[0]], 0)
        return torch.sparse_coo_tensor(rows.indices(), values, rows.shape, check_invariants=False, is_coalesced=True)

    handle: RemovableHandle = parameter.register_hook(zeroed)  # type: ignore[no-untyped-call]
    return handle
