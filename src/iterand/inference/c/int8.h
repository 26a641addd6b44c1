/* Arithmetic of bytes: a pixel q stands for scale * (q - zero).
 *
 * Everything until the output of the network is integers, so all compilers and processors give the same bits. The functions of single
 * pixels say what is computed; vectors of 16 bits compute the same.
 */
#ifdef ITERAND_VECTOR /* 1: no vectors */
#define VECTORS_OF_NONE
#elif defined(__AVX512BW__)
#define VECTORS_OF_AVX512
#elif defined(__AVX2__)
#define VECTORS_OF_AVX2
#elif defined(__SSE4_1__)
#define VECTORS_OF_SSE
#elif defined(__ARM_NEON) && defined(__aarch64__)
#define VECTORS_OF_NEON
#elif defined(__ARM_FEATURE_SIMD32) && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define VECTORS_OF_PAIRS
#else
#define VECTORS_OF_NONE
#endif

#define TOGETHER 128 /* offsets whose sum fits 16 bits whatever the pixels are */

/* From the sum of a channel to a pixel: to eighths of a step of the output, shifted, the residual added, rounded (half a step is
 * part of the shift). */
struct finishing {
    const int16_t *factor, *shift; /* factors are in units of 2^-15 */
    const int8_t *exponent;        /* sums are multiplied by 2^exponent first */
    const float *scale, *start;    /* of outputs of the network, which are floats: scale * sum + start; otherwise NULL */
    int32_t residual;              /* factor */
};

KERNEL int32_t limited(int32_t value, int32_t low, int32_t high) { return value < low ? low : value > high ? high : value; }

#ifdef __ARM_FEATURE_SAT
#include <arm_acle.h>
#define saturated(value) __ssat(value, 16)
#else
KERNEL int32_t saturated(int32_t value) { return limited(value, -32768, 32767); }
#endif

KERNEL int32_t scaled(int32_t value, int32_t factor) { return (value * factor + (1 << 14)) >> 15; }

/* What a channel needs for this, read once: pixels may lie anywhere, so the compiler would read it again for each of them. */
typedef struct {
    int32_t limit, left, right, factor, shift, residual; /* shifts to the left and to the right: one of them is 0 */
} scalars;

KERNEL scalars scalars_of(const block *b) {
    const finishing *f = b->finish;
    const int32_t exponent = f->exponent[b->channel], left = exponent < 0 ? 0 : exponent;
    const scalars c = {32767 >> left, left, left - exponent, f->factor[b->channel], f->shift[b->channel], f->residual};
    return c;
}

/* Of a sum that is shifted to the right already. */
static inline number finished(int32_t sum, const scalars *c, const number *residual) {
    int32_t result = saturated(scaled(limited(sum, -c->limit, c->limit) * (1 << c->left), c->factor) + c->shift);
    if (residual) result = saturated(result + scaled(*residual << 7, c->residual));
    return (number)limited(result >> 3, 0, 255);
}

#define STRIP 32 /* pixels that are computed at a time */

/* A multiplication per weight; sums of 32 bits. */
KERNEL void multiply(const block *b, int32_t length) {
    const scalars c = scalars_of(b);
    int32_t begin, i, k;
    for (begin = 0; begin < length; begin += STRIP) {
        const int32_t count = length - begin < STRIP ? length - begin : STRIP;
        int32_t sums[STRIP] = {0};
        for (k = 0; k < b->plus; k++) {
            const number *from = b->in + b->offsets[k] + begin;
            const int32_t factor = b->weights[k];
            if (count == STRIP)
                for (i = 0; i < STRIP; i++) sums[i] += factor * from[i];
            else
                for (i = 0; i < count; i++) sums[i] += factor * from[i];
        }
        for (i = 0; i < count; i++) b->out[begin + i] = finished(sums[i] >> c.right, &c, b->residual ? b->residual + begin + i : NULL);
    }
}

/* Vectors of VL sums of 16 bits: `ADDED` and `SUBTRACTED` take pixels from memory, `finish` writes pixels. What a channel needs for
 * this is read beforehand, since pixels may lie anywhere. */
