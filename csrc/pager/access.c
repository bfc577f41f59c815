#include "pager/access.h"

#include <stdlib.h>

#include "base/check.h"
#include "pager/evict.h"
#include "pager/extent.h"
#include "pager/fill.h"
#include "pager/park.h"
#include "pager/readahead.h"
#include "pager/reclaim.h"
#include "pager/region.h"
#include "pager/transfer.h"

enum {
    WAIT_NS = 1000000,
    FILL_PATIENCE_NS =
        50000000 /* how long a finished copy waits for pins and regions of others */
};

struct tp_op_pin {
    tp_block *block;
    uint64_t generation;
    bool write;
    bool adopted;
};

tp_block *tp_block_live(tp_pager *pager, tp_addr addr) {
    tp_block *block = tp_space_find(&pager->space, addr);
    return block != NULL && block->life == TP_BLOCK_LIVE ? block : NULL;
}

/* ---- pins -------------------------------------------------------------------------------------- */

/* Room for one pin more; without host memory the pin is not made and the operand is not protected:
 * then the block becomes immovable instead, so that nothing can go wrong. */
static bool pins_reserve(tp_op *op, uint32_t count) {
    if (op->pin_count + count <= op->pin_capacity) return true;
    uint32_t capacity = op->pin_capacity == 0 ? 16 : op->pin_capacity * 2;
    while (capacity < op->pin_count + count) capacity *= 2;
    struct tp_op_pin *pins = realloc(op->pins, capacity * sizeof *pins);
    if (pins == NULL) return false;
    op->pins = pins;
    op->pin_capacity = capacity;
    return true;
}

static bool pin_holds(const struct tp_op_pin *pin) {
    return pin->block->generation == pin->generation && pin->block->life == TP_BLOCK_LIVE;
}

/* What a plan has decided about a block while an operator used it was decided before that operator's
 * kernels: its nested ones had begun, and they launch them. It counts from now on; a write-back only
 * if they may have written, for reading does not disturb its copy. */
static void decide_again(tp_pager *pager, tp_block *block, bool written) {
    tp_marker now = {0};
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent *extent = &block->extents[i];
        const bool concerned = extent->evict || (written && extent->write_back);
        if (!concerned || extent->busy) continue;
        if (now.seq == 0 && tp_marker_record_context(&pager->markers, &now, NULL) != TP_OK) {
            extent->evict = extent->write_back = false; /* the pager's thread takes it out */
            continue;
        }
        extent->decided = now;
        if (!written) continue;
        extent->wanted = now;
        extent->wanted_stamp = block->stamp;
    }
}

static void pin_drop(tp_pager *pager, const struct tp_op_pin *pin, bool detached) {
    /* An operator may end on another thread than it began on. */
    if (!detached && tp_thread_pins > 0) tp_thread_pins--;
    if (!pin_holds(pin)) return;
    TP_ASSERT(pin->block->op_pins > 0);
    pin->block->op_pins--;
    pager->op_pin_total--;
    const bool written = pin->write || pin->adopted;
    const bool last = pin->block->op_pins == 0;
    if (TP_RULE(pager, TP_RULE_PIN) && (written || last))
        decide_again(pager, pin->block, written);
}

static void lru_touch(tp_pager *pager, tp_block *block) {
    tp_list_remove(&block->lru);
    tp_list_push_back(&pager->live, &block->lru);
    block->stamp = ++pager->use_clock;
}

void tp_access_see(tp_pager *pager, tp_block *block) {
    block->seen = block->tensor = true;
    lru_touch(pager, block);
}

static bool anything_in_host(const tp_block *block) {
    for (uint32_t i = 0; i < block->extent_count; i++) {
        if (block->extents[i].state == TP_EXTENT_HOST) return true;
    }
    return false;
}

