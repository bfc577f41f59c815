/* executor: carries out the plan of the step that runs.
 *
 * It is told of each operator when it begins and when it has been launched, and hands out the
 * plan's acts up to there, in order: marks extents to be written back or evicted, notes fills
 * that are wanted, and operands that are to be left in HOST. It waits for nothing. The rest
 * happens as always, behind the same markers, pins and gate: the pager's thread moves bytes, an
 * operator whose operand has not come yet waits for it, an allocation that finds no memory
 * waits or evicts. So a plan that is wrong, or that the program leaves, costs time and nothing
 * else: an act that does not fit the state of its extent is skipped.
 *
 * Where plans may drop blocks, one that is evicted may be one that nobody can reach: the same hook is asked
 * whether it needs its address meanwhile. If not its fill is wanted of pager/park.
 *
 * A block that the plan drops is told of to the hook `drop`, once nothing uses it: whether it goes is
 * for the owner of the hook, who has to make it again, right before it is used. So there is nothing
 * to be done for reruns here, nor for what they need.
 *
 * While the program is astray nothing is handed out; found again, it is at once where it is now.
 * While a plan is followed, nobody evicts or fills by order of last use. */
#ifndef TP_PAGER_EXECUTOR_H
#define TP_PAGER_EXECUTOR_H

#include <stdbool.h>
#include <stdint.h>

#include "memory/space.h"
#include "pager/plan.h"
#include "pager/steps.h"
#include "pager/types.h"

struct tp_pager;

enum { TP_WISHES_MAX = 1024, TP_DECIDED_MAX = 32, TP_DROPS_MAX = 64 };

/* An extent that is to be filled when there is a frame for it. The decision to fill it is made some
 * acts before, so that what was queued then, copies of ours too, is over when its copy is. */
typedef struct tp_wish {
    tp_block *block;
    uint64_t generation, stamp; /* the block's, when it was decided */
    uint32_t extent;
    size_t bytes;
    tp_marker decided;
    bool park; /* of `drops`: its bytes are kept */
} tp_wish;

typedef struct tp_executor {
    bool following; /* a plan */
    bool stale;     /* `next` is to be found anew */
    bool beginning; /* what the plan supposes is still to be put right */
    uint32_t slot;  /* of the step that is followed, and its tp_step.built; 0: none */
    uint64_t built;
    uint64_t recording; /* in which `next` was found */
    uint32_t op;        /* the operator that began last */
    uint32_t next;      /* the first act that is not handed out */
    /* tp_step.built of the step whose first acts were handed out at the end of the last; 0: none */
    uint64_t foreseen;
    tp_wish wishes[TP_WISHES_MAX]; /* a ring, in order */
    uint32_t wish_first, wish_count;
    size_t wish_bytes;
    tp_wish decided[TP_DECIDED_MAX]; /* fills to come: a ring, in order */
    uint32_t decided_first, decided_count;
    uint32_t looked; /* acts before it have been looked at, to decide on their fills */
    tp_wish drops[TP_DROPS_MAX]; /* blocks to be told of; `extent` is 0 */
    uint32_t drop_count;
    uint64_t refused_ns; /* when a frame that the budget admits could not be had */
} tp_executor;

/* An operator begins: the acts that come before it, it included. */
void tp_executor_begin(struct tp_pager *pager);
/* The operator that began last has been launched: the acts before the next one. */
void tp_executor_launched(struct tp_pager *pager);
/* Whether the plan that is followed needs the recipe of the operator that has begun, of which
 * tp_executor_begin has been told just now. O(1). */
bool tp_executor_needs_recipe(const struct tp_pager *pager);
/* The blocks to be told of, at most TP_DROPS_MAX, except those that an operator in progress uses, which
 * wait, and those among `accesses`, which are used again: the plan is past them. *park: they are being
 * evicted, and whether they need an address meanwhile is asked. */
uint32_t tp_executor_take_drops(struct tp_pager *pager, const tp_access *accesses, size_t count,
                                tp_addr *out, bool *park);
/* The hook is not armed any more. */
void tp_executor_stop(struct tp_pager *pager);
/* On the pager's thread: begins the fills that are wanted, as far as there are frames. May drop the
 * lock. True: something was begun. */
bool tp_executor_fill(struct tp_pager *pager);
/* Whether the operator that began last runs over an extent in HOST, by the plan. */
bool tp_executor_leaves(const struct tp_pager *pager, const tp_extent *extent);
/* Bytes that the plan has given to fills which are not begun: births, which come later in its order, leave
 * them that much. */
static inline size_t tp_executor_claimed(const tp_executor *executor) {
    return executor->wish_count > 0 ? executor->wish_bytes : 0;
}
/* Memory is short beyond what the plan knows: what it wants filled is not filled ahead any more. */
void tp_executor_drop_wishes(struct tp_pager *pager);
/* How many operators from now on a block is used next, as far as is known; UINT32_MAX: not soon. */
uint32_t tp_executor_distance(const struct tp_pager *pager, const tp_block *block);

#endif
