/* Layers of a network whose weights are few, in C99 without dependencies.
 *
 * A value of C channels is C planes of pixels. Around and between its rows a plane has a border of zeros, which is the padding of
 * the convolutions that read it; the border on the right of a row is that on the left of the next. So the pixels of a plane are one
 * sequence, from the first pixel to the last, and pixel i of an output channel is the sum of the inputs at i + offset, for a list of
 * offsets: one for each weight that is not zero. Weights of ±c are added and subtracted; c is part of the channel's scale.
 *
 * This file has the planes, float32.h or int8.h the arithmetic of pixels, layers.h the layers.
 */
#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define KERNEL static __attribute__((unused))
#else
#define KERNEL static
#endif

#ifdef NETWORK_INT8
typedef uint8_t number; /* a pixel */
typedef int8_t weight;
#else
typedef float number;
typedef float weight;
#endif

/* Where the pixels of a value are, in numbers. A vector of features has one pixel per channel and no border. */
typedef struct {
    int32_t channels, height, width;
    int32_t first; /* from the beginning of a plane to its first pixel */
    int32_t row;   /* from row to row */
    int32_t plane; /* from channel to channel */
    int32_t zero;  /* the number that stands for zero */
} layout;

KERNEL int32_t length_of(const layout *at) { return (at->height - 1) * at->row + at->width; }

/* What follows the sum of a channel's inputs. */
typedef struct finishing finishing;

/* A block of vectors of output pixels in registers. The last one may overlap the one before it, so that a block ends with the last
 * pixel of the plane. */
