/* The simulated device in the order of time, and without payload. Times are worked out by hand: the
 * link carries a byte in a nanosecond, or 0.75 each way while both directions are busy. */
#include <string.h>

#include "base/bytes.h"
#include "device/device_sim.h"
#include "harness.h"

enum { GRANULE = 64 * 1024 };

typedef struct scene {
    tp_device *dev;
    const tp_device_ops *ops;
    tp_stream stream;
    tp_handle device, host;
    tp_addr base; /* the device frame, then the host frame */
    size_t bytes;
} scene;

static tp_sim_options options_usual(void) {
    return (tp_sim_options){.device_bytes = 64 * TP_MIB,
                            .granularity_bytes = GRANULE,
                            .time_ordered = true,
                            .poison = true,
                            .link_bytes_per_s = 1000000000,
                            .duplex_bytes_per_s = 1500000000,
                            .fingerprint_bytes_per_s = 4000000000};
}

static scene scene_open(const tp_sim_options *options, size_t bytes) {
    scene s = {.bytes = bytes};
    MUST_OK(tp_sim_device_create(options, &s.dev, &test_error));
    s.ops = s.dev->ops;
    MUST_OK(tp_sim_stream_create(s.dev, &s.stream, &test_error));
    MUST_OK(s.ops->reserve(s.dev, 2 * bytes, &s.base, &test_error));
    MUST_OK(s.ops->frame_create(s.dev, TP_FRAME_DEVICE, bytes, &s.device, &test_error));
    MUST_OK(s.ops->frame_create(s.dev, TP_FRAME_HOST, bytes, &s.host, &test_error));
    MUST_OK(s.ops->map(s.dev, s.base, bytes, s.device, &test_error));
    MUST_OK(s.ops->map(s.dev, s.base + bytes, bytes, s.host, &test_error));
    return s;
}

static scene scene_usual(void) {
    const tp_sim_options options = options_usual();
    return scene_open(&options, 2 * GRANULE);
}

static void scene_close(scene *s) {
    while (tp_sim_step(s->dev)) continue;
    MUST_OK(s->ops->unmap(s->dev, s->base, s->bytes, &test_error));
    MUST_OK(s->ops->unmap(s->dev, s->base + s->bytes, s->bytes, &test_error));
    s->ops->frame_destroy(s->dev, TP_FRAME_DEVICE, s->device, s->bytes);
    s->ops->frame_destroy(s->dev, TP_FRAME_HOST, s->host, s->bytes);
    s->ops->release(s->dev, s->base, 2 * s->bytes);
    s->ops->destroy(s->dev);
}

static void copy(const scene *s, tp_copy_dir dir, size_t bytes) {
    const tp_addr device = s->base, host = s->base + s->bytes;
    const bool out = dir == TP_COPY_TO_HOST;
    MUST_OK(s->ops->copy(s->dev, dir, out ? host : device, out ? device : host, bytes,
                         &test_error));
}

static void nothing(tp_device *dev, void *arg) {
    (void)dev;
    (void)arg;
}

static void launch(const scene *s, tp_stream stream, uint64_t ns) {
    MUST_OK(tp_sim_launch(s->dev, stream, nothing, NULL, ns, &test_error));
}

static tp_event mark(const scene *s, tp_stream stream) {
    tp_event event = NULL;
    MUST_OK(s->ops->event_create_timed(s->dev, &event, &test_error));
    MUST_OK(s->ops->event_record(s->dev, event, stream, &test_error));
    return event;
}

static bool is_done(const scene *s, tp_event event) {
    bool done = false;
    MUST_OK(s->ops->event_query(s->dev, event, &done, &test_error));
    return done;
}

static void expect_next_end(const scene *s, uint64_t ns) {
    EXPECT(tp_sim_step(s->dev));
    EXPECT_EQ(tp_sim_clock_ns(s->dev), ns);
}

TEST(both_directions_share_the_link_while_both_are_busy) {
    scene s = scene_usual();
    copy(&s, TP_COPY_TO_HOST, 60000);
    copy(&s, TP_COPY_TO_DEVICE, 30000);
    expect_next_end(&s, 40000); /* in: 30000 at 0.75 */
    expect_next_end(&s, 70000); /* out: 30000 are left, alone */
    copy(&s, TP_COPY_TO_DEVICE, 5000);
    expect_next_end(&s, 75000);
    EXPECT(!tp_sim_step(s.dev));
    scene_close(&s);
}

TEST(sharing_begins_when_the_second_copy_does) {
    scene s = scene_usual();
    launch(&s, s.stream, 10000);
    const tp_event event = mark(&s, s.stream);
    const tp_stream in = s.dev->copy_stream[TP_COPY_TO_DEVICE];
    MUST_OK(s.ops->stream_wait(s.dev, in, event, &test_error));
    copy(&s, TP_COPY_TO_HOST, 30000);
    copy(&s, TP_COPY_TO_DEVICE, 15000);
    const tp_event came = mark(&s, in);
    expect_next_end(&s, 10000); /* the kernel; 20000 are left to go out */
    expect_next_end(&s, 30000); /* in: 15000 at 0.75; 5000 are left to go out */
    EXPECT(is_done(&s, came));
    uint64_t ns = 0;
    EXPECT_OK(s.ops->event_elapsed(s.dev, event, came, &ns, &test_error));
    EXPECT_EQ(ns, 20000);
    expect_next_end(&s, 35000);
    s.ops->event_destroy(s.dev, event);
    s.ops->event_destroy(s.dev, came);
    scene_close(&s);
}

