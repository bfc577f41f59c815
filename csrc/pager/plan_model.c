#include "pager/plan_model.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/check.h"

/* ---- lists by operator and by block ---------------------------------------------------------- */

static void *table(size_t count, size_t size) { return calloc(count != 0 ? count : 1, size); }

/* Turns counts at [i + 1] into first places, so that list i is [first[i], first[i + 1]). */
static void sum_up(uint32_t *first, uint32_t count) {
    for (uint32_t i = 0; i < count; i++) first[i + 1] += first[i];
}

uint64_t tp_model_block_bytes(const tp_model *model, uint32_t block) {
    const uint64_t bytes = model->trace->blocks[block].bytes;
    if (bytes < model->config.large_min_bytes) return bytes;
    return tp_round_up((size_t)bytes, (size_t)model->config.granularity_bytes);
}

static bool list_lives(tp_model *model) {
    const tp_trace *trace = model->trace;
    const uint32_t ops = trace->op_count, blocks = trace->block_count;
    model->op_born = table((size_t)ops + 1, sizeof(uint32_t));
    model->op_dead = table((size_t)ops + 1, sizeof(uint32_t));
    model->born = table(blocks, sizeof(uint32_t));
    model->dead = table(blocks, sizeof(uint32_t));
    model->born_bytes = table(ops, sizeof(uint64_t));
    uint32_t *fill = table(2 * (size_t)ops, sizeof(uint32_t));
    const bool made = model->op_born != NULL && model->op_dead != NULL && model->born != NULL &&
                      model->dead != NULL && model->born_bytes != NULL && fill != NULL;
    for (uint32_t i = 0; i < blocks && made; i++) {
        const tp_trace_block *it = &trace->blocks[i];
        if (it->born_op == TP_NO_OP) continue;
        model->op_born[it->born_op + 1]++;
        model->op_dead[it->dead_op + 1]++;
        model->born_bytes[it->born_op] += tp_model_block_bytes(model, i);
    }
    if (made) {
        sum_up(model->op_born, ops);
        sum_up(model->op_dead, ops);
    }
    for (uint32_t i = 0; i < blocks && made; i++) {
        const tp_trace_block *it = &trace->blocks[i];
        if (it->born_op == TP_NO_OP) continue;
        model->born[model->op_born[it->born_op] + fill[it->born_op]++] = i;
        model->dead[model->op_dead[it->dead_op] + fill[ops + it->dead_op]++] = i;
    }
    free(fill);
    return made;
}

static bool list_uses(tp_model *model) {
    const tp_trace *trace = model->trace;
    model->block_uses = table((size_t)trace->block_count + 1, sizeof(uint32_t));
    model->uses = table(trace->operand_count, sizeof(uint32_t));
    uint32_t *fill = table(trace->block_count, sizeof(uint32_t));
    const bool made = model->block_uses != NULL && model->uses != NULL && fill != NULL;
    for (uint32_t pass = 0; pass < 2 && made; pass++) {
        for (uint32_t op = 0; op < trace->op_count; op++) {
            const tp_trace_op *it = &trace->ops[op];
            for (uint32_t i = it->operand_begin; i < it->operand_begin + it->operand_count;
                 i++) {
                const uint32_t block = trace->operands[i].block;
                if (model->left[i]) continue;
                if (pass == 0)
                    model->block_uses[block + 1]++;
                else
                    model->uses[model->block_uses[block] + fill[block]++] = op;
            }
        }
        if (pass == 0) sum_up(model->block_uses, trace->block_count);
    }
    free(fill);
    return made;
}

static bool list_units(tp_model *model) {
    const tp_trace *trace = model->trace;
    model->block_units = table((size_t)trace->block_count + 1, sizeof(uint32_t));
    if (model->block_units == NULL) return false;
    for (uint32_t i = 0; i < trace->block_count; i++)
        model->block_units[i + 1] = tp_plan_extents(&model->config, trace->blocks[i].bytes);
    sum_up(model->block_units, trace->block_count);
    model->unit_count = model->block_units[trace->block_count];
    model->units = table(model->unit_count, sizeof(tp_unit));
    if (model->units == NULL) return false;
    for (uint32_t i = 0; i < trace->block_count; i++) {
        for (uint32_t at = model->block_units[i]; at < model->block_units[i + 1]; at++) {
            const uint32_t extent = at - model->block_units[i];
            const uint64_t bytes = trace->blocks[i].bytes;
            model->units[at] =
                (tp_unit){.bytes = tp_plan_extent_bytes(&model->config, bytes, extent),
                          .block = i,
                          .extent = extent,
                          .written_at = TP_NO_OP,
                          .evicted_after = TP_NO_OP};
        }
    }
    return true;
}

