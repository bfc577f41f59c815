/* plan_py: the planner as Python sees it (make_plan in python/torchpager/_core.pyi). */
#ifndef TP_BIND_PLAN_PY_H
#define TP_BIND_PLAN_PY_H

#include "base/status.h"

/* `args` and `kwargs` are those of the call, borrowed PyObjects. NULL: a Python error is set or, if
 * not, *error says what the planner answered. Releases the GIL while it plans. */
void *tp_bind_make_plan(void *args, void *kwargs, tp_error *error);

#endif
