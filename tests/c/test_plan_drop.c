/* The planner on traces with recipes: steps whose best answer is known. Random ones are in
 * tests/py/test_plan.py, which carries plans out. Sizes in MiB; moving one takes 19 us. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/bytes.h"
#include "harness.h"
#include "pager/plan.h"

enum { OPS_MAX = 16, BLOCKS_MAX = 16, OPERANDS_MAX = 64, OP_NS = 100000, RERUN_NS = 7000 };

typedef struct scene {
    tp_trace_op ops[OPS_MAX];
    tp_trace_operand operands[OPERANDS_MAX];
    tp_trace_block blocks[BLOCKS_MAX];
    tp_trace_recipe recipes[OPS_MAX];
    uint32_t recipe_blocks[OPERANDS_MAX];
    tp_trace trace;
    tp_plan_config config;
} scene;

static void scene_init(scene *s, uint64_t budget_mib) {
    memset(s, 0, sizeof *s);
    s->trace = (tp_trace){.ops = s->ops,
                          .operands = s->operands,
                          .blocks = s->blocks,
                          .recipes = s->recipes,
                          .recipe_blocks = s->recipe_blocks};
    tp_plan_config_init(&s->config, budget_mib * TP_MIB);
}

static uint32_t add_block(scene *s, uint64_t mib, uint32_t born_op, uint32_t dead_op) {
    s->blocks[s->trace.block_count] = (tp_trace_block){mib * TP_MIB, born_op, dead_op};
    return s->trace.block_count++;
}

static uint32_t add_op(scene *s) {
    s->ops[s->trace.op_count] =
        (tp_trace_op){.device_ns = OP_NS, .operand_begin = s->trace.operand_count};
    return s->trace.op_count++;
}

/* Of the operator added last. */
static void add_operand(scene *s, uint32_t block, bool writes) {
    s->operands[s->trace.operand_count++] = (tp_trace_operand){block, !writes, writes};
    s->ops[s->trace.op_count - 1].operand_count++;
}

/* Of the operator added last: it makes `output` (and `other`) from `input`. */
static void add_recipe(scene *s, uint32_t input, uint32_t output, uint32_t other) {
    s->recipes[s->trace.recipe_count++] =
        (tp_trace_recipe){.device_ns = RERUN_NS,
                          .op = s->trace.op_count - 1,
                          .block_begin = s->trace.recipe_block_count,
                          .input_count = 1,
                          .output_count = other != TP_NO_OP ? 2 : 1};
    s->recipe_blocks[s->trace.recipe_block_count++] = input;
    s->recipe_blocks[s->trace.recipe_block_count++] = output;
    if (other != TP_NO_OP) s->recipe_blocks[s->trace.recipe_block_count++] = other;
}

static void make(const scene *s, tp_plan *plan) {
    MUST_OK(tp_plan_make(&s->trace, &s->config, plan, &test_error));
    EXPECT(plan->peak_bytes <= s->config.budget_bytes);
    for (uint32_t i = 1; i < plan->act_count; i++)
        EXPECT(plan->acts[i].op >= plan->acts[i - 1].op);
    for (uint32_t i = 0; i < plan->resident_count; i++) {
        EXPECT(plan->resident[i].block < s->trace.block_count);
        EXPECT(i == 0 || plan->resident[i].block >= plan->resident[i - 1].block);
    }
}

static uint32_t count(const tp_plan *plan, tp_act_kind kind) {
    uint32_t sum = 0;
    for (uint32_t i = 0; i < plan->act_count; i++) sum += plan->acts[i].kind == kind;
    return sum;
}

static bool is_act(const tp_plan *plan, uint32_t i, tp_act_kind kind, uint32_t op,
                   uint32_t block) {
    const tp_act *it = &plan->acts[i];
    return i < plan->act_count && it->kind == kind && it->op == op && it->block == block;
}

static uint64_t native_ns(const scene *s) { return (uint64_t)s->trace.op_count * OP_NS; }

/* 400 MiB for operator 3, while nothing else is used. The scenes need 256 MiB around it. */
static void add_peak(scene *s) {
    const uint32_t op = add_op(s);
    add_operand(s, add_block(s, 400, op, op), true);
}

