/* verify: whether the bytes that were made again are those that were dropped.
 *
 * A fingerprint (base/fingerprint.h) is computed when a block is dropped, on the stream that has
 * used it last, and one of the block that takes its place, on the stream that made it: both behind
 * everything that writes them, before anything that reads them again or takes their memory. When
 * both are there they are compared. They differ: the pager enters FAILED with TP_NOT_THE_SAME, so
 * that the program learns of it at its next allocation.
 *
 * Where the kernels run on the calling thread (host_kernels) both are computed at once. Where the
 * device computes none, or all places are taken, a rerun is counted as not verified.
 *
 * Expects the lock; never drops it, never waits. */
#ifndef TP_PAGER_VERIFY_H
#define TP_PAGER_VERIFY_H

#include "base/fingerprint.h"
#include "device/marker.h"
#include "memory/space.h"

struct tp_pager;

/* What is known of dropped bytes. Zeroes: nothing. */
typedef struct tp_print {
    tp_fingerprint print;
    bool known;
    uint8_t place; /* 1 + where the device leaves it; 0: nowhere */
} tp_print;

typedef struct tp_verify_place {
    bool taken;
    tp_marker computed;
} tp_verify_place;

/* A block has been made again: what is in `place` has to be `expected`. */
typedef struct tp_check {
    tp_print expected;
    uint8_t place; /* 1 + ...; 0: this check is not in use */
} tp_check;

typedef struct tp_verify {
    tp_verify_place places[TP_VERIFY_PLACES];
    tp_check checks[TP_VERIFY_PLACES];
    uint32_t check_count;
} tp_verify;

/* `block` is about to be dropped: its fingerprint into *out. */
void tp_verify_dropped(struct tp_pager *pager, tp_block *block, tp_stream stream,
                       tp_print *out);
/* They are back, in `block`. */
void tp_verify_back(struct tp_pager *pager, tp_block *block, tp_stream stream,
                    const tp_print *expected);
/* They will not come back. */
void tp_verify_forget(struct tp_pager *pager, const tp_print *print);
/* Compares what has become known. */
void tp_verify_poll(struct tp_pager *pager);

#endif
