/* The recorder of steps: what it writes down, where it finds steps, which it remembers, and how it
 * follows the program along them. A program is a list of operators over weights, which live as
 * long as the program, and activations, which live within a step. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "harness.h"
#include "pager/name.h"
#include "pager/plan.h"
#include "pager/steps.h"
#include "rig.h"

enum { WEIGHTS = 512, ACTIVATIONS = 4096 };

typedef struct scene {
    tp_steps steps;
    tp_identity weights[WEIGHTS], activations[ACTIVATIONS];
    uint64_t now_ns;
    uint32_t taken; /* activations alive */
} scene;

static const tp_record_limits wide = {.ops = 1 << 16, .uses = 1 << 18, .storages = 1 << 16};

static scene *scene_new(const tp_record_limits *limits) {
    scene *s = calloc(1, sizeof *s);
    MUST(s != NULL);
    tp_steps_init(&s->steps, limits);
    for (int i = 0; i < WEIGHTS; i++) tp_list_init(&s->weights[i].link);
    for (int i = 0; i < ACTIVATIONS; i++) tp_list_init(&s->activations[i].link);
    MUST(tp_steps_start(&s->steps));
    for (uint32_t i = 0; i < WEIGHTS; i++) tp_steps_born(&s->steps, &s->weights[i], 1000 + i);
    return s;
}

static void scene_free(scene *s) {
    tp_steps_fini(&s->steps);
    free(s);
}

/* An operator that reads and writes what there is; returns its number. */
static uint32_t run(scene *s, uint32_t name, bool backward, tp_identity *const *operands,
                    uint32_t count, tp_identity *result, uint64_t result_bytes) {
    tp_steps *steps = &s->steps;
    if (!tp_steps_op_begin(steps, name, backward, 1, s->now_ns += 1000)) {
        if (result != NULL) tp_steps_born(steps, result, result_bytes);
        return TP_NO_OP;
    }
    for (uint32_t i = 0; i < count; i++) tp_steps_operand(steps, operands[i], false);
    const uint64_t number = steps->record.number;
    const uint32_t op = steps->record.op_count - 1;
    (void)tp_steps_op_ready(steps);
    if (result != NULL) {
        tp_steps_born(steps, result, result_bytes);
        tp_steps_result(steps, op, number, result);
    }
    tp_steps_op_end(steps, number);
    return op;
}

/* A network of `layers` with weights of its own from `first` on, on inputs of `size`: forward, and,
 * with `train`, backward and an optimizer. Each layer makes an activation, which lives until it has
 * been used backward. */
typedef struct network {
    uint32_t first, layers;
    uint64_t size;
    bool train;
} network;

static void forward_part(scene *s, const network *n, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++) {
        tp_identity *operands[2] = {&s->weights[n->first + i],
                                    i == 0 ? &s->weights[0] : &s->activations[i - 1]};
        (void)run(s, 1, false, operands, 2, &s->activations[i], n->size + 8 * i);
        operands[0] = &s->activations[i];
        (void)run(s, 2, false, operands, 1, NULL, 0);
        if (!n->train && i > 0) tp_steps_freed(&s->steps, &s->activations[i - 1]);
    }
}

static void forward(scene *s, const network *n) {
    forward_part(s, n, 0, n->layers);
    if (!n->train) tp_steps_freed(&s->steps, &s->activations[n->layers - 1]);
}

static void backward(scene *s, const network *n) {
    for (uint32_t i = n->layers; i-- > 0;) {
        tp_identity *operands[2] = {&s->weights[n->first + i], &s->activations[i]};
        (void)run(s, 3, true, operands, 2, NULL, 0);
        (void)run(s, 4, true, operands, 2, NULL, 0);
        tp_steps_freed(&s->steps, &s->activations[i]);
    }
}

static void optimize(scene *s, const network *n) {
    tp_steps_mark(&s->steps, TP_STEP_OPTIMIZER_BEGIN);
    for (uint32_t i = 0; i < n->layers; i++) {
        tp_identity *operands[1] = {&s->weights[n->first + i]};
        (void)run(s, 5, false, operands, 1, NULL, 0);
    }
    tp_steps_mark(&s->steps, TP_STEP_OPTIMIZER_END);
}

static void train(scene *s, const network *n) {
    forward(s, n);
    backward(s, n);
    optimize(s, n);
}

static const network small = {.first = 1, .layers = 20, .size = 100000, .train = true};

/* ---- what is written down ---------------------------------------------------------------- */

TEST(a_step_takes_until_the_next_one_begins) {
    scene *s = scene_new(&wide);
    train(s, &small);
    train(s, &small);
    tp_steps_settle(&s->steps);
    EXPECT_EQ(tp_steps_last(&s->steps)->step_ns, 0); /* nothing has followed it */
    s->now_ns += 5000;
    const uint64_t began = s->now_ns + 1000;
    train(s, &small);
    EXPECT_EQ(tp_steps_last(&s->steps)->step_ns, 20 * 5 * 1000 + 5000);
    /* Two ends in a row are one. */
    tp_steps_settle(&s->steps);
    tp_steps_mark(&s->steps, TP_STEP_ASKED);
    train(s, &small);
    EXPECT_EQ(tp_steps_last(&s->steps)->step_ns, 20 * 5 * 1000);
    EXPECT_EQ(s->now_ns - began, 2 * 20 * 5 * 1000 - 1000);
    scene_free(s);
}

TEST(a_step_that_was_not_seen_whole_has_no_time) {
    scene *s = scene_new(&wide);
    for (int i = 0; i < 2; i++) train(s, &small);
    tp_steps_settle(&s->steps);
    tp_steps_stop(&s->steps); /* in between nobody knows what happened */
    s->now_ns += 1000000;
    MUST(tp_steps_start(&s->steps));
    for (uint32_t i = 0; i < WEIGHTS; i++) tp_steps_born(&s->steps, &s->weights[i], 1000 + i);
    train(s, &small);
    EXPECT_EQ(tp_steps_last(&s->steps)->step_ns, 0);
    scene_free(s);
}

