/* The arithmetic of budgets. */
#include "base/bytes.h"
#include "harness.h"
#include "memory/budget.h"

TEST(frames_get_what_the_foreign_allocator_may_not_hold) {
    tp_budget budget = {.limit_bytes = 100, .foreign_cap_bytes = 30, .host_limit_bytes = 50};
    EXPECT_EQ(tp_budget_frame_cap(&budget), 70);
    EXPECT(tp_budget_admits(&budget, 0, 70));
    EXPECT(tp_budget_admits(&budget, 60, 10));
    EXPECT(!tp_budget_admits(&budget, 60, 11));
    EXPECT(!tp_budget_admits(&budget, 71, 0)); /* over it already, as while a budget shrinks */
    EXPECT(!tp_budget_admits(&budget, 60, SIZE_MAX));
    budget.foreign_cap_bytes = 101;
    EXPECT_EQ(tp_budget_frame_cap(&budget), 0);
    EXPECT(!tp_budget_admits(&budget, 0, 1));
}

TEST(host_budget_is_exact) {
    tp_budget budget = {.host_limit_bytes = 50};
    EXPECT(tp_budget_admits_host(&budget, 40, 10));
    EXPECT(!tp_budget_admits_host(&budget, 40, 11));
    EXPECT(!tp_budget_admits_host(&budget, 51, 0));
    budget.host_limit_bytes = SIZE_MAX;
    EXPECT(tp_budget_admits_host(&budget, SIZE_MAX - 5, 5));
    EXPECT(!tp_budget_admits_host(&budget, SIZE_MAX - 5, 6));
}

TEST(foreign_target_leaves_a_little_room_within_the_limit) {
    tp_budget budget = {.limit_bytes = 6400};
    EXPECT_EQ(tp_budget_foreign_target(&budget, 1000), 1100);
    EXPECT_EQ(tp_budget_foreign_target(&budget, 6350), 6400);
    EXPECT_EQ(tp_budget_foreign_target(&budget, 7000), 6400);
    budget.limit_bytes = 80 * TP_GIB;
    EXPECT_EQ(tp_budget_foreign_target(&budget, TP_GIB), TP_GIB + 64 * TP_MIB);
}

TEST(watermarks_grow_with_the_budget_up_to_a_bound) {
    tp_budget budget = {.limit_bytes = 640 * TP_MIB};
    EXPECT_EQ(tp_budget_watch_bytes(&budget), 320 * TP_MIB);
    EXPECT_EQ(tp_budget_reclaim_start(&budget), 20 * TP_MIB);
    EXPECT_EQ(tp_budget_reclaim_stop(&budget), 40 * TP_MIB);
    budget.limit_bytes = 80 * TP_GIB;
    EXPECT_EQ(tp_budget_reclaim_start(&budget), 512 * TP_MIB);
    EXPECT_EQ(tp_budget_reclaim_stop(&budget), TP_GIB);
}
