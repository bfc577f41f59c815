/* The address space: from an address to its block, segments, extents. */
#include "base/bytes.h"
#include "base/glance.h"
#include "device/device_sim.h"
#include "harness.h"
#include "memory/space.h"

enum { GRANULE = 4096, EXTENT = 4 * GRANULE, SEGMENT = 64 * GRANULE };

static tp_device *open_device(void) {
    tp_device *dev = NULL;
    MUST_OK(tp_sim_device_create(
        &(tp_sim_options){.device_bytes = TP_MIB, .granularity_bytes = GRANULE}, &dev,
        &test_error));
    return dev;
}

TEST(every_address_of_a_block_leads_to_it) {
    tp_device *dev = open_device();
    tp_space space;
    MUST_OK(tp_space_init(&space, dev, SEGMENT, EXTENT, &test_error));
    enum { COUNT = 12 };
    tp_block *blocks[COUNT];
    uint64_t state = test_seed();
    for (int i = 0; i < COUNT; i++) {
        const size_t bytes = 1 + (size_t)test_random_below(&state, 9 * GRANULE);
        MUST_OK(tp_space_take(&space, bytes, &blocks[i], &test_error));
        EXPECT_EQ(blocks[i]->bytes, tp_round_up(bytes, GRANULE));
        EXPECT_EQ(blocks[i]->life, TP_BLOCK_BORN);
    }
    for (int i = 0; i < COUNT; i++) {
        const tp_block *block = blocks[i];
        size_t sum = 0;
        for (uint32_t k = 0; k < block->extent_count; k++) {
            EXPECT_EQ(block->extents[k].addr, block->addr + sum);
            EXPECT_EQ(block->extents[k].state, TP_EXTENT_EMPTY);
            EXPECT(k + 1 == block->extent_count || block->extents[k].bytes == EXTENT);
            sum += block->extents[k].bytes;
        }
        EXPECT_EQ(sum, block->bytes);
        EXPECT(tp_space_find(&space, block->addr) == block);
        EXPECT(tp_glance_may_own(block->addr));
        EXPECT(tp_glance_may_own(block->addr + block->bytes - 1));
        EXPECT(tp_space_find(&space, block->addr + block->bytes - 1) == block);
        EXPECT(tp_space_find(&space, block->addr + block->bytes) != block);
        EXPECT(tp_space_owns(&space, block->addr));
    }
    EXPECT_OK(tp_space_check(&space, &test_error));
    for (int i = 0; i < COUNT; i += 2) {
        const tp_addr addr = blocks[i]->addr;
        tp_space_put(&space, blocks[i]);
        EXPECT(tp_space_find(&space, addr) == NULL);
        EXPECT(tp_space_owns(&space, addr)); /* the range stays ours */
        EXPECT_OK(tp_space_check(&space, &test_error));
    }
    tp_space_fini(&space);
    dev->ops->destroy(dev);
}

TEST(segments_are_added_when_needed_and_run_out) {
    tp_device *dev = open_device();
    tp_space space;
    MUST_OK(tp_space_init(&space, dev, SEGMENT, EXTENT, &test_error));
    EXPECT(!tp_space_owns(&space, 4096));
    tp_block *block = NULL;
    /* Larger than a segment: gets one of its own. */
    MUST_OK(tp_space_take(&space, 2 * SEGMENT + 1, &block, &test_error));
    EXPECT_EQ(block->segment->bytes, 2 * SEGMENT + GRANULE);
    EXPECT(tp_glance_may_own(block->addr) && !tp_glance_may_own(0) &&
           !tp_glance_may_own(UINT64_MAX));
    for (int i = 1; i < TP_SEGMENTS_MAX; i++) {
        MUST_OK(tp_space_take(&space, SEGMENT, &block, &test_error));
    }
    tp_block *kept = block;
    EXPECT_STATUS(tp_space_take(&space, GRANULE, &block, &test_error), TP_OUT_OF_MEMORY);
    EXPECT(block == kept);
    const tp_addr addr = kept->addr;
    tp_space_put(&space, kept);
    MUST_OK(tp_space_take(&space, SEGMENT, &block, &test_error));
    EXPECT_EQ(block->addr, addr);
    tp_space_fini(&space);
    dev->ops->destroy(dev);
}

TEST(block_of_no_bytes_or_of_too_many_cannot_be) {
    tp_device *dev = open_device();
    tp_space space;
    EXPECT_STATUS(tp_space_init(&space, dev, 0, EXTENT, &test_error), TP_INVALID);
    EXPECT_STATUS(tp_space_init(&space, dev, SEGMENT, 0, &test_error), TP_INVALID);
    MUST_OK(tp_space_init(&space, dev, SEGMENT, EXTENT, &test_error));
    tp_block *block = NULL;
    EXPECT_STATUS(tp_space_take(&space, 0, &block, &test_error), TP_INVALID);
    EXPECT_STATUS(tp_space_take(&space, SIZE_MAX, &block, &test_error), TP_INVALID);
    EXPECT(block == NULL);
    tp_space_fini(&space);
    dev->ops->destroy(dev);
}
