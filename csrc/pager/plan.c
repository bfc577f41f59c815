#include "pager/plan.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/check.h"
#include "pager/plan_drop.h"
#include "pager/plan_haste.h"
#include "pager/plan_model.h"
#include "pager/plan_rerun.h"

/* How often the step is run. Farthest next use alone keeps other extents across the boundary in each
 * round, but the acts are carried out step after step: what was kept from the second round to the
 * third is what stays from then on, and anything else that is refilled for the next step goes
 * first. The rounds from the sixth on are written down, each over the one before, until one ends
 * as it began. */
enum { FREE_ROUNDS = 3, ROUNDS_BEFORE = 5, ROUNDS_MAX = 8 };

/* Bytes are counted in units of 1/1024 where a rate in bytes a ns has to be a whole number:
 * the plan must not depend on how a machine rounds. */
#define RATE_UNITS 1024u

/* A copy in one direction. */
typedef struct copy {
    bool busy;
    bool orphaned; /* its block has died: the frame is free when the copy ends */
    uint32_t unit;
    uint64_t left; /* bytes, times RATE_UNITS */
} copy;

typedef struct planner {
    tp_model model;
    copy in, out;
    uint64_t rate_alone, rate_both;
    uint64_t now_ns;
    bool running, over_link; /* an operator; over operands in HOST: copies wait meanwhile */
    uint64_t op_left_ns;
    /* Extents just written whose bytes were evicted in the round before, in order: a ring. */
    uint32_t *early;
    uint32_t early_first, early_count;
    bool recording, settled, no_memory; /* settled: the round written down ends as it began */
    tp_plan *plan;
    uint32_t act_capacity;
    tp_plan_times *times; /* of the round written down, by operator */
} planner;

void tp_plan_config_init(tp_plan_config *config, uint64_t budget_bytes) {
    *config = (tp_plan_config){.budget_bytes = budget_bytes,
                               .granularity_bytes = 2 * TP_MIB,
                               .large_min_bytes = 2 * TP_MIB,
                               .extent_max_bytes = 64 * TP_MIB,
                               .link_bytes_per_s = 55000000000u,
                               .link_both_bytes_per_s = 101000000000u,
                               .headroom_ops = 2,
                               .slack_ns = 5000000u,
                               .evict_ahead_ns = 20000000u,
                               .evict_before = true,
                               .fill_ahead_ns = 10000000u,
                               .chain_max = 3};
}

uint32_t tp_plan_extents(const tp_plan_config *config, uint64_t bytes) {
    if (bytes < config->large_min_bytes || bytes == 0) return 0;
    return (uint32_t)((bytes - 1) / config->extent_max_bytes + 1);
}

uint64_t tp_plan_extent_bytes(const tp_plan_config *config, uint64_t bytes, uint32_t extent) {
    const uint64_t whole = tp_round_up((size_t)bytes, (size_t)config->granularity_bytes);
    const uint64_t rest = whole - extent * config->extent_max_bytes;
    return rest < config->extent_max_bytes ? rest : config->extent_max_bytes;
}

/* ---- the list of acts ------------------------------------------------------------------------ */

static uint32_t op_at(const planner *p, uint64_t point) {
    return (uint32_t)(point % p->model.trace->op_count);
}

static void note(planner *p, tp_act_kind kind, uint32_t unit) {
    if (!p->recording || p->no_memory) return;
    tp_plan *plan = p->plan;
    if (plan->act_count == p->act_capacity) {
        const uint32_t capacity = p->act_capacity != 0 ? 2 * p->act_capacity : 256;
        tp_act *acts = realloc(plan->acts, capacity * sizeof *acts);
        if (acts == NULL) {
            p->no_memory = true;
            return;
        }
        plan->acts = acts;
        p->act_capacity = capacity;
    }
    const tp_unit *it = &p->model.units[unit];
    plan->acts[plan->act_count++] = (tp_act){
        .op = op_at(p, p->model.point), .block = it->block, .extent = it->extent, .kind = kind};
}

