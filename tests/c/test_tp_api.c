/* Every fallible function of tp.h with bad input: a typed error, and nothing has changed. */
#include <string.h>

#include "harness.h"
#include "rig.h"

static tp_device *plain_device(const tp_sim_options *more) {
    tp_sim_options options = *more;
    options.device_bytes = TP_MIB;
    options.granularity_bytes = RIG_GRANULE;
    tp_device *dev = NULL;
    MUST_OK(tp_sim_device_create(&options, &dev, &test_error));
    return dev;
}

static tp_config plain_config(void) {
    return (tp_config){.device_budget_bytes = TP_NO_LIMIT,
                       .host_budget_bytes = TP_NO_LIMIT,
                       .extent_max_bytes = RIG_EXTENT,
                       .segment_bytes = 16 * TP_MIB};
}

TEST(core_of_an_impossible_configuration_cannot_be) {
    tp_core *core = NULL;
    tp_config config = plain_config();
    config.device_budget_bytes = 0;
    EXPECT_STATUS(
        tp_core_create(&config, plain_device(&(tp_sim_options){0}), &core, &test_error),
        TP_INVALID);
    config = plain_config();
    config.extent_max_bytes = SIZE_MAX;
    EXPECT_STATUS(
        tp_core_create(&config, plain_device(&(tp_sim_options){0}), &core, &test_error),
        TP_INVALID);
    EXPECT(core == NULL); /* and the devices are gone: a sanitizer would say */
}

TEST(offload_without_host_frames_is_unsupported) {
    tp_config config = plain_config();
    config.offload = true;
    tp_core *core = NULL;
    MUST_OK(tp_core_create(&config, plain_device(&(tp_sim_options){.no_host_frames = true}),
                           &core, &test_error));
    tp_stats stats;
    tp_core_stats(core, &stats);
    EXPECT(!stats.offload);
    EXPECT_STATUS(tp_core_set_offload(core, true, &test_error), TP_UNSUPPORTED);
    tp_addr addr = 0;
    EXPECT_STATUS(tp_alloc(core, 2 * TP_MIB, NULL, 0, &addr, NULL, &test_error),
                  TP_OUT_OF_MEMORY);
    EXPECT_OK(tp_core_set_offload(core, false, &test_error));
    tp_core_destroy(core);
}

TEST(impossible_sizes_are_refused_and_take_no_addresses) {
    rig r;
    rig_open(&r, &(rig_options){.host_bytes = TP_MIB});
    tp_sim_counts before, after;
    tp_free(r.core, rig_alloc(&r, 4096, 0)); /* the first segment */
    tp_sim_get_counts(r.sim, &before);
    tp_addr addr = 5;
    tp_oom oom = {0};
    EXPECT(!tp_core_last_oom(r.core, &oom));
    EXPECT_STATUS(tp_alloc(r.core, 0, NULL, 0, &addr, &oom, &test_error), TP_INVALID);
    EXPECT(!tp_core_last_oom(r.core, &oom));
    const size_t sizes[] = {SIZE_MAX, SIZE_MAX / 2, (size_t)1 << 44, 2 * TP_MIB};
    for (int i = 0; i < 4; i++) {
        EXPECT_STATUS(tp_alloc(r.core, sizes[i], NULL, 0, &addr, &oom, &test_error),
                      TP_NO_HOST_MEMORY);
        EXPECT_EQ(oom.requested_bytes, sizes[i]);
    }
    EXPECT_OK(tp_core_set_offload(r.core, false, &test_error));
    for (int i = 0; i < 4; i++) {
        EXPECT_STATUS(tp_alloc(r.core, sizes[i], NULL, 0, &addr, &oom, &test_error),
                      TP_OUT_OF_MEMORY);
    }
    EXPECT(tp_core_last_oom(r.core, &oom));
    EXPECT_EQ(addr, 5);
    tp_sim_get_counts(r.sim, &after);
    EXPECT_EQ(after.ranges, before.ranges);
    EXPECT_EQ(rig_stats(&r).ooms, 8);
    rig_close(&r);
}

TEST(budgets_of_nothing_are_refused) {
    rig r;
    rig_open(&r, &(rig_options){0});
    EXPECT_STATUS(tp_core_set_budget(r.core, 0, TP_NO_LIMIT, &test_error), TP_INVALID);
    const tp_addr a = rig_alloc(&r, 64 * TP_KIB, 0);
    rig_op(&r, 0, a, 64 * TP_KIB, 1, true);
    EXPECT_OK(tp_evict(r.core, a, &test_error));
    EXPECT_STATUS(tp_core_set_budget(r.core, 512 * TP_KIB, 4096, &test_error),
                  TP_NO_HOST_MEMORY);
    size_t device = 0, host = 0, granted = 3;
    tp_core_get_budget(r.core, &device, &host);
    EXPECT_EQ(device, 512 * TP_KIB);
    EXPECT_EQ(host, TP_NO_LIMIT);
    EXPECT_STATUS(tp_core_yield_to_foreign(r.core, 1, &granted, &test_error), TP_INVALID);
    EXPECT_EQ(granted, 3);
    rig_close(&r);
}

