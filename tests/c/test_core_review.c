/* One scene for each way in which the core has once gone wrong. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <string.h>
#include <time.h>

#include "base/lock.h"
#include "harness.h"
#include "rig.h"

/* ---- memory that a queued kernel may still use ------------------------------------------- */

/* The frames of a freed block serve a new one on the same stream at once; when the new one
 * cannot be born after all, they are still in use there. */
TEST(frame_of_a_failed_birth_serves_no_other_stream_yet) {
    rig r;
    rig_open(&r,
             &(rig_options){.budget_bytes = 64 * TP_KIB, .no_offload = true, .manual = true});
    const tp_addr a = rig_alloc(&r, 32 * TP_KIB, 0);
    rig_hold(&r, 0);
    rig_launch(&r, 0, a, 32 * TP_KIB, 1, true);
    tp_free(r.core, a);
    /* The second map call is the new block's, after the window of its last frame. */
    fault_device_arm(r.dev, &(fault_plan){.nth = 2, .calls = 1u << FAULT_MAP});
    tp_addr b = 0;
    EXPECT_STATUS(tp_alloc(r.core, 24 * TP_KIB, r.streams[0], 0, &b, NULL, &test_error),
                  TP_DEVICE_ERROR);
    EXPECT(fault_device_fired(r.dev));
    fault_device_disarm(r.dev);
    const tp_addr c = rig_alloc(&r, 16 * TP_KIB, 1);
    rig_launch(&r, 1, c, 16 * TP_KIB, 2, true);
    for (int i = 0; i < 60 && atomic_load(&r.ran) == 0; i++) rig_step(&r, 1);
    EXPECT_EQ(atomic_load(&r.ran), 1); /* the write to `c`, not yet the one to `a` */
    rig_drain(&r);
    rig_launch(&r, 1, c, 16 * TP_KIB, 2, false);
    rig_drain(&r);
    EXPECT_EQ(atomic_load(&r.wrong), 0);
    rig_close(&r);
}

/* When the end of an operator cannot be marked, its stream's use of the block is not
 * forgotten. */
TEST(block_with_a_lost_marker_is_freed_behind_everything) {
    rig r;
    rig_open(&r, &(rig_options){.manual = true});
    rig_press(&r);
    const tp_addr a = rig_alloc(&r, 32 * TP_KIB, 0);
    const tp_access access = {a, true};
    tp_op op = {0};
    tp_op_begin(r.core, &op, &access, 1, r.streams[1]);
    rig_hold(&r, 1);
    rig_launch(&r, 1, a, 32 * TP_KIB, 1, true);
    fault_device_arm(r.dev, &(fault_plan){.nth = 1,
                                          .calls = 1u << FAULT_EVENT_RECORD,
                                          .persistent = true}); /* the operator is timed too */
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
    EXPECT(fault_device_fired(r.dev));
    fault_device_disarm(r.dev);
    EXPECT(rig_info(&r, a).immovable);
    tp_free(r.core, a);
    const tp_addr b = rig_alloc(&r, 32 * TP_KIB, 0);
    rig_launch(&r, 0, b, 32 * TP_KIB, 2, true);
    for (int i = 0; i < 60 && atomic_load(&r.ran) == 0; i++) rig_step(&r, 1);
    EXPECT_EQ(atomic_load(&r.ran), 1);
    rig_drain(&r);
    rig_launch(&r, 0, b, 32 * TP_KIB, 2, false);
    rig_drain(&r);
    EXPECT_EQ(atomic_load(&r.wrong), 0);
    rig_close(&r);
}

/* A kernel of an operator that began before the hook was armed: only the block's stream is
 * known. */