/* A weight of 16 MiB, a result of 256 MiB made of it by operator 2, used by operator 4. */
static void simple_scene(scene *s) {
    scene_init(s, 480);
    const uint32_t weight = add_block(s, 16, TP_NO_OP, TP_NO_OP);
    const uint32_t result = add_block(s, 256, 2, 4);
    add_op(s);
    add_op(s);
    add_op(s);
    add_operand(s, weight, false);
    add_operand(s, result, true);
    add_recipe(s, weight, result, TP_NO_OP);
    add_peak(s);
    add_op(s);
    add_operand(s, result, false);
}

TEST(result_is_made_again_where_that_is_faster_than_moving_it) {
    scene s;
    simple_scene(&s);
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(plan.act_count, 2);
    EXPECT(is_act(&plan, 0, TP_ACT_DROP, 3, 1));
    EXPECT(is_act(&plan, 1, TP_ACT_RERUN, 4, 1));
    EXPECT_EQ(plan.step_ns, native_ns(&s) + RERUN_NS);
    EXPECT_EQ(plan.rerun_count, 1);
    EXPECT_EQ(plan.rerun_ns, RERUN_NS);
    EXPECT_EQ(plan.dropped_bytes, 256 * TP_MIB);
    EXPECT_EQ(plan.in_bytes + plan.out_bytes, 0);
    tp_plan_fini(&plan);
}

TEST(result_is_moved_where_that_is_faster_than_making_it_again) {
    scene s;
    simple_scene(&s);
    s.recipes[0].device_ns = 100000000;
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(plan.rerun_count, 0);
    EXPECT_EQ(count(&plan, TP_ACT_DROP), 0);
    EXPECT(plan.out_bytes > 0);
    tp_plan_fini(&plan);
}

TEST(nothing_is_dropped_where_all_fits) {
    scene s;
    simple_scene(&s);
    s.config.budget_bytes = 1000 * TP_MIB;
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(plan.act_count, 0);
    tp_plan_fini(&plan);
}

/* Writes the weight in operator `op`. */
static void expect_drops_if_written_by(uint32_t op, uint32_t drops) {
    scene s;
    simple_scene(&s);
    for (uint32_t i = op + 1; i < s.trace.op_count; i++) s.ops[i].operand_begin++;
    const uint32_t at = s.ops[op].operand_begin;
    memmove(&s.operands[at + 1], &s.operands[at],
            (s.trace.operand_count++ - at) * sizeof *s.operands);
    s.operands[at] = (tp_trace_operand){0, true, true};
    s.ops[op].operand_count++;
    if (op == 2) s.ops[op].operand_count--, s.ops[op].operand_begin++;
    if (op == 2) s.operands[at + 1].writes = true;
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(count(&plan, TP_ACT_DROP), drops);
    tp_plan_fini(&plan);
}

TEST(input_must_hold_what_it_held) {
    expect_drops_if_written_by(1, 1); /* before */
    expect_drops_if_written_by(2, 0); /* by the operator itself */
    expect_drops_if_written_by(3, 0); /* before the rerun */
    expect_drops_if_written_by(4, 1); /* behind it */
}

TEST(result_that_is_written_later_is_not_dropped) {
    scene s;
    simple_scene(&s);
    s.operands[s.trace.operand_count - 1].writes = true;
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(count(&plan, TP_ACT_DROP), 0);
    tp_plan_fini(&plan);
}

/* As above, but from an input of `mib` that operator 1 made and that is dead since. */
static void chain_scene(scene *s, uint64_t mib) {
    scene_init(s, 480);
    const uint32_t weight = add_block(s, 16, TP_NO_OP, TP_NO_OP);
    const uint32_t middle = add_block(s, mib, 1, 2), result = add_block(s, 256, 2, 4);
    add_op(s);
    add_op(s);
    add_operand(s, weight, false);
    add_operand(s, middle, true);
    add_recipe(s, weight, middle, TP_NO_OP);
    add_op(s);
    add_operand(s, middle, false);
    add_operand(s, result, true);
    add_recipe(s, middle, result, TP_NO_OP);
    add_peak(s);
    add_op(s);
    add_operand(s, result, false);
}

