/* evict: the steps of an extent in flight, on the pager's thread: a write-back ends, an eviction
 * remaps the address to the host frame, a fill remaps it to the device frame.
 *
 * Who may be using a mapping that is about to change, and what keeps them out:
 *  - an operator between begin and end: its pin;
 *  - kernels queued before the decision, on any stream, seen or not: the context-wide marker
 *    recorded after the decision;
 *  - kernels of an opaque region: the gate;
 *  - an operator that begins while the mapping changes: it sees `busy` and waits;
 *  - copies of ours: they use the windows, not this address. */
#ifndef TP_PAGER_EVICT_H
#define TP_PAGER_EVICT_H

#include "pager/pager.h"

/* One step of one extent in flight. True if anything changed. May drop the lock. */
bool tp_evict_step(tp_pager *pager);
/* True if a pin or the gate, not the device, keeps the extent's mapping from changing. */
bool tp_evict_blocked(const tp_pager *pager, const tp_extent *extent);

#endif
