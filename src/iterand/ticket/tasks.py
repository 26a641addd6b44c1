"""Many tasks on one model (``TaskSet``): tickets on its weights, switched in place.

The weights of the base are never written: a task is activated by pointing the tensors of the model to other memory, and
deactivated by pointing them back. What a task needs is kept as packed bits, one per masked weight, and its own tensors.
"""

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from iterand import existing
from iterand.backend.reference import match_layout
from iterand.checks import check_int, unknown
from iterand.distributions import is_conv1d
from iterand.errors import TicketError
from iterand.parametrization import masked_layers, unwrap
from iterand.ticket.load import check_fits
from iterand.ticket.read import Ticket, read_ticket

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Layers that compute each row of a batch by itself, with the parameters that they hold.
_ROWWISE = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Embedding, nn.LayerNorm)
_FUSED = (nn.MultiheadAttention, nn.TransformerEncoderLayer)  # read the parameters of their layers without calling them


@dataclass(frozen=True)
class MaskOverlap:
    """How many weights of a layer two masks keep."""

    weights: int
    """Number of weights."""
    first: int
    """Kept by the first mask."""
    second: int
    """Kept by the second mask."""
    both: int
    """Kept by both."""

    @property
    def share(self) -> float:
        """Weights that both keep, as a share of those that either keeps (the Jaccard index)."""
        either = self.first + self.second - self.both
        return self.both / either if either else 1.0


