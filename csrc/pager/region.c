#include "pager/region.h"

#include <stdlib.h>

#include "base/check.h"
#include "pager/access.h"
#include "pager/extent.h"

enum { WAIT_NS = 1000000 };

struct tp_region_note {
    tp_block *block;
    uint64_t generation;
};

static bool closes(const tp_region *region) {
    return region->lift_count == 0 && !region->standing;
}

static tp_region *next_of(const tp_pager *pager, tp_link *link) {
    return link->next == &pager->regions ? NULL : TP_CONTAINER(link->next, tp_region, link);
}

static tp_region *first_of(tp_pager *pager) { return next_of(pager, &pager->regions); }

/* A mapping that was being changed when the gate closed is in place before kernels are launched. */
static void await_remaps(tp_pager *pager) {
    while (pager->remapping) tp_pager_wait_closed(pager, WAIT_NS);
}

/* ---- what a region uses ------------------------------------------------------------------------ */

static bool note_holds(const struct tp_region_note *note) {
    return note->block->generation == note->generation && note->block->life == TP_BLOCK_LIVE;
}

static void forget_gone(tp_region *region) {
    uint32_t kept = 0;
    for (uint32_t i = 0; i < region->note_count; i++) {
        if (note_holds(&region->notes[i])) region->notes[kept++] = region->notes[i];
    }
    region->note_count = kept;
}

static bool notes_reserve(tp_region *region) {
    if (region->note_count < region->note_capacity) return true;
    forget_gone(region);
    if (region->note_count < region->note_capacity - region->note_capacity / 4) return true;
    const uint32_t capacity = region->note_capacity == 0 ? 16 : region->note_capacity * 2;
    struct tp_region_note *notes = realloc(region->notes, capacity * sizeof *notes);
    if (notes == NULL) return false;
    region->notes = notes;
    region->note_capacity = capacity;
    return true;
}

static void note(tp_pager *pager, tp_region *region, tp_block *block) {
    if (!notes_reserve(region)) {
        tp_access_lose_use(pager, block); /* without host memory: it never moves */
        return;
    }
    region->notes[region->note_count++] = (struct tp_region_note){block, block->generation};
}

void tp_regions_note(tp_pager *pager, tp_block *block) {
    if (tp_list_empty(&pager->regions)) return;
    const uint64_t thread = tp_this_thread();
    for (tp_region *region = first_of(pager); region != NULL;
         region = next_of(pager, &region->link)) {
        if (region->thread == thread && region->lift_count == 0) note(pager, region, block);
    }
}

/* What the region's kernels may have written: copies made meanwhile are not what they seem. */
static void mark_written(tp_pager *pager, tp_region *region) {
    if (!TP_RULE(pager, TP_RULE_REGION_WRITES)) return;
    forget_gone(region);
    for (uint32_t i = 0; i < region->note_count; i++) {
        tp_block *block = region->notes[i].block;
        for (uint32_t k = 0; k < block->extent_count; k++) {
            tp_extent *extent = &block->extents[k];
            if (extent->busy) continue;
            tp_extent_mark_written(pager, extent);
            if (extent->state == TP_EXTENT_FILLING) extent->abandon = true;
        }
    }
}

/* ---- the gate ---------------------------------------------------------------------------------- */

static void close_gate(tp_pager *pager) { pager->region_depth++; }

static void open_gate(tp_pager *pager) {
    TP_REQUIRE(pager->region_depth > 0);
    pager->region_depth--;
    tp_pager_wake(pager);
    tp_cond_broadcast(&pager->changed);
}

static bool own_closed(const tp_region *region, uint64_t thread) {
    return region->thread == thread && closes(region);
}

static bool any_own_closed(tp_pager *pager, uint64_t thread) {
    for (tp_region *region = first_of(pager); region != NULL;
         region = next_of(pager, &region->link)) {
        if (own_closed(region, thread)) return true;
    }
    return false;
}

