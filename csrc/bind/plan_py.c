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
    RECIPE_NS = TP_BIND_TRACE_COLUMNS, /* from here on: make_plan only */
    RECIPE_OP,
    RECIPE_INPUT_END,
    RECIPE_OUTPUT_END,
    RECIPE_BLOCK,
    COLUMNS
};

static const size_t column_width[COLUMNS] = {
    [DEVICE_NS] = sizeof(uint64_t),
    [OPERAND_END] = sizeof(uint32_t),
    [STREAMS] = sizeof(uint8_t),
    [OPERAND_BLOCK] = sizeof(uint32_t),
    [OPERAND_FLAGS] = sizeof(uint8_t),
    [BYTES] = sizeof(uint64_t),
    [BORN] = sizeof(uint32_t),
    [DEAD] = sizeof(uint32_t),
    [RECIPE_NS] = sizeof(uint64_t),
    [RECIPE_OP] = sizeof(uint32_t),
    [RECIPE_INPUT_END] = sizeof(uint32_t),
    [RECIPE_OUTPUT_END] = sizeof(uint32_t),
    [RECIPE_BLOCK] = sizeof(uint32_t),
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
    [RECIPE_NS] = RECIPE_NS,
    [RECIPE_OP] = RECIPE_NS,
    [RECIPE_INPUT_END] = RECIPE_NS,
    [RECIPE_OUTPUT_END] = RECIPE_NS,
    [RECIPE_BLOCK] = RECIPE_BLOCK,
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

/* The columns of recipes; ends that fall make counts that tp_trace_check refuses. */
static void fill_recipes(const Py_buffer *columns, tp_trace_recipe *recipe, uint32_t *block) {
    uint32_t begin = 0;
    for (size_t i = 0; i < length(columns, RECIPE_NS); i++) {
        const uint32_t middle = u32_at(&columns[RECIPE_INPUT_END], i);
        const uint32_t end = u32_at(&columns[RECIPE_OUTPUT_END], i);
        recipe[i] = (tp_trace_recipe){.device_ns = u64_at(&columns[RECIPE_NS], i),
                                      .op = u32_at(&columns[RECIPE_OP], i),
                                      .block_begin = begin,
                                      .input_count = middle - begin,
                                      .output_count = end - middle};
        begin = end;
    }
    for (size_t i = 0; i < length(columns, RECIPE_BLOCK); i++)
        block[i] = u32_at(&columns[RECIPE_BLOCK], i);
}

/* The trace in the planner's form; one allocation, which begins with trace->ops. */
static bool build_trace(const Py_buffer *columns, tp_trace *trace) {
    const size_t ops = length(columns, DEVICE_NS), operands = length(columns, OPERAND_BLOCK);
    const size_t blocks = length(columns, BYTES), recipes = length(columns, RECIPE_NS);
    const size_t recipe_blocks = length(columns, RECIPE_BLOCK);
    char *room = PyMem_RawCalloc(
        1, ops * sizeof(tp_trace_op) + blocks * sizeof(tp_trace_block) +
               recipes * sizeof(tp_trace_recipe) + operands * sizeof(tp_trace_operand) +
               recipe_blocks * sizeof(uint32_t) + 1);
    if (room == NULL) {
        PyErr_NoMemory();
        return false;
    }
    tp_trace_op *op = (tp_trace_op *)(void *)room;
    tp_trace_block *block = (tp_trace_block *)(void *)(op + ops);
    tp_trace_recipe *recipe = (tp_trace_recipe *)(void *)(block + blocks);
    tp_trace_operand *operand = (tp_trace_operand *)(void *)(recipe + recipes);
    uint32_t *recipe_block = (uint32_t *)(void *)(operand + operands);
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
    fill_recipes(columns, recipe, recipe_block);
    *trace = (tp_trace){.ops = op,
                        .recipes = recipe,
                        .recipe_blocks = recipe_block,
                        .recipe_count = (uint32_t)recipes,
                        .recipe_block_count = (uint32_t)recipe_blocks,
                        .operands = operand,
                        .blocks = block,
                        .op_count = (uint32_t)ops,
                        .operand_count = (uint32_t)operands,
                        .block_count = (uint32_t)blocks};
    return true;
}

bool tp_bind_trace_make(void *tuple, tp_trace *out) {
    PyObject *values = tuple;
    Py_buffer columns[COLUMNS] = {0}; /* without recipes */
    int count = 0;
    while (count < TP_BIND_TRACE_COLUMNS &&
           PyObject_GetBuffer(PyTuple_GET_ITEM(values, count), &columns[count], PyBUF_SIMPLE) ==
               0)
        count++;
    const bool made =
        count == TP_BIND_TRACE_COLUMNS && columns_fit(columns) && build_trace(columns, out);
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
        "NKKKKIKK", acts, (unsigned long long)plan->step_ns, (unsigned long long)plan->in_bytes,
        (unsigned long long)plan->out_bytes, (unsigned long long)plan->peak_bytes,
        plan->rerun_count, (unsigned long long)plan->rerun_ns,
        (unsigned long long)plan->dropped_bytes);
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
                            "recipe_ns",
                            "recipe_op",
                            "recipe_input_end",
                            "recipe_output_end",
                            "recipe_block",
                            "budget_bytes",
                            "link_bytes_per_s",
                            "link_both_bytes_per_s",
                            "no_keep",
                            NULL};
    Py_buffer columns[COLUMNS];
    unsigned long long budget, alone, both;
    int no_keep = 0;
    if (!PyArg_ParseTupleAndKeywords(
            (PyObject *)args, (PyObject *)kwargs, "$y*y*y*y*y*y*y*y*y*y*y*y*y*KKKp:make_plan",
            names, &columns[0], &columns[1], &columns[2], &columns[3], &columns[4], &columns[5],
            &columns[6], &columns[7], &columns[8], &columns[9], &columns[10], &columns[11],
            &columns[12], &budget, &alone, &both, &no_keep))
        return NULL;
    tp_plan_config config;
    tp_plan_config_init(&config, budget);
    config.link_bytes_per_s = alone;
    config.link_both_bytes_per_s = both;
    config.no_keep = no_keep != 0;
    PyObject *answer = plan_columns(columns, &config, error);
    for (int i = 0; i < COLUMNS; i++) PyBuffer_Release(&columns[i]);
    return answer;
}
