#include "pager/evict.h"

#include "base/check.h"
#include "pager/extent.h"
#include "pager/fill.h"
#include "pager/park.h"
#include "pager/proof.h"
#include "pager/reclaim.h"
#include "pager/transfer.h"

bool tp_evict_blocked(const tp_pager *pager, const tp_extent *extent) {
    const tp_block *block = extent->block;
    if (TP_RULE(pager, TP_RULE_GATE) && tp_pager_gate_closed(pager)) return true;
    if (!TP_RULE(pager, TP_RULE_PIN)) return false;
    /* Threads that wait for a fill launch nothing; nobody waits for an eviction of a pinned block. */
    const bool fill = extent->state == TP_EXTENT_FILLING || tp_fill_queued(extent);
    return block->op_pins != (fill ? block->waiting_pins : 0) || tp_block_fixed(block);
}

static bool may_remap(tp_pager *pager, const tp_extent *extent) {
    if (extent->busy || tp_evict_blocked(pager, extent)) return false;
    /* A region may have launched kernels after the decision. */
    if (TP_RULE(pager, TP_RULE_GATE) && !tp_marker_done(&pager->markers, pager->region_end)) {
        return false;
    }
    return !TP_RULE(pager, TP_RULE_CONTEXT_MARKER) ||
           tp_marker_done(&pager->markers, extent->decided);
}

/* Replaces what the address maps by `to` (NULL: nothing); the time it took is added to `tally`. Drops the lock. When the new mapping
 * fails, the old one is put back; when that fails too, contents cannot be reached: FAILED. */
static tp_status remap(tp_pager *pager, tp_extent *extent, tp_frame *to, tp_tally *tally) {
    tp_device *dev = pager->dev;
    tp_frame *from = extent->mapped;
    extent->busy = true;
    pager->remapping = true;
    const uint64_t began = tp_pager_now(pager);
    tp_markers_look_away(&pager->markers);
    tp_lock_drop(&pager->lock);
    tp_status status = TP_OK;
    if (from != NULL) status = dev->ops->unmap(dev, extent->addr, extent->bytes, NULL);
    const bool unmapped = status == TP_OK;
    if (unmapped && to != NULL) {
        status = dev->ops->map(dev, extent->addr, extent->bytes, to->handle, NULL);
    }
    tp_status back = TP_OK;
    if (unmapped && status != TP_OK && from != NULL) {
        back = dev->ops->map(dev, extent->addr, extent->bytes, from->handle, NULL);
    }
    tp_lock_take(&pager->lock);
    extent->busy = false;
    pager->remapping = false;
    tp_cond_broadcast(&pager->changed);
    if (back != TP_OK) {
        from->map_count--;
        extent->mapped = NULL;
        tp_pager_fail(pager, back);
    }
    if (unmapped) extent->guarded = false; /* mapped anew, also when it was mapped back */
    if (status != TP_OK) return status;
    if (from != NULL) from->map_count--;
    if (to != NULL) to->map_count++;
    extent->mapped = to;
    tally->ns += tp_pager_now(pager) - began;
    return TP_OK;
}

/* While a fingerprint of its frame is being computed it stays: the frame may not go yet. */
static void leave_flight(tp_pager *pager, tp_extent *extent) {
    extent->differed = false;
    if (tp_proof_drop(pager, extent)) tp_list_remove(&extent->inflight);
}

/* Calls the eviction off: the extent stays resident. */
static void give_up(tp_pager *pager, tp_extent *extent) {
    extent->evict = extent->write_back = false;
    if (extent->block->parking != NULL) tp_park_give_up(pager, extent->block);
    if (extent->state == TP_EXTENT_DIRTY) tp_extent_drop_host(pager, extent);
    leave_flight(pager, extent);
    tp_cond_broadcast(&pager->changed);
}

/* The device refused a step. Too many in a row, and evictions pause: who waits for memory would wait
 * for ever. */
static void set_back(tp_pager *pager) {
    pager->setback_count++;
    pager->setback_ns = tp_pager_now(pager);
}

static bool wanted_in_host(const tp_extent *extent) {
    return extent->evict || extent->write_back;
}

/* Making a host frame takes milliseconds, with the lock dropped; meanwhile operators may use the
 * block and it may be freed (`held` keeps it from retiring), so the frame is attached only if the
 * eviction still stands. False: it does not. */
