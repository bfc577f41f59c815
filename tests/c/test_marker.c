/* Markers and uses, with and without context-wide markers of the device's own. */
#include "base/bytes.h"
#include "device/device_sim.h"
#include "device/marker.h"
#include "fault_device.h"
#include "harness.h"

enum { STREAMS = TP_USES_MAX + 2 };

typedef struct scene {
    tp_device *sim, *dev;
    tp_stream streams[STREAMS];
    tp_markers markers;
} scene;

static void open_scene(scene *s, bool no_context) {
    *s = (scene){0};
    MUST_OK(tp_sim_device_create(&(tp_sim_options){.device_bytes = TP_MIB,
                                                   .granularity_bytes = 4096,
                                                   .manual = true,
                                                   .no_context_marker = no_context},
                                 &s->sim, &test_error));
    MUST_OK(fault_device_create(s->sim, &s->dev, &test_error));
    for (int i = 0; i < STREAMS; i++) {
        MUST_OK(tp_sim_stream_create(s->sim, &s->streams[i], &test_error));
    }
    MUST_OK(tp_markers_init(&s->markers, s->dev, &test_error));
}

static void close_scene(scene *s) {
    tp_markers_fini(&s->markers);
    s->dev->ops->destroy(s->dev);
}

static void count_run(tp_device *dev, void *arg) {
    (void)dev;
    (*(unsigned *)arg)++;
}

/* One kernel on a stream; `ran` counts it once it has run. */
static void launch(scene *s, int stream, unsigned *ran) {
    MUST_OK(tp_sim_launch(s->sim, s->streams[stream], count_run, ran, 1, &test_error));
}

static void drain(scene *s) {
    while (tp_sim_step(s->sim)) continue;
}

static tp_marker record(scene *s, int stream) {
    tp_marker marker = {0};
    MUST_OK(tp_marker_record(&s->markers, s->streams[stream], &marker, &test_error));
    return marker;
}

static tp_marker record_context(scene *s) {
    tp_marker marker = {0};
    MUST_OK(tp_marker_record_context(&s->markers, &marker, &test_error));
    return marker;
}

TEST(marker_is_done_when_the_work_before_it_is) {
    scene s;
    open_scene(&s, false);
    unsigned ran = 0;
    launch(&s, 0, &ran);
    const tp_marker first = record(&s, 0);
    const tp_marker other = record(&s, 1); /* nothing before it */
    launch(&s, 0, &ran);
    const tp_marker second = record(&s, 0);
    EXPECT_EQ(first.lane, second.lane);
    EXPECT(first.lane != other.lane && first.seq < second.seq);
    EXPECT(!tp_marker_done(&s.markers, first));
    while (ran == 0) MUST(tp_sim_step(s.sim));
    EXPECT(!tp_marker_done(&s.markers, second));
    drain(&s);
    EXPECT(tp_marker_done(&s.markers, second) && tp_marker_done(&s.markers, other));
    EXPECT(tp_marker_done(&s.markers, first));
    EXPECT(tp_marker_done(&s.markers, (tp_marker){first.lane, 0})); /* 0: complete */
    close_scene(&s);
}

static void expect_context_covers_all(bool no_context) {
    scene s;
    open_scene(&s, no_context);
    unsigned ran = 0;
    uint32_t lane = 0;
    for (int i = 0; i < 3; i++) { /* seen, though nothing was recorded on them yet */
        MUST_OK(tp_markers_lane(&s.markers, s.streams[i], &lane, &test_error));
        launch(&s, i, &ran);
    }
    const tp_marker all = record_context(&s);
    EXPECT_EQ(all.lane, TP_LANE_CONTEXT);
    unsigned later = 0;
    launch(&s, 0, &later);
    for (int i = 0; i < 200 && ran < 3; i++) {
        EXPECT(!tp_marker_done(&s.markers, all));
        MUST(tp_sim_step(s.sim));
    }
    drain(&s);
    EXPECT(tp_marker_done(&s.markers, all));
    EXPECT_EQ(fault_device_calls(s.dev, FAULT_EVENT_RECORD_CONTEXT), no_context ? 0 : 1);
    close_scene(&s);
}

