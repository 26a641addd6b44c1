"""Batch norm in two passes over its input, with the rectifier and the residual sum that follow it."""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from iterand.backend.triton.layers import launching_on
from iterand.engine.pooling import extent, fits

COLUMNS = 8
"""Sums that a program adds up: 32 bytes of a row, the least that memory gives."""
_ROWS = 512  # at a time, at most


def add_up(sums: Tensor, result: Tensor) -> None:
    """The sum over the rows of a matrix."""
    parts, count = sums.shape
    _add_up[(triton.cdiv(count, COLUMNS),)](sums, result, parts, count, ROWS=rows_of(parts), COLUMNS=COLUMNS)


def rows_of(parts: int) -> int:
    """How many rows of a matrix with ``parts`` of them are added at a time."""
    return min(_ROWS, int(triton.next_power_of_2(parts)))


@triton.jit
def _add_up(sums, result, parts, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)
        there = (part < parts)[:, None] & (at < count)[None, :]
        total += tl.load(sums + part[:, None] * count + at[None, :], mask=there, other=0.0)
    tl.store(result + at, tl.sum(total, 0).to(result.dtype.element_ty), mask=at < count)


@triton.jit
def sum_up(images, sums, pixels, channels, each, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """Sums and squares of one part of the pixels, both of the distance to the first pixel, lest they cancel out."""
    part = tl.program_id(0)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    first = tl.load(images + channel, mask=channel < channels, other=0.0).to(tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    squares = tl.zeros([WIDTH], tl.float32)
    for portion in range(each):
        place, there = _tile(part * each + portion, channel, pixels, channels, HEIGHT)
        seen = tl.load(images + place, mask=there, other=0.0).to(tl.float32)
        distance = tl.where(there, seen - first[None, :], 0.0)
        total += tl.sum(distance, 0)
        squares += tl.sum(distance * distance, 0)
    _keep(sums, part, channel, total, squares, channels)


@triton.jit
def conclude(
    images, sums, found, mean, variance, tracked, parts, pixels, channels, momentum, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Mean and 1/σ of some channels from the sums of all parts."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = channel < channels
    first = tl.load(images + channel, mask=exists, other=0.0).to(tl.float32)
    mean_before = tl.load(mean + channel, mask=exists, other=0.0)
    variance_before = tl.load(variance + channel, mask=exists, other=0.0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, parts, ROWS):
        part = start + tl.arange(0, ROWS)
        place = sums + part[:, None] * (2 * channels) + channel[None, :]
        there = (part < parts)[:, None] & exists[None, :]
        total += tl.load(place, mask=there, other=0.0)
        squares += tl.load(place + channels, mask=there, other=0.0)
    distance = tl.sum(total, 0) / pixels
    spread = tl.sum(squares, 0) / pixels - distance * distance
    spread = tl.where(spread < 0, 0.0, spread)  # NaN stays NaN
    own = first + distance
    tl.store(found + channel, own, mask=exists)
    tl.store(found + channels + channel, 1.0 / tl.sqrt(spread + eps), mask=exists)
    unbiased = spread * (pixels / (pixels - 1.0))
    tl.store(mean + channel, (1.0 - momentum) * mean_before + momentum * own, mask=exists)
    tl.store(variance + channel, (1.0 - momentum) * variance_before + momentum * unbiased, mask=exists)
    if tl.program_id(0) == 0:
        tl.store(tracked, tl.load(tracked) + 1)


@triton.jit
def rescale(
    images, found, weight, shift, added, result, pixels, channels,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
    WEIGHTED: tl.constexpr, SHIFTED: tl.constexpr, ADDED: tl.constexpr, RECTIFIED: tl.constexpr,
):  # fmt: skip
    """What the norm gives."""
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    place, there = _tile(tl.program_id(0), channel, pixels, channels, HEIGHT)
    seen = tl.load(images + place, mask=there, other=0.0).to(tl.float32)
    _, _, value = _normalized(seen, found, weight, shift, channel, channels, WEIGHTED, SHIFTED)
    if ADDED:
        value += tl.load(added + place, mask=there, other=0.0).to(tl.float32)
    if RECTIFIED:
        value = tl.where(value <= 0, 0.0, value)  # NaN stays NaN
    tl.store(result + place, value.to(result.dtype.element_ty), mask=there)


@triton.jit
def sum_up_gradients(
    gradient, images, found, weight, shift, result, sums, pixels, channels, each,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
    WEIGHTED: tl.constexpr, SHIFTED: tl.constexpr, FROM_RESULT: tl.constexpr, RECTIFIED: tl.constexpr,
):  # fmt: skip
    """For one part of the pixels: the sum of the gradients, and that of the gradients times what they belong to."""
    part = tl.program_id(0)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    plain = tl.zeros([WIDTH], tl.float32)
    weighted = tl.zeros([WIDTH], tl.float32)
    for portion in range(each):
        place, there = _tile(part * each + portion, channel, pixels, channels, HEIGHT)
        given, standard, _ = _given(
            gradient, images, found, weight, shift, result, place, there, channel, channels,
            WEIGHTED, SHIFTED, FROM_RESULT, RECTIFIED,
        )  # fmt: skip
        plain += tl.sum(given, 0)
        weighted += tl.sum(given * standard, 0)
    _keep(sums, part, channel, plain, weighted, channels)


@triton.jit
def spread_gradients(
    gradient, images, found, weight, shift, result, sums, for_images, for_added, pixels, channels,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
    WEIGHTED: tl.constexpr, SHIFTED: tl.constexpr, FROM_RESULT: tl.constexpr, RECTIFIED: tl.constexpr,
    OWN: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """The gradient of the images, and of what was added."""
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    place, there = _tile(tl.program_id(0), channel, pixels, channels, HEIGHT)
    given, standard, factor = _given(
        gradient, images, found, weight, shift, result, place, there, channel, channels,
        WEIGHTED, SHIFTED, FROM_RESULT, RECTIFIED,
    )  # fmt: skip
    if ADDED:
        tl.store(for_added + place, given.to(for_added.dtype.element_ty), mask=there)
    if OWN:
        exists = channel < channels
        plain = tl.load(sums + channel, mask=exists, other=0.0) / pixels
        weighted = tl.load(sums + channels + channel, mask=exists, other=0.0) / pixels
        given = given - plain[None, :] - standard * weighted[None, :]
    tl.store(for_images + place, (given * factor[None, :]).to(for_images.dtype.element_ty), mask=there)


@triton.jit
def _given(
    gradient, images, found, weight, shift, result, place, there, channel, channels,
    WEIGHTED: tl.constexpr, SHIFTED: tl.constexpr,
    FROM_RESULT: tl.constexpr, RECTIFIED: tl.constexpr,
):  # fmt: skip
    """The gradient where the result was not rectified; the normalised images; and what these were multiplied with."""
    seen = tl.load(images + place, mask=there, other=0.0).to(tl.float32)
    standard, factor, value = _normalized(seen, found, weight, shift, channel, channels, WEIGHTED, SHIFTED)
    given = tl.load(gradient + place, mask=there, other=0.0).to(tl.float32)
    if RECTIFIED:
        if FROM_RESULT:
            value = tl.load(result + place, mask=there, other=0.0).to(tl.float32)
        given = tl.where(value <= 0, 0.0, given)
    return given, standard, factor


@triton.jit
def _normalized(
    seen, found, weight, shift, channel, channels, WEIGHTED: tl.constexpr, SHIFTED: tl.constexpr
):  # fmt: skip
    """Images less their mean over σ; 1/σ times the weight; and the result before anything is added."""
    exists = channel < channels
    factor = tl.load(found + channels + channel, mask=exists, other=0.0)
    standard = (seen - tl.load(found + channel, mask=exists, other=0.0)[None, :]) * factor[None, :]
    value = standard
    if WEIGHTED:
        scale = tl.load(weight + channel, mask=exists, other=0.0)
        value = value * scale[None, :]
        factor = factor * scale
    if SHIFTED:
        value = value + tl.load(shift + channel, mask=exists, other=0.0)[None, :]
    return standard, factor, value


@triton.jit
def _tile(number, channel, pixels, channels, HEIGHT: tl.constexpr):
    """Where the elements of a tile lie, and which of them exist."""
    pixel = number * HEIGHT + tl.arange(0, HEIGHT)
    place = pixel[:, None] * channels + channel[None, :]
    return place, (pixel < pixels)[:, None] & (channel < channels)[None, :]


@triton.jit
def _keep(sums, part, channel, first, second, channels):
    """Put the two sums of a part where they are added up from."""
    row = sums + part * (2 * channels) + channel
    tl.store(row, first, mask=channel < channels)
    tl.store(row + channels, second, mask=channel < channels)


_CHANNELS = 64  # of a tile, at most
_TILE = 4096  # elements that a program works on
_SUMMED = 16384  # at a time, where it sums them up: many reads at once, few sums to be added
_PROGRAMS = 528  # that share the pixels of a sum
_WARPS = {"num_warps": 8}  # where more than usual is in flight


class FusedNorm(nn.BatchNorm2d):
    """A batch norm that may be followed by a ReLU, and before that by a sum."""

    rectified = False

    def forward(self, input: Tensor, added: Tensor | None = None) -> Tensor:
        """Normalise, add, rectify."""
        if not fits(input.numel()):
            plain: Tensor = super().forward(input)
            plain = plain if added is None else plain + added
            return plain.relu() if self.rectified else plain
        self._check_input_dim(input)
        images = input.contiguous(memory_format=torch.channels_last)
        mean, variance = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        if self.training:
            momentum, count = cast(float, self.momentum), cast(Tensor, self.num_batches_tracked)
            found = statistics(images.detach(), mean, variance, count, momentum, self.eps)
        else:
            found = torch.stack([mean, (variance + self.eps).rsqrt()])
        if added is not None:
            added = added.to(images.dtype).contiguous(memory_format=torch.channels_last)
        normalized: Tensor = normalize(images, found, self.weight, self.bias, added, self.rectified, self.training)
        return normalized


def is_ordinary(module: nn.Module) -> bool:
    """Whether a module is a batch norm that can be computed here."""
    return (
        type(module) is nn.BatchNorm2d
        and module.track_running_stats
        and module.running_mean is not None
        and module.momentum is not None
    )


@torch.library.custom_op("iterand::statistics", mutates_args=("mean", "variance", "count"))
def statistics(
    images: Tensor, mean: Tensor, variance: Tensor, count: Tensor, momentum: float, eps: float
) -> Tensor:  # fmt: skip
    """Mean and 1/σ of every channel; the running averages and their count follow."""
    pixels, channels = extent(images)
    if len(mean) != channels:
        raise ValueError(f"images of shape {tuple(images.shape)} have {channels} channels, their norm {len(mean)}")
    if pixels == 1:
        raise ValueError(f"images of shape {tuple(images.shape)} have one value a channel, which has no variance")
    found = torch.empty(2, channels, dtype=torch.float32, device=images.device)
    if pixels == 0:
        return found.fill_(torch.nan)
    grid, each, constants = _shared(pixels, channels)
    sums = torch.empty(grid[0], 2 * channels, dtype=torch.float32, device=images.device)
    with launching_on(images.device):
        sum_up[grid](images, sums, pixels, channels, each, **constants)
        conclude[(triton.cdiv(channels, COLUMNS),)](
            images, sums, found, mean, variance, count, grid[0], pixels, channels, momentum, eps,
            ROWS=rows_of(grid[0]), COLUMNS=COLUMNS, **_WARPS,
        )  # fmt: skip
    return found


@statistics.register_fake
def _(images: Tensor, mean: Tensor, variance: Tensor, count: Tensor, momentum: float, eps: float) -> Tensor:
    return torch.empty(2, images.shape[1], dtype=torch.float32, device=images.device)


@torch.library.custom_op("iterand::normalize", mutates_args=())
def normalize(
    images: Tensor, found: Tensor, weight: Tensor | None, shift: Tensor | None, added: Tensor | None,
    rectified: bool, own: bool,
) -> Tensor:  # fmt: skip
    """(x − mean) / σ for the mean and 1/σ that were found, times a weight, plus a shift, plus something, rectified.

    ``own``: what was found depends on these images, and so do gradients through it.
    """
    pixels, channels = extent(images)
    result = torch.empty_like(images, memory_format=torch.channels_last)
    grid, constants = _alone(pixels, channels)
    if pixels:
        with launching_on(images.device):
            rescale[grid](
                images, found, *_pointers(found, weight, shift), images if added is None else added, result,
                pixels, channels, **constants, **_kinds(weight, shift), ADDED=added is not None, RECTIFIED=rectified,
            )  # fmt: skip
    return result


@normalize.register_fake
def _(
    images: Tensor, found: Tensor, weight: Tensor | None, shift: Tensor | None, added: Tensor | None,
    rectified: bool, own: bool,
) -> Tensor:  # fmt: skip
    return torch.empty_like(images, memory_format=torch.channels_last)


@torch.library.custom_op("iterand::normalize_backward", mutates_args=())
def normalize_backward(
    gradient: Tensor, images: Tensor, found: Tensor, weight: Tensor | None, shift: Tensor | None, result: Tensor | None,
    rectified: bool, own: bool, wants_added: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """The gradients of the images, of shift and weight (as two rows), and of what was added, if that is wanted.

    ``result``: what ``normalize`` gave, which says where it was rectified; not needed where nothing was added.
    """
    pixels, channels = extent(images)
    for_images, sums, for_added = _gradients_of(images, wants_added)
    if pixels == 0:
        return for_images, sums.zero_(), for_added
    grid, each, constants = _shared(pixels, channels)
    parts = torch.empty(grid[0], 2 * channels, dtype=torch.float32, device=images.device)
    kinds: dict[str, Any] = _kinds(weight, shift)
    kinds |= {"FROM_RESULT": result is not None, "RECTIFIED": rectified}
    given = (gradient, images, found, *_pointers(found, weight, shift), images if result is None else result)
    with launching_on(images.device):
        sum_up_gradients[grid](*given, parts, pixels, channels, each, **constants, **kinds)
        add_up(parts, sums.view(-1))
        grid, constants = _alone(pixels, channels)
        spread_gradients[grid](
            *given, sums, for_images, for_added if wants_added else for_images, pixels, channels,
            **constants, **kinds, OWN=own, ADDED=wants_added,
        )  # fmt: skip
    return for_images, sums, for_added


@normalize_backward.register_fake
def _(
    gradient: Tensor, images: Tensor, found: Tensor, weight: Tensor | None, shift: Tensor | None, result: Tensor | None,
    rectified: bool, own: bool, wants_added: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _gradients_of(images, wants_added)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    images, found, weight, shift, added, ctx.rectified, ctx.own = inputs
    needed = ctx.rectified and added is not None
    ctx.save_for_backward(images, found, weight, shift, output if needed else None)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    images, found, weight, shift, result = ctx.saved_tensors
    wants = ctx.needs_input_grad
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    for_images, (for_shift, for_weight), for_added = normalize_backward(
        gradient, images, found, weight, shift, result, ctx.rectified, ctx.own, wants[4]
    )
    return (
        for_images, None, for_weight if wants[2] else None, for_shift if wants[3] else None,
        for_added if wants[4] else None, None, None,
    )  # fmt: skip


normalize.register_autograd(_backward, setup_context=_remember)


def _shared(pixels: int, channels: int) -> tuple[tuple[int, int], int, dict[str, int]]:
    """How programs share the pixels of a sum: parts and groups of channels, the tiles of each, and their size."""
    (tiles, groups), constants = _alone(pixels, channels, _SUMMED)
    each = triton.cdiv(tiles, max(1, _PROGRAMS // groups))
    return (triton.cdiv(tiles, each), groups), each, constants | _WARPS


def _alone(pixels: int, channels: int, size: int | None = None) -> tuple[tuple[int, int], dict[str, int]]:
    """The same where every program has one tile."""
    width = min(_CHANNELS, triton.next_power_of_2(channels))
    height = (size or _TILE) // width
    grid = triton.cdiv(pixels, height), triton.cdiv(channels, width)
    return grid, {"WIDTH": width, "HEIGHT": height}


def _kinds(weight: Tensor | None, shift: Tensor | None) -> dict[str, bool]:
    return {"WEIGHTED": weight is not None, "SHIFTED": shift is not None}


def _pointers(found: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """The tensors; for one that is not there some other, which is not read."""
    return [found if tensor is None else tensor for tensor in tensors]


def _gradients_of(images: Tensor, wants_added: bool) -> tuple[Tensor, Tensor, Tensor]:
    layout = torch.channels_last
    for_added = torch.empty_like(images, memory_format=layout) if wants_added else images.new_empty(0)
    sums = torch.empty(2, images.shape[1], dtype=torch.float32, device=images.device)
    return torch.empty_like(images, memory_format=layout), sums, for_added
