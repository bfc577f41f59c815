/* A core without a thread over the simulated device in the order of time: repeatable to the
 * nanosecond, right contents, and patience in virtual time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/lock.h"
#include "device/device_sim.h"
#include "fault_device.h"
#include "harness.h"
#include "tp.h"

enum { GRANULE = 4096, EXTENT = 16384, BLOCKS = 24, STRIDE = 512, ACTS = 400 };

typedef struct program {
    tp_device *dev;
    tp_core *core;
    tp_stream streams[2];
    tp_event events[2];
    tp_addr addrs[BLOCKS];
    size_t bytes[BLOCKS];
    uint64_t values[BLOCKS];
    uint64_t random, next_value, trail; /* trail: of all that the clock has shown */
    unsigned wrong;
    bool payload, rule_off;
} program;

typedef struct options {
    uint64_t seed;
    size_t budget_bytes;
    bool payload, wrapped;
    uint32_t rules_off;
    tp_hooks hooks;
} options;

static program open_program(const options *o) {
    program p = {.random = o->seed, .payload = o->payload, .rule_off = o->rules_off != 0};
    const tp_sim_options sim = {.device_bytes = 4 * TP_MIB,
                                .granularity_bytes = GRANULE,
                                .time_ordered = true,
                                .no_payload = !o->payload,
                                .poison = true,
                                .link_bytes_per_s = 1000000000,
                                .duplex_bytes_per_s = 1500000000};
    MUST_OK(tp_sim_device_create(&sim, &p.dev, &test_error));
    for (int i = 0; i < 2; i++) {
        MUST_OK(tp_sim_stream_create(p.dev, &p.streams[i], &test_error));
        MUST_OK(p.dev->ops->event_create(p.dev, &p.events[i], &test_error));
    }
    tp_device *dev = p.dev;
    if (o->wrapped) MUST_OK(fault_device_create(p.dev, &dev, &test_error));
    const tp_config config = {.device_budget_bytes = o->budget_bytes,
                              .host_budget_bytes = TP_NO_LIMIT,
                              .large_min_bytes = GRANULE,
                              .extent_max_bytes = EXTENT,
                              .segment_bytes = 16 * TP_MIB,
                              .offload = true,
                              .no_thread = true,
                              .rules_off = o->rules_off,
                              .hooks = o->hooks};
    MUST_OK(tp_core_create(&config, dev, &p.core, &test_error));
    return p;
}

static void close_program(program *p) {
    while (tp_sim_step(p->dev)) continue;
    EXPECT_OK(tp_core_check(p->core, &test_error));
    for (int i = 0; i < 2; i++) p->dev->ops->event_destroy(p->dev, p->events[i]);
    tp_core_destroy(p->core);
}

/* A missing rule may break the device itself, which answers nothing but errors from then on. */
static bool works(program *p, tp_status status) {
    if (status != TP_OK && p->rule_off)
        p->wrong++;
    else
        MUST_OK(status);
    return status == TP_OK;
}

static void alloc(program *p, unsigned idx, size_t bytes) {
    if (!works(p,
               tp_alloc(p->core, bytes, p->streams[0], 0, &p->addrs[idx], NULL, &test_error)))
        return;
    p->bytes[idx] = bytes;
    p->values[idx] = 0;
}

typedef struct kernel {
    program *p;
    tp_addr addr;
    size_t bytes;
    uint64_t found, left;
} kernel;

static void kernel_run(tp_device *dev, void *arg) {
    kernel *k = arg;
    if (!tp_sim_mapped(dev, k->addr, k->bytes)) k->p->wrong++;
    for (size_t at = 0; at < k->bytes && k->p->payload; at += STRIDE) {
        uint64_t word = 0;
        if (!tp_sim_read(dev, k->addr + at, &word, sizeof word)) k->p->wrong++;
        if (k->found != 0 && word != k->found + at) k->p->wrong++;
        word = k->left + at;
        if (k->left != 0) (void)tp_sim_write(dev, k->addr + at, &word, sizeof word);
    }
    free(k);
}

static void nothing(tp_device *dev, void *arg) {
    (void)dev;
    (void)arg;
}

