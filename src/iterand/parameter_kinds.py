"""What the parameters of a model are: weights, biases, norms, layer scales, or bare ones; and their names.

A parameter is known by its module: torch's layers by their classes; norms and layer scales, of which every library
has its own, by what they are.
"""

import copy
import math
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy
from torch.nn.utils.parametrize import ParametrizationList

from iterand.checks import counted
from iterand.distributions import is_conv1d

Kind = Literal["weight", "bias", "norm", "shift", "scale", "bare"]
"""``weight`` is masked by default, ``bare`` if it is named. Of a norm ``norm`` multiplies and ``shift`` adds. ``scale``
is a layer scale."""

# Module classes, and the names of their weights and of their biases.
_KINDS: list[tuple[tuple[type, ...], str, str]] = [
    ((nn.Linear, nn.Bilinear, _ConvNd, nn.Embedding, nn.EmbeddingBag), "weight", "bias"),
    ((nn.RNNBase, nn.RNNCellBase), "weight_(ih|hh|hr).*", "bias_(ih|hh).*"),
    ((nn.MultiheadAttention,), "(in|q|k|v)_proj_weight", "in_proj_bias|bias_k|bias_v"),
]
_NORMS = (_BatchNorm, _InstanceNorm, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm)
_NAMED = 5  # tensors that a message names
_LAYER_SCALE = "layer_?scale"  # in the name of a parameter, its module or its class
_LAYER_SCALES = r"(\w+_)?gamma(\d*|_\w+)|lambda_?\d*|ls_?\d*|skipinit_gain"  # further names of the parameter itself


@dataclass(frozen=True)
class Slot:
    """An attribute of a module that is a tensor: ``module.attribute``."""

    paths: tuple[str, ...]
    """The qualified names of the module; more than one if it is in several places."""
    attribute: str
    module: nn.Module

    @property
    def names(self) -> tuple[str, ...]:
        """The qualified names of the tensor, such as ``encoder.0.weight``."""
        return tuple(f"{path}.{self.attribute}" if path else self.attribute for path in self.paths)

    @property
    def name(self) -> str:
        """The first of its qualified names."""
        return self.names[0]

    def matches(self, pattern: str) -> bool:
        """Whether a glob pattern matches a qualified name of the tensor or of its module."""
        return any(fnmatchcase(name, pattern) for name in (*self.names, *self.paths))


@dataclass(frozen=True)
class Owner(Slot):
    """A slot with its parameter. A tied parameter has several owners."""

    parameter: nn.Parameter
    kind: Kind
    neutral: float
    """The value at which it changes nothing: what freezing sets it to."""


def owners(model: nn.Module) -> list[Owner]:
    """The owners of all parameters of a model, in module order."""
    found = []
    known: dict[object, _Neutral] = {}
    for paths, module in modules_of(model):
        neutral = _neutral_values(module, known)
        for attribute, parameter in module._parameters.items():
            if parameter is None:
                continue
            kind = torch_kind(module, attribute)
            if kind == "bare" and attribute in neutral:
                kind = "norm" if attribute == next(iter(neutral)) else "shift"
            if kind == "bare" and is_layer_scale(paths[0], module, attribute):
                kind = "scale"
            value = 1.0 if kind in ("norm", "scale") else 0.0
            found.append(Owner(paths, attribute, module, parameter, kind, neutral.get(attribute, value)))
    return found


