"""Batch norm fused with the residual sum and the ReLU after it, for channels-last images.

Forward, two passes over the input: ``statistics`` finds mean and 1/σ of every channel and updates the running
statistics; ``normalize`` computes ReLU((x − mean) / σ · weight + bias + residual). Backward, two passes as well. Sums
over pixels are split into parts, which ``add_up`` adds in a fixed order.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from iterand.backend.triton.layers import launching_on
from iterand.engine.pooling import extent, fits

COLUMNS = 8
"""Columns per program of ``add_up``: 32 bytes of a row, the smallest memory transaction."""
_ROWS = 512  # maximum rows of a tile of ``add_up``
_CHANNELS = 64  # maximum channels of a tile
_TILE = 4096  # elements of a tile
_SUMMED = 16384  # elements of a tile of a sum: many loads in flight, few partial sums
_PROGRAMS = 528  # maximum number of programs that a sum is split over
_WARPS = {"num_warps": 8}  # for the larger tiles of sums


class FusedNorm(nn.BatchNorm2d):
    """A batch norm with an optional residual sum and an optional ReLU (``rectified``)."""

    rectified = False

    def forward(self, input: Tensor, added: Tensor | None = None) -> Tensor:
        """Normalize, add the residual ``added``, apply the ReLU."""
        if not fits(input.numel()):
            plain: Tensor = super().forward(input)
            plain = plain if added is None else plain + added
            return plain.relu() if self.rectified else plain
        self._check_input_dim(input)
        images = input.contiguous(memory_format=torch.channels_last)
        mean, variance = cast(Tensor, self.running_mean), cast(Tensor, self.running_var)
        if self.training:
            momentum, count = cast(float, self.momentum), cast(Tensor, self.num_batches_tracked)
            stats = statistics(images.detach(), mean, variance, count, momentum, self.eps)
        else:
            stats = torch.stack([mean, (variance + self.eps).rsqrt()])
        if added is not None:
            added = added.to(images.dtype).contiguous(memory_format=torch.channels_last)
        normalized: Tensor = normalize(images, stats, self.weight, self.bias, added, self.rectified, self.training)
        return normalized


def can_fuse(module: nn.Module) -> bool:
    """Whether a module is a batch norm that ``FusedNorm`` can replace."""
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
    """Mean and 1/σ of every channel, as two rows. Updates the running statistics and the batch count."""
    pixels, channels = extent(images)
    if len(mean) != channels:
        raise ValueError(f"images of shape {tuple(images.shape)} have {channels} channels, their norm {len(mean)}")
    if pixels == 1:
        raise ValueError(f"images of shape {tuple(images.shape)} have one value a channel, which has no variance")
    stats = torch.empty(2, channels, dtype=torch.float32, device=images.device)
    if pixels == 0:
        return stats.fill_(torch.nan)
    grid, each, constants = _sum_grid(pixels, channels)
    sums = torch.empty(grid[0], 2 * channels, dtype=torch.float32, device=images.device)
    with launching_on(images.device):
        partial_sums[grid](images, sums, pixels, channels, each, **constants)
        finish_statistics[(triton.cdiv(channels, COLUMNS),)](
            images, sums, stats, mean, variance, count, grid[0], pixels, channels, momentum, eps,
            ROWS=rows_of(grid[0]), COLUMNS=COLUMNS, **_WARPS,
        )  # fmt: skip
    return stats


@statistics.register_fake
def _(images: Tensor, mean: Tensor, variance: Tensor, count: Tensor, momentum: float, eps: float) -> Tensor:
    return torch.empty(2, images.shape[1], dtype=torch.float32, device=images.device)


@torch.library.custom_op("iterand::normalize", mutates_args=())
def normalize(
    images: Tensor, stats: Tensor, weight: Tensor | None, shift: Tensor | None, added: Tensor | None,
    rectified: bool, training: bool,
) -> Tensor:  # fmt: skip
    """(x − mean) / σ · weight + shift + added, then ReLU if ``rectified``; ``stats`` has the rows mean and 1/σ.

    ``training``: mean and 1/σ were computed from these images, so gradients flow through them.
    """
    pixels, channels = extent(images)
    result = torch.empty_like(images, memory_format=torch.channels_last)
    grid, constants = _tile_grid(pixels, channels)
    if pixels:
        with launching_on(images.device):
            apply_norm[grid](
                images, stats, *_or_dummy(stats, weight, shift), images if added is None else added, result,
                pixels, channels, **constants, **_affine_flags(weight, shift),
                ADDED=added is not None, RECTIFIED=rectified,
            )  # fmt: skip
    return result


@normalize.register_fake
def _(
    images: Tensor, stats: Tensor, weight: Tensor | None, shift: Tensor | None, added: Tensor | None,
    rectified: bool, training: bool,
) -> Tensor:  # fmt: skip
    return torch.empty_like(images, memory_format=torch.channels_last)


@torch.library.custom_op("iterand::normalize_backward", mutates_args=())
def normalize_backward(
    gradient: Tensor, images: Tensor, stats: Tensor, weight: Tensor | None, shift: Tensor | None, result: Tensor | None,
    rectified: bool, training: bool, wants_added: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of the images, of shift and weight (as two rows), and of ``added`` if ``wants_added``.

    ``result`` is the output of ``normalize``, which tells where the ReLU was active. Without ``added`` it is recomputed
    and may be None.
    """
    pixels, channels = extent(images)
    for_images, sums, for_added = _empty_gradients(images, wants_added)
    if pixels == 0:
        return for_images, sums.zero_(), for_added
    grid, each, constants = _sum_grid(pixels, channels)
    parts = torch.empty(grid[0], 2 * channels, dtype=torch.float32, device=images.device)
    flags: dict[str, Any] = _affine_flags(weight, shift)
    flags |= {"FROM_RESULT": result is not None, "RECTIFIED": rectified}
    arguments = (gradient, images, stats, *_or_dummy(stats, weight, shift), images if result is None else result)
    with launching_on(images.device):
        partial_gradient_sums[grid](*arguments, parts, pixels, channels, each, **constants, **flags)
        add_up(parts, sums.view(-1))
        grid, constants = _tile_grid(pixels, channels)
        input_gradients[grid](
            *arguments, sums, for_images, for_added if wants_added else for_images, pixels, channels,
            **constants, **flags, TRAINING=training, ADDED=wants_added,
        )  # fmt: skip
    return for_images, sums, for_added