/* A stream begins behind all work of the other one. */
static void order(program *p, unsigned stream) {
    const tp_device_ops *ops = p->dev->ops;
    const tp_event event = p->events[1 - stream];
    if (works(p, ops->event_record(p->dev, event, p->streams[1 - stream], &test_error)))
        works(p, ops->stream_wait(p->dev, p->streams[stream], event, &test_error));
}

static void op(program *p, unsigned idx, unsigned stream, bool write, uint64_t ns) {
    const tp_access access = {p->addrs[idx], write};
    tp_op it = {.name = tp_op_name("aten::mul_.Tensor")};
    tp_op_begin(p->core, &it, &access, 1, p->streams[stream]);
    kernel *k = malloc(sizeof *k);
    MUST(k != NULL);
    *k = (kernel){p, p->addrs[idx], p->bytes[idx], p->values[idx], 0};
    if (write) k->left = p->values[idx] = p->next_value += UINT64_C(0x0101010101010101);
    if (!works(p, tp_sim_launch(p->dev, p->streams[stream], kernel_run, k, ns, &test_error)))
        free(k);
    tp_op_end(&it, NULL, 0, NULL);
    tp_op_fini(&it);
}

static void act(program *p) {
    const unsigned idx = (unsigned)test_random_below(&p->random, BLOCKS);
    const unsigned stream = test_random_below(&p->random, 8) == 0 ? 1 : 0;
    if (p->addrs[idx] == 0) {
        alloc(p, idx, (1 + test_random_below(&p->random, 12)) * GRANULE);
        if (p->addrs[idx] != 0) op(p, idx, 0, true, 1000);
    } else if (test_random_below(&p->random, 6) == 0) {
        tp_free(p->core, p->addrs[idx]);
        p->addrs[idx] = 0;
    } else {
        if (stream == 1) order(p, 1);
        op(p, idx, stream, test_random_below(&p->random, 2) == 0,
           test_random_below(&p->random, 40000));
        if (stream == 1) order(p, 0);
    }
    p->trail = p->trail * 31 + p->dev->ops->clock_ns(p->dev);
}

typedef struct outcome {
    uint64_t trail, clock_ns, to_host_bytes, to_device_bytes, maps;
    tp_stats stats;
    unsigned wrong;
} outcome;

static outcome run_program(const options *o) {
    program p = open_program(o);
    for (int i = 0; i < ACTS && p.wrong == 0; i++) act(&p);
    outcome out;
    memset(&out, 0, sizeof out);
    out.trail = p.trail;
    out.clock_ns = tp_sim_clock_ns(p.dev);
    tp_sim_counts counts;
    tp_sim_get_counts(p.dev, &counts);
    out.to_host_bytes = counts.bytes_to_host;
    out.to_device_bytes = counts.bytes_to_device;
    out.maps = counts.maps;
    tp_core_stats(p.core, &out.stats);
    close_program(&p);
    out.wrong = p.wrong;
    return out;
}

static void expect_same(const outcome *a, const outcome *b) {
    EXPECT_EQ(a->trail, b->trail);
    EXPECT_EQ(a->clock_ns, b->clock_ns);
    EXPECT_EQ(a->to_host_bytes, b->to_host_bytes);
    EXPECT_EQ(a->to_device_bytes, b->to_device_bytes);
    EXPECT_EQ(a->maps, b->maps);
    EXPECT_EQ(a->stats.evictions.count, b->stats.evictions.count);
    EXPECT_EQ(a->stats.misses.count, b->stats.misses.count);
    EXPECT_EQ(a->stats.stalls.count, b->stats.stalls.count);
    EXPECT_EQ(a->stats.stalls.ns, b->stats.stalls.ns);
    EXPECT_EQ(a->stats.memory_stalls.ns, b->stats.memory_stalls.ns);
    EXPECT_EQ(a->stats.fingerprints.count, b->stats.fingerprints.count);
}

