#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bind/cores.h"

#include <pthread.h>
#include <stdatomic.h>

#include "base/glance.h"
#include "device/device_cuda.h"

typedef struct slot_state {
    int slot;
    _Atomic(const tp_bind_foreign *) foreign;
} slot_state;

static slot_state slots[TP_SLOT_MAX];
static _Atomic(const tp_bind_operators *) operators_part;
static _Atomic(tp_stream (*)(int)) current_stream_part;
static _Atomic(void (*)(int)) first_paging_part;
static _Atomic(void (*)(int)) unseen_write_part;
/* Serialises opening, closing and the composition of hooks; never held across a wait. */
static pthread_mutex_t cores_mutex = PTHREAD_MUTEX_INITIALIZER;

/* ---- the GIL ----------------------------------------------------------------------------- */

static PyThreadState *current_thread_state(void) {
#if PY_VERSION_HEX >= 0x030D0000
    return PyThreadState_GetUnchecked();
#else
    return _PyThreadState_UncheckedGet();
#endif
}

/* Not PyGILState_Check: that one answers yes for every thread once a subinterpreter exists. */
bool tp_bind_holds_gil(void) {
    if (!Py_IsInitialized()) return false;
    const PyThreadState *state = PyGILState_GetThisThreadState();
    return state != NULL && state == current_thread_state();
}

void tp_bind_bring_back(tp_core *core) {
    const tp_bind_operators *operators = atomic_load(&operators_part);
    if (operators != NULL) operators->bring_back(core);
}

void tp_bind_settle(void) {
    const tp_bind_operators *operators = atomic_load(&operators_part);
    if (operators != NULL) operators->settle();
}

void *tp_bind_release_gil(void) { return tp_bind_holds_gil() ? PyEval_SaveThread() : NULL; }

void tp_bind_take_gil(void *token) {
    if (token != NULL) PyEval_RestoreThread(token);
}

static void *hook_wait_begin(void *ctx) {
    (void)ctx;
    tp_bind_settle();
    return tp_bind_release_gil();
}

static void hook_wait_end(void *ctx, void *token) {
    (void)ctx;
    tp_bind_take_gil(token);
}

static _Thread_local bool python_is_out;

void tp_bind_keep_python_out(bool out) { python_is_out = out; }

static _Thread_local unsigned char filler;

void tp_bind_ask(void) { tp_glance_ask(); }

void tp_bind_set_filler(unsigned char byte) {
    tp_bind_ask();
    filler = byte;
}
unsigned char tp_bind_filler(void) { return filler; }

static bool hook_collect(void *ctx) {
    (void)ctx;
    if (python_is_out || !tp_bind_holds_gil()) return false;
    (void)PyGC_Collect(); /* keeps an exception that is on its way */
    return true;
}

/* ---- hooks made of parts ----------------------------------------------------------------- */

static void hook_arm(void *ctx, tp_arming level) {
    const tp_bind_operators *operators = atomic_load(&operators_part);
    if (operators != NULL) operators->arm(((slot_state *)ctx)->slot, level);
}

static void hook_first_paging(void *ctx) {
    void (*callback)(int) = atomic_load(&first_paging_part);
    if (callback != NULL) callback(((slot_state *)ctx)->slot);
}

static void hook_drop(void *ctx, tp_core *core, tp_addr addr, bool park) {
    (void)ctx;
    const tp_bind_operators *operators = atomic_load(&operators_part);
    if (operators != NULL) operators->drop(core, addr, park);
}

/* Which block it was is in the statistics. */
static void hook_unseen_write(void *ctx, tp_addr addr, size_t bytes) {
    (void)addr;
    (void)bytes;
    void (*callback)(int) = atomic_load(&unseen_write_part);
    if (callback != NULL) callback(((slot_state *)ctx)->slot);
}

static size_t hook_foreign_cap(void *ctx, size_t cap_bytes) {
    slot_state *state = ctx;
    const tp_bind_foreign *foreign = atomic_load(&state->foreign);
    return foreign == NULL ? 0 : foreign->cap(state->slot, cap_bytes);
}

static size_t hook_foreign_held(void *ctx) {
    slot_state *state = ctx;
    const tp_bind_foreign *foreign = atomic_load(&state->foreign);
    return foreign == NULL ? 0 : foreign->held(state->slot);
}

static void hook_foreign_flush(void *ctx) {
    slot_state *state = ctx;
    const tp_bind_foreign *foreign = atomic_load(&state->foreign);
    if (foreign != NULL) foreign->flush(state->slot);
}

static tp_hooks compose(int slot) {
    slot_state *state = &slots[slot];
    state->slot = slot;
    tp_hooks hooks = {
        .ctx = state,
        .wait_begin = hook_wait_begin,
        .wait_end = hook_wait_end,
        .collect = hook_collect,
        .arm = hook_arm,
        .drop = hook_drop,
        .first_paging = hook_first_paging,
        .unseen_write = hook_unseen_write,
    };
    if (atomic_load(&state->foreign) != NULL) {
        hooks.foreign_cap = hook_foreign_cap;
        hooks.foreign_held = hook_foreign_held;
        hooks.foreign_flush = hook_foreign_flush;
    }
    return hooks;
}

void tp_bind_set_operators(const tp_bind_operators *operators) {
    atomic_store(&operators_part, operators);
    if (operators == NULL) return;
    for (int slot = 0; slot < TP_SLOT_MAX; slot++) {
        tp_core *core = tp_core_at(slot);
        if (core == NULL) continue;
        tp_stats stats;
        tp_core_stats(core, &stats);
        if (stats.armed) operators->arm(slot, TP_ARM_FULL);
    }
}

