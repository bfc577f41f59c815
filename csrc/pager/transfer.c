#include "pager/transfer.h"

#include "base/check.h"
#include "pager/extent.h"
#include "pager/region.h"

enum { COPIES_MAX = 2 }; /* in each direction: one runs, one is ready behind it */

bool tp_transfer_room(const tp_pager *pager, tp_copy_dir dir) {
    /* A copy that must wait for a region's kernels needs a marker that a capture does not allow. */
    if (pager->capture_depth > 0 && tp_pager_gate_closed(pager)) return false;
    return pager->copying[dir] < COPIES_MAX;
}

void tp_transfer_forget(tp_pager *pager, tp_extent *extent) {
    if (!extent->copying) return;
    extent->copying = false;
    pager->copying[extent->state == TP_EXTENT_WRITING ? TP_COPY_TO_HOST : TP_COPY_TO_DEVICE]--;
}

bool tp_transfer_done(tp_pager *pager, tp_extent *extent) {
    if (!extent->copying) return true;
    if (!tp_marker_done(&pager->markers, extent->copy)) return false;
    tp_transfer_forget(pager, extent);
    return true;
}

/* Copies between the windows behind everything that has used the block, and marks the copy. A copy
 * that was queued but cannot be marked leaves its frames in doubt: the pager enters FAILED. */
static tp_status queue_copy(tp_pager *pager, tp_extent *extent, tp_copy_dir dir, bool ordered,
                            tp_error *error) {
    tp_device *dev = pager->dev;
    const tp_stream stream = dev->copy_stream[dir];
    if (ordered) {
        /* The marker of the decision stands for uses that have none of their own: operators that
         * began before the hook was armed, or ended while nobody waited for memory. */
        tp_uses *uses = &extent->block->uses;
        const tp_status status =
            tp_uses_marked(uses)
                ? tp_uses_stream_wait(&pager->markers, stream, uses, error)
                : tp_marker_stream_wait(&pager->markers, stream, extent->decided, error);
        if (status != TP_OK) return status;
    }
    const tp_status settled = tp_regions_order(pager, stream, error);
    if (settled != TP_OK) return settled;
    const tp_addr host = extent->host->window, device = extent->device->window;
    tp_status status =
        dev->ops->copy(dev, dir, dir == TP_COPY_TO_HOST ? host : device,
                       dir == TP_COPY_TO_HOST ? device : host, extent->bytes, error);
    if (status != TP_OK) return status;
    status = tp_marker_record(&pager->markers, stream, &extent->copy, error);
    if (status != TP_OK) {
        tp_pager_fail(pager, status);
        return status;
    }
    extent->copying = true;
    pager->copying[dir]++;
    return TP_OK;
}

static void put_in_flight(tp_pager *pager, tp_extent *extent) {
    if (!tp_link_in_list(&extent->inflight)) {
        tp_list_push_back(&pager->inflight, &extent->inflight);
    }
    tp_pager_wake(pager);
}

tp_status tp_transfer_write_back(tp_pager *pager, tp_extent *extent, tp_error *error) {
    TP_REQUIRE(extent->state == TP_EXTENT_DIRTY && extent->host != NULL);
    const tp_status status = queue_copy(pager, extent, TP_COPY_TO_HOST,
                                        TP_RULE(pager, TP_RULE_WRITE_BACK_ORDER), error);
    if (status != TP_OK) return status;
    extent->written = false;
    tp_extent_become(pager, extent, TP_EXTENT_WRITING);
    tp_tally_add(&pager->stats.write_backs, extent->bytes, 0);
    put_in_flight(pager, extent);
    return TP_OK;
}

tp_status tp_transfer_fill(tp_pager *pager, tp_extent *extent, tp_error *error) {
    TP_REQUIRE(extent->state == TP_EXTENT_HOST && extent->device != NULL);
    const tp_status status =
        queue_copy(pager, extent, TP_COPY_TO_DEVICE, TP_RULE(pager, TP_RULE_FILL_ORDER), error);
    if (status != TP_OK) return status;
    extent->abandon = false;
    tp_extent_become(pager, extent, TP_EXTENT_FILLING);
    tp_tally_add(&pager->stats.fills, extent->bytes, 0);
    put_in_flight(pager, extent);
    return TP_OK;
}
