/* Clean is verified, not believed: kernels that write without being announced, between every two
 * steps of a write-back and an eviction. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <signal.h>
#include <string.h>
#include <time.h>

#include "base/bytes.h"
#include "harness.h"
#include "world.h"

static world_options quiet(uint64_t seed) {
    return (world_options){.budget_bytes = 512 * TP_KIB,
                           .host_bytes = TP_NO_LIMIT,
                           .granularity_bytes = 4 * TP_KIB,
                           .extent_bytes = 16 * TP_KIB,
                           .seed = seed,
                           .offload = true,
                           .gentle = true};
}

static void read_back(world *w, unsigned stream) {
    const int reads[] = {0};
    world_op(w, stream, reads, 1, -1);
}

/* Tensor 0, in two extents, CLEAN: evicted once and read again. */
static void open_clean(world *w, const world_options *options) {
    world_open(w, options);
    MUST(world_alloc(w, 0, 32 * TP_KIB, 0));
    MUST_OK(tp_evict(w->core, w->tensors[0].addr, &test_error));
    read_back(w, 0);
    world_drain(w);
}

static unsigned write_to_clean_then_evict(uint64_t seed, uint32_t rules_off) {
    world w;
    world_options options = quiet(seed);
    options.rules_off = rules_off;
    open_clean(&w, &options);
    world_blind_write(&w, 1 + (unsigned)(seed % 2), 0); /* runs some time later */
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    read_back(&w, 0);
    world_drain(&w);
    const tp_stats stats = world_stats(&w);
    EXPECT_EQ(stats.unseen_writes.count, rules_off == 0 ? 2 : 0);
    EXPECT_EQ(stats.unseen_writes.bytes, rules_off == 0 ? 32 * TP_KIB : 0);
    world_close(&w);
    return world_violations(&w);
}

TEST(blind_write_to_a_clean_block_is_found_before_its_eviction) {
    unsigned with = 0, without = 0;
    for (uint64_t i = 0; i < 12; i++) {
        with += write_to_clean_then_evict(test_seed() + i, 0);
        without += write_to_clean_then_evict(test_seed() + i, TP_RULE_FINGERPRINT);
    }
    EXPECT_EQ(with, 0);
    EXPECT(without > 0);
}

/* The operators' stream has finished; another one, that nobody knows of, has not. */
TEST(blind_write_behind_a_write_back_is_found_before_the_eviction_it_is_for) {
    for (uint64_t i = 0; i < 12; i++) {
        world w;
        const world_options options = quiet(test_seed() + i);
        world_open(&w, &options);
        MUST(world_alloc(&w, 0, 32 * TP_KIB, 0));
        world_drain(&w);
        world_idle(&w, 1, 30);
        world_blind_write(&w, 1, 0);
        EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
        read_back(&w, 0);
        world_close(&w);
        EXPECT_EQ(world_violations(&w), 0);
    }
}

TEST(block_that_nobody_wrote_is_evicted_without_a_copy_after_one_look) {
    world w;
    const world_options options = quiet(test_seed());
    open_clean(&w, &options);
    const tp_stats before = world_stats(&w);
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    const tp_stats after = world_stats(&w);
    EXPECT_EQ(after.write_backs.count, before.write_backs.count);
    EXPECT_EQ(after.fingerprints.count, before.fingerprints.count + 2);
    EXPECT_EQ(after.unseen_writes.count, 0);
    EXPECT_EQ(after.unproven.count, 0);
    world_close(&w);
}

/* Six extents are filled into free memory before others have to be written back: copies of both
 * kinds share few places for fingerprints, and finished fills stay where they are until the
 * operator, which pins them, has gathered everything. */
