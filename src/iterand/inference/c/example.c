/* Reads an input from standard input, as floats, and prints the outputs of the network:
 *
 *     cc -std=c99 -O3 -ffp-contract=off -o example example.c network.c
 *     ./example < input.f32
 */
#include <stdio.h>

#include "network.h"

static float arena[NETWORK_ARENA / sizeof(float)], input[NETWORK_INPUTS], output[NETWORK_OUTPUTS];

int main(void) {
    const size_t found = fread(input, sizeof *input, NETWORK_INPUTS, stdin);
    int i, best = 0;
    if (found != NETWORK_INPUTS) {
        fprintf(stderr, "the input has %lu floats; this network takes %d\n", (unsigned long)found, NETWORK_INPUTS);
        return 1;
    }
#ifdef NETWORK_WEIGHTS /* --weights ticket */
    if (network_init(arena)) {
        fprintf(stderr, "the weights are damaged\n");
        return 1;
    }
#endif
    network_run(input, output, arena);
    for (i = 0; i < NETWORK_OUTPUTS; i++) {
        printf("%.9g\n", (double)output[i]);
        if (output[i] > output[best]) best = i;
    }
    fprintf(stderr, "the largest is output %d\n", best);
    return 0;
}
