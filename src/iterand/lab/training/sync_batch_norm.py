"""Batch norm over all ranks: the statistics of the whole batch, on GPUs and on CPUs."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from iterand.errors import IterandError
from iterand.surgery import replace_base

_ORDINARY = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def share_batch_norms_(model: nn.Module, device: torch.device) -> None:
    """Make the batch norms of a model use the statistics of the whole batch, in place."""
    # The class is changed instead of the module, so that references to the module stay valid.
    shared = nn.SyncBatchNorm if device.type == "cuda" else _CpuSyncBatchNorm
    for name, module in model.named_modules():
        kind = type(module)
        if kind in _ORDINARY:
            module.__class__ = shared
        elif parametrize.is_parametrized(module) and kind.__bases__[0] in _ORDINARY:
            # Its bias is masked: torch's parametrize has given it a class of its own.
            module.__class__ = replace_base(kind, kind.__bases__[0], shared)
        elif isinstance(module, _BatchNorm) and not isinstance(module, shared):
            raise IterandError(
                f"{name!r} is a {kind.__name__}, a batch norm that cannot use the statistics of all ranks; use one of "
                "torch.nn's, or one process"
            )
        else:
            continue
        if device.type == "cuda":
            module.process_group = None  # all ranks


class _Sum(torch.autograd.Function):
    """The sum over all ranks; the loss of every rank depends on it, so its gradient is summed over all ranks too."""

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
    """torch's SyncBatchNorm, which runs on GPUs only, in plain operations for a CPU."""

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
        """Accept any number of dimensions: it replaces three classes."""

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
