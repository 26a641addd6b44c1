"""Runs over several processes, started by torchrun; a run in one process is one of one rank.

After every step all ranks hold the same state, bit for bit: gradients are averaged, batch norm and the sums of the
epoch are those of the whole batch, and everything else (weights, masks, randomization, the order of the data) is a
function of seed and scores. So any rank could write the checkpoint, and a run can resume with another number of ranks.
When something goes wrong every rank ends, and one of them says why.
"""

import hashlib
import inspect
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

from iterand import philox
from iterand.errors import IterandError
from iterand.lab.data import Batch, Split
from iterand.lab.data.dataset import Random
from iterand.lab.training.environment import Interrupted
from iterand.lab.training.folder import Checkpoint
from iterand.parametrization import masked_layers

_ORDINARY = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def share_batch_norms_(model: nn.Module, device: torch.device) -> None:
    """Let the batch norms of a model normalise by the whole batch, in place."""
    # The class is changed instead of the module, so that what others know of the module stays true.
    shared = nn.SyncBatchNorm if device.type == "cuda" else _CpuSyncBatchNorm
    for module in model.modules():
        kind = type(module)
        if kind in _ORDINARY:
            module.__class__ = shared
        elif parametrize.is_parametrized(module) and kind.__bases__[0] in _ORDINARY:
            # What it adds is masked: a class of its own, made by parametrize.
            own = {name: value for name, value in vars(kind).items() if name not in ("__dict__", "__weakref__")}
            module.__class__ = type(kind.__name__, (shared,), own)
        else:
            continue
        if device.type == "cuda":
            module.process_group = None  # type: ignore[assignment] # all ranks


class _Sum(torch.autograd.Function):
    """The sum over all ranks; every rank's loss depends on it, so its gradient is the sum over all ranks too."""

    @staticmethod
    def forward(ctx: Any, local: Tensor) -> Tensor:
        total = local.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        total = gradient.clone()
        dist.all_reduce(total)
        return total


class _CpuSyncBatchNorm(_BatchNorm):
    """What torch's SyncBatchNorm, which only runs on GPUs, does; in plain operations."""

    def forward(self, inputs: Tensor) -> Tensor:
        if not self.training:
            return super().forward(inputs)
        values = inputs.float()
        axes = [axis for axis in range(values.dim()) if axis != 1]
        shape = [1, -1] + [1] * (values.dim() - 2)
        local = torch.cat([values.sum(axes), values.new_tensor([values.numel() / values.shape[1]])])
        *_, count = total = _sum(local)
        mean = total[:-1] / count
        centred = values - mean.view(shape)
        variance = _sum(centred.square().sum(axes)) / count
        self._track(mean.detach(), variance.detach() * (count / (count - 1)).detach())
        outputs: Tensor = centred * (variance + self.eps).rsqrt().view(shape)
        if self.weight is not None:
            outputs = outputs * self.weight.view(shape) + self.bias.view(shape)
        return outputs.to(inputs.dtype)

    def _check_input_dim(self, inputs: Tensor) -> None:
        """Any number of dimensions: it stands for three classes."""

    def _track(self, mean: Tensor, variance: Tensor) -> None:
        if self.running_mean is None or self.running_var is None or self.num_batches_tracked is None:
            return
        self.num_batches_tracked.add_(1)
        factor = 1 / int(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean, factor)
        self.running_var.lerp_(variance, factor)


def _sum(local: Tensor) -> Tensor:
    total: Tensor = _Sum.apply(local)  # type: ignore[no-untyped-call]
    return total


def digests(model: nn.Module) -> tuple[list[str], Tensor]:
    """What a model holds, in words, and the digest of each as int64 on the CPU."""
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
    """The sum of all words, each times an odd number of its own, modulo 2⁶⁴: no single change leaves it as it is."""
    values = tensor.detach().reshape(-1)
    words = values.view(torch.int32 if values.element_size() % 4 == 0 else torch.uint8)
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for part in philox.chunks(len(words), words.device):
        total += (words[part].long() * (2 * philox.indices(part, words.device) + 1)).sum()
    return total


_GRACE_SECONDS = 3.0  # seconds a rank has to say what happened to it; torchrun gives the others 30


class ReportedByOtherRank(IterandError):
    """Another rank says what went wrong; this one only has to end."""


