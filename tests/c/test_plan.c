/* The planner: an independent walk of the plan over the trace, traces whose best answer is
 * known, and random ones. A byte takes a ns on the link, both ways too; blocks are made of
 * extents of 100 bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "harness.h"
#include "pager/plan.h"

enum { OPS_MAX = 80, BLOCKS_MAX = 40, OPERANDS_MAX = 400, EXTENTS_MAX = 8, EXTENT = 100 };

typedef struct scene {
    tp_trace_op ops[OPS_MAX];
    tp_trace_operand operands[OPERANDS_MAX];
    tp_trace_block blocks[BLOCKS_MAX];
    tp_trace trace;
    tp_plan_config config;
} scene;

static void scene_init(scene *s, uint64_t budget_bytes) {
    memset(s, 0, sizeof *s);
    s->trace = (tp_trace){.ops = s->ops, .operands = s->operands, .blocks = s->blocks};
    s->config = (tp_plan_config){.budget_bytes = budget_bytes,
                                 .granularity_bytes = 10,
                                 .large_min_bytes = 10,
                                 .extent_max_bytes = EXTENT,
                                 .link_bytes_per_s = 1000000000u,
                                 .link_both_bytes_per_s = 2000000000u,
                                 .headroom_ops = 2,
                                 .slack_ns = 50};
}

static uint32_t add_block(scene *s, uint64_t bytes, uint32_t born_op, uint32_t dead_op) {
    s->blocks[s->trace.block_count] =
        (tp_trace_block){.bytes = bytes, .born_op = born_op, .dead_op = dead_op};
    return s->trace.block_count++;
}

static uint32_t add_carried(scene *s, uint64_t bytes) {
    return add_block(s, bytes, TP_NO_OP, TP_NO_OP);
}

static uint32_t add_op(scene *s, uint64_t device_ns) {
    s->ops[s->trace.op_count] =
        (tp_trace_op){.device_ns = device_ns, .operand_begin = s->trace.operand_count};
    return s->trace.op_count++;
}

/* Of the operator added last. */
static void add_operand(scene *s, uint32_t block, bool reads, bool writes) {
    s->operands[s->trace.operand_count++] =
        (tp_trace_operand){.block = block, .reads = reads, .writes = writes};
    s->ops[s->trace.op_count - 1].operand_count++;
}

/* ---- the walk -------------------------------------------------------------------------------- */

typedef struct walk {
    const scene *s;
    const tp_plan *plan;
    bool alive[BLOCKS_MAX];
    bool resident[BLOCKS_MAX][EXTENTS_MAX], dirty[BLOCKS_MAX][EXTENTS_MAX];
    bool left[BLOCKS_MAX][EXTENTS_MAX]; /* for the operator that comes next */
    uint64_t used_bytes;
    uint32_t running; /* the operator that has started and not ended; TP_NO_OP: none */
    uint64_t in_bytes, out_bytes;
} walk;

static uint32_t extents_of(const scene *s, uint32_t block) {
    return tp_plan_extents(&s->config, s->blocks[block].bytes);
}

static uint64_t bytes_of(const scene *s, uint32_t block, uint32_t extent) {
    return tp_plan_extent_bytes(&s->config, s->blocks[block].bytes, extent);
}

static const tp_trace_operand *operand_of(const scene *s, uint32_t op, uint32_t block) {
    for (uint32_t i = 0; i < s->ops[op].operand_count; i++)
        if (s->operands[s->ops[op].operand_begin + i].block == block)
            return &s->operands[s->ops[op].operand_begin + i];
    return NULL;
}

/* Whether the plan leaves an operand of operator `op` in HOST: all of it, but for what is resident. */
static bool is_left(const walk *w, uint32_t op, uint32_t block) {
    for (uint32_t i = 0; i < w->plan->act_count; i++) {
        const tp_act *it = &w->plan->acts[i];
        if (it->kind == TP_ACT_LEAVE && it->op == op && it->block == block) return true;
    }
    return false;
}

/* How many operators until a block that is alive before operator `op` is an operand, of one that
 * leaves it in HOST too if `left_too`; UINT32_MAX: it dies before. */
static uint32_t next_use(const walk *w, uint32_t op, uint32_t block, bool left_too) {
    const scene *s = w->s;
    for (uint32_t i = 0; i < s->trace.op_count; i++) {
        const uint32_t at = (op + i) % s->trace.op_count;
        if (s->blocks[block].born_op == at) break;
        if (operand_of(s, at, block) != NULL && (left_too || !is_left(w, at, block))) return i;
        if (s->blocks[block].dead_op == at) break;
    }
    return UINT32_MAX;
}

/* How many operators until it is needed on the device. */
static uint32_t distance(const walk *w, uint32_t op, uint32_t block) {
    return next_use(w, op, block, false);
}

static void end_running(walk *w) {
    if (w->running == TP_NO_OP) return;
    const uint32_t op = w->running;
    w->running = TP_NO_OP;
    for (uint32_t b = 0; b < w->s->trace.block_count; b++) {
        if (w->s->blocks[b].dead_op != op) continue;
        w->alive[b] = false;
        if (extents_of(w->s, b) == 0) w->used_bytes -= w->s->blocks[b].bytes;
        for (uint32_t e = 0; e < extents_of(w->s, b); e++) {
            if (w->resident[b][e]) w->used_bytes -= bytes_of(w->s, b, e);
            w->resident[b][e] = false;
        }
    }
}

