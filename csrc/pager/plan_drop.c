#include "pager/plan_drop.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/check.h"

#define NO_RECIPE UINT32_MAX
#define NO_LINK UINT32_MAX

/* What may be made again for one rerun, and come back for it: enough for any program seen, and
 * an end to the search in others. */
enum { PARTS_MAX = 256 };
/* An operator counts for this much more than it takes: what is above the target during many
 * short ones is above it too. */
enum { OP_EXTRA_NS = 1000 };
/* In longer steps operators are looked at in stretches, by the most that is alive during one:
 * each candidate is held against all of its pause. */
enum { ALONE_MAX = 8192, STRETCHES = 1024 };

/* Bytes in time: of `bytes` more during stretches [begin, end). */
typedef struct change {
    uint32_t begin, end;
    int64_t bytes;
} change;

typedef struct list {
    uint32_t *items;
    uint32_t count, capacity;
} list;

/* A dropped block, and one that has to be there when it is made again. */
typedef struct link {
    uint32_t needed, by;
    uint32_t next_needed, next_by; /* in the list of `by`; in that of `needed` */
} link;

/* What dropping a block would do. */
typedef struct offer {
    uint32_t block;
    bool keeps;    /* dead inputs are kept, not made again */
    uint32_t back; /* the operator before which it comes back */
    uint64_t cost_ns, gain;
    int64_t scratch_bytes; /* while it is made again */
    list needs, kept, moved;
    change changes[PARTS_MAX + 2];
    uint32_t change_count, begin, end;
} offer;

typedef struct candidate {
    uint64_t key;
    uint32_t block;
    bool keeps;
} candidate;

struct tp_dropper {
    const tp_trace *trace;
    tp_plan_config config;
    uint32_t *recipe_of; /* of each block */
    uint32_t *writes;    /* operators that write a block: [first_write[i], [i + 1]) */
    uint32_t *first_write;
    uint32_t *from, *next;           /* of each block: the pause; TP_NO_OP: none */
    int64_t *bytes;                  /* that each block occupies */
    uint32_t stretch, stretch_count; /* operators of one; how many there are */
    uint64_t *weight;                /* of each stretch, in us */
    int64_t *full; /* bytes alive during each operator if nothing is dropped */
    int64_t *most; /* most of that in each stretch */
    /* Of one choice. */
    int64_t *live, *steps;
    uint32_t *back; /* of each block: before which operator; TP_NO_OP: not dropped */
    uint32_t *kept; /* see tp_drops */
    uint32_t *after;
    uint32_t *first_needed, *first_by; /* links of each block */
    link *links;
    uint32_t link_count, link_capacity;
    candidate *heap;
    uint32_t heap_count;
    uint64_t target_bytes;
    uint64_t excess; /* all that is above it */
    tp_drop_order order;
    offer offer;
    bool no_memory;
};

/* ---- small things ---------------------------------------------------------------------------- */

static void *table(size_t count, size_t size) { return calloc(count != 0 ? count : 1, size); }

static uint32_t *marks(uint32_t count) {
    uint32_t *items = table(count, sizeof *items);
    for (uint32_t i = 0; items != NULL && i < count; i++) items[i] = TP_NO_OP;
    return items;
}

static void push(tp_dropper *d, list *to, uint32_t item) {
    if (to->count == to->capacity) {
        const uint32_t capacity = to->capacity != 0 ? 2 * to->capacity : 64;
        uint32_t *items = realloc(to->items, capacity * sizeof *items);
        if (items == NULL) {
            d->no_memory = true;
            return;
        }
        to->items = items;
        to->capacity = capacity;
    }
    to->items[to->count++] = item;
}

static bool holds(const list *it, uint32_t item) {
    for (uint32_t i = 0; i < it->count; i++)
        if (it->items[i] == item) return true;
    return false;
}

static const tp_trace_recipe *recipe_of(const tp_dropper *d, uint32_t block) {
    return &d->trace->recipes[d->recipe_of[block]];
}

static const uint32_t *inputs_of(const tp_dropper *d, const tp_trace_recipe *recipe) {
    return d->trace->recipe_blocks + recipe->block_begin;
}

