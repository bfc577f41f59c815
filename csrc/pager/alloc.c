#include "pager/alloc.h"

#include <string.h>

#include "base/bytes.h"
#include "base/check.h"
#include "pager/extent.h"
#include "pager/fill.h"
#include "pager/learn.h"
#include "pager/proof.h"
#include "pager/reclaim.h"
#include "pager/region.h"
#include "pager/transfer.h"

static tp_link *size_bin(tp_pager *pager, size_t bytes) {
    const uint64_t granules = bytes / pager->space.granularity_bytes;
    return &pager->by_size[(granules * 0x9E3779B97F4A7C15u) >> 56];
}

/* ---- unmapping ------------------------------------------------------------------------------------ */

/* Unmaps extents in order until one refuses. Returns how many map nothing now. No lock needed: the
 * block is nobody else's. */
static uint32_t unmap_extents(tp_pager *pager, const tp_block *block, tp_status *status) {
    *status = TP_OK;
    for (uint32_t i = 0; i < block->extent_count; i++) {
        const tp_extent *extent = &block->extents[i];
        if (extent->mapped == NULL) continue;
        *status = pager->dev->ops->unmap(pager->dev, extent->addr, extent->bytes, NULL);
        if (*status != TP_OK) return i;
    }
    return block->extent_count;
}

/* The first `count` extents map nothing any more: their frames go to the pools. */
static void release_frames(tp_pager *pager, tp_block *block, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) {
        tp_extent *extent = &block->extents[i];
        tp_list_remove(&extent->inflight);
        tp_transfer_forget(pager, extent);
        tp_proof_forget(pager, extent);
        if (extent->mapped != NULL) extent->mapped->map_count--;
        extent->mapped = NULL;
        if (extent->device != NULL) tp_frame_pool_put(&pager->device_frames, extent->device);
        if (extent->host != NULL) tp_frame_pool_put(&pager->host_frames, extent->host);
        if (extent->host != NULL) pager->host_full = false;
        extent->device = extent->host = NULL;
        extent->guarded = false;
        extent->state = TP_EXTENT_EMPTY;
    }
}

/* A block in no list, unmapped as far as it went: gone, or, when an extent could not be unmapped, kept
 * with its addresses and frames, and the pager in FAILED. */
static void finish(tp_pager *pager, tp_block *block, uint32_t unmapped, tp_status status) {
    release_frames(pager, block, unmapped);
    if (status == TP_OK) {
        tp_space_put(&pager->space, block);
    } else {
        block->life = TP_BLOCK_RETIRING;
        tp_list_push_back(&pager->retiring, &block->lru);
        tp_pager_fail(pager, status);
    }
    tp_cond_broadcast(&pager->changed);
}

/* ---- markers of freed blocks ------------------------------------------------------------- */

/* One marker of everything instead of one on each stream. False: not possible now. */
static bool mark_everything(tp_pager *pager, tp_block *block) {
    tp_marker everything = {0};
    if (tp_marker_record_context(&pager->markers, &everything, NULL) != TP_OK) return false;
    block->uses = (tp_uses){.at = {{everything, false}}, .count = 1};
    block->unmarked = false;
    return true;
}

/* Records how far the streams that use a block have come that is being freed. False: not possible
 * now. */
static bool refresh(tp_pager *pager, tp_block *block) {
    if (pager->capture_depth > 0) return false;
    if (tp_uses_refresh(&pager->markers, &block->uses, NULL) != TP_OK) {
        return mark_everything(pager, block);
    }
    block->unmarked = false;
    return true;
}

/* While nobody waits for memory, a block that only its own stream has used is cached without a
 * marker: most come back to that stream in the same size. The marker is recorded when the block
 * is wanted for anything else; being later, it covers more, and it is a context-wide one, for the
 * stream may be gone by then. */
