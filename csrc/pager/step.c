#include "pager/step.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "pager/name.h"

enum { PAIRS_MAX = 1 << 20 };

/* What is needed while a step is built. */
typedef struct draft {
    const tp_record *record;
    uint32_t *block_of;   /* by storage; TP_NO_OP: it is left out */
    uint32_t block_count; /* of the trace */
    uint32_t last_op;
    tp_trace_block *blocks; /* with room for every storage */
    uint32_t *stamp;        /* by block: 1 + its operand of the operator at hand */
} draft;

uint32_t tp_step_gram(const uint32_t *kinds) {
    uint32_t hash = 0;
    for (uint32_t i = 0; i < TP_GRAM; i++) hash = (hash ^ kinds[i]) * 0x9E3779B1u + 1;
    return hash ^ hash >> 15;
}

/* ---- blocks ------------------------------------------------------------------------------ */

static bool carried(const tp_record_storage *it) { return it->born == TP_NO_OP; }

static uint32_t block_add(draft *d, uint64_t bytes, uint32_t born, uint32_t dead) {
    d->blocks[d->block_count] =
        (tp_trace_block){.bytes = bytes, .born_op = born, .dead_op = dead};
    return d->block_count++;
}

/* A storage of the same size, alive before, that was freed earlier than this one is born. */
static uint32_t find_replaced(draft *d, const tp_record_storage *born, uint32_t *tries) {
    for (uint32_t i = 0; i < d->record->storage_count && *tries > 0; i++, --*tries) {
        const tp_record_storage *it = &d->record->storages[i];
        if (!carried(it)) break; /* those come first */
        if (it->dead != TP_NO_OP && it->bytes == born->bytes && it->dead < born->born &&
            d->block_of[i] == TP_NO_OP)
            return i;
    }
    return TP_NO_OP;
}

static void place_born(draft *d, uint32_t storage, uint32_t *tries) {
    const tp_record_storage *it = &d->record->storages[storage];
    const uint32_t born = it->born < d->last_op ? it->born : d->last_op;
    if (it->dead != TP_NO_OP) {
        /* Born and freed between two operators: it was never there. */
        if (it->dead < it->born) return;
        d->block_of[storage] = block_add(d, it->bytes, born, it->dead);
        return;
    }
    const uint32_t replaced = find_replaced(d, it, tries);
    if (replaced == TP_NO_OP) {
        d->block_of[storage] = block_add(d, it->bytes, born, d->last_op);
        return;
    }
    d->block_of[storage] = d->block_of[replaced] =
        block_add(d, it->bytes, born, d->record->storages[replaced].dead);
}

static void place_blocks(draft *d) {
    const tp_record *record = d->record;
    uint32_t tries = PAIRS_MAX;
    for (uint32_t i = 0; i < record->storage_count; i++) {
        d->block_of[i] = TP_NO_OP;
        if (carried(&record->storages[i]) && record->storages[i].dead == TP_NO_OP)
            d->block_of[i] = block_add(d, record->storages[i].bytes, TP_NO_OP, TP_NO_OP);
    }
    for (uint32_t i = 0; i < record->storage_count; i++) {
        if (!carried(&record->storages[i])) place_born(d, i, &tries);
    }
    /* Nothing takes its place: it is there in each step, as far as this one can tell. */
    for (uint32_t i = 0; i < record->storage_count; i++) {
        if (carried(&record->storages[i]) && d->block_of[i] == TP_NO_OP)
            d->block_of[i] = block_add(d, record->storages[i].bytes, TP_NO_OP, TP_NO_OP);
    }
}

/* ---- one piece of memory for everything -------------------------------------------------- */

/* Where the next part begins; *total: of the parts so far. */
static size_t part(size_t *total, size_t count, size_t bytes) {
    const size_t at = *total;
    *total = (at + count * bytes + 15) / 16 * 16;
    return at;
}

typedef struct parts {
    tp_trace_op *ops;
    tp_trace_operand *operands;
    tp_trace_block *blocks;
    uint32_t *kinds, *likes, *weights, *streams, *announced, *class_idx, *gap_idx;
    uint64_t *began_ns;
    uint32_t *birth_begin, *births, *use_begin, *use_ops, *gram_head, *gram_next;
    tp_identity **live;
    uint32_t gram_mask;
    tp_trace_recipe *recipes;
    uint32_t *recipe_blocks, *recipe_ops;
} parts;

