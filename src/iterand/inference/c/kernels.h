/* Layers of a network whose weights are few, in C99 without dependencies.
 *
 * A value of C channels is C planes of pixels. Around and between its rows a plane has a border of zeros, which is the padding of
 * the convolutions that read it; the border on the right of a row is that on the left of the next. So the pixels of a plane are one
 * sequence, from the first pixel to the last, and pixel i of an output channel is the sum of the inputs at i + offset, for a list of
 * offsets: one for each weight that is not zero. Weights of ±c are added and subtracted; c is part of the channel's scale.
 *
 * Sums are taken in the order of the lists, for every size of vectors, so that all compilers and processors give the same bits
 * (compile with -ffp-contract=off).
 */
#include <stddef.h>
#include <stdint.h>

#ifndef ITERAND_VECTOR /* floats in a vector; 1: no vectors */
#if !defined(__GNUC__)
#define ITERAND_VECTOR 1
#elif defined(__AVX512F__)
#define ITERAND_VECTOR 16
#elif defined(__AVX__)
#define ITERAND_VECTOR 8
#elif defined(__SSE2__) || defined(__ARM_NEON)
#define ITERAND_VECTOR 4
#else
#define ITERAND_VECTOR 1
#endif
#endif

#define VL ITERAND_VECTOR

#if defined(__GNUC__)
#define KERNEL static __attribute__((unused))
#else
#define KERNEL static
#endif

#if VL == 1
typedef float vector;
#define LOAD(address) (*(address))
#define STORE(address, value) (*(address) = (value))
#define POSITIVE(value) ((value) < 0 ? 0 : (value)) /* NaN stays */
#else
typedef float vector __attribute__((vector_size(VL * 4)));
typedef int32_t integers __attribute__((vector_size(VL * 4)));
typedef float anywhere __attribute__((vector_size(VL * 4), aligned(4), may_alias));
#define LOAD(address) (*(const anywhere *)(address))
#define STORE(address, value) (*(anywhere *)(address) = (value))
#define POSITIVE(value) ((vector)((integers)(value) & ~((value) < 0)))
#endif

/* Where the pixels of a value are, in floats. A vector of features has one pixel per channel and no border. */
typedef struct {
    int32_t channels, height, width;
    int32_t first;  /* from the beginning of a plane to its first pixel */
    int32_t row;    /* from row to row */
    int32_t plane;  /* from channel to channel */
} layout;

/* A convolution or linear layer: relu?(scale * sum + shift + residual).
 *
 * Offsets are given as they are, or as codes of a byte. A code counts the weights from the first one of the input channel of the
 * weight before it: code / taps channels on, tap code % taps. Code 255 goes 255 / taps channels on, without a weight. The offsets that
 * are added and those that are subtracted both begin with input channel 0. */
typedef struct {
    const int32_t *offsets; /* of all output channels, one after the other; NULL: `codes` */
    const uint8_t *codes;
    const uint16_t *counts; /* for each output channel: offsets that are added, offsets that are subtracted */
    const float *weights;   /* NULL: all are 1 */
    const float *scale, *shift;
    int32_t relu;
    int32_t groups;         /* of output channels, which read other input channels each */
    int32_t group;          /* from the input of a group to that of the next */
    int32_t taps, channel;  /* of a kernel; from input channel to input channel */
    const int32_t *tap;     /* the offsets of the taps in a channel */
} weights_of;

KERNEL int32_t length_of(const layout *at) { return (at->height - 1) * at->row + at->width; }

/* A block of VECTORS vectors of output pixels in registers. The last one may overlap the one before it, so that a block ends
 * with the last pixel of the plane. */
typedef struct {
    const float *in;
    const int32_t *offsets;
    const float *weights;
    int32_t plus, minus, last;
    float scale, shift;
    int32_t relu;
    const float *residual;
    float *out;
} block;