/* What is on the device, or on its way there, into the plan. False: it says so already. */
static bool note_resident(planner *p) {
    const tp_model *m = &p->model;
    tp_plan *plan = p->plan;
    if (plan->resident == NULL) {
        plan->resident = malloc(((size_t)m->unit_count + 1) * sizeof *plan->resident);
        p->no_memory = p->no_memory || plan->resident == NULL;
        if (p->no_memory) return false;
    }
    uint32_t count = 0;
    bool differs = false;
    for (uint32_t u = 0; u < m->unit_count; u++) {
        const tp_unit *it = &m->units[u];
        if (!it->alive || !(it->resident || it->filling)) continue;
        tp_plan_extent *place = &plan->resident[count++];
        differs = differs || count > plan->resident_count || place->block != it->block ||
                  place->extent != it->extent;
        *place = (tp_plan_extent){it->block, it->extent};
    }
    differs = differs || count != plan->resident_count;
    plan->resident_count = count;
    return differs;
}

/* What was to go before the boundary and is still there counts as what it is: needed soon. */
static void forget_haste(tp_model *m) {
    for (uint32_t u = 0; u < m->unit_count; u++)
        if (m->units[u].is_used && m->units[u].next != m->units[u].due) tp_model_unhurry(m, u);
}

/* The last operator of a round has started, and the next round begins, whose acts are written down
 * unless those of the last one will do. */
static void turn_round(planner *p) {
    const uint64_t round = p->model.point / p->model.trace->op_count;
    p->recording = false;
    forget_haste(&p->model);
    if (round < ROUNDS_BEFORE || round == ROUNDS_MAX) return;
    const bool differs = note_resident(p);
    p->settled = !differs && round > ROUNDS_BEFORE;
    if (p->settled) return;
    p->recording = true;
    p->plan->act_count = 0;
    p->plan->in_bytes = p->plan->out_bytes = p->plan->peak_bytes = 0;
    for (uint32_t op = 0; op < p->model.trace->op_count; op++)
        p->times[op].least_free = UINT64_MAX;
}

/* ---- memory ---------------------------------------------------------------------------------- */

static void evict(planner *p, uint32_t unit) {
    tp_model *m = &p->model;
    tp_unit *it = &m->units[unit];
    note(p, TP_ACT_EVICT, unit);
    tp_model_unfile(m, unit);
    it->resident = false;
    it->evicted = true;
    it->evicted_at = m->point + 1;
    it->next = it->due;
    it->evicted_after = it->written_at;
    m->free_bytes += it->bytes;
    tp_model_file(m, unit);
}

/* Whether `bytes` are free once all clean extents needed later than `point` are evicted. */
static bool could_make_room(const planner *p, uint64_t bytes, uint64_t point) {
    const tp_model *m = &p->model;
    if (m->free_bytes >= bytes) return true;
    const uint64_t later = tp_model_bytes_after(m, TP_SET_CLEAN, point);
    if (m->free_bytes + later < bytes) return false;
    return m->free_bytes + later - tp_model_bytes_hurried(m, TP_SET_CLEAN, point) >= bytes;
}

/* Evicts clean extents needed later than `point`, the farthest first, until `bytes` are free.
 * False: there are not enough, what is to go before others but is needed by then not counted. */
static bool make_room(planner *p, uint64_t bytes, uint64_t point) {
    tp_model *m = &p->model;
    while (m->free_bytes < bytes) {
        const uint32_t unit = tp_model_first(m, TP_SET_CLEAN);
        if (unit == TP_NO_UNIT || m->units[unit].next <= point) return false;
        if (m->units[unit].is_used && m->units[unit].due <= point) {
            tp_model_unhurry(m, unit);
        } else {
            evict(p, unit);
        }
    }
    return true;
}

