#include "pager/transfer.h"

#include "base/check.h"
#include "pager/extent.h"

/* Copies between the windows behind everything that has used the block, and marks the copy. A copy
 * that was queued but cannot be marked leaves its frames in doubt: the pager enters FAILED. */
static tp_status queue_copy(tp_pager *pager, tp_extent *extent, tp_copy_dir dir, bool ordered,
                            tp_error *error) {
    tp_device *dev = pager->dev;
    const tp_stream stream = dev->copy_stream[dir];
    if (ordered) {
        const tp_status status =
            tp_uses_stream_wait(&pager->markers, stream, &extent->block->uses, error);
        if (status != TP_OK) return status;
    }
    const tp_addr host = extent->host->window, device = extent->device->window;
    tp_status status = dev->ops->copy(dev, dir, dir == TP_COPY_TO_HOST ? host : device,
                                      dir == TP_COPY_TO_HOST ? device : host, extent->bytes, error);
    if (status != TP_OK) return status;
    status = tp_marker_record(&pager->markers, stream, &extent->copy, error);
    if (status != TP_OK) tp_pager_fail(pager, status);
    return status;
}

/* Somebody waits for a fill, nobody for one write-back in particular: fills go first. */
static void put_in_flight(tp_pager *pager, tp_extent *extent, bool first) {
    tp_list_remove(&extent->inflight);
    if (first) {
        tp_list_push_front(&pager->inflight, &extent->inflight);
    } else {
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
    put_in_flight(pager, extent, false);
    return TP_OK;
}

tp_status tp_transfer_fill(tp_pager *pager, tp_extent *extent, tp_error *error) {
    TP_REQUIRE(extent->state == TP_EXTENT_HOST && extent->device != NULL);
    const tp_status status = queue_copy(pager, extent, TP_COPY_TO_DEVICE,
                                        TP_RULE(pager, TP_RULE_FILL_ORDER), error);
    if (status != TP_OK) return status;
    extent->abandon = false;
    tp_extent_become(pager, extent, TP_EXTENT_FILLING);
    tp_tally_add(&pager->stats.fills, extent->bytes, 0);
    put_in_flight(pager, extent, true);
    return TP_OK;
}