/* Calls off evictions that have not begun to change the mapping. */
static void cancel_evictions(tp_pager *pager, tp_block *block) {
    if (block->parking != NULL) tp_park_give_up(pager, block);
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent *extent = &block->extents[i];
        if (!extent->evict || extent->busy) continue;
        extent->evict = extent->write_back = extent->differed = false;
        const bool resting =
            extent->state == TP_EXTENT_DIRTY || extent->state == TP_EXTENT_CLEAN;
        if (resting && extent->place == 0) tp_list_remove(&extent->inflight);
        if (extent->state == TP_EXTENT_DIRTY) tp_extent_drop_host(pager, extent);
        tp_cond_broadcast(&pager->changed);
    }
}

/* Fills wanted and not begun are called off; those begun are forgotten when their copy ends. */
static void call_off_fills(tp_pager *pager, tp_block *block) {
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent *extent = &block->extents[i];
        if (tp_fill_queued(extent)) tp_fill_call_off(pager, extent);
        if (extent->state == TP_EXTENT_FILLING && !extent->busy) extent->abandon = true;
    }
}

static void make_immovable(tp_pager *pager, tp_block *block, bool *flag) {
    if (!tp_block_immovable(block)) tp_gauge_add(&pager->stats.pinned, block->bytes);
    *flag = true;
    cancel_evictions(pager, block);
    call_off_fills(pager, block);
}

void tp_access_lose_use(tp_pager *pager, tp_block *block) {
    make_immovable(pager, block, &block->captured);
    tp_uses_lose(&block->uses);
}

/* What the operands of an operator are waiting for. */
typedef struct operands {
    bool busy;    /* a mapping is being changed */
    bool missing; /* an extent is in HOST or FILLING */
} operands;

static operands look(const tp_op *op) {
    operands seen = {false, false};
    for (uint32_t i = 0; i < op->pin_count; i++) {
        if (!pin_holds(&op->pins[i])) continue;
        const tp_block *block = op->pins[i].block;
        for (uint32_t k = 0; k < block->extent_count; k++) {
            const tp_extent *extent = &block->extents[k];
            seen.busy = seen.busy || extent->busy;
            seen.missing = seen.missing || extent->state == TP_EXTENT_HOST ||
                           extent->state == TP_EXTENT_FILLING;
        }
    }
    return seen;
}

bool tp_access_over_host(const tp_op *op) { return look(op).missing; }

/* `first`: not a second try of the same operator, whose misses have been noted. */
static void pin_all(tp_pager *pager, tp_op *op, const tp_access *accesses, size_t count,
                    bool first) {
    const uint64_t began = pager->use_clock;
    for (size_t i = 0; i < count; i++) {
        tp_block *block = tp_block_live(pager, accesses[i].addr);
        if (block == NULL) continue;
        block->seen = block->tensor = true;
        if (!pins_reserve(op, 1)) {
            make_immovable(pager, block, &block->captured);
            continue;
        }
        op->pins[op->pin_count++] =
            (struct tp_op_pin){block, block->generation, accesses[i].write, false};
        block->op_pins++;
        pager->op_pin_total++;
        tp_thread_pins++;
        const bool again = block->stamp > began; /* an operand twice */
        if (first && !again && (block->ahead || anything_in_host(block))) {
            tp_readahead_note(pager, block);
        }
        lru_touch(pager, block);
        cancel_evictions(pager, block);
    }
}

static void unpin_all(tp_pager *pager, tp_op *op) {
    for (uint32_t i = 0; i < op->pin_count; i++) pin_drop(pager, &op->pins[i], false);
    op->pin_count = 0;
    tp_cond_broadcast(&pager->changed);
}

/* ---- misses ------------------------------------------------------------------------------------ */

static uint32_t own_pins(const tp_op *op, const tp_block *block) {
    uint32_t count = 0;
    for (uint32_t i = 0; i < op->pin_count; i++) count += op->pins[i].block == block ? 1 : 0;
    return count;
}

static void waiting(tp_pager *pager, tp_op *op, bool on) {
    if (!TP_RULE(pager, TP_RULE_WAITING_PINS)) return;
    for (uint32_t i = 0; i < op->pin_count; i++) {
        if (!pin_holds(&op->pins[i])) continue;
        op->pins[i].block->waiting_pins += on ? 1u : UINT32_MAX;
        pager->waiting_pin_total += on ? 1u : UINT64_MAX;
    }
}