static bool needs_no_marker(const tp_pager *pager, const tp_block *block) {
    return !pager->pressure && !tp_ticket_taken(pager) && block->uses.count == 1 &&
           block->uses.at[0].marker.lane != TP_LANE_CONTEXT &&
           tp_markers_stream(&pager->markers, block->uses.at[0].marker.lane) == block->stream;
}

/* ---- birth ------------------------------------------------------------------------------------- */

bool tp_block_serves(tp_pager *pager, tp_block *block, tp_stream stream) {
    if (!TP_RULE(pager, TP_RULE_SAME_STREAM)) return true;
    if (block->unmarked) {
        if (block->stream == stream) return true;
        if (!mark_everything(pager, block)) return false;
    }
    return tp_uses_only_on(&pager->markers, &block->uses, stream);
}

/* A cached block of exactly that size whose earlier uses are ordered before `stream`. */
static tp_block *cache_take(tp_pager *pager, size_t bytes, tp_stream stream) {
    tp_link *head = size_bin(pager, bytes);
    for (tp_link *link = head->prev; link != head; link = link->prev) {
        tp_block *block = TP_CONTAINER(link, tp_block, size);
        if (block->bytes != bytes) continue;
        if (!tp_block_serves(pager, block, stream)) continue;
        tp_list_remove(&block->size);
        tp_list_remove(&block->lru);
        pager->stats.cache_hits++;
        return block;
    }
    return NULL;
}

/* Maps the device (or host) frames of a block that nobody else can see. Drops the lock. */
static tp_status map_born(tp_pager *pager, tp_block *block, tp_frame_kind kind,
                          tp_error *error) {
    pager->mapping_count++;
    tp_lock_drop(&pager->lock);
    tp_status status = TP_OK;
    uint32_t mapped = 0;
    while (status == TP_OK && mapped < block->extent_count) {
        const tp_extent *extent = &block->extents[mapped];
        const tp_frame *frame = kind == TP_FRAME_DEVICE ? extent->device : extent->host;
        status =
            pager->dev->ops->map(pager->dev, extent->addr, extent->bytes, frame->handle, error);
        if (status == TP_OK) mapped++;
    }
    tp_lock_take(&pager->lock);
    if (--pager->mapping_count == 0) tp_pager_wake(pager);
    for (uint32_t i = 0; i < mapped; i++) {
        tp_extent *extent = &block->extents[i];
        extent->mapped = kind == TP_FRAME_DEVICE ? extent->device : extent->host;
        extent->mapped->map_count++;
    }
    return status;
}

static void become_all(tp_pager *pager, tp_block *block, tp_extent_state state) {
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent_become(pager, &block->extents[i], state);
    }
}

/* With a device frame for each extent. */
static tp_status map_on_device(tp_pager *pager, tp_block *block, tp_error *error) {
    const tp_status status = map_born(pager, block, TP_FRAME_DEVICE, error);
    if (status == TP_OK) become_all(pager, block, TP_EXTENT_DIRTY);
    return status;
}

/* Takes back what was done to a block that could not be born. Drops the lock. */
static void unborn(tp_pager *pager, tp_block *block) {
    tp_lock_drop(&pager->lock);
    tp_status status = TP_OK;
    const uint32_t unmapped = unmap_extents(pager, block, &status);
    tp_lock_take(&pager->lock);
    finish(pager, block, unmapped, status);
}

/* Gives every extent a host frame, and maps it. */
static tp_status bear_in_host(tp_pager *pager, tp_block *block, tp_error *error) {
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent *extent = &block->extents[i];
        if (extent->device != NULL) {
            tp_frame_pool_put(&pager->device_frames, extent->device);
            extent->device = NULL;
        }
        extent->host = tp_reclaim_host_frame(pager, extent->bytes);
        if (extent->host == NULL) return TP_NO_HOST_MEMORY;
    }
    /* Mapped in strict mode too: the operator that asked for it is about to use it. */
    const tp_status status = map_born(pager, block, TP_FRAME_HOST, error);
    if (status != TP_OK) return status;
    become_all(pager, block, TP_EXTENT_HOST);
    return TP_OK;
}

