#include "pager/plan_rerun.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

#define NO_RECIPE UINT32_MAX
/* Reruns behind one another. What is chosen has far fewer; this ends a walk that went wrong. */
enum { CHAIN_MAX = 64 };

typedef struct builder {
    const tp_trace *from;
    const tp_drops *drops;
    tp_rerun_trace *to;
    uint32_t op_capacity, operand_capacity, block_capacity, act_capacity;
    uint32_t *recipe_of;  /* of each block */
    uint32_t *written_at; /* the operator that wrote each block last, so far */
    uint32_t *life;       /* the life that each block is in */
    uint32_t *place;      /* of each operator in the new trace */
    bool *is_back;        /* of each dropped block */
    uint32_t *made_at;    /* of each dead block: the operator before which it was made again */
    uint32_t *last_use;   /* of each life; grows with the lives */
    bool *is_natural;     /* of each life: it ends where its block dies */
    uint32_t at;          /* the operator of the old trace that comes next */
    bool no_memory, went_wrong;
} builder;

/* ---- tables that grow ------------------------------------------------------------------------ */

static bool grow(builder *b, void *table, size_t size, uint32_t capacity) {
    void **items = table;
    void *larger = realloc(*items, capacity * size);
    if (larger == NULL) {
        b->no_memory = true;
        return false;
    }
    *items = larger;
    return true;
}

static uint32_t doubled(uint32_t capacity) { return capacity != 0 ? 2 * capacity : 1024; }

static bool has_room_for_block(builder *b) {
    if (b->no_memory) return false;
    if (b->to->trace.block_count < b->block_capacity) return true;
    const uint32_t capacity = doubled(b->block_capacity);
    if (!grow(b, &b->to->blocks, sizeof *b->to->blocks, capacity) ||
        !grow(b, &b->to->block_of, sizeof *b->to->block_of, capacity) ||
        !grow(b, &b->last_use, sizeof *b->last_use, capacity) ||
        !grow(b, &b->is_natural, sizeof *b->is_natural, capacity))
        return false;
    b->block_capacity = capacity;
    return true;
}

/* A life that begins before the operator that is added next. */
static uint32_t add_life(builder *b, uint32_t block) {
    if (!has_room_for_block(b)) return 0;
    const uint32_t life = b->to->trace.block_count++, op = b->to->trace.op_count;
    b->to->blocks[life] = (tp_trace_block){b->from->blocks[block].bytes, op, op};
    b->to->block_of[life] = block;
    b->last_use[life] = op;
    b->is_natural[life] = false;
    return life;
}

static void add_op(builder *b, uint64_t device_ns, bool streams) {
    tp_trace *t = &b->to->trace;
    if (b->no_memory) return;
    if (t->op_count == b->op_capacity) {
        const uint32_t capacity = doubled(b->op_capacity);
        if (!grow(b, &b->to->ops, sizeof *b->to->ops, capacity) ||
            !grow(b, &b->to->op_of, sizeof *b->to->op_of, capacity))
            return;
        b->op_capacity = capacity;
    }
    b->to->ops[t->op_count] = (tp_trace_op){
        .device_ns = device_ns, .operand_begin = t->operand_count, .streams = streams};
    b->to->op_of[t->op_count++] = b->at;
}

/* Of the operator added last. */
static void add_operand(builder *b, uint32_t life, bool reads, bool writes) {
    tp_trace *t = &b->to->trace;
    if (b->no_memory) return;
    if (t->operand_count == b->operand_capacity) {
        const uint32_t capacity = doubled(b->operand_capacity);
        if (!grow(b, &b->to->operands, sizeof *b->to->operands, capacity)) return;
        b->operand_capacity = capacity;
    }
    b->to->operands[t->operand_count++] = (tp_trace_operand){life, reads, writes};
    b->to->ops[t->op_count - 1].operand_count++;
    b->last_use[life] = t->op_count - 1;
}

