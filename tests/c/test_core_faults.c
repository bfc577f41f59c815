/* Every fallible public call with a fault in the 1st, 2nd, 3rd ... device call, until a run meets
 * none. After the fault: a typed error, no value lost, nothing left behind, and the next call works;
 * or the pager is in FAILED and says so. */
#include <stdio.h>
#include <string.h>

#include "base/bytes.h"
#include "device/device_cuda.h"
#include "device/device_sim.h"
#include "fault_device.h"
#include "harness.h"
#include "tp.h"

enum { BLOCKS = 4, BLOCK_BYTES = 40 * 1024 };

typedef struct scene {
    tp_device *dev, *sim;
    tp_core *core;
    tp_addr addr[BLOCKS];
    bool failed; /* the pager went into FAILED */
} scene;

static tp_status scene_open(scene *s, const fault_plan *plan) {
    memset(s, 0, sizeof *s);
    const tp_sim_options options = {.device_bytes = 4 * TP_MIB,
                                    .granularity_bytes = 4 * TP_KIB};
    MUST_OK(tp_sim_device_create(&options, &s->sim, &test_error));
    MUST_OK(fault_device_create(s->sim, &s->dev, &test_error));
    fault_device_arm(s->dev, plan);
    const tp_config config = {.device_budget_bytes = 128 * TP_KIB,
                              .host_budget_bytes = TP_NO_LIMIT,
                              .extent_max_bytes = 16 * TP_KIB,
                              .segment_bytes = 16 * TP_MIB,
                              .offload = true};
    return tp_core_create(&config, s->dev, &s->core, NULL);
}

static bool failed(scene *s) {
    tp_stats stats;
    tp_core_stats(s->core, &stats);
    return stats.failed;
}

/* Writes and reads as an operator on the host would (the simulated device's memory is ours). */
static void fill(scene *s, unsigned idx) {
    const tp_access access = {s->addr[idx], true};
    tp_op op = {0};
    tp_op_begin(s->core, &op, &access, 1, NULL);
    for (size_t at = 0; at < BLOCK_BYTES; at += 512) {
        const uint64_t value = at + idx;
        EXPECT(tp_sim_write(s->sim, s->addr[idx] + at, &value, sizeof value));
    }
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
}

static void verify(scene *s, unsigned idx) {
    const tp_access access = {s->addr[idx], false};
    tp_op op = {0};
    tp_op_begin(s->core, &op, &access, 1, NULL);
    for (size_t at = 0; at < BLOCK_BYTES; at += 512) {
        uint64_t value = 0;
        EXPECT(tp_sim_read(s->sim, s->addr[idx] + at, &value, sizeof value));
        if (value != at + idx) EXPECT_EQ(value, at + idx);
    }
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
}

/* Any status is an answer here; what matters is what holds afterwards. */
static void any(tp_status status) { EXPECT(status <= TP_FAILED); }

/* Its bytes leave its address, and come to another. */
static void park(scene *s, unsigned idx) {
    tp_dropped *dropped = NULL;
    const tp_status status = tp_park(s->core, s->addr[idx], &dropped, NULL);
    any(status);
    if (status != TP_OK) return;
    s->addr[idx] = 0;
    tp_evict_all(s->core); /* so that it goes */
    for (int i = 0; i < 3 && s->addr[idx] == 0; i++)
        any(tp_unpark(s->core, dropped, NULL, true, &s->addr[idx], NULL, NULL));
    if (s->addr[idx] == 0) {
        tp_drop_end(s->core, dropped);
    } else {
        verify(s, idx);
    }
}

static void act(scene *s) {
    tp_oom oom;
    for (unsigned i = 0; i < BLOCKS; i++) {
        any(tp_alloc(s->core, BLOCK_BYTES, NULL, 0, &s->addr[i], &oom, NULL));
        if (s->addr[i] != 0) fill(s, i);
    }
    for (unsigned i = 0; i < BLOCKS; i++) {
        if (s->addr[i] == 0) continue;
        any(tp_evict(s->core, s->addr[i], NULL));
        verify(s, i);
        any(tp_pin(s->core, s->addr[i], &oom, NULL));
        any(tp_unpin(s->core, s->addr[i], NULL));
        any(tp_touch(s->core, s->addr[i], false, NULL, NULL));
        park(s, i);
    }
    any(tp_core_set_budget(s->core, 96 * TP_KIB, TP_NO_LIMIT, NULL));
    any(tp_core_set_offload(s->core, false, NULL));
    any(tp_core_set_offload(s->core, true, NULL));
    for (unsigned i = 0; i < BLOCKS; i++) {
        if (s->addr[i] != 0) verify(s, i);
    }
}