static const uint32_t *outputs_of(const tp_dropper *d, const tp_trace_recipe *recipe) {
    return inputs_of(d, recipe) + recipe->input_count;
}

static bool is_dropped(const tp_dropper *d, uint32_t block) {
    return d->back[block] != TP_NO_OP;
}

/* Whether one of the operators [begin, end) writes a block. */
static bool is_written(const tp_dropper *d, uint32_t block, uint32_t begin, uint32_t end) {
    const uint32_t *writes = d->writes + d->first_write[block];
    const uint32_t count = d->first_write[block + 1] - d->first_write[block];
    const uint32_t place = tp_ops_from(writes, count, begin);
    return place < count && writes[place] < end;
}

static bool is_of_step(const tp_trace_block *it) {
    return it->born_op != TP_NO_OP && it->born_op <= it->dead_op;
}

/* Whether a block that was there at operator `since` still has its bytes before `op`. */
static bool lasts(const tp_dropper *d, uint32_t block, uint32_t since, uint32_t op) {
    const tp_trace_block *it = &d->trace->blocks[block];
    if (it->born_op == TP_NO_OP) return true;
    if (!is_of_step(it)) return since > it->dead_op || op <= it->dead_op;
    return it->dead_op >= op || (d->kept[block] != TP_NO_OP && d->kept[block] >= op);
}

/* Whether dead blocks of this kind are made again: small ones are kept, which costs nothing. */
static bool is_large(const tp_dropper *d, uint32_t block) {
    return d->trace->blocks[block].bytes >= d->config.large_min_bytes;
}

/* Whether a rerun finds a dead input because its bytes are kept. */
static bool is_kept(const tp_dropper *d, uint32_t block, bool keeps) {
    return !d->config.no_keep && (keeps || !is_large(d, block));
}

/* Whether a rerun of `recipe` can have a dead input made again. */
static bool is_made_before(const tp_dropper *d, uint32_t block, const tp_trace_recipe *recipe) {
    return d->recipe_of[block] != NO_RECIPE && recipe_of(d, block) < recipe;
}

/* ---- an offer -------------------------------------------------------------------------------- */

/* Another result of an operator that runs again: one that is dropped comes back with it, else
 * it takes memory meanwhile. */
static void add_siblings(tp_dropper *d, uint32_t block, const tp_trace_recipe *recipe) {
    offer *o = &d->offer;
    const uint32_t *outputs = outputs_of(d, recipe);
    for (uint32_t i = 0; i < recipe->output_count; i++) {
        const uint32_t other = outputs[i];
        if (other == block) continue;
        if (d->recipe_of[other] == d->recipe_of[block] && is_dropped(d, other) &&
            d->from[other] < o->back && o->back <= d->back[other]) {
            if (o->back < d->back[other] && !holds(&o->moved, other)) push(d, &o->moved, other);
        } else {
            o->scratch_bytes += d->bytes[other];
        }
    }
}

/* Collects what making a block again takes. False: it cannot be. */
static bool collect(tp_dropper *d, uint32_t block, uint32_t depth) {
    offer *o = &d->offer;
    const tp_trace_recipe *recipe = recipe_of(d, block);
    if (depth > d->config.chain_max || o->needs.count > PARTS_MAX) return false;
    o->cost_ns += recipe->device_ns;
    add_siblings(d, block, recipe);
    const uint32_t *inputs = inputs_of(d, recipe);
    for (uint32_t i = 0; i < recipe->input_count; i++) {
        const uint32_t input = inputs[i];
        if (is_written(d, input, recipe->op, o->back)) return false;
        if (lasts(d, input, recipe->op, o->back)) {
            push(d, &o->needs, input);
        } else if (!is_of_step(&d->trace->blocks[input])) {
            return false;
        } else if (is_kept(d, input, o->keeps)) {
            if (!holds(&o->kept, input)) push(d, &o->kept, input);
            push(d, &o->needs, input);
        } else {
            if (!is_made_before(d, input, recipe)) return false;
            o->scratch_bytes += d->bytes[input];
            if (!collect(d, input, depth + 1)) return false;
        }
    }
    return true;
}