/* Gives every extent a device frame, waiting for memory while there is hope. */
static tp_status bear_on_device(tp_pager *pager, tp_block *block, tp_stream stream,
                                bool collect, tp_status *device_status) {
    const bool contended = tp_ticket_taken(pager);
    bool ticket = false;
    tp_status status = TP_OK;
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent *extent = &block->extents[i];
        if (extent->device != NULL) continue;
        if (!contended && !ticket) {
            extent->device =
                tp_reclaim_device_frame(pager, extent->bytes, stream, device_status);
            if (extent->device != NULL) continue;
        }
        if (!ticket) tp_ticket_take(pager);
        ticket = true;
        const size_t left = block->bytes - (size_t)(extent->addr - block->addr);
        extent->device =
            tp_reclaim_wait_frame(pager, extent->bytes, left, stream, device_status);
        if (extent->device == NULL) {
            status = TP_OUT_OF_MEMORY;
            break;
        }
    }
    if (ticket) tp_ticket_give(pager);
    if (status != TP_OK && collect && pager->hooks.collect != NULL && pager->failed == TP_OK) {
        const tp_hooks hooks = pager->hooks;
        tp_lock_drop(&pager->lock);
        const bool freed = hooks.collect(hooks.ctx);
        tp_lock_take(&pager->lock);
        if (freed) return bear_on_device(pager, block, stream, false, device_status);
    }
    return status;
}

static tp_status bear(tp_pager *pager, tp_block *block, tp_stream stream,
                      tp_status *device_status, tp_error *error) {
    /* What no amount of evicting can make room for goes to the host at once. */
    if (block->bytes > tp_budget_frame_cap(&pager->budget)) tp_reclaim_negotiate(pager);
    if (block->bytes > tp_budget_frame_cap(&pager->budget) &&
        block->bytes <= pager->budget.limit_bytes) {
        (void)tp_reclaim_flush_foreign(pager);
    }
    const bool too_large = block->bytes > tp_budget_frame_cap(&pager->budget);
    tp_status status = TP_OUT_OF_MEMORY;
    if (!too_large || !pager->offload) {
        status = bear_on_device(pager, block, stream, !pager->offload, device_status);
    }
    if (pager->failed != TP_OK) return pager->failed;
    if (status == TP_OK) return map_on_device(pager, block, error);
    if (!pager->offload || !pager->dev->caps.host_frames) return status;
    status = bear_in_host(pager, block, error);
    if (status == TP_OK) pager->stats.born_in_host++;
    return status;
}

void tp_oom_fill(tp_pager *pager, size_t requested_bytes, tp_oom *out) {
    *out = (tp_oom){
        .requested_bytes = requested_bytes,
        .budget_bytes = pager->budget.limit_bytes,
        .resident_bytes = pager->stats.resident.current,
        .cached_bytes =
            tp_sub_floor(pager->device_frames.created_bytes, pager->stats.resident.current),
        .foreign_bytes = pager->foreign_held_bytes,
        .host_bytes = pager->stats.host.current,
        .host_held_bytes = pager->host_frames.created_bytes,
        .host_budget_bytes = pager->budget.host_limit_bytes,
        .offload = pager->offload,
    };
    for (tp_link *link = pager->live.next; link != &pager->live; link = link->next) {
        const tp_block *block = TP_CONTAINER(link, tp_block, lru);
        for (uint32_t i = 0; i < block->extent_count; i++) {
            if (!tp_extent_resident(block->extents[i].state)) continue;
            if (tp_block_immovable(block)) out->pinned_bytes += block->extents[i].bytes;
            if (!block->seen) out->unseen_bytes += block->extents[i].bytes;
        }
    }
}

