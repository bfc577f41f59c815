/* plan: what to move, and when, so that a step runs inside a budget.
 *
 * Pure: from the trace of a step, a budget and the link's figures comes a list of acts. The
 * planner runs the step on a model of the compute stream and the two directions of the link,
 * several times over as the program will, always with all that is to come in view, and writes
 * down what it did in the last:
 *
 * - write-backs from the last write on, as early as the link is free: of the farthest next use,
 *   as long as memory will be short before that use; then of what was evicted in the round
 *   before;
 * - evictions by farthest next use, clean before dirty, some operators ahead of need;
 * - fills in order of next use, as early as memory is free, and by evicting what is needed
 *   later once the link would else be late;
 * - HOST for operands of streaming operators that do not fit, and for blocks that only such
 *   operators use, where that takes less time.
 *
 * On a cycle this keeps a prefix resident: what was used last is what is needed last.
 *
 * Where a trace has recipes, blocks may be dropped and made again instead of moved, where that
 * takes less time. Bytes up to a target above the budget move for nothing, beside operators;
 * blocks are dropped, the cheapest first, until no more than that is alive; a plan as above
 * moves what is left, reruns being operators like others. Several targets are tried.
 *
 * The acts are in one order. When each happens is their own business (a fill waits for memory,
 * an eviction for its write-back and for the last use), but memory is claimed in that order, by
 * fills and by births alike: so what did not come to a standstill in the model does not
 * elsewhere. Before a block is dropped there is memory for its rerun in that sense.
 *
 * Never sees the device. No lock. Runs on any thread. */
#ifndef TP_PAGER_PLAN_H
#define TP_PAGER_PLAN_H

#include "pager/trace.h"

typedef struct tp_plan_config {
    uint64_t budget_bytes;
    uint64_t granularity_bytes;     /* blocks of large_min and more occupy multiples of it */
    uint64_t large_min_bytes;       /* smaller blocks do not move */
    uint64_t extent_max_bytes;      /* a multiple of the granularity */
    uint64_t link_bytes_per_s;      /* of a copy alone on the link */
    uint64_t link_both_bytes_per_s; /* of copies in both directions, together */
    uint32_t headroom_ops;          /* for how many operators' births room is made ahead */
    /* A fill that something has to be evicted for is begun as late as the link allows, less
     * this. */
    uint64_t slack_ns;
    /* What is evicted goes so much before its memory is claimed, where it is idle by then. */
    uint64_t evict_ahead_ns;
    /* What goes early in a step goes in the step before, where it is idle and clean by then. */
    bool evict_before;
    /* A fill comes so much earlier, where there is memory: so the link has the next one at hand. */
    uint64_t fill_ahead_ns;
    /* How many reruns may stand behind one another, before the block's own. */
    uint32_t chain_max;
    /* The bytes of a block that has died cannot be kept for a rerun: they are made again for it, or
     * nothing is dropped that needs them. */
    bool no_keep;
} tp_plan_config;

/* What carries out a plan refuses a kind that it does not know. */
typedef enum tp_act_kind {
    /* Of an extent. */
    TP_ACT_WRITE_BACK, /* after the last operator that wrote the extent */
    TP_ACT_EVICT,      /* after its last use and its write-back */
    TP_ACT_FILL,       /* when there is memory */
    TP_ACT_LEAVE,      /* the operator runs over this operand in HOST */
    /* Of a block, wherever its extents are; `extent` is 0. Only in plans of traces with
     * recipes. */
    TP_ACT_DROP,  /* after its last use: its frames of both kinds go, its bytes with them */
    TP_ACT_RERUN, /* runs the recipe of the block, in a place of its own among the operators.
                       Claims memory as a birth does, for all outputs: those that are dropped
                       are back, so is a dead one that the act names, and what it makes of the
                       others goes as soon as it has run. */
    TP_ACT_KEEP,  /* the block dies after this operator, but its bytes stay; not with no_keep */
    TP_ACT_DISCARD, /* the bytes of a dead block, kept or made again, go after their last use */
} tp_act_kind;

typedef struct tp_act {
    /* Its place: after the operator before this one has started, before this one starts.
     * Before operator 0: after the last operator of the step before has started. A rerun
     * counts as an operator: what comes behind it in the list, it precedes. */
    uint32_t op;
    uint32_t block, extent;
    tp_act_kind kind;
} tp_act;

typedef struct tp_plan_extent {
    uint32_t block, extent;
} tp_plan_extent;

typedef struct tp_plan {
    tp_act *acts; /* in order; `op` never falls */
    uint32_t act_count;
    /* What the acts suppose to be on the device when the first of them comes, or to be on its way
     * there; by block. */
    tp_plan_extent *resident;
    uint32_t resident_count;
    uint64_t step_ns, in_bytes, out_bytes, peak_bytes; /* of one step, in the model */
    uint32_t rerun_count;
    uint64_t rerun_ns, dropped_bytes;
} tp_plan;

/* The figures of an H200: 55 GB/s one way, 101 GB/s both; extents of 2 to 64 MiB; two
 * operators; 5 ms; evictions 20 ms ahead and in the step before, fills 10 ms; three reruns. */
void tp_plan_config_init(tp_plan_config *config, uint64_t budget_bytes);

/* How many extents a block of `bytes` is made of; 0: it is too small to move. */
uint32_t tp_plan_extents(const tp_plan_config *config, uint64_t bytes);
/* Bytes of one of them. */
uint64_t tp_plan_extent_bytes(const tp_plan_config *config, uint64_t bytes, uint32_t extent);

/* TP_OUT_OF_MEMORY: an operator's operands do not fit, and it does not stream; *error names
 * it. TP_INVALID: the trace or the configuration makes no sense. TP_NO_HOST_MEMORY: no
 * memory to plan in. The caller frees *out with tp_plan_fini. */
TP_MUST_USE tp_status tp_plan_make(const tp_trace *trace, const tp_plan_config *config,
                                   tp_plan *out, tp_error *error);
void tp_plan_fini(tp_plan *plan);

#endif