TEST(a_step_is_what_the_program_did) {
    scene *s = scene_new(&wide);
    for (int i = 0; i < 3; i++) train(s, &small);
    tp_steps_settle(&s->steps);
    const tp_step *step = tp_steps_last(&s->steps);
    MUST(step != NULL);
    EXPECT_EQ(step->completed_count, 2); /* the first began before anything was recorded */
    EXPECT_EQ(s->steps.count, 1);
    EXPECT_OK(tp_trace_check(&step->trace, &test_error));
    EXPECT_EQ(step->trace.op_count, 20 * 5);
    EXPECT_EQ(step->trace.block_count, WEIGHTS + 20);
    /* forward 3 + 1, backward 2 * 2, optimizer 1 */
    EXPECT_EQ(step->trace.operand_count, 20 * 9);
    for (uint32_t i = 0; i < 20; i++) {
        const tp_trace_block *it = &step->trace.blocks[WEIGHTS + i]; /* in order of birth */
        EXPECT_EQ(it->bytes, 100000 + 8 * i);
        EXPECT_EQ(it->born_op, 2 * i);
        EXPECT_EQ(it->dead_op, 40 + 2 * (19 - i) + 1);
    }
    const tp_trace_op *first = &step->trace.ops[0];
    EXPECT_EQ(first->operand_count, 3);
    EXPECT_EQ(step->announced[0], 2);
    const tp_trace_operand *made = &step->trace.operands[first->operand_begin + 2];
    EXPECT_EQ(made->block, WEIGHTS);
    EXPECT(made->writes && !made->reads);
    EXPECT_EQ(tp_kind_phase(step->kinds[0]), TP_PHASE_FORWARD);
    EXPECT_EQ(tp_kind_phase(step->kinds[40]), TP_PHASE_BACKWARD);
    EXPECT_EQ(tp_kind_phase(step->kinds[80]), TP_PHASE_OPTIMIZER);
    tp_plan_config config;
    tp_plan_config_init(&config, (uint64_t)1 << 30);
    tp_plan plan;
    MUST_OK(tp_plan_make(&step->trace, &config, &plan, &test_error));
    tp_plan_fini(&plan);
    scene_free(s);
}

TEST(an_operand_named_twice_is_one) {
    scene *s = scene_new(&wide);
    for (int i = 0; i < 2; i++) {
        tp_identity *operands[3] = {&s->weights[1], &s->weights[2], &s->weights[1]};
        MUST(tp_steps_op_begin(&s->steps, 7, false, 1, 0));
        for (int k = 0; k < 3; k++) tp_steps_operand(&s->steps, operands[k], k == 2);
        (void)tp_steps_op_ready(&s->steps);
        tp_steps_op_end(&s->steps, s->steps.record.number);
        tp_steps_mark(&s->steps, TP_STEP_ASKED);
    }
    const tp_step *step = tp_steps_last(&s->steps);
    MUST(step != NULL);
    EXPECT_EQ(step->trace.operand_count, 2);
    EXPECT(step->trace.operands[0].reads && step->trace.operands[0].writes);
    EXPECT(step->trace.operands[1].reads && !step->trace.operands[1].writes);
    scene_free(s);
}

/* Its result is allocated by an operator that it calls. */
TEST(a_result_is_written_where_it_is_born) {
    scene *s = scene_new(&wide);
    tp_steps *steps = &s->steps;
    for (int i = 0; i < 2; i++) {
        tp_identity *weight = &s->weights[3];
        MUST(tp_steps_op_begin(steps, 1, false, 1, 0));
        tp_steps_operand(steps, weight, false);
        (void)tp_steps_op_ready(steps);
        const uint64_t number = steps->record.number;
        const uint32_t outer = steps->record.op_count - 1;
        (void)run(s, 2, false, &weight, 1, &s->activations[0], 500);
        tp_steps_result(steps, outer, number, &s->activations[0]);
        tp_steps_op_end(steps, number);
        tp_steps_freed(steps, &s->activations[0]);
        tp_steps_mark(steps, TP_STEP_ASKED);
    }
    const tp_step *step = tp_steps_last(steps);
    MUST(step != NULL);
    EXPECT_EQ(step->trace.op_count, 2);
    EXPECT_EQ(step->trace.blocks[WEIGHTS].born_op, 1);
    EXPECT_EQ(step->trace.operand_count, 3);
    scene_free(s);
}

/* What is replaced by one of its size in each step, as gradients and losses are, is one block. */
TEST(what_is_replaced_in_each_step_is_one_block) {
    scene *s = scene_new(&wide);
    for (uint32_t i = 0; i < 6; i++) {
        tp_identity *kept = &s->activations[i], *before = &s->activations[(i + 1) % 2 + 10];
        (void)kept;
        tp_identity *weight = &s->weights[1];
        (void)run(s, 1, false, &weight, 1, NULL, 0);
        if (i > 0) tp_steps_freed(&s->steps, before);
        (void)run(s, 2, false, &weight, 1, NULL, 0);
        (void)run(s, 3, false, &weight, 1, &s->activations[i % 2 + 10], 700);
        tp_steps_mark(&s->steps, TP_STEP_ASKED);
    }
    const tp_step *step = tp_steps_last(&s->steps);
    MUST(step != NULL);
    EXPECT_EQ(step->trace.block_count, WEIGHTS + 1);
    EXPECT_EQ(step->trace.blocks[WEIGHTS].born_op, 2);
    EXPECT_EQ(step->trace.blocks[WEIGHTS].dead_op, 0);
    /* In the next step, before it is freed, it stands for the old one. */
    EXPECT(tp_steps_live(step, WEIGHTS) == &s->activations[11]);
    EXPECT_EQ(tp_steps_block(step, &s->activations[11]), WEIGHTS);
    scene_free(s);
}

TEST(names_are_the_same_for_the_same_text) {
    const uint32_t add = tp_name_id("aten::add_.Tensor"), mm = tp_name_id("aten::mm.");
    EXPECT(add != 0 && mm != 0 && add != mm);
    EXPECT_EQ(tp_name_id("aten::add_.Tensor"), add);
    EXPECT(strcmp(tp_name_text(mm), "aten::mm.") == 0);
    EXPECT(tp_name_streams(add) && !tp_name_streams(mm));
    EXPECT(tp_name_streams(tp_name_id("aten::_foreach_addcmul_.Scalar")));
    EXPECT(tp_name_streams(tp_name_id("aten::_fused_adamw_.")));
    EXPECT(!tp_name_streams(tp_name_id("aten::add.Tensor")));
    EXPECT(!tp_name_streams(tp_name_id("aten::add_relu_.Tensor")));
}

TEST(times_of_operators_come_from_samples) {
    scene *s = scene_new(&wide);
    train(s, &small);
    train(s, &small);
    tp_steps_settle(&s->steps);
    tp_step *step = tp_steps_take_new(&s->steps);
    MUST(step != NULL);
    EXPECT(tp_steps_take_new(&s->steps) == NULL);
    /* Not measured: as long as the operands take at 1 TB/s. */
    EXPECT_EQ(step->trace.ops[0].device_ns, (1001 + 1000) / 1000);
    const uint64_t number = step->number;
    tp_record_sample(&s->steps.record, step->class_idx[0], 50000, false);
    train(s, &small);
    tp_steps_settle(&s->steps);
    EXPECT_EQ(step->trace.ops[0].device_ns, 2); /* held: nothing changes */
    tp_steps_give(step);
    train(s, &small);
    tp_steps_settle(&s->steps);
    EXPECT_EQ(step->trace.ops[0].device_ns, 50000);
    EXPECT(step->number != number);
    EXPECT(tp_steps_find(&s->steps, number) == NULL);
    EXPECT(tp_steps_take_new(&s->steps) == step); /* to be planned again */
    tp_steps_give(step);
    scene_free(s);
}

