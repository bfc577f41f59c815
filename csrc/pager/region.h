/* region: opaque regions, and the gate they close. A region is code on one thread whose kernels we
 * cannot see; while one is closed, no live block's mapping changes. See tp_region_* in tp.h.
 *
 * A thread that stands in a function of ours launches nothing. So while it waits there, its own
 * regions open the gate; other threads' regions keep it closed. What it launched before is covered by
 * a context-wide marker recorded at that moment, and what it will launch may find any block in HOST,
 * where it can be used as well.
 *
 * A region notes the blocks it is known to use: its visible inputs and everything allocated inside.
 * (That alone does not make an allocation a tensor: it may be a library's workspace, which never moves.)
 * They are not pinned, so that what runs inside a region can page. They count as written whenever
 * mappings may change again: as the gate opens for a wait, and at the region's end. And as long as a
 * region's kernels may run, copies of any block wait on the device for everything queued so far.
 *
 * Expects the lock; "may drop" as noted. */
#ifndef TP_PAGER_REGION_H
#define TP_PAGER_REGION_H

#include "pager/pager.h"

/* May drop the lock. */
void tp_regions_begin(tp_pager *pager, tp_region *region, const tp_access *accesses,
                      size_t count, tp_stream stream);
void tp_regions_end(tp_pager *pager, tp_region *region);
/* A block was allocated by this thread: its open regions note it. */
void tp_regions_note(tp_pager *pager, tp_block *block);

/* The gate opens for this thread's regions: until tp_regions_go it stands in functions of ours. Again
 * while it does: nothing. */
void tp_regions_stand(tp_pager *pager);
/* They are closed again. May drop the lock. */
void tp_regions_go(tp_pager *pager);

/* The same around code that announces everything it launches; nests. unlift may drop the lock. */
void tp_regions_lift(tp_pager *pager);
void tp_regions_unlift(tp_pager *pager);

/* The counts of closed and standing regions are right. */
bool tp_regions_agree(tp_pager *pager);

/* What is queued on `stream` from now on waits, on the device, for the kernels of regions. */
TP_MUST_USE tp_status tp_regions_order(tp_pager *pager, tp_stream stream, tp_error *error);

#endif
