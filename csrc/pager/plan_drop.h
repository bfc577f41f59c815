/* plan_drop: which blocks to drop and make again instead of keeping them. Part of plan. Pure.
 *
 * A block that a recipe makes may be dropped in its longest pause between two uses. It comes
 * back before the use that ends the pause, or earlier if a rerun reads it, and stays then:
 * it is made once. Inputs of a rerun have to hold what they held. Those that are dropped come
 * back for it; those that have died are made again for it alone, or their bytes are kept until
 * then, and that counts. */
#ifndef TP_PAGER_PLAN_DROP_H
#define TP_PAGER_PLAN_DROP_H

#include "pager/plan.h"

/* What is cheap: rerun time by the bytes of the block, or by what the drop takes off the bytes
 * above the target, over all the time that they are there. Neither is best for every trace; nor
 * is keeping large dead inputs, which stands in the way of dropping more. */
typedef enum tp_drop_order {
    TP_DROP_BY_EXCESS,
    TP_DROP_BY_BYTES,
    TP_DROP_WITHOUT_KEEPING, /* by excess; the last: with no_keep it is the first again */
    TP_DROP_ORDERS
} tp_drop_order;

typedef struct tp_drops {
    uint32_t *after_op;   /* of each block: its last use before the pause; TP_NO_OP: it stays */
    uint32_t *kept_until; /* the rerun before this operator is the last that needs the bytes of
                             a block which is dead by then; TP_NO_OP: none does */
    uint32_t count;
} tp_drops;

typedef struct tp_dropper tp_dropper;

/* *out is freed by tp_dropper_destroy. TP_NO_HOST_MEMORY. */
TP_MUST_USE tp_status tp_dropper_create(const tp_trace *trace, const tp_plan_config *config,
                                        tp_dropper **out, tp_error *error);
void tp_dropper_destroy(tp_dropper *dropper);

/* Drops, cheapest first, whatever lowers the bytes alive above `target_bytes`, until none are.
 * *out is the dropper's, until the next call. TP_NO_HOST_MEMORY. */
TP_MUST_USE tp_status tp_dropper_choose(tp_dropper *dropper, uint64_t target_bytes,
                                        tp_drop_order order, tp_drops *out, tp_error *error);

/* What the link writes out, at most, from when the fewest bytes are alive to when the most
 * are. */
uint64_t tp_dropper_free_bytes(const tp_dropper *dropper);

#endif
