#include "pager/steps.h"

#include <string.h>

#include "base/check.h"

#define BYTES_MAX ((size_t)256 << 20)

enum {
    NONE = TP_KINDS_MAX,
    SAME_SHARE = 16, /* steps whose bytes differ by less than this part are of one kind */
    TRUST_MAX = 3,
    SWITCH_AHEAD = 8,       /* by how much another step must fit better */
    SETTLED_OPS = 32,       /* who has fitted exactly for so long is followed alone */
    UNMARKED_OPS = 4096,    /* so long, and four steps, without a mark: there are no marks */
    FIRST_UNMARKED_OPS = 64 /* the same before the first mark */
};

void tp_steps_init(tp_steps *steps, const tp_record_limits *limits) {
    memset(steps, 0, sizeof *steps);
    tp_record_init(&steps->record, limits);
    steps->best = steps->last = NONE;
    steps->bytes_max = BYTES_MAX;
}

void tp_steps_fini(tp_steps *steps) {
    tp_steps_stop(steps);
    for (uint32_t i = 0; i < steps->count; i++) {
        if (steps->at[i] != NULL) tp_step_destroy(steps->at[i]);
        steps->at[i] = NULL;
    }
    steps->count = 0;
    tp_record_fini(&steps->record);
    tp_period_fini(&steps->period);
}

/* ---- following --------------------------------------------------------------------------- */

/* The one that has run most often. */
static const tp_step *most_usual(const tp_steps *steps) {
    const tp_step *found = NULL;
    for (uint32_t i = 0; i < steps->count; i++) {
        const tp_step *it = steps->at[i];
        if (it != NULL && (found == NULL || it->completed_count > found->completed_count))
            found = it;
    }
    return found;
}

static void follow_from_start(tp_steps *steps) {
    const tp_step *last = tp_steps_last(steps);
    const tp_step *expected = last == NULL ? NULL : tp_steps_expected(steps, last);
    if (expected == NULL) expected = most_usual(steps);
    steps->best = expected != NULL ? expected->slot : NONE;
    for (uint32_t i = 0; i < steps->count; i++)
        tp_follow_begin(&steps->follows[i], i == steps->best ? SWITCH_AHEAD : 0);
    steps->recent.count = 0;
    steps->matched = false;
}

/* All operators so far were its own, sizes included. */
static bool fits_exactly(const tp_steps *steps, uint32_t slot) {
    const tp_follow *it = &steps->follows[slot];
    return it->from_start && it->exact && it->astray == 0;
}

/* How well a step fits. One that has run only once may be an odd one, behind which others hide
 * that fit as well. */
static uint32_t rank(const tp_steps *steps, uint32_t slot) {
    const uint32_t usual = steps->at[slot]->completed_count > 1 ? 2 * SWITCH_AHEAD : 0;
    return steps->follows[slot].score + usual;
}

/* The one that fits best; the one that is followed stays unless another is clearly better: the sizes of
 * one operator tell of what length a step is. */
static void choose(tp_steps *steps) {
    uint32_t better = NONE;
    bool exact = false;
    for (uint32_t i = 0; i < steps->count; i++) {
        if (steps->at[i] == NULL || steps->follows[i].astray > 0) continue;
        const bool fits = fits_exactly(steps, i);
        if (exact && !fits) continue;
        if (better == NONE || fits != exact || rank(steps, i) > rank(steps, better)) better = i;
        exact = fits;
    }
    if (better == NONE || better == steps->best) return;
    const bool surely = exact && steps->best != NONE && !fits_exactly(steps, steps->best);
    if (steps->best != NONE && !surely) {
        const uint32_t ahead = steps->follows[steps->best].astray == 0 ? SWITCH_AHEAD : 0;
        if (rank(steps, better) <= rank(steps, steps->best) + ahead) return;
    }
    steps->best = better;
}

/* The operands in the order in which they were announced stand for those in the trace. */
static void bind_operands(tp_steps *steps) {
    tp_step *step = steps->at[steps->best];
    const uint32_t at = steps->follows[steps->best].position - 1;
    const tp_record_op *op = &steps->record.ops[steps->record.op_count - 1];
    if (op->use_count != step->announced[at]) return;
    const tp_trace_operand *operands = &step->trace.operands[step->trace.ops[at].operand_begin];
    for (uint32_t i = 0; i < op->use_count; i++) {
        const uint32_t storage = steps->record.uses[op->use_begin + i].storage;
        tp_identity *identity = steps->record.storages[storage].owner;
        if (identity != NULL) tp_step_bind(step, operands[i].block, identity);
    }
}