TEST(paging_without_a_thread_repeats_to_the_nanosecond) {
    for (unsigned i = 0; i < test_rounds(10); i++) {
        options o = {.seed = test_seed() + i, .budget_bytes = 192 * TP_KIB, .payload = true};
        const outcome first = run_program(&o), second = run_program(&o);
        EXPECT(first.stats.evictions.count > 0 && first.stats.misses.count > 0);
        EXPECT(first.clock_ns > 0 && first.stats.stalls.ns > 0);
        EXPECT_EQ(first.wrong, 0);
        expect_same(&first, &second);
        o.payload = false; /* contents have no part in it */
        const outcome bare = run_program(&o);
        EXPECT_EQ(bare.wrong, 0);
        expect_same(&first, &bare);
        o.wrapped = true;
        const outcome wrapped = run_program(&o);
        expect_same(&first, &wrapped);
    }
}

#if TP_DEBUG
static unsigned wrong_without(uint32_t rule, bool payload) {
    unsigned wrong = 0;
    for (unsigned i = 0; i < 20 && wrong == 0; i++) {
        const options o = {.seed = test_seed() + i,
                           .budget_bytes = 192 * TP_KIB,
                           .payload = payload,
                           .rules_off = rule};
        wrong = run_program(&o).wrong;
    }
    return wrong;
}

TEST(kernels_find_what_a_missing_rule_breaks) {
    EXPECT(wrong_without(TP_RULE_FILL_COMPLETE, true) > 0);
    EXPECT(wrong_without(TP_RULE_OLD_MAPPING, true) > 0);
    EXPECT(wrong_without(TP_RULE_OLD_MAPPING, false) > 0); /* nothing is mapped there */
}
#endif

TEST(program_that_fits_takes_no_longer_than_its_kernels) {
    options o = {.budget_bytes = 2 * TP_MIB};
    program p = open_program(&o);
    for (unsigned i = 0; i < BLOCKS; i++) {
        alloc(&p, i, 4 * GRANULE);
        op(&p, i, 0, true, 1000);
    }
    EXPECT_EQ(tp_sim_clock_ns(p.dev), 0); /* nobody has waited yet */
    while (tp_sim_step(p.dev)) continue;
    EXPECT_EQ(tp_sim_clock_ns(p.dev), 1000 * BLOCKS);
    EXPECT_EQ(p.wrong, 0);
    close_program(&p);
}

/* Room for two of three blocks; the link carries a byte in a ns. */
TEST(allocation_waits_for_exactly_one_write_back) {
    options o = {.budget_bytes = 2 * EXTENT};
    program p = open_program(&o);
    for (unsigned i = 0; i < 2; i++) {
        alloc(&p, i, EXTENT);
        op(&p, i, 0, true, 100000);
    }
    alloc(&p, 2, EXTENT);
    /* While nobody waited for memory operators left no markers of their own: the copy begins behind
     * both kernels. A fingerprint goes before it and another behind it, 8.192 ns each. */
    const uint64_t ns = 200000 + 8 + EXTENT + 8;
    EXPECT_EQ(tp_sim_clock_ns(p.dev), ns);
    tp_stats stats;
    tp_core_stats(p.core, &stats);
    EXPECT_EQ(stats.write_backs.count, 1);
    EXPECT_EQ(stats.memory_stalls.count, 1);
    EXPECT_EQ(stats.memory_stalls.ns, ns);
    close_program(&p);
}

static void count_arming(void *ctx, tp_arming level) {
    unsigned *count = ctx;
    if (level == TP_ARM_FULL) ++*count;
}

TEST(grace_of_a_new_hook_passes_in_virtual_time) {
    unsigned armed = 0;
    options o = {.budget_bytes = 2 * EXTENT, .hooks = {.ctx = &armed, .arm = count_arming}};
    program p = open_program(&o);
    const uint64_t began = tp_now_ns();
    for (unsigned i = 0; i < 3; i++) {
        alloc(&p, i, EXTENT);
        op(&p, i, 0, true, 1000);
    }
    EXPECT_EQ(armed, 1);
    /* 20 ms from the arming; what little happens before is above it. */
    const uint64_t clock = tp_sim_clock_ns(p.dev);
    EXPECT(clock >= 20000000 && clock < 23000000);
    EXPECT(tp_now_ns() - began < 15000000 || TP_DEBUG > 0);
    close_program(&p);
}

