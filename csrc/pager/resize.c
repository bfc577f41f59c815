#include "pager/resize.h"

#include "base/bytes.h"
#include "base/check.h"
#include "pager/access.h"
#include "pager/alloc.h"
#include "pager/arming.h"
#include "pager/evict.h"
#include "pager/extent.h"
#include "pager/reclaim.h"

enum {
    WAIT_NS = 1000000,
    PATIENCE_NS = 200000000 /* how long pins and regions of other threads are waited for */
};

/* Gives frames back until at most `cap` bytes exist. The caller holds the ticket and has made sure
 * that no new frame is admitted. False: nothing more can be given up. */
static bool shrink(tp_pager *pager, size_t cap) {
    uint64_t stuck_since = 0;
    while (pager->device_frames.created_bytes > cap) {
        const size_t over = pager->device_frames.created_bytes - cap;
        if (tp_reclaim_release(pager, &pager->device_frames, over) > 0) continue;
        if (tp_pager_halted(pager)) return false;
        const tp_incoming in = tp_reclaim_incoming(pager);
        bool moving = in.moving || in.arriving;
        if (in.bytes < over && tp_reclaim_call_off_ahead(pager, over) > 0) continue;
        if (in.bytes < over) {
            const size_t started = tp_reclaim_start(pager, over - in.bytes, 0);
            if (started == 0 && tp_arming_full(pager)) continue;
            moving |= started > 0;
        }
        const uint64_t now = tp_pager_now(pager);
        if (moving || tp_pager_gate_settling(pager)) {
            stuck_since = 0;
        } else if (stuck_since == 0) {
            stuck_since = now;
        } else if (now - stuck_since > PATIENCE_NS ||
                   (pager->op_pin_total == 0 && !tp_pager_gate_closed(pager))) {
            return false;
        }
        tp_pager_wake(pager);
        tp_pager_wait(pager, WAIT_NS);
    }
    return true;
}

/* Asks the foreign allocator to keep to `cap`. Drops the lock. Returns the bound in force. */
static size_t foreign_cap(tp_pager *pager, size_t cap, bool flush) {
    const tp_hooks hooks = pager->hooks;
    if (hooks.foreign_cap == NULL || hooks.foreign_held == NULL) return 0;
    tp_lock_drop(&pager->lock);
    if (flush && hooks.foreign_flush != NULL) hooks.foreign_flush(hooks.ctx);
    const size_t held = hooks.foreign_held(hooks.ctx);
    const size_t bound = hooks.foreign_cap(hooks.ctx, cap);
    tp_lock_take(&pager->lock);
    tp_reclaim_count_held(pager, held);
    return bound;
}

static void negotiation_begin(tp_pager *pager) {
    while (pager->negotiating) tp_pager_wait(pager, WAIT_NS);
    pager->negotiating = true;
}

static void negotiation_end(tp_pager *pager) {
    pager->negotiating = false;
    pager->negotiated_ns = 0; /* the next one may come at once */
    tp_cond_broadcast(&pager->changed);
}

/* The foreign allocator first gives its unused cache back, then is held to what it has and a little
 * room, but no more than it may have now: our frames have not given anything up yet. */
static tp_status fit_foreign(tp_pager *pager, size_t limit, tp_error *error) {
    if (pager->hooks.foreign_cap == NULL || pager->hooks.foreign_held == NULL) {
        pager->budget.foreign_cap_bytes = 0;
        tp_reclaim_count_held(pager, 0);
        return TP_OK;
    }
    const tp_budget trial = {.limit_bytes = limit};
    const size_t had = pager->budget.foreign_cap_bytes;
    const size_t target =
        tp_min_size(had, tp_budget_foreign_target(&trial, pager->foreign_held_bytes));
    size_t bound = foreign_cap(pager, target, limit < pager->budget.limit_bytes);
    /* What it holds after the flush may be less than what the target was made from. */
    const size_t again =
        tp_min_size(had, tp_budget_foreign_target(&trial, pager->foreign_held_bytes));
    if (again != target || bound > again) bound = foreign_cap(pager, again, false);
    if (bound > limit) {
        (void)foreign_cap(pager, had, false);
        return tp_error_set(error, TP_OUT_OF_MEMORY,
                            "PyTorch's own allocator holds %zu bytes, the budget is %zu", bound,
                            limit);
    }
    pager->budget.foreign_cap_bytes = bound;
    return TP_OK;
}

