"""How a mask is put on a module and taken off again: what torch's parametrizations need beside them."""

import functools
import warnings
from collections.abc import Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from iterand.parametrization import Mask, Ranking
from iterand.targets import Owner

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
def attach(group: list[Owner], mask: Mask, value: Tensor) -> None:
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


def cut_once_a_pass(root: nn.Module, rankings: list[Ranking]) -> None:
    """Make a pass through the model find its cuts once."""
    # A class of its own, as parametrize does it: hooks would not be called after Ctrl-C in the middle of a pass. Where
    # the root itself is parametrized, it lies below that class, which torch adds properties to and removes them from.
    dynamic = _class_of_parametrizations(root)
    base: type[nn.Module] = type(root) if dynamic is None else dynamic.__bases__[0]

    @functools.wraps(base.forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        own = cast(list[Ranking], getattr(self, _RANKINGS))
        around = [ranking.begin() for ranking in own]
        try:
            return base.forward(self, *args, **kwargs)
        finally:
            for ranking, before in zip(own, around):
                ranking.end(before)

    cutting = type(base.__name__, (base,), {"forward": forward, "__module__": base.__module__, _CUTS: True})
    setattr(root, _RANKINGS, rankings)
    root.__class__ = _exchanged(type(root), base, cutting)


def cut_at_each_reading(root: nn.Module) -> None:
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
