/* rig: a core over the simulated device with a fault device between them, for tests that set
 * one scene up by hand.
 *
 * With `manual`, queued work runs only in rig_step, rig_drain, and while a thread waits
 * inside the core (the hook wait_begin steps, unless the test has hooks of its own). */
#ifndef TP_TESTS_RIG_H
#define TP_TESTS_RIG_H

#include <stdatomic.h>

#include "base/bytes.h"
#include "device/device_sim.h"
#include "fault_device.h"
#include "tp.h"

enum { RIG_STREAMS = 10, RIG_GATE = RIG_STREAMS - 1, RIG_GRANULE = 4096, RIG_EXTENT = 16384 };

typedef struct rig_options {
    size_t device_bytes; /* 0: 16 MiB */
    size_t budget_bytes; /* 0: 512 KiB */
    size_t host_bytes;   /* 0: no limit */
    size_t large_min_bytes;
    bool no_offload, manual, serve_small, strict, no_context_marker;
    bool no_plans;
    const tp_hooks *hooks;
} rig_options;

typedef struct rig {
    tp_device *sim, *dev;
    tp_core *core;
    tp_stream streams[RIG_STREAMS];
    atomic_uint wrong; /* reads that found another value, or nothing mapped */
    atomic_uint ran;   /* kernels */
} rig;

void rig_open(rig *r, const rig_options *options);
/* Drains, then destroys; live blocks go with the core. */
void rig_close(rig *r);
/* At most `count` queued items. */
void rig_step(rig *r, unsigned count);
void rig_drain(rig *r);
/* What is queued on `stream` from now on runs after some 64 items of other streams. */
void rig_hold(rig *r, unsigned stream);

tp_addr rig_alloc(rig *r, size_t bytes, unsigned stream);
/* A kernel that nobody has announced. */
void rig_launch(rig *r, unsigned stream, tp_addr addr, size_t bytes, uint64_t value,
                bool write);
/* An operator with one operand and its kernel. */
void rig_op(rig *r, unsigned stream, tp_addr addr, size_t bytes, uint64_t value, bool write);

/* A tensor of `bytes` that an operator on stream 0 has written. */
tp_addr rig_made(rig *r, size_t bytes, uint64_t value);
/* Once the hook has been armed for long enough: what `how` lets go of the block at `addr` with. */
typedef tp_status rig_let_go(rig *r, tp_addr addr, tp_dropped **out);
tp_dropped *rig_gone_soon(rig *r, tp_addr addr, rig_let_go *how);
/* Drains; nothing was read wrong, and the core is in order; closes. */
void rig_close_right(rig *r);

/* Has somebody wait for memory once: from then on operators' ends are marked one by one. */
void rig_press(rig *r);

tp_stats rig_stats(rig *r);
tp_block_info rig_info(rig *r, tp_addr addr);
/* Runs `body` on another thread; false if it has not returned after `seconds` (it is left
 * behind). */
bool rig_returns(void (*body)(void *arg), void *arg, unsigned seconds);

#endif