/* Starts the fills of everything the operator misses, in operand order, for as long as memory can be
 * had. What is left stays in HOST. */
static void start_fills(tp_pager *pager, tp_op *op, bool wait) {
    for (uint32_t i = 0; i < op->pin_count; i++) {
        const struct tp_op_pin pin = op->pins[i];
        for (uint32_t k = 0; pin_holds(&pin) && k < pin.block->extent_count; k++) {
            tp_extent *extent = &pin.block->extents[k];
            if (extent->state != TP_EXTENT_HOST) continue;
            const bool left = tp_executor_leaves(pager, extent) && !tp_fill_queued(extent);
            extent->leave = 0;
            if (left) continue;
            if (tp_fill_queued(extent)) {
                tp_fill_hurry(pager, extent);
                continue;
            }
            if (!tp_fill_allowed(pin.block, own_pins(op, pin.block))) break;
            if (!tp_fill_start(pager, pin.block, pin.generation, extent,
                               own_pins(op, pin.block), wait)) {
                return;
            }
        }
    }
}

/* Whether a fill of the operator's operands is still going to end by itself. `copying`: it waits for
 * the device; else for pins or regions of others. */
static bool filling(tp_pager *pager, const tp_op *op, bool *copying) {
    bool any = false;
    *copying = false;
    for (uint32_t i = 0; i < op->pin_count; i++) {
        if (!pin_holds(&op->pins[i])) continue;
        tp_block *block = op->pins[i].block;
        for (uint32_t k = 0; k < block->extent_count; k++) {
            tp_extent *extent = &block->extents[k];
            const bool begun = extent->state == TP_EXTENT_FILLING && !extent->abandon;
            if (!begun && !tp_fill_queued(extent)) continue;
            any = true;
            *copying = *copying || extent->busy || !tp_evict_blocked(pager, extent);
        }
    }
    return any;
}

static void abandon_fills(tp_pager *pager, tp_op *op) {
    for (uint32_t i = 0; i < op->pin_count; i++) {
        if (pin_holds(&op->pins[i])) call_off_fills(pager, op->pins[i].block);
    }
}

/* Waits until the operands' fills are mapped. What cannot be, because others hold on to the HOST
 * mapping, is given up after a while: the operator runs over HOST. */
static void await_fills(tp_pager *pager, tp_op *op) {
    const uint64_t began = tp_pager_now(pager);
    uint64_t stuck_since = 0;
    bool copying = false;
    waiting(pager, op, true);
    while (!tp_pager_halted(pager) && filling(pager, op, &copying)) {
        const uint64_t now = tp_pager_now(pager);
        if (copying) stuck_since = 0;
        if (!copying && stuck_since == 0) stuck_since = now;
        if (!copying && now - stuck_since > FILL_PATIENCE_NS) break;
        tp_pager_wake(pager);
        tp_pager_wait(pager, WAIT_NS);
    }
    abandon_fills(pager, op);
    while (look(op).busy) tp_pager_wait(pager, WAIT_NS);
    waiting(pager, op, false);
    tp_tally_add(&pager->stats.stalls, 0, tp_pager_now(pager) - began);
}

static void count_misses(tp_pager *pager, const tp_op *op) {
    for (uint32_t i = 0; i < op->pin_count; i++) {
        const tp_block *block = op->pins[i].block;
        for (uint32_t k = 0; pin_holds(&op->pins[i]) && k < block->extent_count; k++) {
            const tp_extent *extent = &block->extents[k];
            /* What is being filled already, for another operator or ahead of need, is late. */
            if (extent->state == TP_EXTENT_HOST && !tp_fill_queued(extent)) {
                tp_tally_add(&pager->stats.misses, extent->bytes, 0);
            }
        }
    }
}

/* In strict mode HOST extents map nothing: what an operator is about to run over gets its host frame
 * mapped after all. */
void tp_access_map_host(tp_pager *pager, tp_extent *extent) {
    if (extent->mapped != NULL || extent->host == NULL || extent->busy) return;
    if (pager->abandoned) return; /* every address stays as it is */
    const tp_status status = pager->dev->ops->map(pager->dev, extent->addr, extent->bytes,
                                                  extent->host->handle, NULL);
    if (status != TP_OK) {
        tp_pager_fail(pager, status);
        return;
    }
    extent->mapped = extent->host;
    extent->host->map_count++;
}