static uint32_t gram_chains(uint32_t op_count) {
    uint32_t chains = 64;
    while (chains < op_count && chains < (1u << 20)) chains *= 2;
    return chains;
}

/* At most so many operands and results of recipes. */
static size_t recipe_blocks(const tp_record *record) {
    size_t count = record->output_count;
    for (uint32_t i = 0; i < record->recipe_count; i++)
        count += record->ops[record->recipes[i].op].use_count;
    return count;
}

static tp_step *step_new(const tp_record *record, uint32_t blocks, parts *p) {
    const uint32_t ops = record->op_count, uses = record->use_count;
    size_t total = 0;
    const uint32_t chains = gram_chains(ops);
    const size_t head = part(&total, 1, sizeof(tp_step));
    const size_t at[] = {
        part(&total, ops, sizeof *p->ops),
        part(&total, uses, sizeof *p->operands),
        part(&total, blocks, sizeof *p->blocks),
        part(&total, ops, sizeof *p->began_ns),
        part(&total, blocks, sizeof *p->live),
        part(&total, 7 * (size_t)ops, sizeof *p->kinds),
        part(&total, (size_t)ops + 1, sizeof *p->birth_begin),
        part(&total, blocks, sizeof *p->births),
        part(&total, (size_t)blocks + 1, sizeof *p->use_begin),
        part(&total, uses, sizeof *p->use_ops),
        part(&total, chains, sizeof *p->gram_head),
        part(&total, ops, sizeof *p->gram_next),
        part(&total, record->recipe_count, sizeof *p->recipes),
        part(&total, record->recipe_count, sizeof *p->recipe_ops),
        part(&total, recipe_blocks(record), sizeof *p->recipe_blocks),
    };
    char *memory = calloc(1, total);
    if (memory == NULL) return NULL;
    ((tp_step *)(void *)(memory + head))->bytes = total;
    p->ops = (void *)(memory + at[0]);
    p->operands = (void *)(memory + at[1]);
    p->blocks = (void *)(memory + at[2]);
    p->began_ns = (void *)(memory + at[3]);
    p->live = (void *)(memory + at[4]);
    p->kinds = (void *)(memory + at[5]);
    p->likes = p->kinds + ops;
    p->weights = p->likes + ops;
    p->streams = p->weights + ops;
    p->announced = p->streams + ops;
    p->class_idx = p->announced + ops;
    p->gap_idx = p->class_idx + ops;
    p->birth_begin = (void *)(memory + at[6]);
    p->births = (void *)(memory + at[7]);
    p->use_begin = (void *)(memory + at[8]);
    p->use_ops = (void *)(memory + at[9]);
    p->gram_head = (void *)(memory + at[10]);
    p->gram_next = (void *)(memory + at[11]);
    p->gram_mask = chains - 1;
    p->recipes = (void *)(memory + at[12]);
    p->recipe_ops = (void *)(memory + at[13]);
    p->recipe_blocks = (void *)(memory + at[14]);
    return (void *)(memory + head);
}

/* ---- operators and their operands -------------------------------------------------------- */

static void fill_ops(const draft *d, parts *p) {
    const tp_record *record = d->record;
    for (uint32_t i = 0; i < record->op_count; i++) {
        const tp_record_op *it = &record->ops[i];
        p->kinds[i] = it->kind;
        p->likes[i] = it->like;
        p->weights[i] = it->weights;
        p->streams[i] = it->stream;
        p->class_idx[i] = it->class_idx;
        p->gap_idx[i] = i + 1 < record->op_count ? it->gap_idx : record->first_gap;
        p->began_ns[i] = it->began_ns - record->ops[0].began_ns;
        p->ops[i] = (tp_trace_op){
            .device_ns =
                tp_record_op_ns(record, it) + tp_record_class_ns(record, p->gap_idx[i]),
            .streams = tp_name_streams(tp_kind_name(it->kind)),
        };
    }
}

/* Puts the uses in the order of their operators, each block at most once in each. Returns how
 * many there are. */
