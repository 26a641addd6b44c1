"""Shared parts of the kernels: tables of the layers of a model, memory layout, ranking keys, masks.

Host side: ``Layers`` and ``pointers`` describe several tensors to one kernel; ``cached`` keeps operations that are
prepared for a set of tensors. Device side (``@triton.jit``): element index ↔ offset in memory, float32 score ↔ integer
key in the same order, the mask of a cut, and writing the cuts of a group of layers that are ranked together.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.graph import increment_version

BLOCK = 1024
"""Elements per block."""
EXACT = {"enable_fp_fusion": False}
"""Compile options: no implicit fused multiply-add, which would round differently from torch."""


# Host side: tables of layers, layouts, launches.


class Layers:
    """Sizes and memory layouts of several tensors, as tables on the device.

    A tensor is contiguous or channels last. A kernel goes through memory in order, one block of elements per program or
    step, and computes the index of an element only where it needs it.
    """

    def __init__(self, tensors: Sequence[Tensor], block: int = BLOCK) -> None:
        device = tensors[0].device
        self.device = device
        self.sizes = [tensor.numel() for tensor in tensors]
        blocks = [triton.cdiv(size, block) for size in self.sizes]
        self.blocks = sum(blocks)
        block_layer = torch.repeat_interleave(torch.arange(len(tensors)), torch.tensor(blocks)).int()
        self.block_layer = to_device_async(block_layer, device)
        """For each block, the number of its layer (int32)."""
        self.layouts = [_channels_and_pixels(tensor) for tensor in tensors]
        """For each layer, its channels and pixels per channel; 1 and 1 if the tensor is contiguous."""
        rows = zip(self.sizes, [sum(blocks[:i]) for i in range(len(blocks))], *zip(*self.layouts))
        self.table = to_device_async(torch.tensor(list(rows)), device)
        """For each layer (int64): number of elements, first block, and the two numbers of its layout."""


def pointers(tensors: Sequence[Tensor | None]) -> Tensor:
    """The addresses of tensors (0 for None), as a tensor on their device, without a host sync."""
    device = next(tensor.device for tensor in tensors if tensor is not None)
    addresses = [0 if tensor is None else tensor.data_ptr() for tensor in tensors]
    return to_device_async(torch.tensor(addresses), device)


def to_device_async(numbers: Tensor, device: torch.device) -> Tensor:
    """Copy a host tensor to a device without a host sync."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


def bump_version(tensors: Iterable[Tensor]) -> None:
    """Increment torch's version counters of tensors that a kernel has written to."""
    for tensor in tensors:
        increment_version(tensor)