/* Inside an address range of ours, but in no block; inside a freed block; nowhere. */
TEST(addresses_without_a_live_block_are_refused_or_ignored) {
    rig r;
    rig_open(&r, &(rig_options){0});
    const tp_addr live = rig_alloc(&r, 32 * TP_KIB, 0), freed = rig_alloc(&r, 32 * TP_KIB, 0);
    tp_free(r.core, freed);
    const tp_addr addrs[] = {0, 4096, freed, freed + 100, live + 8 * TP_MIB};
    for (int i = 0; i < 5; i++) {
        const tp_addr addr = addrs[i];
        tp_block_info info;
        tp_oom oom;
        EXPECT(!tp_block_query(r.core, addr, &info));
        EXPECT_STATUS(tp_touch(r.core, addr, true, NULL, &test_error), TP_INVALID);
        EXPECT_STATUS(tp_pin(r.core, addr, &oom, &test_error), TP_INVALID);
        EXPECT_STATUS(tp_unpin(r.core, addr, &test_error), TP_INVALID);
        EXPECT_STATUS(tp_evict(r.core, addr, &test_error), TP_INVALID);
        tp_free(r.core, addr);
        tp_record_stream(r.core, addr, r.streams[1]);
        tp_mark_seen(r.core, addr);
        tp_export(r.core, addr);
        tp_op op = {0};
        const tp_access access = {addr, true};
        tp_op_begin(r.core, &op, &access, 1, r.streams[0]);
        EXPECT_EQ(op.pin_count, 0);
        tp_op_adopt(&op, addr);
        tp_op_end(&op, &addr, 1, NULL);
        tp_op_fini(&op);
    }
    tp_free(r.core, live + 4096); /* not its first address */
    EXPECT_EQ(rig_stats(&r).block_count, 1);
    EXPECT_EQ(rig_stats(&r).free_count, 1);
    EXPECT_STATUS(tp_unpin(r.core, live, &test_error), TP_INVALID); /* not pinned */
    EXPECT_STATUS(tp_evict(r.core, live, &test_error), TP_BUSY);    /* not seen */
    EXPECT_OK(tp_core_set_offload(r.core, false, &test_error));
    tp_mark_seen(r.core, live);
    EXPECT_STATUS(tp_evict(r.core, live, &test_error), TP_BUSY); /* no offload */
    EXPECT_EQ(tp_evict_all(r.core), 0);
    EXPECT_OK(tp_core_check(r.core, &test_error));
    rig_close(&r);
}

TEST(slots_hold_one_core_each) {
    rig r;
    rig_open(&r, &(rig_options){0});
    const tp_addr a = rig_alloc(&r, 4096, 0);
    EXPECT_STATUS(tp_register(-1, r.core, &test_error), TP_INVALID);
    EXPECT_STATUS(tp_register(TP_SLOT_MAX, r.core, &test_error), TP_INVALID);
    EXPECT_STATUS(tp_register(0, NULL, &test_error), TP_INVALID);
    EXPECT(tp_core_owning(a) == NULL);
    EXPECT_OK(tp_register(TP_SLOT_SIM, r.core, &test_error));
    EXPECT_STATUS(tp_register(TP_SLOT_SIM, r.core, &test_error), TP_BUSY);
    EXPECT(tp_core_at(TP_SLOT_SIM) == r.core);
    EXPECT(tp_core_at(-1) == NULL && tp_core_at(TP_SLOT_MAX) == NULL && tp_core_at(0) == NULL);
    EXPECT(tp_core_owning(a) == r.core);
    EXPECT(tp_core_owning(0) == NULL);
    tp_unregister(-1);
    tp_unregister(TP_SLOT_SIM);
    EXPECT(tp_core_owning(a) == NULL);
    EXPECT_OK(tp_register(3, r.core, &test_error));
    EXPECT(tp_core_owning(a) == r.core);
    tp_unregister(3);
    rig_close(&r);
}

/* In FAILED, what was asked for is refused with the same status everywhere. */
TEST(fault_that_ends_in_failed_is_answered_by_everything) {
    rig r;
    rig_open(&r, &(rig_options){0});
    const tp_addr a = rig_alloc(&r, 32 * TP_KIB, 0);
    rig_op(&r, 0, a, 32 * TP_KIB, 1, true);
    rig_drain(&r);
    EXPECT_OK(tp_evict(r.core, a, &test_error));
    fault_device_arm(
        r.dev, &(fault_plan){.nth = 1, .calls = 1u << FAULT_EVENT_QUERY, .persistent = true});
    EXPECT_OK(tp_touch(r.core, a, false, r.streams[0], &test_error)); /* readable where it is */
    fault_device_disarm(r.dev);
    MUST(rig_stats(&r).failed);
    tp_addr addr = 0;
    size_t granted = 0;
    EXPECT_STATUS(tp_alloc(r.core, 4096, NULL, 0, &addr, NULL, &test_error), TP_FAILED);
    EXPECT_STATUS(tp_evict(r.core, a, &test_error), TP_FAILED);
    EXPECT(tp_touch(r.core, a, false, NULL, &test_error) != TP_OK);
    EXPECT(tp_pin(r.core, a, NULL, &test_error) != TP_OK);
    EXPECT(tp_core_yield_to_foreign(r.core, 1, &granted, &test_error) != TP_OK);
    EXPECT_EQ(tp_evict_all(r.core), 0);
    tp_core_empty_cache(r.core);
    EXPECT_OK(tp_core_set_offload(r.core, false, &test_error));
    EXPECT_EQ(rig_info(&r, a).host_bytes, 32 * TP_KIB);
    rig_launch(&r, 0, a, 32 * TP_KIB, 1, false);
    rig_close(&r);
    EXPECT_EQ(atomic_load(&r.wrong), 0);
}
