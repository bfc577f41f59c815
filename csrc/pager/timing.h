/* timing: how long operators take on the device, by a few samples.
 *
 * Some operators get a pair of events around their kernels; the pager's thread reads them when
 * they are complete. An operator is sampled while little is known of its class, and now and then
 * afterwards. What the operators that it calls take, as far as that is known by then, is not its
 * own time. Where kernels run on the calling thread (tp_config.host_kernels) the host's clock
 * does.
 *
 * A failure costs a sample, nothing else. Expects the pager's lock; never drops it. */
#ifndef TP_PAGER_TIMING_H
#define TP_PAGER_TIMING_H

#include "device/device.h"
#include "pager/types.h"

enum { TP_TIMERS = 16 };

typedef enum tp_timer_state {
    TP_TIMER_FREE,
    TP_TIMER_RUNNING, /* its operator is in progress */
    TP_TIMER_WAITING  /* for the device */
} tp_timer_state;

typedef struct tp_timer {
    tp_event begin, end; /* NULL until it is used first */
    tp_timer_state state;
    uint32_t class_idx;
    uint64_t turn;     /* which has waited longest */
    uint64_t inner_ns; /* of the operators that it has called */
} tp_timer;

typedef struct tp_timing {
    tp_timer timers[TP_TIMERS];
    uint32_t waiting_count;
    uint64_t turn_count;
    bool off; /* the device does not tell */
} tp_timing;

struct tp_pager;

/* The operator's kernels are launched between these. */
void tp_timing_start(struct tp_pager *pager, tp_op *op);
void tp_timing_stop(struct tp_pager *pager, tp_op *op);
/* Reads what is complete, in turn, and asks for no more than one that is not. On the pager's thread. */
void tp_timing_collect(struct tp_pager *pager);
void tp_timing_fini(struct tp_pager *pager);

#endif