#if defined(VECTORS_OF_PAIRS)
#include <arm_acle.h>
#define VL 4
#define BLOCK 4
typedef struct {
    uint32_t even, odd; /* two sums each: of pixels 0 and 2, of pixels 1 and 3 */
} vector;
typedef uint32_t pixels_anywhere __attribute__((aligned(1), may_alias));
/* Bytes 0 and 2 of a word are added, and bytes 1 and 3. */
static inline vector added(vector sum, const number *at) {
    const uint32_t pixels = *(const pixels_anywhere *)at;
    __asm__("uxtab16 %0, %0, %1" : "+r"(sum.even) : "r"(pixels));
    __asm__("uxtab16 %0, %0, %1, ror #8" : "+r"(sum.odd) : "r"(pixels));
    return sum;
}
static inline vector negated(vector sum) {
    const vector result = {__usub16(0, sum.even), __usub16(0, sum.odd)};
    return result;
}
static inline vector joined(vector a, vector b) {
    const vector result = {__qadd16(a.even, b.even), __qadd16(a.odd, b.odd)};
    return result;
}
#define NOTHING {0, 0}
#define ADDED(sum, at) added(sum, at)
#define JOINED(a, b) joined(a, b)
#elif defined(VECTORS_OF_NONE)
#define VL 1
#define BLOCK 8
typedef int32_t vector;
#define NOTHING 0
#define ADDED(sum, at) ((sum) + *(at))
#define SUBTRACTED(sum, at) ((sum) - *(at))
#define JOINED(a, b) saturated((a) + (b))
#else
#if defined(VECTORS_OF_AVX512)
#include <immintrin.h>
#define VL 32
#define BLOCK 20 /* there are 32 registers */
typedef __m512i vector;
#define ALL(x) _mm512_set1_epi16((int16_t)(x))
#define PLUS(a, b) _mm512_add_epi16(a, b)
#define MINUS(a, b) _mm512_sub_epi16(a, b)
#define JOINED(a, b) _mm512_adds_epi16(a, b)
#define SMALLER(a, b) _mm512_min_epi16(a, b)
#define LARGER(a, b) _mm512_max_epi16(a, b)
#define LEFT(a, n) _mm512_sll_epi16(a, _mm_cvtsi32_si128(n))
#define RIGHT(a, n) _mm512_sra_epi16(a, _mm_cvtsi32_si128(n))
#define SCALED(a, b) _mm512_mulhrs_epi16(a, b)
#define READ(at) _mm512_cvtepu8_epi16(_mm256_loadu_si256((const void *)(at)))
#define WRITE(at, a) _mm256_storeu_si256((void *)(at), _mm512_cvtusepi16_epi8(_mm512_max_epi16(a, _mm512_setzero_si512())))
#elif defined(VECTORS_OF_AVX2)
#include <immintrin.h>
#define VL 16
#define BLOCK 12
typedef __m256i vector;
#define ALL(x) _mm256_set1_epi16((int16_t)(x))
#define PLUS(a, b) _mm256_add_epi16(a, b)
#define MINUS(a, b) _mm256_sub_epi16(a, b)
#define JOINED(a, b) _mm256_adds_epi16(a, b)
#define SMALLER(a, b) _mm256_min_epi16(a, b)
#define LARGER(a, b) _mm256_max_epi16(a, b)
#define LEFT(a, n) _mm256_sll_epi16(a, _mm_cvtsi32_si128(n))
#define RIGHT(a, n) _mm256_sra_epi16(a, _mm_cvtsi32_si128(n))
#define SCALED(a, b) _mm256_mulhrs_epi16(a, b)
#define READ(at) _mm256_cvtepu8_epi16(_mm_loadu_si128((const void *)(at)))
#define WRITE(at, a) \
    _mm_storeu_si128((void *)(at), _mm_packus_epi16(_mm256_castsi256_si128(a), _mm256_extracti128_si256(a, 1)))
