#include "bind/torch_entry.h"

#include <stdatomic.h>

#include "bind/cores.h"
#include "bind/oom_text.h"

static _Atomic(void (*)(const char *)) thrower_part;

void tp_torch_set_thrower(void (*thrower)(const char *text)) {
    atomic_store(&thrower_part, thrower);
}

static void fail(const char *text) {
    void (*thrower)(const char *) = atomic_load(&thrower_part);
    if (thrower != NULL) thrower(text);
}

static void fail_alloc(int device, const tp_oom *oom, const tp_error *error) {
    char text[TP_OOM_TEXT_BYTES];
    (void)tp_oom_text(text, sizeof text, device, oom, error);
    fail(text);
}

/* The core of the device, opened if it was not. NULL on failure. */
static tp_core *core_of(int device, tp_error *error) {
    if (device < 0 || device >= TP_SLOT_SIM) {
        (void)tp_error_set(error, TP_INVALID, "no CUDA device has the number %d", device);
        return NULL;
    }
    tp_core *core = tp_core_at(device);
    if (core != NULL) return core;
    const tp_config config = {.serve_small = true};
    const tp_status status = tp_bind_open_cuda(device, &config, error);
    /* BUSY: another thread has opened it meanwhile. */
    return status == TP_OK || status == TP_BUSY ? tp_core_at(device) : NULL;
}

void *tp_torch_malloc(ssize_t size, int device, void *stream) {
    if (size <= 0) return NULL;
    tp_oom oom = {.requested_bytes = (size_t)size};
    tp_error error = {0};
    tp_addr addr = 0;
    tp_core *core = core_of(device, &error);
    if (core == NULL ||
        tp_bind_alloc(core, (size_t)size, stream, &addr, &oom, &error) != TP_OK) {
        fail_alloc(device, &oom, &error);
        return NULL;
    }
    return (void *)(uintptr_t)addr;
}

void tp_torch_free(void *ptr, ssize_t size, int device, void *stream) {
    (void)size;
    (void)device;
    (void)stream;
    const tp_addr addr = (tp_addr)(uintptr_t)ptr;
    tp_core *core = tp_core_owning(addr);
    if (core != NULL) tp_free(core, addr);
}

void tp_torch_init(int device_count) { (void)device_count; }

void tp_torch_reset(void) {
    for (int slot = 0; slot < TP_SLOT_SIM; slot++) {
        tp_core *core = tp_core_at(slot);
        if (core != NULL) tp_core_empty_cache(core);
    }
}

void tp_torch_memory_fraction(double fraction, int device) {
    tp_error error = {0};
    tp_core *core = core_of(device, &error);
    if (core == NULL) {
        fail(error.message);
        return;
    }
    size_t device_bytes, host_bytes;
    tp_core_get_budget(core, &device_bytes, &host_bytes);
    if (!(fraction >= 0.0 && fraction <= 1.0)) {
        fail("torchpager: the memory fraction must lie between 0 and 1");
        return;
    }
    const size_t wanted = (size_t)(fraction * (double)tp_core_caps(core)->total_bytes);
    if (tp_core_set_budget(core, wanted, host_bytes, &error) != TP_OK) fail(error.message);
}

void *tp_torch_base_alloc(void *ptr, size_t *size) {
    const tp_addr addr = (tp_addr)(uintptr_t)ptr;
    tp_core *core = tp_core_owning(addr);
    tp_block_info info;
    if (core == NULL || !tp_block_query(core, addr, &info)) {
        if (size != NULL) *size = 0;
        return ptr;
    }
    if (size != NULL) *size = info.bytes;
    return (void *)(uintptr_t)info.addr;
}

void tp_torch_record_stream(void *ptr, void *stream) {
    const tp_addr addr = (tp_addr)(uintptr_t)ptr;
    tp_core *core = tp_core_owning(addr);
    if (core != NULL) tp_record_stream(core, addr, stream);
}

void tp_torch_begin_allocate_to_pool(int device, tp_torch_pool pool, void *filter) {
    (void)pool;
    (void)filter;
    tp_error error = {0};
    tp_core *core = core_of(device, &error);
    if (core != NULL) tp_capture_begin(core);
}

void tp_torch_end_allocate_to_pool(int device, tp_torch_pool pool) {
    (void)pool;
    tp_core *core = device >= 0 && device < TP_SLOT_SIM ? tp_core_at(device) : NULL;
    if (core != NULL) tp_capture_end(core);
}

/* Blocks of a pool are ordinary blocks: nothing is kept for it. */
void tp_torch_release_pool(int device, tp_torch_pool pool) {
    (void)device;
    (void)pool;
}
