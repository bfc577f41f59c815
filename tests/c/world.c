#include "world.h"

#include <stdlib.h>
#include <string.h>

#include "base/bytes.h"
#include "harness.h"

/* ---- the nasty device: kernels run in the gap between two mappings ---- */

static tp_status (*plain_unmap)(tp_device *dev, tp_addr addr, size_t bytes, tp_error *error);

static tp_status gap_unmap(tp_device *dev, tp_addr addr, size_t bytes, tp_error *error) {
    const tp_status status = plain_unmap(dev, addr, bytes, error);
    for (int i = 0; i < 6 && status == TP_OK; i++) {
        if (!tp_sim_step(dev)) break;
    }
    return status;
}

/* ---- and copies that take their time: some wait behind idle work on their stream ---- */

static tp_status (*plain_copy)(tp_device *dev, tp_copy_dir dir, tp_addr dst, tp_addr src,
                               size_t bytes, tp_error *error);

static void idle(tp_device *dev, void *arg) {
    (void)dev;
    (void)arg;
}

static int slowness;

static tp_status slow_copy(tp_device *dev, tp_copy_dir dir, tp_addr dst, tp_addr src,
                           size_t bytes, tp_error *error) {
    const int idles = slowness != 0 ? slowness : (src >> 14) % 3 == 0 ? 12 : 0;
    for (int i = 0; i < idles; i++) {
        const tp_status status =
            tp_sim_launch(dev, dev->copy_stream[dir], idle, NULL, 1, error);
        if (status != TP_OK) return status;
    }
    return plain_copy(dev, dir, dst, src, bytes, error);
}

static tp_device_ops nasty_ops;

/* ---- kernels ---- */

enum { STRIDE = 2048 };

typedef struct kernel_operand {
    tp_addr addr;
    size_t bytes;
    uint64_t value;
    bool write;
} kernel_operand;

typedef struct kernel {
    world *w;
    unsigned count;
    kernel_operand operands[4];
} kernel;

static void kernel_check(world *w, tp_device *dev, const kernel_operand *op) {
    for (size_t at = 0; at < op->bytes; at += STRIDE) {
        uint64_t got = 0;
        if (!tp_sim_read(dev, op->addr + at, &got, sizeof got)) {
            atomic_fetch_add(&w->unmapped, 1);
        } else if (got != (op->value ^ at)) {
            atomic_fetch_add(&w->wrong, 1);
        }
    }
}

static void kernel_fill(world *w, tp_device *dev, const kernel_operand *op) {
    for (size_t at = 0; at < op->bytes; at += STRIDE) {
        const uint64_t put = op->value ^ at;
        if (!tp_sim_write(dev, op->addr + at, &put, sizeof put)) {
            atomic_fetch_add(&w->unmapped, 1);
        }
    }
}

static void kernel_run(tp_device *dev, void *arg) {
    kernel *k = arg;
    for (unsigned i = 0; i < k->count; i++) {
        if (k->operands[i].write) {
            kernel_fill(k->w, dev, &k->operands[i]);
        } else {
            kernel_check(k->w, dev, &k->operands[i]);
        }
    }
    atomic_fetch_sub(&k->w->pending, 1);
    free(k);
}

static kernel *kernel_new(world *w) {
    kernel *k = calloc(1, sizeof *k);
    if (k == NULL) abort();
    k->w = w;
    return k;
}

static void kernel_add(kernel *k, const world_tensor *t, uint64_t value, bool write) {
    k->operands[k->count++] = (kernel_operand){t->addr, t->bytes, value, write};
}

/* A missing rule may break the device itself, which answers nothing but errors from then on. */
static bool works(world *w, tp_status status) {
    if (status == TP_OK) return true;
    if (w->options.rules_off != 0) {
        atomic_fetch_add(&w->wrong, 1);
    } else {
        (void)test_expect_status(__FILE__, __LINE__, "the device", status, TP_OK);
    }
    return false;
}

static void kernel_launch(world *w, unsigned stream, kernel *k) {
    atomic_fetch_add(&w->pending, 1);
    if (works(w, tp_sim_launch(w->dev, w->streams[stream], kernel_run, k, 1000, &test_error)))
        return;
    atomic_fetch_sub(&w->pending, 1);
    free(k);
}

