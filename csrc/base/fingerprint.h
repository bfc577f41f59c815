/* fingerprint: 128 bits that stand for the contents of a range of memory.
 *
 * Each word of 16 bytes is mixed with its position by one multiplication of 64 by 64 bits, and the
 * products are added up: so any order of reading gives the same sum, pieces can be summed apart, and
 * bytes that change places change it. Two contents that differ have the same fingerprint with a
 * probability of about 2^-64, if nobody looks for such a pair on purpose.
 *
 * The same arithmetic is in device/fingerprint.cu, which computes it on a CUDA device. */
#ifndef TP_BASE_FINGERPRINT_H
#define TP_BASE_FINGERPRINT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct tp_fingerprint {
    uint64_t low, high;
} tp_fingerprint;

static inline bool tp_fingerprint_same(tp_fingerprint a, tp_fingerprint b) {
    return a.low == b.low && a.high == b.high;
}

/* `bytes` is a multiple of 16. */
tp_fingerprint tp_fingerprint_of(const void *data, size_t bytes);

#endif
