/* torchpager._core: the façade as Python sees it (python/torchpager/_core.pyi is its
 * reference).
 *
 * Functions that may wait release the GIL here, except those that may have to collect
 * garbage (set_budget, pin): they keep it, and the hooks in cores.c release it around each
 * wait. */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <string.h>

#include "base/check.h"
#include "bind/cores.h"
#include "bind/plan_py.h"
#include "bind/replay_py.h"
#include "bind/step_py.h"
#include "device/device_cuda.h"

typedef struct module_state {
    PyObject *core_error;   /* the exception class */
    PyObject *first_paging; /* a callback or NULL */
    PyObject *unseen_write; /* likewise */
} module_state;

static module_state *state_of(PyObject *module) {
    return (module_state *)PyModule_GetState(module);
}

/* ---- values ------------------------------------------------------------------------------ */

/* Steals `value`; -1 also when it is NULL. */
static int put(PyObject *dict, const char *key, PyObject *value) {
    if (value == NULL) return -1;
    const int answer = PyDict_SetItemString(dict, key, value);
    Py_DECREF(value);
    return answer;
}

static int put_u64(PyObject *dict, const char *key, uint64_t value) {
    return put(dict, key, PyLong_FromUnsignedLongLong(value));
}

static int put_bool(PyObject *dict, const char *key, bool value) {
    return put(dict, key, PyBool_FromLong(value));
}

static int put_text(PyObject *dict, const char *key, const char *value) {
    return put(dict, key, PyUnicode_FromString(value));
}

static PyObject *limit_to_py(size_t bytes) {
    if (bytes == TP_NO_LIMIT) Py_RETURN_NONE;
    return PyLong_FromSize_t(bytes);
}

/* None: TP_NO_LIMIT. */
static bool limit_from_py(PyObject *value, size_t *out) {
    if (value == Py_None) {
        *out = TP_NO_LIMIT;
        return true;
    }
    const size_t bytes = PyLong_AsSize_t(value);
    if (bytes == (size_t)-1 && PyErr_Occurred()) return false;
    *out = bytes;
    return true;
}

static PyObject *finish_dict(PyObject *dict, int bad) {
    if (bad == 0) return dict;
    Py_DECREF(dict);
    return NULL;
}

static PyObject *oom_to_py(const tp_oom *oom) {
    PyObject *dict = PyDict_New();
    if (dict == NULL) return NULL;
    int bad = put_u64(dict, "requested_bytes", oom->requested_bytes);
    bad |= put(dict, "budget_bytes", limit_to_py(oom->budget_bytes));
    bad |= put_u64(dict, "resident_bytes", oom->resident_bytes);
    bad |= put_u64(dict, "cached_bytes", oom->cached_bytes);
    bad |= put_u64(dict, "foreign_bytes", oom->foreign_bytes);
    bad |= put_u64(dict, "pinned_bytes", oom->pinned_bytes);
    bad |= put_u64(dict, "unseen_bytes", oom->unseen_bytes);
    bad |= put_u64(dict, "host_bytes", oom->host_bytes);
    bad |= put_u64(dict, "host_held_bytes", oom->host_held_bytes);
    bad |= put(dict, "host_budget_bytes", limit_to_py(oom->host_budget_bytes));
    bad |= put_bool(dict, "offload", oom->offload);
    bad |= put_bool(dict, "host_side", oom->host_side);
    bad |= put_text(dict, "device_status", tp_status_name(oom->device_status));
    return finish_dict(dict, bad);
}

static PyObject *block_to_py(const tp_block_info *info) {
    PyObject *dict = PyDict_New();
    if (dict == NULL) return NULL;
    int bad = put_u64(dict, "addr", info->addr);
    bad |= put_u64(dict, "requested_bytes", info->requested_bytes);
    bad |= put_u64(dict, "bytes", info->bytes);
    bad |= put_u64(dict, "resident_bytes", info->resident_bytes);
    bad |= put_u64(dict, "host_bytes", info->host_bytes);
    bad |= put_u64(dict, "extent_count", info->extent_count);
    bad |= put_u64(dict, "dirty_count", info->dirty_count);
    bad |= put_u64(dict, "clean_count", info->clean_count);
    bad |= put_u64(dict, "host_count", info->host_count);
    bad |= put_u64(dict, "busy_count", info->busy_count);
    bad |= put_u64(dict, "pin_count", info->pin_count);
    bad |= put_bool(dict, "seen", info->seen);
    bad |= put_bool(dict, "immovable", info->immovable);
    bad |= put_bool(dict, "captured", info->captured);
    bad |= put_u64(dict, "stream", (uint64_t)(uintptr_t)info->stream);
    bad |= put_u64(dict, "generation", info->generation);
    bad |= put_u64(dict, "evicted_count", info->evicted_count);
    return finish_dict(dict, bad);
}

/* ---- errors ------------------------------------------------------------------------------ */