#define REPEAT_0(DO)
#define REPEAT_1(DO) DO(0)
#define REPEAT_2(DO) REPEAT_1(DO) DO(1)
#define REPEAT_3(DO) REPEAT_2(DO) DO(2)
#define REPEAT_4(DO) REPEAT_3(DO) DO(3)
#define REPEAT_5(DO) REPEAT_4(DO) DO(4)
#define REPEAT_6(DO) REPEAT_5(DO) DO(5)
#define REPEAT_7(DO) REPEAT_6(DO) DO(6)
#define REPEAT_8(DO) REPEAT_7(DO) DO(7)
#define REPEAT_9(DO) REPEAT_8(DO) DO(8)
#define REPEAT_10(DO) REPEAT_9(DO) DO(9)
#define REPEAT_11(DO) REPEAT_10(DO) DO(10)

#define ZERO(i) vector sum_##i = {0};
#define ADD(i) sum_##i += LOAD(from + (i) * VL);
#define SUBTRACT(i) sum_##i -= LOAD(from + (i) * VL);
#define MULTIPLY(i) sum_##i += weight * LOAD(from + (i) * VL);
#define SCALE(i) sum_##i = sum_##i * scale + shift;
#define RESIDUAL(i) sum_##i += LOAD(residual + (i) * VL);
#define RELU(i) sum_##i = POSITIVE(sum_##i);
#define WRITE(i) STORE(out + (i) * VL, sum_##i);

/* From the sums of a block to its outputs. */
#define FINISH(FULL)                                                                        \
    {                                                                                       \
        const float scale = b->scale, shift = b->shift, *const residual = b->residual;      \
        float *const out = b->out;                                                          \
        const int32_t relu = b->relu;                                                       \
        REPEAT_##FULL(SCALE) sum_last = sum_last * scale + shift;                           \
        if (residual) {                                                                     \
            REPEAT_##FULL(RESIDUAL) sum_last += LOAD(residual + last);                      \
        }                                                                                   \
        if (relu) {                                                                         \
            REPEAT_##FULL(RELU) sum_last = POSITIVE(sum_last);                              \
        }                                                                                   \
        REPEAT_##FULL(WRITE) STORE(out + last, sum_last);                                   \
    }

/* The functions of a block of VECTORS = FULL + 1 vectors. */
#define DEFINE_BLOCK(VECTORS, FULL)                                                  \
    static void add_##VECTORS(const block *b) {                                      \
        const int32_t *offset = b->offsets, *end = offset + b->plus, last = b->last; \
        REPEAT_##FULL(ZERO) vector sum_last = {0};                                   \
        for (; offset < end; offset++) {                                             \
            const float *from = b->in + *offset;                                     \
            REPEAT_##FULL(ADD) sum_last += LOAD(from + last);                        \
        }                                                                            \
        for (end += b->minus; offset < end; offset++) {                              \
            const float *from = b->in + *offset;                                     \
            REPEAT_##FULL(SUBTRACT) sum_last -= LOAD(from + last);                   \
        }                                                                            \
        FINISH(FULL)                                                                 \
    }                                                                                \
    static void multiply_##VECTORS(const block *b) {                                 \
        const int32_t *offset = b->offsets, *end = offset + b->plus, last = b->last; \
        const float *weights = b->weights;                                           \
        REPEAT_##FULL(ZERO) vector sum_last = {0};                                   \
        for (; offset < end; offset++) {                                             \
            const float *from = b->in + *offset, weight = *weights++;                \
            REPEAT_##FULL(MULTIPLY) sum_last += weight * LOAD(from + last);          \
        }                                                                            \
        FINISH(FULL)                                                                 \
    }

DEFINE_BLOCK(1, 0)
DEFINE_BLOCK(2, 1)
DEFINE_BLOCK(3, 2)
DEFINE_BLOCK(4, 3)
DEFINE_BLOCK(5, 4)
DEFINE_BLOCK(6, 5)
DEFINE_BLOCK(7, 6)
DEFINE_BLOCK(8, 7)
DEFINE_BLOCK(9, 8)
DEFINE_BLOCK(10, 9)
DEFINE_BLOCK(11, 10)
DEFINE_BLOCK(12, 11)

#define BLOCK 12 /* vectors in a block, at most */

static void (*const add_blocks[])(const block *) = {0, add_1, add_2, add_3, add_4, add_5, add_6, add_7, add_8, add_9, add_10, add_11, add_12};
static void (*const multiply_blocks[])(const block *) = {0, multiply_1, multiply_2, multiply_3, multiply_4, multiply_5, multiply_6,
                                                         multiply_7, multiply_8, multiply_9, multiply_10, multiply_11, multiply_12};

