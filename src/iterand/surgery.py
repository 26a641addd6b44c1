"""Which tensors of a model can be masked; attaching and detaching parametrizations; freezing what is not masked."""

import difflib
import functools
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

# Modules, and which of their parameters are weights and biases.
_KINDS: list[tuple[tuple[type, ...], str, str]] = [
    ((nn.Linear, nn.Bilinear, _ConvNd, nn.Embedding, nn.EmbeddingBag), "weight", "bias"),
    ((nn.RNNBase, nn.RNNCellBase), "weight_(ih|hh|hr).*", "bias_(ih|hh).*"),
    ((nn.MultiheadAttention,), "(in|q|k|v)_proj_weight", "in_proj_bias|bias_k|bias_v"),
]
NORMS = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)


@dataclass(frozen=True)
class Place:
    """One place where a tensor is held: ``module.attribute``."""

    path: str
    attribute: str
    module: nn.Module

    @property
    def name(self) -> str:
        """The parameter's qualified name."""
        return f"{self.path}.{self.attribute}" if self.path else self.attribute

    @property
    def kind(self) -> str:
        """``weight`` (masked by default), ``bias``, ``norm``, ``shift`` (a norm's), or ``bare`` (masked if named)."""
        for kinds, weights, biases in _KINDS:
            if isinstance(self.module, kinds):
                # Only torch's own names count: what a subclass adds is the subclass's business.
                if re.fullmatch(weights, self.attribute):
                    return "weight"
                return "bias" if re.fullmatch(biases, self.attribute) else "bare"
        norm = {"weight": "norm", "bias": "shift"} if isinstance(self.module, NORMS) else {}
        return norm.get(self.attribute, "bare")

    def matches(self, pattern: str) -> bool:
        """Whether a glob pattern fits the parameter's qualified name, or its module's."""
        return fnmatchcase(self.name, pattern) or fnmatchcase(self.path, pattern)


@dataclass(frozen=True)
class Owner(Place):
    """A place that holds a parameter."""

    parameter: nn.Parameter


def owners(model: nn.Module) -> list[Owner]:
    """Every place in the model that holds a parameter, in the order of its modules."""
    return [
        Owner(path, attribute, module, parameter)
        for path, module in model.named_modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None
    ]


def has_shifts(model: nn.Module) -> bool:
    """Whether a model has a norm that adds a parameter."""
    return any(owner.kind == "shift" for owner in owners(model))


def matching(pattern: str, candidates: Iterable[Owner], what: str) -> list[Owner]:
    """The owners a pattern fits; at least one, or the pattern is a mistake."""
    candidates = list(candidates)
    found = [owner for owner in candidates if owner.matches(pattern)]
    if not found:
        names = [name for owner in candidates for name in (owner.name, owner.path)]
        close = difflib.get_close_matches(pattern, names, n=1)
        hint = f"did you mean {close[0]!r}?" if close else f"the names are like {', '.join(names[::2][:3])}"
        raise ValueError(f"{what} pattern {pattern!r} matches nothing that can be masked; {hint}")
    return found


def choose(
    model: nn.Module,
    include: Sequence[str] | None,
    exclude: Sequence[str],
    named: Sequence[str],
    usual: Sequence[str] = ("weight",),
) -> dict[str, list[Owner]]:
    """The parameters to mask, by the name of their first owner, each with all its owners (a tied one has several).

    ``usual`` are the kinds that need not be named; ``include`` narrows the choice, ``named`` adds to it, ``exclude``
    takes away.
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


def _refuse_computed(
    model: nn.Module, include: Sequence[str] | None, exclude: Sequence[str], usual: Sequence[str]
) -> None:  # fmt: skip
    """A weight that something else computes cannot be masked; passing over it in silence would half mask the model."""
    for path, module in model.named_modules():
        held = {
            *getattr(module, "parametrizations", ()),
            *vars(module),
        }  # torch's new way to compute a weight, and its old
        for attribute in held - {*module._parameters}:
            place = Place(path, attribute, module)
            wanted = include is None or any(map(place.matches, include))
            if place.kind in usual and wanted and not any(map(place.matches, exclude)):
                raise ValueError(
                    f"{place.name!r} is computed from other tensors; undo that first, or exclude {path + '*'!r}"
                )


def _refuse_tied(chosen: Owner, everything: Iterable[Owner]) -> None:
    for owner in everything:
        if owner.parameter is chosen.parameter and owner.kind in ("bias", "norm"):
            raise ValueError(
                f"{chosen.name!r} and {owner.name!r} are one tied tensor, and the second is never masked; untie them"
            )


def _refuse_shared(chosen: dict[str, list[Owner]]) -> None:
    """Two parameters in one place of memory would write over each other's weights."""
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


_RANKINGS = "_iterand_rankings"  # noted on a pruned model
_CUTS = "_iterand_cuts"  # noted on the class that finds them
_ORDER = "_iterand_order"  # noted on a module: the order of its parameters, which folding restores


def parametrizations(module: nn.Module, attribute: str) -> nn.ModuleList:
    """The parametrizations of one tensor."""
    return cast(nn.ModuleList, cast(nn.ModuleDict, module.parametrizations)[attribute])


