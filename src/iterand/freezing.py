"""Freeze parameters that are not masked: biases at zero, norms and layer scales at one, or all at their values."""

from collections import Counter
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from iterand.parameter_kinds import Owner, parametrized

# Stored on the module itself, so that copies of the model and parts of it have it too.
_FROZEN = "_iterand_frozen"


class _Affine(int):
    """``affine`` of a frozen norm: a bool that also records how to undo the freezing.

    ``SyncBatchNorm.convert_sync_batchnorm`` and similar functions replace a norm by a new one. They copy constructor
    arguments such as ``affine``, but no other attributes.
    """

    trained: dict[str, bool]
    """Parameter that is frozen or removed → its ``requires_grad`` before."""
    before: bool
    """``affine`` before freezing."""

    def __repr__(self) -> str:
        return repr(bool(self))


def freeze_norms_(affine: list[Owner]) -> None:
    """Fix norms and layer scales at their neutral values: a factor at one, what is added at zero.

    Norms with running statistics get ``affine=False`` instead. A norm of which only one of the two is frozen keeps both
    as parameters.
    """
    both = Counter(id(owner.module) for owner in affine)
    left = []
    for owner in affine:
        module = owner.module
        if not isinstance(module, _NormBase) or module.running_mean is None or both[id(module)] < 2:
            left.append(owner)
        else:
            module.register_parameter(owner.attribute, None)
            _record(module, owner.attribute, owner.parameter.requires_grad, affine=False)
    freeze_(left)


def thaw_(model: nn.Module) -> None:
    """Undo the freezing. The values stay as they are."""
    for module in model.modules():
        for attribute, trained in _recorded(module).items():
            if attribute in dropped(module):
                filled = torch.full_like(cast(Tensor, module.running_mean), _identity(attribute))
                module.register_parameter(attribute, nn.Parameter(filled, requires_grad=trained))
            else:
                for parameter in _parameters_of(module, attribute):
                    parameter.requires_grad_(trained)
        affine = _affine(module)
        if affine is not None:
            module.affine = cast(Any, affine.before)
        else:
            vars(module).pop(_FROZEN, None)


def is_frozen(module: nn.Module, attribute: str) -> bool:
    """Whether a parameter of a module is frozen, and was not made trainable again."""
    if attribute not in _recorded(module):
        return False
    return attribute in dropped(module) or not any(one.requires_grad for one in _parameters_of(module, attribute))


def dropped(module: nn.Module) -> dict[str, float]:
    """The affine parameters that freezing removed from a module, with the values that ``thaw_`` restores."""
    affine = _affine(module)
    if affine is None or affine:
        return {}
    return {attribute: _identity(attribute) for attribute in affine.trained}


def _identity(attribute: str) -> float:
    """The value of an affine parameter that does not change its input."""
    return 1.0 if attribute == "weight" else 0.0


def freeze_(frozen: list[Owner], *, fill: bool = True) -> None:
    """Stop training these parameters, at their neutral values; without ``fill`` they keep theirs."""
    trained = {id(owner.parameter): owner.parameter.requires_grad for owner in frozen}
    for owner in frozen:
        _record(owner.module, owner.attribute, trained[id(owner.parameter)], affine=True)
        if fill:
            with torch.no_grad():
                owner.parameter.fill_(owner.neutral)
        owner.parameter.requires_grad_(False)
        owner.parameter.grad = None


def _record(module: nn.Module, attribute: str, trained: bool, *, affine: bool) -> None:
    """Store on the module that a parameter is frozen, and its ``requires_grad`` before."""
    recorded = {**_recorded(module), attribute: trained}
    if isinstance(module, _NormBase):
        earlier, note = _affine(module), _Affine(affine)
        note.trained, note.before = recorded, earlier.before if earlier is not None else module.affine
        module.affine = cast(bool, note)
    else:
        setattr(module, _FROZEN, recorded)


def _affine(module: nn.Module) -> _Affine | None:
    affine = vars(module).get("affine")  # not getattr, which a wrapper may answer with what is in the module inside
    return affine if isinstance(affine, _Affine) else None


def _recorded(module: nn.Module) -> dict[str, bool]:
    """The frozen parameters of a module → ``requires_grad`` before."""
    affine = _affine(module)
    recorded: dict[str, bool] = vars(module).get(_FROZEN, {}) if affine is None else affine.trained
    return recorded


def _parameters_of(module: nn.Module, attribute: str) -> list[nn.Parameter]:
    """The parameter, or the parameters it is computed from if it is parametrized."""
    if attribute in parametrized(module):
        return list(parametrized(module)[attribute].parameters(recurse=False))
    return [cast(nn.Parameter, getattr(module, attribute))]