/* How many reruns stand behind one another when a block is made again before `op`, its own
 * not counted; more than chain_max: too many. */
static uint32_t chain_of(const tp_dropper *d, uint32_t block, uint32_t op, uint32_t budget) {
    const tp_trace_recipe *recipe = recipe_of(d, block);
    const uint32_t *inputs = inputs_of(d, recipe);
    uint32_t longest = 0;
    for (uint32_t i = 0; i < recipe->input_count && longest <= budget; i++) {
        const uint32_t input = inputs[i];
        const bool comes = is_dropped(d, input) && d->from[input] < op && op <= d->back[input];
        const bool keeps = d->offer.keeps && block == d->offer.block;
        const bool is_made = !comes && !is_kept(d, input, keeps) &&
                             !lasts(d, input, recipe->op, op) &&
                             is_made_before(d, input, recipe);
        if (!comes && !is_made) continue;
        const uint32_t below = 1 + (budget > 0 ? chain_of(d, input, op, budget - 1) : 0);
        if (below > longest) longest = below;
    }
    return longest;
}

/* Whether the block and all that is made again from it at the same time stay within the
 * longest chain. */
static bool chains_hold(tp_dropper *d) {
    const offer *o = &d->offer;
    const uint32_t most = d->config.chain_max;
    list tops = {0};
    push(d, &tops, o->block);
    bool hold = !d->no_memory;
    for (uint32_t i = 0; i < tops.count && hold; i++) {
        const uint32_t top = tops.items[i];
        hold = chain_of(d, top, o->back, most) <= most;
        for (uint32_t l = d->first_by[top]; l != NO_LINK; l = d->links[l].next_by)
            if (d->back[d->links[l].by] == o->back && !holds(&tops, d->links[l].by))
                push(d, &tops, d->links[l].by);
    }
    free(tops.items);
    return hold;
}

/* What is needed and dropped comes back earlier; so does what it needs. */
static void move_needed(tp_dropper *d) {
    offer *o = &d->offer;
    for (uint32_t i = 0; i < o->needs.count; i++) {
        const uint32_t need = o->needs.items[i];
        if (is_dropped(d, need) && d->from[need] < o->back && o->back < d->back[need] &&
            !holds(&o->moved, need))
            push(d, &o->moved, need);
    }
    for (uint32_t i = 0; i < o->moved.count && o->moved.count <= PARTS_MAX; i++) {
        for (uint32_t l = d->first_needed[o->moved.items[i]]; l != NO_LINK;
             l = d->links[l].next_needed) {
            const uint32_t need = d->links[l].needed;
            if (is_dropped(d, need) && d->from[need] < o->back && o->back < d->back[need] &&
                !holds(&o->moved, need))
                push(d, &o->moved, need);
        }
    }
}

/* Of operators [begin, end). What becomes less counts only where that is so throughout. */
static void add_change(tp_dropper *d, uint32_t begin, uint32_t end, int64_t bytes) {
    offer *o = &d->offer;
    if (begin >= end || bytes == 0) return;
    const uint32_t up = d->stretch - 1;
    begin = (bytes < 0 ? begin + up : begin) / d->stretch;
    end = (bytes < 0 ? end : end + up) / d->stretch;
    if (begin >= end) return;
    TP_ASSERT(o->change_count < PARTS_MAX + 2);
    o->changes[o->change_count++] = (change){begin, end, bytes};
    if (begin < o->begin) o->begin = begin;
    if (end > o->end) o->end = end;
}

static bool list_changes(tp_dropper *d) {
    offer *o = &d->offer;
    if (o->moved.count + o->kept.count > PARTS_MAX) return false;
    o->change_count = 0;
    o->begin = UINT32_MAX;
    o->end = 0;
    add_change(d, d->from[o->block] + 1, o->back, -d->bytes[o->block]);
    add_change(d, o->back, o->back + 1, o->scratch_bytes);
    for (uint32_t i = 0; i < o->moved.count; i++)
        add_change(d, o->back, d->back[o->moved.items[i]], d->bytes[o->moved.items[i]]);
    for (uint32_t i = 0; i < o->kept.count; i++) {
        const uint32_t block = o->kept.items[i], dead = d->trace->blocks[block].dead_op;
        const uint32_t end = d->kept[block] != TP_NO_OP ? d->kept[block] : dead;
        add_change(d, end + 1, o->back + 1, d->bytes[block]);
    }
    return true;
}

