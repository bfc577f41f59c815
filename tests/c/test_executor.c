/* Plans carried out: what a step is known to need decides what moves, whatever the program does the
 * bytes are right, and a plan that does not fit costs nothing but time. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "harness.h"
#include "rig.h"

enum {
    WEIGHTS = 16,
    BYTES = 2 * RIG_EXTENT,
    KERNEL_NS = 3000000,
    BUDGET = WEIGHTS * BYTES / 2
};

typedef struct program {
    rig r;
    tp_addr weights[WEIGHTS], kept[WEIGHTS];
    uint64_t values[WEIGHTS]; /* what each weight holds */
    uint64_t clock;
} program;

static void open_program_on(program *p, const rig_options *options) {
    memset(p, 0, sizeof *p);
    rig_open(&p->r, options);
    for (uint32_t i = 0; i < WEIGHTS; i++) {
        p->weights[i] = rig_alloc(&p->r, BYTES, 0);
        p->values[i] = ++p->clock;
        rig_op(&p->r, 0, p->weights[i], BYTES, p->values[i], true);
    }
}

static void close_program(program *p) {
    for (uint32_t i = 0; i < WEIGHTS; i++) {
        rig_op(&p->r, 0, p->weights[i], BYTES, p->values[i], false);
    }
    rig_drain(&p->r);
    EXPECT_OK(tp_core_check(p->r.core, &test_error));
    const unsigned wrong = atomic_load(&p->r.wrong);
    rig_close(&p->r);
    EXPECT_EQ(wrong, 0);
}

static void open_program(program *p, bool plans) {
    open_program_on(p, &(rig_options){.budget_bytes = BUDGET, .no_plans = !plans});
}

/* So that the pager's thread has time for what a kernel would take. */
static void pause_us(long us) {
    const struct timespec pause = {.tv_nsec = us * 1000};
    (void)nanosleep(&pause, NULL);
}

static void nothing(tp_device *dev, void *arg) {
    (void)dev;
    (void)arg;
}

/* An operator that reads a weight, or writes it, and may make a block of that size. */
static tp_addr op(program *p, const char *name, uint32_t weight, bool write, bool make) {
    rig *r = &p->r;
    const tp_access access = {p->weights[weight], write};
    tp_op it = {.name = tp_op_name(name)};
    tp_op_begin(r->core, &it, &access, 1, r->streams[0]);
    tp_addr made = 0;
    if (make) {
        MUST_OK(
            tp_alloc(r->core, BYTES, r->streams[0], TP_ALLOC_PINNED, &made, NULL, &test_error));
        tp_op_adopt(&it, made);
        rig_launch(r, 0, made, BYTES, p->values[weight], true);
    }
    rig_launch(r, 0, p->weights[weight], BYTES, p->values[weight], false);
    if (write) {
        rig_launch(r, 0, p->weights[weight], BYTES, p->values[weight] = ++p->clock, true);
    }
    MUST_OK(tp_sim_launch(r->sim, r->streams[0], nothing, NULL, KERNEL_NS, &test_error));
    tp_op_end(&it, &made, make ? 1 : 0, NULL);
    tp_op_fini(&it);
    pause_us(300);
    return made;
}

static void end_step(program *p) {
    tp_mark_step(p->r.core, TP_STEP_ASKED);
    pause_us(1000);
}

/* Reads all weights in turn. */
static void read_all(program *p) {
    for (uint32_t i = 0; i < WEIGHTS; i++) (void)op(p, "test::read", i, false, false);
    end_step(p);
}

/* Makes something of each weight, which is read in reverse order, when the weight is written. */
static void train(program *p) {
    for (uint32_t i = 0; i < WEIGHTS; i++) p->kept[i] = op(p, "test::forward", i, false, true);
    for (uint32_t i = WEIGHTS; i-- > 0;) {
        const tp_access reads[] = {{p->weights[i], false}, {p->kept[i], false}};
        tp_op it = {.name = tp_op_name("test::backward"), .backward = true};
        tp_op_begin(p->r.core, &it, reads, 2, p->r.streams[0]);
        rig_launch(&p->r, 0, p->weights[i], BYTES, p->values[i], false);
        rig_launch(&p->r, 0, p->kept[i], BYTES, p->values[i], false);
        tp_op_end(&it, NULL, 0, NULL);
        tp_op_fini(&it);
        tp_free(p->r.core, p->kept[i]);
        (void)op(p, "test::update", i, true, false);
    }
    end_step(p);
}

/* Bytes filled and misses in so many steps. */
typedef struct moved {
    uint64_t in, misses, planned;
} moved;

static moved run(program *p, void (*step)(program *), int count) {
    const tp_stats before = rig_stats(&p->r);
    for (int i = 0; i < count; i++) step(p);
    const tp_stats after = rig_stats(&p->r);
    return (moved){after.fills.bytes - before.fills.bytes,
                   after.misses.count - before.misses.count,
                   after.planned_ops - before.planned_ops};
}

