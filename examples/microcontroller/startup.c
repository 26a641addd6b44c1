/* What runs before main on a Cortex-M: it needs the names of chip.ld and no library. */
#include <stdint.h>

#define STACK_PAINT 0xa5a5a5a5u /* main.c looks for it */

extern uint32_t data_begin[], data_end[], bss_begin[], bss_end[], stack_limit[], stack_top[];
extern const uint32_t data_source[];

int main(void);
void timer_interrupt(void);
void leave(int status);

void reset(void);
void reset(void) {
    volatile uint32_t *const coprocessors = (volatile uint32_t *)0xe000ed88; /* CPACR */
    const uint32_t *from = data_source;
    volatile uint32_t *to, *stack; /* volatile: no call of memset, whose stack would be painted over */
    *coprocessors |= 0xfu << 20; /* the floating-point unit */
    __asm volatile("dsb\n isb\n mov %0, sp" : "=r"(stack)::"memory");
    for (to = stack_limit; to < stack; to++) *to = STACK_PAINT;
    for (to = data_begin; to < data_end; to++) *to = *from++;
    for (to = bss_begin; to < bss_end; to++) *to = 0;
    leave(main());
}

/* All faults, and interrupts that nobody expects. */
static void fault(void) { leave(3); }

typedef union {
    void *address;
    void (*function)(void);
} vector;

__attribute__((section(".vectors"), used)) static const vector vectors[16] = {
    {.address = stack_top}, {.function = reset}, {.function = fault}, {.function = fault},
    {.function = fault},    {.function = fault}, {.function = fault}, {0},
    {0},                    {0},                 {0},                 {.function = fault},
    {.function = fault},    {0},                 {.function = fault}, {.function = timer_interrupt},
};