/* Memory is claimed in order: what does not fit waits for the running operator, and then
 * must. */
static void claim(walk *w, uint64_t bytes) {
    if (w->used_bytes + bytes > w->s->config.budget_bytes) end_running(w);
    w->used_bytes += bytes;
    EXPECT(w->used_bytes <= w->s->config.budget_bytes);
}

static void walk_fill(walk *w, const tp_act *act) {
    const uint32_t b = act->block, e = act->extent;
    EXPECT(!w->resident[b][e]);
    const uint32_t mine = distance(w, act->op, b);
    EXPECT(mine != UINT32_MAX);
    /* In order of next use. */
    for (uint32_t i = 0; i < w->s->trace.block_count; i++)
        for (uint32_t j = 0; j < extents_of(w->s, i); j++)
            if (w->alive[i] && !w->resident[i][j]) EXPECT(distance(w, act->op, i) >= mine);
    claim(w, bytes_of(w->s, b, e));
    w->resident[b][e] = true;
    w->dirty[b][e] = false;
    w->in_bytes += bytes_of(w->s, b, e);
}

/* Whether an extent could be evicted just as well: clean for certain (only the last copy of
 * each direction can still be in flight) and not in use. */
static bool is_candidate(const walk *w, const tp_act *act, uint32_t block, uint32_t extent) {
    if (!w->alive[block] || !w->resident[block][extent] || w->dirty[block][extent])
        return false;
    if (w->running != TP_NO_OP && operand_of(w->s, w->running, block) != NULL) return false;
    /* It may have died already. */
    if (w->running != TP_NO_OP && w->s->blocks[block].dead_op == w->running) return false;
    bool saw_in = false, saw_out = false;
    for (const tp_act *it = act; it-- > w->plan->acts;) {
        bool *const saw = it->kind == TP_ACT_FILL         ? &saw_in
                          : it->kind == TP_ACT_WRITE_BACK ? &saw_out
                                                          : NULL;
        if (saw == NULL || *saw) continue;
        *saw = true;
        if (it->block == block && it->extent == extent) return false;
    }
    return saw_in && saw_out; /* else the last one was in the step before */
}

/* In the step, or born in it. */
static bool used_before(const scene *s, uint32_t op, uint32_t block) {
    for (uint32_t i = 0; i < op; i++)
        if (s->blocks[block].born_op == i || operand_of(s, i, block) != NULL) return true;
    return false;
}

static void walk_evict(walk *w, const tp_act *act) {
    const uint32_t b = act->block, e = act->extent;
    EXPECT(w->resident[b][e] && !w->dirty[b][e]);
    if (w->running != TP_NO_OP && operand_of(w->s, w->running, b) != NULL) end_running(w);
    EXPECT(w->alive[b]);
    const uint32_t mine = distance(w, act->op, b);
    EXPECT(mine > 0);
    /* The farthest next use, but that what is refilled for the next step goes before what stays until
     * then, on both sides of the boundary. What is left in HOST where it happens to be resident is
     * no use, but that does not show in the plan; nor does, where fills have been moved up, what was
     * there when this was chosen. */
    const bool in_place = w->s->config.fill_ahead_ns == 0;
    const bool refilled_for_a_step =
        act->op + mine >= w->s->trace.op_count || !used_before(w->s, act->op, b);
    const bool is_farthest = in_place && !refilled_for_a_step && !w->s->ops[0].streams;
    for (uint32_t i = 0; i < w->s->trace.block_count && is_farthest; i++)
        for (uint32_t j = 0; j < extents_of(w->s, i); j++)
            if (is_candidate(w, act, i, j)) EXPECT(mine >= distance(w, act->op, i));
    /* Without headroom the next act says what it was for: a fill, or else the births of this
     * operator. */
    const tp_act *next = act, *end = w->plan->acts + w->plan->act_count;
    while (next < end && next->op == act->op && next->kind == TP_ACT_EVICT) next++;
    const bool says = in_place && w->s->config.headroom_ops == 0;
    if (says && next < end && next->op == act->op && next->kind == TP_ACT_FILL)
        EXPECT(mine > distance(w, act->op, next->block));
    w->resident[b][e] = false;
    w->used_bytes -= bytes_of(w->s, b, e);
}

static void walk_act(walk *w, const tp_act *act) {
    MUST(act->block < w->s->trace.block_count && act->extent < extents_of(w->s, act->block));
    const uint32_t b = act->block, e = act->extent;
    switch (act->kind) {
    case TP_ACT_WRITE_BACK:
        EXPECT(w->resident[b][e] && w->dirty[b][e]);
        if (w->running != TP_NO_OP && operand_of(w->s, w->running, b) != NULL) end_running(w);
        EXPECT(w->alive[b]);
        w->dirty[b][e] = false;
        w->out_bytes += bytes_of(w->s, b, e);
        break;
    case TP_ACT_EVICT: walk_evict(w, act); break;
    case TP_ACT_FILL: walk_fill(w, act); break;
    case TP_ACT_LEAVE:
        EXPECT(!w->resident[b][e] && w->s->ops[act->op].streams);
        w->left[b][e] = true;
        break;
    default: EXPECT(!"an act of a trace with recipes"); break;
    }
}

