#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bind/replay_py.h"

#include <string.h>

#include "bind/plan_py.h"
#include "bind/replay.h"

/* A step comes as the columns of its trace, the names of its operators and a column of which are
 * part of a backward pass. */
enum { NAMES = TP_BIND_TRACE_COLUMNS, BACKWARD, STEP_ITEMS };

typedef struct program {
    tp_replay_step *steps;
    Py_ssize_t count;
    uint32_t *order;
    tp_replay_row *rows;
    uint32_t order_count;
} program;

static void step_free(const tp_replay_step *step) {
    tp_bind_trace_free(&step->trace);
    PyMem_RawFree((void *)(uintptr_t)step->names);
    PyMem_RawFree((void *)(uintptr_t)step->backward);
}

static void program_free(program *it) {
    for (Py_ssize_t i = 0; i < it->count; i++) step_free(&it->steps[i]);
    PyMem_RawFree(it->steps);
    PyMem_RawFree(it->order);
    PyMem_RawFree(it->rows);
}

static bool names_make(PyObject *names, uint32_t *out) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(names); i++) {
        const char *name = PyUnicode_AsUTF8(PyList_GET_ITEM(names, i));
        if (name == NULL) return false;
        out[i] = name[0] == '\0' ? 0 : tp_op_name(name);
    }
    return true;
}

static bool step_make(PyObject *item, tp_replay_step *out) {
    if (!PyTuple_Check(item) || PyTuple_GET_SIZE(item) != STEP_ITEMS ||
        !PyList_Check(PyTuple_GET_ITEM(item, NAMES)) ||
        !PyBytes_Check(PyTuple_GET_ITEM(item, BACKWARD))) {
        PyErr_SetString(PyExc_TypeError, "a step is a tuple of columns, names and phases");
        return false;
    }
    if (!tp_bind_trace_make(item, &out->trace)) return false;
    PyObject *names = PyTuple_GET_ITEM(item, NAMES);
    PyObject *backward = PyTuple_GET_ITEM(item, BACKWARD);
    const size_t ops = out->trace.op_count;
    if ((size_t)PyList_GET_SIZE(names) != ops || (size_t)PyBytes_GET_SIZE(backward) != ops) {
        PyErr_SetString(PyExc_ValueError, "a step needs a name and a phase for each operator");
        return false;
    }
    uint32_t *ids = PyMem_RawCalloc(ops + 1, sizeof *ids);
    uint8_t *phases = PyMem_RawCalloc(ops + 1, sizeof *phases);
    out->names = ids;
    out->backward = phases;
    if (ids == NULL || phases == NULL) {
        PyErr_NoMemory();
        return false;
    }
    memcpy(phases, PyBytes_AS_STRING(backward), ops);
    return names_make(names, ids);
}

static bool program_make(PyObject *steps, PyObject *order, program *out) {
    const Py_ssize_t count = PyList_GET_SIZE(steps);
    const size_t order_bytes = (size_t)PyBytes_GET_SIZE(order);
    out->order_count = (uint32_t)(order_bytes / sizeof *out->order);
    out->steps = PyMem_RawCalloc((size_t)count + 1, sizeof *out->steps);
    out->order = PyMem_RawCalloc(out->order_count + 1u, sizeof *out->order);
    out->rows = PyMem_RawCalloc(out->order_count + 1u, sizeof *out->rows);
    if (out->steps == NULL || out->order == NULL || out->rows == NULL) {
        PyErr_NoMemory();
        return false;
    }
    memcpy(out->order, PyBytes_AS_STRING(order), out->order_count * sizeof *out->order);
    while (out->count < count) {
        /* Counted first, so that what has been made of it is freed. */
        const Py_ssize_t i = out->count++;
        if (!step_make(PyList_GET_ITEM(steps, i), &out->steps[i])) return false;
    }
    for (uint32_t i = 0; i < out->order_count; i++) {
        if (out->order[i] < (size_t)count) continue;
        PyErr_Format(PyExc_ValueError, "there is no step %u", out->order[i]);
        return false;
    }
    return true;
}

static PyObject *row_to_py(const tp_replay_row *row) {
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K,s:K}", "clock_ns",
                         (unsigned long long)row->clock_ns, "to_host_bytes",
                         (unsigned long long)row->to_host_bytes, "to_device_bytes",
                         (unsigned long long)row->to_device_bytes, "over_link_bytes",
                         (unsigned long long)row->over_link_bytes, "frames_peak_bytes",
                         (unsigned long long)row->frames_peak_bytes, "miss_count",
                         (unsigned long long)row->miss_count, "stall_count",
                         (unsigned long long)row->stall_count, "stall_ns",
                         (unsigned long long)row->stall_ns, "memory_stall_count",
                         (unsigned long long)row->memory_stall_count, "host_operand_bytes",
                         (unsigned long long)row->host_operand_bytes);
}

static PyObject *rows_to_py(const program *it, uint64_t wrong_count) {
    PyObject *rows = PyList_New((Py_ssize_t)it->order_count);
    for (uint32_t i = 0; rows != NULL && i < it->order_count; i++) {
        PyObject *row = row_to_py(&it->rows[i]);
        if (row == NULL) {
            Py_CLEAR(rows);
        } else {
            PyList_SET_ITEM(rows, (Py_ssize_t)i, row);
        }
    }
    return rows == NULL ? NULL : Py_BuildValue("NK", rows, (unsigned long long)wrong_count);
}

void *tp_bind_replay(void *args, void *kwargs, tp_error *error) {
    static char *names[] = {"steps",
                            "order",
                            "lasting_count",
                            "budget_bytes",
                            "granularity_bytes",
                            "extent_max_bytes",
                            "link_bytes_per_s",
                            "link_both_bytes_per_s",
                            "map_device_ns_per_mib",
                            "map_host_ns_per_mib",
                            "run_ahead_ops",
                            "payload",
                            "planning",
                            NULL};
    PyObject *steps, *order;
    unsigned int lasting, run_ahead;
    unsigned long long budget, granularity, extent_max, alone, both, map_device, map_host;
    int payload, planning;
    if (!PyArg_ParseTupleAndKeywords(
            (PyObject *)args, (PyObject *)kwargs, "$O!SIKKKKKKKIpp:replay", names, &PyList_Type,
            &steps, &order, &lasting, &budget, &granularity, &extent_max, &alone, &both,
            &map_device, &map_host, &run_ahead, &payload, &planning))
        return NULL;
    const tp_replay_options options = {.budget_bytes = budget,
                                       .granularity_bytes = granularity,
                                       .extent_max_bytes = extent_max,
                                       .link_bytes_per_s = alone,
                                       .link_both_bytes_per_s = both,
                                       .map_device_ns_per_mib = map_device,
                                       .map_host_ns_per_mib = map_host,
                                       .lasting_count = lasting,
                                       .run_ahead_ops = run_ahead,
                                       .payload = payload != 0,
                                       .planning = planning != 0};
    if (granularity == 0) {
        PyErr_SetString(PyExc_ValueError, "a granularity of 0 bytes");
        return NULL;
    }
    program it = {0};
    PyObject *answer = NULL;
    if (program_make(steps, order, &it)) {
        uint64_t wrong_count = 0;
        tp_status status;
        Py_BEGIN_ALLOW_THREADS;
        status = tp_replay(it.steps, it.order, it.order_count, &options, it.rows, &wrong_count,
                           error);
        Py_END_ALLOW_THREADS;
        if (status == TP_OK) answer = rows_to_py(&it, wrong_count);
    }
    program_free(&it);
    return answer;
}