TEST(copies_start_after_uses_that_no_marker_stands_for) {
    rig r;
    rig_open(&r, &(rig_options){.budget_bytes = 32 * TP_KIB, .manual = true});
    const tp_addr a = rig_alloc(&r, 48 * TP_KIB, 0);
    EXPECT_EQ(rig_stats(&r).born_in_host, 1);
    rig_hold(&r, 0);
    rig_launch(&r, 0, a, 48 * TP_KIB, 1, true);
    rig_op(&r, 0, a, 48 * TP_KIB, 1, false);
    rig_drain(&r);
    EXPECT(rig_stats(&r).fills.count > 0);
    EXPECT_EQ(atomic_load(&r.wrong), 0);
    tp_free(r.core, a);
    tp_core_empty_cache(r.core);
    /* The same for a write-back. */
    const tp_addr b = rig_alloc(&r, 16 * TP_KIB, 0);
    rig_hold(&r, 0);
    rig_launch(&r, 0, b, 16 * TP_KIB, 3, true);
    tp_mark_seen(r.core, b);
    EXPECT_OK(tp_evict(r.core, b, &test_error));
    rig_launch(&r, 0, b, 16 * TP_KIB, 3, false);
    rig_drain(&r);
    EXPECT_EQ(atomic_load(&r.wrong), 0);
    rig_close(&r);
}

/* ---- blocks that must not move ----------------------------------------------------------- */

TEST(slab_never_moves_whatever_is_said_of_its_pieces) {
    rig r;
    rig_open(&r, &(rig_options){.budget_bytes = 8 * TP_MIB, .serve_small = true});
    tp_addr a = 0;
    MUST_OK(tp_alloc(r.core, 1000, r.streams[0], TP_ALLOC_PINNED | TP_ALLOC_SEEN, &a, NULL,
                     &test_error));
    rig_op(&r, 0, a, 1000, 1, true);
    tp_mark_seen(r.core, a);
    EXPECT_STATUS(tp_evict(r.core, a, &test_error), TP_BUSY);
    EXPECT_EQ(tp_evict_all(r.core), 0);
    tp_op op = {0};
    tp_op_begin(r.core, &op, NULL, 0, r.streams[0]);
    tp_op_adopt(&op, a);
    tp_op_end(&op, &a, 1, NULL);
    tp_op_fini(&op);
    EXPECT_EQ(rig_info(&r, a).pin_count, 0);
    EXPECT_OK(tp_core_check(r.core, &test_error));
    EXPECT_EQ(rig_stats(&r).pinned.current, 0);
    tp_free(r.core, a);
    rig_close(&r);
}

/* A block in HOST that was never an operand, such as a library's workspace, stays there. */
TEST(unseen_block_in_host_is_not_filled_when_offload_ends) {
    rig r;
    rig_open(&r, &(rig_options){.budget_bytes = 32 * TP_KIB});
    const tp_addr a = rig_alloc(&r, 48 * TP_KIB, 0);
    EXPECT_OK(tp_core_set_budget(r.core, 128 * TP_KIB, TP_NO_LIMIT, &test_error));
    EXPECT_OK(tp_core_set_offload(r.core, false, &test_error));
    EXPECT_EQ(rig_info(&r, a).host_bytes, 48 * TP_KIB);
    EXPECT(!rig_info(&r, a).seen);
    rig_close(&r);
}