#elif defined(VECTORS_OF_SSE)
#include <smmintrin.h>
#define VL 8
#define BLOCK 12
typedef __m128i vector;
#define ALL(x) _mm_set1_epi16((int16_t)(x))
#define PLUS(a, b) _mm_add_epi16(a, b)
#define MINUS(a, b) _mm_sub_epi16(a, b)
#define JOINED(a, b) _mm_adds_epi16(a, b)
#define SMALLER(a, b) _mm_min_epi16(a, b)
#define LARGER(a, b) _mm_max_epi16(a, b)
#define LEFT(a, n) _mm_sll_epi16(a, _mm_cvtsi32_si128(n))
#define RIGHT(a, n) _mm_sra_epi16(a, _mm_cvtsi32_si128(n))
#define SCALED(a, b) _mm_mulhrs_epi16(a, b)
#define READ(at) _mm_cvtepu8_epi16(_mm_loadl_epi64((const void *)(at)))
#define WRITE(at, a) _mm_storel_epi64((void *)(at), _mm_packus_epi16(a, a))
#else
#include <arm_neon.h>
#define VL 8
#define BLOCK 20
typedef int16x8_t vector;
#define ALL(x) vdupq_n_s16((int16_t)(x))
#define PLUS(a, b) vaddq_s16(a, b)
#define MINUS(a, b) vsubq_s16(a, b)
#define JOINED(a, b) vqaddq_s16(a, b)
#define SMALLER(a, b) vminq_s16(a, b)
#define LARGER(a, b) vmaxq_s16(a, b)
#define LEFT(a, n) vshlq_s16(a, vdupq_n_s16((int16_t)(n)))
#define RIGHT(a, n) vshlq_s16(a, vdupq_n_s16((int16_t)-(n)))
#define SCALED(a, b) vqrdmulhq_s16(a, b)
#define READ(at) vreinterpretq_s16_u16(vmovl_u8(vld1_u8(at)))
#define WRITE(at, a) vst1_u8(at, vqmovun_s16(a))
#endif
#define NOTHING ALL(0)
#define ADDED(sum, at) PLUS(sum, READ(at))
#define SUBTRACTED(sum, at) MINUS(sum, READ(at))

typedef struct {
    vector low, high, factor, shift, residual;
    int32_t exponent;
} constants;

static inline constants constants_of(const block *b) {
    const finishing *f = b->finish;
    const int32_t exponent = f->exponent[b->channel], limit = 32767 >> exponent;
    const constants c = {ALL(-limit), ALL(limit), ALL(f->factor[b->channel]), ALL(f->shift[b->channel]), ALL(f->residual), exponent};
    return c;
}

static inline void finish(vector sum, const constants *c, const number *residual, number *out) {
    sum = JOINED(SCALED(LEFT(LARGER(SMALLER(sum, c->high), c->low), c->exponent), c->factor), c->shift);
    if (residual) sum = JOINED(sum, SCALED(LEFT(READ(residual), 7), c->residual));
    WRITE(out, RIGHT(sum, 3));
}
#endif

#if defined(VECTORS_OF_PAIRS) || defined(VECTORS_OF_NONE)
typedef scalars constants;
#define constants_of(b) scalars_of(b)

#if VL == 1
static inline void finish(vector sum, const constants *c, const number *residual, number *out) { *out = finished(sum, c, residual); }
#else
KERNEL void finish(vector sum, const constants *c, const number *residual, number *out) {
    const scalars here = *c;
    const int16_t sums[VL] = {(int16_t)sum.even, (int16_t)sum.odd, (int16_t)(sum.even >> 16), (int16_t)(sum.odd >> 16)};
    uint32_t pixels = 0;
    int32_t i;
    if (residual)
        for (i = 0; i < VL; i++) pixels |= (uint32_t)finished(sums[i], &here, residual + i) << 8 * i;
    else
        for (i = 0; i < VL; i++) pixels |= (uint32_t)finished(sums[i], &here, NULL) << 8 * i;
    *(pixels_anywhere *)out = pixels;
}
#endif
#endif