static void run_over_host(tp_pager *pager, const tp_op *op) {
    for (uint32_t i = 0; i < op->pin_count; i++) {
        if (!pin_holds(&op->pins[i])) continue;
        tp_block *block = op->pins[i].block;
        for (uint32_t k = 0; k < block->extent_count; k++) {
            tp_extent *extent = &block->extents[k];
            if (tp_extent_resident(extent->state)) continue;
            tp_tally_add(&pager->stats.host_operators, extent->bytes, 0);
            tp_access_map_host(pager, extent);
        }
    }
}

/* ---- operators --------------------------------------------------------------------------------- */

static void mark_written(tp_pager *pager, const tp_op *op) {
    for (uint32_t i = 0; i < op->pin_count; i++) {
        if (!op->pins[i].write || !pin_holds(&op->pins[i])) continue;
        tp_block *block = op->pins[i].block;
        for (uint32_t k = 0; k < block->extent_count; k++) {
            tp_extent_mark_written(pager, &block->extents[k]);
        }
    }
}

static bool capturing(tp_pager *pager, tp_stream stream) {
    if (pager->capture_depth == 0 || !TP_RULE(pager, TP_RULE_CAPTURE)) return false;
    bool answer = true;
    if (pager->dev->ops->stream_capturing(pager->dev, stream, &answer, NULL) != TP_OK)
        return true;
    return answer;
}

/* Of operands that were made again, on whatever stream, this one uses the bytes after that. */
static void follow_remakes(tp_pager *pager, const tp_op *op) {
    for (uint32_t i = 0; i < op->pin_count; i++) {
        if (!pin_holds(&op->pins[i]) || op->pins[i].block->remade.seq == 0) continue;
        tp_block *block = op->pins[i].block;
        const tp_marker remade = block->remade;
        bool done = tp_marker_done(&pager->markers, remade);
        if (!done && !pager->host_kernels &&
            tp_markers_stream(&pager->markers, remade.lane) == op->stream)
            continue;
        const bool queued =
            !done && !pager->host_kernels && !capturing(pager, op->stream) &&
            tp_marker_stream_wait(&pager->markers, op->stream, remade, NULL) == TP_OK;
        /* A stream that is captured cannot wait for what is not part of it. */
        while (!done && !queued && !tp_pager_halted(pager)) {
            tp_pager_wait(pager, WAIT_NS);
            done = tp_marker_done(&pager->markers, remade);
        }
        if (done && pin_holds(&op->pins[i])) block->remade.seq = 0;
    }
}

void tp_access_begin(tp_pager *pager, tp_op *op, const tp_access *accesses, size_t count,
                     tp_stream stream) {
    op->stream = stream;
    op->pin_count = 0;
    op->detached = false;
    if (pager->abandoned) return;
    pin_all(pager, op, accesses, count, true);
    const operands seen = look(op);
    if (seen.busy || seen.missing) {
        tp_regions_stand(pager); /* before its fills begin, which it would call off */
        count_misses(pager, op);
        /* All pins at once or none: who has to wait for others' mapping changes or for the ticket
         * holds no pin meanwhile. */
        unpin_all(pager, op);
        tp_ticket_take(pager);
        pin_all(pager, op, accesses, count, false);
        while (look(op).busy) {
            unpin_all(pager, op);
            tp_pager_wait(pager, WAIT_NS);
            pin_all(pager, op, accesses, count, false);
        }
        const bool page = pager->offload && !tp_pager_halted(pager);
        if (page) start_fills(pager, op, true);
        if (page) tp_readahead_start(pager);
        tp_ticket_give(pager);
        await_fills(pager, op);
        run_over_host(pager, op);
    }
    if (pager->ahead_count > 0) tp_readahead_start(pager);
    follow_remakes(pager, op);
    mark_written(pager, op);
    if (op->pin_count > 0 && capturing(pager, stream)) {
        for (uint32_t i = 0; i < op->pin_count; i++) {
            tp_block *block = op->pins[i].block;
            if (pin_holds(&op->pins[i])) make_immovable(pager, block, &block->captured);
        }
    }
}

