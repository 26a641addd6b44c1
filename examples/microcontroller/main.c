/* Runs the network for every input of the file input.f32, writes the outputs to output.f32, and says what the last run
 * took. Files and text go through semihosting, which emulators and debuggers have; on a device of your own, put its
 * sensor and its display in their place. */
#include <stddef.h>
#include <stdint.h>

#include "network.h"

static float arena[(NETWORK_ARENA + 3) / 4], input[NETWORK_INPUTS], output[NETWORK_OUTPUTS];

/* Semihosting */

enum { OPEN = 0x01, WRITE_TEXT = 0x04, WRITE = 0x05, READ = 0x06, EXIT = 0x20 };

static int32_t ask(int32_t operation, const void *parameters) {
    register int32_t r0 __asm("r0") = operation;
    register const void *r1 __asm("r1") = parameters;
    __asm volatile("bkpt 0xab" : "+r"(r0) : "r"(r1) : "memory");
    return r0;
}

static int32_t open_file(const char *name, uint32_t length, uint32_t mode) {
    const uint32_t parameters[3] = {(uint32_t)name, mode, length};
    return ask(OPEN, parameters);
}

/* How many bytes were not read or written. */
static int32_t transfer(int32_t operation, int32_t file, const void *memory, uint32_t bytes) {
    const uint32_t parameters[3] = {(uint32_t)file, (uint32_t)memory, bytes};
    return ask(operation, parameters);
}

static void print(const char *text) { ask(WRITE_TEXT, text); }

static void print_number(const char *name, uint32_t number) {
    char digits[12], *at = digits + sizeof digits;
    *--at = 0;
    *--at = '\n';
    do *--at = (char)('0' + number % 10);
    while (number /= 10);
    print(name);
    print(at);
}

void leave(int status);
void leave(int status) {
    const uint32_t parameters[2] = {0x20026, (uint32_t)status}; /* the program has ended */
    if (status == 3) print("fault\n");
    ask(EXIT, parameters);
    for (;;) {
    }
}

/* The timer of every Cortex-M: 24 bits, counting down with the processor's clock */

static volatile uint32_t *const timer = (volatile uint32_t *)0xe000e010; /* control, reload, current */
static volatile uint32_t wraps;

void timer_interrupt(void);
void timer_interrupt(void) { wraps++; }

static void start_timer(void) {
    wraps = 0;
    timer[1] = 0xffffff;
    timer[2] = 0;
    timer[0] = 7; /* on, interrupts, the processor's clock */
    while (timer[2] == 0) {
    }
}

static uint32_t ticks(void) {
    uint32_t before, current;
    do {
        before = wraps;
        current = timer[2];
    } while (before != wraps);
    return (before << 24) + (0xffffff - current);
}

/* The stack: startup.c has painted it */

extern const uint32_t stack_limit[], stack_top[];

static uint32_t stack_used(void) {
    const uint32_t *word = stack_limit;
    while (word < stack_top && *word == 0xa5a5a5a5u) word++;
    return (uint32_t)(stack_top - word) * 4;
}

int main(void) {
    const int32_t inputs = open_file("input.f32", 9, 1), outputs = open_file("output.f32", 10, 5);
    uint32_t before = 0, after = 0, count = 0;
    if (inputs < 0 || outputs < 0) {
        print("input.f32 or output.f32 cannot be opened\n");
        return 1;
    }
#ifdef NETWORK_WEIGHTS /* --weights ticket */
    start_timer();
    if (network_init(arena)) {
        print("the weights are damaged\n");
        return 1;
    }
    print_number("init ", ticks());
#endif
    while (transfer(READ, inputs, input, sizeof input) == 0) {
        start_timer();
        before = ticks();
        network_run(input, output, arena);
        after = ticks();
        if (transfer(WRITE, outputs, output, sizeof output)) return 1;
        count++;
    }
    if (count == 0) {
        print("input.f32 is shorter than one input\n");
        return 1;
    }
    print_number("ticks ", after - before);
    print_number("stack ", stack_used());
    return 0;
}
