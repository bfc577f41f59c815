/* alloc: the life of a block: born, live, cached or retiring, gone.
 *
 * A freed block that is whole and resident is cached: asked for again in the same size it comes back
 * with no mapping work. Otherwise, or when its memory is wanted, it retires: the pager's thread
 * unmaps it once its markers have completed. New addresses are mapped by the allocating thread:
 * nobody else can use them yet. */
#ifndef TP_PAGER_ALLOC_H
#define TP_PAGER_ALLOC_H

#include "pager/pager.h"

/* See tp_alloc. May drop the lock. */
TP_MUST_USE tp_status tp_block_alloc(tp_pager *pager, size_t bytes, tp_stream stream,
                                     uint32_t flags, tp_addr *out, tp_oom *oom,
                                     tp_error *error);
/* The same of what is free now. TP_OUT_OF_MEMORY: nothing is. Never waits for memory. May drop the lock. */
TP_MUST_USE tp_status tp_block_try_alloc(tp_pager *pager, size_t bytes, tp_stream stream,
                                         uint32_t flags, tp_addr *out, tp_error *error);
/* Frees a live block. Never waits, never drops the lock. */
void tp_block_free(tp_pager *pager, tp_block *block);
/* Whether the memory of a freed block may serve `stream` at once: all that used it is complete, or
 * comes before on that stream. May record its markers. */
bool tp_block_serves(tp_pager *pager, tp_block *block, tp_stream stream);
/* CACHED -> RETIRING, or deferred when its markers cannot be recorded now. */
void tp_block_retire(tp_pager *pager, tp_block *block);
/* Blocks freed during a capture: to be tried again now. True if any moved. */
bool tp_block_free_deferred(tp_pager *pager);
/* Unmaps one retiring block whose markers have completed; its frames go to the pools. Drops the lock.
 * For the pager's thread. False: none is ready. */
bool tp_block_unmap_retired(tp_pager *pager);
/* Unmaps a block of any life and gives its frames to the pools, when nothing is in flight and the
 * pager's thread has ended. */
void tp_block_unmap_now(tp_pager *pager, tp_block *block);
/* The figures of a failure. */
void tp_oom_fill(tp_pager *pager, size_t requested_bytes, tp_oom *out);

#endif