static void follow(tp_steps *steps, const tp_record_op *op) {
    tp_recent_push(&steps->recent, op->kind, op->like, op->weights);
    const uint32_t turn = steps->count > 0 ? steps->record.op_count % steps->count : 0;
    const bool settled = steps->best != NONE && fits_exactly(steps, steps->best) &&
                         steps->follows[steps->best].position >= SETTLED_OPS;
    for (uint32_t i = 0; i < steps->count; i++) {
        if (steps->at[i] == NULL) continue;
        /* Of many kinds few fit: to go along with the others would take longer than all the rest. */
        if (settled && !fits_exactly(steps, i)) {
            tp_follow_lose(&steps->follows[i]);
            continue;
        }
        const bool was_astray = steps->follows[i].astray > 0;
        const bool on = tp_follow_op(&steps->follows[i], steps->at[i], &steps->recent,
                                     i == steps->best || i == turn);
        if (i == steps->best && on && was_astray) steps->resync_count++;
        if (i == steps->best && steps->follows[i].astray == TP_ASTRAY_MAX) steps->lost_count++;
    }
    choose(steps);
    steps->matched = steps->best != NONE && steps->follows[steps->best].astray == 0;
    if (steps->matched) bind_operands(steps);
}

/* ---- the end of a step ------------------------------------------------------------------- */

static bool about_equal(uint64_t a, uint64_t b) {
    return (a > b ? a - b : b - a) <= b / SAME_SHARE;
}

/* The remembered step that has just run once more. */
static tp_step *find_same(const tp_steps *steps) {
    tp_step *found = NULL;
    for (uint32_t i = 0; i < steps->count; i++) {
        tp_step *it = steps->at[i];
        const tp_follow *f = &steps->follows[i];
        if (it == NULL || !f->from_start || it->trace.op_count != steps->record.op_count ||
            f->position != it->trace.op_count)
            continue;
        if (f->exact) return it;
        if (about_equal(steps->record.moved_bytes, it->moved_bytes)) found = it;
    }
    return found;
}

/* The one that is forgotten first: that has not run for longest, among those that ran only once if
 * there are any. NONE: all are held. */
static uint32_t least_useful(const tp_steps *steps) {
    uint32_t found = NONE;
    for (uint32_t i = 0; i < steps->count; i++) {
        const tp_step *it = steps->at[i];
        if (it == NULL || it->held_count > 0) continue;
        if (found == NONE) {
            found = i;
            continue;
        }
        const tp_step *other = steps->at[found];
        const bool once = it->completed_count == 1, other_once = other->completed_count == 1;
        if (once != other_once ? once : it->last_completed < other->last_completed) found = i;
    }
    return found;
}

static void forget(tp_steps *steps, uint32_t place) {
    steps->bytes -= steps->at[place]->bytes;
    tp_step_destroy(steps->at[place]);
    steps->at[place] = NULL;
    if (steps->last == place) steps->last = NONE;
    if (steps->best == place) steps->best = NONE;
}

static uint32_t free_place(const tp_steps *steps) {
    uint32_t place = 0;
    while (place < TP_KINDS_MAX && steps->at[place] != NULL) place++;
    return place; /* or NONE */
}

static void put(tp_steps *steps, tp_step *step) {
    const uint32_t place = step->slot;
    if (steps->at[place] != NULL) {
        steps->bytes -= steps->at[place]->bytes;
        tp_step_destroy(steps->at[place]);
    }
    steps->at[place] = step;
    steps->bytes += step->bytes;
    tp_step_bind_all(step, &steps->record);
}

static tp_step *remember(tp_steps *steps) {
    uint32_t place = free_place(steps);
    if (place == NONE) {
        place = least_useful(steps);
        if (place == NONE) return NULL;
        forget(steps, place);
    }
    tp_step *step = tp_step_build(&steps->record, place);
    if (step == NULL) return NULL;
    while (steps->bytes + step->bytes > steps->bytes_max) {
        const uint32_t other = least_useful(steps);
        if (other == NONE) {
            tp_step_destroy(step);
            return NULL;
        }
        forget(steps, other);
    }
    put(steps, step);
    if (steps->count <= place) steps->count = place + 1;
    step->number = step->built = ++steps->number;
    step->fresh = true;
    return step;
}