/* Nor when the program goes through what lies around it in the order of last use. */
TEST(unseen_block_in_host_is_not_filled_ahead) {
    enum { BEFORE = 12, COUNT = 16 };
    rig r;
    tp_addr tensors[COUNT];
    rig_open(&r, &(rig_options){.budget_bytes = 256 * TP_KIB});
    for (unsigned i = 0; i < BEFORE; i++) {
        tensors[i] = rig_alloc(&r, RIG_EXTENT, 0);
        rig_op(&r, 0, tensors[i], RIG_EXTENT, i, true);
        EXPECT_OK(tp_evict(r.core, tensors[i], &test_error));
    }
    const tp_addr full = rig_alloc(&r, 256 * TP_KIB, 0);
    EXPECT_OK(tp_pin(r.core, full, NULL, &test_error));
    const tp_addr workspace = rig_alloc(&r, RIG_EXTENT, 0);
    for (unsigned i = BEFORE; i < COUNT; i++) {
        tensors[i] = rig_alloc(&r, RIG_EXTENT, 0);
        rig_op(&r, 0, tensors[i], RIG_EXTENT, i, true);
    }
    EXPECT_EQ(rig_info(&r, workspace).host_bytes, RIG_EXTENT);
    tp_free(r.core, full);
    tp_core_empty_cache(r.core); /* only memory that is free is used for it */
    for (unsigned i = 0; i < BEFORE; i++) rig_op(&r, 0, tensors[i], RIG_EXTENT, i, false);
    rig_drain(&r);
    const struct timespec moment = {0,
                                    100000}; /* the pager's thread may be slow to get there */
    for (int i = 0; i < 20000 && rig_info(&r, tensors[BEFORE]).host_bytes > 0; i++) {
        rig_drain(&r);
        (void)nanosleep(&moment, NULL);
    }
    EXPECT_EQ(rig_info(&r, tensors[BEFORE]).resident_bytes,
              RIG_EXTENT); /* the next one, ahead */
    EXPECT_EQ(rig_info(&r, workspace).host_bytes, RIG_EXTENT);
    rig_close(&r);
    EXPECT_EQ(atomic_load(&r.wrong), 0);
}

/* What was touched before the hook was disarmed may have been used since by operators
 * unannounced. */
TEST(blocks_count_as_unseen_after_offload_ended) {
    rig r;
    rig_open(&r, &(rig_options){.budget_bytes = 64 * TP_KIB});
    const tp_addr a = rig_alloc(&r, 56 * TP_KIB, 0);
    rig_op(&r, 0, a, 56 * TP_KIB, 1, true);
    EXPECT_OK(tp_evict(r.core, a, &test_error));
    EXPECT(rig_stats(&r).armed);
    EXPECT_OK(tp_core_set_offload(r.core, false, &test_error));
    EXPECT_OK(tp_core_set_offload(r.core, true, &test_error));
    EXPECT_STATUS(tp_evict(r.core, a, &test_error), TP_BUSY);
    rig_op(&r, 0, a, 56 * TP_KIB, 1, false);
    EXPECT_OK(tp_evict(r.core, a, &test_error));
    rig_close(&r);
    EXPECT_EQ(atomic_load(&r.wrong), 0);
}

TEST(one_block_in_use_does_not_keep_the_others_in_host) {
    rig r;
    rig_open(&r, &(rig_options){.budget_bytes = 64 * TP_KIB});
    const tp_addr a = rig_alloc(&r, 32 * TP_KIB, 0), b = rig_alloc(&r, 16 * TP_KIB, 0);
    rig_op(&r, 0, a, 32 * TP_KIB, 1, true);
    rig_op(&r, 0, b, 16 * TP_KIB, 2, true);
    EXPECT_OK(tp_evict(r.core, a, &test_error));
    EXPECT_OK(tp_evict(r.core, b, &test_error));
    const tp_addr full = rig_alloc(&r, 64 * TP_KIB, 0);
    EXPECT_OK(tp_pin(r.core, full, NULL, &test_error));
    const tp_access access = {a, false};
    tp_op op = {0};
    tp_op_begin(r.core, &op, &access, 1, r.streams[0]); /* over HOST */
    rig_op(&r, 0, b, 16 * TP_KIB, 2, false);            /* too; now used last */
    tp_free(r.core, full);
    EXPECT_OK(tp_core_set_offload(r.core, false, &test_error));
    EXPECT_EQ(rig_info(&r, a).host_bytes, 32 * TP_KIB);
    EXPECT_EQ(rig_info(&r, b).resident_bytes, 16 * TP_KIB);
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
    rig_close(&r);
    EXPECT_EQ(atomic_load(&r.wrong), 0);
}

