#include "pager/drop.h"

#include <stdlib.h>

#include "base/bytes.h"
#include "base/check.h"
#include "pager/access.h"
#include "pager/alloc.h"
#include "pager/extent.h"
#include "pager/learn.h"
#include "pager/park.h"
#include "pager/verify.h"

size_t tp_drop_reserve(const tp_pager *pager) {
    return pager->rerun_count > 0 ? 0 : pager->stats.dropped.current;
}

/* Why the block has to stay; NULL: it may go. */
static const char *stays(const tp_pager *pager, const tp_block *block) {
    if (pager->failed != TP_OK || pager->abandoned) return "the pager has failed";
    if (pager->capture_depth > 0) return "a stream is being captured";
    if (tp_pager_gate_closed(pager)) return "an opaque region is open";
    if (!tp_block_movable(block)) return "it is immovable, or not known to be a tensor";
    if (block->op_pins > 0) return "an operator uses it";
    return NULL;
}

tp_status tp_drop_find(tp_pager *pager, tp_addr addr, tp_block **out, tp_error *error) {
    tp_block *block = tp_block_live(pager, addr);
    if (block == NULL || block->addr != addr) {
        return tp_error_set(error, TP_INVALID, "no block begins at %#llx",
                            (unsigned long long)addr);
    }
    const char *reason = stays(pager, block);
    if (reason != NULL) return tp_error_set(error, TP_BUSY, "the block stays: %s", reason);
    *out = block;
    return TP_OK;
}

static bool room_for(const tp_pager *pager, size_t bytes) {
    const size_t limit = pager->budget.host_limit_bytes;
    const size_t taken = pager->host_frames.created_bytes - pager->host_frames.free_bytes;
    return tp_sub_floor(limit, taken) >= pager->stats.dropped.current + bytes;
}

tp_status tp_block_drop(tp_pager *pager, tp_addr addr, tp_stream stream, tp_dropped **out,
                        tp_error *error) {
    tp_block *block = NULL;
    const tp_status status = tp_drop_find(pager, addr, &block, error);
    if (status != TP_OK) return status;
    tp_dropped *dropped = room_for(pager, block->bytes) ? calloc(1, sizeof *dropped) : NULL;
    if (dropped == NULL) {
        return tp_error_set(error, TP_NO_HOST_MEMORY,
                            "no room for %zu bytes in host memory, should the device have none "
                            "when they are made again",
                            block->bytes);
    }
    dropped->requested_bytes = block->requested_bytes;
    dropped->bytes = block->bytes;
    tp_learn_moved(pager, &block->identity, &dropped->identity, true);
    tp_list_push_back(&pager->dropped, &dropped->link);
    tp_gauge_add(&pager->stats.dropped, dropped->bytes);
    tp_tally_add(&pager->stats.drops, dropped->bytes, 0);
    tp_verify_dropped(pager, block, stream, &dropped->print);
    tp_block_free(pager, block);
    *out = dropped;
    return TP_OK;
}

void tp_drop_fini(tp_pager *pager) {
    tp_park_fini(pager);
    while (!tp_list_empty(&pager->dropped)) {
        tp_dropped *it = TP_CONTAINER(pager->dropped.next, tp_dropped, link);
        tp_list_remove(&it->link);
        free(it);
    }
}

static void forget(tp_pager *pager, tp_dropped *dropped) {
    tp_list_remove(&dropped->link);
    tp_gauge_sub(&pager->stats.dropped, dropped->bytes);
    free(dropped);
}

void tp_block_bring_back(tp_pager *pager, tp_dropped *dropped, tp_addr addr, tp_stream stream) {
    tp_block *block = tp_block_live(pager, addr);
    TP_ASSERT(block != NULL && block->addr == addr);
    if (block == NULL) {
        tp_dropped_end(pager, dropped);
        return;
    }
    tp_learn_moved(pager, &dropped->identity, &block->identity, false);
    block->seen = block->tensor = true;
    tp_tally_add(&pager->stats.reruns, dropped->bytes, 0);
    /* Whoever was ordered behind who made the bytes first is not ordered behind this. */
    if (tp_marker_record(&pager->markers, stream, &block->remade, NULL) != TP_OK) {
        tp_pager_fail(pager, TP_DEVICE_ERROR);
    }
    tp_verify_back(pager, block, stream, &dropped->print);
    tp_verify_poll(pager);
    forget(pager, dropped);
}

void tp_dropped_end(tp_pager *pager, tp_dropped *dropped) {
    if (dropped->stage != TP_PARK_NONE) {
        tp_park_end(pager, dropped);
        return;
    }
    tp_learn_gone(pager, &dropped->identity);
    tp_verify_forget(pager, &dropped->print);
    forget(pager, dropped);
}
