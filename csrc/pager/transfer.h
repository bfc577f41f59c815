/* transfer: queues the copy of one extent between its frames' windows.
 * Expects the lock; drops it never; waits for nothing. */
#ifndef TP_PAGER_TRANSFER_H
#define TP_PAGER_TRANSFER_H

#include "pager/pager.h"

/* The device is given few copies at a time: so an urgent fill waits behind little, and a context-wide
 * marker, which stands for copies too, completes soon. The rest waits in the pager's list. */
bool tp_transfer_room(tp_pager *pager, tp_copy_dir dir);
/* True if the extent has no copy in flight. */
bool tp_transfer_done(tp_pager *pager, tp_extent *extent);
/* The copy counts no more, finished or not. */
void tp_transfer_forget(tp_pager *pager, tp_extent *extent);
/* DIRTY with a host frame attached -> WRITING. On failure it stays DIRTY. */
TP_MUST_USE tp_status tp_transfer_write_back(tp_pager *pager, tp_extent *extent,
                                             tp_error *error);
/* HOST with a device frame attached and `decided` set -> FILLING. On failure it stays HOST. */
TP_MUST_USE tp_status tp_transfer_fill(tp_pager *pager, tp_extent *extent, tp_error *error);

#endif