static void add_act(builder *b, uint32_t op, uint32_t block, tp_act_kind kind) {
    if (b->no_memory) return;
    if (b->to->act_count == b->act_capacity) {
        const uint32_t capacity = doubled(b->act_capacity);
        if (!grow(b, &b->to->acts, sizeof *b->to->acts, capacity)) return;
        b->act_capacity = capacity;
    }
    b->to->acts[b->to->act_count++] = (tp_act){.op = op, .block = block, .kind = kind};
}

/* ---- the walk -------------------------------------------------------------------------------- */

static bool is_of_step(const tp_trace_block *it) {
    return it->born_op != TP_NO_OP && it->born_op <= it->dead_op;
}

static bool is_dropped(const builder *b, uint32_t block) {
    const uint32_t after = b->drops->after_op[block];
    return after != TP_NO_OP && after < b->at && !b->is_back[block] &&
           b->at <= b->from->blocks[block].dead_op;
}

/* Whether a block has its bytes, or has them again. */
static bool is_there(const builder *b, uint32_t block) {
    const tp_trace_block *it = &b->from->blocks[block];
    if (is_dropped(b, block)) return false;
    if (!is_of_step(it)) return tp_trace_is_alive(b->from, block, b->at);
    if (b->at <= it->dead_op) return b->at > it->born_op;
    const uint32_t kept = b->drops->kept_until[block];
    return b->made_at[block] == b->at || (kept != TP_NO_OP && kept >= b->at);
}

/* Whether operator `op` or a later one has written a block. */
static bool is_written(const builder *b, uint32_t block, uint32_t op) {
    return b->written_at[block] != TP_NO_OP && b->written_at[block] >= op;
}

/* Lets the results of a rerun begin their lives: of those that are dropped and come back, of the
 * one that it is made for, and of the others, which take memory while it runs. */
static void add_outputs(builder *b, uint32_t block, const tp_trace_recipe *recipe) {
    const uint32_t *outputs =
        b->from->recipe_blocks + recipe->block_begin + recipe->input_count;
    for (uint32_t i = 0; i < recipe->output_count; i++) {
        const uint32_t output = outputs[i];
        const bool is_its = b->recipe_of[output] == b->recipe_of[block];
        const bool comes = is_its && is_dropped(b, output);
        const bool is_wanted = comes || output == block;
        const uint32_t life = add_life(b, output);
        if (b->no_memory) return;
        if (is_wanted) b->life[output] = life;
        b->is_natural[life] = comes;
        if (comes)
            b->is_back[output] = true;
        else if (is_wanted)
            b->made_at[output] = b->at;
    }
}

/* Adds the rerun of what makes `block`, behind those of its inputs. */
static void rerun(builder *b, uint32_t block, uint32_t depth) {
    if (b->recipe_of[block] == NO_RECIPE || depth > CHAIN_MAX) {
        b->went_wrong = true;
        return;
    }
    const tp_trace_recipe *recipe = &b->from->recipes[b->recipe_of[block]];
    const uint32_t *inputs = b->from->recipe_blocks + recipe->block_begin;
    if (is_written(b, block, recipe->op + 1)) b->went_wrong = true;
    for (uint32_t i = 0; i < recipe->input_count && !b->went_wrong && !b->no_memory; i++) {
        if (is_written(b, inputs[i], recipe->op)) b->went_wrong = true;
        if (!is_there(b, inputs[i])) rerun(b, inputs[i], depth + 1);
    }
    if (b->went_wrong || b->no_memory) return;
    const uint32_t first = b->to->trace.block_count;
    add_outputs(b, block, recipe);
    const uint32_t end = b->to->trace.block_count;
    add_op(b, recipe->device_ns, false);
    for (uint32_t i = 0; i < recipe->input_count; i++)
        add_operand(b, b->life[inputs[i]], true, false);
    for (uint32_t life = first; life < end; life++) add_operand(b, life, false, true);
    add_act(b, b->to->trace.op_count - 1, block, TP_ACT_RERUN);
    b->to->rerun_count++;
    b->to->rerun_ns += recipe->device_ns;
}

