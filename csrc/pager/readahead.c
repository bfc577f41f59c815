#include "pager/readahead.h"

#include "base/bytes.h"
#include "pager/extent.h"
#include "pager/fill.h"
#include "pager/pager.h"
#include "pager/reclaim.h"

enum {
    WALK_MAX = 256, /* neighbours looked at, resident ones included */
    REACH = 256,    /* uses between two misses of one run, at most */
    IDLE = 12,      /* notes in other runs after which a run has ended */
    PASSED = 64,    /* uses that a run may be out of order */
    TREND_MAX = 4,
    TREND_SURE = 2
};

static uint64_t distance(uint64_t a, uint64_t b) { return a > b ? a - b : b - a; }

static uint64_t last_stamp(const tp_run *run) {
    return run->stamps[(run->count - 1) % TP_RUN_LAST];
}

/* The run nearest to `stamp` within reach, else the one that has been idle longest, begun anew. */
static tp_run *run_of(tp_runs *runs, uint64_t stamp) {
    tp_run *nearest = NULL, *idle = &runs->at[0];
    for (uint32_t i = 0; i < TP_RUNS_MAX; i++) {
        tp_run *run = &runs->at[i];
        if (run->last_note < idle->last_note) idle = run;
        if (run->count == 0 || distance(last_stamp(run), stamp) > REACH) continue;
        if (nearest == NULL ||
            distance(last_stamp(run), stamp) < distance(last_stamp(nearest), stamp)) {
            nearest = run;
        }
    }
    if (nearest != NULL) return nearest;
    *idle = (tp_run){.id = ++runs->run_count};
    return idle;
}

int tp_runs_note(tp_runs *runs, uint64_t stamp, uint64_t *run_id) {
    tp_run *run = run_of(runs, stamp);
    const uint32_t place = run->count % TP_RUN_LAST;
    const uint64_t before = run->stamps[place];
    const bool full = run->count >= TP_RUN_LAST;
    run->stamps[place] = stamp;
    run->count++;
    run->last_note = ++runs->note_count;
    *run_id = run->id;
    if (full && stamp > before && run->trend < TREND_MAX) run->trend++;
    if (full && stamp < before && run->trend > -TREND_MAX) run->trend--;
    return run->trend >= TREND_SURE ? 1 : run->trend <= -TREND_SURE ? -1 : 0;
}

bool tp_runs_alive(const tp_runs *runs, uint64_t run_id) {
    for (uint32_t i = 0; i < TP_RUNS_MAX; i++) {
        const tp_run *run = &runs->at[i];
        if (run->count > 0 && run->id == run_id)
            return runs->note_count - run->last_note <= IDLE;
    }
    return false;
}

/* What may be on its way or waiting to be touched at once. */
static size_t window_bytes(const tp_pager *pager) {
    return tp_min_size(pager->budget.limit_bytes / 16, TP_GIB);
}

static size_t host_bytes(const tp_block *block) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < block->extent_count; i++) {
        if (block->extents[i].state == TP_EXTENT_HOST) bytes += block->extents[i].bytes;
    }
    return bytes;
}

void tp_readahead_forget(tp_pager *pager, tp_block *block) {
    if (!block->ahead) return;
    block->ahead = false;
    tp_list_remove(&block->ahead_link);
    pager->ahead_bytes -= block->bytes;
}

/* Whether a run that goes on in `direction` has passed by the block. */
static bool passed(const tp_block *block, uint64_t stamp, int direction) {
    return direction > 0 ? block->stamp + PASSED < stamp
                         : direction < 0 && block->stamp > stamp + PASSED;
}

static void forget_stale(tp_pager *pager, uint64_t run, uint64_t stamp, int direction) {
    for (tp_link *link = pager->ahead_blocks.next, *next; link != &pager->ahead_blocks;
         link = next) {
        next = link->next;
        tp_block *block = TP_CONTAINER(link, tp_block, ahead_link);
        if (!tp_runs_alive(&pager->runs, block->ahead_run) ||
            (block->ahead_run == run && passed(block, stamp, direction))) {
            tp_readahead_forget(pager, block);
        }
    }
}

void tp_readahead_note(tp_pager *pager, tp_block *block) {
    uint64_t run = 0;
    const int direction = tp_runs_note(&pager->runs, block->stamp, &run);
    tp_readahead_forget(pager, block);
    forget_stale(pager, run, block->stamp, direction);
    pager->ahead_count = 0;
    if (direction == 0 || !pager->offload || pager->page_out_before_op) return;
    if (pager->executor.following) return; /* the plan knows better */
    size_t room = tp_sub_floor(window_bytes(pager), pager->ahead_bytes);
    tp_link *link = &block->lru;
    for (uint32_t i = 0; i < WALK_MAX && pager->ahead_count < TP_AHEAD_MAX; i++) {
        link = direction > 0 ? link->next : link->prev;
        if (link == &pager->live) break;
        tp_block *next = TP_CONTAINER(link, tp_block, lru);
        if (!next->seen || next->ahead || host_bytes(next) == 0 || !tp_fill_allowed(next, 0)) {
            continue;
        }
        if (next->bytes > room) break;
        room -= next->bytes;
        pager->ahead[pager->ahead_count++] = (tp_ahead){next, next->generation, run};
    }
}

/* Free memory is left for what the program allocates meanwhile. */
static bool memory_to_spare(const tp_pager *pager, size_t bytes) {
    return tp_reclaim_free_bytes(pager) >= bytes + tp_budget_reclaim_start(&pager->budget) / 4;
}

static bool bring_ahead(tp_pager *pager, tp_ahead it) {
    tp_block *block = it.block;
    if (block->generation != it.generation || block->life != TP_BLOCK_LIVE) return true;
    if (block->ahead || !memory_to_spare(pager, block->bytes)) return false;
    block->ahead = true;
    block->ahead_run = it.run;
    tp_list_push_back(&pager->ahead_blocks, &block->ahead_link);
    pager->ahead_bytes += block->bytes;
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent *extent = &block->extents[i];
        if (extent->state != TP_EXTENT_HOST || extent->device != NULL) continue;
        if (!tp_fill_start(pager, block, it.generation, extent, 0, false)) return false;
        if (block->generation != it.generation) return true;
    }
    return true;
}

void tp_readahead_start(tp_pager *pager) {
    /* Taken over first: another thread may note while the lock is dropped. */
    tp_ahead list[TP_AHEAD_MAX];
    const uint32_t count = pager->ahead_count;
    for (uint32_t i = 0; i < count; i++) list[i] = pager->ahead[i];
    pager->ahead_count = 0;
    for (uint32_t i = 0; i < count && pager->failed == TP_OK; i++) {
        if (!bring_ahead(pager, list[i])) break;
    }
}
