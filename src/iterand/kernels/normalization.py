"""Batch norm of images that lie channels last, together with what is added to it and the ReLU that follows.

A library computes the norm, the sum and the ReLU one after the other, and each reads and writes all images; here each
direction goes through them twice, once for the sums of every channel and once for the result. Sums are taken in
float32, in an order that depends on nothing but the shapes.
"""

from typing import Any, cast

import torch
import triton
from torch import Tensor, nn

from iterand.kernels.images import extent, fits
from iterand.kernels.layers import launching_on
from iterand.kernels.norm_passes import conclude, rescale, spread_gradients, sum_up, sum_up_gradients
from iterand.kernels.sums import COLUMNS, add_up, rows_of

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
