/* stats: counters with a peak, and event counters. Not synchronised: the owner's lock is held. */
#ifndef TP_BASE_STATS_H
#define TP_BASE_STATS_H

#include <stdint.h>

/* A size in bytes: now, and the most since the last reset. */
typedef struct tp_gauge {
    uint64_t current, peak;
} tp_gauge;

/* Something that happened `count` times, to `bytes` bytes, over `ns` nanoseconds of host time. */
typedef struct tp_tally {
    uint64_t count, bytes, ns;
} tp_tally;

static inline void tp_gauge_add(tp_gauge *gauge, uint64_t bytes) {
    gauge->current += bytes;
    if (gauge->current > gauge->peak) gauge->peak = gauge->current;
}

static inline void tp_gauge_sub(tp_gauge *gauge, uint64_t bytes) { gauge->current -= bytes; }

static inline void tp_gauge_reset_peak(tp_gauge *gauge) { gauge->peak = gauge->current; }

static inline void tp_tally_add(tp_tally *tally, uint64_t bytes, uint64_t ns) {
    tally->count += 1;
    tally->bytes += bytes;
    tally->ns += ns;
}

#endif