#define ZERO(i) vector sum_##i = NOTHING;
#define ADD(i) sum_##i = ADDED(sum_##i, from + (i) * VL);
#ifdef VECTORS_OF_PAIRS /* subtracting is adding, and a negation in the end */
#define SUBTRACT(i) ADD(i)
#define SUBTRACTED(sum, at) ADDED(sum, at)
#define NEGATE(i) sum_##i = negated(sum_##i);
#define NEGATED(sum) negated(sum)
#else
#define SUBTRACT(i) sum_##i = SUBTRACTED(sum_##i, from + (i) * VL);
#define NEGATE(i)
#define NEGATED(sum) (sum)
#endif
#define FINISH(i) finish(sum_##i, &c, NULL, out + (i) * VL);
#define FINISH_WITH(i) finish(sum_##i, &c, residual + (i) * VL, out + (i) * VL);
#define JOIN(i) sum_##i = JOINED(all[i], sum_##i);
#define KEEP(i) all[i] = sum_##i;

#ifndef NETWORK_MOST
#define NETWORK_MOST 65535 /* offsets of one sign that a channel of the network has */
#endif
#define UNTIL(begin, end) ((end) - (begin) > TOGETHER ? (begin) + TOGETHER : (end))
#define MORE(condition) (NETWORK_MOST > TOGETHER && (condition))

/* A block of VECTORS = FULL + 1 vectors. Sums of TOGETHER offsets of each sign are joined, and saturate. */
#define DEFINE_BLOCK(VECTORS, FULL)                                                                 \
    KERNEL void add_##VECTORS(const block *b) {                                                     \
        const int32_t *plus = b->offsets, *minus = plus + b->plus, *const middle = minus, *const end = minus + b->minus; \
        const int32_t last = b->last;                                                               \
        const constants c = constants_of(b);                                                        \
        const number *const residual = b->residual;                                                 \
        number *const out = b->out;                                                                 \
        vector all[VECTORS]; /* the sums of earlier offsets */                                      \
        int32_t later;                                                                              \
        for (later = 0;; later = 1) {                                                               \
            const int32_t *const plus_end = UNTIL(plus, middle), *const minus_end = UNTIL(minus, end); \
            vector sum_last = NOTHING;                                                              \
            REPEAT_##FULL(ZERO)                                                                     \
            for (; minus < minus_end; minus++) {                                                    \
                const number *from = b->in + *minus;                                                \
                REPEAT_##FULL(SUBTRACT) sum_last = SUBTRACTED(sum_last, from + last);               \
            }                                                                                       \
            REPEAT_##FULL(NEGATE) sum_last = NEGATED(sum_last);                                     \
            for (; plus < plus_end; plus++) {                                                       \
                const number *from = b->in + *plus;                                                 \
                REPEAT_##FULL(ADD) sum_last = ADDED(sum_last, from + last);                         \
            }                                                                                       \
            if (later) {                                                                            \
                REPEAT_##FULL(JOIN) sum_last = JOINED(all[FULL], sum_last);                         \
            }                                                                                       \
            if (MORE(plus < middle || minus < end)) {                                               \
                REPEAT_##FULL(KEEP) all[FULL] = sum_last;                                           \
            } else if (residual) {                                                                  \
                REPEAT_##FULL(FINISH_WITH) finish(sum_last, &c, residual + last, out + last);       \
                return;                                                                             \
            } else {                                                                                \
                REPEAT_##FULL(FINISH) finish(sum_last, &c, NULL, out + last);                       \
                return;                                                                             \
            }                                                                                       \
        }                                                                                           \
    }

DEFINE_BLOCKS

/* A plane that is shorter than a vector: what lies behind it is read too, but not written. */
KERNEL void few(const block *b, int32_t length) {
    const constants c = constants_of(b);
    const int32_t *plus = b->offsets, *minus = plus + b->plus, *const middle = minus, *const end = minus + b->minus;
    vector all = NOTHING;
    number pixels[VL];
    int32_t i;
    while (plus < middle || minus < end) {
        const int32_t *const plus_end = UNTIL(plus, middle), *const minus_end = UNTIL(minus, end);
        vector sum = NOTHING;
        for (; minus < minus_end; minus++) sum = SUBTRACTED(sum, b->in + *minus);
        sum = NEGATED(sum);
        for (; plus < plus_end; plus++) sum = ADDED(sum, b->in + *plus);
        all = JOINED(all, sum);
    }
    finish(all, &c, b->residual, pixels);
    for (i = 0; i < length; i++) b->out[i] = pixels[i];
}