void tp_regions_stand(tp_pager *pager) {
    if (tp_list_empty(&pager->regions)) return;
    const uint64_t thread = tp_this_thread();
    if (!any_own_closed(pager, thread)) return;
    /* Where no marker can be recorded now, the gate stays closed until one is. */
    if (TP_RULE(pager, TP_RULE_REGION_WAIT)) tp_pager_mark_region_end(pager);
    for (tp_region *region = first_of(pager); region != NULL;
         region = next_of(pager, &region->link)) {
        if (!own_closed(region, thread)) continue;
        mark_written(pager, region);
        region->standing = true;
        pager->standing_count++;
        pager->stats.region_waits++;
        open_gate(pager);
    }
}

void tp_regions_go(tp_pager *pager) {
    if (pager->standing_count == 0) return;
    const uint64_t thread = tp_this_thread();
    bool closed = false;
    for (tp_region *region = first_of(pager); region != NULL;
         region = next_of(pager, &region->link)) {
        if (region->thread != thread || !region->standing) continue;
        region->standing = false;
        pager->standing_count--;
        if (!closes(region)) continue;
        close_gate(pager);
        closed = true;
    }
    if (closed) await_remaps(pager);
}

void tp_regions_lift(tp_pager *pager) {
    if (tp_list_empty(&pager->regions)) return;
    const uint64_t thread = tp_this_thread();
    if (any_own_closed(pager, thread)) tp_pager_mark_region_end(pager);
    for (tp_region *region = first_of(pager); region != NULL;
         region = next_of(pager, &region->link)) {
        if (region->thread != thread) continue;
        if (closes(region)) {
            mark_written(pager, region);
            open_gate(pager);
        }
        region->lift_count++;
    }
}

void tp_regions_unlift(tp_pager *pager) {
    const uint64_t thread = tp_this_thread();
    bool closed = false;
    for (tp_region *region = first_of(pager); region != NULL;
         region = next_of(pager, &region->link)) {
        if (region->thread != thread || region->lift_count == 0) continue;
        region->lift_count--;
        if (!closes(region)) continue;
        close_gate(pager);
        closed = true;
    }
    if (closed) await_remaps(pager);
}

void tp_regions_begin(tp_pager *pager, tp_region *region, const tp_access *accesses,
                      size_t count, tp_stream stream) {
    region->thread = tp_this_thread();
    region->lift_count = 0;
    region->standing = false;
    region->note_count = 0;
    tp_op op = {0};
    tp_access_begin(pager, &op, accesses, count, stream);
    tp_list_push_back(&pager->regions, &region->link);
    close_gate(pager);
    pager->stats.regions_open++;
    pager->stats.region_count++;
    for (size_t i = 0; i < count; i++) {
        tp_block *block = tp_block_live(pager, accesses[i].addr);
        if (block != NULL) note(pager, region, block);
    }
    tp_access_end(pager, &op, NULL, 0, NULL);
    free(op.pins);
    await_remaps(pager);
}

void tp_regions_end(tp_pager *pager, tp_region *region) {
    mark_written(pager, region);
    tp_list_remove(&region->link);
    pager->stats.regions_open--;
    if (region->standing) pager->standing_count--;
    /* Lifted or standing, its earlier kernels are covered already. */
    if (closes(region)) {
        tp_pager_mark_region_end(pager);
        open_gate(pager);
    }
    region->note_count = 0;
}

bool tp_regions_agree(tp_pager *pager) {
    uint32_t closed = 0, standing = 0;
    for (tp_region *region = first_of(pager); region != NULL;
         region = next_of(pager, &region->link)) {
        closed += closes(region) ? 1 : 0;
        standing += region->standing ? 1 : 0;
    }
    return closed == pager->region_depth && standing == pager->standing_count;
}

/* ---- copies ------------------------------------------------------------------------------------ */

tp_status tp_regions_order(tp_pager *pager, tp_stream stream, tp_error *error) {
    if (!TP_RULE(pager, TP_RULE_REGION_ORDER)) return TP_OK;
    tp_marker marker = pager->region_end;
    if (pager->region_unmarked || pager->region_depth > 0) {
        const tp_status status = tp_marker_record_context(&pager->markers, &marker, error);
        if (status != TP_OK) return status;
    }
    return tp_marker_stream_wait(&pager->markers, stream, marker, error);
}
