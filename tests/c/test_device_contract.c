/* The device contract (csrc/device/device.h), one suite for every backend:
 *   NAME_on_sim      the simulated device, under several seeds
 *   NAME_in_time     the same in the order of time
 *   NAME_bare        likewise, without payload: contents are not looked at
 *   NAME_on_wrapped  the same behind fault_device, which thereby proves that it passes calls on
 *   NAME_on_cuda     the CUDA device 0; skipped where there is none
 * A test sees the contract and three things more from its backend: how the host reads and
 * writes at a device address, and how to get a stream. */
#define _POSIX_C_SOURCE 200809L

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "device/device_cuda.h"
#include "device/device_sim.h"
#include "fault_device.h"
#include "harness.h"

enum { SIM_SEEDS = 8, SIM_GRANULE = 64 * 1024 };

/* ---- backends ---------------------------------------------------------------------------- */

typedef struct backend {
    tp_device *dev;
    size_t unit; /* bytes of an ordinary frame */
    tp_status (*stream_create)(const struct backend *be, tp_stream *out);
    bool (*read)(const struct backend *be, tp_addr addr, void *out, size_t bytes);
    bool (*write)(const struct backend *be, tp_addr addr, const void *data, size_t bytes);
    tp_device *sim; /* the simulated device at the bottom, if it is one */
    bool no_payload;
} backend;

static tp_status sim_stream(const backend *be, tp_stream *out) {
    return tp_sim_stream_create(be->sim, out, &test_error);
}

static bool sim_read(const backend *be, tp_addr addr, void *out, size_t bytes) {
    return tp_sim_read(be->sim, addr, out, bytes);
}

static bool sim_write(const backend *be, tp_addr addr, const void *data, size_t bytes) {
    return tp_sim_write(be->sim, addr, data, bytes);
}

static tp_sim_options sim_options(uint64_t seed) {
    return (tp_sim_options){.device_bytes = 64 * TP_MIB,
                            .host_bytes = 256 * TP_MIB,
                            .granularity_bytes = SIM_GRANULE,
                            .seed = seed,
                            .poison = true};
}

static backend sim_backend_with(const tp_sim_options *options) {
    backend be = {.unit = 2 * SIM_GRANULE,
                  .stream_create = sim_stream,
                  .read = sim_read,
                  .write = sim_write,
                  .no_payload = options->no_payload};
    MUST_OK(tp_sim_device_create(options, &be.sim, &test_error));
    be.dev = be.sim;
    return be;
}

static backend sim_backend_in_time(bool payload) {
    tp_sim_options options = sim_options(0);
    options.time_ordered = true;
    options.no_payload = !payload;
    return sim_backend_with(&options);
}

static backend sim_backend(uint64_t seed, bool wrapped) {
    const tp_sim_options options = sim_options(seed);
    backend be = sim_backend_with(&options);
    if (wrapped) MUST_OK(fault_device_create(be.sim, &be.dev, &test_error));
    return be;
}

static void sim_backend_close(const backend *be) {
    tp_sim_counts counts;
    tp_sim_get_counts(be->sim, &counts);
    EXPECT_EQ(counts.ranges, 0);
    EXPECT_EQ(counts.mappings, 0);
    EXPECT_EQ(counts.frames, 0);
    EXPECT_EQ(counts.events, 0);
    if (test_failures() == 0) be->dev->ops->destroy(be->dev);
}

/* The driver's synchronous copies: the core has no use for them. */
typedef unsigned int cuda_copy_to_host(void *dst, unsigned long long src, size_t bytes);
typedef unsigned int cuda_copy_to_device(unsigned long long dst, const void *src, size_t bytes);
typedef unsigned int cuda_stream_create(void **out, unsigned int flags);
static cuda_copy_to_host *cuda_to_host;
static cuda_copy_to_device *cuda_to_device;
static cuda_stream_create *cuda_new_stream;

static void cuda_symbol(const char *name, void *entry, size_t entry_bytes) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    MUST(library != NULL);
    void *found = dlsym(library, name);
    MUST(found != NULL);
    memcpy(entry, &found, entry_bytes);
}

static bool cuda_read(const backend *be, tp_addr addr, void *out, size_t bytes) {
    (void)be;
    return cuda_to_host(out, addr, bytes) == 0;
}

static bool cuda_write(const backend *be, tp_addr addr, const void *data, size_t bytes) {
    (void)be;
    return cuda_to_device(addr, data, bytes) == 0;
}

static tp_status cuda_stream(const backend *be, tp_stream *out) {
    (void)be;
    const unsigned int non_blocking = 1;
    return cuda_new_stream(out, non_blocking) == 0 ? TP_OK : TP_DEVICE_ERROR;
}

static backend cuda_backend(void) {
    backend be = {.stream_create = cuda_stream, .read = cuda_read, .write = cuda_write};
    test_error_clear();
    const tp_status status = tp_cuda_device_create(0, &be.dev, &test_error);
    if (status == TP_UNSUPPORTED) SKIP(test_error.message);
    MUST_OK(status);
    MUST_OK(be.dev->ops->bind_thread(be.dev, &test_error));
    be.unit = tp_max_size(be.dev->caps.granularity_bytes, 8 * TP_MIB);
    cuda_symbol("cuMemcpyDtoH_v2", &cuda_to_host, sizeof cuda_to_host);
    cuda_symbol("cuMemcpyHtoD_v2", &cuda_to_device, sizeof cuda_to_device);
    cuda_symbol("cuStreamCreate", &cuda_new_stream, sizeof cuda_new_stream);
    return be;
}

