#include "pager/plans.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "pager/extent.h"
#include "pager/pager.h"

/* What is left out of plans, for frames that are on their way from one user to the next, and for those of
 * other sizes: the largest extent, within these parts of the budget. */
enum { SPARE_SHARE_MIN = 256, SPARE_SHARE_MAX = 64 };

tp_status tp_plans_init(tp_plans *plans, tp_error *error) {
    memset(plans, 0, sizeof *plans);
    return tp_cond_init(&plans->wanted, error);
}

void tp_plans_fini(tp_plans *plans) {
    for (uint32_t i = 0; i < TP_KINDS_MAX; i++) {
        tp_plan_fini(&plans->at[i].plan);
        free(plans->at[i].needed);
    }
    tp_cond_fini(&plans->wanted);
}

const tp_plan *tp_plans_find(const tp_plans *plans, const tp_step *step) {
    if (plans->off) return NULL;
    const tp_schedule *schedule = &plans->at[step->slot];
    return schedule->built == step->built && schedule->built != 0 ? &schedule->plan : NULL;
}

bool tp_plans_reruns(const tp_plans *plans, const tp_step *step, uint32_t op) {
    if (tp_plans_find(plans, step) == NULL || op >= step->trace.op_count) return false;
    const uint64_t *needed = plans->at[step->slot].needed;
    return needed != NULL && (needed[op / 64] >> op % 64 & 1) != 0;
}

/* ---- what to plan for ------------------------------------------------------------------------ */

/* A step as it can be planned for: what does not move is no part of it, and takes its bytes out of
 * the budget. */
typedef struct draft {
    tp_trace trace;
    tp_trace_block *blocks;
    tp_plan_config config;
} draft;

static bool draft_make(const tp_pager *pager, const tp_step *step, draft *out) {
    const uint32_t count = step->trace.block_count;
    tp_trace_block *blocks = malloc((count > 0 ? count : 1) * sizeof *blocks);
    if (blocks == NULL) return false;
    const size_t cap = tp_budget_frame_cap(&pager->budget);
    size_t fixed = 0;
    for (uint32_t i = 0; i < count; i++) {
        blocks[i] = step->trace.blocks[i];
        const tp_identity *identity = tp_steps_live(step, i);
        if (identity == NULL || identity->dropped) continue;
        const tp_block *block = TP_CONTAINER(identity, tp_block, identity);
        if (tp_block_movable(block)) continue;
        blocks[i].bytes = 0;
        fixed += block->bytes;
    }
    *out = (draft){.trace = step->trace, .blocks = blocks};
    out->trace.blocks = blocks;
    const size_t spare =
        tp_min_size(cap / SPARE_SHARE_MAX,
                    tp_max_size(cap / SPARE_SHARE_MIN, pager->space.extent_max_bytes));
    tp_plan_config_init(&out->config, tp_sub_floor(cap - spare, fixed));
    const tp_device_caps *caps = &pager->dev->caps;
    if (caps->link_bytes_per_s != 0) {
        out->config.link_bytes_per_s = caps->link_bytes_per_s;
        out->config.link_both_bytes_per_s = caps->link_both_bytes_per_s;
    }
    out->config.granularity_bytes = pager->space.granularity_bytes;
    out->config.extent_max_bytes = pager->space.extent_max_bytes;
    out->config.large_min_bytes = 1; /* whatever has extents can move */
    out->config.no_keep = true;      /* what the program has freed is gone */
    if (!pager->plans.recompute) out->trace.recipe_count = out->trace.recipe_block_count = 0;
    return true;
}

/* See tp_schedule. NULL also where memory is short: then nobody keeps a recipe, and nothing goes. What is
 * only evicted is known by its recipe, too. */
