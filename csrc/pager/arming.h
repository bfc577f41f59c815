/* arming: how much the core is told of operators (tp_arming), and when that has to change.
 *
 * From half of the budget on a sample is enough: it shows which blocks are tensors. Before the first
 * eviction everything has to be told. Expects the lock; every function may drop it. */
#ifndef TP_PAGER_ARMING_H
#define TP_PAGER_ARMING_H

#include "pager/pager.h"

/* After anything that may have changed held bytes, offload or the budget. */
void tp_arming_update(tp_pager *pager);
/* Before evictions are decided. True if it changed anything, so that what was read before is old.
 * They may be decided if pager->armed is set then. */
bool tp_arming_full(tp_pager *pager);
/* An operator that perhaps nobody tells of is about to go on: no remap is in progress then, and none
 * begins for a while. */
void tp_arming_unknown(tp_pager *pager);
/* Offload has ended, but what it left in HOST is about to come home, and no mapping may change beside
 * operators that nobody tells of: they are told of again, till tp_arming_off(). False: not now. */
bool tp_arming_for_return(tp_pager *pager);
/* Offload has ended, or what was in HOST has come home. */
void tp_arming_off(tp_pager *pager);

#endif