TEST(wait_of_a_tool_lets_time_pass_and_the_pager_work) {
    options o = {.budget_bytes = 2 * EXTENT};
    program p = open_program(&o);
    alloc(&p, 0, EXTENT);
    op(&p, 0, 0, true, 5000);
    tp_core_pass_time(p.core, 2000);
    EXPECT_EQ(tp_sim_clock_ns(p.dev), 2000);
    tp_core_pass_time(p.core, 10000);
    EXPECT_EQ(tp_sim_clock_ns(p.dev), 5000);
    EXPECT_OK(tp_core_set_offload(p.core, true, &test_error));
    EXPECT_EQ(tp_evict_all(p.core), EXTENT);
    EXPECT(tp_sim_clock_ns(p.dev) >= 5000 + EXTENT);
    close_program(&p);
}

TEST(pager_goes_on_behind_each_operator) {
    options o = {.budget_bytes = 16 * EXTENT};
    program p = open_program(&o);
    for (unsigned i = 0; i < 18; i++) {
        alloc(&p, i, EXTENT);
        op(&p, i, 0, true, 1000);
    }
    /* Memory is being kept free ahead; what the device has done meanwhile is noticed by nobody. */
    while (tp_sim_step(p.dev)) continue;
    tp_stats before, after;
    tp_core_stats(p.core, &before);
    op(&p, 17, 0, false, 1000);
    tp_core_stats(p.core, &after);
    EXPECT_EQ(before.evictions.count, 2);
    EXPECT(after.fingerprints.count > before.fingerprints.count);
    EXPECT_EQ(after.stalls.count, before.stalls.count);
    close_program(&p);
}

enum { LAYERS = BLOCKS / 2 };

/* Weights are the first half of the blocks, results the second. Back as far as layer `until`. */
static void train(program *p, uint64_t ns, unsigned until) {
    for (unsigned i = 0; i < LAYERS; i++) {
        op(p, i, 0, false, ns);
        alloc(p, LAYERS + i, EXTENT);
        op(p, LAYERS + i, 0, true, ns);
    }
    for (unsigned i = LAYERS; i-- > until;) {
        op(p, LAYERS + i, 0, false, ns);
        op(p, i, 0, true, ns);
        tp_free(p->core, p->addrs[LAYERS + i]);
        p->addrs[LAYERS + i] = 0;
    }
}

/* In place: what is queued refers to the program. */
static void train_until_planned(program *p) {
    for (unsigned i = 0; i < LAYERS; i++) {
        alloc(p, i, EXTENT);
        op(p, i, 0, true, 1000);
    }
    for (unsigned i = 0; i < 8; i++) {
        train(p, 40000, 0);
        tp_mark_step(p->core, TP_STEP_ASKED);
    }
}

TEST(block_that_goes_before_its_planned_write_back_leaves_nothing_wanted) {
    options o = {.budget_bytes = BLOCKS / 2 * EXTENT, .payload = true};
    program p = open_program(&o);
    train_until_planned(&p);
    tp_stats stats;
    tp_core_stats(p.core, &stats);
    EXPECT(stats.plans.count > 0);
    train(&p, 1000, LAYERS / 2); /* faster than planned: write-backs wait for the link */
    for (unsigned i = 0; i < LAYERS; i++) {
        tp_free(p.core, p.addrs[i]);
        alloc(&p, i, EXTENT);
        EXPECT_OK(tp_core_check(p.core, &test_error));
    }
    EXPECT_EQ(p.wrong, 0);
    close_program(&p);
}

/* Results belong to an operator that encloses the step, as PyTorch's scratch tensors do: what the plan
 * evicts of them does not move before it ends. Another operator's work, which goes on for long, is what
 * an allocation would wait for, for 50 ms. */
