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

#endif
