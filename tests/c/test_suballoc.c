/* The suballocator against a bitmap that knows which units are taken. */
#include <string.h>

#include "harness.h"
#include "memory/suballoc.h"

enum { UNITS = 700, SPANS = 64 };

typedef struct model {
    tp_suballoc sub;
    bool taken[UNITS];
    tp_span *spans[SPANS];
} model;

static size_t taken_units(const model *m) {
    size_t count = 0;
    for (size_t i = 0; i < UNITS; i++) count += m->taken[i] ? 1 : 0;
    return count;
}

/* The longest run of units that are free in the bitmap. */
static size_t longest_free(const model *m) {
    size_t longest = 0, run = 0;
    for (size_t i = 0; i < UNITS; i++) {
        run = m->taken[i] ? 0 : run + 1;
        if (run > longest) longest = run;
    }
    return longest;
}

static void take(model *m, unsigned slot, uint64_t count) {
    const size_t longest = longest_free(m);
    tp_span *span = tp_suballoc_take(&m->sub, count);
    if (span == NULL) {
        EXPECT(count > longest); /* it finds every range that is long enough */
        return;
    }
    EXPECT_EQ(span->count, count);
    MUST(span->start + span->count <= UNITS);
    for (uint64_t i = 0; i < count; i++) {
        EXPECT(!m->taken[span->start + i]);
        m->taken[span->start + i] = true;
    }
    m->spans[slot] = span;
}

static void put(model *m, unsigned slot) {
    const tp_span *span = m->spans[slot];
    for (uint64_t i = 0; i < span->count; i++) {
        EXPECT(m->taken[span->start + i]);
        m->taken[span->start + i] = false;
    }
    tp_suballoc_put(&m->sub, m->spans[slot]);
    m->spans[slot] = NULL;
}

TEST(random_takes_and_puts_agree_with_a_bitmap) {
    static model m;
    uint64_t state = test_seed();
    memset(&m, 0, sizeof m);
    MUST_OK(tp_suballoc_init(&m.sub, UNITS, &test_error));
    for (unsigned i = 0; i < test_rounds(20000) && test_failures() == 0; i++) {
        const unsigned slot = (unsigned)test_random_below(&state, SPANS);
        const uint64_t most = test_random_below(&state, 4) == 0 ? 200 : 20;
        if (m.spans[slot] != NULL) {
            put(&m, slot);
        } else {
            take(&m, slot, 1 + test_random_below(&state, most));
        }
        EXPECT_OK(tp_suballoc_check(&m.sub, &test_error));
        EXPECT_EQ(m.sub.free_count, UNITS - taken_units(&m));
    }
    for (unsigned i = 0; i < SPANS; i++) {
        if (m.spans[i] != NULL) put(&m, i);
    }
    EXPECT(tp_suballoc_idle(&m.sub));
    EXPECT(m.sub.first->free && m.sub.first->count == UNITS); /* merged into one */
    tp_suballoc_fini(&m.sub);
}

TEST(everything_fits_and_nothing_more) {
    tp_suballoc sub;
    const uint64_t sizes[] = {1, 7, 8, 9, 1000, (uint64_t)1 << 40};
    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        MUST_OK(tp_suballoc_init(&sub, sizes[i], &test_error));
        EXPECT(tp_suballoc_take(&sub, sizes[i] + 1) == NULL);
        tp_span *span = tp_suballoc_take(&sub, sizes[i]);
        MUST(span != NULL);
        EXPECT(!tp_suballoc_idle(&sub));
        EXPECT(tp_suballoc_take(&sub, 1) == NULL);
        tp_suballoc_put(&sub, span);
        EXPECT(tp_suballoc_idle(&sub));
        EXPECT_OK(tp_suballoc_check(&sub, &test_error));
        tp_suballoc_fini(&sub);
    }
}

TEST(check_notices_a_range_that_was_tampered_with) {
    tp_suballoc sub;
    MUST_OK(tp_suballoc_init(&sub, 100, &test_error));
    tp_span *span = tp_suballoc_take(&sub, 10);
    MUST(span != NULL);
    span->count = 11;
    EXPECT_STATUS(tp_suballoc_check(&sub, &test_error), TP_FAILED);
    span->count = 10;
    sub.free_count--;
    EXPECT_STATUS(tp_suballoc_check(&sub, &test_error), TP_FAILED);
    sub.free_count++;
    EXPECT_OK(tp_suballoc_check(&sub, &test_error));
    tp_suballoc_fini(&sub);
}