static uint64_t *list_needed(const tp_step *step, const tp_plan *plan) {
    const tp_trace *trace = &step->trace;
    uint64_t *needed = calloc(trace->op_count / 64 + 1, sizeof *needed);
    uint32_t *made_by = calloc(trace->block_count, sizeof *made_by); /* 1 + the operator */
    if (needed == NULL || made_by == NULL) {
        free(made_by);
        free(needed);
        return NULL;
    }
    for (uint32_t i = 0; i < trace->recipe_count; i++) {
        const tp_trace_recipe *it = &trace->recipes[i];
        const uint32_t *outputs = trace->recipe_blocks + it->block_begin + it->input_count;
        for (uint32_t k = 0; k < it->output_count; k++)
            made_by[outputs[k]] = 1 + step->recipe_ops[i];
    }
    for (uint32_t i = 0; i < plan->act_count; i++) {
        const tp_act *act = &plan->acts[i];
        const bool goes = act->kind == TP_ACT_RERUN || act->kind == TP_ACT_EVICT;
        if (!goes || made_by[act->block] == 0) continue;
        const uint32_t op = made_by[act->block] - 1;
        needed[op / 64] |= (uint64_t)1 << op % 64;
    }
    free(made_by);
    return needed;
}

bool tp_plans_step(tp_pager *pager) {
    tp_step *step = tp_steps_take_new(&pager->steps);
    if (step == NULL) return false;
    draft it;
    const size_t cap = tp_budget_frame_cap(&pager->budget);
    if (draft_make(pager, step, &it)) {
        tp_plan plan = {0};
        const uint64_t began = tp_now_ns();
        const bool park = pager->plans.park;
        tp_lock_drop(&pager->lock);
        const tp_status status = tp_plan_make(&it.trace, &it.config, &plan, NULL);
        free(it.blocks);
        uint64_t *needed = park ? list_needed(step, &plan) : NULL;
        tp_lock_take(&pager->lock);
        tp_schedule *schedule = &pager->plans.at[step->slot];
        tp_plan_fini(&schedule->plan);
        free(schedule->needed);
        *schedule = (tp_schedule){.built = status == TP_OK ? step->built : 0,
                                  .cap = cap,
                                  .plan = plan,
                                  .needed = needed};
        pager->stats.planned_drop_bytes = plan.dropped_bytes;
        tp_tally_add(&pager->stats.plans, 0, tp_now_ns() - began);
        pager->executor.stale =
            true; /* its place in the old list means nothing in the new one */
    }
    tp_steps_give(step);
    return true;
}

/* ---- the thread ------------------------------------------------------------------------------ */

static void *run(void *arg) {
    tp_pager *pager = arg;
    tp_lock_take(&pager->lock);
    while (!pager->plans.stop) {
        if (tp_plans_step(pager)) continue;
        (void)tp_cond_wait(&pager->plans.wanted, &pager->lock, 0);
    }
    tp_lock_drop(&pager->lock);
    return NULL;
}

void tp_plans_poll(tp_pager *pager) {
    tp_plans *plans = &pager->plans;
    if (plans->seen_number == pager->steps.number || pager->abandoned || plans->off) return;
    if (pager->no_thread) return; /* made behind the next operator */
    plans->seen_number = pager->steps.number;
    if (!plans->thread_started) {
        /* Without it there are no plans, and paging is on demand. */
        plans->thread_started = pthread_create(&plans->thread, NULL, run, pager) == 0;
    }
    tp_cond_broadcast(&plans->wanted);
}

void tp_plans_review(tp_pager *pager, tp_step *step) {
    const size_t cap = tp_budget_frame_cap(&pager->budget);
    const size_t planned = pager->plans.at[step->slot].cap;
    const size_t change = cap > planned ? cap - planned : planned - cap;
    if (change <= cap / SPARE_SHARE_MAX) return;
    step->fresh = true;
    tp_cond_broadcast(&pager->plans.wanted);
}

void tp_plans_renew(tp_pager *pager) {
    tp_steps_renew(&pager->steps);
    if (pager->plans.thread_started) tp_cond_broadcast(&pager->plans.wanted);
}

void tp_plans_stop(tp_pager *pager) {
    tp_plans *plans = &pager->plans;
    tp_lock_take(&pager->lock);
    const bool started = plans->thread_started;
    plans->stop = true;
    tp_cond_broadcast(&plans->wanted);
    tp_lock_drop(&pager->lock);
    if (started) (void)pthread_join(plans->thread, NULL);
    plans->thread_started = false;
}
