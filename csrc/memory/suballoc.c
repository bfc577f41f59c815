#include "memory/suballoc.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

enum { STEP_BITS = 3 }; /* TP_SUBALLOC_STEPS == 1 << STEP_BITS */

typedef struct bin_idx {
    uint32_t level, step;
} bin_idx;

/* The bin whose ranges have at least the size class of `count`. Sizes below TP_SUBALLOC_STEPS have
 * bins of their own in level 0. */
static bin_idx bin_of(uint64_t count) {
    if (count < TP_SUBALLOC_STEPS) return (bin_idx){0, (uint32_t)count};
    const uint32_t log2 = 63u - (uint32_t)__builtin_clzll(count);
    const uint32_t level = log2 - STEP_BITS + 1;
    const uint32_t step = (uint32_t)(count >> (log2 - STEP_BITS)) & (TP_SUBALLOC_STEPS - 1);
    if (level >= TP_SUBALLOC_LEVELS)
        return (bin_idx){TP_SUBALLOC_LEVELS - 1, TP_SUBALLOC_STEPS - 1};
    return (bin_idx){level, step};
}

static void bin_insert(tp_suballoc *sub, tp_span *span) {
    const bin_idx bin = bin_of(span->count);
    span->free = true;
    tp_list_push_back(&sub->bins[bin.level][bin.step], &span->bin);
    sub->level_mask |= 1ull << bin.level;
    sub->step_mask[bin.level] |= (uint8_t)(1u << bin.step);
    sub->free_count += span->count;
}

static void bin_remove(tp_suballoc *sub, tp_span *span) {
    const bin_idx bin = bin_of(span->count);
    span->free = false;
    tp_list_remove(&span->bin);
    sub->free_count -= span->count;
    if (!tp_list_empty(&sub->bins[bin.level][bin.step])) return;
    sub->step_mask[bin.level] &= (uint8_t)~(1u << bin.step);
    if (sub->step_mask[bin.level] == 0) sub->level_mask &= ~(1ull << bin.level);
}

static tp_span *span_new(tp_suballoc *sub) {
    if (!tp_list_empty(&sub->spare)) {
        tp_span *span = TP_CONTAINER(sub->spare.next, tp_span, bin);
        tp_list_remove(&span->bin);
        return span;
    }
    tp_span *span = calloc(1, sizeof *span);
    if (span != NULL) tp_list_init(&span->bin);
    return span;
}

tp_status tp_suballoc_init(tp_suballoc *sub, uint64_t unit_count, tp_error *error) {
    memset(sub, 0, sizeof *sub);
    for (uint32_t i = 0; i < TP_SUBALLOC_LEVELS; i++) {
        for (uint32_t k = 0; k < TP_SUBALLOC_STEPS; k++) tp_list_init(&sub->bins[i][k]);
    }
    tp_list_init(&sub->spare);
    tp_span *span = span_new(sub);
    if (span == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a range");
    sub->unit_count = unit_count;
    sub->first = span;
    span->start = 0;
    span->count = unit_count;
    span->before = span->after = NULL;
    bin_insert(sub, span);
    return TP_OK;
}

void tp_suballoc_fini(tp_suballoc *sub) {
    for (tp_span *span = sub->first, *after; span != NULL; span = after) {
        after = span->after;
        free(span);
    }
    while (sub->spare.next != NULL && !tp_list_empty(&sub->spare)) {
        tp_span *span = TP_CONTAINER(sub->spare.next, tp_span, bin);
        tp_list_remove(&span->bin);
        free(span);
    }
    memset(sub, 0, sizeof *sub);
}

/* The first free range of a bin that can hold `count`. Ranges of the bin of `count` itself may be
 * shorter, so it is searched; every range of a higher bin is long enough. */
static tp_span *find_fit(tp_suballoc *sub, uint64_t count) {
    const bin_idx bin = bin_of(count);
    tp_link *head = &sub->bins[bin.level][bin.step];
    for (tp_link *link = head->next; link != head; link = link->next) {
        tp_span *span = TP_CONTAINER(link, tp_span, bin);
        if (span->count >= count) return span;
    }
    const uint32_t steps = sub->step_mask[bin.level] & (uint32_t)(~0u << (bin.step + 1));
    if (steps != 0) {
        tp_link *first = sub->bins[bin.level][__builtin_ctz(steps)].next;
        return TP_CONTAINER(first, tp_span, bin);
    }
    const uint64_t levels = sub->level_mask & (~0ull << (bin.level + 1));
    if (levels == 0) return NULL;
    const uint32_t level = (uint32_t)__builtin_ctzll(levels);
    tp_link *first = sub->bins[level][__builtin_ctz(sub->step_mask[level])].next;
    return TP_CONTAINER(first, tp_span, bin);
}

tp_span *tp_suballoc_take(tp_suballoc *sub, uint64_t count) {
    TP_REQUIRE(count > 0);
    tp_span *span = find_fit(sub, count);
    if (span == NULL) return NULL;
    if (span->count == count) {
        bin_remove(sub, span);
        return span;
    }
    tp_span *rest = span_new(sub);
    if (rest == NULL) return NULL;
    bin_remove(sub, span);
    rest->start = span->start + count;
    rest->count = span->count - count;
    rest->before = span;
    rest->after = span->after;
    if (rest->after != NULL) rest->after->before = rest;
    span->after = rest;
    span->count = count;
    bin_insert(sub, rest);
    return span;
}

/* Merges `gone`, which follows `span`, into it. Neither is in a bin. */
static void absorb(tp_suballoc *sub, tp_span *span, tp_span *gone) {
    span->count += gone->count;
    span->after = gone->after;
    if (span->after != NULL) span->after->before = span;
    tp_list_push_back(&sub->spare, &gone->bin);
}

void tp_suballoc_put(tp_suballoc *sub, tp_span *span) {
    TP_REQUIRE(!span->free);
    if (span->after != NULL && span->after->free) {
        bin_remove(sub, span->after);
        absorb(sub, span, span->after);
    }
    if (span->before != NULL && span->before->free) {
        tp_span *before = span->before;
        bin_remove(sub, before);
        absorb(sub, before, span);
        span = before;
    }
    bin_insert(sub, span);
}

bool tp_suballoc_idle(const tp_suballoc *sub) { return sub->free_count == sub->unit_count; }

tp_status tp_suballoc_check(const tp_suballoc *sub, tp_error *error) {
    uint64_t at = 0, free_count = 0;
    const tp_span *before = NULL;
    for (const tp_span *span = sub->first; span != NULL; span = span->after) {
        const bool ok = span->start == at && span->count > 0 && span->before == before &&
                        !(span->free && before != NULL && before->free) &&
                        span->free == tp_link_in_list(&span->bin);
        if (!ok) {
            return tp_error_set(error, TP_FAILED, "suballoc: range at %llu is inconsistent",
                                (unsigned long long)span->start);
        }
        at += span->count;
        free_count += span->free ? span->count : 0;
        before = span;
    }
    if (at != sub->unit_count || free_count != sub->free_count) {
        return tp_error_set(error, TP_FAILED, "suballoc: ranges do not add up");
    }
    return TP_OK;
}
