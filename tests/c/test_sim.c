/* What only the simulated device promises: order by seed, checked preconditions, poison, the
 * clock. The contract that it shares with CUDA is tested in test_device_contract.c. */
#define _POSIX_C_SOURCE 200809L

#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/bytes.h"
#include "device/device_sim.h"
#include "harness.h"

enum { GRANULE = 64 * 1024 };

static tp_sim_options options_usual(uint64_t seed) {
    return (tp_sim_options){.device_bytes = 64 * TP_MIB,
                            .granularity_bytes = GRANULE,
                            .seed = seed,
                            .poison = true,
                            .manual = true};
}

static tp_device *sim_open(const tp_sim_options *options) {
    tp_device *dev = NULL;
    MUST_OK(tp_sim_device_create(options, &dev, &test_error));
    return dev;
}

static tp_device *sim_open_seed(uint64_t seed) {
    const tp_sim_options options = options_usual(seed);
    return sim_open(&options);
}

static tp_stream stream_open(tp_device *dev) {
    tp_stream stream = NULL;
    MUST_OK(tp_sim_stream_create(dev, &stream, &test_error));
    return stream;
}

static tp_event event_open(tp_device *dev) {
    tp_event event = NULL;
    MUST_OK(dev->ops->event_create(dev, &event, &test_error));
    return event;
}

static bool event_done(tp_device *dev, tp_event event) {
    bool done = false;
    MUST_OK(dev->ops->event_query(dev, event, &done, &test_error));
    return done;
}

/* A device frame and a host frame of one size, each mapped at an address of its own. */
typedef struct frame_pair {
    size_t bytes;
    tp_addr base, device_addr, host_addr;
    tp_handle device, host;
} frame_pair;

static frame_pair pair_open(tp_device *dev, size_t bytes) {
    frame_pair pair = {.bytes = bytes};
    MUST_OK(dev->ops->reserve(dev, bytes * 2, &pair.base, &test_error));
    MUST_OK(dev->ops->frame_create(dev, TP_FRAME_DEVICE, bytes, &pair.device, &test_error));
    MUST_OK(dev->ops->frame_create(dev, TP_FRAME_HOST, bytes, &pair.host, &test_error));
    pair.device_addr = pair.base;
    pair.host_addr = pair.base + bytes;
    MUST_OK(dev->ops->map(dev, pair.device_addr, bytes, pair.device, &test_error));
    MUST_OK(dev->ops->map(dev, pair.host_addr, bytes, pair.host, &test_error));
    return pair;
}

static void pair_close(tp_device *dev, const frame_pair *pair) {
    MUST_OK(dev->ops->unmap(dev, pair->device_addr, pair->bytes, &test_error));
    MUST_OK(dev->ops->unmap(dev, pair->host_addr, pair->bytes, &test_error));
    dev->ops->frame_destroy(dev, TP_FRAME_DEVICE, pair->device, pair->bytes);
    dev->ops->frame_destroy(dev, TP_FRAME_HOST, pair->host, pair->bytes);
    dev->ops->release(dev, pair->base, pair->bytes * 2);
}

static void run_all(tp_device *dev) {
    while (tp_sim_step(dev)) {}
}

/* ---- order ------------------------------------------------------------------------------- */

typedef struct order_log {
    int seen[64];
    int count;
} order_log;

typedef struct order_mark {
    order_log *log;
    int number;
} order_mark;

static void note_order(tp_device *dev, void *arg) {
    (void)dev;
    const order_mark *mark = arg;
    mark->log->seen[mark->log->count++] = mark->number;
}

/* Three streams of four kernels each; kernel 10 * stream + place. */
static order_log order_of_seed(uint64_t seed) {
    order_log log = {.count = 0};
    order_mark marks[3][4];
    tp_device *dev = sim_open_seed(seed);
    for (int s = 0; s < 3; s++) {
        const tp_stream stream = stream_open(dev);
        for (int k = 0; k < 4; k++) {
            marks[s][k] = (order_mark){&log, 10 * s + k};
            MUST_OK(tp_sim_launch(dev, stream, note_order, &marks[s][k], 0, &test_error));
        }
    }
    run_all(dev);
    dev->ops->destroy(dev);
    return log;
}

TEST(same_seed_gives_the_same_order) {
    const uint64_t seed = test_seed();
    const order_log first = order_of_seed(seed);
    const order_log second = order_of_seed(seed);
    EXPECT_EQ(first.count, 12);
    EXPECT(memcmp(&first, &second, sizeof first) == 0);
}

TEST(seeds_give_different_orders_that_keep_each_stream) {
    const order_log first = order_of_seed(test_seed());
    bool differs = false;
    for (uint64_t i = 1; i <= 16; i++) {
        const order_log log = order_of_seed(test_seed() + i);
        differs = differs || memcmp(&first, &log, sizeof log) != 0;
        int next[3] = {0, 0, 0};
        for (int k = 0; k < log.count; k++) {
            EXPECT_EQ(log.seen[k] % 10, next[log.seen[k] / 10]);
            next[log.seen[k] / 10]++;
        }
    }
    EXPECT(differs);
}

typedef struct word_access {
    tp_addr addr;
    uint64_t value;
    bool mapped;
} word_access;

static void kernel_write(tp_device *dev, void *arg) {
    word_access *word = arg;
    word->mapped = tp_sim_write(dev, word->addr, &word->value, sizeof word->value);
}

static void kernel_read(tp_device *dev, void *arg) {
    word_access *word = arg;
    word->mapped = tp_sim_read(dev, word->addr, &word->value, sizeof word->value);
}

/* What a reader on another stream sees of a writer's 2 over a 1. */
static uint64_t value_seen(uint64_t seed, bool wait) {
    tp_device *dev = sim_open_seed(seed);
    const frame_pair pair = pair_open(dev, GRANULE);
    const tp_stream writer = stream_open(dev), reader = stream_open(dev);
    const tp_event written = event_open(dev);
    word_access before = {.addr = pair.device_addr, .value = 1};
    kernel_write(dev, &before);
    word_access write = {.addr = pair.device_addr, .value = 2};
    word_access read = {.addr = pair.device_addr};
    MUST_OK(tp_sim_launch(dev, writer, kernel_write, &write, 0, &test_error));
    MUST_OK(dev->ops->event_record(dev, written, writer, &test_error));
    if (wait) MUST_OK(dev->ops->stream_wait(dev, reader, written, &test_error));
    MUST_OK(tp_sim_launch(dev, reader, kernel_read, &read, 0, &test_error));
    run_all(dev);
    EXPECT(write.mapped && read.mapped);
    dev->ops->event_destroy(dev, written);
    pair_close(dev, &pair);
    dev->ops->destroy(dev);
    return read.value;
}