static void walk_op(walk *w, uint32_t op) {
    const scene *s = w->s;
    end_running(w);
    for (uint32_t b = 0; b < s->trace.block_count; b++) {
        if (s->blocks[b].born_op != op) continue;
        w->alive[b] = true;
        if (extents_of(s, b) == 0) claim(w, s->blocks[b].bytes);
        for (uint32_t e = 0; e < extents_of(s, b); e++) {
            claim(w, bytes_of(s, b, e));
            w->resident[b][e] = w->dirty[b][e] = true;
        }
    }
    for (uint32_t i = 0; i < s->ops[op].operand_count; i++) {
        const tp_trace_operand *it = &s->operands[s->ops[op].operand_begin + i];
        for (uint32_t e = 0; e < extents_of(s, it->block); e++) {
            EXPECT(w->resident[it->block][e] != w->left[it->block][e]);
            if (w->left[it->block][e] && it->reads) w->in_bytes += bytes_of(s, it->block, e);
            if (w->left[it->block][e] && it->writes) w->out_bytes += bytes_of(s, it->block, e);
            w->left[it->block][e] = false;
            if (it->writes && w->resident[it->block][e]) w->dirty[it->block][e] = true;
        }
    }
    w->running = op;
}

/* What the plan does first with an extent that is alive before operator 0; NULL: nothing in
 * this life. */
static const tp_act *first_of(const walk *w, uint32_t block, uint32_t extent) {
    const tp_trace_block *its = &w->s->blocks[block];
    const bool is_carried = its->born_op == TP_NO_OP;
    const bool is_across = !is_carried && its->dead_op < its->born_op;
    const uint32_t last = is_carried ? TP_NO_OP : is_across ? its->dead_op + 1 : 0;
    for (uint32_t i = 0; i < w->plan->act_count; i++) {
        const tp_act *it = &w->plan->acts[i];
        if (it->op > last) return NULL;
        if (it->block == block && it->extent == extent) return it;
    }
    return NULL;
}

/* The state in which the plan begins follows from what it does with each extent first. The
 * last operator of the step before is still running. */
static void walk_begin(walk *w) {
    const scene *s = w->s;
    w->running = s->trace.op_count - 1;
    for (uint32_t b = 0; b < s->trace.block_count; b++) {
        const tp_trace_block *its = &s->blocks[b];
        w->alive[b] = its->born_op == TP_NO_OP || its->dead_op < its->born_op ||
                      its->dead_op == w->running;
        if (!w->alive[b]) continue;
        if (extents_of(s, b) == 0) w->used_bytes += its->bytes;
        for (uint32_t e = 0; e < extents_of(s, b); e++) {
            /* Where the rest of the block is left in HOST, too. */
            const uint32_t used = next_use(w, 0, b, true);
            const tp_act *first = first_of(w, b, e);
            /* Without an act: used as it is. One never used is not told from one in HOST. */
            bool resident = used != UINT32_MAX, dirty = resident;
            if (first != NULL && (first->op <= used || !resident)) {
                resident = first->kind == TP_ACT_WRITE_BACK || first->kind == TP_ACT_EVICT;
                dirty = first->kind == TP_ACT_WRITE_BACK;
            }
            w->resident[b][e] = resident;
            w->dirty[b][e] = dirty && (first == NULL || first->kind != TP_ACT_EVICT);
            if (resident) w->used_bytes += bytes_of(s, b, e);
        }
    }
    EXPECT(w->used_bytes <= s->config.budget_bytes);
}

static void walk_plan(const scene *s, const tp_plan *plan) {
    walk w = {.s = s, .plan = plan};
    walk_begin(&w);
    uint32_t at = 0;
    for (uint32_t op = 0; op < s->trace.op_count; op++) {
        for (; at < plan->act_count && plan->acts[at].op == op; at++)
            walk_act(&w, &plan->acts[at]);
        walk_op(&w, op);
    }
    EXPECT_EQ(at, plan->act_count);
    EXPECT(plan->peak_bytes <= s->config.budget_bytes);
}

/* ---- traces whose best answer is known ------------------------------------------------------- */

static void make(const scene *s, tp_plan *plan) {
    MUST_OK(tp_plan_make(&s->trace, &s->config, plan, &test_error));
    walk_plan(s, plan);
}

static uint32_t count(const tp_plan *plan, tp_act_kind kind) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < plan->act_count; i++) sum += plan->acts[i].kind == kind;
    return sum;
}

static const tp_act *first_act(const tp_plan *plan, tp_act_kind kind) {
    for (uint32_t i = 0; i < plan->act_count; i++)
        if (plan->acts[i].kind == kind) return &plan->acts[i];
    return NULL;
}

/* Four activations, made one after another and used in the reverse order. */
static void stack_of_four(scene *s, uint64_t budget_bytes, uint64_t op_ns) {
    scene_init(s, budget_bytes);
    for (uint32_t i = 0; i < 4; i++) add_block(s, EXTENT, i, 7 - i);
    for (uint32_t i = 0; i < 8; i++) {
        add_op(s, op_ns);
        add_operand(s, i < 4 ? i : 7 - i, i >= 4, i < 4);
    }
}

