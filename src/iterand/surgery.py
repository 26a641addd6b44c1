"""Attach masks to a model, find them again and detach them.

``attach`` and ``detach`` add and remove the masked parametrization of a parameter, ``masked_layers`` finds those that
are there. ``adapt_root_`` changes the model as a whole: a forward pass finds its cuts once.
"""

import copy
import functools
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from iterand.checks import shown
from iterand.parameter_kinds import Owner, parametrized
from iterand.parametrization import MaskedParametrization
from iterand.selection import Ranking

_RANKINGS = "_iterand_rankings"  # attribute of a masked model
_CUTS = "_iterand_cuts"  # attribute of the class that ``adapt_root_`` makes
_SAMPLES = "_iterand_samples"  # attribute of the call of a layer with Bernoulli masks
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
def attach(group: list[Owner], mask: MaskedParametrization, value: Tensor | None) -> None:
    """Mask the parameter of these owners and set its weights to ``value``; None: they stay as they are."""
    first, *tied = group
    for owner in group:
        if _ORDER not in vars(owner.module):
            setattr(owner.module, _ORDER, tuple(owner.module._parameters))
    first.parameter.requires_grad_(False)
    first.parameter.grad = None
    if value is not None:
        first.parameter.copy_(value)
    # A buffer: what averages, regularizes or counts the parameters of a model must leave these weights alone.
    delattr(first.module, first.attribute)
    first.module.register_buffer(first.attribute, first.parameter.detach())
    parametrize.register_parametrization(first.module, first.attribute, mask, unsafe=True)
    _adapt_class(first.module)
    shared = cast(nn.ModuleDict, first.module.parametrizations)[first.attribute]
    mask.attach_to(shared)
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
    if _sampled(module) and not hasattr(generated.__call__, _SAMPLES):
        generated.__call__ = _with_samples(generated.__call__)
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


