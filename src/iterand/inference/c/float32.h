/* Arithmetic in float32.
 *
 * Sums are taken in the order of the lists, for every size of vectors, so that all compilers and processors give the same bits
 * (compile with -ffp-contract=off).
 */
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

#define VL ITERAND_VECTOR /* pixels in a vector */
#if VL == 16 || defined(__aarch64__)
#define BLOCK 20 /* vectors in a block, at most: there are 32 registers */
#else
#define BLOCK 12
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

/* relu?(scale * sum + shift + residual) */
struct finishing {
    const float *scale, *shift; /* of channels */
    int32_t relu;
};

#define ZERO(i) vector sum_##i = {0};
#define ADD(i) sum_##i += LOAD(from + (i) * VL);
#define SUBTRACT(i) sum_##i -= LOAD(from + (i) * VL);
#define MULTIPLY(i) sum_##i += factor * LOAD(from + (i) * VL);
#define SCALE(i) sum_##i = sum_##i * scale + shift;
#define RESIDUAL(i) sum_##i += LOAD(residual + (i) * VL);
#define RELU(i) sum_##i = POSITIVE(sum_##i);
#define WRITE(i) STORE(out + (i) * VL, sum_##i);

/* From the sums of a block to its outputs. */
#define FINISH(FULL)                                                                        \
    {                                                                                       \
        const float scale = b->finish->scale[b->channel], shift = b->finish->shift[b->channel]; \
        const float *const residual = b->residual;                                          \
        float *const out = b->out;                                                          \
        const int32_t relu = b->finish->relu;                                               \
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
    KERNEL void add_##VECTORS(const block *b) {                                      \
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
    KERNEL void multiply_##VECTORS(const block *b) {                                 \
        const int32_t *offset = b->offsets, *end = offset + b->plus, last = b->last; \
        const float *weights = b->weights;                                           \
        REPEAT_##FULL(ZERO) vector sum_last = {0};                                   \
        for (; offset < end; offset++) {                                             \
            const float *from = b->in + *offset, factor = *weights++;                \
            REPEAT_##FULL(MULTIPLY) sum_last += factor * LOAD(from + last);          \
        }                                                                            \
        FINISH(FULL)                                                                 \
    }

DEFINE_BLOCKS

KERNEL number finished(float sum, const block *b, int32_t pixel) {
    float result = sum * b->finish->scale[b->channel] + b->finish->shift[b->channel];
    if (b->residual) result += b->residual[pixel];
    return b->finish->relu && result < 0 ? 0 : result;
}

/* A plane that is shorter than a vector. A single pixel, as in a linear layer, has four sums, so that additions need not wait for
 * each other. */
KERNEL void few(const block *b, int32_t length) {
    float sums[VL < 4 ? 4 : VL] = {0};
    int32_t i, k;
    for (k = 0; k < b->plus + b->minus; k++) {
        const float *from = b->in + b->offsets[k], factor = b->weights ? b->weights[k] : k < b->plus ? 1.0f : -1.0f;
        if (length == 1)
            sums[k & 3] += factor * from[0];
        else
            for (i = 0; i < length; i++) sums[i] += factor * from[i];
    }
    if (length == 1) sums[0] = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (i = 0; i < length; i++) b->out[i] = finished(sums[i], b, i);
}

#define CASE(SIZE)                                                                  \
    case SIZE:                                                                      \
        if (USED(SIZE)) b->weights ? multiply_##SIZE(b) : add_##SIZE(b);            \
        break;

/* A block of so many vectors in a plane of so many pixels. */
KERNEL void compute(const block *b, int32_t vectors, int32_t length) {
    if (length < VL || length == 1) {
        few(b, length);
        return;
    }
    switch (vectors) { SIZES(CASE) }
}

typedef float total;

#define LARGEST(a, b) ((b) > (a) || (b) != (b) ? (b) : (a)) /* NaN stays */

typedef struct {
    int32_t unused; /* an average is a pixel as it is */
} averaging;

/* Of the pixels of a window, so many of them inside, and so many by which the sum is divided. */
KERNEL number average(float sum, int32_t inside, int32_t divisor, const averaging *a) {
    (void)inside, (void)a;
    return sum / (float)divisor;
}

/* relu?(scale * a + shift + b); scale and shift per channel or NULL, b or NULL; written to the channels of `a`. */
KERNEL void combine(const float *a, const layout *a_at, const float *scale, const float *shift, int relu, const float *b,
                    const layout *b_at, float *out, const layout *to) {
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

/* The caller's numbers as planes, and back. */
KERNEL void from_floats(const float *in, float *out, const layout *to) {
    int32_t channel, y, x;
    for (channel = 0; channel < to->channels; channel++)
        for (y = 0; y < to->height; y++)
            for (x = 0; x < to->width; x++) out[channel * to->plane + to->first + y * to->row + x] = *in++;
    clear_border(out, to);
}

KERNEL void to_floats(const float *in, const layout *from, float *out) {
    int32_t channel, y, x;
    for (channel = 0; channel < from->channels; channel++)
        for (y = 0; y < from->height; y++)
            for (x = 0; x < from->width; x++) *out++ = in[channel * from->plane + from->first + y * from->row + x];
}