#define CONTRACT(name)                                                                         \
    static void name##_with(const backend *be);                                                \
    TEST(name##_on_sim) {                                                                      \
        for (uint64_t i = 0; i < SIM_SEEDS; i++) {                                             \
            const backend be = sim_backend(test_seed() + i, false);                            \
            name##_with(&be);                                                                  \
            sim_backend_close(&be);                                                            \
        }                                                                                      \
    }                                                                                          \
    TEST(name##_in_time) {                                                                     \
        const backend be = sim_backend_in_time(true);                                          \
        name##_with(&be);                                                                      \
        sim_backend_close(&be);                                                                \
    }                                                                                          \
    TEST(name##_bare) {                                                                        \
        const backend be = sim_backend_in_time(false);                                         \
        name##_with(&be);                                                                      \
        sim_backend_close(&be);                                                                \
    }                                                                                          \
    TEST(name##_on_wrapped) {                                                                  \
        const backend be = sim_backend(test_seed(), true);                                     \
        name##_with(&be);                                                                      \
        sim_backend_close(&be);                                                                \
    }                                                                                          \
    TEST(name##_on_cuda) {                                                                     \
        const backend be = cuda_backend();                                                     \
        name##_with(&be);                                                                      \
        if (test_failures() == 0) be.dev->ops->destroy(be.dev);                                \
    }                                                                                          \
    static void name##_with(const backend *be)

/* ---- what the tests share ---------------------------------------------------------------- */

static tp_addr range_open(const backend *be, size_t bytes) {
    tp_addr addr = 0;
    MUST_OK(be->dev->ops->reserve(be->dev, bytes, &addr, &test_error));
    return addr;
}

static void range_close(const backend *be, tp_addr addr, size_t bytes) {
    be->dev->ops->release(be->dev, addr, bytes);
}

static tp_handle frame_open(const backend *be, tp_frame_kind kind, size_t bytes) {
    tp_handle handle = 0;
    if (kind == TP_FRAME_HOST && !be->dev->caps.host_frames) SKIP("no host frames here");
    MUST_OK(be->dev->ops->frame_create(be->dev, kind, bytes, &handle, &test_error));
    MUST(handle != 0);
    return handle;
}

static void frame_close(const backend *be, tp_frame_kind kind, tp_handle handle, size_t bytes) {
    be->dev->ops->frame_destroy(be->dev, kind, handle, bytes);
}

static void map(const backend *be, tp_addr addr, size_t bytes, tp_handle handle) {
    MUST_OK(be->dev->ops->map(be->dev, addr, bytes, handle, &test_error));
}

static void unmap(const backend *be, tp_addr addr, size_t bytes) {
    MUST_OK(be->dev->ops->unmap(be->dev, addr, bytes, &test_error));
}

static tp_event event_open(const backend *be) {
    tp_event event = NULL;
    MUST_OK(be->dev->ops->event_create(be->dev, &event, &test_error));
    return event;
}

static bool event_done(const backend *be, tp_event event) {
    bool done = false;
    MUST_OK(be->dev->ops->event_query(be->dev, event, &done, &test_error));
    return done;
}

static void copy(const backend *be, tp_copy_dir dir, tp_addr dst, tp_addr src, size_t bytes) {
    MUST_OK(be->dev->ops->copy(be->dev, dir, dst, src, bytes, &test_error));
}

/* Makes `later` wait for what is queued on `earlier` by now. */
static void order(const backend *be, tp_stream earlier, tp_stream later, tp_event event) {
    MUST_OK(be->dev->ops->event_record(be->dev, event, earlier, &test_error));
    MUST_OK(be->dev->ops->stream_wait(be->dev, later, event, &test_error));
}

static void finish(const backend *be, tp_stream stream, tp_event event) {
    MUST_OK(be->dev->ops->event_record(be->dev, event, stream, &test_error));
    MUST_OK(be->dev->ops->event_sync(be->dev, event, &test_error));
}

static uint64_t pattern_word(uint64_t seed, size_t idx) {
    return (seed + idx + 1) * 0x9E3779B97F4A7C15u ^ idx;
}

static void fill(const backend *be, tp_addr addr, size_t bytes, uint64_t seed) {
    uint64_t *words = malloc(bytes);
    MUST(words != NULL);
    for (size_t i = 0; i < bytes / sizeof *words; i++) words[i] = pattern_word(seed, i);
    const bool written = be->write(be, addr, words, bytes);
    free(words);
    MUST(written);
}

/* True if the range holds what fill with that seed wrote. */
static bool holds(const backend *be, tp_addr addr, size_t bytes, uint64_t seed) {
    uint64_t *words = calloc(1, bytes);
    MUST(words != NULL);
    bool same = be->read(be, addr, words, bytes);
    for (size_t i = 0; i < bytes / sizeof *words && same && !be->no_payload; i++) {
        same = words[i] == pattern_word(seed, i);
    }
    free(words);
    return same;
}