TEST(missing_wait_gives_the_wrong_value_under_some_seed) {
    int old_count = 0, new_count = 0;
    for (uint64_t i = 0; i < 64; i++) {
        const uint64_t value = value_seen(test_seed() + i, false);
        if (value == 1) old_count++;
        if (value == 2) new_count++;
    }
    EXPECT(old_count != 0 && new_count != 0);
    EXPECT_EQ(old_count + new_count, 64);
}

TEST(wait_gives_the_right_value_under_every_seed) {
    for (uint64_t i = 0; i < 64; i++) EXPECT_EQ(value_seen(test_seed() + i, true), 2);
}

static void kernel_nothing(tp_device *dev, void *arg) {
    (void)dev;
    (void)arg;
}

TEST(wait_is_for_the_record_at_the_call) {
    tp_device *dev = sim_open_seed(1);
    const tp_stream a = stream_open(dev), b = stream_open(dev), c = stream_open(dev);
    const tp_event event = event_open(dev), after = event_open(dev), never = event_open(dev);
    MUST_OK(dev->ops->event_record(dev, event, a, &test_error));
    MUST_OK(dev->ops->stream_wait(dev, c, event, &test_error));
    MUST_OK(dev->ops->event_record(dev, after, c, &test_error));
    /* The event now stands for work behind `c`: waiting for it would be a cycle. */
    MUST_OK(dev->ops->stream_wait(dev, b, after, &test_error));
    MUST_OK(dev->ops->event_record(dev, event, b, &test_error));
    MUST_OK(dev->ops->stream_wait(dev, a, never, &test_error));
    EXPECT(!event_done(dev, event));
    MUST_OK(dev->ops->event_sync(dev, event, &test_error));
    EXPECT(event_done(dev, event));
    EXPECT(event_done(dev, after));
    dev->ops->event_destroy(dev, event);
    dev->ops->event_destroy(dev, after);
    dev->ops->event_destroy(dev, never);
    dev->ops->destroy(dev);
}

TEST(wait_outlives_the_event_it_was_taken_from) {
    for (uint64_t seed = 0; seed < 16; seed++) {
        order_log log = {.count = 0};
        order_mark marks[2] = {{&log, 1}, {&log, 2}};
        tp_device *dev = sim_open_seed(test_seed() + seed);
        const tp_stream a = stream_open(dev), b = stream_open(dev);
        const tp_event event = event_open(dev);
        MUST_OK(tp_sim_launch(dev, a, note_order, &marks[0], 0, &test_error));
        MUST_OK(dev->ops->event_record(dev, event, a, &test_error));
        MUST_OK(dev->ops->stream_wait(dev, b, event, &test_error));
        dev->ops->event_destroy(dev, event);
        MUST_OK(tp_sim_launch(dev, b, note_order, &marks[1], 0, &test_error));
        run_all(dev);
        EXPECT(log.count == 2 && log.seen[0] == 1 && log.seen[1] == 2);
        dev->ops->destroy(dev);
    }
}

TEST(query_runs_work_unless_manual) {
    tp_sim_options options = options_usual(test_seed());
    tp_device *dev = sim_open(&options);
    tp_event event = event_open(dev);
    MUST_OK(tp_sim_launch(dev, NULL, kernel_nothing, NULL, 0, &test_error));
    MUST_OK(dev->ops->event_record(dev, event, NULL, &test_error));
    for (int i = 0; i < 10; i++) EXPECT(!event_done(dev, event));
    EXPECT(tp_sim_step(dev));
    EXPECT(!event_done(dev, event));
    EXPECT(tp_sim_step(dev));
    EXPECT(event_done(dev, event));
    EXPECT(!tp_sim_step(dev));
    dev->ops->event_destroy(dev, event);
    dev->ops->destroy(dev);

    options.manual = false;
    dev = sim_open(&options);
    event = event_open(dev);
    MUST_OK(tp_sim_launch(dev, NULL, kernel_nothing, NULL, 0, &test_error));
    MUST_OK(dev->ops->event_record(dev, event, NULL, &test_error));
    EXPECT(!event_done(dev, event));
    EXPECT(event_done(dev, event));
    dev->ops->event_destroy(dev, event);
    dev->ops->destroy(dev);
}

TEST(context_marker_covers_what_was_queued_and_nothing_later) {
    for (uint64_t seed = 0; seed < 32; seed++) {
        order_log log = {.count = 0};
        order_mark marks[6];
        tp_device *dev = sim_open_seed(test_seed() + seed);
        const tp_stream streams[3] = {NULL, stream_open(dev), stream_open(dev)};
        const tp_event marker = event_open(dev), latest = event_open(dev);
        for (int i = 0; i < 3; i++) {
            marks[i] = (order_mark){&log, i};
            MUST_OK(tp_sim_launch(dev, streams[i], note_order, &marks[i], 0, &test_error));
        }
        MUST_OK(dev->ops->event_record_context(dev, marker, &test_error));
        for (int i = 0; i < 3; i++) {
            marks[3 + i] = (order_mark){&log, 3 + i};
            MUST_OK(tp_sim_launch(dev, streams[i], note_order, &marks[3 + i], 0, &test_error));
        }
        MUST_OK(dev->ops->event_record_context(dev, latest, &test_error));
        MUST_OK(dev->ops->event_sync(dev, marker, &test_error));
        int early = 0;
        for (int i = 0; i < log.count; i++) early += log.seen[i] < 3;
        EXPECT_EQ(early, 3);
        EXPECT(!event_done(dev, latest));
        run_all(dev);
        EXPECT(event_done(dev, latest));
        dev->ops->event_destroy(dev, marker);
        dev->ops->event_destroy(dev, latest);
        dev->ops->destroy(dev);
    }
}

TEST(markers_nobody_asks_for_do_not_pile_up) {
    tp_sim_options options = options_usual(test_seed());
    options.manual = false;
    tp_device *dev = sim_open(&options);
    const tp_event event = event_open(dev);
    for (int i = 0; i < 20000; i++) {
        MUST_OK(dev->ops->event_record(dev, event, NULL, &test_error));
    }
    int steps = 0;
    while (tp_sim_step(dev)) steps++;
    EXPECT(steps < 5000);
    EXPECT(event_done(dev, event));
    dev->ops->event_destroy(dev, event);
    dev->ops->destroy(dev);
}

