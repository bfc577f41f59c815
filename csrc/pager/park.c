#include "pager/park.h"

#include <stdlib.h>

#include "base/check.h"
#include "pager/access.h"
#include "pager/alloc.h"
#include "pager/extent.h"
#include "pager/fill.h"
#include "pager/learn.h"
#include "pager/reclaim.h"

enum { WAIT_NS = 2000000 };

/* ---- going ------------------------------------------------------------------------------------- */

static const char *obstacle(const tp_block *block) {
    for (uint32_t i = 0; i < block->extent_count; i++) {
        const tp_extent *extent = &block->extents[i];
        if (extent->busy || extent->state == TP_EXTENT_FILLING || tp_fill_queued(extent))
            return "its mapping is being changed";
    }
    return NULL;
}

static bool is_resident(const tp_block *block) {
    for (uint32_t i = 0; i < block->extent_count; i++)
        if (tp_extent_resident(block->extents[i].state)) return true;
    return false;
}

static bool has_gone(const tp_block *block) {
    for (uint32_t i = 0; i < block->extent_count; i++) {
        const tp_extent *extent = &block->extents[i];
        const bool in_host = extent->state == TP_EXTENT_HOST && !tp_fill_queued(extent);
        if (extent->busy || !(extent->parked || in_host)) return false;
    }
    return true;
}

/* The block is freed, and its host frames are not. */
static void go(tp_pager *pager, tp_block *block) {
    tp_dropped *dropped = block->parking;
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent *extent = &block->extents[i];
        dropped->parked->frames[i] = extent->host;
        extent->host = NULL;
        if (extent->parked) tp_tally_add(&pager->stats.evictions, extent->bytes, 0);
        extent->parked = false;
        extent->evict = extent->write_back = extent->differed = false;
        tp_extent_become(pager, extent,
                         extent->state == TP_EXTENT_CLEAN ? TP_EXTENT_DIRTY : TP_EXTENT_EMPTY);
        tp_list_remove(&extent->inflight);
    }
    block->parking = NULL;
    dropped->block = NULL;
    dropped->stage = TP_PARK_GONE;
    tp_gauge_add(&pager->stats.parked, dropped->bytes);
    tp_gauge_add(&pager->stats.host, dropped->bytes);
    pager->setback_count = 0;
    tp_block_free(pager, block);
}

void tp_park_extent(tp_pager *pager, tp_extent *extent) {
    TP_REQUIRE(extent->state == TP_EXTENT_CLEAN && extent->place == 0);
    extent->parked = true;
    if (has_gone(extent->block)) go(pager, extent->block);
}

static tp_dropped *make(const tp_block *block) {
    tp_dropped *dropped = calloc(1, sizeof *dropped);
    tp_parked *parked =
        calloc(1, sizeof *parked + block->extent_count * sizeof parked->frames[0]);
    if (dropped == NULL || parked == NULL) {
        free(dropped);
        free(parked);
        return NULL;
    }
    tp_list_init(&dropped->want);
    tp_list_init(&parked->link);
    parked->count = block->extent_count;
    dropped->parked = parked;
    dropped->requested_bytes = block->requested_bytes;
    dropped->bytes = block->bytes;
    return dropped;
}

tp_status tp_block_park(tp_pager *pager, tp_addr addr, tp_dropped **out, tp_error *error) {
    tp_block *block = NULL;
    const tp_status status = tp_drop_find(pager, addr, &block, error);
    if (status != TP_OK) return status;
    const char *reason = pager->offload ? obstacle(block) : "nothing moves to the host";
    if (reason != NULL) return tp_error_set(error, TP_BUSY, "the block stays: %s", reason);
    const bool resident = is_resident(block);
    /* What is in host memory already may have been written there, by kernels that are not done. */
    tp_marker decided = {0};
    if (tp_marker_record_context(&pager->markers, &decided, NULL) != TP_OK)
        return tp_error_set(error, TP_BUSY, "the block stays: nothing can be marked");
    tp_dropped *dropped = pager->host_full && resident ? NULL : make(block);
    if (dropped == NULL)
        return tp_error_set(error, TP_NO_HOST_MEMORY, "no host memory for %zu bytes",
                            block->bytes);
    tp_learn_moved(pager, &block->identity, &dropped->identity, true);
    tp_list_push_back(&pager->dropped, &dropped->link);
    dropped->stage = TP_PARK_GOING;
    dropped->block = block;
    dropped->parked->left = decided;
    block->parking = dropped;
    tp_tally_add(&pager->stats.parks, block->bytes, 0);
    (void)tp_reclaim_mark(pager, block, 0, SIZE_MAX, SIZE_MAX, decided);
    if (!resident) go(pager, block);
    tp_pager_wake(pager);
    *out = dropped;
    return TP_OK;
}

/* ---- coming back ------------------------------------------------------------------------------- */