/* When a block would come back: before its next use, or that of a rerun. */
static uint32_t comes_back(const tp_dropper *d, uint32_t block, bool *with_sibling) {
    uint32_t back = d->next[block];
    for (uint32_t l = d->first_by[block]; l != NO_LINK; l = d->links[l].next_by) {
        const uint32_t at = d->back[d->links[l].by];
        if (at > d->from[block] && at < back) back = at;
    }
    const tp_trace_recipe *recipe = recipe_of(d, block);
    const uint32_t *outputs = outputs_of(d, recipe);
    *with_sibling = false;
    for (uint32_t i = 0; i < recipe->output_count; i++) {
        const uint32_t at = d->back[outputs[i]];
        if (at == TP_NO_OP || at <= d->from[block] || at > back) continue;
        if (d->recipe_of[outputs[i]] != d->recipe_of[block]) continue;
        back = at;
        *with_sibling = true;
    }
    return back;
}

/* Whether `block` can be dropped; d->offer says what that would do. */
static bool make_offer(tp_dropper *d, uint32_t block, bool keeps) {
    offer *o = &d->offer;
    bool with_sibling;
    o->block = block;
    o->keeps = keeps;
    o->back = comes_back(d, block, &with_sibling);
    o->cost_ns = 0;
    o->scratch_bytes = 0;
    o->needs.count = o->kept.count = o->moved.count = 0;
    if (o->back <= d->from[block] + 1 || !collect(d, block, 0)) return false;
    d->back[block] = o->back;
    const bool hold = chains_hold(d);
    d->back[block] = TP_NO_OP;
    if (!hold) return false;
    if (with_sibling) o->cost_ns -= recipe_of(d, block)->device_ns;
    move_needed(d);
    return list_changes(d) && !d->no_memory;
}

/* ---- what it is worth ------------------------------------------------------------------------ */

/* Of what is alive in a stretch, what is above the target: in KiB times us. */
static uint64_t excess(const tp_dropper *d, uint32_t at, int64_t live) {
    const int64_t target = (int64_t)d->target_bytes;
    return live > target ? (uint64_t)(live - target) / TP_KIB * d->weight[at] : 0;
}

/* Puts the changes of the offer into d->steps, or takes them out again. */
static void set_steps(tp_dropper *d, int64_t sign) {
    const offer *o = &d->offer;
    for (uint32_t i = 0; i < o->change_count; i++) {
        d->steps[o->changes[i].begin] += sign * o->changes[i].bytes;
        d->steps[o->changes[i].end] -= sign * o->changes[i].bytes;
    }
}

/* By how much the offer lowers what is above the target; 0: not at all. */
static uint64_t gain_of(tp_dropper *d) {
    const offer *o = &d->offer;
    uint64_t less = 0, more = 0;
    int64_t delta = 0;
    set_steps(d, 1);
    for (uint32_t at = o->begin; at < o->end; at++) {
        delta += d->steps[at];
        less += excess(d, at, d->live[at]);
        more += excess(d, at, d->live[at] + delta);
    }
    set_steps(d, -1);
    return less > more ? less - more : 0;
}

/* Cheap is small. Whole numbers: the plan must not depend on how a machine rounds. */
static uint64_t key_of(const tp_dropper *d) {
    const uint64_t most_ns = ((uint64_t)1 << 28) - 1;
    const uint64_t cost = d->offer.cost_ns < most_ns ? d->offer.cost_ns : most_ns;
    if (d->order == TP_DROP_BY_BYTES)
        return (cost << 24) / ((uint64_t)d->bytes[d->offer.block] / TP_KIB + 1);
    return (cost << 36) / d->offer.gain;
}

/* ---- the choice ------------------------------------------------------------------------------ */

static bool is_cheaper(const candidate *a, const candidate *b) {
    if (a->key != b->key) return a->key < b->key;
    if (a->block != b->block) return a->block < b->block;
    return !a->keeps && b->keeps;
}

