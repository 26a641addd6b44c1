"""Distributed runs: several processes, started by torchrun; a run in one process has one rank.

After every step all ranks hold the same state, bit for bit: gradients are averaged, batch norm and the sums of the
epoch are those of the whole batch, and everything else (weights, masks, randomization, the order of the data) is a
function of seed and scores. So any rank could write the checkpoint, and a run can resume with another number of ranks.
After an error every rank ends, and one of them reports it.
"""

import gc
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from importlib import import_module
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

from iterand import philox
from iterand.errors import IterandError
from iterand.lab.data import Batch, Split
from iterand.lab.data.dataset import Random
from iterand.lab.training.checkpoint import Checkpoint
from iterand.lab.training.environment import Interrupted
from iterand.lab.training.rank_errors import error_to_raise
from iterand.lab.training.sync_batch_norm import share_batch_norms_
from iterand.surgery import masked_layers

TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another that hangs; that a rank has ended is noticed at once."""

Value = TypeVar("Value")


@dataclass
class Ranks:
    """This process among those of a run."""

    number: int = 0
    count: int = 1
    local: int = 0
    """The rank among those of this machine."""
    _whole: int = field(default=0, repr=False)
    _vote: tuple[Tensor, dist.Work] | None = field(default=None, repr=False)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes files and prints."""
        return self.number == 0

    def device(self, chosen: torch.device) -> torch.device:
        """This rank's own device of the chosen kind."""
        if self.count == 1 or chosen.type != "cuda":
            return chosen
        if str(chosen) != "cuda":
            raise ValueError(f"device is {str(chosen)!r}, but each rank takes a GPU of its own; use --device cuda")
        here = torch.cuda.device_count()
        if self.local >= here:
            raise ValueError(f"this machine has {here} GPUs, but more ranks; start at most {here}, or use --device cpu")
        own = torch.device("cuda", self.local)
        torch.cuda.set_device(own)
        return own

    def parallel(self, model: nn.Module, device: torch.device) -> nn.Module:
        """The model for training steps: the same outputs, with gradients averaged over the ranks.

        Batch norms of the model are changed in place to use the statistics of the whole batch.
        """
        if self.count == 1:
            return model
        share_batch_norms_(model, device)
        # Buffers are equal on all ranks anyway, and have one number per weight.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # the older name
        options: dict[str, Any] = {buffers: False, "gradient_as_bucket_view": True}
        if "init_sync" in known:  # not in torch 2.6
            options["init_sync"] = False
        return DistributedDataParallel(model, **options)

    def batches(self, split: Split, order: Tensor, size: int, random: Random | None = None) -> Iterator[Batch]:
        """This rank's part of every batch of ``size`` in this order; each example is in the part of one rank."""
        if not len(order):
            return
        if self.count == 1:
            yield from split.batches(order, size, random)
            return
        whole = torch.split(order, size)
        # A part has the same size in every full batch and is not larger in the last one, so one size splits them all.
        parts = [batch[self._part(len(batch))] for batch in whole]
        mine = split.batches(torch.cat(parts), len(parts[0]), random)
        for batch, self._whole in zip(mine, map(len, whole)):
            yield batch

    def whole(self, part: int) -> int:
        """The number of examples in the current batch, of which ``part`` are this rank's."""
        return part if self.count == 1 else self._whole

    def weighted(self, loss: Tensor, part: int) -> Tensor:
        """The mean loss over this rank's part, scaled so that the mean over ranks is the mean over the whole batch."""
        even, whole = part * self.count, self.whole(part)
        return loss if even == whole else loss * (even / whole)

    def sum_(self, tensor: Tensor) -> Tensor:
        """The sum over ranks, in place."""
        if self.count > 1:
            dist.all_reduce(tensor)
        return tensor

    def share_of(self, count: int) -> Tensor:
        """The examples among ``count`` that this rank evaluates."""
        return torch.arange(count)[self._part(count)]

    def _part(self, count: int) -> slice:
        """This rank's contiguous part of ``count`` items; the sizes of parts differ by at most one."""
        each, more = divmod(count, self.count)
        start = self.number * each + min(self.number, more)
        return slice(start, start + each + (self.number < more))

    def seed(self, seed: int, iteration: int) -> None:
        """Seed torch's generator for an iteration: different on each rank, the same after a resume."""
        if self.count > 1:
            low, high = philox.key(seed, f"rank {self.number} iteration {iteration}")
            torch.manual_seed(high << 32 | low)

    def any(self, asked: bool) -> bool:
        """Whether any rank asked in the previous step; so all ranks act in the same step, and none waits."""
        if self.count == 1:
            return asked
        before = self._vote
        flag = torch.tensor([asked], dtype=torch.int32)
        self._vote = flag, dist.all_reduce(flag, async_op=True)
        if before is None:
            return False
        before[1].wait()
        return bool(before[0])

    def from_first(self, value: Value) -> Value:
        """The value of the first rank."""
        if self.count == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, 0, device=torch.device("cpu"))
        return held[0]

    def from_all(self, value: Value) -> list[Value]:
        """The values of all ranks."""
        if self.count == 1:
            return [value]
        held = [value] * self.count
        dist.all_gather_object(held, value)
        return held

    def checkpoint_from_first(self, saved: Checkpoint | None) -> Checkpoint | None:
        """The checkpoint of the first rank, sent tensor by tensor: other machines may not have its folder."""
        if self.count == 1:
            return saved
        described = None
        if saved is not None:
            described = {name: (tensor.shape, tensor.dtype) for name, tensor in saved.tensors.items()}, saved.state
        described = self.from_first(described)
        if described is None:
            return None
        shapes, state = described
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
        for name, tensor in tensors.items():
            if saved is not None:
                tensor.copy_(saved.tensors[name])
            dist.broadcast(tensor, 0)
        return Checkpoint(tensors, state)

    def require_gradients(self, model: nn.Module) -> None:
        """Refuse a model of which some parameters took no part in a step: the ranks would wait for their gradients."""
        if self.count == 1:
            return
        for name, parameter in model.named_parameters():
            if parameter.requires_grad and parameter.grad is None:
                layer = name.partition(".parametrizations.")[0]
                raise IterandError(
                    f"{layer!r} takes no part in a training step, and ranks average the gradients of all layers; take "
                    "it out of the network, or train in one process"
                )

    def compare(self, model: nn.Module, when: str) -> None:
        """Raise on all ranks if the tensors of the model differ between them."""
        if self.count == 1:
            return
        names, mine = digests(model)
        all_ranks = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(all_ranks, mine)
        for index, name in enumerate(names):
            others = [str(rank) for rank in range(self.count) if all_ranks[rank][index] != all_ranks[0][index]]
            if others:
                raise IterandError(
                    f"{when} {name} differ between rank 0 and rank {', '.join(others)}; a device computes wrongly or "
                    "the ranks run different software: install the same, and start again with --fresh"
                )


