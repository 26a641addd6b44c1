/* Decoder of iterand tickets, format 2 (docs/reference/ticket-format.md), in C99.
 *
 * It allocates nothing, calls nothing but a few functions of <string.h>, uses no global variables and no floating-point
 * numbers but for the one multiplication that makes a weight. All memory comes from the caller:
 *
 *     size_t bytes;
 *     ticket t;
 *     ticket_tensor layer;
 *     check(ticket_measure(file, size, &bytes));                       // checksum, size of the header
 *     check(ticket_open(&t, file, size, malloc(bytes), bytes));        // header, limits; sets t.work_words
 *     check(ticket_begin(&t, malloc(4 * t.work_words), t.work_words));
 *     check(ticket_read(&t, "norm.bias", bias, sizeof bias));          // tensors that are not masked
 *     while ((status = ticket_next_layer(&t, &layer)) == TICKET_OK)    // masked layers, in the order of the file
 *         check(ticket_dense(&t, weights, layer.elements));
 *     check(ticket_finish(&t));                                        // the weights are those that were saved
 *
 * Instead of ticket_dense, ticket_next_weight gives the kept weights one at a time, without memory for the others.
 * A layer may be skipped; it is decoded all the same, since the coded streams run through all layers.
 *
 * The file, the header and the work memory must stay where they are while the ticket is in use. The work memory holds
 * one bit per weight of the largest layer and small tables. Functions take less than 2.5 kB of stack.
 *
 * Every function but ticket_find returns the first error again once one has occurred. Nothing is certain of the weights
 * until ticket_finish returns TICKET_OK: it compares the checksum of the network.
 *
 * Numbers are IEEE 754; do not compile with -ffast-math.
 *
 * Where this reader differs from iterand.read_ticket:
 *   - unknown keys and columns are skipped, as are `recipe`, `metrics`, `iterand`, the column `digest`, and those with
 *     settings of the search (`sparsity`, `score_distribution`, `ranking`, `rank_by`, `floor`): whatever JSON they hold
 *     is accepted;
 *   - a ticket on a base is refused;
 *   - no distribution is known but those of section 7; others are read if they are stored as `level` and are in
 *     `levels`;
 *   - JSON is nested at most 64 deep, has no half of a surrogate pair, and a number has at most 4300 characters; a key
 *     of `aliases` does not occur twice;
 *   - every size of a shape, the elements of every tensor, and those of tensors in one sequence of planes are less than
 *     2^32;
 *   - a `unit` may differ from a float32 number in its 16th digit;
 *   - a header that takes too long to search, with many layers of distributions that are in `levels`, is refused;
 *   - the data of tensors that are not masked is checked when they are read.
 */
#ifndef ITERAND_TICKET_H
#define ITERAND_TICKET_H

#include "streams.h"

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef enum {
    TICKET_OK,
    TICKET_END,          /* there is no further layer, weight or alias */
    TICKET_NONE,         /* not a ticket */
    TICKET_VERSION,      /* a ticket of another format */
    TICKET_CHECKSUM,     /* the file was cut off or damaged */
    TICKET_COMPRESSION,  /* header or tensors cannot be inflated */
    TICKET_JSON,         /* the header is not JSON */
    TICKET_HEADER,       /* an entry of the header is missing or not as it must be */
    TICKET_LIMIT,        /* more than section 9 allows */
    TICKET_DISTRIBUTION, /* weights of a distribution that this reader does not know */
    TICKET_BASE,         /* a mask on the weights of a base, which the file does not hold */
    TICKET_STREAM,       /* the coded sequences are not as the header says */
    TICKET_COIN,         /* a weight holds more draws than its coins came up */
    TICKET_WEIGHTS,      /* weights_sha256 is another */
    TICKET_TENSORS,      /* tensors that are not masked are not as the header says */
    TICKET_MEMORY,       /* the caller gave too little memory */
    TICKET_NAME,         /* no tensor has this name, or it is of another kind */
    TICKET_ORDER         /* a function was called too early, or in the middle of a layer */
} ticket_status;

/* One sentence for a status. */
const char *ticket_message(ticket_status status);

/* Types of elements, named as in safetensors. */
typedef enum {
    TICKET_F64, TICKET_F32, TICKET_F16, TICKET_BF16, TICKET_F8_E4M3, TICKET_F8_E5M2, TICKET_C64, TICKET_I64,
    TICKET_I32, TICKET_I16, TICKET_I8, TICKET_U64, TICKET_U32, TICKET_U16, TICKET_U8, TICKET_BOOL
} ticket_dtype;

