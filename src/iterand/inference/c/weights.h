/* Weights of ±c that a network decodes from the coded sequences of its ticket before it runs.
 *
 * All masked layers of the ticket are described in bytes, one after the other. A number has seven bits in a byte, the lowest first; the
 * highest bit of a byte says that there are more.
 *
 *     elements
 *     number of different values, how often each occurs
 *     how signs are stored: LEVEL, ROUND, FIRST or LATEST
 *     LEVEL: one number, bit i of which is 1 if value i is +c
 *     otherwise: key (two numbers); runs, rounds, and for each run its rounds and threshold; the value of each symbol
 */

/* Where weights go, as codes and counts of weights_of. */
typedef struct {
    uint32_t layer; /* of the ticket, counted from 0 */
    uint32_t row;   /* weights of an output channel */
    uint32_t taps;
    const uint8_t *rows;    /* bits of the output channels that are not left out; NULL: all */
    const uint8_t *swapped; /* bits of the output channels whose signs are swapped; NULL: none */
    const uint8_t *inputs;  /* bits of the input channels that are not left out; NULL: all */
    uint8_t *codes;
    uint16_t *counts;
} destination;

static uint32_t take_number(const uint8_t **at) {
    uint32_t number = 0, shift = 0, byte;
    do {
        byte = *(*at)++;
        number |= (byte & 127) << shift;
        shift += 7;
    } while (byte & 128);
    return number;
}

static uint32_t bit_at(const uint8_t *bits, uint32_t index) { return bits[index / 8] >> (7 - index % 8) & 1; }

static void put_bit(uint8_t *bits, uint32_t index, uint32_t bit) {
    const uint32_t mask = 128u >> index % 8;
    bits[index / 8] = (uint8_t)(bit ? bits[index / 8] | mask : bits[index / 8] & ~mask);
}

/* The weights of a layer from its mask and the signs of its kept weights. */
static void write_codes(const destination *to, const uint8_t *mask, const uint8_t *signs, uint32_t elements) {
    const uint32_t taps = to->taps, step = 255 / taps * taps;
    uint8_t *codes = to->codes;
    uint16_t *counts = to->counts;
    uint32_t start, row, kept = 0, next = 0, pass;
    for (start = row = 0; start < elements; start += to->row, row++, kept = next) {
        const uint32_t left_out = to->rows && !bit_at(to->rows, row), swapped = to->swapped && bit_at(to->swapped, row);
        for (pass = 0; pass < 2; pass++) { /* what is added, then what is subtracted */
            uint32_t index, base = 0, count = 0, channel = 0, lost = 0;
            next = kept;
            for (index = start; index < start + to->row; index++) {
                uint32_t place = index - start;
                if (index % 8 == 0 && mask[index / 8] == 0) {
                    index += 7;
                    continue;
                }
                if (!bit_at(mask, index) || bit_at(signs, next++) == (pass ^ swapped) || left_out) continue;
                for (; to->inputs && channel < place / taps; channel++)
                    if (!bit_at(to->inputs, channel)) lost += taps;
                for (place -= lost; place - base >= 255; base += step) *codes++ = 255;
                *codes++ = (uint8_t)(place - base);
                base = place / taps * taps;
                count++;
            }
            if (!left_out) *counts++ = (uint16_t)count;
        }
    }
}

/* The sign of a kept weight that is stored as a draw; 2: there is no such draw. */
static uint32_t drawn_sign(uint32_t stored, const uint32_t *key, const uint32_t *history, uint32_t index, uint32_t value) {
    uint32_t words[2];
    if (stored != ROUND && value > 0) {
        value = draw_of(key, index, value, history + 2, history[0], history[1], stored == LATEST);
        if (value == 0) return 2;
    }
    philox(key, index, value, words);
    return words[0] >> 31;
}

typedef struct {
    ticket_stream stream;
    const uint8_t *bits;
    uint32_t *work;
} weight_reader;

