"""Images as kernels go through them: pixel by pixel, the channels of each side by side.

Max pooling of images that lie channels last, two by two, with the ReLU before it.

The largest of four, rectified, is the largest of the four rectified; so one pass does both, and notes in a byte which
of the four it was."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from iterand.backend.triton.layers import launching_on

_LARGEST = 1 << 31  # places are numbers of 32 bits


def fits(elements: int) -> bool:
    """Whether kernels can count so many; what is more is left to torch."""
    return elements < _LARGEST


def extent(images: Tensor) -> tuple[int, int]:
    """How many pixels some images have in all, and how many channels."""
    shape = tuple(images.shape)
    if not fits(images.numel()):
        raise ValueError(f"images of shape {shape} have 2³¹ elements or more; lower the batch size")
    if not images.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(f"images of shape {shape} do not lie channels last")
    return images.numel() // max(1, shape[1]), shape[1]


_CHANNELS = 64  # of a tile, at most
_TILE = 2048  # results of a program


class FusedPool(nn.MaxPool2d):
    """Max pooling two by two that may have the work of a ReLU to do."""

    rectified = False

    def forward(self, input: Tensor) -> Tensor:
        """Rectify, take the largest."""
        left_over = input.shape[2] % 2 or input.shape[3] % 2
        if left_over or not fits(input.numel()):
            pooled: Tensor = super().forward(input.relu() if self.rectified else input)
            return pooled
        pooled, _ = pool(input.contiguous(memory_format=torch.channels_last), self.rectified)
        return pooled


def is_two_by_two(module: nn.Module) -> bool:
    """Whether a module is a max pooling that can be computed here."""
    return type(module) is nn.MaxPool2d and (
        all(size in (2, (2, 2)) for size in (module.kernel_size, module.stride))
        and (module.padding, module.dilation) == (0, 1)
        and not (module.return_indices or module.ceil_mode)
    )


@torch.library.custom_op("iterand::pool", mutates_args=())
def pool(images: Tensor, rectified: bool) -> tuple[Tensor, Tensor]:
    """The largest of each four pixels, and which it was; none, which is four, where that is rectified."""
    result, chosen = _results_of(images)
    _launch(_pool, images, result, chosen, RECTIFIED=rectified)
    return result, chosen


@pool.register_fake
def _(images: Tensor, rectified: bool) -> tuple[Tensor, Tensor]:
    return _results_of(images)


@torch.library.custom_op("iterand::pool_backward", mutates_args=())
def pool_backward(gradient: Tensor, chosen: Tensor) -> Tensor:
    """The gradient of the images: that of a result where it came from, and zero elsewhere."""
    images = _images_of(gradient)
    _launch(_spread, images, gradient, chosen)
    return images


@pool_backward.register_fake
def _(gradient: Tensor, chosen: Tensor) -> Tensor:
    return _images_of(gradient)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    (chosen,) = ctx.saved_tensors
    return pool_backward(gradient.contiguous(memory_format=torch.channels_last), chosen), None


pool.register_autograd(_backward, setup_context=_remember)


def _results_of(images: Tensor) -> tuple[Tensor, Tensor]:
    count, channels, height, width = images.shape
    shape = (count, channels, height // 2, width // 2)
    made = [
        torch.empty(shape, dtype=kind, device=images.device, memory_format=torch.channels_last)
        for kind in (images.dtype, torch.uint8)
    ]
    return made[0], made[1]


def _images_of(result: Tensor) -> Tensor:
    count, channels, height, width = result.shape
    shape = (count, channels, 2 * height, 2 * width)
    return torch.empty(shape, dtype=result.dtype, device=result.device, memory_format=torch.channels_last)


def _launch(kernel: Any, images: Tensor, result: Tensor, chosen: Tensor, **constants: bool) -> None:
    extent(images)
    channels, columns = result.shape[1], result.shape[3]
    width = min(_CHANNELS, triton.next_power_of_2(max(1, channels)))
    pixels = result.numel() // max(1, channels)
    grid = triton.cdiv(pixels, _TILE // width), triton.cdiv(channels, width)
    if result.numel():
        with launching_on(images.device):
            kernel[grid](
                images, result, chosen, pixels, channels, columns, WIDTH=width, HEIGHT=_TILE // width, **constants
            )  # fmt: skip


@triton.jit
def _pool(
    images, result, chosen, pixels, channels, columns,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr, RECTIFIED: tl.constexpr,
):  # fmt: skip
    place, source, there = _tile(pixels, channels, columns, WIDTH, HEIGHT)
    best = tl.load(images + source, mask=there, other=0.0).to(tl.float32)
    which = tl.zeros([HEIGHT, WIDTH], tl.int32)
    for number in tl.static_range(1, 4):
        other = tl.load(images + source + _offset(number, channels, columns), mask=there, other=0.0).to(tl.float32)
        better = (other > best) | (other != other)  # NaN is larger than anything
        best = tl.where(better, other, best)
        which = tl.where(better, number, which)
    if RECTIFIED:
        which = tl.where(best <= 0, 4, which)
        best = tl.where(best <= 0, 0.0, best)
    tl.store(result + place, best.to(result.dtype.element_ty), mask=there)
    tl.store(chosen + place, which.to(tl.uint8), mask=there)


@triton.jit
def _spread(
    images, gradient, chosen, pixels, channels, columns, WIDTH: tl.constexpr, HEIGHT: tl.constexpr
):  # fmt: skip
    place, source, there = _tile(pixels, channels, columns, WIDTH, HEIGHT)
    given = tl.load(gradient + place, mask=there, other=0.0)
    which = tl.load(chosen + place, mask=there, other=4).to(tl.int32)
    for number in tl.static_range(4):
        own = tl.where(which == number, given, tl.zeros_like(given))
        tl.store(images + source + _offset(number, channels, columns), own, mask=there)


@triton.jit
def _tile(pixels, channels, columns, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """Where the results of a program lie, where the first of their four pixels lies, and which of them exist."""
    pixel = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    place = pixel[:, None] * channels + channel[None, :]
    first = pixel // columns * (4 * columns) + pixel % columns * 2  # rows of all images, one below the other
    source = first[:, None] * channels + channel[None, :]
    return place, source, (pixel < pixels)[:, None] & (channel < channels)[None, :]


@triton.jit
def _offset(number, channels, columns):
    return (number // 2 * (2 * columns) + number % 2) * channels