/* ---- captures ---------------------------------------------------------------------------- */

/* cuCtxRecordEvent would invalidate the user's capture. */
TEST(no_context_wide_marker_is_recorded_during_a_capture) {
    rig r;
    rig_open(&r, &(rig_options){0});
    const tp_addr a = rig_alloc(&r, 32 * TP_KIB, 0), b = rig_alloc(&r, 32 * TP_KIB, 0);
    rig_op(&r, 0, a, 32 * TP_KIB, 1, true);
    rig_drain(&r);
    tp_capture_begin(r.core);
    tp_sim_set_capturing(r.sim, r.streams[RIG_GATE], true);
    const uint64_t before = fault_device_calls(r.dev, FAULT_EVENT_RECORD_CONTEXT);
    EXPECT_EQ(tp_evict_all(r.core), 0);
    EXPECT_STATUS(tp_evict(r.core, a, &test_error), TP_BUSY);
    for (unsigned i = 0; i < RIG_GATE; i++) tp_record_stream(r.core, b, r.streams[i]);
    EXPECT_EQ(fault_device_calls(r.dev, FAULT_EVENT_RECORD_CONTEXT), before);
    tp_free(r.core, b);
    EXPECT_EQ(fault_device_calls(r.dev, FAULT_EVENT_RECORD_CONTEXT), before);
    tp_sim_set_capturing(r.sim, r.streams[RIG_GATE], false);
    tp_capture_end(r.core);
    tp_core_empty_cache(r.core); /* the deferred free has its marker now */
    EXPECT(fault_device_calls(r.dev, FAULT_EVENT_RECORD_CONTEXT) > before);
    EXPECT_EQ(rig_stats(&r).reserved.current, 32 * TP_KIB);
    rig_close(&r);
}

/* ---- waits that end ---------------------------------------------------------------------- */

typedef struct request {
    rig *r;
    tp_addr addr;
    size_t bytes;
    tp_status status;
} request;

static void ask_alloc(void *arg) {
    request *q = arg;
    q->status = tp_alloc(q->r->core, q->bytes, q->r->streams[0], 0, &q->addr, NULL, NULL);
}

static void ask_budget(void *arg) {
    request *q = arg;
    q->status = tp_core_set_budget(q->r->core, q->bytes, TP_NO_LIMIT, NULL);
}

static void expect_alloc_ends_when_refused(fault_call call, bool written_back) {
    rig r;
    rig_open(&r, &(rig_options){.budget_bytes = 32 * TP_KIB});
    const tp_addr a = rig_alloc(&r, 32 * TP_KIB, 0);
    rig_op(&r, 0, a, 32 * TP_KIB, 1, true);
    if (written_back) {
        EXPECT_OK(tp_evict(r.core, a, &test_error));
        rig_op(&r, 0, a, 32 * TP_KIB, 1, false);
    }
    fault_device_arm(r.dev, &(fault_plan){.nth = 1, .calls = 1u << call, .persistent = true});
    request q = {.r = &r, .bytes = 16 * TP_KIB};
    MUST(rig_returns(ask_alloc, &q, 20));
    EXPECT(fault_device_fired(r.dev));
    EXPECT_EQ(q.status, TP_OK); /* born in HOST, which needs neither */
    EXPECT_EQ(rig_info(&r, q.addr).host_bytes, 16 * TP_KIB);
    request lower = {.r = &r, .bytes = 16 * TP_KIB};
    MUST(rig_returns(ask_budget, &lower, 20));
    EXPECT_EQ(lower.status, TP_OUT_OF_MEMORY);
    fault_device_disarm(r.dev);
    EXPECT(!rig_stats(&r).failed);
    rig_op(&r, 0, a, 32 * TP_KIB, 1, false);
    rig_close(&r);
    EXPECT_EQ(atomic_load(&r.wrong), 0);
}

