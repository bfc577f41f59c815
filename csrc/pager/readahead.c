#include "pager/readahead.h"

#include "base/bytes.h"
#include "pager/extent.h"
#include "pager/fill.h"
#include "pager/pager.h"

enum { WALK_MAX = 256 }; /* neighbours looked at, resident ones included */

int tp_trend_note(tp_trend *trend, uint64_t stamp) {
    const uint32_t place = trend->count % TP_TREND_LAST;
    const uint64_t before = trend->stamps[place];
    const bool full = trend->count >= TP_TREND_LAST;
    trend->stamps[place] = stamp;
    trend->count++;
    if (!full || stamp == before) return 0;
    return stamp > before ? 1 : -1;
}

/* What may be on its way or waiting to be touched at once. */
static size_t window_bytes(const tp_pager *pager) {
    return tp_min_size(pager->budget.limit_bytes / 16, TP_GIB);
}

static size_t host_bytes(const tp_block *block) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < block->extent_count; i++) {
        if (block->extents[i].state == TP_EXTENT_HOST) bytes += block->extents[i].bytes;
    }
    return bytes;
}

void tp_readahead_forget(tp_pager *pager, tp_block *block) {
    if (!block->ahead) return;
    block->ahead = false;
    pager->ahead_bytes -= block->bytes;
}

void tp_readahead_note(tp_pager *pager, tp_block *block) {
    const int direction = tp_trend_note(&pager->trend, block->stamp);
    tp_readahead_forget(pager, block);
    pager->ahead_count = 0;
    if (direction == 0 || !pager->offload || pager->page_out_before_op) return;
    size_t room = tp_sub_floor(window_bytes(pager), pager->ahead_bytes);
    tp_link *link = &block->lru;
    for (uint32_t i = 0; i < WALK_MAX && pager->ahead_count < TP_AHEAD_MAX; i++) {
        link = direction > 0 ? link->next : link->prev;
        if (link == &pager->live) break;
        tp_block *next = TP_CONTAINER(link, tp_block, lru);
        if (!next->seen || next->ahead || host_bytes(next) == 0 || !tp_fill_allowed(next, 0)) {
            continue;
        }
        if (next->bytes > room) break;
        room -= next->bytes;
        pager->ahead[pager->ahead_count++] = (tp_ahead){next, next->generation};
    }
}

/* Free memory is left for what the program allocates meanwhile. */
static bool memory_to_spare(const tp_pager *pager, size_t bytes) {
    const size_t cap = tp_budget_frame_cap(&pager->budget);
    const size_t free_bytes = pager->device_frames.free_bytes +
                              tp_sub_floor(cap, pager->device_frames.created_bytes);
    return free_bytes >= bytes + tp_budget_reclaim_start(&pager->budget) / 4;
}

static bool bring_ahead(tp_pager *pager, tp_ahead it) {
    tp_block *block = it.block;
    if (block->generation != it.generation || block->life != TP_BLOCK_LIVE) return true;
    if (block->ahead || !memory_to_spare(pager, block->bytes)) return false;
    block->ahead = true;
    pager->ahead_bytes += block->bytes;
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent *extent = &block->extents[i];
        if (extent->state != TP_EXTENT_HOST || extent->device != NULL) continue;
        if (!tp_fill_start(pager, block, it.generation, extent, 0, false)) return false;
        if (block->generation != it.generation) return true;
    }
    return true;
}

void tp_readahead_start(tp_pager *pager) {
    /* Taken over first: another thread may note while the lock is dropped. */
    tp_ahead list[TP_AHEAD_MAX];
    const uint32_t count = pager->ahead_count;
    for (uint32_t i = 0; i < count; i++) list[i] = pager->ahead[i];
    pager->ahead_count = 0;
    for (uint32_t i = 0; i < count && pager->failed == TP_OK; i++) {
        if (!bring_ahead(pager, list[i])) break;
    }
}