static void put_candidate(tp_dropper *d, candidate it) {
    uint32_t place = d->heap_count++;
    while (place > 0 && is_cheaper(&it, &d->heap[(place - 1) / 2])) {
        d->heap[place] = d->heap[(place - 1) / 2];
        place = (place - 1) / 2;
    }
    d->heap[place] = it;
}

static candidate take_candidate(tp_dropper *d) {
    const candidate first = d->heap[0], it = d->heap[--d->heap_count];
    uint32_t place = 0;
    for (;;) {
        uint32_t child = 2 * place + 1;
        if (child >= d->heap_count) break;
        if (child + 1 < d->heap_count && is_cheaper(&d->heap[child + 1], &d->heap[child]))
            child++;
        if (!is_cheaper(&d->heap[child], &it)) break;
        d->heap[place] = d->heap[child];
        place = child;
    }
    d->heap[place] = it;
    return first;
}

static bool keeps_large(const tp_dropper *d) {
    for (uint32_t i = 0; i < d->offer.kept.count; i++)
        if (is_large(d, d->offer.kept.items[i])) return true;
    return false;
}

/* Offers a block, if that helps at all. */
static bool offer_candidate(tp_dropper *d, uint32_t block, bool keeps, candidate *out) {
    if (is_dropped(d, block) || !make_offer(d, block, keeps)) return false;
    if (keeps && !keeps_large(d)) return false; /* the same as without */
    d->offer.gain = gain_of(d);
    if (d->offer.gain == 0) return false;
    *out = (candidate){key_of(d), block, keeps};
    return true;
}

static void add_link(tp_dropper *d, uint32_t needed, uint32_t by) {
    if (d->link_count == d->link_capacity) {
        const uint32_t capacity = d->link_capacity != 0 ? 2 * d->link_capacity : 1024;
        link *links = realloc(d->links, capacity * sizeof *links);
        if (links == NULL) {
            d->no_memory = true;
            return;
        }
        d->links = links;
        d->link_capacity = capacity;
    }
    d->links[d->link_count] = (link){needed, by, d->first_needed[by], d->first_by[needed]};
    d->first_needed[by] = d->first_by[needed] = d->link_count++;
}

static void accept(tp_dropper *d) {
    const offer *o = &d->offer;
    set_steps(d, 1);
    int64_t delta = 0;
    for (uint32_t at = o->begin; at < o->end; at++) {
        delta += d->steps[at];
        d->live[at] += delta;
    }
    set_steps(d, -1);
    d->excess -= o->gain;
    d->back[o->block] = o->back;
    d->after[o->block] = d->from[o->block];
    for (uint32_t i = 0; i < o->needs.count; i++) add_link(d, o->needs.items[i], o->block);
    for (uint32_t i = 0; i < o->moved.count; i++) d->back[o->moved.items[i]] = o->back;
    for (uint32_t i = 0; i < o->kept.count; i++) d->kept[o->kept.items[i]] = o->back;
}

static void begin_choice(tp_dropper *d) {
    const uint32_t blocks = d->trace->block_count;
    memcpy(d->live, d->most, d->stretch_count * sizeof *d->live);
    d->excess = 0;
    for (uint32_t at = 0; at < d->stretch_count; at++) d->excess += excess(d, at, d->live[at]);
    for (uint32_t i = 0; i < blocks; i++) {
        d->back[i] = d->kept[i] = d->after[i] = TP_NO_OP;
        d->first_needed[i] = d->first_by[i] = NO_LINK;
    }
    d->link_count = d->heap_count = 0;
    candidate it;
    for (uint32_t i = 0; i < blocks; i++) {
        if (d->from[i] == TP_NO_OP) continue;
        if (offer_candidate(d, i, false, &it)) put_candidate(d, it);
        const bool may_keep = d->order != TP_DROP_WITHOUT_KEEPING && !d->config.no_keep;
        if (may_keep && offer_candidate(d, i, true, &it)) put_candidate(d, it);
    }
}