TEST(fault_in_every_copy_does_not_make_an_allocation_wait_for_ever) {
    expect_alloc_ends_when_refused(FAULT_COPY, false);
}

TEST(fault_in_every_unmap_does_not_make_an_allocation_wait_for_ever) {
    expect_alloc_ends_when_refused(FAULT_UNMAP, true);
}

typedef struct evicter {
    rig *r;
    tp_addr addr;
    tp_status status;
} evicter;

static void *evict_one(void *arg) {
    evicter *e = arg;
    e->status = tp_evict(e->r->core, e->addr, NULL);
    return NULL;
}

/* A block that becomes immovable while it is on its way out is not waited for. */
TEST(eviction_of_a_block_that_became_immovable_is_called_off) {
    rig r;
    const tp_hooks none = {0};
    rig_open(&r, &(rig_options){.budget_bytes = 32 * TP_KIB, .manual = true, .hooks = &none});
    const tp_addr a = rig_alloc(&r, 32 * TP_KIB, 0);
    rig_op(&r, 0, a, 32 * TP_KIB, 1, true);
    rig_drain(&r);
    evicter e = {&r, a, TP_OK};
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, evict_one, &e) == 0);
    while (rig_info(&r, a).busy_count < 2) continue; /* write-backs queued; nothing runs them */
    tp_export(r.core, a);
    request q = {.r = &r, .bytes = 16 * TP_KIB};
    MUST(rig_returns(ask_alloc, &q, 20));
    EXPECT_EQ(q.status, TP_OK);
    MUST(pthread_join(thread, NULL) == 0);
    EXPECT_EQ(e.status, TP_BUSY);
    EXPECT_EQ(rig_info(&r, a).resident_bytes, 32 * TP_KIB);
    rig_close(&r);
}

static void use_after_abandon(void *arg) {
    request *q = arg;
    rig_op(q->r, 0, q->addr, 32 * TP_KIB, 1, false);
    tp_core_empty_cache(q->r->core);
    (void)tp_evict_all(q->r->core);
    EXPECT_STATUS(tp_evict(q->r->core, q->addr, &test_error), TP_FAILED);
    EXPECT_OK(tp_core_set_offload(q->r->core, false, &test_error));
}

TEST(nothing_waits_for_the_thread_after_it_was_abandoned) {
    rig r;
    rig_open(&r, &(rig_options){0});
    const tp_addr a = rig_alloc(&r, 32 * TP_KIB, 0), b = rig_alloc(&r, 32 * TP_KIB, 0);
    rig_op(&r, 0, a, 32 * TP_KIB, 1, true);
    EXPECT_OK(tp_evict(r.core, a, &test_error));
    tp_free(r.core, b);
    tp_core_abandon(r.core);
    request q = {.r = &r, .addr = a};
    MUST(rig_returns(use_after_abandon, &q, 20));
    EXPECT_EQ(rig_info(&r, a).host_bytes, 32 * TP_KIB); /* read where it was */
    tp_addr c = 0;
    EXPECT_STATUS(tp_alloc(r.core, 4096, NULL, 0, &c, NULL, &test_error), TP_FAILED);
    rig_close(&r);
    EXPECT_EQ(atomic_load(&r.wrong), 0);
}

/* ---- pins -------------------------------------------------------------------------------- */

typedef struct two_ops {
    rig *r;
    tp_op op[2];
    atomic_bool waited;
    request q;
} two_ops;

static void end_one(two_ops *it, unsigned idx) { tp_op_end(&it->op[idx], NULL, 0, NULL); }

static void *end_in_wait(void *ctx) {
    two_ops *it = ctx;
    if (!atomic_exchange(&it->waited, true)) end_one(it, 1);
    return NULL;
}

static void end_then_alloc(void *arg) {
    two_ops *it = arg;
    end_one(it, 0);
    ask_alloc(&it->q);
}

