#include "device/marker.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"

enum { TRIM_COUNT = 16 };

/* One recorded point of a lane. A context-wide marker on a device that cannot record one is a set
 * of ordinary markers (`parts`) instead of an event. */
typedef struct tp_point {
    uint64_t seq;
    tp_event event;
    tp_marker *parts;
    uint32_t part_count;
} tp_point;

struct tp_lane {
    tp_stream stream;
    uint64_t recorded_seq, done_seq;
    uint64_t late_seq, late_look; /* not complete in that look, nor is any later one */
    tp_point *ring; /* points recorded and not yet seen complete; capacity a power of two */
    uint32_t head, count, capacity;
};

static bool lane_init(tp_lane *lane, tp_stream stream) {
    memset(lane, 0, sizeof *lane);
    lane->stream = stream;
    lane->capacity = 16;
    lane->ring = calloc(lane->capacity, sizeof *lane->ring);
    return lane->ring != NULL;
}

tp_status tp_markers_init(tp_markers *markers, tp_device *dev, tp_error *error) {
    memset(markers, 0, sizeof *markers);
    markers->dev = dev;
    markers->lane_capacity = 8;
    markers->lanes = calloc(markers->lane_capacity, sizeof *markers->lanes);
    if (markers->lanes == NULL || !lane_init(&markers->lanes[TP_LANE_CONTEXT], NULL)) {
        free(markers->lanes);
        memset(markers, 0, sizeof *markers);
        return tp_error_set(error, TP_NO_HOST_MEMORY, "no host memory for stream markers");
    }
    markers->lane_count = 1;
    return TP_OK;
}

void tp_markers_fini(tp_markers *markers) {
    for (uint32_t i = 0; i < markers->lane_count; i++) {
        tp_lane *lane = &markers->lanes[i];
        for (uint32_t k = 0; k < lane->count; k++) {
            tp_point *point = &lane->ring[(lane->head + k) & (lane->capacity - 1)];
            if (point->event != NULL)
                markers->dev->ops->event_destroy(markers->dev, point->event);
            free(point->parts);
        }
        free(lane->ring);
    }
    for (uint32_t i = 0; i < markers->pool_count; i++) {
        markers->dev->ops->event_destroy(markers->dev, markers->pool[i]);
    }
    free(markers->lanes);
    free(markers->pool);
    memset(markers, 0, sizeof *markers);
}

tp_status tp_markers_lane(tp_markers *markers, tp_stream stream, uint32_t *out,
                          tp_error *error) {
    for (uint32_t i = 1; i < markers->lane_count; i++) {
        if (markers->lanes[i].stream == stream) {
            *out = i;
            return TP_OK;
        }
    }
    if (markers->lane_count == markers->lane_capacity) {
        const uint32_t capacity = markers->lane_capacity * 2;
        tp_lane *lanes = realloc(markers->lanes, capacity * sizeof *lanes);
        if (lanes == NULL)
            return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a lane");
        markers->lanes = lanes;
        markers->lane_capacity = capacity;
    }
    if (!lane_init(&markers->lanes[markers->lane_count], stream)) {
        return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a lane");
    }
    *out = markers->lane_count++;
    return TP_OK;
}

tp_stream tp_markers_stream(const tp_markers *markers, uint32_t lane) {
    return markers->lanes[lane].stream;
}

static tp_status event_take(tp_markers *markers, tp_event *out, tp_error *error) {
    if (markers->pool_count > 0) {
        *out = markers->pool[--markers->pool_count];
        return TP_OK;
    }
    return markers->dev->ops->event_create(markers->dev, out, error);
}

static void event_put(tp_markers *markers, tp_event event) {
    if (event == NULL) return;
    if (markers->pool_count == markers->pool_capacity) {
        const uint32_t capacity = markers->pool_capacity == 0 ? 64 : markers->pool_capacity * 2;
        tp_event *pool = realloc(markers->pool, capacity * sizeof(tp_event));
        if (pool == NULL) {
            markers->dev->ops->event_destroy(markers->dev, event);
            return;
        }
        markers->pool = pool;
        markers->pool_capacity = capacity;
    }
    markers->pool[markers->pool_count++] = event;
}

static bool point_done(tp_markers *markers, const tp_point *point) {
    if (point->event == NULL) {
        for (uint32_t i = 0; i < point->part_count; i++) {
            if (!tp_marker_done(markers, point->parts[i])) return false;
        }
        return true;
    }
    bool done = false;
    tp_error error = {0};
    const tp_status status =
        markers->dev->ops->event_query(markers->dev, point->event, &done, &error);
    if (status != TP_OK) {
        if (markers->broken == TP_OK) markers->broken = status;
        return false;
    }
    return done;
}

