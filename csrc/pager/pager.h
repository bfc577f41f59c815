/* pager: residency of live blocks, and the thread that changes their mappings.
 *
 * struct tp_pager is the state of one core; the files of this folder are its parts:
 *   extent    the state machine of an extent, and the gauges that follow it
 *   victim    which extents to evict (pure)
 *   transfer  queueing a write-back or a fill
 *   proof     whether a CLEAN extent is what its host frame says
 *   reclaim   where a frame comes from: pools, cached blocks, the device, victims; waiting for one
 *   arming    how much has to be known of operators
 *   alloc     blocks: born, freed, cached, retired
 *   fill      starting a fill; readahead: filling ahead of need
 *   access    operators: pins, misses, dirtiness, last-use markers
 *   learn     tells pager/steps of operators and blocks; timing: how long operators take
 *   plans     makes plans; executor: carries them out
 *   region    opaque regions and the gate
 *   resize    budgets moved while running
 *   pager     the thread: write-backs, evictions, fills, retirements
 * None of it decides policy but victim and memory/budget.
 *
 * Lock: everything here expects pager->lock held, and may release it for a while where the
 * function's comment says "may drop the lock": afterwards re-check what was read before. */
#ifndef TP_PAGER_PAGER_H
#define TP_PAGER_PAGER_H

#include <pthread.h>

#include "base/lock.h"
#include "base/stats.h"
#include "device/marker.h"
#include "memory/budget.h"
#include "memory/frame.h"
#include "memory/space.h"
#include "pager/executor.h"
#include "pager/plans.h"
#include "pager/readahead.h"
#include "pager/steps.h"
#include "pager/timing.h"
#include "pager/types.h"
#include "pager/verify.h"

enum { TP_SIZE_BINS = 256, TP_AHEAD_MAX = 32 };

/* Where the device leaves a fingerprint (pager/proof.h). */
typedef struct tp_place {
    bool taken;                    /* an extent waits for it */
    tp_marker computed;            /* behind the computation; seq 0: it is not marked yet */
    tp_marker decided, region_end; /* of a check: the extent's and the pager's at that time */
} tp_place;

/* A block to be filled ahead of its use. */
typedef struct tp_ahead {
    tp_block *block;
    uint64_t generation;
    uint64_t run; /* the run of misses that asks for it */
} tp_ahead;

typedef struct tp_pager {
    tp_device *dev;
    tp_space space;
    tp_frame_pool device_frames, host_frames;
    tp_budget budget;
    tp_markers markers;

    tp_lock lock;
    tp_cond work;    /* the pager's thread waits here */
    tp_cond changed; /* everybody else: something moved, was freed, unpinned, failed */
    pthread_t thread;
    bool thread_started, thread_ended, stop, abandoned;
    bool no_thread; /* tp_config.no_thread */

    tp_link live;                  /* blocks, least recently used first */
    tp_link cached;                /* oldest first */
    tp_link by_size[TP_SIZE_BINS]; /* the same, by size */
    tp_link retiring;
    tp_link deferred; /* freed while no marker could be recorded */
    tp_link dropped;  /* storages whose bytes are to be made again (pager/drop.h), or parked */
    tp_link wanted_parked; /* of those that are parked: to be brought back soon, in order */
    tp_link homing; /* host frames of others, until they have been copied (pager/park.h) */
    tp_verify verify;
    uint32_t rerun_count; /* operators in progress that do so */
    tp_link inflight;     /* extents: see tp_extent.inflight */
    uint32_t copying
        [2]; /* copies the device has been given and not been seen to finish, by tp_copy_dir */
    tp_place places[TP_PLACES];
    bool remapping; /* the thread changes the mapping of a live block, with the lock dropped */
    uint32_t mapping_count;   /* blocks being mapped by allocating threads, likewise */
    uint32_t unmapping_count; /* blocks being unmapped with the lock dropped */
    uint64_t op_pin_total, waiting_pin_total; /* sums over the live blocks */

    uint64_t ticket_next,
        ticket_serving; /* who may gather frames: one thread at a time, in order */
    uint64_t negotiated_ns;
    bool negotiating; /* a thread is talking to the foreign allocator with the lock dropped */

    tp_hooks hooks;
    size_t large_min_bytes;
    bool offload, strict, readonly_clean, host_kernels, page_out_before_op;
    uint32_t rules_off;
    tp_link regions;         /* open opaque regions of all threads */
    uint32_t region_depth;   /* of those, the ones that close the gate */
    uint32_t standing_count; /* the ones whose thread stands in a function of ours */
    uint32_t capture_depth;
    tp_marker region_end; /* context-wide, recorded when the gate was last opened */
    bool
        region_unmarked; /* it is still to be recorded, by the thread; till then the gate is closed */
    bool watching, armed; /* TP_ARM_SAMPLE, TP_ARM_FULL are due */
    tp_arming told;       /* what the hook `arm` has heard last */
    bool telling;         /* a thread is calling it, with the lock dropped */
    uint64_t
        heard_ns;  /* when the owner of the hook `arm` last became sure to tell of all operators
                             in progress; 0: it was not asked to */
    bool pressure; /* somebody had to wait for memory since offload went on: reclaim ahead */
    bool paged;    /* bytes have moved to the host */
    bool told_unseen;   /* the first unseen write has been told of */
    size_t wanted_size; /* of the frame that was waited for last */
    bool host_full;     /* no host frame could be had; cleared when one becomes free */
    uint32_t
        setback_count;   /* steps of evictions that the device refused, since one succeeded */
    uint64_t setback_ns; /* when it refused last */
    tp_status failed;

    uint64_t use_clock; /* uses of blocks so far */
    tp_runs runs;
    tp_link ahead_blocks;         /* brought ahead of their use, oldest first */
    tp_ahead ahead[TP_AHEAD_MAX]; /* collected by tp_readahead_note */
    uint32_t ahead_count;
    size_t ahead_bytes; /* of the blocks that are ahead of their use */

    tp_steps steps; /* what the program does, told by pager/learn */
    tp_timing timing;
    tp_plans plans;
    tp_executor executor;
    size_t foreign_held_bytes; /* as last asked */
    tp_stats stats;
    tp_oom last_oom;
    bool has_last_oom;
} tp_pager;