TEST(nothing_is_planned_where_all_fits) {
    scene s;
    stack_of_four(&s, 4 * EXTENT, 50);
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(plan.act_count, 0);
    EXPECT_EQ(plan.step_ns, 8 * 50);
    EXPECT_EQ(plan.peak_bytes, 4 * EXTENT);
    tp_plan_fini(&plan);
}

TEST(what_is_needed_last_goes_out_right_after_its_write_and_comes_back_in_time) {
    scene s;
    stack_of_four(&s, 3 * EXTENT, 100);
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(plan.step_ns, 8 * 100); /* all of it beside operators */
    EXPECT_EQ(plan.in_bytes, EXTENT);
    EXPECT_EQ(plan.out_bytes, EXTENT);
    EXPECT_EQ(plan.act_count, 3);
    const tp_act *write_back = first_act(&plan, TP_ACT_WRITE_BACK);
    const tp_act *evict = first_act(&plan, TP_ACT_EVICT);
    const tp_act *fill = first_act(&plan, TP_ACT_FILL);
    MUST(write_back != NULL && evict != NULL && fill != NULL);
    EXPECT_EQ(write_back->block, 0);
    EXPECT_EQ(write_back->op, 2); /* while operator 1 runs */
    EXPECT_EQ(evict->block, 0);
    EXPECT_EQ(fill->block, 0);
    EXPECT_EQ(fill->op, 6); /* operator 4 has freed memory; while 5 runs */
    tp_plan_fini(&plan);
}

TEST(step_takes_what_the_link_takes_where_operators_are_short) {
    scene s;
    stack_of_four(&s, 2 * EXTENT, 10);
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(plan.out_bytes, 2 * EXTENT);
    EXPECT_EQ(plan.in_bytes, 2 * EXTENT);
    /* The first write, two copies out, the peak's two operators, two copies in, the last
     * use. Copies in can begin when operator 4 has freed memory. */
    EXPECT_EQ(plan.step_ns, 10 + 200 + 10 + 10 + 200 + 10);
    tp_plan_fini(&plan);
}

TEST(cycle_keeps_a_prefix_resident) {
    scene s;
    scene_init(&s, 8 * EXTENT);
    for (uint32_t i = 0; i < 10; i++) {
        add_carried(&s, EXTENT);
        add_op(&s, 1000);
        add_operand(&s, i, true, false);
    }
    tp_plan plan;
    make(&s, &plan);
    /* Least recently used would move all ten. Six stay: one is in use, and one on its way. */
    EXPECT(plan.in_bytes <= 4 * EXTENT);
    EXPECT_EQ(plan.out_bytes, 0); /* weights are written out once, not in each step */
    EXPECT_EQ(plan.step_ns, 10 * 1000);
    tp_plan_fini(&plan);
}

TEST(clean_goes_before_dirty) {
    scene s;
    scene_init(&s, 3 * EXTENT);
    const uint32_t weight = add_carried(&s, EXTENT), state = add_carried(&s, EXTENT);
    add_op(&s, 1000);
    add_operand(&s, weight, true, false);
    add_operand(&s, state, true, true);
    add_op(&s, 1000);
    const uint32_t large = add_block(&s, 2 * EXTENT, 1, 1);
    add_operand(&s, large, false, true);
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(plan.out_bytes, 0);
    EXPECT_EQ(plan.in_bytes, EXTENT);
    MUST(first_act(&plan, TP_ACT_EVICT) != NULL);
    EXPECT_EQ(first_act(&plan, TP_ACT_EVICT)->block, weight);
    tp_plan_fini(&plan);
}

TEST(what_is_not_used_before_it_dies_does_not_come_back) {
    scene s;
    scene_init(&s, 2 * EXTENT);
    const uint32_t kept = add_block(&s, EXTENT, 0, 3);
    add_op(&s, 1000);
    add_operand(&s, kept, false, true);
    add_op(&s, 1000);
    add_op(&s, 1000);
    add_operand(&s, add_block(&s, 2 * EXTENT, 2, 2), false, true);
    add_op(&s, 1000);
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(plan.out_bytes, EXTENT);
    EXPECT_EQ(plan.in_bytes, 0);
    EXPECT_EQ(plan.step_ns, 4000);
    tp_plan_fini(&plan);
}

TEST(room_for_births_is_made_two_operators_ahead) {
    scene s;
    scene_init(&s, 3 * EXTENT);
    const uint32_t weight = add_carried(&s, 2 * EXTENT);
    for (uint32_t op = 0; op < 6; op++) {
        add_op(&s, 1000);
        if (op == 0) add_operand(&s, weight, true, false);
        if (op == 4) add_operand(&s, add_block(&s, 3 * EXTENT, 4, 4), false, true);
    }
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(count(&plan, TP_ACT_EVICT), 2);
    for (uint32_t i = 0; i < plan.act_count; i++)
        if (plan.acts[i].kind == TP_ACT_EVICT) EXPECT(plan.acts[i].op <= 3);
    EXPECT_EQ(plan.step_ns, 6000);
    tp_plan_fini(&plan);
}

