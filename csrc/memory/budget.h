/* budget: the arithmetic of the device and host budgets. Pure; sees no device.
 *
 * The device budget is shared by our frames and a foreign allocator (PyTorch's native one):
 *     frames created <= frame_cap,   foreign held <= foreign_cap,   frame_cap + foreign_cap <= limit
 * at every instant. To move the border, the side that gives is lowered first and the side that takes
 * is raised after. Expects the owner's lock. */
#ifndef TP_MEMORY_BUDGET_H
#define TP_MEMORY_BUDGET_H

#include <stdbool.h>
#include <stddef.h>

typedef struct tp_budget {
    size_t limit_bytes;       /* device */
    size_t foreign_cap_bytes; /* what the foreign allocator may hold */
    size_t host_limit_bytes;
} tp_budget;

/* What our frames may add up to. */
size_t tp_budget_frame_cap(const tp_budget *budget);
/* Whether frames of `bytes` may be created beside `created_bytes`. */
bool tp_budget_admits(const tp_budget *budget, size_t created_bytes, size_t bytes);
bool tp_budget_admits_host(const tp_budget *budget, size_t created_bytes, size_t bytes);
/* From this many held bytes on operators are looked at now and then: what has been seen by the time
 * that memory is short has to be enough to evict. */
size_t tp_budget_watch_bytes(const tp_budget *budget);
/* The foreign allocator's cap that leaves our frames all but what it holds and a little room, so
 * that small allocations do not negotiate. */
size_t tp_budget_foreign_target(const tp_budget *budget, size_t foreign_held_bytes);
/* Free bytes at which background reclaim starts, and at which it stops. */
size_t tp_budget_reclaim_start(const tp_budget *budget);
size_t tp_budget_reclaim_stop(const tp_budget *budget);

#endif
