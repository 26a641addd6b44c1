"""Which tensors of a model are masked: the choice by kind and by name, and what it refuses."""

import difflib
import functools
import glob
import itertools
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from iterand.parameter_kinds import Owner, Slot, modules_of, owners, parametrized, torch_kind

_OF_MODULES = frozenset(vars(nn.Module()))  # attributes of every module


def choose(
    model: nn.Module,
    include: Sequence[str] | None,
    exclude: Sequence[str],
    named: Sequence[str],
    usual: Sequence[str] = ("weight",),
) -> dict[str, list[Owner]]:
    """The parameters to mask: name of the first owner → all owners.

    ``usual`` are the kinds that are masked by default. ``include`` restricts the choice to matching names, ``named``
    adds names, ``exclude`` removes names. A bare parameter that is, say, a layer's bias under another name stays one.
    """
    everything = owners(model)
    never = {id(owner.parameter) for owner in everything if owner.kind not in (*usual, "bare")}
    maskable = [
        owner
        for owner in everything
        if owner.kind in usual or (owner.kind == "bare" and id(owner.parameter) not in never)
    ]
    wanted = list(named) + list(include or ())
    for pattern in exclude:
        matching(pattern, everything, "exclude")
    for pattern in wanted:
        found = matching(pattern, maskable, "include" if pattern not in named else "overrides")
        if pattern in named and all(any(map(owner.matches, exclude)) for owner in found):
            raise ValueError(
                f"overrides pattern {pattern!r} names only what exclude= or trainable= leaves alone; drop either"
            )
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
            _refuse_name(group)
            chosen[group[0].name] = group
    _refuse_shared(chosen, everything)
    _refuse_held(model, chosen)
    if not chosen:
        raise ValueError(f"{type(model).__name__} has nothing to mask: no linear, convolution, embedding, recurrent or "
                         "attention layer is left; name a bare parameter with include=")  # fmt: skip
    return chosen


def left_over(everything: Iterable[Owner], exclude: Sequence[str], masked: set[int]) -> list[Owner]:
    """The first owners of parameters that are bare under all their names, and neither masked (by id) nor excluded."""
    first: dict[int, Owner] = {}
    settled = set(masked)
    for owner in everything:
        first.setdefault(id(owner.parameter), owner)
        if owner.kind != "bare" or any(map(owner.matches, exclude)):
            settled.add(id(owner.parameter))
    return [owner for key, owner in first.items() if key not in settled]


def matching(pattern: str, candidates: Iterable[Owner], what: str) -> list[Owner]:
    """The owners that match a glob pattern. Raises ValueError if there is none."""
    candidates = list(candidates)
    found = [owner for owner in candidates if owner.matches(pattern)]
    if not found:
        names = [name for owner in candidates for pair in zip(owner.names, owner.paths) for name in pair]
        close = difflib.get_close_matches(pattern, names, n=1)
        like = f"the names are like {', '.join(names[::2][:3])}" if names else "the model has nothing of the kind"
        hint = f"did you mean {close[0]!r}?" if close else like
        if pattern in names:
            hint = f"[…] stands for one of the letters in it, so write {glob.escape(pattern)!r} for this name"
        kind = "no parameter" if what == "trainable" else "nothing that can be masked"
        raise ValueError(f"{what} pattern {pattern!r} matches {kind}; {hint}")
    return found


def _refuse_computed(
    model: nn.Module, include: Sequence[str] | None, exclude: Sequence[str], usual: Sequence[str]
) -> None:  # fmt: skip
    """Refuse weights that are computed from other tensors: skipping them would leave the model half masked."""
    for paths, module in modules_of(model):
        # torch.nn.utils.parametrize, and the older hooks such as weight_norm, which set a plain attribute.
        attributes = {*parametrized(module), *vars(module)}
        for attribute in attributes - {*module._parameters.keys()}:  # a scripted module has no dict
            slot = Slot(paths, attribute, module)
            wanted = include is None or any(map(slot.matches, include))
            if torch_kind(module, attribute) in usual and wanted and not any(map(slot.matches, exclude)):
                raise ValueError(
                    f"{slot.name!r} is computed from other tensors; undo that first, or exclude {paths[0] + '*'!r}"
                )


def _refuse_tied(chosen: Owner, everything: Iterable[Owner]) -> None:
    for owner in everything:
        if owner.parameter is chosen.parameter and owner.kind in ("bias", "norm", "scale"):
            raise ValueError(
                f"{chosen.name!r} and {owner.name!r} are one tied tensor, and the second is never masked; untie them"
            )


