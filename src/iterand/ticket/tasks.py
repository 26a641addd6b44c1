"""Many tasks on one model (``TaskSet``): tickets on its weights, switched in place.

The weights of the base are never written: a task is activated by pointing the tensors of the model to other memory, and
deactivated by pointing them back. What a task needs is kept as packed bits, one per masked weight, and its own tensors.
"""

import os
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from iterand import existing
from iterand.checks import check_int, shown, unknown
from iterand.errors import TicketError
from iterand.surgery import masked_layers, unwrap
from iterand.ticket.load import check_fits
from iterand.ticket.read import Ticket, read_ticket
from iterand.ticket.rows import Parts, TaskRows, apply_packed

_CACHE_BYTES = 512 << 20  # of masked weights, if the number of cached tasks is not given
_LISTED = 20  # names that a message lists


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

    The model runs as it is, with nothing added. Tasks are for inference: train further on a model of its own. Move or
    convert the model first, then make a TaskSet. Several threads may switch, but all of them run the same model.

    Args:
        base: An ordinary module with the weights that the tickets were saved on.
        cached: How many tasks keep their masked weights, so that switching back to one of them takes no time. Each
            takes as much memory as the weights that it masks. The default is as many as fit into 512 MiB, at least one.
    """

    def __init__(self, base: nn.Module, *, cached: int | None = None) -> None:
        if not isinstance(base, nn.Module):
            raise ValueError(
                f"base is {shown(base)}; it must be a torch.nn.Module with the weights that the tickets mask"
            )
        self._root = unwrap(base)
        if masked_layers(self._root):
            raise ValueError(
                "the base is masked; give TaskSet an ordinary model with the weights that the tickets mask"
            )
        self.model = base
        rule = "a number of tasks, at least 1"
        self._cached = None if cached is None else check_int("cached", cached, rule, low=1)
        state = self._root.state_dict(keep_vars=True)
        self._tensors: dict[str, Tensor] = {name: one for name, one in state.items() if isinstance(one, Tensor)}
        self._base = {name: tensor.detach() for name, tensor in self._tensors.items()}
        first: dict[int, str] = {}
        self._names = {name: first.setdefault(id(tensor), name) for name, tensor in self._tensors.items()}
        """The first of the names that a tensor has, if it is tied."""
        self._places = list(_places(self._root, self._tensors))
        self._seen = {name: (tensor.data_ptr(), _version(tensor)) for name, tensor in self._tensors.items()}
        """Memory and version of each tensor of the model when it was last known to be as it should."""
        self._digests: dict[str, str] = {}
        self._stale: set[str] = set()
        """The tensors of the base that no longer have their digests."""
        self._tasks: dict[str, _Task] = {}
        self._masked: OrderedDict[str, dict[str, Tensor]] = OrderedDict()
        """The masked weights of the tasks that were activated last."""
        self._active: str | None = None
        self._changed: dict[str, Tensor] = {}
        """What the tensors of the model are pointed to, if not to the base, by the first of their names."""
        self._by_row = False
        self._lock = threading.RLock()

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.RLock())
        for name, first in self._names.items():  # a copy of a model has memory of its own
            self._tensors[name].data = self._changed.get(first, self._base[first])
            self._seen[name] = 0, -1

    def add(self, name: str, ticket: Ticket | str | os.PathLike[str]) -> None:
        """Add a task. A ticket that does not fit the base is refused; its masks are decoded when first used."""
        if not isinstance(name, str) or not name.isprintable() or not name or name in self._tasks:
            raise ValueError(f"name is {shown(name)}; it must be a printable text that no other task has")
        if not isinstance(ticket, (Ticket, str, os.PathLike)):
            raise ValueError(f"ticket is a {type(ticket).__name__}; it must be a path, or what read_ticket gives")
        prefix = "" if isinstance(ticket, Ticket) else f"ticket {str(ticket)!r}: "
        opened = ticket if isinstance(ticket, Ticket) else read_ticket(ticket)
        with self._lock:
            if not self._tasks:
                self._digests.clear()
                self._stale.clear()
            self._refuse_changed()
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
        with self._lock:
            self._task(name)
            if name == self._active or self._by_row:
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

    @torch.inference_mode(False)
    def activate(self, name: str) -> nn.Module:
        """Make the model compute this task, in place; gives the model.

        A later switch may overwrite the masked weights, so clone what you keep of them, such as a state dict.
        """
        with self._lock:
            task = self._task(name)
            self._refuse_rows()
            masks, others = task.parts()
            self._refuse_changed(others)
            self._forget_written()
            if name == self._active and name in self._masked:
                return self.model
            if name not in self._masked:
                self._mask(name, masks)
            self._masked.move_to_end(name)
            self._point_to(self._masked[name] | {other: tensor.clone() for other, tensor in others.items()}, task)
            self._active = name
        return self.model

    @torch.inference_mode(False)
    def deactivate(self) -> nn.Module:
        """Go back to the base, bit for bit; gives the model."""
        with self._lock:
            self._refuse_rows()
            self._forget_written()
            moved = [name for name in self._changed if self._is_moved(name)]
            self._point_to({}, None)
            self._active = None
            if moved:
                raise ValueError(_moved_sentence(moved[0]))
        return self.model

    def overlap(self, first: str, second: str) -> dict[str, MaskOverlap]:
        """How many weights the masks of two tasks keep, for each layer that both mask."""
        with self._lock:
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
        convolutions, embeddings and layer norms, and no other module may read their weights directly.
        """
        if not isinstance(tasks, Sequence) or not all(task is None or isinstance(task, str) for task in tasks):
            raise ValueError(f"tasks is {shown(tasks)}; it must be a list with a name or None for each row")
        order: dict[str | None, list[int]] = {}
        for row, task in enumerate(tasks):
            order.setdefault(task, []).append(row)
        with self._lock:
            self._refuse_rows()
            parts = {task: self._task(task).parts() for task in order if task is not None}
            batch = TaskRows(order, len(tasks), parts, self._base, self._masked)
            modules = batch.changed_modules(self._root, self._tensors)
            active = self._active
            self.deactivate()
            self._refuse_changed({name for _, others in parts.values() for name in others})
            self._by_row = True
        try:
            with batch.computed(modules):
                yield self.model
        finally:
            self._by_row = False
            if active is not None:
                self.activate(active)

    # The parts

    def _task(self, name: str) -> "_Task":
        if isinstance(name, str) and name in self._tasks:
            return self._tasks[name]
        if not self._tasks:
            raise ValueError(f"there is no task {shown(name)}; add it first")
        sentence = unknown("task", name, self)
        if len(self) > _LISTED and "did you mean" not in sentence:
            sentence = f"unknown task {shown(name)}; there are {len(self)} others"
        raise ValueError(sentence)

    def _digest(self, name: str) -> str:
        first = self._names[name]
        if first not in self._digests:
            self._digests[first] = existing.digest(self._base[first])
        return self._digests[first]

    def _refuse_rows(self) -> None:
        if self._by_row:
            raise ValueError("the rows of a batch have a task each inside this block; leave it before you switch")

    def _is_moved(self, name: str) -> bool:
        """Whether a tensor of the model has other memory than it was given here."""
        expected = self._changed.get(self._names[name], self._base[name])
        return self._tensors[name].data_ptr() != expected.data_ptr()

    def _refuse_changed(self, own: Collection[str] = ()) -> None:
        """Refuse a model of which tensors were exchanged, or written to since tasks were added; but for a task's own.

        Only tensors whose memory or version has changed are looked at. While a task is active, its tensors are not
        those of the base, so their versions say nothing.
        """
        for name, holder, attribute, tensor in self._places:
            if holder.get(attribute) is not tensor:
                raise ValueError(_moved_sentence(name))
            first, seen = self._names[name], (tensor.data_ptr(), _version(tensor))
            if seen == self._seen[first]:
                continue
            if self._is_moved(name):
                raise ValueError(_moved_sentence(name))
            if first in self._changed:
                continue
            self._stale.discard(first)
            if first in self._digests and existing.digest(self._base[first]) != self._digests[first]:
                self._stale.add(first)
            self._seen[first] = seen
        for name in sorted(self._stale - {self._names[one] for one in own}):
            raise ValueError(
                f"{name!r} of the base has changed since tasks were added; load its weights again, or make another "
                "TaskSet"
            )

    def _forget_written(self) -> None:
        """Drop the masked weights of the active task if something has written to them."""
        for name in self._masked.get(self._active or "", {}):
            first = self._names[name]
            if (self._tensors[first].data_ptr(), _version(self._tensors[first])) != self._seen[first]:
                del self._masked[cast(str, self._active)]
                return

    def _mask(self, name: str, masks: Mapping[str, Tensor]) -> None:
        """Compute the masked weights of a task, in the memory of the one that was used least recently."""
        used: dict[str, Tensor] = {}
        needed = sum(self._base[one].nbytes for one in masks)
        while self._masked and not self._fits(needed):
            dropped, used = self._masked.popitem(last=False)
            if dropped == self._active:
                self.deactivate()
        self._masked[name] = {one: apply_packed(self._base[one], bits, used.get(one)) for one, bits in masks.items()}

    def _fits(self, needed: int) -> bool:
        """Whether the masked weights of one more task, so many bytes, can be kept beside those that are."""
        if self._cached is not None:
            return len(self._masked) < self._cached
        held = sum(weight.nbytes for weights in self._masked.values() for weight in weights.values())
        return held + needed <= _CACHE_BYTES

    @torch.no_grad()
    def _point_to(self, values: Mapping[str, Tensor], task: "_Task | None") -> None:
        """Let the tensors of the model have these values, and all others those of the base."""
        wanted = {self._names[name]: value for name, value in values.items()}
        for name, other in ({} if task is None else task.aliases).items():
            if other in values:
                wanted.setdefault(self._names[name], values[other])
        for name in [*self._changed.keys() - wanted.keys(), *wanted]:
            tensor = self._tensors[name]
            if name in wanted:
                tensor.data = self._changed[name] = wanted[name]
            else:
                tensor.data = self._base[name]
                del self._changed[name]
            if not tensor.is_inference():
                torch.autograd.graph.increment_version(tensor)  # so that a backward pass across a switch is refused
            self._seen[name] = tensor.data_ptr(), _version(tensor)


