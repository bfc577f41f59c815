/* device_sim: the device contract on plain host memory, with streams, events and a virtual
 * clock.
 *
 * Device frames and host frames are ranges of two memfds, named "torchpager-device" and
 * "torchpager-host", so that an outside observer can count their blocks; a mapping is an mmap
 * with MAP_FIXED. A missing mapping is a SIGSEGV, a missing synchronisation a wrong value: work
 * queued on a stream (copies, and kernels queued by tp_sim_launch) runs later, in an order
 * drawn from the seed among all that the streams and events allow. With `poison` set a new
 * frame is full of 0xDB, also where it reuses the range of a freed one; a freed frame's OS
 * pages go back at once.
 *
 * Broken preconditions change nothing and answer TP_INVALID, also an unmap under a running
 * copy; calls that return void trap on them in debug builds. A queued copy that meets an
 * unmapped address when its turn comes loses the device, as on hardware: from then on every
 * call about streams and events answers TP_DEVICE_ERROR with driver code 700.
 *
 * In the order of time (`time_ordered`) chance has no part: the item that ends first runs first,
 * both directions share the link for exactly as long as both are busy, and time passes only
 * while the host waits (event_sync, clock_advance, tp_sim_step): the host's time is the clock.
 * An event is looked at without time passing; only who looks a few thousand times, and does nothing
 * else, waits by that.
 *
 * With `no_payload` frames have no contents: nothing is written, copied or compared, all
 * fingerprints are the same, and the size of a frame costs nothing. States and preconditions are
 * checked, and everything is counted, as ever; addresses are reserved and cannot be accessed.
 *
 * The virtual clock: a copy takes bytes / link rate on its direction's engine (both directions
 * at once share `duplex_bytes_per_s`), a fingerprint bytes / fingerprint rate, a kernel its own
 * duration; in the order of time, where the options say so, a change of a mapping as well, for
 * which the host waits; nothing else takes time. The clock is the latest end of anything that has
 * run; what is queued after the host saw an event complete begins no earlier than that event. */
#ifndef TP_DEVICE_DEVICE_SIM_H
#define TP_DEVICE_DEVICE_SIM_H

#include "device/device.h"

typedef struct tp_sim_options {
    size_t device_bytes;      /* physical device memory; frames beyond it: TP_OUT_OF_MEMORY */
    size_t host_bytes;        /* physical host memory for host frames; 0: no bound */
    size_t granularity_bytes; /* power of two, at least one OS page */
    uint64_t seed;            /* of the completion order */
    bool poison;              /* fill new frames with 0xDB */
    bool manual;            /* queries run no queued work; only tp_sim_step and event_sync do */
    bool no_context_marker; /* capability off, to test the fallbacks */
    bool no_host_frames;
    bool no_fingerprints;
    bool time_ordered; /* not with `manual` */
    bool no_payload;
    uint64_t link_bytes_per_s;        /* 0: 55e9 */
    uint64_t duplex_bytes_per_s;      /* 0: 101e9 */
    uint64_t fingerprint_bytes_per_s; /* 0: 2e12 */
    /* How long mapping a frame takes, in the order of time; unmapping it takes a quarter. */
    uint64_t map_device_ns_per_mib, map_host_ns_per_mib;
} tp_sim_options;

TP_MUST_USE tp_status tp_sim_device_create(const tp_sim_options *options, tp_device **out,
                                           tp_error *error);

/* Test and replay interface. */

/* A new stream. It lives until the device does. */
TP_MUST_USE tp_status tp_sim_stream_create(tp_device *dev, tp_stream *out, tp_error *error);

/* A kernel: runs on the host, some time later, in stream order, with no lock of the device
 * held. */
typedef void tp_sim_kernel(tp_device *dev, void *arg);
TP_MUST_USE tp_status tp_sim_launch(tp_device *dev, tp_stream stream, tp_sim_kernel *kernel,
                                    void *arg, uint64_t duration_ns, tp_error *error);
/* A kernel over operands in host frames: while it runs, which is at least as long as the link takes
 * for these bytes, no copy goes on. Only in the order of time. */
TP_MUST_USE tp_status tp_sim_launch_over_link(tp_device *dev, tp_stream stream,
                                              tp_sim_kernel *kernel, void *arg,
                                              uint64_t duration_ns, size_t read_bytes,
                                              size_t written_bytes, tp_error *error);

/* Runs one queued item that may run now, chosen by the seed or by time. False: nothing could run. */
bool tp_sim_step(tp_device *dev);

/* Marks a stream as being captured, or not: then recording an event on it, or a context event,
 * fails as the driver does; so do launches and waits on it (no graph is recorded). */
void tp_sim_set_capturing(tp_device *dev, tp_stream stream, bool capturing);

/* What a kernel does with memory, checked: false, and nothing done, where any byte of the range
 * maps nothing at this moment. Without payload nothing is done, and 0 read. */
bool tp_sim_read(tp_device *dev, tp_addr addr, void *out, size_t bytes);
bool tp_sim_write(tp_device *dev, tp_addr addr, const void *data, size_t bytes);
/* Whether every byte of the range maps something. */
bool tp_sim_mapped(tp_device *dev, tp_addr addr, size_t bytes);

uint64_t tp_sim_clock_ns(tp_device *dev);

typedef struct tp_sim_counts {
    size_t device_frames_bytes, host_frames_bytes; /* existing now */
    uint64_t frame_creates, frame_destroys, maps, unmaps, copies, event_creates;
    size_t device_frames_peak_bytes;            /* the most that existed at once */
    uint64_t bytes_to_host, bytes_to_device;    /* by copies */
    uint64_t written_over_link, read_over_link; /* bytes, by kernels */
    uint64_t fingerprints;
    size_t ranges, frames, mappings, events; /* existing now: all 0 before destroy */
} tp_sim_counts;
void tp_sim_get_counts(tp_device *dev, tp_sim_counts *out);

/* The memfd behind frames of that kind. Owned by the device. -1: they have no payload. */
int tp_sim_fd(tp_device *dev, tp_frame_kind kind);

#endif
