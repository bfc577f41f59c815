/* reclaim: where frames come from, cheapest first: the pool, the frames of a cached block the same
 * stream has freed, the device while the budget admits it, the device after giving frames of other
 * sizes back, and, after waiting, cached blocks retired and victims evicted.
 *
 * One thread at a time gathers frames: it holds the ticket. Who waits for the ticket holds no pins
 * of its own operator. No wait here is without bound. */
#ifndef TP_PAGER_RECLAIM_H
#define TP_PAGER_RECLAIM_H

#include "pager/pager.h"

/* Pins held by operators in progress on this thread. */
extern _Thread_local uint32_t tp_thread_pins;

/* May drop the lock. */
void tp_ticket_take(tp_pager *pager);
void tp_ticket_give(tp_pager *pager);
bool tp_ticket_taken(const tp_pager *pager);

/* A device frame without waiting, or NULL. `device_status`: what the device itself answered when it
 * refused a frame the budget admits (else untouched). May drop the lock. */
tp_frame *tp_reclaim_device_frame(tp_pager *pager, size_t bytes, tp_stream stream,
                                  tp_status *device_status);
/* The same for a fill that is not needed yet: what is free now, and the foreign allocator is not
 * asked. *dropped: whether it dropped the lock. */
tp_frame *tp_reclaim_spare_frame(tp_pager *pager, size_t bytes, bool *dropped);
/* A host frame without waiting, or NULL: the host budget or the host is full. May drop the lock. */
tp_frame *tp_reclaim_host_frame(tp_pager *pager, size_t bytes);

/* As tp_reclaim_device_frame, but waits while anything can be reclaimed (victims only when offload is
 * on); `total`: what the caller will ask for in all, this frame included, so that it is reclaimed
 * together. The caller holds the ticket. NULL: nothing more can be had. May drop the lock. */
tp_frame *tp_reclaim_wait_frame(tp_pager *pager, size_t bytes, size_t total, tp_stream stream,
                                tp_status *device_status);

/* Free frames, and what may still be made. */
size_t tp_reclaim_free_bytes(const tp_pager *pager);

/* Device bytes on their way to becoming free. `moving`: some of them wait for the device alone, so
 * that waiting for them is bounded. `arriving`: so do fills, and what they bring can be evicted then. */
typedef struct tp_incoming {
    size_t bytes;
    bool moving, arriving;
} tp_incoming;
tp_incoming tp_reclaim_incoming(tp_pager *pager);
/* Starts giving up at least `bytes` more: cached blocks, then, when everything is told (arming.h), victims,
 * extents of `size` (0: any) before others, so that frames need not be made anew. Returns the bytes
 * started. */
size_t tp_reclaim_start(tp_pager *pager, size_t bytes, size_t size);
/* Fills ahead of need that have not begun give back at least `bytes`, if they have them. Returns the
 * bytes that are free now. */
size_t tp_reclaim_call_off_ahead(tp_pager *pager, size_t bytes);
/* Marks resident extents of a block (of `size`, 0: any) to be evicted, at most `clean` and `dirty` bytes (rounded up to
 * extents). `decided` was recorded just now. Returns the bytes marked. */
size_t tp_reclaim_mark(tp_pager *pager, tp_block *block, size_t size, size_t clean,
                       size_t dirty, tp_marker decided);
/* Whether a live block may be evicted at this moment. */
bool tp_reclaim_evictable(const tp_pager *pager, const tp_block *block);
/* In words, what keeps the frames that exist from being given up; for error messages. */
void tp_reclaim_explain(const tp_pager *pager, char *text, size_t size);
/* Gives free frames of at least `bytes` back to the device. Drops the lock. Returns the bytes. */
size_t tp_reclaim_release(tp_pager *pager, tp_frame_pool *pool, size_t bytes);
/* Takes note of what the foreign allocator holds, and counts it together with our frames. */
void tp_reclaim_count_held(tp_pager *pager, size_t foreign_bytes);
/* Moves the border to the foreign allocator so that our frames may grow. Drops the lock. */
void tp_reclaim_negotiate(tp_pager *pager);
/* The foreign allocator gives its unused cache back first: a last resort, it may stop the device.
 * Drops the lock. False: there is none. */
bool tp_reclaim_flush_foreign(tp_pager *pager);

#endif
