#include "fault_device.h"

#include <stdatomic.h>
#include <stdlib.h>

#include "base/check.h"

typedef struct fault_device {
    tp_device base;
    tp_device *inner;
    _Atomic uint64_t calls[FAULT_CALL_COUNT];
    _Atomic uint64_t counted; /* calls that count, since the last arm */
    _Atomic uint64_t nth;     /* 0: disarmed */
    _Atomic int fired;        /* fault_call + 1, 0: no fault yet */
    uint32_t mask;
    tp_status status;
    bool persistent;
    fault_call before_call;
    void (*_Atomic before)(void *arg); /* NULL: nothing */
    void *before_arg;
} fault_device;

static const struct {
    const char *name;
    tp_status natural; /* what the call answers when it fails for a usual reason */
} call_info[FAULT_CALL_COUNT] = {
    [FAULT_BIND_THREAD] = {"bind_thread", TP_DEVICE_ERROR},
    [FAULT_RESERVE] = {"reserve", TP_DEVICE_ERROR},
    [FAULT_DEVICE_FRAME] = {"frame_create(device)", TP_OUT_OF_MEMORY},
    [FAULT_HOST_FRAME] = {"frame_create(host)", TP_NO_HOST_MEMORY},
    [FAULT_MAP] = {"map", TP_DEVICE_ERROR},
    [FAULT_UNMAP] = {"unmap", TP_DEVICE_ERROR},
    [FAULT_PROTECT] = {"protect", TP_DEVICE_ERROR},
    [FAULT_COPY] = {"copy", TP_DEVICE_ERROR},
    [FAULT_FINGERPRINT] = {"fingerprint", TP_DEVICE_ERROR},
    [FAULT_EVENT_CREATE] = {"event_create", TP_NO_HOST_MEMORY},
    [FAULT_EVENT_CREATE_TIMED] = {"event_create_timed", TP_NO_HOST_MEMORY},
    [FAULT_EVENT_ELAPSED] = {"event_elapsed", TP_DEVICE_ERROR},
    [FAULT_EVENT_RECORD] = {"event_record", TP_DEVICE_ERROR},
    [FAULT_EVENT_RECORD_CONTEXT] = {"event_record_context", TP_DEVICE_ERROR},
    [FAULT_EVENT_QUERY] = {"event_query", TP_DEVICE_ERROR},
    [FAULT_EVENT_SYNC] = {"event_sync", TP_DEVICE_ERROR},
    [FAULT_STREAM_WAIT] = {"stream_wait", TP_DEVICE_ERROR},
    [FAULT_STREAM_CAPTURING] = {"stream_capturing", TP_DEVICE_ERROR},
    [FAULT_MEMORY_INFO] = {"memory_info", TP_DEVICE_ERROR},
};

static fault_device *fault_of(tp_device *dev) { return (fault_device *)(void *)dev; }

static tp_device *inner_of(tp_device *dev) { return fault_of(dev)->inner; }

/* Counts the call. Anything but TP_OK: the call fails with it. */
static tp_status fault_check(tp_device *dev, fault_call call, tp_error *error) {
    fault_device *fault = fault_of(dev);
    atomic_fetch_add(&fault->calls[call], 1);
    void (*before)(void *arg) = atomic_load(&fault->before);
    if (before != NULL && call == fault->before_call) before(fault->before_arg);
    const uint64_t nth = atomic_load(&fault->nth);
    if (nth == 0 || (fault->mask & (1u << call)) == 0) return TP_OK;
    const uint64_t counted = atomic_fetch_add(&fault->counted, 1) + 1;
    if (counted < nth || (counted > nth && !fault->persistent)) return TP_OK;
    int none = 0;
    (void)atomic_compare_exchange_strong(&fault->fired, &none, (int)call + 1);
    const tp_status status = fault->status != TP_OK ? fault->status : call_info[call].natural;
    return tp_error_set(error, status, "fault injected in %s, call %llu", call_info[call].name,
                        (unsigned long long)counted);
}