/* ---- addresses, frames, mappings --------------------------------------------------------- */

CONTRACT(caps_are_sane) {
    const tp_device_caps *caps = &be->dev->caps;
    EXPECT(caps->name != NULL);
    EXPECT(tp_is_power_of_two(caps->granularity_bytes));
    EXPECT(caps->total_bytes >= caps->granularity_bytes);
    EXPECT(caps->shared_frames);
    EXPECT(be->dev->copy_stream[0] != NULL);
    EXPECT(be->dev->copy_stream[1] != NULL);
    EXPECT(be->dev->copy_stream[0] != be->dev->copy_stream[1]);
    size_t free_bytes = 0, total_bytes = 0;
    EXPECT_OK(be->dev->ops->memory_info(be->dev, &free_bytes, &total_bytes, &test_error));
    EXPECT(free_bytes <= total_bytes);
    EXPECT(total_bytes > 0);
}

CONTRACT(reserved_ranges_are_whole_and_apart) {
    enum { COUNT = 8 };
    const size_t granularity = be->dev->caps.granularity_bytes;
    tp_addr ranges[COUNT];
    for (size_t i = 0; i < COUNT; i++) {
        ranges[i] = range_open(be, (i + 1) * granularity);
        EXPECT(ranges[i] != 0);
        EXPECT_EQ(ranges[i] % granularity, 0);
        for (size_t k = 0; k < i; k++) {
            EXPECT(ranges[i] + (i + 1) * granularity <= ranges[k] ||
                   ranges[k] + (k + 1) * granularity <= ranges[i]);
        }
    }
    /* Addresses cost no memory: far more than the device has can be reserved. */
    const size_t wide = tp_round_up(4 * be->dev->caps.total_bytes, granularity);
    const tp_addr addr = range_open(be, wide);
    range_close(be, addr, wide);
    for (size_t i = 0; i < COUNT; i++) range_close(be, ranges[i], (i + 1) * granularity);
}

CONTRACT(frame_keeps_its_bytes_while_it_is_mapped_nowhere) {
    const size_t unit = be->unit;
    const tp_addr base = range_open(be, 2 * unit);
    for (int kind = 0; kind < 2; kind++) {
        const tp_handle frame = frame_open(be, (tp_frame_kind)kind, unit);
        map(be, base, unit, frame);
        fill(be, base, unit, 11);
        EXPECT(holds(be, base, unit, 11));
        unmap(be, base, unit);
        map(be, base + unit, unit, frame);
        EXPECT(holds(be, base + unit, unit, 11));
        unmap(be, base + unit, unit);
        frame_close(be, (tp_frame_kind)kind, frame, unit);
    }
    range_close(be, base, 2 * unit);
}

CONTRACT(one_frame_at_two_addresses_is_the_same_memory) {
    const size_t unit = be->unit;
    const tp_addr base = range_open(be, 2 * unit);
    for (int kind = 0; kind < 2; kind++) {
        const tp_handle frame = frame_open(be, (tp_frame_kind)kind, unit);
        map(be, base, unit, frame);
        map(be, base + unit, unit, frame);
        fill(be, base, unit, 21);
        EXPECT(holds(be, base + unit, unit, 21));
        fill(be, base + unit, unit, 22);
        EXPECT(holds(be, base, unit, 22));
        unmap(be, base, unit);
        EXPECT(holds(be, base + unit, unit, 22));
        unmap(be, base + unit, unit);
        frame_close(be, (tp_frame_kind)kind, frame, unit);
    }
    range_close(be, base, 2 * unit);
}

/* An eviction and a return, as the pager does them: the address stays, the frame behind it
 * changes. */
CONTRACT(host_frame_takes_the_address_of_a_device_frame) {
    const size_t unit = be->unit;
    const tp_addr tensor = range_open(be, 3 * unit);
    const tp_addr host_window = tensor + unit, device_window = tensor + 2 * unit;
    const tp_handle device = frame_open(be, TP_FRAME_DEVICE, unit);
    const tp_handle host = frame_open(be, TP_FRAME_HOST, unit);
    const tp_event event = event_open(be);
    map(be, tensor, unit, device);
    map(be, host_window, unit, host);
    map(be, device_window, unit, device);
    fill(be, tensor, unit, 31);

    copy(be, TP_COPY_TO_HOST, host_window, tensor, unit);
    finish(be, be->dev->copy_stream[TP_COPY_TO_HOST], event);
    unmap(be, tensor, unit);
    map(be, tensor, unit, host);
    EXPECT(holds(be, tensor, unit, 31));
    fill(be, tensor, unit, 32);
    EXPECT(holds(be, host_window, unit, 32));
    EXPECT(holds(be, device_window, unit, 31));

    copy(be, TP_COPY_TO_DEVICE, device_window, tensor, unit);
    finish(be, be->dev->copy_stream[TP_COPY_TO_DEVICE], event);
    unmap(be, tensor, unit);
    map(be, tensor, unit, device);
    EXPECT(holds(be, tensor, unit, 32));

    be->dev->ops->event_destroy(be->dev, event);
    for (size_t i = 0; i < 3; i++) unmap(be, tensor + i * unit, unit);
    frame_close(be, TP_FRAME_DEVICE, device, unit);
    frame_close(be, TP_FRAME_HOST, host, unit);
    range_close(be, tensor, 3 * unit);
}

