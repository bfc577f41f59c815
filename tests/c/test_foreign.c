/* The budget shared with another allocator, which is faked here: it holds what it likes up
 * to the cap it was last given. At every instant, frames and what it holds stay within the
 * limit. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <string.h>
#include <time.h>

#include "harness.h"
#include "rig.h"

enum { LIMIT = 512 * 1024 };

typedef struct foreign {
    rig *r;
    pthread_mutex_t mutex;
    size_t held, unused, cap; /* unused: of what is held, what a flush gives back */
    atomic_size_t limit;      /* the budget, or the larger one while it changes */
    atomic_uint over;         /* instants at which the sum was more */
    unsigned flushes;
    bool greedy;   /* grows to each new cap at once */
    tp_addr evict; /* to be evicted when somebody asks what is held */
} foreign;

/* Needs f->mutex: what is held stays, so any number of frames that is seen counts. */
static void look(foreign *f) {
    tp_sim_counts counts;
    tp_sim_get_counts(f->r->sim, &counts);
    if (counts.device_frames_bytes + f->held > atomic_load(&f->limit))
        atomic_fetch_add(&f->over, 1);
}

static size_t hook_cap(void *ctx, size_t cap_bytes) {
    foreign *f = ctx;
    pthread_mutex_lock(&f->mutex);
    f->cap = cap_bytes > f->held ? cap_bytes : f->held;
    if (f->greedy) f->held = f->cap;
    look(f);
    const size_t bound = f->cap;
    pthread_mutex_unlock(&f->mutex);
    return bound;
}

static size_t hook_held(void *ctx) {
    foreign *f = ctx;
    if (f->evict != 0 && tp_evict(f->r->core, f->evict, NULL) != TP_OK) f->evict = 0;
    pthread_mutex_lock(&f->mutex);
    const size_t held = f->held;
    pthread_mutex_unlock(&f->mutex);
    return held;
}

static void hook_flush(void *ctx) {
    foreign *f = ctx;
    pthread_mutex_lock(&f->mutex);
    f->held -= f->unused;
    f->unused = 0;
    f->flushes++;
    pthread_mutex_unlock(&f->mutex);
}

static bool grow(foreign *f, size_t bytes) {
    pthread_mutex_lock(&f->mutex);
    const bool fits = f->held + bytes <= f->cap;
    if (fits) f->held += bytes;
    look(f);
    pthread_mutex_unlock(&f->mutex);
    return fits;
}

static void open_shared(rig *r, foreign *f) {
    memset(f, 0, sizeof *f);
    f->r = r;
    atomic_store(&f->limit, (size_t)LIMIT);
    MUST(pthread_mutex_init(&f->mutex, NULL) == 0);
    const tp_hooks hooks = {.ctx = f,
                            .foreign_cap = hook_cap,
                            .foreign_held = hook_held,
                            .foreign_flush = hook_flush};
    rig_open(r, &(rig_options){.budget_bytes = LIMIT, .hooks = &hooks});
    MUST_OK(tp_core_set_budget(r->core, LIMIT, TP_NO_LIMIT, &test_error));
}

static void close_shared(rig *r, foreign *f) {
    EXPECT_OK(tp_core_check(r->core, &test_error));
    EXPECT_EQ(atomic_load(&f->over), 0);
    rig_close(r);
    EXPECT_EQ(atomic_load(&r->wrong), 0);
    (void)pthread_mutex_destroy(&f->mutex);
}

/* Tensors that have been used and may be evicted. */
static tp_addr fill_with_tensors(rig *r, size_t bytes) {
    tp_addr addr = 0;
    for (size_t at = 0; at < bytes; at += RIG_EXTENT) {
        addr = rig_alloc(r, RIG_EXTENT, 0);
        rig_op(r, 0, addr, RIG_EXTENT, 1, true);
    }
    return addr;
}

