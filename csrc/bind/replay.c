#include "bind/replay.h"

#include <stdlib.h>

#include "base/bytes.h"
#include "base/check.h"
#include "device/device_sim.h"

enum { STRIDE = 1024, WAIT_NS = 1000000 };
/* A block's values begin so far apart: no byte of one is like a byte of the next at its place. */
#define VALUES 0x0101010101010101u

/* Blocks by the operator that they are born before, or die behind: those of `op` are
 * blocks[begin[op]] up to blocks[begin[op + 1]]. */
typedef struct events {
    uint32_t *begin, *blocks;
} events;

typedef struct kind {
    const tp_replay_step *step;
    events births, deaths;
} kind;

typedef struct live {
    tp_addr addr; /* 0: not alive, or too small to move */
    uint64_t value;
} live;

typedef struct replay {
    const tp_replay_options *options;
    tp_device *dev;
    tp_core *core;
    tp_stream stream;
    kind *kinds; /* by step */
    uint32_t kind_count;
    const tp_replay_step *now; /* the step that `blocks` are of; NULL: none yet */
    live *blocks;              /* as many as the largest step has */
    tp_access *accesses;       /* room for the operands of any operator */
    tp_addr *outputs;
    tp_op op;
    uint64_t next_value, launched_count, ended_count, wrong_count;
} replay;

/* ---- kernels ----------------------------------------------------------------------------- */

typedef struct piece {
    tp_addr addr;
    size_t bytes;
    uint64_t found, left; /* values; 0: nothing has been, or is, written */
} piece;

typedef struct kernel {
    replay *r;
    tp_replay_row *row; /* where the end of a step is noted, or NULL */
    size_t read_bytes, written_bytes;
    uint32_t count;
    piece pieces[];
} kernel;

static bool piece_check(tp_device *dev, const piece *it) {
    for (size_t at = 0; at + sizeof(uint64_t) <= it->bytes; at += STRIDE) {
        uint64_t word = 0;
        if (!tp_sim_read(dev, it->addr + at, &word, sizeof word)) return false;
        if (word != it->found + at) return false;
    }
    return true;
}

static bool piece_write(tp_device *dev, const piece *it) {
    for (size_t at = 0; at + sizeof(uint64_t) <= it->bytes; at += STRIDE) {
        const uint64_t word = it->left + at;
        if (!tp_sim_write(dev, it->addr + at, &word, sizeof word)) return false;
    }
    return true;
}

static void row_of_device(tp_device *dev, tp_replay_row *row) {
    tp_sim_counts counts;
    tp_sim_get_counts(dev, &counts);
    row->clock_ns = tp_sim_clock_ns(dev);
    row->to_host_bytes = counts.bytes_to_host + counts.written_over_link;
    row->to_device_bytes = counts.bytes_to_device + counts.read_over_link;
    row->over_link_bytes = counts.written_over_link + counts.read_over_link;
    row->frames_peak_bytes = counts.device_frames_peak_bytes;
}

static void kernel_run(tp_device *dev, void *arg) {
    kernel *k = arg;
    const bool payload = k->r->options->payload;
    for (uint32_t i = 0; i < k->count; i++) {
        const piece *it = &k->pieces[i];
        bool right = tp_sim_mapped(dev, it->addr, it->bytes);
        if (payload && it->found != 0) right = right && piece_check(dev, it);
        if (payload && it->left != 0) right = right && piece_write(dev, it);
        if (!right) k->r->wrong_count++;
    }
    if (k->row != NULL) row_of_device(dev, k->row);
    k->r->ended_count++;
    free(k);
}

static kernel *kernel_new(replay *r, size_t piece_max) {
    kernel *k = malloc(sizeof *k + piece_max * sizeof(piece));
    if (k != NULL) *k = (kernel){.r = r};
    return k;
}

/* Over an operand in HOST it moves bytes over the link. */
static void kernel_add(kernel *k, live *it, size_t bytes, bool reads, bool writes) {
    replay *r = k->r;
    if (it->addr == 0) return;
    tp_block_info info = {0};
    (void)tp_block_query(r->core, it->addr, &info); /* it is live */
    piece *p = &k->pieces[k->count++];
    *p = (piece){.addr = it->addr, .bytes = bytes, .found = it->value};
    if (reads) k->read_bytes += info.host_bytes;
    if (!writes) return;
    k->written_bytes += info.host_bytes;
    p->left = it->value = r->next_value += VALUES;
}

/* The kernel is the device's, also on failure. */
static tp_status kernel_launch(kernel *k, uint64_t duration_ns, tp_error *error) {
    replay *r = k->r;
    const tp_status status = tp_sim_launch_over_link(
        r->dev, r->stream, kernel_run, k, duration_ns, k->read_bytes, k->written_bytes, error);
    if (status == TP_OK) {
        r->launched_count++;
    } else {
        free(k);
    }
    return status;
}