CONTRACT(failed_calls_change_nothing) {
    const tp_device_ops *ops = be->dev->ops;
    const size_t unit = be->unit;
    const tp_addr base = range_open(be, 2 * unit);
    const tp_handle kept = frame_open(be, TP_FRAME_DEVICE, unit);
    const tp_handle other = frame_open(be, TP_FRAME_DEVICE, unit);
    map(be, base, unit, kept);
    fill(be, base, unit, 41);

    tp_handle untouched = 77;
    const size_t too_big =
        tp_round_up(2 * be->dev->caps.total_bytes, be->dev->caps.granularity_bytes);
    EXPECT_STATUS(ops->frame_create(be->dev, TP_FRAME_DEVICE, too_big, &untouched, &test_error),
                  TP_OUT_OF_MEMORY);
    EXPECT_EQ(untouched, 77);
    EXPECT(test_error.message[0] != '\0');
    EXPECT(ops->map(be->dev, base, unit, other, NULL) != TP_OK);
    EXPECT(holds(be, base, unit, 41));
    /* The refused frame and the free half of the range are as usable as before. */
    map(be, base + unit, unit, other);
    fill(be, base + unit, unit, 42);
    EXPECT(holds(be, base, unit, 41));
    EXPECT(holds(be, base + unit, unit, 42));

    unmap(be, base, unit);
    unmap(be, base + unit, unit);
    frame_close(be, TP_FRAME_DEVICE, kept, unit);
    frame_close(be, TP_FRAME_DEVICE, other, unit);
    range_close(be, base, 2 * unit);
}

CONTRACT(device_memory_comes_back) {
    size_t before = 0, during = 0, after = 0, total = 0;
    const size_t granularity = be->dev->caps.granularity_bytes;
    MUST_OK(be->dev->ops->memory_info(be->dev, &before, &total, &test_error));
    const size_t bytes = tp_min_size(256 * TP_MIB, before / 4 / granularity * granularity);
    const tp_addr addr = range_open(be, bytes);
    for (int round = 0; round < 5; round++) {
        const tp_handle frame = frame_open(be, TP_FRAME_DEVICE, bytes);
        map(be, addr, bytes, frame);
        fill(be, addr, be->unit, 50);
        MUST_OK(be->dev->ops->memory_info(be->dev, &during, &total, &test_error));
        EXPECT(during + bytes <= before);
        unmap(be, addr, bytes);
        frame_close(be, TP_FRAME_DEVICE, frame, bytes);
        MUST_OK(be->dev->ops->memory_info(be->dev, &after, &total, &test_error));
        /* The driver may keep some memory of its own, for page tables; not a frame's worth. */
        EXPECT(after + bytes / 2 >= before);
    }
    range_close(be, addr, bytes);
}

/* ---- copies ------------------------------------------------------------------------------ */

/* Two device frames and two host frames of `bytes`, each mapped. */
typedef struct quad {
    size_t bytes;
    tp_addr base, device[2], host[2];
    tp_handle frames[4];
} quad;

static quad quad_open(const backend *be, size_t bytes) {
    quad q = {.bytes = bytes, .base = range_open(be, 4 * bytes)};
    for (size_t i = 0; i < 4; i++) {
        q.frames[i] = frame_open(be, i < 2 ? TP_FRAME_DEVICE : TP_FRAME_HOST, bytes);
        map(be, q.base + i * bytes, bytes, q.frames[i]);
    }
    for (size_t i = 0; i < 2; i++) {
        q.device[i] = q.base + i * bytes;
        q.host[i] = q.base + (i + 2) * bytes;
    }
    return q;
}

static void quad_close(const backend *be, const quad *q) {
    for (size_t i = 0; i < 4; i++) {
        unmap(be, q->base + i * q->bytes, q->bytes);
        frame_close(be, i < 2 ? TP_FRAME_DEVICE : TP_FRAME_HOST, q->frames[i], q->bytes);
    }
    range_close(be, q->base, 4 * q->bytes);
}

CONTRACT(copies_both_ways_at_once_arrive) {
    enum { PIECES = 8 };
    const quad q = quad_open(be, be->unit);
    const tp_event out = event_open(be), in = event_open(be);
    fill(be, q.device[0], q.bytes, 61);
    fill(be, q.host[1], q.bytes, 62);
    const size_t piece = q.bytes / PIECES;
    for (size_t i = 0; i < PIECES; i++) {
        copy(be, TP_COPY_TO_HOST, q.host[0] + i * piece, q.device[0] + i * piece, piece);
        copy(be, TP_COPY_TO_DEVICE, q.device[1] + i * piece, q.host[1] + i * piece, piece);
    }
    MUST_OK(be->dev->ops->event_record(be->dev, out, be->dev->copy_stream[TP_COPY_TO_HOST],
                                       &test_error));
    MUST_OK(be->dev->ops->event_record(be->dev, in, be->dev->copy_stream[TP_COPY_TO_DEVICE],
                                       &test_error));
    MUST_OK(be->dev->ops->event_sync(be->dev, in, &test_error));
    MUST_OK(be->dev->ops->event_sync(be->dev, out, &test_error));
    EXPECT(holds(be, q.host[0], q.bytes, 61));
    EXPECT(holds(be, q.device[1], q.bytes, 62));
    be->dev->ops->event_destroy(be->dev, out);
    be->dev->ops->event_destroy(be->dev, in);
    quad_close(be, &q);
}