/* ---- capture and capabilities ------------------------------------------------------------ */

TEST(captured_stream_refuses_events_and_work) {
    tp_device *dev = sim_open_seed(3);
    const tp_stream captured = stream_open(dev), other = stream_open(dev);
    const tp_event event = event_open(dev);
    bool capturing = true;
    MUST_OK(dev->ops->stream_capturing(dev, captured, &capturing, &test_error));
    EXPECT(!capturing);
    tp_sim_set_capturing(dev, captured, true);
    MUST_OK(dev->ops->stream_capturing(dev, captured, &capturing, &test_error));
    EXPECT(capturing);
    EXPECT_STATUS(dev->ops->event_record(dev, event, captured, &test_error), TP_DEVICE_ERROR);
    EXPECT_EQ(test_error.driver_code, 900);
    EXPECT_STATUS(dev->ops->event_record_context(dev, event, &test_error), TP_DEVICE_ERROR);
    EXPECT_STATUS(dev->ops->stream_wait(dev, captured, event, &test_error), TP_DEVICE_ERROR);
    EXPECT_STATUS(tp_sim_launch(dev, captured, kernel_nothing, NULL, 0, &test_error),
                  TP_DEVICE_ERROR);
    EXPECT(event_done(dev, event));
    EXPECT_OK(dev->ops->event_record(dev, event, other, &test_error));
    tp_sim_set_capturing(dev, captured, false);
    EXPECT_OK(dev->ops->event_record_context(dev, event, &test_error));
    MUST_OK(dev->ops->event_sync(dev, event, &test_error));
    dev->ops->event_destroy(dev, event);
    dev->ops->destroy(dev);
}

TEST(capabilities_switched_off_answer_unsupported) {
    tp_sim_options options = options_usual(0);
    options.no_context_marker = true;
    options.no_host_frames = true;
    options.no_fingerprints = true;
    tp_device *dev = sim_open(&options);
    EXPECT(!dev->caps.fingerprints && dev->caps.no_fingerprints[0] != '\0');
    EXPECT_STATUS(dev->ops->fingerprint(dev, dev->check_stream, 0, GRANULE, 0, &test_error),
                  TP_UNSUPPORTED);
    EXPECT(!dev->caps.context_marker && !dev->caps.host_frames && dev->caps.shared_frames);
    const tp_event event = event_open(dev);
    tp_handle handle = 77;
    EXPECT_STATUS(dev->ops->event_record_context(dev, event, &test_error), TP_UNSUPPORTED);
    EXPECT_STATUS(dev->ops->frame_create(dev, TP_FRAME_HOST, GRANULE, &handle, &test_error),
                  TP_UNSUPPORTED);
    EXPECT_EQ(handle, 77);
    dev->ops->event_destroy(dev, event);
    dev->ops->destroy(dev);
}

TEST(bad_options_are_refused) {
    tp_device *dev = NULL;
    tp_sim_options options = options_usual(0);
    options.granularity_bytes = 3 * GRANULE;
    EXPECT_STATUS(tp_sim_device_create(&options, &dev, &test_error), TP_INVALID);
    options.granularity_bytes = 512;
    EXPECT_STATUS(tp_sim_device_create(&options, &dev, &test_error), TP_INVALID);
    options.granularity_bytes = 2 * TP_MIB;
    options.device_bytes = TP_MIB;
    EXPECT_STATUS(tp_sim_device_create(&options, &dev, &test_error), TP_INVALID);
    EXPECT(dev == NULL);
}

/* ---- memory ------------------------------------------------------------------------------ */

static bool all_bytes_are(tp_device *dev, tp_addr addr, size_t bytes, unsigned char wanted) {
    unsigned char chunk[4096];
    for (size_t at = 0; at < bytes; at += sizeof chunk) {
        if (!tp_sim_read(dev, addr + at, chunk, sizeof chunk)) return false;
        for (size_t i = 0; i < sizeof chunk; i++) {
            if (chunk[i] != wanted) return false;
        }
    }
    return true;
}

TEST(new_frame_is_poisoned_also_where_it_reuses_a_freed_one) {
    tp_device *dev = sim_open_seed(0);
    for (int round = 0; round < 3; round++) {
        const frame_pair pair = pair_open(dev, 2 * GRANULE);
        EXPECT(all_bytes_are(dev, pair.device_addr, pair.bytes, 0xDB));
        EXPECT(all_bytes_are(dev, pair.host_addr, pair.bytes, 0xDB));
        memset((void *)(uintptr_t)pair.device_addr, 0x11, pair.bytes);
        memset((void *)(uintptr_t)pair.host_addr, 0x22, pair.bytes);
        pair_close(dev, &pair);
    }
    dev->ops->destroy(dev);
}

static void touch_byte(void *arg) {
    const volatile unsigned char *byte = arg;
    (void)*byte;
}

TEST(missing_mapping_is_seen_by_kernels_and_kills_raw_access) {
    tp_device *dev = sim_open_seed(0);
    const frame_pair pair = pair_open(dev, GRANULE);
    uint64_t word = 5;
    /* The two mappings lie in a row: one access may span them, but not go beyond. */
    EXPECT(tp_sim_write(dev, pair.host_addr - 4, &word, sizeof word));
    EXPECT(!tp_sim_write(dev, pair.host_addr + GRANULE - 4, &word, sizeof word));
    EXPECT(!tp_sim_read(dev, pair.base - 4, &word, sizeof word));
    EXPECT_EQ(word, 5);
    MUST_OK(dev->ops->unmap(dev, pair.device_addr, GRANULE, &test_error));
    EXPECT(!tp_sim_read(dev, pair.device_addr, &word, sizeof word));
    EXPECT(!tp_sim_read(dev, pair.host_addr - 4, &word, sizeof word));
    EXPECT(tp_sim_read(dev, pair.host_addr, &word, sizeof word));
    EXPECT(test_ends_by_signal(SIGSEGV, touch_byte, (void *)(uintptr_t)pair.device_addr));
    EXPECT(!test_ends_by_signal(SIGSEGV, touch_byte, (void *)(uintptr_t)pair.host_addr));
    MUST_OK(dev->ops->map(dev, pair.device_addr, GRANULE, pair.device, &test_error));
    EXPECT(tp_sim_read(dev, pair.device_addr, &word, sizeof word));
    pair_close(dev, &pair);
    dev->ops->destroy(dev);
}

static void write_one(void *arg) { *(volatile uint64_t *)arg = 1; }