TEST(operator_gathers_memory_by_write_backs_while_its_finished_fills_wait) {
    enum { OPERANDS = 4, FIXED = OPERANDS, OTHERS = 11 };
    world w;
    world_options options = quiet(test_seed());
    options.budget_bytes = 64 * TP_KIB;
    world_open(&w, &options);
    MUST(world_alloc(&w, FIXED, 64 * TP_KIB, 0));
    MUST_OK(tp_pin(w.core, w.tensors[FIXED].addr, NULL, &test_error));
    int reads[OPERANDS];
    for (unsigned i = 0; i < OPERANDS; i++) { /* born, and written, in HOST */
        reads[i] = (int)i;
        MUST(world_alloc(&w, i, 48 * TP_KIB, 0));
    }
    MUST_OK(tp_unpin(w.core, w.tensors[FIXED].addr, &test_error));
    MUST_OK(tp_core_set_budget(w.core, 512 * TP_KIB, TP_NO_LIMIT, &test_error));
    for (unsigned i = FIXED + 1; i <= FIXED + OTHERS; i++) {
        MUST(world_alloc(&w, i, 32 * TP_KIB, 0));
    }
    world_drain(&w);
    const tp_stats before = world_stats(&w);
    world_op(&w, 0, reads, OPERANDS, -1);
    world_drain(&w);
    EXPECT_EQ(world_stats(&w).fills.count, before.fills.count + 3 * OPERANDS);
    EXPECT(world_stats(&w).write_backs.count > before.write_backs.count);
    EXPECT_EQ(world_stats(&w).host_operators.count, before.host_operators.count);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

/* What was written over HOST is another content: its fingerprint is taken when it is filled. */
TEST(block_written_in_host_is_proven_anew) {
    world w;
    world_options options = quiet(test_seed());
    options.budget_bytes = 64 * TP_KIB;
    world_open(&w, &options);
    MUST(world_alloc(&w, 0, 80 * TP_KIB,
                     0)); /* born in HOST; the fifth extent is written there */
    world_drain(&w);
    EXPECT_EQ(world_stats(&w).fills.count, 4);
    EXPECT_OK(tp_core_set_budget(w.core, 512 * TP_KIB, TP_NO_LIMIT, &test_error));
    read_back(&w, 0);
    world_drain(&w);
    EXPECT_EQ(world_stats(&w).fills.count, 5);
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    EXPECT_EQ(world_stats(&w).write_backs.count, 4);
    EXPECT_EQ(world_stats(&w).unproven.count, 0);
    EXPECT_EQ(world_stats(&w).unseen_writes.count, 0);
    read_back(&w, 1);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

/* The same for a block that had a fingerprint: an operator without room writes over HOST. */
TEST(announced_write_over_host_is_no_unseen_one) {
    world w;
    world_options options = quiet(test_seed());
    options.budget_bytes = 64 * TP_KIB;
    world_open(&w, &options);
    MUST(world_alloc(&w, 0, 32 * TP_KIB, 0));
    world_drain(&w);
    MUST(world_alloc(&w, 1, 64 * TP_KIB, 1)); /* waits until the first one is in HOST */
    MUST_OK(tp_pin(w.core, w.tensors[1].addr, NULL, &test_error));
    world_op(&w, 0, NULL, 0, 0);
    EXPECT(world_stats(&w).host_operators.count > 0);
    world_drain(&w);
    world_free(&w, 1);
    read_back(&w, 0);
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    EXPECT_EQ(world_stats(&w).unseen_writes.count, 0);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

/* ---- writes at every point of a write-back ------------------------------------------------------- */

typedef enum point { BEFORE_FINGERPRINT, BETWEEN, BEHIND_COPY, POINT_COUNT } point;

static tp_status (*plain_copy)(tp_device *dev, tp_copy_dir dir, tp_addr dst, tp_addr src,
                               size_t bytes, tp_error *error);
static tp_status (*plain_fingerprint)(tp_device *dev, tp_stream stream, tp_addr addr,
                                      size_t bytes, uint32_t place, tp_error *error);
static tp_device_ops watched_ops;
/* Set by the test, read where the pager's thread copies. */
static world *_Atomic watched;
static _Atomic point write_at;
static atomic_int writes_left;
static atomic_int idles_before, idles_behind; /* of a check */
static atomic_int idles_copy;                 /* before a write-back */

static void idle(tp_device *dev, void *arg) {
    (void)dev;
    (void)arg;
}

static void poke(tp_device *dev, void *arg) {
    const world_tensor *t = arg;
    for (size_t at = 0; at < t->bytes; at += 2048) {
        const uint64_t value = t->value ^ at;
        EXPECT(tp_sim_write(dev, t->addr + at, &value, sizeof value));
    }
}

/* On the fingerprint's or the copy's own stream, so that it runs exactly there. */
static void write_now(tp_device *dev, tp_stream stream, point here) {
    if (here != write_at || writes_left == 0) return;
    writes_left--;
    world_tensor *target = &watched->tensors[0];
    target->value += 1 << 20;
    MUST_OK(tp_sim_launch(dev, stream, poke, target, 1, &test_error));
}

static tp_status watched_copy(tp_device *dev, tp_copy_dir dir, tp_addr dst, tp_addr src,
                              size_t bytes, tp_error *error) {
    const tp_stream stream = dev->copy_stream[dir];
    if (dir == TP_COPY_TO_HOST) write_now(dev, stream, BETWEEN);
    for (int i = 0; dir == TP_COPY_TO_HOST && i < idles_copy; i++) {
        MUST_OK(tp_sim_launch(dev, stream, idle, NULL, 1, &test_error));
    }
    const tp_status status = plain_copy(dev, dir, dst, src, bytes, error);
    if (dir == TP_COPY_TO_HOST) write_now(dev, stream, BEHIND_COPY);
    return status;
}

static tp_status watched_fingerprint(tp_device *dev, tp_stream stream, tp_addr addr,
                                     size_t bytes, uint32_t place, tp_error *error) {
    if (stream == dev->print_stream) write_now(dev, stream, BEFORE_FINGERPRINT);
    const bool check = stream == dev->check_stream;
    for (int i = 0; check && i < idles_before; i++) {
        MUST_OK(tp_sim_launch(dev, stream, idle, NULL, 1, &test_error));
    }
    const tp_status status = plain_fingerprint(dev, stream, addr, bytes, place, error);
    for (int i = 0; check && i < idles_behind; i++) {
        MUST_OK(tp_sim_launch(dev, stream, idle, NULL, 1, &test_error));
    }
    return status;
}

static void watch_device(tp_device *dev) {
    plain_copy = dev->ops->copy;
    plain_fingerprint = dev->ops->fingerprint;
    watched_ops = *dev->ops;
    watched_ops.copy = watched_copy;
    watched_ops.fingerprint = watched_fingerprint;
    dev->ops = &watched_ops;
}

/* Options of a world whose copies and fingerprints pass through here. */
static world_options watched_quiet(uint64_t seed) {
    world_options options = quiet(seed);
    options.prepare = watch_device;
    return options;
}

static void write_into(world *w, point where, int writes) {
    watched = w;
    write_at = where;
    writes_left = writes;
}

TEST(blind_write_anywhere_in_a_write_back_is_kept) {
    for (int where = 0; where < POINT_COUNT; where++) {
        world w;
        const world_options options = watched_quiet(test_seed());
        world_open(&w, &options);
        MUST(world_alloc(&w, 0, 16 * TP_KIB, 0));
        world_drain(&w);
        write_into(&w, (point)where, 1);
        EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
        EXPECT_EQ(writes_left, 0);
        read_back(&w, 1);
        world_drain(&w);
        EXPECT_EQ(world_stats(&w).unseen_writes.count, where == BEFORE_FINGERPRINT ? 0 : 1);
        world_close(&w);
        EXPECT_EQ(world_violations(&w), 0);
    }
}

/* Somebody writes as often as it is copied: the eviction ends, and the block is left alone. */
TEST(eviction_of_a_block_that_is_always_written_is_given_up) {
    world w;
    const world_options options = watched_quiet(test_seed());
    world_open(&w, &options);
    MUST(world_alloc(&w, 0, 16 * TP_KIB, 0));
    MUST(world_alloc(&w, 1, 16 * TP_KIB, 0));
    world_drain(&w);
    write_into(&w, BEHIND_COPY, 1000);
    EXPECT_STATUS(tp_evict(w.core, w.tensors[0].addr, &test_error), TP_BUSY);
    EXPECT_EQ(world_stats(&w).unseen_writes.count, 2);
    EXPECT_EQ(writes_left, 998);
    writes_left = 0;
    read_back(&w, 1);
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    read_back(&w, 2);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

static void *evict_first(void *arg) {
    world *w = arg;
    /* May be called off, by an operator or the end of the block. */
    if (tp_evict(w->core, w->tensors[0].addr, NULL) != TP_OK) return NULL;
    return NULL;
}

/* Of many extents found different most wait for the link when an operator, or the end of the block,
 * calls the eviction off: the next one begins anew. */
static void call_off_copies(bool by_operator) {
    enum { EXTENTS = 12 };
    world w;
    const world_options options = watched_quiet(test_seed());
    world_open(&w, &options);
    MUST(world_alloc(&w, 0, EXTENTS * options.extent_bytes, 0));
    MUST_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    read_back(&w, 0);
    world_blind_write(&w, 0, 0);
    world_drain(&w);
    write_into(&w, POINT_COUNT, 0);
    idles_copy = 3000;
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, evict_first, &w) == 0);
    while (world_stats(&w).unseen_writes.count < EXTENTS) continue;
    if (by_operator) {
        read_back(&w, 0);
    } else {
        world_free(&w, 0);
    }
    EXPECT_OK(tp_core_check(w.core, &test_error));
    EXPECT(pthread_join(thread, NULL) == 0);
    idles_copy = 0;
    EXPECT_EQ(world_stats(&w).unseen_writes.count, EXTENTS);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

TEST(eviction_called_off_forgets_the_writes_it_has_found) {
    call_off_copies(true);
    call_off_copies(false);
}

/* A check that takes long is called off: its frame, which it still reads, may not go away. */
static void call_off_a_check(bool by_operator) {
    world w;
    const world_options options = watched_quiet(test_seed());
    open_clean(&w, &options);
    read_back(&w, 1); /* two streams: the end of the block is marked on each of them alone */
    world_drain(&w);
    write_into(&w, POINT_COUNT, 0);
    idles_before = 2000;
    const uint64_t before = world_stats(&w).fingerprints.count;
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, evict_first, &w) == 0);
    while (world_stats(&w).fingerprints.count == before) continue;
    if (by_operator) {
        read_back(&w, 0);
        EXPECT(pthread_join(thread, NULL) == 0);
        const struct timespec moment = {0, 3000000}; /* for the pager's thread to see it */
        (void)nanosleep(&moment, NULL);
    }
    world_free(&w, 0);
    if (!by_operator) EXPECT(pthread_join(thread, NULL) == 0);
    tp_core_empty_cache(w.core);
    EXPECT_EQ(world_stats(&w).reserved.current, 0);
    idles_before = 0;
    for (int i = 0; i < 5000; i++) (void)tp_sim_step(w.dev);
    MUST(world_alloc(&w, 1, 32 * TP_KIB, 0)); /* the device has not been lost */
    EXPECT_OK(tp_evict(w.core, w.tensors[1].addr, &test_error));
    EXPECT(!world_stats(&w).failed);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

TEST(frame_stays_while_a_fingerprint_of_it_is_computed) {
    call_off_a_check(false);
    call_off_a_check(true);
}

/* The check has been computed, and is not yet known to be, when a region's kernel writes. */
TEST(region_that_was_open_since_a_check_calls_for_another) {
    world w;
    const world_options options = watched_quiet(test_seed());
    world_open(&w, &options);
    MUST(world_alloc(&w, 0, 16 * TP_KIB, 0));
    MUST_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    read_back(&w, 0);
    world_drain(&w);
    write_into(&w, POINT_COUNT, 0);
    idles_behind = 2000;
    tp_sim_counts before, now;
    tp_sim_get_counts(w.dev, &before);
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, evict_first, &w) == 0);
    do {
        tp_sim_get_counts(w.dev, &now);
    } while (now.fingerprints == before.fingerprints);
    tp_region region = {0};
    tp_region_begin(w.core, &region, NULL, 0, w.streams[0]);
    tp_block_info info;
    MUST(tp_block_query(w.core, w.tensors[0].addr, &info));
    world_blind_write(&w, 1, 0);
    tp_region_end(&region);
    tp_region_fini(&region);
    EXPECT(pthread_join(thread, NULL) == 0);
    idles_behind = 0;
    /* Unless this thread was so late that the eviction had ended before. Whoever asked for it may have
     * been told that it has to wait for the region; it goes on behind it. */
    const uint64_t wanted = info.host_count == 0 ? 1 : 0;
    const struct timespec moment = {0, 1000000};
    for (int i = 0; i < 5000 && world_stats(&w).unseen_writes.count < wanted; i++) {
        world_drain(&w);
        (void)nanosleep(&moment, NULL);
    }
    EXPECT_EQ(world_stats(&w).unseen_writes.count, wanted);
    read_back(&w, 0);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

/* ---- who says so --------------------------------------------------------------------------------- */

TEST(marked_block_is_copied_and_one_that_operators_wrote_is_left_alone) {
    world w;
    const world_options options = quiet(test_seed());
    open_clean(&w, &options);
    const uint64_t before = tp_use_clock(w.core);
    world_blind_write(&w, 1, 0);
    const tp_addr addrs[] = {8, w.tensors[0].addr};
    tp_mark_written(w.core, addrs, 2, before);
    tp_block_info info;
    MUST(tp_block_query(w.core, w.tensors[0].addr, &info));
    EXPECT_EQ(info.dirty_count, 2);
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    EXPECT_EQ(world_stats(&w).unseen_writes.count, 0);
    world_op(&w, 0, NULL, 0, 0); /* announced */
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    read_back(&w, 0);
    tp_mark_written(w.core, addrs, 2, before);
    MUST(tp_block_query(w.core, w.tensors[0].addr, &info));
    EXPECT_EQ(info.clean_count, 2);
    tp_mark_written(w.core, addrs, 2, tp_use_clock(w.core));
    MUST(tp_block_query(w.core, w.tensors[0].addr, &info));
    EXPECT_EQ(info.dirty_count, 2);
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

static void write_blindly(void *arg) {
    const world_tensor *t = arg;
    *(volatile uint64_t *)(uintptr_t)(t->addr + 16384) = 1;
}

TEST(clean_block_is_read_only_if_asked_for) {
    world w;
    world_options options = quiet(test_seed());
    options.readonly_clean = true;
    open_clean(&w, &options);
    EXPECT(test_ends_by_signal(SIGSEGV, write_blindly, &w.tensors[0]));
    world_op(&w, 0, NULL, 0, 0); /* an announced write makes it writable first */
    world_drain(&w);
    world_blind_write(&w, 0, 0);
    world_drain(&w);
    EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
    world_blind_write(&w, 0, 0); /* in HOST */
    read_back(&w, 0);
    world_drain(&w);
    world_free(&w, 0); /* what comes next at the address is writable */
    MUST(world_alloc(&w, 1, 32 * TP_KIB, 0));
    world_close(&w);
    EXPECT_EQ(world_violations(&w), 0);
}

/* ---- without fingerprints ------------------------------------------------------------------------ */

TEST(without_fingerprints_every_eviction_copies) {
    for (uint64_t i = 0; i < 12; i++) {
        world w;
        world_options options = quiet(test_seed() + i);
        options.no_fingerprints = true;
        open_clean(&w, &options);
        /* Somebody has waited for memory: from then on uses are marked one by one. */
        MUST(world_alloc(&w, 1, 500 * TP_KIB, 0));
        world_free(&w, 1);
        read_back(&w, 0);
        world_drain(&w);
        const uint64_t before = world_stats(&w).write_backs.count;
        const uint64_t unproven = world_stats(&w).unproven.count;
        world_idle(&w, 1, 30);
        world_blind_write(&w, 1, 0);
        EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
        EXPECT_EQ(world_stats(&w).write_backs.count, before + 2);
        EXPECT_EQ(world_stats(&w).unproven.count, unproven + 2);
        EXPECT_EQ(world_stats(&w).fingerprints.count, 0);
        read_back(&w, 0);
        /* Also what is DIRTY, while a stream that nobody knows of is still at work on it. */
        world_op(&w, 0, NULL, 0, 0);
        world_drain(&w);
        world_idle(&w, 1, 30);
        world_blind_write(&w, 1, 0);
        EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
        read_back(&w, 0);
        world_close(&w);
        EXPECT_EQ(world_violations(&w), 0);
    }
}

/* ---- the hook -------------------------------------------------------------------------------------- */

typedef struct told {
    unsigned count;
    tp_addr addr;
    size_t bytes;
} told;

static void on_unseen_write(void *ctx, tp_addr addr, size_t bytes) {
    told *t = ctx;
    t->count++;
    t->addr = addr;
    t->bytes = bytes;
}

TEST(first_unseen_write_is_told_once) {
    world w;
    told heard = {0};
    const world_options options = quiet(test_seed());
    open_clean(&w, &options);
    const tp_hooks hooks = {.ctx = &heard, .unseen_write = on_unseen_write};
    tp_core_set_hooks(w.core, &hooks);
    for (int i = 0; i < 2; i++) {
        world_blind_write(&w, 1, 0);
        EXPECT_OK(tp_evict(w.core, w.tensors[0].addr, &test_error));
        read_back(&w, 0);
        world_drain(&w);
    }
    EXPECT_EQ(world_stats(&w).unseen_writes.count, 4);
    const tp_addr addr = w.tensors[0].addr;
    world_close(&w); /* which ends the thread that tells */
    EXPECT_EQ(heard.count, 1);
    EXPECT_EQ(heard.addr, addr);
    EXPECT_EQ(heard.bytes, 32 * TP_KIB);
}
