#define _POSIX_C_SOURCE 200809L

#include "rig.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "harness.h"

enum { HOLD_ITEMS = 64, STRIDE = 1024 };

static void *step_while_waiting(void *ctx) {
    rig_step(ctx, 4);
    return NULL;
}

void rig_open(rig *r, const rig_options *options) {
    memset(r, 0, sizeof *r);
    const tp_sim_options sim = {
        .device_bytes = options->device_bytes != 0 ? options->device_bytes : 16 * TP_MIB,
        .granularity_bytes = RIG_GRANULE,
        .seed = 11,
        .poison = true,
        .manual = options->manual,
        .no_context_marker = options->no_context_marker};
    MUST_OK(tp_sim_device_create(&sim, &r->sim, &test_error));
    MUST_OK(fault_device_create(r->sim, &r->dev, &test_error));
    tp_config config = {.device_budget_bytes =
                            options->budget_bytes != 0 ? options->budget_bytes : 512 * TP_KIB,
                        .host_budget_bytes =
                            options->host_bytes != 0 ? options->host_bytes : TP_NO_LIMIT,
                        .large_min_bytes = options->large_min_bytes,
                        .extent_max_bytes = RIG_EXTENT,
                        .segment_bytes = 64 * TP_MIB,
                        .offload = !options->no_offload,
                        .strict = options->strict,
                        .serve_small = options->serve_small,
                        .rules_off = test_rules_off()};
    if (options->manual) config.hooks = (tp_hooks){.ctx = r, .wait_begin = step_while_waiting};
    if (options->hooks != NULL) config.hooks = *options->hooks;
    MUST_OK(tp_core_create(&config, r->dev, &r->core, &test_error));
    tp_core_set_planning(r->core, !options->no_plans);
    for (unsigned i = 0; i < RIG_STREAMS; i++) {
        MUST_OK(tp_sim_stream_create(r->sim, &r->streams[i], &test_error));
    }
}

void rig_close(rig *r) {
    rig_drain(r);
    tp_core_destroy(r->core);
}

void rig_step(rig *r, unsigned count) {
    while (count-- > 0 && tp_sim_step(r->sim)) continue;
}

void rig_drain(rig *r) {
    while (tp_sim_step(r->sim)) continue;
}

static void idle(tp_device *dev, void *arg) {
    (void)dev;
    (void)arg;
}

void rig_hold(rig *r, unsigned stream) {
    tp_event event = NULL;
    for (int i = 0; i < HOLD_ITEMS; i++) {
        EXPECT_OK(tp_sim_launch(r->sim, r->streams[RIG_GATE], idle, NULL, 1, &test_error));
    }
    MUST_OK(r->sim->ops->event_create(r->sim, &event, &test_error));
    EXPECT_OK(r->sim->ops->event_record(r->sim, event, r->streams[RIG_GATE], &test_error));
    EXPECT_OK(r->sim->ops->stream_wait(r->sim, r->streams[stream], event, &test_error));
    r->sim->ops->event_destroy(r->sim, event);
}

tp_addr rig_alloc(rig *r, size_t bytes, unsigned stream) {
    tp_addr addr = 0;
    MUST_OK(tp_alloc(r->core, bytes, r->streams[stream], 0, &addr, NULL, &test_error));
    return addr;
}

typedef struct kernel {
    rig *r;
    tp_addr addr;
    size_t bytes;
    uint64_t value;
    bool write;
} kernel;

static void kernel_run(tp_device *dev, void *arg) {
    kernel *k = arg;
    for (size_t at = 0; at < k->bytes; at += STRIDE) {
        uint64_t word = k->value + at;
        const bool mapped = k->write ? tp_sim_write(dev, k->addr + at, &word, sizeof word)
                                     : tp_sim_read(dev, k->addr + at, &word, sizeof word);
        if (!mapped || word != k->value + at) atomic_fetch_add(&k->r->wrong, 1);
    }
    atomic_fetch_add(&k->r->ran, 1);
    free(k);
}

void rig_launch(rig *r, unsigned stream, tp_addr addr, size_t bytes, uint64_t value,
                bool write) {
    kernel *k = malloc(sizeof *k);
    if (k == NULL) abort();
    *k = (kernel){r, addr, bytes, value, write};
    MUST_OK(tp_sim_launch(r->sim, r->streams[stream], kernel_run, k, 1000, &test_error));
}

void rig_op(rig *r, unsigned stream, tp_addr addr, size_t bytes, uint64_t value, bool write) {
    const tp_access access = {addr, write};
    tp_op op = {0};
    tp_op_begin(r->core, &op, &access, 1, r->streams[stream]);
    rig_launch(r, stream, addr, bytes, value, write);
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
}

tp_addr rig_made(rig *r, size_t bytes, uint64_t value) {
    const tp_addr addr = rig_alloc(r, bytes, 0);
    rig_op(r, 0, addr, bytes, value, true);
    return addr;
}

tp_dropped *rig_gone_soon(rig *r, tp_addr addr, rig_let_go *how) {
    tp_dropped *dropped = NULL;
    for (int i = 0; i < 1000; i++) {
        const tp_status status = how(r, addr, &dropped);
        if (status == TP_OK) return dropped;
        MUST(status == TP_BUSY);
        (void)nanosleep(&(struct timespec){.tv_nsec = 1000000}, NULL);
    }
    MUST(!"the block stays");
    return NULL;
}

void rig_close_right(rig *r) {
    rig_drain(r);
    EXPECT_OK(tp_core_check(r->core, &test_error));
    EXPECT_EQ(r->wrong, 0);
    rig_close(r);
}

tp_stats rig_stats(rig *r) {
    tp_stats stats;
    tp_core_stats(r->core, &stats);
    return stats;
}

tp_block_info rig_info(rig *r, tp_addr addr) {
    tp_block_info info;
    MUST(tp_block_query(r->core, addr, &info));
    return info;
}

typedef struct bounded {
    void (*body)(void *arg);
    void *arg;
    atomic_bool done;
} bounded;

static void *bounded_run(void *ptr) {
    bounded *b = ptr;
    b->body(b->arg);
    atomic_store(&b->done, true);
    return NULL;
}

bool rig_returns(void (*body)(void *arg), void *arg, unsigned seconds) {
    bounded *b = calloc(1, sizeof *b); /* left behind with the thread */
    if (b == NULL) abort();
    b->body = body;
    b->arg = arg;
    pthread_t thread;
    MUST(pthread_create(&thread, NULL, bounded_run, b) == 0);
    const struct timespec moment = {0, 1000000};
    for (unsigned ms = 0; ms < seconds * 1000 && !atomic_load(&b->done); ms++) {
        (void)nanosleep(&moment, NULL);
    }
    if (!atomic_load(&b->done)) {
        (void)pthread_detach(thread);
        return false;
    }
    (void)pthread_join(thread, NULL);
    free(b);
    return true;
}

void rig_press(rig *r) {
    size_t budget = 0, host = 0;
    tp_core_get_budget(r->core, &budget, &host);
    tp_addr full[2];
    for (unsigned i = 0; i < 2; i++) {
        full[i] = rig_alloc(r, budget, 0);
        rig_op(r, 0, full[i], budget, i, true);
    }
    rig_drain(r);
    EXPECT(rig_stats(r).memory_stalls.count + rig_stats(r).evictions.count > 0);
    for (unsigned i = 0; i < 2; i++) tp_free(r->core, full[i]);
    tp_core_empty_cache(r->core);
    atomic_store(&r->ran, 0);
}