TEST(room_for_the_foreign_allocator_is_taken_from_frames_first) {
    rig r;
    foreign f;
    open_shared(&r, &f);
    EXPECT_EQ(f.cap, LIMIT / 64); /* a little room */
    MUST(grow(&f, f.cap));
    fill_with_tensors(&r, LIMIT);
    EXPECT_EQ(rig_stats(&r).reserved.peak, LIMIT - RIG_EXTENT); /* whole extents */
    const tp_addr half = rig_alloc(&r, RIG_EXTENT / 2, 0);      /* now nothing is left */
    EXPECT_EQ(rig_info(&r, half).resident_bytes, RIG_EXTENT / 2);
    f.greedy = true;
    EXPECT_OK(tp_core_set_budget(r.core, LIMIT, TP_NO_LIMIT, &test_error));
    EXPECT_EQ(atomic_load(&f.over), 0);
    EXPECT_OK(tp_core_set_budget(r.core, LIMIT - RIG_EXTENT, TP_NO_LIMIT, &test_error));
    atomic_store(&f.limit, (size_t)LIMIT - RIG_EXTENT);
    EXPECT_OK(tp_core_set_budget(r.core, LIMIT - RIG_EXTENT, TP_NO_LIMIT, &test_error));
    close_shared(&r, &f);
}

TEST(yielding_evicts_and_grants_what_was_asked) {
    rig r;
    foreign f;
    open_shared(&r, &f);
    fill_with_tensors(&r, LIMIT);
    EXPECT(!grow(&f, 64 * TP_KIB));
    size_t granted = 0;
    EXPECT_OK(tp_core_yield_to_foreign(r.core, 64 * TP_KIB, &granted, &test_error));
    EXPECT_EQ(granted, f.cap);
    EXPECT(granted >= 64 * TP_KIB);
    EXPECT(rig_stats(&r).reserved.current + granted <= LIMIT);
    EXPECT(grow(&f, 64 * TP_KIB));
    EXPECT_EQ(rig_stats(&r).foreign_cap, granted);
    close_shared(&r, &f);
}

TEST(yielding_more_than_there_is_is_refused_and_changes_nothing) {
    rig r;
    foreign f;
    open_shared(&r, &f);
    const tp_addr pinned = fill_with_tensors(&r, RIG_EXTENT);
    EXPECT_OK(tp_pin(r.core, pinned, NULL, &test_error));
    const size_t cap = f.cap, sizes[] = {LIMIT, LIMIT + 1, SIZE_MAX, SIZE_MAX - LIMIT / 2};
    (void)grow(&f, 4096);
    for (int i = 0; i < 4; i++) {
        size_t granted = 77;
        EXPECT_STATUS(tp_core_yield_to_foreign(r.core, sizes[i], &granted, &test_error),
                      TP_OUT_OF_MEMORY);
        EXPECT_EQ(granted, 77);
        EXPECT_EQ(f.cap, cap);
        EXPECT_EQ(rig_stats(&r).foreign_cap, cap);
    }
    close_shared(&r, &f);
}

TEST(lowering_below_what_the_foreign_allocator_holds_fails_and_changes_nothing) {
    rig r;
    foreign f;
    open_shared(&r, &f);
    size_t granted = 0;
    EXPECT_OK(tp_core_yield_to_foreign(r.core, 300 * TP_KIB, &granted, &test_error));
    MUST(grow(&f, 300 * TP_KIB));
    const tp_addr a = fill_with_tensors(&r, 64 * TP_KIB);
    EXPECT_STATUS(tp_core_set_budget(r.core, 256 * TP_KIB, 0, &test_error), TP_OUT_OF_MEMORY);
    size_t device = 0, host = 0;
    tp_core_get_budget(r.core, &device, &host);
    EXPECT_EQ(device, LIMIT);
    EXPECT_EQ(host, TP_NO_LIMIT);
    EXPECT_EQ(f.cap, granted);
    EXPECT_EQ(rig_stats(&r).foreign_cap, granted);
    EXPECT_EQ(rig_info(&r, a).resident_bytes, RIG_EXTENT);
    EXPECT_OK(tp_core_set_budget(r.core, 400 * TP_KIB, TP_NO_LIMIT, &test_error));
    atomic_store(&f.limit, 400 * TP_KIB);
    fill_with_tensors(&r, 128 * TP_KIB);
    close_shared(&r, &f);
}

