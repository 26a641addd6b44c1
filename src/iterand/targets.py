"""What there is to mask in a model: its parameters, who owns them, and what kind each is."""

import difflib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

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
