/* trace: one step of a program, as the planner sees it. Plain data; nothing here is
 * allocated or owned. Pure: no device, no lock. */
#ifndef TP_PAGER_TRACE_H
#define TP_PAGER_TRACE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* In place of the index of an operator. */
#define TP_NO_OP UINT32_MAX

/* A block. Born just before an operator, dead just after one; TP_NO_OP twice: it lives
 * through the whole step. dead_op < born_op: it lives across the step's boundary. */
typedef struct tp_trace_block {
    uint64_t bytes;
    uint32_t born_op, dead_op;
} tp_trace_block;

/* A block among the operands of an operator; each at most once. */
typedef struct tp_trace_operand {
    uint32_t block;
    bool reads, writes;
} tp_trace_operand;

typedef struct tp_trace_op {
    uint64_t device_ns;
    uint32_t operand_begin, operand_count; /* its part of tp_trace.operands */
    bool streams; /* goes over each operand once, so that one in HOST costs what a copy does */
} tp_trace_op;

/* How the bytes of some blocks can be made again. Only of operators that may be rerun: the
 * planner takes the word of whoever recorded it for that. It checks itself that no operator
 * writes the outputs later, and it reruns only where the inputs hold what they held. */
typedef struct tp_trace_recipe {
    uint64_t device_ns; /* of a rerun: the operator with those that it calls */
    uint32_t op;        /* behind which the outputs are complete */
    /* Its part of tp_trace.recipe_blocks: the inputs, then all blocks that it allocates and
     * that outlive it. A block is an output of one recipe at most. */
    uint32_t block_begin, input_count, output_count;
} tp_trace_recipe;

typedef struct tp_trace {
    const tp_trace_op *ops;
    const tp_trace_operand *operands;
    const tp_trace_block *blocks;
    uint32_t op_count, operand_count, block_count;
    const tp_trace_recipe *recipes; /* ops rise from one to the next */
    const uint32_t *recipe_blocks;
    uint32_t recipe_count, recipe_block_count;
} tp_trace;

/* Whether a block is alive while an operator runs. */
bool tp_trace_block_is_alive(const tp_trace_block *block, uint32_t op);
bool tp_trace_is_alive(const tp_trace *trace, uint32_t block, uint32_t op);

/* TP_INVALID, with the reason, if an index leads nowhere, an operand is not alive, or a recipe
 * does not allocate its outputs. */
TP_MUST_USE tp_status tp_trace_check(const tp_trace *trace, tp_error *error);

/* Of `count` operators, ascending: the place of the first that is not before `op`; `count`: none is. */
static inline uint32_t tp_ops_from(const uint32_t *ops, uint32_t count, uint32_t op) {
    uint32_t low = 0, high = count;
    while (low < high) {
        const uint32_t middle = low + (high - low) / 2;
        if (ops[middle] < op)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

#endif
