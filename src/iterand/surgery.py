"""Changes to a model: choose the tensors to mask, attach and detach masks, freeze biases and norms.

1. ``choose`` finds the parameters that can be masked, by kind of module and by ``include`` and ``exclude`` patterns.
2. ``attach`` and ``detach`` add and remove the masked parametrization of a parameter. ``cache_cuts_`` makes a forward
   pass of the model find its cuts once.
3. ``freeze_biases_`` and ``freeze_norms_`` fix parameters that are not masked at zero and one; ``thaw_`` undoes it.
"""

import copy
import difflib
import functools
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from iterand.parametrization import MaskedParametrization
from iterand.selection import Ranking

# 1. The tensors of a model that can be masked.

# Module classes, and the names of their weights and of their biases.
_KINDS: list[tuple[tuple[type, ...], str, str]] = [
    ((nn.Linear, nn.Bilinear, _ConvNd, nn.Embedding, nn.EmbeddingBag), "weight", "bias"),
    ((nn.RNNBase, nn.RNNCellBase), "weight_(ih|hh|hr).*", "bias_(ih|hh).*"),
    ((nn.MultiheadAttention,), "(in|q|k|v)_proj_weight", "in_proj_bias|bias_k|bias_v"),
]
NORMS = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Slot:
    """An attribute of a module that is a tensor: ``module.attribute``."""

    path: str
    attribute: str
    module: nn.Module

    @property
    def name(self) -> str:
        """Qualified name, such as ``encoder.0.weight``."""
        return f"{self.path}.{self.attribute}" if self.path else self.attribute

    @property
    def kind(self) -> str:
        """``weight`` (masked by default), ``bias``, ``norm``, ``shift`` (a norm's), or ``bare`` (masked if named)."""
        for kinds, weights, biases in _KINDS:
            if isinstance(self.module, kinds):
                # Only the names that torch defines: a parameter that a subclass adds is "bare".
                if re.fullmatch(weights, self.attribute):
                    return "weight"
                return "bias" if re.fullmatch(biases, self.attribute) else "bare"
        norm = {"weight": "norm", "bias": "shift"} if isinstance(self.module, NORMS) else {}
        return norm.get(self.attribute, "bare")

    def matches(self, pattern: str) -> bool:
        """Whether a glob pattern matches the qualified name of the tensor or of its module."""
        return fnmatchcase(self.name, pattern) or fnmatchcase(self.path, pattern)


@dataclass(frozen=True)
class Owner(Slot):
    """A slot with its parameter. A tied parameter has several owners."""

    parameter: nn.Parameter


def owners(model: nn.Module) -> list[Owner]:
    """The owners of all parameters of a model, in module order."""
    return [
        Owner(path, attribute, module, parameter)
        for path, module in model.named_modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None
    ]


def has_shifts(model: nn.Module) -> bool:
    """Whether a norm of the model has a bias."""
    return any(owner.kind == "shift" for owner in owners(model))


def choose(
    model: nn.Module,
    include: Sequence[str] | None,
    exclude: Sequence[str],
    named: Sequence[str],
    usual: Sequence[str] = ("weight",),
) -> dict[str, list[Owner]]:
    """The parameters to mask: name of the first owner → all owners.

    ``usual`` are the kinds that are masked by default. ``include`` restricts the choice to matching names, ``named``
    adds names, ``exclude`` removes names.
    """
    everything = owners(model)
    maskable = [owner for owner in everything if owner.kind in (*usual, "bare")]
    wanted = list(named) + list(include or ())
    for pattern in exclude:
        matching(pattern, everything, "exclude")
    for pattern in wanted:
        found = matching(pattern, maskable, "include" if pattern not in named else "overrides")
        if pattern in named and all(any(map(owner.matches, exclude)) for owner in found):
            raise ValueError(f"overrides pattern {pattern!r} names only what exclude= leaves alone; drop either")
    _refuse_computed(model, include, exclude, usual)

    groups: dict[int, list[Owner]] = {}
    for owner in maskable:
        groups.setdefault(id(owner.parameter), []).append(owner)
    chosen = {}
    for group in groups.values():
        out = [owner for owner in group if any(owner.matches(pattern) for pattern in exclude)]
        into = [
            owner
            for owner in group
            if owner not in out
            and (any(owner.matches(pattern) for pattern in wanted) or (include is None and owner.kind in usual))
        ]
        if into and out:
            raise ValueError(
                f"{into[0].name!r} and {out[0].name!r} are one tied tensor, and only one of them is excluded; "
                "exclude both or neither"
            )
        if into:
            _refuse_unfit(into[0])
            _refuse_tied(into[0], everything)
            chosen[group[0].name] = group
    _refuse_shared(chosen)
    if not chosen:
        raise ValueError(f"{type(model).__name__} has nothing to mask: no linear, convolution, embedding, recurrent or "
                         "attention layer is left; name a bare parameter with include=")  # fmt: skip
    return chosen


