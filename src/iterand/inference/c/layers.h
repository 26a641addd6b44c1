/* Convolutions, linear layers and pooling, for either arithmetic. */

/* A convolution or linear layer: sums of the inputs, and what follows them.
 *
 * Offsets are given as they are, or as codes of a byte. A code counts the weights from the first one of the input channel of the
 * weight before it: code / taps channels on, tap code % taps. Code 255 goes 255 / taps channels on, without a weight. The offsets that
 * are added and those that are subtracted both begin with input channel 0. */
typedef struct {
    const int32_t *offsets; /* of all output channels, one after the other; NULL: `codes` */
    const uint8_t *codes;
    const uint16_t *counts; /* for each output channel: offsets that are added, offsets that are subtracted */
    const weight *weights;  /* NULL: all are 1 */
    finishing finish;
    int32_t groups;         /* of output channels, which read other input channels each */
    int32_t group;          /* from the input of a group to that of the next */
    int32_t taps, channel;  /* of a kernel; from input channel to input channel */
    const int32_t *tap;     /* the offsets of the taps in a channel */
} weights_of;

#ifndef NETWORK_OFFSETS
#define NETWORK_OFFSETS 1 /* of decoded offsets, at least as many as a channel has */
#endif

/* Decoded offsets, and what a code stands for. */
typedef struct {
    int32_t offsets[NETWORK_OFFSETS], at[256], on[256];
} decoder;

KERNEL void prepare(decoder *d, const weights_of *w) {
    int32_t code;
    for (code = 0; code < 256; code++) {
        d->on[code] = code / w->taps * w->channel;
        d->at[code] = d->on[code] + w->tap[code % w->taps];
    }
}

KERNEL const uint8_t *decode(const decoder *d, const uint8_t *codes, int32_t count, int32_t base, int32_t *offsets) {
    while (count) {
        const uint8_t code = *codes++;
        if (code < 255) {
            *offsets++ = base + d->at[code];
            count--;
        }
        base += d->on[code];
    }
    return codes;
}

/* Some channels of a convolution. Blocks come first, because the inputs of a block fit the fastest memory. */
KERNEL void convolve_channels(const number *in, const weights_of *w, const int32_t *offsets, const weight *weights, int32_t from, int32_t to,
                              const number *residual, const layout *residual_at, number *out, const layout *at) {
    const int32_t length = length_of(at), vectors = VECTORS(length), size = BLOCK_SIZE(length);
    int32_t start, channel;
    for (start = 0; start < vectors; start += size) {
        const int32_t these = vectors - start < size ? vectors - start : size, begin = start * VL;
        block b;
        b.offsets = offsets;
        b.weights = weights;
        b.in = in + begin;
        b.last = start + these == vectors ? length - VL - begin : (these - 1) * VL;
        b.finish = &w->finish;
        for (channel = from; channel < to; channel++) {
            b.channel = channel;
            b.plus = w->counts[2 * channel];
            b.minus = w->counts[2 * channel + 1];
            b.residual = residual ? residual + channel * residual_at->plane + residual_at->first + begin : NULL;
            b.out = out + channel * at->plane + at->first + begin;
            compute(&b, these, length);
            b.offsets += b.plus + b.minus;
            if (b.weights) b.weights += b.plus;
        }
    }
}

/* Offsets count from the first pixel of the output to the pixels of `in`, whose rows are as far apart as those of the output. */
KERNEL void convolve(const number *in, const weights_of *w, const number *residual, const layout *residual_at, number *out, const layout *at) {
    if (w->offsets) {
        convolve_channels(in, w, w->offsets, w->weights, 0, at->channels, residual, residual_at, out, at);
    } else {
        const int32_t group = at->channels / w->groups;
        const uint8_t *codes = w->codes;
        const weight *weights = w->weights;
        int32_t from = 0, to = 0, used = 0, all;
        decoder d;
        prepare(&d, w);
        for (; from < at->channels; from = to, used = 0) {
            for (all = 0; to < at->channels; to++, used += all) {
                const int32_t plus = w->counts[2 * to], minus = w->counts[2 * to + 1], base = to / group * w->group;
                all = plus + minus;
                if (used + all > NETWORK_OFFSETS) break;
                codes = decode(&d, codes, plus, base, d.offsets + used);
                codes = decode(&d, codes, minus, base, d.offsets + used + plus);
            }
            convolve_channels(in, w, d.offsets, weights, from, to, residual, residual_at, out, at);
            if (weights) weights += used;
        }
    }
    clear_border(out, at);
}