/* Its trace is another. */
static void renumber(tp_steps *steps, tp_step *step) {
    const uint64_t before = step->number;
    step->number = ++steps->number;
    step->fresh = true;
    for (uint32_t i = 0; i < steps->count; i++) {
        if (steps->at[i] != NULL && steps->at[i]->next_number == before)
            steps->at[i]->next_number = step->number;
    }
}

static void refresh(tp_steps *steps, tp_step *step) {
    if (step->held_count == 0 && tp_step_refresh(step, &steps->record)) renumber(steps, step);
}

/* The program has other recipes than when the step was remembered, and had them in its last run
 * too. The step is built anew, in its place; what was planned for it goes on if it differs in nothing
 * else. Returns the step that counts. */
static tp_step *renew_recipes(tp_steps *steps, tp_step *step) {
    const uint64_t hash = tp_step_recipe_hash(&steps->record), last = step->last_recipe_hash;
    step->last_recipe_hash = hash;
    if (hash == step->recipe_hash || hash != last || step->held_count > 0) return step;
    tp_step *other = tp_step_build(&steps->record, step->slot);
    if (other == NULL) return step;
    other->number = step->number;
    other->built = tp_step_alike(step, other) ? step->built : ++steps->number;
    other->completed_count = step->completed_count;
    other->last_completed = step->last_completed;
    other->next_number = step->next_number;
    other->next_trust = step->next_trust;
    put(steps, other);
    renumber(steps, other);
    return other;
}

/* What has followed a step once follows it as a rule only if nothing else does. */
static void note_follower(tp_step *before, const tp_step *step) {
    if (before->next_number == step->number) {
        if (before->next_trust < TRUST_MAX) before->next_trust++;
    } else if (before->next_trust > 1) {
        before->next_trust--;
    } else {
        before->next_number = step->number;
        before->next_trust = 1;
    }
}

static bool complete(tp_steps *steps) {
    tp_step *step = find_same(steps);
    if (step == NULL) {
        step = remember(steps);
    } else {
        step = renew_recipes(steps, step);
        refresh(steps, step);
    }
    if (step == NULL) return false;
    step->completed_count++;
    step->last_completed = ++steps->completed_count;
    if (steps->last != NONE) note_follower(steps->at[steps->last], step);
    steps->last = step->slot;
    return true;
}

/* The first operator behind a step: the step has taken until now. */
static void note_time(tp_steps *steps, uint64_t now_ns) {
    if (steps->ended_began_ns == 0) return;
    steps->at[steps->last]->step_ns = now_ns - steps->ended_began_ns;
    steps->ended_began_ns = 0;
}

static void end_step(tp_steps *steps) {
    steps->ending = false;
    steps->countdown = steps->period_ops;
    steps->period_ops = 0;
    if (steps->record.op_count == 0) return; /* nothing has happened since the last one */
    const bool whole = !steps->record.partial && !steps->record.overflown;
    steps->ended_began_ns = whole && complete(steps) ? steps->record.ops[0].began_ns : 0;
    tp_record_next(&steps->record);
    follow_from_start(steps);
}

/* ---- without marks ----------------------------------------------------------------------- */

/* No marks have come for so long that there seem to be none. Who trains will come to an optimizer. */
static bool unmarked(const tp_steps *steps) {
    if (steps->asked_count + steps->optimizer_count == 0 && !steps->trains)
        return steps->unmarked_ops > FIRST_UNMARKED_OPS;
    return steps->unmarked_ops > UNMARKED_OPS + 4 * steps->longest_ops;
}

/* How many operators of the last `period` ones come before the one at which least is alive: there
 * a step ends best. */
static uint32_t until_least_alive(const tp_record *record, uint32_t period) {
    const uint32_t first = record->op_count - period;
    uint32_t least = first;
    for (uint32_t op = first; op < record->op_count; op++) {
        if (record->ops[op].live_bytes < record->ops[least].live_bytes) least = op;
    }
    return least - first;
}

static bool names_weights(const tp_record *record, const tp_record_op *op) {
    for (uint32_t i = op->use_begin; i < op->use_begin + op->use_count; i++) {
        if (record->storages[record->uses[i].storage].born == TP_NO_OP) return true;
    }
    return false;
}