static void lane_pop(tp_markers *markers, tp_lane *lane) {
    tp_point *point = &lane->ring[lane->head];
    lane->done_seq = point->seq;
    event_put(markers, point->event);
    free(point->parts);
    memset(point, 0, sizeof *point);
    lane->head = (lane->head + 1) & (lane->capacity - 1);
    lane->count--;
}

/* The point of that seq, which is not complete yet: the seqs of a ring are consecutive. */
static const tp_point *lane_find(const tp_lane *lane, uint64_t seq) {
    TP_ASSERT(seq > lane->done_seq && seq <= lane->recorded_seq);
    const uint32_t idx = (uint32_t)(seq - lane->done_seq - 1);
    return &lane->ring[(lane->head + idx) & (lane->capacity - 1)];
}

/* The points of a lane complete in order: one look at the last one asked for answers for all
 * before it. */
static bool lane_reap(tp_markers *markers, uint32_t idx, uint64_t seq) {
    tp_lane *lane = &markers->lanes[idx];
    if (lane->done_seq >= seq) return true;
    const bool late = lane->late_look == markers->look_count && lane->late_seq <= seq;
    if (markers->looking && late) return false;
    if (!point_done(markers, lane_find(lane, seq))) {
        lane->late_seq = seq;
        lane->late_look = markers->look_count;
        return false;
    }
    while (lane->done_seq < seq) lane_pop(markers, lane);
    return true;
}

/* Now and then a look at the middle keeps the ring short. */
static void lane_trim(tp_markers *markers, uint32_t idx) {
    const tp_lane *lane = &markers->lanes[idx];
    if (lane->count >= TRIM_COUNT && lane->recorded_seq % TRIM_COUNT == 0) {
        (void)lane_reap(markers, idx, lane->done_seq + lane->count / 2);
    }
}

bool tp_marker_done(tp_markers *markers, tp_marker marker) {
    return lane_reap(markers, marker.lane, marker.seq);
}

void tp_markers_look(tp_markers *markers) {
    markers->look_count++;
    markers->looking = true;
}

void tp_markers_look_away(tp_markers *markers) { markers->looking = false; }