/* ---- what is alive --------------------------------------------------------------------------- */

static bool add_up_live(tp_model *model) {
    const uint32_t ops = model->trace->op_count;
    model->live_tree = table(2 * (size_t)ops, sizeof(uint64_t));
    model->before_ns = table((size_t)ops + 1, sizeof(uint64_t));
    if (model->live_tree == NULL || model->before_ns == NULL) return false;
    for (uint32_t op = 0; op < ops; op++)
        model->before_ns[op + 1] = model->before_ns[op] + model->trace->ops[op].device_ns;
    uint64_t live = 0;
    for (uint32_t i = 0; i < model->trace->block_count; i++) {
        const tp_trace_block *it = &model->trace->blocks[i];
        if (it->born_op == TP_NO_OP || it->dead_op < it->born_op)
            live += tp_model_block_bytes(model, i);
    }
    model->live_bytes = live;
    for (uint32_t op = 0; op < ops; op++) {
        live += model->born_bytes[op];
        model->live_tree[ops + op] = live;
        for (uint32_t i = model->op_dead[op]; i < model->op_dead[op + 1]; i++)
            live -= tp_model_block_bytes(model, model->dead[i]);
    }
    for (uint32_t i = ops - 1; i > 0; i--) {
        const uint64_t left = model->live_tree[2 * i], right = model->live_tree[2 * i + 1];
        model->live_tree[i] = left > right ? left : right;
    }
    return true;
}

/* Most bytes alive during operators [begin, end). */
static uint64_t most_live(const tp_model *model, uint32_t begin, uint32_t end) {
    const uint32_t ops = model->trace->op_count;
    uint64_t most = 0;
    for (uint32_t l = begin + ops, r = end + ops; l < r; l /= 2, r /= 2) {
        if (l % 2 == 1 && model->live_tree[l] > most) most = model->live_tree[l];
        if (l % 2 == 1) l++;
        if (r % 2 == 1 && model->live_tree[r - 1] > most) most = model->live_tree[r - 1];
    }
    return most;
}

uint64_t tp_model_growth(const tp_model *model, uint64_t point) {
    const uint32_t ops = model->trace->op_count;
    const uint32_t begin = (uint32_t)(model->point % ops);
    uint64_t most = model->live_tree[1];
    if (point != TP_FAR && point + 1 < model->point + ops) {
        const uint32_t end = (uint32_t)(point % ops) + 1;
        most = most_live(model, begin, begin < end ? end : ops);
        if (begin >= end) {
            const uint64_t rest = most_live(model, 0, end);
            if (rest > most) most = rest;
        }
    }
    return most > model->live_bytes ? most - model->live_bytes : 0;
}

/* ---- what does not fit ----------------------------------------------------------------------- */

/* Bytes of small blocks alive during each operator: all that is alive less what can move. */
static uint64_t *small_live(const tp_model *model) {
    const tp_trace *trace = model->trace;
    uint64_t *small = table((size_t)trace->op_count + 1, sizeof(uint64_t));
    if (small == NULL) return NULL;
    for (uint32_t i = 0; i < trace->block_count; i++) {
        const tp_trace_block *it = &trace->blocks[i];
        if (model->block_units[i] != model->block_units[i + 1]) continue;
        if (it->born_op == TP_NO_OP || it->dead_op < it->born_op) small[0] += it->bytes;
        if (it->born_op == TP_NO_OP) continue;
        small[it->born_op] += it->bytes;
        small[it->dead_op + 1] -= it->bytes;
    }
    for (uint32_t op = 1; op < trace->op_count; op++) small[op] += small[op - 1];
    return small;
}

static bool is_born_at(const tp_model *model, uint32_t block, uint32_t op) {
    return model->trace->blocks[block].born_op == op;
}