def _refuse_name(group: Iterable[Owner]) -> None:
    for owner in group:
        if hasattr(owner.module, "parametrizations") and not parametrized(owner.module):
            raise ValueError(
                f"{owner.name!r} cannot be masked: its {type(owner.module).__name__} has something of its own called "
                f"'parametrizations', a name that torch needs there; rename it, or exclude {owner.name!r}"
            )


def _refuse_shared(chosen: dict[str, list[Owner]], everything: Sequence[Owner]) -> None:
    """Refuse a parameter that shares memory with another: its weights would overwrite those of the other."""
    masked = {group[0].parameter for group in chosen.values()}
    first: dict[nn.Parameter, Owner] = {}
    for owner in everything:
        first.setdefault(owner.parameter, owner)
    places = sorted(
        (str(parameter.device), *_memory(parameter), number)
        for number, parameter in enumerate(first)
        if not is_lazy(parameter) and parameter.layout == torch.strided and parameter.numel() and parameter.data_ptr()
    )
    for (device, _, end, one), (other_device, begin, _, other) in itertools.pairwise(places):
        pair = [list(first.values())[number] for number in sorted((one, other))]
        if device == other_device and begin < end and any(owner.parameter in masked for owner in pair):
            names = " and ".join(repr(owner.name) for owner in pair)
            raise ValueError(f"{names} are two parameters with one memory; make them one, or clone it")


def _refuse_held(model: nn.Module, chosen: Mapping[str, list[Owner]]) -> None:
    """Refuse a parameter that a module also has in a list or a method, which would go on using it without a mask."""
    masked = {id(group[0].parameter): name for name, group in chosen.items()}
    for paths, module in modules_of(model):
        if isinstance(module, nn.RNNBase):
            continue  # its list is made anew
        for attribute, value in vars(module).items():
            if attribute not in _OF_MODULES:
                for name in (masked[id(one)] for one in _held(value) if id(one) in masked):
                    slot = Slot(paths, attribute, module)
                    raise ValueError(
                        f"{slot.name!r} holds the parameter {name!r} outside of torch's modules, where it would stay "
                        f"without a mask; look it up in forward, or exclude {name!r}"
                    )


def _held(value: Any, depth: int = 3) -> Iterator[Any]:
    """The tensors in a value: itself, entries of lists, tuples, sets and dicts, and the object of a bound method."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, dict)) and depth:
        for entry in value.values() if isinstance(value, dict) else value:
            yield from _held(entry, depth - 1)
    elif isinstance(value, functools.partial) and depth:
        yield from _held([value.func, *value.args, *value.keywords.values()], depth - 1)
    elif isinstance(value, (types.MethodType, types.BuiltinMethodType, types.MethodWrapperType)):
        yield from _held(value.__self__, 0)


def _memory(parameter: Tensor) -> tuple[int, int]:
    """Where the elements of a tensor begin and end."""
    begin = parameter.data_ptr()
    last = sum((size - 1) * step for size, step in zip(parameter.shape, parameter.stride()))
    return begin, begin + (last + 1) * parameter.itemsize


def refuse_lazy(found: Iterable[Owner]) -> None:
    """Refuse parameters without a shape."""
    for owner in found:
        if is_lazy(owner.parameter):
            raise ValueError(f"{owner.name!r} has no shape yet; run one forward pass before pruning")


def _refuse_unfit(owner: Owner) -> None:
    refuse_lazy([owner])
    if isinstance(owner.module, torch.jit.ScriptModule):
        raise ValueError(f"{owner.name!r} is in a scripted module, which takes no mask; exclude it, or script it later")
    if not owner.parameter.is_floating_point():
        raise ValueError(
            f"{owner.name!r} is {owner.parameter.dtype}, and only real floating-point weights can be masked; exclude it"
        )
    if owner.parameter.dtype.itemsize < 2:
        raise ValueError(f"{owner.name!r} is {owner.parameter.dtype}, which a ticket cannot hold; convert it first")
    if owner.parameter.numel() == 0:
        raise ValueError(f"{owner.name!r} is empty, so there is nothing to mask; exclude it")
    if owner.parameter.is_inference():
        raise ValueError(f"{owner.name!r} was made under torch.inference_mode, so nothing can be written to it")
    if any(step == 0 and size > 1 for step, size in zip(owner.parameter.stride(), owner.parameter.shape)):
        raise ValueError(f"{owner.name!r} is expanded, so its weights share memory; give it a copy with clone()")
    if isinstance(owner.module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
        container = next(kind for kind in type(owner.module).__mro__ if kind.__module__.startswith("torch."))
        raise ValueError(
            f"{owner.name!r} is a parameter of a {container.__name__}, which would take its mask for one of its "
            "modules; exclude it, or make it a parameter of another module"
        )
