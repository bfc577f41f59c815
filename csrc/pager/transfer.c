#include "pager/transfer.h"

#include "base/check.h"
#include "pager/extent.h"
#include "pager/proof.h"
#include "pager/region.h"

enum { COPIES_MAX = 2 }; /* in each direction: one runs, one is ready behind it */

bool tp_transfer_room(tp_pager *pager, tp_copy_dir dir) {
    /* A copy that must wait for a region's kernels needs a marker that a capture does not allow. */
    if (pager->capture_depth > 0 && tp_pager_gate_closed(pager)) return false;
    return pager->copying[dir] < COPIES_MAX && tp_proof_room(pager);
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

/* Makes what is queued on `stream` next wait, on the device, for everything that has used the block. */
static tp_status order_copy(tp_pager *pager, tp_extent *extent, tp_copy_dir dir,
                            tp_stream stream, tp_error *error) {
    /* The marker of the decision stands for uses that have none of their own: operators that
     * began before the hook was armed, or ended while nobody waited for memory. Without
     * fingerprints it also stands for what nobody has announced. */
    tp_block *block = extent->block;
    tp_uses *uses = &block->uses;
    const bool marked = tp_uses_marked(uses);
    tp_status status = TP_OK;
    /* A write-back need not wait for what has read the block since it was wanted; what has written it since
     * has taken the wish back. */
    if (dir == TP_COPY_TO_HOST && extent->write_back && extent->wanted_stamp != block->stamp &&
        !tp_proof_by_copying(pager))
        return tp_marker_stream_wait(&pager->markers, stream, extent->wanted, error);
    if (marked) status = tp_uses_stream_wait(&pager->markers, stream, uses, error);
    if (!marked || (dir == TP_COPY_TO_HOST && tp_proof_by_copying(pager))) {
        if (status == TP_OK) {
            status = tp_marker_stream_wait(&pager->markers, stream, extent->decided, error);
        }
    }
    return status;
}

/* Where a copy's waits are queued: a write-back's before its fingerprint. */
static tp_stream first_stream(const tp_pager *pager, tp_copy_dir dir) {
    const tp_device *dev = pager->dev;
    const bool printed = dir == TP_COPY_TO_HOST && tp_proof_before_copies(pager);
    return printed ? dev->print_stream : dev->copy_stream[dir];
}

/* The fingerprint of what is written back: while the copy before it runs, and before its own begins. */
static tp_status print_first(tp_pager *pager, tp_extent *extent, tp_error *error) {
    if (!tp_proof_before_copies(pager)) return TP_OK;
    tp_device *dev = pager->dev;
    tp_status status = tp_proof_with_copy(pager, extent, dev->print_stream, error);
    if (status != TP_OK) return status;
    tp_marker printed = {0}; /* and behind what the copy must wait for */
    status = tp_marker_record(&pager->markers, dev->print_stream, &printed, error);
    if (status != TP_OK) {
        tp_pager_fail(pager, status); /* its frame is in doubt */
        return status;
    }
    tp_proof_mark_copy(pager, extent, printed);
    return tp_marker_stream_wait(&pager->markers, dev->copy_stream[TP_COPY_TO_HOST], printed,
                                 error);
}

/* Copies between the windows, with the fingerprint that goes with it: before what is written back,
 * behind what is filled (proof.h). */
static tp_status copy_with_proof(tp_pager *pager, tp_extent *extent, tp_copy_dir dir,
                                 tp_error *error) {
    tp_device *dev = pager->dev;
    const tp_addr host = extent->host->window, device = extent->device->window;
    if (dir == TP_COPY_TO_HOST) {
        const tp_status status = print_first(pager, extent, error);
        return status == TP_OK ? dev->ops->copy(dev, dir, host, device, extent->bytes, error)
                               : status;
    }
    const tp_status status = dev->ops->copy(dev, dir, device, host, extent->bytes, error);
    if (status != TP_OK || extent->printed) return status;
    const tp_status printed = tp_proof_with_copy(pager, extent, dev->copy_stream[dir], NULL);
    (void)printed; /* without one the extent is written back again before it is evicted */
    return TP_OK;
}

/* Queues a copy and marks it. What was queued but cannot be marked leaves its frames in doubt: the
 * pager enters FAILED. */
static tp_status queue_copy(tp_pager *pager, tp_extent *extent, tp_copy_dir dir, bool ordered,
                            tp_error *error) {
    TP_REQUIRE(extent->place == 0);
    const tp_stream first = first_stream(pager, dir);
    tp_status status = ordered ? order_copy(pager, extent, dir, first, error) : TP_OK;
    if (status == TP_OK) status = tp_regions_order(pager, first, error);
    if (status != TP_OK) return status;
    const tp_status copied = copy_with_proof(pager, extent, dir, error);
    if (copied != TP_OK)
        return copied; /* the fingerprint alone may be in flight, and is marked */
    status =
        tp_marker_record(&pager->markers, pager->dev->copy_stream[dir], &extent->copy, error);
    if (status != TP_OK) {
        tp_pager_fail(pager, status);
        return status;
    }
    tp_proof_mark_copy(pager, extent, extent->copy);
    extent->copying = true;
    pager->copying[dir]++;
    return TP_OK;
}

static void put_in_flight(tp_pager *pager, tp_extent *extent) {
    tp_extent_list(pager, extent);
    tp_pager_wake(pager);
}

tp_status tp_transfer_write_back(tp_pager *pager, tp_extent *extent, tp_error *error) {
    TP_REQUIRE(extent->state == TP_EXTENT_DIRTY && extent->host != NULL);
    const tp_status status = queue_copy(pager, extent, TP_COPY_TO_HOST,
                                        TP_RULE(pager, TP_RULE_WRITE_BACK_ORDER), error);
    if (status != TP_OK) return status;
    extent->written = false;
    extent->copied_behind = extent->decided;
    extent->copied_region = pager->region_end;
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
