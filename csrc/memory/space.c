#include "memory/space.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "base/check.h"
#include "base/glance.h"

tp_status tp_space_init(tp_space *space, tp_device *dev, size_t segment_bytes,
                        size_t extent_max_bytes, tp_error *error) {
    memset(space, 0, sizeof *space);
    space->dev = dev;
    space->granularity_bytes = dev->caps.granularity_bytes;
    space->extent_max_bytes = tp_round_up(extent_max_bytes, space->granularity_bytes);
    space->segment_bytes = tp_round_up(segment_bytes, space->granularity_bytes);
    tp_list_init(&space->spare);
    if (space->extent_max_bytes == 0 || space->segment_bytes == 0) {
        return tp_error_set(error, TP_INVALID, "extent and segment sizes must not be 0");
    }
    return TP_OK;
}

static void segment_fini(tp_space *space, tp_segment *segment) {
    for (tp_span *span = segment->sub.first; span != NULL; span = span->after) {
        if (span->free) continue;
        tp_block *block = segment->table[span->start];
        free(block->extents);
        free(block);
    }
    tp_suballoc_fini(&segment->sub);
    free(segment->table);
    space->dev->ops->release(space->dev, segment->base, segment->bytes);
}

void tp_space_fini(tp_space *space) {
    const unsigned count = atomic_load(&space->segment_count);
    for (unsigned i = 0; i < count; i++) segment_fini(space, &space->segments[i]);
    while (!tp_list_empty(&space->spare)) {
        tp_block *block = TP_CONTAINER(space->spare.next, tp_block, lru);
        tp_list_remove(&block->lru);
        free(block->extents);
        free(block);
    }
    memset(space, 0, sizeof *space);
}

static tp_status segment_add(tp_space *space, size_t at_least_bytes, tp_error *error) {
    const unsigned count = atomic_load(&space->segment_count);
    if (count == TP_SEGMENTS_MAX) {
        return tp_error_set(error, TP_OUT_OF_MEMORY, "all %d address segments are in use",
                            TP_SEGMENTS_MAX);
    }
    tp_segment *segment = &space->segments[count];
    const size_t bytes = tp_max_size(space->segment_bytes, at_least_bytes);
    const uint64_t granules = bytes / space->granularity_bytes;
    segment->table = calloc(granules, sizeof(tp_block *));
    if (segment->table == NULL) {
        return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for the table of a segment");
    }
    tp_status status = tp_suballoc_init(&segment->sub, granules, error);
    if (status != TP_OK) goto no_sub;
    status = space->dev->ops->reserve(space->dev, bytes, &segment->base, error);
    if (status != TP_OK) goto no_range;
    segment->bytes = bytes;
    tp_glance_widen(segment->base, segment->base + bytes);
    atomic_store_explicit(&space->segment_count, count + 1, memory_order_release);
    return TP_OK;
no_range:
    tp_suballoc_fini(&segment->sub);
no_sub:
    free(segment->table);
    memset(segment, 0, sizeof *segment);
    return status;
}

static tp_block *block_new(tp_space *space, uint32_t extent_count) {
    tp_block *block = NULL;
    if (!tp_list_empty(&space->spare)) {
        block = TP_CONTAINER(space->spare.prev, tp_block, lru);
        tp_list_remove(&block->lru);
    } else {
        block = calloc(1, sizeof *block);
        if (block == NULL) return NULL;
        tp_list_init(&block->lru);
        tp_list_init(&block->size);
        tp_list_init(&block->ahead_link);
    }
    if (block->extent_capacity < extent_count) {
        tp_extent *extents = realloc(block->extents, extent_count * sizeof *extents);
        if (extents == NULL) {
            tp_list_push_back(&space->spare, &block->lru);
            return NULL;
        }
        block->extents = extents;
        block->extent_capacity = extent_count;
    }
    block->extent_count = extent_count;
    return block;
}

static void block_cut(tp_space *space, tp_block *block) {
    for (uint32_t i = 0; i < block->extent_count; i++) {
        const size_t offset = (size_t)i * space->extent_max_bytes;
        tp_extent *extent = &block->extents[i];
        memset(extent, 0, sizeof *extent);
        extent->block = block;
        extent->addr = block->addr + offset;
        extent->bytes = tp_min_size(space->extent_max_bytes, block->bytes - offset);
        tp_list_init(&extent->inflight);
    }
}

