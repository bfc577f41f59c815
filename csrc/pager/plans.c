#include "pager/plans.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "pager/extent.h"
#include "pager/pager.h"

/* Of the budget: what is left out of plans for frames that are on their way from one user to the
 * next, and for those of other sizes. */
enum { SPARE_SHARE = 64 };

tp_status tp_plans_init(tp_plans *plans, tp_error *error) {
    memset(plans, 0, sizeof *plans);
    return tp_cond_init(&plans->wanted, error);
}

void tp_plans_fini(tp_plans *plans) {
    for (uint32_t i = 0; i < TP_KINDS_MAX; i++) tp_plan_fini(&plans->at[i].plan);
    tp_cond_fini(&plans->wanted);
}

const tp_plan *tp_plans_find(const tp_plans *plans, const tp_step *step) {
    if (plans->off) return NULL;
    const tp_schedule *schedule = &plans->at[step->slot];
    return schedule->built == step->built && schedule->built != 0 ? &schedule->plan : NULL;
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
    tp_plan_config_init(&out->config, tp_sub_floor(cap - cap / SPARE_SHARE, fixed));
    out->config.granularity_bytes = pager->space.granularity_bytes;
    out->config.extent_max_bytes = pager->space.extent_max_bytes;
    out->config.large_min_bytes = 1; /* whatever has extents can move */
    return true;
}

bool tp_plans_step(tp_pager *pager) {
    tp_step *step = tp_steps_take_new(&pager->steps);
    if (step == NULL) return false;
    draft it;
    const size_t cap = tp_budget_frame_cap(&pager->budget);
    if (draft_make(pager, step, &it)) {
        tp_plan plan = {0};
        const uint64_t began = tp_now_ns();
        tp_lock_drop(&pager->lock);
        const tp_status status = tp_plan_make(&it.trace, &it.config, &plan, NULL);
        free(it.blocks);
        tp_lock_take(&pager->lock);
        tp_schedule *schedule = &pager->plans.at[step->slot];
        tp_plan_fini(&schedule->plan);
        *schedule =
            (tp_schedule){.built = status == TP_OK ? step->built : 0, .cap = cap, .plan = plan};
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
    if (change <= cap / SPARE_SHARE) return;
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
