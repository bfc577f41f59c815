/* device: the contract between the pager and whatever owns device memory.
 *
 * Responsible for: reserving addresses, creating physical frames on the device and on the host,
 * mapping frames at addresses, copying between frames, fingerprints of what they hold, and events on
 * streams. Not responsible for: deciding anything, counting budgets, remembering what is mapped where.
 *
 * Preconditions common to all calls, stated once:
 *  - sizes and addresses given to reserve, frame_create, map and unmap are multiples of
 *    caps.granularity_bytes and not 0;
 *  - one frame is mapped whole, never in part; map needs an address range that is reserved and maps
 *    nothing; unmap takes exactly a range that one map call mapped;
 *  - a frame may be mapped at several addresses at once (caps.shared_frames); frame_destroy needs it
 *    to be mapped nowhere and no work in flight on it;
 *  - map, unmap, frame_* and reserve/release take effect on the host side at once, not in stream
 *    order: the caller answers for no work in flight on the old mapping;
 *  - every call may be made from any thread; each thread calls bind_thread once before the others.
 *
 * Errors: a failed call changes nothing. TP_OUT_OF_MEMORY: the device has no room;
 * TP_NO_HOST_MEMORY: the host has none; TP_UNSUPPORTED: a capability is missing; everything else is
 * TP_DEVICE_ERROR with the driver's own code. Calls that return void cannot fail: during process
 * exit, when the driver is gone already, they do nothing.
 *
 * Locks: a backend has a lock of its own (TP_RANK_DEVICE) or none. No call waits for device work but
 * event_sync and clock_advance. */
#ifndef TP_DEVICE_DEVICE_H
#define TP_DEVICE_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/fingerprint.h"
#include "base/status.h"

typedef uint64_t tp_addr;   /* an address as kernels see it; 0 is none */
typedef uint64_t tp_handle; /* physical memory; 0 is none */
typedef void *tp_stream;    /* the framework's stream; NULL is the default stream */
typedef void *tp_event;     /* owned by the device that created it; NULL is none */

typedef enum tp_frame_kind { TP_FRAME_DEVICE, TP_FRAME_HOST } tp_frame_kind;
typedef enum tp_copy_dir { TP_COPY_TO_HOST, TP_COPY_TO_DEVICE } tp_copy_dir;

/* Where fingerprints are left for the host, numbered from 0: those of pager/proof, then those of
 * pager/verify. */
enum { TP_PLACES = 12, TP_VERIFY_PLACES = 96, TP_ALL_PLACES = TP_PLACES + TP_VERIFY_PLACES };

typedef struct tp_device_caps {
    const char *name;         /* "cuda" or "sim"; static */
    size_t granularity_bytes; /* smallest size of a frame and of a mapping */
    size_t total_bytes;       /* device memory in all */
    bool host_frames;    /* a host frame can be mapped at a tensor's address (promise P4) */
    bool shared_frames;  /* one frame at two addresses at once */
    bool context_marker; /* event_record_context works */
    bool fingerprints;   /* fingerprint works */
    uint64_t link_bytes_per_s,
        link_both_bytes_per_s; /* copies one way, and both ways together; 0:
                                                         not known */
    bool virtual_clock; /* clock_ns and clock_advance work, and time passes in no other way */
    const char
        *no_fingerprints; /* why it does not: static, or as long as the device; "" if it does */
} tp_device_caps;

typedef struct tp_device tp_device;

