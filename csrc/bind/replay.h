/* replay: a recorded program, taken step by step through a core of its own over the simulated
 * device, in virtual time: what the operator hook and the allocator do for PyTorch is done here for
 * the operators of a trace. Each becomes a kernel that takes the recorded time; over operands in
 * HOST, at least as long as the link takes for them.
 *
 * What is the trace's: operators, operands, lives, sizes, times. What is real: everything from tp.h
 * down. What costs no time: launching, the host's memory; mapping, unless the options
 * say what it takes. The pager has no thread here, so the host waits for it.
 *
 * Storages that are too small for extents live in the framework's own allocator: their peak is
 * taken off the budget. With `payload` each kernel checks what it reads and writes something new;
 * without, that its operands are mapped. One thread, no lock. */
#ifndef TP_BIND_REPLAY_H
#define TP_BIND_REPLAY_H

#include "tp.h"

typedef struct tp_replay_step {
    tp_trace trace;
    const uint32_t *names;   /* tp_op_name of each operator; 0: it only keeps others apart */
    const uint8_t *backward; /* whether it is part of a backward pass */
} tp_replay_step;

typedef struct tp_replay_options {
    size_t budget_bytes, granularity_bytes, extent_max_bytes;
    uint64_t link_bytes_per_s, link_both_bytes_per_s;
    uint64_t map_device_ns_per_mib, map_host_ns_per_mib; /* as tp_sim_options */
    uint32_t lasting_count; /* blocks, the first ones, that are the same in all kinds of step */
    uint32_t run_ahead_ops; /* how many operators may be launched and not ended; 0: no limit */
    bool payload;
    bool planning; /* else it is paged on demand throughout */
} tp_replay_options;

/* Since the beginning, when a step has ended: its last kernel on the device, its last operator
 * on the host. */
typedef struct tp_replay_row {
    uint64_t clock_ns, to_host_bytes, to_device_bytes; /* copies, and kernels over the link */
    uint64_t over_link_bytes;                          /* of those, by kernels */
    uint64_t frames_peak_bytes;
    uint64_t miss_count, stall_count, stall_ns, memory_stall_count, host_operand_bytes;
} tp_replay_row;

/* Runs steps[order[i]] for each i; rows[i] tells of it. *wrong_count: operands that were not mapped,
 * or held a wrong value. TP_INVALID for a trace that makes no sense; else what the core answers
 * when a block cannot be had. */
TP_MUST_USE tp_status tp_replay(const tp_replay_step *steps, const uint32_t *order,
                                uint32_t count, const tp_replay_options *options,
                                tp_replay_row *rows, uint64_t *wrong_count, tp_error *error);

#endif
