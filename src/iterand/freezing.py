"""Biases and norms of a pruned model: fixed while it is pruned, free again once it is folded.

Biases are zero; batch norm is non-affine, "which fixes its all learnable multipliers to 1 and all learnable bias terms
to 0" (Appendix B). Where what it adds is masked or left alone, it keeps a multiplier of one, which torch's backward
pass on a GPU wants then. A norm without statistics keeps both, fixed: nothing else of it would say in which precision
and on which device they are to come back.
"""

from collections import Counter
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from iterand.targets import Owner

# What freezing did to a module is noted on it, so that a copy of the model knows too.
_FROZEN = "_iterand_frozen"
_DROPPED = "_iterand_dropped"


def freeze_biases_(places: list[Owner]) -> None:
    """Set these parameters to zero and take them from training."""
    _freeze_(places, lambda owner: 0.0)


def freeze_norms_(places: list[Owner]) -> None:
    """Take the affine part out of norms with statistics; fix that of others, and what is left, at one and zero."""
    both = Counter(id(owner.module) for owner in places)
    left = []
    for owner in places:
        module = owner.module
        if not isinstance(module, _NormBase) or module.running_mean is None or both[id(module)] < 2:
            left.append(owner)
        else:
            module.affine = False
            module.register_parameter(owner.attribute, None)
            noted = getattr(module, _DROPPED, {})
            setattr(module, _DROPPED, {**noted, owner.attribute: owner.parameter.requires_grad})
    _freeze_(left, _identity)


def _identity(owner: Owner) -> float:
    return 1.0 if owner.attribute == "weight" else 0.0


def _freeze_(places: list[Owner], value: Callable[[Owner], float]) -> None:
    trained = {id(owner.parameter): owner.parameter.requires_grad for owner in places}
    for owner in places:
        noted = getattr(owner.module, _FROZEN, {})
        setattr(owner.module, _FROZEN, {**noted, owner.attribute: trained[id(owner.parameter)]})
        with torch.no_grad():
            owner.parameter.fill_(value(owner))
        owner.parameter.requires_grad_(False)
        owner.parameter.grad = None


def is_frozen(module: nn.Module, attribute: str) -> bool:
    """Whether freezing has fixed a parameter of a module."""
    return attribute in getattr(module, _FROZEN, {})


def dropped(module: nn.Module) -> dict[str, float]:
    """The affine parameters that freezing took out of a module, and the values that folding gives them."""
    return {attribute: 1.0 if attribute == "weight" else 0.0 for attribute in getattr(module, _DROPPED, ())}


def thaw_(model: nn.Module) -> None:
    """Undo the freezing; the values stay zero and one."""
    for module in model.modules():
        for attribute, trained in getattr(module, _FROZEN, {}).items():
            getattr(module, attribute).requires_grad_(trained)
        if isinstance(module, _NormBase) and hasattr(module, _DROPPED):
            module.affine = True
            for attribute, value in dropped(module).items():
                trained = getattr(module, _DROPPED)[attribute]
                filled = torch.full_like(cast(Tensor, module.running_mean), value)
                module.register_parameter(attribute, nn.Parameter(filled, requires_grad=trained))
        for note in (_FROZEN, _DROPPED):
            if hasattr(module, note):
                delattr(module, note)