void tp_bind_set_foreign(int slot, const tp_bind_foreign *foreign) {
    if (slot < 0 || slot >= TP_SLOT_MAX) return;
    atomic_store(&slots[slot].foreign, foreign);
    tp_core *core = tp_core_at(slot);
    if (core == NULL) return;
    const tp_hooks hooks = compose(slot);
    tp_core_set_hooks(core, &hooks);
}

void tp_bind_set_current_stream(tp_stream (*current_stream)(int slot)) {
    atomic_store(&current_stream_part, current_stream);
}

tp_stream tp_bind_current_stream(int slot) {
    tp_stream (*current)(int) = atomic_load(&current_stream_part);
    return current == NULL || slot == TP_SLOT_SIM ? NULL : current(slot);
}

void tp_bind_set_first_paging(void (*callback)(int slot)) {
    atomic_store(&first_paging_part, callback);
}

void tp_bind_set_unseen_write(void (*callback)(int slot)) {
    atomic_store(&unseen_write_part, callback);
}

/* ---- opening and closing ----------------------------------------------------------------- */

/* Takes ownership of `dev`. Needs cores_mutex. */
static tp_status open_on(int slot, tp_device *dev, const tp_config *wanted, tp_error *error) {
    tp_config config = *wanted;
    config.device_budget_bytes = TP_NO_LIMIT;
    config.host_budget_bytes = TP_NO_LIMIT;
    config.hooks = compose(slot);
    tp_core *core = NULL;
    tp_status status = tp_core_create(&config, dev, &core, error);
    if (status != TP_OK) return status;
    status = tp_register(slot, core, error);
    if (status != TP_OK) tp_core_destroy(core);
    return status;
}

tp_status tp_bind_open_cuda(int slot, const tp_config *config, tp_error *error) {
    if (slot < 0 || slot >= TP_SLOT_SIM) {
        return tp_error_set(error, TP_INVALID, "no CUDA device has the number %d", slot);
    }
    pthread_mutex_lock(&cores_mutex);
    tp_status status;
    tp_device *dev = NULL;
    if (tp_core_at(slot) != NULL) {
        status =
            tp_error_set(error, TP_BUSY, "the core of CUDA device %d is open already", slot);
    } else {
        status = tp_cuda_device_create(slot, &dev, error);
        if (status == TP_OK) status = open_on(slot, dev, config, error);
    }
    pthread_mutex_unlock(&cores_mutex);
    return status;
}

tp_status tp_bind_open_sim(const tp_sim_options *options, const tp_config *config,
                           tp_error *error) {
    pthread_mutex_lock(&cores_mutex);
    tp_status status;
    tp_device *dev = NULL;
    if (tp_core_at(TP_SLOT_SIM) != NULL) {
        status = tp_error_set(error, TP_BUSY, "a simulated device is open already");
    } else {
        status = tp_sim_device_create(options, &dev, error);
        if (status == TP_OK) status = open_on(TP_SLOT_SIM, dev, config, error);
    }
    pthread_mutex_unlock(&cores_mutex);
    return status;
}

/* Takes the simulated core out of its slot unless blocks of it are alive, or an opaque region is
 * open on it. */
static tp_core *detach_sim(bool *alive) {
    tp_core *core = tp_core_at(TP_SLOT_SIM);
    *alive = false;
    if (core == NULL) return NULL;
    tp_stats stats;
    tp_core_stats(core, &stats);
    *alive = stats.block_count != 0 || stats.regions_open != 0 || stats.dropped.current != 0 ||
             stats.parked.current != 0;
    if (*alive) return NULL;
    tp_unregister(TP_SLOT_SIM);
    return core;
}

bool tp_bind_close_sim(void) {
    bool alive;
    tp_bind_settle(); /* works that are done let go of their tensors */
    pthread_mutex_lock(&cores_mutex);
    tp_core *core = detach_sim(&alive);
    pthread_mutex_unlock(&cores_mutex);
    if (core == NULL) return !alive;
    hook_arm(&slots[TP_SLOT_SIM], TP_ARM_OFF);
    const tp_bind_operators *operators = atomic_load(&operators_part);
    if (operators != NULL) {
        void *token = hook_wait_begin(NULL);
        operators->forget(core);
        hook_wait_end(NULL, token);
    }
    tp_core_destroy(core);
    return true;
}

/* ---- allocating -------------------------------------------------------------------------- */

void tp_bind_free(tp_core *core, tp_addr addr) {
    const tp_bind_operators *operators = atomic_load(&operators_part);
    if (operators != NULL) operators->freed(addr);
    tp_free(core, addr);
}

const char *tp_bind_lacks_memory(void) {
    const tp_bind_operators *operators = atomic_load(&operators_part);
    return operators == NULL ? NULL : operators->lacks_memory();
}

tp_status tp_bind_alloc(tp_core *core, size_t bytes, tp_stream stream, tp_addr *out,
                        tp_oom *oom, tp_error *error) {
    const tp_bind_operators *operators = atomic_load(&operators_part);
    const tp_bind_place place = operators == NULL ? TP_BIND_OUTSIDE : operators->allocating();
    static const uint32_t flags_of[] = {[TP_BIND_OUTSIDE] = 0,
                                        [TP_BIND_OPERATOR] = TP_ALLOC_PINNED,
                                        [TP_BIND_RERUN] = TP_ALLOC_PINNED | TP_ALLOC_RERUN,
                                        [TP_BIND_UNKNOWN] = TP_ALLOC_UNKNOWN};
    const uint32_t flags = flags_of[place];
    tp_addr addr = 0;
    const tp_status status = tp_alloc(core, bytes, stream, flags, &addr, oom, error);
    if (status != TP_OK) return status;
    if ((flags & TP_ALLOC_PINNED) != 0) operators->on_alloc(core, addr, stream);
    *out = addr;
    return TP_OK;
}