static bool attach_host_frame(tp_pager *pager, tp_extent *extent) {
    extent->held = true;
    tp_markers_look_away(&pager->markers);
    tp_frame *frame = tp_reclaim_host_frame(pager, extent->bytes);
    extent->held = false;
    if (frame == NULL) return false;
    const bool stands = wanted_in_host(extent) && extent->state == TP_EXTENT_DIRTY &&
                        extent->host == NULL && extent->block->life == TP_BLOCK_LIVE;
    if (!stands) {
        tp_frame_pool_put(&pager->host_frames, frame);
        return false;
    }
    extent->host = frame;
    return true;
}

static bool begin_write_back(tp_pager *pager, tp_extent *extent) {
    if (!wanted_in_host(extent)) {
        give_up(pager, extent);
    } else if (TP_RULE(pager, TP_RULE_PIN) && extent->block->op_pins > 0) {
        return false; /* an operator in progress may write it, with kernels yet to come */
    } else if (extent->host == NULL && !attach_host_frame(pager, extent)) {
        give_up(pager, extent);
    } else if (!tp_transfer_room(pager, TP_COPY_TO_HOST)) {
        return false;
    } else if (tp_transfer_write_back(pager, extent, NULL) != TP_OK && pager->failed == TP_OK) {
        set_back(pager);
        give_up(pager, extent);
    }
    return true;
}

static bool end_write_back(tp_pager *pager, tp_extent *extent) {
    if (!tp_transfer_done(pager, extent)) return false;
    if (extent->written && TP_RULE(pager, TP_RULE_WRITTEN_MEANWHILE)) {
        tp_extent_become(pager, extent, TP_EXTENT_DIRTY);
        give_up(pager, extent);
        return true;
    }
    tp_proof_end_copy(pager, extent);
    tp_extent_become(pager, extent, TP_EXTENT_CLEAN);
    extent->write_back = false;
    if (extent->block->life != TP_BLOCK_LIVE) {
        tp_extent_become(pager, extent, TP_EXTENT_DIRTY);
        give_up(pager, extent);
    }
    return true;
}

static void note_unseen_write(tp_pager *pager, const tp_extent *extent) {
    tp_tally_add(&pager->stats.unseen_writes, extent->bytes, 0);
    if (pager->stats.unseen_addr != 0) return;
    pager->stats.unseen_addr = extent->block->addr;
    pager->stats.unseen_bytes = extent->block->requested_bytes;
}

/* The host frame does not hold, or is not known to hold, what the device frame holds: it is written
 * again, and the eviction goes on. Found so twice in a row, somebody is writing all the time: the
 * block is not to be had now. */
static void write_back_again(tp_pager *pager, tp_extent *extent, bool unseen_write) {
    tp_block *block = extent->block;
    tp_extent_become(pager, extent, TP_EXTENT_DIRTY);
    if (!unseen_write) {
        tp_tally_add(&pager->stats.unproven, extent->bytes, 0);
        return;
    }
    note_unseen_write(pager, extent);
    if (extent->differed && block->life == TP_BLOCK_LIVE) {
        tp_list_remove(&block->lru);
        tp_list_push_back(&pager->live, &block->lru);
        give_up(pager, extent);
    } else {
        extent->differed = true;
    }
}

/* Whether the eviction of a CLEAN extent needs no copy. Else *moved says whether anything changed. */
static bool proven(tp_pager *pager, tp_extent *extent, bool *moved) {
    *moved = true;
    switch (tp_proof_step(pager, extent)) {
    case TP_PROOF_HOLDS: return true;
    case TP_PROOF_WAIT: *moved = false; break;
    case TP_PROOF_BEGUN: break;
    case TP_PROOF_REFUSED:
        set_back(pager);
        give_up(pager, extent);
        break;
    case TP_PROOF_MISSING: write_back_again(pager, extent, false); break;
    case TP_PROOF_DIFFERS: write_back_again(pager, extent, true); break;
    }
    return false;
}