static void expect_recovered(scene *s) {
    if (failed(s)) {
        tp_addr addr = 0;
        EXPECT_STATUS(tp_alloc(s->core, BLOCK_BYTES, NULL, 0, &addr, NULL, &test_error),
                      TP_FAILED);
        return;
    }
    EXPECT_OK(tp_core_check(s->core, &test_error));
    for (unsigned i = 0; i < BLOCKS; i++) {
        if (s->addr[i] != 0) verify(s, i);
        if (s->addr[i] != 0) tp_free(s->core, s->addr[i]);
        s->addr[i] = 0;
    }
    MUST_OK(tp_alloc(s->core, BLOCK_BYTES, NULL, 0, &s->addr[0], NULL, &test_error));
    fill(s, 0);
    verify(s, 0);
    tp_free(s->core, s->addr[0]);
    tp_core_empty_cache(s->core);
    tp_stats stats;
    tp_core_stats(s->core, &stats);
    EXPECT_EQ(stats.reserved.current, 0);
    EXPECT_EQ(stats.allocated.current, 0);
}

static uint64_t run(const fault_plan *plan, unsigned *went_failed) {
    scene s;
    const bool opened = scene_open(&s, plan) == TP_OK;
    if (!opened) return 1;
    act(&s);
    const bool fired = fault_device_fired(s.dev);
    fault_device_disarm(s.dev);
    *went_failed += failed(&s) ? 1u : 0u;
    expect_recovered(&s);
    tp_core_destroy(s.core);
    return fired ? 1 : 0;
}

static void loop(uint32_t calls, bool persistent) {
    unsigned went_failed = 0;
    uint64_t nth = 1;
    while (test_failures() == 0) {
        const fault_plan plan = {.nth = nth, .calls = calls, .persistent = persistent};
        if (run(&plan, &went_failed) == 0) break;
        nth++;
    }
    EXPECT(nth > 1);
    printf("  %llu faults met, %u of them ended in FAILED\n", (unsigned long long)nth - 1,
           went_failed);
}

TEST(fault_in_any_one_call_is_survived) {
    loop(FAULT_ALL_CALLS & ~(1u << FAULT_EVENT_QUERY), false);
}

TEST(fault_in_frames_for_good_is_survived) {
    loop((1u << FAULT_DEVICE_FRAME) | (1u << FAULT_HOST_FRAME), true);
}

TEST(fault_in_a_query_ends_in_failed) {
    unsigned went_failed = 0;
    const fault_plan plan = {.nth = 3, .calls = 1u << FAULT_EVENT_QUERY};
    EXPECT_EQ(run(&plan, &went_failed), 1);
    EXPECT_EQ(went_failed, 1);
}

TEST(fault_in_fingerprints_is_survived) {
    loop(1u << FAULT_FINGERPRINT, false);
    loop(1u << FAULT_FINGERPRINT, true);
}

/* ---- one allocation, on both devices -------------------------------------------------------- */

enum { HELD_GRANULES = 4, WANTED_GRANULES = 6, TIGHT_GRANULES = 8, WIDE_GRANULES = 16 };

typedef struct lone_alloc {
    tp_device *(*make)(void);
    size_t budget_granules; /* TIGHT: the block that is there has to go to the host */
    unsigned failed;        /* how many faults ended in FAILED */
} lone_alloc;

static tp_device *make_sim(void) {
    const tp_sim_options options = {.device_bytes = 4 * TP_MIB,
                                    .granularity_bytes = 4 * TP_KIB};
    tp_device *dev = NULL;
    MUST_OK(tp_sim_device_create(&options, &dev, &test_error));
    return dev;
}

static tp_device *make_cuda(void) {
    tp_device *dev = NULL;
    test_error_clear();
    const tp_status status = tp_cuda_device_create(0, &dev, &test_error);
    if (status == TP_UNSUPPORTED) SKIP(test_error.message);
    MUST_OK(status);
    return dev;
}

static size_t free_bytes(tp_device *dev) {
    size_t now = 0, total = 0;
    EXPECT_OK(dev->ops->memory_info(dev, &now, &total, &test_error));
    return now;
}

/* With all blocks freed, every device frame has gone back. */
static void expect_baseline(tp_core *core, size_t baseline) {
    tp_core_empty_cache(core);
    tp_stats stats;
    tp_core_stats(core, &stats);
    EXPECT_EQ(stats.block_count, 0);
    EXPECT_EQ(stats.allocated.current, 0);
    EXPECT_EQ(stats.reserved.current, 0);
    EXPECT_EQ(free_bytes(fault_device_inner(tp_core_device(core))), baseline);
    EXPECT_OK(tp_core_check(core, &test_error));
}

