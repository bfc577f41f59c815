#include "base/glance.h"

tp_glance tp_glance_now = {.begin = UINT64_MAX};

void tp_glance_ask(void) { __atomic_store_n(&tp_glance_now.asks, 1, __ATOMIC_RELAXED); }

void tp_glance_widen(uint64_t begin, uint64_t end) {
    uint64_t found = __atomic_load_n(&tp_glance_now.begin, __ATOMIC_RELAXED);
    while (begin < found &&
           !__atomic_compare_exchange_n(&tp_glance_now.begin, &found, begin, true,
                                        __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
    found = __atomic_load_n(&tp_glance_now.end, __ATOMIC_RELAXED);
    while (found < end && !__atomic_compare_exchange_n(&tp_glance_now.end, &found, end, true,
                                                       __ATOMIC_RELAXED, __ATOMIC_RELAXED))
        continue;
}
