/* Decoder of iterand tickets, format 2. Section numbers are those of docs/reference/ticket-format.md. */

#include "ticket.h"

#include <string.h>

#define TRY(call) do { ticket_status failed = (call); if (failed != TICKET_OK) return failed; } while (0)
#define REFUSE_IF(condition, status) do { if (condition) return (status); } while (0)

static uint32_t read32(const uint8_t *from) {
    return (uint32_t)from[0] | (uint32_t)from[1] << 8 | (uint32_t)from[2] << 16 | (uint32_t)from[3] << 24;
}

static void write32(uint8_t *to, uint32_t value) {
    for (int k = 0; k < 4; k++) to[k] = (uint8_t)(value >> 8 * k);
}

/* SHA-256 */

static const uint32_t sha256_constants[64] = {
    0x428a2f98, 0x71374491, 0xb5c0fbcf, 0xe9b5dba5, 0x3956c25b, 0x59f111f1, 0x923f82a4, 0xab1c5ed5,
    0xd807aa98, 0x12835b01, 0x243185be, 0x550c7dc3, 0x72be5d74, 0x80deb1fe, 0x9bdc06a7, 0xc19bf174,
    0xe49b69c1, 0xefbe4786, 0x0fc19dc6, 0x240ca1cc, 0x2de92c6f, 0x4a7484aa, 0x5cb0a9dc, 0x76f988da,
    0x983e5152, 0xa831c66d, 0xb00327c8, 0xbf597fc7, 0xc6e00bf3, 0xd5a79147, 0x06ca6351, 0x14292967,
    0x27b70a85, 0x2e1b2138, 0x4d2c6dfc, 0x53380d13, 0x650a7354, 0x766a0abb, 0x81c2c92e, 0x92722c85,
    0xa2bfe8a1, 0xa81a664b, 0xc24b8b70, 0xc76c51a3, 0xd192e819, 0xd6990624, 0xf40e3585, 0x106aa070,
    0x19a4c116, 0x1e376c08, 0x2748774c, 0x34b0bcb5, 0x391c0cb3, 0x4ed8aa4a, 0x5b9cca4f, 0x682e6ff3,
    0x748f82ee, 0x78a5636f, 0x84c87814, 0x8cc70208, 0x90befffa, 0xa4506ceb, 0xbef9a3f7, 0xc67178f2,
};

static void sha256_init(ticket_sha256 *sha) {
    static const uint32_t initial[8] = {
        0x6a09e667, 0xbb67ae85, 0x3c6ef372, 0xa54ff53a, 0x510e527f, 0x9b05688c, 0x1f83d9ab, 0x5be0cd19,
    };
    memcpy(sha->state, initial, sizeof initial);
    sha->total = 0;
}

static uint32_t rotate(uint32_t x, int by) { return x >> by | x << (32 - by); }

static void sha256_block(uint32_t *state, const uint8_t *block) {
    uint32_t w[16], v[8];
    memcpy(v, state, sizeof v);
    for (int k = 0; k < 16; k++)
        w[k] = (uint32_t)block[4 * k] << 24 | (uint32_t)block[4 * k + 1] << 16 | (uint32_t)block[4 * k + 2] << 8 |
               (uint32_t)block[4 * k + 3];
    for (int k = 0; k < 64; k++) {
        uint32_t word = w[k & 15];
        if (k >= 16) {
            uint32_t a = w[(k + 1) & 15], b = w[(k + 14) & 15];
            word += (rotate(a, 7) ^ rotate(a, 18) ^ a >> 3) + w[(k + 9) & 15];
            word += rotate(b, 17) ^ rotate(b, 19) ^ b >> 10;
            w[k & 15] = word;
        }
        uint32_t choice = (v[4] & v[5]) ^ (~v[4] & v[6]), majority = (v[0] & v[1]) ^ (v[0] & v[2]) ^ (v[1] & v[2]);
        uint32_t t1 = v[7] + (rotate(v[4], 6) ^ rotate(v[4], 11) ^ rotate(v[4], 25)) + choice;
        t1 += sha256_constants[k] + word;
        uint32_t t2 = (rotate(v[0], 2) ^ rotate(v[0], 13) ^ rotate(v[0], 22)) + majority;
        memmove(v + 1, v, 7 * sizeof *v);
        v[4] += t1;
        v[0] = t1 + t2;
    }
    for (int k = 0; k < 8; k++) state[k] += v[k];
}

static void sha256_update(ticket_sha256 *sha, const uint8_t *bytes, size_t count) {
    while (count > 0) {
        size_t filled = sha->total % 64, room = 64 - filled < count ? 64 - filled : count;
        if (room == 64) {
            sha256_block(sha->state, bytes);
        } else {
            memcpy(sha->block + filled, bytes, room);
            if (filled + room == 64) sha256_block(sha->state, sha->block);
        }
        sha->total += room;
        bytes += room;
        count -= room;
    }
}

static void sha256_final(ticket_sha256 *sha, uint8_t *digest) {
    uint64_t bits = sha->total * 8;
    uint8_t byte = 0x80;
    do {
        sha256_update(sha, &byte, 1);
        byte = 0;
    } while (sha->total % 64 != 56);
    for (int k = 56; k >= 0; k -= 8) {
        byte = (uint8_t)(bits >> k);
        sha256_update(sha, &byte, 1);
    }
    for (int k = 0; k < 32; k++) digest[k] = (uint8_t)(sha->state[k / 4] >> (24 - 8 * (k % 4)));
}

#define TICKET_STREAM_FUNCTIONS
#define TICKET_DIGEST(digest, bytes, count) sha256_update(digest, bytes, count)
#include "streams.h"

/* Inflating (RFC 1951). Bytes go to a window, and from there to tensors (section 3). */

static const char dictionary[] =
    "\"aliases\":{\"levels\":{\"unit\":[0.25,\"floor\":[0.01],\"rank_by\":[\"magnitude\"],\"score_distribution\":[\"u"
    "niform\"],\"saved_as\":[\"F16\",\"BF16\",\"F64\",\"I32\",\"BOOL\",\"identity\":[\"module.model.backbone.head.emb"
    "eddings.word_embeddings.encoder.layer.0.attention.self.query.key.value.output.dense.intermediate.LayerNorm.self_"
    "attn.in_proj_weight.mlp.linear1.linear2.norm1.norm2.features.0.downsample.0.conv2.bn2.layer1.0.conv1.bn1.fc.bloc"
    "ks.0.\"training\":{\"epochs\":160,\"batch_size\":128,\"precision\":\"bfloat16\",\"channels_last\":true,\"norm_st"
    "atistics\":\"recomputed\",\"label_smoothing\":0.1,\"temperature\":0.25,\"threads\":1}},\"learning_rate\":{\"init"
    "ial\":0.5,\"schedule\":\"cosine\",\"milestones\":[],\"factor\":0.1},\"optimizer\":{\"momentum\":0.9,\"weight_dec"
    "ay\":0.0005},\"weight_decay\":0.0001},\"method\":{\"name\":\"edge_popup\",\"sparsity\":0.9,\"weight_distribution"
    "\":\"signed_constant\",\"ranking\":\"global\",\"norms\":\"shifted\",\"sparsity_schedule\":\"cubic\",\"sparsity_s"
    "chedule_share\":0.8,\"period\":1000,\"rate\":1.0,\"candidates\":\"negative\",\"redrawn_scores\":\"follow\"},\"ne"
    "twork\":{\"name\":\"resnet20\",\"vgg11\",\"conv6\",\"width_factor\":0.25,\"classes\":10},\"data\":{\"name\":\"ci"
    "far10\",\"augmentation\":\"crop_cutout\",\"normalization\":\"imagenet\"},\"recipe\":{\"name\":\"best-digits\",\""
    "seed\":1,\"metrics\":{\"accuracy\":9,\"test_accuracy\":9,\"test_loss\":0.,\"validation_accuracy\":9},\"planes\":"
    "[1,2,3,4,5,6,7,8,9,\"weights_sha256\":\"0123456789abcdef0123456789abcdef\",\"I64\"],\"element\":[\"0000000000000"
    "000\",\"00000000\",\"0000803f\",\"0000803f\"]},\"dtype\":[\"F32\",\"I64\",\"tensors\":{\"name\":[\"stem.0.normal"
    "ization.running_var\",\"stages.1.0.shortcut.normalization.running_mean\",\"stages.0.0.branch.2.normalization.num"
    "_batches_tracked\",\"filled\":{\"name\":[\"convolutions.0.0.bias\",\"classifier.bias\"],\"ranking\":[\"global\"]"
    ",\"history\":[[[4294967296,9]]],\"history\":[[[429496730,117]]],\"stored\":[\"level\"],\"stored\":[\"first\"],["
    "\"latest\",\"round\",\"counts\":[[16,-1,3],\"sparsity\":[0.9],[0.5],\"fan_in\":[27,144,8,288,8,576,8,\"seed\":[0"
    "],\"weight_distribution\":[\"signed_constant\"],[\"kaiming_uniform\"],\"shape\":[[512,512,3,3],[256,256,3,3],[12"
    "8,128,3,3],[64,64,3,3],[64],[32,32,3,3],[32],[16,16,3,3],[16],[16,3,3,3],[10,64]],\"stages.0.0.branch.0.normaliz"
    "ation.bias\",\"stages.0.0.branch.0.convolution.weight\",{\"iterand\":\"0.2.0\",\"layers\":{\"name\":[\"0.weight"
    "\",\"";
enum { DICTIONARY = sizeof dictionary - 1 };

typedef struct scatter scatter;
static ticket_status scatter_put(scatter *to, uint8_t byte);

typedef struct {
    const uint8_t *in, *end;
    uint32_t bits, held;
    uint8_t *window;      /* NULL: only count */
    uint32_t window_mask; /* size of the window - 1, a power of two, or all ones */
    uint32_t count, limit, dictionary;
    scatter *to;
} inflater;

typedef struct {
    uint16_t count[16], symbol[288];
} huffman;

/* The next bits of the stream, at most 16; -1: there are too few. */
static int32_t take_bits(inflater *z, uint32_t count) {
    while (z->held < count) {
        if (z->in == z->end) return -1;
        z->bits |= (uint32_t)*z->in++ << z->held;
        z->held += 8;
    }
    int32_t value = (int32_t)(z->bits & ((1u << count) - 1));
    z->bits >>= count;
    z->held -= count;
    return value;
}

