/* The core over the simulated device: residency, budgets, and the rules about mappings under seeded
 * schedules of several streams, with a model that copies everything. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#include "base/bytes.h"
#include "harness.h"
#include "world.h"

static world_options usual(uint64_t seed) {
    return (world_options){.budget_bytes = 512 * TP_KIB,
                           .host_bytes = TP_NO_LIMIT,
                           .granularity_bytes = 4 * TP_KIB,
                           .extent_bytes = 16 * TP_KIB,
                           .seed = seed,
                           .offload = true};
}

static tp_block_info info_of(world *w, unsigned idx) {
    tp_block_info info;
    MUST(tp_block_query(w->core, w->tensors[idx].addr, &info));
    return info;
}

TEST(block_comes_back_whole_when_asked_for_again) {
    world w;
    const world_options options = usual(1);
    world_open(&w, &options);
    MUST(world_alloc(&w, 0, 40 * TP_KIB, 0));
    const tp_addr addr = w.tensors[0].addr;
    tp_sim_counts before, after;
    tp_sim_get_counts(w.dev, &before);
    world_free(&w, 0);
    MUST(world_alloc(&w, 1, 38 * TP_KIB, 0));
    tp_sim_get_counts(w.dev, &after);
    EXPECT_EQ(w.tensors[1].addr, addr);
    EXPECT_EQ(after.maps, before.maps);
    EXPECT_EQ(world_stats(&w).cache_hits, 1);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

TEST(evicted_block_is_read_where_it_is_and_comes_back) {
    world w;
    const world_options options = usual(2);
    world_open(&w, &options);
    MUST(world_alloc(&w, 0, 40 * TP_KIB, 0));
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    EXPECT_EQ(info_of(&w, 0).host_bytes, 40 * TP_KIB);
    EXPECT_EQ(world_stats(&w).resident.current, 0);
    world_blind_read(&w, 1, 0, false); /* nobody told us: read in HOST */
    world_drain(&w);
    const int reads[] = {0};
    world_op(&w, 2, reads, 1, -1);
    EXPECT_EQ(info_of(&w, 0).resident_bytes, 40 * TP_KIB);
    EXPECT_EQ(info_of(&w, 0).clean_count, 3);
    EXPECT_EQ(world_stats(&w).fills.bytes, 40 * TP_KIB);
    /* A clean block leaves without a copy; a written one does not. */
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    EXPECT_EQ(world_stats(&w).write_backs.bytes, 40 * TP_KIB);
    world_op(&w, 0, NULL, 0, 0);
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    EXPECT_EQ(world_stats(&w).write_backs.bytes, 80 * TP_KIB);
    world_op(&w, 1, reads, 1, -1);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