/* A little room, if our frames leave it: the side that gives is lowered first. */
static void widen_foreign(tp_pager *pager) {
    if (pager->hooks.foreign_cap == NULL || pager->hooks.foreign_held == NULL) return;
    const size_t target = tp_budget_foreign_target(&pager->budget, pager->foreign_held_bytes);
    const size_t room =
        tp_sub_floor(pager->budget.limit_bytes, pager->device_frames.created_bytes);
    if (target <= pager->budget.foreign_cap_bytes || target > room) return;
    pager->budget.foreign_cap_bytes = target;
    (void)foreign_cap(pager, target, false);
}

static tp_status resize(tp_pager *pager, size_t device_bytes, size_t host_bytes,
                        tp_error *error) {
    const tp_budget old = pager->budget;
    if (host_bytes < pager->host_frames.created_bytes) {
        (void)tp_reclaim_release(pager, &pager->host_frames,
                                 pager->host_frames.created_bytes - host_bytes);
    }
    if (host_bytes < pager->host_frames.created_bytes) {
        return tp_error_set(error, TP_NO_HOST_MEMORY,
                            "host frames hold %zu bytes, the host budget would be %zu",
                            pager->host_frames.created_bytes, host_bytes);
    }
    /* Before the lock is dropped: no host frame beyond it is made from here on. */
    pager->budget.host_limit_bytes = host_bytes;
    const tp_status status = fit_foreign(pager, device_bytes, error);
    if (status != TP_OK) {
        pager->budget.host_limit_bytes = old.host_limit_bytes;
        return status;
    }
    pager->budget.limit_bytes = device_bytes;
    if (shrink(pager, tp_budget_frame_cap(&pager->budget))) {
        widen_foreign(pager);
        return TP_OK;
    }
    if (old.foreign_cap_bytes != pager->budget.foreign_cap_bytes) {
        (void)foreign_cap(pager, old.foreign_cap_bytes, false);
    }
    pager->budget = old;
    return tp_error_set(error, TP_OUT_OF_MEMORY,
                        "%zu bytes of frames cannot be brought below a budget of %zu",
                        pager->device_frames.created_bytes, device_bytes);
}

/* The frames of all cached blocks go to the pool. */
static void retire_cached(tp_pager *pager) {
    while (!tp_list_empty(&pager->cached)) {
        tp_block_retire(pager, TP_CONTAINER(pager->cached.next, tp_block, lru));
    }
    while ((!tp_list_empty(&pager->retiring) || pager->unmapping_count > 0) &&
           !tp_pager_halted(pager)) {
        tp_pager_wake(pager);
        tp_pager_wait(pager, WAIT_NS);
    }
}

/* Offload ends: what fits comes back, the rest stays readable where it is. The lock is dropped at each
 * block, so the walk starts anew; a block that was tried has become the most recently used one. Pins
 * and regions of other threads are waited for once, not at each block. */
static void bring_all_back(tp_pager *pager) {
    if (pager->stats.host.current == 0) return;
    retire_cached(pager);
    uint64_t in_vain_ns = 0;
    for (uint64_t tries = pager->stats.block_count; tries > 0; tries--) {
        tp_block *next = NULL;
        for (tp_link *link = pager->live.next; link != &pager->live && next == NULL;
             link = link->next) {
            tp_block *block = TP_CONTAINER(link, tp_block, lru);
            for (uint32_t i = 0; i < block->extent_count; i++) {
                const tp_extent *extent = &block->extents[i];
                if (extent->state != TP_EXTENT_HOST || tp_block_fixed(block)) continue;
                if (block->tensor) next = block; /* else kernels nobody announces may use it */
            }
        }
        if (next == NULL || tp_pager_halted(pager) || in_vain_ns > PATIENCE_NS) return;
        const uint64_t began = tp_pager_now(pager);
        if (!tp_access_bring_back(pager, next)) in_vain_ns += tp_pager_now(pager) - began;
    }
}