def launching_on(device: torch.device) -> AbstractContextManager[Any]:
    """Make ``device`` current: Triton launches on the current device, whatever the device of the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def is_dense(tensor: Tensor) -> bool:
    """Whether a tensor is contiguous or channels last."""
    return tensor.is_contiguous() or (tensor.dim() == 4 and tensor.is_contiguous(memory_format=torch.channels_last))


def same_order(*tensors: Tensor) -> bool:
    """Whether tensors have the same shape and memory layout."""
    first = tensors[0]
    steps = [
        [step for step, size in zip(tensor.stride(), tensor.shape) if size > 1] for tensor in tensors
    ]  # fmt: skip
    return all(tensor.shape == first.shape and strides == steps[0] for tensor, strides in zip(tensors, steps))


def _channels_and_pixels(tensor: Tensor) -> tuple[int, int]:
    if tensor.is_contiguous():
        return 1, 1
    if not is_dense(tensor):
        raise ValueError(f"a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} has gaps")
    return tensor.shape[1], tensor.shape[2] * tensor.shape[3]


# Host side: cache of prepared operations.

_CACHE_SIZE = 64  # prepared operations in the cache
Operation = TypeVar("Operation")
_cache: OrderedDict[tuple[Any, ...], Any] = OrderedDict()


def cached(key: tuple[Any, ...], make: Callable[[], Operation]) -> Operation:
    """The cached operation for this key; ``make`` creates it. Kernels read addresses, so the key must contain all."""
    if key not in _cache:
        _cache[key] = make()
        while len(_cache) > _CACHE_SIZE:
            _cache.popitem(last=False)
    _cache.move_to_end(key)
    operation: Operation = _cache[key]
    return operation


def forget() -> None:
    """Clear the cache of prepared operations."""
    _cache.clear()


def addresses(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Addresses, devices, dtypes, shapes and strides of tensors, as a cache key."""
    return [(tensor.data_ptr(), tensor.device, tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]


# Device side: blocks, indices and offsets.


@triton.jit
def locate(block_layer, table, block, BLOCK: tl.constexpr):
    """Layer of a block, offset of its first element in the layer, and number of elements, at most BLOCK."""
    layer = tl.load(block_layer + block)
    start = (block - tl.load(table + layer * 4 + 1)) * BLOCK
    return layer, start, tl.minimum(tl.load(table + layer * 4) - start, BLOCK).to(tl.int32)


@triton.jit
def index_of(table, layer, start, lane):
    """Index in the tensor of the elements at the offsets ``start + lane`` in memory."""
    channels = tl.load(table + layer * 4 + 2)
    pixels = tl.load(table + layer * 4 + 3)
    whole = channels * pixels
    before = start % whole  # from here on 32-bit divisions
    offset = before.to(tl.int32) + lane
    inside = offset % whole.to(tl.int32)
    index = offset - inside + inside % channels.to(tl.int32) * pixels.to(tl.int32) + inside // channels.to(tl.int32)
    return (start - before) + tl.where(pixels == 1, offset, index)


@triton.jit
def offset_of(table, layer, index):
    """Offset in memory of the elements with these indices."""
    channels = tl.load(table + layer * 4 + 2)
    pixels = tl.load(table + layer * 4 + 3)
    inside = index % (channels * pixels)
    return index - inside + inside % pixels * channels + inside // pixels


@triton.jit
def floats(addresses, layer):
    """Pointer to the float32 tensor of a layer."""
    return tl.load(addresses + layer).to(tl.pointer_type(tl.float32))


# Device side: ranking keys and masks.


@triton.jit
def ordered(score, MAGNITUDE: tl.constexpr):
    """``reference.ordered`` in int32: integers in the order of float32 scores; −0 and +0 are equal."""
    bits = score.to(tl.int32, bitcast=True)
    if MAGNITUDE:
        bits = bits & 0x7FFFFFFF
    return tl.where(bits < 0, tl.where(bits == -2147483648, 0, bits ^ 0x7FFFFFFF), bits)


@triton.jit
def unordered(key):
    """``reference.unordered``: the score of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def keeps(key, threshold, last, table, layer, start, lane, exists):
    """``reference.keeps``: the mask of a cut. Computes indices only where scores equal the threshold."""
    limit = ordered(threshold, False)
    kept = key > limit
    tied = (key == limit) & exists
    if tl.max(tied.to(tl.int32), 0) > 0:
        kept = kept | (tied & (index_of(table, layer, start, lane) <= last))
    return kept


@triton.jit
def kept_at(scores, table, layer, start, lane, exists, thresholds, lasts, MAGNITUDE: tl.constexpr):
    """The mask of the elements at ``start + lane``, by the current cuts."""
    score = tl.load(floats(scores, layer) + start + lane, mask=exists, other=0.0)
    threshold = tl.load(thresholds + layer)
    return keeps(ordered(score, MAGNITUDE), threshold, tl.load(lasts + layer), table, layer, start, lane, exists)


@triton.jit
def ranked(
    scores, table, layer, start, lane, exists, thresholds, lasts,
    MAGNITUDE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Keys of the scores at ``start + lane``, and which are NaN. FIRST: scores that the given cuts keep rank first."""
    score = tl.load(floats(scores, layer) + start + lane, mask=exists, other=0.0)
    key = ordered(score, MAGNITUDE)
    nan = exists & (score != score)
    if FIRST:
        kept = keeps(key, tl.load(thresholds + layer), tl.load(lasts + layer), table, layer, start, lane, exists)
        key = tl.where(kept, 0x7FFFFFFF, key)
    return key, nan


# Device side: groups of layers that are ranked together, their counters, brackets and cuts.

# Columns of ``numbers``, a row per group (layers ranked together): scores above the bracket, scores inside it, NaN,
# whether the cut is outside the bracket (a miss), and the number of misses so far.
ABOVE, FOUND, NAN, FAILED, MISSES = (tl.constexpr(column) for column in range(5))
COLUMNS = tl.constexpr(5)
# Columns of ``bracket``, a row per group: centre, half width, last threshold, and its distance from the one before.
CENTRE, WIDTH, LAST, DRIFT = (tl.constexpr(column) for column in range(4))
BRACKET = tl.constexpr(4)


@triton.jit
def kept_total(ranges, kept, group):
    """Number of kept scores of a group."""
    first = tl.load(ranges + group * 2)
    total = first - first
    for member in range(first, first + tl.load(ranges + group * 2 + 1)):
        total += tl.load(tl.load(kept + member).to(tl.pointer_type(tl.int64)))
    return total


@triton.jit
def write_cut(members, ranges, group, threshold, last, thresholds, lasts):
    """Store the cut of every layer of a group; ``last`` is an index in the group."""
    first = tl.load(ranges + group * 2)
    for member in range(first, first + tl.load(ranges + group * 2 + 1)):
        tl.store(thresholds + member, threshold)
        tl.store(lasts + member, last - tl.load(members + member * 2 + 1))


@triton.jit
def write_empty_cut(ranges, group, thresholds, lasts):
    """Store the cut that keeps no score: t = ∞, c = −1."""
    first = tl.load(ranges + group * 2)
    for member in range(first, first + tl.load(ranges + group * 2 + 1)):
        tl.store(thresholds + member, float("inf"))
        tl.store(lasts + member, -1)


@triton.jit
def move_bracket(bracket, threshold):
    """Centre a bracket at the expected next threshold: extrapolate a drift, but not a single jump."""
    drift = threshold - tl.load(bracket + LAST)
    before = tl.load(bracket + DRIFT)
    less = tl.where(tl.abs(drift) < tl.abs(before), drift, before)
    tl.store(bracket + CENTRE, threshold + tl.where(drift * before > 0, less, 0.0))
    tl.store(bracket + LAST, threshold)
    tl.store(bracket + DRIFT, drift)
