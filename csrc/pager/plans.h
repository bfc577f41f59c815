/* plans: makes the plans for the kinds of step that are remembered, on a thread of its own, so that
 * neither the launching thread nor the pager's waits for one.
 *
 * A plan belongs to the step it was made of for as long as that step is remembered: other times,
 * or another budget, ask for a better one, and until it is there the old one is carried out. What
 * cannot be planned (an operator's operands do not fit) is paged on demand.
 *
 * Expects the pager's lock; what plans drops it meanwhile. */
#ifndef TP_PAGER_PLANS_H
#define TP_PAGER_PLANS_H

#include "base/lock.h"
#include "pager/plan.h"
#include "pager/steps.h"

struct tp_pager;

/* What is to be done in one kind of step. */
typedef struct tp_schedule {
    uint64_t built; /* tp_step.built of the step it is for; 0: there is no plan */
    size_t cap;     /* what frames might add up to when it was made */
    tp_plan plan;
    uint64_t *
        needed; /* a bit for each operator whose recipe it reruns, or whose results it evicts; NULL: none */
} tp_schedule;

typedef struct tp_plans {
    tp_schedule at[TP_KINDS_MAX]; /* by tp_step.slot */
    tp_cond wanted;
    pthread_t thread;
    bool thread_started, stop;
    bool off;             /* none are made or found */
    bool recompute;       /* blocks may be dropped and made again */
    bool park;            /* those that are evicted may lose their addresses (pager/park.h) */
    uint64_t seen_number; /* the last step that the thread was woken for */
} tp_plans;

TP_MUST_USE tp_status tp_plans_init(tp_plans *plans, tp_error *error);
/* Ends the thread. Lock not held. */
void tp_plans_stop(struct tp_pager *pager);
void tp_plans_fini(tp_plans *plans);

/* Wakes the thread if there is a step to plan for; the first time, starts it. O(1). */
void tp_plans_poll(struct tp_pager *pager);
/* All steps are planned for again: the budget is another one. */
void tp_plans_renew(struct tp_pager *pager);
/* Makes one plan. Drops the lock. False: nothing was to be planned. */
bool tp_plans_step(struct tp_pager *pager);
/* At the beginning of a step: plans anew if the frames may add up to something else by now. */
void tp_plans_review(struct tp_pager *pager, tp_step *step);
/* The plan for a step, or NULL. */
const tp_plan *tp_plans_find(const tp_plans *plans, const tp_step *step);
/* Whether the plan for a step reruns that operator, the first of a recipe. O(1). */
bool tp_plans_reruns(const tp_plans *plans, const tp_step *step, uint32_t op);

#endif