/* A single pixel, as in a linear layer: four sums, so that additions need not wait for each other. */
KERNEL void one(const block *b) {
    float sums[4] = {0}, result;
    int32_t k;
    for (k = 0; k < b->plus + b->minus; k++) {
        const float weight = b->weights ? b->weights[k] : k < b->plus ? 1.0f : -1.0f;
        sums[k & 3] += weight * b->in[b->offsets[k]];
    }
    result = ((sums[0] + sums[1]) + (sums[2] + sums[3])) * b->scale + b->shift;
    if (b->residual) result += b->residual[0];
    b->out[0] = b->relu && result < 0 ? 0 : result;
}

/* A plane that is shorter than a vector. */
KERNEL void few(const block *b, int32_t length) {
    float sums[VL] = {0};
    int32_t i, k;
    for (k = 0; k < b->plus + b->minus; k++) {
        const float *from = b->in + b->offsets[k], weight = b->weights ? b->weights[k] : k < b->plus ? 1.0f : -1.0f;
        for (i = 0; i < length; i++) sums[i] += weight * from[i];
    }
    for (i = 0; i < length; i++) {
        float result = sums[i] * b->scale + b->shift;
        if (b->residual) result += b->residual[i];
        b->out[i] = b->relu && result < 0 ? 0 : result;
    }
}

KERNEL void zeros(float *at, int32_t count) {
    const vector zero = {0};
    int32_t i;
    if (count < VL) {
        for (i = 0; i < count; i++) at[i] = 0;
        return;
    }
    for (i = 0; i + VL < count; i += VL) STORE(at + i, zero);
    STORE(at + count - VL, zero);
}

/* Zeros in front of, behind and between the rows of all planes. */
KERNEL void clear_border(float *value, const layout *at) {
    const int32_t gap = at->row - at->width, length = length_of(at);
    int32_t channel, row, i;
    zeros(value, at->first);
    for (channel = 0; channel < at->channels; channel++, value += at->plane) {
        float *pixels = value + at->first, *between = pixels + at->width;
        if (gap == 1)
            for (row = 1; row < at->height; row++, between += at->row) *between = 0;
        else
            for (row = 1; row < at->height; row++, between += at->row)
                for (i = 0; i < gap; i++) between[i] = 0;
        zeros(pixels + length, at->plane - length - (channel + 1 < at->channels ? 0 : at->first));
    }
}

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
KERNEL void convolve_channels(const float *in, const weights_of *w, const int32_t *offsets, const float *weights, int32_t from, int32_t to,
                              const float *residual, const layout *residual_at, float *out, const layout *at) {
    const int32_t length = length_of(at), vectors = (length + VL - 1) / VL, blocks = (vectors + BLOCK - 1) / BLOCK;
    const int32_t size = (vectors + blocks - 1) / blocks;
    void (*const *run)(const block *) = w->weights ? multiply_blocks : add_blocks;
    int32_t start, channel;
    for (start = 0; start < vectors; start += size) {
        const int32_t these = vectors - start < size ? vectors - start : size, begin = start * VL;
        block b;
        b.offsets = offsets;
        b.weights = weights;
        b.in = in + begin;
        b.last = start + these == vectors ? length - VL - begin : (these - 1) * VL;
        b.relu = w->relu;
        for (channel = from; channel < to; channel++) {
            b.plus = w->counts[2 * channel];
            b.minus = w->counts[2 * channel + 1];
            b.scale = w->scale[channel];
            b.shift = w->shift[channel];
            b.residual = residual ? residual + channel * residual_at->plane + residual_at->first + begin : NULL;
            b.out = out + channel * at->plane + at->first + begin;
            if (length == 1)
                one(&b);
            else if (length < VL)
                few(&b, length);
            else
                run[these](&b);
            b.offsets += b.plus + b.minus;
            if (b.weights) b.weights += b.plus;
        }
    }
}