static uint32_t fill_operands(const draft *d, parts *p, const uint32_t *order) {
    const tp_record *record = d->record;
    uint32_t count = 0, op = 0;
    for (uint32_t i = 0; i < record->use_count; i++) {
        const tp_record_use *use = &record->uses[order[i]];
        const uint32_t block = d->block_of[use->storage];
        for (; op < use->op; op++) p->ops[op + 1].operand_begin = count;
        if (block == TP_NO_OP || !tp_trace_block_is_alive(&p->blocks[block], op)) continue;
        const uint32_t stamp = d->stamp[block];
        const bool again = stamp > p->ops[op].operand_begin;
        if (again) {
            p->operands[stamp - 1].reads |= use->reads;
            p->operands[stamp - 1].writes |= use->writes;
            continue;
        }
        p->operands[count] = (tp_trace_operand){block, use->reads, use->writes};
        d->stamp[block] = ++count;
        p->ops[op].operand_count++;
        const tp_record_op *from = &record->ops[op];
        const uint32_t at = order[i] - from->use_begin;
        if (order[i] >= from->use_begin && at < from->use_count) p->announced[op]++;
    }
    for (; op + 1 < record->op_count; op++) p->ops[op + 1].operand_begin = count;
    return count;
}

/* Numbers of uses, by operator; within one as they were recorded. */
static void order_uses(const tp_record *record, uint32_t *begin, uint32_t *order) {
    memset(begin, 0, ((size_t)record->op_count + 1) * sizeof *begin);
    for (uint32_t i = 0; i < record->use_count; i++) begin[record->uses[i].op + 1]++;
    for (uint32_t op = 0; op < record->op_count; op++) begin[op + 1] += begin[op];
    for (uint32_t i = 0; i < record->use_count; i++) order[begin[record->uses[i].op]++] = i;
}

/* ---- recipes ----------------------------------------------------------------------------- */

/* Without what comes behind the last operator. */
static uint64_t recipe_ns(const tp_record *record, const tp_trace_op *ops,
                          const uint32_t *gap_idx, uint32_t first, uint32_t last) {
    uint64_t sum = 0;
    for (uint32_t op = first; op <= last; op++) sum += ops[op].device_ns;
    const uint64_t behind = tp_record_class_ns(record, gap_idx[last]);
    return sum > behind ? sum - behind : 0;
}

static bool is_of_step(const tp_trace_block *it) {
    return it->born_op != TP_NO_OP && it->born_op <= it->dead_op;
}

/* The blocks of a recipe of the record, from `at` on. False: it is none of the trace's. */
static bool list_recipe(const draft *d, parts *p, const tp_record_recipe *from,
                        tp_trace_recipe *to) {
    const tp_record_op *op = &d->record->ops[from->op];
    uint32_t *at = p->recipe_blocks + to->block_begin;
    for (uint32_t i = 0; i < op->use_count; i++) {
        const uint32_t block = d->block_of[d->record->uses[op->use_begin + i].storage];
        if (block == TP_NO_OP || !tp_trace_block_is_alive(&p->blocks[block], from->op) ||
            !tp_trace_block_is_alive(&p->blocks[block], from->last_op))
            return false;
        at[to->input_count++] = block;
    }
    const uint32_t *outputs = d->record->outputs + from->output_begin;
    for (uint32_t i = 0; i < from->output_count; i++) {
        const uint32_t block = d->block_of[outputs[i]];
        if (block == TP_NO_OP || !is_of_step(&p->blocks[block])) return false;
        at[to->input_count + to->output_count++] = block;
    }
    return true;
}

static void fill_recipes(const draft *d, parts *p, tp_trace *trace) {
    for (uint32_t i = 0; i < d->record->recipe_count; i++) {
        const tp_record_recipe *from = &d->record->recipes[i];
        tp_trace_recipe to = {
            .device_ns = recipe_ns(d->record, p->ops, p->gap_idx, from->op, from->last_op),
            .op = from->last_op,
            .block_begin = trace->recipe_block_count};
        if (!list_recipe(d, p, from, &to)) continue;
        p->recipe_ops[trace->recipe_count] = from->op;
        p->recipes[trace->recipe_count++] = to;
        trace->recipe_block_count += to.input_count + to.output_count;
    }
    trace->recipes = p->recipes;
    trace->recipe_blocks = p->recipe_blocks;
}

uint64_t tp_step_recipe_hash(const tp_record *record) {
    uint64_t hash = 1;
    for (uint32_t i = 0; i < record->recipe_count; i++) {
        const tp_record_recipe *it = &record->recipes[i];
        const uint64_t value = (uint64_t)it->op << 32 | it->last_op;
        hash = (hash ^ value ^ (uint64_t)it->output_count << 20) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
    }
    return hash;
}