TEST(eviction_that_an_enclosing_operator_keeps_back_is_no_memory_on_its_way) {
    options o = {.budget_bytes = (LAYERS + 2) * EXTENT};
    program p = open_program(&o);
    train_until_planned(&p);
    tp_addr far = 0;
    MUST_OK(tp_alloc(p.core, GRANULE, p.streams[0], 0, &far, NULL, &test_error));
    const tp_access access = {far, false};
    tp_op collective = {0}, outer = {0};
    tp_op_begin(p.core, &collective, &access, 1, p.streams[0]);
    tp_op_detach(&collective, NULL);
    tp_stats before, after;
    tp_core_stats(p.core, &before);
    tp_op_begin(p.core, &outer, NULL, 0, p.streams[0]);
    for (unsigned i = 0; i < LAYERS; i++) {
        op(&p, i, 0, false, 40000);
        MUST_OK(tp_alloc(p.core, EXTENT, p.streams[0], TP_ALLOC_PINNED, &p.addrs[LAYERS + i],
                         NULL, &test_error));
        tp_op_adopt(&outer, p.addrs[LAYERS + i]);
        p.bytes[LAYERS + i] = EXTENT;
        op(&p, LAYERS + i, 0, true, 40000);
    }
    tp_op_end(&outer, NULL, 0, NULL);
    tp_core_stats(p.core, &after);
    EXPECT(after.planned_ops > before.planned_ops);
    EXPECT_EQ(after.born_in_host, before.born_in_host);
    EXPECT(after.memory_stalls.ns - before.memory_stalls.ns < 20000000);
    tp_op_end(&collective, NULL, 0, NULL);
    tp_op_fini(&collective);
    tp_op_fini(&outer);
    close_program(&p);
}

/* Frames that are given up for a smaller budget are not taken for the fills of a plan. */
TEST(budget_that_shrinks_is_not_filled_by_the_plan) {
    options o = {.budget_bytes = (LAYERS + 2) * EXTENT};
    program p = open_program(&o);
    train_until_planned(&p);
    (void)tp_evict_all(p.core);
    train(&p, 40000, LAYERS - 2); /* the plan is behind, and wants much */
    tp_stats before, after;
    tp_core_stats(p.core, &before);
    EXPECT_OK(tp_core_set_budget(p.core, LAYERS / 2 * EXTENT, TP_NO_LIMIT, &test_error));
    tp_core_stats(p.core, &after);
    EXPECT(after.evictions.count > before.evictions.count);
    EXPECT_EQ(after.fills.count, before.fills.count);
    EXPECT(after.reserved.current <= LAYERS / 2 * EXTENT);
    close_program(&p);
}

/* What the program needs now goes before what its plan says that it will need. */
TEST(allocation_finds_memory_though_a_plan_is_filling_all_of_it) {
    options o = {.budget_bytes = LAYERS * EXTENT, .payload = true};
    program p = open_program(&o);
    train_until_planned(&p);
    (void)tp_evict_all(p.core);
    tp_stats stats;
    tp_core_stats(p.core, &stats);
    const uint64_t fills = stats.fills.count;
    const tp_access access = {p.addrs[0], false};
    tp_op it = {.name = tp_op_name("aten::mul_.Tensor")};
    tp_op_begin(p.core, &it, &access, 1, p.streams[0]); /* a step begins: all comes */
    alloc(&p, BLOCKS - 1, (LAYERS - 2) * EXTENT);
    tp_op_end(&it, NULL, 0, NULL);
    tp_op_fini(&it);
    tp_core_stats(p.core, &stats);
    EXPECT(stats.planned_ops > 0 && stats.fills.count > fills);
    EXPECT_EQ(stats.born_in_host, 0);
    EXPECT_EQ(p.wrong, 0);
    close_program(&p);
}

enum { WIDE = 6 };

/* An operator that goes once over more than fits. */
static void stream_over(program *p, const char *name, unsigned count) {
    tp_access accesses[WIDE];
    for (unsigned i = 0; i < count; i++) accesses[i] = (tp_access){p->addrs[i], true};
    tp_op it = {.name = tp_op_name(name)};
    tp_op_begin(p->core, &it, accesses, count, p->streams[0]);
    MUST_OK(tp_sim_launch(p->dev, p->streams[0], nothing, NULL, 100000, &test_error));
    tp_op_end(&it, NULL, 0, NULL);
    tp_op_fini(&it);
}