static tp_status lane_reserve(tp_lane *lane, tp_error *error) {
    if (lane->count < lane->capacity) return TP_OK;
    const uint32_t capacity = lane->capacity * 2;
    tp_point *ring = calloc(capacity, sizeof *ring);
    if (ring == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for markers");
    for (uint32_t i = 0; i < lane->count; i++) {
        ring[i] = lane->ring[(lane->head + i) & (lane->capacity - 1)];
    }
    free(lane->ring);
    lane->ring = ring;
    lane->head = 0;
    lane->capacity = capacity;
    return TP_OK;
}

/* Room in the lane is reserved. */
static tp_marker lane_push(tp_lane *lane, uint32_t idx, tp_event event, tp_marker *parts,
                           uint32_t part_count) {
    TP_ASSERT(lane->count < lane->capacity);
    tp_point *point = &lane->ring[(lane->head + lane->count++) & (lane->capacity - 1)];
    *point = (tp_point){++lane->recorded_seq, event, parts, part_count};
    return (tp_marker){idx, lane->recorded_seq};
}

tp_status tp_marker_record(tp_markers *markers, tp_stream stream, tp_marker *out,
                           tp_error *error) {
    uint32_t idx = 0;
    tp_status status = tp_markers_lane(markers, stream, &idx, error);
    if (status != TP_OK) return status;
    lane_trim(markers, idx);
    status = lane_reserve(&markers->lanes[idx], error);
    if (status != TP_OK) return status;
    tp_event event = NULL;
    status = event_take(markers, &event, error);
    if (status != TP_OK) return status;
    status = markers->dev->ops->event_record(markers->dev, event, stream, error);
    if (status != TP_OK) {
        event_put(markers, event);
        return status;
    }
    *out = lane_push(&markers->lanes[idx], idx, event, NULL, 0);
    return TP_OK;
}

/* The fallback: a marker on every stream seen. */
static tp_status record_everywhere(tp_markers *markers, tp_marker *out, tp_error *error) {
    const uint32_t count = markers->lane_count - 1;
    tp_marker *parts = calloc(count == 0 ? 1 : count, sizeof *parts);
    if (parts == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for markers");
    for (uint32_t i = 0; i < count; i++) {
        const tp_status status =
            tp_marker_record(markers, markers->lanes[i + 1].stream, &parts[i], error);
        if (status != TP_OK) {
            free(parts);
            return status;
        }
    }
    *out = lane_push(&markers->lanes[TP_LANE_CONTEXT], TP_LANE_CONTEXT, NULL, parts, count);
    return TP_OK;
}

tp_status tp_marker_record_context(tp_markers *markers, tp_marker *out, tp_error *error) {
    if (markers->capturing) return tp_error_set(error, TP_BUSY, "a stream is being captured");
    tp_lane *lane = &markers->lanes[TP_LANE_CONTEXT];
    lane_trim(markers, TP_LANE_CONTEXT);
    tp_status status = lane_reserve(lane, error);
    if (status != TP_OK) return status;
    if (!markers->dev->caps.context_marker) return record_everywhere(markers, out, error);
    tp_event event = NULL;
    status = event_take(markers, &event, error);
    if (status != TP_OK) return status;
    status = markers->dev->ops->event_record_context(markers->dev, event, error);
    if (status != TP_OK) {
        event_put(markers, event);
        return status;
    }
    *out = lane_push(lane, TP_LANE_CONTEXT, event, NULL, 0);
    return TP_OK;
}

tp_status tp_marker_stream_wait(tp_markers *markers, tp_stream stream, tp_marker marker,
                                tp_error *error) {
    const tp_lane *lane = &markers->lanes[marker.lane];
    if (marker.seq <= lane->done_seq) return TP_OK;
    if (marker.lane != TP_LANE_CONTEXT && lane->stream == stream) return TP_OK;
    const tp_point *point = lane_find(lane, marker.seq);
    if (point->event != NULL) {
        return markers->dev->ops->stream_wait(markers->dev, stream, point->event, error);
    }
    for (uint32_t i = 0; i < point->part_count; i++) {
        const tp_status status = tp_marker_stream_wait(markers, stream, point->parts[i], error);
        if (status != TP_OK) return status;
    }
    return TP_OK;
}

tp_status tp_uses_add(tp_markers *markers, tp_uses *uses, tp_marker marker, bool refresh,
                      tp_error *error) {
    for (uint32_t i = 0; i < uses->count; i++) {
        tp_use *use = &uses->at[i];
        if (use->marker.lane != marker.lane) continue;
        if (marker.seq > use->marker.seq) use->marker.seq = marker.seq;
        use->refresh = use->refresh || refresh;
        return TP_OK;
    }
    if (uses->count == TP_USES_MAX) {
        tp_marker context = {0};
        const tp_status status = tp_marker_record_context(markers, &context, error);
        if (status != TP_OK) return status;
        uses->at[0] = (tp_use){context, true};
        uses->count = 1;
        return tp_uses_add(markers, uses, marker, refresh, error);
    }
    uses->at[uses->count++] = (tp_use){marker, refresh};
    return TP_OK;
}

bool tp_uses_note(tp_uses *uses, uint32_t lane) {
    uint32_t i = 0;
    while (i < uses->count && uses->at[i].marker.lane != lane) i++;
    if (i == TP_USES_MAX) return false;
    if (i == uses->count) uses->count++;
    uses->at[i] = (tp_use){{lane, 0}, true};
    return true;
}

bool tp_uses_done(tp_markers *markers, tp_uses *uses) {
    for (uint32_t i = 0; i < uses->count; i++) {
        if (!tp_marker_done(markers, uses->at[i].marker)) return false;
    }
    return true;
}

bool tp_uses_only_on(tp_markers *markers, tp_uses *uses, tp_stream stream) {
    for (uint32_t i = 0; i < uses->count; i++) {
        const tp_marker marker = uses->at[i].marker;
        const bool same =
            marker.lane != TP_LANE_CONTEXT && markers->lanes[marker.lane].stream == stream;
        if (!same && !tp_marker_done(markers, marker)) return false;
    }
    return true;
}

tp_status tp_uses_stream_wait(tp_markers *markers, tp_stream stream, tp_uses *uses,
                              tp_error *error) {
    for (uint32_t i = 0; i < uses->count; i++) {
        const tp_status status =
            tp_marker_stream_wait(markers, stream, uses->at[i].marker, error);
        if (status != TP_OK) return status;
    }
    return TP_OK;
}

tp_status tp_uses_refresh(tp_markers *markers, tp_uses *uses, tp_error *error) {
    for (uint32_t i = 0; i < uses->count; i++) {
        tp_use *use = &uses->at[i];
        if (!use->refresh) continue;
        const tp_status status =
            use->marker.lane == TP_LANE_CONTEXT
                ? tp_marker_record_context(markers, &use->marker, error)
                : tp_marker_record(markers, markers->lanes[use->marker.lane].stream,
                                   &use->marker, error);
        if (status != TP_OK) return status;
    }
    return TP_OK;
}

bool tp_uses_marked(const tp_uses *uses) {
    for (uint32_t i = 0; i < uses->count; i++) {
        if (uses->at[i].refresh && uses->at[i].marker.seq == 0) return false;
    }
    return true;
}

void tp_uses_lose(tp_uses *uses) {
    *uses = (tp_uses){.at = {{{TP_LANE_CONTEXT, 0}, true}}, .count = 1};
}