class _Task:
    """A ticket, decoded when it is first used."""

    def __init__(self, ticket: Ticket, base: Mapping[str, Tensor]) -> None:
        self.aliases = ticket.header.aliases
        self._ticket: Ticket | None = ticket
        self._base = base
        self._decoded: Parts = {}, {}

    @torch.inference_mode(False)
    def parts(self) -> Parts:
        """Masks as packed bits, and the tensors that are the task's own."""
        if self._ticket is not None:
            masks, weights = self._ticket.decode_layers()
            packed = {name: torch.from_numpy(np.packbits(mask.numpy().reshape(-1))) for name, mask in masks.items()}
            own = self._ticket.other_tensors() | weights
            self._decoded = ({name: bits.to(self._base[name].device) for name, bits in packed.items()},
                             {name: tensor.to(self._base[name].device) for name, tensor in own.items()})  # fmt: skip
            self._ticket = None
        return self._decoded


def _places(root: nn.Module, tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, dict[str, Any], str, Tensor]]:
    """The parameters and buffers among these tensors: name, the dict that holds it in its module, key, tensor."""
    for path, module in root.named_modules(remove_duplicate=False):
        for holder in (module._parameters, module._buffers):
            for attribute in holder if isinstance(holder, dict) else ():  # that of a scripted module is no dict
                name = f"{path}.{attribute}" if path else attribute
                if name in tensors and holder[attribute] is tensors[name]:
                    yield name, holder, attribute, tensors[name]


def _moved_sentence(name: str) -> str:
    return (
        f"{name!r} of the model is not where this TaskSet put it: the model was moved or converted, or another TaskSet "
        "is active on it; deactivate that one, or make a new TaskSet"
    )


def _version(tensor: Tensor) -> int:
    """How often the tensor was written to in place, as far as torch knows."""
    return 0 if tensor.is_inference() else tensor._version
