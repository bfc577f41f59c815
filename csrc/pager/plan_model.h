/* plan_model: the state in which the planner runs a step: extents, where their bytes are,
 * and when they are needed next. Part of plan. Pure. */
#ifndef TP_PAGER_PLAN_MODEL_H
#define TP_PAGER_PLAN_MODEL_H

#include "pager/plan.h"

/* Points of time are counts of operators since the model began: operator i of round r is at
 * r * op_count + i. What is never used and never dies is needed at TP_FAR. */
#define TP_FAR UINT64_MAX
#define TP_NO_UNIT UINT32_MAX

/* Where the bytes of an extent are. In use by the running operator, moving, dead, or in HOST
 * and not used again: in no set. */
typedef enum tp_unit_set {
    TP_SET_NONE,
    TP_SET_CLEAN, /* resident; the host frame holds the same */
    TP_SET_DIRTY, /* resident, nowhere else */
    TP_SET_HOST,
    TP_SET_COUNT
} tp_unit_set;

/* An extent. */
typedef struct tp_unit {
    uint64_t bytes;
    uint64_t due;  /* point of its next use, or the one after its death if that comes first */
    uint64_t next; /* the same, or TP_FAR: it is to go before others, so as to be refilled */
    uint64_t used_at, evicted_at; /* points + 1 of its last use and last eviction; 0: none */
    uint32_t block, extent;
    uint32_t place;      /* in its set's heap */
    uint32_t written_at; /* the operator that wrote it last; TP_NO_OP: none yet */
    uint32_t
        evicted_after; /* the operator whose bytes were evicted last time; TP_NO_OP: none */
    tp_unit_set set;
    bool alive, resident, dirty, writing, filling, in_use;
    bool is_used; /* before it dies */
    bool evicted; /* since it was written last */
    bool stays;   /* from its last use in a step to its first in the next */
} tp_unit;

/* A heap of extents by next need, the nearest first in TP_SET_HOST and the farthest in the
 * others; and how many bytes are needed at which operator. */
typedef struct tp_unit_heap {
    uint32_t *units;
    uint32_t count;
    uint64_t *sums;    /* a Fenwick tree over the operators and, last, TP_FAR */
    uint64_t *hurried; /* likewise, of what is to go before others, by when it is due */
    uint64_t bytes;
} tp_unit_heap;

typedef struct tp_model {
    const tp_trace *trace;
    tp_plan_config config;
    tp_unit *units;
    uint32_t unit_count;
    /* Lists: that of block or operator i is [first[i], first[i + 1]). */
    uint32_t *block_units;
    uint32_t *uses, *block_uses; /* the operators that use each block, ascending */
    uint32_t *born, *op_born;    /* the blocks born before each operator */
    uint32_t *dead, *op_dead;    /* those dead after it */
    uint64_t *live_tree;         /* most bytes alive: a segment tree over the operators */
    uint64_t *born_bytes;        /* of each operator */
    uint64_t *before_ns;         /* the operators' time before each, and in all */
    bool *left;                  /* of each operand: it is left in HOST */
    uint64_t point;              /* that of the operator which starts next */
    uint64_t live_bytes, free_bytes;
    tp_unit_heap sets[TP_SET_COUNT];
} tp_model;

/* Decides which operands are left in HOST: those of streaming operators that do not fit and,
 * with `stream`, all blocks that only such operators use. TP_OUT_OF_MEMORY: an operator's
 * others do not fit. */
TP_MUST_USE tp_status tp_model_init(tp_model *model, const tp_trace *trace,
                                    const tp_plan_config *config, bool stream, tp_error *error);
void tp_model_fini(tp_model *model);

/* Bytes that a block occupies. */
uint64_t tp_model_block_bytes(const tp_model *model, uint32_t block);
/* Finds out when the extents of a block, which are in no set, are needed next. */
void tp_model_look_ahead(tp_model *model, uint32_t block);
/* Puts an extent into the set that its state says, in the place that its next need says. */
void tp_model_file(tp_model *model, uint32_t unit);
/* Takes it out of its set, if it is in one. */
void tp_model_unfile(tp_model *model, uint32_t unit);
/* It stands again where its next need says. */
void tp_model_unhurry(tp_model *model, uint32_t unit);
/* The first of a set; TP_NO_UNIT: it is empty. */
uint32_t tp_model_first(const tp_model *model, tp_unit_set set);
/* Bytes of a set that are needed later than `point`. */
uint64_t tp_model_bytes_after(const tp_model *model, tp_unit_set set, uint64_t point);
/* Of those, bytes that are to go before others but are due by then. */
uint64_t tp_model_bytes_hurried(const tp_model *model, tp_unit_set set, uint64_t point);
/* By how much the bytes alive will exceed those alive now, at most, up to the operator at
 * `point`. */
uint64_t tp_model_growth(const tp_model *model, uint64_t point);

#endif