static void await_kernels(replay *r, uint64_t most) {
    while (r->launched_count - r->ended_count > most) tp_core_pass_time(r->core, WAIT_NS);
}

/* ---- blocks ------------------------------------------------------------------------------ */

static bool is_small(const replay *r, const tp_trace_block *block) {
    return block->bytes < r->options->granularity_bytes;
}

static tp_status block_bear(replay *r, const tp_trace *trace, uint32_t block, uint32_t flags,
                            tp_error *error) {
    live *it = &r->blocks[block];
    it->value = 0;
    if (is_small(r, &trace->blocks[block])) return TP_OK;
    return tp_alloc(r->core, trace->blocks[block].bytes, r->stream, flags, &it->addr, NULL,
                    error);
}

static void block_kill(replay *r, uint32_t block) {
    if (r->blocks[block].addr != 0) tp_free(r->core, r->blocks[block].addr);
    r->blocks[block] = (live){0};
}

/* Alive where a step begins. */
static bool is_there_at_first(const tp_trace_block *block) {
    return block->born_op == TP_NO_OP || block->dead_op < block->born_op;
}

/* ---- operators --------------------------------------------------------------------------- */

static tp_status launch(replay *r, const tp_trace *trace, const tp_trace_op *op,
                        tp_error *error) {
    kernel *k = kernel_new(r, op->operand_count);
    if (k == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a kernel");
    for (uint32_t i = 0; i < op->operand_count; i++) {
        const tp_trace_operand *operand = &trace->operands[op->operand_begin + i];
        kernel_add(k, &r->blocks[operand->block], trace->blocks[operand->block].bytes,
                   operand->reads, operand->writes);
    }
    return kernel_launch(k, op->device_ns, error);
}

static size_t list_accesses(replay *r, const tp_trace *trace, const tp_trace_op *op,
                            uint32_t number) {
    size_t count = 0;
    for (uint32_t i = 0; i < op->operand_count; i++) {
        const tp_trace_operand *operand = &trace->operands[op->operand_begin + i];
        if (trace->blocks[operand->block].born_op == number) continue;
        const tp_addr addr = r->blocks[operand->block].addr;
        if (addr != 0) r->accesses[count++] = (tp_access){addr, operand->writes};
    }
    return count;
}

static size_t list_outputs(replay *r, const tp_trace *trace, const tp_trace_op *op,
                           uint32_t number) {
    size_t count = 0;
    for (uint32_t i = 0; i < op->operand_count; i++) {
        const uint32_t block = trace->operands[op->operand_begin + i].block;
        if (trace->blocks[block].born_op != number || r->blocks[block].addr == 0) continue;
        r->outputs[count++] = r->blocks[block].addr;
    }
    return count;
}

/* As the hook does: what the operator finds is announced, what it makes is born while it is in
 * progress, what is freed behind it is freed behind it. */
static tp_status run_op(replay *r, const kind *it, uint32_t number, tp_error *error) {
    const tp_trace *trace = &it->step->trace;
    const tp_trace_op *op = &trace->ops[number];
    const bool is_real = it->step->names[number] != 0;
    const size_t count = list_accesses(r, trace, op, number);
    r->op.name = it->step->names[number];
    r->op.backward = it->step->backward[number] != 0;
    if (is_real) tp_op_begin(r->core, &r->op, r->accesses, count, r->stream);
    tp_status status = TP_OK;
    for (uint32_t i = it->births.begin[number];
         status == TP_OK && i < it->births.begin[number + 1]; i++) {
        const uint32_t block = it->births.blocks[i];
        status = block_bear(r, trace, block, is_real ? TP_ALLOC_PINNED : 0, error);
        if (status == TP_OK && is_real && r->blocks[block].addr != 0)
            tp_op_adopt(&r->op, r->blocks[block].addr);
    }
    if (status == TP_OK && is_real) status = launch(r, trace, op, error);
    const size_t output_count = list_outputs(r, trace, op, number);
    if (is_real) tp_op_end(&r->op, r->outputs, output_count, NULL);
    for (uint32_t i = it->deaths.begin[number]; i < it->deaths.begin[number + 1]; i++)
        block_kill(r, it->deaths.blocks[i]);
    if (r->options->run_ahead_ops != 0) await_kernels(r, r->options->run_ahead_ops);
    return status;
}

/* What is alive before a program begins is written by an operator of its own. */
static tp_status bear_at_first(replay *r, const tp_trace *trace, uint32_t block,
                               tp_error *error) {
    tp_status status = block_bear(r, trace, block, 0, error);
    live *it = &r->blocks[block];
    if (status != TP_OK || it->addr == 0) return status;
    kernel *k = kernel_new(r, 1);
    if (k == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a kernel");
    const tp_access access = {it->addr, true};
    r->op.name = tp_op_name("aten::fill_.Scalar");
    tp_op_begin(r->core, &r->op, &access, 1, r->stream);
    kernel_add(k, it, trace->blocks[block].bytes, false, true);
    status = kernel_launch(k, 0, error);
    tp_op_end(&r->op, NULL, 0, NULL);
    return status;
}

/* ---- steps ------------------------------------------------------------------------------- */

static bool lasts(const replay *r, uint32_t block) { return block < r->options->lasting_count; }

/* From one kind of step to another only what lasts goes on; the rest is as if it had always been. */
static tp_status step_enter(replay *r, const kind *it, tp_error *error) {
    const tp_trace *trace = &it->step->trace;
    if (r->now == it->step) return TP_OK;
    const uint32_t before = r->now == NULL ? 0 : r->now->trace.block_count;
    for (uint32_t i = 0; i < before; i++) {
        if (!lasts(r, i)) block_kill(r, i);
    }
    tp_status status = TP_OK;
    for (uint32_t i = 0; status == TP_OK && i < trace->block_count; i++) {
        const bool goes_on = lasts(r, i) && r->now != NULL;
        if (is_there_at_first(&trace->blocks[i]) && !goes_on)
            status = bear_at_first(r, trace, i, error);
    }
    r->now = it->step;
    return status;
}

/* The end of a step on the device is that of a kernel that does nothing. */
static tp_status step_note(replay *r, tp_replay_row *row, tp_error *error) {
    tp_stats stats;
    tp_core_stats(r->core, &stats);
    *row = (tp_replay_row){.miss_count = stats.misses.count,
                           .stall_count = stats.stalls.count,
                           .stall_ns = stats.stalls.ns,
                           .memory_stall_count = stats.memory_stalls.count,
                           .host_operand_bytes = stats.host_operators.bytes};
    kernel *k = kernel_new(r, 0);
    if (k == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a kernel");
    k->row = row;
    return kernel_launch(k, 0, error);
}

static tp_status run_step(replay *r, const kind *it, tp_replay_row *row, tp_error *error) {
    tp_status status = step_enter(r, it, error);
    for (uint32_t i = 0; status == TP_OK && i < it->step->trace.op_count; i++)
        status = run_op(r, it, i, error);
    tp_mark_step(r->core, TP_STEP_ASKED);
    return status == TP_OK ? step_note(r, row, error) : status;
}

/* ---- life -------------------------------------------------------------------------------- */

static bool events_make(const tp_trace *trace, bool births, events *out) {
    const uint32_t ops = trace->op_count;
    out->begin = calloc(ops + 2u, sizeof *out->begin);
    out->blocks = calloc(trace->block_count + 1u, sizeof *out->blocks);
    if (out->begin == NULL || out->blocks == NULL) return false;
    uint32_t *counts = out->begin + 1; /* each becomes its beginning, then its end */
    for (uint32_t i = 0; i < trace->block_count; i++) {
        const uint32_t op = births ? trace->blocks[i].born_op : trace->blocks[i].dead_op;
        if (op != TP_NO_OP) counts[op + 1]++;
    }
    for (uint32_t op = 0; op < ops; op++) counts[op + 1] += counts[op];
    for (uint32_t i = 0; i < trace->block_count; i++) {
        const uint32_t op = births ? trace->blocks[i].born_op : trace->blocks[i].dead_op;
        if (op != TP_NO_OP) out->blocks[counts[op]++] = i;
    }
    return true;
}

static void events_free(events *it) {
    free(it->begin);
    free(it->blocks);
}

/* The most that small storages add up to. */
static size_t small_peak(const replay *r, const kind *it) {
    const tp_trace *trace = &it->step->trace;
    size_t held = 0, peak;
    for (uint32_t i = 0; i < trace->block_count; i++) {
        const tp_trace_block *block = &trace->blocks[i];
        if (is_small(r, block) && is_there_at_first(block)) held += block->bytes;
    }
    peak = held;
    for (uint32_t op = 0; op < trace->op_count; op++) {
        for (uint32_t i = it->births.begin[op]; i < it->births.begin[op + 1]; i++) {
            const tp_trace_block *block = &trace->blocks[it->births.blocks[i]];
            held += is_small(r, block) ? block->bytes : 0;
        }
        peak = tp_max_size(peak, held);
        for (uint32_t i = it->deaths.begin[op]; i < it->deaths.begin[op + 1]; i++) {
            const tp_trace_block *block = &trace->blocks[it->deaths.blocks[i]];
            held -= is_small(r, block) ? block->bytes : 0;
        }
    }
    return peak;
}

static tp_status room_make(replay *r, const tp_replay_step *steps, tp_error *error) {
    uint32_t blocks = 1, operands = 1;
    bool room = true;
    for (uint32_t i = 0; room && i < r->kind_count; i++) {
        const tp_trace *trace = &steps[i].trace;
        const tp_status status = tp_trace_check(trace, error);
        if (status != TP_OK) return status;
        r->kinds[i].step = &steps[i];
        room = events_make(trace, true, &r->kinds[i].births) &&
               events_make(trace, false, &r->kinds[i].deaths);
        if (trace->block_count > blocks) blocks = trace->block_count;
        for (uint32_t op = 0; op < trace->op_count; op++) {
            if (trace->ops[op].operand_count > operands)
                operands = trace->ops[op].operand_count;
        }
    }
    r->blocks = calloc(blocks, sizeof *r->blocks);
    r->accesses = calloc(operands, sizeof *r->accesses);
    r->outputs = calloc(operands, sizeof *r->outputs);
    room = room && r->blocks != NULL && r->accesses != NULL && r->outputs != NULL;
    return room ? TP_OK : tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a replay");
}

static void room_free(replay *r) {
    for (uint32_t i = 0; r->kinds != NULL && i < r->kind_count; i++) {
        events_free(&r->kinds[i].births);
        events_free(&r->kinds[i].deaths);
    }
    free(r->kinds);
    free(r->blocks);
    free(r->accesses);
    free(r->outputs);
}

/* The hook is there from the beginning. */
static void arm(void *ctx, tp_arming level) {
    (void)ctx;
    (void)level;
}

static tp_status core_open(replay *r, tp_error *error) {
    const tp_replay_options *options = r->options;
    size_t small = 0;
    for (uint32_t i = 0; i < r->kind_count; i++)
        small = tp_max_size(small, small_peak(r, &r->kinds[i]));
    const size_t granules =
        tp_sub_floor(options->budget_bytes, small) / options->granularity_bytes;
    if (granules == 0) {
        return tp_error_set(error, TP_OUT_OF_MEMORY,
                            "storages that cannot move take %zu of %zu bytes", small,
                            options->budget_bytes);
    }
    const size_t frames_bytes = granules * options->granularity_bytes;
    /* Not a byte more: what the budget is there for, the device sees to. */
    const tp_sim_options sim = {.device_bytes = frames_bytes,
                                .granularity_bytes = options->granularity_bytes,
                                .time_ordered = true,
                                .no_payload = !options->payload,
                                .link_bytes_per_s = options->link_bytes_per_s,
                                .duplex_bytes_per_s = options->link_both_bytes_per_s,
                                .map_device_ns_per_mib = options->map_device_ns_per_mib,
                                .map_host_ns_per_mib = options->map_host_ns_per_mib};
    tp_status status = tp_sim_device_create(&sim, &r->dev, error);
    if (status != TP_OK) return status;
    const tp_config config = {.device_budget_bytes = frames_bytes,
                              .host_budget_bytes = TP_NO_LIMIT,
                              .large_min_bytes = options->granularity_bytes,
                              .extent_max_bytes = options->extent_max_bytes,
                              .offload = true,
                              .no_thread = true,
                              .hooks = {.arm = arm}};
    status = tp_core_create(&config, r->dev, &r->core, error);
    if (status != TP_OK) return status;
    tp_core_set_planning(r->core, options->planning);
    return tp_sim_stream_create(r->dev, &r->stream, error);
}

tp_status tp_replay(const tp_replay_step *steps, const uint32_t *order, uint32_t count,
                    const tp_replay_options *options, tp_replay_row *rows,
                    uint64_t *wrong_count, tp_error *error) {
    replay r = {.options = options};
    for (uint32_t i = 0; i < count; i++) {
        if (order[i] >= r.kind_count) r.kind_count = order[i] + 1;
    }
    r.kinds = calloc(r.kind_count + 1u, sizeof *r.kinds);
    tp_status status = r.kinds != NULL
                           ? room_make(&r, steps, error)
                           : tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a replay");
    if (status == TP_OK) status = core_open(&r, error);
    for (uint32_t i = 0; status == TP_OK && i < count; i++)
        status = run_step(&r, &r.kinds[order[i]], &rows[i], error);
    if (r.core != NULL) {
        await_kernels(&r, 0);
        const tp_status checked = tp_core_check(r.core, status == TP_OK ? error : NULL);
        if (status == TP_OK) status = checked;
        tp_core_destroy(r.core);
    }
    tp_op_fini(&r.op);
    room_free(&r);
    *wrong_count = r.wrong_count;
    return status;
}