/* Before an operator is recorded: whether the last one ended a step, as far as its period tells. */
static bool period_ends(tp_steps *steps) {
    if (!unmarked(steps)) return false;
    if (steps->countdown > 0) return --steps->countdown == 0;
    const uint32_t best = steps->best;
    if (best == NONE || steps->follows[best].astray > 0) return false;
    if (steps->follows[best].position != steps->at[best]->trace.op_count) return false;
    /* The program has come back to a step on its way: what is recorded is more or less than one. */
    if (!steps->follows[best].from_start) steps->record.partial = true;
    return true;
}

static void seek(tp_steps *steps, const tp_record_op *op) {
    const bool followed = steps->matched && steps->follows[steps->best].from_start;
    const bool known = steps->countdown > 0 || followed;
    if (known || !unmarked(steps)) {
        steps->seeking = false;
        return;
    }
    if (!steps->seeking && !tp_period_reset(&steps->period)) return;
    steps->seeking = true;
    const uint32_t period =
        tp_period_op(&steps->period, op->token, names_weights(&steps->record, op));
    if (period == 0 || period > steps->record.op_count) return;
    steps->seeking = false;
    const uint32_t rest = until_least_alive(&steps->record, period);
    tp_record_next(&steps->record); /* what was recorded so far is more than a step */
    steps->record.partial = rest > 0;
    follow_from_start(steps);
    steps->countdown = (rest > 0 ? rest : period) + 1;
    steps->period_ops = rest > 0 ? period : 0;
}

/* ---- telling ----------------------------------------------------------------------------- */

bool tp_steps_start(tp_steps *steps) {
    if (!tp_record_start(&steps->record)) return false;
    steps->unmarked_ops = 0;
    steps->ending = steps->in_optimizer = steps->seeking = false;
    steps->countdown = steps->period_ops = 0;
    steps->ended_began_ns = 0;
    follow_from_start(steps);
    return true;
}

void tp_steps_stop(tp_steps *steps) {
    for (uint32_t i = 0; i < steps->count; i++) {
        if (steps->at[i] == NULL) continue;
        memset(steps->at[i]->live, 0,
               steps->at[i]->trace.block_count * sizeof *steps->at[i]->live);
    }
    tp_record_stop(&steps->record);
}

/* The next block that the trace has born about here, of that size, and that nothing stands for. */
static uint32_t birth_expected(const tp_step *step, uint32_t position, uint64_t bytes) {
    const uint32_t from = position == 0 ? 0 : position - 1;
    const uint32_t end = position < step->trace.op_count ? position + 1 : position;
    for (uint32_t i = step->birth_begin[from]; i < step->birth_begin[end]; i++) {
        const uint32_t block = step->births[i];
        if (step->trace.blocks[block].bytes == bytes && step->live[block] == NULL) return block;
    }
    return TP_NO_OP;
}

void tp_steps_born(tp_steps *steps, tp_identity *identity, uint64_t bytes) {
    tp_record_born(&steps->record, identity, bytes);
    if (steps->best == NONE || steps->follows[steps->best].astray > 0) return;
    if (identity->serial == 0) return;
    tp_step *step = steps->at[steps->best];
    const uint32_t block = birth_expected(step, steps->follows[steps->best].position, bytes);
    if (block != TP_NO_OP) tp_step_bind(step, block, identity);
}

void tp_steps_moved(tp_steps *steps, tp_identity *from, tp_identity *to) {
    tp_record_moved(&steps->record, from, to);
    if (to->serial != 0) tp_step_moved(steps->at, to);
}

void tp_steps_freed(tp_steps *steps, tp_identity *identity) {
    if (identity->serial == 0) return;
    tp_step_unbind(steps->at, identity);
    tp_record_freed(&steps->record, identity);
}

bool tp_steps_op_begin(tp_steps *steps, uint32_t name, bool backward, uint32_t stream,
                       uint64_t now_ns) {
    const bool ends = (steps->ending && !steps->in_optimizer) || period_ends(steps);
    if (ends) end_step(steps);
    /* Longer than can be recorded, and nobody says where it ends: anywhere will do. */
    if (steps->record.overflown && unmarked(steps)) end_step(steps);
    note_time(steps, now_ns);
    steps->unmarked_ops++;
    steps->trains = steps->trains || backward || steps->in_optimizer;
    const tp_phase phase = backward              ? TP_PHASE_BACKWARD
                           : steps->in_optimizer ? TP_PHASE_OPTIMIZER
                                                 : TP_PHASE_FORWARD;
    return tp_record_op_begin(&steps->record, tp_op_kind(name, phase), stream, now_ns);
}