/* ---- recipes ----------------------------------------------------------------------------- */

/* An operator in progress that could be run again. */
typedef struct maker {
    uint64_t number, turn;
    uint32_t op, storages;
} maker;

static maker begin_maker(scene *s, uint32_t name, tp_identity *const *operands, uint32_t count,
                         bool writes) {
    tp_steps *steps = &s->steps;
    MUST(tp_steps_op_begin(steps, name, false, 1, s->now_ns += 1000));
    for (uint32_t i = 0; i < count; i++) tp_steps_operand(steps, operands[i], writes);
    (void)tp_steps_op_ready(steps);
    return (maker){steps->record.number, steps->record.turn, steps->record.op_count - 1,
                   steps->record.storage_count};
}

static void end_maker(scene *s, maker it, tp_identity *const *results, uint32_t count) {
    tp_steps *steps = &s->steps;
    for (uint32_t i = 0; i < count; i++) tp_steps_result(steps, it.op, it.number, results[i]);
    tp_steps_note_recipe(steps, it.op, it.number, it.storages, it.turn);
    tp_steps_op_end(steps, it.number);
}

static void read(scene *s, tp_identity *identity) {
    (void)run(s, 60, false, &identity, 1, NULL, 0);
}

/* The body of a step, run twice; what it leaves in activations[0 .. 3] is freed before it ends. */
static const tp_step *step_of(scene *s, void (*body)(scene *s)) {
    for (int i = 0; i < 2; i++) {
        body(s);
        for (uint32_t k = 0; k < 4; k++) {
            if (s->activations[k].serial != 0) tp_steps_freed(&s->steps, &s->activations[k]);
        }
        read(s, &s->weights[9]);
        tp_steps_mark(&s->steps, TP_STEP_ASKED);
    }
    const tp_step *step = tp_steps_last(&s->steps);
    MUST(step != NULL);
    EXPECT_OK(tp_trace_check(&step->trace, &test_error));
    return step;
}

static void expect_recipe(const tp_step *step, uint32_t idx, uint32_t first, uint32_t last,
                          uint32_t inputs, uint32_t outputs) {
    MUST(idx < step->trace.recipe_count);
    const tp_trace_recipe *it = &step->trace.recipes[idx];
    EXPECT_EQ(step->recipe_ops[idx], first);
    EXPECT_EQ(it->op, last);
    EXPECT_EQ(it->input_count, inputs);
    EXPECT_EQ(it->output_count, outputs);
    uint64_t ns = 0;
    for (uint32_t op = first; op <= last; op++) ns += step->trace.ops[op].device_ns;
    EXPECT_EQ(it->device_ns, ns);
}

static uint32_t block_of(const tp_step *step, uint32_t idx, uint32_t place) {
    return step->trace.recipe_blocks[step->trace.recipes[idx].block_begin + place];
}

/* It calls two others, of which one could be run again by itself; a temporary dies inside. */
static void nested(scene *s) {
    tp_identity *inputs[2] = {&s->weights[1], &s->weights[2]};
    tp_identity *results[2] = {&s->activations[0], &s->activations[1]};
    const maker outer = begin_maker(s, 1, inputs, 2, false);
    tp_steps_born(&s->steps, results[0], 5000);
    tp_identity *temporary = &s->activations[5];
    const maker inner = begin_maker(s, 2, inputs, 1, false);
    tp_steps_born(&s->steps, temporary, 7000);
    end_maker(s, inner, &temporary, 1);
    tp_steps_born(&s->steps, results[1], 6000);
    (void)run(s, 3, false, &temporary, 1, NULL, 0);
    tp_steps_freed(&s->steps, temporary);
    end_maker(s, outer, results, 2);
    read(s, results[0]);
    const maker next = begin_maker(s, 4, &results[1], 1, false);
    tp_steps_born(&s->steps, &s->activations[2], 8000);
    tp_identity *result = &s->activations[2];
    end_maker(s, next, &result, 1);
}

TEST(recipe_is_of_an_operator_with_those_that_it_calls) {
    scene *s = scene_new(&wide);
    const tp_step *step = step_of(s, nested);
    EXPECT_EQ(step->trace.recipe_count, 2);
    EXPECT_EQ(step->trace.recipe_block_count, 2 + 2 + 1 + 1);
    expect_recipe(step, 0, 0, 2, 2, 2);
    EXPECT(block_of(step, 0, 0) == 1 && block_of(step, 0, 1) == 2);
    EXPECT_EQ(step->trace.blocks[block_of(step, 0, 2)].bytes, 5000);
    EXPECT_EQ(step->trace.blocks[block_of(step, 0, 3)].bytes, 6000);
    expect_recipe(step, 1, 4, 4, 1, 1);
    EXPECT_EQ(block_of(step, 1, 0), block_of(step, 0, 3));
    EXPECT_EQ(step->trace.blocks[block_of(step, 1, 1)].bytes, 8000);
    /* The times of one that has been measured since. */
    tp_record_sample(&s->steps.record, step->class_idx[1], 70000, false);
    (void)step_of(s, nested);
    expect_recipe(tp_steps_last(&s->steps), 0, 0, 2, 2, 2);
    EXPECT(tp_steps_last(&s->steps)->trace.recipes[0].device_ns > 70000);
    /* But not what comes behind it. */
    const uint64_t before_ns = tp_steps_last(&s->steps)->trace.recipes[0].device_ns;
    tp_record_sample(&s->steps.record, tp_steps_last(&s->steps)->gap_idx[2], 40000, false);
    (void)step_of(s, nested);
    EXPECT_EQ(tp_steps_last(&s->steps)->trace.recipes[0].device_ns, before_ns);
    scene_free(s);
}

static void without_recipe(scene *s) {
    tp_identity *input = &s->weights[1], *result = &s->activations[0];
    /* One that changes its operand, though somebody says that it could be run again. */
    end_maker(s, begin_maker(s, 1, &input, 1, true), NULL, 0);
    maker it = begin_maker(s, 2, &input, 1, true);
    tp_steps_born(&s->steps, result, 5000);
    end_maker(s, it, &result, 1);
    /* One that calls such a one. */
    it = begin_maker(s, 3, &input, 1, false);
    tp_steps_born(&s->steps, &s->activations[1], 5000);
    end_maker(s, begin_maker(s, 4, &result, 1, true), NULL, 0);
    result = &s->activations[1];
    end_maker(s, it, &result, 1);
    /* One that makes nothing, and one whose result dies inside. */
    end_maker(s, begin_maker(s, 5, &input, 1, false), NULL, 0);
    it = begin_maker(s, 6, &input, 1, false);
    tp_steps_born(&s->steps, &s->activations[5], 5000);
    tp_steps_freed(&s->steps, &s->activations[5]);
    end_maker(s, it, NULL, 0);
}

