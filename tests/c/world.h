/* world: a program in miniature over the simulated device: tensors, streams, operators whose kernels
 * run some time later and check every value they read against a model that copies everything.
 *
 * The model is exact because the program is well formed: before an operator runs on a stream, the
 * stream waits for the last work on its operands on other streams, as a PyTorch program must.
 * The device is made nastier than the simulated one: whenever a mapping goes away, queued kernels
 * run in the gap before the next one comes, and some copies take long. */
#ifndef TP_TESTS_WORLD_H
#define TP_TESTS_WORLD_H

#include <stdatomic.h>

#include "device/device_sim.h"
#include "tp.h"

enum { WORLD_TENSORS = 24, WORLD_STREAMS = 3 };

typedef struct world_tensor {
    tp_addr addr; /* 0: none */
    size_t bytes;
    uint64_t value;               /* what a kernel launched now would find */
    tp_event last[WORLD_STREAMS]; /* last work on it, by stream */
    bool used[WORLD_STREAMS];
} world_tensor;

typedef struct world_options {
    size_t budget_bytes, host_bytes, granularity_bytes, extent_bytes;
    uint64_t seed;
    uint32_t rules_off;
    bool strict, offload, no_context_marker;
    bool fixed_sizes; /* every tensor has two extents */
    int copy_idles;   /* idle work before each copy; 0: before some */
    bool gentle;      /* the simulated device as it is */
    bool no_fingerprints, readonly_clean;
    bool blind_writers; /* some kernels write without being announced */
    void (*prepare)(
        tp_device *dev); /* before the core, whose thread calls it, exists; NULL: nothing */
} world_options;

typedef struct world {
    world_options options;
    tp_device *dev;
    tp_core *core;
    tp_stream streams[WORLD_STREAMS];
    world_tensor tensors[WORLD_TENSORS];
    uint64_t random;
    atomic_uint pending;  /* kernels launched and not yet run */
    atomic_uint wrong;    /* a kernel read a value that is not the model's */
    atomic_uint unmapped; /* a kernel met an address that maps nothing */
    uint64_t next_value;
} world;

void world_open(world *w, const world_options *options);
/* Runs everything queued, frees all, destroys. */
void world_close(world *w);
/* A second program (another thread) on the same core. */
void world_join(world *w, const world *host, uint64_t seed);
void world_leave(world *w);
void world_drain(world *w);
unsigned world_violations(world *w);

/* False: out of memory. */
bool world_alloc(world *w, unsigned idx, size_t bytes, unsigned stream);
/* The same, but written first by a kernel that nobody announced. */
bool world_alloc_blind(world *w, unsigned idx, size_t bytes, unsigned stream);
void world_free(world *w, unsigned idx);
/* An operator on `stream` that checks `reads` and writes `target` (or -1). */
void world_op(world *w, unsigned stream, const int *reads, unsigned read_count, int target);
/* The same, but the kernels are launched by nobody we know: no pins, no marks (inside a region when
 * `region`). It only reads. */
void world_blind_read(world *w, unsigned stream, int read, bool region);
/* A region that is known to use `target`: it writes to it, allocates `made` (-1: nothing), which may
 * wait for memory, and writes to it again. */
void world_region(world *w, unsigned stream, int target, int made, size_t bytes);
/* A kernel that writes, launched likewise. */
void world_blind_write(world *w, unsigned stream, int target);
tp_stats world_stats(const world *w);
/* Work that does nothing, to be run before what comes later on the stream. */
void world_idle(world *w, unsigned stream, int count);
/* One random action. */
void world_act(world *w);

#endif