TEST(copies_of_one_direction_and_fingerprints_follow_one_another) {
    scene s = scene_usual();
    const tp_stream out = s.dev->copy_stream[TP_COPY_TO_HOST];
    MUST_OK(s.ops->fingerprint(s.dev, out, s.base, GRANULE, 0, &test_error));
    copy(&s, TP_COPY_TO_HOST, 1000);
    copy(&s, TP_COPY_TO_HOST, 2000);
    expect_next_end(&s, GRANULE / 4);
    expect_next_end(&s, GRANULE / 4 + 1000);
    expect_next_end(&s, GRANULE / 4 + 3000);
    scene_close(&s);
}

TEST(copies_stand_still_while_a_kernel_uses_the_link) {
    scene s = scene_usual();
    copy(&s, TP_COPY_TO_HOST, 5000);
    launch(&s, s.stream, 2000);
    MUST_OK(tp_sim_launch_over_link(s.dev, s.stream, nothing, NULL, 10, 1000, 0, &test_error));
    MUST_OK(tp_sim_launch_over_link(s.dev, s.stream, nothing, NULL, 10, 30, 60, &test_error));
    MUST_OK(tp_sim_launch_over_link(s.dev, s.stream, nothing, NULL, 50, 7, 0, &test_error));
    expect_next_end(&s, 2000);
    expect_next_end(&s, 3000);
    expect_next_end(&s, 3080); /* 60 at 0.75 */
    expect_next_end(&s, 3130); /* its own time is longer */
    expect_next_end(&s, 6130);
    tp_sim_counts counts;
    tp_sim_get_counts(s.dev, &counts);
    EXPECT_EQ(counts.read_over_link, 1037);
    EXPECT_EQ(counts.written_over_link, 60);
    EXPECT_EQ(counts.bytes_to_host, 5000);
    scene_close(&s);
}

TEST(time_passes_only_while_the_host_waits) {
    scene s = scene_usual();
    launch(&s, s.stream, 10000);
    const tp_event event = mark(&s, s.stream);
    for (int i = 0; i < 100; i++) EXPECT(!is_done(&s, event));
    EXPECT_EQ(tp_sim_clock_ns(s.dev), 0);
    s.ops->clock_advance(s.dev, 4000);
    EXPECT_EQ(s.ops->clock_ns(s.dev), 4000);
    EXPECT(!is_done(&s, event));
    s.ops->clock_advance(s.dev, 100000);
    EXPECT_EQ(s.ops->clock_ns(s.dev), 10000);
    EXPECT(is_done(&s, event));
    s.ops->clock_advance(s.dev, 500); /* nothing is queued */
    launch(&s, s.stream, 100);
    MUST_OK(s.ops->event_record(s.dev, event, s.stream, &test_error));
    MUST_OK(s.ops->event_sync(s.dev, event, &test_error));
    EXPECT_EQ(s.ops->clock_ns(s.dev), 10600);
    s.ops->event_destroy(s.dev, event);
    scene_close(&s);
}

typedef struct order_log {
    int seen[8];
    int count;
} order_log;

typedef struct order_mark {
    order_log *log;
    int number;
} order_mark;

static void note_order(tp_device *dev, void *arg) {
    (void)dev;
    const order_mark *it = arg;
    it->log->seen[it->log->count++] = it->number;
}

TEST(changing_a_mapping_takes_what_the_options_say) {
    tp_sim_options options = options_usual();
    options.map_device_ns_per_mib = 160000; /* 10000 for a granule */
    options.map_host_ns_per_mib = 320000;
    scene s = scene_open(&options, 2 * GRANULE);
    EXPECT_EQ(tp_sim_clock_ns(s.dev), 60000);
    launch(&s, s.stream, 7000);
    const tp_event first = mark(&s, s.stream);
    launch(&s, s.stream, 7000);
    const tp_event second = mark(&s, s.stream);
    MUST_OK(s.ops->unmap(s.dev, s.base + s.bytes, s.bytes, &test_error));
    EXPECT_EQ(tp_sim_clock_ns(s.dev), 70000); /* a quarter of 40000 */
    EXPECT(is_done(&s, first) && !is_done(&s, second));
    MUST_OK(s.ops->map(s.dev, s.base + s.bytes, s.bytes, s.host, &test_error));
    EXPECT_EQ(tp_sim_clock_ns(s.dev), 110000); /* also with nothing left to run */
    EXPECT(is_done(&s, second));
    EXPECT_STATUS(s.ops->map(s.dev, s.base, s.bytes, s.host, &test_error), TP_INVALID);
    EXPECT_EQ(tp_sim_clock_ns(s.dev), 110000); /* what was refused took no time */
    s.ops->event_destroy(s.dev, first);
    s.ops->event_destroy(s.dev, second);
    scene_close(&s);
}

