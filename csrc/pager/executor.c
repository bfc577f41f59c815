#include "pager/executor.h"

#include "base/bytes.h"
#include "pager/access.h"
#include "pager/extent.h"
#include "pager/fill.h"
#include "pager/pager.h"
#include "pager/park.h"
#include "pager/reclaim.h"

enum { REFUSED_NS = 2000000 }; /* a device that had no frame is not asked again before that */
/* What is decided ahead: so many fills of so many bytes, the time that copies which are queued may
 * still take. Looked for among so many acts. */
enum { LOOK_ACTS = 64, LOOK_FILLS = TP_DECIDED_MAX / 2 };
/* A step has just begun. */
enum { EARLY_OPS = 64 };
#define LOOK_BYTES ((size_t)256 << 20)

/* ---- acts ------------------------------------------------------------------------------------ */

/* One marker stands for all decisions that are made at the same operator. */
static bool decide(tp_pager *pager, tp_marker *decided) {
    if (decided->seq != 0) return true;
    return tp_marker_record_context(&pager->markers, decided, NULL) == TP_OK;
}

static void write_back(tp_pager *pager, tp_extent *extent, tp_marker *decided) {
    if (extent->state != TP_EXTENT_DIRTY || extent->busy || extent->evict) return;
    if (pager->host_full || !decide(pager, decided)) return;
    extent->write_back = true;
    extent->wanted_stamp = extent->block->stamp;
    extent->wanted = extent->decided = *decided;
    tp_extent_list(pager, extent);
}

static void evict(tp_pager *pager, tp_extent *extent, tp_marker *decided) {
    if (!tp_extent_resident(extent->state) || extent->busy || extent->evict) return;
    if (extent->state == TP_EXTENT_DIRTY && pager->host_full) return;
    if (!decide(pager, decided)) return;
    extent->evict = true;
    extent->decided = *decided;
    tp_extent_list(pager, extent);
}

static bool same_extent(const tp_wish *wish, const tp_block *block, uint32_t extent) {
    return wish->block == block && wish->generation == block->generation &&
           wish->extent == extent;
}

/* The decision to fill an extent, if one has been made and nobody has used the block since. */
static const tp_wish *find_decided(const tp_executor *it, const tp_block *block,
                                   uint32_t extent) {
    for (uint32_t i = 0; i < it->decided_count; i++) {
        const tp_wish *wish = &it->decided[(it->decided_first + i) % TP_DECIDED_MAX];
        if (same_extent(wish, block, extent) && wish->stamp == block->stamp) return wish;
    }
    return NULL;
}

static void wish(tp_pager *pager, tp_block *block, uint32_t extent, tp_marker *decided) {
    tp_executor *it = &pager->executor;
    if (block->extents[extent].state != TP_EXTENT_HOST || it->wish_count == TP_WISHES_MAX) {
        return;
    }
    /* Not while an operator uses it in HOST: its kernels may be yet to come. */
    const bool in_use = block->op_pins > 0;
    const tp_wish *before = find_decided(it, block, extent);
    if (!in_use && before == NULL && !decide(pager, decided)) return;
    const tp_marker marker = in_use           ? (tp_marker){0}
                             : before != NULL ? before->decided
                                              : *decided;
    const size_t bytes = block->extents[extent].bytes;
    it->wishes[(it->wish_first + it->wish_count++) % TP_WISHES_MAX] =
        (tp_wish){block, block->generation, block->stamp, extent, bytes, marker, false};
    it->wish_bytes += bytes;
}

/* The block that an act is about; NULL: it does not apply. */
static tp_block *block_of(const tp_step *step, const tp_act *act) {
    const tp_identity *identity = tp_steps_live(step, act->block);
    if (identity == NULL || identity->dropped) return NULL;
    tp_block *block = TP_CONTAINER(identity, tp_block, identity);
    return tp_block_movable(block) && act->extent < block->extent_count ? block : NULL;
}

static void drop(tp_pager *pager, tp_block *block, bool park) {
    tp_executor *it = &pager->executor;
    const bool may = park ? pager->plans.park : pager->plans.recompute;
    if (!may || it->drop_count == TP_DROPS_MAX) return;
    for (uint32_t i = 0; i < it->drop_count; i++)
        if (it->drops[i].block == block) return; /* another extent of it */
    it->drops[it->drop_count++] =
        (tp_wish){.block = block, .generation = block->generation, .park = park};
}