CONTRACT(copy_of_a_part_touches_only_that_part) {
    const quad q = quad_open(be, be->unit);
    const tp_event event = event_open(be);
    const size_t begin = 4096 + 64, bytes = 3 * 4096 + 8;
    fill(be, q.device[0], q.bytes, 71);
    fill(be, q.host[0], q.bytes, 72);
    uint64_t word = 0;
    copy(be, TP_COPY_TO_HOST, q.host[0] + begin, q.device[0] + begin, bytes);
    finish(be, be->dev->copy_stream[TP_COPY_TO_HOST], event);
    const size_t places[] = {begin - 8, begin, begin + bytes - 8, begin + bytes};
    for (size_t i = 0; i < 4; i++) {
        const uint64_t seed = i == 1 || i == 2 ? 71 : 72;
        MUST(be->read(be, q.host[0] + places[i], &word, sizeof word));
        EXPECT(be->no_payload || word == pattern_word(seed, places[i] / sizeof word));
    }
    be->dev->ops->event_destroy(be->dev, event);
    quad_close(be, &q);
}

/* ---- events and streams ------------------------------------------------------------------ */

CONTRACT(new_event_is_complete) {
    const tp_event event = event_open(be);
    EXPECT(event_done(be, event));
    EXPECT_OK(be->dev->ops->event_sync(be->dev, event, &test_error));
    EXPECT_OK(be->dev->ops->stream_wait(be->dev, be->dev->copy_stream[0], event, &test_error));
    EXPECT(event_done(be, event));
    be->dev->ops->event_destroy(be->dev, event);
}

CONTRACT(polling_an_event_ends) {
    const quad q = quad_open(be, be->unit);
    const tp_event event = event_open(be);
    fill(be, q.device[0], q.bytes, 81);
    copy(be, TP_COPY_TO_HOST, q.host[0], q.device[0], q.bytes);
    MUST_OK(be->dev->ops->event_record(be->dev, event, be->dev->copy_stream[TP_COPY_TO_HOST],
                                       &test_error));
    while (!event_done(be, event)) {}
    EXPECT(event_done(be, event));
    EXPECT(holds(be, q.host[0], q.bytes, 81));
    be->dev->ops->event_destroy(be->dev, event);
    quad_close(be, &q);
}

CONTRACT(timed_events_tell_the_time_between_them) {
    const quad q = quad_open(be, be->unit);
    const tp_device_ops *ops = be->dev->ops;
    const tp_stream stream = be->dev->copy_stream[TP_COPY_TO_HOST];
    tp_event from = NULL, to = NULL;
    MUST_OK(ops->event_create_timed(be->dev, &from, &test_error));
    MUST_OK(ops->event_create_timed(be->dev, &to, &test_error));
    fill(be, q.device[0], q.bytes, 82);
    MUST_OK(ops->event_record(be->dev, from, stream, &test_error));
    copy(be, TP_COPY_TO_HOST, q.host[0], q.device[0], q.bytes);
    MUST_OK(ops->event_record(be->dev, to, stream, &test_error));
    MUST_OK(ops->event_sync(be->dev, to, &test_error));
    uint64_t ns = 0;
    EXPECT_OK(ops->event_elapsed(be->dev, from, to, &ns, &test_error));
    EXPECT(ns < 1000000000);
    const bool takes_time =
        be->dev->caps.virtual_clock || strcmp(be->dev->caps.name, "cuda") == 0;
    EXPECT(ns > 0 || !takes_time);
    ops->event_destroy(be->dev, from);
    ops->event_destroy(be->dev, to);
    quad_close(be, &q);
}

/* device 0 -> host 0 -> device 1 -> host 1, each on the stream of its direction. */
CONTRACT(waits_order_copies_across_streams) {
    const quad q = quad_open(be, be->unit);
    const tp_stream out = be->dev->copy_stream[TP_COPY_TO_HOST];
    const tp_stream in = be->dev->copy_stream[TP_COPY_TO_DEVICE];
    const tp_event event = event_open(be);
    for (uint64_t round = 0; round < 4; round++) {
        fill(be, q.device[0], q.bytes, 90 + round);
        copy(be, TP_COPY_TO_HOST, q.host[0], q.device[0], q.bytes);
        order(be, out, in, event);
        copy(be, TP_COPY_TO_DEVICE, q.device[1], q.host[0], q.bytes);
        order(be, in, out, event);
        copy(be, TP_COPY_TO_HOST, q.host[1], q.device[1], q.bytes);
        finish(be, out, event);
        EXPECT(holds(be, q.host[1], q.bytes, 90 + round));
    }
    be->dev->ops->event_destroy(be->dev, event);
    quad_close(be, &q);
}

