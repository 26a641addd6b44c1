/* Coded sequences of tickets and random bits: sections 4, 5 and 7 of the ticket format.
 *
 * ticket.c and exported networks share this file. With TICKET_STREAM_FUNCTIONS it gives the functions, not only the types.
 */
#ifndef ITERAND_STREAMS_H
#define ITERAND_STREAMS_H

#include <stddef.h>
#include <stdint.h>

/* The lanes of the coder, and the words that are not read yet. */
typedef struct {
    uint32_t *states;
    const uint8_t *words;
    size_t words_left;
    uint32_t lanes;
} ticket_stream;

/* A sequence of symbols that is being decoded. */
typedef struct {
    uint32_t kind, alphabet, coded, group, length, left, rare, rare_left, run, pending, digits, divisor, lane;
    uint32_t *remaining, *first;
    const uint8_t *bits;
    void *digest; /* of coded symbols, if there is one */
} ticket_sequence;

#endif

#ifdef TICKET_STREAM_FUNCTIONS

#ifndef TICKET_DIGEST
#define TICKET_DIGEST(digest, bytes, count) ((void)0)
#endif

enum { LEVEL, ROUND, FIRST, LATEST };  /* how kept weights are stored */
enum { CONSTANT, BITS, RUNS, GROUPS }; /* how a sequence is cut into coded symbols */
enum { ALWAYS = 1 << 30 };             /* added to rounds in which all coins come up */

static uint32_t sequence_kind(uint32_t alphabet, const uint32_t *counts) {
    uint64_t a = counts[0], b = counts[1], difference = a > b ? a - b : b - a;
    if (alphabet < 2) return CONSTANT;
    if (alphabet > 2) return GROUPS;
    return 16 * difference <= a + b ? BITS : 8 * (a < b ? a : b) <= a + b ? RUNS : GROUPS;
}

/* How many symbols make a group, and how many different groups there are. */
static uint32_t group_size(uint32_t alphabet, uint32_t *groups) {
    uint32_t size = 1;
    for (*groups = alphabet; alphabet > 1 && *groups <= 256 / alphabet; *groups *= alphabet) size++;
    return size;
}

static uint32_t bit_bytes(uint32_t bits) { return bits / 8 + (bits % 8 > 0); }

/* Start with a sequence of so many symbols; `remaining` are their counts, `first` is memory for the frequencies. */
static void start_sequence(ticket_sequence *s, uint32_t alphabet, uint32_t *remaining, uint32_t length,
                           uint32_t *first) {
    static const ticket_sequence none = {0};
    uint64_t share = 0;
    *s = none;
    s->alphabet = alphabet;
    s->kind = alphabet < 2 ? CONSTANT : sequence_kind(alphabet, remaining);
    s->length = s->left = length;
    s->remaining = remaining;
    s->first = first;
    if (s->kind == GROUPS) {
        uint32_t count = 1;
        s->group = group_size(alphabet, &s->coded);
        first[0] = (65536 - s->coded) << 16;
        for (uint32_t k = 0; k < s->group; k++, count *= alphabet)
            for (uint32_t i = count; i-- > 0;) {
                share = first[i];
                for (uint32_t a = alphabet; a-- > 0;)
                    first[i * alphabet + a] = (uint32_t)(share * remaining[a] / length);
            }
        for (uint32_t i = 0; i < count; i++) first[i] >>= 16;
    } else if (s->kind == RUNS) {
        uint64_t whole = (uint64_t)1 << 32, chance;
        s->rare = remaining[1] <= remaining[0];
        s->rare_left = remaining[s->rare];
        s->coded = 256;
        chance = ((uint64_t)s->rare_left << 32) / length;
        share = whole;
        for (uint32_t i = 0; i < 256; i++) {
            uint64_t longer = i < 255 ? share * (whole - chance) >> 32 : 0;
            first[i] = (uint32_t)((65536 - 256) * (share - longer) >> 32);
            share = longer;
        }
    }
    uint32_t largest = 0, total = 0; /* from shares w to cumulative frequencies F */
    for (uint32_t i = 0; i < s->coded; i++) {
        if (first[i] > first[largest]) largest = i;
        total += first[i] + 1;
    }
    if (s->coded) first[largest] += 65536 - total;
    total = 0;
    for (uint32_t i = 0; i < s->coded; i++) {
        uint32_t frequency = first[i] + 1;
        first[i] = total;
        total += frequency;
    }
}

