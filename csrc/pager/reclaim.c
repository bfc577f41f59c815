#include "pager/reclaim.h"

#include <stdarg.h>
#include <stdio.h>

#include "base/bytes.h"
#include "base/check.h"
#include "pager/alloc.h"
#include "pager/arming.h"
#include "pager/drop.h"
#include "pager/extent.h"
#include "pager/fill.h"
#include "pager/victim.h"

_Thread_local uint32_t tp_thread_pins;

enum {
    WAIT_NS = 2000000,      /* one look at the world while waiting for memory */
    PATIENCE_NS = 50000000, /* how long other threads' pins and regions are waited for */
    STALL_NS = 50000,       /* a shorter wait is no stall */
    NEGOTIATE_NS = 2000000, /* the foreign allocator is asked no more often */
    SETBACK_NS = 100000000, /* the pause of evictions after SETBACKS_MAX setbacks in a row */
    SETBACKS_MAX = 4,
    CANDIDATES_MAX = 64
};

void tp_ticket_take(tp_pager *pager) {
    const uint64_t mine = pager->ticket_next++;
    if (!TP_RULE(pager, TP_RULE_TICKET)) return;
    while (pager->ticket_serving != mine) tp_pager_wait(pager, WAIT_NS);
}

void tp_ticket_give(tp_pager *pager) {
    pager->ticket_serving++;
    tp_cond_broadcast(&pager->changed);
}

bool tp_ticket_taken(const tp_pager *pager) {
    return pager->ticket_serving != pager->ticket_next;
}

size_t tp_reclaim_release(tp_pager *pager, tp_frame_pool *pool, size_t bytes) {
    tp_link out;
    tp_list_init(&out);
    if (tp_frame_pool_strip(pool, bytes, &out) == 0) return 0;
    pager->mapping_count++;
    tp_lock_drop(&pager->lock);
    tp_link kept;
    tp_list_init(&kept);
    size_t got = 0;
    uint64_t count = 0;
    while (!tp_list_empty(&out)) {
        tp_frame *frame = TP_CONTAINER(out.next, tp_frame, link);
        const size_t frame_bytes = frame->bytes;
        tp_list_remove(&frame->link);
        if (tp_frame_destroy(pager->dev, frame)) {
            got += frame_bytes;
            count++;
        } else {
            tp_list_push_back(&kept, &frame->link);
        }
    }
    tp_lock_take(&pager->lock);
    pager->mapping_count--;
    while (!tp_list_empty(&kept)) {
        tp_frame *frame = TP_CONTAINER(kept.next, tp_frame, link);
        tp_list_remove(&frame->link);
        tp_frame_pool_put(pool, frame);
    }
    pool->created_bytes -= got;
    pool->release_count += count;
    tp_gauge_sub(
        pool->kind == TP_FRAME_DEVICE ? &pager->stats.reserved : &pager->stats.host_held, got);
    tp_reclaim_count_held(pager, pager->foreign_held_bytes);
    tp_tally_add(&pager->stats.frame_releases, got, 0);
    tp_cond_broadcast(&pager->changed);
    return got;
}

void tp_reclaim_count_held(tp_pager *pager, size_t foreign_bytes) {
    tp_gauge *held = &pager->stats.held;
    pager->foreign_held_bytes = foreign_bytes;
    held->current = pager->stats.reserved.current + foreign_bytes;
    if (held->current > held->peak) held->peak = held->current;
}

static size_t device_bytes(const tp_block *block) {
    size_t bytes = 0;
    for (uint32_t i = 0; i < block->extent_count; i++) {
        if (block->extents[i].device != NULL) bytes += block->extents[i].bytes;
    }
    return bytes;
}

/* Has cached blocks of at least `bytes`, the oldest first, give their frames up. */
static size_t retire_some(tp_pager *pager, size_t bytes) {
    size_t started = 0;
    while (started < bytes && !tp_list_empty(&pager->cached)) {
        tp_block *block = TP_CONTAINER(pager->cached.next, tp_block, lru);
        started += device_bytes(block);
        tp_block_retire(pager, block);
    }
    return started;
}

