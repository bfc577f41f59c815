/* learn: tells pager/steps what the program does, while the hook is armed in full. Otherwise, and
 * after a fork in the child, every function here returns at once.
 *
 * Slabs are left out: they hold many tensors and never move. Expects the pager's lock; never
 * drops it. */
#ifndef TP_PAGER_LEARN_H
#define TP_PAGER_LEARN_H

#include "pager/pager.h"

/* The hook has been armed: recording begins with the next operator. */
void tp_learn_start(tp_pager *pager);
void tp_learn_stop(tp_pager *pager);

/* `told`: false for what a rerun makes, which is no part of the program. */
void tp_learn_born(tp_pager *pager, tp_block *block, bool told);
void tp_learn_freed(tp_pager *pager, tp_block *block);
/* A block's storage is dropped, or back: it is known by `to` from now on. */
void tp_learn_moved(tp_pager *pager, tp_identity *from, tp_identity *to, bool dropped);
/* A storage is gone while it was dropped. */
void tp_learn_gone(tp_pager *pager, tp_identity *identity);
/* It has turned out to be a slab. */
void tp_learn_forget(tp_pager *pager, tp_block *block);

/* An operator, named in `op`, before anything is done for it: from here on tp_steps_where answers
 * with it. */
void tp_learn_begin(tp_pager *pager, tp_op *op, const tp_access *accesses, size_t count,
                    tp_stream stream);
/* Its operands are there: its kernels are launched next. */
void tp_learn_started(tp_pager *pager, tp_op *op);
/* They have been launched. */
void tp_learn_end(tp_pager *pager, tp_op *op, const tp_addr *outputs, size_t output_count);
/* An opaque region, as an operator over what it is known to use. */
void tp_learn_region(tp_pager *pager, const tp_access *accesses, size_t count,
                     tp_stream stream);

#endif