static void fault_destroy(tp_device *dev) {
    tp_device *inner = inner_of(dev);
    inner->ops->destroy(inner);
    free(fault_of(dev));
}

static tp_status fault_bind_thread(tp_device *dev, tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_BIND_THREAD, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->bind_thread(inner_of(dev), error);
}

static tp_status fault_reserve(tp_device *dev, size_t bytes, tp_addr *out, tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_RESERVE, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->reserve(inner_of(dev), bytes, out, error);
}

static void fault_release(tp_device *dev, tp_addr addr, size_t bytes) {
    inner_of(dev)->ops->release(inner_of(dev), addr, bytes);
}

static tp_status fault_frame_create(tp_device *dev, tp_frame_kind kind, size_t bytes,
                                    tp_handle *out, tp_error *error) {
    const fault_call call = kind == TP_FRAME_DEVICE ? FAULT_DEVICE_FRAME : FAULT_HOST_FRAME;
    const tp_status status = fault_check(dev, call, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->frame_create(inner_of(dev), kind, bytes, out, error);
}

static void fault_frame_destroy(tp_device *dev, tp_frame_kind kind, tp_handle handle,
                                size_t bytes) {
    inner_of(dev)->ops->frame_destroy(inner_of(dev), kind, handle, bytes);
}

static tp_status fault_map(tp_device *dev, tp_addr addr, size_t bytes, tp_handle handle,
                           tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_MAP, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->map(inner_of(dev), addr, bytes, handle, error);
}

static tp_status fault_unmap(tp_device *dev, tp_addr addr, size_t bytes, tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_UNMAP, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->unmap(inner_of(dev), addr, bytes, error);
}

static tp_status fault_protect(tp_device *dev, tp_addr addr, size_t bytes, bool readonly,
                               tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_PROTECT, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->protect(inner_of(dev), addr, bytes, readonly, error);
}

static tp_status fault_copy(tp_device *dev, tp_copy_dir dir, tp_addr dst, tp_addr src,
                            size_t bytes, tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_COPY, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->copy(inner_of(dev), dir, dst, src, bytes, error);
}

static tp_status fault_fingerprint(tp_device *dev, tp_stream stream, tp_addr addr, size_t bytes,
                                   uint32_t place, tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_FINGERPRINT, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->fingerprint(inner_of(dev), stream, addr, bytes, place, error);
}

static tp_fingerprint fault_fingerprint_read(tp_device *dev, uint32_t place) {
    return inner_of(dev)->ops->fingerprint_read(inner_of(dev), place);
}

static tp_status fault_event_create(tp_device *dev, tp_event *out, tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_EVENT_CREATE, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->event_create(inner_of(dev), out, error);
}

static void fault_event_destroy(tp_device *dev, tp_event event) {
    inner_of(dev)->ops->event_destroy(inner_of(dev), event);
}

static tp_status fault_event_record(tp_device *dev, tp_event event, tp_stream stream,
                                    tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_EVENT_RECORD, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->event_record(inner_of(dev), event, stream, error);
}

static tp_status fault_event_record_context(tp_device *dev, tp_event event, tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_EVENT_RECORD_CONTEXT, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->event_record_context(inner_of(dev), event, error);
}

static tp_status fault_event_create_timed(tp_device *dev, tp_event *out, tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_EVENT_CREATE_TIMED, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->event_create_timed(inner_of(dev), out, error);
}

static tp_status fault_event_elapsed(tp_device *dev, tp_event from, tp_event to, uint64_t *ns,
                                     tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_EVENT_ELAPSED, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->event_elapsed(inner_of(dev), from, to, ns, error);
}

static tp_status fault_event_query(tp_device *dev, tp_event event, bool *done,
                                   tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_EVENT_QUERY, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->event_query(inner_of(dev), event, done, error);
}

static tp_status fault_event_sync(tp_device *dev, tp_event event, tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_EVENT_SYNC, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->event_sync(inner_of(dev), event, error);
}

static tp_status fault_stream_wait(tp_device *dev, tp_stream stream, tp_event event,
                                   tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_STREAM_WAIT, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->stream_wait(inner_of(dev), stream, event, error);
}

static tp_status fault_stream_capturing(tp_device *dev, tp_stream stream, bool *capturing,
                                        tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_STREAM_CAPTURING, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->stream_capturing(inner_of(dev), stream, capturing, error);
}

static tp_status fault_memory_info(tp_device *dev, size_t *free_bytes, size_t *total_bytes,
                                   tp_error *error) {
    const tp_status status = fault_check(dev, FAULT_MEMORY_INFO, error);
    if (status != TP_OK) return status;
    return inner_of(dev)->ops->memory_info(inner_of(dev), free_bytes, total_bytes, error);
}

static uint64_t fault_clock(tp_device *dev) {
    return inner_of(dev)->ops->clock_ns(inner_of(dev));
}

static void fault_clock_advance(tp_device *dev, uint64_t most_ns) {
    inner_of(dev)->ops->clock_advance(inner_of(dev), most_ns);
}

static const tp_device_ops fault_ops = {
    .destroy = fault_destroy,
    .bind_thread = fault_bind_thread,
    .reserve = fault_reserve,
    .release = fault_release,
    .frame_create = fault_frame_create,
    .frame_destroy = fault_frame_destroy,
    .map = fault_map,
    .unmap = fault_unmap,
    .protect = fault_protect,
    .copy = fault_copy,
    .fingerprint = fault_fingerprint,
    .fingerprint_read = fault_fingerprint_read,
    .event_create = fault_event_create,
    .event_destroy = fault_event_destroy,
    .event_record = fault_event_record,
    .event_record_context = fault_event_record_context,
    .event_create_timed = fault_event_create_timed,
    .event_elapsed = fault_event_elapsed,
    .event_query = fault_event_query,
    .event_sync = fault_event_sync,
    .stream_wait = fault_stream_wait,
    .stream_capturing = fault_stream_capturing,
    .memory_info = fault_memory_info,
    .clock_ns = fault_clock,
    .clock_advance = fault_clock_advance,
};

tp_status fault_device_create(tp_device *inner, tp_device **out, tp_error *error) {
    fault_device *fault = calloc(1, sizeof *fault);
    if (fault == NULL) {
        inner->ops->destroy(inner);
        return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a device");
    }
    fault->base = *inner;
    fault->base.ops = &fault_ops;
    fault->inner = inner;
    *out = &fault->base;
    return TP_OK;
}

tp_device *fault_device_inner(tp_device *dev) { return inner_of(dev); }

void fault_device_arm(tp_device *dev, const fault_plan *plan) {
    fault_device *fault = fault_of(dev);
    atomic_store(&fault->nth, 0);
    atomic_store(&fault->counted, 0);
    atomic_store(&fault->fired, 0);
    fault->mask = plan->calls != 0 ? plan->calls : FAULT_ALL_CALLS;
    fault->status = plan->status;
    fault->persistent = plan->persistent;
    atomic_store(&fault->nth, plan->nth);
}

void fault_device_disarm(tp_device *dev) { atomic_store(&fault_of(dev)->nth, 0); }

bool fault_device_fired(const tp_device *dev) {
    return atomic_load(&((const fault_device *)(const void *)dev)->fired) != 0;
}

fault_call fault_device_fired_call(const tp_device *dev) {
    const int fired = atomic_load(&((const fault_device *)(const void *)dev)->fired);
    TP_REQUIRE(fired != 0);
    return (fault_call)(fired - 1);
}

uint64_t fault_device_calls(const tp_device *dev, fault_call call) {
    return atomic_load(&((const fault_device *)(const void *)dev)->calls[call]);
}

void fault_device_before(tp_device *dev, fault_call call, void (*run)(void *arg), void *arg) {
    fault_device *fault = fault_of(dev);
    fault->before_call = call;
    fault->before_arg = arg;
    atomic_store(&fault->before, run);
}

const char *fault_call_name(fault_call call) { return call_info[call].name; }