/* An operator ended on another thread than it began on; that thread still waits for the pins of
 * others. */
TEST(thread_that_ended_an_operator_of_another_one_keeps_its_patience) {
    rig r;
    two_ops it = {.r = &r, .q = {.r = &r, .bytes = 32 * TP_KIB}};
    const tp_hooks hooks = {.ctx = &it, .wait_begin = end_in_wait};
    rig_open(&r, &(rig_options){.budget_bytes = 32 * TP_KIB, .hooks = &hooks});
    const tp_access access = {rig_alloc(&r, 32 * TP_KIB, 0), true};
    for (unsigned i = 0; i < 2; i++) tp_op_begin(r.core, &it.op[i], &access, 1, r.streams[0]);
    MUST(rig_returns(end_then_alloc, &it, 20));
    EXPECT(atomic_load(&it.waited));
    EXPECT_EQ(it.q.status, TP_OK);
    EXPECT_EQ(rig_info(&r, it.q.addr).resident_bytes, 32 * TP_KIB);
    for (unsigned i = 0; i < 2; i++) tp_op_fini(&it.op[i]);
    rig_close(&r);
}

/* A collective: the operator has returned, and somebody else goes on with its operands. */
TEST(detached_operator_holds_its_operands_until_it_ends_elsewhere) {
    rig r;
    rig_open(&r, &(rig_options){.budget_bytes = 64 * TP_KIB, .manual = true});
    rig_press(&r); /* so that each operator's end is marked by itself */
    const tp_addr a = rig_alloc(&r, 32 * TP_KIB, 0);
    rig_op(&r, 0, a, 32 * TP_KIB, 1, true);
    rig_drain(&r);
    const tp_access access = {a, true};
    tp_op op = {0};
    tp_op_begin(r.core, &op, &access, 1, r.streams[0]);
    tp_op_detach(&op, NULL);
    EXPECT_STATUS(tp_evict(r.core, a, &test_error), TP_BUSY);
    /* On a stream that the core knows nothing of. */
    rig_hold(&r, 7);
    rig_launch(&r, 7, a, 32 * TP_KIB, 5, true);
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
    EXPECT_OK(tp_evict(r.core, a, &test_error));
    EXPECT_EQ(rig_stats(&r).unseen_writes.count, 0); /* the write-back came after it */
    rig_op(&r, 1, a, 32 * TP_KIB, 5, false);
    rig_close(&r);
    EXPECT_EQ(atomic_load(&r.wrong), 0);
}

typedef struct slow_op {
    two_ops it;
    unsigned waits;
} slow_op;

static void *end_in_fourth_wait(void *ctx) {
    slow_op *slow = ctx;
    if (++slow->waits == 4) end_one(&slow->it, 1);
    return NULL;
}

static void detach_then_alloc(void *arg) {
    two_ops *it = &((slow_op *)arg)->it;
    const tp_access access = {it->q.addr, true};
    tp_op_begin(it->r->core, &it->op[1], &access, 1, it->r->streams[0]);
    tp_op_detach(&it->op[1], NULL);
    ask_alloc(&it->q);
}

/* A thread waits for what its own collective holds as for another thread's pins. */
TEST(thread_waits_for_its_own_detached_operator) {
    rig r;
    slow_op slow = {.it = {.r = &r, .q = {.r = &r, .bytes = 32 * TP_KIB}}};
    const tp_hooks hooks = {.ctx = &slow, .wait_begin = end_in_fourth_wait};
    rig_open(&r, &(rig_options){.budget_bytes = 32 * TP_KIB, .hooks = &hooks});
    slow.it.q.addr = rig_alloc(&r, 32 * TP_KIB, 0);
    MUST(rig_returns(detach_then_alloc, &slow, 20));
    EXPECT(slow.waits >= 4);
    EXPECT_EQ(slow.it.q.status, TP_OK);
    EXPECT_EQ(rig_info(&r, slow.it.q.addr).resident_bytes, 32 * TP_KIB);
    tp_op_fini(&slow.it.op[1]);
    rig_close(&r);
}