class TaskSet:
    """Many tasks on one model, one of them active at a time.

    The model runs as it is, with nothing added. Tasks are for inference: train further on a model of its own.

    Args:
        base: An ordinary module with the weights that the tickets were saved on.
        cached: How many tasks keep their masked weights, so that switching back to one of them takes no time. Each
            takes as much memory as the weights that it masks.
    """

    def __init__(self, base: nn.Module, *, cached: int = 1) -> None:
        if not isinstance(base, nn.Module):
            raise ValueError(f"base is {base!r}; it must be a torch.nn.Module with the weights that the tickets mask")
        self._root = unwrap(base)
        if masked_layers(self._root):
            raise ValueError(
                "the base is masked; give TaskSet an ordinary model with the weights that the tickets mask"
            )
        self.model = base
        self._cached = check_int("cached", cached, "a number of tasks, at least 1", low=1)
        state = self._root.state_dict(keep_vars=True)
        self._tensors: dict[str, Tensor] = {name: one for name, one in state.items() if isinstance(one, Tensor)}
        self._base = {name: tensor.detach() for name, tensor in self._tensors.items()}
        self._digests: dict[str, str] = {}
        self._tasks: dict[str, _Task] = {}
        self._masked: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        """The masked weights of the tasks that were activated last."""
        self._active: str | None = None
        self._changed: set[str] = set()

    def add(self, name: str, ticket: Ticket | str | os.PathLike[str]) -> None:
        """Add a task. A ticket that does not fit the base is refused; its masks are decoded when first used."""
        if not isinstance(name, str) or not name or name in self._tasks:
            raise ValueError(f"name is {name!r}; it must be a text that no other task has")
        prefix = "" if isinstance(ticket, Ticket) else f"ticket {str(ticket)!r}: "
        opened = ticket if isinstance(ticket, Ticket) else read_ticket(ticket)
        try:
            if opened.base is None:
                raise TicketError("it holds all its weights itself, so it is no task of a base; use load_ticket")
            check_fits(opened, self._root)
            opened.check_base(self._base, self._digest)
        except TicketError as error:
            raise TicketError(f"{prefix}{error}") from None
        self._tasks[name] = _Task(opened, self._base)

    def remove(self, name: str) -> None:
        """Remove a task; if it is active, the base is active afterwards."""
        self._task(name)
        if name == self._active:
            self.deactivate()
        self._masked.pop(name, None)
        del self._tasks[name]

    @property
    def active(self) -> str | None:
        """The name of the active task. None: the base."""
        return self._active

    def __iter__(self) -> Iterator[str]:
        return iter(self._tasks)

    def __len__(self) -> int:
        return len(self._tasks)

    def __contains__(self, name: object) -> bool:
        return name in self._tasks

    def activate(self, name: str) -> nn.Module:
        """Make the model compute this task, in place; gives the model."""
        task = self._task(name)
        if name == self._active:
            return self.model
        masks, others = task.parts()
        if name not in self._masked:
            self._mask(name, masks)
        self._masked.move_to_end(name)
        self._point_to(self._masked[name] | {other: tensor.clone() for other, tensor in others.items()}, task)
        self._active = name
        return self.model

    def deactivate(self) -> nn.Module:
        """Go back to the base, bit for bit; gives the model."""
        self._point_to({}, None)
        self._active = None
        return self.model

    def overlap(self, first: str, second: str) -> dict[str, MaskOverlap]:
        """How many weights the masks of two tasks keep, for each layer that both mask."""
        ours, theirs = self._task(first).parts()[0], self._task(second).parts()[0]
        counted = {}
        for name in ours.keys() & theirs.keys():
            a, b = (np.unpackbits(packed[name].cpu().numpy()) for packed in (ours, theirs))
            counts = (int(np.count_nonzero(mask)) for mask in (a, b, a & b))
            counted[name] = MaskOverlap(self._base[name].numel(), *counts)
        return {name: counted[name] for name in ours if name in counted}

    @contextmanager
    def rows(self, tasks: Sequence[str | None]) -> Iterator[nn.Module]:
        """Let row i of the batches in this block be computed by task i; None: by the base.

        Rows are the first axis of the input of every layer that a task changes. These must be linear layers,
        convolutions, embeddings and layer norms.
        """
        order: dict[str | None, list[int]] = {}
        for row, task in enumerate(tasks):
            order.setdefault(task, []).append(row)
        parts = {task: self._task(task).parts() for task in order if task is not None}
        modules = self._changed_modules(parts)
        active = self._active
        self.deactivate()
        try:
            for module, attributes in modules.items():
                module.forward = self._by_rows(module, attributes, parts, order, len(tasks))
            yield self.model
        finally:
            for module in modules:
                module.__dict__.pop("forward", None)
            if active is not None:
                self.activate(active)

    # The parts

    def _task(self, name: str) -> "_Task":
        if name not in self._tasks:
            raise ValueError(unknown("task", name, self) if self._tasks else f"there is no task {name!r}; add it first")
        return self._tasks[name]

    def _digest(self, name: str) -> str:
        if name not in self._digests:
            self._digests[name] = existing.digest(self._base[name])
        return self._digests[name]

    def _mask(self, name: str, masks: Mapping[str, Tensor]) -> None:
        """Compute the masked weights of a task, in the memory of the one that was used least recently."""
        used: dict[str, Tensor] = {}
        while len(self._masked) >= self._cached:
            dropped, used = self._masked.popitem(last=False)
            if dropped == self._active:
                self.deactivate()
        self._masked[name] = {one: _apply(self._base[one], bits, used.get(one)) for one, bits in masks.items()}

    @torch.no_grad()
    def _point_to(self, values: Mapping[str, Tensor], task: "_Task | None") -> None:
        """Let the tensors of the model have these values, and all others those of the base."""
        wanted = dict(values)
        for name, other in ({} if task is None else task.aliases).items():
            if other in values and self._tensors[name] is not self._tensors[other]:
                wanted[name] = values[other]
        for name in self._changed - wanted.keys():
            self._tensors[name].data = self._base[name]
        self._changed |= wanted.keys()
        for name, value in wanted.items():
            self._tensors[name].data = value
        self._changed = set(wanted)

    def _changed_modules(self, parts: Mapping[str, "_Parts"]) -> dict[nn.Module, dict[str, str]]:
        """The modules that hold a tensor that a task changes: attribute → name of the tensor."""
        changed = {id(self._tensors[name]): name for masks, others in parts.values() for name in (*masks, *others)}
        found: dict[nn.Module, dict[str, str]] = {}
        fused: set[nn.Module] = set()
        for path, module in self._root.named_modules():
            if isinstance(module, _FUSED):
                fused |= set(module.modules())
            held = {**module._parameters, **module._buffers}
            mine = {attribute: changed[id(one)] for attribute, one in held.items() if id(one) in changed}
            if not mine:
                continue
            if module in fused or not (type(module) in _ROWWISE or is_conv1d(module)):
                raise ValueError(
                    f"a task changes {next(iter(mine.values()))!r}, and {path or 'the model'!r} is a "
                    f"{type(module).__name__}, which cannot have a task per row; activate one task at a time"
                )
            found[module] = mine
        return found

    def _by_rows(
        self,
        module: nn.Module,
        attributes: Mapping[str, str],
        parts: Mapping[str, "_Parts"],
        order: Mapping[str | None, Sequence[int]],
        count: int,
    ) -> Callable[[Tensor], Tensor]:
        def forward(inputs: Tensor) -> Tensor:
            if inputs.shape[:1] != (count,):
                raise ValueError(
                    f"a {type(module).__name__} gets a tensor of shape {list(inputs.shape)} for {count} tasks; give "
                    "one task for each row of the batch"
                )
            outputs: Tensor | None = None
            for task, rows in order.items():
                twin = copy.copy(module)
                twin.__dict__.pop("forward")
                twin._parameters = module._parameters | self._own(attributes, task, parts)
                index = torch.tensor(rows, device=inputs.device)
                part = twin(inputs.index_select(0, index))
                outputs = part.new_empty((count, *part.shape[1:])) if outputs is None else outputs
                outputs = outputs.index_copy(0, index, part)
            if outputs is None:
                raise ValueError("tasks is empty; give one task for each row of the batch")
            return outputs

        return forward

    def _own(self, attributes: Mapping[str, str], task: str | None, parts: Mapping[str, "_Parts"]) -> dict[str, Any]:
        """The parameters of a module that are a task's own."""
        own: dict[str, Any] = {}
        masks, others = parts[task] if task is not None else ({}, {})
        for attribute, name in attributes.items():
            if name in others:
                own[attribute] = others[name]
            elif name in masks:
                ready = self._masked.get(task, {}) if task is not None else {}
                own[attribute] = ready[name] if name in ready else _apply(self._base[name], masks[name])
        return own