/* Decode the layer that is described at `at`: its mask and signs, as bits. 0: the ticket is damaged. */
static int decode_layer(weight_reader *r, const uint8_t **at, uint32_t *elements, const uint8_t **mask, uint8_t **signs) {
    uint32_t alphabet, stored, kept = 0, index = 0, i, symbol = 0, plus, runs, both[2], key[2] = {0};
    uint32_t *memory = r->work, *counts, *values, *history;
    ticket_sequence s;
    *elements = take_number(at);
    uint8_t *bits = (uint8_t *)memory;
    memory += *elements / 32 + (*elements % 32 > 0);
    alphabet = take_number(at);
    counts = memory;
    memory += alphabet + 2; /* at least two counts */
    counts[0] = counts[1] = 0;
    for (i = 0; i < alphabet; i++) kept += counts[i] = take_number(at);
    *signs = (uint8_t *)memory;
    values = history = memory += kept / 32 + (kept % 32 > 0);
    stored = take_number(at);
    key[0] = plus = take_number(at);
    if (NETWORK_DRAWS && stored != LEVEL) {
        key[1] = take_number(at);
        runs = take_number(at);
        *memory++ = runs;
        for (i = 0; i < 1 + 2 * runs; i++) *memory++ = take_number(at);
        values = memory;
        for (i = 0; i < alphabet; i++) *memory++ = take_number(at);
    }

    both[0] = *elements - kept;
    both[1] = kept;
    *mask = bits;
    if (both[0] && both[1]) {
        start_sequence(&s, 2, both, *elements, memory);
        s.bits = r->bits;
        if (s.kind == BITS) {
            *mask = r->bits;
            r->bits += bit_bytes(s.length);
        }
        for (i = 0; i < *elements; i++) {
            if (!next_symbol(&r->stream, &s, &symbol)) return 0;
            if (s.kind != BITS) put_bit(bits, i, symbol);
        }
    } else {
        for (i = 0; i < bit_bytes(*elements); i++) bits[i] = kept ? 255 : 0;
    }

    start_sequence(&s, alphabet, counts, kept, memory);
    s.bits = r->bits;
    if (s.kind == BITS) r->bits += bit_bytes(s.length);
    for (i = 0; i < kept; i++, index++) {
        if (!next_symbol(&r->stream, &s, &symbol)) return 0;
        while (!bit_at(*mask, index)) index++;
        if (NETWORK_DRAWS && stored != LEVEL)
            symbol = drawn_sign(stored, key, history, index, values[symbol]);
        else
            symbol = plus >> (symbol & 31) & 1;
        if (symbol > 1) return 0;
        put_bit(*signs, i, symbol);
    }
    return 1;
}

/* Decode all layers, and fill the `count` destinations, in the order of their layers. 0: done. */
static int decode_weights(const uint8_t *layers, uint32_t layer_count, const uint8_t *coded, size_t bytes, size_t bit_count, uint32_t lanes,
                          const destination *to, uint32_t count, void *memory) {
    weight_reader r;
    uint32_t lane, layer, elements;
    const uint8_t *state = coded + bit_count, *mask;
    uint8_t *signs;
    r.stream.states = memory;
    r.stream.lanes = lanes;
    for (lane = 0; lane < lanes; lane++, state += 4)
        r.stream.states[lane] = state[0] | (uint32_t)state[1] << 8 | (uint32_t)state[2] << 16 | (uint32_t)state[3] << 24;
    r.stream.words = state;
    r.stream.words_left = (bytes - bit_count) / 2 - 2 * lanes;
    r.bits = coded;
    r.work = r.stream.states + lanes;
    for (layer = 0; layer < layer_count; layer++) {
        if (!decode_layer(&r, &layers, &elements, &mask, &signs)) return 1;
        for (; count && to->layer == layer; to++, count--) write_codes(to, mask, signs, elements);
    }
    for (lane = 0; lane < lanes; lane++)
        if (r.stream.states[lane] != 65536) return 1;
    return r.stream.words_left != 0;
}