static ticket_status put_byte(inflater *z, uint8_t byte) {
    REFUSE_IF(z->count == z->limit, TICKET_LIMIT);
    if (z->window) z->window[z->count & z->window_mask] = byte;
    z->count++;
    return z->to ? scatter_put(z->to, byte) : TICKET_OK;
}

/* A canonical code from the lengths of its words. It must be complete, or, if `one` is set, have at most one word of
 * one bit, as in zlib. */
static int build_code(huffman *code, const uint8_t *lengths, uint32_t symbols, int one) {
    uint32_t start[16], left = 1, used;
    memset(code->count, 0, sizeof code->count);
    for (uint32_t k = 0; k < symbols; k++) code->count[lengths[k]]++;
    used = symbols - code->count[0];
    start[0] = start[1] = 0;
    for (int k = 1; k < 16; k++) {
        left <<= 1;
        if (left < code->count[k]) return 0;
        left -= code->count[k];
        if (k < 15) start[k + 1] = start[k] + code->count[k];
    }
    for (uint32_t k = 0; k < symbols; k++)
        if (lengths[k]) code->symbol[start[lengths[k]]++] = (uint16_t)k;
    return left == 0 || (one && used == code->count[1]);
}

static int32_t decode_symbol(inflater *z, const huffman *code) {
    int32_t word = 0, first = 0, index = 0;
    for (int k = 1; k < 16; k++) {
        int32_t bit = take_bits(z, 1), count = code->count[k];
        if (bit < 0) return -1;
        word |= bit;
        if (word - first < count) return code->symbol[index + word - first];
        index += count;
        first = (first + count) << 1;
        word <<= 1;
    }
    return -1;
}

static ticket_status inflate_codes(inflater *z, const huffman *literals, const huffman *distances) {
    for (;;) {
        int32_t symbol = decode_symbol(z, literals);
        REFUSE_IF(symbol < 0 || symbol > 285, TICKET_COMPRESSION);
        if (symbol < 256) {
            TRY(put_byte(z, (uint8_t)symbol));
            continue;
        }
        if (symbol == 256) return TICKET_OK;
        uint32_t length = (uint32_t)symbol - 254, extra = 0;
        if (symbol == 285) {
            length = 258;
        } else if (symbol >= 265) {
            extra = ((uint32_t)symbol - 261) / 4;
            length = 3 + ((4 + ((uint32_t)symbol - 265) % 4) << extra);
        }
        int32_t more = take_bits(z, extra);
        REFUSE_IF(more < 0, TICKET_COMPRESSION);
        length += (uint32_t)more;
        symbol = decode_symbol(z, distances);
        REFUSE_IF(symbol < 0 || symbol > 29, TICKET_COMPRESSION);
        uint32_t distance = (uint32_t)symbol + 1;
        if (symbol >= 4) {
            extra = (uint32_t)symbol / 2 - 1;
            more = take_bits(z, extra);
            REFUSE_IF(more < 0, TICKET_COMPRESSION);
            distance = 1 + ((2 + ((uint32_t)symbol & 1)) << extra) + (uint32_t)more;
        }
        REFUSE_IF(distance > (uint64_t)z->count + z->dictionary, TICKET_COMPRESSION);
        for (; length > 0; length--) {
            uint8_t byte = 0;
            if (distance > z->count)
                byte = (uint8_t)dictionary[DICTIONARY - (distance - z->count)];
            else if (z->window)
                byte = z->window[(z->count - distance) & z->window_mask];
            TRY(put_byte(z, byte));
        }
    }
}

static ticket_status inflate_dynamic(inflater *z, huffman *literals, huffman *distances) {
    static const uint8_t order[19] = {16, 17, 18, 0, 8, 7, 9, 6, 10, 5, 11, 4, 12, 3, 13, 2, 14, 1, 15};
    uint8_t lengths[320] = {0};
    int32_t sizes = take_bits(z, 14);
    REFUSE_IF(sizes < 0, TICKET_COMPRESSION);
    uint32_t literal = ((uint32_t)sizes & 31) + 257, distance = ((uint32_t)sizes >> 5 & 31) + 1, at = 0;
    REFUSE_IF(literal > 286 || distance > 30, TICKET_COMPRESSION);
    for (int k = 0; k < (sizes >> 10) + 4; k++) {
        int32_t length = take_bits(z, 3);
        REFUSE_IF(length < 0, TICKET_COMPRESSION);
        lengths[order[k]] = (uint8_t)length;
    }
    REFUSE_IF(!build_code(literals, lengths, 19, 0), TICKET_COMPRESSION);
    while (at < literal + distance) {
        int32_t symbol = decode_symbol(z, literals), repeat = 0;
        REFUSE_IF(symbol < 0, TICKET_COMPRESSION);
        if (symbol < 16) {
            lengths[at++] = (uint8_t)symbol;
            continue;
        }
        uint8_t length = 0;
        if (symbol == 16) {
            REFUSE_IF(at == 0, TICKET_COMPRESSION);
            length = lengths[at - 1];
        }
        repeat = take_bits(z, symbol == 16 ? 2 : symbol == 17 ? 3 : 7);
        REFUSE_IF(repeat < 0, TICKET_COMPRESSION);
        repeat += symbol == 18 ? 11 : 3;
        REFUSE_IF(at + (uint32_t)repeat > literal + distance, TICKET_COMPRESSION);
        while (repeat-- > 0) lengths[at++] = length;
    }
    REFUSE_IF(lengths[256] == 0, TICKET_COMPRESSION);
    REFUSE_IF(!build_code(literals, lengths, literal, 1), TICKET_COMPRESSION);
    REFUSE_IF(!build_code(distances, lengths + literal, distance, 1), TICKET_COMPRESSION);
    return inflate_codes(z, literals, distances);
}

/* A whole stream, which must end where the input does. */
static ticket_status inflate(inflater *z) {
    huffman literals, distances;
    int32_t block;
    do {
        block = take_bits(z, 3);
        REFUSE_IF(block < 0, TICKET_COMPRESSION);
        if (block >> 1 == 0) {
            z->bits = z->held = 0;
            int32_t length = take_bits(z, 16), complement = take_bits(z, 16);
            REFUSE_IF(length < 0 || complement < 0 || (length ^ complement) != 0xffff, TICKET_COMPRESSION);
            while (length-- > 0) {
                REFUSE_IF(z->in == z->end, TICKET_COMPRESSION);
                TRY(put_byte(z, *z->in++));
            }
        } else if (block >> 1 == 1) {
            uint8_t lengths[288];
            for (int k = 0; k < 288; k++) lengths[k] = k < 144 ? 8 : k < 256 ? 9 : k < 280 ? 7 : 8;
            build_code(&literals, lengths, 288, 0);
            memset(lengths, 5, 32);
            build_code(&distances, lengths, 32, 0);
            TRY(inflate_codes(z, &literals, &distances));
        } else {
            REFUSE_IF(block >> 1 == 3, TICKET_COMPRESSION);
            TRY(inflate_dynamic(z, &literals, &distances));
        }
    } while (!(block & 1));
    return z->in == z->end ? TICKET_OK : TICKET_COMPRESSION;
}

/* JSON (section 2). The text is checked and rewritten in place, once: white space and colons are left out, a string is
 * its opening quote, its characters without escapes and a 0, and a literal is its first letter. What comes later can
 * walk through it without checks. */

static int is_digit(int c) { return c >= '0' && c <= '9'; }

/* The code point at `at`, moving on; -1: not UTF-8. */
static int32_t take_utf8(const uint8_t **at, const uint8_t *end) {
    uint32_t c = *(*at)++, more = c < 0x80 ? 0 : c < 0xe0 ? 1 : c < 0xf0 ? 2 : 3;
    static const uint32_t smallest[4] = {0, 0x80, 0x800, 0x10000};
    if (c >= 0x80 && (c < 0xc2 || c > 0xf4)) return -1;
    if (more) c &= 0x3fu >> more;
    for (uint32_t k = 0; k < more; k++) {
        if (*at == end || (**at & 0xc0) != 0x80) return -1;
        c = c << 6 | (*(*at)++ & 0x3fu);
    }
    return c < smallest[more] || (c >> 11) == 0x1b || c > 0x10ffff ? -1 : (int32_t)c;
}

static int32_t take_hex(const uint8_t **at, const uint8_t *end) {
    int32_t value = 0;
    for (int k = 0; k < 4; k++) {
        if (*at == end) return -1;
        int c = *(*at)++, letter = c | 0x20;
        if (is_digit(c)) value = value << 4 | (c - '0');
        else if (letter >= 'a' && letter <= 'f') value = value << 4 | (letter - 'a' + 10);
        else return -1;
    }
    return value;
}

static uint8_t *put_utf8(uint8_t *to, uint32_t c) {
    if (c && c < 0x80) {
        *to++ = (uint8_t)c;
    } else { /* a character 0 too, as it would end the string */
        int more = c < 0x800 ? 1 : c < 0x10000 ? 2 : 3;
        *to++ = (uint8_t)((0xf0u << (3 - more) & 0xf0u) | c >> 6 * more);
        while (more-- > 0) *to++ = (uint8_t)(0x80 | (c >> 6 * more & 0x3f));
    }
    return to;
}

/* From behind an opening quote to behind the closing one; NULL: not a string. */
static const uint8_t *rewrite_string(const uint8_t *at, const uint8_t *end, uint8_t **to) {
    static const char escapes[] = "\"\"\\\\//b\bf\fn\nr\rt\t";
    *(*to)++ = '"';
    while (at < end && *at != '"') {
        int32_t c = *at;
        if (c == '\\') {
            if (++at == end) return NULL;
            c = *at++;
            if (c == 'u') {
                c = take_hex(&at, end);
                if (c >> 10 == 0x36) {
                    if (end - at < 2 || *at++ != '\\' || *at++ != 'u') return NULL;
                    int32_t low = take_hex(&at, end);
                    if (low >> 10 != 0x37) return NULL;
                    c = 0x10000 + ((c & 0x3ff) << 10 | (low & 0x3ff));
                } else if (c >> 10 == 0x37) {
                    return NULL;
                }
            } else {
                const char *pair = escapes;
                while (*pair && *pair != c) pair += 2;
                c = *pair ? pair[1] : -1;
            }
        } else {
            c = c < 0x20 ? -1 : take_utf8(&at, end);
        }
        if (c < 0) return NULL;
        *to = put_utf8(*to, (uint32_t)c);
    }
    if (at == end) return NULL;
    *(*to)++ = 0;
    return at + 1;
}

