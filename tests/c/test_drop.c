/* Blocks whose bytes can be made again: what goes, what is kept for their return, and that the
 * recorder knows the storage all the while. */
#include "harness.h"
#include "rig.h"

enum { BLOCK = 4 * RIG_EXTENT };

/* What a rerun does: a block nobody is told of, written by an operator that nobody counts. */
static tp_addr rerun(rig *r, size_t bytes, uint64_t value) {
    tp_op op = {.rerun = true};
    tp_addr addr = 0;
    tp_op_begin(r->core, &op, NULL, 0, r->streams[0]);
    MUST_OK(tp_alloc(r->core, bytes, r->streams[0], TP_ALLOC_PINNED | TP_ALLOC_RERUN, &addr,
                     NULL, &test_error));
    tp_op_adopt(&op, addr);
    rig_launch(r, 0, addr, bytes, value, true);
    tp_op_end(&op, &addr, 1, NULL);
    tp_op_fini(&op);
    return addr;
}

static tp_addr made(rig *r, uint64_t value) { return rig_made(r, BLOCK, value); }

TEST(dropped_block_is_free_and_comes_back_elsewhere) {
    rig r;
    rig_open(&r, &(rig_options){0});
    const tp_addr addr = made(&r, 7);
    tp_dropped *dropped = NULL;
    EXPECT_OK(tp_drop(r.core, addr, r.streams[0], &dropped, &test_error));
    tp_stats stats = rig_stats(&r);
    EXPECT_EQ(stats.dropped.current, BLOCK);
    EXPECT_EQ(stats.resident.current, 0);
    EXPECT_EQ(stats.block_count, 0);
    EXPECT_EQ(stats.drops.count, 1);
    const tp_addr other = made(&r, 9); /* in its memory */
    const tp_addr back = rerun(&r, BLOCK, 7);
    tp_bring_back(r.core, dropped, back, r.streams[0]);
    rig_op(&r, 0, back, BLOCK, 7, false);
    rig_op(&r, 0, other, BLOCK, 9, false);
    stats = rig_stats(&r);
    EXPECT_EQ(stats.dropped.current, 0);
    EXPECT_EQ(stats.reruns.count, 1);
    EXPECT_EQ(stats.block_count, 2);
    rig_close_right(&r);
}

TEST(storage_that_ends_while_it_is_dropped_leaves_nothing) {
    rig r;
    rig_open(&r, &(rig_options){0});
    tp_dropped *dropped = NULL, *left = NULL;
    EXPECT_OK(tp_drop(r.core, made(&r, 1), r.streams[0], &dropped, &test_error));
    EXPECT_OK(tp_drop(r.core, made(&r, 2), r.streams[0], &left, &test_error));
    tp_drop_end(r.core, dropped);
    EXPECT_EQ(rig_stats(&r).dropped.current, BLOCK);
    EXPECT_OK(tp_core_check(r.core, &test_error));
    rig_close(&r); /* with one that nobody has ended */
}

static tp_status drop(rig *r, tp_addr addr, tp_dropped **out) {
    return tp_drop(r->core, addr, r->streams[0], out, &test_error);
}

static tp_status try_drop(rig *r, tp_addr addr) {
    tp_dropped *dropped = NULL;
    const tp_status status = drop(r, addr, &dropped);
    if (status == TP_OK) tp_drop_end(r->core, dropped);
    return status;
}

TEST(block_in_use_or_immovable_stays) {
    rig r;
    rig_open(&r, &(rig_options){0});
    const tp_addr addr = made(&r, 3);
    EXPECT_EQ(try_drop(&r, addr + RIG_EXTENT), TP_INVALID);
    const tp_access access = {addr, false};
    tp_op op = {0};
    tp_op_begin(r.core, &op, &access, 1, r.streams[0]);
    EXPECT_EQ(try_drop(&r, addr), TP_BUSY);
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
    EXPECT_OK(tp_pin(r.core, addr, NULL, &test_error));
    EXPECT_EQ(try_drop(&r, addr), TP_BUSY);
    EXPECT_OK(tp_unpin(r.core, addr, &test_error));
    tp_region region = {0};
    tp_region_begin(r.core, &region, NULL, 0, r.streams[0]);
    EXPECT_EQ(try_drop(&r, addr), TP_BUSY);
    tp_region_end(&region);
    tp_region_fini(&region);
    tp_capture_begin(r.core);
    EXPECT_EQ(try_drop(&r, addr), TP_BUSY);
    tp_capture_end(r.core);
    EXPECT_EQ(try_drop(&r, rig_alloc(&r, BLOCK, 0)),
              TP_BUSY); /* no tensor, as far as is known */
    rig_op(&r, 0, addr, BLOCK, 3, false);
    rig_drain(&r);
    EXPECT_EQ(try_drop(&r, addr), TP_OK);
    EXPECT_EQ(r.wrong, 0);
    rig_close(&r);
}