TEST(operands_of_a_streaming_operator_that_do_not_fit_stay_in_host) {
    scene s;
    scene_init(&s, 3 * EXTENT);
    const uint32_t weight = add_carried(&s, EXTENT), states = add_carried(&s, 4 * EXTENT);
    add_op(&s, 100);
    add_operand(&s, weight, true, true);
    add_op(&s, 10);
    add_operand(&s, weight, true, true);
    add_operand(&s, states, true, true);
    tp_error error = {0};
    tp_plan plan;
    EXPECT_EQ(tp_plan_make(&s.trace, &s.config, &plan, &error), TP_OUT_OF_MEMORY);
    EXPECT(strstr(error.message, "operator 1 ") != NULL);
    s.ops[1].streams = true;
    make(&s, &plan);
    EXPECT_EQ(count(&plan, TP_ACT_LEAVE), 4);
    EXPECT_EQ(plan.act_count, 4);
    EXPECT_EQ(plan.step_ns, 100 + 4 * EXTENT); /* both ways at once, a byte a ns */
    EXPECT_EQ(plan.in_bytes, 4 * EXTENT);
    EXPECT_EQ(plan.out_bytes, 4 * EXTENT);
    tp_plan_fini(&plan);
}

TEST(streaming_operator_waits_for_an_operand_that_is_on_its_way) {
    scene s;
    scene_init(&s, 4 * EXTENT);
    const uint32_t state = add_carried(&s, 2 * EXTENT);
    add_op(&s, 10);
    s.ops[0].streams = true;
    add_operand(&s, add_block(&s, 3 * EXTENT, 0, 0), false, true);
    add_operand(&s, state, true, true);
    add_op(&s, 500);
    add_operand(&s, state, true, true);
    add_op(&s, 500);
    add_operand(&s, add_block(&s, 4 * EXTENT, 2, 2), false, true);
    add_op(&s, 10); /* one extent has room beside the next births; its fill ends after this */
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(count(&plan, TP_ACT_LEAVE), 1);
    EXPECT_EQ(count(&plan, TP_ACT_FILL), 2);
    EXPECT(first_act(&plan, TP_ACT_LEAVE)->extent == 1);
    tp_plan_fini(&plan);
}

TEST(states_are_streamed_where_that_is_faster_than_copies) {
    scene s;
    scene_init(&s, 2 * EXTENT);
    for (uint32_t i = 0; i < 4; i++) add_carried(&s, 2 * EXTENT);
    for (uint32_t i = 0; i < 4; i++) {
        add_op(&s, 10);
        add_operand(&s, i, true, true);
    }
    tp_plan copied, streamed;
    make(&s, &copied);
    for (uint32_t i = 0; i < 4; i++) s.ops[i].streams = true;
    make(&s, &streamed);
    EXPECT_EQ(count(&copied, TP_ACT_LEAVE), 0);
    EXPECT_EQ(count(&streamed, TP_ACT_LEAVE), 8);
    EXPECT_EQ(streamed.step_ns, 4 * 2 * EXTENT);
    EXPECT(copied.step_ns > streamed.step_ns);
    tp_plan_fini(&copied);
    tp_plan_fini(&streamed);
}

TEST(small_blocks_stay_and_count) {
    scene s;
    scene_init(&s, 2 * EXTENT + 5);
    add_carried(&s, 5);
    const uint32_t a = add_carried(&s, 2 * EXTENT), b = add_carried(&s, EXTENT);
    add_op(&s, 10);
    add_operand(&s, a, true, false);
    add_op(&s, 10);
    add_operand(&s, b, true, false);
    tp_plan plan;
    make(&s, &plan);
    tp_plan_fini(&plan);
    s.config.budget_bytes--;
    EXPECT_STATUS(tp_plan_make(&s.trace, &s.config, &plan, &test_error), TP_OUT_OF_MEMORY);
}

TEST(blocks_are_cut_into_extents_of_whole_granules) {
    tp_plan_config config;
    tp_plan_config_init(&config, 0);
    const uint64_t mib = 1 << 20;
    EXPECT_EQ(tp_plan_extents(&config, 0), 0);
    EXPECT_EQ(tp_plan_extents(&config, 2 * mib - 1), 0);
    EXPECT_EQ(tp_plan_extents(&config, 2 * mib), 1);
    EXPECT_EQ(tp_plan_extents(&config, 64 * mib), 1);
    EXPECT_EQ(tp_plan_extents(&config, 64 * mib + 1), 2);
    EXPECT_EQ(tp_plan_extent_bytes(&config, 64 * mib + 1, 0), 64 * mib);
    EXPECT_EQ(tp_plan_extent_bytes(&config, 64 * mib + 1, 1), 2 * mib);
    EXPECT_EQ(tp_plan_extent_bytes(&config, 3 * mib, 0), 4 * mib);
}

/* ---- what makes no sense --------------------------------------------------------------------- */

static tp_status refused(const scene *s) {
    tp_plan plan = {.act_count = 77};
    const tp_status status = tp_plan_make(&s->trace, &s->config, &plan, NULL);
    EXPECT_EQ(plan.act_count, 77); /* untouched */
    return status;
}