/* The next allocation has all of the budget that `held` leaves in its place, on the device. */
static void expect_whole_budget(tp_core *core, size_t budget_bytes, tp_addr held) {
    tp_block_info info;
    MUST(tp_block_query(core, held, &info));
    tp_addr addr = 0;
    EXPECT_OK(tp_alloc(core, budget_bytes - info.bytes, NULL, 0, &addr, NULL, &test_error));
    if (addr == 0) return;
    MUST(tp_block_query(core, addr, &info));
    EXPECT_EQ(info.resident_bytes, info.bytes);
    tp_free(core, addr);
}

/* Whether the core answers everything with its first error. */
static bool gave_up(tp_core *core, size_t wanted) {
    tp_stats stats;
    tp_core_stats(core, &stats);
    if (!stats.failed) return false;
    tp_addr addr = 0;
    EXPECT_STATUS(tp_alloc(core, wanted, NULL, 0, &addr, NULL, &test_error), TP_FAILED);
    return true;
}

/* False: the allocation has fewer calls than that. 0: none fails. */
static bool fail_in_one_alloc(lone_alloc *a, uint64_t nth) {
    tp_device *inner = a->make(), *dev = NULL;
    const size_t granule = inner->caps.granularity_bytes, wanted = WANTED_GRANULES * granule;
    const size_t baseline = free_bytes(inner);
    MUST_OK(fault_device_create(inner, &dev, &test_error));
    const tp_config config = {.device_budget_bytes = a->budget_granules * granule,
                              .host_budget_bytes = TP_NO_LIMIT,
                              .extent_max_bytes = 2 * granule,
                              .segment_bytes = 64 * granule,
                              .offload = true};
    tp_core *core = NULL;
    MUST_OK(tp_core_create(&config, dev, &core, &test_error));
    tp_addr held = 0, addr = 0;
    /* A block that was never seen as a tensor stays where it is. */
    const uint32_t flags = a->budget_granules == TIGHT_GRANULES ? TP_ALLOC_SEEN : 0;
    MUST_OK(tp_alloc(core, HELD_GRANULES * granule, NULL, flags, &held, NULL, &test_error));
    /* Not the bind of the pager's thread, which may begin only now: without it nothing works. */
    const uint32_t others = 1u << FAULT_EVENT_QUERY | 1u << FAULT_BIND_THREAD;
    const fault_plan plan = {.nth = nth, .calls = FAULT_ALL_CALLS & ~others};
    fault_device_arm(dev, &plan);
    const tp_status status = tp_alloc(core, wanted, NULL, 0, &addr, NULL, &test_error);
    const bool fired = fault_device_fired(dev);
    fault_device_disarm(dev);
    any(status);
    EXPECT((status == TP_OK) == (addr != 0));
    if (status == TP_OK) tp_free(core, addr);
    if (gave_up(core, wanted)) {
        a->failed++;
    } else {
        EXPECT_OK(tp_core_check(core, &test_error));
        expect_whole_budget(core, a->budget_granules * granule, held);
        tp_free(core, held);
        expect_baseline(core, baseline);
    }
    tp_core_destroy(core);
    return fired;
}

static void fail_in_every_call(lone_alloc a) {
    tp_device *witness = a.make();
    (void)fail_in_one_alloc(&a, 0); /* what the driver makes once */
    const size_t baseline = free_bytes(witness);
    uint64_t nth = 1;
    while (test_failures() == 0 && fail_in_one_alloc(&a, nth)) {
        EXPECT_EQ(free_bytes(witness), baseline);
        nth++;
    }
    witness->ops->destroy(witness);
    EXPECT(nth > WANTED_GRANULES);
    if (a.budget_granules == WIDE_GRANULES) EXPECT_EQ(a.failed, 0);
    printf("  %llu faults met, %u of them ended in FAILED\n", (unsigned long long)nth - 1,
           a.failed);
}

#define ONE_ALLOC_ON(where, maker)                                                             \
    TEST(fault_in_any_call_of_one_alloc_leaves_nothing_behind_on_##where) {                    \
        fail_in_every_call((lone_alloc){maker, WIDE_GRANULES, 0});                             \
    }                                                                                          \
    TEST(fault_in_any_call_of_one_alloc_that_evicts_leaves_nothing_behind_on_##where) {        \
        fail_in_every_call((lone_alloc){maker, TIGHT_GRANULES, 0});                            \
    }
ONE_ALLOC_ON(sim, make_sim)
ONE_ALLOC_ON(cuda, make_cuda)