/* By how much the next operators will need more than is alive now. */
static uint64_t headroom(const planner *p) {
    const tp_model *m = &p->model;
    const uint32_t ops = m->config.headroom_ops;
    return ops != 0 ? tp_model_growth(m, m->point + ops - 1) : 0;
}

/* ---- operators ------------------------------------------------------------------------------- */

/* New bytes: what is known of the old ones counts no more. */
static void write_unit(planner *p, uint32_t unit, uint32_t op) {
    tp_unit *it = &p->model.units[unit];
    if (!it->evicted && it->evicted_after == it->written_at) it->evicted_after = TP_NO_OP;
    it->dirty = true;
    it->evicted = false;
    it->written_at = op;
}

static void bear(planner *p, uint32_t op) {
    tp_model *m = &p->model;
    for (uint32_t i = m->op_born[op]; i < m->op_born[op + 1]; i++) {
        const uint32_t block = m->born[i];
        tp_model_look_ahead(m, block);
        for (uint32_t u = m->block_units[block]; u < m->block_units[block + 1]; u++) {
            m->units[u].alive = m->units[u].resident = true;
            write_unit(p, u, op);
            tp_model_file(m, u);
        }
    }
    m->free_bytes -= m->born_bytes[op];
    m->live_bytes += m->born_bytes[op];
}

static void bury_unit(planner *p, uint32_t unit) {
    tp_model *m = &p->model;
    tp_unit *it = &m->units[unit];
    TP_ASSERT(!it->filling);
    tp_model_unfile(m, unit);
    if (it->writing)
        p->out.orphaned = true;
    else if (it->resident)
        m->free_bytes += it->bytes;
    it->alive = it->resident = it->writing = false;
}

static void bury(planner *p, uint32_t op) {
    tp_model *m = &p->model;
    for (uint32_t i = m->op_dead[op]; i < m->op_dead[op + 1]; i++) {
        const uint32_t block = m->dead[i];
        const uint64_t bytes = tp_model_block_bytes(m, block);
        m->live_bytes -= bytes;
        if (m->block_units[block] == m->block_units[block + 1]) m->free_bytes += bytes;
        for (uint32_t u = m->block_units[block]; u < m->block_units[block + 1]; u++)
            bury_unit(p, u);
    }
}

/* What is left in HOST must not be on its way here: the operator may write it. */
static bool operands_are_there(const planner *p, uint32_t op) {
    const tp_model *m = &p->model;
    const tp_trace_op *it = &m->trace->ops[op];
    for (uint32_t i = it->operand_begin; i < it->operand_begin + it->operand_count; i++) {
        const uint32_t block = m->trace->operands[i].block;
        if (m->trace->blocks[block].born_op == op) continue;
        for (uint32_t u = m->block_units[block]; u < m->block_units[block + 1]; u++)
            if (m->left[i] ? m->units[u].filling : !m->units[u].resident) return false;
    }
    return true;
}

static uint64_t duration(uint64_t left, uint64_t rate) { return (left + rate - 1) / rate; }

static uint64_t larger(uint64_t a, uint64_t b) { return a > b ? a : b; }
static uint64_t smaller(uint64_t a, uint64_t b) { return a < b ? a : b; }

static uint64_t round_of(const planner *p, uint64_t point) {
    return point / p->model.trace->op_count;
}

/* By the operator that starts now. */
static void note_use(planner *p, tp_unit *it) {
    const uint64_t point = p->model.point;
    if (round_of(p, point) < FREE_ROUNDS && it->used_at != 0 &&
        round_of(p, it->used_at - 1) < round_of(p, point)) {
        it->stays = it->evicted_at < it->used_at;
    }
    it->used_at = point + 1;
}

/* Marks the operands as in use. Returns the operator's time: that of its own traffic over
 * the link, if that takes longer. */