TEST(operator_that_changes_something_or_makes_nothing_has_no_recipe) {
    scene *s = scene_new(&wide);
    EXPECT_EQ(step_of(s, without_recipe)->trace.recipe_count, 0);
    scene_free(s);
}

/* What it makes lives until the next step makes it anew. */
static void makes_what_lasts(scene *s) {
    tp_identity *input = &s->weights[1];
    read(s, input);
    static uint32_t turn;
    tp_identity *old = &s->activations[10 + turn % 2], *made = &s->activations[10 + ++turn % 2];
    if (old->serial != 0) tp_steps_freed(&s->steps, old);
    read(s, input);
    const maker it = begin_maker(s, 1, &input, 1, false);
    tp_steps_born(&s->steps, made, 5000);
    end_maker(s, it, &made, 1);
}

TEST(result_that_outlives_the_step_has_no_recipe) {
    scene *s = scene_new(&wide);
    const tp_step *step = step_of(s, makes_what_lasts);
    EXPECT_EQ(step->trace.blocks[WEIGHTS].dead_op, 0);
    EXPECT_EQ(step->trace.recipe_count, 0);
    scene_free(s);
}

static void *bear(void *arg) {
    scene *s = arg;
    tp_steps_born(&s->steps, &s->activations[1], 5000);
    return NULL;
}

static void *read_weight(void *arg) {
    scene *s = arg;
    read(s, &s->weights[3]);
    return NULL;
}

static void elsewhere(scene *s, void *(*what)(void *)) {
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, what, s) == 0);
    MUST(pthread_join(thread, NULL) == 0);
}

static void with_threads(scene *s) {
    tp_identity *input = &s->weights[1], *results[3];
    for (uint32_t i = 0; i < 3; i++) results[i] = &s->activations[2 * i];
    maker it = begin_maker(s, 1, &input, 1, false);
    tp_steps_born(&s->steps, results[0], 5000);
    elsewhere(s, bear); /* whose is it? */
    end_maker(s, it, &results[0], 1);
    it = begin_maker(s, 2, &input, 1, false);
    tp_steps_born(&s->steps, results[1], 5000);
    elsewhere(s, read_weight);
    end_maker(s, it, &results[1], 1);
    elsewhere(s, read_weight);
    it = begin_maker(s, 3, &input, 1, false);
    tp_steps_born(&s->steps, results[2], 5000);
    end_maker(s, it, &results[2], 1);
    tp_steps_freed(&s->steps, results[2]);
}

TEST(operator_beside_another_thread_has_no_recipe) {
    scene *s = scene_new(&wide);
    const tp_step *step = step_of(s, with_threads);
    EXPECT_EQ(step->trace.recipe_count, 1);
    expect_recipe(step, 0, 4, 4, 1, 1);
    scene_free(s);
}

static uint32_t makers; /* how many of four say that they could be run again */

static void some_makers(scene *s) {
    tp_identity *input = &s->weights[1];
    for (uint32_t i = 0; i < 4; i++) {
        tp_identity *result = &s->activations[i];
        if (i < makers) {
            const maker it = begin_maker(s, 1, &input, 1, false);
            tp_steps_born(&s->steps, result, 5000);
            end_maker(s, it, &result, 1);
        } else {
            (void)run(s, 1, false, &input, 1, result, 5000);
        }
    }
}

TEST(recipes_that_stay_others_are_taken_over) {
    scene *s = scene_new(&wide);
    makers = 0;
    EXPECT_EQ(step_of(s, some_makers)->trace.recipe_count, 0);
    tp_step *step = tp_steps_take_new(&s->steps);
    const uint64_t built = step->built, number = step->number;
    const uint64_t runs = step->completed_count;
    tp_steps_give(step);
    for (makers = 4; makers > 0; makers--) { /* never the same twice */
        some_makers(s);
        for (uint32_t k = 0; k < 4; k++) tp_steps_freed(&s->steps, &s->activations[k]);
        read(s, &s->weights[9]);
        tp_steps_mark(&s->steps, TP_STEP_ASKED);
        EXPECT_EQ(tp_steps_last(&s->steps)->trace.recipe_count, 0);
    }
    makers = 3;
    step = tp_steps_last(&s->steps);
    tp_steps_hold(step);
    EXPECT_EQ(step_of(s, some_makers)->trace.recipe_count, 0); /* somebody reads it */
    tp_steps_give(step);
    EXPECT_EQ(step_of(s, some_makers)->trace.recipe_count, 3);
    step = tp_steps_take_new(&s->steps);
    MUST(step != NULL); /* to be planned again; the plan that there is fits it */
    EXPECT_EQ(step->built, built);
    EXPECT(step->number != number);
    EXPECT_EQ(step->completed_count, runs + 4 + 4);
    EXPECT_EQ(s->steps.count, 1);
    EXPECT(tp_steps_expected(&s->steps, step) == step);
    EXPECT(tp_steps_block(step, &s->weights[1]) == 1);
    const tp_record before = s->steps.record;
    tp_steps_give(step);
    for (int i = 0; i < 10; i++) (void)step_of(s, some_makers);
    EXPECT(tp_steps_last(&s->steps) == step); /* nothing more happens */
    EXPECT(s->steps.record.recipes == before.recipes);
    scene_free(s);
}

/* There is room for so many classes; who comes later is not measured, but takes time all the same. */
TEST(operators_without_a_class_take_as_long_as_their_operands) {
    scene *s = scene_new(&wide);
    network n = small;
    for (int i = 0; i < 200; i++) {
        n.size += 1000;
        train(s, &n);
    }
    for (int i = 0; i < 3; i++) train(s, &n);
    tp_steps_settle(&s->steps);
    const tp_step *step = tp_steps_last(&s->steps);
    const uint32_t op = 3; /* of the second layer */
    EXPECT_EQ(step->class_idx[op], 0);
    EXPECT_EQ(step->trace.ops[op].device_ns, (n.size + 8) / 1000);
    scene_free(s);
}

/* Samples of what may have begun late count only until there is one of the whole. */
TEST(part_of_an_operator_counts_until_there_is_a_whole_one) {
    scene *s = scene_new(&wide);
    train(s, &small);
    train(s, &small);
    tp_steps_settle(&s->steps);
    tp_record *record = &s->steps.record;
    const uint32_t class_idx = tp_steps_last(&s->steps)->class_idx[0];
    tp_record_sample(record, class_idx, 90000, true);
    EXPECT_EQ(tp_record_class_ns(record, class_idx), 90000);
    tp_record_sample(record, class_idx, 50000, false);
    EXPECT_EQ(tp_record_class_ns(record, class_idx), 50000);
    tp_record_sample(record, class_idx, 10, true);
    EXPECT_EQ(tp_record_class_ns(record, class_idx), 50000);
    scene_free(s);
}

