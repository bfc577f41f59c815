#include "pager/proof.h"

#include "base/check.h"

/* The first places are for copies, so that these never wait for checks: two in each direction, and fills that
 * wait to be mapped. The rest are few, so that a check is not old when its extent's turn to be remapped
 * comes. */
enum { COPY_PLACES = 8 };

static bool in_force(const tp_pager *pager) { return TP_RULE(pager, TP_RULE_FINGERPRINT); }

static bool computed(const tp_pager *pager) {
    return in_force(pager) && pager->dev->caps.fingerprints;
}

bool tp_proof_before_copies(const tp_pager *pager) { return computed(pager); }

bool tp_proof_by_copying(const tp_pager *pager) {
    return in_force(pager) && !pager->dev->caps.fingerprints;
}

/* ---- places -------------------------------------------------------------------------------------- */

static tp_place *place_of(tp_pager *pager, const tp_extent *extent) {
    return &pager->places[extent->place - 1];
}

/* A place that nobody needs any more is free once the device has left it. */
static uint8_t place_find(tp_pager *pager, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++) {
        tp_place *place = &pager->places[i];
        if (!place->taken && tp_marker_done(&pager->markers, place->computed)) {
            return (uint8_t)(i + 1);
        }
    }
    return 0;
}

static tp_status compute(tp_pager *pager, tp_extent *extent, uint8_t place, tp_stream stream,
                         tp_error *error) {
    tp_device *dev = pager->dev;
    const tp_status status = dev->ops->fingerprint(dev, stream, extent->device->window,
                                                   extent->bytes, place - 1u, error);
    if (status != TP_OK) return status;
    extent->place = place;
    *place_of(pager, extent) = (tp_place){.taken = true};
    tp_tally_add(&pager->stats.fingerprints, extent->bytes, 0);
    return TP_OK;
}

void tp_proof_forget(tp_pager *pager, tp_extent *extent) {
    if (extent->place == 0) return;
    place_of(pager, extent)->taken = false;
    extent->place = 0;
}

bool tp_proof_drop(tp_pager *pager, tp_extent *extent) {
    if (extent->place == 0) return true;
    if (!tp_marker_done(&pager->markers, place_of(pager, extent)->computed)) return false;
    tp_proof_forget(pager, extent);
    return true;
}

static tp_fingerprint take_result(tp_pager *pager, tp_extent *extent) {
    const tp_fingerprint found =
        pager->dev->ops->fingerprint_read(pager->dev, extent->place - 1u);
    tp_proof_forget(pager, extent);
    return found;
}

/* ---- with copies ------------------------------------------------------------------------------- */

bool tp_proof_room(tp_pager *pager) {
    return !computed(pager) || place_find(pager, 0, COPY_PLACES) != 0;
}

tp_status tp_proof_with_copy(tp_pager *pager, tp_extent *extent, tp_stream stream,
                             tp_error *error) {
    const uint8_t place = computed(pager) ? place_find(pager, 0, COPY_PLACES) : 0;
    return place == 0 ? TP_OK : compute(pager, extent, place, stream, error);
}

void tp_proof_mark_copy(tp_pager *pager, const tp_extent *extent, tp_marker copy) {
    if (extent->place != 0) place_of(pager, extent)->computed = copy;
}

void tp_proof_end_copy(tp_pager *pager, tp_extent *extent) {
    if (extent->place == 0) return;
    extent->print = take_result(pager, extent);
    extent->printed = true;
}

/* ---- before an eviction ------------------------------------------------------------------------ */

static bool same_marker(tp_marker a, tp_marker b) { return a.lane == b.lane && a.seq == b.seq; }

static tp_proof begin_check(tp_pager *pager, tp_extent *extent) {
    const uint8_t place = place_find(pager, COPY_PLACES, TP_PLACES);
    if (place == 0) return TP_PROOF_WAIT;
    const tp_stream stream = pager->dev->check_stream;
    if (compute(pager, extent, place, stream, NULL) != TP_OK) return TP_PROOF_REFUSED;
    tp_place *taken = place_of(pager, extent);
    taken->decided = extent->decided;
    taken->region_end = pager->region_end;
    const tp_status status = tp_marker_record(&pager->markers, stream, &taken->computed, NULL);
    if (status != TP_OK) {
        /* It may be in flight for ever: its frame, and the place, are in doubt. */
        tp_pager_fail(pager, status);
        return TP_PROOF_WAIT;
    }
    return TP_PROOF_BEGUN;
}

/* A check, or a copy, counts for the decision it was made for, and not when a region has been open
 * since, whose kernels may have written. */
static bool still_counts(const tp_pager *pager, const tp_extent *extent, tp_marker decided,
                         tp_marker region_end) {
    return same_marker(decided, extent->decided) && same_marker(region_end, pager->region_end);
}

tp_proof tp_proof_step(tp_pager *pager, tp_extent *extent) {
    TP_REQUIRE(extent->state == TP_EXTENT_CLEAN && extent->evict);
    if (!in_force(pager)) return TP_PROOF_HOLDS;
    if (tp_proof_by_copying(pager)) {
        const bool copied =
            still_counts(pager, extent, extent->copied_behind, extent->copied_region);
        return copied ? TP_PROOF_HOLDS : TP_PROOF_MISSING;
    }
    if (extent->place == 0) {
        return extent->printed ? begin_check(pager, extent) : TP_PROOF_MISSING;
    }
    const tp_place place = *place_of(pager, extent);
    if (!tp_marker_done(&pager->markers, place.computed)) return TP_PROOF_WAIT;
    const tp_fingerprint found = take_result(pager, extent);
    if (!still_counts(pager, extent, place.decided, place.region_end)) {
        return begin_check(pager, extent);
    }
    return tp_fingerprint_same(found, extent->print) ? TP_PROOF_HOLDS : TP_PROOF_DIFFERS;
}