static void walk_op(builder *b) {
    const tp_trace_op *it = &b->from->ops[b->at];
    const tp_trace_operand *operands = b->from->operands + it->operand_begin;
    for (uint32_t i = 0; i < it->operand_count && !b->went_wrong; i++)
        if (is_dropped(b, operands[i].block)) rerun(b, operands[i].block, 0);
    b->place[b->at] = b->to->trace.op_count;
    add_op(b, it->device_ns, it->streams);
    for (uint32_t i = 0; i < it->operand_count && !b->no_memory; i++) {
        add_operand(b, b->life[operands[i].block], operands[i].reads, operands[i].writes);
        if (operands[i].writes) b->written_at[operands[i].block] = b->at;
    }
}

/* ---- lives ----------------------------------------------------------------------------------- */

static void begin_lives(builder *b) {
    for (uint32_t i = 0; i < b->from->block_count && !b->no_memory; i++) {
        b->life[i] = add_life(b, i);
        if (!b->no_memory) b->is_natural[b->life[i]] = true;
    }
}

/* The end of a life that ends where its block dies, or where the last rerun that it was kept
 * for has used it. */
static void end_natural(builder *b, uint32_t life) {
    const uint32_t block = b->to->block_of[life];
    tp_trace_block *it = &b->to->blocks[life];
    it->dead_op = b->place[b->from->blocks[block].dead_op];
    if (b->last_use[life] <= it->dead_op || it->dead_op < it->born_op) return;
    add_act(b, it->dead_op, block, TP_ACT_KEEP);
    it->dead_op = b->last_use[life];
    add_act(b, it->dead_op + 1, block, TP_ACT_DISCARD);
}

static void end_lives(builder *b) {
    for (uint32_t life = 0; life < b->to->trace.block_count && !b->no_memory; life++) {
        const uint32_t block = b->to->block_of[life];
        const tp_trace_block *its = &b->from->blocks[block];
        tp_trace_block *it = &b->to->blocks[life];
        const bool is_first = life < b->from->block_count;
        if (is_first && its->born_op == TP_NO_OP) {
            it->born_op = it->dead_op = TP_NO_OP;
            continue;
        }
        if (is_first) it->born_op = b->place[its->born_op];
        if (is_first && b->drops->after_op[block] != TP_NO_OP) {
            it->dead_op = b->place[b->drops->after_op[block]];
            add_act(b, it->dead_op + 1, block, TP_ACT_DROP);
            b->to->dropped_bytes += its->bytes;
        } else if (b->is_natural[life]) {
            end_natural(b, life);
        } else {
            it->dead_op = b->last_use[life];
            /* One that only took memory while a rerun ran is gone with it. */
            if (it->dead_op != it->born_op) add_act(b, it->dead_op + 1, block, TP_ACT_DISCARD);
        }
    }
}

/* At one place first what gives memory back, and the rerun itself last. */
static int rank(tp_act_kind kind) {
    switch (kind) {
    case TP_ACT_DISCARD: return 0;
    case TP_ACT_DROP: return 1;
    case TP_ACT_KEEP: return 2;
    default: return 3;
    }
}

static int in_order(const void *left, const void *right) {
    const tp_act *a = left, *b = right;
    if (a->op != b->op) return a->op < b->op ? -1 : 1;
    if (a->kind != b->kind) return rank(a->kind) - rank(b->kind);
    return a->block < b->block ? -1 : a->block > b->block;
}

/* ---- all of it ------------------------------------------------------------------------------- */

static uint32_t *marks(uint32_t count) {
    uint32_t *items = malloc(((size_t)count + 1) * sizeof *items);
    for (uint32_t i = 0; items != NULL && i < count; i++) items[i] = TP_NO_OP;
    return items;
}

