#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bind/step_py.h"

#include <string.h>

enum { READS = 1, WRITES = 2 };

/* Columns of fixed width, in the machine's byte order, as make_plan takes them. */
static PyObject *column(size_t count, size_t width) {
    return PyBytes_FromStringAndSize(NULL, (Py_ssize_t)(count * width));
}

static void put_u32(PyObject *to, size_t idx, uint32_t value) {
    memcpy(PyBytes_AS_STRING(to) + idx * sizeof value, &value, sizeof value);
}

static void put_u64(PyObject *to, size_t idx, uint64_t value) {
    memcpy(PyBytes_AS_STRING(to) + idx * sizeof value, &value, sizeof value);
}

static bool put(PyObject *dict, const char *key, PyObject *value) {
    const bool good = value != NULL && PyDict_SetItemString(dict, key, value) == 0;
    Py_XDECREF(value);
    return good;
}

static PyObject *names(const tp_step *step) {
    PyObject *list = PyList_New((Py_ssize_t)step->trace.op_count);
    for (uint32_t i = 0; list != NULL && i < step->trace.op_count; i++) {
        PyObject *name =
            PyUnicode_InternFromString(tp_op_name_text(tp_kind_name(step->kinds[i])));
        if (name == NULL) Py_CLEAR(list);
        if (list != NULL) PyList_SET_ITEM(list, (Py_ssize_t)i, name);
    }
    return list;
}

static bool put_ops(PyObject *dict, const tp_step *step) {
    const tp_trace *trace = &step->trace;
    PyObject *phase = column(trace->op_count, 1), *end = column(trace->op_count, 4);
    PyObject *device = column(trace->op_count, 8), *began = column(trace->op_count, 8);
    const bool made = phase != NULL && end != NULL && device != NULL && began != NULL;
    for (uint32_t i = 0; made && i < trace->op_count; i++) {
        const tp_trace_op *it = &trace->ops[i];
        PyBytes_AS_STRING(phase)[i] = (char)tp_kind_phase(step->kinds[i]);
        put_u32(end, i, it->operand_begin + it->operand_count);
        put_u64(device, i, it->device_ns);
        put_u64(began, i, step->began_ns[i]);
    }
    const bool good[] = {put(dict, "names", names(step)), put(dict, "phase", phase),
                         put(dict, "operand_end", end), put(dict, "device_ns", device),
                         put(dict, "began_ns", began)};
    return good[0] && good[1] && good[2] && good[3] && good[4];
}

static bool put_operands(PyObject *dict, const tp_trace *trace) {
    PyObject *block = column(trace->operand_count, 4), *flags = column(trace->operand_count, 1);
    for (uint32_t i = 0; block != NULL && flags != NULL && i < trace->operand_count; i++) {
        const tp_trace_operand *it = &trace->operands[i];
        put_u32(block, i, it->block);
        PyBytes_AS_STRING(flags)[i] =
            (char)((it->reads ? READS : 0) | (it->writes ? WRITES : 0));
    }
    const bool good[] = {put(dict, "operand_block", block), put(dict, "operand_flags", flags)};
    return good[0] && good[1];
}

static bool put_blocks(PyObject *dict, const tp_trace *trace) {
    PyObject *bytes = column(trace->block_count, 8);
    PyObject *born = column(trace->block_count, 4), *dead = column(trace->block_count, 4);
    const bool made = bytes != NULL && born != NULL && dead != NULL;
    for (uint32_t i = 0; made && i < trace->block_count; i++) {
        put_u64(bytes, i, trace->blocks[i].bytes);
        put_u32(born, i, trace->blocks[i].born_op);
        put_u32(dead, i, trace->blocks[i].dead_op);
    }
    const bool good[] = {put(dict, "block_bytes", bytes), put(dict, "born", born),
                         put(dict, "dead", dead)};
    return good[0] && good[1] && good[2];
}

static bool put_times(PyObject *dict, const tp_step *step) {
    return put(dict, "number", PyLong_FromUnsignedLongLong(step->number)) &&
           put(dict, "completed_count", PyLong_FromUnsignedLongLong(step->completed_count)) &&
           put(dict, "step_ns", PyLong_FromUnsignedLongLong(step->step_ns));
}

static void visit(void *ctx, const tp_step *step) {
    PyObject **answer = ctx;
    PyObject *dict = PyDict_New();
    if (dict != NULL && !(put_ops(dict, step) && put_operands(dict, &step->trace) &&
                          put_blocks(dict, &step->trace) && put_times(dict, step)))
        Py_CLEAR(dict);
    *answer = dict;
}

void *tp_bind_last_step(tp_core *core) {
    PyObject *answer = NULL;
    if (!tp_last_step(core, visit, &answer)) return Py_NewRef(Py_None);
    return answer;
}