/* ---- life ---- */

/* A device without context-wide markers waits for the streams it has seen: all of them, as PyTorch's
 * are known. */
static void announce_streams(world *w) {
    for (unsigned i = 0; i < WORLD_STREAMS; i++) {
        tp_addr addr = 0;
        MUST_OK(tp_alloc(w->core, 1, w->streams[i], 0, &addr, NULL, &test_error));
        tp_free(w->core, addr);
    }
    tp_core_empty_cache(w->core);
    tp_core_reset_stats(w->core, true, true);
}

static void open_streams(world *w) {
    for (unsigned i = 0; i < WORLD_STREAMS; i++) {
        MUST_OK(tp_sim_stream_create(w->dev, &w->streams[i], &test_error));
    }
    for (unsigned i = 0; i < WORLD_TENSORS; i++) {
        for (unsigned s = 0; s < WORLD_STREAMS; s++) {
            MUST_OK(w->dev->ops->event_create(w->dev, &w->tensors[i].last[s], &test_error));
        }
    }
}

void world_open(world *w, const world_options *options) {
    memset(w, 0, sizeof *w);
    w->options = *options;
    w->random = options->seed;
    slowness = options->copy_idles;
    w->next_value = 1;
    const tp_sim_options sim = {.device_bytes = 64 * TP_MIB,
                                .granularity_bytes = options->granularity_bytes,
                                .seed = options->seed,
                                .poison = true,
                                .no_context_marker = options->no_context_marker,
                                .no_fingerprints = options->no_fingerprints};
    MUST_OK(tp_sim_device_create(&sim, &w->dev, &test_error));
    if (!options->gentle) {
        plain_unmap = w->dev->ops->unmap;
        plain_copy = w->dev->ops->copy;
        nasty_ops = *w->dev->ops;
        nasty_ops.unmap = gap_unmap;
        nasty_ops.copy = slow_copy;
        w->dev->ops = &nasty_ops;
    }
    if (options->prepare != NULL) options->prepare(w->dev);
    const tp_config config = {.device_budget_bytes = options->budget_bytes,
                              .host_budget_bytes = options->host_bytes,
                              .extent_max_bytes = options->extent_bytes,
                              .segment_bytes = 256 * TP_MIB,
                              .offload = options->offload,
                              .strict = options->strict,
                              .readonly_clean = options->readonly_clean,
                              .rules_off = options->rules_off | test_rules_off()};
    MUST_OK(tp_core_create(&config, w->dev, &w->core, &test_error));
    open_streams(w);
    announce_streams(w);
}

void world_join(world *w, const world *host, uint64_t seed) {
    memset(w, 0, sizeof *w);
    w->options = host->options;
    w->dev = host->dev;
    w->core = host->core;
    w->random = seed;
    w->next_value = seed << 8;
    open_streams(w);
    if (!w->dev->caps.context_marker) announce_streams(w);
}

void world_leave(world *w) {
    world_drain(w);
    for (unsigned i = 0; i < WORLD_TENSORS; i++) {
        if (w->tensors[i].addr != 0) world_free(w, i);
        for (unsigned s = 0; s < WORLD_STREAMS; s++) {
            w->dev->ops->event_destroy(w->dev, w->tensors[i].last[s]);
        }
    }
}

void world_close(world *w) {
    world_leave(w);
    tp_core_destroy(w->core);
}

void world_drain(world *w) {
    while (atomic_load(&w->pending) > 0) (void)tp_sim_step(w->dev);
}

unsigned world_violations(world *w) {
    return atomic_load(&w->wrong) + atomic_load(&w->unmapped);
}

/* ---- actions ---- */

void world_idle(world *w, unsigned stream, int count) {
    for (int i = 0; i < count; i++) {
        (void)works(w, tp_sim_launch(w->dev, w->streams[stream], idle, NULL, 1, &test_error));
    }
}

static void note_use(world *w, world_tensor *t, unsigned stream) {
    t->used[stream] = true;
    const tp_device_ops *ops = w->dev->ops;
    (void)works(w, ops->event_record(w->dev, t->last[stream], w->streams[stream], &test_error));
}

