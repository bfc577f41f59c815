#include "pager/trace.h"

#include "base/check.h"

static tp_status check_blocks(const tp_trace *trace, tp_error *error) {
    for (uint32_t i = 0; i < trace->block_count; i++) {
        const tp_trace_block *it = &trace->blocks[i];
        const bool carried = it->born_op == TP_NO_OP && it->dead_op == TP_NO_OP;
        if (!carried && (it->born_op >= trace->op_count || it->dead_op >= trace->op_count))
            return tp_error_set(error, TP_INVALID, "block %u is born or dies at no operator",
                                i);
    }
    return TP_OK;
}

bool tp_trace_block_is_alive(const tp_trace_block *it, uint32_t op) {
    if (it->born_op == TP_NO_OP) return true;
    const bool born = op >= it->born_op, gone = op > it->dead_op;
    return it->dead_op < it->born_op ? born || !gone : born && !gone;
}

bool tp_trace_is_alive(const tp_trace *trace, uint32_t block, uint32_t op) {
    return tp_trace_block_is_alive(&trace->blocks[block], op);
}

static tp_status check_op(const tp_trace *trace, uint32_t op, tp_error *error) {
    const tp_trace_op *it = &trace->ops[op];
    if (it->operand_begin > trace->operand_count ||
        it->operand_count > trace->operand_count - it->operand_begin)
        return tp_error_set(error, TP_INVALID, "the operands of operator %u lead nowhere", op);
    for (uint32_t i = 0; i < it->operand_count; i++) {
        const uint32_t block = trace->operands[it->operand_begin + i].block;
        if (block >= trace->block_count)
            return tp_error_set(error, TP_INVALID, "operator %u has no block %u", op, block);
        if (!tp_trace_is_alive(trace, block, op))
            return tp_error_set(error, TP_INVALID, "operator %u uses block %u, not alive", op,
                                block);
    }
    return TP_OK;
}

static tp_status check_outputs(const tp_trace *trace, uint32_t recipe, tp_error *error) {
    const tp_trace_recipe *it = &trace->recipes[recipe];
    const uint32_t *outputs = trace->recipe_blocks + it->block_begin + it->input_count;
    for (uint32_t i = 0; i < it->output_count; i++) {
        const tp_trace_block *block = &trace->blocks[outputs[i]];
        if (block->born_op == TP_NO_OP || block->born_op > it->op || block->dead_op < it->op)
            return tp_error_set(error, TP_INVALID, "recipe %u does not allocate block %u",
                                recipe, outputs[i]);
    }
    return TP_OK;
}

static tp_status check_recipes(const tp_trace *trace, tp_error *error) {
    for (uint32_t i = 0; i < trace->recipe_block_count; i++)
        if (trace->recipe_blocks[i] >= trace->block_count)
            return tp_error_set(error, TP_INVALID, "recipes have no block %u",
                                trace->recipe_blocks[i]);
    for (uint32_t i = 0; i < trace->recipe_count; i++) {
        const tp_trace_recipe *it = &trace->recipes[i];
        const uint64_t end = (uint64_t)it->block_begin + it->input_count + it->output_count;
        if (end > trace->recipe_block_count)
            return tp_error_set(error, TP_INVALID, "the blocks of recipe %u lead nowhere", i);
        if (it->op >= trace->op_count || (i > 0 && it->op <= it[-1].op))
            return tp_error_set(error, TP_INVALID, "recipe %u is out of order", i);
        const tp_status status = check_outputs(trace, i, error);
        if (status != TP_OK) return status;
    }
    return TP_OK;
}

tp_status tp_trace_check(const tp_trace *trace, tp_error *error) {
    if (trace->op_count == 0 || trace->op_count == TP_NO_OP)
        return tp_error_set(error, TP_INVALID, "a step of %u operators", trace->op_count);
    tp_status status = check_blocks(trace, error);
    for (uint32_t op = 0; op < trace->op_count && status == TP_OK; op++)
        status = check_op(trace, op, error);
    return status == TP_OK ? check_recipes(trace, error) : status;
}
