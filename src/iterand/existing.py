"""Masks over weights that a model has already: the scores they start with, and what the model was before.

The weights never change. So a ticket holds a mask and digests of the weights, and only the tensors that were trained.
"""

import hashlib
import sys
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from iterand.distributions import MagnitudeScores
from iterand.parameter_kinds import Owner
from iterand.parametrization import MaskedParametrization
from iterand.selection import GlobalRanking, Ranking

_BEFORE = "_iterand_before"  # attribute of a masked model
_SPREAD = 0.1  # of scores that are ranks: a hundred steps of AdamW at a learning rate of 0.001


def magnitude_scores(weights: Sequence[Tensor], start: MagnitudeScores) -> list[Tensor]:
    """Scores of weights that compete with each other: the first mask keeps the largest magnitudes.

    ``magnitude``: s = |θ|. ``magnitude_rank``: the rank of |θ|, equally spaced up to 0.1, so that one learning rate
    suits every layer and every model.
    """
    magnitudes = [weight.detach().abs().to(torch.float32, memory_format=torch.contiguous_format) for weight in weights]
    if start == "magnitude":
        return magnitudes
    flat = torch.cat([magnitude.view(-1) for magnitude in magnitudes])
    order = torch.sort(flat, descending=True, stable=True).indices
    spaced = torch.arange(len(flat), 0, -1, dtype=torch.float64, device=flat.device) * (_SPREAD / max(len(flat), 1))
    ranks = torch.empty_like(flat).index_copy_(0, order, spaced.float())
    parts = torch.split(ranks, [magnitude.numel() for magnitude in magnitudes])
    return [part.clone().view(magnitude.shape) for part, magnitude in zip(parts, magnitudes)]


def initial_scores(
    weights: Mapping[str, Tensor], rankings: Mapping[str, Ranking[MaskedParametrization]], start: MagnitudeScores
) -> dict[str, Tensor]:
    """The scores that each of these weights starts with; layers of a global ranking are ranked as one."""
    together = [name for name, ranking in rankings.items() if isinstance(ranking, GlobalRanking)]
    found = {name: magnitude_scores([weights[name]], start)[0] for name in weights if name not in together}
    if together:
        found |= zip(together, magnitude_scores([weights[name] for name in together], start))
    return found


def refuse_nan(owners: Iterable[Owner]) -> None:
    """Refuse weights that no score can be computed from."""
    for owner in owners:
        if not owner.parameter.is_meta and owner.parameter.isnan().any():
            raise ValueError(f"{owner.name!r} contains NaN, so its weights cannot be ranked; exclude it, or repair it")


def digest(tensor: Tensor) -> str:
    """The first 16 bytes of the SHA-256 of the elements, little-endian and in row-major order, in hexadecimal."""
    elements = tensor.detach().to("cpu").contiguous().reshape(-1).view(torch.uint8).numpy()
    if sys.byteorder == "big" and tensor.dtype.itemsize > 1:
        size = tensor.dtype.itemsize // (2 if tensor.dtype.is_complex else 1)
        elements = elements.reshape(-1, size)[:, ::-1].copy()
    return hashlib.sha256(elements.data).hexdigest()[:32]


def note_before_(root: nn.Module, frozen: Iterable[Owner]) -> None:
    """Keep the names of what is frozen, and the digests of what training may change: parameters and buffers."""
    changing = {name: tensor for name, tensor in root.state_dict(keep_vars=True).items() if _may_change(name, tensor)}
    noted: dict[str, str | None] = dict.fromkeys(owner.name for owner in frozen)
    setattr(root, _BEFORE, noted | {name: digest(tensor) for name, tensor in changing.items()})


def _may_change(name: str, tensor: object) -> bool:
    if not isinstance(tensor, Tensor) or tensor.is_meta or ".parametrizations." in f".{name}":
        return False
    if tensor.layout is not torch.strided:  # a ticket holds none
        return False
    return tensor.requires_grad or not isinstance(tensor, nn.Parameter)


def unchanged(root: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """The digests of those tensors, without a mask, that are what they were when the model was pruned."""
    noted: dict[str, str | None] = {}
    for path, module in root.named_modules():
        before: dict[str, str | None] = vars(module).get(_BEFORE, {})
        noted |= {f"{path}.{name}" if path else name: kept for name, kept in before.items()}
    trained = {name for name, one in root.named_parameters(remove_duplicate=False) if one.requires_grad}
    found = {}
    for name in noted.keys() & tensors.keys():
        now = digest(tensors[name])
        if noted[name] == now or (noted[name] is None and name not in trained):
            found[name] = now
    return found


def forget_before_(root: nn.Module) -> None:
    """Undo ``note_before_``."""
    for module in root.modules():
        vars(module).pop(_BEFORE, None)