void tp_park_want(tp_pager *pager, tp_dropped *dropped) {
    if (dropped->stage != TP_PARK_GONE || tp_link_in_list(&dropped->want)) return;
    tp_list_push_back(&pager->wanted_parked, &dropped->want);
}

/* Queues the copies into a block that `stream` may use, and orders the users of the block behind them. */
static tp_status copy_in(tp_pager *pager, tp_dropped *dropped, tp_block *block,
                         tp_stream stream, tp_error *error) {
    tp_device *dev = pager->dev;
    const tp_stream copies = dev->copy_stream[TP_COPY_TO_DEVICE];
    tp_marker before = {0}, copied = {0};
    tp_status status = tp_marker_record(&pager->markers, stream, &before, error);
    if (status == TP_OK) status = tp_marker_stream_wait(&pager->markers, copies, before, error);
    if (status == TP_OK)
        status = tp_marker_stream_wait(&pager->markers, copies, dropped->parked->left, error);
    if (status != TP_OK) return status;
    for (uint32_t i = 0; i < block->extent_count && status == TP_OK; i++) {
        const tp_extent *extent = &block->extents[i];
        const tp_frame *to = extent->device != NULL ? extent->device : extent->host;
        status = dev->ops->copy(dev, TP_COPY_TO_DEVICE, to->window,
                                dropped->parked->frames[i]->window, extent->bytes, error);
    }
    /* Also behind a copy that is not followed by all others. */
    tp_status marked = tp_marker_record(&pager->markers, copies, &copied, NULL);
    if (marked == TP_OK)
        marked = tp_uses_add(&pager->markers, &block->uses, copied, false, NULL);
    if (marked != TP_OK) tp_pager_fail(pager, marked); /* frames are in doubt */
    if (status == TP_OK) status = marked;
    if (status != TP_OK) return status;
    block->remade = copied;
    dropped->parked->copied = copied;
    return TP_OK;
}

static void discard_parked(tp_pager *pager, tp_parked *parked) {
    for (uint32_t i = 0; i < parked->count; i++)
        if (parked->frames[i] != NULL)
            tp_frame_pool_put(&pager->host_frames, parked->frames[i]);
    pager->host_full = false;
    free(parked);
}

static void unlist(tp_dropped *dropped) {
    tp_list_remove(&dropped->want);
    tp_list_remove(&dropped->link);
    free(dropped);
}

static void count_back(tp_pager *pager, const tp_dropped *dropped) {
    tp_gauge_sub(&pager->stats.parked, dropped->bytes);
    tp_gauge_sub(&pager->stats.host, dropped->bytes);
}

/* The storage has ended while a thread was looking for memory. */
static void end_late(tp_pager *pager, tp_dropped *dropped, tp_block *block) {
    if (block != NULL) tp_block_free(pager, block);
    count_back(pager, dropped);
    discard_parked(pager, dropped->parked);
    tp_learn_gone(pager, &dropped->identity);
    unlist(dropped);
    tp_cond_broadcast(&pager->changed);
}

/* GONE to BACK. May drop the lock; with `wait`, waits for memory. False: as it was, or it has ended. */
static bool bring(tp_pager *pager, tp_dropped *dropped, tp_stream stream, bool wait,
                  tp_status *status, tp_oom *oom, tp_error *error) {
    enum { FLAGS = TP_ALLOC_RERUN | TP_ALLOC_SEEN };
    dropped->stage = TP_PARK_COMING;
    tp_list_remove(&dropped->want);
    tp_addr addr = 0;
    if (wait) {
        *status =
            tp_block_alloc(pager, dropped->requested_bytes, stream, FLAGS, &addr, oom, error);
    } else {
        *status =
            tp_block_try_alloc(pager, dropped->requested_bytes, stream, FLAGS, &addr, error);
    }
    tp_block *block = *status == TP_OK ? tp_block_live(pager, addr) : NULL;
    if (dropped->ended) {
        end_late(pager, dropped, block);
        *status = tp_error_set(error, TP_INVALID, "the storage has ended");
        return false;
    }
    if (*status == TP_OK) *status = copy_in(pager, dropped, block, stream, error);
    dropped->stage = *status == TP_OK ? TP_PARK_BACK : TP_PARK_GONE;
    tp_cond_broadcast(&pager->changed);
    if (*status != TP_OK) {
        if (block != NULL) tp_block_free(pager, block);
        return false;
    }
    tp_learn_moved(pager, &dropped->identity, &block->identity, false);
    dropped->block = block;
    count_back(pager, dropped);
    tp_tally_add(&pager->stats.fills, dropped->bytes, 0);
    tp_list_push_back(&pager->homing, &dropped->parked->link);
    dropped->parked = NULL;
    tp_pager_wake(pager);
    return true;
}

