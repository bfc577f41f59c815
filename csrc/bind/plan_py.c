#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "bind/plan_py.h"

#include <string.h>

/* What the call hands over: columns of fixed width, in the machine's byte order. */
enum {
    DEVICE_NS,
    OPERAND_END,
    STREAMS,
    OPERAND_BLOCK,
    OPERAND_FLAGS,
    BYTES,
    BORN,
    DEAD,
    COLUMNS = TP_BIND_TRACE_COLUMNS
};

static const size_t column_width[COLUMNS] = {
    [DEVICE_NS] = sizeof(uint64_t),    [OPERAND_END] = sizeof(uint32_t),
    [STREAMS] = sizeof(uint8_t),       [OPERAND_BLOCK] = sizeof(uint32_t),
    [OPERAND_FLAGS] = sizeof(uint8_t), [BYTES] = sizeof(uint64_t),
    [BORN] = sizeof(uint32_t),         [DEAD] = sizeof(uint32_t),
};
/* The column that says how long another one is. */
static const int column_like[COLUMNS] = {
    [DEVICE_NS] = DEVICE_NS,
    [OPERAND_END] = DEVICE_NS,
    [STREAMS] = DEVICE_NS,
    [OPERAND_BLOCK] = OPERAND_BLOCK,
    [OPERAND_FLAGS] = OPERAND_BLOCK,
    [BYTES] = BYTES,
    [BORN] = BYTES,
    [DEAD] = BYTES,
};
enum { READS = 1, WRITES = 2 };

static size_t length(const Py_buffer *columns, int column) {
    return (size_t)columns[column].len / column_width[column];
}

static uint32_t u32_at(const Py_buffer *column, size_t idx) {
    uint32_t value;
    memcpy(&value, (const char *)column->buf + idx * sizeof value, sizeof value);
    return value;
}

static uint64_t u64_at(const Py_buffer *column, size_t idx) {
    uint64_t value;
    memcpy(&value, (const char *)column->buf + idx * sizeof value, sizeof value);
    return value;
}

static uint8_t u8_at(const Py_buffer *column, size_t idx) {
    return ((const uint8_t *)column->buf)[idx];
}

static bool columns_fit(const Py_buffer *columns) {
    for (int i = 0; i < COLUMNS; i++) {
        const size_t count = length(columns, i);
        if ((size_t)columns[i].len % column_width[i] != 0 || count >= UINT32_MAX ||
            count != length(columns, column_like[i])) {
            PyErr_Format(PyExc_ValueError, "column %d has %zd bytes", i, columns[i].len);
            return false;
        }
    }
    return true;
}

/* The trace in the planner's form; one allocation, which begins with trace->ops. */
static bool build_trace(const Py_buffer *columns, tp_trace *trace) {
    const size_t ops = length(columns, DEVICE_NS), operands = length(columns, OPERAND_BLOCK);
    const size_t blocks = length(columns, BYTES);
    char *room =
        PyMem_RawCalloc(1, ops * sizeof(tp_trace_op) + blocks * sizeof(tp_trace_block) +
                               operands * sizeof(tp_trace_operand) + 1);
    if (room == NULL) {
        PyErr_NoMemory();
        return false;
    }
    tp_trace_op *op = (tp_trace_op *)(void *)room;
    tp_trace_block *block = (tp_trace_block *)(void *)(op + ops);
    tp_trace_operand *operand = (tp_trace_operand *)(void *)(block + blocks);
    uint32_t begin = 0;
    for (size_t i = 0; i < ops; i++) {
        const uint32_t end = u32_at(&columns[OPERAND_END], i);
        /* Ends that fall make a count that tp_trace_check refuses. */
        op[i] = (tp_trace_op){.device_ns = u64_at(&columns[DEVICE_NS], i),
                              .operand_begin = begin,
                              .operand_count = end - begin,
                              .streams = u8_at(&columns[STREAMS], i) != 0};
        begin = end;
    }
    for (size_t i = 0; i < operands; i++) {
        const uint8_t flags = u8_at(&columns[OPERAND_FLAGS], i);
        operand[i] = (tp_trace_operand){.block = u32_at(&columns[OPERAND_BLOCK], i),
                                        .reads = (flags & READS) != 0,
                                        .writes = (flags & WRITES) != 0};
    }
    for (size_t i = 0; i < blocks; i++)
        block[i] = (tp_trace_block){.bytes = u64_at(&columns[BYTES], i),
                                    .born_op = u32_at(&columns[BORN], i),
                                    .dead_op = u32_at(&columns[DEAD], i)};
    *trace = (tp_trace){.ops = op,
                        .operands = operand,
                        .blocks = block,
                        .op_count = (uint32_t)ops,
                        .operand_count = (uint32_t)operands,
                        .block_count = (uint32_t)blocks};
    return true;
}

