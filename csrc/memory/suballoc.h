/* suballoc: hands out ranges of an abstract interval [0, unit_count), good fit in constant time.
 *
 * Two-level segregated free lists with boundary merging (the idea of Masmano et al., "TLSF: a new
 * dynamic memory allocator for real-time systems", 2004), over units that mean nothing here: the
 * address space uses granules, small blocks use 512-byte units. It never sees the memory itself.
 * Expects the owner's lock. */
#ifndef TP_MEMORY_SUBALLOC_H
#define TP_MEMORY_SUBALLOC_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/list.h"
#include "base/status.h"

enum { TP_SUBALLOC_LEVELS = 48, TP_SUBALLOC_STEPS = 8 };

/* A range, free or taken. Owned by the suballoc; valid until it is put back. */
typedef struct tp_span {
    uint64_t start, count; /* units */
    bool free;
    struct tp_span *before, *after; /* neighbours by address */
    tp_link bin;
} tp_span;

typedef struct tp_suballoc {
    tp_link bins[TP_SUBALLOC_LEVELS][TP_SUBALLOC_STEPS];
    uint64_t level_mask;
    uint8_t step_mask[TP_SUBALLOC_LEVELS];
    tp_span *first;
    tp_link spare; /* span nodes not in use */
    uint64_t unit_count, free_count;
} tp_suballoc;

TP_MUST_USE tp_status tp_suballoc_init(tp_suballoc *sub, uint64_t unit_count, tp_error *error);
/* Frees every span, taken ones too. */
void tp_suballoc_fini(tp_suballoc *sub);
/* A range of `count` units (not 0), or NULL: no free range is long enough, or no memory for a node. */
tp_span *tp_suballoc_take(tp_suballoc *sub, uint64_t count);
/* Cannot fail. */
void tp_suballoc_put(tp_suballoc *sub, tp_span *span);
/* True if nothing is taken. */
bool tp_suballoc_idle(const tp_suballoc *sub);
TP_MUST_USE tp_status tp_suballoc_check(const tp_suballoc *sub, tp_error *error);

#endif