def modules_of(model: nn.Module) -> list[tuple[tuple[str, ...], nn.Module]]:
    """The modules of a model, each with all its qualified names."""
    paths: dict[nn.Module, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        paths.setdefault(module, []).append(path)
    return [(tuple(found), module) for module, found in paths.items()]


def torch_kind(module: nn.Module, attribute: str) -> Kind:
    """The kind of a parameter by torch's classes and by Hugging Face's ``Conv1D``."""
    for kinds, weights, biases in _KINDS:
        if isinstance(module, kinds) or (nn.Linear in kinds and is_conv1d(module)):
            # Only the names that torch defines: a parameter that a subclass adds is "bare".
            if re.fullmatch(weights, attribute):
                return "weight"
            return "bias" if re.fullmatch(biases, attribute) else "bare"
    if isinstance(module, _NORMS) and attribute in ("weight", "bias"):
        return "norm" if attribute == "weight" else "shift"
    return "bare"


def is_layer_scale(path: str, module: nn.Module, attribute: str) -> bool:
    """Whether a bare parameter is a layer scale: it multiplies a branch, so 1e-6 there would switch the branch off.

    Such a parameter has one element per channel, all equal when the model is new, and no shift beside it. Libraries
    call it ``gamma``, ``lambda1``, ``layer_scale_parameter`` and the like, or its module or the class of that.
    """
    names = (attribute, path.rpartition(".")[2], type(module).__name__)
    if any(re.search(_LAYER_SCALE, name, re.IGNORECASE) for name in names):
        fewest = 1
    elif re.fullmatch(_LAYER_SCALES, attribute):
        fewest = 1 if attribute == "skipinit_gain" else 2  # a single number is too little to tell by
    else:
        return False
    parameter = module._parameters[attribute]
    if parameter is None or not _is_vector(parameter) or parameter.numel() < fewest:
        return False
    if any(other in module._parameters for other in ("beta", "bias")):
        return False
    return parameter.is_meta or bool((parameter == parameter.reshape(-1)[0]).all())


def _is_vector(parameter: Tensor) -> bool:
    """Whether a parameter has one axis, beside axes of length one."""
    return not is_lazy(parameter) and 0 < parameter.numel() == max(parameter.shape, default=1)


def parametrized(module: nn.Module) -> dict[str, ParametrizationList]:
    """The tensors of a module that ``torch.nn.utils.parametrize`` computes, and the lists that do."""
    if "parametrizations" not in module._modules:
        return {}
    held = module._modules["parametrizations"]
    lists = held.items() if isinstance(held, nn.ModuleDict) else ()
    return {name: one for name, one in lists if isinstance(one, ParametrizationList)}


def list_tensors(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The number of parameters in these tensors, and the names of the largest."""
    return f"{counted(sum(map(math.prod, shapes.values())), 'parameter')} in {name_tensors(shapes)}"


def name_tensors(shapes: Mapping[str, tuple[int, ...]]) -> str:
    """The names and shapes of the largest of these tensors, and how many more there are."""
    largest = sorted(shapes, key=lambda name: -math.prod(shapes[name]))
    named = [f"{name} ({'×'.join(map(str, shapes[name])) or '1'})" for name in largest[:_NAMED]]
    more = [f"{len(largest) - _NAMED} more"] if len(largest) > _NAMED else []
    return ", ".join(named + more)


def has_shifts(model: nn.Module) -> bool:
    """Whether a norm of the model has a bias."""
    return any(owner.kind == "shift" for owner in owners(model))


def has_norms(model: nn.Module) -> bool:
    """Whether the model has a norm, with or without parameters."""
    known = any(isinstance(module, _NORMS) for module in model.modules())
    return known or any(owner.kind in ("norm", "shift") for owner in owners(model))


# Norms that are not torch's.

_Neutral = dict[str, float]
"""The parameters of a norm → the values at which they change nothing, the factor first. Empty: not a norm."""


def _neutral_values(module: nn.Module, known: dict[object, _Neutral]) -> _Neutral:
    """The neutral values of a module if it is a norm.

    torch's norms have a weight of one and a bias of zero. Another module is a norm if its class is called so or it has
    an epsilon, it has nothing but one vector or two, and a trial shows that it normalizes. Most norms multiply by their
    weight, some by one plus their weight; the trial tells which, also for subclasses of torch's norms.
    """
    if not module._parameters:
        return {}
    if isinstance(module, _NORMS):
        changed = next(kind for kind in type(module).__mro__ if "forward" in vars(kind)) not in _NORMS
        tried = _try_norm(module, known) if changed and not isinstance(module, _NormBase) else {}
        return {"weight": tried.get("weight", 1.0), "bias": 0.0}
    parameters = list(module.parameters())
    if len(parameters) not in (1, 2) or not all(_is_vector(one) and one.numel() > 1 for one in parameters):
        return {}
    named = any("norm" in kind.__name__.lower() for kind in type(module).__mro__)
    if named or any(re.search("(^|_)eps(ilon)?$", name) for name in vars(module)):
        return _try_norm(module, known)
    return {}


def _try_norm(module: nn.Module, known: dict[object, _Neutral]) -> _Neutral:
    """The neutral values by trial. ``known`` has the answers for modules of the same class and the same settings."""
    settings = {name: value for name, value in vars(module).items() if isinstance(value, (bool, int, float, str))}
    names = [name for name, parameter in module.named_parameters()]
    key = type(module), repr(settings), *((name, module.get_parameter(name).shape) for name in names)
    if key not in known:
        tries = [(factor, one) for factor in names for one in (1.0, 0.0)]
        found = next(((factor, one) for factor, one in tries if _normalizes(module, factor, one)), None)
        known[key] = {} if found is None else {found[0]: found[1]} | {name: 0.0 for name in names if name != found[0]}
    return known[key]


@torch.no_grad()
def _normalizes(module: nn.Module, factor: str, one: float) -> bool:
    """Whether a module normalizes its input, multiplies by ``1 - one`` plus this parameter, and adds the others.

    Tried on a copy with small inputs: channels last, channels first, and one vector per row.
    """
    try:
        twin = copy.deepcopy(module).train()
        twin = twin.to_empty(device="cpu") if any(parameter.is_meta for parameter in twin.parameters()) else twin
    except Exception:
        return False

    def output(inputs: Tensor, value: float, others: float = 0.0) -> Tensor:
        for name, parameter in twin.named_parameters():
            parameter.fill_(value if name == factor else others)
        outputs: Tensor = twin.forward(inputs.clone())
        return outputs.double()

    parameter = twin.get_parameter(factor)
    channels = parameter.numel()
    length = 5 if channels != 5 else 7
    for shape in ((2, length, channels), (2, channels, length, length), (length, channels)):
        numbers = torch.arange(1, 1 + torch.Size(shape).numel(), device=parameter.device)
        inputs = numbers.mul(0.7).sin().view(shape).to(parameter.dtype)
        try:
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings(action="ignore"):
                off, on, larger = output(inputs, one - 1), output(inputs, one), output(16 * inputs, one)
                shifted = output(inputs, one - 1, 1.0)
        except Exception:
            continue  # not the shape that it takes
        adds = len(list(twin.parameters())) == 1 or bool(shifted.any() and (shifted == shifted.reshape(-1)[0]).all())
        if adds and not off.any() and on.isfinite().all() and (on != on.reshape(-1)[0]).any():
            return bool(torch.allclose(on, larger, rtol=0.05, atol=0.05 * float(on.abs().max())))
    return False
