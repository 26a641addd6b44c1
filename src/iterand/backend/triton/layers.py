"""What all kernels share: the layers of a model as one list of tensors, ranking keys, and kept-or-pruned."""

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
        self.owner = to_device_async(owner, device)
        """The tensor of each block."""
        shapes = [_shape(tensor) for tensor in tensors]
        rows = zip(self.sizes, [sum(blocks[:i]) for i in range(len(blocks))], *zip(*shapes))
        self.table = to_device_async(torch.tensor(list(rows)), device)
        """A row a tensor: its elements, its first block, its channels, the pixels of a channel (1 if these lie in the
        order of their indices)."""


def pointers(tensors: Sequence[Tensor]) -> Tensor:
    """The addresses of tensors, on their device; the host does not wait."""
    return to_device_async(torch.tensor([tensor.data_ptr() for tensor in tensors]), tensors[0].device)


def to_device_async(numbers: Tensor, device: torch.device) -> Tensor:
    """Numbers of the host on a device; the host does not wait."""
    return (numbers.pin_memory() if device.type == "cuda" else numbers).to(device, non_blocking=True)


def bump_version(tensors: Iterable[Tensor]) -> None:
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


# Columns of a group's numbers: scores above the bracket and inside, NaN among them, whether the cut was not inside, and
# how often that was so.
ABOVE, FOUND, NAN, FAILED, MISSES = (tl.constexpr(column) for column in range(5))
COLUMNS = tl.constexpr(5)
# Columns of a group's bracket: its centre, half its width, the last threshold, and its distance from the one before.
CENTRE, WIDTH, LAST, DRIFT = (tl.constexpr(column) for column in range(4))
BRACKET = tl.constexpr(4)


@triton.jit
def ordered(score, MAGNITUDE: tl.constexpr):
    """Whole numbers in the order of float32 scores; the two zeros are one."""
    bits = score.to(tl.int32, bitcast=True)
    if MAGNITUDE:
        bits = bits & 0x7FFFFFFF
    return tl.where(bits < 0, tl.where(bits == -2147483648, 0, bits ^ 0x7FFFFFFF), bits)


@triton.jit
def unordered(key):
    """The score of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def keeps(key, threshold, last, table, layer, start, lane, exists):
    """The mask of a cut; indices are only looked at where scores equal the threshold."""
    limit = ordered(threshold, False)
    kept = key > limit
    tied = (key == limit) & exists
    if tl.max(tied.to(tl.int32), 0) > 0:
        kept = kept | (tied & (index_of(table, layer, start, lane) <= last))
    return kept


@triton.jit
def kept_at(scores, table, layer, start, lane, exists, thresholds, lasts, MAGNITUDE: tl.constexpr):
    """The mask at these places, by the cuts as they are."""
    score = tl.load(floats(scores, layer) + start + lane, mask=exists, other=0.0)
    threshold = tl.load(thresholds + layer)
    return keeps(ordered(score, MAGNITUDE), threshold, tl.load(lasts + layer), table, layer, start, lane, exists)


@triton.jit
def ranked(
    scores, table, layer, start, lane, exists, thresholds, lasts,
    MAGNITUDE: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Keys of the scores at these places; what another cut keeps ranks first."""
    score = tl.load(floats(scores, layer) + start + lane, mask=exists, other=0.0)
    key = ordered(score, MAGNITUDE)
    nan = exists & (score != score)
    if FIRST:
        kept = keeps(key, tl.load(thresholds + layer), tl.load(lasts + layer), table, layer, start, lane, exists)
        key = tl.where(kept, 0x7FFFFFFF, key)
    return key, nan


@triton.jit
def kept_of(ranges, kept, group):
    """How many scores of a group are kept."""
    first = tl.load(ranges + group * 2)
    total = first - first
    for member in range(first, first + tl.load(ranges + group * 2 + 1)):
        total += tl.load(tl.load(kept + member).to(tl.pointer_type(tl.int64)))
    return total


@triton.jit
def write_cut(members, ranges, group, threshold, last, thresholds, lasts):
    """Give every member of a group its cut; indices are counted within it."""
    first = tl.load(ranges + group * 2)
    for member in range(first, first + tl.load(ranges + group * 2 + 1)):
        tl.store(thresholds + member, threshold)
        tl.store(lasts + member, last - tl.load(members + member * 2 + 1))


@triton.jit
def write_nothing(ranges, group, thresholds, lasts):
    """No score is kept, or none but those that rank first."""
    first = tl.load(ranges + group * 2)
    for member in range(first, first + tl.load(ranges + group * 2 + 1)):
        tl.store(thresholds + member, float("inf"))
        tl.store(lasts + member, -1)


@triton.jit
def aim(bracket, threshold):
    """Centre a bracket where the next threshold is expected: they drift, but one that jumped does not go on jumping."""
    drift = threshold - tl.load(bracket + LAST)
    before = tl.load(bracket + DRIFT)
    less = tl.where(tl.abs(drift) < tl.abs(before), drift, before)
    tl.store(bracket + CENTRE, threshold + tl.where(drift * before > 0, less, 0.0))
    tl.store(bracket + LAST, threshold)
    tl.store(bracket + DRIFT, drift)


_REMEMBERED = 64  # sets of layers


def forget() -> None:
    """Drop all that was made ready."""
    _known.clear()


Made = TypeVar("Made")
_known: OrderedDict[tuple[Any, ...], Any] = OrderedDict()


def remembered(key: tuple[Any, ...], make: Callable[[], Made]) -> Made:
    """What was made for this key before, or now; kernels read addresses, so the key must say all of them."""
    if key not in _known:
        _known[key] = make()
        while len(_known) > _REMEMBERED:
            _known.popitem(last=False)
    _known.move_to_end(key)
    made: Made = _known[key]
    return made


def addresses(tensors: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """Where tensors lie and how, as a key for ``remembered``."""
    return [(tensor.data_ptr(), tensor.device, tensor.shape, tensor.stride()) for tensor in tensors]
