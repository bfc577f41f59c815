/* plan_rerun: a trace with reruns in it, for which the planner then plans as for any other;
 * and the way back from that plan to the trace that was recorded. Part of plan. Pure.
 *
 * Each rerun is an operator before the one that needs its result. Each stretch in which a block
 * has its bytes, a life, is a block. */
#ifndef TP_PAGER_PLAN_RERUN_H
#define TP_PAGER_PLAN_RERUN_H

#include "pager/plan_drop.h"

typedef struct tp_rerun_trace {
    tp_trace trace; /* of the tables below; no recipes */
    tp_trace_op *ops;
    tp_trace_operand *operands;
    tp_trace_block *blocks;
    uint32_t *block_of; /* which block each is a life of */
    uint32_t *op_of;    /* which operator each is, or comes before */
    tp_act *acts;       /* drops, reruns, ...: by `op`, which is one of this trace */
    uint32_t act_count;
    uint32_t rerun_count;
    uint64_t rerun_ns, dropped_bytes;
} tp_rerun_trace;

/* The trace under `drops`. TP_INVALID: a rerun would not find its inputs as they were.
 * TP_NO_HOST_MEMORY. The caller frees *out with tp_rerun_trace_fini. */
TP_MUST_USE tp_status tp_rerun_trace_make(const tp_trace *trace, const tp_drops *drops,
                                          tp_rerun_trace *out, tp_error *error);
void tp_rerun_trace_fini(tp_rerun_trace *it);

/* Turns a plan for it->trace into one for the recorded trace. TP_NO_HOST_MEMORY: *plan is as it
 * was. */
TP_MUST_USE tp_status tp_rerun_trace_translate(const tp_rerun_trace *it, tp_plan *plan,
                                               tp_error *error);

#endif