TEST(what_a_detached_operator_adopted_stays_until_both_have_ended) {
    rig r;
    rig_open(&r, &(rig_options){0});
    for (int first = 0; first < 2; first++) {
        tp_op outer = {0}, inner = {0};
        tp_op_begin(r.core, &outer, NULL, 0, r.streams[0]);
        tp_op_begin(r.core, &inner, NULL, 0, r.streams[0]);
        tp_addr a = 0;
        MUST_OK(tp_alloc(r.core, 32 * TP_KIB, r.streams[0], TP_ALLOC_PINNED | TP_ALLOC_SEEN, &a,
                         NULL, &test_error));
        tp_op_adopt(&inner, a);
        tp_op_detach(&inner, &outer);
        EXPECT_EQ(rig_info(&r, a).pin_count, 2);
        tp_op_end(first == 0 ? &outer : &inner, NULL, 0, NULL);
        EXPECT_EQ(rig_info(&r, a).pin_count, 1);
        tp_op_end(first == 0 ? &inner : &outer, NULL, 0, NULL);
        EXPECT_EQ(rig_info(&r, a).pin_count, 0);
        tp_op_fini(&inner);
        tp_op_fini(&outer);
        tp_free(r.core, a);
    }
    rig_close(&r);
}

TEST(operands_of_an_exported_operator_never_move_again) {
    rig r;
    rig_open(&r, &(rig_options){0});
    const tp_addr a = rig_alloc(&r, 32 * TP_KIB, 0);
    const tp_access access = {a, false};
    tp_op op = {0};
    tp_op_begin(r.core, &op, &access, 1, r.streams[0]);
    tp_op_export(&op);
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
    EXPECT(rig_info(&r, a).immovable);
    EXPECT_STATUS(tp_evict(r.core, a, &test_error), TP_BUSY);
    rig_close(&r);
}

/* ---- frames ------------------------------------------------------------------------------ */

/* Other programs use the card, too: the budget is more than the device has. */
TEST(free_frames_of_other_sizes_make_room_on_a_device_smaller_than_the_budget) {
    rig r;
    rig_open(&r, &(rig_options){.device_bytes = 64 * TP_KIB,
                                .budget_bytes = 256 * TP_KIB,
                                .no_offload = true});
    const tp_addr a = rig_alloc(&r, 64 * TP_KIB, 0);
    tp_free(r.core, a);
    const tp_addr b = rig_alloc(&r, 8 * TP_KIB, 0);
    EXPECT_EQ(rig_info(&r, b).resident_bytes, 8 * TP_KIB);
    rig_close(&r);
}

/* Nothing is lost when a fill cannot be mapped and the old mapping not restored. */
TEST(fault_in_both_mappings_of_a_fill_loses_no_frame) {
    rig r;
    rig_open(&r, &(rig_options){0});
    const tp_addr a = rig_alloc(&r, 32 * TP_KIB, 0);
    rig_op(&r, 0, a, 32 * TP_KIB, 1, true);
    EXPECT_OK(tp_evict(r.core, a, &test_error));
    rig_drain(&r);
    fault_device_arm(r.dev,
                     &(fault_plan){.nth = 1, .calls = 1u << FAULT_MAP, .persistent = true});
    EXPECT_OK(tp_touch(r.core, a, false, r.streams[0], &test_error));
    fault_device_disarm(r.dev);
    EXPECT(rig_stats(&r).failed);
    rig_close(&r); /* a sanitizer counts what is left */
}

/* ---- the hook that is armed -------------------------------------------------------------- */

typedef struct arming {
    rig *r;
    atomic_bool armed, in_disarm, other_done;
} arming;

