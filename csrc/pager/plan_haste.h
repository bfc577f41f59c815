/* plan_haste: the acts of a plan, moved up where nothing stands in their way.
 *
 * In the model an act takes no longer than its copy. On a device it also waits for a thread, a mapping and
 * the operators that were queued before it, and the program waits for it in turn. So an act comes
 * some time before the model has it:
 *
 * - an eviction, where its extent is idle by then;
 * - a fill, where there is memory for it all that time;
 * - and what goes early in a step, unused till then and clean, goes as soon as it is idle in the step
 *   before: an eviction takes the driver's lock for a while, which those wait for that allocate,
 *   and most are born where a step begins.
 *
 * Part of plan. Pure. */
#ifndef TP_PAGER_PLAN_HASTE_H
#define TP_PAGER_PLAN_HASTE_H

#include "pager/plan_model.h"

/* Of an operator, in the model. */
typedef struct tp_plan_times {
    uint64_t began_ns;
    uint64_t begin_free; /* bytes, when its births have theirs */
    uint64_t least_free; /* from then on until the next operator begins */
} tp_plan_times;

/* `times`: of each operator; what fills take earlier is taken off. False: no host memory. */
bool tp_plan_haste(tp_plan *plan, const tp_model *model, tp_plan_times *times);

#endif