def error_to_raise(store: Store, number: int, count: int, error: Exception) -> Exception:
    """What this rank should raise in place of an error, so that it is said once.

    The store is torchrun's, so that it is there whoever is gone.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends the others once one has ended: we are ending
    try:
        if _is_lost_contact(error):
            return _name_the_lost(store, number, count, error)
        said = f"said/{hashlib.sha256(str(error).encode()).hexdigest()}"
        store.set(f"ended/{number}", "with an error of its own")
        if number == 0:
            store.set(said, "")
        elif _wait_for(store, [said]):  # the same error as on the first rank
            return ReportedByOtherRank()
    except dist.DistError:
        return IterandError(f"rank {number} lost contact with torchrun, which was killed; start the same command again")
    if number == 0 or not isinstance(error, IterandError | ValueError | OSError):
        return error
    return IterandError(f"rank {number}: {error}")


def _is_lost_contact(error: Exception) -> bool:
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


def _name_the_lost(store: Store, number: int, count: int, error: Exception) -> Exception:
    """The ranks that neither reported an error nor noticed one are those that are gone."""
    store.set(f"ended/{number}", "")
    _wait_for(store, [f"ended/{rank}" for rank in range(count)])
    ended = [rank for rank in range(count) if store.check([f"ended/{rank}"])]
    if any(store.get(f"ended/{rank}") for rank in ended) or number != min(ended):
        return ReportedByOtherRank()
    gone = [rank for rank in range(count) if rank not in ended]
    what = f"the ranks lost contact with each other ({str(error).splitlines()[0]})"
    if gone:
        names = f"rank {gone[0]}" if len(gone) == 1 else f"ranks {', '.join(map(str, gone))}"
        what = f"{names} ended without a word: killed, out of memory, or cut off"
    return IterandError(
        f"{what}; start the same command again, or give torchrun --max-restarts: it goes on from the last checkpoint"
    )


def _wait_for(store: Store, keys: list[str]) -> bool:
    deadline = time.monotonic() + _GRACE_SECONDS
    while not (found := all(store.check([key]) for key in keys)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


TIMEOUT = timedelta(minutes=10)
"""How long a rank waits for another that hangs; one that ended is noticed at once."""

Value = TypeVar("Value")


@dataclass
class Ranks:
    """This process among those of a run."""

    number: int = 0
    count: int = 1
    local: int = 0
    """The number on this machine."""
    _whole: int = field(default=0, repr=False)
    _vote: tuple[Tensor, dist.Work] | None = field(default=None, repr=False)

    @property
    def first(self) -> bool:
        """Whether this is the rank that writes and talks."""
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
        """What to call instead of the model in training: it computes the same, and averages gradients over the ranks.

        The model's batch norms are changed in place to use the statistics of the whole batch.
        """
        if self.count == 1:
            return model
        share_batch_norms_(model, device)
        # Buffers are the same on all ranks as it is, and there is one number a weight among them.
        known = inspect.signature(DistributedDataParallel).parameters
        buffers = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"  # the older name
        options: dict[str, Any] = {buffers: False, "init_sync": False, "gradient_as_bucket_view": True}
        return DistributedDataParallel(model, **options)

    def batches(self, split: Split, order: Tensor, size: int, random: Random | None = None) -> Iterator[Batch]:
        """This rank's part of every batch of ``size`` in this order; each example is in the part of one rank."""
        if not len(order):
            return
        if self.count == 1:
            yield from split.batches(order, size, random)
            return
        whole = torch.split(order, size)
        smallest = min(map(len, whole))
        if smallest < self.count:
            raise ValueError(
                f"an epoch has a batch of {smallest} examples, which {self.count} ranks cannot share; start fewer "
                "ranks, raise training.batch_size, or set data.drop_last=true if it is the last one"
            )
        # A part has as many examples in every full batch and no more in a smaller last one: one size cuts them all.
        parts = [batch[self._part(len(batch))] for batch in whole]
        mine = split.batches(torch.cat(parts), len(parts[0]), random)
        for batch, self._whole in zip(mine, map(len, whole)):
            yield batch

    def whole(self, part: int) -> int:
        """How many examples the batch under way has, of which ``part`` are this rank's."""
        return part if self.count == 1 else self._whole

    def weighted(self, loss: Tensor, part: int) -> Tensor:
        """A mean loss over this rank's part, such that the mean over ranks is that over all examples of the batch."""
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
        """The contiguous part of ``count`` things that is this rank's; parts differ by one at most."""
        each, more = divmod(count, self.count)
        start = self.number * each + min(self.number, more)
        return slice(start, start + each + (self.number < more))

    def seed(self, seed: int, iteration: int) -> None:
        """Begin an iteration: layers that draw by themselves draw other numbers on each rank, the same in any try."""
        if self.count > 1:
            low, high = philox.key(seed, f"rank {self.number} iteration {iteration}")
            torch.manual_seed(high << 32 | low)

    def any(self, asked: bool) -> bool:
        """Whether any rank asked a step ago, so that all act in the same step and none waits for the answer."""
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
        """What the first rank has."""
        if self.count == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, 0, device=torch.device("cpu"))
        return held[0]

    def checkpoint_from_first(self, saved: Checkpoint | None) -> Checkpoint | None:
        """The first rank's checkpoint, tensor by tensor: the others may not see its folder."""
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

    def compare(self, model: nn.Module, when: str) -> None:
        """Stop on all ranks if what a model holds is not the same on all of them."""
        if self.count == 1:
            return
        names, mine = digests(model)
        all_ranks = [torch.empty_like(mine) for _ in range(self.count)]
        dist.all_gather(all_ranks, mine)
        for place, name in enumerate(names):
            others = [str(rank) for rank in range(self.count) if all_ranks[rank][place] != all_ranks[0][place]]
            if others:
                raise IterandError(
                    f"{when} {name} differ between rank 0 and rank {', '.join(others)}; a device computes wrongly or "
                    "the ranks run different software: mend that, and start anew with --fresh"
                )


ALONE = Ranks()


@contextmanager
def joined() -> Iterator[Ranks]:
    """Join the other ranks, if torchrun started several; what goes wrong is raised as an error on one of them only."""
    count = int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1
    if count == 1:
        yield ALONE
        return
    shared, number, _ = next(iter(rendezvous("env://", timeout=TIMEOUT)))
    # torchrun may keep its store when it starts the ranks again; what the last try left in it must not be found.
    store = PrefixStore(f"iterand/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", shared)
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() and dist.is_nccl_available() else "gloo"
    dist.init_process_group(backend, store=store, rank=number, world_size=count, timeout=TIMEOUT)
    try:
        yield Ranks(number, count, int(os.environ.get("LOCAL_RANK", "0")))
    except Interrupted:
        dist.destroy_process_group()
        raise
    except Exception as error:
        raise error_to_raise(store, number, count, error) from None
    dist.destroy_process_group()
