/* Mechanisms that no other test misses when they are gone; `make mechanisms` takes each away. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "harness.h"
#include "rig.h"

/* ---- one thread at a time gathers frames ---- */

enum { SETS = 2, IN_SET = 10, CROWD = 16, ROUNDS = 24 };

typedef struct crowd {
    rig r;
    tp_addr sets[SETS][IN_SET], others[CROWD];
    pthread_barrier_t step;
} crowd;

typedef struct member {
    crowd *c;
    unsigned idx;
} member;

static void use_all(rig *r, unsigned stream, const tp_addr *addrs, unsigned count) {
    tp_access accesses[CROWD] = {0};
    for (unsigned i = 0; i < count; i++) accesses[i] = (tp_access){addrs[i], true};
    tp_op op = {0};
    tp_op_begin(r->core, &op, accesses, count, r->streams[stream]);
    for (unsigned i = 0; i < count; i++) rig_launch(r, stream, addrs[i], RIG_EXTENT, i, true);
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
}

static void *use_own_set(void *arg) {
    const member *m = arg;
    for (unsigned i = 0; i < ROUNDS; i++) {
        (void)pthread_barrier_wait(&m->c->step);
        (void)pthread_barrier_wait(&m->c->step);
        use_all(&m->c->r, m->idx, m->c->sets[m->idx], IN_SET);
        (void)pthread_barrier_wait(&m->c->step);
    }
    return NULL;
}

/* Two operators at once, each of which fits into the budget, and both do not. If each got a part of
 * what there is, neither could go on until one runs over HOST. */
TEST(operators_that_fit_one_at_a_time_do_not_keep_frames_from_each_other) {
    crowd c;
    memset(&c, 0, sizeof c);
    rig_open(&c.r, &(rig_options){.budget_bytes = (size_t)CROWD * RIG_EXTENT});
    MUST(pthread_barrier_init(&c.step, NULL, SETS + 1) == 0);
    for (unsigned s = 0; s < SETS; s++) {
        for (unsigned i = 0; i < IN_SET; i++) c.sets[s][i] = rig_alloc(&c.r, RIG_EXTENT, s);
        use_all(&c.r, s, c.sets[s], IN_SET);
    }
    for (unsigned i = 0; i < CROWD; i++) c.others[i] = rig_alloc(&c.r, RIG_EXTENT, SETS);
    pthread_t threads[SETS];
    member members[SETS];
    for (unsigned s = 0; s < SETS; s++) {
        members[s] = (member){&c, s};
        MUST(pthread_create(&threads[s], NULL, use_own_set, &members[s]) == 0);
    }
    unsigned over_host = 0;
    for (unsigned i = 0; i < ROUNDS; i++) {
        (void)pthread_barrier_wait(&c.step);
        use_all(&c.r, SETS, c.others, CROWD); /* so that all else is in HOST */
        const uint64_t before = rig_stats(&c.r).host_operators.count;
        (void)pthread_barrier_wait(&c.step);
        (void)pthread_barrier_wait(&c.step);
        over_host += rig_stats(&c.r).host_operators.count > before;
    }
    for (unsigned s = 0; s < SETS; s++) EXPECT(pthread_join(threads[s], NULL) == 0);
    /* A thread that does not run for 50 ms is given up on: no error, and seldom. */
    if (!EXPECT(over_host <= ROUNDS / 4)) (void)printf("  %u of %d\n", over_host, ROUNDS);
    (void)pthread_barrier_destroy(&c.step);
    rig_close(&c.r);
    EXPECT_EQ(atomic_load(&c.r.wrong), 0);
}

/* ---- the run-ahead limit ---- */

/* Nothing runs on the device but while the launching thread waits. */
TEST(thread_far_ahead_of_the_device_waits_for_memory) {
    enum { KEPT = 12, STEPS = 40 };
    rig r;
    rig_open(&r, &(rig_options){.budget_bytes = 8 * RIG_EXTENT, .manual = true});
    tp_addr kept[KEPT];
    for (unsigned i = 0; i < KEPT; i++) {
        kept[i] = rig_alloc(&r, RIG_EXTENT, 0);
        rig_op(&r, 0, kept[i], RIG_EXTENT, i, true);
    }
    for (unsigned step = 0; step < STEPS; step++) {
        const unsigned i = step % KEPT;
        const tp_addr passing = rig_alloc(&r, RIG_EXTENT, 0);
        rig_op(&r, 0, passing, RIG_EXTENT, step, true);
        rig_op(&r, 0, kept[i], RIG_EXTENT, i, false);
        tp_free(r.core, passing);
    }
    const tp_stats stats = rig_stats(&r);
    EXPECT(stats.memory_stalls.count > 0);
    EXPECT_EQ(stats.born_in_host, 0);
    EXPECT_EQ(stats.host_operators.count, 0);
    EXPECT(stats.reserved.peak <= 8 * RIG_EXTENT);
    rig_close(&r);
    EXPECT_EQ(atomic_load(&r.wrong), 0);
}