def matching(pattern: str, candidates: Iterable[Owner], what: str) -> list[Owner]:
    """The owners that match a glob pattern. Raises ValueError if there is none."""
    candidates = list(candidates)
    found = [owner for owner in candidates if owner.matches(pattern)]
    if not found:
        names = [name for owner in candidates for name in (owner.name, owner.path)]
        close = difflib.get_close_matches(pattern, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the names are like {', '.join(names[::2][:3])}"
        raise ValueError(f"{what} pattern {pattern!r} matches nothing that can be masked; {hint}")
    return found


def _refuse_computed(
    model: nn.Module, include: Sequence[str] | None, exclude: Sequence[str], usual: Sequence[str]
) -> None:  # fmt: skip
    """Refuse weights that are computed from other tensors: skipping them would leave the model half masked."""
    for path, module in model.named_modules():
        # torch.nn.utils.parametrize, and the older hooks such as weight_norm, which set a plain attribute.
        attributes = {*getattr(module, "parametrizations", ()), *vars(module)}
        for attribute in attributes - {*module._parameters}:
            slot = Slot(path, attribute, module)
            wanted = include is None or any(map(slot.matches, include))
            if slot.kind in usual and wanted and not any(map(slot.matches, exclude)):
                raise ValueError(
                    f"{slot.name!r} is computed from other tensors; undo that first, or exclude {path + '*'!r}"
                )


def _refuse_tied(chosen: Owner, everything: Iterable[Owner]) -> None:
    for owner in everything:
        if owner.parameter is chosen.parameter and owner.kind in ("bias", "norm"):
            raise ValueError(
                f"{chosen.name!r} and {owner.name!r} are one tied tensor, and the second is never masked; untie them"
            )


def _refuse_shared(chosen: dict[str, list[Owner]]) -> None:
    """Refuse two parameters with one storage: they would overwrite each other's weights."""
    first: dict[tuple[str, int], str] = {}
    for name, group in chosen.items():
        parameter = group[0].parameter
        if parameter.is_meta:
            continue
        before = first.setdefault((str(parameter.device), parameter.data_ptr()), name)
        if before != name:
            raise ValueError(f"{before!r} and {name!r} are two parameters with one memory; make them one, or clone it")


def _refuse_unfit(owner: Owner) -> None:
    if is_lazy(owner.parameter):
        raise ValueError(f"{owner.name!r} has no shape yet; run one forward pass before pruning")
    if not owner.parameter.is_floating_point():
        raise ValueError(f"{owner.name!r} is {owner.parameter.dtype}; only real floating-point weights can be masked")
    if owner.parameter.dtype.itemsize < 2:
        raise ValueError(f"{owner.name!r} is {owner.parameter.dtype}, which a ticket cannot hold; convert it first")
    if owner.parameter.numel() == 0:
        raise ValueError(f"{owner.name!r} is empty, so there is nothing to mask; exclude it")
    if owner.parameter.is_inference():
        raise ValueError(f"{owner.name!r} was made under torch.inference_mode, so nothing can be written to it")
    if any(step == 0 and size > 1 for step, size in zip(owner.parameter.stride(), owner.parameter.shape)):
        raise ValueError(f"{owner.name!r} is expanded, so its weights share memory; give it a copy with clone()")


# 2. Attach and detach masks.

_RANKINGS = "_iterand_rankings"  # attribute of a masked model
_CUTS = "_iterand_cuts"  # attribute of the class that ``cache_cuts_`` makes
_PASSES = ("forward", "training_step", "validation_step", "test_step", "predict_step")  # the last four: Lightning's
_TIED = "_tied_weights_keys"  # attribute of a module, as Hugging Face has it: patterns for the names of tied tensors
_ORDER = "_iterand_order"  # attribute of a module: the original order of its parameters


def check_classes(modules: Iterable[nn.Module]) -> None:
    """Refuse modules that cannot be subclassed: torch makes a subclass for each parametrized module."""
    for kind in dict.fromkeys(type(module) for module in modules):
        try:
            type(kind.__name__, (kind,), {"__module__": kind.__module__})
        except Exception as error:
            raise ValueError(f"no subclass of {kind.__name__} can be made, which masks need: {error}") from None


@torch.no_grad()
def attach(group: list[Owner], mask: MaskedParametrization, value: Tensor) -> None:
    """Mask the parameter of these owners and set its weights to ``value``."""
    first, *tied = group
    for owner in group:
        if not hasattr(owner.module, _ORDER):
            setattr(owner.module, _ORDER, tuple(owner.module._parameters))
    first.parameter.requires_grad_(False)
    first.parameter.grad = None
    first.parameter.copy_(value)
    # A buffer: what averages, regularizes or counts the parameters of a model must leave the random weights alone.
    delattr(first.module, first.attribute)
    first.module.register_buffer(first.attribute, first.parameter.detach())
    parametrize.register_parametrization(first.module, first.attribute, mask, unsafe=True)
    _adapt_class(first.module)
    shared = cast(nn.ModuleDict, first.module.parametrizations)[first.attribute]
    for owner in tied:
        parametrize.register_parametrization(owner.module, owner.attribute, nn.Identity(), unsafe=True)
        cast(nn.ModuleDict, owner.module.parametrizations)[owner.attribute] = shared
        # Hugging Face's save_pretrained leaves out the names that this attribute lists: a file has each tensor once.
        names = {f"parametrizations.{owner.attribute}.": "", **vars(owner.module).get(_TIED, {})}
        setattr(owner.module, _TIED, names)
        _adapt_class(owner.module)


def _adapt_class(module: nn.Module) -> None:
    """Refuse what would go wrong with a masked module; make a recurrent layer read its weights at each pass."""
    generated = cast(Any, type(module))  # the subclass that parametrize made for this module
    generated.__getstate__ = _refuse_pickling
    if isinstance(module, nn.Embedding):  # Hugging Face's resize_token_embeddings sets it, with a matrix that is lost
        generated.num_embeddings = property(lambda self: self.__dict__["num_embeddings"], _refuse_resizing)
    if isinstance(module, nn.RNNBase):
        # On CUDA torch warns at each pass if the weights are not one chunk of memory. Masked weights never are.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        # torch.compile does not compile recurrent layers, so it must not compile the masks of their weights.
        read = torch.compiler.disable(  # type: ignore[no-untyped-call]
            lambda self: [getattr(self, name) for name in self._flat_weights_names]
        )
        live = property(read, lambda self, value: None)
        module.__dict__.pop("_flat_weights", None)
        generated._flat_weights = live
        generated._init_flat_weights = generated._update_flat_weights = lambda self: None


def _refuse_pickling(module: nn.Module) -> Any:
    raise pickle.PicklingError(
        f"a masked {type(module).__name__} cannot be pickled, since its class is made at run time; save "
        "model.state_dict(), or a ticket with iterand.save_ticket(model, path)"
    )


def _refuse_resizing(embedding: nn.Embedding, count: int) -> None:
    if count != embedding.num_embeddings:
        raise ValueError(
            f"a masked embedding of {embedding.num_embeddings} rows cannot be resized to {count}; resize it before "
            "prune_, or fold_ the model first"
        )


def detach(module: nn.Module, attribute: str, parameter: nn.Parameter) -> None:
    """Replace a masked tensor by an ordinary parameter."""
    # torch's removal edits the class, which a deep copy of the module shares. Here the module gets a new class.
    generated = cast(type, _class_of_parametrizations(module))
    left = cast(nn.ModuleDict, module.parametrizations)
    del left[attribute]
    if len(left) == 0:
        del module.parametrizations
        plain = generated.__bases__[0]
    else:
        plain = type(generated.__name__, generated.__bases__, _namespace(generated, attribute))
    module.__class__ = _replace_base(type(module), generated, plain)
    module.register_parameter(attribute, parameter)
    order = getattr(module, _ORDER)
    later = [name for name in module._parameters if name not in order]
    for name in (*order, *later):
        if name in module._parameters:
            module._parameters[name] = module._parameters.pop(name)
    if len(left) == 0:
        delattr(module, _ORDER)
        module.__dict__.pop(_TIED, None)
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


def parametrizations(module: nn.Module, attribute: str) -> nn.ModuleList:
    """The parametrizations of one tensor."""
    return cast(nn.ModuleList, cast(nn.ModuleDict, module.parametrizations)[attribute])


def cache_cuts_(root: nn.Module, rankings: list[Ranking[MaskedParametrization]]) -> None:
    """Make a forward pass of the model find its cuts once."""
    # A subclass, as in parametrize. Forward hooks would not run after a KeyboardInterrupt in the middle of a pass. If
    # the root is parametrized itself, the new class becomes the base of parametrize's class, which torch edits.
    generated = _class_of_parametrizations(root)
    base: type[nn.Module] = type(root) if generated is None else generated.__bases__[0]

    def one_pass(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            current = cast("list[Ranking[MaskedParametrization]]", getattr(self, _RANKINGS))
            previous = [ranking.begin() for ranking in current]
            try:
                return method(self, *args, **kwargs)
            finally:
                for ranking, before in zip(current, previous):
                    ranking.end(before)

        return run

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(cast(Any, base).__getstate__(self), memo))  # type: ignore[no-untyped-call]
        return copied

    namespace: dict[str, Any] = {name: one_pass(getattr(base, name)) for name in _PASSES if hasattr(base, name)}
    namespace |= {"__getstate__": _refuse_pickling, "__module__": base.__module__, _CUTS: True}
    if not hasattr(base, "__deepcopy__"):  # by default, copies and pickles are made from __getstate__
        namespace["__deepcopy__"] = deepcopy
    caching = type(base.__name__, (base,), namespace)
    setattr(root, _RANKINGS, rankings)
    root.__class__ = _replace_base(type(root), base, caching)


def stop_caching_cuts_(root: nn.Module) -> None:
    """Undo ``cache_cuts_``. Does nothing if it was not called."""
    if _RANKINGS in root.__dict__:
        delattr(root, _RANKINGS)
        caching = next(kind for kind in type(root).__mro__ if _CUTS in vars(kind))
        root.__class__ = _replace_base(type(root), caching, caching.__bases__[0])


def _class_of_parametrizations(module: nn.Module) -> type | None:
    """The class with the properties that parametrize made for a module. None if it is not parametrized."""
    names = tuple(getattr(module, "parametrizations", ()))
    for kind in type(module).__mro__:
        if any(isinstance(vars(kind).get(name), property) for name in names):
            return kind
    return None


def _replace_base(kind: type, old: type, new: type) -> type:
    """A class with the base ``old`` replaced by ``new``. Classes between them are recreated."""
    if kind is old:
        return new
    bases = tuple(_replace_base(base, old, new) if old in base.__mro__ else base for base in kind.__bases__)
    return type(kind.__name__, bases, _namespace(kind))


def _namespace(kind: type, *without: str) -> dict[str, Any]:
    """The namespace of a class, as an argument for ``type``."""
    return {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__", *without)}


# 3. Freeze parameters that are not masked.

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


def freeze_biases_(biases: list[Owner]) -> None:
    """Set these parameters to zero and stop training them."""
    _freeze_(biases, lambda owner: 0.0)


def freeze_norms_(affine: list[Owner]) -> None:
    """Fix weight and bias of norms at one and zero. Norms with running statistics get ``affine=False`` instead.

    A norm of which only one of the two is frozen keeps both as parameters.
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
    _freeze_(left, lambda owner: _identity(owner.attribute))


def thaw_(model: nn.Module) -> None:
    """Undo the freezing. The values stay zero and one."""
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
        elif hasattr(module, _FROZEN):
            delattr(module, _FROZEN)


def is_frozen(module: nn.Module, attribute: str) -> bool:
    """Whether a parameter of a module is frozen."""
    return attribute in _recorded(module)


def dropped(module: nn.Module) -> dict[str, float]:
    """The affine parameters that freezing removed from a module, with the values that ``thaw_`` restores."""
    affine = _affine(module)
    if affine is None or affine:
        return {}
    return {attribute: _identity(attribute) for attribute in affine.trained}


def _identity(attribute: str) -> float:
    """The value of an affine parameter that does not change its input."""
    return 1.0 if attribute == "weight" else 0.0


def _freeze_(frozen: list[Owner], value: Callable[[Owner], float]) -> None:
    trained = {id(owner.parameter): owner.parameter.requires_grad for owner in frozen}
    for owner in frozen:
        _record(owner.module, owner.attribute, trained[id(owner.parameter)], affine=True)
        with torch.no_grad():
            owner.parameter.fill_(value(owner))
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
    affine = getattr(module, "affine", None)
    return affine if isinstance(affine, _Affine) else None


def _recorded(module: nn.Module) -> dict[str, bool]:
    """The frozen parameters of a module → ``requires_grad`` before."""
    affine = _affine(module)
    recorded: dict[str, bool] = getattr(module, _FROZEN, {}) if affine is None else affine.trained
    return recorded


def _parameters_of(module: nn.Module, attribute: str) -> list[nn.Parameter]:
    """The parameter, or the parameters it is computed from if it is parametrized."""
    if parametrize.is_parametrized(module, attribute):
        return list(cast(nn.ModuleDict, module.parametrizations)[attribute].parameters(recurse=False))
    return [cast(nn.Parameter, getattr(module, attribute))]