tp_status tp_dropper_choose(tp_dropper *d, uint64_t target_bytes, tp_drop_order order,
                            tp_drops *out, tp_error *error) {
    d->target_bytes = target_bytes;
    d->order = order;
    begin_choice(d);
    uint32_t count = 0;
    while (d->heap_count > 0 && d->excess > 0 && !d->no_memory) {
        candidate it = take_candidate(d);
        /* What it costs and is worth has changed since. One that is nearly the cheapest will
         * do: looking for the very cheapest takes most of the time. */
        if (!offer_candidate(d, it.block, it.keeps, &it)) continue;
        if (d->heap_count > 0 && d->heap[0].key < it.key - it.key / 64) {
            put_candidate(d, it);
            continue;
        }
        accept(d);
        count++;
    }
    if (d->no_memory) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory to plan in");
    *out = (tp_drops){.after_op = d->after, .kept_until = d->kept, .count = count};
    return TP_OK;
}

/* ---- life ------------------------------------------------------------------------------------ */

static bool list_writes(tp_dropper *d) {
    const tp_trace *trace = d->trace;
    d->first_write = table((size_t)trace->block_count + 2, sizeof(uint32_t));
    d->writes = table(trace->operand_count, sizeof(uint32_t));
    if (d->first_write == NULL || d->writes == NULL) return false;
    /* Counts two places ahead, so that filling in turns them into first places. */
    uint32_t *first = d->first_write;
    for (uint32_t i = 0; i < trace->operand_count; i++)
        if (trace->operands[i].writes) first[trace->operands[i].block + 2]++;
    for (uint32_t i = 0; i < trace->block_count; i++) first[i + 2] += first[i + 1];
    for (uint32_t op = 0; op < trace->op_count; op++) {
        const tp_trace_op *it = &trace->ops[op];
        for (uint32_t i = it->operand_begin; i < it->operand_begin + it->operand_count; i++)
            if (trace->operands[i].writes)
                d->writes[first[trace->operands[i].block + 1]++] = op;
    }
    return true;
}

static bool list_recipes(tp_dropper *d) {
    const tp_trace *trace = d->trace;
    d->recipe_of = marks(trace->block_count);
    d->bytes = table(trace->block_count, sizeof(int64_t));
    if (d->recipe_of == NULL || d->bytes == NULL) return false;
    for (uint32_t i = 0; i < trace->block_count; i++) {
        const uint64_t bytes = trace->blocks[i].bytes;
        d->bytes[i] = (int64_t)bytes;
        if (bytes >= d->config.large_min_bytes)
            d->bytes[i] =
                (int64_t)tp_round_up((size_t)bytes, (size_t)d->config.granularity_bytes);
    }
    for (uint32_t r = 0; r < trace->recipe_count; r++) {
        const tp_trace_recipe *recipe = &trace->recipes[r];
        const uint32_t *outputs = outputs_of(d, recipe);
        for (uint32_t i = 0; i < recipe->output_count; i++)
            if (!is_written(d, outputs[i], recipe->op + 1, trace->op_count))
                d->recipe_of[outputs[i]] = r;
    }
    return true;
}

/* The longest pause of each block between uses, by the operators' time. */
static bool find_pauses(tp_dropper *d) {
    const tp_trace *trace = d->trace;
    uint64_t *before_ns = table((size_t)trace->op_count + 1, sizeof(uint64_t));
    uint64_t *longest = table(trace->block_count, sizeof(uint64_t));
    uint32_t *last = marks(trace->block_count);
    d->from = marks(trace->block_count);
    d->next = marks(trace->block_count);
    const bool made = before_ns != NULL && longest != NULL && last != NULL && d->from != NULL &&
                      d->next != NULL;
    for (uint32_t op = 0; made && op < trace->op_count; op++) {
        const tp_trace_op *it = &trace->ops[op];
        before_ns[op + 1] = before_ns[op] + it->device_ns;
        for (uint32_t i = it->operand_begin; i < it->operand_begin + it->operand_count; i++) {
            const uint32_t block = trace->operands[i].block;
            if (d->recipe_of[block] == NO_RECIPE || !is_large(d, block) ||
                op < recipe_of(d, block)->op)
                continue;
            if (last[block] != TP_NO_OP &&
                before_ns[op] - before_ns[last[block] + 1] > longest[block]) {
                longest[block] = before_ns[op] - before_ns[last[block] + 1];
                d->from[block] = last[block];
                d->next[block] = op;
            }
            last[block] = op;
        }
    }
    free(before_ns), free(longest), free(last);
    return made;
}

