/* fault_device: a device that passes every call on to another one and makes chosen calls fail.
 *
 * A fault test runs the same actions again and again, with a fault in the 1st, 2nd, 3rd ...
 * fallible call, until a run meets no fault:
 *
 *     for (uint64_t nth = 1;; nth++) {
 *         ... create, fault_device_arm(dev, nth, ...), act, check ...
 *         if (!fault_device_fired(dev)) break;
 *     }
 *
 * A call that is made to fail does not reach the inner device. The functions tp_sim_* need the
 * inner device, not this one. Any thread may call anything here; no lock. */
#ifndef TP_TESTS_FAULT_DEVICE_H
#define TP_TESTS_FAULT_DEVICE_H

#include "device/device.h"

/* The fallible calls of the contract. */
typedef enum fault_call {
    FAULT_BIND_THREAD,
    FAULT_RESERVE,
    FAULT_DEVICE_FRAME,
    FAULT_HOST_FRAME,
    FAULT_MAP,
    FAULT_UNMAP,
    FAULT_PROTECT,
    FAULT_COPY,
    FAULT_FINGERPRINT,
    FAULT_EVENT_CREATE,
    FAULT_EVENT_RECORD,
    FAULT_EVENT_RECORD_CONTEXT,
    FAULT_EVENT_CREATE_TIMED,
    FAULT_EVENT_ELAPSED,
    FAULT_EVENT_QUERY,
    FAULT_EVENT_SYNC,
    FAULT_STREAM_WAIT,
    FAULT_STREAM_CAPTURING,
    FAULT_MEMORY_INFO,
    FAULT_CALL_COUNT
} fault_call;

enum { FAULT_ALL_CALLS = (1 << FAULT_CALL_COUNT) - 1 };

typedef struct fault_plan {
    uint64_t nth;     /* which of the calls counted from now on fails, from 1; 0: none */
    uint32_t calls;   /* 1 << fault_call each; calls of other kinds do not count. 0: all */
    tp_status status; /* TP_OK: what such a call answers when its resource is used up */
    bool persistent;  /* every later one fails too */
} fault_plan;

/* Takes ownership of `inner`, also on failure. */
TP_MUST_USE tp_status fault_device_create(tp_device *inner, tp_device **out, tp_error *error);
tp_device *fault_device_inner(tp_device *dev);
/* Starts counting anew. Nobody else may be in a call of this device meanwhile. */
void fault_device_arm(tp_device *dev, const fault_plan *plan);
void fault_device_disarm(tp_device *dev);
/* True if a call has been made to fail since the last arm. */
bool fault_device_fired(const tp_device *dev);
/* Which kind it was. Needs fault_device_fired. */
fault_call fault_device_fired_call(const tp_device *dev);
/* Calls of that kind since creation, failed ones included. */
uint64_t fault_device_calls(const tp_device *dev, fault_call call);
/* From now on `run` runs before each call of that kind, on the thread that makes it. Once for a
 * device. */
void fault_device_before(tp_device *dev, fault_call call, void (*run)(void *arg), void *arg);
const char *fault_call_name(fault_call call);

#endif