static tp_status fail_alloc(tp_pager *pager, size_t bytes, tp_status status,
                            tp_status device_status, tp_oom *oom, tp_error *error) {
    if (status == TP_OUT_OF_MEMORY || status == TP_NO_HOST_MEMORY) {
        tp_oom figures;
        tp_oom_fill(pager, bytes, &figures);
        figures.host_side = status == TP_NO_HOST_MEMORY;
        figures.device_status = device_status;
        pager->last_oom = figures;
        pager->has_last_oom = true;
        if (oom != NULL) *oom = figures;
    }
    return tp_error_set(error, status, "cannot allocate %zu bytes: %s", bytes,
                        tp_status_name(status));
}

/* A block is about to be handed out. */
static void publish(tp_pager *pager, tp_block *block, size_t requested_bytes, tp_stream stream,
                    uint32_t flags) {
    block->requested_bytes = requested_bytes;
    block->stream = stream;
    block->op_pins = (flags & TP_ALLOC_PINNED) != 0 ? 1 : 0;
    pager->op_pin_total += block->op_pins;
    tp_thread_pins += block->op_pins;
    block->waiting_pins = block->handle_pins = 0;
    block->seen = block->tensor = (flags & TP_ALLOC_SEEN) != 0;
    block->exported = block->captured = block->slab = false;
    block->ahead = false;
    block->stamp = block->written = ++pager->use_clock;
    block->evicted_count = 0;
    block->remade = (tp_marker){0, 0};
    block->parking = NULL;
    block->life = TP_BLOCK_LIVE;
    tp_list_push_back(&pager->live, &block->lru);
    tp_block_count(pager, block, true);
    tp_regions_note(pager, block);
    tp_learn_born(pager, block, (flags & TP_ALLOC_RERUN) == 0);
    pager->stats.alloc_count++;
}

/* What the budgets can never hold takes no addresses: they are not given back. */
static tp_status fits_at_all(const tp_pager *pager, size_t bytes) {
    if (bytes <= pager->budget.limit_bytes) return TP_OK;
    if (!pager->offload || !pager->dev->caps.host_frames) return TP_OUT_OF_MEMORY;
    return bytes <= pager->budget.host_limit_bytes ? TP_OK : TP_NO_HOST_MEMORY;
}

static void hand_out(tp_pager *pager, tp_block *block, uint32_t lane, size_t bytes,
                     tp_stream stream, uint32_t flags) {
    block->uses = (tp_uses){.at = {{{lane, 0}, true}}, .count = 1};
    block->unmarked = false;
    publish(pager, block, bytes, stream, flags);
}

tp_status tp_block_alloc(tp_pager *pager, size_t bytes, tp_stream stream, uint32_t flags,
                         tp_addr *out, tp_oom *oom, tp_error *error) {
    if (pager->failed != TP_OK || pager->abandoned) {
        return tp_error_set(error, TP_FAILED, "the pager has failed (%s): nothing is allocated",
                            tp_status_name(pager->failed));
    }
    if (bytes == 0) return tp_error_set(error, TP_INVALID, "a block of 0 bytes was asked for");
    uint32_t lane = 0;
    tp_status status = tp_markers_lane(&pager->markers, stream, &lane, error);
    if (status != TP_OK) return status;
    const size_t rounded = tp_round_up(bytes, pager->space.granularity_bytes);
    tp_block *block = cache_take(pager, rounded, stream);
    if (block == NULL) {
        status = fits_at_all(pager, bytes);
        if (status == TP_OK) status = tp_space_take(&pager->space, bytes, &block, error);
        if (status != TP_OK) return fail_alloc(pager, bytes, status, TP_OK, oom, error);
        tp_status device_status = TP_OK;
        tp_error detail = {0};
        const uint64_t waited_ns = tp_thread_waited_ns, began = tp_pager_now(pager);
        status = bear(pager, block, stream, &device_status, &detail);
        /* Making and mapping frames is waiting, too: the device may have nothing to do meanwhile. */
        tp_thread_waited_ns = waited_ns + (tp_pager_now(pager) - began);
        if (status != TP_OK) {
            unborn(pager, block);
            return fail_alloc(pager, bytes, status, device_status, oom, error);
        }
    }
    hand_out(pager, block, lane, bytes, stream, flags);
    *out = block->addr;
    return TP_OK;
}