static uint64_t take_operands(planner *p, uint32_t op) {
    tp_model *m = &p->model;
    const tp_trace_op *its = &m->trace->ops[op];
    uint64_t in = 0, out = 0;
    for (uint32_t i = its->operand_begin; i < its->operand_begin + its->operand_count; i++) {
        const tp_trace_operand *operand = &m->trace->operands[i];
        for (uint32_t u = m->block_units[operand->block];
             u < m->block_units[operand->block + 1]; u++) {
            tp_unit *it = &m->units[u];
            if (it->resident) {
                tp_model_unfile(m, u);
                it->in_use = true;
                note_use(p, it);
                if (operand->writes) write_unit(p, u, op);
                continue;
            }
            note(p, TP_ACT_LEAVE, u);
            if (operand->reads) in += it->bytes;
            if (operand->writes) out += it->bytes;
        }
    }
    p->over_link = (in | out) != 0;
    if (p->recording) p->plan->in_bytes += in;
    if (p->recording) p->plan->out_bytes += out;
    const uint64_t rate = in != 0 && out != 0 ? p->rate_both : p->rate_alone;
    return larger(its->device_ns, duration(larger(in, out) * RATE_UNITS, rate));
}

/* Puts the operands back; what it wrote and what was evicted in the round before may go out
 * now. */
static void release_operands(planner *p, uint32_t op) {
    tp_model *m = &p->model;
    const tp_trace_op *its = &m->trace->ops[op];
    for (uint32_t i = its->operand_begin; i < its->operand_begin + its->operand_count; i++) {
        const uint32_t block = m->trace->operands[i].block;
        for (uint32_t u = m->block_units[block]; u < m->block_units[block + 1]; u++) {
            tp_model_unfile(m, u);
            m->units[u].in_use = false;
        }
        tp_model_look_ahead(m, block);
        for (uint32_t u = m->block_units[block]; u < m->block_units[block + 1]; u++) {
            tp_unit *it = &m->units[u];
            const uint64_t round = round_of(p, m->point - 1);
            const bool crosses = it->is_used && round_of(p, it->due) > round;
            if (round >= FREE_ROUNDS && crosses && !it->stays && it->resident)
                it->next = TP_FAR;
            tp_model_file(m, u);
            if (it->dirty && it->written_at == op && it->evicted_after == op &&
                p->early_count < m->unit_count)
                p->early[(p->early_first + p->early_count++) % m->unit_count] = u;
        }
    }
}

static void note_memory(planner *p) {
    if (!p->recording) return;
    const tp_model *m = &p->model;
    tp_plan_times *running = &p->times[op_at(p, m->point + m->trace->op_count - 1)];
    running->least_free = smaller(running->least_free, m->free_bytes);
    p->plan->peak_bytes = larger(p->plan->peak_bytes, m->config.budget_bytes - m->free_bytes);
}

static bool start_op(planner *p) {
    tp_model *m = &p->model;
    const uint32_t op = op_at(p, m->point);
    if (p->running || !operands_are_there(p, op)) return false;
    if (!could_make_room(p, m->born_bytes[op], m->point)) return false;
    if (!make_room(p, m->born_bytes[op], m->point)) return false;
    bear(p, op);
    p->op_left_ns = take_operands(p, op);
    p->running = true;
    p->times[op].began_ns = p->now_ns;
    p->times[op].begin_free = m->free_bytes;
    m->point++;
    if (m->point % m->trace->op_count == 0) turn_round(p);
    note_memory(p);
    (void)make_room(p, headroom(p), m->point + m->config.headroom_ops);
    return true;
}

static void end_op(planner *p) {
    const uint32_t op = op_at(p, p->model.point - 1);
    p->running = p->over_link = false;
    release_operands(p, op);
    bury(p, op);
}

/* ---- copies ---------------------------------------------------------------------------------- */