/* A storage that is parked comes back as a whole. False: the act is about something else. */
static bool fill_parked(tp_pager *pager, const tp_step *step, const tp_act *act) {
    tp_identity *identity = tp_steps_live(step, act->block);
    if (identity == NULL || !identity->dropped) return false;
    if (act->kind == TP_ACT_FILL)
        tp_park_want(pager, TP_CONTAINER(identity, tp_dropped, identity));
    return true;
}

static void carry_out(tp_pager *pager, const tp_step *step, const tp_act *act,
                      tp_marker *decided) {
    if (fill_parked(pager, step, act)) return;
    tp_block *block = block_of(step, act);
    if (block == NULL) return;
    tp_extent *extent = &block->extents[act->extent];
    switch (act->kind) {
    case TP_ACT_WRITE_BACK: write_back(pager, extent, decided); break;
    case TP_ACT_EVICT:
        evict(pager, extent, decided);
        drop(pager, block, true);
        break;
    case TP_ACT_FILL: wish(pager, block, act->extent, decided); break;
    case TP_ACT_LEAVE: extent->leave = act->op + 1; break;
    case TP_ACT_DROP: drop(pager, block, false); break;
    case TP_ACT_RERUN:
    case TP_ACT_KEEP:
    case TP_ACT_DISCARD: break; /* by itself, where the block is used */
    }
}

/* ---- following ------------------------------------------------------------------------------- */

/* The step that is followed. NULL: none, or it has been forgotten since. */
static const tp_step *followed(const tp_pager *pager) {
    const tp_executor *it = &pager->executor;
    const tp_step *step = it->built != 0 ? pager->steps.at[it->slot] : NULL;
    return step != NULL && step->built == it->built ? step : NULL;
}

/* The first act that comes before an operator later than `op`. */
static uint32_t first_after(const tp_plan *plan, uint32_t op) {
    uint32_t low = 0, high = plan->act_count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (plan->acts[middle].op <= op) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    return low;
}

/* Where the program is, if a plan can be followed there. */
static const tp_plan *find_plan(tp_pager *pager) {
    tp_executor *it = &pager->executor;
    const tp_position where = tp_steps_where(&pager->steps);
    const bool known = where.step != NULL && !where.lost && where.op != TP_NO_OP;
    const tp_plan *plan = known ? tp_plans_find(&pager->plans, where.step) : NULL;
    it->following = plan != NULL && pager->offload && pager->capture_depth == 0 &&
                    !pager->page_out_before_op && !tp_pager_halted(pager);
    if (!it->following) return NULL;
    const bool moved_on = it->built == where.step->built &&
                          it->recording == pager->steps.record.number && !it->stale &&
                          where.op >= it->op;
    if (!moved_on) {
        if (where.op == 0) tp_plans_review(pager, where.step);
        /* A step has begun, or its sizes have just shown what kind it is of: everything in its list is
         * to come. In the middle of one: what has been missed is not caught up with. */
        const bool foreseen = it->foreseen == where.step->built && where.op == 0 && !it->stale;
        const bool other = it->built != where.step->built;
        const bool begins = it->recording != pager->steps.record.number || other;
        it->beginning = begins && !foreseen && where.op < EARLY_OPS;
        it->next = it->beginning  ? 0
                   : where.op > 0 ? first_after(plan, where.op - 1)
                   : foreseen     ? first_after(plan, 0)
                                  : 0;
        if (other && it->built != 0 && !foreseen) tp_executor_drop_wishes(pager);
        it->foreseen = 0;
        it->looked = it->decided_count = 0;
        it->slot = where.step->slot;
        it->built = where.step->built;
        it->recording = pager->steps.record.number;
        it->stale = false;
    }
    it->op = where.op;
    return plan;
}

/* A step begins. What its plan supposes to be on the device and is not (the plan is new, or the last
 * step left its own) comes as soon as it can, and what is needed last goes for it. */