/* A span of `granules` in any segment, the newest segment last. */
static tp_span *span_take(tp_space *space, uint64_t granules, tp_segment **segment) {
    const unsigned count = atomic_load(&space->segment_count);
    for (unsigned i = 0; i < count; i++) {
        tp_span *span = tp_suballoc_take(&space->segments[i].sub, granules);
        if (span == NULL) continue;
        *segment = &space->segments[i];
        return span;
    }
    return NULL;
}

tp_status tp_space_take(tp_space *space, size_t bytes, tp_block **out, tp_error *error) {
    const size_t rounded = tp_round_up(bytes, space->granularity_bytes);
    const size_t extent_count =
        rounded / space->extent_max_bytes + (rounded % space->extent_max_bytes != 0 ? 1 : 0);
    if (bytes == 0 || rounded < bytes || extent_count > UINT32_MAX / 2) {
        return tp_error_set(error, TP_INVALID, "a block of %zu bytes cannot be", bytes);
    }
    const uint64_t granules = rounded / space->granularity_bytes;
    tp_segment *segment = NULL;
    tp_span *span = span_take(space, granules, &segment);
    if (span == NULL) {
        const tp_status status = segment_add(space, rounded, error);
        if (status != TP_OK) return status;
        span = span_take(space, granules, &segment);
    }
    if (span == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a range");
    tp_block *block = block_new(space, (uint32_t)extent_count);
    if (block == NULL) {
        tp_suballoc_put(&segment->sub, span);
        return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a block");
    }
    block->addr = segment->base + span->start * space->granularity_bytes;
    block->bytes = rounded;
    block->segment = segment;
    block->span = span;
    block->life = TP_BLOCK_BORN;
    block_cut(space, block);
    for (uint64_t i = 0; i < granules; i++) segment->table[span->start + i] = block;
    *out = block;
    return TP_OK;
}

void tp_space_put(tp_space *space, tp_block *block) {
    tp_segment *segment = block->segment;
    TP_REQUIRE(!tp_link_in_list(&block->lru) && !tp_link_in_list(&block->size));
    for (uint64_t i = 0; i < block->span->count; i++) {
        segment->table[block->span->start + i] = NULL;
    }
    tp_suballoc_put(&segment->sub, block->span);
    block->span = NULL;
    block->segment = NULL;
    block->life = TP_BLOCK_NONE;
    block->addr = 0;
    tp_list_push_back(&space->spare, &block->lru);
}

static const tp_segment *segment_of(const tp_space *space, tp_addr addr) {
    const unsigned count = atomic_load_explicit(&space->segment_count, memory_order_acquire);
    for (unsigned i = 0; i < count; i++) {
        const tp_segment *segment = &space->segments[i];
        if (addr - segment->base < segment->bytes) return segment;
    }
    return NULL;
}

tp_block *tp_space_find(const tp_space *space, tp_addr addr) {
    const tp_segment *segment = segment_of(space, addr);
    if (segment == NULL) return NULL;
    return segment->table[(addr - segment->base) / space->granularity_bytes];
}

bool tp_space_owns(const tp_space *space, tp_addr addr) {
    return segment_of(space, addr) != NULL;
}

tp_status tp_space_check(const tp_space *space, tp_error *error) {
    const unsigned count = atomic_load(&space->segment_count);
    for (unsigned i = 0; i < count; i++) {
        const tp_segment *segment = &space->segments[i];
        const tp_status status = tp_suballoc_check(&segment->sub, error);
        if (status != TP_OK) return status;
        for (const tp_span *span = segment->sub.first; span != NULL; span = span->after) {
            const tp_block *block = segment->table[span->start];
            const tp_block *last = segment->table[span->start + span->count - 1];
            const bool ok = span->free ? block == NULL && last == NULL
                                       : block != NULL && block == last && block->span == span;
            if (!ok)
                return tp_error_set(error, TP_FAILED, "space: table differs from its spans");
        }
    }
    return TP_OK;
}