/* Creates a frame that the budget admits. Drops the lock. NULL: the device refused. */
static tp_frame *create(tp_pager *pager, tp_frame_pool *pool, size_t bytes,
                        tp_status *refused) {
    tp_gauge *gauge =
        pool->kind == TP_FRAME_DEVICE ? &pager->stats.reserved : &pager->stats.host_held;
    pool->created_bytes += bytes;
    pager->mapping_count++;
    tp_lock_drop(&pager->lock);
    tp_frame *frame = NULL;
    const tp_status status = tp_frame_create(pager->dev, pool->kind, bytes, &frame, NULL);
    tp_lock_take(&pager->lock);
    pager->mapping_count--;
    if (status != TP_OK) {
        pool->created_bytes -= bytes;
        if (refused != NULL) *refused = status;
        return NULL;
    }
    pool->create_count++;
    tp_gauge_add(gauge, bytes);
    tp_reclaim_count_held(pager, pager->foreign_held_bytes);
    tp_tally_add(&pager->stats.frame_creates, bytes, 0);
    return frame;
}

/* Takes the device frame of one idle extent of that size from a freed block, or NULL. */
static tp_frame *take_from(tp_pager *pager, tp_block *block, size_t bytes) {
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent *extent = &block->extents[i];
        if (extent->bytes != bytes || extent->state != TP_EXTENT_DIRTY || extent->busy ||
            extent->place != 0) {
            continue;
        }
        tp_frame *frame = extent->device;
        extent->device = NULL;
        tp_extent_become(pager, extent, TP_EXTENT_EMPTY);
        return frame;
    }
    return NULL;
}

/* All extents but the last have the largest size. */
static bool has_extent_of(const tp_block *block, size_t bytes) {
    return block->extents[0].bytes == bytes ||
           block->extents[block->extent_count - 1].bytes == bytes;
}

void tp_reclaim_claim(tp_pager *pager) {
    const size_t claimed = tp_executor_claimed(&pager->executor);
    if (claimed == 0 || tp_list_empty(&pager->cached)) return;
    const size_t coming = tp_reclaim_free_bytes(pager) + tp_reclaim_incoming(pager).bytes;
    if (coming < claimed) (void)retire_some(pager, claimed - coming);
}

static bool for_fill(const tp_pager *pager, tp_stream stream) {
    return stream == pager->dev->copy_stream[TP_COPY_TO_DEVICE];
}

/* Whether a birth may have `bytes` of what is free or becomes free: the rest is claimed. */
static bool unclaimed(tp_pager *pager, size_t bytes, tp_stream stream) {
    const size_t claimed = tp_executor_claimed(&pager->executor);
    if (claimed == 0 || for_fill(pager, stream)) return true;
    return tp_reclaim_free_bytes(pager) + tp_reclaim_incoming(pager).bytes >= claimed + bytes;
}

/* A frame of a freed block whose uses are all on `stream` (or complete): it serves at once through
 * its new address, while the old mapping stays until the block has retired. */
static tp_frame *find_stolen(tp_pager *pager, size_t bytes, tp_stream stream) {
    for (tp_link *link = pager->cached.next; link != &pager->cached; link = link->next) {
        tp_block *block = TP_CONTAINER(link, tp_block, lru);
        if (!has_extent_of(block, bytes) || !tp_block_serves(pager, block, stream)) continue;
        tp_block_retire(pager, block);
        return take_from(pager, block, bytes);
    }
    if (!for_fill(pager, stream) && tp_executor_claimed(&pager->executor) > 0) return NULL;
    for (tp_link *link = pager->retiring.next; link != &pager->retiring; link = link->next) {
        tp_block *block = TP_CONTAINER(link, tp_block, lru);
        if (!has_extent_of(block, bytes) || !tp_block_serves(pager, block, stream)) continue;
        tp_frame *frame = take_from(pager, block, bytes);
        if (frame != NULL) return frame;
    }
    return NULL;
}