/* What must be resident while an operator runs, small blocks not counted. */
static uint64_t needed_bytes(const tp_model *model, uint32_t op) {
    const tp_trace_op *it = &model->trace->ops[op];
    uint64_t sum = 0;
    for (uint32_t i = model->op_born[op]; i < model->op_born[op + 1]; i++) {
        const uint32_t block = model->born[i];
        if (model->block_units[block] != model->block_units[block + 1])
            sum += tp_model_block_bytes(model, block);
    }
    for (uint32_t i = it->operand_begin; i < it->operand_begin + it->operand_count; i++) {
        const uint32_t block = model->trace->operands[i].block;
        if (model->block_units[block] == model->block_units[block + 1]) continue;
        if (!model->left[i] && !is_born_at(model, block, op))
            sum += tp_model_block_bytes(model, block);
    }
    return sum;
}

/* Leaves the largest operands of a streaming operator in HOST until the rest fits. */
static uint64_t leave_largest(tp_model *model, uint32_t op, uint64_t needed, uint64_t room) {
    const tp_trace_op *it = &model->trace->ops[op];
    while (needed > room) {
        uint32_t best = TP_NO_UNIT;
        uint64_t best_bytes = model->config.large_min_bytes;
        for (uint32_t i = it->operand_begin; i < it->operand_begin + it->operand_count; i++) {
            const uint32_t block = model->trace->operands[i].block;
            const uint64_t bytes = tp_model_block_bytes(model, block);
            if (model->left[i] || is_born_at(model, block, op) || bytes < best_bytes) continue;
            if (best == TP_NO_UNIT || bytes > best_bytes) best = i;
            best_bytes = bytes;
        }
        if (best == TP_NO_UNIT) break;
        model->left[best] = true;
        needed -= best_bytes;
    }
    return needed;
}

/* Leaves the blocks in HOST that only streaming operators use and that live through the
 * step. */
static bool leave_streamed(tp_model *model) {
    const tp_trace *trace = model->trace;
    bool *stays = table(trace->block_count, sizeof(bool));
    if (stays == NULL) return false;
    for (uint32_t i = 0; i < trace->block_count; i++)
        stays[i] = trace->blocks[i].born_op == TP_NO_OP;
    for (uint32_t pass = 0; pass < 2; pass++) {
        for (uint32_t op = 0; op < trace->op_count; op++) {
            const tp_trace_op *it = &trace->ops[op];
            for (uint32_t i = it->operand_begin; i < it->operand_begin + it->operand_count;
                 i++) {
                const uint32_t block = trace->operands[i].block;
                if (pass == 0)
                    stays[block] = stays[block] && it->streams;
                else
                    model->left[i] = stays[block];
            }
        }
    }
    free(stays);
    return true;
}

