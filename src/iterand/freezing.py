"""Biases and norms of a pruned model: fixed while it is pruned, free again once it is folded.

Biases are zero; batch norm is non-affine, "which fixes its all learnable multipliers to 1 and all learnable bias terms
to 0" (Appendix B). Where what it adds is masked or left alone, it keeps a multiplier of one, which torch's backward
pass on a GPU wants then. A norm without statistics keeps both, fixed: nothing else of it would say in which precision
and on which device they are to come back.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from iterand.targets import Owner

# What freezing did to a module is noted on it, so that a copy of the model or a part of it knows too.
_FROZEN = "_iterand_frozen"


class _Affine(int):
    """``affine`` of a norm that was frozen: whether it has an affine part now, and what comes back.

    A norm may be made anew while it is frozen: ``SyncBatchNorm.convert_sync_batchnorm`` and others like it hand on the
    arguments of the old one, of which this is one, and none of the attributes that they do not know.
    """

    trained: dict[str, bool]
    """Whether each parameter that is frozen or dropped took gradients."""
    before: bool
    """What ``affine`` was."""

    def __repr__(self) -> str:
        return repr(bool(self))


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
            module.register_parameter(owner.attribute, None)
            _note(module, owner.attribute, owner.parameter.requires_grad, affine=False)
    _freeze_(left, lambda owner: _identity(owner.attribute))


def _identity(attribute: str) -> float:
    return 1.0 if attribute == "weight" else 0.0


def _freeze_(places: list[Owner], value: Callable[[Owner], float]) -> None:
    trained = {id(owner.parameter): owner.parameter.requires_grad for owner in places}
    for owner in places:
        _note(owner.module, owner.attribute, trained[id(owner.parameter)], affine=True)
        with torch.no_grad():
            owner.parameter.fill_(value(owner))
        owner.parameter.requires_grad_(False)
        owner.parameter.grad = None


def _note(module: nn.Module, attribute: str, trained: bool, *, affine: bool) -> None:
    noted = {**_noted(module), attribute: trained}
    if isinstance(module, _NormBase):
        earlier, note = _affine(module), _Affine(affine)
        note.trained, note.before = noted, earlier.before if earlier is not None else module.affine
        module.affine = cast(bool, note)
    else:
        setattr(module, _FROZEN, noted)


def _affine(module: nn.Module) -> _Affine | None:
    affine = getattr(module, "affine", None)
    return affine if isinstance(affine, _Affine) else None


def _noted(module: nn.Module) -> dict[str, bool]:
    affine = _affine(module)
    noted: dict[str, bool] = getattr(module, _FROZEN, {}) if affine is None else affine.trained
    return noted


def is_frozen(module: nn.Module, attribute: str) -> bool:
    """Whether freezing has fixed a parameter of a module."""
    return attribute in _noted(module)


def dropped(module: nn.Module) -> dict[str, float]:
    """The affine parameters that freezing took out of a module, and the values that folding gives them."""
    affine = _affine(module)
    if affine is None or affine:
        return {}
    return {attribute: _identity(attribute) for attribute in affine.trained}


def thaw_(model: nn.Module) -> None:
    """Undo the freezing; the values stay zero and one."""
    for module in model.modules():
        for attribute, trained in _noted(module).items():
            if attribute in dropped(module):
                filled = torch.full_like(cast(Tensor, module.running_mean), _identity(attribute))
                module.register_parameter(attribute, nn.Parameter(filled, requires_grad=trained))
            else:
                for parameter in _held(module, attribute):
                    parameter.requires_grad_(trained)
        affine = _affine(module)
        if affine is not None:
            module.affine = cast(Any, affine.before)
        elif hasattr(module, _FROZEN):
            delattr(module, _FROZEN)


def _held(module: nn.Module, attribute: str) -> list[nn.Parameter]:
    """A parameter, or those that it is computed from since it was frozen."""
    if parametrize.is_parametrized(module, attribute):
        return list(cast(nn.ModuleDict, module.parametrizations)[attribute].parameters(recurse=False))
    return [cast(nn.Parameter, getattr(module, attribute))]