/* Whether memory will be short before `next`, if nothing needed later or dirty is evicted. */
static bool will_be_short(const planner *p, uint64_t next) {
    const tp_model *m = &p->model;
    const uint64_t horizon = smaller(next, m->point + m->trace->op_count - 1);
    const uint64_t wanted =
        m->sets[TP_SET_HOST].bytes - tp_model_bytes_after(m, TP_SET_HOST, horizon);
    return tp_model_growth(m, next == TP_FAR ? TP_FAR : next - 1) + wanted >
           m->free_bytes + tp_model_bytes_after(m, TP_SET_CLEAN, next);
}

/* The next of those evicted in the round before that still waits to be written. */
static uint32_t take_early(planner *p) {
    const tp_model *m = &p->model;
    while (p->early_count > 0) {
        const uint32_t unit = p->early[p->early_first];
        p->early_first = (p->early_first + 1) % m->unit_count;
        p->early_count--;
        const tp_unit *it = &m->units[unit];
        if (it->set == TP_SET_DIRTY && it->evicted_after == it->written_at) return unit;
    }
    return TP_NO_UNIT;
}

static bool start_write_back(planner *p) {
    tp_model *m = &p->model;
    if (p->out.busy) return false;
    uint32_t unit = tp_model_first(m, TP_SET_DIRTY);
    if (unit == TP_NO_UNIT) return false;
    const uint64_t next = m->units[unit].next;
    if (next <= m->point || !will_be_short(p, next)) unit = take_early(p);
    if (unit == TP_NO_UNIT) return false;
    tp_unit *it = &m->units[unit];
    note(p, TP_ACT_WRITE_BACK, unit);
    tp_model_unfile(m, unit);
    it->writing = true;
    it->dirty = false;
    p->out = (copy){.busy = true, .unit = unit, .left = it->bytes * RATE_UNITS};
    return true;
}

static void end_write_back(planner *p) {
    tp_model *m = &p->model;
    tp_unit *it = &m->units[p->out.unit];
    p->out.busy = false;
    if (p->recording) p->plan->out_bytes += it->bytes;
    if (p->out.orphaned) {
        m->free_bytes += it->bytes;
        return;
    }
    it->writing = false;
    tp_model_file(m, p->out.unit);
}

/* Whether extents have to come in by now: those needed up to some point take as long as the
 * operators up to it, but for the slack. */
static bool is_due(const planner *p, uint64_t next) {
    const tp_model *m = &p->model;
    const uint64_t ops = m->trace->op_count, round_ns = m->before_ns[ops];
    const uint64_t at_ns = m->before_ns[m->point % ops];
    for (uint64_t ahead = next - m->point; ahead < ops; ahead = 2 * ahead + 1) {
        const uint64_t until = m->point + ahead;
        const uint64_t bytes =
            m->sets[TP_SET_HOST].bytes - tp_model_bytes_after(m, TP_SET_HOST, until);
        uint64_t ns = m->before_ns[until % ops] - at_ns;
        if (until % ops < m->point % ops) ns += round_ns;
        if (duration(bytes * RATE_UNITS, p->rate_both) + m->config.slack_ns >= ns) return true;
    }
    return false;
}

/* Whether there is memory for an extent that is not needed at once: beside the next births,
 * and all that is born before it is used. What would have to be evicted for it stays as long
 * as it can. */
static bool may_fill_ahead(const planner *p, const tp_unit *it) {
    const tp_model *m = &p->model;
    const uint64_t now_bytes = it->bytes + headroom(p);
    if (!could_make_room(p, now_bytes, it->next)) return false;
    if (m->free_bytes < now_bytes && !is_due(p, it->next)) return false;
    const uint64_t growth = tp_model_growth(m, it->next);
    const uint64_t dirty = tp_model_bytes_after(m, TP_SET_DIRTY, it->next);
    return growth <= dirty || could_make_room(p, it->bytes + growth - dirty, it->next);
}

