"""Convolutions with few channels in bfloat16, channels last. The tiles of cuDNN are several times too wide for them.

A convolution is a sum of matrix products (pixels × input channels) · (input channels × output channels), one per kernel
position. Sums are float32, in an order that depends on the shapes only, so results are deterministic.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from iterand.backend.triton.layers import launching_on
from iterand.engine.normalization import add_up
from iterand.engine.pooling import fits

WIDEST = 2048
"""Largest input channels × output channels. Wider convolutions, or more than 128 of either, are left to cuDNN."""
PIXELS = 128
"""Pixels per tile."""
_PARTS = 128  # programs that the pixels of a weight gradient are split over


def narrow_(model: nn.Module) -> None:
    """Replace the convolutions of a model that have few channels by ``NarrowConvolution``."""
    for module in model.modules():
        if type(module) is nn.Conv2d and _is_narrow(module):
            module.__class__ = NarrowConvolution


def _is_narrow(module: nn.Conv2d) -> bool:
    square = all(len({*pair}) == 1 for pair in (module.kernel_size, module.stride) if isinstance(pair, tuple))
    plain = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
    same_size = module.padding == tuple(size // 2 for size in module.kernel_size) and module.kernel_size[0] <= 3
    narrow = module.in_channels * module.out_channels <= WIDEST and max(module.in_channels, module.out_channels) <= 128
    return square and plain and same_size and narrow


class NarrowConvolution(nn.Conv2d):
    """A convolution in bfloat16 with few channels."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve in bfloat16, whatever the dtype of the input."""
        if not fits(input.numel() // self.in_channels * max(self.in_channels, self.out_channels)):
            return super().forward(input)
        half = torch.bfloat16
        images = input.to(half).contiguous(memory_format=torch.channels_last)
        convolved: Tensor = convolve(images, self.weight.to(half), self.stride[0])
        return convolved if self.bias is None else convolved + self.bias.to(half).view(-1, 1, 1)


@torch.library.custom_op("iterand::convolve", mutates_args=())
def convolve(images: Tensor, weight: Tensor, stride: int) -> Tensor:
    """A convolution with padding (kernel size // 2). All tensors are channels last."""
    result = _empty_output(images, weight, stride)
    pixels = result.numel() // weight.shape[0]
    with launching_on(images.device):
        _convolve[(triton.cdiv(pixels, PIXELS),)](
            images, weight, result, pixels, **_constants(images, weight, result, stride)
        )
    return result


@convolve.register_fake
def _(images: Tensor, weight: Tensor, stride: int) -> Tensor:
    return _empty_output(images, weight, stride)


@torch.library.custom_op("iterand::convolve_backward", mutates_args=())
def convolve_backward(
    gradient: Tensor, images: Tensor, weight: Tensor, stride: int, wants_images: bool
) -> tuple[Tensor, Tensor]:
    """Gradients of images and weights. That of the images is empty unless ``wants_images``."""
    constants = _constants(images, weight, gradient, stride)
    for_images, for_weight = _empty_gradients(images, weight, wants_images)
    pixels = gradient.numel() // weight.shape[0]
    parts = max(1, min(_PARTS, triton.cdiv(pixels, PIXELS)))
    sums = torch.empty(parts, weight.numel(), dtype=torch.float32, device=weight.device)
    with launching_on(images.device):
        if wants_images:
            input_pixels = images.numel() // images.shape[1]
            _input_gradient[(triton.cdiv(input_pixels, PIXELS),)](
                gradient, weight, for_images, input_pixels, **constants
            )
        each = triton.cdiv(triton.cdiv(pixels, parts), PIXELS)
        _weight_gradient[(parts, constants["STEPS"])](gradient, images, sums, pixels, EACH=each, **constants)
        add_up(sums, for_weight)
    return for_images, for_weight


@convolve_backward.register_fake
def _(gradient: Tensor, images: Tensor, weight: Tensor, stride: int, wants_images: bool) -> tuple[Tensor, Tensor]:
    return _empty_gradients(images, weight, wants_images)


def _save_for_backward(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    images, weight, ctx.stride = inputs
    ctx.save_for_backward(images, weight)


def _backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
    images, weight = context.saved_tensors
    wants = context.needs_input_grad[0]
    # The gradient of a sum is an expanded scalar, which is not channels last.
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    for_images, for_weight = convolve_backward(gradient, images, weight, context.stride, wants)
    return for_images if wants else None, for_weight, None


convolve.register_autograd(_backward, setup_context=_save_for_backward)


def _constants(images: Tensor, weight: Tensor, result: Tensor, stride: int) -> dict[str, int]:
    """Compile-time constants of the kernels. Refuses tensors that they cannot address."""
    for tensor in (images, weight, result):
        shape = tuple(tensor.shape)
        if tensor.numel() >= 1 << 31:
            raise ValueError(f"a tensor of shape {shape} has 2³¹ elements or more; lower the batch size")
        if not tensor.is_contiguous(memory_format=torch.channels_last):
            raise ValueError(f"a tensor of shape {shape} does not lie channels last")
    (_, inputs, height, width), (outputs, _, kernel, _) = images.shape, weight.shape
    entries = 32 if inputs < 16 else triton.next_power_of_2(inputs)
    return {
        "HEIGHT": height, "WIDTH": width, "ROWS": result.shape[2], "COLUMNS": result.shape[3],
        "INPUTS": inputs, "OUTPUTS": outputs, "KERNEL": kernel, "STRIDE": stride,
        "IN": entries, "OUT": max(16, triton.next_power_of_2(outputs)),
        "STEPS": triton.cdiv(kernel * kernel * inputs, entries) if inputs < 16 else kernel * kernel,
        "PIXELS": PIXELS,
    }  # fmt: skip


def _empty_output(images: Tensor, weight: Tensor, stride: int) -> Tensor:
    kernel = weight.shape[2]
    rows, columns = ((side + kernel // 2 * 2 - kernel) // stride + 1 for side in images.shape[2:])
    shape = images.shape[0], weight.shape[0], rows, columns
    return torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last)


def _empty_gradients(images: Tensor, weight: Tensor, wants_images: bool) -> tuple[Tensor, Tensor]:
    layout = torch.channels_last
    for_images = torch.empty_like(images, memory_format=layout) if wants_images else images.new_empty(0)
    return for_images, torch.empty_like(weight, memory_format=layout)


@triton.jit
def _convolve(
    images, weight, result, pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, STEPS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """One tile of output pixels, all output channels."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    output = tl.arange(0, OUT)
    total = tl.zeros([PIXELS, OUT], tl.float32)
    for step in tl.static_range(STEPS):
        entry, entries = _entries(step, INPUTS, KERNEL, IN)
        patch = _patches(
            images, pixel, pixels, step, HEIGHT, WIDTH, ROWS, COLUMNS, INPUTS, KERNEL, STRIDE, IN
        )  # fmt: skip
        offset = output[None, :] * (KERNEL * KERNEL * INPUTS) + entry[:, None]
        filters = _load(weight + offset, (output < OUTPUTS)[None, :] & entries[:, None])
        total = tl.dot(patch, filters, total)
    valid = (pixel < pixels)[:, None] & (output < OUTPUTS)[None, :]
    tl.store(result + pixel[:, None] * OUTPUTS + output[None, :], total.to(result.dtype.element_ty), mask=valid)


@triton.jit
def _input_gradient(
    gradient, weight, for_images, pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, STEPS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """Gradient of the images: a transposed convolution of the output gradient."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel, output = tl.arange(0, IN), tl.arange(0, OUT)
    column, row, image = pixel % WIDTH, pixel // WIDTH % HEIGHT, pixel // (WIDTH * HEIGHT)
    total = tl.zeros([PIXELS, IN], tl.float32)
    for tap in tl.static_range(KERNEL * KERNEL):
        y, x = row + KERNEL // 2 - tap // KERNEL, column + KERNEL // 2 - tap % KERNEL
        inside = (pixel < pixels) & (y >= 0) & (x >= 0) & (y % STRIDE == 0) & (x % STRIDE == 0)
        inside = inside & (y // STRIDE < ROWS) & (x // STRIDE < COLUMNS)
        source = (image * ROWS + y // STRIDE) * COLUMNS + x // STRIDE
        offset = source[:, None] * OUTPUTS + output[None, :]
        grad = _load(gradient + offset, inside[:, None] & (output < OUTPUTS)[None, :])
        entry = (output[:, None] * (KERNEL * KERNEL) + tap) * INPUTS + channel[None, :]
        filters = _load(weight + entry, (output < OUTPUTS)[:, None] & (channel < INPUTS)[None, :])
        total = tl.dot(grad, filters, total)
    valid = (pixel < pixels)[:, None] & (channel < INPUTS)[None, :]
    tl.store(for_images + pixel[:, None] * INPUTS + channel[None, :], total.to(for_images.dtype.element_ty), mask=valid)


@triton.jit
def _weight_gradient(
    gradient, images, sums, pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, STEPS: tl.constexpr, PIXELS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """Gradient of the weights of one step of ``_convolve``, summed over one part of the pixels."""
    part, step = tl.program_id(0), tl.program_id(1)
    output = tl.arange(0, OUT)
    total = tl.zeros([OUT, IN], tl.float32)
    for chunk in range(EACH):
        pixel = (part * EACH + chunk) * PIXELS + tl.arange(0, PIXELS)
        offset = pixel[None, :] * OUTPUTS + output[:, None]
        grad = _load(gradient + offset, (pixel < pixels)[None, :] & (output < OUTPUTS)[:, None])
        patch = _patches(
            images, pixel, pixels, step, HEIGHT, WIDTH, ROWS, COLUMNS, INPUTS, KERNEL, STRIDE, IN
        )  # fmt: skip
        total = tl.dot(grad, patch, total)
    row = sums + part * (OUTPUTS * KERNEL * KERNEL * INPUTS)
    entry, entries = _entries(step, INPUTS, KERNEL, IN)
    offset = output[:, None] * (KERNEL * KERNEL * INPUTS) + entry[None, :]
    tl.store(row + offset, total, mask=(output < OUTPUTS)[:, None] & entries[None, :])


@triton.jit
def _entries(step, INPUTS: tl.constexpr, KERNEL: tl.constexpr, IN: tl.constexpr):
    """Columns of the weight matrix in one step, and which are in bounds; several kernel positions if INPUTS < 16."""
    entry = tl.arange(0, IN)
    if INPUTS < 16:
        entry = step * IN + entry
        entries = entry < KERNEL * KERNEL * INPUTS
    else:
        entries = entry < INPUTS
        entry = step * INPUTS + entry
    return entry, entries


@triton.jit
def _patches(
    images, pixel, pixels, step,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """The input values for these columns at each output pixel; zero in the padding."""
    entry, entries = _entries(step, INPUTS, KERNEL, IN)
    column, row, image = pixel % COLUMNS, pixel // COLUMNS % ROWS, pixel // (COLUMNS * ROWS)
    if INPUTS < 16:
        tap = (entry // INPUTS)[None, :]
    else:
        tap = step  # a scalar: the source pixel is computed once for all channels
    y = row[:, None] * STRIDE + tap // KERNEL - KERNEL // 2
    x = column[:, None] * STRIDE + tap % KERNEL - KERNEL // 2
    inside = (pixel < pixels)[:, None] & (y >= 0) & (y < HEIGHT) & (x >= 0) & (x < WIDTH)
    source_pixel = (image[:, None] * HEIGHT + y) * WIDTH + x
    return _load(images + source_pixel * INPUTS + (entry % INPUTS)[None, :], inside & entries[None, :])


@triton.jit
def _load(pointers, valid):
    """Load with zero where ``valid`` is false."""
    return tl.load(pointers, mask=valid, other=0.0)
