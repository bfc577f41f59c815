#include "pager/fill.h"

#include "pager/extent.h"
#include "pager/park.h"
#include "pager/reclaim.h"
#include "pager/transfer.h"

bool tp_fill_allowed(const tp_block *block, uint32_t own_pins) {
    return !tp_block_fixed(block) && block->op_pins - block->waiting_pins <= own_pins;
}

static tp_frame *take_frame(tp_pager *pager, size_t bytes, bool wait) {
    /* The copy stream is the first to use the frame: what the operator's stream may have again at
     * once is not free for it. */
    const tp_stream stream = pager->dev->copy_stream[TP_COPY_TO_DEVICE];
    tp_status refused = TP_OK;
    tp_frame *frame = tp_reclaim_device_frame(pager, bytes, stream, &refused);
    if (frame == NULL && wait)
        frame = tp_reclaim_wait_frame(pager, bytes, bytes, stream, &refused);
    return frame;
}

bool tp_fill_start(tp_pager *pager, tp_block *block, uint64_t generation, tp_extent *extent,
                   uint32_t own_pins, bool wait) {
    if (pager->capture_depth > 0) return false;
    tp_frame *frame = take_frame(pager, extent->bytes, wait);
    return frame != NULL &&
           tp_fill_begin(pager, block, generation, extent, own_pins, frame, NULL);
}

bool tp_fill_begin(tp_pager *pager, tp_block *block, uint64_t generation, tp_extent *extent,
                   uint32_t own_pins, tp_frame *frame, const tp_marker *decided) {
    /* The lock was dropped: somebody else may have begun, or the block may be gone. */
    const bool wanted = block->life == TP_BLOCK_LIVE && block->generation == generation &&
                        extent->state == TP_EXTENT_HOST && !extent->busy &&
                        extent->device == NULL && tp_fill_allowed(block, own_pins) &&
                        !tp_pager_halted(pager);
    if (!wanted) {
        tp_frame_pool_put(&pager->device_frames, frame);
        return true;
    }
    if (block->parking != NULL) tp_park_give_up(pager, block); /* somebody wants it there */
    extent->device = frame;
    if (decided != NULL) {
        extent->decided = *decided;
    } else if (tp_marker_record_context(&pager->markers, &extent->decided, NULL) != TP_OK) {
        extent->device = NULL;
        tp_frame_pool_put(&pager->device_frames, frame);
        return false;
    }
    tp_list_push_back(&pager->inflight, &extent->inflight);
    if (own_pins > 0) tp_fill_hurry(pager, extent);
    (void)tp_fill_step(pager, extent, own_pins);
    tp_pager_wake(pager);
    return true;
}

bool tp_fill_queued(const tp_extent *extent) {
    return extent->state == TP_EXTENT_HOST && extent->device != NULL;
}

void tp_fill_call_off(tp_pager *pager, tp_extent *extent) {
    tp_frame_pool_put(&pager->device_frames, extent->device);
    extent->device = NULL;
    tp_list_remove(&extent->inflight);
    tp_cond_broadcast(&pager->changed);
}

void tp_fill_hurry(tp_pager *pager, tp_extent *extent) {
    tp_list_remove(&extent->inflight);
    tp_list_push_front(&pager->inflight, &extent->inflight);
}

bool tp_fill_step(tp_pager *pager, tp_extent *extent, uint32_t own_pins) {
    if (!tp_fill_allowed(extent->block, own_pins)) return false;
    if (!tp_transfer_room(pager, TP_COPY_TO_DEVICE)) return false;
    if (tp_transfer_fill(pager, extent, NULL) != TP_OK && pager->failed == TP_OK) {
        tp_fill_call_off(pager, extent);
    }
    return true;
}
