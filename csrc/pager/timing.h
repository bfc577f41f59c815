/* timing: how long operators take on the device, by a few samples.
 *
 * Some operators get a pair of events around their kernels; the pager's thread reads them when
 * they are complete. An operator is sampled while little is known of its class, and now and then
 * afterwards. What the operators that it calls take, as far as that is known by then, is not its
 * own time, nor is what its thread waits for memory: behind a wait it begins anew, and counts
 * only while nothing better is known, for some of its kernels may have come before. So does one that the
 * device had come to before its kernels were launched: then it has waited for the host, too. Where kernels
 * run on the calling thread (tp_config.host_kernels) the host's clock does.
 *
 * A failure costs a sample, nothing else. Expects the pager's lock; never drops it. */
#ifndef TP_PAGER_TIMING_H
#define TP_PAGER_TIMING_H

#include "device/device.h"
#include "pager/types.h"

/* So many operators may be timed that the device has not come to: a program is often a whole step
 * ahead of it, and every kind of operator in it wants a sample. */
enum { TP_TIMERS = 512 };

typedef struct tp_timer {
    tp_event begin, end; /* NULL until it is used first */
    uint32_t class_idx;
    uint64_t inner_ns;  /* of the operators that it has called */
    const void *thread; /* on which its operator began: the address of tp_thread_waited_ns */
    tp_stream stream;
    bool running; /* its operator is in progress */
    bool partly;  /* begun anew, or the device may have waited for its kernels */
} tp_timer;

typedef struct tp_timing {
    tp_timer timers[TP_TIMERS];
    uint16_t free[TP_TIMERS];    /* a stack of those below made_count */
    uint16_t waiting[TP_TIMERS]; /* for the device: a ring, the oldest first */
    uint32_t made_count, free_count, running_count, waiting_first, waiting_count;
    uint32_t
        gap; /* 1 + the timer that runs since the operator recorded last has ended; 0: none */
    uint64_t gap_after, gap_waited_ns; /* operators recorded by then; tp_thread_waited_ns */
    uint32_t lost_gaps;                /* while it is not known what comes */
    bool off;                          /* the device does not tell */
} tp_timing;

struct tp_pager;

/* An operator has been recorded, and its thread has not waited for its operands yet: till here goes
 * what came between it and the operator before. */
void tp_timing_reach(struct tp_pager *pager, const tp_op *op, tp_stream stream);
/* The operator's kernels are launched between these. */
void tp_timing_start(struct tp_pager *pager, tp_op *op);
void tp_timing_stop(struct tp_pager *pager, tp_op *op);
/* The calling thread has waited in an allocation: what it runs counts from now on. */
void tp_timing_resume(struct tp_pager *pager);
/* Reads what is complete. On the pager's thread. True: there may be more. */
bool tp_timing_collect(struct tp_pager *pager);
void tp_timing_fini(struct tp_pager *pager);

#endif
