/* bytes: arithmetic on sizes. Pure. */
#ifndef TP_BASE_BYTES_H
#define TP_BASE_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TP_KIB ((size_t)1 << 10)
#define TP_MIB ((size_t)1 << 20)
#define TP_GIB ((size_t)1 << 30)

/* Rounds up to a multiple of `unit_bytes` (not 0). Saturates at the largest multiple. */
static inline size_t tp_round_up(size_t bytes, size_t unit_bytes) {
    const size_t rest = bytes % unit_bytes;
    if (rest == 0) return bytes;
    const size_t add = unit_bytes - rest;
    return bytes > SIZE_MAX - add ? SIZE_MAX - SIZE_MAX % unit_bytes : bytes + add;
}

static inline bool tp_is_power_of_two(size_t value) {
    return value != 0 && (value & (value - 1)) == 0;
}

static inline size_t tp_min_size(size_t a, size_t b) { return a < b ? a : b; }
static inline size_t tp_max_size(size_t a, size_t b) { return a > b ? a : b; }

/* a - b, not below 0. */
static inline size_t tp_sub_floor(size_t a, size_t b) { return a > b ? a - b : 0; }

#endif