TEST(write_through_a_read_only_mapping_faults) {
    tp_device *dev = sim_open_seed(test_seed());
    const frame_pair pair = pair_open(dev, TP_MIB);
    void *at = (void *)(uintptr_t)pair.device_addr;
    MUST_OK(dev->ops->protect(dev, pair.device_addr, pair.bytes, true, &test_error));
    EXPECT_EQ(*(volatile unsigned char *)at, 0xDB);
    EXPECT(test_ends_by_signal(SIGSEGV, write_one, at));
    MUST_OK(dev->ops->protect(dev, pair.device_addr, pair.bytes, false, &test_error));
    write_one(at);
    EXPECT_STATUS(dev->ops->protect(dev, pair.device_addr, GRANULE, true, &test_error),
                  TP_INVALID);
    pair_close(dev, &pair);
    dev->ops->destroy(dev);
}

TEST(copy_that_meets_an_unmapped_address_loses_the_device) {
    tp_device *dev = sim_open_seed(0);
    const frame_pair pair = pair_open(dev, GRANULE);
    const tp_event event = event_open(dev);
    MUST_OK(dev->ops->copy(dev, TP_COPY_TO_HOST, pair.host_addr, pair.device_addr, GRANULE,
                           &test_error));
    MUST_OK(dev->ops->event_record(dev, event, dev->copy_stream[TP_COPY_TO_HOST], &test_error));
    MUST_OK(dev->ops->unmap(dev, pair.device_addr, GRANULE, &test_error));
    run_all(dev);
    bool done = false;
    EXPECT_STATUS(dev->ops->event_query(dev, event, &done, &test_error), TP_DEVICE_ERROR);
    EXPECT_EQ(test_error.driver_code, 700);
    EXPECT_STATUS(dev->ops->event_sync(dev, event, &test_error), TP_DEVICE_ERROR);
    EXPECT_STATUS(dev->ops->event_record(dev, event, NULL, &test_error), TP_DEVICE_ERROR);
    EXPECT(all_bytes_are(dev, pair.host_addr, GRANULE, 0xDB));
    MUST_OK(dev->ops->map(dev, pair.device_addr, GRANULE, pair.device, &test_error));
    dev->ops->event_destroy(dev, event);
    pair_close(dev, &pair);
    dev->ops->destroy(dev);
}

TEST(broken_preconditions_are_invalid_and_change_nothing) {
    tp_device *dev = sim_open_seed(0);
    const tp_device_ops *ops = dev->ops;
    const frame_pair pair = pair_open(dev, 2 * GRANULE);
    tp_addr free_range = 0, addr = 77;
    tp_handle frame = 0, handle = 77;
    MUST_OK(ops->reserve(dev, 2 * GRANULE, &free_range, &test_error));
    MUST_OK(ops->frame_create(dev, TP_FRAME_DEVICE, 2 * GRANULE, &frame, &test_error));
    tp_sim_counts before, after;
    tp_sim_get_counts(dev, &before);

    EXPECT_STATUS(ops->reserve(dev, 0, &addr, &test_error), TP_INVALID);
    EXPECT_STATUS(ops->reserve(dev, GRANULE + 1, &addr, &test_error), TP_INVALID);
    EXPECT_STATUS(ops->frame_create(dev, TP_FRAME_DEVICE, 0, &handle, &test_error), TP_INVALID);
    EXPECT_STATUS(ops->frame_create(dev, TP_FRAME_HOST, 1, &handle, &test_error), TP_INVALID);
    EXPECT(addr == 77 && handle == 77);

    /* Over a mapping, in part or whole; out of the range; in no range; not aligned. */
    EXPECT_STATUS(ops->map(dev, pair.device_addr, 2 * GRANULE, frame, &test_error), TP_INVALID);
    EXPECT_STATUS(ops->map(dev, pair.device_addr + GRANULE, 2 * GRANULE, frame, &test_error),
                  TP_INVALID);
    EXPECT_STATUS(ops->map(dev, free_range + GRANULE, 2 * GRANULE, frame, &test_error),
                  TP_INVALID);
    EXPECT_STATUS(ops->map(dev, GRANULE, 2 * GRANULE, frame, &test_error), TP_INVALID);
    EXPECT_STATUS(ops->map(dev, free_range + 4096, 2 * GRANULE, frame, &test_error),
                  TP_INVALID);
    /* Part of a frame; no frame; a handle that was never given out. */
    EXPECT_STATUS(ops->map(dev, free_range, GRANULE, frame, &test_error), TP_INVALID);
    EXPECT_STATUS(ops->map(dev, free_range, 2 * GRANULE, 0, &test_error), TP_INVALID);
    EXPECT_STATUS(
        ops->map(dev, free_range, 2 * GRANULE, frame + ((tp_handle)1 << 32), &test_error),
        TP_INVALID);
    EXPECT_STATUS(ops->map(dev, free_range, 2 * GRANULE, 1000, &test_error), TP_INVALID);

    EXPECT_STATUS(ops->unmap(dev, pair.device_addr, GRANULE, &test_error), TP_INVALID);
    EXPECT_STATUS(ops->unmap(dev, pair.device_addr + GRANULE, GRANULE, &test_error),
                  TP_INVALID);
    EXPECT_STATUS(ops->unmap(dev, pair.device_addr, 4 * GRANULE, &test_error), TP_INVALID);
    EXPECT_STATUS(ops->unmap(dev, free_range, 2 * GRANULE, &test_error), TP_INVALID);

    EXPECT_STATUS(ops->copy(dev, TP_COPY_TO_HOST, pair.host_addr, free_range, 8, &test_error),
                  TP_INVALID);
    EXPECT_STATUS(ops->copy(dev, TP_COPY_TO_HOST, free_range, pair.device_addr, 8, &test_error),
                  TP_INVALID);
    EXPECT_STATUS(
        ops->copy(dev, TP_COPY_TO_HOST, pair.host_addr, pair.device_addr, 0, &test_error),
        TP_INVALID);
    EXPECT(!tp_sim_step(dev));
    int not_a_stream = 0;
    EXPECT_STATUS(tp_sim_launch(dev, &not_a_stream, kernel_nothing, NULL, 0, &test_error),
                  TP_INVALID);

    tp_sim_get_counts(dev, &after);
    EXPECT(memcmp(&before, &after, sizeof before) == 0);
    EXPECT_OK(ops->map(dev, free_range, 2 * GRANULE, frame, &test_error));
    EXPECT_OK(ops->unmap(dev, free_range, 2 * GRANULE, &test_error));
    ops->frame_destroy(dev, TP_FRAME_DEVICE, frame, 2 * GRANULE);
    EXPECT_STATUS(ops->map(dev, free_range, 2 * GRANULE, frame, &test_error), TP_INVALID);
    ops->release(dev, free_range, 2 * GRANULE);
    EXPECT_STATUS(ops->map(dev, free_range, 2 * GRANULE, pair.device, &test_error), TP_INVALID);
    pair_close(dev, &pair);
    ops->destroy(dev);
}

