/* frame: physical memory behind one extent, and the pools that recycle it by size.
 *
 * A frame exists from take (or create) to release. Each frame is mapped at an address of its own,
 * its window, for as long as it exists: copies go from window to window, so that a block's own
 * mapping may change while a copy runs. The pool counts what exists; the caller answers for the
 * budget (budget.h) and for a frame being idle when it is put back: nothing in flight on it.
 *
 * Expects the owner's lock, except tp_frame_create and tp_frame_destroy, which make driver calls and
 * expect that it is NOT held. */
#ifndef TP_MEMORY_FRAME_H
#define TP_MEMORY_FRAME_H

#include "base/list.h"
#include "device/device.h"

typedef struct tp_frame {
    tp_link link; /* in a pool's free list, or in a list of the taker's */
    tp_handle handle;
    tp_addr window;
    size_t bytes;
    tp_frame_kind kind;
    uint32_t map_count; /* addresses of blocks it is mapped at, old mappings too */
} tp_frame;

typedef struct tp_frame_pool {
    tp_device *dev;
    tp_frame_kind kind;
    size_t granularity_bytes;
    uint32_t class_count;
    tp_link *free;        /* by size in granules - 1; most recently used last */
    size_t free_bytes;    /* in the free lists */
    size_t created_bytes; /* existing, plus reserved for frames being created */
    uint64_t create_count, release_count;
} tp_frame_pool;

TP_MUST_USE tp_status tp_frame_pool_init(tp_frame_pool *pool, tp_device *dev,
                                         tp_frame_kind kind, size_t largest_bytes,
                                         tp_error *error);
/* Every frame has been destroyed or is in the free lists (they are destroyed here). */
void tp_frame_pool_fini(tp_frame_pool *pool);

/* A free frame of exactly that size, or NULL. Frames still mapped somewhere stay: kernels queued
 * before their old block was freed may use them. */
tp_frame *tp_frame_pool_take(tp_frame_pool *pool, size_t bytes);
void tp_frame_pool_put(tp_frame_pool *pool, tp_frame *frame);
/* Takes free frames with at least `bytes` in all, if there are that many, out of the pool and into
 * `out` (a list head): the smallest one that is large enough, else the largest ones. Frames still
 * mapped somewhere stay. Returns their bytes. */
size_t tp_frame_pool_strip(tp_frame_pool *pool, size_t bytes, tp_link *out);

/* Makes a frame and its window. Lock not held; `created_bytes` was raised by the caller first. */
TP_MUST_USE tp_status tp_frame_create(tp_device *dev, tp_frame_kind kind, size_t bytes,
                                      tp_frame **out, tp_error *error);
/* Gives it back to the device. Lock not held; the caller lowers `created_bytes` afterwards. False:
 * its window could not be unmapped; the frame is as it was. */
bool tp_frame_destroy(tp_device *dev, tp_frame *frame);

#endif