/* The figures of six steps, on demand or once there is a plan. */
static moved measure(void (*step)(program *), bool plans) {
    program p;
    open_program(&p, plans);
    for (int i = 0; i < (plans ? 20 : 3) && rig_stats(&p.r).plans.count == 0; i++) {
        step(&p);
        pause_us(5000);
    }
    EXPECT_EQ(rig_stats(&p.r).plans.count > 0, plans);
    step(&p); /* in the middle of which the plan may have come */
    const moved found = run(&p, step, 6);
    (void)printf("  %s: filled %llu KiB in 6 steps, %llu misses\n",
                 plans ? "planned" : "on demand", (unsigned long long)found.in / 1024,
                 (unsigned long long)found.misses);
    close_program(&p);
    return found;
}

TEST(a_cycle_keeps_part_of_it_and_finds_the_rest) {
    const moved demand = measure(read_all, false), planned = measure(read_all, true);
    EXPECT_EQ(demand.planned, 0);
    EXPECT_EQ(planned.planned, 6 * WEIGHTS);
    /* By last use all of it moves in each step; half has to. */
    EXPECT(planned.in < demand.in * 4 / 5);
    EXPECT(planned.misses < demand.misses / 2);
}

TEST(a_training_step_finds_what_it_needs) {
    const moved demand = measure(train, false), planned = measure(train, true);
    EXPECT_EQ(planned.planned, 6 * 3 * WEIGHTS);
    EXPECT(planned.in < demand.in * 11 / 10);
    EXPECT(planned.misses < demand.misses / 2);
}

/* ---- programs that leave their plan ---------------------------------------------------------- */

/* Now and then something else, other sizes of work, threads that are late. */
static void wander(program *p, uint64_t *seed) {
    const uint32_t choice = (uint32_t)(test_random(seed) % 5);
    if (choice == 0) {
        read_all(p);
    } else if (choice == 1) {
        for (uint32_t i = 0; i < WEIGHTS; i++) {
            (void)op(p, "test::update", (uint32_t)(test_random(seed) % WEIGHTS), true, false);
        }
        end_step(p);
    } else if (choice == 2) {
        (void)tp_evict_all(p->r.core);
    } else {
        train(p);
    }
}

TEST(a_program_that_leaves_its_plans_has_right_bytes) {
    program p;
    uint64_t seed = test_seed();
    open_program(&p, true);
    const unsigned rounds = test_rounds(40);
    bool planned = false;
    for (unsigned i = 0; i < rounds || (i < 80 && !planned); i++) {
        wander(&p, &seed);
        planned = rig_stats(&p.r).plans.count > 1 && rig_stats(&p.r).planned_ops > 0;
        if (i % 8 == 7) {
            const size_t budget = BUDGET + (test_random(&seed) % 5) * RIG_EXTENT;
            EXPECT_OK(tp_core_set_budget(p.r.core, budget, TP_NO_LIMIT, &test_error));
        }
        if (i == 30) tp_core_set_planning(p.r.core, false);
        if (i == 33) tp_core_set_planning(p.r.core, true);
        EXPECT_OK(tp_core_check(p.r.core, &test_error));
    }
    EXPECT(planned);
    close_program(&p);
}

TEST(offload_that_ends_and_begins_again_in_mid_step_is_harmless) {
    program p;
    open_program(&p, true);
    for (int i = 0; i < 6; i++) train(&p);
    for (uint32_t i = 0; i < WEIGHTS / 2; i++) (void)op(&p, "test::read", i, false, false);
    EXPECT_OK(tp_core_set_budget(p.r.core, 4 * BUDGET, TP_NO_LIMIT, &test_error));
    EXPECT_OK(tp_core_set_offload(p.r.core, false, &test_error));
    for (uint32_t i = WEIGHTS / 2; i < WEIGHTS; i++)
        (void)op(&p, "test::read", i, false, false);
    EXPECT_OK(tp_core_set_offload(p.r.core, true, &test_error));
    EXPECT_OK(tp_core_set_budget(p.r.core, BUDGET, TP_NO_LIMIT, &test_error));
    for (int i = 0; i < 6; i++) train(&p);
    close_program(&p);
}

/* ---- operators that begin before those around them have queued their kernels ------------------ */

/* The kernel of an operator is queued behind a nested one that has begun and ended: all that a plan
 * says of the operator's block is said before, and has to wait for it. */
static void read_around(program *p, uint32_t weight) {
    rig *r = &p->r;
    const tp_access access = {p->weights[weight], false}, other = {p->kept[0], false};
    tp_op outer = {.name = tp_op_name("test::outer")},
          inner = {.name = tp_op_name("test::inner")};
    tp_op_begin(r->core, &outer, &access, 1, r->streams[0]);
    tp_op_begin(r->core, &inner, &other, 1, r->streams[0]);
    tp_op_end(&inner, NULL, 0, NULL);
    rig_hold(r, 0);
    rig_launch(r, 0, p->weights[weight], BYTES, p->values[weight], false);
    tp_op_end(&outer, NULL, 0, NULL);
    for (int i = 0; i < 8; i++) {
        rig_step(r, 4);
        pause_us(200);
    }
    rig_drain(r);
    tp_op_fini(&inner);
    tp_op_fini(&outer);
}