TEST(dead_input_is_made_again_first_and_discarded) {
    scene s;
    chain_scene(&s, 128);
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(plan.act_count, 4);
    EXPECT(is_act(&plan, 0, TP_ACT_DROP, 3, 2));
    EXPECT(is_act(&plan, 1, TP_ACT_RERUN, 4, 1));
    EXPECT(is_act(&plan, 2, TP_ACT_RERUN, 4, 2));
    EXPECT(is_act(&plan, 3, TP_ACT_DISCARD, 4, 1));
    EXPECT_EQ(plan.step_ns, native_ns(&s) + 2 * RERUN_NS);
    tp_plan_fini(&plan);
    s.config.chain_max = 0;
    make(&s, &plan);
    EXPECT_EQ(count(&plan, TP_ACT_RERUN), 1); /* it is kept instead */
    EXPECT_EQ(count(&plan, TP_ACT_KEEP), 1);
    tp_plan_fini(&plan);
}

TEST(small_dead_input_is_kept) {
    scene s;
    chain_scene(&s, 8);
    s.blocks[1].bytes = TP_MIB;
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(plan.act_count, 4);
    EXPECT(is_act(&plan, 0, TP_ACT_KEEP, 2, 1));
    EXPECT(is_act(&plan, 1, TP_ACT_DROP, 3, 2));
    EXPECT(is_act(&plan, 2, TP_ACT_RERUN, 4, 2));
    EXPECT(is_act(&plan, 3, TP_ACT_DISCARD, 4, 1));
    EXPECT_EQ(plan.rerun_count, 1);
    tp_plan_fini(&plan);
}

TEST(large_dead_input_is_kept_where_it_cannot_be_made_again_and_is_smaller) {
    scene s;
    chain_scene(&s, 64);
    s.recipes[0] = s.recipes[1];
    s.trace.recipe_count = 1;
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(count(&plan, TP_ACT_KEEP), 1);
    EXPECT_EQ(count(&plan, TP_ACT_DROP), 1);
    tp_plan_fini(&plan);
    s.blocks[1].bytes = 300 * TP_MIB; /* it would take more than it saves */
    s.config.budget_bytes = 600 * TP_MIB;
    make(&s, &plan);
    EXPECT_EQ(count(&plan, TP_ACT_KEEP) + count(&plan, TP_ACT_DROP), 0);
    tp_plan_fini(&plan);
}

/* As it is at run time: what the program has freed is gone. */
TEST(nothing_is_kept_where_it_cannot_be) {
    scene s;
    chain_scene(&s, 8);
    s.blocks[1].bytes = TP_MIB; /* small: else it would be kept */
    s.config.no_keep = true;
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(count(&plan, TP_ACT_KEEP), 0);
    EXPECT_EQ(plan.rerun_count, 2);
    EXPECT(is_act(&plan, 0, TP_ACT_DROP, 3, 2));
    EXPECT(is_act(&plan, 1, TP_ACT_RERUN, 4, 1));
    EXPECT(is_act(&plan, 2, TP_ACT_RERUN, 4, 2));
    tp_plan_fini(&plan);
    s.config.chain_max = 0; /* nor can it be made again, then */
    make(&s, &plan);
    EXPECT_EQ(count(&plan, TP_ACT_DROP) + count(&plan, TP_ACT_KEEP), 0);
    tp_plan_fini(&plan);
    chain_scene(&s, 64);
    s.config.no_keep = true;
    s.recipes[0] = s.recipes[1];
    s.trace.recipe_count = 1;
    make(&s, &plan);
    EXPECT_EQ(count(&plan, TP_ACT_DROP) + count(&plan, TP_ACT_KEEP), 0);
    tp_plan_fini(&plan);
}

TEST(results_of_one_operator_come_back_together) {
    scene s;
    scene_init(&s, 430);
    const uint32_t weight = add_block(&s, 16, TP_NO_OP, TP_NO_OP);
    const uint32_t large = add_block(&s, 256, 2, 4), small = add_block(&s, 32, 2, 5);
    add_op(&s);
    add_op(&s);
    add_op(&s);
    add_operand(&s, weight, false);
    add_operand(&s, large, true);
    add_operand(&s, small, true);
    add_recipe(&s, weight, large, small);
    add_peak(&s);
    add_op(&s);
    add_operand(&s, large, false);
    add_op(&s);
    add_operand(&s, small, false);
    tp_plan plan;
    make(&s, &plan);
    EXPECT_EQ(count(&plan, TP_ACT_DROP), 2);
    EXPECT_EQ(plan.rerun_count, 1);
    EXPECT_EQ(plan.step_ns, native_ns(&s) + RERUN_NS);
    tp_plan_fini(&plan);
}

