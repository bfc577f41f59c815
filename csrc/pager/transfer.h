/* transfer: queues the copy of one extent between its frames' windows.
 * Expects the lock; drops it never; waits for nothing. */
#ifndef TP_PAGER_TRANSFER_H
#define TP_PAGER_TRANSFER_H

#include "pager/pager.h"

/* DIRTY with a host frame attached -> WRITING. On failure it stays DIRTY. */
TP_MUST_USE tp_status tp_transfer_write_back(tp_pager *pager, tp_extent *extent, tp_error *error);
/* HOST with a device frame attached and `decided` set -> FILLING. On failure it stays HOST. */
TP_MUST_USE tp_status tp_transfer_fill(tp_pager *pager, tp_extent *extent, tp_error *error);

#endif