/* A number; NULL: not one, or larger than float64 numbers are. */
static const uint8_t *rewrite_number(const uint8_t *at, const uint8_t *end, uint8_t **to) {
    const uint8_t *start = at;
    int32_t exponent = -1, power = 0, sign = 1, real = 0, zero = 1; /* exponent of the first digit that is not 0 */
    if (*at == '-') at++;
    if (at == end || !is_digit(*at)) return NULL;
    if (*at == '0' && end - at > 1 && is_digit(at[1])) return NULL;
    for (; at < end && is_digit(*at); at++) {
        zero &= *at == '0';
        exponent++;
    }
    if (at < end && *at == '.') {
        if (++at == end || !is_digit(*at)) return NULL;
        real = 1;
        if (zero) exponent = -1;
        for (; at < end && is_digit(*at); at++) {
            exponent -= zero && *at == '0';
            zero &= *at == '0';
        }
    }
    if (at < end && (*at | 0x20) == 'e') {
        real = 1;
        if (++at < end && (*at == '+' || *at == '-')) sign = *at++ == '-' ? -1 : 1;
        if (at == end || !is_digit(*at)) return NULL;
        for (; at < end && is_digit(*at); at++)
            if (power < 10000) power = 10 * power + (*at - '0');
    }
    if (at - start > 4300 || (real && !zero && exponent + sign * power > 308)) return NULL;
    memmove(*to, start, (size_t)(at - start));
    *to += at - start;
    return at;
}

static ticket_status rewrite_json(uint8_t *text, size_t length) {
    const uint8_t *at = text, *end = text + length;
    uint8_t *to = text;
    uint64_t objects = 0; /* a bit for every level of nesting: whether it is an object */
    int depth = 0;
    enum { VALUE, FIRST_VALUE, KEY, FIRST_KEY, AFTER } expected = VALUE;
    for (;;) {
        while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')) at++;
        if (at == end) break;
        uint8_t c = *at++;
        int object = (int)(objects & 1);
        if ((expected == FIRST_VALUE && c == ']') || (expected == FIRST_KEY && c == '}') ||
            (expected == AFTER && depth > 0 && c == (object ? '}' : ']'))) {
            *to++ = c;
            objects >>= 1;
            depth--;
            expected = AFTER;
        } else if (expected == AFTER) {
            REFUSE_IF(depth == 0 || c != ',', TICKET_JSON);
            *to++ = c;
            expected = object ? KEY : VALUE;
        } else if (expected == KEY || expected == FIRST_KEY) {
            REFUSE_IF(c != '"', TICKET_JSON);
            at = rewrite_string(at, end, &to);
            REFUSE_IF(!at, TICKET_JSON);
            while (at < end && (*at == ' ' || *at == '\t' || *at == '\n' || *at == '\r')) at++;
            REFUSE_IF(at == end || *at++ != ':', TICKET_JSON);
            expected = VALUE;
        } else if (c == '{' || c == '[') {
            REFUSE_IF(depth == 64, TICKET_JSON);
            *to++ = c;
            objects = objects << 1 | (c == '{');
            depth++;
            expected = c == '{' ? FIRST_KEY : FIRST_VALUE;
        } else {
            const char *rest = c == 't' ? "rue" : c == 'f' ? "alse" : "ull";
            if (c == '"') {
                at = rewrite_string(at, end, &to);
            } else if (c == '-' || is_digit(c)) {
                at = rewrite_number(at - 1, end, &to);
            } else {
                size_t size = strlen(rest);
                REFUSE_IF((c != 't' && c != 'f' && c != 'n') || (size_t)(end - at) < size, TICKET_JSON);
                REFUSE_IF(memcmp(at, rest, size) != 0, TICKET_JSON);
                *to++ = c;
                at += size;
            }
            REFUSE_IF(!at, TICKET_JSON);
            expected = AFTER;
        }
    }
    REFUSE_IF(expected != AFTER || depth > 0, TICKET_JSON);
    return *text == '{' ? TICKET_OK : TICKET_HEADER;
}

/* What follows the value at `at`. */
static const char *skip(const char *at) {
    int depth = 0;
    do {
        if (*at == '"') {
            at += strlen(at) + 1;
        } else if (*at == '-' || is_digit(*at)) {
            while (*at != ',' && *at != ']' && *at != '}') at++;
        } else {
            if (*at == '[' || *at == '{') depth++;
            if (*at == ']' || *at == '}') depth--;
            at++;
        }
    } while (depth > 0);
    return at;
}

/* What follows the value at `at` and the comma behind it. */
static const char *next(const char *at) {
    at = skip(at);
    return *at == ',' ? at + 1 : at;
}

/* The value of a key of an object; NULL: it has none. Of several the last one holds. */
static const char *find(const char *object, const char *key) {
    const char *found = NULL;
    for (const char *at = object + 1; *at != '}';) {
        const char *value = skip(at);
        if (strcmp(at + 1, key) == 0) found = value;
        at = next(value);
    }
    return found;
}

static int is_string(const char *at, const char *text) { return *at == '"' && strcmp(at + 1, text) == 0; }

static int is_list(const char *at) { return at && *at == '['; }

/* A whole number whose absolute value is less than 2^63. */
static int get_integer(const char *at, int64_t *value) {
    int negative = *at == '-';
    uint64_t total = 0;
    at += negative;
    if (!is_digit(*at)) return 0;
    for (; is_digit(*at); at++) {
        uint64_t digit = (uint64_t)(*at - '0');
        if (total > (INT64_MAX - digit) / 10) return 0;
        total = 10 * total + digit;
    }
    *value = negative ? -(int64_t)total : (int64_t)total;
    return *at == ',' || *at == ']' || *at == '}';
}

/* A name of 1 to 4096 characters. */
static int get_name(const char *at, const char **name) {
    uint32_t characters = 0;
    if (*at != '"') return 0;
    *name = ++at;
    for (; *at; at++) characters += ((uint8_t)*at & 0xc0) != 0x80;
    return characters >= 1 && characters <= 4096;
}

/* Numbers */