/* Host frames that only mirror a resident extent are of no use without paging. */
static void forget_copies(tp_pager *pager) {
    for (tp_link *link = pager->live.next; link != &pager->live; link = link->next) {
        tp_block *block = TP_CONTAINER(link, tp_block, lru);
        for (uint32_t i = 0; i < block->extent_count; i++) {
            tp_extent *extent = &block->extents[i];
            /* Nor is what we know of those in HOST, once writes are announced no more. */
            if (!extent->busy &&
                (extent->state == TP_EXTENT_CLEAN || extent->state == TP_EXTENT_HOST)) {
                tp_extent_mark_written(pager, extent);
            }
        }
    }
    (void)tp_reclaim_release(pager, &pager->host_frames, SIZE_MAX);
}

/* What an earlier, smaller budget left in HOST comes home once paging has ended. */
static void come_home(tp_pager *pager) {
    if (pager->stats.host.current == 0 || !tp_arming_for_return(pager)) return;
    bring_all_back(pager);
    forget_copies(pager);
}

tp_status tp_resize_budget(tp_pager *pager, size_t device_bytes, size_t host_bytes,
                           tp_error *error) {
    const size_t total = pager->dev->caps.total_bytes;
    if (device_bytes == TP_NO_LIMIT) device_bytes = total;
    if (device_bytes == 0) return tp_error_set(error, TP_INVALID, "a budget of 0 bytes");
    tp_ticket_take(pager);
    negotiation_begin(pager);
    const tp_status status = resize(pager, device_bytes, host_bytes, error);
    negotiation_end(pager);
    pager->host_full = false;
    if (status == TP_OK) tp_plans_renew(pager);
    if (status == TP_OK && !pager->offload) come_home(pager);
    tp_ticket_give(pager);
    return status;
}

tp_status tp_resize_yield(tp_pager *pager, size_t bytes, size_t *granted_cap_bytes,
                          tp_error *error) {
    if (pager->hooks.foreign_cap == NULL || pager->hooks.foreign_held == NULL) {
        return tp_error_set(error, TP_INVALID, "no foreign allocator shares this budget");
    }
    tp_ticket_take(pager);
    negotiation_begin(pager);
    const tp_hooks hooks = pager->hooks;
    tp_lock_drop(&pager->lock);
    const size_t held = hooks.foreign_held(hooks.ctx);
    tp_lock_take(&pager->lock);
    tp_reclaim_count_held(pager, held);
    const size_t limit = pager->budget.limit_bytes;
    tp_status status = TP_OUT_OF_MEMORY;
    if (bytes <= tp_sub_floor(limit, held)) {
        const size_t wanted = held + bytes;
        /* The side that gives is lowered first: from here on no frame beyond the cap is made. */
        const size_t had = pager->budget.foreign_cap_bytes;
        if (wanted > had) pager->budget.foreign_cap_bytes = wanted;
        if (shrink(pager, tp_budget_frame_cap(&pager->budget))) {
            tp_lock_drop(&pager->lock);
            const size_t bound = hooks.foreign_cap(hooks.ctx, pager->budget.foreign_cap_bytes);
            tp_lock_take(&pager->lock);
            *granted_cap_bytes = bound;
            status = TP_OK;
        } else {
            pager->budget.foreign_cap_bytes = had;
        }
    }
    negotiation_end(pager);
    pager->negotiated_ns = tp_pager_now(pager);
    tp_ticket_give(pager);
    if (status == TP_OK) return TP_OK;
    char why[160];
    tp_reclaim_explain(pager, why, sizeof why);
    return tp_error_set(error, status, "no room in the budget for %zu bytes more; %s", bytes,
                        why);
}

void tp_resize_flush(tp_pager *pager) {
    tp_ticket_take(pager);
    if (pager->capture_depth == 0) (void)tp_block_free_deferred(pager);
    retire_cached(pager);
    (void)tp_reclaim_release(pager, &pager->device_frames, SIZE_MAX);
    (void)tp_reclaim_release(pager, &pager->host_frames, SIZE_MAX);
    tp_ticket_give(pager);
}