/* Raises CoreError for `status`. Always NULL. */
static PyObject *raise_core_error(PyObject *module, tp_status status, const tp_error *error,
                                  const tp_oom *oom) {
    PyObject *cls = state_of(module)->core_error;
    const char *name = tp_status_name(status);
    const char *message = error->message[0] != '\0' ? error->message : name;
    PyObject *exc = PyObject_CallFunction(cls, "s", message);
    if (exc == NULL) return NULL;
    PyObject *figures = NULL;
    if (oom != NULL && (status == TP_OUT_OF_MEMORY || status == TP_NO_HOST_MEMORY)) {
        figures = oom_to_py(oom);
    } else {
        figures = Py_NewRef(Py_None);
    }
    PyObject *status_name = PyUnicode_FromString(name);
    PyObject *code = PyLong_FromLongLong(error->driver_code);
    if (figures != NULL && status_name != NULL && code != NULL &&
        PyObject_SetAttrString(exc, "status", status_name) == 0 &&
        PyObject_SetAttrString(exc, "driver_code", code) == 0 &&
        PyObject_SetAttrString(exc, "oom", figures) == 0) {
        PyErr_SetObject(cls, exc);
    }
    Py_XDECREF(code);
    Py_XDECREF(status_name);
    Py_XDECREF(figures);
    Py_DECREF(exc);
    return NULL;
}

static PyObject *none_or_error(PyObject *module, tp_status status, const tp_error *error) {
    if (status == TP_OK) Py_RETURN_NONE;
    return raise_core_error(module, status, error, NULL);
}

/* The core at `slot`; NULL with CoreError("INVALID") when there is none. */
static tp_core *core_at(PyObject *module, int slot) {
    tp_core *core = tp_core_at(slot);
    if (core != NULL) return core;
    tp_error error = {0};
    (void)tp_error_set(&error, TP_INVALID, "no core is open at slot %d", slot);
    (void)raise_core_error(module, TP_INVALID, &error, NULL);
    return NULL;
}

static bool addr_from_py(PyObject *value, tp_addr *out) {
    const unsigned long long addr = PyLong_AsUnsignedLongLong(value);
    if (addr == (unsigned long long)-1 && PyErr_Occurred()) return false;
    *out = addr;
    return true;
}

/* The core that owns the address `value`; NULL with an exception. */
static tp_core *core_owning(PyObject *module, PyObject *value, tp_addr *addr) {
    if (!addr_from_py(value, addr)) return NULL;
    tp_core *core = tp_core_owning(*addr);
    if (core != NULL) return core;
    tp_error error = {0};
    (void)tp_error_set(&error, TP_INVALID, "no core owns the address 0x%llx",
                       (unsigned long long)*addr);
    (void)raise_core_error(module, TP_INVALID, &error, NULL);
    return NULL;
}

static int slot_of(const tp_core *core) {
    for (int slot = 0; slot < TP_SLOT_MAX; slot++) {
        if (tp_core_at(slot) == core) return slot;
    }
    return -1;
}

/* ---- life -------------------------------------------------------------------------------- */

static PyObject *core_sim_open(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"device_bytes", "granularity",        "large_min", "extent_max",
                            "strict",       "page_out_before_op", "seed",      "poison",
                            "readonly",     "link_bytes_per_s",   NULL};
    Py_ssize_t device_bytes = 0, granularity = 0, large_min = 0, extent_max = 0;
    unsigned long long seed = 0, link = 0;
    int strict = 0, page_out = 0, poison = 1, readonly = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|$nnnnppKppK", names, &device_bytes,
                                     &granularity, &large_min, &extent_max, &strict, &page_out,
                                     &seed, &poison, &readonly, &link)) {
        return NULL;
    }
    if (device_bytes <= 0 || granularity <= 0 || large_min < 0 || extent_max < 0) {
        PyErr_SetString(PyExc_ValueError, "sizes of a simulated device must be positive");
        return NULL;
    }
    const tp_sim_options options = {
        .device_bytes = (size_t)device_bytes,
        .granularity_bytes = (size_t)granularity,
        .seed = seed,
        .poison = poison != 0,
        .link_bytes_per_s = link,
    };
    const tp_config config = {
        .large_min_bytes = (size_t)large_min,
        .extent_max_bytes = (size_t)extent_max,
        .strict = strict != 0,
        .readonly_clean = readonly != 0,
        .host_kernels = true,
        .page_out_before_op = page_out != 0,
    };
    tp_error error = {0};
    tp_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tp_bind_open_sim(&options, &config, &error);
    Py_END_ALLOW_THREADS;
    return none_or_error(module, status, &error);
}

static PyObject *core_sim_close(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    bool closed;
    Py_BEGIN_ALLOW_THREADS;
    closed = tp_bind_close_sim();
    Py_END_ALLOW_THREADS;
    return PyBool_FromLong(closed);
}