static void put_right(tp_pager *pager, const tp_step *step, const tp_plan *plan) {
    size_t missing = 0;
    tp_marker decided = {0};
    for (uint32_t i = 0; i < plan->resident_count; i++) {
        const tp_identity *identity = tp_steps_live(step, plan->resident[i].block);
        if (identity == NULL || identity->dropped) continue;
        tp_block *block = TP_CONTAINER(identity, tp_block, identity);
        const uint32_t number = plan->resident[i].extent;
        if (!tp_block_movable(block) || number >= block->extent_count) continue;
        const tp_extent *extent = &block->extents[number];
        if (extent->state != TP_EXTENT_HOST || extent->device != NULL) continue;
        wish(pager, block, number, &decided);
        missing += extent->bytes;
    }
    if (missing == 0) return;
    const size_t spare = tp_reclaim_free_bytes(pager) + tp_reclaim_incoming(pager).bytes;
    if (missing > spare) (void)tp_reclaim_start(pager, missing - spare, 0);
    tp_pager_wake(pager);
}

/* Decides on the next fills, which are begun later. */
static void look_ahead(tp_pager *pager, const tp_step *step, const tp_plan *plan,
                       tp_marker *decided) {
    tp_executor *it = &pager->executor;
    size_t bytes = 0;
    uint32_t count = 0;
    for (uint32_t i = it->next; i < plan->act_count && i - it->next < LOOK_ACTS; i++) {
        const tp_act *act = &plan->acts[i];
        if (act->kind != TP_ACT_FILL) continue;
        tp_block *block = block_of(step, act);
        if (block == NULL) continue;
        const tp_extent *extent = &block->extents[act->extent];
        bytes += extent->bytes;
        if (bytes > LOOK_BYTES || ++count > LOOK_FILLS) return;
        if (i < it->looked) continue;
        it->looked = i + 1;
        if (extent->state != TP_EXTENT_HOST || extent->device != NULL) continue;
        if (block->op_pins > 0) continue;
        if (!decide(pager, decided)) return;
        if (it->decided_count == TP_DECIDED_MAX) {
            it->decided_first = (it->decided_first + 1) % TP_DECIDED_MAX;
            it->decided_count--;
        }
        const uint32_t place = it->decided_first + it->decided_count++;
        it->decided[place % TP_DECIDED_MAX] =
            (tp_wish){block,         block->generation, block->stamp, act->extent,
                      extent->bytes, *decided,          false};
    }
}

static void hand_out(tp_pager *pager, const tp_step *step, const tp_plan *plan,
                     uint32_t until) {
    tp_executor *it = &pager->executor;
    tp_marker decided = {0};
    const uint32_t first = it->next;
    while (it->next < plan->act_count && plan->acts[it->next].op <= until) {
        carry_out(pager, step, &plan->acts[it->next++], &decided);
    }
    if (it->next == first) return;
    look_ahead(pager, step, plan, &decided);
    tp_reclaim_claim(pager);
    tp_pager_wake(pager);
}

/* A step has launched its last operator: what comes before the first one of the step that follows
 * as a rule. */
static void foresee(tp_pager *pager, const tp_step *step) {
    const tp_step *next = tp_steps_expected(&pager->steps, step);
    const tp_plan *plan = next != NULL ? tp_plans_find(&pager->plans, next) : NULL;
    if (plan == NULL) return;
    put_right(pager, next, plan);
    tp_marker decided = {0};
    for (uint32_t i = 0; i < plan->act_count && plan->acts[i].op == 0; i++) {
        if (plan->acts[i].kind != TP_ACT_LEAVE)
            carry_out(pager, next, &plan->acts[i], &decided);
    }
    pager->executor.foreseen = next->built;
    tp_reclaim_claim(pager);
    tp_pager_wake(pager);
}

void tp_executor_begin(tp_pager *pager) {
    if (!tp_steps_on(&pager->steps)) return;
    tp_plans_poll(pager);
    const tp_plan *plan = find_plan(pager);
    if (plan == NULL) return;
    pager->stats.planned_ops++;
    const tp_step *step = followed(pager);
    if (pager->executor.beginning) put_right(pager, step, plan);
    pager->executor.beginning = false;
    hand_out(pager, step, plan, pager->executor.op);
}

void tp_executor_launched(tp_pager *pager) {
    tp_executor *it = &pager->executor;
    if (!it->following || it->stale || tp_pager_halted(pager)) return;
    if (it->recording != pager->steps.record.number) return;
    const tp_step *step = followed(pager);
    const tp_plan *plan = step != NULL ? tp_plans_find(&pager->plans, step) : NULL;
    if (plan == NULL) return;
    hand_out(pager, step, plan, it->op + 1);
    if (it->op + 1 == step->trace.op_count && it->foreseen == 0) foresee(pager, step);
}