TEST(what_comes_between_two_operators_belongs_to_the_pair) {
    scene *s = scene_new(&wide);
    train(s, &small);
    train(s, &small);
    tp_steps_settle(&s->steps);
    const tp_step *step = tp_steps_last(&s->steps);
    const uint32_t last = step->trace.op_count - 1;
    /* Layers are alike but for their weights' sizes: no two pairs are the same. */
    EXPECT(step->gap_idx[0] != step->gap_idx[2] && step->gap_idx[0] != 0);
    const uint64_t first_ns = step->trace.ops[0].device_ns;
    tp_record_sample(&s->steps.record, step->gap_idx[0], 30000, false);
    tp_record_sample(&s->steps.record, step->gap_idx[last], 70000, false);
    train(s, &small);
    tp_steps_settle(&s->steps);
    EXPECT_EQ(step->trace.ops[0].device_ns, first_ns + 30000);
    EXPECT(step->trace.ops[last].device_ns >= 70000); /* before the next step */
    scene_free(s);
}

/* ---- where steps end --------------------------------------------------------------------- */

TEST(two_optimizers_in_a_row_are_one_step) {
    scene *s = scene_new(&wide);
    for (int i = 0; i < 4; i++) {
        forward(s, &small);
        backward(s, &small);
        optimize(s, &small);
        optimize(s, &small);
    }
    tp_steps_settle(&s->steps);
    EXPECT_EQ(s->steps.count, 1);
    EXPECT_EQ(tp_steps_last(&s->steps)->trace.op_count, 20 * 6);
    scene_free(s);
}

TEST(a_step_that_is_asked_for_counts_alone) {
    scene *s = scene_new(&wide);
    for (int i = 0; i < 6; i++) {
        train(s, &small);
        train(s, &small);
        tp_steps_mark(&s->steps, TP_STEP_ASKED);
    }
    /* The very first optimizer's step came before anything was asked for. */
    EXPECT_EQ(tp_steps_last(&s->steps)->trace.op_count, 2 * 20 * 5);
    scene_free(s);
}

static uint32_t ops_until_known(scene *s, const network *n, uint32_t times) {
    uint64_t before = s->steps.record.ops_before + s->steps.record.op_count;
    for (uint32_t i = 0; i < times; i++) {
        forward(s, n);
        if (tp_steps_last(&s->steps) != NULL) break;
    }
    return (uint32_t)(s->steps.record.ops_before + s->steps.record.op_count - before);
}

TEST(a_period_is_found_without_marks) {
    scene *s = scene_new(&wide);
    const network inference = {.first = 1, .layers = 100, .size = 5000};
    const uint32_t ops = ops_until_known(s, &inference, 20);
    EXPECT(ops <= 6 * 200);
    const tp_step *step = tp_steps_last(&s->steps);
    MUST(step != NULL);
    EXPECT_EQ(step->trace.op_count, 200);
    for (int i = 0; i < 10; i++) forward(s, &inference);
    EXPECT(step->completed_count >= 10);
    EXPECT_EQ(s->steps.count, 1);
    EXPECT_EQ(tp_steps_where(&s->steps).lost, false);
    EXPECT(tp_steps_where(&s->steps).exact);
    scene_free(s);
}

/* Layers that are alike but for their weights are no steps. */
TEST(a_layer_is_not_taken_for_a_step) {
    scene *s = scene_new(&wide);
    const network inference = {.first = 1, .layers = 400, .size = 5000};
    (void)ops_until_known(s, &inference, 10);
    const tp_step *step = tp_steps_last(&s->steps);
    MUST(step != NULL);
    EXPECT_EQ(step->trace.op_count, 800);
    scene_free(s);
}

/* A prompt is worked on, then token after token; then the next prompt. */
TEST(generation_finds_its_way_back_after_each_prompt) {
    scene *s = scene_new(&wide);
    const network token = {.first = 1, .layers = 60, .size = 3000};
    const network prompt = {.first = 1, .layers = 60, .size = 90000};
    for (int k = 0; k < 6; k++) {
        forward(s, &prompt);
        for (int i = 0; i < 12; i++) forward(s, &token);
    }
    EXPECT(s->steps.count <= 3);
    const tp_step *step = tp_steps_last(&s->steps);
    MUST(step != NULL);
    EXPECT_EQ(step->trace.op_count, 120);
    EXPECT(step->completed_count > 30);
    scene_free(s);
}

/* What training repeats before its first optimizer step is no step. */
TEST(training_is_not_divided_before_its_first_mark) {
    scene *s = scene_new(&wide);
    forward(s, &small);
    backward(s, &small);
    tp_identity *weight[1] = {&s->weights[1]};
    for (uint32_t i = 0; i < 600; i++) (void)run(s, 6 + i % 12, false, weight, 1, NULL, 0);
    EXPECT_EQ(s->steps.count, 0);
    optimize(s, &small);
    train(s, &small);
    train(s, &small);
    tp_steps_settle(&s->steps);
    EXPECT(tp_steps_last(&s->steps)->completed_count >= 1);
    EXPECT_EQ(tp_steps_last(&s->steps)->trace.op_count, 5 * small.layers);
    scene_free(s);
}

/* A few operators that come twice prove nothing, whatever follows. */
TEST(a_run_that_comes_twice_is_no_period) {
    tp_period period = {0};
    MUST(tp_period_reset(&period));
    uint32_t fresh = 1000;
    for (int round = 0; round < 2; round++) {
        for (uint32_t i = 0; i < TP_PERIOD_GRAM; i++)
            EXPECT_EQ(tp_period_op(&period, i + 1, true), 0);
        const int others = round == 0 ? 13 : 500;
        for (int i = 0; i < others; i++) EXPECT_EQ(tp_period_op(&period, fresh++, true), 0);
    }
    tp_period_fini(&period);
}

/* Where a program comes back to a step it knows, what it did before is not one. */
TEST(what_comes_before_a_known_step_is_not_remembered) {
    scene *s = scene_new(&wide);
    const network token = {.first = 1, .layers = 60, .size = 3000};
    for (int i = 0; i < 12; i++) forward(s, &token);
    const uint32_t count = s->steps.count;
    const tp_step *step = tp_steps_last(&s->steps);
    MUST(step != NULL);
    const uint64_t completed = step->completed_count;
    tp_identity *weight[1] = {&s->weights[1]};
    for (uint32_t k = 0; k < 20; k++) {
        for (uint32_t i = 0; i < 10 + 3 * k; i++)
            (void)run(s, 100 + 64 * k + i, false, weight, 1, NULL, 0);
        forward_part(s, &token, 0, 1);
        forward_part(s, &token, 40, token.layers);
        tp_steps_freed(&s->steps, &s->activations[token.layers - 1]);
        for (int i = 0; i < 3; i++) forward(s, &token);
    }
    EXPECT_EQ(s->steps.count, count);
    EXPECT(step->completed_count >= completed + 40);
    scene_free(s);
}