static float float_of(uint32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static uint32_t bits_of(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* `value` without its last `drop` bits, rounded to the nearest, ties to even; `rest`: there is more behind them. */
static uint64_t round_off(uint64_t value, uint32_t drop, int rest) {
    uint64_t kept = value >> drop, low = value & (((uint64_t)1 << drop) - 1), half = (uint64_t)1 << (drop - 1);
    return kept + (low > half || (low == half && (rest || (kept & 1))));
}

/* The float32 number closest to sqrt(numerator / fan_in) / 2^shift, where quotient and root are rounded to float64
 * (section 7). All in integers; fan_in is less than 2^62. */
static uint32_t root_unit(uint64_t numerator, uint64_t fan_in, int shift) {
    uint64_t quotient = numerator / fan_in, rest = numerator % fan_in, root = 0, left = 0;
    int exponent = 2;
    while (quotient >> 54 == 0) {
        int bit = (rest <<= 1) >= fan_in;
        if (bit) rest -= fan_in;
        quotient = quotient << 1 | (uint64_t)bit;
        exponent--;
    }
    uint64_t square = round_off(quotient, 2, rest != 0); /* 53 bits, times 2^exponent */
    if (exponent & 1) {
        square <<= 1;
        exponent--;
    }
    if (square >> 54) { /* rounding has made one bit more */
        square >>= 2;
        exponent += 2;
    }
    for (int k = 52; k > -56; k -= 2) { /* the root of square * 2^54, digit by digit */
        left = left << 2 | (k >= 0 ? square >> k & 3 : 0);
        root <<= 1;
        if (left >= 2 * root + 1) {
            left -= 2 * root + 1;
            root++;
        }
    }
    uint64_t significand = round_off(round_off(root, 1, left != 0), 29, 0);
    return ((uint32_t)(exponent / 2 + 153 - shift) << 23) + (uint32_t)(significand - (1u << 23));
}

/* Shift a number that is not 0 until its highest bit is set. */
static uint64_t normalized(uint64_t m, int32_t *exponent) {
    for (; m >> 63 == 0; m <<= 1) --*exponent;
    return m;
}

/* A decimal number that is a float32 number, but for rounding in its last digits; 0: it is not one. */
static int get_float(const char *at, uint32_t *bits) {
    uint32_t sign = *at == '-';
    uint64_t m = 0, exact;
    int32_t power = 0, point = 0, exponent = 63, given = 0, minus;
    for (at += sign; is_digit(*at) || *at == '.'; at++) {
        if (*at == '.') {
            point = 1;
        } else if (m < 1000000000000000000) {
            m = 10 * m + (uint64_t)(*at - '0');
            power -= point;
        } else {
            power += !point;
        }
    }
    if (*at == 'e' || *at == 'E') {
        minus = *++at == '-';
        for (at += *at == '-' || *at == '+'; is_digit(*at); at++)
            if (given < 10000) given = 10 * given + (*at - '0');
        power += minus ? -given : given;
    }
    *bits = sign << 31;
    if (*at != ',' && *at != ']' && *at != '}') return 0;
    if (m == 0) return 1;
    if (power < -80 || power > 60) return 0;
    m = normalized(m, &exponent);
    while (power != 0) { /* m * 2^(exponent - 63) * 10^power, with 60 bits */
        int up = power > 0;
        m = normalized(up ? (m >> 3) * 5 : m / 5, &exponent);
        exponent += up ? 4 : -1;
        power += up ? -1 : 1;
    }
    m += 1 << 11; /* more than rounding has taken away, so that a power of two is not just below itself */
    if (m >> 63 == 0) {
        m = (uint64_t)1 << 63;
        exponent++;
    }
    uint32_t drop = exponent < -126 ? (uint32_t)(40 - 126 - exponent) : 40;
    if (drop > 63 || exponent > 127) return 0;
    exact = round_off(m, drop, 0);
    uint64_t back = exact << drop, off = back > m ? back - m : m - back; /* back is 0 if it is 2^64 */
    if ((off > (uint64_t)1 << 12 && off < ~(uint64_t)0 << 12) || exact == 0) return 0;
    exact += (uint64_t)(exponent < -126 ? 0 : exponent + 126) << 23;
    *bits |= (uint32_t)exact;
    return exact < 0x7f800000;
}

/* float32 to F16 and back, and to BF16 and back: the float32 number that a weight of this type is */
static uint32_t half_to_float(uint32_t half) {
    uint32_t sign = (half & 0x8000) << 16, exponent = half >> 10 & 31, fraction = half & 0x3ff;
    if (exponent == 31) return sign | 0x7f800000 | fraction << 13;
    if (exponent == 0) {
        if (fraction == 0) return sign;
        for (exponent = 1; !(fraction & 0x400); fraction <<= 1) exponent--;
        fraction &= 0x3ff;
    }
    return sign | (exponent + 112) << 23 | fraction << 13;
}

static uint32_t narrowed(uint32_t bits, ticket_dtype dtype) {
    if (dtype == TICKET_BF16) return (uint32_t)round_off(bits, 16, 0) << 16;
    if (dtype != TICKET_F16) return bits;
    uint32_t sign = bits >> 31 << 15, exponent = bits >> 23 & 255, half;
    if (exponent < 113) { /* below 2^-14 a step is 2^-24 */
        half = exponent < 101 ? 0 : (uint32_t)round_off((bits & 0x7fffff) | 0x800000, 126 - exponent, 0);
    } else {
        half = (uint32_t)round_off((bits & 0x7fffffff) - (112u << 23), 13, 0);
        if (half > 0x7c00) half = 0x7c00;
    }
    return half_to_float(sign | half);
}

/* The 128-bit product of two numbers, shifted right by 1 to 63 bits. */
static uint64_t multiply_shift(uint64_t a, uint64_t b, uint32_t shift) {
    uint64_t al = a & 0xffffffff, ah = a >> 32, bl = b & 0xffffffff, bh = b >> 32;
    uint64_t low = al * bl, middle = ah * bl + (low >> 32), other = al * bh + (middle & 0xffffffff);
    uint64_t high = ah * bh + (middle >> 32) + (other >> 32);
    return high << (64 - shift) | (other << 32 | (low & 0xffffffff)) >> shift;
}

/* The standard normal quantile x at 1/2 + (i + 1/2) / 2^16, times 2^20, rounded (section 7). Newton's method for
 * q = f(x) (x + x^3 / 3 + x^5 / (3 * 5) + ...), where f is the density, from a *start that is not above x. Since f
 * falls, the steps never go too far. Qn: a fixed-point number with n bits behind the point. */
static int32_t normal_quantile(uint32_t i, uint64_t *start) {
    const uint64_t ln2 = 0xb17217f7d1cf79b, density0 = 0x662114cf50d94234; /* ln 2 in Q60, 1 / sqrt(2 pi) in Q64 */
    uint64_t q = (uint64_t)(2 * i + 1) << 46, x = *start, step;            /* q in Q63, x in Q60 */
    do {
        uint64_t half_square = multiply_shift(x, x, 61); /* x^2 / 2 in Q60, which is x^2 in Q59 */
        uint32_t k = (uint32_t)(half_square / ln2);
        uint64_t left = (k + 1) * ln2 - half_square, term = (uint64_t)1 << 62, density = term, sum, area;
        for (uint32_t n = 1; term; n++) { /* exp(left) in Q62, between 1 and 2; the density is 2^(-k - 1) times that */
            term = multiply_shift(term, left, 60) / n;
            density += term;
        }
        density = multiply_shift(density, density0, 63) >> 1;
        term = sum = x >> 13; /* Q47 */
        for (uint32_t n = 3; term; n += 2) {
            term = multiply_shift(term, half_square, 59) / n;
            sum += term;
        }
        area = multiply_shift(density, sum, 47 + k); /* Q63 */
        uint64_t missing = q > area ? q - area : 0;
        uint32_t shift = k + 29;
        for (; shift && missing && !(missing >> 62); missing <<= 1) shift--;
        step = missing / (density >> 31) << shift;
        x += step;
    } while (step >> 37);
    *start = x;
    return (int32_t)((x + ((uint64_t)1 << 39)) >> 40);
}

void ticket_normal_table(int32_t *table) {
    uint64_t x = 0;
    for (uint32_t i = 0; i < 32768; i++) table[i] = normal_quantile(i, &x);
}

/* Tables (section 2) */

enum { NAME, SHAPE, DTYPE, IDENTITY, SEED, DISTRIBUTION, FAN_IN, UNIT, HISTORY, STORED, COUNTS, SAVED_AS, ELEMENT };
static const char column_names[TICKET_COLUMNS][20] = {
    "name", "shape", "dtype", "identity", "seed", "weight_distribution", "fan_in", "unit", "history", "stored",
    "counts", "saved_as", "element",
};
static const char dtype_names[16][8] = {
    "F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "C64", "I64",
    "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL",
};
static const uint8_t dtype_sizes[16] = {8, 4, 2, 2, 1, 1, 8, 8, 4, 2, 1, 8, 4, 2, 1, 1};

size_t ticket_element_size(ticket_dtype dtype) { return dtype_sizes[dtype]; }

/* Put a table at its first row. It may be left out. */
static ticket_status open_table(const char *text, ticket_table *table) {
    uint32_t entries[TICKET_COLUMNS] = {0};
    memset(table, 0, sizeof *table);
    if (!text) return TICKET_OK;
    REFUSE_IF(*text != '{', TICKET_HEADER);
    if (text[1] == '}') return TICKET_OK;
    for (const char *at = text + 1, *value; *at != '}'; at = next(value)) {
        value = skip(at);
        REFUSE_IF(*value != '[', TICKET_HEADER);
        for (uint32_t column = 0; column < TICKET_COLUMNS; column++) {
            if (strcmp(at + 1, column_names[column]) != 0) continue;
            table->at[column] = value + 1;
            entries[column] = 0;
            for (const char *entry = value + 1; *entry != ']'; entry = next(entry)) entries[column]++;
        }
    }
    table->rows = entries[NAME];
    REFUSE_IF(table->rows == 0, TICKET_HEADER);
    for (uint32_t column = 0; column < TICKET_COLUMNS; column++) {
        if (!table->at[column] || entries[column] == table->rows) continue;
        REFUSE_IF(entries[column] != 1, TICKET_HEADER);
        table->shared |= 1u << column;
    }
    return TICKET_OK;
}

static void next_row(ticket_table *table) {
    table->row++;
    for (uint32_t column = 0; column < TICKET_COLUMNS; column++)
        if (table->at[column] && !(table->shared >> column & 1)) table->at[column] = next(table->at[column]);
}

static ticket_status get_dtype(const char *at, ticket_dtype standard, ticket_dtype *dtype) {
    *dtype = standard;
    if (!at) return TICKET_OK;
    for (uint32_t k = 0; k < 16; k++) {
        if (!is_string(at, dtype_names[k])) continue;
        *dtype = (ticket_dtype)k;
        return TICKET_OK;
    }
    return TICKET_HEADER;
}

/* Name, shape and type of a row. */
static ticket_status get_tensor(const ticket_table *table, ticket_role role, ticket_tensor *tensor) {
    uint64_t elements = 1;
    int empty = 0, huge = 0;
    memset(tensor, 0, sizeof *tensor);
    tensor->role = role;
    REFUSE_IF(!get_name(table->at[NAME], &tensor->name), TICKET_HEADER);
    REFUSE_IF(!is_list(table->at[SHAPE]), TICKET_HEADER);
    for (const char *at = table->at[SHAPE] + 1; *at != ']'; at = next(at)) {
        int64_t size;
        REFUSE_IF(!get_integer(at, &size) || size < (role == TICKET_MASKED), TICKET_HEADER);
        REFUSE_IF(tensor->dimensions == 16 || size > UINT32_MAX, TICKET_LIMIT);
        tensor->shape[tensor->dimensions++] = (uint32_t)size;
        empty |= size == 0;
        huge |= size > 0 && (elements *= (uint64_t)size) > UINT32_MAX;
        if (huge) elements = 1;
    }
    REFUSE_IF(huge && !empty, TICKET_LIMIT);
    tensor->elements = empty ? 0 : (uint32_t)elements;
    return get_dtype(table->at[DTYPE], TICKET_F32, &tensor->dtype);
}

/* Masked layers (section 2) */

enum { KAIMING_UNIFORM, UNIFORM, SIGNED_CONSTANT, KAIMING_NORMAL, OTHER };
static const char distribution_names[OTHER][16] = {"kaiming_uniform", "uniform", "signed_constant", "kaiming_normal"};
static const char stored_names[4][7] = {"level", "round", "first", "latest"};
enum { MAX_ROUNDS = 1 << 24, MAX_ALPHABET = 1 << 16, MAX_LEVEL = 1 << 24 };

/* Whether a number is above a limit of section 9: 2^fixed + 2^each per byte of the file. */
static int above(const ticket *t, uint64_t number, int fixed, int each) {
    return number > ((uint64_t)1 << fixed) + ((uint64_t)t->size << each);
}

/* Searching the header again and again takes time that the size of the file must allow. */
static ticket_status spend(ticket *t, size_t work) {
    t->spent += work;
    return above(t, t->spent, 26, 4) ? TICKET_LIMIT : TICKET_OK;
}

/* The runs of a history, to `runs` in pairs of rounds (or ALWAYS + rounds) and threshold if it is not NULL. */
static ticket_status get_history(const char *at, uint32_t *runs, uint32_t *count, uint32_t *rounds) {
    int64_t threshold, number, total = 0;
    *count = 0;
    REFUSE_IF(*at != '[', TICKET_HEADER);
    for (at++; *at != ']'; at = next(at)) {
        REFUSE_IF(*at != '[' || !get_integer(at + 1, &threshold), TICKET_HEADER);
        const char *second = next(at + 1);
        REFUSE_IF(*second == ']' || !get_integer(second, &number) || *skip(second) != ']', TICKET_HEADER);
        REFUSE_IF(threshold < 0 || threshold > (int64_t)1 << 32 || number < 1, TICKET_HEADER);
        REFUSE_IF(number > MAX_ROUNDS || (total += number) > MAX_ROUNDS || *count == 1 << 20, TICKET_LIMIT);
        if (runs) {
            runs[2 * *count] = (uint32_t)number + (threshold >> 32 ? ALWAYS : 0);
            runs[2 * *count + 1] = (uint32_t)threshold;
        }
        ++*count;
    }
    *rounds = (uint32_t)total;
    return TICKET_OK;
}

/* The counts of a layer. Fills in the number of kept weights, how many hold value 0, and the first two counts. With
 * `counts` also all counts, and behind them the values they belong to. */
static ticket_status get_counts(ticket_layer *layer, uint32_t *counts, uint64_t *entries) {
    uint64_t kept = 0;
    int64_t number = 1, value = 0;
    uint32_t alphabet = 0;
    REFUSE_IF(!is_list(layer->values), TICKET_HEADER);
    layer->initial = layer->counts[0] = layer->counts[1] = 0;
    for (const char *at = layer->values + 1; *at != ']'; at = next(at)) {
        int gap = number < 0;
        REFUSE_IF(!get_integer(at, &number) || number == 0 || (gap && number < 0), TICKET_HEADER);
        REFUSE_IF(++*entries > UINT32_MAX, TICKET_LIMIT);
        if (number < 0) {
            REFUSE_IF(number < -MAX_ROUNDS || (value -= number) > MAX_ROUNDS, TICKET_HEADER);
            continue;
        }
        REFUSE_IF(value >= layer->most || number > layer->tensor.elements, TICKET_HEADER);
        REFUSE_IF((kept += (uint64_t)number) > layer->tensor.elements, TICKET_HEADER);
        REFUSE_IF(alphabet == MAX_ALPHABET, TICKET_LIMIT);
        if (value == 0) layer->initial = (uint32_t)number;
        if (alphabet < 2) layer->counts[alphabet] = (uint32_t)number;
        if (counts) {
            counts[alphabet] = (uint32_t)number;
            counts[layer->alphabet + alphabet] = (uint32_t)value;
        }
        alphabet++;
        value++;
    }
    REFUSE_IF(number < 0, TICKET_HEADER);
    layer->alphabet = alphabet;
    layer->tensor.kept = (uint32_t)kept;
    return TICKET_OK;
}

/* What follows the first characters of a text, if they are these; else NULL. */
static const char *behind(const char *text, const char *first) {
    while (*first && *text == *first) text++, first++;
    return *first ? NULL : text;
}

/* Whether a text is a decimal number, such as 1.78 or 1e-06. */
static int is_decimal(const char *at) {
    static const char before[3] = {0, '.', 'e'};
    for (int part = 0; part < 3; part++) {
        if (part && *at != before[part]) continue;
        at += part > 0;
        if (part == 2 && *at != '+' && *at != '-') return 0;
        at += part == 2;
        if (!is_digit(*at)) return 0;
        while (is_digit(*at)) at++;
    }
    return *at == 0;
}

/* The distribution of a name with no tag but a gain, which the unit includes. */
static uint32_t gained(const char *name) {
    for (uint32_t k = 0; k < OTHER; k++) {
        const char *tag = behind(name, distribution_names[k]), *factor = tag ? behind(tag, ":gain") : NULL;
        if (factor && is_decimal(factor)) return k;
    }
    return OTHER;
}

/* Everything the header says of a layer. `entries` counts those of `counts`. */
static ticket_status get_layer(ticket *t, const ticket_table *table, ticket_layer *layer, uint64_t *entries) {
    int64_t number;
    uint32_t unit = 0;
    uint64_t fan_in = 1;
    memset(layer, 0, sizeof *layer);
    const ticket_tensor *tensor = &layer->tensor;
    TRY(get_tensor(table, TICKET_MASKED, &layer->tensor));
    REFUSE_IF(tensor->dtype > TICKET_BF16, TICKET_HEADER);
    layer->identity = tensor->name;
    if (table->at[IDENTITY]) REFUSE_IF(!get_name(table->at[IDENTITY], &layer->identity), TICKET_HEADER);
    TRY(spend(t, strlen(layer->identity)));
    REFUSE_IF(!table->at[SEED] || !get_integer(table->at[SEED], &number) || number < 0, TICKET_HEADER);
    layer->seed = (uint64_t)number;

    const char *distribution = table->at[DISTRIBUTION];
    REFUSE_IF(!distribution, TICKET_HEADER);
    while (layer->distribution < OTHER && !is_string(distribution, distribution_names[layer->distribution]))
        layer->distribution++;
    if (table->at[FAN_IN]) {
        REFUSE_IF(!get_integer(table->at[FAN_IN], &number) || number < 1, TICKET_HEADER);
        REFUSE_IF(number > (int64_t)1 << 40, TICKET_LIMIT);
        fan_in = (uint64_t)number;
    } else {
        for (uint32_t k = tensor->dimensions > 1; k < tensor->dimensions; k++) fan_in *= tensor->shape[k];
    }
    if (layer->distribution == KAIMING_UNIFORM) layer->unit = root_unit(6, fan_in, 24);
    if (layer->distribution == UNIFORM) layer->unit = (127 - 24) << 23;
    if (layer->distribution == SIGNED_CONSTANT) layer->unit = root_unit(2, fan_in, 0);
    if (layer->distribution == KAIMING_NORMAL) layer->unit = root_unit(2, fan_in, 20);
    if (table->at[UNIT]) {
        REFUSE_IF(!get_float(table->at[UNIT], &unit), TICKET_HEADER);
        REFUSE_IF(layer->distribution != OTHER && unit != layer->unit, TICKET_HEADER);
        layer->unit = unit;
    } else {
        REFUSE_IF(layer->distribution == OTHER, TICKET_HEADER);
    }

    layer->values = table->at[COUNTS];
    REFUSE_IF(!table->at[STORED], TICKET_HEADER);
    while (layer->stored < 4 && !is_string(table->at[STORED], stored_names[layer->stored])) layer->stored++;
    REFUSE_IF(layer->stored == 4, TICKET_HEADER);
    if (layer->distribution == OTHER && layer->stored != LEVEL && *distribution == '"')
        layer->distribution = gained(distribution + 1);
    if (layer->distribution == OTHER) {
        const char *name;
        REFUSE_IF(!get_name(distribution, &name), TICKET_HEADER);
        if (name != t->distribution) {
            TRY(spend(t, t->levels_size));
            t->distribution = name;
            t->distribution_levels = t->levels ? find(t->levels, name) : NULL;
            t->distribution_count = 0;
            if (t->distribution_levels)
                for (const char *at = t->distribution_levels + 1; *at != ']'; at = next(at)) t->distribution_count++;
        }
        layer->levels = t->distribution_levels;
        REFUSE_IF(layer->stored != LEVEL || (!layer->levels && is_list(layer->values) && layer->values[1] != ']'),
                  TICKET_DISTRIBUTION);
    }
    layer->history = table->at[HISTORY];
    if (layer->history) {
        if (layer->history != t->history)
            TRY(get_history(layer->history, NULL, &t->history_runs, &t->history_rounds));
        t->history = layer->history;
        layer->runs = t->history_runs;
        layer->rounds = t->history_rounds;
    }
    layer->most = layer->stored != LEVEL ? layer->rounds + 1 : layer->levels ? t->distribution_count
                : layer->distribution == SIGNED_CONSTANT ? 2 : 0;
    return get_counts(layer, NULL, entries);
}

/* Coded sequences (section 4) */

/* What a sequence needs: bytes of bits, symbols that count for the lanes, words of memory for its frequencies. */
static uint32_t sequence_needs(uint32_t alphabet, const uint32_t *counts, uint32_t length, uint64_t *bits,
                               uint64_t *symbols) {
    uint32_t kind = sequence_kind(alphabet, counts), groups, size = group_size(alphabet, &groups);
    if (kind == BITS) *bits += bit_bytes(length);
    if (kind == RUNS) *symbols += counts[0] < counts[1] ? counts[0] : counts[1];
    if (kind == GROUPS) *symbols += length / size + (length % size > 0);
    return kind == RUNS ? 256 : kind == GROUPS ? groups : 0;
}

/* The counts of a mask that are not 0, and how many there are. */
static uint32_t mask_counts(const ticket_tensor *layer, uint32_t *counts) {
    uint32_t pruned = layer->elements - layer->kept;
    counts[0] = pruned ? pruned : layer->kept;
    counts[1] = pruned ? layer->kept : 0;
    return pruned && layer->kept ? 2 : 1;
}

/* Tensors that are not masked (section 3) */

/* Where the next byte of a plane goes. */
struct scatter {
    ticket_table table; /* at the tensor that comes next */
    uint32_t plane, left;
    size_t at, step;
    uint8_t *to;
    int boolean;
    ticket_where where;
    void *context;
};

static ticket_status scatter_put(scatter *to, uint8_t byte) {
    while (to->left == 0) {
        ticket_tensor tensor;
        TRY(get_tensor(&to->table, TICKET_STORED, &tensor));
        next_row(&to->table);
        to->left = tensor.elements;
        to->to = to->where(to->context, &tensor);
        to->at = to->plane;
        to->step = dtype_sizes[tensor.dtype];
        to->boolean = tensor.dtype == TICKET_BOOL;
    }
    to->left--;
    REFUSE_IF(to->boolean && byte > 1, TICKET_TENSORS);
    if (to->to) to->to[to->at] = byte;
    to->at += to->step;
    return TICKET_OK;
}

/* F16 numbers in the first bytes of F32 or F64 numbers become these. */
static void widen(uint8_t *elements, uint32_t count, ticket_dtype dtype) {
    for (; count > 0; count--, elements += dtype_sizes[dtype]) {
        uint32_t bits = half_to_float((uint32_t)elements[0] | (uint32_t)elements[1] << 8);
        uint32_t sign = bits & 0x80000000, exponent = bits >> 23 & 255, fraction = bits & 0x7fffff;
        if (dtype == TICKET_F32) {
            write32(elements, bits);
        } else {
            if (exponent) exponent = exponent == 255 ? 2047 : exponent + 896;
            write32(elements, fraction << 29);
            write32(elements + 4, sign | exponent << 20 | fraction >> 3);
        }
    }
}

static uint32_t window_size(uint64_t count) {
    uint32_t size = 4;
    while (size < count && size < 32768) size *= 2;
    return size;
}

static ticket_status read_plane(const uint8_t *data, uint32_t length, uint32_t count, uint32_t *window, scatter *to) {
    if (length == count) {
        for (uint32_t k = 0; k < count; k++) TRY(scatter_put(to, data[k]));
        return TICKET_OK;
    }
    inflater z;
    memset(&z, 0, sizeof z);
    z.in = data;
    z.end = data + length;
    z.window = (uint8_t *)window;
    z.window_mask = window_size(count) - 1;
    z.limit = count;
    z.to = to;
    ticket_status status = inflate(&z);
    return status == TICKET_OK && z.count == count ? TICKET_OK : TICKET_TENSORS;
}

/* Go through all groups of tensors and their planes. Without `where`, only check that lengths fit, and find how many
 * words of memory a window needs and where the planes end. */
static ticket_status walk_tensors(ticket *t, ticket_where where, void *context, uint64_t *words) {
    ticket_table table;
    const uint8_t *data = t->planes, *end = t->file + t->size;
    const char *lengths = t->plane_lengths ? t->plane_lengths + 1 : "]";
    uint32_t planes = 0;
    TRY(open_table(t->tensors, &table));
    while (table.row < table.rows) {
        ticket_table start = table;
        ticket_tensor tensor;
        ticket_dtype saved = TICKET_F32, group = TICKET_F32;
        uint64_t count = 0;
        while (table.row < table.rows) {
            TRY(get_tensor(&table, TICKET_STORED, &tensor));
            TRY(get_dtype(table.at[SAVED_AS], tensor.dtype, &saved));
            REFUSE_IF(saved != tensor.dtype && (saved != TICKET_F16 || tensor.dtype > TICKET_F32), TICKET_HEADER);
            if (table.row == start.row) group = saved;
            if (saved != group) break;
            count += tensor.elements;
            next_row(&table);
        }
        REFUSE_IF(count > UINT32_MAX, TICKET_LIMIT);
        for (uint32_t plane = 0; plane < dtype_sizes[group]; plane++) {
            int64_t length;
            REFUSE_IF(*lengths == ']' || !get_integer(lengths, &length) || length < 0, TICKET_HEADER);
            REFUSE_IF((uint64_t)length > count || length > end - data, TICKET_TENSORS);
            REFUSE_IF(planes++ == 1 << 16, TICKET_HEADER);
            if (!where) {
                uint32_t window = window_size(count) / 4;
                if ((uint64_t)length < count && window > *words) *words = window;
            } else {
                scatter to;
                memset(&to, 0, sizeof to);
                to.table = start;
                to.plane = plane;
                to.where = where;
                to.context = context;
                TRY(read_plane(data, (uint32_t)length, (uint32_t)count, t->stream.states + t->scratch_at, &to));
            }
            data += length;
            lengths = next(lengths);
        }
        for (; where && start.row < table.row; next_row(&start)) {
            TRY(get_tensor(&start, TICKET_STORED, &tensor));
            uint8_t *elements = where(context, &tensor); /* also of a tensor without elements */
            if (elements && tensor.dtype != group) widen(elements, tensor.elements, tensor.dtype);
        }
    }
    REFUSE_IF(*lengths != ']', TICKET_HEADER);
    if (!where) t->bits = data;
    return TICKET_OK;
}

static int hex_digit(char c) { return is_digit(c) ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1; }

static ticket_status get_filled(const ticket_table *table, ticket_tensor *tensor, uint8_t *element) {
    const char *at = table->at[ELEMENT];
    TRY(get_tensor(table, TICKET_FILLED, tensor));
    size_t size = dtype_sizes[tensor->dtype];
    REFUSE_IF(!at || *at != '"' || strlen(at + 1) != 2 * size, TICKET_HEADER);
    for (size_t k = 0; k < size; k++) {
        int high = hex_digit(at[2 * k + 1]), low = hex_digit(at[2 * k + 2]);
        REFUSE_IF(high < 0 || low < 0, TICKET_HEADER);
        element[k] = (uint8_t)(high << 4 | low);
    }
    REFUSE_IF(tensor->dtype == TICKET_BOOL && element[0] > 1, TICKET_HEADER);
    return TICKET_OK;
}

/* Opening */

enum { OPENED, BETWEEN_LAYERS, IN_LAYER, FINISHED };

/* An error in the file is final; a mistake of the caller is not. */
static ticket_status result(ticket *t, ticket_status status) {
    if (status > TICKET_END && status < TICKET_MEMORY) t->status = status;
    return status;
}

static ticket_status inflate_header(const uint8_t *file, uint8_t *to, uint32_t limit, uint32_t *count) {
    inflater z;
    memset(&z, 0, sizeof z);
    z.in = file + 44;
    z.end = z.in + read32(file + 40);
    z.window = to;
    z.window_mask = UINT32_MAX;
    z.limit = limit;
    z.dictionary = DICTIONARY;
    TRY(inflate(&z));
    *count = z.count;
    return TICKET_OK;
}

ticket_status ticket_measure(const void *file, size_t size, size_t *bytes) {
    const uint8_t *data = file;
    uint8_t digest[32];
    ticket_sha256 sha;
    uint32_t count, length;
    *bytes = 0;
    REFUSE_IF(size < 7 || memcmp(data, "iterand", 7) != 0, TICKET_NONE);
    REFUSE_IF(size < 44, TICKET_CHECKSUM);
    REFUSE_IF(data[7] != 2, TICKET_VERSION);
    sha256_init(&sha);
    sha256_update(&sha, data, 8);
    sha256_update(&sha, data + 40, size - 40);
    sha256_final(&sha, digest);
    REFUSE_IF(memcmp(digest, data + 8, 32) != 0, TICKET_CHECKSUM);
    length = read32(data + 40);
    REFUSE_IF(length > size - 44, TICKET_HEADER);
    uint64_t limit = ((uint64_t)1 << 20) + 128 * (uint64_t)length;
    TRY(inflate_header(data, NULL, limit < INT32_MAX ? (uint32_t)limit : INT32_MAX, &count));
    REFUSE_IF(count == 0, TICKET_JSON);
    *bytes = count;
    return TICKET_OK;
}

/* Levels of distributions, ascending integers that float32 holds. */
static ticket_status check_levels(ticket *t) {
    if (!t->levels) return TICKET_OK;
    REFUSE_IF(*t->levels != '{', TICKET_HEADER);
    t->levels_size = (size_t)(skip(t->levels) - t->levels);
    for (const char *at = t->levels + 1, *list; *at != '}'; at = next(list)) {
        const char *name;
        int64_t last = -MAX_LEVEL - 1, level;
        uint32_t count = 0;
        list = skip(at);
        REFUSE_IF(!get_name(at, &name) || *list != '[', TICKET_HEADER);
        for (uint32_t k = 0; k < OTHER; k++) REFUSE_IF(is_string(at, distribution_names[k]), TICKET_HEADER);
        for (const char *entry = list + 1; *entry != ']'; entry = next(entry)) {
            REFUSE_IF(!get_integer(entry, &level) || level <= last || level > MAX_LEVEL, TICKET_HEADER);
            REFUSE_IF(count++ == 1 << 16, TICKET_LIMIT);
            last = level;
        }
        REFUSE_IF(count == 0, TICKET_HEADER);
    }
    return TICKET_OK;
}

/* The rest of the header: all checks and limits, and the size of everything. */
static ticket_status survey(ticket *t) {
    ticket_table table;
    ticket_tensor tensor;
    uint64_t entries = 0, coins = 0, bits = 0, symbols = 0, scratch = 0, runs = 0, names = 0;
    int snapshot = 0;
    REFUSE_IF(!t->digest || *t->digest != '"' || strlen(t->digest + 1) != 64, TICKET_HEADER);
    for (int k = 1; k <= 64; k++) REFUSE_IF(hex_digit(t->digest[k]) < 0, TICKET_HEADER);
    REFUSE_IF(t->plane_lengths && *t->plane_lengths != '[', TICKET_HEADER);
    TRY(check_levels(t));

    TRY(open_table(t->layers_text, &table));
    REFUSE_IF(table.rows == 0, TICKET_HEADER);
    t->layers = table.rows;
    for (names = table.rows; table.row < table.rows; next_row(&table)) {
        ticket_layer *layer = &t->layer;
        uint32_t counts[2];
        TRY(get_layer(t, &table, layer, &entries));
        t->elements += layer->tensor.elements;
        int tossed = layer->stored == FIRST || layer->stored == LATEST;
        if (tossed) coins += (uint64_t)(layer->tensor.kept - layer->initial) * layer->rounds;
        if (tossed && layer->tensor.kept > layer->initial && 2 * (uint64_t)layer->runs > runs) runs = 2 * layer->runs;
        REFUSE_IF(above(t, coins, 25, 10) || above(t, entries, 16, 3) || above(t, t->elements, 22, 14), TICKET_LIMIT);
        uint32_t alphabet = mask_counts(&layer->tensor, counts);
        uint64_t mask = sequence_needs(alphabet, counts, layer->tensor.elements, &bits, &symbols);
        uint64_t values = sequence_needs(layer->alphabet, layer->counts, layer->tensor.kept, &bits, &symbols);
        uint64_t needed = (mask > values ? mask : values) + 2 * (uint64_t)layer->alphabet;
        if (mask) needed += (layer->tensor.elements + (uint64_t)31) / 32;
        if (needed > scratch) scratch = needed;
        snapshot |= layer->stored != LEVEL && values > 0;
    }
    TRY(walk_tensors(t, NULL, NULL, &scratch));
    TRY(open_table(t->tensors, &table));
    for (names += table.rows; table.row < table.rows; next_row(&table)) {
        TRY(get_tensor(&table, TICKET_STORED, &tensor));
        t->elements += tensor.elements;
    }
    TRY(open_table(t->filled, &table));
    for (names += table.rows; table.row < table.rows; next_row(&table)) {
        uint8_t element[8];
        TRY(get_filled(&table, &tensor, element));
        t->elements += tensor.elements;
    }
    REFUSE_IF(above(t, t->elements, 22, 14), TICKET_LIMIT);
    REFUSE_IF(t->aliases && *t->aliases != '{', TICKET_HEADER);
    if (t->aliases)
        for (const char *at = t->aliases + 1; *at != '}'; at = next(skip(at))) names++;
    if (2 * names > scratch) scratch = 2 * names;

    uint64_t rest = (uint64_t)(t->file + t->size - t->bits), lanes = symbols / 2048 + (symbols % 2048 > 0);
    t->stream.lanes = lanes < 2048 ? (uint32_t)lanes : 2048;
    REFUSE_IF(rest < bits || rest - bits < 4 * t->stream.lanes || (rest - bits) % 2, TICKET_STREAM);
    t->stream.words = t->bits + bits + 4 * t->stream.lanes;
    t->stream.words_left = (size_t)(rest - bits - 4 * t->stream.lanes) / 2;
    t->snapshot_at = t->stream.lanes;
    t->runs_at = t->stream.lanes * (snapshot ? 2 : 1);
    t->scratch_at = t->runs_at + (size_t)runs;
    REFUSE_IF(scratch > SIZE_MAX / 4 - t->scratch_at, TICKET_LIMIT);
    t->work_words = t->scratch_at + (size_t)scratch;
    return TICKET_OK;
}

ticket_status ticket_open(ticket *t, const void *file, size_t size, void *header, size_t bytes) {
    size_t needed;
    uint32_t count;
    memset(t, 0, sizeof *t);
    t->stage = OPENED;
    t->status = ticket_measure(file, size, &needed);
    REFUSE_IF(t->status != TICKET_OK, t->status);
    t->status = TICKET_MEMORY;
    REFUSE_IF(bytes < needed, TICKET_MEMORY);
    t->status = TICKET_OK;
    t->file = file;
    t->size = size;
    t->planes = t->file + 44 + read32(t->file + 40);
    t->header = header;
    TRY(result(t, inflate_header(t->file, header, (uint32_t)needed, &count)));
    TRY(result(t, rewrite_json(header, count)));
    const char *others = find(t->header, "base_tensors");
    if (find(t->header, "base") || (others && others[1] != '}')) return result(t, TICKET_BASE);
    t->layers_text = find(t->header, "layers");
    t->tensors = find(t->header, "tensors");
    t->filled = find(t->header, "filled");
    t->aliases = find(t->header, "aliases");
    t->levels = find(t->header, "levels");
    t->plane_lengths = find(t->header, "planes");
    t->digest = find(t->header, "weights_sha256");
    return result(t, survey(t));
}

/* Names: pairs of an offset in the header and a number of elements, in order. The highest bit marks an alias. */

enum { OFFSET = 0x7fffffff };

static int compare_names(const ticket *t, const uint32_t *a, const uint32_t *b) {
    return strcmp(t->header + (*a & OFFSET), t->header + (*b & OFFSET));
}

static void swap_pairs(uint32_t *a, uint32_t *b) {
    for (int k = 0; k < 2; k++) {
        uint32_t held = a[k];
        a[k] = b[k];
        b[k] = held;
    }
}

static void sort_names(const ticket *t, uint32_t *pairs, size_t count) { /* heap sort */
    for (size_t top = count / 2, end = count; end > 1;) {
        if (top > 0) top--;
        else swap_pairs(pairs, pairs + 2 * --end);
        for (size_t parent = top, child; (child = 2 * parent + 1) < end; parent = child) {
            if (child + 1 < end && compare_names(t, pairs + 2 * child, pairs + 2 * child + 2) < 0) child++;
            if (compare_names(t, pairs + 2 * parent, pairs + 2 * child) >= 0) break;
            swap_pairs(pairs + 2 * parent, pairs + 2 * child);
        }
    }
}

static uint32_t *add_name(const ticket *t, uint32_t *pair, const char *name, uint32_t elements, uint32_t alias) {
    pair[0] = (uint32_t)(name - t->header) | alias << 31;
    pair[1] = elements;
    return pair + 2;
}

static ticket_status check_names(ticket *t, uint32_t *pairs) {
    const char *const tables[3] = {t->layers_text, t->tensors, t->filled};
    uint32_t *end = pairs;
    const char *name;
    for (int k = 0; k < 3; k++) {
        ticket_table table;
        ticket_tensor tensor;
        TRY(open_table(tables[k], &table));
        for (; table.row < table.rows; next_row(&table)) {
            TRY(get_tensor(&table, TICKET_STORED, &tensor));
            end = add_name(t, end, tensor.name, tensor.elements, 0);
        }
    }
    if (t->aliases)
        for (const char *at = t->aliases + 1; *at != '}'; at = next(skip(at))) {
            REFUSE_IF(!get_name(at, &name), TICKET_HEADER);
            end = add_name(t, end, name, 0, 1);
        }
    size_t count = (size_t)(end - pairs) / 2;
    sort_names(t, pairs, count);
    for (size_t k = 1; k < count; k++)
        REFUSE_IF(compare_names(t, pairs + 2 * k - 2, pairs + 2 * k) == 0, TICKET_HEADER);
    if (t->aliases)
        for (const char *at = t->aliases + 1; *at != '}'; at = next(skip(at))) {
            size_t low = 0, high = count;
            REFUSE_IF(!get_name(skip(at), &name), TICKET_HEADER);
            while (high - low > 1) {
                size_t middle = low + (high - low) / 2;
                if (strcmp(t->header + (pairs[2 * middle] & OFFSET), name) <= 0) low = middle;
                else high = middle;
            }
            REFUSE_IF(pairs[2 * low] >> 31 || strcmp(t->header + pairs[2 * low], name) != 0, TICKET_HEADER);
            t->elements += pairs[2 * low + 1];
        }
    REFUSE_IF(above(t, t->elements, 22, 14), TICKET_LIMIT);
    return TICKET_OK;
}

ticket_status ticket_begin(ticket *t, uint32_t *work, size_t words) {
    REFUSE_IF(t->status != TICKET_OK, t->status);
    REFUSE_IF(t->stage != OPENED, TICKET_ORDER);
    REFUSE_IF(words < t->work_words, TICKET_MEMORY);
    t->stream.states = work;
    TRY(result(t, check_names(t, work + t->scratch_at)));
    for (uint32_t lane = 0; lane < t->stream.lanes; lane++) {
        work[lane] = read32(t->stream.words - 4 * (size_t)(t->stream.lanes - lane));
        REFUSE_IF(work[lane] < 65536, result(t, TICKET_STREAM));
    }
    TRY(result(t, open_table(t->layers_text, &t->table)));
    t->spent = 0;
    sha256_init(&t->sha);
    t->stage = BETWEEN_LAYERS;
    return TICKET_OK;
}

/* Layers */

static void find_key(ticket_layer *layer) {
    ticket_sha256 sha;
    uint8_t digest[32], byte;
    sha256_init(&sha);
    for (int k = 0; k < 64; k += 8) {
        byte = (uint8_t)(layer->seed >> k);
        sha256_update(&sha, &byte, 1);
    }
    for (const char *at = layer->identity; *at; at++) {
        byte = (uint8_t)*at;
        if (byte == 0xc0) { /* the two bytes of a character 0 */
            byte = 0;
            at++;
        }
        sha256_update(&sha, &byte, 1);
    }
    sha256_final(&sha, digest);
    layer->key[0] = read32(digest);
    layer->key[1] = read32(digest + 4);
}

static uint32_t weight_bits(const ticket *t, int32_t level) {
    return bits_of((float)level * float_of(t->layer.unit));
}

static void hash_weight(ticket *t, uint32_t bits) {
    uint8_t bytes[4];
    write32(bytes, bits);
    sha256_update(&t->sha, bytes, 4);
}

/* Start with the values of the layer. If they are levels, weights take the place of the values. */
static ticket_status start_values(ticket *t, uint32_t *first, uint32_t *counts, int digest) {
    ticket_layer *layer = &t->layer;
    uint64_t entries = 0;
    TRY(get_counts(layer, counts, &entries));
    t->value_of = counts + layer->alphabet;
    start_sequence(&t->sequence, layer->alphabet, counts, layer->tensor.kept, first);
    t->sequence.bits = t->bits;
    t->sequence.digest = digest ? &t->sha : NULL;
    const char *at = layer->levels ? layer->levels + 1 : NULL;
    for (uint32_t symbol = 0, level = 0; layer->stored == LEVEL && symbol < layer->alphabet; symbol++) {
        int64_t number = 2 * (int64_t)t->value_of[symbol] - 1;
        if (at) {
            for (; level < t->value_of[symbol]; level++) at = next(at);
            REFUSE_IF(!get_integer(at, &number), TICKET_HEADER);
        }
        t->value_of[symbol] = weight_bits(t, (int32_t)number);
    }
    return TICKET_OK;
}

static ticket_status start_layer(ticket *t) {
    ticket_layer *layer = &t->layer;
    ticket_sequence s;
    uint32_t *scratch = t->stream.states + t->scratch_at, counts[2], symbol;
    uint32_t alphabet = mask_counts(&layer->tensor, counts);
    uint64_t bits = 0, symbols = 0;
    uint32_t mask_table = sequence_needs(alphabet, counts, layer->tensor.elements, &bits, &symbols);
    uint32_t value_table = sequence_needs(layer->alphabet, layer->counts, layer->tensor.kept, &bits, &symbols);
    uint32_t *table = scratch + (mask_table ? (layer->tensor.elements + (uint64_t)31) / 32 : 0);
    uint32_t *value_counts = table + (mask_table > value_table ? mask_table : value_table);

    t->mask = NULL;
    start_sequence(&s, alphabet, counts, layer->tensor.elements, table);
    if (s.kind != CONSTANT) {
        uint8_t *stored = s.kind == BITS ? NULL : (uint8_t *)scratch;
        s.bits = t->bits;
        s.digest = &t->sha;
        t->mask = stored ? stored : t->bits;
        if (!stored) t->bits += bit_bytes(s.length);
        else memset(stored, 0, bit_bytes(s.length));
        for (uint32_t index = 0; index < s.length; index++) {
            REFUSE_IF(!next_symbol(&t->stream, &s, &symbol), TICKET_STREAM);
            if (stored) stored[index / 8] |= (uint8_t)(symbol << (7 - index % 8));
        }
    }
    t->index = 0;
    TRY(start_values(t, table, value_counts, 1));
    if (layer->stored != LEVEL) {
        /* The digest takes all values before all weights: go through the values twice. */
        const uint8_t *words = t->stream.words;
        size_t words_left = t->stream.words_left;
        uint32_t coded = t->sequence.kind == RUNS || t->sequence.kind == GROUPS ? t->stream.lanes : 0;
        memcpy(t->stream.states + t->snapshot_at, t->stream.states, coded * sizeof *t->stream.states);
        while (t->sequence.kind != CONSTANT && t->sequence.left > 0)
            REFUSE_IF(!next_symbol(&t->stream, &t->sequence, &symbol), TICKET_STREAM);
        memcpy(t->stream.states, t->stream.states + t->snapshot_at, coded * sizeof *t->stream.states);
        t->stream.words = words;
        t->stream.words_left = words_left;
        TRY(start_values(t, table, value_counts, 0));
        find_key(layer);
        if (layer->stored != ROUND && layer->tensor.kept > layer->initial && layer->history != t->loaded_history) {
            TRY(get_history(layer->history, t->stream.states + t->runs_at, &layer->runs, &layer->rounds));
            t->loaded_history = layer->history;
        }
    }
    if (t->sequence.kind == BITS) t->bits += bit_bytes(t->sequence.length);
    return TICKET_OK;
}

ticket_status ticket_next_layer(ticket *t, ticket_tensor *layer) {
    ticket_status status;
    uint64_t entries = 0;
    uint32_t index;
    float weight;
    REFUSE_IF(t->status != TICKET_OK, t->status);
    REFUSE_IF(t->stage == OPENED, TICKET_ORDER);
    while (t->stage == IN_LAYER) {
        status = ticket_next_weight(t, &index, &weight);
        REFUSE_IF(status > TICKET_END, status);
    }
    if (t->table.row == t->table.rows) return TICKET_END;
    TRY(result(t, get_layer(t, &t->table, &t->layer, &entries)));
    next_row(&t->table);
    TRY(result(t, start_layer(t)));
    t->stage = IN_LAYER;
    *layer = t->layer.tensor;
    return TICKET_OK;
}

static ticket_status next_weight(ticket *t, uint32_t *index, float *weight) {
    const ticket_layer *layer = &t->layer;
    uint32_t symbol, bits;
    if (t->sequence.left == 0) {
        for (uint32_t k = 0; layer->stored == LEVEL && k < layer->alphabet; k++) hash_weight(t, t->value_of[k]);
        t->stage = BETWEEN_LAYERS;
        return TICKET_END;
    }
    REFUSE_IF(!next_symbol(&t->stream, &t->sequence, &symbol), TICKET_STREAM);
    while (t->mask && !(t->mask[t->index / 8] >> (7 - t->index % 8) & 1))
        t->index += t->index % 8 == 0 && t->mask[t->index / 8] == 0 ? 8 : 1;
    *index = t->index++;
    bits = t->value_of[symbol];
    if (layer->stored != LEVEL) {
        uint32_t draw = bits, words[2];
        int32_t level;
        if (layer->stored != ROUND && draw > 0) {
            draw = draw_of(layer->key, *index, draw, t->stream.states + t->runs_at, layer->runs, layer->rounds,
                           layer->stored == LATEST);
            REFUSE_IF(draw == 0, TICKET_COIN);
        }
        philox(layer->key, *index, draw, words);
        if (layer->distribution == SIGNED_CONSTANT) {
            level = words[0] >> 31 ? 1 : -1;
        } else if (layer->distribution == KAIMING_NORMAL) {
            uint64_t x = 0;
            uint32_t i = words[0] >> 16, upper = i >> 15;
            i = upper ? i - 32768 : 32767 - i;
            level = t->normal_table ? t->normal_table[i] : normal_quantile(i, &x);
            if (!upper) level = -level;
        } else {
            level = (int32_t)(words[0] >> 8) * 2 + 1 - (1 << 24);
        }
        bits = weight_bits(t, level);
        hash_weight(t, bits);
    }
    *weight = float_of(narrowed(bits, layer->tensor.dtype));
    return TICKET_OK;
}

ticket_status ticket_next_weight(ticket *t, uint32_t *index, float *weight) {
    REFUSE_IF(t->status != TICKET_OK, t->status);
    REFUSE_IF(t->stage == OPENED, TICKET_ORDER);
    if (t->stage != IN_LAYER) return TICKET_END;
    return result(t, next_weight(t, index, weight));
}

ticket_status ticket_dense(ticket *t, float *weights, size_t count) {
    ticket_status status = t->status;
    uint32_t index;
    float weight;
    REFUSE_IF(status != TICKET_OK, status);
    REFUSE_IF(t->stage != IN_LAYER || t->sequence.left < t->layer.tensor.kept, TICKET_ORDER);
    REFUSE_IF(count < t->layer.tensor.elements, TICKET_MEMORY);
    memset(weights, 0, t->layer.tensor.elements * sizeof *weights);
    while ((status = ticket_next_weight(t, &index, &weight)) == TICKET_OK) weights[index] = weight;
    return status == TICKET_END ? TICKET_OK : status;
}

ticket_status ticket_finish(ticket *t) {
    ticket_tensor layer;
    ticket_status status;
    uint8_t digest[32];
    do status = ticket_next_layer(t, &layer);
    while (status == TICKET_OK);
    REFUSE_IF(status != TICKET_END, status);
    if (t->stage == FINISHED) return TICKET_OK;
    REFUSE_IF(t->stream.words_left > 0, result(t, TICKET_STREAM));
    for (uint32_t lane = 0; lane < t->stream.lanes; lane++)
        REFUSE_IF(t->stream.states[lane] != 65536, result(t, TICKET_STREAM));
    sha256_final(&t->sha, digest);
    for (int k = 0; k < 64; k++) {
        int digit = digest[k / 2] >> (k % 2 ? 0 : 4) & 15;
        REFUSE_IF(hex_digit(t->digest[k + 1]) != digit, result(t, TICKET_WEIGHTS));
    }
    t->stage = FINISHED;
    return TICKET_OK;
}

/* Other tensors */

ticket_status ticket_alias(const ticket *t, uint32_t number, const char **name, const char **same) {
    REFUSE_IF(t->status != TICKET_OK, t->status);
    REFUSE_IF(t->stage == OPENED, TICKET_ORDER);
    if (!t->aliases) return TICKET_END;
    for (const char *at = t->aliases + 1; *at != '}'; at = next(skip(at))) {
        if (number-- > 0) continue;
        *name = at + 1;
        *same = skip(at) + 1;
        return TICKET_OK;
    }
    return TICKET_END;
}

ticket_status ticket_find(const ticket *t, const char *name, ticket_tensor *tensor) {
    const char *const tables[3] = {t->layers_text, t->tensors, t->filled};
    static const ticket_role roles[3] = {TICKET_MASKED, TICKET_STORED, TICKET_FILLED};
    REFUSE_IF(t->status != TICKET_OK, t->status);
    REFUSE_IF(t->stage == OPENED, TICKET_ORDER);
    const char *same = t->aliases ? find(t->aliases, name) : NULL;
    if (same) name = same + 1;
    for (int k = 0; k < 3; k++) {
        ticket_table table;
        TRY(open_table(tables[k], &table));
        for (; table.row < table.rows; next_row(&table))
            if (is_string(table.at[NAME], name)) return get_tensor(&table, roles[k], tensor);
    }
    return TICKET_NAME;
}

ticket_status ticket_read_all(ticket *t, ticket_where where, void *context) {
    ticket_table table;
    REFUSE_IF(t->status != TICKET_OK, t->status);
    REFUSE_IF(t->stage == OPENED || t->stage == IN_LAYER, TICKET_ORDER);
    TRY(result(t, walk_tensors(t, where, context, NULL)));
    TRY(result(t, open_table(t->filled, &table)));
    for (; table.row < table.rows; next_row(&table)) {
        ticket_tensor tensor;
        uint8_t element[8], *to;
        TRY(result(t, get_filled(&table, &tensor, element)));
        size_t size = dtype_sizes[tensor.dtype];
        to = where(context, &tensor);
        for (size_t k = 0; to && k < size * tensor.elements; k++) to[k] = element[k % size];
    }
    return TICKET_OK;
}

typedef struct {
    const char *name;
    void *memory;
} wanted;

static void *where_wanted(void *context, const ticket_tensor *tensor) {
    const wanted *one = context;
    return strcmp(one->name, tensor->name) == 0 ? one->memory : NULL;
}

ticket_status ticket_read(ticket *t, const char *name, void *memory, size_t bytes) {
    ticket_tensor tensor;
    TRY(ticket_find(t, name, &tensor));
    REFUSE_IF(tensor.role == TICKET_MASKED, TICKET_NAME);
    REFUSE_IF(bytes / dtype_sizes[tensor.dtype] < tensor.elements, TICKET_MEMORY);
    wanted one = {tensor.name, memory};
    return ticket_read_all(t, where_wanted, &one);
}

const char *ticket_message(ticket_status status) {
    switch (status) {
    case TICKET_OK: return "no error";
    case TICKET_END: return "there is no further one";
    case TICKET_NONE: return "this is no ticket; iterand.save_ticket writes those";
    case TICKET_VERSION: return "it is a ticket of another format; this reader reads format 2";
    case TICKET_CHECKSUM: return "it was cut off or damaged on the way; copy or download it again";
    case TICKET_COMPRESSION: return "its header cannot be inflated";
    case TICKET_JSON: return "its header is no JSON";
    case TICKET_HEADER: return "an entry of its header is missing or not as it must be";
    case TICKET_LIMIT: return "it asks for more memory or time than its size allows";
    case TICKET_DISTRIBUTION: return "its weights are of a distribution that this reader does not know";
    case TICKET_BASE: return "it is a mask on the weights of a base, which it does not hold";
    case TICKET_STREAM: return "its coded masks and weights are not as its header says";
    case TICKET_COIN: return "a weight holds a draw of a round in which it was not redrawn";
    case TICKET_WEIGHTS: return "the weights it gives are not the ones that were saved";
    case TICKET_TENSORS: return "the tensors that are not masked are not as its header says";
    case TICKET_MEMORY: return "too little memory was given; ticket_measure and work_words say how much is needed";
    case TICKET_NAME: return "it has no tensor of this name that can be read here";
    case TICKET_ORDER: return "a function was called too early, or in the middle of a layer";
    }
    return "an unknown status";
}