/* The next coded symbol; 0: the words have come to an end. */
static int decode_coded(ticket_stream *t, ticket_sequence *s, uint32_t *symbol) {
    uint32_t x = t->states[s->lane], q = x & 0xffff, low = 0, high = s->coded;
    while (high - low > 1) {
        uint32_t middle = (low + high) / 2;
        if (s->first[middle] <= q) low = middle;
        else high = middle;
    }
    x = ((high < s->coded ? s->first[high] : 65536) - s->first[low]) * (x >> 16) + q - s->first[low];
    if (x < 65536) {
        if (t->words_left == 0) return 0;
        x = x << 16 | t->words[0] | (uint32_t)t->words[1] << 8;
        t->words += 2;
        t->words_left--;
    }
    t->states[s->lane] = x;
    if (++s->lane == t->lanes) s->lane = 0;
    *symbol = low;
    if (s->digest) {
        uint8_t bytes[2] = {(uint8_t)low, (uint8_t)(low >> 8)};
        TICKET_DIGEST(s->digest, bytes, s->coded > 256 ? 2 : 1);
        (void)bytes;
    }
    return 1;
}

/* The next symbol of a sequence, which must have one left; 0: the sequence is not what its counts say. */
static int next_symbol(ticket_stream *t, ticket_sequence *s, uint32_t *symbol) {
    uint32_t position = s->length - s->left--, found = 0, coded;
    if (s->kind == BITS) {
        uint32_t byte = s->bits[position / 8];
        if (s->digest && position % 8 == 0) TICKET_DIGEST(s->digest, s->bits + position / 8, 1);
        found = byte >> (7 - position % 8) & 1;
        if (s->left == 0 && byte << (position % 8 + 1) & 0xff) return 0;
    } else if (s->kind == RUNS) {
        if (!s->pending && s->rare_left) { /* the next run is not read yet */
            do {
                if (!decode_coded(t, s, &coded) || coded > s->remaining[!s->rare] - s->run) return 0;
                s->run += coded;
            } while (coded == 255);
            s->pending = 1;
        }
        found = s->pending && s->run == 0 ? s->rare : !s->rare;
        if (found == s->rare) {
            s->rare_left--;
            s->pending = 0;
        } else if (s->pending) {
            s->run--;
        }
    } else if (s->kind == GROUPS) {
        if (s->divisor == 0) {
            if (!decode_coded(t, s, &s->digits)) return 0;
            s->divisor = s->coded;
        }
        s->divisor /= s->alphabet;
        found = s->digits / s->divisor;
        s->digits %= s->divisor;
        if (s->divisor == 1) s->divisor = 0;
        if (s->left == 0 && s->digits != 0) return 0;
    }
    *symbol = found;
    return s->remaining[found]-- != 0;
}

/* Words 0 and 1 of Philox4x32-10 */
static void philox(const uint32_t *key, uint32_t index, uint32_t draw, uint32_t *words) {
    uint32_t c0 = index, c1 = 0, c2 = draw, c3 = 0, k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)c0 * 0xD2511F53, b = (uint64_t)c2 * 0xCD9E8D57;
        c0 = (uint32_t)(b >> 32) ^ c1 ^ k0;
        c1 = (uint32_t)b;
        c2 = (uint32_t)(a >> 32) ^ c3 ^ k1;
        c3 = (uint32_t)a;
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    words[0] = c0;
    words[1] = c1;
}

/* The round in which the coin of a weight came up for the ordinal-th time; 0: it did not so often. `runs` are `count`
 * pairs of a number of rounds, `rounds` together, and the threshold of their coins. */
static uint32_t draw_of(const uint32_t *key, uint32_t index, uint32_t ordinal, const uint32_t *runs, uint32_t count,
                        uint32_t rounds, int latest) {
    uint32_t round = latest ? rounds : 1, words[2];
    for (uint32_t k = 0; k < count; k++) {
        const uint32_t *run = runs + 2 * (latest ? count - 1 - k : k);
        for (uint32_t left = run[0] & (ALWAYS - 1); left > 0; left--) {
            if (!(run[0] & ALWAYS) && run[1]) philox(key, index, round, words);
            if (run[0] & ALWAYS || (run[1] && words[1] < run[1])) ordinal--;
            if (ordinal == 0) return round;
            if (latest) round--;
            else round++;
        }
    }
    return 0;
}

#endif