/* An output of the network. */
KERNEL void write_float(const block *b) {
    int32_t sum = 0, k;
    for (k = 0; k < b->plus + b->minus; k++)
        sum += (b->weights ? b->weights[k] : k < b->plus ? 1 : -1) * b->in[b->offsets[k]];
    *(float *)(void *)b->out = (float)sum * b->finish->scale[b->channel] + b->finish->start[b->channel];
}

#define CASE(SIZE)                         \
    case SIZE:                             \
        if (USED(SIZE)) add_##SIZE(b);     \
        break;

/* A block of so many vectors in a plane of so many pixels. */
KERNEL void compute(const block *b, int32_t vectors, int32_t length) {
    if (b->finish->scale)
        write_float(b);
    else if (b->weights)
        multiply(b, b->last + VL);
    else if (length < VL)
        few(b, length);
    else
        switch (vectors) { SIZES(CASE) }
}

typedef int32_t total;

#define LARGEST(a, b) ((b) > (a) ? (b) : (a))

/* Factors are in units of 2^-16. */
typedef struct {
    int32_t factor, zero, to_zero;
} averaging;

/* Of the pixels of a window, so many of them inside, and so many by which the sum is divided. */
KERNEL number average(int32_t sum, int32_t inside, int32_t divisor, const averaging *a) {
    const int64_t result = (int64_t)(sum - inside * a->zero) * a->factor / divisor;
    return (number)limited((int32_t)((result + (1 << 15)) >> 16) + a->to_zero, 0, 255);
}

/* How steps and zeros of one or two values become those of another; per channel, or the same for all. */
typedef struct {
    const int32_t *scale, *shift;
    int32_t per_channel, second; /* factor of the second value */
} mixing;

/* scale * a + shift + second * b, for b or NULL; written to the channels of `a`. */
KERNEL void combine(const number *a, const layout *a_at, const mixing *m, const number *b, const layout *b_at, number *out,
                    const layout *to) {
    int32_t channel, y, x;
    for (channel = 0; channel < a_at->channels; channel++)
        for (y = 0; y < a_at->height; y++) {
            const number *left = a + channel * a_at->plane + a_at->first + y * a_at->row;
            const number *right = b ? b + channel * b_at->plane + b_at->first + y * b_at->row : NULL;
            const int32_t scale = m->scale[m->per_channel * channel], shift = m->shift[m->per_channel * channel] + (1 << 15);
            number *result = out + channel * to->plane + to->first + y * to->row;
            for (x = 0; x < a_at->width; x++)
                result[x] = (number)limited((left[x] * scale + (right ? right[x] * m->second : 0) + shift) >> 16, 0, 255);
        }
}

/* The caller's floats as bytes, and back. */
KERNEL void from_floats(const float *in, float steps, float zero, number *out, const layout *to) {
    int32_t channel, y, x;
    for (channel = 0; channel < to->channels; channel++)
        for (y = 0; y < to->height; y++, in += to->width) {
            number *result = out + channel * to->plane + to->first + y * to->row;
            for (x = 0; x < to->width; x++) {
                const float value = in[x] * steps + zero;
                result[x] = (number)(value > 0 ? value < 255 ? (int32_t)(value + 0.5f) : 255 : 0); /* NaN is 0 */
            }
        }
    clear_border(out, to);
}

KERNEL void to_floats(const number *in, const layout *from, float scale, float *out) {
    int32_t channel, y, x;
    for (channel = 0; channel < from->channels; channel++)
        for (y = 0; y < from->height; y++, out += from->width) {
            const number *row = in + channel * from->plane + from->first + y * from->row;
            for (x = 0; x < from->width; x++) out[x] = (float)((int32_t)row[x] - from->zero) * scale;
        }
}