static tp_status leave_what_does_not_fit(tp_model *model, tp_error *error) {
    const tp_trace *trace = model->trace;
    uint64_t *small = small_live(model);
    if (small == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory to plan in");
    tp_status status = TP_OK;
    for (uint32_t op = 0; op < trace->op_count && status == TP_OK; op++) {
        const uint64_t budget = model->config.budget_bytes;
        const uint64_t room = budget > small[op] ? budget - small[op] : 0;
        uint64_t needed = needed_bytes(model, op);
        if (needed > room && trace->ops[op].streams)
            needed = leave_largest(model, op, needed, room);
        if (needed > room)
            status =
                tp_error_set(error, TP_OUT_OF_MEMORY,
                             "operator %u needs %llu bytes at once, the budget has %llu for it",
                             op, (unsigned long long)needed, (unsigned long long)room);
    }
    free(small);
    return status;
}

/* ---- next uses ------------------------------------------------------------------------------- */

/* The point of the next use of a block, or the one after its death if it dies before. */
static uint64_t next_need(const tp_model *model, uint32_t block, uint64_t point,
                          bool *is_used) {
    const uint32_t ops = model->trace->op_count;
    const tp_trace_block *it = &model->trace->blocks[block];
    const uint32_t *uses = model->uses + model->block_uses[block];
    const uint32_t count = model->block_uses[block + 1] - model->block_uses[block];
    const uint32_t at = (uint32_t)(point % ops);
    const uint64_t base = point - at;
    const uint64_t death =
        it->born_op == TP_NO_OP ? TP_FAR : base + it->dead_op + (it->dead_op < at ? ops : 0);
    const uint64_t gone = death == TP_FAR ? TP_FAR : death + 1;
    *is_used = false;
    if (count == 0) return gone;
    const uint32_t place = tp_ops_from(uses, count, at);
    const uint64_t next = place < count ? base + uses[place] : base + ops + uses[0];
    *is_used = next <= death;
    return *is_used ? next : gone;
}

void tp_model_look_ahead(tp_model *model, uint32_t block) {
    bool is_used;
    const uint64_t next = next_need(model, block, model->point, &is_used);
    for (uint32_t u = model->block_units[block]; u < model->block_units[block + 1]; u++) {
        TP_ASSERT(model->units[u].set == TP_SET_NONE);
        model->units[u].next = model->units[u].due = next;
        model->units[u].is_used = is_used;
    }
}

/* ---- sets ------------------------------------------------------------------------------------ */

static uint32_t slot_of(const tp_model *model, uint64_t next) {
    const uint32_t ops = model->trace->op_count;
    return next == TP_FAR ? ops : (uint32_t)(next % ops);
}

static void add_to(const tp_model *model, uint64_t *sums, uint64_t next, uint64_t bytes) {
    const uint32_t count = model->trace->op_count + 1;
    for (uint32_t i = slot_of(model, next) + 1; i <= count; i += i & (~i + 1))
        sums[i] += bytes; /* a subtraction is the addition of its complement */
}

static void add_bytes(tp_model *model, tp_unit_heap *heap, const tp_unit *unit,
                      uint64_t bytes) {
    add_to(model, heap->sums, unit->next, bytes);
    if (unit->is_used && unit->next != unit->due)
        add_to(model, heap->hurried, unit->due, bytes);
    heap->bytes += bytes;
}

/* Bytes needed in slots [0, end). */
static uint64_t bytes_below(const uint64_t *sums, uint32_t end) {
    uint64_t sum = 0;
    for (uint32_t i = end; i > 0; i -= i & (~i + 1)) sum += sums[i];
    return sum;
}

/* Bytes needed from the point of the model to `point`, both included. */
static uint64_t bytes_until(const tp_model *model, const uint64_t *sums, uint64_t point) {
    const uint32_t ops = model->trace->op_count;
    const uint32_t begin = (uint32_t)(model->point % ops), end = (uint32_t)(point % ops) + 1;
    if (point >= model->point + ops) return bytes_below(sums, ops);
    const uint64_t near = bytes_below(sums, end) - bytes_below(sums, begin);
    return begin >= end ? near + bytes_below(sums, ops) : near;
}

uint64_t tp_model_bytes_after(const tp_model *model, tp_unit_set set, uint64_t point) {
    const tp_unit_heap *heap = &model->sets[set];
    return point == TP_FAR ? 0 : heap->bytes - bytes_until(model, heap->sums, point);
}

uint64_t tp_model_bytes_hurried(const tp_model *model, tp_unit_set set, uint64_t point) {
    return bytes_until(model, model->sets[set].hurried, point);
}

/* Whether unit a stands before unit b in its heap; equal needs: in order of blocks. */
static bool before(const tp_model *model, tp_unit_set set, uint32_t a, uint32_t b) {
    const uint64_t next_a = model->units[a].next, next_b = model->units[b].next;
    const uint64_t due_a = model->units[a].due, due_b = model->units[b].due;
    if (next_a == next_b && due_a != due_b) return due_a > due_b; /* to go before others */
    if (next_a == next_b) return a < b;
    return set == TP_SET_HOST ? next_a < next_b : next_a > next_b;
}

static void put(tp_model *model, tp_unit_heap *heap, uint32_t place, uint32_t unit) {
    heap->units[place] = unit;
    model->units[unit].place = place;
}

static void rise(tp_model *model, tp_unit_set set, uint32_t place) {
    tp_unit_heap *heap = &model->sets[set];
    const uint32_t unit = heap->units[place];
    while (place > 0 && before(model, set, unit, heap->units[(place - 1) / 2])) {
        put(model, heap, place, heap->units[(place - 1) / 2]);
        place = (place - 1) / 2;
    }
    put(model, heap, place, unit);
}

static void sink(tp_model *model, tp_unit_set set, uint32_t place) {
    tp_unit_heap *heap = &model->sets[set];
    const uint32_t unit = heap->units[place];
    for (;;) {
        uint32_t child = 2 * place + 1;
        if (child >= heap->count) break;
        if (child + 1 < heap->count &&
            before(model, set, heap->units[child + 1], heap->units[child]))
            child++;
        if (!before(model, set, heap->units[child], unit)) break;
        put(model, heap, place, heap->units[child]);
        place = child;
    }
    put(model, heap, place, unit);
}

void tp_model_unfile(tp_model *model, uint32_t unit) {
    tp_unit *it = &model->units[unit];
    if (it->set == TP_SET_NONE) return;
    tp_unit_heap *heap = &model->sets[it->set];
    add_bytes(model, heap, it, 0 - it->bytes);
    const uint32_t last = heap->units[--heap->count];
    if (last != unit) {
        const uint32_t place = it->place;
        put(model, heap, place, last);
        sink(model, it->set, place);
        rise(model, it->set, model->units[last].place);
    }
    it->set = TP_SET_NONE;
}

void tp_model_file(tp_model *model, uint32_t unit) {
    tp_unit *it = &model->units[unit];
    TP_ASSERT(it->set == TP_SET_NONE);
    if (!it->alive || it->in_use || it->writing || it->filling) return;
    if (!it->resident && !it->is_used) return;
    it->set = !it->resident ? TP_SET_HOST : it->dirty ? TP_SET_DIRTY : TP_SET_CLEAN;
    if (it->set == TP_SET_CLEAN && !it->is_used) it->next = TP_FAR;
    tp_unit_heap *heap = &model->sets[it->set];
    add_bytes(model, heap, it, it->bytes);
    heap->units[heap->count] = unit;
    it->place = heap->count++;
    rise(model, it->set, it->place);
}

void tp_model_unhurry(tp_model *model, uint32_t unit) {
    tp_unit *it = &model->units[unit];
    const bool filed = it->set != TP_SET_NONE;
    tp_model_unfile(model, unit);
    it->next = it->due;
    if (filed) tp_model_file(model, unit);
}

uint32_t tp_model_first(const tp_model *model, tp_unit_set set) {
    return model->sets[set].count == 0 ? TP_NO_UNIT : model->sets[set].units[0];
}

/* ---- life ------------------------------------------------------------------------------------ */

static bool make_sets(tp_model *model) {
    for (uint32_t set = TP_SET_NONE + 1; set < TP_SET_COUNT; set++) {
        tp_unit_heap *heap = &model->sets[set];
        heap->units = table(model->unit_count, sizeof(uint32_t));
        heap->sums = table((size_t)model->trace->op_count + 2, sizeof(uint64_t));
        heap->hurried = table((size_t)model->trace->op_count + 2, sizeof(uint64_t));
        if (heap->units == NULL || heap->sums == NULL || heap->hurried == NULL) return false;
    }
    return true;
}

tp_status tp_model_init(tp_model *model, const tp_trace *trace, const tp_plan_config *config,
                        bool stream, tp_error *error) {
    *model = (tp_model){.trace = trace, .config = *config};
    model->left = table(trace->operand_count, sizeof(bool));
    tp_status status = TP_OK;
    if (model->left == NULL || !list_lives(model) || !list_units(model) ||
        !add_up_live(model) || (stream && !leave_streamed(model)))
        status = tp_error_set(error, TP_NO_HOST_MEMORY, "no memory to plan in");
    if (status == TP_OK) status = leave_what_does_not_fit(model, error);
    if (status == TP_OK && (!list_uses(model) || !make_sets(model)))
        status = tp_error_set(error, TP_NO_HOST_MEMORY, "no memory to plan in");
    if (status != TP_OK) tp_model_fini(model);
    return status;
}

void tp_model_fini(tp_model *model) {
    for (uint32_t set = 0; set < TP_SET_COUNT; set++) {
        free(model->sets[set].units);
        free(model->sets[set].sums);
        free(model->sets[set].hurried);
    }
    free(model->units);
    free(model->block_units);
    free(model->uses);
    free(model->block_uses);
    free(model->born);
    free(model->op_born);
    free(model->dead);
    free(model->op_dead);
    free(model->live_tree);
    free(model->before_ns);
    free(model->born_bytes);
    free(model->left);
    memset(model, 0, sizeof *model);
}
