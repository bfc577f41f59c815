/* Small requests that share slabs (the pluggable door). */
#include <string.h>

#include "harness.h"
#include "rig.h"

enum { SLAB = 2 * 1024 * 1024, UNIT = 512, PIECES = 200 };

static void open_small(rig *r, size_t budget_bytes, bool manual) {
    rig_open(r, &(rig_options){.device_bytes = 64 * TP_MIB,
                               .budget_bytes = budget_bytes,
                               .no_offload = true,
                               .serve_small = true,
                               .manual = manual});
}

TEST(random_pieces_share_slabs_and_never_overlap) {
    static struct piece {
        tp_addr addr;
        size_t bytes;
    } pieces[PIECES];
    rig r;
    uint64_t state = test_seed();
    memset(pieces, 0, sizeof pieces);
    open_small(&r, 16 * TP_MIB, false);
    for (unsigned round = 0; round < test_rounds(4000) && test_failures() == 0; round++) {
        struct piece *it = &pieces[test_random_below(&state, PIECES)];
        if (it->addr != 0) {
            tp_free(r.core, it->addr);
            it->addr = 0;
            continue;
        }
        const size_t bytes = 1 + (size_t)test_random_below(&state, 20 * TP_KIB);
        const tp_addr addr = rig_alloc(&r, bytes, 0);
        EXPECT_EQ(addr % UNIT, 0);
        for (unsigned i = 0; i < PIECES; i++) {
            if (pieces[i].addr == 0) continue;
            EXPECT(addr + bytes <= pieces[i].addr || pieces[i].addr + pieces[i].bytes <= addr);
        }
        *it = (struct piece){addr, bytes};
    }
    EXPECT(rig_stats(&r).reserved.peak <= 6 * TP_MIB); /* 200 times 10 KiB, and some waste */
    for (unsigned i = 0; i < PIECES; i++) {
        if (pieces[i].addr != 0) tp_free(r.core, pieces[i].addr);
    }
    tp_core_empty_cache(r.core);
    EXPECT_EQ(rig_stats(&r).reserved.current, 0);
    rig_close(&r);
}

TEST(slabs_belong_to_a_stream_and_to_a_range_of_sizes) {
    rig r;
    open_small(&r, 64 * TP_MIB, false);
    const tp_addr a = rig_alloc(&r, 600, 0), b = rig_alloc(&r, 600, 0),
                  c = rig_alloc(&r, 600, 1);
    const tp_addr big = rig_alloc(&r, SLAB / 8 + 1, 0), large = rig_alloc(&r, 2 * TP_MIB, 0);
    EXPECT_EQ(b - a, 2 * UNIT);
    EXPECT_EQ(rig_info(&r, a).addr, rig_info(&r, b).addr);
    EXPECT(rig_info(&r, c).addr != rig_info(&r, a).addr);
    EXPECT(rig_info(&r, big).addr != rig_info(&r, a).addr);
    EXPECT_EQ(rig_info(&r, big).bytes, 16 * TP_MIB);
    EXPECT_EQ(rig_info(&r, large).addr, large); /* not small: a block of its own */
    EXPECT_EQ(rig_info(&r, large).bytes, 2 * TP_MIB);
    tp_free(r.core, a + UNIT); /* no piece begins there: nothing happens */
    tp_free(r.core, a);
    EXPECT_EQ(rig_alloc(&r, 600, 0), a); /* at once, on its own stream */
    rig_close(&r);
}

TEST(piece_used_on_another_stream_comes_back_after_that_stream) {
    rig r;
    open_small(&r, 16 * TP_MIB, true);
    const tp_addr a = rig_alloc(&r, 4096, 0);
    tp_record_stream(r.core, a, r.streams[0]); /* its own: nothing to wait for */
    tp_record_stream(r.core, a, r.streams[1]);
    rig_hold(&r, 1);
    rig_launch(&r, 1, a, 4096, 1, true);
    tp_free(r.core, a);
    const tp_addr b = rig_alloc(&r, 4096, 0);
    EXPECT(b != a);
    tp_core_empty_cache(r.core);
    EXPECT_EQ(rig_stats(&r).reserved.current, SLAB);
    rig_drain(&r);
    EXPECT_EQ(rig_alloc(&r, 4096, 0), a);
    tp_free(r.core, a);
    tp_free(r.core, b);
    tp_core_empty_cache(r.core);
    EXPECT_EQ(rig_stats(&r).reserved.current, 0);
    rig_close(&r);
}