/* Bytes of one element. */
size_t ticket_element_size(ticket_dtype dtype);

typedef enum { TICKET_MASKED, TICKET_STORED, TICKET_FILLED } ticket_role;

/* A tensor of the state dict. Its name is UTF-8 with a 0 at the end, inside the memory of the header; a character 0 in
 * it is written as the bytes C0 80. */
typedef struct {
    const char *name;
    uint32_t shape[16];
    uint32_t dimensions;
    uint32_t elements;
    uint32_t kept; /* of a masked tensor */
    ticket_dtype dtype;
    ticket_role role;
} ticket_tensor;

enum { TICKET_COLUMNS = 13 };

/* The fields below are private, except those that say otherwise. */
typedef struct {
    uint32_t state[8];
    uint8_t block[64];
    uint64_t total;
} ticket_sha256;

typedef struct {
    const char *at[TICKET_COLUMNS];
    uint32_t shared, rows, row;
} ticket_table;

typedef struct {
    ticket_tensor tensor;
    uint32_t stored, distribution, unit, rounds, runs, most, alphabet, initial, counts[2], key[2];
    uint64_t seed;
    const char *identity, *levels, *history, *values;
} ticket_layer;

typedef struct {
    uint32_t layers;             /* public: the number of masked layers, after ticket_open */
    size_t work_words;           /* public: how many uint32_t ticket_begin needs, after ticket_open */
    const int32_t *normal_table; /* public: NULL or the table of ticket_normal_table; set it after ticket_open */

    ticket_status status;
    uint32_t stage;
    const uint8_t *file, *planes, *bits;
    size_t size, scratch_at;
    const char *header, *layers_text, *tensors, *filled, *aliases, *levels, *plane_lengths, *digest;
    const char *history, *loaded_history, *distribution, *distribution_levels; /* the ones that were read last */
    uint64_t elements, spent;
    size_t levels_size;
    uint32_t history_runs, history_rounds, distribution_count, snapshot_at, runs_at, index;
    uint32_t *value_of;
    const uint8_t *mask;
    ticket_table table;
    ticket_layer layer;
    ticket_stream stream;
    ticket_sequence sequence;
    ticket_sha256 sha;
} ticket;

/* Check the kind of file and its checksum, and find how many bytes ticket_open needs for the header. */
ticket_status ticket_measure(const void *file, size_t size, size_t *bytes);

/* Inflate and check the header. Sets t->layers and t->work_words. */
ticket_status ticket_open(ticket *t, const void *file, size_t size, void *header, size_t bytes);

/* Check the names, and start with the first layer. */
ticket_status ticket_begin(ticket *t, uint32_t *work, size_t words);

/* Go on to the next masked layer. TICKET_END: there is none. */
ticket_status ticket_next_layer(ticket *t, ticket_tensor *layer);

/* The next kept weight of the layer, in ascending order of the index in row-major order. TICKET_END: there is none.
 * Weights of all types are exact as float: those of F64 are computed in float32, and F16 and BF16 are narrower. */
ticket_status ticket_next_weight(ticket *t, uint32_t *index, float *weight);

/* All weights of the layer, pruned ones as 0; count is layer.elements. Only before ticket_next_weight. */
ticket_status ticket_dense(ticket *t, float *weights, size_t count);

/* Decode what is left, and compare the checksum of the network. */
ticket_status ticket_finish(ticket *t);

/* The tensor of this name; of a tied one, the tensor it is tied to. */
ticket_status ticket_find(const ticket *t, const char *name, ticket_tensor *tensor);

/* The elements of a tensor that is not masked, little-endian. bytes is elements times ticket_element_size. Not in the
 * middle of a layer. */
ticket_status ticket_read(ticket *t, const char *name, void *memory, size_t bytes);

/* The same for all of them in one pass. `where` says where the elements of a tensor go; NULL: nowhere. It is called
 * several times for a tensor and always gives the same address. */
typedef void *(*ticket_where)(void *context, const ticket_tensor *tensor);
ticket_status ticket_read_all(ticket *t, ticket_where where, void *context);

/* Pair `number` of the tied tensors: `name` is the same tensor as `same`. TICKET_END: there are fewer. */
ticket_status ticket_alias(const ticket *t, uint32_t number, const char **name, const char **same);

/* Weights of `kaiming_normal` take some microseconds each. With this table of 32,768 numbers, filled once and put into
 * t->normal_table, they take as long as others. */
void ticket_normal_table(int32_t *table);

#ifdef __cplusplus
}
#endif

#endif
