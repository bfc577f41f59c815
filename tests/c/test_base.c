/* Tests of csrc/base. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <string.h>

#include "base/bytes.h"
#include "base/fingerprint.h"
#include "base/list.h"
#include "base/lock.h"
#include "base/stats.h"
#include "base/status.h"
#include "harness.h"

TEST(round_up_saturates_at_the_largest_multiple) {
    EXPECT_EQ(tp_round_up(0, 4096), 0);
    EXPECT_EQ(tp_round_up(1, 4096), 4096);
    EXPECT_EQ(tp_round_up(4096, 4096), 4096);
    EXPECT_EQ(tp_round_up(4097, 4096), 8192);
    EXPECT_EQ(tp_round_up(7, 3), 9);
    EXPECT_EQ(tp_round_up(SIZE_MAX, 4096), SIZE_MAX - 4095);
    EXPECT_EQ(tp_round_up(SIZE_MAX - 1, 2), SIZE_MAX - 1);
}

TEST(size_helpers_at_their_edges) {
    EXPECT(!tp_is_power_of_two(0));
    EXPECT(tp_is_power_of_two(1));
    EXPECT(!tp_is_power_of_two(3));
    EXPECT(tp_is_power_of_two((size_t)1 << 63));
    EXPECT_EQ(tp_min_size(2, 3), 2);
    EXPECT_EQ(tp_max_size(2, 3), 3);
    EXPECT_EQ(tp_sub_floor(2, 3), 0);
    EXPECT_EQ(tp_sub_floor(3, 2), 1);
}

/* Whatever a kernel may do to a block, and also where most bytes are 0. */
TEST(fingerprint_tells_contents_apart) {
    enum { BYTES = 4096 };
    static unsigned char plain[BYTES], other[BYTES];
    for (int zeros = 0; zeros < 2; zeros++) {
        for (int i = 0; i < BYTES; i++)
            plain[i] = (unsigned char)(zeros ? 0 : i * 13 + i / 256);
        const tp_fingerprint was = tp_fingerprint_of(plain, BYTES);
        EXPECT(tp_fingerprint_same(was, tp_fingerprint_of(plain, BYTES)));
        EXPECT(!tp_fingerprint_same(was, tp_fingerprint_of(plain, BYTES / 2)));
        for (int bit = 0; bit < BYTES * 8; bit += 7) {
            memcpy(other, plain, BYTES);
            other[bit / 8] ^= (unsigned char)(1 << bit % 8);
            const tp_fingerprint now = tp_fingerprint_of(other, BYTES);
            EXPECT(now.low != was.low || now.high != was.high);
        }
        /* Two parts of a size change places, large and small. */
        for (size_t part = 8; part <= BYTES / 2; part *= 2) {
            memcpy(other, plain, BYTES);
            other[0] = 1; /* not all the same */
            const tp_fingerprint before = tp_fingerprint_of(other, BYTES);
            unsigned char kept[BYTES / 2];
            memcpy(kept, other, part);
            memcpy(other, other + part, part);
            memcpy(other + part, kept, part);
            EXPECT(!tp_fingerprint_same(before, tp_fingerprint_of(other, BYTES)));
        }
    }
}

typedef struct numbered {
    int number;
    tp_link link;
} numbered;

TEST(list_keeps_order_and_survives_double_removal) {
    tp_link head;
    tp_list_init(&head);
    EXPECT(tp_list_empty(&head));
    numbered items[4];
    for (int i = 0; i < 4; i++) {
        items[i].number = i;
        tp_list_push_back(&head, &items[i].link);
    }
    tp_list_remove(&items[1].link);
    tp_list_remove(&items[1].link);
    EXPECT(!tp_link_in_list(&items[1].link));
    EXPECT(tp_link_in_list(&items[2].link));
    int order[4] = {-1, -1, -1, -1};
    int count = 0;
    for (tp_link *at = head.next; at != &head; at = at->next) {
        order[count++] = TP_CONTAINER(at, numbered, link)->number;
    }
    EXPECT_EQ(count, 3);
    EXPECT(order[0] == 0 && order[1] == 2 && order[2] == 3);
    for (int i = 0; i < 4; i++) tp_list_remove(&items[i].link);
    EXPECT(tp_list_empty(&head));
}

TEST(error_keeps_the_first_failure) {
    tp_error error = {0};
    EXPECT_EQ(tp_error_set_driver(&error, TP_DEVICE_ERROR, 719, "first %d", 1),
              TP_DEVICE_ERROR);
    EXPECT_EQ(tp_error_set(&error, TP_INVALID, "second"), TP_INVALID);
    EXPECT_EQ(error.status, TP_DEVICE_ERROR);
    EXPECT_EQ(error.driver_code, 719);
    EXPECT(strcmp(error.message, "first 1") == 0);
    EXPECT_EQ(tp_error_set(NULL, TP_BUSY, "nobody listens"), TP_BUSY);
}