/* More streams than a piece remembers, noted while a capture forbids markers of everything. */
TEST(piece_whose_streams_cannot_be_marked_waits_for_everything) {
    rig r;
    open_small(&r, 16 * TP_MIB, true);
    const tp_addr a = rig_alloc(&r, 4096, 0);
    tp_capture_begin(r.core);
    for (unsigned i = 1; i < RIG_GATE; i++) tp_record_stream(r.core, a, r.streams[i]);
    tp_capture_end(r.core);
    rig_hold(&r, 1);
    rig_launch(&r, 1, a, 4096, 1, true);
    tp_free(r.core, a);
    EXPECT(rig_alloc(&r, 4096, 0) != a);
    rig_drain(&r);
    EXPECT_EQ(rig_alloc(&r, 4096, 0), a);
    rig_close(&r);
}

TEST(trim_keeps_a_slab_with_one_piece) {
    rig r;
    open_small(&r, 16 * TP_MIB, false);
    const tp_addr a = rig_alloc(&r, 1000, 0), b = rig_alloc(&r, 1000, 0),
                  c = rig_alloc(&r, 1000, 1);
    EXPECT_EQ(rig_stats(&r).reserved.current, 2 * SLAB);
    tp_free(r.core, b);
    tp_free(r.core, c);
    tp_core_empty_cache(r.core);
    EXPECT_EQ(rig_stats(&r).reserved.current, SLAB);
    EXPECT_EQ(rig_info(&r, a).resident_bytes, SLAB);
    rig_close(&r);
}

TEST(out_of_memory_is_answered_when_no_slab_can_be_had) {
    rig r;
    open_small(&r, SLAB, false);
    const tp_addr a = rig_alloc(&r, 1000, 0);
    tp_addr addr = 99;
    tp_oom oom = {0};
    EXPECT_STATUS(tp_alloc(r.core, 1000, r.streams[1], 0, &addr, &oom, &test_error),
                  TP_OUT_OF_MEMORY);
    EXPECT_EQ(addr, 99);
    EXPECT_EQ(oom.budget_bytes, SLAB);
    EXPECT_EQ(oom.resident_bytes, SLAB);
    EXPECT_EQ(rig_stats(&r).ooms, 1);
    EXPECT(rig_alloc(&r, 1000, 0) != a); /* there is room in the slab of this stream */
    rig_close(&r);
}

/* A slab for pieces of 300 KiB is 16 MiB: more than the budget. */
TEST(piece_has_a_block_of_its_own_where_no_slab_fits) {
    rig r;
    rig_open(&r, &(rig_options){.device_bytes = 64 * TP_MIB,
                                .budget_bytes = 640 * TP_KIB,
                                .large_min_bytes = 2 * TP_MIB,
                                .no_offload = true,
                                .serve_small = true});
    const tp_addr a = rig_alloc(&r, 300 * TP_KIB, 0);
    EXPECT_EQ(rig_info(&r, a).addr, a);
    EXPECT_EQ(rig_info(&r, a).requested_bytes, 300 * TP_KIB);
    EXPECT(rig_alloc(&r, 300 * TP_KIB, 1) != a);
    tp_addr addr = 0;
    tp_oom oom = {0};
    EXPECT_STATUS(tp_alloc(r.core, 300 * TP_KIB, r.streams[0], 0, &addr, &oom, &test_error),
                  TP_OUT_OF_MEMORY);
    EXPECT_EQ(oom.requested_bytes, 300 * TP_KIB);
    EXPECT_EQ(rig_stats(&r).ooms, 1);
    tp_free(r.core, a);
    EXPECT_EQ(rig_alloc(&r, 300 * TP_KIB, 0), a);
    EXPECT_EQ(rig_stats(&r).ooms, 1);
    rig_close(&r);
}

TEST(idle_slabs_make_room_before_an_allocation_fails) {
    rig r;
    open_small(&r, SLAB, false);
    tp_free(r.core, rig_alloc(&r, 1000, 0));
    const tp_addr small = rig_alloc(&r, 1000, 1); /* a slab of another stream in its place */
    tp_free(r.core, small);
    const tp_addr large = rig_alloc(&r, SLAB, 2);
    EXPECT_EQ(rig_info(&r, large).resident_bytes, SLAB);
    EXPECT_EQ(rig_stats(&r).ooms, 0);
    EXPECT(rig_stats(&r).reserved.peak <= SLAB);
    rig_close(&r);
}
