"""Several tensors as one piece of work: which program works on which part of which tensor."""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

BLOCK = 1024
"""Elements a program works on at a time."""

EXACT = {"enable_fp_fusion": False}
"""How kernels are compiled: no product is fused with a sum unless the code says so, since that rounds differently."""


class Layers:
    """Where the elements of several tensors lie, as numbers on the device.

    A tensor lies in memory either in the order of its indices or, as convolutions want it, with its channels last; a
    kernel walks through memory and computes an index only where it needs one.
    """

    def __init__(self, tensors: Sequence[Tensor], block: int = BLOCK) -> None:
        device = tensors[0].device
        self.device = device
        self.sizes = [tensor.numel() for tensor in tensors]
        blocks = [triton.cdiv(size, block) for size in self.sizes]
        self.blocks = sum(blocks)
        owner = torch.repeat_interleave(torch.arange(len(tensors)), torch.tensor(blocks)).int()
        self.owner = sent(owner, device)
        """The tensor of each block."""
        shapes = [_shape(tensor) for tensor in tensors]
        rows = zip(self.sizes, [sum(blocks[:i]) for i in range(len(blocks))], *zip(*shapes))
        self.table = sent(torch.tensor(list(rows)), device)
        """A row a tensor: its elements, its first block, its channels, the pixels of a channel (1 if these lie in the
        order of their indices)."""


def pointers(tensors: Sequence[Tensor]) -> Tensor:
    """The addresses of tensors, on their device; the host does not wait."""
    return sent(torch.tensor([tensor.data_ptr() for tensor in tensors]), tensors[0].device)


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device; the host does not wait."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


def wrote(tensors: Iterable[Tensor]) -> None:
    """Tell torch, which counts what is written to a tensor, that a kernel has written to these."""
    for tensor in tensors:
        increment_version(tensor)


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Triton launches on the present device, which need not be the one of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor lies in memory in one of the two ways that kernels know."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def same_order(*tensors: Tensor) -> bool:
    """Whether tensors of one shape lie in memory in the same order."""
    first = tensors[0]
    steps = [
        [step for step, size in zip(tensor.stride(), tensor.shape) if size > 1] for tensor in tensors
    ]  # fmt: skip
    return all(tensor.shape == first.shape and own == steps[0] for tensor, own in zip(tensors, steps))


def _shape(tensor: Tensor) -> tuple[int, int]:
    if tensor.is_contiguous():
        return 1, 1
    if not is_dense(tensor):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps")
    return tensor.shape[1], tensor.shape[2] * tensor.shape[3]


@triton.jit
def locate(owner, table, block, BLOCK: tl.constexpr):
    """Tensor, where a block of its memory starts, and how many elements the block has."""
    layer = tl.load(owner + block)
    start = (block - tl.load(table + layer * 4 + 1)) * BLOCK
    return layer, start, tl.minimum(tl.load(table + layer * 4) - start, BLOCK).to(tl.int32)


@triton.jit
def index_of(table, layer, start, lane):
    """The indices of the elements at these places of a tensor's memory."""
    channels = tl.load(table + layer * 4 + 2)
    pixels = tl.load(table + layer * 4 + 3)
    whole = channels * pixels
    before = start % whole  # divisions of 32 bits from here on
    place = before.to(tl.int32) + lane
    inside = place % whole.to(tl.int32)
    index = place - inside + inside % channels.to(tl.int32) * pixels.to(tl.int32) + inside // channels.to(tl.int32)
    return (start - before) + tl.where(pixels == 1, place, index)


@triton.jit
def position_of(table, layer, index):
    """Where in a tensor's memory the elements with these indices lie."""
    channels = tl.load(table + layer * 4 + 2)
    pixels = tl.load(table + layer * 4 + 3)
    inside = index % (channels * pixels)
    return index - inside + inside % pixels * channels + inside // pixels


@triton.jit
def floats(addresses, layer):
    """The address of one tensor of float32 among several."""
    return tl.load(addresses + layer).to(tl.pointer_type(tl.float32))
