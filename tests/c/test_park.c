/* Storages that nobody can reach: their bytes leave their address, and come to another one. */
#define _POSIX_C_SOURCE 200809L

#include <time.h>

#include "harness.h"
#include "pager/fill.h"
#include "pager/pager.h"
#include "pager/park.h"
#include "rig.h"

enum { BLOCK = 4 * RIG_EXTENT };

static tp_addr made(rig *r, uint64_t value) { return rig_made(r, BLOCK, value); }

static tp_status try_park(rig *r, tp_addr addr, tp_dropped **out) {
    return tp_park(r->core, addr, out, &test_error);
}

static tp_dropped *park(rig *r, tp_addr addr) { return rig_gone_soon(r, addr, try_park); }

/* Until so many bytes have gone. */
static void await_gone(rig *r, size_t bytes) {
    for (int i = 0; i < 5000 && rig_stats(r).parked.current != bytes; i++) {
        rig_drain(r);
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    EXPECT_EQ(rig_stats(r).parked.current, bytes);
}

static tp_addr unpark(rig *r, tp_dropped *dropped, unsigned stream) {
    tp_addr addr = 0;
    MUST_OK(tp_unpark(r->core, dropped, r->streams[stream], false, &addr, NULL, &test_error));
    return addr;
}

TEST(parked_block_is_freed_once_it_is_copied_and_comes_back_elsewhere) {
    rig r;
    rig_open(&r, &(rig_options){0});
    tp_dropped *dropped = park(&r, made(&r, 7));
    await_gone(&r, BLOCK);
    tp_stats stats = rig_stats(&r);
    EXPECT_EQ(stats.resident.current, 0);
    EXPECT_EQ(stats.host.current, BLOCK);
    EXPECT_EQ(stats.block_count, 0);
    EXPECT_EQ(stats.parks.count, 1);
    EXPECT_EQ(stats.evictions.bytes, BLOCK);
    EXPECT_OK(tp_core_check(r.core, &test_error));
    const tp_addr other = made(&r, 9); /* in its memory, with no mapping changed */
    EXPECT_EQ(rig_stats(&r).cache_hits, 1);
    const tp_addr back = unpark(&r, dropped, 0);
    EXPECT(back != other);
    rig_op(&r, 0, back, BLOCK, 7, false);
    rig_op(&r, 0, other, BLOCK, 9, false);
    rig_drain(&r);
    stats = rig_stats(&r);
    EXPECT_EQ(stats.parked.current, 0);
    EXPECT_EQ(stats.host.current, 0);
    EXPECT_EQ(stats.fills.bytes, BLOCK);
    EXPECT_OK(tp_core_check(r.core, &test_error));
    EXPECT_EQ(r.wrong, 0);
    rig_close(&r);
}

TEST(block_that_is_wanted_before_it_has_gone_stays_where_it_is) {
    rig r;
    rig_open(&r, &(rig_options){.manual = true});
    const tp_addr addr = made(&r, 7);
    rig_drain(&r);
    tp_dropped *dropped = park(&r, addr);
    EXPECT_EQ(unpark(&r, dropped, 0), addr);
    rig_op(&r, 0, addr, BLOCK, 7, false);
    rig_op(&r, 0, addr, BLOCK, 8, true);
    rig_drain(&r);
    /* Called off while the pager has not seen the end of a copy that was written over. */
    tp_status status = TP_BUSY;
    for (int i = 0; i < 1000 && status == TP_BUSY; i++)
        status = tp_evict(r.core, addr, &test_error);
    EXPECT_EQ(status, TP_OK);
    rig_op(&r, 0, addr, BLOCK, 8, false);
    rig_drain(&r);
    EXPECT_EQ(rig_stats(&r).parked.peak, 0);
    EXPECT_OK(tp_core_check(r.core, &test_error));
    EXPECT_EQ(r.wrong, 0);
    rig_close(&r);
}

/* The device is behind: who uses the bytes, on whatever stream, and who has their memory next, waits. */
TEST(users_and_successors_wait_for_the_copy) {
    rig r;
    rig_open(&r, &(rig_options){.budget_bytes = 2 * BLOCK});
    for (uint64_t round = 0; round < test_rounds(100); round++) {
        tp_dropped *dropped = park(&r, made(&r, 100 + round));
        const tp_addr other = made(&r, 300 + round), third = made(&r, 500 + round);
        rig_hold(&r, (unsigned)(round % 3));
        const tp_addr back = unpark(&r, dropped, (unsigned)(round % 3));
        if (round % 2 == 0) {
            rig_op(&r, 1, back, BLOCK, 100 + round, false);
            rig_op(&r, 2, back, BLOCK, 100 + round, false);
        }
        tp_free(r.core, back);
        const tp_addr next = made(&r, 700 + round);
        rig_op(&r, 0, other, BLOCK, 300 + round, false);
        rig_op(&r, 0, third, BLOCK, 500 + round, false);
        rig_op(&r, 0, next, BLOCK, 700 + round, false);
        EXPECT_OK(tp_core_check(r.core, &test_error));
        tp_free(r.core, other);
        tp_free(r.core, third);
        tp_free(r.core, next);
    }
    rig_drain(&r);
    EXPECT_EQ(rig_stats(&r).parked.current, 0);
    EXPECT_EQ(r.wrong, 0);
    rig_close(&r);
}

/* Its kernels are nobody's operators. */
TEST(region_on_another_stream_waits_for_the_copy) {
    rig r;
    rig_open(&r, &(rig_options){0});
    for (uint64_t round = 0; round < test_rounds(20); round++) {
        tp_dropped *dropped = park(&r, made(&r, 100 + round));
        await_gone(&r, BLOCK);
        tp_free(r.core, made(&r, 900 + round)); /* other bytes in its memory */
        rig_drain(&r);
        rig_hold(&r, 0);
        const tp_addr back = unpark(&r, dropped, 0);
        const tp_access access = {back, false};
        tp_region region = {0};
        tp_region_begin(r.core, &region, &access, 1, r.streams[1]);
        rig_launch(&r, 1, back, BLOCK, 100 + round, false);
        tp_region_end(&region);
        tp_region_fini(&region);
        rig_drain(&r);
        tp_free(r.core, back);
    }
    EXPECT_EQ(r.wrong, 0);
    rig_close(&r);
}

TEST(storage_that_ends_while_it_is_parked_leaves_nothing) {
    rig r;
    rig_open(&r, &(rig_options){0});
    tp_dropped *gone = park(&r, made(&r, 1));
    await_gone(&r, BLOCK);
    tp_drop_end(r.core, gone);
    tp_drop_end(r.core, park(&r, made(&r, 2))); /* perhaps before it has gone */
    EXPECT_OK(tp_core_check(r.core, &test_error));
    EXPECT_EQ(rig_stats(&r).parked.current, 0);
    EXPECT_EQ(rig_stats(&r).block_count, 0);
    (void)park(&r, made(&r, 3));
    rig_close(&r); /* with one that nobody has ended */
}

TEST(block_in_host_can_be_parked) {
    rig r;
    rig_open(&r, &(rig_options){0});
    const tp_addr addr = made(&r, 5);
    rig_drain(&r);
    EXPECT_OK(tp_evict(r.core, addr, &test_error));
    tp_dropped *dropped = park(&r, addr);
    EXPECT_EQ(rig_stats(&r).parked.current, BLOCK);
    const tp_addr back = unpark(&r, dropped, 0);
    rig_op(&r, 0, back, BLOCK, 5, false);
    rig_close_right(&r);
}

/* Somebody has written since the write-back, and told nobody. */
TEST(unseen_write_before_a_park_is_found) {
    rig r;
    rig_open(&r, &(rig_options){0});
    const tp_addr addr = made(&r, 5);
    rig_drain(&r);
    EXPECT_OK(tp_evict(r.core, addr, &test_error));
    rig_op(&r, 0, addr, BLOCK, 5, false); /* and it is CLEAN */
    rig_launch(&r, 0, addr, BLOCK, 6, true);
    tp_dropped *dropped = park(&r, addr);
    await_gone(&r, BLOCK);
    EXPECT(rig_stats(&r).unseen_writes.count > 0);
    const tp_addr back = unpark(&r, dropped, 0);
    rig_op(&r, 0, back, BLOCK, 6, false);
    rig_drain(&r);
    EXPECT_EQ(r.wrong, 0);
    rig_close(&r);
}

TEST(block_in_use_or_immovable_is_not_parked) {
    rig r;
    rig_open(&r, &(rig_options){0});
    const tp_addr addr = made(&r, 3);
    tp_drop_end(r.core, park(&r, made(&r, 4)));
    tp_dropped *dropped = NULL;
    EXPECT_EQ(try_park(&r, addr + RIG_EXTENT, &dropped), TP_INVALID);
    const tp_access access = {addr, false};
    tp_op op = {0};
    tp_op_begin(r.core, &op, &access, 1, r.streams[0]);
    EXPECT_EQ(try_park(&r, addr, &dropped), TP_BUSY);
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
    EXPECT_OK(tp_pin(r.core, addr, NULL, &test_error));
    EXPECT_EQ(try_park(&r, addr, &dropped), TP_BUSY);
    EXPECT_OK(tp_unpin(r.core, addr, &test_error));
    rig_op(&r, 0, addr, BLOCK, 3, false);
    EXPECT_EQ(r.wrong, 0);
    rig_close(&r);
}

/* Neither the device nor the host has room for one more. */
TEST(bytes_that_find_no_memory_stay_parked) {
    rig r;
    rig_open(&r, &(rig_options){.budget_bytes = BLOCK, .host_bytes = BLOCK});
    tp_dropped *dropped = park(&r, made(&r, 7));
    await_gone(&r, BLOCK);
    const tp_addr other = made(&r, 8);
    tp_addr back = 0;
    tp_oom oom = {0};
    const tp_status status =
        tp_unpark(r.core, dropped, r.streams[0], false, &back, &oom, &test_error);
    EXPECT(status == TP_OUT_OF_MEMORY || status == TP_NO_HOST_MEMORY);
    EXPECT_EQ(oom.requested_bytes, BLOCK);
    rig_op(&r, 0, other, BLOCK, 8, false);
    tp_free(r.core, other);
    rig_op(&r, 0, unpark(&r, dropped, 0), BLOCK, 7, false);
    rig_close_right(&r);
}

/* An operator has written over host memory, and is not done: whoever brings the bytes back on another
 * stream, for whoever uses them there, copies what it has written. */
TEST(bytes_that_are_still_being_written_in_host_memory_come_back_written) {
    rig r;
    rig_open(&r, &(rig_options){.budget_bytes = BLOCK, .manual = true});
    for (uint64_t round = 1; round < 20; round++) {
        const tp_addr other = made(&r, 100 + round);
        EXPECT_OK(tp_pin(r.core, other, NULL, &test_error));
        const tp_addr addr = rig_alloc(&r, BLOCK, 1);
        rig_hold(&r, 1);
        rig_op(&r, 1, addr, BLOCK, round, true);
        EXPECT_EQ(rig_info(&r, addr).resident_bytes, 0);
        tp_dropped *dropped = park(&r, addr);
        EXPECT_OK(tp_unpin(r.core, other, &test_error));
        tp_free(r.core, other);
        const tp_addr back = unpark(&r, dropped, 0);
        rig_op(&r, 1, back, BLOCK, round, false);
        rig_drain(&r);
        EXPECT_EQ(r.wrong, 0);
        tp_free(r.core, back);
    }
    rig_close(&r);
}

/* ---- on the way ---------------------------------------------------------------------------- */

static tp_pager *locked(rig *r) {
    tp_pager *pager = (tp_pager *)(void *)r->core; /* its first member */
    tp_lock_take(&pager->lock);
    return pager;
}

static void stop_offload(void *arg) {
    rig *r = arg;
    EXPECT_OK(tp_core_set_offload(r->core, false, &test_error));
}

typedef struct eviction {
    rig *r;
    tp_addr addr;
} eviction;

static void evict_busy(void *arg) {
    const eviction *it = arg;
    tp_error error = {0};
    EXPECT_STATUS(tp_evict(it->r->core, it->addr, &error), TP_BUSY);
}

/* The recorder hears of each storage once, also of one that is on its way. */
TEST(storage_that_is_going_while_recording_begins_is_known_once) {
    rig r;
    rig_open(&r, &(rig_options){.manual = true});
    const tp_addr addr = made(&r, 7), other = made(&r, 8);
    tp_dropped *dropped = park(&r, addr);
    tp_region region = {0};
    tp_region_begin(r.core, &region, NULL, 0, r.streams[3]);   /* so that it does not get far */
    MUST(rig_returns(evict_busy, &(eviction){&r, other}, 10)); /* but recording begins */
    tp_region_end(&region);
    EXPECT_EQ(unpark(&r, dropped, 0), addr);
    rig_op(&r, 0, addr, BLOCK, 7, false);
    tp_free(r.core, addr);
    tp_free(r.core, other);
    MUST(rig_returns(stop_offload, &r, 10));
    rig_close(&r);
}

static void make_room(void *arg) {
    rig *r = arg;
    tp_free(r->core, rig_alloc(r, RIG_EXTENT, 0));
}

/* Whoever has kept its address uses it: it stays, and its extents can be evicted like any other's. */
TEST(block_that_is_used_while_it_is_going_can_be_evicted_later) {
    bool any = false;
    for (unsigned steps = 1; steps < 24; steps++) {
        rig r;
        rig_open(&r, &(rig_options){.budget_bytes = BLOCK, .manual = true});
        const tp_addr addr = made(&r, 7);
        rig_drain(&r);
        tp_dropped *dropped = park(&r, addr);
        for (unsigned i = 0; i < steps; i++) {
            rig_step(&r, 1);
            (void)nanosleep(&(struct timespec){.tv_nsec = 300000}, NULL);
        }
        if (rig_stats(&r).parked.current == 0) {
            any = true;
            EXPECT_OK(tp_touch(r.core, addr, false, r.streams[0], &test_error));
            MUST(rig_returns(make_room, &r, 5));
        }
        const tp_addr back = unpark(&r, dropped, 0);
        rig_op(&r, 0, back, BLOCK, 7, false);
        rig_drain(&r);
        EXPECT_EQ(r.wrong, 0);
        rig_close(&r);
    }
    EXPECT(any);
}

static void evict_everything(void *arg) { (void)tp_evict_all(((rig *)arg)->core); }

/* Parks a block, and fills what of it is in host memory, before anybody else comes by it. */
static tp_status park_and_fill(rig *r, tp_addr addr, tp_dropped **out) {
    tp_pager *pager = locked(r);
    const tp_status status = tp_block_park(pager, addr, out, &test_error);
    tp_block *block = tp_space_find(&pager->space, addr);
    for (uint32_t i = 0; i < block->extent_count && status == TP_OK; i++)
        if (block->extents[i].state == TP_EXTENT_HOST)
            EXPECT(
                tp_fill_start(pager, block, block->generation, &block->extents[i], 0, false));
    tp_lock_drop(&pager->lock);
    return status;
}

/* A part of it was in host memory, and is filled for a plan that wanted it before it was parked. */
TEST(block_that_is_filled_while_it_is_going_stays) {
    rig r;
    rig_open(&r, &(rig_options){.budget_bytes = BLOCK});
    const tp_addr addr = made(&r, 7);
    make_room(&r);
    tp_core_empty_cache(r.core);
    const size_t in_host = rig_info(&r, addr).host_bytes; /* some room is made ahead */
    EXPECT(in_host > 0 && in_host < BLOCK);
    tp_dropped *dropped = rig_gone_soon(&r, addr, park_and_fill);
    MUST(rig_returns(evict_everything, &r, 10));
    rig_op(&r, 0, unpark(&r, dropped, 0), BLOCK, 7, false);
    rig_close_right(&r);
}

static uint64_t events(const rig *r) {
    return fault_device_calls(r->dev, FAULT_EVENT_RECORD) +
           fault_device_calls(r->dev, FAULT_EVENT_RECORD_CONTEXT) +
           fault_device_calls(r->dev, FAULT_STREAM_WAIT);
}

/* The process ends: what ends now is left where it is. */
TEST(storages_that_end_after_the_core_was_abandoned_ask_nothing_of_the_device) {
    rig r;
    rig_open(&r, &(rig_options){.manual = true});
    const tp_addr first = made(&r, 7), second = made(&r, 8);
    rig_op(&r, 1, first, BLOCK, 7, false);
    rig_op(&r, 1, second, BLOCK, 8, false);
    tp_dropped *going = park(&r, first), *stays = park(&r, second);
    tp_core_abandon(r.core);
    const uint64_t before = events(&r);
    tp_drop_end(r.core, going);
    EXPECT_EQ(unpark(&r, stays, 0), second);
    EXPECT_EQ(events(&r), before);
    rig_close(&r);
}

/* What is queued on a stream that is captured is not done now, if ever. */
TEST(wanted_storage_does_not_come_back_on_a_stream_that_is_captured) {
    rig r;
    rig_open(&r, &(rig_options){0});
    tp_dropped *dropped = park(&r, made(&r, 7));
    await_gone(&r, BLOCK);
    const tp_addr other = rig_alloc(&r, RIG_EXTENT, 2);
    tp_free(r.core, rig_alloc(&r, BLOCK, 2)); /* there is memory that this stream may have */
    tp_pager *pager = locked(&r);
    tp_park_want(pager, dropped);
    tp_lock_drop(&pager->lock);
    tp_capture_begin(r.core);
    tp_sim_set_capturing(r.sim, r.streams[2], true);
    const uint64_t before = events(&r);
    const tp_access access = {other, false};
    tp_op op = {0};
    tp_op_begin(r.core, &op, &access, 1, r.streams[2]);
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
    EXPECT_EQ(events(&r), before);
    EXPECT_EQ(rig_stats(&r).parked.current, BLOCK);
    tp_sim_set_capturing(r.sim, r.streams[2], false);
    tp_capture_end(r.core);
    rig_op(&r, 0, other, RIG_EXTENT, 1, true);
    EXPECT_EQ(rig_stats(&r).parked.current, 0); /* it is wanted still */
    rig_op(&r, 0, unpark(&r, dropped, 0), BLOCK, 7, false);
    rig_drain(&r);
    EXPECT_EQ(r.wrong, 0);
    rig_close(&r);
}
