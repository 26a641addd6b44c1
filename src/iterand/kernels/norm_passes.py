"""Passes over images that lie channels last: the sums that a batch norm needs, and what it makes of them."""

import triton
import triton.language as tl


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
