/* lock: a mutex and a condition with a monotonic clock, ranked in debug builds.
 *
 * Ranks must be taken in increasing order (csrc/README.md has the table). A debug build traps on a
 * violation. The functions here cannot fail once tp_lock_init and tp_cond_init have succeeded. */
#ifndef TP_BASE_LOCK_H
#define TP_BASE_LOCK_H

#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef enum tp_lock_rank {
    TP_RANK_CORE = 1,  /* one per device allocator: blocks, extents, frames, budgets, markers */
    TP_RANK_DEVICE = 2 /* inside a backend */
} tp_lock_rank;

typedef struct tp_lock {
    pthread_mutex_t mutex;
    tp_lock_rank rank;
} tp_lock;

typedef struct tp_cond {
    pthread_cond_t cond;
} tp_cond;

TP_MUST_USE tp_status tp_lock_init(tp_lock *lock, tp_lock_rank rank, tp_error *error);
void tp_lock_fini(tp_lock *lock);
void tp_lock_take(tp_lock *lock);
void tp_lock_drop(tp_lock *lock);
/* True if this thread holds `lock`. Debug builds only; release builds answer true. */
bool tp_lock_held(const tp_lock *lock);

TP_MUST_USE tp_status tp_cond_init(tp_cond *cond, tp_error *error);
void tp_cond_fini(tp_cond *cond);
void tp_cond_broadcast(tp_cond *cond);
/* Waits with `lock` released. timeout_ns 0: no timeout. Returns false when the time ran out. */
bool tp_cond_wait(tp_cond *cond, tp_lock *lock, uint64_t timeout_ns);

/* Monotonic time in nanoseconds. */
uint64_t tp_now_ns(void);

/* The number of this thread, not 0 and never another thread's: unlike the system's. */
uint64_t tp_this_thread(void);

#endif