/* The same through a stream of the program's own, and through the default stream. */
CONTRACT(waits_pass_through_other_streams) {
    const quad q = quad_open(be, be->unit);
    tp_stream own = NULL;
    MUST_OK(be->stream_create(be, &own));
    const tp_stream middle[2] = {own, NULL};
    const tp_event event = event_open(be);
    for (uint64_t i = 0; i < 2; i++) {
        fill(be, q.device[0], q.bytes, 100 + i);
        copy(be, TP_COPY_TO_HOST, q.host[0], q.device[0], q.bytes);
        order(be, be->dev->copy_stream[TP_COPY_TO_HOST], middle[i], event);
        order(be, middle[i], be->dev->copy_stream[TP_COPY_TO_DEVICE], event);
        copy(be, TP_COPY_TO_DEVICE, q.device[1], q.host[0], q.bytes);
        finish(be, be->dev->copy_stream[TP_COPY_TO_DEVICE], event);
        EXPECT(holds(be, q.device[1], q.bytes, 100 + i));
    }
    be->dev->ops->event_destroy(be->dev, event);
    quad_close(be, &q);
}

CONTRACT(recording_again_replaces_what_an_event_stands_for) {
    const quad q = quad_open(be, be->unit);
    const tp_stream out = be->dev->copy_stream[TP_COPY_TO_HOST];
    const tp_event event = event_open(be);
    fill(be, q.device[0], q.bytes, 111);
    fill(be, q.device[1], q.bytes, 112);
    copy(be, TP_COPY_TO_HOST, q.host[0], q.device[0], q.bytes);
    MUST_OK(be->dev->ops->event_record(be->dev, event, out, &test_error));
    copy(be, TP_COPY_TO_HOST, q.host[1], q.device[1], q.bytes);
    MUST_OK(be->dev->ops->event_record(be->dev, event, out, &test_error));
    MUST_OK(be->dev->ops->event_sync(be->dev, event, &test_error));
    EXPECT(holds(be, q.host[0], q.bytes, 111));
    EXPECT(holds(be, q.host[1], q.bytes, 112));
    be->dev->ops->event_destroy(be->dev, event);
    quad_close(be, &q);
}

CONTRACT(context_marker_covers_every_stream) {
    if (!be->dev->caps.context_marker) SKIP("no context marker here");
    const quad q = quad_open(be, be->unit);
    const tp_event marker = event_open(be);
    for (uint64_t round = 0; round < 4; round++) {
        fill(be, q.device[0], q.bytes, 120 + round);
        fill(be, q.host[1], q.bytes, 130 + round);
        copy(be, TP_COPY_TO_HOST, q.host[0], q.device[0], q.bytes);
        copy(be, TP_COPY_TO_DEVICE, q.device[1], q.host[1], q.bytes);
        MUST_OK(be->dev->ops->event_record_context(be->dev, marker, &test_error));
        MUST_OK(be->dev->ops->event_sync(be->dev, marker, &test_error));
        EXPECT(holds(be, q.host[0], q.bytes, 120 + round));
        EXPECT(holds(be, q.device[1], q.bytes, 130 + round));
    }
    be->dev->ops->event_destroy(be->dev, marker);
    quad_close(be, &q);
}

CONTRACT(stream_that_is_not_captured_says_so) {
    tp_stream own = NULL;
    MUST_OK(be->stream_create(be, &own));
    const tp_stream streams[] = {NULL, own, be->dev->copy_stream[0], be->dev->copy_stream[1]};
    for (size_t i = 0; i < 4; i++) {
        bool capturing = true;
        MUST_OK(be->dev->ops->stream_capturing(be->dev, streams[i], &capturing, &test_error));
        EXPECT(!capturing);
    }
}

/* ---- threads ----------------------------------------------------------------------------- */

enum { THREAD_COUNT = 4 };

typedef struct worker {
    const backend *be;
    uint64_t seed;
    unsigned rounds;
    tp_addr base;
    const char *wrong; /* the first thing that was not as it should be */
    pthread_t thread;
} worker;

#define WORKER_EXPECT(cond)                                                                    \
    do {                                                                                       \
        if (w->wrong == NULL && !(cond)) w->wrong = #cond;                                     \
    } while (0)

/* Writes a word to a device frame, moves it to a host frame and back into another one. */
static void worker_round(worker *w, tp_event event, uint64_t value) {
    const backend *be = w->be;
    tp_device *dev = be->dev;
    const tp_device_ops *ops = dev->ops;
    const size_t unit = be->unit;
    const tp_frame_kind kinds[3] = {TP_FRAME_DEVICE, TP_FRAME_HOST, TP_FRAME_DEVICE};
    tp_handle frames[3] = {0, 0, 0};
    for (size_t i = 0; i < 3; i++) {
        WORKER_EXPECT(ops->frame_create(dev, kinds[i], unit, &frames[i], NULL) == TP_OK);
        WORKER_EXPECT(ops->map(dev, w->base + i * unit, unit, frames[i], NULL) == TP_OK);
    }
    uint64_t word = value;
    WORKER_EXPECT(be->write(be, w->base + unit - sizeof word, &word, sizeof word));
    WORKER_EXPECT(ops->copy(dev, TP_COPY_TO_HOST, w->base + unit, w->base, unit, NULL) ==
                  TP_OK);
    WORKER_EXPECT(ops->event_record(dev, event, dev->copy_stream[TP_COPY_TO_HOST], NULL) ==
                  TP_OK);
    WORKER_EXPECT(ops->stream_wait(dev, dev->copy_stream[TP_COPY_TO_DEVICE], event, NULL) ==
                  TP_OK);
    WORKER_EXPECT(ops->copy(dev, TP_COPY_TO_DEVICE, w->base + 2 * unit, w->base + unit, unit,
                            NULL) == TP_OK);
    WORKER_EXPECT(ops->event_record(dev, event, dev->copy_stream[TP_COPY_TO_DEVICE], NULL) ==
                  TP_OK);
    WORKER_EXPECT(ops->event_sync(dev, event, NULL) == TP_OK);
    word = 0;
    WORKER_EXPECT(be->read(be, w->base + 3 * unit - sizeof word, &word, sizeof word));
    WORKER_EXPECT(be->no_payload || word == value);
    for (size_t i = 0; i < 3; i++) {
        WORKER_EXPECT(ops->unmap(dev, w->base + i * unit, unit, NULL) == TP_OK);
        ops->frame_destroy(dev, kinds[i], frames[i], unit);
    }
}