static bool begin(builder *b) {
    const uint32_t blocks = b->from->block_count;
    b->recipe_of = marks(blocks);
    b->written_at = marks(blocks);
    b->life = marks(blocks);
    b->made_at = marks(blocks);
    b->place = marks(b->from->op_count);
    b->is_back = calloc((size_t)blocks + 1, sizeof *b->is_back);
    if (b->recipe_of == NULL || b->written_at == NULL || b->life == NULL ||
        b->made_at == NULL || b->place == NULL || b->is_back == NULL)
        return false;
    for (uint32_t r = 0; r < b->from->recipe_count; r++) {
        const tp_trace_recipe *it = &b->from->recipes[r];
        const uint32_t *outputs = b->from->recipe_blocks + it->block_begin + it->input_count;
        for (uint32_t i = 0; i < it->output_count; i++) b->recipe_of[outputs[i]] = r;
    }
    begin_lives(b);
    return !b->no_memory;
}

tp_status tp_rerun_trace_make(const tp_trace *trace, const tp_drops *drops, tp_rerun_trace *out,
                              tp_error *error) {
    memset(out, 0, sizeof *out);
    builder b = {.from = trace, .drops = drops, .to = out};
    b.no_memory = !begin(&b);
    for (; b.at < trace->op_count && !b.no_memory && !b.went_wrong; b.at++) walk_op(&b);
    if (!b.no_memory && !b.went_wrong) end_lives(&b);
    tp_status status = TP_OK;
    if (b.no_memory)
        status = tp_error_set(error, TP_NO_HOST_MEMORY, "no memory to plan in");
    else if (b.went_wrong)
        status = tp_error_set(error, TP_INVALID, "a rerun before operator %u has no inputs",
                              b.at - 1);
    free(b.recipe_of), free(b.written_at), free(b.life), free(b.made_at), free(b.place);
    free(b.is_back), free(b.last_use), free(b.is_natural);
    if (status != TP_OK) {
        tp_rerun_trace_fini(out);
        return status;
    }
    if (out->act_count > 0) qsort(out->acts, out->act_count, sizeof *out->acts, in_order);
    out->trace.ops = out->ops;
    out->trace.operands = out->operands;
    out->trace.blocks = out->blocks;
    return TP_OK;
}

void tp_rerun_trace_fini(tp_rerun_trace *it) {
    free(it->ops), free(it->operands), free(it->blocks);
    free(it->block_of), free(it->op_of), free(it->acts);
    memset(it, 0, sizeof *it);
}

/* Where the moves of a plan and the drops and reruns meet: moves come before the rerun that
 * needs them and behind what gives memory back. */
static bool comes_first(const tp_act *other, const tp_act *move) {
    if (other->op != move->op) return other->op < move->op;
    return other->kind != TP_ACT_RERUN;
}

static int by_block(const void *left, const void *right) {
    const tp_plan_extent *a = left, *b = right;
    if (a->block != b->block) return a->block < b->block ? -1 : 1;
    return a->extent < b->extent ? -1 : a->extent > b->extent;
}

tp_status tp_rerun_trace_translate(const tp_rerun_trace *it, tp_plan *plan, tp_error *error) {
    const uint32_t count = plan->act_count + it->act_count;
    tp_act *acts = malloc(((size_t)count + 1) * sizeof *acts);
    if (acts == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory to plan in");
    uint32_t moves = 0, others = 0;
    for (uint32_t i = 0; i < count; i++) {
        const bool is_other =
            moves == plan->act_count ||
            (others < it->act_count && comes_first(&it->acts[others], &plan->acts[moves]));
        acts[i] = is_other ? it->acts[others++] : plan->acts[moves++];
        acts[i].op = it->op_of[acts[i].op];
        if (!is_other) acts[i].block = it->block_of[acts[i].block];
    }
    for (uint32_t i = 0; i < plan->resident_count; i++)
        plan->resident[i].block = it->block_of[plan->resident[i].block];
    if (plan->resident_count > 0)
        qsort(plan->resident, plan->resident_count, sizeof *plan->resident, by_block);
    free(plan->acts);
    plan->acts = acts;
    plan->act_count = count;
    plan->rerun_count = it->rerun_count;
    plan->rerun_ns = it->rerun_ns;
    plan->dropped_bytes = it->dropped_bytes;
    return TP_OK;
}