static tp_frame *steal(tp_pager *pager, size_t bytes, tp_stream stream) {
    tp_markers_look(&pager->markers);
    tp_frame *frame = find_stolen(pager, bytes, stream);
    tp_markers_look_away(&pager->markers);
    return frame;
}

void tp_reclaim_negotiate(tp_pager *pager) {
    if (pager->hooks.foreign_cap == NULL || pager->hooks.foreign_held == NULL) return;
    while (pager->negotiating) tp_pager_wait(pager, WAIT_NS);
    if (tp_pager_now(pager) - pager->negotiated_ns < NEGOTIATE_NS) return;
    pager->negotiating = true;
    const tp_hooks hooks = pager->hooks;
    tp_lock_drop(&pager->lock);
    const size_t held = hooks.foreign_held(hooks.ctx);
    tp_lock_take(&pager->lock);
    tp_reclaim_count_held(pager, held);
    const size_t target = tp_budget_foreign_target(&pager->budget, held);
    if (target < pager->budget.foreign_cap_bytes) {
        tp_lock_drop(&pager->lock);
        const size_t bound = hooks.foreign_cap(hooks.ctx, target);
        tp_lock_take(&pager->lock);
        if (bound < pager->budget.foreign_cap_bytes) pager->budget.foreign_cap_bytes = bound;
    }
    pager->negotiating = false;
    pager->negotiated_ns = tp_pager_now(pager);
    tp_cond_broadcast(&pager->changed);
}

tp_frame *tp_reclaim_device_frame(tp_pager *pager, size_t bytes, tp_stream stream,
                                  tp_status *device_status) {
    tp_frame_pool *pool = &pager->device_frames;
    if (pager->pressure) tp_pager_wake(pager); /* it keeps some memory free ahead of need */
    const bool free = unclaimed(pager, bytes, stream);
    tp_frame *frame = free ? tp_frame_pool_take(pool, bytes) : NULL;
    if (frame == NULL) frame = steal(pager, bytes, stream);
    if (frame != NULL || !free) return frame;
    if (!tp_budget_admits(&pager->budget, pool->created_bytes, bytes)) {
        tp_reclaim_negotiate(pager);
    }
    if (!tp_budget_admits(&pager->budget, pool->created_bytes, bytes)) {
        const size_t cap = tp_budget_frame_cap(&pager->budget);
        const size_t over = bytes - tp_min_size(bytes, tp_sub_floor(cap, pool->created_bytes));
        (void)tp_reclaim_release(pager, pool, over);
    }
    if (!tp_budget_admits(&pager->budget, pool->created_bytes, bytes)) {
        return tp_frame_pool_take(pool, bytes);
    }
    frame = create(pager, pool, bytes, device_status);
    /* The device has less than the budget: what we keep in other sizes may be in the way. */
    if (frame == NULL && tp_reclaim_release(pager, pool, bytes) > 0 &&
        tp_budget_admits(&pager->budget, pool->created_bytes, bytes)) {
        frame = create(pager, pool, bytes, device_status);
    }
    return frame;
}

tp_frame *tp_reclaim_spare_frame(tp_pager *pager, size_t bytes, bool *dropped) {
    tp_frame_pool *pool = &pager->device_frames;
    const size_t cap = tp_budget_frame_cap(&pager->budget);
    if (pool->created_bytes > cap) return NULL; /* what becomes free is to be given back */
    tp_frame *frame = tp_frame_pool_take(pool, bytes);
    if (frame != NULL) return frame;
    if (!tp_budget_admits(&pager->budget, pool->created_bytes, bytes)) {
        const size_t over = bytes - tp_min_size(bytes, tp_sub_floor(cap, pool->created_bytes));
        if (pool->free_bytes < over) {
            /* What waits as freed blocks, if anything does. */
            const size_t incoming = tp_reclaim_incoming(pager).bytes + pool->free_bytes;
            if (incoming < over) (void)retire_some(pager, over - incoming);
            return NULL;
        }
        *dropped = true;
        (void)tp_reclaim_release(pager, pool, over);
    }
    if (!tp_budget_admits(&pager->budget, pool->created_bytes, bytes)) return NULL;
    *dropped = true;
    return create(pager, pool, bytes, NULL);
}