TEST(context_marker_covers_every_stream) { expect_context_covers_all(false); }
TEST(context_marker_without_the_capability_covers_every_stream_seen) {
    expect_context_covers_all(true);
}

TEST(no_context_marker_is_recorded_while_a_stream_is_captured) {
    scene s;
    for (int no_context = 0; no_context < 2; no_context++) {
        open_scene(&s, no_context != 0);
        (void)record(&s, 0);
        const uint64_t before = fault_device_calls(s.dev, FAULT_EVENT_RECORD);
        s.markers.capturing = true;
        tp_marker marker = {7, 7};
        EXPECT_STATUS(tp_marker_record_context(&s.markers, &marker, &test_error), TP_BUSY);
        EXPECT_EQ(marker.lane, 7);
        EXPECT_EQ(fault_device_calls(s.dev, FAULT_EVENT_RECORD), before);
        EXPECT_EQ(fault_device_calls(s.dev, FAULT_EVENT_RECORD_CONTEXT), 0);
        close_scene(&s);
    }
}

/* A stream that waits for a marker runs its work after what the marker covers. */
static void expect_stream_waits(bool no_context, bool context) {
    scene s;
    open_scene(&s, no_context);
    unsigned before = 0, after = 0;
    uint32_t lane = 0;
    MUST_OK(tp_markers_lane(&s.markers, s.streams[0], &lane, &test_error));
    for (int i = 0; i < 5; i++) launch(&s, 0, &before);
    const tp_marker marker = context ? record_context(&s) : record(&s, 0);
    EXPECT_OK(tp_marker_stream_wait(&s.markers, s.streams[1], marker, &test_error));
    launch(&s, 1, &after);
    while (after == 0) MUST(tp_sim_step(s.sim));
    EXPECT_EQ(before, 5);
    close_scene(&s);
}

TEST(stream_waits_for_markers) {
    expect_stream_waits(false, false);
    expect_stream_waits(false, true);
    expect_stream_waits(true, true);
}

/* Points are found again in a ring that has grown and wrapped. */
TEST(many_unfinished_markers_complete_in_order) {
    scene s;
    open_scene(&s, false);
    enum { COUNT = 100 };
    tp_marker markers[COUNT];
    unsigned ran = 0;
    for (int round = 0; round < 3; round++) {
        for (int i = 0; i < COUNT; i++) {
            launch(&s, 0, &ran);
            markers[i] = record(&s, 0);
        }
        EXPECT(!tp_marker_done(&s.markers, markers[0]));
        EXPECT_OK(
            tp_marker_stream_wait(&s.markers, s.streams[1], markers[COUNT / 2], &test_error));
        unsigned waited = 0;
        launch(&s, 1, &waited);
        ran = 0;
        while (waited == 0) MUST(tp_sim_step(s.sim));
        EXPECT(ran > COUNT / 2);
        EXPECT(tp_marker_done(&s.markers, markers[COUNT / 2]));
        drain(&s);
        EXPECT(tp_marker_done(&s.markers, markers[COUNT - 1]));
    }
    EXPECT(fault_device_calls(s.dev, FAULT_EVENT_CREATE) <= COUNT + 4); /* events are pooled */
    close_scene(&s);
}

static void expect_uses_overflow(bool no_context) {
    scene s;
    open_scene(&s, no_context);
    tp_uses uses = {0};
    unsigned ran = 0;
    for (int i = 0; i < TP_USES_MAX + 1; i++) {
        launch(&s, i, &ran);
        EXPECT_OK(tp_uses_add(&s.markers, &uses, record(&s, i), i == 0, &test_error));
        EXPECT(uses.count <= TP_USES_MAX);
    }
    EXPECT_EQ(uses.count, 2); /* a context-wide marker, and the last one */
    EXPECT_EQ(uses.at[0].marker.lane, TP_LANE_CONTEXT);
    EXPECT(uses.at[0].refresh); /* stream 0 may go on */
    while (ran < TP_USES_MAX + 1) {
        EXPECT(!tp_uses_done(&s.markers, &uses));
        MUST(tp_sim_step(s.sim));
    }
    drain(&s);
    EXPECT(tp_uses_done(&s.markers, &uses));
    /* Refreshed, it covers what stream 0 has queued since. */
    launch(&s, 0, &ran);
    EXPECT_OK(tp_uses_refresh(&s.markers, &uses, &test_error));
    EXPECT(!tp_uses_done(&s.markers, &uses));
    drain(&s);
    EXPECT(tp_uses_done(&s.markers, &uses));
    close_scene(&s);
}

