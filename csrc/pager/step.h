/* step: a complete step that is remembered: a trace for the planner, and which live block stands
 * for which block of the trace.
 *
 * The trace never changes while somebody holds the step (pager/steps.h): it may then be read
 * with no lock. The bindings belong to the pager's lock.
 *
 * Blocks of the trace: first those that live through the whole step, then those born in it, in
 * order of birth: so tomorrow's activation is known by yesterday's. A block that is freed and
 * replaced by one of its size in each step is one block with it, alive across the step's
 * boundary (dead_op < born_op).
 *
 * Recipes of the record become recipes of the trace, unless something that they make, or read,
 * is no block alive throughout. 28 bytes for each, and 4 for each block.
 *
 * Pure: no device. */
#ifndef TP_PAGER_STEP_H
#define TP_PAGER_STEP_H

#include "pager/record.h"

typedef struct tp_step {
    tp_trace trace;  /* for tp_plan_make */
    uint32_t slot;   /* its place among the remembered steps, and in tp_identity.bound */
    uint64_t built;  /* its first number, which never changes */
    uint64_t number; /* another one whenever the trace is another, its times included */
    uint64_t completed_count; /* how often it has run from its first to its last operator */
    uint64_t last_completed;  /* when, in steps of all kinds */
    uint64_t moved_bytes;     /* of all operands */
    uint64_t device_ns;       /* of all operators */
    /* On the host, from its first operator to that of the next step, when it ran last; 0: none has
     * followed it yet. */
    uint64_t step_ns;
    size_t bytes; /* of host memory that it takes */
    uint32_t held_count;
    bool fresh; /* nobody has been told of this trace */

    /* By operator. */
    const uint32_t *kinds, *likes, *weights; /* as in tp_record_op */
    const uint64_t *began_ns;  /* since the step began, on the host, when it was recorded */
    const uint32_t *streams;   /* small numbers */
    const uint32_t *announced; /* its first so many operands were announced; the others
                                      are results */
    const uint32_t *class_idx, *gap_idx; /* likewise; the last one's gap: before the first */
    const uint32_t *birth_begin;         /* and one behind: its part of `births` */
    const uint32_t *births;              /* blocks by born_op */

    const uint32_t
        *recipe_ops;      /* by recipe of the trace: the operator that may be run again, the
                                   first of those that are part of it */
    uint64_t recipe_hash; /* of the record's, and of the last run's: tp_step_recipe_hash */
    uint64_t last_recipe_hash;

    /* By block. */
    const uint32_t *use_begin; /* and one behind: its part of `use_ops` */
    const uint32_t *use_ops;   /* operators that use it, in order */
    tp_identity **live;        /* the live block that stands for it; NULL: none is known */

    /* Runs of TP_GRAM operators, by a hash of their kinds: where one ends. */
    const uint32_t *gram_head; /* gram_mask + 1 chains; TP_NO_OP ends them */
    const uint32_t *gram_next; /* by operator, rising */
    uint32_t gram_mask;

    uint64_t next_number; /* of the step that follows it as a rule; 0: none has */
    uint32_t next_trust;  /* how often in a row it has, about */
    void *attached;       /* the executor's own; not looked at here */
} tp_step;

enum { TP_GRAM = 8 };

/* A hash of the last TP_GRAM kinds, the newest last. */
uint32_t tp_step_gram(const uint32_t *kinds);

/* A step of what has been recorded; its bindings are still to be made (tp_step_bind_all). NULL:
 * host memory is short, or nothing was recorded. O(operands). */
tp_step *tp_step_build(const tp_record *record, uint32_t slot);
/* Of which operators there are recipes. O(recipes). */
uint64_t tp_step_recipe_hash(const tp_record *record);
/* Whether two steps have the same operators, operands and blocks, whatever their times and recipes:
 * a plan for one is a plan for the other. O(operands). */
bool tp_step_alike(const tp_step *a, const tp_step *b);
/* Binds the blocks that are alive at the end of the recording it was built of. */
void tp_step_bind_all(tp_step *step, const tp_record *record);
/* Unbinds everything, and frees it. */
void tp_step_destroy(tp_step *step);

/* From now on the live block stands for that block of the trace; an earlier one, and an earlier
 * meaning of it, are forgotten. */
void tp_step_bind(tp_step *step, uint32_t block, tp_identity *identity);
/* The block is part of another struct now. */
void tp_step_moved(tp_step *const *steps, tp_identity *to);
/* The block is freed: no step knows it any more. */
void tp_step_unbind(tp_step *const *steps, tp_identity *identity);

/* The times known now into the trace. True if they differ by more than a tenth in all: who plans
 * by them should plan again. Nobody may hold the step. */
bool tp_step_refresh(tp_step *step, const tp_record *record);

#endif