TEST(traces_and_configurations_that_make_no_sense_are_refused) {
    scene s;
    stack_of_four(&s, 3 * EXTENT, 10);
    scene broken = s;
    broken.trace.ops = broken.ops, broken.trace.blocks = broken.blocks;
    broken.trace.operands = broken.operands;
    const scene sound = broken;
    broken.trace.op_count = 0;
    EXPECT_EQ(refused(&broken), TP_INVALID);
    broken.trace = sound.trace;
    broken.blocks[1].born_op = 8;
    EXPECT_EQ(refused(&broken), TP_INVALID);
    broken.blocks[1].born_op = TP_NO_OP;
    EXPECT_EQ(refused(&broken), TP_INVALID);
    broken.blocks[1].born_op = 2; /* one after its first use */
    EXPECT_EQ(refused(&broken), TP_INVALID);
    broken.blocks[1] = sound.blocks[1];
    broken.operands[3].block = 4;
    EXPECT_EQ(refused(&broken), TP_INVALID);
    broken.operands[3] = sound.operands[3];
    broken.ops[7].operand_count = 2;
    EXPECT_EQ(refused(&broken), TP_INVALID);
    broken.ops[7] = sound.ops[7];
    broken.config.extent_max_bytes = 15;
    EXPECT_EQ(refused(&broken), TP_INVALID);
    broken.config = sound.config;
    broken.config.link_bytes_per_s = 0;
    EXPECT_EQ(refused(&broken), TP_INVALID);
    broken.config = sound.config;
    broken.config.link_both_bytes_per_s = 1900000; /* less than a byte a us each way */
    EXPECT_EQ(refused(&broken), TP_INVALID);
    broken.config = sound.config;
    tp_plan plan;
    make(&broken, &plan);
    tp_plan_fini(&plan);
}

/* ---- random traces --------------------------------------------------------------------------- */

static void random_blocks(scene *s, uint64_t *state, uint32_t ops) {
    const uint32_t blocks = 1 + (uint32_t)test_random_below(state, BLOCKS_MAX - 1);
    for (uint32_t i = 0; i < blocks; i++) {
        const uint64_t small = test_random_below(state, 8) == 0;
        const uint64_t bytes =
            small ? 1 + test_random_below(state, 9) : 10 * (1 + test_random_below(state, 30));
        uint32_t born = (uint32_t)test_random_below(state, ops);
        uint32_t dead = (uint32_t)test_random_below(state, ops);
        const uint64_t kind = test_random_below(state, 10);
        if (kind < 4) born = dead = TP_NO_OP;
        if (kind >= 4 && kind < 9 && dead < born) dead = born + (ops - born) / 2;
        if (dead != TP_NO_OP && dead >= ops) dead = ops - 1;
        add_block(s, bytes, born, dead);
    }
}

static void random_scene(scene *s, uint64_t *state) {
    scene_init(s, 0);
    const uint32_t ops = 1 + (uint32_t)test_random_below(state, OPS_MAX - 1);
    random_blocks(s, state, ops);
    s->trace.op_count = ops; /* so that lives can be looked up */
    const bool streams = test_random_below(state, 2) == 0;
    uint64_t most = 0, needed = 0;
    for (uint32_t op = 0; op < ops; op++) {
        uint64_t live = 0, operands = 0, small = 0;
        s->ops[op] =
            (tp_trace_op){.device_ns = test_random_below(state, 200),
                          .operand_begin = s->trace.operand_count,
                          .streams = streams && (op == 0 || test_random_below(state, 5) == 0)};
        for (uint32_t b = 0; b < s->trace.block_count; b++) {
            if (!tp_trace_is_alive(&s->trace, b, op)) continue;
            const uint64_t bytes = s->blocks[b].bytes;
            live += bytes;
            if (bytes < 10) small += bytes;
            const bool is_born = s->blocks[b].born_op == op;
            const bool used = is_born || test_random_below(state, 8) == 0;
            if (!used || s->ops[op].operand_count >= (is_born ? 8u : 4u) ||
                s->trace.operand_count == OPERANDS_MAX) {
                operands += is_born && bytes >= 10 ? bytes : 0;
                continue;
            }
            operands += bytes >= 10 ? bytes : 0;
            const bool writes = is_born || test_random_below(state, 3) == 0;
            s->operands[s->trace.operand_count++] = (tp_trace_operand){
                .block = b, .reads = !writes || test_random_below(state, 2), .writes = writes};
            s->ops[op].operand_count++;
        }
        if (live > most) most = live;
        if (operands + small > needed) needed = operands + small;
    }
    s->config.budget_bytes = needed + test_random_below(state, most - needed + 20);
    s->config.headroom_ops =
        test_random_below(state, 2) == 0 ? 0 : (uint32_t)test_random_below(state, 4);
}

TEST(random_plans_keep_the_rules) {
    uint64_t state = test_seed();
    for (unsigned round = 0; round < test_rounds(3000) && test_failures() == 0; round++) {
        scene s;
        random_scene(&s, &state);
        tp_plan plan;
        make(&s, &plan);
        uint64_t native_ns = 0;
        for (uint32_t op = 0; op < s.trace.op_count; op++) native_ns += s.ops[op].device_ns;
        EXPECT(plan.step_ns >= native_ns);
        tp_plan again;
        MUST_OK(tp_plan_make(&s.trace, &s.config, &again, &test_error));
        EXPECT_EQ(again.act_count, plan.act_count);
        EXPECT(plan.act_count == 0 ||
               memcmp(again.acts, plan.acts, plan.act_count * sizeof *plan.acts) == 0);
        tp_plan_fini(&again);
        tp_plan_fini(&plan);
    }
}