typedef struct tp_device_ops {
    /* Frees the device. No frame, range or event of it may be left. */
    void (*destroy)(tp_device *dev);

    /* Makes the device current on this thread (CUDA: its primary context). */
    tp_status (*bind_thread)(tp_device *dev, tp_error *error);

    /* Reserves a contiguous range that maps nothing yet. */
    tp_status (*reserve)(tp_device *dev, size_t bytes, tp_addr *out, tp_error *error);
    void (*release)(tp_device *dev, tp_addr addr, size_t bytes);

    /* Physical memory. Contents of a new frame are unspecified. */
    tp_status (*frame_create)(tp_device *dev, tp_frame_kind kind, size_t bytes, tp_handle *out,
                              tp_error *error);
    void (*frame_destroy)(tp_device *dev, tp_frame_kind kind, tp_handle handle, size_t bytes);

    /* Maps the whole frame at `addr`, readable and writable by kernels and copies. */
    tp_status (*map)(tp_device *dev, tp_addr addr, size_t bytes, tp_handle handle,
                     tp_error *error);
    tp_status (*unmap)(tp_device *dev, tp_addr addr, size_t bytes, tp_error *error);
    /* Whether kernels may write through a mapping (a range that one map call mapped). Readers in
     * progress do not notice either change; a write through a read-only mapping faults. */
    tp_status (*protect)(tp_device *dev, tp_addr addr, size_t bytes, bool readonly,
                         tp_error *error);

    /* Queues a copy on the device's own stream for that direction (copy_stream[dir]). */
    tp_status (*copy)(tp_device *dev, tp_copy_dir dir, tp_addr dst, tp_addr src, size_t bytes,
                      tp_error *error);

    /* Queues, on `stream`, the computation of the fingerprint of the bytes mapped at `addr` into a
     * place. Once an event recorded behind it is complete fingerprint_read answers, until the place
     * is given to the next one. A place serves one computation at a time. Needs caps.fingerprints. */
    tp_status (*fingerprint)(tp_device *dev, tp_stream stream, tp_addr addr, size_t bytes,
                             uint32_t place, tp_error *error);
    tp_fingerprint (*fingerprint_read)(tp_device *dev, uint32_t place);

    /* Events. Recording again replaces what the event stood for. A new event is complete. */
    tp_status (*event_create)(tp_device *dev, tp_event *out, tp_error *error);
    void (*event_destroy)(tp_device *dev, tp_event event);
    tp_status (*event_record)(tp_device *dev, tp_event event, tp_stream stream,
                              tp_error *error);
    /* All work queued on the device so far, on every stream. Needs caps.context_marker, and no
     * stream of the process in capture. */
    tp_status (*event_record_context)(tp_device *dev, tp_event event, tp_error *error);
    /* An event that can be timed, and the time on the device between two such, both complete. NULL,
     * both: the device does not tell. */
    tp_status (*event_create_timed)(tp_device *dev, tp_event *out, tp_error *error);
    tp_status (*event_elapsed)(tp_device *dev, tp_event from, tp_event to, uint64_t *ns,
                               tp_error *error);
    /* Sets *done. Never waits. */
    tp_status (*event_query)(tp_device *dev, tp_event event, bool *done, tp_error *error);
    /* Waits on the host. The only call that waits for the device. Take no lock across it. */
    tp_status (*event_sync)(tp_device *dev, tp_event event, tp_error *error);
    /* Work queued on `stream` from now on waits, on the device, for `event` as recorded now. */
    tp_status (*stream_wait)(tp_device *dev, tp_stream stream, tp_event event, tp_error *error);
    /* Whether `stream` is being captured into a graph. */
    tp_status (*stream_capturing)(tp_device *dev, tp_stream stream, bool *capturing,
                                  tp_error *error);
    /* In a child process, right after fork: the range, mapped or not, becomes memory of its own with
     * the bytes that are at `from`. Takes no lock. NULL: the device does not work in a child, and
     * its framework says so. */
    void (*make_private)(tp_device *dev, tp_addr addr, size_t bytes, tp_addr from);
    /* Device memory free and in all, as the driver reports it now. */
    tp_status (*memory_info)(tp_device *dev, size_t *free_bytes, size_t *total_bytes,
                             tp_error *error);
    /* With caps.virtual_clock, else not to be called. The host's time; and the host waits until an
     * item of queued work ends, `most_ns` at most. */
    uint64_t (*clock_ns)(tp_device *dev);
    void (*clock_advance)(tp_device *dev, uint64_t most_ns);
} tp_device_ops;

struct tp_device {
    const tp_device_ops *ops;
    tp_device_caps caps;
    tp_stream copy_stream[2]; /* by tp_copy_dir; usable with event_record and stream_wait */
    /* More of our own, so that a fingerprint waits for no copy and no copy for a fingerprint: for checks, and
     * for those before write-backs, which wait for other work. */
    tp_stream check_stream, print_stream;
};

#endif