typedef struct misuse {
    tp_device *dev;
    frame_pair pair;
} misuse;

static void destroy_mapped_frame(void *arg) {
    const misuse *m = arg;
    m->dev->ops->frame_destroy(m->dev, TP_FRAME_DEVICE, m->pair.device, m->pair.bytes);
}

static void destroy_frame_of_other_kind(void *arg) {
    const misuse *m = arg;
    (void)m->dev->ops->unmap(m->dev, m->pair.device_addr, m->pair.bytes, NULL);
    m->dev->ops->frame_destroy(m->dev, TP_FRAME_HOST, m->pair.device, m->pair.bytes);
}

static void destroy_frame_twice(void *arg) {
    const misuse *m = arg;
    (void)m->dev->ops->unmap(m->dev, m->pair.device_addr, m->pair.bytes, NULL);
    m->dev->ops->frame_destroy(m->dev, TP_FRAME_DEVICE, m->pair.device, m->pair.bytes);
    m->dev->ops->frame_destroy(m->dev, TP_FRAME_DEVICE, m->pair.device, m->pair.bytes);
}

static void release_mapped_range(void *arg) {
    const misuse *m = arg;
    m->dev->ops->release(m->dev, m->pair.base, m->pair.bytes * 2);
}

static void destroy_device_in_use(void *arg) {
    const misuse *m = arg;
    m->dev->ops->destroy(m->dev);
}

TEST(misuse_of_calls_that_cannot_fail_traps) {
    if (!TP_DEBUG) SKIP("asserts are off");
    misuse m = {.dev = sim_open_seed(0)};
    m.pair = pair_open(m.dev, GRANULE);
    EXPECT(test_traps(destroy_mapped_frame, &m));
    EXPECT(test_traps(destroy_frame_of_other_kind, &m));
    EXPECT(test_traps(destroy_frame_twice, &m));
    EXPECT(test_traps(release_mapped_range, &m));
    EXPECT(test_traps(destroy_device_in_use, &m));
    pair_close(m.dev, &m.pair);
    m.dev->ops->destroy(m.dev);
}

TEST(frames_beyond_the_device_are_out_of_memory) {
    tp_sim_options options = options_usual(0);
    options.device_bytes = 4 * GRANULE;
    options.host_bytes = 2 * GRANULE;
    tp_device *dev = sim_open(&options);
    tp_handle big = 0, small = 0, host = 0, none = 77;
    size_t free_bytes = 0, total_bytes = 0;
    MUST_OK(dev->ops->frame_create(dev, TP_FRAME_DEVICE, 3 * GRANULE, &big, &test_error));
    EXPECT_STATUS(dev->ops->frame_create(dev, TP_FRAME_DEVICE, 2 * GRANULE, &none, &test_error),
                  TP_OUT_OF_MEMORY);
    EXPECT_EQ(none, 77);
    MUST_OK(dev->ops->memory_info(dev, &free_bytes, &total_bytes, &test_error));
    EXPECT_EQ(free_bytes, GRANULE);
    EXPECT_EQ(total_bytes, 4 * GRANULE);
    MUST_OK(dev->ops->frame_create(dev, TP_FRAME_DEVICE, GRANULE, &small, &test_error));
    MUST_OK(dev->ops->frame_create(dev, TP_FRAME_HOST, 2 * GRANULE, &host, &test_error));
    EXPECT_STATUS(dev->ops->frame_create(dev, TP_FRAME_HOST, GRANULE, &none, &test_error),
                  TP_NO_HOST_MEMORY);
    dev->ops->frame_destroy(dev, TP_FRAME_DEVICE, big, 3 * GRANULE);
    EXPECT_OK(dev->ops->frame_create(dev, TP_FRAME_DEVICE, 2 * GRANULE, &big, &test_error));
    dev->ops->frame_destroy(dev, TP_FRAME_DEVICE, big, 2 * GRANULE);
    dev->ops->frame_destroy(dev, TP_FRAME_DEVICE, small, GRANULE);
    dev->ops->frame_destroy(dev, TP_FRAME_HOST, host, 2 * GRANULE);
    dev->ops->destroy(dev);
}

static size_t file_held_bytes(int fd) {
    struct stat info;
    MUST(fstat(fd, &info) == 0);
    return (size_t)info.st_blocks * 512;
}

TEST(memfd_blocks_show_the_frames_from_outside) {
    tp_device *dev = sim_open_seed(0);
    char path[64], target[128] = "";
    (void)snprintf(path, sizeof path, "/proc/self/fd/%d", tp_sim_fd(dev, TP_FRAME_DEVICE));
    MUST(readlink(path, target, sizeof target - 1) > 0);
    EXPECT(strstr(target, "torchpager-device") != NULL);
    EXPECT_EQ(file_held_bytes(tp_sim_fd(dev, TP_FRAME_DEVICE)), 0);
    const frame_pair a = pair_open(dev, 8 * GRANULE), b = pair_open(dev, 4 * GRANULE);
    EXPECT_EQ(file_held_bytes(tp_sim_fd(dev, TP_FRAME_DEVICE)), 12 * GRANULE);
    EXPECT_EQ(file_held_bytes(tp_sim_fd(dev, TP_FRAME_HOST)), 12 * GRANULE);
    pair_close(dev, &a);
    EXPECT_EQ(file_held_bytes(tp_sim_fd(dev, TP_FRAME_DEVICE)), 4 * GRANULE);
    pair_close(dev, &b);
    EXPECT_EQ(file_held_bytes(tp_sim_fd(dev, TP_FRAME_DEVICE)), 0);
    EXPECT_EQ(file_held_bytes(tp_sim_fd(dev, TP_FRAME_HOST)), 0);
    /* Frames of a size seen before reuse its ranges: the file does not grow. */
    struct stat before, after;
    MUST(fstat(tp_sim_fd(dev, TP_FRAME_DEVICE), &before) == 0);
    for (int i = 0; i < 20; i++) {
        const frame_pair again = pair_open(dev, 8 * GRANULE);
        pair_close(dev, &again);
    }
    MUST(fstat(tp_sim_fd(dev, TP_FRAME_DEVICE), &after) == 0);
    EXPECT_EQ(before.st_size, after.st_size);
    dev->ops->destroy(dev);
}