/* ---- kinds, and finding the way back ----------------------------------------------------- */

/* Where the program stands in the last operator of a part, and what fits. */
static void expect_at(const scene *s, const tp_step *step, uint32_t op) {
    const tp_position at = tp_steps_where(&s->steps);
    EXPECT(at.step == step);
    EXPECT_EQ(at.op, op);
    EXPECT(!at.lost);
}

TEST(an_evaluation_now_and_then_takes_nothing_away) {
    scene *s = scene_new(&wide);
    for (int i = 0; i < 3; i++) train(s, &small);
    tp_steps_settle(&s->steps);
    const tp_step *usual = tp_steps_last(&s->steps);
    const uint64_t number = usual->number;
    network evaluation = small;
    evaluation.train = false;
    for (int i = 0; i < 40; i++) {
        if (i % 5 == 4) {
            for (int k = 0; k < 1 + i / 5; k++) forward(s, &evaluation); /* never the same */
        }
        forward(s, &small);
        expect_at(s, usual, 39);
        backward(s, &small);
        expect_at(s, usual, 79);
        optimize(s, &small);
        expect_at(s, usual, 99);
    }
    tp_steps_settle(&s->steps);
    EXPECT(tp_steps_find(&s->steps, number) == usual);
    EXPECT(usual->completed_count >= 30);
    EXPECT(s->steps.count <= TP_KINDS_MAX);
    scene_free(s);
}

TEST(random_lengths_are_followed_along_the_nearest_kind) {
    scene *s = scene_new(&wide);
    uint64_t random = test_seed();
    uint32_t followed = 0;
    const uint32_t rounds = 60;
    for (uint32_t i = 0; i < rounds; i++) {
        network n = small;
        n.size = 50000 + test_random_below(&random, 200000);
        train(s, &n);
        const tp_position at = tp_steps_where(&s->steps);
        followed += at.step != NULL && at.op == 99 && !at.lost;
        tp_steps_settle(&s->steps);
    }
    EXPECT(followed >= rounds - 2);
    EXPECT(s->steps.count <= TP_KINDS_MAX);
    EXPECT(s->steps.lost_count == 0);
    scene_free(s);
}

/* Each more than a sixteenth longer than the one before. */
static uint64_t length_size(uint32_t length) {
    uint64_t size = 50000;
    for (uint32_t i = 0; i < length; i++) size += size / 8;
    return size;
}

TEST(sizes_tell_at_once_of_what_kind_a_step_is) {
    enum { LENGTHS = 20 };
    scene *s = scene_new(&wide);
    network n = small;
    const tp_step *kinds[LENGTHS] = {NULL};
    for (int i = 0; i < 2 * LENGTHS; i++) {
        n.size = length_size((uint32_t)i % LENGTHS);
        train(s, &n);
        tp_steps_settle(&s->steps);
        kinds[i % LENGTHS] = tp_steps_last(&s->steps);
    }
    EXPECT_EQ(s->steps.count, LENGTHS);
    uint64_t random = test_seed();
    for (unsigned i = 0; i < 40; i++) {
        const uint32_t length = (uint32_t)test_random_below(&random, LENGTHS);
        n.size = length_size(length);
        /* The first operator knows weights only, the second has an operand of the length. */
        forward_part(s, &n, 0, 1);
        EXPECT(tp_steps_where(&s->steps).step == kinds[length]);
        forward_part(s, &n, 1, n.layers);
        backward(s, &n);
        optimize(s, &n);
        tp_steps_settle(&s->steps);
        for (int k = 0; k < LENGTHS; k++) EXPECT(tp_steps_find(&s->steps, kinds[k]->number));
    }
    scene_free(s);
}

TEST(two_models_in_turn_are_two_kinds) {
    scene *s = scene_new(&wide);
    const network models[2] = {small,
                               {.first = 100, .layers = 33, .size = 40000, .train = true}};
    const tp_step *kinds[2] = {NULL, NULL};
    for (int i = 0; i < 20; i++) {
        const network *n = &models[i % 2];
        forward(s, n);
        if (i >= 6) expect_at(s, kinds[i % 2], 2 * n->layers - 1);
        backward(s, n);
        optimize(s, n);
        tp_steps_settle(&s->steps);
        if (i >= 4) kinds[i % 2] = tp_steps_last(&s->steps);
        if (i >= 6) EXPECT(tp_steps_where(&s->steps).step == kinds[(i + 1) % 2]);
    }
    EXPECT_EQ(s->steps.count, 2);
    EXPECT(kinds[0] != kinds[1]);
    EXPECT(tp_steps_expected(&s->steps, kinds[0]) == kinds[1]);
    EXPECT(tp_steps_expected(&s->steps, kinds[1]) == kinds[0]);
    scene_free(s);
}

/* Operators more, operators less, in the middle of the step: a few later it is found again. */
TEST(what_is_inserted_or_left_out_is_passed_over) {
    scene *s = scene_new(&wide);
    for (int i = 0; i < 3; i++) train(s, &small);
    tp_steps_settle(&s->steps);
    const tp_step *usual = tp_steps_last(&s->steps);
    for (uint32_t extra = 1; extra < 40; extra += 6) {
        forward(s, &small);
        for (uint32_t i = 0; i < extra; i++) {
            tp_identity *weight = &s->weights[200 + i];
            (void)run(s, 50 + i + 64 * extra, false, &weight, 1, NULL, 0);
        }
        EXPECT_EQ(tp_steps_where(&s->steps).lost, extra >= TP_ASTRAY_MAX);
        backward(s, &small);
        expect_at(s, usual, 79);
        optimize(s, &small);
    }
    network shorter = small; /* the optimizer passes over some */
    forward(s, &small);
    backward(s, &small);
    shorter.first += 9;
    shorter.layers -= 9;
    optimize(s, &shorter);
    expect_at(s, usual, 99);
    scene_free(s);
}

/* Layers that are alike in everything but their weights, four operators each. */
static void run_layers(scene *s, uint32_t from, uint32_t to) {
    for (uint32_t i = from; i < to; i++) {
        tp_identity *operand[1] = {&s->weights[1 + i]};
        (void)run(s, 1, false, operand, 1, NULL, 0);
        for (uint32_t name = 2; name <= 4; name++) (void)run(s, name, false, NULL, 0, NULL, 0);
    }
}

