/* Frames and their pools. */
#include "base/bytes.h"
#include "device/device_sim.h"
#include "fault_device.h"
#include "harness.h"
#include "memory/frame.h"

enum { GRANULE = 4096, LARGEST = 8 * GRANULE };

static tp_device *open_sim(void) {
    tp_device *dev = NULL;
    MUST_OK(tp_sim_device_create(
        &(tp_sim_options){.device_bytes = TP_MIB, .granularity_bytes = GRANULE}, &dev,
        &test_error));
    return dev;
}

static tp_frame *make(tp_device *dev, tp_frame_kind kind, size_t granules) {
    tp_frame *frame = NULL;
    MUST_OK(tp_frame_create(dev, kind, granules * GRANULE, &frame, &test_error));
    return frame;
}

TEST(frame_comes_back_by_its_exact_size_last_used_first) {
    tp_device *dev = open_sim();
    tp_frame_pool pool;
    MUST_OK(tp_frame_pool_init(&pool, dev, TP_FRAME_DEVICE, LARGEST, &test_error));
    tp_frame *one = make(dev, TP_FRAME_DEVICE, 3), *two = make(dev, TP_FRAME_DEVICE, 3);
    tp_frame_pool_put(&pool, one);
    tp_frame_pool_put(&pool, two);
    EXPECT_EQ(pool.free_bytes, 6 * GRANULE);
    EXPECT(tp_frame_pool_take(&pool, 2 * GRANULE) == NULL);
    EXPECT(tp_frame_pool_take(&pool, 4 * GRANULE) == NULL);
    EXPECT(tp_frame_pool_take(&pool, 3 * GRANULE) == two);
    EXPECT(tp_frame_pool_take(&pool, 3 * GRANULE) == one);
    EXPECT(tp_frame_pool_take(&pool, 3 * GRANULE) == NULL);
    EXPECT_EQ(pool.free_bytes, 0);
    tp_frame_pool_put(&pool, one);
    EXPECT(tp_frame_destroy(dev, two));
    tp_frame_pool_fini(&pool); /* destroys `one` */
    tp_sim_counts counts;
    tp_sim_get_counts(dev, &counts);
    EXPECT_EQ(counts.frames + counts.mappings + counts.ranges, 0);
    dev->ops->destroy(dev);
}

TEST(frame_still_mapped_is_neither_taken_nor_stripped) {
    tp_device *dev = open_sim();
    tp_frame_pool pool;
    MUST_OK(tp_frame_pool_init(&pool, dev, TP_FRAME_DEVICE, LARGEST, &test_error));
    tp_frame *idle = make(dev, TP_FRAME_DEVICE, 2), *mapped = make(dev, TP_FRAME_DEVICE, 2);
    mapped->map_count = 1;
    tp_frame_pool_put(&pool, idle);
    tp_frame_pool_put(&pool, mapped);
    EXPECT(tp_frame_pool_take(&pool, 2 * GRANULE) == idle);
    EXPECT(tp_frame_pool_take(&pool, 2 * GRANULE) == NULL);
    tp_link out;
    tp_list_init(&out);
    EXPECT_EQ(tp_frame_pool_strip(&pool, SIZE_MAX, &out), 0);
    mapped->map_count = 0;
    EXPECT(tp_frame_pool_take(&pool, 2 * GRANULE) == mapped);
    EXPECT(tp_frame_destroy(dev, idle) && tp_frame_destroy(dev, mapped));
    tp_frame_pool_fini(&pool);
    dev->ops->destroy(dev);
}

TEST(strip_takes_the_largest_until_there_is_enough) {
    tp_device *dev = open_sim();
    tp_frame_pool pool;
    MUST_OK(tp_frame_pool_init(&pool, dev, TP_FRAME_HOST, LARGEST, &test_error));
    const size_t sizes[] = {1, 8, 2, 5, 8};
    for (int i = 0; i < 5; i++) tp_frame_pool_put(&pool, make(dev, TP_FRAME_HOST, sizes[i]));
    tp_link out;
    tp_list_init(&out);
    EXPECT_EQ(tp_frame_pool_strip(&pool, 17 * GRANULE, &out), 21 * GRANULE);
    EXPECT_EQ(pool.free_bytes, 3 * GRANULE);
    size_t sum = 0;
    while (!tp_list_empty(&out)) {
        tp_frame *frame = TP_CONTAINER(out.next, tp_frame, link);
        tp_list_remove(&frame->link);
        sum += frame->bytes;
        EXPECT(tp_frame_destroy(dev, frame));
    }
    EXPECT_EQ(sum, 21 * GRANULE);
    tp_frame_pool_fini(&pool);
    dev->ops->destroy(dev);
}

TEST(fault_in_a_frame_being_made_or_destroyed_leaves_nothing_half) {
    for (unsigned nth = 1; nth <= 3; nth++) {
        tp_device *sim = open_sim(), *dev = NULL;
        MUST_OK(fault_device_create(sim, &dev, &test_error));
        fault_device_arm(dev, &(fault_plan){.nth = nth});
        tp_frame *frame = NULL;
        EXPECT(tp_frame_create(dev, TP_FRAME_DEVICE, GRANULE, &frame, NULL) != TP_OK);
        EXPECT(frame == NULL && fault_device_fired(dev));
        tp_sim_counts counts;
        tp_sim_get_counts(sim, &counts);
        EXPECT_EQ(counts.frames + counts.mappings + counts.ranges, 0);
        fault_device_disarm(dev);
        frame = make(dev, TP_FRAME_DEVICE, 1);
        fault_device_arm(dev, &(fault_plan){.nth = 1, .calls = 1u << FAULT_UNMAP});
        EXPECT(!tp_frame_destroy(dev, frame));
        EXPECT(tp_frame_destroy(dev, frame)); /* as it was: the second try works */
        tp_sim_get_counts(sim, &counts);
        EXPECT_EQ(counts.frames + counts.mappings + counts.ranges, 0);
        dev->ops->destroy(dev);
    }
}
