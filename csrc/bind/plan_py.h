/* plan_py: the planner as Python sees it (make_plan in python/torchpager/_core.pyi), and traces that
 * Python hands over. */
#ifndef TP_BIND_PLAN_PY_H
#define TP_BIND_PLAN_PY_H

#include "tp.h"

enum { TP_BIND_TRACE_COLUMNS = 8 };

/* A trace of a step from a tuple of at least so many columns, in the order of make_plan's
 * arguments. False: a Python error is set. Operands and lives are not checked (tp_trace_check). */
bool tp_bind_trace_make(void *tuple, tp_trace *out);
void tp_bind_trace_free(const tp_trace *trace);

/* `args` and `kwargs` are those of the call, borrowed PyObjects. NULL: a Python error is set or, if
 * not, *error says what the planner answered. Releases the GIL while it plans. */
void *tp_bind_make_plan(void *args, void *kwargs, tp_error *error);

#endif