void tp_access_adopt(tp_pager *pager, tp_op *op, tp_addr addr) {
    tp_block *block = tp_block_live(pager, addr);
    if (block == NULL || block->slab) return; /* slabs are not born pinned: they never move */
    TP_REQUIRE(block->op_pins > 0);
    if (pins_reserve(op, 1)) {
        op->pins[op->pin_count++] = (struct tp_op_pin){block, block->generation, false, true};
    } /* else it stays pinned for good: safe, and freeing it forgets the pin */
}

/* What stands for the work of an operator that ends. */
typedef struct use_mark {
    tp_marker marker; /* when seq is 0: the lane alone, to be recorded when it matters */
    bool known;       /* false: nothing can stand for it */
} use_mark;

/* Nobody waits for memory: nothing will be evicted soon, and a marker recorded then covers this
 * operator too. Else one that says exactly how far the block has been used. */
static use_mark mark_of(tp_pager *pager, const tp_op *op) {
    use_mark mark = {{0}, false};
    const tp_stream stream = op->stream;
    if (op->detached) { /* wherever it was done */
        mark.known = tp_marker_record_context(&pager->markers, &mark.marker, NULL) == TP_OK;
        return mark;
    }
    if (capturing(pager, stream)) return mark;
    mark.known =
        pager->pressure
            ? tp_marker_record(&pager->markers, stream, &mark.marker, NULL) == TP_OK
            : tp_markers_lane(&pager->markers, stream, &mark.marker.lane, NULL) == TP_OK;
    return mark;
}

/* A block whose use nothing stands for never moves and is freed behind everything. */
static void mark_use(tp_pager *pager, tp_block *block, use_mark mark) {
    const bool noted =
        mark.known && mark.marker.seq == 0 && tp_uses_note(&block->uses, mark.marker.lane);
    if (noted) return;
    /* With seq 0 there was no room: what stands in the way makes place for a marker of all. */
    if (!mark.known ||
        tp_uses_add(&pager->markers, &block->uses, mark.marker, true, NULL) != TP_OK) {
        tp_access_lose_use(pager, block);
    }
}

void tp_access_end(tp_pager *pager, tp_op *op, const tp_addr *outputs, size_t output_count,
                   tp_op *parent) {
    if (pager->abandoned) op->pin_count = 0; /* the device is not asked any more */
    if (pager->abandoned || (op->pin_count == 0 && output_count == 0)) return;
    if (op->detached) mark_written(pager, op);
    const use_mark mark = mark_of(pager, op);
    for (size_t i = 0; i < output_count; i++) {
        tp_block *block = tp_block_live(pager, outputs[i]);
        if (block == NULL) continue;
        tp_access_see(pager, block);
        mark_use(pager, block, mark);
    }
    for (uint32_t i = 0; i < op->pin_count; i++) {
        const struct tp_op_pin pin = op->pins[i];
        if (pin_holds(&pin)) mark_use(pager, pin.block, mark);
        if (pin.adopted && parent != NULL && pin_holds(&pin) && pins_reserve(parent, 1)) {
            parent->pins[parent->pin_count++] = pin;
        } else {
            pin_drop(pager, &pin, op->detached);
        }
    }
    op->pin_count = 0;
    if (tp_ticket_taken(pager) || !tp_list_empty(&pager->inflight)) {
        tp_cond_broadcast(&pager->changed);
    }
}

void tp_access_detach(tp_pager *pager, tp_op *op, tp_op *parent) {
    for (uint32_t i = 0; i < op->pin_count; i++) {
        struct tp_op_pin *pin = &op->pins[i];
        if (pin->adopted && parent != NULL && pin_holds(pin) && pins_reserve(parent, 1)) {
            parent->pins[parent->pin_count++] = *pin; /* which counts for this thread instead */
            pin->block->op_pins++;
            pager->op_pin_total++;
        } else if (tp_thread_pins > 0) {
            tp_thread_pins--;
        }
        pin->adopted = false;
    }
    op->detached = true;
}