/* Takes the host frames of CLEAN extents away until one of that size is free. */
static void strip_clean(tp_pager *pager, size_t bytes) {
    size_t freed = 0;
    for (tp_link *link = pager->live.prev; link != &pager->live && freed < bytes;
         link = link->prev) {
        tp_block *block = TP_CONTAINER(link, tp_block, lru);
        for (uint32_t i = 0; i < block->extent_count && freed < bytes; i++) {
            tp_extent *extent = &block->extents[i];
            if (extent->state != TP_EXTENT_CLEAN || extent->busy || extent->evict) continue;
            tp_extent_become(pager, extent, TP_EXTENT_DIRTY);
            tp_extent_drop_host(pager, extent);
            freed += extent->bytes;
        }
    }
}

static bool host_admits(const tp_pager *pager, size_t bytes) {
    if (!TP_RULE(pager, TP_RULE_HOST_CAP)) return true;
    return tp_budget_admits_host(&pager->budget, pager->host_frames.created_bytes,
                                 bytes + tp_drop_reserve(pager));
}

tp_frame *tp_reclaim_host_frame(tp_pager *pager, size_t bytes) {
    tp_frame_pool *pool = &pager->host_frames;
    for (int round = 0; round < 2; round++) {
        tp_frame *frame = tp_frame_pool_take(pool, bytes);
        if (frame != NULL) return frame;
        if (!host_admits(pager, bytes)) (void)tp_reclaim_release(pager, pool, bytes);
        if (host_admits(pager, bytes)) {
            frame = create(pager, pool, bytes, NULL);
            if (frame != NULL) return frame;
        }
        strip_clean(pager, bytes);
    }
    pager->host_full = true;
    return NULL;
}

size_t tp_reclaim_free_bytes(const tp_pager *pager) {
    const size_t cap = tp_budget_frame_cap(&pager->budget);
    const size_t made = pager->device_frames.created_bytes;
    const size_t free_bytes = pager->device_frames.free_bytes;
    return made > cap ? tp_sub_floor(free_bytes, made - cap) : free_bytes + (cap - made);
}

/* Whether an extent in flight gives its device frame up. What an operator in progress has pinned is not on
 * its way: that operator may be the one that asks. */
static bool leaving(const tp_extent *extent) {
    if (extent->block->life != TP_BLOCK_LIVE || !extent->evict) return false;
    return extent->busy || extent->block->op_pins == 0;
}

tp_incoming tp_reclaim_incoming(tp_pager *pager) {
    tp_incoming in = {0};
    for (tp_link *link = pager->retiring.next; link != &pager->retiring; link = link->next) {
        in.bytes += device_bytes(TP_CONTAINER(link, tp_block, lru));
    }
    in.moving = !tp_list_empty(&pager->retiring) || pager->unmapping_count > 0;
    const bool open = !tp_pager_gate_closed(pager);
    for (tp_link *link = pager->inflight.next; link != &pager->inflight; link = link->next) {
        const tp_extent *extent = TP_CONTAINER(link, tp_extent, inflight);
        const bool filling =
            extent->state == TP_EXTENT_FILLING && extent->block->life == TP_BLOCK_LIVE;
        const bool abandoned = filling && extent->abandon;
        if (filling && extent->block->op_pins == 0 && open) in.arriving = true;
        if (!abandoned && !leaving(extent)) continue;
        in.bytes += extent->bytes;
        in.moving = in.moving || abandoned || extent->busy || open;
    }
    return in;
}

bool tp_reclaim_evictable(const tp_pager *pager, const tp_block *block) {
    if (!TP_RULE(pager, TP_RULE_PIN)) return block->seen;
    const bool tensor = block->seen || !TP_RULE(pager, TP_RULE_WORKSPACE);
    return tensor && block->op_pins == 0 && !tp_block_fixed(block);
}