TEST(strict_eviction_maps_nothing) {
    world w;
    world_options options = usual(3);
    options.strict = true;
    world_open(&w, &options);
    MUST(world_alloc(&w, 0, 8 * TP_KIB, 0));
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    world_blind_read(&w, 0, 0, false);
    world_drain(&w);
    EXPECT(atomic_load(&w.unmapped) > 0);
    atomic_store(&w.unmapped, 0);
    const int reads[] = {0};
    world_op(&w, 0, reads, 1, -1);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

TEST(budget_without_offload_refuses_and_goes_on) {
    world w;
    world_options options = usual(4);
    options.offload = false;
    world_open(&w, &options);
    MUST(world_alloc(&w, 0, 500 * TP_KIB, 0));
    tp_addr addr = 0;
    tp_oom oom = {0};
    EXPECT_STATUS(tp_alloc(w.core, 16 * TP_KIB, w.streams[0], 0, &addr, &oom, &test_error),
                  TP_OUT_OF_MEMORY);
    EXPECT_EQ(oom.requested_bytes, 16 * TP_KIB);
    EXPECT_EQ(oom.budget_bytes, 512 * TP_KIB);
    EXPECT_EQ(oom.resident_bytes, 500 * TP_KIB);
    EXPECT(!oom.offload);
    MUST(world_alloc(&w, 1, 12 * TP_KIB, 0));
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

TEST(block_larger_than_the_budget_is_born_in_host) {
    world w;
    const world_options options = usual(5);
    world_open(&w, &options);
    MUST(world_alloc(&w, 0, 600 * TP_KIB, 0));
    EXPECT_EQ(world_stats(&w).born_in_host, 1);
    MUST(world_alloc(&w, 1, 300 * TP_KIB, 0));
    const int reads[] = {0, 1};
    world_op(&w, 0, reads, 2, -1); /* 900 KiB of operands in 512: some run in HOST */
    EXPECT(world_stats(&w).host_operators.count > 0);
    EXPECT(world_stats(&w).reserved.peak <= 512 * TP_KIB);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

TEST(host_budget_is_exact_and_its_end_is_an_error) {
    world w;
    world_options options = usual(6);
    options.host_bytes = 64 * TP_KIB;
    world_open(&w, &options);
    for (unsigned i = 0; i < 9; i++) (void)world_alloc(&w, i, 64 * TP_KIB, 0);
    EXPECT_EQ(world_stats(&w).block_count, 9);
    EXPECT_EQ(world_stats(&w).host_held.current, 64 * TP_KIB);
    tp_addr addr = 0;
    tp_oom oom = {0};
    EXPECT_STATUS(tp_alloc(w.core, 128 * TP_KIB, w.streams[0], 0, &addr, &oom, &test_error),
                  TP_NO_HOST_MEMORY);
    EXPECT(oom.host_side);
    EXPECT_EQ(oom.host_budget_bytes, 64 * TP_KIB);
    EXPECT(world_stats(&w).host_held.peak <= 64 * TP_KIB);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

TEST(pinned_block_stays_and_pins_have_an_end) {
    world w;
    const world_options options = usual(7);
    world_open(&w, &options);
    MUST(world_alloc(&w, 0, 400 * TP_KIB, 0));
    MUST(world_alloc(&w, 1, 100 * TP_KIB, 0));
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    EXPECT_OK(tp_pin(w.core, w.tensors[0].addr, NULL, &test_error));
    EXPECT_EQ(info_of(&w, 0).resident_bytes, 400 * TP_KIB);
    EXPECT_STATUS(tp_evict(w.core, w.tensors[0].addr, &test_error), TP_BUSY);
    MUST(world_alloc(&w, 2, 200 * TP_KIB, 0)); /* no room beside it: born in HOST */
    tp_oom oom = {0};
    EXPECT_STATUS(tp_pin(w.core, w.tensors[2].addr, &oom, &test_error), TP_OUT_OF_MEMORY);
    EXPECT_EQ(oom.pinned_bytes, 400 * TP_KIB);
    EXPECT_OK(tp_unpin(w.core, w.tensors[0].addr, &test_error));
    EXPECT_STATUS(tp_unpin(w.core, w.tensors[0].addr, &test_error), TP_INVALID);
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

TEST(unseen_block_is_never_evicted) {
    world w;
    const world_options options = usual(8);
    world_open(&w, &options);
    tp_addr addr = 0;
    MUST_OK(tp_alloc(w.core, 100 * TP_KIB, w.streams[0], 0, &addr, NULL, &test_error));
    EXPECT_EQ(tp_evict_all(w.core), 0);
    tp_mark_seen(w.core, addr);
    EXPECT_EQ(tp_evict_all(w.core), 100 * TP_KIB);
    tp_free(w.core, addr);
    world_close(&w);
}

TEST(budget_moves_while_running) {
    world w;
    const world_options options = usual(9);
    world_open(&w, &options);
    for (unsigned i = 0; i < 8; i++) MUST(world_alloc(&w, i, 60 * TP_KIB, 0));
    EXPECT_OK(tp_core_set_budget(w.core, 128 * TP_KIB, TP_NO_LIMIT, &test_error));
    EXPECT(world_stats(&w).reserved.current <= 128 * TP_KIB);
    EXPECT_OK(tp_core_check(w.core, &test_error));
    const int reads[] = {0, 1};
    world_op(&w, 1, reads, 2, 2);
    EXPECT(world_stats(&w).reserved.current <= 128 * TP_KIB);
    EXPECT_OK(tp_pin(w.core, w.tensors[3].addr, NULL, &test_error));
    EXPECT_STATUS(tp_core_set_budget(w.core, 32 * TP_KIB, TP_NO_LIMIT, &test_error),
                  TP_OUT_OF_MEMORY);
    size_t device = 0, host = 0;
    tp_core_get_budget(w.core, &device, &host);
    EXPECT_EQ(device, 128 * TP_KIB);
    EXPECT_OK(tp_unpin(w.core, w.tensors[3].addr, &test_error));
    EXPECT_OK(tp_core_set_budget(w.core, 4 * TP_MIB, TP_NO_LIMIT, &test_error));
    EXPECT_OK(tp_core_set_offload(w.core, false, &test_error));
    EXPECT_EQ(world_stats(&w).host.current, 0);
    EXPECT_EQ(world_stats(&w).host_held.current, 0);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

TEST(what_is_left_in_host_comes_home_with_a_larger_budget) {
    world w;
    world_options options = usual(11);
    options.budget_bytes = 128 * TP_KIB;
    world_open(&w, &options);
    for (unsigned i = 0; i < 6; i++) MUST(world_alloc(&w, i, 64 * TP_KIB, 0));
    EXPECT_OK(tp_core_set_offload(w.core, false, &test_error));
    EXPECT_EQ(world_stats(&w).host.current, 4 * 64 * TP_KIB); /* the budget holds two */
    EXPECT_OK(tp_core_set_budget(w.core, TP_MIB, TP_NO_LIMIT, &test_error));
    EXPECT_EQ(world_stats(&w).host.current, 0);
    const int reads[] = {0, 1, 5};
    world_op(&w, 0, reads, 3, -1);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

/* Frames of the size that is wanted are got by evicting extents of that size, a little out of order,
 * not by giving others back to the device and making new ones. */
TEST(victims_have_the_size_that_is_wanted) {
    world w;
    world_options options = usual(13);
    options.budget_bytes = 64 * TP_KIB;
    world_open(&w, &options);
    const size_t sizes[] = {8 * TP_KIB, 8 * TP_KIB, 16 * TP_KIB, 16 * TP_KIB, 16 * TP_KIB};
    for (unsigned i = 0; i < 5; i++) MUST(world_alloc(&w, i, sizes[i], 0));
    const uint64_t released = world_stats(&w).frame_releases.count;
    MUST(world_alloc(&w, 5, 16 * TP_KIB, 0));
    EXPECT_EQ(info_of(&w, 2).host_count, 1);
    EXPECT_EQ(info_of(&w, 0).host_count + info_of(&w, 1).host_count, 0);
    EXPECT_EQ(world_stats(&w).frame_releases.count, released);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

TEST(capture_stops_paging_and_defers_frees) {
    world w;
    const world_options options = usual(10);
    world_open(&w, &options);
    MUST(world_alloc(&w, 0, 64 * TP_KIB, 0));
    MUST(world_alloc(&w, 1, 64 * TP_KIB, 1));
    tp_capture_begin(w.core);
    tp_sim_set_capturing(w.dev, w.streams[2], true);
    tp_op op = {0};
    const tp_access access = {w.tensors[0].addr, false};
    tp_op_begin(w.core, &op, &access, 1, w.streams[2]);
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
    world_free(&w, 1);
    EXPECT_EQ(tp_evict_all(w.core), 0);
    tp_sim_set_capturing(w.dev, w.streams[2], false);
    tp_capture_end(w.core);
    EXPECT(info_of(&w, 0).captured);
    EXPECT_STATUS(tp_evict(w.core, w.tensors[0].addr, &test_error), TP_BUSY);
    tp_core_empty_cache(w.core);
    EXPECT(world_stats(&w).reserved.current <= 64 * TP_KIB);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

static void use_in_child(void *arg) {
    world *w = arg;
    tp_addr addr = 0;
    const tp_access access = {w->tensors[0].addr, true};
    tp_op op = {0};
    tp_op_begin(w->core, &op, &access, 1, w->streams[0]);
    tp_op_end(&op, NULL, 0, NULL);
    tp_free(w->core, w->tensors[0].addr);
    tp_core_empty_cache(w->core);
    /* Copies of its own, wherever the bytes were: the parent reads its own afterwards. */
    bool same = true;
    for (unsigned i = 0; i < 12; i++) {
        const world_tensor *t = &w->tensors[i];
        unsigned char *bytes = (unsigned char *)(uintptr_t)t->addr;
        uint64_t got = 0;
        memcpy(&got, bytes + 4096, sizeof got);
        same = same && got == (t->value ^ 4096);
        memset(bytes, 0xEE, t->bytes);
    }
    const tp_status status = tp_alloc(w->core, 8192, w->streams[0], 0, &addr, NULL, NULL);
    const bool owns = tp_owns(w->core, w->tensors[0].addr);
    raise(same && status == TP_FAILED && owns ? SIGUSR1 : SIGUSR2);
}

/* A child has no pager's thread: what it does with our blocks neither hangs nor harms the
 * parent. */
static void expect_fork_is_harmless(bool strict) {
    world w;
    world_options options = usual(12);
    options.strict = strict;
    world_open(&w, &options);
    MUST_OK(tp_register(TP_SLOT_SIM, w.core, &test_error));
    for (unsigned i = 0; i < 12; i++) MUST(world_alloc(&w, i, 60 * TP_KIB, 0));
    world_drain(&w);
    EXPECT(test_ends_by_signal(SIGUSR1, use_in_child, &w));
    for (int i = 0; i < 12; i++) {
        const int reads[] = {i};
        world_op(&w, 1, reads, 1, -1);
    }
    EXPECT_OK(tp_core_check(w.core, &test_error));
    tp_unregister(TP_SLOT_SIM);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

TEST(forked_child_has_copies_and_leaves_everything_as_it_is) {
    expect_fork_is_harmless(false);
    expect_fork_is_harmless(true);
}

/* ---- opaque regions ---- */

static void region_begin(world *w, tp_region *region, int input) {
    const tp_access access = {input >= 0 ? w->tensors[input].addr : 0, true};
    tp_region_begin(w->core, region, &access, input >= 0 ? 1 : 0, w->streams[0]);
}

static void region_end(tp_region *region) {
    tp_region_end(region);
    tp_region_fini(region);
}

TEST(wait_inside_a_region_opens_the_gate_for_its_own_thread) {
    world w;
    const world_options options = usual(20);
    world_open(&w, &options);
    for (unsigned i = 0; i < 8; i++) MUST(world_alloc(&w, i, 60 * TP_KIB, 0));
    tp_region outer = {0}, inner = {0};
    region_begin(&w, &outer, 0);
    region_begin(&w, &inner, -1);
    EXPECT_EQ(world_stats(&w).regions_open, 2);
    const uint64_t evicted = world_stats(&w).evictions.count;
    /* Twice the budget in all, inside the region: it pages, and comes back. */
    for (unsigned i = 8; i < 16; i++) MUST(world_alloc(&w, i, 60 * TP_KIB, 0));
    EXPECT(world_stats(&w).evictions.count > evicted);
    EXPECT(world_stats(&w).region_waits >= 2);
    EXPECT_EQ(world_stats(&w).born_in_host, 0);
    const int reads[] = {0, 9};
    world_op(&w, 0, reads, 2, 3);
    EXPECT_EQ(info_of(&w, 0).host_bytes, 0);
    region_end(&inner);
    region_end(&outer);
    EXPECT_EQ(world_stats(&w).regions_open, 0);
    EXPECT_EQ(world_stats(&w).region_count, 2);
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

/* A thread of its own with a region open while `main` does something. */
typedef struct other_region {
    world *w;
    tp_region region;
    pthread_t thread;
    pthread_barrier_t step;
} other_region;

static void *hold_region(void *arg) {
    other_region *other = arg;
    region_begin(other->w, &other->region, -1);
    (void)pthread_barrier_wait(&other->step);
    (void)pthread_barrier_wait(&other->step);
    region_end(&other->region);
    return NULL;
}

static void other_begin(other_region *other, world *w) {
    *other = (other_region){.w = w};
    MUST(pthread_barrier_init(&other->step, NULL, 2) == 0);
    MUST(pthread_create(&other->thread, NULL, hold_region, other) == 0);
    (void)pthread_barrier_wait(&other->step);
}

static void other_end(other_region *other) {
    (void)pthread_barrier_wait(&other->step);
    EXPECT(pthread_join(other->thread, NULL) == 0);
    (void)pthread_barrier_destroy(&other->step);
}

TEST(region_of_another_thread_keeps_the_gate_closed) {
    world w;
    const world_options options = usual(21);
    world_open(&w, &options);
    for (unsigned i = 0; i < 8; i++) MUST(world_alloc(&w, i, 60 * TP_KIB, 0));
    other_region other;
    other_begin(&other, &w);
    EXPECT_STATUS(tp_evict(w.core, w.tensors[0].addr, &test_error), TP_BUSY);
    tp_region own = {0};
    region_begin(&w, &own, 1);
    EXPECT_STATUS(tp_evict(w.core, w.tensors[2].addr, &test_error), TP_BUSY);
    MUST(world_alloc(&w, 8, 60 * TP_KIB, 0)); /* waits for a while, then is born in HOST */
    EXPECT_EQ(world_stats(&w).evictions.count, 0);
    EXPECT_EQ(world_stats(&w).born_in_host, 1);
    other_end(&other);
    EXPECT_OK(tp_evict(w.core, w.tensors[2].addr, &test_error));
    region_end(&own);
    EXPECT_OK(tp_evict(w.core, w.tensors[3].addr, &test_error));
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

TEST(lifted_region_leaves_the_gate_open_but_not_for_a_new_one) {
    world w;
    const world_options options = usual(22);
    world_open(&w, &options);
    for (unsigned i = 0; i < 4; i++) MUST(world_alloc(&w, i, 40 * TP_KIB, 0));
    tp_region outer = {0}, inner = {0};
    region_begin(&w, &outer, -1);
    tp_region_lift(w.core);
    tp_region_lift(w.core);
    region_begin(&w, &inner, -1);
    tp_region_lift(w.core);
    tp_region_unlift(w.core);
    EXPECT_EQ(world_stats(&w).regions_closed, 1);
    region_end(&inner);
    EXPECT_EQ(world_stats(&w).regions_closed, 0);
    tp_region_unlift(w.core);
    EXPECT_EQ(world_stats(&w).regions_closed, 0);
    tp_region_unlift(w.core);
    EXPECT_EQ(world_stats(&w).regions_closed, 1);
    region_end(&outer);
    EXPECT_EQ(world_stats(&w).regions_closed, 0);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

/* What is allocated in a region is no tensor by that: a library's workspace may be among it. */
TEST(block_allocated_in_a_region_is_noted_but_not_seen) {
    world w;
    const world_options options = usual(23);
    world_open(&w, &options);
    tp_region region = {0};
    region_begin(&w, &region, -1);
    tp_addr addr = 0;
    MUST_OK(tp_alloc(w.core, 40 * TP_KIB, w.streams[0], 0, &addr, NULL, &test_error));
    for (int i = 0; i < 100; i++) { /* notes of freed blocks are forgotten */
        tp_addr passing = 0;
        MUST_OK(tp_alloc(w.core, 40 * TP_KIB, w.streams[0], 0, &passing, NULL, &test_error));
        tp_free(w.core, passing);
    }
    EXPECT(region.note_capacity <= 16);
    region_end(&region);
    EXPECT_EQ(tp_evict_all(w.core), 0);
    tp_free(w.core, addr);
    world_close(&w);
}

/* ---- schedules ---- */

static void run_schedule(const world_options *options, unsigned actions, unsigned *violations) {
    world w;
    world_open(&w, options);
    for (unsigned i = 0; i < actions && test_failures() == 0; i++) world_act(&w);
    EXPECT_OK(tp_core_check(w.core, &test_error));
    if (options->rules_off == 0) {
        EXPECT(world_stats(&w).reserved.peak <= options->budget_bytes);
        EXPECT(!world_stats(&w).failed);
        if (!options->blind_writers) EXPECT_EQ(world_stats(&w).unseen_writes.count, 0);
    }
    world_close(&w);
    if (world_violations(&w) > 0 && options->rules_off == 0) {
        printf("  seed %llu: %u wrong, %u unmapped\n", (unsigned long long)options->seed,
               atomic_load(&w.wrong), atomic_load(&w.unmapped));
    }
    *violations += world_violations(&w);
}

TEST(schedules_agree_with_the_model) {
    uint64_t state = test_seed();
    unsigned violations = 0;
    const unsigned rounds = test_rounds(2000);
    for (unsigned i = 0; i < rounds && violations == 0 && test_failures() == 0; i++) {
        world_options options = usual(test_random(&state));
        options.budget_bytes = (256 + 128 * (i % 4)) * TP_KIB;
        options.strict = i % 5 == 4;
        options.no_context_marker = i % 7 == 6;
        options.fixed_sizes = i % 2 == 0;
        options.blind_writers = i % 3 == 1;
        options.no_fingerprints = i % 8 == 5;
        options.readonly_clean = i % 4 == 3 && !options.blind_writers;
        if (options.strict) options.host_bytes = 8 * TP_MIB;
        run_schedule(&options, 60, &violations);
    }
    EXPECT_EQ(violations, 0);
}

TEST(ten_thousand_operations_agree_with_the_model) {
    world_options options = usual(test_seed());
    options.budget_bytes = 384 * TP_KIB;
    options.host_bytes = 2 * TP_MIB;
    unsigned violations = 0;
    run_schedule(&options, test_rounds(10000), &violations);
    EXPECT_EQ(violations, 0);
}

typedef struct thread_arg {
    const world *host;
    uint64_t seed;
    unsigned actions, violations;
} thread_arg;

static void *run_thread(void *ptr) {
    thread_arg *arg = ptr;
    world w;
    world_join(&w, arg->host, arg->seed);
    for (unsigned i = 0; i < arg->actions; i++) world_act(&w);
    world_leave(&w);
    arg->violations = world_violations(&w);
    return NULL;
}

TEST(threads_share_a_core_and_agree_with_their_models) {
    enum { THREADS = 3 };
    uint64_t state = test_seed();
    for (unsigned round = 0; round < test_rounds(60) && test_failures() == 0; round++) {
        world_options options = usual(test_random(&state));
        options.budget_bytes = (256 + 64 * (round % 4)) * TP_KIB;
        world host;
        world_open(&host, &options);
        pthread_t threads[THREADS];
        thread_arg args[THREADS];
        for (unsigned i = 0; i < THREADS; i++) {
            args[i] = (thread_arg){&host, test_random(&state), 60, 0};
            MUST(pthread_create(&threads[i], NULL, run_thread, &args[i]) == 0);
        }
        for (unsigned i = 0; i < THREADS; i++) {
            EXPECT(pthread_join(threads[i], NULL) == 0);
            EXPECT_EQ(args[i].violations, 0);
        }
        EXPECT_OK(tp_core_check(host.core, &test_error));
        EXPECT(world_stats(&host).reserved.peak <= options.budget_bytes);
        world_close(&host);
    }
}

/* So little memory that every rule about mappings matters soon. */
static world_options tight(uint64_t seed, unsigned round) {
    world_options options = usual(seed);
    options.budget_bytes = (96 + 64 * (round % 4)) * TP_KIB;
    options.fixed_sizes = true;
    return options;
}

TEST(tight_schedules_agree_with_the_model) {
    uint64_t state = test_seed();
    unsigned violations = 0;
    const unsigned rounds = test_rounds(200);
    for (unsigned i = 0; i < rounds && violations == 0 && test_failures() == 0; i++) {
        const world_options options = tight(test_random(&state), i);
        run_schedule(&options, 150, &violations);
    }
    EXPECT_EQ(violations, 0);
}

/* Each rule, switched off, must be missed: some schedule goes wrong. */
static void expect_rule_needed(uint32_t rule, unsigned schedules) {
    uint64_t state = test_seed();
    unsigned violations = 0, tried = 0;
    for (; tried < schedules && violations == 0; tried++) {
        world_options options = tight(test_random(&state), tried);
        options.blind_writers = rule == TP_RULE_FINGERPRINT;
        options.rules_off = rule;
        run_schedule(&options, 150, &violations);
    }
    if (!EXPECT(violations > 0)) return;
    printf("  rule %#x off: wrong after %u schedules\n", rule, tried);
}

#define RULE_TEST(name, rule, schedules)                                                       \
    TEST(schedules_go_wrong_without_##name) { expect_rule_needed(rule, schedules); }

RULE_TEST(context_markers, TP_RULE_CONTEXT_MARKER, 3000)
RULE_TEST(pins, TP_RULE_PIN, 3000)
RULE_TEST(gate, TP_RULE_GATE, 3000)
RULE_TEST(region_waits, TP_RULE_REGION_WAIT | TP_RULE_FINGERPRINT, 3000)
RULE_TEST(region_writes, TP_RULE_REGION_WRITES | TP_RULE_FINGERPRINT, 3000)
RULE_TEST(region_order, TP_RULE_REGION_ORDER | TP_RULE_FINGERPRINT, 3000)
RULE_TEST(old_mappings, TP_RULE_OLD_MAPPING, 3000)
RULE_TEST(same_stream_reuse, TP_RULE_SAME_STREAM, 3000)
/* Fingerprints find what some of the rules would lose: they go off together. */
RULE_TEST(write_back_order, TP_RULE_WRITE_BACK_ORDER | TP_RULE_FINGERPRINT, 3000)
RULE_TEST(fill_completion, TP_RULE_FILL_COMPLETE, 3000)
RULE_TEST(written_meanwhile, TP_RULE_WRITTEN_MEANWHILE | TP_RULE_FINGERPRINT, 3000)
RULE_TEST(fingerprints, TP_RULE_FINGERPRINT, 3000)

/* Three rules are seldom needed by chance: each has a scene of its own. */

/* A kernel still has to write to a block in HOST when the block's fill is asked for. */
static unsigned write_in_host_then_fill(uint64_t seed, uint32_t rules_off) {
    world w;
    world_options options = usual(seed);
    options.budget_bytes = 64 * TP_KIB;
    options.rules_off = rules_off;
    world_open(&w, &options);
    MUST(world_alloc(&w, 0, 32 * TP_KIB, 0));
    world_drain(&w);
    MUST(world_alloc(&w, 1, 64 * TP_KIB, 1)); /* waits until the first one is in HOST */
    EXPECT_EQ(info_of(&w, 0).host_count, 2);
    MUST_OK(tp_pin(w.core, w.tensors[1].addr, NULL, &test_error));
    world_drain(&w);
    world_idle(&w, 0, 40);
    world_op(&w, 0, NULL, 0, 0); /* no room: over HOST, some time later */
    EXPECT(world_stats(&w).host_operators.count > 0);
    world_free(&w, 1); /* its frames are free at once, with no marker of stream 0 in the way */
    const int reads[] = {0};
    world_op(&w, 2, reads, 1, -1);
    world_close(&w);
    return world_violations(&w);
}

static void *evict_first(void *arg) {
    world *w = arg;
    /* May be called off: the block is freed meanwhile. */
    if (tp_evict(w->core, w->tensors[0].addr, NULL) != TP_OK) return NULL;
    return NULL;
}

/* A block is freed while it is being written back; its host frame serves another block at once. */
static unsigned free_while_writing_back(uint64_t seed, uint32_t rules_off) {
    world w;
    world_options options = usual(seed);
    options.budget_bytes = 64 * TP_KIB;
    options.rules_off = rules_off;
    options.copy_idles = 200;
    world_open(&w, &options);
    MUST(world_alloc(&w, 0, 16 * TP_KIB, 0));
    world_drain(&w);
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, evict_first, &w) == 0);
    while (info_of(&w, 0).busy_count == 0 && info_of(&w, 0).host_count == 0) continue;
    world_free(&w, 0);
    EXPECT(pthread_join(thread, NULL) == 0);
    const struct timespec moment = {0, 300000};
    (void)nanosleep(&moment, NULL);
    /* Larger than the budget, so born in HOST, where a kernel that nobody announced writes to it. */
    MUST(world_alloc_blind(&w, 1, 80 * TP_KIB, 0));
    EXPECT_EQ(world_stats(&w).born_in_host, 1);
    world_drain(&w);
    for (int i = 0; i < 400; i++) (void)tp_sim_step(w.dev);
    const int reads[] = {1};
    world_op(&w, 0, reads, 1, -1);
    world_close(&w);
    return world_violations(&w);
}

static void *alloc_and_free(void *arg) {
    world *w = arg;
    tp_addr addr = 0;
    EXPECT_OK(tp_alloc(w->core, 16 * TP_KIB, w->streams[2], 0, &addr, NULL, &test_error));
    tp_free(w->core, addr);
    return NULL;
}

/* An eviction was decided before a region's kernel was launched, and waits for the gate, which opens
 * when the region's own thread waits for memory. */
static unsigned launch_in_region_then_wait(uint64_t seed, uint32_t rules_off) {
    world w;
    world_options options = usual(seed);
    options.budget_bytes = 64 * TP_KIB;
    options.rules_off = rules_off;
    world_open(&w, &options);
    for (unsigned i = 0; i < 4; i++) MUST(world_alloc(&w, i, 16 * TP_KIB, 0));
    world_drain(&w);
    tp_region region = {0};
    region_begin(&w, &region, -1);
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, alloc_and_free, &w) == 0);
    EXPECT(pthread_join(thread, NULL) == 0); /* it was born in HOST: the gate is closed */
    EXPECT_EQ(world_stats(&w).evictions.count, 0);
    world_drain(&w);
    world_blind_read(&w, 1, 0, false);
    MUST(world_alloc(&w, 4, 16 * TP_KIB, 0));
    EXPECT_EQ(info_of(&w, 0).host_count, 1);
    region_end(&region);
    world_close(&w);
    return world_violations(&w);
}

static void expect_scene_needs(unsigned (*scene)(uint64_t seed, uint32_t rules_off),
                               uint32_t rule, unsigned rounds) {
    uint64_t state = test_seed();
    unsigned with = 0, without = 0;
    for (unsigned i = 0; i < rounds && test_failures() == 0; i++) {
        const uint64_t seed = test_random(&state);
        with += scene(seed, 0);
        without += scene(seed, rule);
    }
    EXPECT_EQ(with, 0);
    EXPECT(without > 0);
}

TEST(fill_waits_for_writes_over_host) {
    expect_scene_needs(write_in_host_then_fill, TP_RULE_FILL_ORDER, 40);
}

TEST(frames_of_a_freed_block_wait_for_its_write_back) {
    expect_scene_needs(free_while_writing_back, TP_RULE_BUSY_FRAME, 40);
}

TEST(gate_opens_for_a_wait_only_behind_what_its_region_has_launched) {
    expect_scene_needs(launch_in_region_then_wait, TP_RULE_REGION_WAIT | TP_RULE_FINGERPRINT,
                       8);
}