static bool add_up(tp_dropper *d) {
    const tp_trace *trace = d->trace;
    const uint32_t ops = trace->op_count;
    d->stretch = ops <= ALONE_MAX ? 1 : (ops - 1) / STRETCHES + 1;
    d->stretch_count = (ops - 1) / d->stretch + 1;
    d->weight = table(d->stretch_count, sizeof(uint64_t));
    d->most = table(d->stretch_count, sizeof(int64_t));
    d->full = table((size_t)ops + 1, sizeof(int64_t));
    if (d->weight == NULL || d->most == NULL || d->full == NULL) return false;
    for (uint32_t i = 0; i < trace->block_count; i++) {
        const tp_trace_block *it = &trace->blocks[i];
        if (!is_of_step(it)) d->full[0] += d->bytes[i];
        if (it->born_op == TP_NO_OP) continue;
        d->full[it->born_op] += d->bytes[i];
        d->full[it->dead_op + 1] -= d->bytes[i];
    }
    for (uint32_t op = 0; op < ops; op++) {
        if (op > 0) d->full[op] += d->full[op - 1];
        const uint32_t at = op / d->stretch;
        d->weight[at] += (trace->ops[op].device_ns + OP_EXTRA_NS) / 1024 + 1;
        if (d->full[op] > d->most[at]) d->most[at] = d->full[op];
    }
    return true;
}

static bool make_room(tp_dropper *d) {
    const size_t blocks = d->trace->block_count;
    d->live = table(d->stretch_count, sizeof *d->live);
    d->steps = table((size_t)d->stretch_count + 1, sizeof *d->steps);
    d->back = table(blocks, sizeof(uint32_t));
    d->kept = table(blocks, sizeof(uint32_t));
    d->after = table(blocks, sizeof(uint32_t));
    d->first_needed = table(blocks, sizeof(uint32_t));
    d->first_by = table(blocks, sizeof(uint32_t));
    d->heap = table(2 * blocks + 1, sizeof *d->heap);
    return d->live != NULL && d->steps != NULL && d->back != NULL && d->kept != NULL &&
           d->after != NULL && d->first_needed != NULL && d->first_by != NULL &&
           d->heap != NULL;
}

tp_status tp_dropper_create(const tp_trace *trace, const tp_plan_config *config,
                            tp_dropper **out, tp_error *error) {
    tp_dropper *d = table(1, sizeof *d);
    if (d == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory to plan in");
    d->trace = trace;
    d->config = *config;
    if (!list_writes(d) || !list_recipes(d) || !find_pauses(d) || !add_up(d) || !make_room(d)) {
        tp_dropper_destroy(d);
        return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory to plan in");
    }
    *out = d;
    return TP_OK;
}

void tp_dropper_destroy(tp_dropper *d) {
    if (d == NULL) return;
    free(d->recipe_of), free(d->writes), free(d->first_write), free(d->from), free(d->next);
    free(d->bytes), free(d->weight), free(d->full), free(d->most), free(d->live),
        free(d->steps);
    free(d->back), free(d->kept), free(d->after), free(d->first_needed), free(d->first_by);
    free(d->links), free(d->heap);
    free(d->offer.needs.items), free(d->offer.kept.items), free(d->offer.moved.items);
    free(d);
}

uint64_t tp_dropper_free_bytes(const tp_dropper *d) {
    const uint32_t ops = d->trace->op_count;
    uint32_t least = 0, most = 0;
    for (uint32_t op = 1; op < ops; op++) {
        if (d->full[op] < d->full[least]) least = op;
        if (d->full[op] > d->full[most]) most = op;
    }
    uint64_t ns = 0;
    for (uint32_t op = least; op != most; op = (op + 1) % ops)
        ns += d->trace->ops[op].device_ns;
    return ns / 1000 * (d->config.link_bytes_per_s / 1000000);
}