static PyObject *core_cuda_open(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"device",   "large_min", "extent_max", "serve_small",
                            "readonly", "strict",    NULL};
    int device, serve_small = 0, readonly = 0, strict = 0;
    Py_ssize_t large_min = 0, extent_max = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|$nnppp", names, &device, &large_min,
                                     &extent_max, &serve_small, &readonly, &strict)) {
        return NULL;
    }
    if (large_min < 0 || extent_max < 0) {
        PyErr_SetString(PyExc_ValueError, "large_min and extent_max must not be negative");
        return NULL;
    }
    const tp_config config = {
        .large_min_bytes = (size_t)large_min,
        .extent_max_bytes = (size_t)extent_max,
        .serve_small = serve_small != 0,
        .readonly_clean = readonly != 0,
        .strict = strict != 0,
    };
    tp_error error = {0};
    tp_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tp_bind_open_cuda(device, &config, &error);
    Py_END_ALLOW_THREADS;
    return none_or_error(module, status, &error);
}

static PyObject *core_is_open(PyObject *module, PyObject *args) {
    (void)module;
    int slot;
    if (!PyArg_ParseTuple(args, "i", &slot)) return NULL;
    return PyBool_FromLong(tp_core_at(slot) != NULL);
}

static PyObject *core_armed(PyObject *module, PyObject *args) {
    (void)module;
    int slot;
    if (!PyArg_ParseTuple(args, "i", &slot)) return NULL;
    tp_core *core = tp_core_at(slot);
    tp_stats stats = {0};
    if (core != NULL) tp_core_stats(core, &stats);
    return PyBool_FromLong(stats.armed);
}