TEST(counts_return_to_zero) {
    tp_device *dev = sim_open_seed(0);
    const frame_pair pair = pair_open(dev, GRANULE);
    const tp_event event = event_open(dev);
    MUST_OK(dev->ops->copy(dev, TP_COPY_TO_HOST, pair.host_addr, pair.device_addr, 1000,
                           &test_error));
    MUST_OK(dev->ops->copy(dev, TP_COPY_TO_DEVICE, pair.device_addr, pair.host_addr, 300,
                           &test_error));
    run_all(dev);
    tp_sim_counts counts;
    tp_sim_get_counts(dev, &counts);
    EXPECT(counts.ranges == 1 && counts.frames == 2 && counts.mappings == 2 &&
           counts.events == 1);
    EXPECT(counts.device_frames_bytes == GRANULE && counts.host_frames_bytes == GRANULE);
    EXPECT(counts.copies == 2 && counts.bytes_to_host == 1000 && counts.bytes_to_device == 300);
    dev->ops->event_destroy(dev, event);
    pair_close(dev, &pair);
    tp_sim_get_counts(dev, &counts);
    EXPECT(counts.ranges == 0 && counts.frames == 0 && counts.mappings == 0 &&
           counts.events == 0);
    EXPECT(counts.device_frames_bytes == 0 && counts.host_frames_bytes == 0);
    EXPECT(counts.frame_creates == 2 && counts.frame_destroys == 2);
    EXPECT(counts.maps == 2 && counts.unmaps == 2 && counts.event_creates == 1);
    dev->ops->destroy(dev);
}

/* Random maps and unmaps of frames of one to four granules over a few ranges, against a plain
 * array that says for each granule which mapping covers it. */
enum { MODEL_RANGES = 3, MODEL_GRANULES = 40, MODEL_FRAMES = 12 };

typedef struct model {
    tp_device *dev;
    tp_addr ranges[MODEL_RANGES];
    int covered_by[MODEL_RANGES][MODEL_GRANULES]; /* frame, -1: nothing */
    bool starts[MODEL_RANGES][MODEL_GRANULES];
    tp_handle frames[MODEL_FRAMES];
    int granules[MODEL_FRAMES];
} model;

static tp_status model_map_expected(const model *m, int range, int at, int frame) {
    if (at + m->granules[frame] > MODEL_GRANULES) return TP_INVALID;
    for (int g = at; g < at + m->granules[frame]; g++) {
        if (m->covered_by[range][g] >= 0) return TP_INVALID;
    }
    return TP_OK;
}

static void model_map(model *m, int range, int at, int frame) {
    const tp_status expected = model_map_expected(m, range, at, frame);
    const size_t bytes = (size_t)m->granules[frame] * GRANULE;
    const tp_addr addr = m->ranges[range] + (size_t)at * GRANULE;
    EXPECT_STATUS(m->dev->ops->map(m->dev, addr, bytes, m->frames[frame], &test_error),
                  expected);
    if (expected != TP_OK) return;
    m->starts[range][at] = true;
    for (int g = at; g < at + m->granules[frame]; g++) m->covered_by[range][g] = frame;
}

static void model_unmap(model *m, int range, int at, int granules) {
    const int frame = m->covered_by[range][at];
    const bool whole = m->starts[range][at] && m->granules[frame] == granules;
    const tp_addr addr = m->ranges[range] + (size_t)at * GRANULE;
    EXPECT_STATUS(m->dev->ops->unmap(m->dev, addr, (size_t)granules * GRANULE, &test_error),
                  whole ? TP_OK : TP_INVALID);
    if (!whole) return;
    m->starts[range][at] = false;
    for (int g = at; g < at + granules; g++) m->covered_by[range][g] = -1;
}

static void model_check(const model *m, int range, int at) {
    const int frame = m->covered_by[range][at];
    uint64_t word = 0;
    const tp_addr addr = m->ranges[range] + (size_t)at * GRANULE;
    if (EXPECT(tp_sim_read(m->dev, addr, &word, sizeof word) == (frame >= 0)) && frame >= 0) {
        EXPECT_EQ(word, (uint64_t)frame);
    }
}

static void model_open(model *m, uint64_t *random) {
    memset(m->covered_by, -1, sizeof m->covered_by);
    for (int r = 0; r < MODEL_RANGES; r++) {
        MUST_OK(m->dev->ops->reserve(m->dev, (size_t)MODEL_GRANULES * GRANULE, &m->ranges[r],
                                     &test_error));
    }
    for (int f = 0; f < MODEL_FRAMES; f++) {
        m->granules[f] = 1 + (int)test_random_below(random, 4);
        const size_t bytes = (size_t)m->granules[f] * GRANULE;
        MUST_OK(m->dev->ops->frame_create(m->dev, TP_FRAME_DEVICE, bytes, &m->frames[f],
                                          &test_error));
        MUST_OK(m->dev->ops->map(m->dev, m->ranges[0], bytes, m->frames[f], &test_error));
        const uint64_t number = (uint64_t)f;
        for (size_t at = 0; at < bytes; at += GRANULE) {
            MUST(tp_sim_write(m->dev, m->ranges[0] + at, &number, sizeof number));
        }
        MUST_OK(m->dev->ops->unmap(m->dev, m->ranges[0], bytes, &test_error));
    }
}

static void model_close(model *m) {
    for (int r = 0; r < MODEL_RANGES; r++) {
        for (int at = 0; at < MODEL_GRANULES; at++) {
            if (m->starts[r][at]) model_unmap(m, r, at, m->granules[m->covered_by[r][at]]);
        }
        m->dev->ops->release(m->dev, m->ranges[r], (size_t)MODEL_GRANULES * GRANULE);
    }
    for (int f = 0; f < MODEL_FRAMES; f++) {
        m->dev->ops->frame_destroy(m->dev, TP_FRAME_DEVICE, m->frames[f],
                                   (size_t)m->granules[f] * GRANULE);
    }
}