static void *worker_run(void *arg) {
    worker *w = arg;
    tp_device *dev = w->be->dev;
    tp_event event = NULL;
    WORKER_EXPECT(dev->ops->bind_thread(dev, NULL) == TP_OK);
    WORKER_EXPECT(dev->ops->event_create(dev, &event, NULL) == TP_OK);
    for (unsigned i = 0; i < w->rounds && w->wrong == NULL; i++) {
        worker_round(w, event, test_random(&w->seed));
    }
    if (event != NULL) dev->ops->event_destroy(dev, event);
    return NULL;
}

CONTRACT(threads_use_the_device_side_by_side) {
    if (!be->dev->caps.host_frames) SKIP("no host frames here");
    worker workers[THREAD_COUNT];
    for (int i = 0; i < THREAD_COUNT; i++) {
        workers[i] = (worker){.be = be,
                              .seed = test_seed() + (uint64_t)i,
                              .rounds = test_rounds(20),
                              .base = range_open(be, 3 * be->unit)};
        MUST(pthread_create(&workers[i].thread, NULL, worker_run, &workers[i]) == 0);
    }
    for (int i = 0; i < THREAD_COUNT; i++) {
        (void)pthread_join(workers[i].thread, NULL);
        if (workers[i].wrong != NULL) test_fail(__FILE__, __LINE__, "%s", workers[i].wrong);
        range_close(be, workers[i].base, 3 * be->unit);
    }
}

/* ---- access ------------------------------------------------------------------------------ */

CONTRACT(read_only_mapping_is_read_and_its_frame_is_written_elsewhere) {
    const size_t unit = be->unit;
    const tp_addr base = range_open(be, 2 * unit);
    const tp_handle frame = frame_open(be, TP_FRAME_DEVICE, unit);
    map(be, base, unit, frame);
    map(be, base + unit, unit, frame);
    MUST_OK(be->dev->ops->protect(be->dev, base, unit, true, &test_error));
    fill(be, base + unit, unit, 91); /* another mapping of the frame is as it was */
    EXPECT(holds(be, base, unit, 91));
    MUST_OK(be->dev->ops->protect(be->dev, base, unit, false, &test_error));
    fill(be, base, unit, 92);
    EXPECT(holds(be, base + unit, unit, 92));
    unmap(be, base, unit);
    unmap(be, base + unit, unit);
    frame_close(be, TP_FRAME_DEVICE, frame, unit);
    range_close(be, base, 2 * unit);
}

/* ---- fingerprints ------------------------------------------------------------------------ */

static tp_fingerprint fingerprint(const backend *be, tp_stream stream, tp_addr addr,
                                  size_t bytes, uint32_t place) {
    const tp_event event = event_open(be);
    MUST_OK(be->dev->ops->fingerprint(be->dev, stream, addr, bytes, place, &test_error));
    finish(be, stream, event);
    be->dev->ops->event_destroy(be->dev, event);
    return be->dev->ops->fingerprint_read(be->dev, place);
}

/* The fingerprint of base/fingerprint.h, of what the host reads at that address. */
static tp_fingerprint wanted(const backend *be, tp_addr addr, size_t bytes) {
    unsigned char *copied = malloc(bytes);
    MUST(copied != NULL && be->read(be, addr, copied, bytes));
    const tp_fingerprint found = tp_fingerprint_of(copied, bytes);
    free(copied);
    return found;
}

CONTRACT(fingerprint_is_that_of_the_bytes) {
    if (!be->dev->caps.fingerprints) SKIP(be->dev->caps.no_fingerprints);
    if (be->no_payload) return;
    const size_t granule = be->dev->caps.granularity_bytes;
    for (size_t granules = 1; granules <= 5; granules += 2) {
        const size_t bytes = granules * granule;
        const tp_addr addr = range_open(be, bytes);
        const tp_handle frame = frame_open(be, TP_FRAME_DEVICE, bytes);
        map(be, addr, bytes, frame);
        fill(be, addr, bytes, 71 + granules);
        EXPECT(holds(be, addr, bytes, 71 + granules)); /* the fill has ended */
        const tp_fingerprint was = fingerprint(be, be->dev->check_stream, addr, bytes, 0);
        EXPECT(tp_fingerprint_same(was, wanted(be, addr, bytes)));
        EXPECT(tp_fingerprint_same(was, fingerprint(be, be->dev->copy_stream[TP_COPY_TO_HOST],
                                                    addr, bytes, TP_ALL_PLACES - 1)));
        const unsigned char byte = 0xA5;
        MUST(be->write(be, addr + bytes - 1, &byte, 1));
        EXPECT(
            !tp_fingerprint_same(was, fingerprint(be, be->dev->check_stream, addr, bytes, 0)));
        unmap(be, addr, bytes);
        frame_close(be, TP_FRAME_DEVICE, frame, bytes);
        range_close(be, addr, bytes);
    }
}