typedef struct {
    const number *in;
    const int32_t *offsets;
    const weight *weights;     /* NULL: all are 1 */
    int32_t plus, minus, last; /* offsets that are added, offsets that are subtracted; the place of the last vector */
    const finishing *finish;
    int32_t channel;
    const number *residual;
    number *out;
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
#define REPEAT_12(DO) REPEAT_11(DO) DO(11)
#define REPEAT_13(DO) REPEAT_12(DO) DO(12)
#define REPEAT_14(DO) REPEAT_13(DO) DO(13)
#define REPEAT_15(DO) REPEAT_14(DO) DO(14)
#define REPEAT_16(DO) REPEAT_15(DO) DO(15)
#define REPEAT_17(DO) REPEAT_16(DO) DO(16)
#define REPEAT_18(DO) REPEAT_17(DO) DO(17)
#define REPEAT_19(DO) REPEAT_18(DO) DO(18)

/* The pixels of a plane in vectors (VL pixels) and blocks (at most BLOCK vectors) of equal size, but for the last one. */
#define VECTORS(length) (((length) + VL - 1) / VL)
#define BLOCKS(length) ((VECTORS(length) + BLOCK - 1) / BLOCK)
#define BLOCK_SIZE(length) ((VECTORS(length) + BLOCKS(length) - 1) / BLOCKS(length))
#define LAST_SIZE(length) ((VECTORS(length) - 1) % BLOCK_SIZE(length) + 1)
#define USES(size, length) (BLOCK_SIZE(length) == (size) || LAST_SIZE(length) == (size))

#ifndef NETWORK_USES
#define NETWORK_USES(size) 1 /* whether the network has blocks of this size */
#endif
#define USED(size) ((size) <= BLOCK && NETWORK_USES(size))

/* The functions of all sizes; compilers leave out those that the network does not use. */
#define DEFINE_BLOCKS \
    DEFINE_BLOCK(1, 0) DEFINE_BLOCK(2, 1) DEFINE_BLOCK(3, 2) DEFINE_BLOCK(4, 3) DEFINE_BLOCK(5, 4) \
    DEFINE_BLOCK(6, 5) DEFINE_BLOCK(7, 6) DEFINE_BLOCK(8, 7) DEFINE_BLOCK(9, 8) DEFINE_BLOCK(10, 9) \
    DEFINE_BLOCK(11, 10) DEFINE_BLOCK(12, 11) DEFINE_BLOCK(13, 12) DEFINE_BLOCK(14, 13) DEFINE_BLOCK(15, 14) \
    DEFINE_BLOCK(16, 15) DEFINE_BLOCK(17, 16) DEFINE_BLOCK(18, 17) DEFINE_BLOCK(19, 18) DEFINE_BLOCK(20, 19)

#define SIZES(DO) \
    DO(1) DO(2) DO(3) DO(4) DO(5) DO(6) DO(7) DO(8) DO(9) DO(10) DO(11) DO(12) DO(13) DO(14) DO(15) DO(16) DO(17) DO(18) DO(19) DO(20)

#define CHUNK 16 /* pixels that compilers turn into vectors */

/* The last chunk overlaps the one before it. */
KERNEL void fill(number *at, int32_t count, number value) {
    int32_t begin, i;
    if (count < CHUNK) {
        for (i = 0; i < count; i++) at[i] = value;
        return;
    }
    for (begin = 0; begin < count; begin += CHUNK) {
        number *chunk = at + (begin + CHUNK <= count ? begin : count - CHUNK);
        for (i = 0; i < CHUNK; i++) chunk[i] = value;
    }
}

/* Zeros in front of, behind and between the rows of all planes. */
KERNEL void clear_border(number *value, const layout *at) {
    const int32_t gap = at->row - at->width, length = length_of(at);
    const number zero = (number)at->zero;
    int32_t channel, row, i;
    if (!at->first && !gap) return;
    fill(value, at->first, zero);
    for (channel = 0; channel < at->channels; channel++, value += at->plane) {
        number *pixels = value + at->first, *between = pixels + at->width;
        if (gap == 1)
            for (row = 1; row < at->height; row++, between += at->row) *between = zero;
        else
            for (row = 1; row < at->height; row++, between += at->row)
                for (i = 0; i < gap; i++) between[i] = zero;
        fill(pixels + length, at->plane - length - (channel + 1 < at->channels ? 0 : at->first), zero);
    }
}

/* The rows that a strided or unpadded convolution reads, so that rows lie as far apart as those of its output: for each channel,
 * for some columns to begin with, and for each remainder of rows by the stride one plane of `rows` rows. The padding is part of `from`. */
typedef struct {
    int32_t columns, remainders, rows;  /* planes of a channel, rows of a plane */
    int32_t stride_y, stride_x, column; /* from one of the first columns to the next */
    int32_t width, row;                 /* pixels that are read; from row to row */
} gathering;

/* Every step-th pixel. */
KERNEL void take(const number *restrict from, int32_t step, int32_t count, number *restrict to) {
    int32_t x;
    for (x = 0; x < count; x++) to[x] = from[x * step];
}

#define PAIRS_OF_PIXELS 8

#if defined(NETWORK_INT8) && defined(__GNUC__) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
typedef uint16_t pair __attribute__((aligned(1), may_alias)); /* so compilers find vectors of 16 bits */
#define FIRST_OF(from, i) (number)(((const pair *)(from))[i] & 255)
#define SECOND_OF(from, i) (number)(((const pair *)(from))[i] >> 8)
#else
#define FIRST_OF(from, i) (from)[2 * (i)]
#define SECOND_OF(from, i) (from)[2 * (i) + 1]
#endif

/* The first and the second of so many pairs of pixels. */
KERNEL void part(const number *restrict from, number *restrict first, number *restrict second) {
    int32_t i;
    for (i = 0; i < PAIRS_OF_PIXELS; i++) first[i] = FIRST_OF(from, i);
    for (i = 0; i < PAIRS_OF_PIXELS; i++) second[i] = SECOND_OF(from, i);
}

KERNEL void gather(const number *in, const layout *from, const gathering *g, number *out) {
    const int32_t plane = g->rows * g->row, second = g->remainders * plane;
    const int32_t pairs = from->width / 2 < g->width ? from->width / 2 : g->width;
    int32_t channel, remainder, row, column, x;
    for (channel = 0; channel < from->channels; channel++, out += g->columns * second)
        for (remainder = 0; remainder < g->remainders; remainder++)
            for (row = 0; row < g->rows; row++) {
                const int32_t y = row * g->stride_y + remainder;
                const number *source = in + channel * from->plane + from->first + y * from->row;
                number *target = out + remainder * plane + row * g->row;
                if (y >= from->height) continue; /* no weight reads these */
                if (g->stride_x == 2 && g->columns == 2 && g->column == 1 && pairs >= PAIRS_OF_PIXELS) {
                    for (x = 0; x < pairs; x += PAIRS_OF_PIXELS) {
                        const int32_t begin = x + PAIRS_OF_PIXELS <= pairs ? x : pairs - PAIRS_OF_PIXELS;
                        part(source + 2 * begin, target + begin, target + second + begin);
                    }
                    if (pairs < g->width && 2 * pairs < from->width) target[pairs] = source[2 * pairs];
                    continue;
                }
                for (column = 0; column < g->columns; column++, target += second) {
                    const int32_t first = column * g->column, there = (from->width - first + g->stride_x - 1) / g->stride_x;
                    take(source + first, g->stride_x, there < g->width ? there : g->width, target);
                }
            }
}
