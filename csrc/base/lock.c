#define _POSIX_C_SOURCE 200809L

#include "base/lock.h"

#include <errno.h>
#include <stdatomic.h>
#include <time.h>

#include "base/check.h"

#if TP_DEBUG
enum { HELD_MAX = 4 };
static _Thread_local const tp_lock *held[HELD_MAX];
static _Thread_local int held_count;

static void held_push(const tp_lock *lock) {
    TP_ASSERT(held_count < HELD_MAX);
    TP_ASSERT(held_count == 0 || held[held_count - 1]->rank < lock->rank);
    held[held_count++] = lock;
}

static void held_pop(const tp_lock *lock) {
    TP_ASSERT(held_count > 0 && held[held_count - 1] == lock);
    held_count--;
}

bool tp_lock_held(const tp_lock *lock) {
    for (int i = 0; i < held_count; i++) {
        if (held[i] == lock) return true;
    }
    return false;
}
#else
static void held_push(const tp_lock *lock) { (void)lock; }
static void held_pop(const tp_lock *lock) { (void)lock; }
bool tp_lock_held(const tp_lock *lock) {
    (void)lock;
    return true;
}
#endif

tp_status tp_lock_init(tp_lock *lock, tp_lock_rank rank, tp_error *error) {
    lock->rank = rank;
    if (pthread_mutex_init(&lock->mutex, NULL) != 0) {
        return tp_error_set(error, TP_NO_HOST_MEMORY, "cannot create a mutex");
    }
    return TP_OK;
}

void tp_lock_fini(tp_lock *lock) { (void)pthread_mutex_destroy(&lock->mutex); }

void tp_lock_take(tp_lock *lock) {
    (void)pthread_mutex_lock(&lock->mutex);
    held_push(lock);
}

void tp_lock_drop(tp_lock *lock) {
    held_pop(lock);
    (void)pthread_mutex_unlock(&lock->mutex);
}

tp_status tp_cond_init(tp_cond *cond, tp_error *error) {
    pthread_condattr_t attr;
    if (pthread_condattr_init(&attr) != 0) {
        return tp_error_set(error, TP_NO_HOST_MEMORY, "cannot create a condition");
    }
    (void)pthread_condattr_setclock(&attr, CLOCK_MONOTONIC);
    int rc = pthread_cond_init(&cond->cond, &attr);
    (void)pthread_condattr_destroy(&attr);
    if (rc != 0) return tp_error_set(error, TP_NO_HOST_MEMORY, "cannot create a condition");
    return TP_OK;
}

void tp_cond_fini(tp_cond *cond) { (void)pthread_cond_destroy(&cond->cond); }

void tp_cond_broadcast(tp_cond *cond) { (void)pthread_cond_broadcast(&cond->cond); }

bool tp_cond_wait(tp_cond *cond, tp_lock *lock, uint64_t timeout_ns) {
    held_pop(lock);
    int rc = 0;
    if (timeout_ns == 0) {
        rc = pthread_cond_wait(&cond->cond, &lock->mutex);
    } else {
        const uint64_t until = tp_now_ns() + timeout_ns;
        const struct timespec ts = {(time_t)(until / 1000000000u), (long)(until % 1000000000u)};
        rc = pthread_cond_timedwait(&cond->cond, &lock->mutex, &ts);
    }
    held_push(lock);
    return rc != ETIMEDOUT;
}

uint64_t tp_now_ns(void) {
    struct timespec ts;
    (void)clock_gettime(CLOCK_MONOTONIC, &ts);
    return (uint64_t)ts.tv_sec * 1000000000u + (uint64_t)ts.tv_nsec;
}

uint64_t tp_this_thread(void) {
    static atomic_uint_fast64_t thread_count;
    static _Thread_local uint64_t thread;
    if (thread == 0) thread = atomic_fetch_add(&thread_count, 1) + 1;
    return thread;
}