/* Three blocks fit on the device and two in the host's memory. */
TEST(room_is_kept_for_what_is_dropped) {
    rig r;
    rig_open(&r, &(rig_options){.budget_bytes = 3 * BLOCK, .host_bytes = 2 * BLOCK});
    tp_addr blocks[4];
    for (uint64_t i = 0; i < 3; i++) blocks[i] = made(&r, 10 + i);
    tp_dropped *dropped = rig_gone_soon(&r, blocks[0], drop);
    blocks[0] = made(&r, 20);
    blocks[3] = made(&r, 21); /* one goes to HOST */
    tp_addr none = 0;
    EXPECT_STATUS(tp_alloc(r.core, BLOCK, r.streams[0], 0, &none, NULL, &test_error),
                  TP_NO_HOST_MEMORY);
    EXPECT_EQ(try_drop(&r, blocks[1]), TP_NO_HOST_MEMORY);
    const tp_addr back = rerun(&r, BLOCK, 10);
    tp_bring_back(r.core, dropped, back, r.streams[0]);
    rig_op(&r, 0, back, BLOCK, 10, false);
    rig_op(&r, 0, blocks[0], BLOCK, 20, false);
    rig_op(&r, 0, blocks[1], BLOCK, 11, false);
    rig_op(&r, 0, blocks[2], BLOCK, 12, false);
    rig_op(&r, 0, blocks[3], BLOCK, 21, false);
    rig_drain(&r);
    EXPECT_EQ(r.wrong, 0);
    rig_close(&r);
}

/* What comes back is compared when the device has computed both fingerprints. */
static tp_status come_back_as(uint64_t value, uint64_t *wrong) {
    rig r;
    rig_open(&r, &(rig_options){0});
    const tp_addr addr = made(&r, 7);
    tp_dropped *dropped = NULL;
    EXPECT_OK(tp_drop(r.core, addr, r.streams[0], &dropped, &test_error));
    const tp_addr other = made(&r, 9);
    const tp_addr back = rerun(&r, BLOCK, value);
    tp_bring_back(r.core, dropped, back, r.streams[0]);
    rig_drain(&r);
    rig_op(&r, 0, other, BLOCK, 9, false); /* where somebody looks */
    rig_drain(&r);
    const tp_stats stats = rig_stats(&r);
    EXPECT_EQ(stats.unverified_reruns, 0);
    *wrong = stats.wrong_reruns;
    tp_addr next = 0;
    const tp_status status = tp_alloc(r.core, BLOCK, r.streams[0], 0, &next, NULL, &test_error);
    EXPECT_EQ(r.wrong, 0);
    rig_close(&r);
    return status;
}

TEST(bytes_that_come_back_as_others_stop_everything) {
    uint64_t wrong = 0;
    EXPECT_EQ(come_back_as(7, &wrong), TP_OK);
    EXPECT_EQ(wrong, 0);
    EXPECT_EQ(come_back_as(8, &wrong), TP_FAILED);
    EXPECT_EQ(wrong, 1);
}

/* Nobody has waited for memory, so uses have no markers: the last one on another stream counts. */
TEST(fingerprint_of_a_drop_waits_for_other_streams) {
    rig r;
    rig_open(&r, &(rig_options){.manual = true});
    const tp_addr addr = rig_alloc(&r, BLOCK, 1);
    rig_op(&r, 1, addr, BLOCK, 6, true);
    rig_drain(&r);
    rig_hold(&r, 1);
    rig_op(&r, 1, addr, BLOCK, 7, true);
    tp_dropped *dropped = NULL;
    EXPECT_OK(tp_drop(r.core, addr, r.streams[0], &dropped, &test_error));
    const tp_addr back = rerun(&r, BLOCK, 7);
    tp_bring_back(r.core, dropped, back, r.streams[0]);
    rig_drain(&r);
    const tp_stats stats = rig_stats(&r);
    EXPECT_EQ(stats.unverified_reruns, 0);
    EXPECT_EQ(stats.wrong_reruns, 0);
    EXPECT_EQ(r.wrong, 0);
    rig_close(&r);
}