/* An extent that a new eviction may take. */
static bool extent_takeable(const tp_pager *pager, const tp_extent *extent, bool clean) {
    if (extent->evict || extent->busy) return false;
    if (clean) return extent->state == TP_EXTENT_CLEAN;
    return extent->state == TP_EXTENT_WRITING ||
           (extent->state == TP_EXTENT_DIRTY && !pager->host_full);
}

static void candidate_fill(const tp_pager *pager, const tp_block *block, size_t size,
                           tp_candidate *out) {
    *out = (tp_candidate){0};
    for (uint32_t i = 0; i < block->extent_count; i++) {
        const tp_extent *extent = &block->extents[i];
        if (size != 0 && extent->bytes != size) continue;
        if (extent_takeable(pager, extent, true)) out->clean_bytes += extent->bytes;
        if (extent_takeable(pager, extent, false)) out->dirty_bytes += extent->bytes;
    }
}

size_t tp_reclaim_mark(tp_pager *pager, tp_block *block, size_t size, size_t clean,
                       size_t dirty, tp_marker decided) {
    size_t marked = 0;
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent *extent = &block->extents[i];
        if (size != 0 && extent->bytes != size) continue;
        size_t *left = extent_takeable(pager, extent, true)    ? &clean
                       : extent_takeable(pager, extent, false) ? &dirty
                                                               : NULL;
        if (left == NULL || *left == 0) continue;
        *left = tp_sub_floor(*left, extent->bytes);
        extent->evict = true;
        extent->decided = decided;
        tp_extent_list(pager, extent);
        marked += extent->bytes;
    }
    return marked;
}

static bool candidate(const tp_pager *pager, const tp_block *block, bool ahead) {
    if (!tp_reclaim_evictable(pager, block) || block->ahead != ahead) return false;
    tp_candidate it;
    candidate_fill(pager, block, 0, &it);
    return it.clean_bytes + it.dirty_bytes > 0;
}

/* The least recently used ones. */
static size_t oldest_blocks(tp_pager *pager, bool ahead, tp_block *blocks[CANDIDATES_MAX]) {
    size_t count = 0;
    for (tp_link *link = pager->live.next; link != &pager->live && count < CANDIDATES_MAX;
         link = link->next) {
        tp_block *block = TP_CONTAINER(link, tp_block, lru);
        if (candidate(pager, block, ahead)) blocks[count++] = block;
    }
    return count;
}

/* Those that the program will use last, as far as is known; the last first. */
static size_t farthest_blocks(tp_pager *pager, bool ahead, tp_block *blocks[CANDIDATES_MAX]) {
    uint32_t distances[CANDIDATES_MAX];
    size_t count = 0;
    for (tp_link *link = pager->live.next; link != &pager->live; link = link->next) {
        tp_block *block = TP_CONTAINER(link, tp_block, lru);
        if (!candidate(pager, block, ahead)) continue;
        const uint32_t distance = tp_executor_distance(pager, block);
        if (count == CANDIDATES_MAX && distance <= distances[count - 1]) continue;
        if (count < CANDIDATES_MAX) count++;
        size_t at = count - 1;
        for (; at > 0 && distances[at - 1] < distance; at--) {
            distances[at] = distances[at - 1];
            blocks[at] = blocks[at - 1];
        }
        distances[at] = distance;
        blocks[at] = block;
    }
    return count;
}

/* Among the least recently used blocks, or those that a plan needs last. `size`: only extents of that size, 0: any. `ahead`: whether
 * blocks filled ahead of a use that has not come yet are candidates. */
