/* resize: budgets moved while the program runs. May drop the lock, all of them. */
#ifndef TP_PAGER_RESIZE_H
#define TP_PAGER_RESIZE_H

#include "pager/pager.h"

/* See tp_core_set_budget. */
TP_MUST_USE tp_status tp_resize_budget(tp_pager *pager, size_t device_bytes, size_t host_bytes,
                                       tp_error *error);
/* See tp_core_yield_to_foreign. */
TP_MUST_USE tp_status tp_resize_yield(tp_pager *pager, size_t bytes, size_t *granted_cap_bytes,
                                      tp_error *error);
/* See tp_core_empty_cache. */
void tp_resize_flush(tp_pager *pager);
/* See tp_evict_all. */
size_t tp_resize_evict_all(tp_pager *pager);
/* See tp_evict. */
TP_MUST_USE tp_status tp_resize_evict(tp_pager *pager, tp_addr addr, tp_error *error);
/* See tp_core_set_offload. */
TP_MUST_USE tp_status tp_resize_offload(tp_pager *pager, bool offload, tp_error *error);

#endif