bool tp_bind_trace_make(void *tuple, tp_trace *out) {
    PyObject *values = tuple;
    Py_buffer columns[COLUMNS];
    int count = 0;
    while (count < COLUMNS && PyObject_GetBuffer(PyTuple_GET_ITEM(values, count),
                                                 &columns[count], PyBUF_SIMPLE) == 0)
        count++;
    const bool made = count == COLUMNS && columns_fit(columns) && build_trace(columns, out);
    while (count > 0) PyBuffer_Release(&columns[--count]);
    return made;
}

void tp_bind_trace_free(const tp_trace *trace) { PyMem_RawFree((void *)(uintptr_t)trace->ops); }

static PyObject *plan_to_py(const tp_plan *plan) {
    PyObject *acts = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)plan->act_count * 16);
    if (acts == NULL) return NULL;
    char *at = PyBytes_AS_STRING(acts);
    for (uint32_t i = 0; i < plan->act_count; i++, at += 16) {
        const tp_act *it = &plan->acts[i];
        const uint32_t row[4] = {it->op, it->block, it->extent, (uint32_t)it->kind};
        memcpy(at, row, sizeof row);
    }
    return Py_BuildValue(
        "NKKKK", acts, (unsigned long long)plan->step_ns, (unsigned long long)plan->in_bytes,
        (unsigned long long)plan->out_bytes, (unsigned long long)plan->peak_bytes);
}

static PyObject *plan_columns(const Py_buffer *columns, const tp_plan_config *config,
                              tp_error *error) {
    tp_trace trace;
    if (!columns_fit(columns) || !build_trace(columns, &trace)) return NULL;
    tp_plan plan;
    tp_status status;
    Py_BEGIN_ALLOW_THREADS;
    status = tp_plan_make(&trace, config, &plan, error);
    Py_END_ALLOW_THREADS;
    tp_bind_trace_free(&trace);
    if (status != TP_OK) return NULL;
    PyObject *answer = plan_to_py(&plan);
    tp_plan_fini(&plan);
    return answer;
}

void *tp_bind_make_plan(void *args, void *kwargs, tp_error *error) {
    static char *names[] = {"device_ns",
                            "operand_end",
                            "streams",
                            "operand_block",
                            "operand_flags",
                            "block_bytes",
                            "born",
                            "dead",
                            "budget_bytes",
                            "link_bytes_per_s",
                            "link_both_bytes_per_s",
                            NULL};
    Py_buffer columns[COLUMNS];
    unsigned long long budget, alone, both;
    if (!PyArg_ParseTupleAndKeywords(
            (PyObject *)args, (PyObject *)kwargs, "$y*y*y*y*y*y*y*y*KKK:make_plan", names,
            &columns[0], &columns[1], &columns[2], &columns[3], &columns[4], &columns[5],
            &columns[6], &columns[7], &budget, &alone, &both))
        return NULL;
    tp_plan_config config;
    tp_plan_config_init(&config, budget);
    config.link_bytes_per_s = alone;
    config.link_both_bytes_per_s = both;
    PyObject *answer = plan_columns(columns, &config, error);
    for (int i = 0; i < COLUMNS; i++) PyBuffer_Release(&columns[i]);
    return answer;
}