TEST(a_layer_is_found_by_its_weights) {
    scene *s = scene_new(&wide);
    const uint32_t layers = 60;
    for (int i = 0; i < 4; i++) {
        run_layers(s, 0, layers);
        tp_steps_mark(&s->steps, TP_STEP_ASKED);
    }
    const tp_step *step = tp_steps_last(&s->steps);
    MUST(step != NULL);
    /* Far ahead, a little back, and behind operators of other kinds. */
    const uint32_t parts[][2] = {{0, 3}, {50, 53}, {48, 51}, {5, 8}, {40, 44}};
    for (size_t i = 0; i < sizeof parts / sizeof *parts; i++) {
        if (i == 3)
            for (uint32_t k = 0; k < 20; k++) (void)run(s, 70 + k, false, NULL, 0, NULL, 0);
        run_layers(s, parts[i][0], parts[i][1]);
        expect_at(s, step, 4 * parts[i][1] - 1);
    }
    scene_free(s);
}

TEST(memory_is_bounded_whatever_the_program_does) {
    const tp_record_limits narrow = {.ops = 300, .uses = 1000, .storages = 700};
    scene *s = scene_new(&narrow);
    uint64_t random = test_seed();
    for (unsigned i = 0; i < test_rounds(200); i++) {
        network n = {.first = 1 + (uint32_t)test_random_below(&random, 50),
                     .layers = 1 + (uint32_t)test_random_below(&random, 120),
                     .size = 1000 + test_random_below(&random, 100000),
                     .train = test_random_below(&random, 3) > 0};
        if (n.train) {
            train(s, &n);
        } else {
            forward(s, &n);
        }
        EXPECT(s->steps.record.op_capacity <= narrow.ops);
        EXPECT(s->steps.record.use_capacity <= narrow.uses);
        EXPECT(s->steps.record.storage_capacity <= narrow.storages);
        EXPECT(s->steps.count <= TP_KINDS_MAX);
        size_t bytes = 0;
        for (uint32_t k = 0; k < s->steps.count; k++)
            bytes += s->steps.at[k] != NULL ? s->steps.at[k]->bytes : 0;
        EXPECT_EQ(s->steps.bytes, bytes);
        for (uint32_t k = 0; k < s->steps.count; k++) {
            const tp_step *step = s->steps.at[k];
            EXPECT_OK(tp_trace_check(&step->trace, &test_error));
            for (uint32_t b = 0; b < step->trace.block_count; b++) {
                const tp_identity *live = tp_steps_live(step, b);
                if (live != NULL) EXPECT_EQ(tp_steps_block(step, live), b);
            }
        }
    }
    scene_free(s);
}

TEST(long_steps_are_remembered_as_far_as_memory_goes) {
    enum { LAYERS = 40 };
    scene *s = scene_new(&wide);
    network n = {.first = 1, .layers = LAYERS, .size = 1000, .train = true};
    train(s, &n);
    train(s, &n);
    tp_steps_settle(&s->steps);
    const size_t each = s->steps.bytes;
    EXPECT(each > 0 && each < 5 * LAYERS * 400); /* what the header says, and room to spare */
    s->steps.bytes_max = 4 * each + each / 2;
    for (uint32_t i = 0; i < 12; i++) {
        n.size = 1000 + 5000 * (uint64_t)i;
        train(s, &n);
        tp_steps_settle(&s->steps);
        EXPECT(s->steps.bytes <= s->steps.bytes_max);
    }
    uint32_t count = 0;
    for (uint32_t k = 0; k < s->steps.count; k++) count += s->steps.at[k] != NULL;
    EXPECT_EQ(count, 4);
    scene_free(s);
}

TEST(in_steady_state_nothing_is_allocated) {
    scene *s = scene_new(&wide);
    for (int i = 0; i < 4; i++) train(s, &small);
    const tp_record before = s->steps.record;
    const tp_step *step = s->steps.at[0];
    for (int i = 0; i < 20; i++) train(s, &small);
    EXPECT(s->steps.record.ops == before.ops && s->steps.record.uses == before.uses);
    EXPECT(s->steps.record.storages == before.storages);
    EXPECT_EQ(s->steps.number, 1); /* no step was built anew */
    EXPECT(s->steps.at[0] == step && s->steps.at[1] == NULL);
    scene_free(s);
}

/* ---- what the executor asks -------------------------------------------------------------- */

TEST(blocks_are_known_by_their_ordinal) {
    scene *s = scene_new(&wide);
    for (int i = 0; i < 3; i++) train(s, &small);
    tp_steps_settle(&s->steps);
    const tp_step *step = tp_steps_last(&s->steps);
    /* Every weight that is used keeps its number. */
    for (uint32_t i = 1; i <= 20; i++) {
        const uint32_t block = tp_steps_block(step, &s->weights[i]);
        MUST(block != TP_NO_OP);
        EXPECT_EQ(step->trace.blocks[block].bytes, 1000 + i);
        EXPECT(tp_steps_live(step, block) == &s->weights[i]);
    }
    EXPECT_EQ(tp_steps_block(step, &s->activations[0]), TP_NO_OP);
    forward(s, &small);
    for (uint32_t i = 0; i < 20; i++) {
        EXPECT_EQ(tp_steps_block(step, &s->activations[i]), WEIGHTS + i);
        EXPECT(tp_steps_live(step, WEIGHTS + i) == &s->activations[i]);
    }
    backward(s, &small);
    for (uint32_t i = 0; i < 20; i++) EXPECT(tp_steps_live(step, WEIGHTS + i) == NULL);
    scene_free(s);
}

TEST(the_next_use_may_be_in_the_next_step) {
    scene *s = scene_new(&wide);
    for (int i = 0; i < 3; i++) train(s, &small);
    tp_steps_settle(&s->steps);
    const tp_step *step = tp_steps_last(&s->steps);
    const uint32_t weight = tp_steps_block(step, &s->weights[1]); /* of the first layer */
    EXPECT_EQ(tp_steps_next_use(step, weight, 0), 0);
    EXPECT_EQ(tp_steps_next_use(step, weight, 1), 78);
    EXPECT_EQ(tp_steps_next_use(step, weight, 79), 79);
    EXPECT_EQ(tp_steps_next_use(step, weight, 80), 80);
    EXPECT_EQ(tp_steps_next_use(step, weight, 81), 100 + 0);
    EXPECT_EQ(tp_steps_next_use(step, WEIGHTS, 2), 2); /* what the first layer made */
    EXPECT_EQ(tp_steps_next_use(step, WEIGHTS, 80), TP_NO_OP);
    const uint32_t unused = tp_steps_block(step, &s->weights[500]);
    EXPECT_EQ(tp_steps_next_use(step, unused, 0), TP_NO_OP);
    scene_free(s);
}

/* Recording stops when offload is switched off, and begins again. */
TEST(what_is_remembered_outlives_a_pause) {
    scene *s = scene_new(&wide);
    for (int i = 0; i < 3; i++) train(s, &small);
    tp_steps_settle(&s->steps);
    const tp_step *step = tp_steps_last(&s->steps);
    tp_steps_stop(&s->steps);
    EXPECT_EQ(tp_steps_block(step, &s->weights[1]), TP_NO_OP);
    tp_steps_mark(&s->steps, TP_STEP_OPTIMIZER_END);
    MUST(tp_steps_start(&s->steps));
    for (uint32_t i = 0; i < WEIGHTS; i++) tp_steps_born(&s->steps, &s->weights[i], 1000 + i);
    for (int i = 0; i < 2; i++) train(s, &small);
    tp_steps_settle(&s->steps);
    EXPECT_EQ(s->steps.count, 1);
    EXPECT(tp_steps_block(step, &s->weights[1]) != TP_NO_OP);
    EXPECT_EQ(step->completed_count, 3);
    scene_free(s);
}