/* Maximum or average over windows; pixels outside do not count. */
typedef struct {
    int32_t height, width, stride_y, stride_x, pad_y, pad_x;
    int32_t maximum;
    int32_t include_pad; /* in the number that an average is divided by */
    averaging average;
} window;

KERNEL number pixel_of(const number *plane, int32_t row, int32_t top, int32_t bottom, int32_t left, int32_t right, const window *w) {
    const int32_t inside = (bottom - top) * (right - left);
    int32_t y, x;
    if (w->maximum) {
        number largest = plane[top * row + left];
        for (y = top; y < bottom; y++)
            for (x = left; x < right; x++) {
                const number pixel = plane[y * row + x];
                largest = LARGEST(largest, pixel);
            }
        return largest;
    } else {
        total sum = 0;
        for (y = top; y < bottom; y++)
            for (x = left; x < right; x++) sum += plane[y * row + x];
        return average(sum, inside, w->include_pad ? w->height * w->width : inside, &w->average);
    }
}

/* The maxima of two times two pixels. */
KERNEL void largest_of_pairs(const number *restrict upper, const number *restrict lower, number *restrict result) {
    int32_t i;
    for (i = 0; i < PAIRS_OF_PIXELS; i++) {
        const number a = FIRST_OF(upper, i), b = SECOND_OF(upper, i), c = FIRST_OF(lower, i), d = SECOND_OF(lower, i);
        const number left = LARGEST(a, c), right = LARGEST(b, d);
        result[i] = LARGEST(left, right);
    }
}

/* The same of whole planes, without padding. */
KERNEL void pool_pairs(const number *in, const layout *from, number *out, const layout *to) {
    int32_t channel, y, x;
    for (channel = 0; channel < to->channels; channel++)
        for (y = 0; y < to->height; y++) {
            const number *upper = in + channel * from->plane + from->first + 2 * y * from->row, *lower = upper + from->row;
            number *result = out + channel * to->plane + to->first + y * to->row;
            for (x = 0; x + PAIRS_OF_PIXELS <= to->width; x += PAIRS_OF_PIXELS)
                largest_of_pairs(upper + 2 * x, lower + 2 * x, result + x);
            for (; x < to->width; x++) {
                const number left = LARGEST(upper[2 * x], lower[2 * x]), right = LARGEST(upper[2 * x + 1], lower[2 * x + 1]);
                result[x] = LARGEST(left, right);
            }
        }
}

KERNEL void pool(const number *in, const layout *from, const window *w, number *out, const layout *to) {
    int32_t channel, y, x;
    if (w->maximum && w->height == 2 && w->width == 2 && w->stride_y == 2 && w->stride_x == 2 && !w->pad_y && !w->pad_x)
        pool_pairs(in, from, out, to);
    else
        for (channel = 0; channel < to->channels; channel++)
            for (y = 0; y < to->height; y++)
                for (x = 0; x < to->width; x++) {
                    const int32_t top = y * w->stride_y - w->pad_y, left = x * w->stride_x - w->pad_x;
                    const int32_t bottom = top + w->height < from->height ? top + w->height : from->height;
                    const int32_t right = left + w->width < from->width ? left + w->width : from->width;
                    const number *plane = in + channel * from->plane + from->first;
                    out[channel * to->plane + to->first + y * to->row + x] =
                        pixel_of(plane, from->row, top < 0 ? 0 : top, bottom, left < 0 ? 0 : left, right, w);
                }
    clear_border(out, to);
}