TEST(uses_of_many_streams_become_one_of_everything) {
    expect_uses_overflow(false);
    expect_uses_overflow(true);
}

TEST(newer_marker_of_a_stream_replaces_the_older_one) {
    scene s;
    open_scene(&s, false);
    tp_uses uses = {0};
    unsigned ran = 0;
    const tp_marker old = record(&s, 0);
    launch(&s, 0, &ran);
    const tp_marker new = record(&s, 0);
    EXPECT_OK(tp_uses_add(&s.markers, &uses, new, false, &test_error));
    EXPECT_OK(tp_uses_add(&s.markers, &uses, old, true, &test_error));
    EXPECT_EQ(uses.count, 1);
    EXPECT_EQ(uses.at[0].marker.seq, new.seq);
    EXPECT(uses.at[0].refresh);
    EXPECT(tp_uses_only_on(&s.markers, &uses, s.streams[0]));
    EXPECT(!tp_uses_only_on(&s.markers, &uses, s.streams[1]));
    launch(&s, 1, &ran);
    EXPECT_OK(tp_uses_add(&s.markers, &uses, record(&s, 1), false, &test_error));
    EXPECT(!tp_uses_only_on(&s.markers, &uses, s.streams[0]));
    drain(&s);
    EXPECT(tp_uses_only_on(&s.markers, &uses, s.streams[0])); /* the other one is complete */
    close_scene(&s);
}

TEST(lost_use_is_covered_when_refreshed) {
    scene s;
    open_scene(&s, false);
    tp_uses uses = {0};
    unsigned ran = 0;
    tp_uses_lose(&uses);
    launch(&s, 3, &ran); /* a stream nobody has told of */
    EXPECT_OK(tp_uses_refresh(&s.markers, &uses, &test_error));
    EXPECT(!tp_uses_done(&s.markers, &uses));
    EXPECT(!tp_uses_only_on(&s.markers, &uses, s.streams[3]));
    drain(&s);
    EXPECT(tp_uses_done(&s.markers, &uses));
    close_scene(&s);
}

/* What may use the block without a marker yet is marked before a copy; what has one is left. */
TEST(noted_use_is_unmarked_until_it_is_recorded) {
    scene s;
    open_scene(&s, false);
    uint32_t lane = 0;
    MUST_OK(tp_markers_lane(&s.markers, s.streams[0], &lane, &test_error));
    tp_uses uses = {.at = {{{lane, 0}, true}}, .count = 1};
    EXPECT(!tp_uses_marked(&uses));
    EXPECT_OK(tp_uses_refresh(&s.markers, &uses, &test_error));
    EXPECT(tp_uses_marked(&uses));
    EXPECT(tp_uses_note(&uses, lane));
    EXPECT(!tp_uses_marked(&uses));
    EXPECT_EQ(uses.count, 1);
    for (uint32_t other = lane + 1; uses.count < TP_USES_MAX; other++) {
        EXPECT(tp_uses_note(&uses, other));
    }
    EXPECT(!tp_uses_note(&uses, lane + TP_USES_MAX));
    EXPECT(tp_uses_note(&uses, lane));
    close_scene(&s);
}

TEST(fault_in_a_query_is_remembered_and_nothing_completes) {
    scene s;
    open_scene(&s, false);
    const tp_marker marker = record(&s, 0);
    fault_device_arm(
        s.dev, &(fault_plan){.nth = 1, .calls = 1u << FAULT_EVENT_QUERY, .persistent = true});
    drain(&s);
    EXPECT(!tp_marker_done(&s.markers, marker));
    EXPECT(s.markers.broken != TP_OK);
    close_scene(&s);
}