static void hook_arm(void *ctx, tp_arming level) {
    arming *it = ctx;
    if (level == TP_ARM_OFF) {
        atomic_store(&it->in_disarm, true);
        while (!atomic_load(&it->other_done)) continue;
    }
    atomic_store(&it->armed, level != TP_ARM_OFF);
}

static void *offload_ends(void *arg) {
    arming *it = arg;
    EXPECT_OK(tp_core_set_offload(it->r->core, false, &test_error));
    return NULL;
}

typedef struct first_arming {
    rig *r;
    tp_arming level;        /* heard last */
    uint64_t evicted_count; /* when it was heard first */
    uint64_t heard_ns;
} first_arming;

static void hook_arm_first(void *ctx, tp_arming level) {
    first_arming *it = ctx;
    if (it->heard_ns == 0) {
        it->evicted_count = rig_stats(it->r).evictions.count;
        it->heard_ns = tp_now_ns();
    }
    it->level = level;
}

/* An operator that began before the hook was armed has launched its kernels by then. */
TEST(nothing_moves_before_the_hook_is_armed_and_settled) {
    rig r;
    first_arming it = {.r = &r};
    const tp_hooks hooks = {.ctx = &it, .arm = hook_arm_first};
    rig_open(&r, &(rig_options){.budget_bytes = 256 * TP_KIB, .hooks = &hooks});
    tp_mark_seen(r.core, rig_alloc(&r, 32 * TP_KIB, 0));
    tp_mark_seen(r.core, rig_alloc(&r, 32 * TP_KIB, 0));
    EXPECT(!rig_stats(&r).armed);
    EXPECT_OK(tp_core_set_budget(r.core, 32 * TP_KIB, SIZE_MAX, &test_error));
    EXPECT(it.heard_ns != 0);
    EXPECT_EQ(it.evicted_count, 0);
    EXPECT(rig_stats(&r).evictions.count > 0);
    EXPECT(tp_now_ns() > it.heard_ns + 15000000u);
    EXPECT_EQ(it.level, TP_ARM_FULL);
    rig_close(&r);
}

/* Nothing has woken the pager's thread since: the marker that the gate waits for is recorded by whoever
 * wants to evict. */
TEST(eviction_asked_for_long_after_arming_is_not_called_off) {
    rig r;
    first_arming it = {.r = &r};
    const tp_hooks hooks = {.ctx = &it, .arm = hook_arm_first};
    rig_open(&r, &(rig_options){.budget_bytes = 256 * TP_KIB, .hooks = &hooks});
    const tp_addr a = rig_alloc(&r, 32 * TP_KIB, 0);
    tp_mark_seen(r.core, a);
    EXPECT_OK(tp_evict(r.core, a, &test_error)); /* which arms */
    tp_addr b = 0;
    MUST_OK(tp_alloc(r.core, 32 * TP_KIB, r.streams[0], TP_ALLOC_UNKNOWN | TP_ALLOC_SEEN, &b,
                     NULL, &test_error));
    const struct timespec longer = {1, 100000000};
    (void)nanosleep(&longer, NULL);
    EXPECT_OK(tp_evict(r.core, b, &test_error));
    rig_close(&r);
}

TEST(last_word_about_arming_is_the_truth) {
    rig r;
    arming it = {.r = &r};
    const tp_hooks hooks = {.ctx = &it, .arm = hook_arm};
    rig_open(&r, &(rig_options){.budget_bytes = 64 * TP_KIB, .hooks = &hooks});
    (void)rig_alloc(&r, 56 * TP_KIB, 0);
    EXPECT(atomic_load(&it.armed));
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, offload_ends, &it) == 0);
    while (!atomic_load(&it.in_disarm)) continue;
    EXPECT_OK(tp_core_set_offload(r.core, true, &test_error)); /* arms again at once */
    atomic_store(&it.other_done, true);
    MUST(pthread_join(thread, NULL) == 0);
    EXPECT(atomic_load(&it.armed));
    rig_close(&r);
}