/* What is queued runs while nothing is mapped. */
static void run_all(void *arg) { rig_drain(arg); }

static void read_all_around(program *p) {
    for (uint32_t i = 0; i < WEIGHTS; i++) read_around(p, i);
    end_step(p);
}

TEST(what_is_decided_of_a_block_in_use_waits_for_the_kernels_of_that_use) {
    program p;
    open_program_on(&p, &(rig_options){.budget_bytes = BUDGET, .manual = true});
    p.kept[0] = rig_alloc(&p.r, BYTES, 0);
    fault_device_before(p.r.dev, FAULT_MAP, run_all, &p.r);
    for (int i = 0; i < 20 && rig_stats(&p.r).plans.count == 0; i++) read_all_around(&p);
    const moved planned = run(&p, read_all_around, 6);
    EXPECT_EQ(planned.planned, 6 * 2 * WEIGHTS);
    EXPECT_EQ(atomic_load(&p.r.wrong), 0);
    close_program(&p);
}

/* ---- a device that has less than the budget -------------------------------------------------- */

TEST(fills_that_the_device_has_no_frame_for_are_not_tried_all_the_time) {
    program p;
    open_program(&p, true);
    for (int i = 0; i < 20 && rig_stats(&p.r).plans.count == 0; i++) train(&p);
    /* More of a budget, and not a frame more. */
    const fault_plan full = {.nth = 1, .calls = 1 << FAULT_DEVICE_FRAME, .persistent = true};
    fault_device_arm(p.r.dev, &full);
    EXPECT_OK(tp_core_set_budget(p.r.core, 3 * BUDGET / 2, TP_NO_LIMIT, &test_error));
    const uint64_t plans = rig_stats(&p.r).plans.count;
    for (int i = 0; i < 20 && rig_stats(&p.r).plans.count == plans; i++) train(&p);
    train(&p);
    const uint64_t before = fault_device_calls(p.r.dev, FAULT_DEVICE_FRAME);
    pause_us(50000);
    const uint64_t tries = fault_device_calls(p.r.dev, FAULT_DEVICE_FRAME) - before;
    EXPECT(fault_device_fired(p.r.dev));
    if (!EXPECT(tries <= 50)) (void)printf("  %llu tries\n", (unsigned long long)tries);
    fault_device_disarm(p.r.dev);
    close_program(&p);
}

/* ---- a forked child -------------------------------------------------------------------------- */

typedef struct forked {
    program *p;
    tp_op ops[2];
} forked;

static uint64_t all_calls(const program *p) {
    uint64_t count = 0;
    for (int i = 0; i < FAULT_CALL_COUNT; i++)
        count += fault_device_calls(p->r.dev, (fault_call)i);
    return count;
}

static void end_in_child(void *arg) {
    forked *f = arg;
    const uint64_t before = all_calls(f->p);
    for (int i = 0; i < 2; i++) tp_op_end(&f->ops[i], &f->p->weights[i], 1, NULL);
    const tp_access access = {f->p->weights[3], true};
    tp_op it = {.name = tp_op_name("test::read")};
    tp_op_begin(f->p->r.core, &it, &access, 1, f->p->r.streams[0]);
    tp_op_end(&it, NULL, 0, NULL);
    tp_record_stream(f->p->r.core, f->p->weights[2], f->p->r.streams[1]);
    tp_free(f->p->r.core, f->p->weights[2]);
    (void)raise(all_calls(f->p) == before ? SIGUSR1 : SIGUSR2);
}

TEST(operators_that_end_in_a_forked_child_ask_the_device_for_nothing) {
    program p;
    open_program(&p, true);
    MUST_OK(tp_register(TP_SLOT_SIM, p.r.core, &test_error));
    for (int i = 0; i < 20 && rig_stats(&p.r).plans.count == 0; i++) train(&p);
    train(&p);
    forked f = {.p = &p};
    for (uint32_t i = 0; i < 2; i++) {
        const tp_access access = {p.weights[i], false};
        f.ops[i].name = tp_op_name(i == 0 ? "test::forward" : "test::unheard_of");
        tp_op_begin(p.r.core, &f.ops[i], &access, 1, p.r.streams[0]);
    }
    EXPECT(test_ends_by_signal(SIGUSR1, end_in_child, &f));
    for (uint32_t i = 0; i < 2; i++) {
        tp_op_end(&f.ops[i], NULL, 0, NULL);
        tp_op_fini(&f.ops[i]);
    }
    tp_unregister(TP_SLOT_SIM);
    close_program(&p);
}
