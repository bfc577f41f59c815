/* glance: what a door looks at for each request and each free, before it asks anything else.
 *
 * A program makes and frees a thousand small tensors a step that are no concern of a core. What a
 * door adds to them is the code and the data it touches, seldom in the first cache: this is one line
 * of data, read in place. It may claim too much, never too little; nothing in it is ever taken back.
 *
 * C and C++; takes no lock. */
#ifndef TP_BASE_GLANCE_H
#define TP_BASE_GLANCE_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tp_glance {
    uint64_t begin, end; /* around every address that a core has ever owned */
    int asks;            /* not 0: a door must ask what this thread is due (tp_bind_ask) */
} tp_glance;

extern tp_glance tp_glance_now __attribute__((visibility("default"), aligned(64)));

static inline bool tp_glance_asks(void) {
    return __atomic_load_n(&tp_glance_now.asks, __ATOMIC_RELAXED) != 0;
}

/* Whoever asks for an address got it after the range was widened. */
static inline bool tp_glance_may_own(uint64_t addr) {
    return addr >= __atomic_load_n(&tp_glance_now.begin, __ATOMIC_RELAXED) &&
           addr < __atomic_load_n(&tp_glance_now.end, __ATOMIC_RELAXED);
}

/* From now on doors ask. */
void tp_glance_ask(void);
/* Before anybody is given an address of the range. */
void tp_glance_widen(uint64_t begin, uint64_t end);

#ifdef __cplusplus
}
#endif

#endif
