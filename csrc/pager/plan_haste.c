#include "pager/plan_haste.h"

#include <stdlib.h>
#include <string.h>

/* The act at `from` goes to `to`, before it, and to an operator no later than the ones behind. */
static void move_up(tp_plan *plan, uint32_t from, uint32_t to, uint32_t op) {
    tp_act act = plan->acts[from];
    act.op = op;
    memmove(&plan->acts[to + 1], &plan->acts[to], (from - to) * sizeof act);
    plan->acts[to] = act;
}

static bool same_extent(const tp_act *a, const tp_act *b) {
    return a->block == b->block && a->extent == b->extent;
}

/* The first operator that starts less than `ahead_ns` before operator `op`, or that one. */
static uint32_t soon_from(const tp_plan_times *times, uint32_t op, uint64_t ahead_ns) {
    uint32_t low = 0, high = op;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (times[middle].began_ns + ahead_ns < times[op].began_ns)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* ---- evictions --------------------------------------------------------------------------- */

/* The operator behind which no other uses the block before operator `op`; 0: none does. */
static uint32_t idle_from(const tp_model *m, uint32_t block, uint32_t op) {
    const uint32_t *uses = m->uses + m->block_uses[block];
    const uint32_t place =
        tp_ops_from(uses, m->block_uses[block + 1] - m->block_uses[block], op);
    return place == 0 ? 0 : uses[place - 1] + 1;
}

static void hasten_eviction(tp_plan *plan, uint32_t from, uint32_t op) {
    const tp_act act = plan->acts[from];
    uint32_t to = from;
    for (; to > 0; to--) {
        const tp_act *before = &plan->acts[to - 1];
        if (before->op < op || (before->op == op && before->kind == TP_ACT_EVICT)) break;
        if (same_extent(before, &act)) { /* its write-back */
            op = before->op;
            break;
        }
    }
    if (op < act.op) move_up(plan, from, to, op);
}

static void hasten_evictions(tp_plan *plan, const tp_model *m, const tp_plan_times *times) {
    for (uint32_t i = 0; i < plan->act_count; i++) {
        const tp_act *act = &plan->acts[i];
        if (act->kind != TP_ACT_EVICT) continue;
        const uint32_t idle = idle_from(m, act->block, act->op);
        const uint32_t soon = soon_from(times, act->op, m->config.evict_ahead_ns);
        hasten_eviction(plan, i, idle > soon ? idle : soon);
    }
}

/* ---- evictions in the step before -------------------------------------------------------- */

typedef struct extra_evictions {
    uint32_t *first, *last; /* of each unit: 1 + its first and its last act; 0: it has none */
    tp_act *acts;
    uint32_t count;
} extra_evictions;

static uint32_t unit_of(const tp_model *m, const tp_act *act) {
    return m->block_units[act->block] + act->extent;
}

/* When the extent of the eviction at `i` is idle at the end of the step before; 0: it is not. */
static uint32_t idle_before(const tp_plan *plan, const tp_model *m, const extra_evictions *it,
                            uint32_t i) {
    const tp_act *act = &plan->acts[i];
    const uint32_t unit = unit_of(m, act);
    if (act->kind != TP_ACT_EVICT || m->trace->blocks[act->block].born_op != TP_NO_OP) return 0;
    const bool is_first = it->first[unit] == i + 1 && idle_from(m, act->block, act->op) == 0;
    if (!is_first || it->last[unit] == i + 1) return 0;
    const tp_act *last = &plan->acts[it->last[unit] - 1];
    if (last->kind != TP_ACT_FILL && last->kind != TP_ACT_WRITE_BACK) return 0;
    const uint32_t idle = idle_from(m, act->block, m->trace->op_count);
    return idle > last->op ? idle : last->op;
}

static int by_op(const void *left, const void *right) {
    const tp_act *a = left, *b = right;
    if (a->op != b->op) return a->op < b->op ? -1 : 1;
    if (a->block != b->block) return a->block < b->block ? -1 : 1;
    return a->extent < b->extent ? -1 : a->extent > b->extent;
}

static void find_extra(const tp_plan *plan, const tp_model *m, extra_evictions *it) {
    for (uint32_t i = 0; i < plan->act_count; i++) {
        const uint32_t unit = unit_of(m, &plan->acts[i]);
        if (it->first[unit] == 0) it->first[unit] = i + 1;
        it->last[unit] = i + 1;
    }
    for (uint32_t i = 0; i < plan->act_count; i++) {
        const uint32_t op = idle_before(plan, m, it, i);
        if (op == 0 || op >= m->trace->op_count) continue;
        it->acts[it->count] = plan->acts[i];
        it->acts[it->count++].op = op;
    }
    if (it->count > 0) qsort(it->acts, it->count, sizeof *it->acts, by_op);
}

/* They come behind the other acts before their operator; what they evict is not supposed to be there when a
 * step begins. The evictions they go ahead of stay: in a step behind another one they are still
 * to be carried out. */
static void merge_extra(tp_plan *plan, const tp_model *m, const extra_evictions *it,
                        tp_act *merged) {
    uint32_t own = 0, extra = 0, count = 0;
    while (own < plan->act_count || extra < it->count) {
        const bool is_own = extra == it->count ||
                            (own < plan->act_count && plan->acts[own].op <= it->acts[extra].op);
        merged[count++] = is_own ? plan->acts[own++] : it->acts[extra++];
    }
    free(plan->acts);
    plan->acts = merged;
    plan->act_count = count;
    for (uint32_t i = 0; i < it->count; i++) it->first[unit_of(m, &it->acts[i])] = UINT32_MAX;
    uint32_t kept = 0;
    for (uint32_t i = 0; i < plan->resident_count; i++) {
        const tp_plan_extent place = plan->resident[i];
        if (it->first[m->block_units[place.block] + place.extent] != UINT32_MAX)
            plan->resident[kept++] = place;
    }
    plan->resident_count = kept;
}

static bool evict_before(tp_plan *plan, const tp_model *m) {
    extra_evictions it = {.first = calloc(m->unit_count + 1, sizeof *it.first),
                          .last = calloc(m->unit_count + 1, sizeof *it.last),
                          .acts = malloc((plan->act_count + 1) * sizeof *it.acts)};
    tp_act *merged = malloc((2 * (size_t)plan->act_count + 1) * sizeof *merged);
    const bool made = it.first != NULL && it.last != NULL && it.acts != NULL && merged != NULL;
    if (made) find_extra(plan, m, &it);
    if (made)
        merge_extra(plan, m, &it, merged);
    else
        free(merged);
    free(it.first);
    free(it.last);
    free(it.acts);
    return made;
}

/* ---- fills ------------------------------------------------------------------------------- */

/* What fills leave, for what the model does not know. */
enum { LEFT_SHARE = 32 };

/* The earliest operator from `op` on before which a fill may come that the plan has before operator
 * `until`: it has its memory from then on, and what is evicted for others may only come behind. */
static uint32_t room_from(const tp_plan_times *times, uint32_t op, uint32_t until,
                          uint64_t bytes) {
    if (until == 0 || times[until - 1].begin_free < bytes) return until;
    uint32_t from = until;
    for (; from > op && from > 1; from--) {
        const tp_plan_times *before = &times[from - 2];
        if (before->begin_free < bytes || before->least_free < bytes) break;
    }
    return from;
}

static void take_room(tp_plan_times *times, uint32_t op, uint32_t until, uint64_t bytes) {
    for (uint32_t at = op; at < until; at++) times[at - 1].least_free -= bytes;
    for (uint32_t at = op; at <= until; at++) times[at - 1].begin_free -= bytes;
}

static void hasten_fills(tp_plan *plan, const tp_model *m, tp_plan_times *times) {
    const uint64_t left = m->config.budget_bytes / LEFT_SHARE;
    for (uint32_t i = 0; i < plan->act_count; i++) {
        const tp_act act = plan->acts[i];
        if (act.kind != TP_ACT_FILL) continue;
        const uint64_t bytes = m->units[unit_of(m, &act)].bytes;
        uint32_t op = soon_from(times, act.op, m->config.fill_ahead_ns);
        op = room_from(times, op, act.op, bytes + left);
        uint32_t to = i;
        for (; to > 0 && plan->acts[to - 1].op >= op; to--) {
            const tp_act *before = &plan->acts[to - 1];
            /* Fills stay in order. */
            if (before->kind != TP_ACT_FILL && !same_extent(before, &act)) continue;
            op = before->op;
            break;
        }
        if (op >= act.op || op == 0) continue;
        take_room(times, op, act.op, bytes);
        move_up(plan, i, to, op);
    }
}

bool tp_plan_haste(tp_plan *plan, const tp_model *model, tp_plan_times *times) {
    if (model->config.evict_ahead_ns > 0) hasten_evictions(plan, model, times);
    if (model->config.fill_ahead_ns > 0) hasten_fills(plan, model, times);
    return !model->config.evict_before || evict_before(plan, model);
}
