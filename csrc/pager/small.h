/* small: requests too small for a block of their own share slabs (the pluggable door, where there is
 * no other allocator to send them to).
 *
 * A slab is a block whose mapping never changes: nobody knows all that is in it. Slabs belong to the stream they
 * were made for: what that stream frees it may have again at once. What other streams used, too
 * (record_stream), comes back once the markers recorded at its free have completed.
 * Expects the pager's lock; tp_small_alloc may drop it. */
#ifndef TP_PAGER_SMALL_H
#define TP_PAGER_SMALL_H

#include "pager/pager.h"

typedef struct tp_small {
    tp_link slabs;   /* every slab */
    tp_link pending; /* freed pieces that wait for markers of other streams */
} tp_small;

void tp_small_init(tp_small *small);
/* Forgets all slabs; their blocks are the caller's to unmap. */
void tp_small_fini(tp_small *small);
TP_MUST_USE tp_status tp_small_alloc(tp_small *small, tp_pager *pager, size_t bytes,
                                     tp_stream stream, tp_addr *out, tp_oom *oom,
                                     tp_error *error);
/* True if the block at that address is a slab. */
bool tp_small_holds(const tp_small *small, tp_addr block_addr);
void tp_small_free(tp_small *small, tp_pager *pager, tp_addr addr);
void tp_small_record_stream(tp_small *small, tp_pager *pager, tp_addr addr, tp_stream stream);
/* Frees slabs that hold nothing. False: there is none. */
bool tp_small_trim(tp_small *small, tp_pager *pager);

#endif