static bool evict(tp_pager *pager, tp_extent *extent) {
    if (!extent->evict) {
        if (extent->block->parking != NULL) tp_park_give_up(pager, extent->block);
        leave_flight(pager, extent);
        return !tp_link_in_list(&extent->inflight);
    }
    const bool parking = extent->block->parking != NULL;
    /* The driver lets one thread at a time change mappings, and a host frame takes it a millisecond:
     * an allocation does not wait behind evictions if it can be helped. */
    if (extent->parked || (pager->mapping_count > 0 && !parking)) return false;
    if (!may_remap(pager, extent)) return false;
    bool moved = false;
    if (!proven(pager, extent, &moved)) return moved;
    if (parking) {
        tp_park_extent(pager, extent);
        return true;
    }
    if (remap(pager, extent, pager->strict ? NULL : extent->host, &pager->stats.evictions) !=
        TP_OK) {
        set_back(pager);
        give_up(pager, extent);
        return true;
    }
    tp_frame *frame = extent->device;
    extent->device = NULL;
    tp_extent_become(pager, extent, TP_EXTENT_HOST);
    tp_frame_pool_put(&pager->device_frames, frame);
    tp_tally_add(&pager->stats.evictions, extent->bytes, 0);
    extent->block->evicted_count++;
    pager->setback_count = 0;
    tp_readahead_forget(pager, extent->block);
    extent->evict = false;
    leave_flight(pager, extent);
    return true;
}

static bool fill_ended(tp_pager *pager, tp_extent *extent) {
    return tp_transfer_done(pager, extent) || !TP_RULE(pager, TP_RULE_FILL_COMPLETE);
}

static bool end_fill(tp_pager *pager, tp_extent *extent) {
    if (!fill_ended(pager, extent)) return false;
    tp_transfer_forget(pager, extent);
    const bool unwanted = extent->abandon || extent->block->life != TP_BLOCK_LIVE;
    if (!unwanted) {
        /* It may wait for a pin of the operator that is still gathering memory for its other
         * operands: the place is wanted for the write-backs that this memory comes from. */
        tp_proof_end_copy(pager, extent);
        if (!may_remap(pager, extent)) return false;
        if (remap(pager, extent, extent->device, &pager->stats.fills) == TP_OK) {
            tp_extent_become(pager, extent, TP_EXTENT_CLEAN);
            leave_flight(pager, extent);
            return true;
        }
    }
    tp_frame *frame = extent->device;
    extent->device = NULL;
    extent->abandon = false;
    tp_extent_become(pager, extent, TP_EXTENT_HOST);
    tp_proof_forget(pager, extent);
    leave_flight(pager, extent);
    tp_frame_pool_put(&pager->device_frames, frame);
    tp_cond_broadcast(&pager->changed);
    return true;
}

/* States in which a fingerprint on its way is of no use any more: called off, freed, written. */
static bool unwanted_proof(const tp_extent *extent) {
    if (extent->place == 0) return false;
    return extent->state == TP_EXTENT_DIRTY || extent->state == TP_EXTENT_EMPTY ||
           extent->state == TP_EXTENT_HOST;
}

static bool step(tp_pager *pager, tp_extent *extent) {
    if (extent->busy) return false;
    if (unwanted_proof(extent) && !tp_proof_drop(pager, extent)) return false;
    switch (extent->state) {
    case TP_EXTENT_DIRTY: return begin_write_back(pager, extent);
    case TP_EXTENT_WRITING: return end_write_back(pager, extent);
    case TP_EXTENT_CLEAN: return evict(pager, extent);
    case TP_EXTENT_FILLING: return end_fill(pager, extent);
    case TP_EXTENT_HOST:
        if (tp_fill_queued(extent)) return tp_fill_step(pager, extent, 0);
        break;
    case TP_EXTENT_EMPTY:
    case TP_EXTENT_STATE_COUNT: break;
    }
    extent->evict = extent->write_back = false;
    leave_flight(pager, extent);
    return true;
}

static bool is_leaving(const tp_extent *extent) {
    return extent->state == TP_EXTENT_CLEAN && extent->evict;
}

/* One step of the first that can make one. */
static bool step_one(tp_pager *pager, bool leaving, bool others) {
    for (tp_link *link = pager->inflight.next; link != &pager->inflight; link = link->next) {
        tp_extent *extent = TP_CONTAINER(link, tp_extent, inflight);
        if (!(is_leaving(extent) ? leaving : others)) continue;
        if (step(pager, extent)) return true; /* the link may be gone */
    }
    return false;
}

/* An eviction takes the driver about as long as a copy takes the link: while nobody waits for memory, what
 * is filled and what keeps the link busy comes first. */
bool tp_evict_step(tp_pager *pager) {
    tp_markers_look(&pager->markers);
    const bool moved = tp_ticket_taken(pager)
                           ? step_one(pager, true, true)
                           : step_one(pager, false, true) || step_one(pager, true, false);
    tp_markers_look_away(&pager->markers);
    return moved;
}
