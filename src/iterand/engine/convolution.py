"""Convolutions with few channels, channels last: libraries have tiles that are several times too wide for them.

Each is a product of matrices of pixels and channels for every position of the kernel. Sums are taken in float32, in an
order that depends on nothing but the shapes."""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from iterand.backend.triton.layers import launching_on
from iterand.engine.normalization import add_up
from iterand.engine.pooling import fits

WIDEST = 2048
"""More channels, those that come in times those that go out, are left to cuDNN, and more than 128 of either."""
PIXELS = 128
"""Pixels that a program works on at a time."""
_PARTS = 128  # programs that share the pixels of a gradient of weights


def narrow_(model: nn.Module) -> None:
    """Let the convolutions of a model that have few channels be computed here."""
    for module in model.modules():
        if type(module) is nn.Conv2d and _is_narrow(module):
            module.__class__ = NarrowConvolution


def _is_narrow(module: nn.Conv2d) -> bool:
    square = all(len({*pair}) == 1 for pair in (module.kernel_size, module.stride) if isinstance(pair, tuple))
    plain = module.groups == 1 and module.dilation == (1, 1) and module.padding_mode == "zeros"
    centred = module.padding == tuple(size // 2 for size in module.kernel_size) and module.kernel_size[0] <= 3
    few = module.in_channels * module.out_channels <= WIDEST and max(module.in_channels, module.out_channels) <= 128
    return square and plain and centred and few


class NarrowConvolution(nn.Conv2d):
    """A convolution in bfloat16 with few channels."""

    def forward(self, input: Tensor) -> Tensor:
        """Convolve, in bfloat16 whatever comes in."""
        if not fits(input.numel() // self.in_channels * max(self.in_channels, self.out_channels)):
            return super().forward(input)
        half = torch.bfloat16
        images = input.to(half).contiguous(memory_format=torch.channels_last)
        convolved: Tensor = convolve(images, self.weight.to(half), self.stride[0])
        return convolved if self.bias is None else convolved + self.bias.to(half).view(-1, 1, 1)


@torch.library.custom_op("iterand::convolve", mutates_args=())
def convolve(images: Tensor, weight: Tensor, stride: int) -> Tensor:
    """A convolution, padded so that it is centred; everything lies channels last."""
    result = _result_of(images, weight, stride)
    pixels = result.numel() // weight.shape[0]
    with launching_on(images.device):
        _convolve[(triton.cdiv(pixels, PIXELS),)](
            images, weight, result, pixels, **_constants(images, weight, result, stride)
        )
    return result


@convolve.register_fake
def _(images: Tensor, weight: Tensor, stride: int) -> Tensor:
    return _result_of(images, weight, stride)


@torch.library.custom_op("iterand::convolve_backward", mutates_args=())
def convolve_backward(
    gradient: Tensor, images: Tensor, weight: Tensor, stride: int, wants_images: bool
) -> tuple[Tensor, Tensor]:
    """The gradients of images and weights; that of images is empty where it is not wanted."""
    constants = _constants(images, weight, gradient, stride)
    for_images, for_weight = _gradients_of(images, weight, wants_images)
    pixels = gradient.numel() // weight.shape[0]
    parts = max(1, min(_PARTS, triton.cdiv(pixels, PIXELS)))
    sums = torch.empty(parts, weight.numel(), dtype=torch.float32, device=weight.device)
    with launching_on(images.device):
        if wants_images:
            own = images.numel() // images.shape[1]
            _spread[(triton.cdiv(own, PIXELS),)](gradient, weight, for_images, own, **constants)
        each = triton.cdiv(triton.cdiv(pixels, parts), PIXELS)
        _correlate[(parts, constants["STEPS"])](gradient, images, sums, pixels, EACH=each, **constants)
        add_up(sums, for_weight)
    return for_images, for_weight


@convolve_backward.register_fake
def _(gradient: Tensor, images: Tensor, weight: Tensor, stride: int, wants_images: bool) -> tuple[Tensor, Tensor]:
    return _gradients_of(images, weight, wants_images)


def _remember(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    images, weight, ctx.stride = inputs
    ctx.save_for_backward(images, weight)


def _backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
    images, weight = context.saved_tensors
    wants = context.needs_input_grad[0]
    # A sum over all positions comes back as one number that lies nowhere in particular.
    gradient = gradient.contiguous(memory_format=torch.channels_last)
    for_images, for_weight = convolve_backward(gradient, images, weight, context.stride, wants)
    return for_images if wants else None, for_weight, None


convolve.register_autograd(_backward, setup_context=_remember)


def _constants(images: Tensor, weight: Tensor, result: Tensor, stride: int) -> dict[str, int]:
    """What kernels are compiled for."""
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


def _result_of(images: Tensor, weight: Tensor, stride: int) -> Tensor:
    kernel = weight.shape[2]
    rows, columns = ((side + kernel // 2 * 2 - kernel) // stride + 1 for side in images.shape[2:])
    shape = images.shape[0], weight.shape[0], rows, columns
    return torch.empty(shape, dtype=images.dtype, device=images.device, memory_format=torch.channels_last)


def _gradients_of(images: Tensor, weight: Tensor, wants_images: bool) -> tuple[Tensor, Tensor]:
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
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    output = tl.arange(0, OUT)
    total = tl.zeros([PIXELS, OUT], tl.float32)
    for step in tl.static_range(STEPS):
        entry, entries = _entries(step, INPUTS, KERNEL, IN)
        seen = _seen(
            images, pixel, pixels, step, HEIGHT, WIDTH, ROWS, COLUMNS, INPUTS, KERNEL, STRIDE, IN
        )  # fmt: skip
        place = output[None, :] * (KERNEL * KERNEL * INPUTS) + entry[:, None]
        own = _read(weight + place, (output < OUTPUTS)[None, :] & entries[:, None])
        total = tl.dot(seen, own, total)
    there = (pixel < pixels)[:, None] & (output < OUTPUTS)[None, :]
    tl.store(result + pixel[:, None] * OUTPUTS + output[None, :], total.to(result.dtype.element_ty), mask=there)


@triton.jit
def _spread(
    gradient, weight, for_images, pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, STEPS: tl.constexpr, PIXELS: tl.constexpr,
):  # fmt: skip
    """The gradient of the images: what every pixel of the gradient gives to those it was computed from."""
    pixel = tl.program_id(0) * PIXELS + tl.arange(0, PIXELS)
    channel, output = tl.arange(0, IN), tl.arange(0, OUT)
    column, row, image = pixel % WIDTH, pixel // WIDTH % HEIGHT, pixel // (WIDTH * HEIGHT)
    total = tl.zeros([PIXELS, IN], tl.float32)
    for tap in tl.static_range(KERNEL * KERNEL):
        below, across = row + KERNEL // 2 - tap // KERNEL, column + KERNEL // 2 - tap % KERNEL
        inside = (pixel < pixels) & (below >= 0) & (across >= 0) & (below % STRIDE == 0) & (across % STRIDE == 0)
        inside = inside & (below // STRIDE < ROWS) & (across // STRIDE < COLUMNS)
        source = (image * ROWS + below // STRIDE) * COLUMNS + across // STRIDE
        place = source[:, None] * OUTPUTS + output[None, :]
        given = _read(gradient + place, inside[:, None] & (output < OUTPUTS)[None, :])
        entry = (output[:, None] * (KERNEL * KERNEL) + tap) * INPUTS + channel[None, :]
        own = _read(weight + entry, (output < OUTPUTS)[:, None] & (channel < INPUTS)[None, :])
        total = tl.dot(given, own, total)
    there = (pixel < pixels)[:, None] & (channel < INPUTS)[None, :]
    tl.store(for_images + pixel[:, None] * INPUTS + channel[None, :], total.to(for_images.dtype.element_ty), mask=there)


@triton.jit
def _correlate(
    gradient, images, sums, pixels,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr, OUTPUTS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr,
    IN: tl.constexpr, OUT: tl.constexpr, STEPS: tl.constexpr, PIXELS: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    """The gradient of the weights that one step of a convolution multiplies with, from one part of the pixels."""
    part, step = tl.program_id(0), tl.program_id(1)
    output = tl.arange(0, OUT)
    total = tl.zeros([OUT, IN], tl.float32)
    for portion in range(EACH):
        pixel = (part * EACH + portion) * PIXELS + tl.arange(0, PIXELS)
        place = pixel[None, :] * OUTPUTS + output[:, None]
        given = _read(gradient + place, (pixel < pixels)[None, :] & (output < OUTPUTS)[:, None])
        seen = _seen(
            images, pixel, pixels, step, HEIGHT, WIDTH, ROWS, COLUMNS, INPUTS, KERNEL, STRIDE, IN
        )  # fmt: skip
        total = tl.dot(given, seen, total)
    row = sums + part * (OUTPUTS * KERNEL * KERNEL * INPUTS)
    entry, entries = _entries(step, INPUTS, KERNEL, IN)
    place = output[:, None] * (KERNEL * KERNEL * INPUTS) + entry[None, :]
    tl.store(row + place, total, mask=(output < OUTPUTS)[:, None] & entries[None, :])


@triton.jit
def _entries(step, INPUTS: tl.constexpr, KERNEL: tl.constexpr, IN: tl.constexpr):
    """Which entries of an output's weights a step multiplies with: one tap's, or, of few channels, several taps'."""
    entry = tl.arange(0, IN)
    if INPUTS < 16:
        entry = step * IN + entry
        entries = entry < KERNEL * KERNEL * INPUTS
    else:
        entries = entry < INPUTS
        entry = step * INPUTS + entry
    return entry, entries


@triton.jit
def _seen(
    images, pixel, pixels, step,
    HEIGHT: tl.constexpr, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    INPUTS: tl.constexpr, KERNEL: tl.constexpr, STRIDE: tl.constexpr, IN: tl.constexpr,
):  # fmt: skip
    """What these entries are multiplied with at each pixel of the result; zero outside of the images."""
    entry, entries = _entries(step, INPUTS, KERNEL, IN)
    column, row, image = pixel % COLUMNS, pixel // COLUMNS % ROWS, pixel // (COLUMNS * ROWS)
    if INPUTS < 16:
        tap = (entry // INPUTS)[None, :]
    else:
        tap = step  # one number: where a tap looks is computed once for all its channels
    below = row[:, None] * STRIDE + tap // KERNEL - KERNEL // 2
    across = column[:, None] * STRIDE + tap % KERNEL - KERNEL // 2
    inside = (pixel < pixels)[:, None] & (below >= 0) & (below < HEIGHT) & (across >= 0) & (across < WIDTH)
    near = (image[:, None] * HEIGHT + below) * WIDTH + across
    return _read(images + near * INPUTS + (entry % INPUTS)[None, :], inside & entries[None, :])


@triton.jit
def _read(places, there):
    """What lies at these places, and zero where nothing does."""
    return tl.load(places, mask=there, other=0.0)