static bool start_fill(planner *p) {
    tp_model *m = &p->model;
    if (p->in.busy) return false;
    const uint32_t unit = tp_model_first(m, TP_SET_HOST);
    if (unit == TP_NO_UNIT) return false;
    tp_unit *it = &m->units[unit];
    if (it->next > m->point && !may_fill_ahead(p, it)) return false;
    if (!could_make_room(p, it->bytes, it->next)) return false;
    if (!make_room(p, it->bytes, it->next)) return false;
    note(p, TP_ACT_FILL, unit);
    tp_model_unfile(m, unit);
    it->filling = true;
    m->free_bytes -= it->bytes;
    p->in = (copy){.busy = true, .unit = unit, .left = it->bytes * RATE_UNITS};
    return true;
}

static void end_fill(planner *p) {
    tp_unit *it = &p->model.units[p->in.unit];
    p->in.busy = false;
    it->filling = false;
    it->resident = true;
    if (p->recording) p->plan->in_bytes += it->bytes;
    tp_model_file(&p->model, p->in.unit);
}

/* ---- time ------------------------------------------------------------------------------------ */

/* Lets time pass until something ends. False: nothing is under way. */
static bool pass_time(planner *p) {
    const bool in = p->in.busy && !p->over_link, out = p->out.busy && !p->over_link;
    const uint64_t rate = in && out ? p->rate_both : p->rate_alone;
    uint64_t ns = UINT64_MAX;
    if (p->running) ns = p->op_left_ns;
    if (in) ns = smaller(ns, duration(p->in.left, rate));
    if (out) ns = smaller(ns, duration(p->out.left, rate));
    if (ns == UINT64_MAX) return false;
    p->now_ns += ns;
    if (in) p->in.left -= smaller(p->in.left, ns * rate);
    if (out) p->out.left -= smaller(p->out.left, ns * rate);
    if (p->running) p->op_left_ns -= ns;
    if (out && p->out.left == 0) end_write_back(p);
    if (in && p->in.left == 0) end_fill(p);
    if (p->running && p->op_left_ns == 0) end_op(p);
    return true;
}

/* Runs until the operator at `point` is next. False: it came to a standstill. */
static bool run_to(planner *p, uint64_t point) {
    tp_model *m = &p->model;
    while (m->point < point || p->running) {
        bool moved = true;
        while (moved)
            moved = (m->point < point && start_op(p)) || start_fill(p) || start_write_back(p);
        note_memory(p);
        if (!pass_time(p)) return false;
    }
    return true;
}

/* ---- the plan -------------------------------------------------------------------------------- */

/* At first what lives across the boundary is resident as far as it fits, the next needed
 * first. */
static bool begin(planner *p) {
    tp_model *m = &p->model;
    uint64_t small_bytes = 0;
    for (uint32_t i = 0; i < m->trace->block_count; i++) {
        const tp_trace_block *it = &m->trace->blocks[i];
        if (it->born_op != TP_NO_OP && it->dead_op >= it->born_op) continue;
        if (m->block_units[i] == m->block_units[i + 1]) small_bytes += it->bytes;
        tp_model_look_ahead(m, i);
        for (uint32_t u = m->block_units[i]; u < m->block_units[i + 1]; u++) {
            m->units[u].alive = true;
            tp_model_file(m, u);
        }
    }
    if (small_bytes > m->config.budget_bytes) return false;
    m->free_bytes = m->config.budget_bytes - small_bytes;
    for (;;) {
        const uint32_t unit = tp_model_first(m, TP_SET_HOST);
        if (unit == TP_NO_UNIT || m->units[unit].bytes + headroom(p) > m->free_bytes)
            return true;
        tp_model_unfile(m, unit);
        m->units[unit].resident = m->units[unit].dirty = true;
        m->free_bytes -= m->units[unit].bytes;
        tp_model_file(m, unit);
    }
}