bool tp_step_alike(const tp_step *a, const tp_step *b) {
    const tp_trace *x = &a->trace, *y = &b->trace;
    if (x->op_count != y->op_count || x->operand_count != y->operand_count ||
        x->block_count != y->block_count)
        return false;
    bool same = true;
    for (uint32_t i = 0; i < x->op_count && same; i++)
        same = x->ops[i].operand_count == y->ops[i].operand_count;
    for (uint32_t i = 0; i < x->operand_count && same; i++) {
        const tp_trace_operand *o = &x->operands[i], *r = &y->operands[i];
        same = o->block == r->block && o->reads == r->reads && o->writes == r->writes;
    }
    for (uint32_t i = 0; i < x->block_count && same; i++) {
        const tp_trace_block *o = &x->blocks[i], *r = &y->blocks[i];
        same = o->bytes == r->bytes && o->born_op == r->born_op && o->dead_op == r->dead_op;
    }
    return same;
}

/* ---- indices ----------------------------------------------------------------------------- */

static void index_uses(const tp_trace *trace, parts *p) {
    for (uint32_t i = 0; i < trace->operand_count; i++)
        p->use_begin[trace->operands[i].block + 1]++;
    for (uint32_t b = 0; b < trace->block_count; b++) p->use_begin[b + 1] += p->use_begin[b];
    /* Filled from the end, so that the beginnings are right afterwards. */
    for (uint32_t b = trace->block_count; b > 0; b--) p->use_begin[b] = p->use_begin[b - 1];
    for (uint32_t op = 0; op < trace->op_count; op++) {
        const tp_trace_op *it = &trace->ops[op];
        for (uint32_t i = 0; i < it->operand_count; i++) {
            const uint32_t block = trace->operands[it->operand_begin + i].block;
            p->use_ops[p->use_begin[block + 1]++] = op;
        }
    }
}

static void index_births(const tp_trace *trace, parts *p) {
    for (uint32_t b = 0; b < trace->block_count; b++) {
        if (trace->blocks[b].born_op != TP_NO_OP)
            p->birth_begin[trace->blocks[b].born_op + 1]++;
    }
    for (uint32_t op = 0; op < trace->op_count; op++)
        p->birth_begin[op + 1] += p->birth_begin[op];
    for (uint32_t op = trace->op_count; op > 0; op--)
        p->birth_begin[op] = p->birth_begin[op - 1];
    for (uint32_t b = 0; b < trace->block_count; b++) {
        const uint32_t born = trace->blocks[b].born_op;
        if (born != TP_NO_OP) p->births[p->birth_begin[born + 1]++] = b;
    }
    p->birth_begin[0] = 0;
}

static void index_grams(const tp_trace *trace, parts *p) {
    for (uint32_t i = 0; i <= p->gram_mask; i++) p->gram_head[i] = TP_NO_OP;
    for (uint32_t op = trace->op_count; op-- > TP_GRAM - 1;) {
        const uint32_t chain = tp_step_gram(&p->kinds[op - (TP_GRAM - 1)]) & p->gram_mask;
        p->gram_next[op] = p->gram_head[chain];
        p->gram_head[chain] = op;
    }
}

/* ---- building ---------------------------------------------------------------------------- */

static void assemble(tp_step *step, const parts *p) {
    step->kinds = p->kinds;
    step->likes = p->likes;
    step->weights = p->weights;
    step->streams = p->streams;
    step->announced = p->announced;
    step->class_idx = p->class_idx;
    step->gap_idx = p->gap_idx;
    step->began_ns = p->began_ns;
    step->birth_begin = p->birth_begin;
    step->births = p->births;
    step->use_begin = p->use_begin;
    step->use_ops = p->use_ops;
    step->gram_head = p->gram_head;
    step->gram_next = p->gram_next;
    step->gram_mask = p->gram_mask;
    step->live = p->live;
    for (uint32_t i = 0; i < step->trace.op_count; i++) step->device_ns += p->ops[i].device_ns;
}

static tp_step *build(draft *d, uint32_t *order, uint32_t slot) {
    const tp_record *record = d->record;
    place_blocks(d);
    parts p;
    tp_step *step = step_new(record, d->block_count, &p);
    if (step == NULL) return NULL;
    memcpy(p.blocks, d->blocks, d->block_count * sizeof *p.blocks);
    fill_ops(d, &p);
    order_uses(record, p.birth_begin, order); /* which is filled later */
    memset(p.birth_begin, 0, ((size_t)record->op_count + 1) * sizeof *p.birth_begin);
    step->trace = (tp_trace){.ops = p.ops,
                             .operands = p.operands,
                             .blocks = p.blocks,
                             .op_count = record->op_count,
                             .operand_count = fill_operands(d, &p, order),
                             .block_count = d->block_count};
    fill_recipes(d, &p, &step->trace);
    index_uses(&step->trace, &p);
    index_births(&step->trace, &p);
    index_grams(&step->trace, &p);
    step->slot = slot;
    step->moved_bytes = record->moved_bytes;
    step->recipe_ops = p.recipe_ops;
    step->recipe_hash = step->last_recipe_hash = tp_step_recipe_hash(record);
    assemble(step, &p);
    TP_ASSERT(tp_trace_check(&step->trace, NULL) == TP_OK);
    return step;
}