TEST(random_mappings_agree_with_a_plain_array) {
    uint64_t random = test_seed();
    model m = {.dev = sim_open_seed(0)};
    model_open(&m, &random);
    const unsigned rounds = test_rounds(5000);
    for (unsigned i = 0; i < rounds && test_failures() == 0; i++) {
        const int range = (int)test_random_below(&random, MODEL_RANGES);
        const int at = (int)test_random_below(&random, MODEL_GRANULES);
        if (test_random_below(&random, 2) == 0) {
            model_map(&m, range, at, (int)test_random_below(&random, MODEL_FRAMES));
        } else {
            const int frame = m.covered_by[range][at];
            const bool right = frame >= 0 && test_random_below(&random, 4) != 0;
            model_unmap(&m, range, at, right ? m.granules[frame] : 1);
        }
        model_check(&m, range, (int)test_random_below(&random, MODEL_GRANULES));
    }
    model_close(&m);
    m.dev->ops->destroy(m.dev);
}

/* ---- the clock --------------------------------------------------------------------------- */

/* In whole nanoseconds, one allowed for rounding. */
static bool near_ns(uint64_t got_ns, double wanted_ns) {
    const double off = (double)got_ns - wanted_ns;
    if (off > -1.5 && off < 1.5) return true;
    test_fail(__FILE__, __LINE__, "the clock says %llu ns, not %.1f",
              (unsigned long long)got_ns, wanted_ns);
    return false;
}

static void copy_queue(tp_device *dev, const frame_pair *pair, tp_copy_dir dir, size_t bytes) {
    const bool out = dir == TP_COPY_TO_HOST;
    MUST_OK(dev->ops->copy(dev, dir, out ? pair->host_addr : pair->device_addr,
                           out ? pair->device_addr : pair->host_addr, bytes, &test_error));
}

TEST(clock_of_copies_one_way_is_bytes_over_the_link) {
    tp_device *dev = sim_open_seed(test_seed());
    const frame_pair pair = pair_open(dev, 16 * TP_MIB);
    EXPECT_EQ(tp_sim_clock_ns(dev), 0);
    copy_queue(dev, &pair, TP_COPY_TO_HOST, pair.bytes);
    EXPECT_EQ(tp_sim_clock_ns(dev), 0);
    run_all(dev);
    EXPECT(near_ns(tp_sim_clock_ns(dev), (double)pair.bytes * 1e9 / 55e9));
    for (int i = 0; i < 9; i++) copy_queue(dev, &pair, TP_COPY_TO_HOST, pair.bytes);
    run_all(dev);
    EXPECT(near_ns(tp_sim_clock_ns(dev), 10 * (double)pair.bytes * 1e9 / 55e9));
    pair_close(dev, &pair);
    dev->ops->destroy(dev);
}

TEST(fingerprint_takes_time_and_meets_what_is_there_in_its_turn) {
    tp_device *dev = sim_open_seed(test_seed());
    const frame_pair pair = pair_open(dev, TP_MIB);
    MUST_OK(dev->ops->fingerprint(dev, dev->check_stream, pair.device_addr, pair.bytes, 0,
                                  &test_error));
    const uint64_t late = 7;
    MUST(tp_sim_write(dev, pair.device_addr, &late, sizeof late));
    run_all(dev);
    EXPECT(near_ns(tp_sim_clock_ns(dev), (double)pair.bytes * 1e9 / 2e12));
    EXPECT(tp_fingerprint_same(
        dev->ops->fingerprint_read(dev, 0),
        tp_fingerprint_of((const void *)(uintptr_t)pair.device_addr, pair.bytes)));
    MUST_OK(dev->ops->fingerprint(dev, dev->check_stream, pair.device_addr, pair.bytes, 0,
                                  &test_error));
    pair_close(dev, &pair);
    run_all(dev);
    tp_event event = NULL;
    MUST_OK(dev->ops->event_create(dev, &event, &test_error));
    EXPECT_STATUS(dev->ops->event_record(dev, event, NULL, &test_error), TP_DEVICE_ERROR);
    dev->ops->event_destroy(dev, event);
    dev->ops->destroy(dev);
}

TEST(clock_of_copies_both_ways_shares_the_duplex_rate) {
    for (uint64_t seed = 0; seed < 8; seed++) {
        tp_device *dev = sim_open_seed(test_seed() + seed);
        const frame_pair out = pair_open(dev, TP_MIB), in = pair_open(dev, TP_MIB);
        for (int i = 0; i < 10; i++) {
            copy_queue(dev, &out, TP_COPY_TO_HOST, TP_MIB);
            copy_queue(dev, &in, TP_COPY_TO_DEVICE, TP_MIB);
        }
        run_all(dev);
        EXPECT(near_ns(tp_sim_clock_ns(dev), 20.0 * (double)TP_MIB * 1e9 / 101e9));
        pair_close(dev, &out);
        pair_close(dev, &in);
        dev->ops->destroy(dev);
    }
}

/* Ten each way share the link; the five left over have it alone. */
TEST(clock_of_a_longer_direction_ends_at_full_rate) {
    for (uint64_t seed = 0; seed < 8; seed++) {
        tp_device *dev = sim_open_seed(test_seed() + seed);
        const frame_pair out = pair_open(dev, TP_MIB), in = pair_open(dev, TP_MIB);
        for (int i = 0; i < 15; i++) copy_queue(dev, &out, TP_COPY_TO_HOST, TP_MIB);
        for (int i = 0; i < 10; i++) copy_queue(dev, &in, TP_COPY_TO_DEVICE, TP_MIB);
        run_all(dev);
        const double piece = (double)TP_MIB * 1e9;
        EXPECT(near_ns(tp_sim_clock_ns(dev), 20 * piece / 101e9 + 5 * piece / 55e9));
        pair_close(dev, &out);
        pair_close(dev, &in);
        dev->ops->destroy(dev);
    }
}

