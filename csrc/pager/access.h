/* access: what an operator does to blocks: pins, misses, dirtiness, last-use markers. See tp_op_* in
 * tp.h for the contracts. Expects the lock; "may drop" as noted. */
#ifndef TP_PAGER_ACCESS_H
#define TP_PAGER_ACCESS_H

#include "pager/pager.h"

/* May drop the lock. */
void tp_access_begin(tp_pager *pager, tp_op *op, const tp_access *accesses, size_t count,
                     tp_stream stream);
void tp_access_adopt(tp_pager *pager, tp_op *op, tp_addr addr);
void tp_access_end(tp_pager *pager, tp_op *op, const tp_addr *outputs, size_t output_count,
                   tp_op *parent);
/* See tp_op_detach, tp_op_export. The latter may drop the lock. */
void tp_access_detach(tp_pager *pager, tp_op *op, tp_op *parent);
void tp_access_export_operands(tp_pager *pager, const tp_op *op);
/* Whether an operator in progress uses something that is in HOST now. */
bool tp_access_over_host(const tp_op *op);
/* It is a tensor, and has just been used. */
void tp_access_see(tp_pager *pager, tp_block *block);
/* Resident and immovable. May drop the lock. */
TP_MUST_USE tp_status tp_access_pin(tp_pager *pager, tp_addr addr, tp_error *error);
TP_MUST_USE tp_status tp_access_unpin(tp_pager *pager, tp_addr addr, tp_error *error);
void tp_access_export(tp_pager *pager, tp_addr addr);
/* A use that no marker can stand for: the block never moves again, and when it is freed its memory
 * waits for everything. */
void tp_access_lose_use(tp_pager *pager, tp_block *block);
/* The live block holding `addr`, or NULL. */
tp_block *tp_block_live(tp_pager *pager, tp_addr addr);
/* Brings the HOST extents of a block back if frames can be had without evicting anything, and waits.
 * True if it is resident afterwards. May drop the lock. */
bool tp_access_bring_back(tp_pager *pager, tp_block *block);
/* Maps the host frame of an extent in HOST whose address maps nothing (strict mode). */
void tp_access_map_host(tp_pager *pager, tp_extent *extent);
/* Waits until no extent of the block has a mapping change or a fill in progress, or the block is no
 * longer of that generation. May drop the lock. */
void tp_access_settle(tp_pager *pager, tp_block *block, uint64_t generation);
/* Waits until no mapping of any live block is being changed. May drop the lock. */
void tp_access_await_remaps(tp_pager *pager);

#endif