/* Offsets count from the first pixel of the output to the pixels of `in`, whose rows are as far apart as those of the output. */
KERNEL void convolve(const float *in, const weights_of *w, const float *residual, const layout *residual_at, float *out, const layout *at) {
    if (w->offsets) {
        convolve_channels(in, w, w->offsets, w->weights, 0, at->channels, residual, residual_at, out, at);
    } else {
        const int32_t group = at->channels / w->groups;
        const uint8_t *codes = w->codes;
        const float *weights = w->weights;
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

/* The rows that a strided or unpadded convolution reads, so that rows lie as far apart as those of its output: for each channel,
 * each column of the kernel and each remainder of rows by the stride one plane of `rows` rows. The padding is part of `from`. */
typedef struct {
    int32_t columns, remainders, rows; /* planes of a channel, rows of a plane */
    int32_t stride_y, stride_x, dilation_x;
    int32_t width, row;                /* of the output */
} gathering;

#define CHUNK 8 /* a number of pixels that compilers turn into vectors */

KERNEL void take(const float *restrict from, int32_t step, int32_t count, float *restrict to) {
    int32_t x = 0, i;
    if (step == 1)
        for (; x + CHUNK <= count; x += CHUNK)
            for (i = 0; i < CHUNK; i++) to[x + i] = from[x + i];
    else if (step == 2)
        for (; x + CHUNK <= count; x += CHUNK)
            for (i = 0; i < CHUNK; i++) to[x + i] = from[2 * x + 2 * i];
    for (; x < count; x++) to[x] = from[x * step];
}

KERNEL void gather(const float *in, const layout *from, const gathering *g, float *out) {
    int32_t channel, column, remainder, row;
    for (channel = 0; channel < from->channels; channel++)
        for (column = 0; column < g->columns; column++)
            for (remainder = 0; remainder < g->remainders; remainder++)
                for (row = 0; row < g->rows; row++, out += g->row) {
                    const int32_t y = row * g->stride_y + remainder;
                    if (y < from->height) /* no weight reads the others */
                        take(in + channel * from->plane + from->first + y * from->row + column * g->dilation_x, g->stride_x, g->width, out);
                }
}

typedef struct {
    int32_t height, width, stride_y, stride_x, pad_y, pad_x;
    int32_t include_pad; /* in the number that an average is divided by */
} window;

/* Maximum or average over windows; pixels outside do not count. */
KERNEL void pool(const float *in, const layout *from, const window *w, int maximum, float *out, const layout *to) {
    int32_t channel, y, x, i, j;
    for (channel = 0; channel < to->channels; channel++)
        for (y = 0; y < to->height; y++)
            for (x = 0; x < to->width; x++) {
                const int32_t top = y * w->stride_y - w->pad_y, left = x * w->stride_x - w->pad_x;
                const int32_t first_y = top < 0 ? 0 : top, first_x = left < 0 ? 0 : left;
                const int32_t end_y = top + w->height < from->height ? top + w->height : from->height;
                const int32_t end_x = left + w->width < from->width ? left + w->width : from->width;
                const float *plane = in + channel * from->plane + from->first;
                float result = maximum ? plane[first_y * from->row + first_x] : 0;
                for (i = first_y; i < end_y; i++)
                    for (j = first_x; j < end_x; j++) {
                        const float pixel = plane[i * from->row + j];
                        result = !maximum ? result + pixel : pixel > result || pixel != pixel ? pixel : result;
                    }
                if (!maximum)
                    result /= (float)(w->include_pad ? w->height * w->width : (end_y - first_y) * (end_x - first_x));
                out[channel * to->plane + to->first + y * to->row + x] = result;
            }
    clear_border(out, to);
}

/* relu?(scale * a + shift + b); scale and shift per channel or NULL, b or NULL; written to the channels of `a`. */
KERNEL void combine(const float *a, const layout *a_at, const float *scale, const float *shift, const float *b, const layout *b_at,
                    int relu, float *out, const layout *to) {
    int32_t channel, y, x;
    for (channel = 0; channel < a_at->channels; channel++)
        for (y = 0; y < a_at->height; y++) {
            const float *left = a + channel * a_at->plane + a_at->first + y * a_at->row;
            const float *right = b ? b + channel * b_at->plane + b_at->first + y * b_at->row : NULL;
            float *result = out + channel * to->plane + to->first + y * to->row;
            for (x = 0; x < a_at->width; x++) {
                float value = scale ? scale[channel] * left[x] + shift[channel] : left[x];
                if (right) value += right[x];
                result[x] = relu && value < 0 ? 0 : value;
            }
        }
}