/* Waits until nothing marked for eviction can move any more. */
static void await_evictions(tp_pager *pager) {
    /* The thread tries only when something wakes it, which may have been long ago. */
    if (pager->region_unmarked) tp_pager_mark_region_end(pager);
    for (;;) {
        bool any = false;
        for (tp_link *link = pager->inflight.next; link != &pager->inflight;
             link = link->next) {
            const tp_extent *extent = TP_CONTAINER(link, tp_extent, inflight);
            any = any || (extent->evict && (extent->busy || tp_pager_gate_settling(pager) ||
                                            !tp_evict_blocked(pager, extent)));
        }
        if (!any || tp_pager_halted(pager)) return;
        tp_pager_wake(pager);
        tp_pager_wait(pager, WAIT_NS);
    }
}

size_t tp_resize_evict_all(tp_pager *pager) {
    if (!pager->offload || tp_pager_halted(pager)) return 0;
    (void)tp_arming_full(pager);
    tp_marker decided = {0};
    if (!pager->armed || tp_marker_record_context(&pager->markers, &decided, NULL) != TP_OK) {
        return 0;
    }
    const uint64_t before = pager->stats.evictions.bytes;
    pager->host_full = false;
    for (tp_link *link = pager->live.next; link != &pager->live; link = link->next) {
        tp_block *block = TP_CONTAINER(link, tp_block, lru);
        if (!tp_reclaim_evictable(pager, block)) continue;
        (void)tp_reclaim_mark(pager, block, 0, SIZE_MAX, SIZE_MAX, decided);
    }
    await_evictions(pager);
    return pager->stats.evictions.bytes - before;
}

tp_status tp_resize_evict(tp_pager *pager, tp_addr addr, tp_error *error) {
    (void)tp_arming_full(pager);
    tp_block *block = tp_block_live(pager, addr);
    if (block == NULL) return tp_error_set(error, TP_INVALID, "no block of ours holds it");
    if (tp_pager_halted(pager)) return tp_error_set(error, TP_FAILED, "nothing moves any more");
    if (!pager->offload) return tp_error_set(error, TP_BUSY, "auto_offload is off");
    if (!tp_reclaim_evictable(pager, block)) {
        return tp_error_set(error, TP_BUSY, "the block is %s",
                            !block->seen            ? "not known to be a tensor"
                            : tp_block_fixed(block) ? "pinned or exported"
                                                    : "in use by an operator");
    }
    const uint64_t generation = block->generation;
    tp_marker decided = {0};
    tp_status status = tp_marker_record_context(&pager->markers, &decided, error);
    if (status != TP_OK) return status;
    pager->host_full = false;
    (void)tp_reclaim_mark(pager, block, 0, SIZE_MAX, SIZE_MAX, decided);
    await_evictions(pager);
    for (uint32_t i = 0; block->generation == generation && i < block->extent_count; i++) {
        if (tp_extent_resident(block->extents[i].state)) {
            return tp_error_set(error, pager->host_full ? TP_NO_HOST_MEMORY : TP_BUSY,
                                "the eviction was called off");
        }
    }
    return TP_OK;
}

static void map_the_rest(tp_pager *pager) {
    for (tp_link *link = pager->live.next; link != &pager->live; link = link->next) {
        tp_block *block = TP_CONTAINER(link, tp_block, lru);
        for (uint32_t i = 0; i < block->extent_count; i++) {
            tp_extent *extent = &block->extents[i];
            if (extent->state == TP_EXTENT_HOST && extent->mapped == NULL) {
                tp_access_map_host(pager, extent);
            }
        }
    }
}

static void call_off_evictions(tp_pager *pager) {
    for (tp_link *link = pager->inflight.next; link != &pager->inflight; link = link->next) {
        tp_extent *extent = TP_CONTAINER(link, tp_extent, inflight);
        if (!extent->busy) extent->evict = extent->write_back = false;
    }
    tp_access_await_remaps(pager);
}

tp_status tp_resize_offload(tp_pager *pager, bool offload, tp_error *error) {
    if (offload && !pager->dev->caps.host_frames) {
        return tp_error_set(error, TP_UNSUPPORTED,
                            "this device cannot map host memory at a tensor's address");
    }
    if (offload == pager->offload) return TP_OK;
    if (offload) {
        pager->offload = true;
        return TP_OK;
    }
    tp_ticket_take(pager);
    /* First, so that nothing is evicted behind the walk. */
    pager->offload = false;
    pager->pressure = false;
    call_off_evictions(pager);
    bring_all_back(pager);
    map_the_rest(pager);
    forget_copies(pager);
    tp_ticket_give(pager);
    return TP_OK;
}