CONTRACT(fingerprints_are_computed_in_stream_order) {
    if (!be->dev->caps.host_frames) SKIP("no host frames here");
    if (!be->dev->caps.fingerprints) SKIP(be->dev->caps.no_fingerprints);
    const quad q = quad_open(be, be->unit);
    const tp_stream stream = be->dev->copy_stream[TP_COPY_TO_DEVICE];
    const tp_event event = event_open(be);
    fill(be, q.device[0], q.bytes, 81);
    fill(be, q.host[0], q.bytes, 82);
    const tp_fingerprint before = wanted(be, q.device[0], q.bytes);
    const tp_fingerprint after = wanted(be, q.host[0], q.bytes);
    const tp_device_ops *ops = be->dev->ops;
    MUST_OK(ops->fingerprint(be->dev, stream, q.device[0], q.bytes, 2, &test_error));
    copy(be, TP_COPY_TO_DEVICE, q.device[0], q.host[0], q.bytes);
    MUST_OK(ops->fingerprint(be->dev, stream, q.device[0], q.bytes, 3, &test_error));
    finish(be, stream, event);
    if (!be->no_payload) {
        EXPECT(tp_fingerprint_same(ops->fingerprint_read(be->dev, 2), before));
        EXPECT(tp_fingerprint_same(ops->fingerprint_read(be->dev, 3), after));
    }
    EXPECT(ops->fingerprint(be->dev, stream, q.device[0], q.bytes, TP_ALL_PLACES, NULL) !=
           TP_OK);
    be->dev->ops->event_destroy(be->dev, event);
    quad_close(be, &q);
}

/* ---- fault_device itself ----------------------------------------------------------------- */

static tp_status actions(const backend *be, tp_addr base, tp_error *error) {
    tp_handle frame = 0;
    const tp_device_ops *ops = be->dev->ops;
    tp_status status = ops->frame_create(be->dev, TP_FRAME_DEVICE, be->unit, &frame, error);
    if (status != TP_OK) return status;
    status = ops->map(be->dev, base, be->unit, frame, error);
    if (status == TP_OK) {
        status = ops->unmap(be->dev, base, be->unit, error);
        if (status != TP_OK) MUST_OK(ops->unmap(be->dev, base, be->unit, &test_error));
    }
    ops->frame_destroy(be->dev, TP_FRAME_DEVICE, frame, be->unit);
    return status;
}

TEST(fault_device_fails_each_call_in_turn) {
    static const tp_status wanted[] = {TP_OUT_OF_MEMORY, TP_DEVICE_ERROR, TP_DEVICE_ERROR,
                                       TP_OK};
    const backend be = sim_backend(0, true);
    const tp_addr base = range_open(&be, be.unit);
    uint64_t nth = 1;
    for (;; nth++) {
        tp_error error = {0};
        const fault_plan plan = {.nth = nth};
        fault_device_arm(be.dev, &plan);
        const tp_status status = actions(&be, base, &error);
        fault_device_disarm(be.dev);
        EXPECT_EQ(status, wanted[nth - 1]);
        if (!fault_device_fired(be.dev)) break;
        EXPECT(strstr(error.message, fault_call_name(fault_device_fired_call(be.dev))) != NULL);
    }
    EXPECT_EQ(nth, 4);
    EXPECT_EQ(fault_device_calls(be.dev, FAULT_MAP), 3);
    range_close(&be, base, be.unit);
    sim_backend_close(&be);
}

TEST(fault_device_counts_only_the_calls_asked_for) {
    const backend be = sim_backend(0, true);
    const tp_addr base = range_open(&be, be.unit);
    const fault_plan plan = {.nth = 2, .calls = 1u << FAULT_MAP, .status = TP_NO_HOST_MEMORY};
    fault_device_arm(be.dev, &plan);
    EXPECT_STATUS(actions(&be, base, &test_error), TP_OK);
    EXPECT_STATUS(actions(&be, base, &test_error), TP_NO_HOST_MEMORY);
    EXPECT_EQ(fault_device_fired_call(be.dev), FAULT_MAP);
    EXPECT_STATUS(actions(&be, base, &test_error), TP_OK);
    const fault_plan lasting = {
        .nth = 1, .calls = 1u << FAULT_DEVICE_FRAME, .persistent = true};
    fault_device_arm(be.dev, &lasting);
    EXPECT_STATUS(actions(&be, base, &test_error), TP_OUT_OF_MEMORY);
    EXPECT_STATUS(actions(&be, base, &test_error), TP_OUT_OF_MEMORY);
    fault_device_disarm(be.dev);
    EXPECT_STATUS(actions(&be, base, &test_error), TP_OK);
    range_close(&be, base, be.unit);
    sim_backend_close(&be);
}