/* More of them than places for fingerprints; the device is far behind, or is not. */
static uint64_t unverified_of_many(bool behind) {
    enum { MANY = TP_VERIFY_PLACES + 20, SMALL = RIG_GRANULE };
    rig r;
    rig_open(&r, &(rig_options){.manual = true, .budget_bytes = 2 * MANY * SMALL});
    tp_dropped *dropped[MANY];
    for (uint64_t i = 0; i < MANY; i++) {
        const tp_addr addr = rig_alloc(&r, SMALL, 0);
        rig_op(&r, 0, addr, SMALL, i + 1, true);
        EXPECT_OK(tp_drop(r.core, addr, r.streams[0], &dropped[i], &test_error));
        if (!behind) rig_drain(&r);
    }
    for (uint64_t i = 0; i < MANY; i++) {
        const tp_addr back = rerun(&r, SMALL, i + 1);
        tp_bring_back(r.core, dropped[i], back, r.streams[0]);
        rig_op(&r, 0, back, SMALL, i + 1, false);
        tp_free(r.core, back);
        if (!behind) rig_drain(&r);
    }
    rig_drain(&r);
    const tp_stats stats = rig_stats(&r);
    EXPECT_EQ(stats.wrong_reruns, 0);
    EXPECT_EQ(r.wrong, 0);
    rig_close(&r);
    return stats.unverified_reruns;
}

TEST(drops_without_a_place_for_their_fingerprint_are_counted) {
    const uint64_t behind = unverified_of_many(true);
    EXPECT(behind >= 20 && behind <= 20 + TP_VERIFY_PLACES / 2);
    EXPECT_EQ(unverified_of_many(false), 0);
}

typedef struct counted {
    uint32_t ops, blocks;
    uint64_t died;
} counted;

static void count_step(void *ctx, const tp_step *step) {
    counted *out = ctx;
    *out = (counted){.ops = step->trace.op_count, .blocks = step->trace.block_count};
    for (uint32_t i = 0; i < step->trace.block_count; i++) {
        if (step->trace.blocks[i].dead_op != TP_NO_OP)
            out->died += step->trace.blocks[i].dead_op;
    }
}

static counted step_with(bool drops) {
    rig r;
    rig_open(&r, &(rig_options){.budget_bytes = 3 * BLOCK, .no_plans = true});
    const tp_addr weight = made(&r, 1), second = made(&r, 5), third = made(&r, 6);
    rig_press(&r);
    for (int step = 0; step < 3; step++) {
        tp_mark_step(r.core, TP_STEP_ASKED);
        rig_op(&r, 0, weight, BLOCK, 1, false);
        tp_addr kept = made(&r, 2);
        rig_op(&r, 0, second, BLOCK, 5, false);
        tp_dropped *dropped = drops ? rig_gone_soon(&r, kept, drop) : NULL;
        rig_op(&r, 0, third, BLOCK, 6, false);
        if (drops) {
            kept = rerun(&r, BLOCK, 2);
            tp_bring_back(r.core, dropped, kept, r.streams[0]);
        }
        rig_op(&r, 0, kept, BLOCK, 2, false);
        tp_free(r.core, kept);
        rig_op(&r, 0, weight, BLOCK, 1, true);
    }
    tp_mark_step(r.core, TP_STEP_ASKED);
    rig_op(&r, 0, weight, BLOCK, 1, false);
    counted out = {0};
    EXPECT(tp_last_step(r.core, count_step, &out));
    rig_drain(&r);
    EXPECT_EQ(r.wrong, 0);
    EXPECT_OK(tp_core_check(r.core, &test_error));
    rig_close(&r);
    return out;
}

TEST(recorder_sees_the_program_and_no_rerun) {
    const counted without = step_with(false), with = step_with(true);
    EXPECT(without.ops == 6 && without.blocks == 4);
    EXPECT_EQ(with.ops, without.ops);
    EXPECT_EQ(with.blocks, without.blocks);
    EXPECT_EQ(with.died, without.died);
}