_Parts = tuple[dict[str, Tensor], dict[str, Tensor]]
"""Masks as packed bits, and the tensors that are a task's own."""


class _Task:
    """A ticket, decoded when it is first used."""

    def __init__(self, ticket: Ticket, base: Mapping[str, Tensor]) -> None:
        self.aliases = ticket.header.aliases
        self._ticket: Ticket | None = ticket
        self._base = base
        self._decoded: _Parts = {}, {}

    def parts(self) -> "_Parts":
        """Masks as packed bits, and the tensors that are the task's own."""
        if self._ticket is not None:
            masks, weights = self._ticket.decode_layers()
            packed = {name: torch.from_numpy(np.packbits(mask.numpy().reshape(-1))) for name, mask in masks.items()}
            own = self._ticket.other_tensors() | weights
            self._decoded = ({name: bits.to(self._base[name].device) for name, bits in packed.items()},
                             {name: tensor.to(self._base[name].device) for name, tensor in own.items()})  # fmt: skip
            self._ticket = None
        return self._decoded


@torch.no_grad()
def _apply(base: Tensor, packed: Tensor, out: Tensor | None = None) -> Tensor:
    """θ ⊙ m for a mask of packed bits; pruned weights become +0."""
    out = torch.empty_like(base) if out is None else out
    count = base.numel()
    if base.device.type != "cpu" or not base.is_contiguous():
        shifts = torch.arange(7, -1, -1, dtype=torch.uint8, device=packed.device)
        mask = ((packed[:, None] >> shifts) & 1).bool().view(-1)[:count].view(base.shape)
        return out.copy_(torch.where(match_layout(mask, base), base, 0.0))
    kind = _INTEGERS[base.dtype.itemsize]
    weights, masked = base.reshape(-1).view(kind).numpy(), out.view(-1).view(kind).numpy()
    np.multiply(weights, np.unpackbits(packed.numpy())[:count], out=masked)  # bit patterns, times 0 or 1
    return out