static size_t start_victims(tp_pager *pager, size_t bytes, size_t size, bool ahead) {
    if (pager->setback_count >= SETBACKS_MAX &&
        tp_pager_now(pager) - pager->setback_ns < SETBACK_NS) {
        return 0;
    }
    tp_block *blocks[CANDIDATES_MAX];
    tp_candidate candidates[CANDIDATES_MAX];
    const size_t looked_at = pager->executor.following ? farthest_blocks(pager, ahead, blocks)
                                                       : oldest_blocks(pager, ahead, blocks);
    size_t count = 0;
    for (size_t i = 0; i < looked_at; i++) {
        candidate_fill(pager, blocks[i], size, &candidates[count]);
        if (candidates[count].clean_bytes + candidates[count].dirty_bytes == 0) continue;
        blocks[count++] = blocks[i];
    }
    if (count == 0 || tp_victim_choose(candidates, count, bytes) == 0) return 0;
    tp_marker decided = {0};
    if (tp_marker_record_context(&pager->markers, &decided, NULL) != TP_OK) return 0;
    size_t started = 0;
    for (size_t i = 0; i < count; i++) {
        started += tp_reclaim_mark(pager, blocks[i], size, candidates[i].take_clean_bytes,
                                   candidates[i].take_dirty_bytes, decided);
    }
    return started;
}

/* The frames of live blocks, by what keeps them. */
typedef struct obstacles {
    size_t immovable, unseen, in_use, arriving, leaving, no_host, movable;
} obstacles;

static void count_obstacle(const tp_pager *pager, const tp_extent *extent, obstacles *out) {
    const tp_block *block = extent->block;
    size_t *which = &out->movable;
    if (tp_block_fixed(block)) {
        which = &out->immovable;
    } else if (!block->seen) {
        which = &out->unseen;
    } else if (block->op_pins > 0) {
        which = &out->in_use;
    } else if (extent->state == TP_EXTENT_FILLING || tp_fill_queued(extent)) {
        which = &out->arriving;
    } else if (extent->evict || extent->busy) {
        which = &out->leaving;
    } else if (extent->state == TP_EXTENT_DIRTY && pager->host_full) {
        which = &out->no_host;
    }
    *which += extent->bytes;
}

/* Appends at `at`; returns where the text ends. */
TP_PRINTF(4, 5)
static size_t text_add(char *text, size_t size, size_t at, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    const int count = vsnprintf(text + at, size - at, fmt, args);
    va_end(args);
    return count > 0 ? tp_min_size(at + (size_t)count, size - 1) : at;
}

void tp_reclaim_explain(const tp_pager *pager, char *text, size_t size) {
    obstacles found = {0};
    const size_t frame_bytes = pager->device_frames.created_bytes;
    for (const tp_link *link = pager->live.next; link != &pager->live; link = link->next) {
        const tp_block *block = TP_CONTAINER(link, tp_block, lru);
        for (uint32_t i = 0; i < block->extent_count; i++) {
            if (block->extents[i].device == NULL) continue;
            count_obstacle(pager, &block->extents[i], &found);
        }
    }
    const struct {
        const char *what;
        size_t bytes;
    } shares[] = {{"immovable", found.immovable}, {"never seen as an operand", found.unseen},
                  {"in use", found.in_use},       {"arriving", found.arriving},
                  {"leaving", found.leaving},     {"without host memory", found.no_host},
                  {"movable", found.movable}};
    size_t at = text_add(text, size, 0, "of %zu KiB in frames", frame_bytes / TP_KIB);
    for (size_t i = 0; i < sizeof shares / sizeof *shares; i++) {
        if (shares[i].bytes == 0) continue;
        at = text_add(text, size, at, ", %zu %s", shares[i].bytes / TP_KIB, shares[i].what);
    }
    if (tp_pager_gate_closed(pager)) at = text_add(text, size, at, "; opaque code may run");
    if (pager->setback_count > 0) at = text_add(text, size, at, "; the device refused");
    if (!pager->armed) (void)text_add(text, size, at, "; operators are not told of");
}