TEST(what_ends_first_runs_first) {
    static const uint64_t durations[3][2] = {{500, 100}, {200, 200}, {300, 200}};
    static const int wanted[6] = {10, 20, 11, 0, 21, 1};
    scene s = scene_usual();
    order_log log = {.count = 0};
    order_mark marks[3][2];
    for (int i = 0; i < 3; i++) {
        tp_stream stream = NULL;
        MUST_OK(tp_sim_stream_create(s.dev, &stream, &test_error));
        for (int k = 0; k < 2; k++) {
            marks[i][k] = (order_mark){&log, 10 * i + k};
            MUST_OK(tp_sim_launch(s.dev, stream, note_order, &marks[i][k], durations[i][k],
                                  &test_error));
        }
    }
    while (tp_sim_step(s.dev)) continue;
    EXPECT_EQ(log.count, 6);
    for (int i = 0; i < 6; i++) EXPECT_EQ(log.seen[i], wanted[i]);
    scene_close(&s);
}

TEST(nothing_is_run_by_hand_in_the_order_of_time) {
    tp_sim_options options = options_usual();
    tp_device *dev = NULL;
    options.manual = true;
    EXPECT_STATUS(tp_sim_device_create(&options, &dev, &test_error), TP_INVALID);
    options.manual = options.time_ordered = false;
    scene s = scene_open(&options, GRANULE);
    EXPECT(!s.dev->caps.virtual_clock);
    EXPECT_STATUS(tp_sim_launch_over_link(s.dev, s.stream, nothing, NULL, 1, 1, 1, &test_error),
                  TP_UNSUPPORTED);
    scene_close(&s);
}

/* More than the machine has; what a sanitizer leaves of the addresses holds it. */
TEST(frames_without_payload_cost_nothing_and_are_counted) {
    const size_t huge = (size_t)1 << 38;
    tp_sim_options options = options_usual();
    options.no_payload = true;
    options.device_bytes = huge;
    scene s = scene_open(&options, huge);
    EXPECT_EQ(tp_sim_fd(s.dev, TP_FRAME_DEVICE), -1);
    tp_handle none = 0;
    EXPECT_STATUS(s.ops->frame_create(s.dev, TP_FRAME_DEVICE, GRANULE, &none, &test_error),
                  TP_OUT_OF_MEMORY);
    uint64_t word = 7;
    EXPECT(tp_sim_write(s.dev, s.base + 8, &word, sizeof word));
    EXPECT(tp_sim_read(s.dev, s.base + 8, &word, sizeof word));
    EXPECT_EQ(word, 0);
    EXPECT(tp_sim_mapped(s.dev, s.base, 2 * huge));
    EXPECT(!tp_sim_mapped(s.dev, s.base + 1, 2 * huge));
    copy(&s, TP_COPY_TO_HOST, huge);
    expect_next_end(&s, huge);
    tp_sim_counts counts;
    tp_sim_get_counts(s.dev, &counts);
    EXPECT_EQ(counts.bytes_to_host, huge);
    EXPECT_EQ(counts.device_frames_bytes, huge);
    EXPECT_EQ(counts.device_frames_peak_bytes, huge);
    EXPECT_EQ(counts.host_frames_bytes, huge);
    scene_close(&s);
}

TEST(mapping_under_a_running_copy_stays) {
    tp_sim_options options = options_usual();
    for (int i = 0; i < 2; i++) {
        options.no_payload = i != 0;
        scene s = scene_open(&options, GRANULE);
        copy(&s, TP_COPY_TO_HOST, GRANULE);
        EXPECT_STATUS(s.ops->unmap(s.dev, s.base, GRANULE, &test_error), TP_INVALID);
        s.ops->clock_advance(s.dev, 10);
        EXPECT_STATUS(s.ops->unmap(s.dev, s.base, GRANULE, &test_error), TP_INVALID);
        scene_close(&s);
    }
}

TEST(copy_that_meets_nothing_when_its_turn_comes_loses_the_device) {
    tp_sim_options options = options_usual();
    for (int i = 0; i < 2; i++) {
        options.no_payload = i != 0;
        scene s = scene_open(&options, GRANULE);
        launch(&s, s.stream, 100);
        const tp_event event = mark(&s, s.stream);
        MUST_OK(
            s.ops->stream_wait(s.dev, s.dev->copy_stream[TP_COPY_TO_HOST], event, &test_error));
        copy(&s, TP_COPY_TO_HOST, GRANULE);
        MUST_OK(s.ops->unmap(s.dev, s.base, GRANULE, &test_error));
        EXPECT_STATUS(s.ops->event_sync(s.dev, event, &test_error), TP_DEVICE_ERROR);
        EXPECT_EQ(test_error.driver_code, 700);
        MUST_OK(s.ops->map(s.dev, s.base, GRANULE, s.device, &test_error));
        s.ops->event_destroy(s.dev, event);
        scene_close(&s);
    }
}
