/* The states of an extent: exactly the arrows of the diagram in csrc/README.md. */
#include <string.h>

#include "harness.h"
#include "pager/extent.h"

/* One character for each arrow: from a row to a column. The order is that of
 * tp_extent_state. */
static const char *const arrows[TP_EXTENT_STATE_COUNT] = {
    /*             E D W C H F */
    /* EMPTY   */ ".x..x.",
    /* DIRTY   */ "x.x...",
    /* WRITING */ ".x.x..",
    /* CLEAN   */ "xx..x.",
    /* HOST    */ "x....x",
    /* FILLING */ "...xx.",
};

TEST(legal_moves_are_those_of_the_diagram) {
    for (unsigned from = 0; from < TP_EXTENT_STATE_COUNT; from++) {
        for (unsigned to = 0; to < TP_EXTENT_STATE_COUNT; to++) {
            const bool drawn = arrows[from][to] == 'x';
            if (tp_extent_may_become((tp_extent_state)from, (tp_extent_state)to) == drawn)
                continue;
            test_fail(__FILE__, __LINE__, "%s to %s is %s",
                      tp_extent_state_name((tp_extent_state)from),
                      tp_extent_state_name((tp_extent_state)to), drawn ? "refused" : "allowed");
        }
    }
}

TEST(resident_states_are_those_that_map_a_device_frame) {
    const char *const names[] = {"EMPTY", "DIRTY", "WRITING", "CLEAN", "HOST", "FILLING"};
    for (unsigned i = 0; i < TP_EXTENT_STATE_COUNT; i++) {
        EXPECT_EQ(tp_extent_resident((tp_extent_state)i), i >= 1 && i <= 3);
        EXPECT(strcmp(tp_extent_state_name((tp_extent_state)i), names[i]) == 0);
    }
    EXPECT(strcmp(tp_extent_state_name(TP_EXTENT_STATE_COUNT), "UNKNOWN") == 0);
}

#if TP_DEBUG
static void fill_without_a_frame(void *arg) {
    static tp_pager pager;
    tp_block block = {.life = TP_BLOCK_BORN};
    tp_extent extent = {.block = &block, .state = TP_EXTENT_DIRTY};
    (void)arg;
    tp_extent_become(&pager, &extent, TP_EXTENT_FILLING);
}

TEST(illegal_move_traps) { EXPECT(test_traps(fill_without_a_frame, NULL)); }
#endif

TEST(gauges_follow_the_extents_of_live_blocks_only) {
    static tp_pager pager;
    memset(&pager, 0, sizeof pager);
    tp_extent extents[2];
    tp_block block = {.bytes = 30,
                      .requested_bytes = 25,
                      .extents = extents,
                      .extent_count = 2,
                      .life = TP_BLOCK_BORN};
    extents[0] = (tp_extent){.block = &block, .bytes = 20};
    extents[1] = (tp_extent){.block = &block, .bytes = 10};
    tp_extent_become(&pager, &extents[0], TP_EXTENT_DIRTY);
    tp_extent_become(&pager, &extents[1], TP_EXTENT_HOST);
    EXPECT_EQ(pager.stats.resident.current + pager.stats.host.current, 0);
    block.life = TP_BLOCK_LIVE;
    tp_block_count(&pager, &block, true);
    EXPECT_EQ(pager.stats.resident.current, 20);
    EXPECT_EQ(pager.stats.host.current, 10);
    EXPECT_EQ(pager.stats.active.current, 30);
    EXPECT_EQ(pager.stats.allocated.current, 25);
    tp_extent_become(&pager, &extents[1], TP_EXTENT_FILLING);
    EXPECT_EQ(pager.stats.host.current, 10);
    tp_extent_become(&pager, &extents[1], TP_EXTENT_CLEAN);
    EXPECT_EQ(pager.stats.resident.current, 30);
    EXPECT_EQ(pager.stats.host.current, 0);
    tp_block_count(&pager, &block, false);
    EXPECT_EQ(pager.stats.resident.current + pager.stats.active.current +
                  pager.stats.allocated.current + pager.stats.block_count,
              0);
    EXPECT_EQ(pager.stats.resident.peak, 30);
}