static tp_status run_rounds(planner *p, tp_error *error) {
    const uint32_t ops = p->model.trace->op_count;
    uint64_t began_ns = 0;
    bool runs = begin(p);
    for (uint32_t round = 1; round <= ROUNDS_MAX && runs && !p->settled; round++) {
        began_ns = p->now_ns;
        runs = run_to(p, (uint64_t)round * ops);
    }
    p->plan->step_ns = p->now_ns - began_ns;
    if (runs && !p->no_memory) p->no_memory = !tp_plan_haste(p->plan, &p->model, p->times);
    if (!runs)
        return tp_error_set(error, TP_OUT_OF_MEMORY, "operator %u cannot get its operands",
                            op_at(p, p->model.point));
    if (p->no_memory) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory to plan in");
    return TP_OK;
}

/* A plan of one way; `stream`: with all blocks that only streaming operators use in HOST. */
static tp_status plan_one_way(const tp_trace *trace, const tp_plan_config *config, bool stream,
                              tp_plan *out, tp_error *error) {
    tp_plan plan = {0};
    planner p = {.rate_alone = config->link_bytes_per_s * RATE_UNITS / 1000000000u,
                 .rate_both = config->link_both_bytes_per_s / 2 * RATE_UNITS / 1000000000u,
                 .plan = &plan};
    tp_status status = tp_model_init(&p.model, trace, config, stream, error);
    if (status != TP_OK) return status;
    p.early = malloc(((size_t)p.model.unit_count + 1) * sizeof *p.early);
    p.times = calloc((size_t)trace->op_count + 1, sizeof *p.times);
    if (p.early == NULL || p.times == NULL)
        status = tp_error_set(error, TP_NO_HOST_MEMORY, "no memory to plan in");
    else
        status = run_rounds(&p, error);
    free(p.early);
    free(p.times);
    tp_model_fini(&p.model);
    if (status != TP_OK)
        tp_plan_fini(&plan);
    else
        *out = plan;
    return status;
}

static tp_status check_config(const tp_plan_config *config, tp_error *error) {
    /* Less than a byte a us in a direction, or more than 1024 TB/s, and the arithmetic of rates
     * breaks down. */
    const uint64_t slowest = 1000000u, fastest = (uint64_t)1 << 50;
    if (config->granularity_bytes == 0 || config->extent_max_bytes == 0 ||
        config->extent_max_bytes % config->granularity_bytes != 0)
        return tp_error_set(error, TP_INVALID, "extents must be multiples of the granularity");
    if (config->link_bytes_per_s < slowest || config->link_both_bytes_per_s < 2 * slowest ||
        config->link_bytes_per_s > fastest || config->link_both_bytes_per_s > fastest)
        return tp_error_set(error, TP_INVALID, "no such link");
    return TP_OK;
}

/* Whether some block is used by streaming operators only. */
static bool streams_a_block(const tp_trace *trace) {
    for (uint32_t op = 0; op < trace->op_count; op++)
        if (trace->ops[op].streams && trace->ops[op].operand_count != 0) return true;
    return false;
}

/* A plan that only moves bytes. */
static tp_status plan_moves(const tp_trace *trace, const tp_plan_config *config,
                            uint64_t native_ns, tp_plan *out, tp_error *error) {
    tp_plan other;
    const tp_status status = plan_one_way(trace, config, false, out, error);
    if (status != TP_OK) return status;
    if (out->step_ns > native_ns && streams_a_block(trace) &&
        plan_one_way(trace, config, true, &other, NULL) == TP_OK) {
        const bool is_better = other.step_ns < out->step_ns;
        tp_plan_fini(is_better ? out : &other);
        if (is_better) *out = other;
    }
    return TP_OK;
}

/* ---- drops and moves together ---------------------------------------------------------------- */

/* The target is the budget and so many quarters of what is free to move. */
enum { QUARTERS_FIRST = 4, QUARTERS_MAX = 40 };

typedef struct search {
    const tp_trace *trace;
    const tp_plan_config *config;
    tp_dropper *dropper;
    tp_plan *best;
    uint32_t best_quarters;
    tp_drop_order best_order;
    bool tried[TP_DROP_ORDERS][QUARTERS_MAX + 1];
} search;