@normalize_backward.register_fake
def _(
    gradient: Tensor, images: Tensor, stats: Tensor, weight: Tensor | None, shift: Tensor | None, result: Tensor | None,
    rectified: bool, training: bool, wants_added: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return _empty_gradients(images, wants_added)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    images, stats, weight, shift, added, ctx.rectified, ctx.training = inputs
    needed = ctx.rectified and added is not None
    ctx.save_for_backward(images, stats, weight, shift, output if needed else None)


def _backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    images, stats, weight, shift, result = ctx.saved_tensors
    wants = ctx.needs_input_grad
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    for_images, (for_shift, for_weight), for_added = normalize_backward(
        gradient, images, stats, weight, shift, result, ctx.rectified, ctx.training, wants[4]
    )
    return (
        for_images, None, for_weight if wants[2] else None, for_shift if wants[3] else None,
        for_added if wants[4] else None, None, None,
    )  # fmt: skip


normalize.register_autograd(_backward, setup_context=_save_for_backward)


def add_up(sums: Tensor, result: Tensor) -> None:
    """Sum a matrix over its rows, in a fixed order."""
    parts, count = sums.shape
    _add_up[(triton.cdiv(count, COLUMNS),)](sums, result, parts, count, ROWS=rows_of(parts), COLUMNS=COLUMNS)


def rows_of(parts: int) -> int:
    """Rows of a tile of ``add_up`` for a matrix of ``parts`` rows."""
    return min(_ROWS, int(triton.next_power_of_2(parts)))


def _sum_grid(pixels: int, channels: int) -> tuple[tuple[int, int], int, dict[str, int]]:
    """Launch grid of a sum (parts, channel groups), tiles per part, and constants."""
    (tiles, groups), constants = _tile_grid(pixels, channels, _SUMMED)
    each = triton.cdiv(tiles, max(1, _PROGRAMS // groups))
    return (triton.cdiv(tiles, each), groups), each, constants | _WARPS


def _tile_grid(pixels: int, channels: int, size: int | None = None) -> tuple[tuple[int, int], dict[str, int]]:
    """Launch grid with one tile per program, and constants."""
    width = min(_CHANNELS, triton.next_power_of_2(channels))
    height = (size or _TILE) // width
    grid = triton.cdiv(pixels, height), triton.cdiv(channels, width)
    return grid, {"WIDTH": width, "HEIGHT": height}


def _affine_flags(weight: Tensor | None, shift: Tensor | None) -> dict[str, bool]:
    return {"WEIGHTED": weight is not None, "SHIFTED": shift is not None}


def _or_dummy(dummy: Tensor, *tensors: Tensor | None) -> list[Tensor]:
    """The tensors, with ``dummy`` for each None: kernels need a pointer, which they do not read."""
    return [dummy if tensor is None else tensor for tensor in tensors]


def _empty_gradients(images: Tensor, wants_added: bool) -> tuple[Tensor, Tensor, Tensor]:
    layout = torch.channels_last
    for_added = torch.empty_like(images, memory_format=layout) if wants_added else images.new_empty(0)
    sums = torch.empty(2, images.shape[1], dtype=torch.float32, device=images.device)
    return torch.empty_like(images, memory_format=layout), sums, for_added


# Kernels.


@triton.jit
def partial_sums(images, sums, pixels, channels, each, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """Σ d and Σ d² over one part of the pixels, d = x − first pixel of the channel, which avoids cancellation."""
    part = tl.program_id(0)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    first = tl.load(images + channel, mask=channel < channels, other=0.0).to(tl.float32)
    total = tl.zeros([WIDTH], tl.float32)
    squares = tl.zeros([WIDTH], tl.float32)
    for tile in range(each):
        offset, valid = _tile(part * each + tile, channel, pixels, channels, HEIGHT)
        x = tl.load(images + offset, mask=valid, other=0.0).to(tl.float32)
        delta = tl.where(valid, x - first[None, :], 0.0)
        total += tl.sum(delta, 0)
        squares += tl.sum(delta * delta, 0)
    _store_sums(sums, part, channel, total, squares, channels)


@triton.jit
def finish_statistics(
    images, sums, stats, mean, variance, tracked, parts, pixels, channels, momentum, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Mean and 1/σ of each channel from the sums of all parts; update of the running statistics."""
    channel = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    exists = channel < channels
    first = tl.load(images + channel, mask=exists, other=0.0).to(tl.float32)
    mean_before = tl.load(mean + channel, mask=exists, other=0.0)
    variance_before = tl.load(variance + channel, mask=exists, other=0.0)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    squares = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in range(0, parts, ROWS):
        part = start + tl.arange(0, ROWS)
        offset = sums + part[:, None] * (2 * channels) + channel[None, :]
        valid = (part < parts)[:, None] & exists[None, :]
        total += tl.load(offset, mask=valid, other=0.0)
        squares += tl.load(offset + channels, mask=valid, other=0.0)
    delta = tl.sum(total, 0) / pixels
    biased = tl.sum(squares, 0) / pixels - delta * delta
    biased = tl.where(biased < 0, 0.0, biased)  # NaN stays NaN
    training = first + delta
    tl.store(stats + channel, training, mask=exists)
    tl.store(stats + channels + channel, 1.0 / tl.sqrt(biased + eps), mask=exists)
    unbiased = biased * (pixels / (pixels - 1.0))
    tl.store(mean + channel, (1.0 - momentum) * mean_before + momentum * training, mask=exists)
    tl.store(variance + channel, (1.0 - momentum) * variance_before + momentum * unbiased, mask=exists)
    if tl.program_id(0) == 0:
        tl.store(tracked, tl.load(tracked) + 1)


@triton.jit
def apply_norm(
    images, stats, weight, shift, added, result, pixels, channels,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
    WEIGHTED: tl.constexpr, SHIFTED: tl.constexpr, ADDED: tl.constexpr, RECTIFIED: tl.constexpr,
):  # fmt: skip
    """Normalize one tile, add the residual, apply the ReLU."""
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    offset, valid = _tile(tl.program_id(0), channel, pixels, channels, HEIGHT)
    x = tl.load(images + offset, mask=valid, other=0.0).to(tl.float32)
    _, _, value = _normalized(x, stats, weight, shift, channel, channels, WEIGHTED, SHIFTED)
    if ADDED:
        value += tl.load(added + offset, mask=valid, other=0.0).to(tl.float32)
    if RECTIFIED:
        value = tl.where(value <= 0, 0.0, value)  # NaN stays NaN
    tl.store(result + offset, value.to(result.dtype.element_ty), mask=valid)


@triton.jit
def partial_gradient_sums(
    gradient, images, stats, weight, shift, result, sums, pixels, channels, each,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
    WEIGHTED: tl.constexpr, SHIFTED: tl.constexpr, FROM_RESULT: tl.constexpr, RECTIFIED: tl.constexpr,
):  # fmt: skip
    """Σ g and Σ g · x̂ over one part of the pixels: gradient g, normalized input x̂."""
    part = tl.program_id(0)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    plain = tl.zeros([WIDTH], tl.float32)
    weighted = tl.zeros([WIDTH], tl.float32)
    for tile in range(each):
        offset, valid = _tile(part * each + tile, channel, pixels, channels, HEIGHT)
        grad, normalized, _ = _gradient_tile(
            gradient, images, stats, weight, shift, result, offset, valid, channel, channels,
            WEIGHTED, SHIFTED, FROM_RESULT, RECTIFIED,
        )  # fmt: skip
        plain += tl.sum(grad, 0)
        weighted += tl.sum(grad * normalized, 0)
    _store_sums(sums, part, channel, plain, weighted, channels)


@triton.jit
def input_gradients(
    gradient, images, stats, weight, shift, result, sums, for_images, for_added, pixels, channels,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr,
    WEIGHTED: tl.constexpr, SHIFTED: tl.constexpr, FROM_RESULT: tl.constexpr, RECTIFIED: tl.constexpr,
    TRAINING: tl.constexpr, ADDED: tl.constexpr,
):  # fmt: skip
    """Gradient of one tile of the images, and of the residual."""
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    offset, valid = _tile(tl.program_id(0), channel, pixels, channels, HEIGHT)
    grad, normalized, factor = _gradient_tile(
        gradient, images, stats, weight, shift, result, offset, valid, channel, channels,
        WEIGHTED, SHIFTED, FROM_RESULT, RECTIFIED,
    )  # fmt: skip
    if ADDED:
        tl.store(for_added + offset, grad.to(for_added.dtype.element_ty), mask=valid)
    if TRAINING:
        exists = channel < channels
        plain = tl.load(sums + channel, mask=exists, other=0.0) / pixels
        weighted = tl.load(sums + channels + channel, mask=exists, other=0.0) / pixels
        grad = grad - plain[None, :] - normalized * weighted[None, :]
    tl.store(for_images + offset, (grad * factor[None, :]).to(for_images.dtype.element_ty), mask=valid)


@triton.jit
def _gradient_tile(
    gradient, images, stats, weight, shift, result, offset, valid, channel, channels,
    WEIGHTED: tl.constexpr, SHIFTED: tl.constexpr,
    FROM_RESULT: tl.constexpr, RECTIFIED: tl.constexpr,
):  # fmt: skip
    """Gradient after the ReLU, normalized images, and weight / σ, for one tile."""
    x = tl.load(images + offset, mask=valid, other=0.0).to(tl.float32)
    normalized, factor, value = _normalized(x, stats, weight, shift, channel, channels, WEIGHTED, SHIFTED)
    grad = tl.load(gradient + offset, mask=valid, other=0.0).to(tl.float32)
    if RECTIFIED:
        if FROM_RESULT:
            value = tl.load(result + offset, mask=valid, other=0.0).to(tl.float32)
        grad = tl.where(value <= 0, 0.0, grad)
    return grad, normalized, factor


@triton.jit
def _normalized(
    x, stats, weight, shift, channel, channels, WEIGHTED: tl.constexpr, SHIFTED: tl.constexpr
):  # fmt: skip
    """x̂ = (x − mean) / σ, weight / σ, and x̂ · weight + bias, for one tile."""
    exists = channel < channels
    factor = tl.load(stats + channels + channel, mask=exists, other=0.0)
    normalized = (x - tl.load(stats + channel, mask=exists, other=0.0)[None, :]) * factor[None, :]
    value = normalized
    if WEIGHTED:
        scale = tl.load(weight + channel, mask=exists, other=0.0)
        value = value * scale[None, :]
        factor = factor * scale
    if SHIFTED:
        value = value + tl.load(shift + channel, mask=exists, other=0.0)[None, :]
    return normalized, factor, value


@triton.jit
def _tile(number, channel, pixels, channels, HEIGHT: tl.constexpr):
    """Offsets of the elements of a tile, and which are in bounds."""
    pixel = number * HEIGHT + tl.arange(0, HEIGHT)
    offset = pixel[:, None] * channels + channel[None, :]
    return offset, (pixel < pixels)[:, None] & (channel < channels)[None, :]


@triton.jit
def _store_sums(sums, part, channel, first, second, channels):
    """Store the two sums of a part."""
    row = sums + part * (2 * channels) + channel
    tl.store(row, first, mask=channel < channels)
    tl.store(row + channels, second, mask=channel < channels)


@triton.jit
def _add_up(sums, result, parts, count, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Sums of COLUMNS columns."""
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for first in range(0, parts, ROWS):
        part = first + tl.arange(0, ROWS)
        valid = (part < parts)[:, None] & (at < count)[None, :]
        total += tl.load(sums + part[:, None] * count + at[None, :], mask=valid, other=0.0)
    tl.store(result + at, tl.sum(total, 0).to(result.dtype.element_ty), mask=at < count)
