"""2 × 2 max pooling fused with the ReLU before it, for channels-last images. Size limits of the image kernels.

max(ReLU(a), …) = ReLU(max(a, …)), so one pass does both. It stores the position of the maximum in one byte.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from iterand.backend.triton.layers import launching_on

_CHANNELS = 64  # maximum channels of a tile
_TILE = 2048  # outputs per program


class FusedPool(nn.MaxPool2d):
    """2 × 2 max pooling, optionally with a ReLU before it (``rectified``)."""

    rectified = False

    def forward(self, input: Tensor) -> Tensor:
        """ReLU and max pooling in one pass."""
        odd_size = input.shape[2] % 2 or input.shape[3] % 2
        if odd_size or not fits(input.numel()):
            pooled: Tensor = super().forward(input.relu() if self.rectified else input)
            return pooled
        pooled, _ = pool(input.contiguous(memory_format=torch.channels_last), self.rectified)
        return pooled


def is_two_by_two(module: nn.Module) -> bool:
    """Whether a module is a max pooling that ``FusedPool`` can replace."""
    return type(module) is nn.MaxPool2d and (
        all(size in (2, (2, 2)) for size in (module.kernel_size, module.stride))
        and (module.padding, module.dilation) == (0, 1)
        and not (module.return_indices or module.ceil_mode)
    )


@torch.library.custom_op("iterand::pool", mutates_args=())
def pool(images: Tensor, rectified: bool) -> tuple[Tensor, Tensor]:
    """Maximum of each 2 × 2 window and its position 0 … 3; 4 where the ReLU sets it to zero."""
    result, chosen = _empty_outputs(images)
    _launch(_pool, images, result, chosen, RECTIFIED=rectified)
    return result, chosen


@pool.register_fake
def _(images: Tensor, rectified: bool) -> tuple[Tensor, Tensor]:
    return _empty_outputs(images)


@torch.library.custom_op("iterand::pool_backward", mutates_args=())
def pool_backward(gradient: Tensor, chosen: Tensor) -> Tensor:
    """Gradient of the images: the gradient of the output at the position of the maximum, zero elsewhere."""
    images = _empty_images(gradient)
    _launch(_scatter, images, gradient, chosen)
    return images


@pool_backward.register_fake
def _(gradient: Tensor, chosen: Tensor) -> Tensor:
    return _empty_images(gradient)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(output[1])


def _backward(ctx: Any, gradient: Tensor, _: Tensor | None) -> tuple[Tensor, None]:
    (chosen,) = ctx.saved_tensors
    return pool_backward(gradient.contiguous(memory_format=torch.channels_last), chosen), None


pool.register_autograd(_backward, setup_context=_save_for_backward)


def _empty_outputs(images: Tensor) -> tuple[Tensor, Tensor]:
    count, channels, height, width = images.shape
    shape = (count, channels, height // 2, width // 2)
    outputs = [
        torch.empty(shape, dtype=dtype, device=images.device, memory_format=torch.channels_last)
        for dtype in (images.dtype, torch.uint8)
    ]
    return outputs[0], outputs[1]


def _empty_images(result: Tensor) -> Tensor:
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


# Size limits of the kernels.

_MAX_ELEMENTS = 1 << 31  # kernels use 32-bit offsets


def fits(elements: int) -> bool:
    """Whether kernels can address this many elements. Larger tensors are left to torch."""
    return elements < _MAX_ELEMENTS


def extent(images: Tensor) -> tuple[int, int]:
    """Number of pixels in a batch of images, and number of channels. Refuses images that kernels cannot address."""
    shape = tuple(images.shape)
    if not fits(images.numel()):
        raise ValueError(f"images of shape {shape} have 2³¹ elements or more; lower the batch size")
    if not images.is_contiguous(memory_format=torch.channels_last):
        raise ValueError(f"images of shape {shape} do not lie channels last")
    return images.numel() // max(1, shape[1]), shape[1]


# Kernels.


@triton.jit
def _pool(
    images, result, chosen, pixels, channels, columns,
    WIDTH: tl.constexpr, HEIGHT: tl.constexpr, RECTIFIED: tl.constexpr,
):  # fmt: skip
    """Maximum and its position for one tile of outputs."""
    offset, source, valid = _tile(pixels, channels, columns, WIDTH, HEIGHT)
    best = tl.load(images + source, mask=valid, other=0.0).to(tl.float32)
    position = tl.zeros([HEIGHT, WIDTH], tl.int32)
    for number in tl.static_range(1, 4):
        other = tl.load(images + source + _offset(number, channels, columns), mask=valid, other=0.0).to(tl.float32)
        better = (other > best) | (other != other)  # NaN propagates
        best = tl.where(better, other, best)
        position = tl.where(better, number, position)
    if RECTIFIED:
        position = tl.where(best <= 0, 4, position)
        best = tl.where(best <= 0, 0.0, best)
    tl.store(result + offset, best.to(result.dtype.element_ty), mask=valid)
    tl.store(chosen + offset, position.to(tl.uint8), mask=valid)


@triton.jit
def _scatter(
    images, gradient, chosen, pixels, channels, columns, WIDTH: tl.constexpr, HEIGHT: tl.constexpr
):  # fmt: skip
    """Gradient of the images for one tile of outputs."""
    offset, source, valid = _tile(pixels, channels, columns, WIDTH, HEIGHT)
    grad = tl.load(gradient + offset, mask=valid, other=0.0)
    position = tl.load(chosen + offset, mask=valid, other=4).to(tl.int32)
    for number in tl.static_range(4):
        value = tl.where(position == number, grad, tl.zeros_like(grad))
        tl.store(images + source + _offset(number, channels, columns), value, mask=valid)


@triton.jit
def _tile(pixels, channels, columns, WIDTH: tl.constexpr, HEIGHT: tl.constexpr):
    """Offsets of the outputs of a program, offsets of the first pixels of their windows, and which are in bounds."""
    pixel = tl.program_id(0) * HEIGHT + tl.arange(0, HEIGHT)
    channel = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    offset = pixel[:, None] * channels + channel[None, :]
    first = pixel // columns * (4 * columns) + pixel % columns * 2  # the rows of all images are stacked
    source = first[:, None] * channels + channel[None, :]
    return offset, source, (pixel < pixels)[:, None] & (channel < channels)[None, :]


@triton.jit
def _offset(number, channels, columns):
    """Offset of pixel ``number`` (0 … 3) of a window from its first pixel."""
    return (number // 2 * (2 * columns) + number % 2) * channels