/* Plans under one target; keeps that plan if it is the best so far. Only the lack of host memory
 * ends the search: a target that leads nowhere is passed over. */
static tp_status try_target(search *s, uint32_t quarters, tp_drop_order order,
                            tp_error *error) {
    if (quarters > QUARTERS_MAX || s->tried[order][quarters]) return TP_OK;
    s->tried[order][quarters] = true;
    const uint64_t target_bytes =
        s->config->budget_bytes + tp_dropper_free_bytes(s->dropper) / 4 * quarters;
    tp_drops drops;
    tp_status status = tp_dropper_choose(s->dropper, target_bytes, order, &drops, error);
    if (status != TP_OK || drops.count == 0) return status;
    tp_rerun_trace with_reruns;
    status = tp_rerun_trace_make(s->trace, &drops, &with_reruns, error);
    if (status != TP_OK) return status == TP_INVALID ? TP_OK : status;
    tp_plan plan;
    status = plan_one_way(&with_reruns.trace, s->config, false, &plan, error);
    if (status == TP_OK && plan.step_ns < s->best->step_ns) {
        status = tp_rerun_trace_translate(&with_reruns, &plan, error);
        if (status == TP_OK) {
            tp_plan_fini(s->best);
            *s->best = plan;
            s->best_quarters = quarters;
            s->best_order = order;
        } else {
            tp_plan_fini(&plan);
        }
    } else if (status == TP_OK) {
        tp_plan_fini(&plan);
    }
    tp_rerun_trace_fini(&with_reruns);
    return status == TP_OUT_OF_MEMORY ? TP_OK : status;
}

/* Replaces *plan by one with drops, if that takes less time. */
static tp_status plan_drops(const tp_trace *trace, const tp_plan_config *config, tp_plan *plan,
                            tp_error *error) {
    search s = {.trace = trace, .config = config, .best = plan, .best_quarters = UINT32_MAX};
    tp_status status = tp_dropper_create(trace, config, &s.dropper, error);
    const uint32_t orders = config->no_keep ? TP_DROP_WITHOUT_KEEPING : TP_DROP_ORDERS;
    for (uint32_t order = 0; order < orders; order++) {
        /* Upwards as long as it gets better. */
        for (uint32_t quarters = 0; quarters <= QUARTERS_MAX && status == TP_OK;
             quarters += 2) {
            const uint64_t before_ns = plan->step_ns;
            status = try_target(&s, quarters, (tp_drop_order)order, error);
            if (quarters > QUARTERS_FIRST && plan->step_ns == before_ns) break;
        }
    }
    const uint32_t found = s.best_quarters;
    if (status == TP_OK && found != UINT32_MAX)
        status = try_target(&s, found + 1, s.best_order, error);
    if (status == TP_OK && found != UINT32_MAX && found > 0)
        status = try_target(&s, found - 1, s.best_order, error);
    tp_dropper_destroy(s.dropper);
    return status;
}

tp_status tp_plan_make(const tp_trace *trace, const tp_plan_config *config, tp_plan *out,
                       tp_error *error) {
    tp_status status = check_config(config, error);
    if (status == TP_OK) status = tp_trace_check(trace, error);
    if (status != TP_OK) return status;
    uint64_t native_ns = 0;
    for (uint32_t op = 0; op < trace->op_count; op++) native_ns += trace->ops[op].device_ns;
    tp_plan plan;
    status = plan_moves(trace, config, native_ns, &plan, error);
    if (status != TP_OK) return status;
    if (plan.step_ns > native_ns && trace->recipe_count > 0)
        status = plan_drops(trace, config, &plan, error);
    if (status == TP_OK)
        *out = plan;
    else
        tp_plan_fini(&plan);
    return status;
}

void tp_plan_fini(tp_plan *plan) {
    free(plan->acts);
    free(plan->resident);
    memset(plan, 0, sizeof *plan);
}