/* Frames for all of it, without waiting. False: there are not enough now. */
static bool bear_at_once(tp_pager *pager, tp_block *block, tp_stream stream) {
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent *extent = &block->extents[i];
        extent->device = tp_reclaim_device_frame(pager, extent->bytes, stream, NULL);
        if (extent->device == NULL) return false;
    }
    return map_on_device(pager, block, NULL) == TP_OK;
}

static size_t cached_bytes(const tp_pager *pager) {
    size_t bytes = 0;
    for (const tp_link *link = pager->cached.next; link != &pager->cached; link = link->next)
        bytes += TP_CONTAINER(link, tp_block, lru)->bytes;
    return bytes;
}

tp_status tp_block_try_alloc(tp_pager *pager, size_t bytes, tp_stream stream, uint32_t flags,
                             tp_addr *out, tp_error *error) {
    if (tp_pager_halted(pager)) return tp_error_set(error, TP_FAILED, "the pager has failed");
    uint32_t lane = 0;
    tp_status status = tp_markers_lane(&pager->markers, stream, &lane, error);
    if (status != TP_OK) return status;
    const size_t rounded = tp_round_up(bytes, pager->space.granularity_bytes);
    tp_block *block = cache_take(pager, rounded, stream);
    if (block == NULL) {
        const bool hopeless = tp_ticket_taken(pager) || pager->capture_depth > 0 ||
                              tp_reclaim_free_bytes(pager) + cached_bytes(pager) < rounded;
        if (hopeless)
            return tp_error_set(error, TP_OUT_OF_MEMORY, "no memory for %zu bytes now", bytes);
        status = tp_space_take(&pager->space, bytes, &block, error);
        if (status != TP_OK) return status;
        if (!bear_at_once(pager, block, stream)) {
            unborn(pager, block);
            return tp_error_set(error, TP_OUT_OF_MEMORY, "no memory for %zu bytes now", bytes);
        }
    }
    hand_out(pager, block, lane, bytes, stream, flags);
    *out = block->addr;
    return TP_OK;
}

/* ---- end --------------------------------------------------------------------------------------- */

/* Whole and resident, with nothing in flight: can serve again as it is. */
static bool cacheable(const tp_block *block) {
    for (uint32_t i = 0; i < block->extent_count; i++) {
        const tp_extent *extent = &block->extents[i];
        const bool settled =
            extent->state == TP_EXTENT_DIRTY || extent->state == TP_EXTENT_CLEAN;
        if (!settled || extent->busy) return false;
    }
    return true;
}

/* Forgets the contents: evictions not yet begun are called off, idle host frames go back. */
static void discard(tp_pager *pager, tp_block *block) {
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent *extent = &block->extents[i];
        if (extent->busy) continue;
        extent->evict = extent->write_back = extent->differed = false;
        extent->leave = 0;
        if (tp_fill_queued(extent)) tp_fill_call_off(pager, extent);
        if (extent->state == TP_EXTENT_CLEAN) {
            tp_extent_become(pager, extent, TP_EXTENT_DIRTY);
            tp_extent_drop_host(pager, extent);
        }
        if (extent->state == TP_EXTENT_DIRTY) {
            tp_extent_drop_host(pager, extent);
            if (extent->place == 0) tp_list_remove(&extent->inflight);
        }
    }
    tp_tally_add(&pager->stats.discards, block->bytes, 0);
}

