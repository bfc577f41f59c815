/* fill: starting the fill of an extent in HOST. Waiting for it is the business of who needs it.
 * Expects the lock; may drop it. */
#ifndef TP_PAGER_FILL_H
#define TP_PAGER_FILL_H

#include "pager/pager.h"

/* Whether the mapping of the block may change while `own_pins` pins of the caller are on it: nobody
 * else launches on the HOST mapping, and it is not immovable. */
bool tp_fill_allowed(const tp_block *block, uint32_t own_pins);
/* Gives one HOST extent of a live block a device frame and queues its fill. With `wait` (the ticket
 * is held) it waits for memory while there is hope. False: no frame can be had, or the device
 * refused. True also when there is nothing to do any more, the block being gone or filled by another
 * thread. */
bool tp_fill_start(tp_pager *pager, tp_block *block, uint64_t generation, tp_extent *extent,
                   uint32_t own_pins, bool wait);
/* The same, with a frame that the caller has: it is given away in any case. `decided`: a context-wide
 * marker since which nobody has been told to use the block (NULL: one is recorded now). */
bool tp_fill_begin(tp_pager *pager, tp_block *block, uint64_t generation, tp_extent *extent,
                   uint32_t own_pins, tp_frame *frame, const tp_marker *decided);

/* A fill that is wanted but not begun (HOST, with a device frame attached): begins it if the link has
 * room. True if anything changed. */
bool tp_fill_step(tp_pager *pager, tp_extent *extent, uint32_t own_pins);
/* Wanted, not begun. */
bool tp_fill_queued(const tp_extent *extent);
/* Takes the wish back: the frame goes to the pool. */
void tp_fill_call_off(tp_pager *pager, tp_extent *extent);
/* An operator waits for it: before all others. */
void tp_fill_hurry(tp_pager *pager, tp_extent *extent);

#endif