static PyObject *core_abandon_all(PyObject *module, PyObject *unused) {
    (void)module;
    (void)unused;
    Py_BEGIN_ALLOW_THREADS;
    for (int slot = 0; slot < TP_SLOT_MAX; slot++) {
        tp_core *core = tp_core_at(slot);
        if (core != NULL) tp_core_abandon(core);
    }
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *core_caps(PyObject *module, PyObject *args) {
    int slot;
    if (!PyArg_ParseTuple(args, "i", &slot)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    const tp_device_caps *caps = tp_core_caps(core);
    PyObject *dict = PyDict_New();
    if (dict == NULL) return NULL;
    int bad = put_text(dict, "name", caps->name);
    bad |= put_u64(dict, "granularity_bytes", caps->granularity_bytes);
    bad |= put_u64(dict, "total_bytes", caps->total_bytes);
    bad |= put_bool(dict, "host_frames", caps->host_frames);
    bad |= put_bool(dict, "shared_frames", caps->shared_frames);
    bad |= put_bool(dict, "context_marker", caps->context_marker);
    bad |= put_bool(dict, "fingerprints", caps->fingerprints);
    bad |= put_text(dict, "no_fingerprints", caps->no_fingerprints);
    return finish_dict(dict, bad);
}

static PyObject *core_memory_info(PyObject *module, PyObject *args) {
    int slot;
    if (!PyArg_ParseTuple(args, "i", &slot)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    tp_device *dev = tp_core_device(core);
    size_t free_bytes = 0, total_bytes = 0;
    tp_error error = {0};
    tp_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = dev->ops->bind_thread(dev, &error);
    if (status == TP_OK) status = dev->ops->memory_info(dev, &free_bytes, &total_bytes, &error);
    Py_END_ALLOW_THREADS;
    if (status != TP_OK) return raise_core_error(module, status, &error, NULL);
    return Py_BuildValue("(KK)", (unsigned long long)free_bytes,
                         (unsigned long long)total_bytes);
}

static PyObject *core_cuda_probe(PyObject *module, PyObject *args, PyObject *kwargs) {
    (void)module;
    static char *names[] = {"device", "retain", NULL};
    int device = 0, retain = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "|ip", names, &device, &retain)) return NULL;
    tp_cuda_probe probe;
    memset(&probe, 0, sizeof probe);
    Py_BEGIN_ALLOW_THREADS;
    tp_cuda_probe_device(device, retain != 0, &probe);
    Py_END_ALLOW_THREADS;
    PyObject *dict = PyDict_New();
    if (dict == NULL) return NULL;
    int bad = put_bool(dict, "library", probe.library);
    bad |= put(dict, "driver_version", PyLong_FromLong(probe.driver_version));
    bad |= put(dict, "device_count", PyLong_FromLong(probe.device_count));
    bad |= put_bool(dict, "virtual_memory", probe.virtual_memory);
    bad |= put_bool(dict, "host_frames", probe.host_frames);
    bad |= put_bool(dict, "context_marker", probe.context_marker);
    bad |= put_u64(dict, "granularity_bytes", probe.granularity_bytes);
    bad |= put_u64(dict, "total_bytes", probe.total_bytes);
    bad |= put_text(dict, "device_name", probe.device_name);
    bad |= put_text(dict, "reason", probe.reason);
    return finish_dict(dict, bad);
}

/* ---- budgets ----------------------------------------------------------------------------- */

static PyObject *core_set_budget(PyObject *module, PyObject *args) {
    int slot;
    PyObject *device_limit, *host_limit;
    if (!PyArg_ParseTuple(args, "iOO", &slot, &device_limit, &host_limit)) return NULL;
    size_t device_bytes, host_bytes;
    if (!limit_from_py(device_limit, &device_bytes) ||
        !limit_from_py(host_limit, &host_bytes)) {
        return NULL;
    }
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    tp_error error = {0};
    const tp_status status = tp_core_set_budget(core, device_bytes, host_bytes, &error);
    if (status == TP_OK) Py_RETURN_NONE;
    tp_oom oom;
    const bool known = tp_core_last_oom(core, &oom);
    return raise_core_error(module, status, &error, known ? &oom : NULL);
}

static PyObject *core_get_budget(PyObject *module, PyObject *args) {
    int slot;
    if (!PyArg_ParseTuple(args, "i", &slot)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    size_t device_bytes, host_bytes;
    tp_core_get_budget(core, &device_bytes, &host_bytes);
    return Py_BuildValue("(NN)", limit_to_py(device_bytes), limit_to_py(host_bytes));
}

static PyObject *core_set_offload(PyObject *module, PyObject *args) {
    int slot, offload;
    if (!PyArg_ParseTuple(args, "ip", &slot, &offload)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    tp_error error = {0};
    tp_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tp_core_set_offload(core, offload != 0, &error);
    Py_END_ALLOW_THREADS;
    return none_or_error(module, status, &error);
}

static PyObject *core_set_recompute(PyObject *module, PyObject *args) {
    int slot, park, recompute;
    if (!PyArg_ParseTuple(args, "ipp", &slot, &park, &recompute)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    tp_core_set_recompute(core, park != 0, recompute != 0);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *core_set_planning(PyObject *module, PyObject *args) {
    int slot, planning;
    if (!PyArg_ParseTuple(args, "ip", &slot, &planning)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    tp_core_set_planning(core, planning != 0);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

static PyObject *core_empty_cache(PyObject *module, PyObject *args) {
    int slot;
    if (!PyArg_ParseTuple(args, "i", &slot)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    Py_BEGIN_ALLOW_THREADS;
    tp_core_empty_cache(core);
    Py_END_ALLOW_THREADS;
    Py_RETURN_NONE;
}

/* ---- blocks ------------------------------------------------------------------------------ */

static PyObject *core_owns(PyObject *module, PyObject *arg) {
    (void)module;
    tp_addr addr;
    if (!addr_from_py(arg, &addr)) return NULL;
    const tp_core *core = tp_core_owning(addr);
    const int slot = core == NULL ? -1 : slot_of(core);
    if (slot < 0) Py_RETURN_NONE;
    return PyLong_FromLong(slot);
}

static PyObject *core_block(PyObject *module, PyObject *arg) {
    (void)module;
    tp_addr addr;
    if (!addr_from_py(arg, &addr)) return NULL;
    tp_core *core = tp_core_owning(addr);
    tp_block_info info;
    if (core == NULL || !tp_block_query(core, addr, &info)) Py_RETURN_NONE;
    return block_to_py(&info);
}

/* ctx is a list; NULL in it once an item could not be made. */
typedef struct block_list {
    PyObject *list;
    bool bad;
} block_list;

static void append_block(void *ctx, const tp_block_info *info) {
    block_list *blocks = ctx;
    if (blocks->bad) return;
    PyObject *item = block_to_py(info);
    blocks->bad = item == NULL || PyList_Append(blocks->list, item) != 0;
    Py_XDECREF(item);
}

static PyObject *core_blocks(PyObject *module, PyObject *args) {
    int slot;
    if (!PyArg_ParseTuple(args, "i", &slot)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    block_list blocks = {.list = PyList_New(0)};
    if (blocks.list == NULL) return NULL;
    if (!tp_block_visit(core, append_block, &blocks)) {
        PyErr_NoMemory();
        blocks.bad = true;
    }
    if (!blocks.bad) return blocks.list;
    Py_DECREF(blocks.list);
    return NULL;
}

static PyObject *core_touch(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"addr", "write", NULL};
    unsigned long long addr;
    int write = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "K|p", names, &addr, &write)) return NULL;
    tp_core *core = tp_core_owning(addr);
    if (core == NULL) Py_RETURN_NONE;
    const tp_stream stream = tp_bind_current_stream(slot_of(core));
    tp_error error = {0};
    tp_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tp_touch(core, addr, write != 0, stream, &error);
    Py_END_ALLOW_THREADS;
    return none_or_error(module, status, &error);
}

static PyObject *core_export(PyObject *module, PyObject *arg) {
    tp_addr addr;
    if (!addr_from_py(arg, &addr)) return NULL;
    tp_core *core = tp_core_owning(addr);
    if (core == NULL) Py_RETURN_NONE;
    const tp_stream stream = tp_bind_current_stream(slot_of(core));
    tp_error error = {0};
    tp_status status;
    Py_BEGIN_ALLOW_THREADS;
    /* Written, too: whoever gets the address may write through it, and nobody will tell us. */
    status = tp_touch(core, addr, true, stream, &error);
    if (status == TP_OK) tp_export(core, addr);
    Py_END_ALLOW_THREADS;
    return none_or_error(module, status, &error);
}

static PyObject *core_use_clock(PyObject *module, PyObject *args) {
    int slot;
    if (!PyArg_ParseTuple(args, "i", &slot)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    return PyLong_FromUnsignedLongLong(tp_use_clock(core));
}

static PyObject *core_mark_step(PyObject *module, PyObject *args) {
    int slot, mark;
    if (!PyArg_ParseTuple(args, "ii", &slot, &mark)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    if (mark < TP_STEP_ASKED || mark > TP_STEP_OPTIMIZER_END) {
        PyErr_SetString(PyExc_ValueError, "there is no such mark");
        return NULL;
    }
    tp_mark_step(core, (tp_step_mark)mark);
    Py_RETURN_NONE;
}

static PyObject *core_last_step(PyObject *module, PyObject *args) {
    int slot;
    if (!PyArg_ParseTuple(args, "i", &slot)) return NULL;
    tp_core *core = core_at(module, slot);
    return core == NULL ? NULL : tp_bind_last_step(core);
}

static PyObject *core_mark_written(PyObject *module, PyObject *args) {
    int slot;
    PyObject *list;
    unsigned long long since;
    if (!PyArg_ParseTuple(args, "iO!K", &slot, &PyList_Type, &list, &since)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    const Py_ssize_t count = PyList_GET_SIZE(list);
    tp_addr *addrs = PyMem_Malloc((size_t)(count + 1) * sizeof *addrs);
    if (addrs == NULL) return PyErr_NoMemory();
    bool good = true;
    for (Py_ssize_t i = 0; good && i < count; i++) {
        good = addr_from_py(PyList_GET_ITEM(list, i), &addrs[i]);
    }
    if (good) tp_mark_written(core, addrs, (size_t)count, since);
    PyMem_Free(addrs);
    if (!good) return NULL;
    Py_RETURN_NONE;
}

static PyObject *core_mark_seen(PyObject *module, PyObject *arg) {
    tp_addr addr;
    tp_core *core = core_owning(module, arg, &addr);
    if (core == NULL) return NULL;
    tp_mark_seen(core, addr);
    Py_RETURN_NONE;
}

static PyObject *core_pin(PyObject *module, PyObject *arg) {
    tp_addr addr;
    tp_core *core = core_owning(module, arg, &addr);
    if (core == NULL) return NULL;
    tp_error error = {0};
    tp_oom oom;
    memset(&oom, 0, sizeof oom);
    const tp_status status = tp_pin(core, addr, &oom, &error);
    if (status == TP_OK) Py_RETURN_NONE;
    return raise_core_error(module, status, &error, &oom);
}

static PyObject *core_unpin(PyObject *module, PyObject *arg) {
    tp_addr addr;
    tp_core *core = core_owning(module, arg, &addr);
    if (core == NULL) return NULL;
    tp_error error = {0};
    return none_or_error(module, tp_unpin(core, addr, &error), &error);
}

static PyObject *core_evict(PyObject *module, PyObject *arg) {
    tp_addr addr;
    tp_core *core = core_owning(module, arg, &addr);
    if (core == NULL) return NULL;
    tp_error error = {0};
    tp_status status;
    Py_BEGIN_ALLOW_THREADS;
    tp_bind_settle();
    status = tp_evict(core, addr, &error);
    Py_END_ALLOW_THREADS;
    return none_or_error(module, status, &error);
}

static PyObject *core_evict_all(PyObject *module, PyObject *args) {
    int slot;
    if (!PyArg_ParseTuple(args, "i", &slot)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    size_t bytes;
    Py_BEGIN_ALLOW_THREADS;
    tp_bind_settle();
    bytes = tp_evict_all(core);
    Py_END_ALLOW_THREADS;
    return PyLong_FromSize_t(bytes);
}

static PyObject *core_check(PyObject *module, PyObject *args) {
    int slot;
    if (!PyArg_ParseTuple(args, "i", &slot)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    tp_error error = {0};
    tp_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tp_core_check(core, &error);
    Py_END_ALLOW_THREADS;
    return none_or_error(module, status, &error);
}

/* ---- figures ----------------------------------------------------------------------------- */

static int put_gauge(PyObject *dict, const char *key, const tp_gauge *gauge) {
    return put(dict, key,
               Py_BuildValue("(KK)", (unsigned long long)gauge->current,
                             (unsigned long long)gauge->peak));
}

static int put_tally(PyObject *dict, const char *key, const tp_tally *tally) {
    return put(dict, key,
               Py_BuildValue("(KKK)", (unsigned long long)tally->count,
                             (unsigned long long)tally->bytes, (unsigned long long)tally->ns));
}

static int put_gauges(PyObject *dict, const tp_stats *stats) {
    int bad = put_gauge(dict, "allocated", &stats->allocated);
    bad |= put_gauge(dict, "active", &stats->active);
    bad |= put_gauge(dict, "reserved", &stats->reserved);
    bad |= put_gauge(dict, "resident", &stats->resident);
    bad |= put_gauge(dict, "host", &stats->host);
    bad |= put_gauge(dict, "host_held", &stats->host_held);
    bad |= put_gauge(dict, "pinned", &stats->pinned);
    bad |= put_gauge(dict, "dropped", &stats->dropped);
    bad |= put_gauge(dict, "held", &stats->held);
    return bad;
}

static int put_tallies(PyObject *dict, const tp_stats *stats) {
    int bad = put_tally(dict, "fills", &stats->fills);
    bad |= put_tally(dict, "write_backs", &stats->write_backs);
    bad |= put_tally(dict, "evictions", &stats->evictions);
    bad |= put_tally(dict, "misses", &stats->misses);
    bad |= put_tally(dict, "stalls", &stats->stalls);
    bad |= put_tally(dict, "memory_stalls", &stats->memory_stalls);
    bad |= put_tally(dict, "host_operators", &stats->host_operators);
    bad |= put_tally(dict, "unseen_writes", &stats->unseen_writes);
    bad |= put_tally(dict, "unproven", &stats->unproven);
    bad |= put_tally(dict, "fingerprints", &stats->fingerprints);
    bad |= put_tally(dict, "plans", &stats->plans);
    bad |= put_u64(dict, "planned_ops", stats->planned_ops);
    bad |= put_gauge(dict, "parked", &stats->parked);
    bad |= put_tally(dict, "drops", &stats->drops);
    bad |= put_tally(dict, "parks", &stats->parks);
    bad |= put_tally(dict, "reruns", &stats->reruns);
    bad |= put_tally(dict, "discards", &stats->discards);
    bad |= put_tally(dict, "frame_creates", &stats->frame_creates);
    bad |= put_tally(dict, "frame_releases", &stats->frame_releases);
    return bad;
}

static int put_counts(PyObject *dict, const tp_stats *stats) {
    int bad = put_u64(dict, "alloc_count", stats->alloc_count);
    bad |= put_u64(dict, "planned_drop_bytes", stats->planned_drop_bytes);
    bad |= put_u64(dict, "wrong_reruns", stats->wrong_reruns);
    bad |= put_u64(dict, "unverified_reruns", stats->unverified_reruns);
    bad |= put_u64(dict, "free_count", stats->free_count);
    bad |= put_u64(dict, "cache_hits", stats->cache_hits);
    bad |= put_u64(dict, "born_in_host", stats->born_in_host);
    bad |= put_u64(dict, "ooms", stats->ooms);
    bad |= put_u64(dict, "block_count", stats->block_count);
    bad |= put_u64(dict, "live_peak_count", stats->live_peak_count);
    bad |= put_u64(dict, "regions_open", stats->regions_open);
    bad |= put_u64(dict, "regions_closed", stats->regions_closed);
    bad |= put_u64(dict, "region_count", stats->region_count);
    bad |= put_u64(dict, "region_waits", stats->region_waits);
    bad |= put_u64(dict, "unseen_addr", stats->unseen_addr);
    bad |= put_u64(dict, "unseen_bytes", stats->unseen_bytes);
    bad |= put(dict, "device_budget", limit_to_py(stats->device_budget));
    bad |= put(dict, "host_budget", limit_to_py(stats->host_budget));
    bad |= put(dict, "foreign_cap", limit_to_py(stats->foreign_cap));
    bad |= put_bool(dict, "armed", stats->armed);
    bad |= put_bool(dict, "offload", stats->offload);
    bad |= put_bool(dict, "failed", stats->failed);
    return bad;
}

static PyObject *core_stats(PyObject *module, PyObject *args) {
    int slot;
    if (!PyArg_ParseTuple(args, "i", &slot)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    tp_stats stats;
    tp_core_stats(core, &stats);
    PyObject *dict = PyDict_New();
    if (dict == NULL) return NULL;
    const int bad =
        put_gauges(dict, &stats) | put_tallies(dict, &stats) | put_counts(dict, &stats);
    return finish_dict(dict, bad);
}

static PyObject *core_reset_stats(PyObject *module, PyObject *args, PyObject *kwargs) {
    static char *names[] = {"slot", "peaks", "totals", NULL};
    int slot, peaks = 1, totals = 1;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "i|pp", names, &slot, &peaks, &totals)) {
        return NULL;
    }
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    tp_core_reset_stats(core, peaks != 0, totals != 0);
    Py_RETURN_NONE;
}

static PyObject *core_last_oom(PyObject *module, PyObject *args) {
    int slot;
    if (!PyArg_ParseTuple(args, "i", &slot)) return NULL;
    tp_core *core = core_at(module, slot);
    if (core == NULL) return NULL;
    tp_oom oom;
    if (!tp_core_last_oom(core, &oom)) Py_RETURN_NONE;
    return oom_to_py(&oom);
}

static PyObject *core_sim_fd(PyObject *module, PyObject *args) {
    const char *kind;
    if (!PyArg_ParseTuple(args, "s", &kind)) return NULL;
    const bool device = strcmp(kind, "device") == 0;
    if (!device && strcmp(kind, "host") != 0) {
        PyErr_SetString(PyExc_ValueError, "kind must be \"device\" or \"host\"");
        return NULL;
    }
    tp_core *core = core_at(module, TP_SLOT_SIM);
    if (core == NULL) return NULL;
    const tp_frame_kind frame_kind = device ? TP_FRAME_DEVICE : TP_FRAME_HOST;
    return PyLong_FromLong(tp_sim_fd(tp_core_device(core), frame_kind));
}

/* ---- callbacks --------------------------------------------------------------------------- */

/* On the main thread, with the GIL. The module is looked up again: no reference to it is held
 * outside the interpreter. */
static int run_callback(void *slot, PyObject *(*which)(const module_state *state)) {
    PyObject *module = PyImport_ImportModule("torchpager._core");
    if (module == NULL) {
        PyErr_Clear();
        return 0;
    }
    PyObject *callback = Py_XNewRef(which(state_of(module)));
    Py_DECREF(module);
    if (callback == NULL) return 0;
    PyObject *answer = PyObject_CallFunction(callback, "n", (Py_ssize_t)(intptr_t)slot);
    if (answer == NULL) PyErr_WriteUnraisable(callback);
    Py_XDECREF(answer);
    Py_DECREF(callback);
    return 0;
}

static PyObject *first_paging_of(const module_state *state) { return state->first_paging; }

static PyObject *unseen_write_of(const module_state *state) { return state->unseen_write; }

static int run_first_paging(void *slot) { return run_callback(slot, first_paging_of); }

static int run_unseen_write(void *slot) { return run_callback(slot, unseen_write_of); }

static void queue_first_paging(int slot) {
    if (!Py_IsInitialized()) return;
    (void)Py_AddPendingCall(run_first_paging, (void *)(intptr_t)slot);
}

static void queue_unseen_write(int slot) {
    if (!Py_IsInitialized()) return;
    (void)Py_AddPendingCall(run_unseen_write, (void *)(intptr_t)slot);
}

/* Keeps the callback, or none when it is None. */
static bool keep_callback(PyObject **at, PyObject *callback) {
    if (callback != Py_None && !PyCallable_Check(callback)) {
        PyErr_SetString(PyExc_TypeError, "the callback must be callable or None");
        return false;
    }
    PyObject *old = *at;
    *at = callback == Py_None ? NULL : Py_NewRef(callback);
    Py_XDECREF(old);
    return true;
}

static PyObject *core_on_first_paging(PyObject *module, PyObject *callback) {
    module_state *state = state_of(module);
    if (!keep_callback(&state->first_paging, callback)) return NULL;
    tp_bind_set_first_paging(state->first_paging == NULL ? NULL : queue_first_paging);
    Py_RETURN_NONE;
}

static PyObject *core_on_unseen_write(PyObject *module, PyObject *callback) {
    module_state *state = state_of(module);
    if (!keep_callback(&state->unseen_write, callback)) return NULL;
    tp_bind_set_unseen_write(state->unseen_write == NULL ? NULL : queue_unseen_write);
    Py_RETURN_NONE;
}

/* ---- planning ---------------------------------------------------------------------------- */

static PyObject *core_make_plan(PyObject *module, PyObject *args, PyObject *kwargs) {
    tp_error error = {0};
    PyObject *answer = tp_bind_make_plan(args, kwargs, &error);
    if (answer != NULL || PyErr_Occurred()) return answer;
    return raise_core_error(module, error.status, &error, NULL);
}

static PyObject *core_replay(PyObject *module, PyObject *args, PyObject *kwargs) {
    tp_error error = {0};
    PyObject *answer = tp_bind_replay(args, kwargs, &error);
    if (answer != NULL || PyErr_Occurred()) return answer;
    return raise_core_error(module, error.status, &error, NULL);
}

/* ---- the module -------------------------------------------------------------------------- */

#define KEYWORDS(function) (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS

static PyMethodDef methods[] = {
    {"sim_open", KEYWORDS(core_sim_open), NULL},
    {"sim_close", core_sim_close, METH_NOARGS, NULL},
    {"cuda_open", KEYWORDS(core_cuda_open), NULL},
    {"is_open", core_is_open, METH_VARARGS, NULL},
    {"armed", core_armed, METH_VARARGS, NULL},
    {"abandon_all", core_abandon_all, METH_NOARGS, NULL},
    {"caps", core_caps, METH_VARARGS, NULL},
    {"memory_info", core_memory_info, METH_VARARGS, NULL},
    {"cuda_probe", KEYWORDS(core_cuda_probe), NULL},
    {"set_budget", core_set_budget, METH_VARARGS, NULL},
    {"get_budget", core_get_budget, METH_VARARGS, NULL},
    {"set_offload", core_set_offload, METH_VARARGS, NULL},
    {"set_recompute", core_set_recompute, METH_VARARGS, NULL},
    {"set_planning", core_set_planning, METH_VARARGS, NULL},
    {"empty_cache", core_empty_cache, METH_VARARGS, NULL},
    {"owns", core_owns, METH_O, NULL},
    {"block", core_block, METH_O, NULL},
    {"blocks", core_blocks, METH_VARARGS, NULL},
    {"touch", KEYWORDS(core_touch), NULL},
    {"export", core_export, METH_O, NULL},
    {"mark_seen", core_mark_seen, METH_O, NULL},
    {"use_clock", core_use_clock, METH_VARARGS, NULL},
    {"mark_written", core_mark_written, METH_VARARGS, NULL},
    {"mark_step", core_mark_step, METH_VARARGS, NULL},
    {"last_step", core_last_step, METH_VARARGS, NULL},
    {"pin", core_pin, METH_O, NULL},
    {"unpin", core_unpin, METH_O, NULL},
    {"evict", core_evict, METH_O, NULL},
    {"evict_all", core_evict_all, METH_VARARGS, NULL},
    {"check", core_check, METH_VARARGS, NULL},
    {"stats", core_stats, METH_VARARGS, NULL},
    {"reset_stats", KEYWORDS(core_reset_stats), NULL},
    {"last_oom", core_last_oom, METH_VARARGS, NULL},
    {"on_first_paging", core_on_first_paging, METH_O, NULL},
    {"on_unseen_write", core_on_unseen_write, METH_O, NULL},
    {"make_plan", KEYWORDS(core_make_plan), NULL},
    {"replay", KEYWORDS(core_replay), NULL},
    {"sim_fd", core_sim_fd, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static int module_exec(PyObject *module) {
    module_state *state = state_of(module);
    PyObject *defaults =
        Py_BuildValue("{s:s,s:i,s:O}", "status", "OK", "driver_code", 0, "oom", Py_None);
    if (defaults == NULL) return -1;
    state->core_error = PyErr_NewExceptionWithDoc(
        "torchpager._core.CoreError", "A call of the core failed and changed nothing.", NULL,
        defaults);
    Py_DECREF(defaults);
    if (state->core_error == NULL) return -1;
    if (PyModule_AddObjectRef(module, "CoreError", state->core_error) != 0) return -1;
    if (PyModule_AddIntConstant(module, "SIM_SLOT", TP_SLOT_SIM) != 0) return -1;
    if (PyModule_AddIntConstant(module, "STEP_ASKED", TP_STEP_ASKED) != 0) return -1;
    if (PyModule_AddIntConstant(module, "OPTIMIZER_BEGIN", TP_STEP_OPTIMIZER_BEGIN) != 0)
        return -1;
    if (PyModule_AddIntConstant(module, "OPTIMIZER_END", TP_STEP_OPTIMIZER_END) != 0) return -1;
    return PyModule_AddIntConstant(module, "DEBUG", TP_DEBUG);
}

static int module_traverse(PyObject *module, visitproc visit, void *arg) {
    module_state *state = state_of(module);
    if (state == NULL) return 0;
    Py_VISIT(state->core_error);
    Py_VISIT(state->first_paging);
    Py_VISIT(state->unseen_write);
    return 0;
}

static int module_clear(PyObject *module) {
    module_state *state = state_of(module);
    if (state == NULL) return 0;
    if (state->first_paging != NULL) tp_bind_set_first_paging(NULL);
    Py_CLEAR(state->core_error);
    if (state->unseen_write != NULL) tp_bind_set_unseen_write(NULL);
    Py_CLEAR(state->first_paging);
    Py_CLEAR(state->unseen_write);
    return 0;
}

static void module_free(void *module) { (void)module_clear((PyObject *)module); }

static PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, (void *)module_exec},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, NULL},
};

static struct PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    .m_name = "torchpager._core",
    .m_doc = "The C core of torchpager.",
    .m_size = sizeof(module_state),
    .m_methods = methods,
    .m_slots = module_slots,
    .m_traverse = module_traverse,
    .m_clear = module_clear,
    .m_free = module_free,
};

PyMODINIT_FUNC PyInit__core(void);
PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&module_def); }