static bool alloc(world *w, unsigned idx, size_t bytes, unsigned stream) {
    world_tensor *t = &w->tensors[idx];
    tp_addr addr = 0;
    if (tp_alloc(w->core, bytes, w->streams[stream], 0, &addr, NULL, NULL) != TP_OK)
        return false;
    t->addr = addr;
    t->bytes = bytes;
    memset(t->used, 0, sizeof t->used);
    note_use(w, t, stream);
    return true;
}

bool world_alloc(world *w, unsigned idx, size_t bytes, unsigned stream) {
    if (!alloc(w, idx, bytes, stream)) return false;
    world_op(w, stream, NULL, 0, (int)idx);
    return true;
}

static uint64_t new_value(world *w) { return (w->next_value++ << 20) * 0x9E3779B97F4A7C15u; }

bool world_alloc_blind(world *w, unsigned idx, size_t bytes, unsigned stream) {
    if (!alloc(w, idx, bytes, stream)) return false;
    world_tensor *t = &w->tensors[idx];
    t->value = new_value(w);
    kernel *k = kernel_new(w);
    kernel_add(k, t, t->value, true);
    kernel_launch(w, stream, k);
    note_use(w, t, stream);
    return true;
}

void world_free(world *w, unsigned idx) {
    world_tensor *t = &w->tensors[idx];
    for (unsigned s = 0; s < WORLD_STREAMS; s++) {
        if (t->used[s]) tp_record_stream(w->core, t->addr, w->streams[s]);
    }
    tp_free(w->core, t->addr);
    t->addr = 0;
}

/* What a well-formed program does before it uses a tensor on a stream. */
static void order(world *w, world_tensor *t, unsigned stream) {
    for (unsigned s = 0; s < WORLD_STREAMS; s++) {
        if (s == stream || !t->used[s]) continue;
        const tp_device_ops *ops = w->dev->ops;
        (void)works(w, ops->stream_wait(w->dev, w->streams[stream], t->last[s], &test_error));
    }
}

void world_op(world *w, unsigned stream, const int *reads, unsigned read_count, int target) {
    tp_access accesses[4];
    unsigned count = 0;
    kernel *k = kernel_new(w);
    for (unsigned i = 0; i < read_count; i++) {
        world_tensor *t = &w->tensors[reads[i]];
        order(w, t, stream);
        accesses[count++] = (tp_access){t->addr + 8, false};
        kernel_add(k, t, t->value, false);
    }
    if (target >= 0) {
        world_tensor *t = &w->tensors[target];
        order(w, t, stream);
        accesses[count++] = (tp_access){t->addr, true};
        t->value = new_value(w);
        kernel_add(k, t, t->value, true);
    }
    tp_op op = {0};
    tp_op_begin(w->core, &op, accesses, count, w->streams[stream]);
    /* A pinned operator takes its time before it launches; the pager is at work meanwhile. */
    for (uint64_t i = test_random_below(&w->random, 3); i > 0; i--) (void)tp_sim_step(w->dev);
    kernel_launch(w, stream, k);
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
    for (unsigned i = 0; i < read_count; i++) note_use(w, &w->tensors[reads[i]], stream);
    if (target >= 0) note_use(w, &w->tensors[target], stream);
}

void world_blind_read(world *w, unsigned stream, int read, bool region) {
    world_tensor *t = &w->tensors[read];
    tp_region around = {0};
    if (region) tp_region_begin(w->core, &around, NULL, 0, w->streams[stream]);
    order(w, t, stream);
    kernel *k = kernel_new(w);
    kernel_add(k, t, t->value, false);
    kernel_launch(w, stream, k);
    note_use(w, t, stream);
    if (region) tp_region_end(&around);
    tp_region_fini(&around);
}

void world_region(world *w, unsigned stream, int target, int made, size_t bytes) {
    world_tensor *t = &w->tensors[target];
    tp_region region = {0};
    const tp_access access = {t->addr, true};
    tp_region_begin(w->core, &region, &access, 1, w->streams[stream]);
    order(w, t, stream);
    kernel *first = kernel_new(w);
    kernel_add(first, t, t->value = new_value(w), true);
    kernel_launch(w, stream, first);
    note_use(w, t, stream);
    /* May wait for memory, with the gate open. */
    const bool born = made >= 0 && world_alloc_blind(w, (unsigned)made, bytes, stream);
    kernel *second = kernel_new(w);
    kernel_add(second, t, t->value, false);
    kernel_add(second, t, new_value(w), true);
    t->value = second->operands[1].value;
    if (born) kernel_add(second, &w->tensors[made], w->tensors[made].value, false);
    kernel_launch(w, stream, second);
    note_use(w, t, stream);
    if (born) note_use(w, &w->tensors[made], stream);
    tp_region_end(&region);
    tp_region_fini(&region);
}

