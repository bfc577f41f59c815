#include "pager/verify.h"

#include "pager/drop.h"
#include "pager/pager.h"

enum { WORD = 16 }; /* a fingerprint is of so many bytes at a time */
/* Half of the places are for what goes and half for what comes back: where the device is far behind,
 * what goes would take them all, and nothing would be compared. */
enum { HALF = TP_VERIFY_PLACES / 2 };

/* What was asked for; behind it the block's bytes are nobody's. */
static size_t looked_at(const tp_block *block) { return block->requested_bytes / WORD * WORD; }

static bool all_mapped(const tp_block *block) {
    for (uint32_t i = 0; i < block->extent_count; i++) {
        if (block->extents[i].mapped == NULL || block->extents[i].busy) return false;
    }
    return true;
}

static uint8_t place_find(tp_pager *pager, bool back) {
    const uint32_t first = back ? HALF : 0;
    for (uint32_t i = first; i < first + HALF; i++) {
        tp_verify_place *place = &pager->verify.places[i];
        if (place->taken || !tp_marker_done(&pager->markers, place->computed)) continue;
        place->taken = true;
        return (uint8_t)(i + 1);
    }
    return 0;
}

static void place_give(tp_pager *pager, uint8_t place) {
    if (place != 0) pager->verify.places[place - 1].taken = false;
}

static bool is_computed(tp_pager *pager, uint8_t place) {
    return tp_marker_done(&pager->markers, pager->verify.places[place - 1].computed);
}

static tp_fingerprint result_of(tp_pager *pager, uint8_t place) {
    return pager->dev->ops->fingerprint_read(pager->dev, TP_PLACES + place - 1u);
}

/* False: the expected one is not there yet. */
static bool is_known(tp_pager *pager, tp_print *print) {
    if (print->known) return true;
    if (print->place == 0 || !is_computed(pager, print->place)) return false;
    print->print = result_of(pager, print->place);
    print->known = true;
    place_give(pager, print->place);
    print->place = 0;
    return true;
}

/* 1 + a place; 0: none is free. Those of blocks that are dropped are free once they are read. */
static uint8_t place_take(tp_pager *pager, bool back) {
    const uint8_t place = place_find(pager, back);
    if (place != 0 || back) return place;
    tp_markers_look(&pager->markers);
    for (tp_link *link = pager->dropped.next; link != &pager->dropped; link = link->next) {
        (void)is_known(pager, &TP_CONTAINER(link, tp_dropped, link)->print);
    }
    tp_markers_look_away(&pager->markers);
    return place_find(pager, false);
}

/* 1 + the place where the fingerprint will be, of the block as the stream finds it then. */
static uint8_t compute(tp_pager *pager, tp_block *block, tp_stream stream, bool back) {
    if (!pager->dev->caps.fingerprints || pager->capture_depth > 0) return 0;
    const uint8_t place = place_take(pager, back);
    if (place == 0) return 0;
    tp_verify_place *its = &pager->verify.places[place - 1];
    /* Not every use has a marker. */
    tp_status status = tp_uses_marked(&block->uses)
                           ? TP_OK
                           : tp_uses_refresh(&pager->markers, &block->uses, NULL);
    if (status == TP_OK) {
        status = tp_uses_stream_wait(&pager->markers, stream, &block->uses, NULL);
    }
    if (status == TP_OK) {
        status = pager->dev->ops->fingerprint(pager->dev, stream, block->addr, looked_at(block),
                                              TP_PLACES + place - 1u, NULL);
    }
    if (status == TP_OK) {
        tp_tally_add(&pager->stats.fingerprints, block->requested_bytes, 0);
        status = tp_marker_record(&pager->markers, stream, &its->computed, NULL);
        /* It may be in flight for ever: the block's memory is in doubt. */
        if (status != TP_OK) tp_pager_fail(pager, status);
    }
    if (status == TP_OK) {
        status = tp_uses_add(&pager->markers, &block->uses, its->computed, true, NULL);
        if (status != TP_OK) tp_uses_lose(&block->uses);
        return place;
    }
    place_give(pager, place);
    return 0;
}

static tp_fingerprint compute_now(const tp_block *block) {
    return tp_fingerprint_of((const void *)(uintptr_t)block->addr, looked_at(block));
}

void tp_verify_dropped(tp_pager *pager, tp_block *block, tp_stream stream, tp_print *out) {
    *out = (tp_print){0};
    if (looked_at(block) == 0 || !all_mapped(block)) return;
    if (pager->host_kernels) {
        out->print = compute_now(block);
        out->known = true;
    } else {
        out->place = compute(pager, block, stream, false);
    }
}

void tp_verify_forget(tp_pager *pager, const tp_print *print) {
    place_give(pager, print->place);
}

static void compare(tp_pager *pager, tp_fingerprint expected, tp_fingerprint found) {
    if (tp_fingerprint_same(expected, found)) return;
    pager->stats.wrong_reruns++;
    tp_pager_fail(pager, TP_NOT_THE_SAME);
}

static tp_check *check_find(tp_verify *verify) {
    for (uint32_t i = 0; i < TP_VERIFY_PLACES; i++) {
        if (verify->checks[i].place == 0) return &verify->checks[i];
    }
    return NULL;
}

void tp_verify_back(tp_pager *pager, tp_block *block, tp_stream stream,
                    const tp_print *expected) {
    const bool can = (expected->known || expected->place != 0) && all_mapped(block);
    if (can && pager->host_kernels) {
        compare(pager, expected->print, compute_now(block));
        return;
    }
    tp_check *check = can ? check_find(&pager->verify) : NULL;
    const uint8_t place = check != NULL ? compute(pager, block, stream, true) : 0;
    if (place == 0) {
        pager->stats.unverified_reruns++;
        tp_verify_forget(pager, expected);
        return;
    }
    *check = (tp_check){*expected, place};
    pager->verify.check_count++;
}

void tp_verify_poll(tp_pager *pager) {
    tp_verify *verify = &pager->verify;
    if (verify->check_count == 0) return;
    tp_markers_look(&pager->markers);
    for (uint32_t i = 0; verify->check_count > 0 && i < TP_VERIFY_PLACES; i++) {
        tp_check *check = &verify->checks[i];
        if (check->place == 0 || !is_known(pager, &check->expected)) continue;
        if (!is_computed(pager, check->place)) continue;
        const tp_fingerprint found = result_of(pager, check->place);
        place_give(pager, check->place);
        check->place = 0;
        verify->check_count--;
        compare(pager, check->expected.print, found);
    }
    tp_markers_look_away(&pager->markers);
}