void tp_steps_operand(tp_steps *steps, tp_identity *identity, bool write) {
    tp_record_operand(&steps->record, identity, write);
}

uint32_t tp_steps_op_ready(tp_steps *steps) {
    const tp_record_op *op = tp_record_op_ready(&steps->record);
    const uint32_t class_idx = op->class_idx;
    follow(steps, op);
    seek(steps, op);
    return class_idx;
}

void tp_steps_result(tp_steps *steps, uint32_t op, uint64_t number, tp_identity *identity) {
    if (number == steps->record.number) tp_record_result(&steps->record, op, identity);
}

void tp_steps_note_recipe(tp_steps *steps, uint32_t op, uint64_t number, uint32_t storages,
                          uint64_t turn) {
    if (number == steps->record.number)
        tp_record_note_recipe(&steps->record, op, storages, turn);
}

void tp_steps_op_end(tp_steps *steps, uint64_t number) {
    tp_record_op_end(&steps->record, number);
}

void tp_steps_settle(tp_steps *steps) {
    if (steps->ending) end_step(steps);
}

void tp_steps_mark(tp_steps *steps, tp_step_mark mark) {
    if (mark != TP_STEP_ASKED) steps->in_optimizer = mark == TP_STEP_OPTIMIZER_BEGIN;
    if (mark == TP_STEP_OPTIMIZER_BEGIN) return;
    if (mark == TP_STEP_OPTIMIZER_END && steps->asked_count > 0) return;
    if (mark == TP_STEP_ASKED) {
        steps->asked_count++;
    } else {
        steps->optimizer_count++;
    }
    if (steps->unmarked_ops > steps->longest_ops) steps->longest_ops = steps->unmarked_ops;
    steps->unmarked_ops = 0;
    steps->seeking = false;
    steps->countdown = steps->period_ops = 0;
    if (!tp_steps_on(steps)) return;
    steps->ending = true;
    if (mark == TP_STEP_ASKED) end_step(steps);
}

/* ---- asking ------------------------------------------------------------------------------ */

tp_step *tp_steps_take_new(tp_steps *steps) {
    for (uint32_t i = 0; i < steps->count; i++) {
        tp_step *it = steps->at[i];
        if (it == NULL || !it->fresh) continue;
        it->fresh = false;
        tp_steps_hold(it);
        return it;
    }
    return NULL;
}

void tp_steps_renew(tp_steps *steps) {
    for (uint32_t i = 0; i < steps->count; i++) {
        if (steps->at[i] != NULL) steps->at[i]->fresh = true;
    }
}

void tp_steps_hold(tp_step *step) { step->held_count++; }

void tp_steps_give(tp_step *step) {
    TP_REQUIRE(step->held_count > 0);
    step->held_count--;
}

tp_step *tp_steps_find(const tp_steps *steps, uint64_t number) {
    for (uint32_t i = 0; i < steps->count; i++) {
        if (steps->at[i] != NULL && steps->at[i]->number == number) return steps->at[i];
    }
    return NULL;
}

tp_position tp_steps_where(const tp_steps *steps) {
    if (steps->best == NONE) return (tp_position){.op = TP_NO_OP, .lost = true};
    const tp_follow *it = &steps->follows[steps->best];
    return (tp_position){.step = steps->at[steps->best],
                         .op = it->position - 1u, /* 0 becomes TP_NO_OP */
                         .lost = it->astray >= TP_ASTRAY_MAX,
                         .exact = it->astray == 0 && it->score >= TP_SCORE_MAX / 2};
}

tp_step *tp_steps_expected(const tp_steps *steps, const tp_step *step) {
    return step->next_number == 0 ? NULL : tp_steps_find(steps, step->next_number);
}

tp_step *tp_steps_last(const tp_steps *steps) {
    return steps->last == NONE ? NULL : steps->at[steps->last];
}

/* Whether it is there in the next step too. */
static bool lives_on(const tp_trace_block *block) {
    return block->born_op == TP_NO_OP || block->dead_op < block->born_op;
}

uint32_t tp_steps_next_use(const tp_step *step, uint32_t block, uint32_t op) {
    const uint32_t *uses = step->use_ops + step->use_begin[block];
    const uint32_t count = step->use_begin[block + 1] - step->use_begin[block];
    const uint32_t place = tp_ops_from(uses, count, op);
    if (place < count) return uses[place];
    if (count == 0 || !lives_on(&step->trace.blocks[block])) return TP_NO_OP;
    return step->trace.op_count + uses[0];
}
