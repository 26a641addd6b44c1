"""A task for each row of a batch, on one model. The masks of a task are packed bits, one per weight."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from iterand.backend.reference import bit_patterns, match_layout
from iterand.distributions import is_conv1d

# Layers that compute each row of a batch by itself, with the parameters that they hold.
_ROWWISE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm)
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # read the parameters of their layers without calling them

Parts = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Masks as packed bits, and the tensors that are a task's own."""


class _OtherReads(TorchFunctionMode):
    """Refuses computations with tensors that a task changes, but for those of the layers that hold them."""

    def __init__(self) -> None:
        super().__init__()
        self.names: dict[int, str] = {}
        """The names of these tensors, by their identity."""
        self.in_layer = False

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self.in_layer and _tensors([result]):  # not a shape, a dtype or a device
            given = _tensors([*args, *(kwargs or {}).values()])
            for name in (self.names[id(one)] for one in given if id(one) in self.names):
                raise ValueError(
                    f"a task changes {name!r}, which the model also reads outside of its layer and so cannot have a "
                    "task per row; activate one task at a time"
                )
        return result


@dataclass(frozen=True)
class TaskRows:
    """Which task computes which rows of a batch."""

    order: Mapping[str | None, Sequence[int]]
    """Task → its rows. None: the base."""
    count: int
    """How many rows there are."""
    parts: Mapping[str, Parts]
    base: Mapping[str, Tensor]
    masked: Mapping[str, Mapping[str, Tensor]]
    """The masked weights of the tasks that keep them."""
    _reads: _OtherReads = field(default_factory=_OtherReads)

    def changed_modules(self, root: nn.Module, tensors: Mapping[str, Tensor]) -> dict[nn.Module, dict[str, str]]:
        """The modules that hold a tensor that a task changes: attribute → name of the tensor."""
        changed = {id(tensors[name]): name for masks, others in self.parts.values() for name in (*masks, *others)}
        self._reads.names = changed
        found: dict[nn.Module, dict[str, str]] = {}
        fused: set[nn.Module] = set()
        for path, module in root.named_modules():
            if isinstance(module, _FUSED):
                fused |= set(module.modules())
            held = {**module._parameters, **module._buffers}
            mine = {attribute: changed[id(one)] for attribute, one in held.items() if id(one) in changed}
            if not mine:
                continue
            if "forward" in vars(module):
                raise ValueError(
                    f"a task changes {next(iter(mine.values()))!r}, and {path or 'the model'!r} has a forward of its "
                    "own, which cannot have a task per row; activate one task at a time"
                )
            if module in fused or not (type(module) in _ROWWISE or is_conv1d(module)):
                raise ValueError(
                    f"a task changes {next(iter(mine.values()))!r}, and {path or 'the model'!r} is a "
                    f"{type(module).__name__}, which cannot have a task per row; activate one task at a time"
                )
            found[module] = mine
        return found

    @contextmanager
    def computed(self, modules: Mapping[nn.Module, Mapping[str, str]]) -> Iterator[None]:
        """Let these modules, which hold changed tensors, compute row by row."""
        try:
            for module, attributes in modules.items():
                module.forward = self._forward_of(module, attributes)
            with self._reads:
                yield
        finally:
            for module in modules:
                module.__dict__.pop("forward", None)

    def _forward_of(self, module: nn.Module, attributes: Mapping[str, str]) -> Callable[..., Tensor]:
        """The forward pass of such a module, row by row. Its hooks see the whole batch."""

        def forward(*positional: Tensor, **named: Tensor) -> Tensor:
            (inputs,) = *positional, *named.values()
            if inputs.shape[:1] != (self.count,):
                layer = next(iter(attributes.values())).rpartition(".")[0]
                raise ValueError(
                    f"{layer!r} gets a tensor of shape {list(inputs.shape)} for {self.count} tasks; give one task for "
                    "each row of the batch, and mask only layers that get these rows"
                )
            found = []
            self._reads.in_layer = True
            try:
                for task, rows in self.order.items():
                    twin = copy.copy(module)
                    twin._parameters = module._parameters | self._own(attributes, task)
                    part = inputs.index_select(0, torch.tensor(rows, device=inputs.device))
                    found.append(type(module).forward(twin, part))
            finally:
                self._reads.in_layer = False
            places = torch.tensor([row for rows in self.order.values() for row in rows], device=inputs.device)
            return torch.cat(found).index_select(0, places.argsort())

        return forward

    def _own(self, attributes: Mapping[str, str], task: str | None) -> dict[str, Any]:
        """The parameters of a module that are a task's own."""
        own: dict[str, Any] = {}
        if task is None:
            return own
        (masks, others), ready = self.parts[task], self.masked.get(task, {})
        for attribute, name in attributes.items():
            if name in others:
                own[attribute] = others[name]
            elif name in masks:
                own[attribute] = ready[name] if name in ready else apply_packed(self.base[name], masks[name])
        return own


def _tensors(values: Sequence[Any]) -> list[Tensor]:
    """The tensors among these values and in their tuples and lists."""
    inner = [one for many in values if isinstance(many, (tuple, list)) for one in many]
    return [one for one in (*values, *inner) if isinstance(one, Tensor)]


@torch.no_grad()
def apply_packed(base: Tensor, packed: Tensor, out: Tensor | None = None) -> Tensor:
    """θ ⊙ m for a mask of packed bits; pruned weights become +0."""
    out = torch.empty_like(base) if out is None else out
    count = base.numel()
    if base.device.type != "cpu" or not base.is_contiguous():
        shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
        mask = ((packed[:, None] >> shifts) & 1).bool().view(-1)[:count].view(base.shape)
        return out.copy_(torch.where(match_layout(mask, base), base, 0.0))
    weights, masked = (bit_patterns(one.view(-1)).numpy() for one in (base, out))
    np.multiply(weights, np.unpackbits(packed.numpy())[:count], out=masked)  # bit patterns, times 0 or 1
    return out