/* Freed, and its markers recorded: cached or retiring. */
static void settle(tp_pager *pager, tp_block *block) {
    if (cacheable(block) && !tp_ticket_taken(pager)) {
        block->life = TP_BLOCK_CACHED;
        tp_list_push_back(&pager->cached, &block->lru);
        tp_list_push_back(size_bin(pager, block->bytes), &block->size);
    } else {
        block->life = TP_BLOCK_RETIRING;
        tp_list_push_back(&pager->retiring, &block->lru);
        tp_pager_wake(pager);
    }
    tp_cond_broadcast(&pager->changed);
}

void tp_block_free(tp_pager *pager, tp_block *block) {
    TP_REQUIRE(block->life == TP_BLOCK_LIVE);
    tp_readahead_forget(pager, block);
    tp_learn_freed(pager, block);
    tp_block_count(pager, block, false);
    tp_list_remove(&block->lru);
    block->generation++;
    pager->op_pin_total -= block->op_pins;
    pager->waiting_pin_total -= block->waiting_pins;
    block->op_pins = block->waiting_pins = block->handle_pins = 0;
    pager->stats.free_count++;
    block->life = TP_BLOCK_RETIRING;
    discard(pager, block);
    block->unmarked = cacheable(block) && needs_no_marker(pager, block);
    if (block->unmarked || refresh(pager, block)) {
        settle(pager, block);
    } else {
        tp_list_push_back(&pager->deferred, &block->lru);
    }
}

bool tp_block_free_deferred(tp_pager *pager) {
    bool moved = false;
    while (!tp_list_empty(&pager->deferred)) {
        tp_block *block = TP_CONTAINER(pager->deferred.next, tp_block, lru);
        if (!refresh(pager, block)) break;
        tp_list_remove(&block->lru);
        settle(pager, block);
        moved = true;
    }
    return moved;
}

void tp_block_retire(tp_pager *pager, tp_block *block) {
    TP_REQUIRE(block->life == TP_BLOCK_CACHED);
    tp_list_remove(&block->lru);
    tp_list_remove(&block->size);
    block->life = TP_BLOCK_RETIRING;
    const bool marked = !block->unmarked || mark_everything(pager, block);
    tp_list_push_back(marked ? &pager->retiring : &pager->deferred, &block->lru);
    tp_pager_wake(pager);
}

static bool retirable(tp_pager *pager, tp_block *block) {
    for (uint32_t i = 0; i < block->extent_count; i++) {
        const tp_extent *extent = &block->extents[i];
        if (extent->busy || extent->held) return false;
        if (TP_RULE(pager, TP_RULE_BUSY_FRAME) && tp_link_in_list(&extent->inflight))
            return false;
    }
    return !TP_RULE(pager, TP_RULE_OLD_MAPPING) || tp_uses_done(&pager->markers, &block->uses);
}

/* The first block of the list that can be unmapped now, or NULL. */
static tp_block *find_retirable(tp_pager *pager) {
    tp_block *found = NULL;
    tp_markers_look(&pager->markers);
    for (tp_link *link = pager->retiring.next; link != &pager->retiring && found == NULL;
         link = link->next) {
        tp_block *block = TP_CONTAINER(link, tp_block, lru);
        if (retirable(pager, block)) found = block;
    }
    tp_markers_look_away(&pager->markers);
    return found;
}

bool tp_block_unmap_retired(tp_pager *pager) {
    tp_block *block = find_retirable(pager);
    if (block == NULL) return false;
    tp_list_remove(&block->lru);
    block->life = TP_BLOCK_UNMAPPING;
    pager->unmapping_count++;
    tp_lock_drop(&pager->lock);
    tp_status status = TP_OK;
    const uint32_t unmapped = unmap_extents(pager, block, &status);
    tp_lock_take(&pager->lock);
    pager->unmapping_count--;
    finish(pager, block, unmapped, status);
    return true;
}

void tp_block_unmap_now(tp_pager *pager, tp_block *block) {
    tp_status status = TP_OK;
    const uint32_t unmapped = unmap_extents(pager, block, &status);
    release_frames(pager, block, unmapped);
    if (status == TP_OK) tp_space_put(&pager->space, block); /* else leaked, never reused */
}
