/* extent: the state machine of an extent, drawn in csrc/README.md, and the gauges that follow it.
 * Expects the lock; never drops it; makes no driver call but, with readonly_clean, that which changes
 * the access to a mapping. */
#ifndef TP_PAGER_EXTENT_H
#define TP_PAGER_EXTENT_H

#include "pager/pager.h"

const char *tp_extent_state_name(tp_extent_state state);
bool tp_extent_may_become(tp_extent_state from, tp_extent_state to);
/* True if the address maps a device frame in that state. */
bool tp_extent_resident(tp_extent_state state);
/* Moves to `to` (legal) and keeps the gauges of live blocks right. */
void tp_extent_become(tp_pager *pager, tp_extent *extent, tp_extent_state to);
/* Detaches the host frame, idle, into its pool. */
void tp_extent_drop_host(tp_pager *pager, tp_extent *extent);
/* Adds the block's extents to the gauges, or takes them out, as it becomes live or stops being so. */
void tp_block_count(tp_pager *pager, const tp_block *block, bool live);
/* The contents of an extent are being changed by an operator. */
void tp_extent_mark_written(tp_pager *pager, tp_extent *extent);
/* True if no one may change the mapping of this block for as long as it lives or is pinned. */
bool tp_block_immovable(const tp_block *block);
/* The same, or a slab. */
bool tp_block_fixed(const tp_block *block);
/* Whether it moves at all: it is known to be a tensor, and not fixed. */
bool tp_block_movable(const tp_block *block);
/* Into the pager's list of extents in flight, unless it is there. */
void tp_extent_list(tp_pager *pager, tp_extent *extent);

#endif
