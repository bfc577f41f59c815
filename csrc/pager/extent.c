#include "pager/extent.h"

#include "base/check.h"
#include "pager/proof.h"

#define TO(state) (1u << TP_EXTENT_##state)

/* Row: from; bits: to. HOST to EMPTY and the like is discard: a freed block forgets its contents. */
static const uint8_t legal[TP_EXTENT_STATE_COUNT] = {
    [TP_EXTENT_EMPTY] = TO(DIRTY) | TO(HOST),
    [TP_EXTENT_DIRTY] = TO(WRITING) | TO(EMPTY),
    [TP_EXTENT_WRITING] = TO(CLEAN) | TO(DIRTY),
    [TP_EXTENT_CLEAN] = TO(DIRTY) | TO(HOST) | TO(EMPTY),
    [TP_EXTENT_HOST] = TO(FILLING) | TO(EMPTY),
    [TP_EXTENT_FILLING] = TO(CLEAN) | TO(HOST),
};

const char *tp_extent_state_name(tp_extent_state state) {
    static const char *const names[TP_EXTENT_STATE_COUNT] = {"EMPTY", "DIRTY", "WRITING",
                                                             "CLEAN", "HOST",  "FILLING"};
    return state < TP_EXTENT_STATE_COUNT ? names[state] : "UNKNOWN";
}

bool tp_extent_may_become(tp_extent_state from, tp_extent_state to) {
    return (legal[from] & (1u << to)) != 0;
}

bool tp_extent_resident(tp_extent_state state) {
    return state == TP_EXTENT_DIRTY || state == TP_EXTENT_WRITING || state == TP_EXTENT_CLEAN;
}

static bool in_host(tp_extent_state state) {
    return state == TP_EXTENT_HOST || state == TP_EXTENT_FILLING;
}

static void count(tp_pager *pager, tp_extent_state state, size_t bytes, bool add) {
    tp_gauge *gauge = tp_extent_resident(state) ? &pager->stats.resident
                      : in_host(state)          ? &pager->stats.host
                                                : NULL;
    if (gauge == NULL) return;
    if (add) {
        tp_gauge_add(gauge, bytes);
    } else {
        tp_gauge_sub(gauge, bytes);
    }
}

/* With readonly_clean: no announced writer is in progress when an extent becomes CLEAN, and those who
 * announce themselves later make it DIRTY, and so writable, before their kernels are launched.
 * Whoever is reading meanwhile does not notice. */
static void guard(tp_pager *pager, tp_extent *extent, bool readonly) {
    if (extent->guarded == readonly) return;
    const tp_status status =
        pager->dev->ops->protect(pager->dev, extent->addr, extent->bytes, readonly, NULL);
    if (status == TP_OK) {
        extent->guarded = readonly;
    } else if (!readonly) {
        tp_pager_fail(pager, status); /* the writer that is coming will fault */
    }
}

void tp_extent_become(tp_pager *pager, tp_extent *extent, tp_extent_state to) {
    TP_ASSERT(tp_extent_may_become(extent->state, to));
    if (extent->block->life == TP_BLOCK_LIVE) {
        count(pager, extent->state, extent->bytes, false);
        count(pager, to, extent->bytes, true);
    }
    extent->state = to;
    if (pager->readonly_clean && !extent->busy && tp_extent_resident(to)) {
        guard(pager, extent, to == TP_EXTENT_CLEAN);
    }
    if (to == TP_EXTENT_DIRTY || to == TP_EXTENT_EMPTY) extent->printed = false;
}

void tp_extent_drop_host(tp_pager *pager, tp_extent *extent) {
    if (extent->host == NULL) return;
    TP_ASSERT(extent->mapped != extent->host);
    tp_frame_pool_put(&pager->host_frames, extent->host);
    extent->host = NULL;
    pager->host_full = false;
}

void tp_block_count(tp_pager *pager, const tp_block *block, bool live) {
    tp_stats *stats = &pager->stats;
    for (uint32_t i = 0; i < block->extent_count; i++) {
        count(pager, block->extents[i].state, block->extents[i].bytes, live);
    }
    if (live) {
        tp_gauge_add(&stats->allocated, block->requested_bytes);
        tp_gauge_add(&stats->active, block->bytes);
        stats->block_count++;
        if (stats->block_count > stats->live_peak_count)
            stats->live_peak_count = stats->block_count;
        return;
    }
    tp_gauge_sub(&stats->allocated, block->requested_bytes);
    tp_gauge_sub(&stats->active, block->bytes);
    stats->block_count--;
    if (tp_block_immovable(block)) tp_gauge_sub(&stats->pinned, block->bytes);
}

void tp_extent_mark_written(tp_pager *pager, tp_extent *extent) {
    extent->block->written = pager->use_clock;
    extent->write_back = false; /* not yet, then: it is not ordered behind this write */
    extent->parked = false;
    if (extent->state == TP_EXTENT_CLEAN) {
        tp_extent_become(pager, extent, TP_EXTENT_DIRTY);
        tp_extent_drop_host(pager, extent);
    } else if (extent->state == TP_EXTENT_WRITING) {
        extent->written = true;
    } else if (extent->state == TP_EXTENT_HOST || extent->state == TP_EXTENT_FILLING) {
        /* Through the host frame, whose fingerprint is no longer the one we have. */
        extent->printed = false;
        tp_proof_forget(pager, extent);
    }
}

bool tp_block_immovable(const tp_block *block) {
    return block->handle_pins > 0 || block->exported || block->captured;
}

bool tp_block_fixed(const tp_block *block) { return block->slab || tp_block_immovable(block); }

bool tp_block_movable(const tp_block *block) { return block->seen && !tp_block_fixed(block); }

void tp_extent_list(tp_pager *pager, tp_extent *extent) {
    if (!tp_link_in_list(&extent->inflight)) {
        tp_list_push_back(&pager->inflight, &extent->inflight);
    }
}