/* What a plan leaves in HOST it leaves for one operator; whatever comes in its place finds it on the
 * device. */
TEST(operand_left_in_host_is_left_for_no_other_operator) {
    options o = {.budget_bytes = 4 * EXTENT + EXTENT / 4};
    program p = open_program(&o);
    for (unsigned i = 0; i <= WIDE; i++) {
        alloc(&p, i, i < WIDE ? EXTENT : GRANULE);
        op(&p, i, 0, true, 1000);
    }
    for (unsigned i = 0; i < 8; i++) {
        op(&p, WIDE, 0, true, 1000);
        stream_over(&p, "aten::_foreach_mul_.Scalar", WIDE);
        tp_mark_step(p.core, TP_STEP_ASKED);
    }
    op(&p, WIDE, 0, true, 1000);
    while (tp_sim_step(p.dev)) continue;
    tp_stats before, after;
    tp_core_stats(p.core, &before);
    EXPECT(before.planned_ops > 0 && before.host_operators.count > 0);
    for (unsigned i = 0; i < WIDE; i++) op(&p, i, 0, false, 100000);
    tp_core_stats(p.core, &after);
    EXPECT_EQ(after.host_operators.count, before.host_operators.count);
    close_program(&p);
}

/* ---- what the device is asked ---------------------------------------------------------------- */

static uint64_t queries(const program *p) {
    return fault_device_calls(tp_core_device(p->core), FAULT_EVENT_QUERY);
}

/* All that waits for the same moment waits for one answer in each look. */
TEST(many_extents_that_wait_for_the_device_ask_it_once) {
    enum { MANY = 16, LOOKS = 2 * 50 };
    options o = {.budget_bytes = (BLOCKS + 1) * EXTENT, .wrapped = true};
    program p = open_program(&o);
    for (unsigned i = 0; i < BLOCKS; i++) {
        alloc(&p, i, EXTENT);
        op(&p, i, 0, true, 1000);
    }
    EXPECT_EQ(tp_evict_all(p.core), BLOCKS * EXTENT);
    for (unsigned i = 0; i < BLOCKS; i++) op(&p, i, 0, false, 1000); /* CLEAN from now on */
    op(&p, 0, 0, false, 100000000);
    tp_core_pass_time(p.core, 1000);
    const uint64_t before = queries(&p);
    tp_addr large = 0; /* waits 2 ms at a time */
    MUST_OK(tp_alloc(p.core, MANY * EXTENT, p.streams[0], 0, &large, NULL, &test_error));
    const uint64_t asked = queries(&p) - before;
    if (!EXPECT(asked < LOOKS * MANY / 3)) printf("  %llu\n", (unsigned long long)asked);
    close_program(&p);
}

/* Timers of operators on one stream end in order. */
TEST(timers_that_wait_for_the_device_ask_it_once) {
    options o = {.budget_bytes = (BLOCKS + 1) * EXTENT, .wrapped = true};
    program p = open_program(&o);
    for (unsigned i = 0; i < BLOCKS; i++) {
        alloc(&p, i, (1 + i % 4) * GRANULE);
        op(&p, i, 0, true, 1000);
    }
    (void)tp_evict_all(p.core); /* which arms it */
    for (unsigned i = 0; i < BLOCKS; i++) op(&p, i, 0, false, 1000);
    tp_core_pass_time(p.core, 1000000);
    for (unsigned i = 0; i < BLOCKS; i++) op(&p, i, 0, i % 2 == 0, 10000000);
    const uint64_t before = queries(&p);
    tp_core_pass_time(p.core, 1000);
    const uint64_t asked = queries(&p) - before;
    if (!EXPECT(asked <= 8)) printf("  %llu\n", (unsigned long long)asked);
    close_program(&p);
}

/* ---- what plans are made of ---------------------------------------------------------------- */

static void find_times(void *ctx, const tp_step *step) {
    uint64_t *times = ctx;
    for (uint32_t i = 0; i < step->trace.op_count; i++) times[i] = step->trace.ops[i].device_ns;
}