size_t tp_reclaim_call_off_ahead(tp_pager *pager, size_t bytes) {
    size_t got = 0;
    for (tp_link *link = pager->inflight.next, *next; link != &pager->inflight && got < bytes;
         link = next) {
        next = link->next;
        tp_extent *extent = TP_CONTAINER(link, tp_extent, inflight);
        if (!tp_fill_queued(extent) || extent->block->op_pins > 0) continue;
        got += extent->bytes;
        tp_fill_call_off(pager, extent);
    }
    return got;
}

size_t tp_reclaim_start(tp_pager *pager, size_t bytes, size_t size) {
    size_t started = retire_some(pager, bytes);
    if (started < bytes && pager->armed && pager->offload && pager->capture_depth == 0) {
        if (size != 0) started += start_victims(pager, bytes - started, size, false);
        if (started < bytes) started += start_victims(pager, bytes - started, 0, false);
        if (started == 0) started = start_victims(pager, bytes, 0, true);
    }
    if (started > 0) tp_pager_wake(pager);
    return started;
}

bool tp_reclaim_flush_foreign(tp_pager *pager) {
    const tp_hooks hooks = pager->hooks;
    if (hooks.foreign_flush == NULL || pager->foreign_held_bytes == 0) return false;
    tp_lock_drop(&pager->lock);
    hooks.foreign_flush(hooks.ctx);
    tp_lock_take(&pager->lock);
    pager->negotiated_ns = 0;
    tp_reclaim_negotiate(pager);
    return true;
}

/* Whether some block would be evictable if an operator on another thread ended, or a region. */
static bool others_are_in_the_way(const tp_pager *pager) {
    if (!pager->offload) return false;
    return pager->op_pin_total - pager->waiting_pin_total > tp_thread_pins ||
           tp_pager_gate_closed(pager);
}

tp_frame *tp_reclaim_wait_frame(tp_pager *pager, size_t bytes, size_t total, tp_stream stream,
                                tp_status *device_status) {
    const uint64_t began = tp_pager_now(pager);
    uint64_t stuck_since = 0;
    bool flushed = false;
    tp_frame *frame = NULL;
    while ((frame = tp_reclaim_device_frame(pager, bytes, stream, device_status)) == NULL) {
        if (tp_pager_halted(pager) || !TP_RULE(pager, TP_RULE_RUN_AHEAD)) break;
        pager->wanted_size = bytes;
        tp_incoming in = tp_reclaim_incoming(pager);
        if (!for_fill(pager, stream))
            in.bytes = tp_sub_floor(in.bytes, tp_executor_claimed(&pager->executor));
        bool moving = in.moving;
        const bool planned = pager->executor.following;
        if (!planned && in.bytes < bytes && tp_reclaim_call_off_ahead(pager, bytes) > 0) {
            continue;
        }
        if (in.bytes < total) {
            const size_t started = tp_reclaim_start(pager, total - in.bytes, bytes);
            if (started == 0 && tp_arming_full(pager)) continue;
            moving |= started > 0;
        }
        if (!moving && tp_reclaim_call_off_ahead(pager, bytes) > 0) continue;
        moving |= in.arriving;
        if (moving || tp_pager_gate_settling(pager)) {
            stuck_since = 0;
        } else {
            const uint64_t now = tp_pager_now(pager);
            if (stuck_since == 0) stuck_since = now;
            if (tp_executor_claimed(&pager->executor) > 0) {
                tp_executor_drop_wishes(pager);
                continue;
            }
            if (!others_are_in_the_way(pager) || now - stuck_since > PATIENCE_NS) {
                if (flushed || !tp_reclaim_flush_foreign(pager)) break;
                flushed = true;
                continue;
            }
        }
        pager->pressure = pager->offload;
        tp_pager_wake(pager);
        tp_pager_wait(pager, WAIT_NS);
    }
    const uint64_t waited = tp_pager_now(pager) - began;
    if (waited > STALL_NS) {
        tp_tally_add(&pager->stats.stalls, frame == NULL ? 0 : bytes, waited);
        tp_tally_add(&pager->stats.memory_stalls, frame == NULL ? 0 : bytes, waited);
    }
    return frame;
}
