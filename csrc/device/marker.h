/* marker: "all work queued on this stream up to here", cheap to record, to ask and to wait for.
 *
 * A marker is a lane (one per stream seen) and a sequence number in it. Markers of one lane complete
 * in order, so a newer one covers every older one. Events are pooled. Lane 0 holds context-wide
 * markers: all work of the device so far, on every stream; where the device cannot record one, it is
 * a set of markers, one on each stream seen so far.
 *
 * Not responsible for deciding what waits for what. Expects the owner's lock; never waits. */
#ifndef TP_DEVICE_MARKER_H
#define TP_DEVICE_MARKER_H

#include "device/device.h"

typedef struct tp_marker {
    uint32_t lane;
    uint64_t seq; /* 0: complete */
} tp_marker;

enum { TP_LANE_CONTEXT = 0, TP_USES_MAX = 6 };

typedef struct tp_lane tp_lane;

typedef struct tp_markers {
    tp_device *dev;
    tp_lane *lanes;
    uint32_t lane_count, lane_capacity;
    tp_event *pool;
    uint32_t pool_count, pool_capacity;
    tp_status broken; /* the first driver failure of a query; nothing completes any more */
    bool
        capturing; /* a stream of the process is: a context-wide marker would break the capture */
    uint64_t look_count;
    bool looking;
} tp_markers;

/* The streams that use a block, and up to where. `refresh`: the stream may have used it since, so
 * freeing the block records anew. */
typedef struct tp_use {
    tp_marker marker;
    bool refresh;
} tp_use;

typedef struct tp_uses {
    tp_use at[TP_USES_MAX];
    uint32_t count;
} tp_uses;

TP_MUST_USE tp_status tp_markers_init(tp_markers *markers, tp_device *dev, tp_error *error);
void tp_markers_fini(tp_markers *markers);

/* The lane of a stream, made on first sight. TP_NO_HOST_MEMORY when it cannot be. */
TP_MUST_USE tp_status tp_markers_lane(tp_markers *markers, tp_stream stream, uint32_t *out,
                                      tp_error *error);
tp_stream tp_markers_stream(const tp_markers *markers, uint32_t lane);

TP_MUST_USE tp_status tp_marker_record(tp_markers *markers, tp_stream stream, tp_marker *out,
                                       tp_error *error);
/* TP_BUSY while a stream is being captured. */
TP_MUST_USE tp_status tp_marker_record_context(tp_markers *markers, tp_marker *out,
                                               tp_error *error);
/* Asks the device as little as possible. After a failed query: false for ever, see `broken`. */
bool tp_marker_done(tp_markers *markers, tp_marker marker);
/* From look to look_away, both without the lock being dropped between them: what has been found not to
 * be complete is not asked for again. For who goes through many that wait for the same. */
void tp_markers_look(tp_markers *markers);
void tp_markers_look_away(tp_markers *markers);
/* Work queued on `stream` from now on waits, on the device, for the marker. */
TP_MUST_USE tp_status tp_marker_stream_wait(tp_markers *markers, tp_stream stream,
                                            tp_marker marker, tp_error *error);

/* Adds a use; a newer marker of a lane replaces the older one. When there is no room, all are
 * replaced by one context-wide marker. */
TP_MUST_USE tp_status tp_uses_add(tp_markers *markers, tp_uses *uses, tp_marker marker,
                                  bool refresh, tp_error *error);
/* Notes that a lane has used it, with no marker that says how far: whoever needs to know takes a
 * context-wide one. False: no room. */
bool tp_uses_note(tp_uses *uses, uint32_t lane);
bool tp_uses_done(tp_markers *markers, tp_uses *uses);
/* True if every use that may be unfinished is on `stream`'s lane. */
bool tp_uses_only_on(tp_markers *markers, tp_uses *uses, tp_stream stream);
TP_MUST_USE tp_status tp_uses_stream_wait(tp_markers *markers, tp_stream stream, tp_uses *uses,
                                          tp_error *error);
/* Records anew on every lane that may have been used since (the block is being freed). */
TP_MUST_USE tp_status tp_uses_refresh(tp_markers *markers, tp_uses *uses, tp_error *error);
/* False: a lane has used it and no marker says how far. */
bool tp_uses_marked(const tp_uses *uses);
/* A use could not be marked: tp_uses_refresh will record a marker of everything. */
void tp_uses_lose(tp_uses *uses);

#endif