/* Each makes a block, and waits for memory meanwhile: the other half is written back. */
TEST(what_an_operator_waits_for_memory_is_not_its_time) {
    options o = {.budget_bytes = BLOCKS / 2 * EXTENT};
    program p = open_program(&o);
    tp_core_set_planning(p.core, false);
    for (unsigned i = 0; i < BLOCKS; i++) alloc(&p, i, EXTENT);
    for (unsigned i = 0; i < BLOCKS; i++) op(&p, i, 0, true, 5000);
    for (unsigned step = 0; step < 6; step++) {
        for (unsigned i = 0; i < BLOCKS; i++) {
            const tp_access access = {p.addrs[i], true};
            tp_op it = {.name = tp_op_name("test::makes.")};
            tp_op_begin(p.core, &it, &access, 1, p.streams[0]);
            tp_addr made = 0;
            MUST_OK(tp_alloc(p.core, 8 * EXTENT, p.streams[0], TP_ALLOC_PINNED, &made, NULL,
                             &test_error));
            tp_op_adopt(&it, made);
            MUST_OK(tp_sim_launch(p.dev, p.streams[0], nothing, NULL, 5000, &test_error));
            tp_op_end(&it, &made, 1, NULL);
            tp_op_fini(&it);
            op(&p, (i + 7) % BLOCKS, 0, true, 5000);
            tp_free(p.core, made);
        }
        tp_mark_step(p.core, TP_STEP_ASKED);
    }
    tp_stats stats;
    tp_core_stats(p.core, &stats);
    EXPECT(stats.memory_stalls.count > 0);
    uint64_t times[2 * BLOCKS] = {0};
    MUST(tp_last_step(p.core, find_times, times));
    /* The clock ticks in ns, and the shortest sample counts. */
    for (unsigned i = 0; i < 2 * BLOCKS; i++) EXPECT(times[i] == 5000 || times[i] == 4999);
    close_program(&p);
}

/* Sixty kinds of operators, launched long before the device comes to them. Between two of them runs
 * what nobody tells of. */
TEST(all_operators_of_a_program_that_is_ahead_are_timed) {
    enum { KINDS = 60 };
    options o = {.budget_bytes = 2 * TP_MIB};
    program p = open_program(&o);
    for (unsigned i = 0; i < BLOCKS; i++) alloc(&p, i, 2 * EXTENT);
    (void)tp_evict_all(p.core); /* which arms it */
    for (unsigned step = 0; step < 3; step++) {
        for (unsigned i = 0; i < KINDS; i++) {
            char name[32];
            (void)snprintf(name, sizeof name, "test::kind%u.", i);
            const tp_access access = {p.addrs[i % BLOCKS], false};
            tp_op it = {.name = tp_op_name(name)};
            tp_op_begin(p.core, &it, &access, 1, p.streams[0]);
            MUST_OK(tp_sim_launch(p.dev, p.streams[0], nothing, NULL, 20000 + i, &test_error));
            tp_op_end(&it, NULL, 0, NULL);
            tp_op_fini(&it);
            MUST_OK(tp_sim_launch(p.dev, p.streams[0], nothing, NULL, 3000, &test_error));
        }
        tp_core_pass_time(p.core, 1000000000);
        while (tp_sim_step(p.dev)) continue;
        tp_core_pass_time(p.core, 1);
        tp_mark_step(p.core, TP_STEP_ASKED);
    }
    uint64_t times[KINDS] = {0};
    MUST(tp_last_step(p.core, find_times, times));
    for (unsigned i = 0; i < KINDS - 1; i++) EXPECT_EQ(times[i], 20000 + i + 3000);
    close_program(&p);
}

TEST(no_thread_needs_a_virtual_clock) {
    const tp_sim_options sim = {.device_bytes = TP_MIB, .granularity_bytes = GRANULE};
    tp_device *dev = NULL;
    tp_core *core = NULL;
    MUST_OK(tp_sim_device_create(&sim, &dev, &test_error));
    const tp_config config = {.device_budget_bytes = TP_MIB, .no_thread = true};
    EXPECT_STATUS(tp_core_create(&config, dev, &core, &test_error), TP_INVALID);
}