/* True while a rule about mappings is in force: always, but in debug builds that switch it off. */
#if TP_DEBUG
#define TP_RULE(pager, rule) (((pager)->rules_off & (uint32_t)(rule)) == 0)
#else
#define TP_RULE(pager, rule) ((void)(pager), true)
#endif

TP_MUST_USE tp_status tp_pager_init(tp_pager *pager, const tp_config *config, tp_device *dev,
                                    tp_error *error);
/* Stops the thread, waits for work in flight, unmaps everything. Lock not held. */
void tp_pager_fini(tp_pager *pager);
/* Stops the thread within a bounded time; leaves every mapping. Lock not held. */
void tp_pager_abandon(tp_pager *pager);

/* Around fork(). The child gets copies of its own of all live blocks, at their addresses, while the
 * parent waits (tp_pager_fork_copies); its pager is abandoned. */
bool tp_pager_fork_copies(const tp_pager *pager);
void tp_pager_fork_prepare(tp_pager *pager);
void tp_pager_fork_parent(tp_pager *pager);
void tp_pager_fork_child(tp_pager *pager);

/* How long this thread has waited in tp_pager_wait, and until blocks were born. */
extern _Thread_local uint64_t tp_thread_waited_ns;

/* Wakes the pager's thread. */
void tp_pager_wake(tp_pager *pager);
/* What time it is, in ns, for every decision that depends on it: the host's or, without a thread,
 * the device's. Never 0. */
uint64_t tp_pager_now(const tp_pager *pager);
/* Without a thread: does what it would do now. May drop the lock. */
void tp_pager_catch_up(tp_pager *pager);
/* Waits for `changed`, at most timeout_ns (not 0); without a thread, does its work or, if there is
 * none, lets time pass. wait_begin and wait_end run around it with the
 * lock dropped. Drops the lock. While it waits, and until the function of tp.h that it is in returns,
 * this thread's opaque regions leave the gate open. */
void tp_pager_wait(tp_pager *pager, uint64_t timeout_ns);
/* The same, but they keep it closed. */
void tp_pager_wait_closed(tp_pager *pager, uint64_t timeout_ns);
/* True while an opaque region is open, or kernels may be launched that nobody tells of. */
bool tp_pager_gate_closed(const tp_pager *pager);
/* The gate is closed and will soon open by itself. */
bool tp_pager_gate_settling(const tp_pager *pager);
/* Kernels that nobody tells of may be launched until the pager's thread has recorded a marker. */
static inline void tp_pager_distrust(tp_pager *pager) { pager->region_unmarked = true; }
/* Records the marker that remaps wait for after a region. */
void tp_pager_mark_region_end(tp_pager *pager);
/* Enters FAILED. */
void tp_pager_fail(tp_pager *pager, tp_status status);
/* True if nothing moves any more, so that nobody may wait for it: FAILED or abandoned. */
static inline bool tp_pager_halted(const tp_pager *pager) {
    return pager->failed != TP_OK || pager->abandoned;
}
/* Broken invariants, numbered as in csrc/README.md. */
TP_MUST_USE tp_status tp_pager_check(tp_pager *pager, tp_error *error);

#endif