/* ---- pins by handle, exports ------------------------------------------------------------------- */

void tp_access_settle(tp_pager *pager, tp_block *block, uint64_t generation) {
    for (;;) {
        bool moving = false;
        for (uint32_t i = 0; i < block->extent_count; i++) {
            const tp_extent *extent = &block->extents[i];
            moving = moving || extent->busy || extent->state == TP_EXTENT_FILLING;
        }
        if (!moving || block->generation != generation || tp_pager_halted(pager)) return;
        tp_pager_wake(pager);
        tp_pager_wait(pager, WAIT_NS);
    }
}

static bool resident(const tp_block *block) {
    for (uint32_t i = 0; i < block->extent_count; i++) {
        if (!tp_extent_resident(block->extents[i].state)) return false;
    }
    return true;
}

tp_status tp_access_pin(tp_pager *pager, tp_addr addr, tp_error *error) {
    tp_block *block = tp_block_live(pager, addr);
    if (block == NULL) return tp_error_set(error, TP_INVALID, "no block of ours holds it");
    tp_op op = {0};
    const tp_access access = {addr, false};
    tp_access_begin(pager, &op, &access, 1, block->stream);
    block = tp_block_live(pager, addr);
    tp_status status = TP_INVALID;
    if (block != NULL) {
        status = resident(block) ? TP_OK : TP_OUT_OF_MEMORY;
        if (status == TP_OK) {
            if (!tp_block_immovable(block)) tp_gauge_add(&pager->stats.pinned, block->bytes);
            block->handle_pins++;
        }
    }
    unpin_all(pager, &op);
    free(op.pins);
    return status == TP_OK ? TP_OK
                           : tp_error_set(error, status, "the block cannot be made resident");
}

tp_status tp_access_unpin(tp_pager *pager, tp_addr addr, tp_error *error) {
    tp_block *block = tp_block_live(pager, addr);
    if (block == NULL || block->handle_pins == 0) {
        return tp_error_set(error, TP_INVALID, "no pin of ours is on it");
    }
    block->handle_pins--;
    if (!tp_block_immovable(block)) tp_gauge_sub(&pager->stats.pinned, block->bytes);
    tp_cond_broadcast(&pager->changed);
    return TP_OK;
}

void tp_access_export(tp_pager *pager, tp_addr addr) {
    tp_block *block = tp_block_live(pager, addr);
    if (block == NULL) return;
    /* Its writes are unseen from now on: what a host frame holds is no copy any more. */
    make_immovable(pager, block, &block->exported);
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent *extent = &block->extents[i];
        if (!extent->busy) tp_extent_mark_written(pager, extent);
    }
    const uint64_t generation = block->generation;
    tp_access_settle(pager, block, generation);
    if (block->generation != generation) return;
    for (uint32_t i = 0; i < block->extent_count; i++) {
        tp_extent *extent = &block->extents[i];
        if (extent->state == TP_EXTENT_HOST) tp_access_map_host(pager, extent);
        tp_extent_mark_written(pager, extent);
    }
}

void tp_access_export_operands(tp_pager *pager, const tp_op *op) {
    for (uint32_t i = 0; i < op->pin_count; i++) {
        const struct tp_op_pin *pin = &op->pins[i];
        if (!pin->adopted && pin_holds(pin)) tp_access_export(pager, pin->block->addr);
    }
}

bool tp_access_bring_back(tp_pager *pager, tp_block *block) {
    const uint64_t generation = block->generation;
    tp_op op = {0};
    const tp_access access = {block->addr, false};
    pin_all(pager, &op, &access, 1, false);
    op.stream = block->stream;
    start_fills(pager, &op, false);
    await_fills(pager, &op);
    const bool done = block->generation == generation && resident(block);
    if (!done) run_over_host(pager, &op);
    unpin_all(pager, &op);
    free(op.pins);
    return done;
}

void tp_access_await_remaps(tp_pager *pager) {
    while (pager->remapping) tp_pager_wait(pager, WAIT_NS);
}