TEST(recipes_that_make_no_sense_are_refused) {
    scene s;
    tp_plan plan;
    simple_scene(&s);
    s.recipes[0].op = 7;
    EXPECT_EQ(tp_plan_make(&s.trace, &s.config, &plan, NULL), TP_INVALID);
    simple_scene(&s);
    s.recipes[0].input_count = UINT32_MAX;
    EXPECT_EQ(tp_plan_make(&s.trace, &s.config, &plan, NULL), TP_INVALID);
    simple_scene(&s);
    s.recipe_blocks[0] = 9;
    EXPECT_EQ(tp_plan_make(&s.trace, &s.config, &plan, NULL), TP_INVALID);
    simple_scene(&s);
    s.recipe_blocks[1] = 0; /* lives through the step */
    EXPECT_EQ(tp_plan_make(&s.trace, &s.config, &plan, NULL), TP_INVALID);
    chain_scene(&s, 8);
    s.recipes[1].op = 1; /* not behind the first */
    EXPECT_EQ(tp_plan_make(&s.trace, &s.config, &plan, NULL), TP_INVALID);
}

/* ---- how long it takes ----------------------------------------------------------------------- */

/* A training step of 10 `layers` operators: each result made from the one before and a weight. */
static double seconds_to_plan(uint32_t layers) {
    const uint32_t ops = 10 * layers, half = ops / 2;
    scene s;
    scene_init(&s, 0);
    tp_trace_op *op = calloc(ops, sizeof *op);
    tp_trace_operand *operand = calloc(3 * (size_t)ops, sizeof *operand);
    tp_trace_block *block = calloc(2 * (size_t)half, sizeof *block);
    tp_trace_recipe *recipe = calloc(half, sizeof *recipe);
    uint32_t *blocks = calloc(3 * (size_t)half, sizeof *blocks);
    MUST(op != NULL && operand != NULL && block != NULL && recipe != NULL && blocks != NULL);
    tp_trace trace = {.ops = op,
                      .operands = operand,
                      .blocks = block,
                      .recipes = recipe,
                      .recipe_blocks = blocks,
                      .op_count = ops,
                      .block_count = 2 * half};
    for (uint32_t i = 0; i < half; i++) {
        block[2 * i] = (tp_trace_block){32u << 20, i, ops - 1 - i};
        block[2 * i + 1] = (tp_trace_block){8u << 20, TP_NO_OP, TP_NO_OP};
    }
    for (uint32_t i = 0; i < ops; i++) {
        const uint32_t layer = i < half ? i : ops - 1 - i;
        op[i] = (tp_trace_op){200000, trace.operand_count, layer > 0 ? 3 : 2, false};
        operand[trace.operand_count++] = (tp_trace_operand){2 * layer, i != layer, i == layer};
        operand[trace.operand_count++] = (tp_trace_operand){2 * layer + 1, true, false};
        if (layer > 0)
            operand[trace.operand_count++] = (tp_trace_operand){2 * layer - 2, true, false};
    }
    for (uint32_t i = 1; i < half; i++) {
        recipe[i - 1] = (tp_trace_recipe){50000 + i % 7 * 10000, i, 3 * (i - 1), 2, 1};
        blocks[trace.recipe_block_count++] = 2 * i - 2;
        blocks[trace.recipe_block_count++] = 2 * i + 1;
        blocks[trace.recipe_block_count++] = 2 * i;
        trace.recipe_count++;
    }
    s.config.budget_bytes = (uint64_t)half * (40u << 20) / 2;
    tp_plan plan;
    const clock_t began = clock();
    EXPECT_OK(tp_plan_make(&trace, &s.config, &plan, &test_error));
    const double seconds = (double)(clock() - began) / CLOCKS_PER_SEC;
    EXPECT(plan.rerun_count > half / 4);
    tp_plan_fini(&plan);
    free(op), free(operand), free(block), free(recipe), free(blocks);
    return seconds;
}

/* Processor time; TP_TEST_VERBOSE prints it. */
TEST(planning_drops_takes_little_time) {
    const double small = seconds_to_plan(300);
    if (getenv("TP_TEST_VERBOSE") != NULL)
        printf("3,000 operators with reruns: %.0f ms\n", small * 1e3);
    if (getenv("TP_TEST_LONG") != NULL) printf("100,000: %.1f s\n", seconds_to_plan(10000));
    EXPECT(small <= 2.0 * TEST_SLACK);
}