TEST(lowering_makes_the_foreign_allocator_give_up_its_cache_first) {
    rig r;
    foreign f;
    open_shared(&r, &f);
    size_t granted = 0;
    EXPECT_OK(tp_core_yield_to_foreign(r.core, 300 * TP_KIB, &granted, &test_error));
    MUST(grow(&f, 300 * TP_KIB));
    f.unused = 200 * TP_KIB;
    EXPECT_OK(tp_core_set_budget(r.core, 256 * TP_KIB, TP_NO_LIMIT, &test_error));
    EXPECT_EQ(f.flushes, 1);
    EXPECT(f.cap >= 100 * TP_KIB && f.cap <= 256 * TP_KIB);
    close_shared(&r, &f);
}

/* What the foreign allocator may hold but does not goes to a tensor before the host does. */
TEST(unused_cap_is_taken_back_also_for_a_block_larger_than_our_share) {
    rig r;
    foreign f;
    open_shared(&r, &f);
    size_t granted = 0;
    EXPECT_OK(tp_core_yield_to_foreign(r.core, 300 * TP_KIB, &granted, &test_error));
    const struct timespec a_while = {0, 5000000}; /* it is not asked again at once */
    (void)nanosleep(&a_while, NULL);
    const tp_addr a = rig_alloc(&r, 400 * TP_KIB, 0);
    EXPECT_EQ(rig_info(&r, a).resident_bytes, 400 * TP_KIB);
    EXPECT(f.cap <= LIMIT - 400 * TP_KIB);
    close_shared(&r, &f);
}

/* The hooks run with the lock dropped: what was read before is no longer so. */
TEST(what_is_held_counts_what_the_foreign_allocator_holds_now) {
    rig r;
    foreign f;
    open_shared(&r, &f);
    MUST(grow(&f, f.cap));
    fill_with_tensors(&r, RIG_EXTENT); /* a frame is made, and both sides are counted */
    EXPECT_OK(tp_core_set_budget(r.core, LIMIT, TP_NO_LIMIT, &test_error));
    EXPECT_EQ(rig_stats(&r).held.current, RIG_EXTENT + f.held);
    f.unused = f.held;
    hook_flush(&f);
    EXPECT_OK(tp_core_set_budget(r.core, LIMIT, TP_NO_LIMIT, &test_error));
    tp_core_reset_stats(r.core, true, false);
    EXPECT_EQ(rig_stats(&r).held.current, RIG_EXTENT);
    EXPECT_EQ(rig_stats(&r).held.peak, RIG_EXTENT);
    close_shared(&r, &f);
}

TEST(host_frames_made_while_the_host_budget_is_lowered_stay_within_it) {
    rig r;
    foreign f;
    open_shared(&r, &f);
    f.evict = rig_alloc(&r, 64 * TP_KIB, 0);
    rig_op(&r, 0, f.evict, 64 * TP_KIB, 1, true);
    EXPECT_OK(tp_core_set_budget(r.core, LIMIT, 2 * RIG_EXTENT, &test_error));
    EXPECT(rig_stats(&r).host_held.peak <= 2 * RIG_EXTENT);
    EXPECT_EQ(f.evict, 0); /* it was tried */
    close_shared(&r, &f);
}