tp_step *tp_step_build(const tp_record *record, uint32_t slot) {
    if (record->op_count == 0) return NULL;
    draft d = {.record = record, .last_op = record->op_count - 1};
    const size_t storages = (size_t)record->storage_count + 1;
    d.block_of = calloc(storages, sizeof *d.block_of);
    d.blocks = calloc(storages, sizeof *d.blocks);
    d.stamp = calloc(storages, sizeof *d.stamp);
    uint32_t *order = calloc((size_t)record->use_count + 1, sizeof *order);
    tp_step *step = NULL;
    if (d.block_of != NULL && d.blocks != NULL && d.stamp != NULL && order != NULL)
        step = build(&d, order, slot);
    free(order);
    free(d.stamp);
    free(d.blocks);
    free(d.block_of);
    return step;
}

/* The blocks were numbered in this order too. */
void tp_step_bind_all(tp_step *step, const tp_record *record) {
    uint32_t block = 0;
    for (uint32_t i = 0; i < record->storage_count; i++) {
        const tp_record_storage *it = &record->storages[i];
        if (!carried(it) || it->dead != TP_NO_OP) continue;
        tp_step_bind(step, block++, it->owner);
    }
    for (uint32_t i = 0; i < record->storage_count; i++) {
        const tp_record_storage *it = &record->storages[i];
        if (carried(it)) continue;
        if (it->dead != TP_NO_OP && it->dead < it->born) continue;
        if (it->owner != NULL) tp_step_bind(step, block, it->owner);
        block++;
    }
}

void tp_step_destroy(tp_step *step) {
    for (uint32_t b = 0; b < step->trace.block_count; b++) {
        if (step->live[b] != NULL) step->live[b]->bound[step->slot] = 0;
    }
    free(step);
}

/* ---- bindings ---------------------------------------------------------------------------- */

void tp_step_bind(tp_step *step, uint32_t block, tp_identity *identity) {
    if (step->live[block] == identity || identity->serial == 0) return;
    if (step->live[block] != NULL) step->live[block]->bound[step->slot] = 0;
    const uint32_t before = identity->bound[step->slot];
    if (before != 0) step->live[before - 1] = NULL;
    step->live[block] = identity;
    identity->bound[step->slot] = block + 1;
}

void tp_step_moved(tp_step *const *steps, tp_identity *to) {
    for (uint32_t slot = 0; slot < TP_KINDS_MAX; slot++) {
        if (to->bound[slot] != 0) {
            steps[slot]->live[to->bound[slot] - 1] = to;
        }
    }
}

void tp_step_unbind(tp_step *const *steps, tp_identity *identity) {
    for (uint32_t slot = 0; slot < TP_KINDS_MAX; slot++) {
        if (identity->bound[slot] != 0) steps[slot]->live[identity->bound[slot] - 1] = NULL;
        identity->bound[slot] = 0;
    }
}

bool tp_step_refresh(tp_step *step, const tp_record *record) {
    TP_REQUIRE(step->held_count == 0);
    tp_trace_op *ops = (tp_trace_op *)(uintptr_t)step->trace.ops;
    uint64_t total = 0;
    for (uint32_t i = 0; i < step->trace.op_count; i++) {
        if (step->class_idx[i] != 0)
            ops[i].device_ns = tp_record_class_ns(record, step->class_idx[i]) +
                               tp_record_class_ns(record, step->gap_idx[i]);
        total += ops[i].device_ns;
    }
    tp_trace_recipe *recipes = (tp_trace_recipe *)(uintptr_t)step->trace.recipes;
    for (uint32_t i = 0; i < step->trace.recipe_count; i++)
        recipes[i].device_ns =
            recipe_ns(record, ops, step->gap_idx, step->recipe_ops[i], recipes[i].op);
    const uint64_t before = step->device_ns;
    const uint64_t apart = total > before ? total - before : before - total;
    if (apart <= before / 32) return false;
    step->device_ns = total;
    return true;
}