bool tp_executor_needs_recipe(const tp_pager *pager) {
    const tp_executor *it = &pager->executor;
    if (!it->following || !pager->plans.park || !pager->steps.matched) return false;
    const tp_step *step = followed(pager);
    return step != NULL && tp_plans_reruns(&pager->plans, step, it->op);
}

static bool is_among(tp_pager *pager, const tp_block *block, const tp_access *accesses,
                     size_t count) {
    for (size_t i = 0; i < count; i++)
        if (tp_block_live(pager, accesses[i].addr) == block) return true;
    return false;
}

uint32_t tp_executor_take_drops(tp_pager *pager, const tp_access *accesses, size_t count,
                                tp_addr *out, bool *park) {
    tp_executor *it = &pager->executor;
    const bool wait = tp_pager_gate_closed(pager) || pager->capture_depth > 0;
    uint32_t taken = 0, left = 0;
    for (uint32_t i = 0; i < it->drop_count; i++) {
        tp_block *block = it->drops[i].block;
        const bool alive =
            block->generation == it->drops[i].generation && block->life == TP_BLOCK_LIVE;
        if (!alive || !tp_block_movable(block) || is_among(pager, block, accesses, count))
            continue;
        if (block->op_pins > 0 || wait) {
            it->drops[left++] = it->drops[i];
        } else {
            park[taken] = it->drops[i].park;
            out[taken++] = block->addr;
        }
    }
    it->drop_count = left;
    return taken;
}

void tp_executor_stop(tp_pager *pager) {
    pager->executor.following = false;
    pager->executor.built = 0;
    pager->executor.drop_count = 0;
    tp_executor_drop_wishes(pager);
}

void tp_executor_drop_wishes(tp_pager *pager) {
    pager->executor.wish_count = 0;
    pager->executor.wish_bytes = 0;
}

bool tp_executor_leaves(const tp_pager *pager, const tp_extent *extent) {
    const tp_executor *it = &pager->executor;
    return it->following && extent->leave != 0 && extent->leave == it->op + 1;
}

uint32_t tp_executor_distance(const tp_pager *pager, const tp_block *block) {
    const tp_step *step = followed(pager);
    const uint32_t number = step != NULL ? tp_steps_block(step, &block->identity) : TP_NO_OP;
    if (number == TP_NO_OP) return UINT32_MAX;
    const uint32_t op = pager->executor.op;
    const uint32_t next = tp_steps_next_use(step, number, op + 1);
    return next == TP_NO_OP ? UINT32_MAX : next - op;
}

/* ---- fills ----------------------------------------------------------------------------------- */

static void wish_done(tp_executor *it) {
    const tp_wish *wish = &it->wishes[it->wish_first];
    it->wish_bytes -= tp_min_size(it->wish_bytes, wish->bytes);
    it->wish_first = (it->wish_first + 1) % TP_WISHES_MAX;
    it->wish_count--;
}

bool tp_executor_fill(tp_pager *pager) {
    tp_executor *it = &pager->executor;
    bool begun = false;
    if (it->wish_count > 0 && tp_pager_now(pager) - it->refused_ns < REFUSED_NS) return false;
    while (it->wish_count > 0 && !tp_pager_halted(pager)) {
        const tp_wish wish = it->wishes[it->wish_first];
        tp_block *block = wish.block;
        const bool alive = block->generation == wish.generation && block->life == TP_BLOCK_LIVE;
        tp_extent *extent = alive ? &block->extents[wish.extent] : NULL;
        if (!alive || extent->state != TP_EXTENT_HOST || extent->device != NULL) {
            wish_done(it);
            continue;
        }
        bool dropped = false;
        tp_frame *frame = tp_reclaim_spare_frame(pager, extent->bytes, &dropped);
        begun |= dropped;
        if (frame == NULL && dropped) it->refused_ns = tp_pager_now(pager);
        if (frame == NULL) break;
        begun = true;
        /* While the lock was dropped the list may have been emptied, and filled again. */
        if (it->wish_count > 0 && it->wishes[it->wish_first].block == block) wish_done(it);
        const bool stands = block->stamp == wish.stamp && wish.decided.seq != 0;
        const tp_marker *decided = stands ? &wish.decided : NULL;
        (void)tp_fill_begin(pager, block, wish.generation, extent, 0, frame, decided);
    }
    return begun;
}
