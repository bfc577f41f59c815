#include "memory/frame.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

tp_status tp_frame_pool_init(tp_frame_pool *pool, tp_device *dev, tp_frame_kind kind,
                             size_t largest_bytes, tp_error *error) {
    memset(pool, 0, sizeof *pool);
    pool->dev = dev;
    pool->kind = kind;
    pool->granularity_bytes = dev->caps.granularity_bytes;
    pool->class_count = (uint32_t)(largest_bytes / pool->granularity_bytes);
    pool->free = calloc(pool->class_count, sizeof *pool->free);
    if (pool->free == NULL)
        return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for pools");
    for (uint32_t i = 0; i < pool->class_count; i++) tp_list_init(&pool->free[i]);
    return TP_OK;
}

void tp_frame_pool_fini(tp_frame_pool *pool) {
    for (uint32_t i = 0; i < pool->class_count; i++) {
        while (!tp_list_empty(&pool->free[i])) {
            tp_frame *frame = TP_CONTAINER(pool->free[i].next, tp_frame, link);
            tp_list_remove(&frame->link);
            if (!tp_frame_destroy(pool->dev, frame)) free(frame); /* its memory is lost */
        }
    }
    free(pool->free);
    memset(pool, 0, sizeof *pool);
}

static tp_link *class_of(tp_frame_pool *pool, size_t bytes) {
    const size_t granules = bytes / pool->granularity_bytes;
    TP_REQUIRE(granules >= 1 && granules <= pool->class_count);
    return &pool->free[granules - 1];
}

tp_frame *tp_frame_pool_take(tp_frame_pool *pool, size_t bytes) {
    tp_link *head = class_of(pool, bytes);
    for (tp_link *link = head->prev; link != head; link = link->prev) {
        tp_frame *frame = TP_CONTAINER(link, tp_frame, link);
        if (frame->map_count > 0) continue;
        tp_list_remove(link);
        pool->free_bytes -= bytes;
        return frame;
    }
    return NULL;
}

void tp_frame_pool_put(tp_frame_pool *pool, tp_frame *frame) {
    TP_REQUIRE(frame->kind == pool->kind && !tp_link_in_list(&frame->link));
    tp_list_push_back(class_of(pool, frame->bytes), &frame->link);
    pool->free_bytes += frame->bytes;
}

/* Moves free frames of one size to `out` until `bytes` are there. */
static size_t strip_class(tp_frame_pool *pool, uint32_t idx, size_t bytes, tp_link *out) {
    size_t got = 0;
    tp_link *head = &pool->free[idx];
    for (tp_link *link = head->next, *next; link != head && got < bytes; link = next) {
        next = link->next;
        tp_frame *frame = TP_CONTAINER(link, tp_frame, link);
        if (frame->map_count > 0) continue;
        tp_list_remove(link);
        pool->free_bytes -= frame->bytes;
        got += frame->bytes;
        tp_list_push_back(out, link);
    }
    return got;
}

size_t tp_frame_pool_strip(tp_frame_pool *pool, size_t bytes, tp_link *out) {
    if (bytes == 0) return 0;
    const size_t granules =
        bytes / pool->granularity_bytes + (bytes % pool->granularity_bytes != 0);
    for (size_t i = granules; i <= pool->class_count; i++) {
        const size_t got = strip_class(pool, (uint32_t)i - 1, 1, out);
        if (got > 0) return got;
    }
    size_t got = 0;
    for (uint32_t i = pool->class_count; i > 0 && got < bytes && pool->free_bytes > 0; i--) {
        got += strip_class(pool, i - 1, bytes - got, out);
    }
    return got;
}

tp_status tp_frame_create(tp_device *dev, tp_frame_kind kind, size_t bytes, tp_frame **out,
                          tp_error *error) {
    tp_frame *frame = calloc(1, sizeof *frame);
    if (frame == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a frame");
    tp_list_init(&frame->link);
    frame->kind = kind;
    frame->bytes = bytes;
    tp_status status = dev->ops->frame_create(dev, kind, bytes, &frame->handle, error);
    if (status != TP_OK) goto no_handle;
    status = dev->ops->reserve(dev, bytes, &frame->window, error);
    if (status != TP_OK) goto no_window;
    status = dev->ops->map(dev, frame->window, bytes, frame->handle, error);
    if (status != TP_OK) goto no_map;
    *out = frame;
    return TP_OK;
no_map:
    dev->ops->release(dev, frame->window, bytes);
no_window:
    dev->ops->frame_destroy(dev, kind, frame->handle, bytes);
no_handle:
    free(frame);
    return status;
}

bool tp_frame_destroy(tp_device *dev, tp_frame *frame) {
    TP_REQUIRE(frame->map_count == 0 && !tp_link_in_list(&frame->link));
    if (dev->ops->unmap(dev, frame->window, frame->bytes, NULL) != TP_OK) return false;
    dev->ops->release(dev, frame->window, frame->bytes);
    dev->ops->frame_destroy(dev, frame->kind, frame->handle, frame->bytes);
    free(frame);
    return true;
}
