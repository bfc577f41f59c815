/* victim: which blocks give up their device frames. Pure: sees figures, never the pager.
 *
 * Least recently used, with a preference for what needs no copy: among the oldest candidates that
 * together hold twice the bytes needed, clean ones go first. */
#ifndef TP_PAGER_VICTIM_H
#define TP_PAGER_VICTIM_H

#include <stddef.h>
#include <stdint.h>

typedef struct tp_candidate {
    size_t clean_bytes, dirty_bytes;           /* evictable now */
    size_t take_clean_bytes, take_dirty_bytes; /* the answer: how much of each to evict */
} tp_candidate;

/* `candidates`: least recently used first. Fills the answers; returns the bytes they add up to (at
 * least `need_bytes` if the candidates hold that much; whole extents may make it more later). */
size_t tp_victim_choose(tp_candidate *candidates, size_t count, size_t need_bytes);

#endif