TEST(foreign_allocator_that_has_gone_counts_no_more) {
    rig r;
    foreign f;
    open_shared(&r, &f);
    size_t granted = 0;
    EXPECT_OK(tp_core_yield_to_foreign(r.core, 100 * TP_KIB, &granted, &test_error));
    MUST(grow(&f, 100 * TP_KIB));
    EXPECT_OK(tp_core_set_budget(r.core, LIMIT, TP_NO_LIMIT, &test_error));
    fill_with_tensors(&r, RIG_EXTENT);
    EXPECT_EQ(rig_stats(&r).held.current, RIG_EXTENT + 100 * TP_KIB);
    const tp_hooks none = {0};
    tp_core_set_hooks(r.core, &none);
    f.held = 0;
    EXPECT_OK(tp_core_set_budget(r.core, LIMIT, TP_NO_LIMIT, &test_error));
    EXPECT_EQ(rig_stats(&r).foreign_cap, 0);
    fill_with_tensors(&r, RIG_EXTENT);
    EXPECT_EQ(rig_stats(&r).held.current, 2 * RIG_EXTENT);
    EXPECT_STATUS(tp_core_yield_to_foreign(r.core, 1, &granted, &test_error), TP_INVALID);
    close_shared(&r, &f);
}

/* ---- both sides at work ------------------------------------------------------------------ */

typedef struct worker {
    foreign *f;
    uint64_t seed;
    unsigned rounds;
} worker;

static void *foreign_works(void *arg) {
    const worker *w = arg;
    foreign *f = w->f;
    uint64_t state = w->seed;
    for (unsigned i = 0; i < w->rounds; i++) {
        const size_t bytes = 4096 * (1 + (size_t)test_random_below(&state, 12));
        if (!grow(f, bytes)) {
            size_t granted = 0;
            if (tp_core_yield_to_foreign(f->r->core, bytes, &granted, NULL) == TP_OK) {
                (void)grow(f, bytes);
            }
        }
        if (test_random_below(&state, 2) == 0) continue;
        pthread_mutex_lock(&f->mutex);
        f->held -= (size_t)test_random_below(&state, f->held + 1);
        look(f);
        pthread_mutex_unlock(&f->mutex);
    }
    return NULL;
}

static void *program_works(void *arg) {
    enum { TENSORS = 16 };
    const worker *w = arg;
    rig *r = w->f->r;
    uint64_t state = w->seed;
    tp_addr addrs[TENSORS] = {0};
    for (unsigned i = 0; i < w->rounds; i++) {
        tp_addr *addr = &addrs[test_random_below(&state, TENSORS)];
        if (*addr != 0 && test_random_below(&state, 3) == 0) {
            tp_free(r->core, *addr);
            *addr = 0;
        } else if (*addr == 0) {
            EXPECT_OK(
                tp_alloc(r->core, 3 * RIG_EXTENT, r->streams[0], 0, addr, NULL, &test_error));
            if (*addr != 0) rig_op(r, 0, *addr, 3 * RIG_EXTENT, (uint64_t)*addr, true);
        } else {
            rig_op(r, 0, *addr, 3 * RIG_EXTENT, (uint64_t)*addr, false);
        }
    }
    return NULL;
}

TEST(sum_stays_within_the_budget_while_both_sides_work) {
    rig r;
    foreign f;
    uint64_t state = test_seed();
    open_shared(&r, &f);
    worker workers[2] = {{&f, test_random(&state), test_rounds(3000)},
                         {&f, test_random(&state), test_rounds(3000)}};
    pthread_t threads[2];
    MUST(pthread_create(&threads[0], NULL, foreign_works, &workers[0]) == 0);
    MUST(pthread_create(&threads[1], NULL, program_works, &workers[1]) == 0);
    size_t limit = LIMIT;
    for (unsigned i = 0; i < test_rounds(300); i++) {
        const size_t wanted = 4096 * (60 + (size_t)test_random_below(&state, 69));
        if (wanted > limit) atomic_store(&f.limit, wanted);
        if (tp_core_set_budget(r.core, wanted, TP_NO_LIMIT, NULL) == TP_OK) limit = wanted;
        atomic_store(&f.limit, limit);
        pthread_mutex_lock(&f.mutex);
        look(&f);
        pthread_mutex_unlock(&f.mutex);
    }
    for (int i = 0; i < 2; i++) MUST(pthread_join(threads[i], NULL) == 0);
    EXPECT(!rig_stats(&r).failed);
    EXPECT(rig_stats(&r).evictions.count > 0);
    close_shared(&r, &f);
}