/* ---- through the core -------------------------------------------------------------------- */

enum { BLOCKS = 12, BLOCK_BYTES = 64 * 1024, KERNEL_NS = 70000 };

static void nothing(tp_device *dev, void *arg) {
    (void)dev;
    (void)arg;
}

/* Reads a weight and makes a temporary, over and over. */
static void core_step(rig *r, const tp_addr *weights, tp_stream stream) {
    for (uint32_t i = 0; i < BLOCKS; i++) {
        const tp_access access = {weights[i], false};
        tp_op op = {.name = tp_op_name("test::reads."), .backward = i >= BLOCKS / 2};
        tp_op_begin(r->core, &op, &access, 1, stream);
        tp_addr made = 0;
        const tp_status status = tp_alloc(r->core, BLOCK_BYTES / 2, stream, TP_ALLOC_PINNED,
                                          &made, NULL, &test_error);
        if (EXPECT(status == TP_OK)) tp_op_adopt(&op, made);
        EXPECT_OK(tp_sim_launch(r->sim, stream, nothing, NULL, KERNEL_NS, &test_error));
        tp_op_end(&op, &made, 1, NULL);
        tp_op_fini(&op);
        if (status == TP_OK) tp_free(r->core, made);
    }
}

typedef struct seen {
    uint32_t ops, blocks;
    uint64_t first_ns, number;
    bool valid;
} seen;

static void look_at(void *ctx, const tp_step *step) {
    *(seen *)ctx = (seen){.ops = step->trace.op_count,
                          .blocks = step->trace.block_count,
                          .first_ns = step->trace.ops[0].device_ns,
                          .number = step->number,
                          .valid = tp_trace_check(&step->trace, NULL) == TP_OK};
}

static void open_with_weights(rig *r, tp_addr *weights) {
    rig_open(r, &(rig_options){.budget_bytes = 8 * BLOCK_BYTES});
    for (uint32_t i = 0; i < BLOCKS; i++) weights[i] = rig_alloc(r, BLOCK_BYTES, 0);
    (void)tp_evict_all(r->core); /* which arms it */
}

TEST(the_core_records_operators_and_their_times) {
    rig r;
    tp_addr weights[BLOCKS];
    open_with_weights(&r, weights);
    seen it = {0};
    EXPECT(!tp_last_step(r.core, look_at, &it));
    for (int i = 0; i < 8; i++) {
        core_step(&r, weights, r.streams[0]);
        rig_drain(&r);
        tp_mark_step(r.core, TP_STEP_ASKED);
    }
    MUST(tp_last_step(r.core, look_at, &it));
    EXPECT(it.valid);
    EXPECT_EQ(it.ops, BLOCKS);
    EXPECT_EQ(it.blocks, 2 * BLOCKS);
    /* Of the virtual clock, which ticks in ns. */
    EXPECT(it.first_ns >= KERNEL_NS - 1 && it.first_ns < 2 * KERNEL_NS);
    EXPECT_OK(tp_core_check(r.core, &test_error));
    MUST_OK(tp_core_set_offload(r.core, false, &test_error));
    rig_op(&r, 0, weights[0], BLOCK_BYTES, 1, true); /* disarmed: nothing is recorded */
    tp_mark_step(r.core, TP_STEP_ASKED);
    seen later = {0};
    EXPECT(tp_last_step(r.core, look_at, &later));
    EXPECT_EQ(later.number, it.number);
    rig_close(&r);
}

static void born_where(void *ctx, const tp_step *step) {
    for (uint32_t i = 0; i < step->trace.block_count; i++) {
        const tp_trace_block *block = &step->trace.blocks[i];
        if (block->bytes == BLOCK_BYTES / 2) *(uint32_t *)ctx = block->born_op;
    }
}

static _Thread_local uint64_t calls_here;
static void count_here(void *arg) {
    (void)arg;
    calls_here++;
}

/* A collective's work outlives its operator: by then the stream may be another's, or gone. */
TEST(work_that_goes_on_is_no_operator_any_more) {
    rig r;
    tp_addr weights[BLOCKS];
    open_with_weights(&r, weights);
    fault_device_before(r.dev, FAULT_EVENT_RECORD, count_here, NULL);
    for (int i = 0; i < 5; i++) {
        const tp_access access = {weights[0], true};
        tp_op op = {.name = tp_op_name("c10d::allreduce_.")};
        tp_op_begin(r.core, &op, &access, 1, r.streams[0]);
        tp_op_detach(&op, NULL);
        rig_op(&r, 0, weights[1], BLOCK_BYTES, 1, true);
        const tp_addr made = rig_alloc(&r, BLOCK_BYTES / 2, 0);
        rig_op(&r, 0, made, BLOCK_BYTES / 2, 2, true);
        tp_free(r.core, made);
        const uint64_t before = calls_here; /* the pager's thread has copies to mark */
        tp_op_end(&op, NULL, 0, NULL);
        EXPECT_EQ(calls_here, before);
        tp_op_fini(&op);
        rig_drain(&r);
        tp_mark_step(r.core, TP_STEP_ASKED);
    }
    uint32_t born = TP_NO_OP;
    MUST(tp_last_step(r.core, born_where, &born));
    EXPECT_EQ(born, 2);
    rig_close(&r);
}

typedef struct worker {
    rig *r;
    const tp_addr *weights;
    tp_stream stream;
} worker;

static void *work(void *arg) {
    const worker *w = arg;
    for (int i = 0; i < 12; i++) {
        core_step(w->r, w->weights, w->stream);
        tp_mark_step(w->r->core, i % 3 == 2 ? TP_STEP_ASKED : TP_STEP_OPTIMIZER_END);
        seen it = {.valid = true};
        (void)tp_last_step(w->r->core, look_at, &it);
        EXPECT(it.valid);
    }
    return NULL;
}

TEST(threads_record_and_read_at_the_same_time) {
    rig r;
    tp_addr weights[BLOCKS];
    open_with_weights(&r, weights);
    pthread_t threads[3];
    worker workers[3];
    for (unsigned i = 0; i < 3; i++) {
        workers[i] = (worker){&r, weights, r.streams[i]};
        MUST(pthread_create(&threads[i], NULL, work, &workers[i]) == 0);
    }
    for (unsigned i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    EXPECT_OK(tp_core_check(r.core, &test_error));
    rig_close(&r);
}