void world_blind_write(world *w, unsigned stream, int target) {
    world_tensor *t = &w->tensors[target];
    order(w, t, stream);
    t->value = new_value(w);
    kernel *k = kernel_new(w);
    kernel_add(k, t, t->value, true);
    kernel_launch(w, stream, k);
    note_use(w, t, stream);
}

tp_stats world_stats(const world *w) {
    tp_stats stats;
    tp_core_stats(w->core, &stats);
    return stats;
}

static int pick(world *w, bool live) {
    const unsigned from = (unsigned)test_random_below(&w->random, WORLD_TENSORS);
    for (unsigned i = 0; i < WORLD_TENSORS; i++) {
        const unsigned idx = (from + i) % WORLD_TENSORS;
        if ((w->tensors[idx].addr != 0) == live) return (int)idx;
    }
    return -1;
}

static size_t random_bytes(world *w) {
    if (w->options.fixed_sizes) return 2 * w->options.extent_bytes;
    return 1 + (size_t)test_random_below(&w->random, 3 * w->options.extent_bytes);
}

/* Inside a region nothing is remapped; what is resident then stays so until its kernels are over.
 * (A blind writer at the very moment of a fill or an eviction is what remains.) */
static void act_blind_write(world *w, unsigned stream) {
    const int idx = pick(w, true);
    if (idx < 0) return;
    tp_region region = {0};
    tp_region_begin(w->core, &region, NULL, 0, w->streams[stream]);
    tp_block_info info;
    if (tp_block_query(w->core, w->tensors[idx].addr, &info) && info.host_count == 0) {
        world_blind_write(w, stream, idx);
    }
    tp_region_end(&region);
    tp_region_fini(&region);
}

static void act_op(world *w, unsigned stream) {
    int reads[3];
    const unsigned count = 1 + (unsigned)test_random_below(&w->random, 3);
    for (unsigned i = 0; i < count; i++) {
        reads[i] = pick(w, true);
        if (reads[i] < 0) return;
    }
    int target = test_random_below(&w->random, 2) == 0 ? -1 : pick(w, true);
    for (unsigned i = 0; i < count; i++) {
        if (target == reads[i]) target = -1;
    }
    world_op(w, stream, reads, count, target);
}

void world_act(world *w) {
    const unsigned stream = (unsigned)test_random_below(&w->random, WORLD_STREAMS);
    if (w->options.blind_writers && test_random_below(&w->random, 6) == 0) {
        act_blind_write(w, stream);
    }
    const uint64_t what = test_random_below(&w->random, 100);
    if (what < 20) {
        const int idx = pick(w, false);
        if (idx >= 0) (void)world_alloc(w, (unsigned)idx, random_bytes(w), stream);
    } else if (what < 34) {
        const int idx = pick(w, true);
        if (idx >= 0) world_free(w, (unsigned)idx);
    } else if (what < 84) {
        act_op(w, stream);
    } else if (what < 88) {
        const int idx = pick(w, true);
        /* In strict mode a read that nobody announced fails by design. */
        if (idx >= 0 && !w->options.strict) world_blind_read(w, stream, idx, true);
    } else if (what < 91) {
        const int idx = pick(w, true);
        if (idx >= 0 && !w->options.strict) {
            world_region(w, stream, idx, pick(w, false), random_bytes(w));
        }
    } else if (what < 94) {
        const int idx = pick(w, true);
        /* May be refused: the block is in use, or HOST is full. */
        if (idx >= 0 && tp_evict(w->core, w->tensors[idx].addr, NULL) != TP_OK) return;
    } else if (what < 95) {
        (void)tp_evict_all(w->core);
    } else if (what < 96) {
        tp_core_empty_cache(w->core);
    } else {
        for (int i = 0; i < 8; i++) (void)tp_sim_step(w->dev);
    }
}