/* Whether an operator in [from, to) uses a block. */
static bool used_in(const scene *s, uint32_t block, uint32_t from, uint32_t to) {
    for (uint32_t op = from; op < to; op++)
        if (s->blocks[block].born_op == op || operand_of(s, op, block) != NULL) return true;
    return false;
}

/* Plans random steps without haste and with `haste` of the configuration. What `compare` returns, the
 * acts in which they differ, is not 0 in all. */
static void compare_plans(void (*haste)(tp_plan_config *),
                          uint32_t (*compare)(const scene *, const tp_plan *,
                                              const tp_plan *)) {
    uint64_t state = test_seed();
    uint32_t differences = 0;
    for (unsigned round = 0; round < test_rounds(300) && test_failures() == 0; round++) {
        scene s;
        random_scene(&s, &state);
        tp_plan plan, ahead;
        make(&s, &plan);
        haste(&s.config);
        MUST_OK(tp_plan_make(&s.trace, &s.config, &ahead, &test_error));
        for (uint32_t i = 1; i < ahead.act_count; i++)
            EXPECT(ahead.acts[i].op >= ahead.acts[i - 1].op);
        differences += compare(&s, &plan, &ahead);
        tp_plan_fini(&ahead);
        tp_plan_fini(&plan);
    }
    EXPECT(differences > 0);
}

/* The evictions of an extent come in the same order in both plans; the n-th of `plan` earlier. */
static uint32_t expect_earlier(const scene *s, const tp_plan *plan, const tp_plan *other) {
    uint32_t moved = 0;
    for (uint32_t i = 0, from = 0; i < plan->act_count; i++) {
        const tp_act *it = &plan->acts[i];
        if (it->kind != TP_ACT_EVICT) continue;
        const tp_act *then = NULL;
        uint32_t nth = 0;
        for (uint32_t k = 0; k < i; k++)
            nth += plan->acts[k].kind == TP_ACT_EVICT && plan->acts[k].block == it->block &&
                   plan->acts[k].extent == it->extent;
        for (from = 0; from < other->act_count && then == NULL; from++) {
            const tp_act *at = &other->acts[from];
            if (at->kind == TP_ACT_EVICT && at->block == it->block &&
                at->extent == it->extent && nth-- == 0)
                then = at;
        }
        MUST(then != NULL);
        EXPECT(it->op <= then->op);
        EXPECT(!used_in(s, it->block, it->op, then->op));
        moved += it->op < then->op;
        /* What has been written is written back first. */
        for (uint32_t k = i + 1; k < plan->act_count && plan->acts[k].op <= then->op; k++) {
            const tp_act *behind = &plan->acts[k];
            EXPECT(behind->kind != TP_ACT_WRITE_BACK || behind->block != it->block ||
                   behind->extent != it->extent);
        }
    }
    return moved;
}

static void evict_ahead(tp_plan_config *config) { config->evict_ahead_ns = 300; }

static uint32_t compare_evictions(const scene *s, const tp_plan *plan, const tp_plan *ahead) {
    EXPECT_EQ(ahead->act_count, plan->act_count);
    EXPECT_EQ(ahead->step_ns, plan->step_ns);
    for (tp_act_kind kind = TP_ACT_WRITE_BACK; kind <= TP_ACT_LEAVE; kind++)
        EXPECT_EQ(count(ahead, kind), count(plan, kind));
    return expect_earlier(s, ahead, plan);
}

/* Evictions take time: they come before their memory is claimed, but not before the last use, nor before
 * the write-back. Everything else is as it was. */
TEST(evictions_go_ahead_where_the_extent_is_idle) {
    compare_plans(evict_ahead, compare_evictions);
}

static void fill_ahead(tp_plan_config *config) { config->fill_ahead_ns = 300; }

/* The next act from `at` on that is a fill, or that is none. */
static const tp_act *next_act(const tp_plan *plan, uint32_t *at, bool fills) {
    while (*at < plan->act_count && (plan->acts[*at].kind == TP_ACT_FILL) != fills) (*at)++;
    MUST(*at < plan->act_count);
    return &plan->acts[(*at)++];
}

static uint32_t compare_fills(const scene *s, const tp_plan *plan, const tp_plan *ahead) {
    uint32_t moved = 0, fill = 0, other = 0;
    walk_plan(s, ahead);
    EXPECT_EQ(ahead->act_count, plan->act_count);
    for (uint32_t i = 0; i < ahead->act_count; i++) {
        const tp_act *it = &ahead->acts[i];
        const bool is_fill = it->kind == TP_ACT_FILL;
        const tp_act *then = next_act(plan, is_fill ? &fill : &other, is_fill);
        EXPECT(it->kind == then->kind && it->block == then->block &&
               it->extent == then->extent);
        EXPECT(is_fill ? it->op <= then->op : it->op == then->op);
        moved += it->op < then->op;
    }
    return moved;
}

/* A fill that is begun early takes its memory early: the walk sees that there is some. Fills keep their
 * order, and everything else is as it was: what is evicted too, whose choice is walked without haste. */
TEST(fills_go_ahead_where_there_is_memory) { compare_plans(fill_ahead, compare_fills); }

/* The first act of an extent in a plan; NULL: it has none. */
static const tp_act *first_act_of(const tp_plan *plan, const tp_act *act) {
    for (uint32_t i = 0; i < plan->act_count; i++)
        if (plan->acts[i].block == act->block && plan->acts[i].extent == act->extent)
            return &plan->acts[i];
    return NULL;
}

