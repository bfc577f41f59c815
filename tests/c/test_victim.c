/* The choice of victims. */
#include "harness.h"
#include "pager/victim.h"

enum { MANY = 20 };

TEST(oldest_goes_first) {
    tp_candidate c[] = {{.dirty_bytes = 4}, {.dirty_bytes = 4}, {.dirty_bytes = 4}};
    EXPECT_EQ(tp_victim_choose(c, 3, 6), 6);
    EXPECT_EQ(c[0].take_dirty_bytes, 4);
    EXPECT_EQ(c[1].take_dirty_bytes, 2);
    EXPECT_EQ(c[2].take_dirty_bytes, 0);
}

TEST(clean_is_preferred_only_among_the_oldest) {
    /* The first three hold twice the need: the clean one of them goes first; the last one is
     * too young for that. */
    tp_candidate c[] = {
        {.dirty_bytes = 4}, {.dirty_bytes = 2}, {.clean_bytes = 4}, {.clean_bytes = 9}};
    EXPECT_EQ(tp_victim_choose(c, 4, 5), 5);
    EXPECT_EQ(c[2].take_clean_bytes, 4);
    EXPECT_EQ(c[0].take_dirty_bytes, 1);
    EXPECT_EQ(c[1].take_dirty_bytes, 0);
    EXPECT_EQ(c[3].take_clean_bytes, 0);
}

TEST(young_clean_is_taken_before_giving_up) {
    tp_candidate c[] = {{.dirty_bytes = 1}, {.clean_bytes = 5}};
    EXPECT_EQ(tp_victim_choose(c, 2, 100), 6);
    EXPECT_EQ(c[0].take_dirty_bytes, 1);
    EXPECT_EQ(c[1].take_clean_bytes, 5);
}

TEST(nothing_comes_of_nothing) {
    EXPECT_EQ(tp_victim_choose(NULL, 0, 5), 0);
    tp_candidate c = {
        .clean_bytes = 5, .dirty_bytes = 5, .take_clean_bytes = 9, .take_dirty_bytes = 9};
    EXPECT_EQ(tp_victim_choose(&c, 1, 0), 0);
    EXPECT_EQ(c.take_clean_bytes + c.take_dirty_bytes, 0); /* an old answer is replaced */
    EXPECT_EQ(tp_victim_choose(&c, 1, SIZE_MAX), 10);
}

TEST(random_choices_give_what_is_needed_and_no_more_than_there_is) {
    uint64_t state = test_seed();
    for (unsigned round = 0; round < test_rounds(5000) && test_failures() == 0; round++) {
        tp_candidate c[MANY];
        size_t all = 0, taken = 0;
        const size_t count = (size_t)test_random_below(&state, MANY + 1);
        for (size_t i = 0; i < count; i++) {
            c[i] = (tp_candidate){.clean_bytes = (size_t)test_random_below(&state, 3) * 8,
                                  .dirty_bytes = (size_t)test_random_below(&state, 3) * 8};
            all += c[i].clean_bytes + c[i].dirty_bytes;
        }
        const size_t need = (size_t)test_random_below(&state, 200);
        const size_t got = tp_victim_choose(c, count, need);
        for (size_t i = 0; i < count; i++) {
            EXPECT(c[i].take_clean_bytes <= c[i].clean_bytes);
            EXPECT(c[i].take_dirty_bytes <= c[i].dirty_bytes);
            taken += c[i].take_clean_bytes + c[i].take_dirty_bytes;
        }
        EXPECT_EQ(got, taken);
        EXPECT_EQ(got, need < all ? need : all);
    }
}