ALONE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the other ranks, if torchrun started several; an error is raised with its message on one of them only."""
    count = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if count == 1:
        yield ALONE
        return
    shared, number, _ = next(iter(rendezvous("env://", timeout=TIMEOUT)))
    # torchrun may keep its store when it restarts the ranks: the prefix hides the keys of the previous attempt.
    store = PrefixStore(f"iterand/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
    # Imported later, as DistributedDataParallel does, its default arguments would hold the process group for ever.
    import_module("torch.distributed.nn.functional")
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=TIMEOUT)
    ranks = Ranks(number, count, int(os.environ.get("LOCAL_RANK", "0")))
    try:
        yield ranks
    except Interrupted:
        _leave(ranks)
        raise
    except Exception as error:
        raise error_to_raise(store, number, count, error) from None
    _leave(ranks)


def _leave(ranks: Ranks) -> None:
    """Destroy the process group, and end its threads.

    A thread of Gloo that still holds a tensor when the interpreter ends aborts the process. The threads end with the
    last reference to the group; those of a model are in cycles.
    """
    ranks._vote = None
    dist.destroy_process_group()
    gc.collect()


def digests(model: nn.Module) -> tuple[list[str], Tensor]:
    """A description and the digest of each tensor of a model, the digests as int64 on the CPU."""
    held: dict[str, Tensor] = {}
    for name, layer in masked_layers(model).items():
        parts = {"scores": layer.score, "weights": layer.weight, "draws": layer.draw}
        held |= {f"the {kind} of {name!r}": tensor for kind, tensor in parts.items()}
    known = {tensor.data_ptr() for tensor in held.values()}
    for name, tensor in model.state_dict().items():
        if tensor.data_ptr() not in known:
            held[f"the values of {name!r}"] = tensor
    return list(held), torch.stack([digest(tensor).cpu() for tensor in held.values()])


def digest(tensor: Tensor) -> Tensor:
    """The sum of all words, each times a different odd number, modulo 2⁶⁴: any single change changes it."""
    values = tensor.detach().reshape(-1)
    words = values.view(torch.int32 if values.element_size() % 4 == 0 else torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part in philox.chunks(len(words), words.device):
        total += (words[part].long() * (2 * philox.indices(part, words.device) + 1)).sum()
    return total
