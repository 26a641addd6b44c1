"""What a network with int8 activations computes, by plain NumPy on integers; see int8.h."""

from math import ceil, log2

import numpy as np
import torch
import torch.nn.functional as F

from iterand.inference.nodes import Add, Affine, AveragePool, Concatenate, Convolution, Flatten, Linear, MaxPool


def clip16(numbers):
    return np.clip(numbers, -32768, 32767)


def half_up(numbers, bits):
    return np.floor(np.asarray(numbers, np.float64) / 2**bits + 0.5).astype(np.int64)


def patches(node, pixels, zero):
    """The inputs of every output pixel: (groups, inputs of a channel, output pixels)."""
    if isinstance(node, Linear):
        return pixels.reshape(1, -1, 1)
    image = torch.tensor(pixels, dtype=torch.float64).reshape(
        len(pixels), *([1] * (3 - pixels.ndim)), *pixels.shape[1:]
    )
    (py, px) = node.padding
    image = F.pad(image, (px, px, py, py), value=zero)
    found = F.unfold(image[None], node.weight.shape[2:], node.dilation, 0, node.stride)[0]
    return found.numpy().astype(np.int64).reshape(node.groups, -1, found.shape[1])


def sums(row, inputs):
    """128 additions and 128 subtractions at a time, joined with saturation."""
    plus, minus = np.flatnonzero(row > 0), np.flatnonzero(row < 0)
    total = np.zeros(inputs.shape[1], np.int64)
    for begin in range(0, max(len(plus), len(minus)), 128):
        part = inputs[plus[begin : begin + 128]].sum(0) - inputs[minus[begin : begin + 128]].sum(0)
        total = clip16(total + part)
    return total


def layer(graph, codes, node, values):
    source, residual = codes[node.inputs[0].name], None
    inputs = patches(node, values[node.inputs[0]], source.zero)
    rows = node.weight.reshape(len(node.weight), -1).astype(np.float64)
    ternary = all(len(np.unique(np.abs(row[row != 0]))) <= 1 for row in rows)
    target = codes.get(node.output.name)
    if len(node.inputs) > 1:
        residual = values[node.inputs[1]].reshape(len(rows), -1), codes[node.inputs[1].name]
    outputs = []
    for channel, row in enumerate(rows):
        mine = inputs[channel * len(inputs) // len(rows)]
        size = np.abs(row).max() / (1 if ternary else 127) or 1.0
        size = np.float64(size) if ternary else np.float64(np.float32(np.abs(row).max()) / np.float32(127)) or 1.0
        scale = float(node.scale[channel]) * size * source.scale
        row = np.rint(row / size) * (-1 if scale < 0 else 1)
        scale = abs(scale)
        exact = (row[:, None] * mine).sum(0)
        start = float(node.shift[channel]) - scale * source.zero * row.sum()
        if target is None:
            outputs.append(exact.astype(np.float32) * np.float32(scale) + np.float32(start))
            continue
        eighths = 8 * scale / target.scale
        exponent = (
            min(15, max(0 if ternary else -15, ceil(log2(eighths)))) if eighths > 2**-55 else 0 if ternary else -15
        )
        exponent += round(eighths * 2 ** (15 - exponent)) > 32767
        factor = round(eighths * 2 ** (15 - exponent))
        start = start / target.scale + target.zero
        if exponent < 0:
            found = np.clip(exact.astype(np.int64) >> -exponent, -32767, 32767)
        else:
            limit = 32767 >> exponent
            found = np.clip(sums(row, mine) if ternary else exact, -limit, limit).astype(np.int64) << exponent
        if residual is not None:
            start -= residual[1].scale / target.scale * residual[1].zero
        found = clip16(half_up(found * factor, 15) + np.clip(np.rint(8 * start + 4), -32767, 32767).astype(np.int64))
        if residual is not None:
            ratio = np.rint(residual[1].scale / target.scale * 2**11).clip(-32767, 32767)
            found = clip16(found + half_up((residual[0][channel].astype(np.int64) << 7) * ratio, 15))
        outputs.append(np.clip(found >> 3, 0, 255))
    return np.array(outputs).reshape(node.output.shape)


def mixed(codes, node, parts):
    """Values with their scales and shifts per channel, in the steps of another value."""
    target, total = codes[node.output.name], 0
    for number, (value, numbers, scale, shift) in enumerate(parts):
        source = codes[value.name]
        factor = scale * source.scale / target.scale
        limit = 2**21 - 1
        total = total + numbers.astype(np.int64) * np.rint(factor * 65536).clip(-limit, limit).astype(np.int64)
        start = shift / target.scale - factor * source.zero + (target.zero if number == 0 else 0)
        parts[number] = start
    start = np.rint(sum(parts) * 65536).clip(-(2**29) + 1, 2**29 - 1).astype(np.int64)
    return np.clip((total + start + 32768) >> 16, 0, 255)


def pooled(codes, node, pixels):
    source, target = codes[node.inputs[0].name], codes[node.output.name]
    image = torch.tensor(pixels.astype(np.float64)).reshape(len(pixels), *([1] * (3 - pixels.ndim)), *pixels.shape[1:])
    if isinstance(node, MaxPool):
        return (
            F.max_pool2d(image, node.kernel, node.stride, node.padding)
            .numpy()
            .astype(np.int64)
            .reshape(node.output.shape)
        )
    area = node.kernel[0] * node.kernel[1]
    total = F.avg_pool2d(image, node.kernel, node.stride, node.padding, divisor_override=1)
    inside = F.avg_pool2d(torch.ones_like(image), node.kernel, node.stride, node.padding, divisor_override=1)
    total, inside = (one.numpy().round().astype(np.int64) for one in (total, inside))
    divisor = area if node.count_include_pad else inside
    factor = int(np.rint(source.scale / target.scale * 65536))
    product = (total - inside * source.zero) * factor
    shared = np.sign(product) * (np.abs(product) // divisor)  # C rounds towards zero
    return np.clip(((shared + 32768) >> 16) + target.zero, 0, 255).reshape(node.output.shape)


def run(graph, codes, image):
    """The output for one input."""
    first = codes[graph.input.name]
    scaled = image.astype(np.float32) * np.float32(1 / first.scale) + np.float32(first.zero)
    values = {graph.input: np.clip(np.floor(np.float32(scaled + np.float32(0.5))), 0, 255).astype(np.int64)}
    for node in graph.nodes:
        shape = (-1, *[1] * (len(node.output.shape) - 1))
        match node:
            case Convolution() | Linear():
                found = layer(graph, codes, node, values)
            case Affine(inputs=(one,)):
                scale, shift = (
                    node.scale.astype(np.float64).reshape(shape),
                    node.shift.astype(np.float64).reshape(shape),
                )
                found = mixed(codes, node, [(one, values[one], scale, shift)])
            case Add(inputs=(one, other)):
                found = mixed(codes, node, [(value, values[value], np.float64(1), 0.0) for value in (one, other)])
            case MaxPool() | AveragePool():
                found = pooled(codes, node, values[node.inputs[0]])
            case Concatenate():
                parts = [mixed(codes, node, [(value, values[value], np.float64(1), 0.0)]) for value in node.inputs]
                found = np.concatenate(parts)
            case Flatten(inputs=(one,)):
                found = values[one].reshape(-1)
        values[node.output] = found
    last = codes.get(graph.output.name)
    output = values[graph.output]
    return output if last is None else ((output - last.zero).astype(np.float32) * np.float32(last.scale)).reshape(-1)