void tp_park_bring_wanted(tp_pager *pager, tp_stream stream) {
    if (pager->capture_depth > 0) return; /* the copies would become part of a graph */
    while (!tp_list_empty(&pager->wanted_parked) && !tp_pager_halted(pager)) {
        tp_dropped *dropped = TP_CONTAINER(pager->wanted_parked.next, tp_dropped, want);
        tp_status status = TP_OK;
        if (bring(pager, dropped, stream, false, &status, NULL, NULL)) continue;
        /* Another one may have been put in front of it meanwhile: next time, then. */
        const bool wanted = status == TP_OUT_OF_MEMORY && dropped->stage == TP_PARK_GONE;
        if (wanted && !tp_link_in_list(&dropped->want))
            tp_list_push_front(&pager->wanted_parked, &dropped->want);
        return;
    }
}

void tp_park_give_up(tp_pager *pager, tp_block *block) {
    tp_dropped *dropped = block->parking;
    for (uint32_t i = 0; i < block->extent_count; i++) block->extents[i].parked = false;
    block->parking = NULL;
    free(dropped->parked);
    dropped->parked = NULL;
    dropped->stage = TP_PARK_BACK;
    tp_learn_moved(pager, &dropped->identity, &block->identity, false);
    tp_pager_wake(pager);
}

/* It is used again before it has gone. */
static void stay(tp_pager *pager, tp_dropped *dropped) {
    tp_block *block = dropped->block;
    for (uint32_t i = 0; i < block->extent_count; i++)
        if (!block->extents[i].busy) block->extents[i].evict = false;
    tp_park_give_up(pager, block);
}

/* Whoever is about to use the block finds its bytes. */
static void await(tp_pager *pager, tp_block *block, tp_stream stream, bool now) {
    const tp_marker copied = block->remade;
    if (copied.seq == 0 || pager->abandoned) return;
    const uint64_t generation = block->generation;
    if (!now && !pager->host_kernels && pager->capture_depth == 0 &&
        tp_marker_stream_wait(&pager->markers, stream, copied, NULL) == TP_OK)
        return;
    while (!tp_marker_done(&pager->markers, copied) && !tp_pager_halted(pager) &&
           block->generation == generation)
        tp_pager_wait(pager, WAIT_NS);
}

tp_status tp_block_unpark(tp_pager *pager, tp_dropped *dropped, tp_stream stream, bool now,
                          tp_addr *out, tp_oom *oom, tp_error *error) {
    while (dropped->stage == TP_PARK_COMING && !tp_pager_halted(pager))
        tp_pager_wait(pager, WAIT_NS);
    tp_status status = TP_OK;
    if (dropped->stage == TP_PARK_GONE &&
        !bring(pager, dropped, stream, true, &status, oom, error))
        return status;
    if (dropped->stage == TP_PARK_COMING)
        return tp_error_set(error, TP_FAILED, "the pager has failed");
    tp_block *block = dropped->block;
    if (dropped->stage == TP_PARK_GOING) stay(pager, dropped);
    const tp_addr addr = block->addr;
    unlist(dropped);
    await(pager, block, stream, now);
    *out = addr;
    return TP_OK;
}

/* ---- the end ----------------------------------------------------------------------------------- */

void tp_park_end(tp_pager *pager, tp_dropped *dropped) {
    switch (dropped->stage) {
    case TP_PARK_COMING: dropped->ended = true; return;
    case TP_PARK_GOING: stay(pager, dropped); /* fall through */
    case TP_PARK_BACK:
        if (!pager->abandoned) tp_block_free(pager, dropped->block);
        break;
    case TP_PARK_GONE:
        count_back(pager, dropped);
        discard_parked(pager, dropped->parked);
        tp_learn_gone(pager, &dropped->identity);
        break;
    case TP_PARK_NONE: break;
    }
    unlist(dropped);
    tp_cond_broadcast(&pager->changed);
}

bool tp_park_settle(tp_pager *pager) {
    bool any = false;
    while (!tp_list_empty(&pager->homing)) {
        tp_parked *parked = TP_CONTAINER(pager->homing.next, tp_parked, link);
        if (!tp_marker_done(&pager->markers, parked->copied)) break;
        tp_list_remove(&parked->link);
        discard_parked(pager, parked);
        any = true;
    }
    return any;
}

void tp_park_fini(tp_pager *pager) {
    while (!tp_list_empty(&pager->homing)) {
        tp_parked *parked = TP_CONTAINER(pager->homing.next, tp_parked, link);
        tp_list_remove(&parked->link);
        discard_parked(pager, parked);
    }
    for (tp_link *link = pager->dropped.next; link != &pager->dropped; link = link->next) {
        tp_dropped *it = TP_CONTAINER(link, tp_dropped, link);
        if (it->stage == TP_PARK_GONE) {
            discard_parked(pager, it->parked);
        } else {
            free(it->parked); /* its block, if it has one, is among the others */
        }
    }
}