TEST(clock_follows_streams_events_and_what_the_host_saw) {
    tp_sim_options options = options_usual(test_seed());
    options.link_bytes_per_s = 1000000000; /* a byte a nanosecond */
    options.duplex_bytes_per_s = 2000000000;
    tp_device *dev = sim_open(&options);
    const frame_pair pair = pair_open(dev, GRANULE);
    const tp_stream a = stream_open(dev), b = stream_open(dev);
    const tp_event event = event_open(dev);
    /* Streams run side by side. */
    MUST_OK(tp_sim_launch(dev, a, kernel_nothing, NULL, 500, &test_error));
    MUST_OK(tp_sim_launch(dev, b, kernel_nothing, NULL, 300, &test_error));
    run_all(dev);
    EXPECT(near_ns(tp_sim_clock_ns(dev), 500));
    /* A copy behind the kernel of `a`, then a kernel of `b` behind the copy. */
    MUST_OK(dev->ops->event_record(dev, event, a, &test_error));
    MUST_OK(dev->ops->stream_wait(dev, dev->copy_stream[TP_COPY_TO_HOST], event, &test_error));
    copy_queue(dev, &pair, TP_COPY_TO_HOST, 1000);
    MUST_OK(dev->ops->event_record(dev, event, dev->copy_stream[TP_COPY_TO_HOST], &test_error));
    MUST_OK(dev->ops->stream_wait(dev, b, event, &test_error));
    MUST_OK(tp_sim_launch(dev, b, kernel_nothing, NULL, 40, &test_error));
    run_all(dev);
    EXPECT(near_ns(tp_sim_clock_ns(dev), 1540));
    /* The host has seen nothing yet: the engine the other way is free from the beginning. */
    copy_queue(dev, &pair, TP_COPY_TO_DEVICE, 1540);
    run_all(dev);
    EXPECT(near_ns(tp_sim_clock_ns(dev), 1540));
    /* It sees the copy at 1500: what it queues now begins there. */
    MUST_OK(dev->ops->event_sync(dev, event, &test_error));
    MUST_OK(tp_sim_launch(dev, a, kernel_nothing, NULL, 100, &test_error));
    run_all(dev);
    EXPECT(near_ns(tp_sim_clock_ns(dev), 1600));
    dev->ops->event_destroy(dev, event);
    pair_close(dev, &pair);
    dev->ops->destroy(dev);
}

/* ---- threads ----------------------------------------------------------------------------- */

enum { THREAD_COUNT = 4 };

typedef struct worker {
    tp_device *dev;
    uint64_t random;
    unsigned rounds;
    int wrong;
    pthread_t thread;
} worker;

static void worker_expect(worker *w, bool cond) {
    if (!cond) w->wrong++;
}

/* Fills a device frame by a kernel, copies it out and back into another frame, checks it
 * there. */
static void worker_round(worker *w, tp_stream stream, tp_event event, tp_addr base) {
    tp_device *dev = w->dev;
    const tp_device_ops *ops = dev->ops;
    const tp_frame_kind kinds[3] = {TP_FRAME_DEVICE, TP_FRAME_HOST, TP_FRAME_DEVICE};
    tp_handle frames[3] = {0, 0, 0};
    tp_addr at[3];
    for (size_t i = 0; i < 3; i++) {
        at[i] = base + i * GRANULE;
        worker_expect(w, ops->frame_create(dev, kinds[i], GRANULE, &frames[i], NULL) == TP_OK);
        worker_expect(w, ops->map(dev, at[i], GRANULE, frames[i], NULL) == TP_OK);
    }
    word_access write = {.addr = at[0], .value = test_random(&w->random)};
    word_access read = {.addr = at[2]};
    const tp_stream out = dev->copy_stream[TP_COPY_TO_HOST];
    const tp_stream in = dev->copy_stream[TP_COPY_TO_DEVICE];
    worker_expect(w, tp_sim_launch(dev, stream, kernel_write, &write, 10, NULL) == TP_OK);
    worker_expect(w, ops->event_record(dev, event, stream, NULL) == TP_OK);
    worker_expect(w, ops->stream_wait(dev, out, event, NULL) == TP_OK);
    worker_expect(w, ops->copy(dev, TP_COPY_TO_HOST, at[1], at[0], GRANULE, NULL) == TP_OK);
    worker_expect(w, ops->event_record(dev, event, out, NULL) == TP_OK);
    worker_expect(w, ops->stream_wait(dev, in, event, NULL) == TP_OK);
    worker_expect(w, ops->copy(dev, TP_COPY_TO_DEVICE, at[2], at[1], GRANULE, NULL) == TP_OK);
    worker_expect(w, ops->event_record(dev, event, in, NULL) == TP_OK);
    worker_expect(w, ops->stream_wait(dev, stream, event, NULL) == TP_OK);
    worker_expect(w, tp_sim_launch(dev, stream, kernel_read, &read, 10, NULL) == TP_OK);
    const bool whole = test_random_below(&w->random, 2) == 0;
    worker_expect(w, (whole ? ops->event_record_context(dev, event, NULL)
                            : ops->event_record(dev, event, stream, NULL)) == TP_OK);
    bool done = false;
    if (test_random_below(&w->random, 2) == 0) {
        while (!done && ops->event_query(dev, event, &done, NULL) == TP_OK) {}
    } else {
        done = ops->event_sync(dev, event, NULL) == TP_OK;
    }
    worker_expect(w, done && read.mapped && read.value == write.value);
    for (size_t i = 0; i < 3; i++) {
        worker_expect(w, ops->unmap(dev, at[i], GRANULE, NULL) == TP_OK);
        ops->frame_destroy(dev, kinds[i], frames[i], GRANULE);
    }
}

static void *worker_run(void *arg) {
    worker *w = arg;
    tp_stream stream = NULL;
    tp_event event = NULL;
    tp_addr base = 0;
    worker_expect(w, tp_sim_stream_create(w->dev, &stream, NULL) == TP_OK);
    worker_expect(w, w->dev->ops->event_create(w->dev, &event, NULL) == TP_OK);
    worker_expect(w, w->dev->ops->reserve(w->dev, 3 * GRANULE, &base, NULL) == TP_OK);
    for (unsigned i = 0; i < w->rounds && w->wrong == 0; i++)
        worker_round(w, stream, event, base);
    w->dev->ops->event_destroy(w->dev, event);
    w->dev->ops->release(w->dev, base, 3 * GRANULE);
    return NULL;
}

TEST(threads_share_the_device) {
    tp_sim_options options = options_usual(test_seed());
    options.manual = false;
    tp_device *dev = sim_open(&options);
    worker workers[THREAD_COUNT];
    for (int i = 0; i < THREAD_COUNT; i++) {
        workers[i] = (worker){
            .dev = dev, .random = test_seed() + (uint64_t)i, .rounds = test_rounds(150)};
        MUST(pthread_create(&workers[i].thread, NULL, worker_run, &workers[i]) == 0);
    }
    for (int i = 0; i < THREAD_COUNT; i++) {
        (void)pthread_join(workers[i].thread, NULL);
        EXPECT_EQ(workers[i].wrong, 0);
    }
    tp_sim_counts counts;
    tp_sim_get_counts(dev, &counts);
    EXPECT(counts.ranges == 0 && counts.frames == 0 && counts.mappings == 0 &&
           counts.events == 0);
    dev->ops->destroy(dev);
}