static bool supposes(const tp_plan *plan, const tp_act *act) {
    for (uint32_t i = 0; i < plan->resident_count; i++)
        if (plan->resident[i].block == act->block && plan->resident[i].extent == act->extent)
            return true;
    return false;
}

static void evict_before(tp_plan_config *config) { config->evict_before = true; }

static uint32_t compare_steps(const scene *s, const tp_plan *plan, const tp_plan *ahead) {
    uint32_t added = 0, own = 0;
    for (uint32_t i = 0; i < ahead->act_count; i++) {
        const tp_act *it = &ahead->acts[i];
        if (own < plan->act_count && memcmp(it, &plan->acts[own], sizeof *it) == 0) {
            own++;
            continue;
        }
        added++;
        const tp_act *then = first_act_of(plan, it);
        MUST(then != NULL && it->kind == TP_ACT_EVICT && then->kind == TP_ACT_EVICT);
        EXPECT(!used_in(s, it->block, it->op, s->trace.op_count));
        EXPECT(!used_in(s, it->block, 0, then->op));
        EXPECT(supposes(plan, it) && !supposes(ahead, it));
        for (uint32_t k = i + 1; k < ahead->act_count; k++)
            EXPECT(ahead->acts[k].block != it->block || ahead->acts[k].extent != it->extent);
    }
    EXPECT_EQ(own, plan->act_count);
    EXPECT_EQ(plan->resident_count - ahead->resident_count, ahead->act_count - plan->act_count);
    return added;
}

/* Where the acts of the second plan are not those of the first: evictions in the step before. */
TEST(what_goes_early_in_a_step_goes_in_the_step_before) {
    compare_plans(evict_before, compare_steps);
}

TEST(operators_that_do_not_fit_are_refused_at_any_budget_below) {
    uint64_t state = test_seed();
    for (unsigned round = 0; round < test_rounds(300) && test_failures() == 0; round++) {
        scene s;
        random_scene(&s, &state);
        s.config.budget_bytes = test_random_below(&state, s.config.budget_bytes + 1);
        tp_plan plan;
        tp_error error = {0};
        const tp_status status = tp_plan_make(&s.trace, &s.config, &plan, &error);
        EXPECT(status == TP_OK || status == TP_OUT_OF_MEMORY);
        if (status == TP_OK) walk_plan(&s, &plan);
        if (status == TP_OK) tp_plan_fini(&plan);
    }
}

/* ---- how long it takes ----------------------------------------------------------------------- */

/* A training step of `layers` layers in `layers` x 10 operators. */
static double seconds_to_plan(uint32_t layers) {
    const uint32_t count_ops = 10 * layers;
    tp_trace_op *ops = calloc(count_ops, sizeof *ops);
    tp_trace_operand *operands = calloc(3 * (size_t)count_ops, sizeof *operands);
    tp_trace_block *blocks = calloc(count_ops, sizeof *blocks);
    MUST(ops != NULL && operands != NULL && blocks != NULL);
    tp_trace trace = {
        .ops = ops, .operands = operands, .blocks = blocks, .op_count = count_ops};
    uint64_t total = 0;
    for (uint32_t i = 0; i < count_ops / 2; i++) {
        blocks[2 * i] = (tp_trace_block){32u << 20, i, count_ops - 1 - i};
        blocks[2 * i + 1] = (tp_trace_block){8u << 20, TP_NO_OP, TP_NO_OP};
        total += 40u << 20;
    }
    trace.block_count = count_ops / 2 * 2;
    for (uint32_t op = 0; op < count_ops; op++) {
        const uint32_t layer = op < count_ops / 2 ? op : count_ops - 1 - op;
        ops[op] = (tp_trace_op){200000, trace.operand_count, layer > 0 ? 3 : 2, false};
        operands[trace.operand_count++] = (tp_trace_operand){2 * layer, op != layer, true};
        operands[trace.operand_count++] = (tp_trace_operand){2 * layer + 1, true, op != layer};
        if (layer > 0)
            operands[trace.operand_count++] = (tp_trace_operand){2 * layer - 2, true, false};
    }
    tp_plan_config config;
    tp_plan_config_init(&config, total / 2);
    tp_plan plan;
    const clock_t began = clock();
    EXPECT_OK(tp_plan_make(&trace, &config, &plan, &test_error));
    const double seconds = (double)(clock() - began) / CLOCKS_PER_SEC;
    EXPECT(plan.act_count > count_ops / 4);
    tp_plan_fini(&plan);
    free(ops), free(operands), free(blocks);
    return seconds;
}

/* Release builds take 20 ms and 1 s at most; `make -C tests/c release TESTS=test_plan` with
 * TP_TEST_VERBOSE prints what they take. Processor time. */
TEST(planning_takes_little_time) {
    const double small = seconds_to_plan(300), large = seconds_to_plan(10000);
    if (getenv("TP_TEST_VERBOSE") != NULL)
        printf("3,000 operators: %.1f ms; 100,000: %.0f ms\n", small * 1e3, large * 1e3);
    EXPECT(small <= 0.02 * TEST_SLACK);
    EXPECT(large <= 1.0 * TEST_SLACK);
}