def check_classes(modules: Iterable[nn.Module]) -> None:
    """Refuse modules of which no subclass can be made: parametrized, each has a class of its own."""
    for kind in dict.fromkeys(type(module) for module in modules):
        try:
            type(kind.__name__, (kind,), {"__module__": kind.__module__})
        except Exception as error:
            raise ValueError(f"no subclass of {kind.__name__} can be made, which masks need: {error}") from None


@torch.no_grad()
def attach(group: list[Owner], mask: MaskedParametrization, value: Tensor) -> None:
    """Put a mask on a tensor that these modules own, with ``value`` as its weights."""
    first, *tied = group
    for owner in group:
        if not hasattr(owner.module, _ORDER):
            setattr(owner.module, _ORDER, tuple(owner.module._parameters))
    first.parameter.requires_grad_(False)
    first.parameter.grad = None
    first.parameter.copy_(value)
    parametrize.register_parametrization(first.module, first.attribute, mask, unsafe=True)
    _read_live(first.module)
    shared = cast(nn.ModuleDict, first.module.parametrizations)[first.attribute]
    for owner in tied:
        parametrize.register_parametrization(owner.module, owner.attribute, nn.Identity(), unsafe=True)
        cast(nn.ModuleDict, owner.module.parametrizations)[owner.attribute] = shared
        _read_live(owner.module)


def _read_live(module: nn.Module) -> None:
    """Make a recurrent layer, which keeps a list of its weights, read them each time instead."""
    if isinstance(module, nn.RNNBase):
        # On CUDA torch would rather have the weights in one piece, and says so at each pass; masked, they are not.
        warnings.filterwarnings("ignore", message="RNN module weights are not part of single contiguous chunk")
        # torch.compile leaves recurrent layers out, so it must not compile a mask for each of their weights either.
        read = torch.compiler.disable(  # type: ignore[no-untyped-call]
            lambda self: [getattr(self, name) for name in self._flat_weights_names]
        )
        live = property(read, lambda self, value: None)
        module.__dict__.pop("_flat_weights", None)
        dynamic = cast(Any, type(module))  # the class that parametrize made for this module alone
        dynamic._flat_weights = live
        dynamic._init_flat_weights = dynamic._update_flat_weights = lambda self: None


def cache_cuts_(root: nn.Module, rankings: list[Ranking[MaskedParametrization]]) -> None:
    """Make a pass through the model find its cuts once."""
    # A class of its own, as parametrize does it: hooks would not be called after Ctrl-C in the middle of a pass. Where
    # the root itself is parametrized, it lies below that class, which torch adds properties to and removes them from.
    dynamic = _class_of_parametrizations(root)
    base: type[nn.Module] = type(root) if dynamic is None else dynamic.__bases__[0]

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = cast("list[Ranking[MaskedParametrization]]", getattr(self, _RANKINGS))
        around = [ranking.begin() for ranking in own]
        try:
            return base.forward(self, *args, **kwargs)
        finally:
            for ranking, before in zip(own, around):
                ranking.end(before)

    cutting = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__, _CUTS: True})
    setattr(root, _RANKINGS, rankings)
    root.__class__ = _exchanged(type(root), base, cutting)


def stop_caching_cuts_(root: nn.Module) -> None:
    """Undo ``cut_once_a_pass``, where it was done."""
    if _RANKINGS in root.__dict__:
        delattr(root, _RANKINGS)
        cutting = next(kind for kind in type(root).__mro__ if _CUTS in vars(kind))
        root.__class__ = _exchanged(type(root), cutting, cutting.__bases__[0])


def detach(module: nn.Module, attribute: str, parameter: nn.Parameter) -> None:
    """Put an ordinary parameter in the place of a masked tensor."""
    # torch's own removal edits the class, which a deep copy of the module shares; here the module gets another one.
    dynamic = cast(type, _class_of_parametrizations(module))
    left = cast(nn.ModuleDict, module.parametrizations)
    del left[attribute]
    if len(left) == 0:
        del module.parametrizations
        plain = dynamic.__bases__[0]
    else:
        plain = type(dynamic.__name__, dynamic.__bases__, _own(dynamic, attribute))
    module.__class__ = _exchanged(type(module), dynamic, plain)
    module.register_parameter(attribute, parameter)
    order = getattr(module, _ORDER)
    later = [name for name in module._parameters if name not in order]
    for name in (*order, *later):
        if name in module._parameters:
            module._parameters[name] = module._parameters.pop(name)
    if len(left) == 0:
        delattr(module, _ORDER)
    if isinstance(module, nn.RNNBase):
        module._init_flat_weights()


def _class_of_parametrizations(module: nn.Module) -> type | None:
    """The class that parametrize made for a module: the one with its properties, wherever it lies among others."""
    names = tuple(getattr(module, "parametrizations", ()))
    for kind in type(module).__mro__:
        if any(isinstance(vars(kind).get(name), property) for name in names):
            return kind
    return None


def _exchanged(kind: type, old: type, new: type) -> type:
    """A class with another one in the place of one it is made from; what lies above is made anew."""
    if kind is old:
        return new
    bases = tuple(_exchanged(base, old, new) if old in base.__mro__ else base for base in kind.__bases__)
    return type(kind.__name__, bases, _own(kind))


def _own(kind: type, *without: str) -> dict[str, Any]:
    """What a class itself defines, to make another from."""
    return {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__", *without)}


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