TEST(error_message_is_cut_not_overrun) {
    tp_error error = {0};
    char longer[512];
    memset(longer, 'x', sizeof longer - 1);
    longer[sizeof longer - 1] = '\0';
    EXPECT_EQ(tp_error_set(&error, TP_INVALID, "%s", longer), TP_INVALID);
    EXPECT_EQ(strlen(error.message), sizeof error.message - 1);
}

TEST(every_status_has_a_name) {
    for (int status = TP_OK; status <= TP_FAILED; status++) {
        EXPECT(strcmp(tp_status_name((tp_status)status), "UNKNOWN") != 0);
    }
    EXPECT(strcmp(tp_status_name(TP_NO_HOST_MEMORY), "NO_HOST_MEMORY") == 0);
    EXPECT(strcmp(tp_status_name((tp_status)99), "UNKNOWN") == 0);
}

TEST(gauge_remembers_its_peak) {
    tp_gauge gauge = {0, 0};
    tp_gauge_add(&gauge, 10);
    tp_gauge_add(&gauge, 5);
    tp_gauge_sub(&gauge, 12);
    EXPECT_EQ(gauge.current, 3);
    EXPECT_EQ(gauge.peak, 15);
    tp_gauge_reset_peak(&gauge);
    EXPECT_EQ(gauge.peak, 3);
    tp_tally tally = {0, 0, 0};
    tp_tally_add(&tally, 100, 7);
    tp_tally_add(&tally, 1, 1);
    EXPECT(tally.count == 2 && tally.bytes == 101 && tally.ns == 8);
}

/* Takes the second lock of a pair while holding the first. */
static void take_in_order(void *arg) {
    tp_lock *const *pair = arg;
    tp_lock_take(pair[0]);
    tp_lock_take(pair[1]);
}

TEST(lock_taken_against_its_rank_traps) {
    if (!TP_DEBUG) SKIP("asserts are off");
    tp_lock core, device, other_core;
    MUST_OK(tp_lock_init(&core, TP_RANK_CORE, &test_error));
    MUST_OK(tp_lock_init(&other_core, TP_RANK_CORE, &test_error));
    MUST_OK(tp_lock_init(&device, TP_RANK_DEVICE, &test_error));
    tp_lock *rising[] = {&core, &device};
    tp_lock *falling[] = {&device, &core};
    tp_lock *level[] = {&core, &other_core};
    EXPECT(!test_traps(take_in_order, rising));
    EXPECT(test_traps(take_in_order, falling));
    EXPECT(test_traps(take_in_order, level));
    EXPECT(!tp_lock_held(&core));
    tp_lock_take(&core);
    EXPECT(tp_lock_held(&core));
    tp_lock_drop(&core);
    tp_lock_fini(&device);
    tp_lock_fini(&other_core);
    tp_lock_fini(&core);
}

typedef struct turn {
    tp_lock lock;
    tp_cond cond;
    int owner, taken;
} turn;

static void *take_turns(void *arg) {
    turn *shared = arg;
    tp_lock_take(&shared->lock);
    for (int i = 0; i < 100; i++) {
        while (shared->owner != 1) (void)tp_cond_wait(&shared->cond, &shared->lock, 0);
        shared->owner = 0;
        shared->taken++;
        tp_cond_broadcast(&shared->cond);
    }
    tp_lock_drop(&shared->lock);
    return NULL;
}

TEST(cond_wakes_the_waiter) {
    turn shared = {.owner = 1};
    MUST_OK(tp_lock_init(&shared.lock, TP_RANK_CORE, &test_error));
    MUST_OK(tp_cond_init(&shared.cond, &test_error));
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, take_turns, &shared) == 0);
    tp_lock_take(&shared.lock);
    for (int i = 0; i < 100; i++) {
        while (shared.owner != 0) (void)tp_cond_wait(&shared.cond, &shared.lock, 0);
        if (i < 99) shared.owner = 1;
        tp_cond_broadcast(&shared.cond);
    }
    tp_lock_drop(&shared.lock);
    (void)pthread_join(thread, NULL);
    EXPECT_EQ(shared.taken, 100);
    tp_cond_fini(&shared.cond);
    tp_lock_fini(&shared.lock);
}

TEST(cond_wait_ends_when_its_time_is_over) {
    turn shared = {.owner = 0};
    MUST_OK(tp_lock_init(&shared.lock, TP_RANK_CORE, &test_error));
    MUST_OK(tp_cond_init(&shared.cond, &test_error));
    tp_lock_take(&shared.lock);
    const uint64_t begin = tp_now_ns();
    bool woken = true;
    while (woken && tp_now_ns() - begin < 10000000000u) {
        woken = tp_cond_wait(&shared.cond, &shared.lock, 2000000);
    }
    EXPECT(!woken);
    EXPECT(tp_now_ns() - begin >= 2000000);
    EXPECT(tp_lock_held(&shared.lock));
    tp_lock_drop(&shared.lock);
    tp_cond_fini(&shared.cond);
    tp_lock_fini(&shared.lock);
}