def _with_samples(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call of a layer that has Bernoulli masks: by itself it is a pass, in which they are sampled anew."""

    @functools.wraps(call)
    def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        sampled = [mask for module in self.modules() for mask in _sampled(module)]
        for mask in sampled:
            mask.begin_pass()
        try:
            return call(self, *args, **kwargs)
        finally:
            for mask in sampled:
                mask.end_pass()

    setattr(run, _SAMPLES, True)
    return run


def _sampled(module: nn.Module) -> list[MaskedParametrization]:
    """The Bernoulli masks of a module."""
    masks = [one[0] for one in parametrized(module).values()]
    return [one for one in masks if isinstance(one, MaskedParametrization) and one.settings.mask == "bernoulli"]


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


def _refuse_tying(model: nn.Module) -> None:
    for name, layer in masked_layers(model).items():
        if len(layer.owners) > 1:
            raise ValueError(
                f"{name!r} is masked and stays tied; call tie_weights, and resize_token_embeddings, which calls it, "
                "before prune_"
            )


@dataclass(frozen=True)
class MaskedLayer:
    """One masked tensor of a model: weights, scores, mask and draws."""

    name: str
    """Its qualified name in this model."""
    parametrization: MaskedParametrization
    weight: Tensor
    """θ, the random weights, kept and pruned."""
    owners: tuple[tuple[nn.Module, str], ...]
    """The modules that hold it, and under which attribute; more than one if it is tied."""

    @property
    def mask(self) -> Tensor:
        """m: true where the weight is kept."""
        return self.parametrization.mask

    @property
    def score(self) -> nn.Parameter:
        """s, the scores: a parameter."""
        return self.parametrization.score

    @property
    def draw(self) -> Tensor:
        """The round of randomization in which each weight was last redrawn; 0 for initial weights."""
        return self.parametrization.draw


def masked_layers(model: nn.Module) -> dict[str, MaskedLayer]:
    """The masked tensors of a model by qualified name; a tied tensor once."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"model is {shown(model)}; it must be a torch.nn.Module")
    found: dict[MaskedParametrization, MaskedLayer] = {}
    for path, module in unwrap(model).named_modules():
        if "parametrizations" not in module._modules:
            continue  # for speed; the next line alone would do
        for attribute, parametrizations in parametrized(module).items():
            mask = parametrizations[0]
            if not isinstance(mask, MaskedParametrization):
                continue
            name = f"{path}.{attribute}" if path else attribute
            first = found.get(mask)
            owners = (*(first.owners if first else ()), (module, attribute))
            found[mask] = MaskedLayer(first.name if first else name, mask, parametrizations.original, owners)
    return {layer.name: layer for layer in found.values()}


def require_masked_layers(model: nn.Module) -> dict[str, MaskedLayer]:
    """The masked tensors of a model that must have some."""
    layers = masked_layers(model)
    if not layers:
        raise ValueError(f"{type(unwrap(model)).__name__} has no masked layer; call prune_ on it first")
    for name, layer in layers.items():
        if _is_sharded(layer.score) or layer.score.shape != layer.parametrization.draw.shape:
            raise ValueError(
                f"the scores of {name!r} are spread over several processes (FSDP), but a mask is cut over a whole "
                "tensor; use DistributedDataParallel"
            )
    return layers


def _is_sharded(tensor: Tensor) -> bool:
    loaded = sys.modules.get("torch.distributed.tensor")  # whoever has a DTensor has imported it
    return loaded is not None and isinstance(tensor, loaded.DTensor)


def by_ranking(layers: Iterable[MaskedLayer]) -> list[list[MaskedLayer]]:
    """The layers, those of one ranking together."""
    groups: dict[Ranking[MaskedParametrization], list[MaskedLayer]] = {}
    for layer in layers:
        groups.setdefault(layer.parametrization.ranking, []).append(layer)
    return list(groups.values())


def require_whole_rankings(model: nn.Module, layers: Mapping[str, MaskedLayer]) -> None:
    """Refuse layers that are ranked together with others that are not among them, since they share one count."""
    masks = {layer.parametrization for layer in layers.values()}
    for layer in layers.values():
        for rival in layer.parametrization.ranking.rivals(layer.parametrization):
            if rival not in masks:
                raise ValueError(
                    f"{layer.name!r} is ranked together with {rival.name!r}, which is not masked in "
                    f"{type(unwrap(model)).__name__}; give the whole model that was pruned"
                )


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and data-parallel wrappers."""
    while True:
        if isinstance(model, (nn.parallel.DistributedDataParallel, nn.DataParallel)):
            model = model.module
        elif "_orig_mod" in model._modules:
            model = cast(nn.Module, model._modules["_orig_mod"])
        else:
            return model


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
    module.__class__ = replace_base(type(module), generated, plain)
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


def adapt_root_(root: nn.Module, rankings: list[Ranking[MaskedParametrization]]) -> None:
    """Make a forward pass of the model find its cuts once, and refuse what would go wrong with masked tied tensors."""
    # A subclass, as in parametrize. Forward hooks would not run after a KeyboardInterrupt in the middle of a pass. If
    # the root is parametrized itself, the new class becomes the base of parametrize's class, which torch edits.
    generated = _class_of_parametrizations(root)
    base: type[nn.Module] = type(root) if generated is None else generated.__bases__[0]
    setattr(root, _RANKINGS, rankings)
    root.__class__ = replace_base(type(root), base, _adapted(base))


def _adapted(base: type[nn.Module]) -> type[nn.Module]:
    """The class of masked models of this class: one, so that torch.func takes several for an ensemble."""

    def one_pass(method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
            # A slice of a Sequential is of the same class, but has no rankings of its own.
            current = cast("list[Ranking[MaskedParametrization]]", getattr(self, _RANKINGS, []))
            sampled = [mask for ranking in current for mask in ranking.members if mask.settings.mask == "bernoulli"]
            previous = [ranking.begin() for ranking in current]
            for mask in sampled:
                mask.begin_pass()
            try:
                return method(self, *args, **kwargs)
            finally:
                for mask in sampled:
                    mask.end_pass()
                for ranking, before in zip(current, previous):
                    ranking.end(before)

        return run

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        copied = memo[id(self)] = type(self).__new__(type(self))
        copied.__setstate__(copy.deepcopy(cast(Any, base).__getstate__(self), memo))  # type: ignore[no-untyped-call]
        return copied

    def tie_weights(self: nn.Module, *args: Any, **options: Any) -> Any:
        _refuse_tying(self)
        return cast(Any, base).tie_weights(self, *args, **options)

    passes = {name: getattr(base, name) for name in _PASSES if hasattr(base, name)}
    for known in base.__subclasses__():
        ours = _CUTS in vars(known) and known.__bases__ == (base,)
        if ours and all(getattr(known, name).__wrapped__ is method for name, method in passes.items()):
            return known
    namespace: dict[str, Any] = {name: one_pass(method) for name, method in passes.items()}
    namespace |= {"__getstate__": _refuse_pickling, "__module__": base.__module__, _CUTS: True}
    if not hasattr(base, "__deepcopy__"):  # by default, copies and pickles are made from __getstate__
        namespace["__deepcopy__"] = deepcopy
    if hasattr(base, "tie_weights"):  # as Hugging Face's models have
        namespace["tie_weights"] = tie_weights
    return type(base.__name__, (base,), namespace)


def restore_roots_(model: nn.Module) -> None:
    """Undo ``adapt_root_`` for the model and those of its parts that were pruned by themselves."""
    for root in model.modules():
        if _RANKINGS in root.__dict__:
            delattr(root, _RANKINGS)
            caching = next(kind for kind in type(root).__mro__ if _CUTS in vars(kind))
            root.__class__ = replace_base(type(root), caching, caching.__bases__[0])


def _class_of_parametrizations(module: nn.Module) -> type | None:
    """The class with the properties that parametrize made for a module. None if it is not parametrized."""
    names = tuple(parametrized(module))
    for kind in type(module).__mro__:
        if any(isinstance(vars(kind).get(name), property) for name in names):
            return kind
    return None


def replace_base(kind: type, old: type, new: type) -> type:
    """A class with the base ``old`` replaced by ``new``. Classes between them are recreated."""
    if kind is old:
        return new
    bases = tuple(replace_base(base, old, new) if old in base.__mro__ else base for base in kind.__bases__)
    return type(kind.__name__, bases, _namespace(kind))


def _namespace(kind: type, *without: str) -> dict[str, Any]:
    """The namespace of a class, as an argument for ``type``."""
    return {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__", *without)}
