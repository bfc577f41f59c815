/* Principal entry points: tp_cuda_device_create, tp_cuda_probe_device, cuda_map, cuda_copy.
 *
 * Design note. The driver library is loaded once and never unloaded; nothing is linked against
 * it. A device holds a reference to its primary context, which the CUDA runtime and PyTorch use
 * too.
 *
 * Two properties of the calling thread matter to the driver, and neither is ours: the context
 * that is current, and the stream capture mode. Each call that needs our context while another
 * is current pushes it and pops it again (a thread of PyTorch may work on another device). Each
 * call that the driver calls unsafe during a capture runs with the mode relaxed: it never
 * touches the stream that is being captured.
 *
 * Host frames are physical memory on the host NUMA node next to the device. Which kind of
 * location the driver takes is found out by mapping one small frame when the device is
 * opened.
 *
 * Fingerprints are computed by a kernel whose PTX text is part of this library; the driver compiles
 * it when the device is opened, and one is computed then to see that it is right. Each block of it
 * writes what it has summed up to page-locked memory, where the host adds the sums. It runs on our
 * own streams, which have the highest priority: it is short, and a copy or an eviction waits for
 * it. Its blocks take as many threads as GRID_MULTIPROCESSORS multiprocessors have: half of
 * an H200, for 2% of the time that the copy takes. */
#define _POSIX_C_SOURCE 200809L

#include "device/device_cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/bytes.h"
#include "base/lock.h"
#include "device/cuda_api.h"
#include "device/fingerprint_ptx.h"

enum {
    BLOCK_THREADS = 512, /* as fingerprint.cu has it */
    GRID_MULTIPROCESSORS = 66,
    GRID_BLOCKS = GRID_MULTIPROCESSORS * 2048 / BLOCK_THREADS,
    PROOF_BYTES = 16 * 1000, /* not a multiple of what the grid reads at once */
    PLACES_BYTES = TP_ALL_PLACES * GRID_BLOCKS * 16
};

enum {
    SYNC_POLL_NS = 20000,
    VERSION_HOST_NUMA = 12020 /* the first driver that takes host NUMA locations */
};

/* ---- the driver library ------------------------------------------------------------------ */

#define DECLARE_ENTRY(name, params) tp_cu_result(*name) params;
typedef struct cuda_api {
    TP_CUDA_ENTRY_POINTS(DECLARE_ENTRY, DECLARE_ENTRY)
    bool loaded;      /* the library, and every required entry point */
    char reason[160]; /* why not */
} cuda_api;

static cuda_api api;
static pthread_once_t api_once = PTHREAD_ONCE_INIT;

/* ISO C has no conversion from an object pointer to a function pointer; POSIX promises that the
 * bytes are the same. False: there is no such entry point. */
static bool entry_find(void *library, const char *name, void *entry, size_t entry_bytes) {
    void *found = dlsym(library, name);
    if (found == NULL) return false;
    memcpy(entry, &found, entry_bytes);
    return true;
}

static void entry_missing(const char *name) {
    (void)snprintf(api.reason, sizeof api.reason,
                   "libcuda.so.1 lacks %s: the driver is too old", name);
}

#define FIND_REQUIRED(name, params)                                                            \
    if (!entry_find(library, #name, &api.name, sizeof api.name)) {                             \
        entry_missing(#name);                                                                  \
        return;                                                                                \
    }
#define FIND_OPTIONAL(name, params)                                                            \
    (void)entry_find(library, #name, &api.name, sizeof api.name);

static void api_load(void) {
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == NULL) {
        const char *why = dlerror();
        (void)snprintf(api.reason, sizeof api.reason,
                       "the NVIDIA driver cannot be loaded: %.100s",
                       why != NULL ? why : "libcuda.so.1");
        return;
    }
    TP_CUDA_ENTRY_POINTS(FIND_REQUIRED, FIND_OPTIONAL)
    api.loaded = true;
}

static bool api_ready(void) {
    (void)pthread_once(&api_once, api_load);
    return api.loaded;
}

static const char *result_text(tp_cu_result result) {
    const char *text = NULL;
    if (api.cuGetErrorString(result, &text) != TP_CU_SUCCESS || text == NULL)
        return "unknown error";
    return text;
}

/* `no_room` is what running out of memory means for this call. */
static tp_status fail_as(tp_error *error, tp_status no_room, tp_cu_result result,
                         const char *what) {
    tp_status status = TP_DEVICE_ERROR;
    if (result == TP_CU_OUT_OF_MEMORY) status = no_room;
    if (result == TP_CU_NOT_SUPPORTED) status = TP_UNSUPPORTED;
    return tp_error_set_driver(error, status, (int64_t)result, "%s: %s (%u)", what,
                               result_text(result), result);
}

static tp_status check(tp_error *error, tp_cu_result result, const char *what) {
    return result == TP_CU_SUCCESS ? TP_OK : fail_as(error, TP_OUT_OF_MEMORY, result, what);
}

/* ---- the device -------------------------------------------------------------------------- */

typedef struct cuda_device {
    tp_device base;
    tp_cu_device device;
    tp_cu_context context; /* a reference */
    tp_cu_location host;   /* of host frames; type 0: there are none */
    tp_cu_module module;   /* of the fingerprint's kernel */
    tp_cu_function kernel;
    tp_fingerprint *places;     /* TP_ALL_PLACES times GRID_BLOCKS sums, page-locked */
    tp_cu_pointer places_there; /* the same, as kernels see it */
    char no_fingerprints[160];
} cuda_device;

static cuda_device *cuda_of(tp_device *dev) { return (cuda_device *)(void *)dev; }

/* What a call changed on its thread, to be put back. */
typedef struct scope {
    bool pushed, relaxed;
    tp_cu_capture_mode mode;
} scope;

static tp_cu_result scope_context(const cuda_device *cuda, scope *s) {
    tp_cu_context current = NULL;
    const tp_cu_result result = api.cuCtxGetCurrent(&current);
    if (result != TP_CU_SUCCESS || current == cuda->context) return result;
    const tp_cu_result pushed = api.cuCtxPushCurrent_v2(cuda->context);
    s->pushed = pushed == TP_CU_SUCCESS;
    return pushed;
}

static void scope_relax(scope *s) {
    s->mode = TP_CU_CAPTURE_MODE_RELAXED;
    s->relaxed = api.cuThreadExchangeStreamCaptureMode(&s->mode) == TP_CU_SUCCESS;
}

static void scope_leave(scope *s) {
    tp_cu_context popped = NULL;
    if (s->relaxed) (void)api.cuThreadExchangeStreamCaptureMode(&s->mode);
    if (s->pushed) (void)api.cuCtxPopCurrent_v2(&popped);
    *s = (scope){0};
}

/* Our context, and calls unsafe during a capture allowed. Leave the scope also on failure. */
static tp_cu_result scope_enter(const cuda_device *cuda, scope *s) {
    *s = (scope){0};
    const tp_cu_result result = scope_context(cuda, s);
    if (result == TP_CU_SUCCESS) scope_relax(s);
    return result;
}

/* Sets our context where there is none. A thread that works on another device keeps its own:
 * then each call switches for itself. */
static tp_status cuda_bind_thread(tp_device *dev, tp_error *error) {
    tp_cu_context current = NULL;
    tp_cu_result result = api.cuCtxGetCurrent(&current);
    if (result == TP_CU_SUCCESS && current == NULL) {
        result = api.cuCtxSetCurrent(cuda_of(dev)->context);
    }
    return check(error, result, "making the context current");
}

/* ---- addresses and frames ---------------------------------------------------------------- */

static tp_status cuda_reserve(tp_device *dev, size_t bytes, tp_addr *out, tp_error *error) {
    tp_cu_pointer address = 0;
    scope s;
    tp_cu_result result = scope_enter(cuda_of(dev), &s);
    if (result == TP_CU_SUCCESS) {
        result = api.cuMemAddressReserve(&address, bytes, dev->caps.granularity_bytes, 0, 0);
    }
    scope_leave(&s);
    if (result != TP_CU_SUCCESS) return check(error, result, "cuMemAddressReserve");
    *out = address;
    return TP_OK;
}

static void cuda_release(tp_device *dev, tp_addr addr, size_t bytes) {
    scope s;
    if (scope_enter(cuda_of(dev), &s) == TP_CU_SUCCESS) (void)api.cuMemAddressFree(addr, bytes);
    scope_leave(&s);
}

static tp_cu_memory memory_at(tp_cu_location location) {
    return (tp_cu_memory){.type = TP_CU_MEMORY_PINNED, .location = location};
}

static tp_cu_location device_location(const cuda_device *cuda) {
    return (tp_cu_location){.type = TP_CU_LOCATION_DEVICE, .id = cuda->device};
}

static tp_status cuda_frame_create(tp_device *dev, tp_frame_kind kind, size_t bytes,
                                   tp_handle *out, tp_error *error) {
    const cuda_device *cuda = cuda_of(dev);
    const bool on_host = kind == TP_FRAME_HOST;
    if (on_host && !dev->caps.host_frames) {
        return tp_error_set(error, TP_UNSUPPORTED, "this driver cannot map host frames");
    }
    const tp_cu_memory memory = memory_at(on_host ? cuda->host : device_location(cuda));
    tp_cu_handle handle = 0;
    scope s;
    tp_cu_result result = scope_enter(cuda, &s);
    if (result == TP_CU_SUCCESS) result = api.cuMemCreate(&handle, bytes, &memory, 0);
    scope_leave(&s);
    if (result != TP_CU_SUCCESS) {
        return fail_as(error, on_host ? TP_NO_HOST_MEMORY : TP_OUT_OF_MEMORY, result,
                       on_host ? "cuMemCreate of a host frame"
                               : "cuMemCreate of a device frame");
    }
    *out = handle;
    return TP_OK;
}

static void cuda_frame_destroy(tp_device *dev, tp_frame_kind kind, tp_handle handle,
                               size_t bytes) {
    (void)kind;
    (void)bytes;
    scope s;
    if (scope_enter(cuda_of(dev), &s) == TP_CU_SUCCESS) (void)api.cuMemRelease(handle);
    scope_leave(&s);
}

/* In a scope. Whole, as the driver insists. It changes one mapping at a time, and making host memory
 * accessible takes it 12 us a MiB (H200); in several pieces of physical memory, longer. */
static tp_cu_result map_in_scope(const cuda_device *cuda, tp_addr addr, size_t bytes,
                                 tp_handle handle) {
    const tp_cu_access access = {.location = device_location(cuda),
                                 .flags = TP_CU_ACCESS_READ_WRITE};
    tp_cu_result result = api.cuMemMap(addr, bytes, 0, handle, 0);
    if (result != TP_CU_SUCCESS) return result;
    result = api.cuMemSetAccess(addr, bytes, &access, 1);
    if (result != TP_CU_SUCCESS) (void)api.cuMemUnmap(addr, bytes);
    return result;
}

static tp_status cuda_map(tp_device *dev, tp_addr addr, size_t bytes, tp_handle handle,
                          tp_error *error) {
    const cuda_device *cuda = cuda_of(dev);
    scope s;
    tp_cu_result result = scope_enter(cuda, &s);
    if (result == TP_CU_SUCCESS) result = map_in_scope(cuda, addr, bytes, handle);
    scope_leave(&s);
    return check(error, result, "mapping a frame");
}

static tp_status cuda_unmap(tp_device *dev, tp_addr addr, size_t bytes, tp_error *error) {
    scope s;
    tp_cu_result result = scope_enter(cuda_of(dev), &s);
    if (result == TP_CU_SUCCESS) result = api.cuMemUnmap(addr, bytes);
    scope_leave(&s);
    return check(error, result, "cuMemUnmap");
}

static tp_status cuda_protect(tp_device *dev, tp_addr addr, size_t bytes, bool readonly,
                              tp_error *error) {
    const cuda_device *cuda = cuda_of(dev);
    const tp_cu_access access = {.location = device_location(cuda),
                                 .flags =
                                     readonly ? TP_CU_ACCESS_READ : TP_CU_ACCESS_READ_WRITE};
    scope s;
    tp_cu_result result = scope_enter(cuda, &s);
    if (result == TP_CU_SUCCESS) result = api.cuMemSetAccess(addr, bytes, &access, 1);
    scope_leave(&s);
    return check(error, result, "cuMemSetAccess");
}

/* ---- copies, events, streams ------------------------------------------------------------- */

static tp_status cuda_copy(tp_device *dev, tp_copy_dir dir, tp_addr dst, tp_addr src,
                           size_t bytes, tp_error *error) {
    scope s;
    tp_cu_result result = scope_enter(cuda_of(dev), &s);
    if (result == TP_CU_SUCCESS) {
        result = api.cuMemcpyAsync(dst, src, bytes, dev->copy_stream[dir]);
    }
    scope_leave(&s);
    return check(error, result, "cuMemcpyAsync");
}

/* In a scope. */
static tp_cu_result launch_fingerprint(const cuda_device *cuda, tp_cu_stream stream,
                                       tp_cu_pointer addr, size_t bytes, uint32_t place) {
    unsigned long long words = bytes / 16;
    tp_cu_pointer sums = cuda->places_there + place * sizeof(tp_fingerprint[GRID_BLOCKS]);
    void *parameters[] = {&addr, &words, &sums};
    return api.cuLaunchKernel(cuda->kernel, GRID_BLOCKS, 1, 1, BLOCK_THREADS, 1, 1, 0, stream,
                              parameters, NULL);
}

static tp_status cuda_fingerprint(tp_device *dev, tp_stream stream, tp_addr addr, size_t bytes,
                                  uint32_t place, tp_error *error) {
    const cuda_device *cuda = cuda_of(dev);
    if (!dev->caps.fingerprints) {
        return tp_error_set(error, TP_UNSUPPORTED, "%s", cuda->no_fingerprints);
    }
    if (place >= TP_ALL_PLACES) return tp_error_set(error, TP_INVALID, "no place %u", place);
    scope s;
    tp_cu_result result = scope_enter(cuda, &s);
    if (result == TP_CU_SUCCESS) result = launch_fingerprint(cuda, stream, addr, bytes, place);
    scope_leave(&s);
    return check(error, result, "launching a fingerprint");
}

static tp_fingerprint cuda_fingerprint_read(tp_device *dev, uint32_t place) {
    /* The device has written it behind the compiler's back. */
    const volatile tp_fingerprint *sums = cuda_of(dev)->places + (size_t)place * GRID_BLOCKS;
    tp_fingerprint sum = {0, 0};
    for (int i = 0; i < GRID_BLOCKS; i++) {
        sum.low += sums[i].low;
        sum.high += sums[i].high;
    }
    return sum;
}

static tp_status event_create(tp_device *dev, unsigned int flags, tp_event *out,
                              tp_error *error) {
    tp_cu_event event = NULL;
    scope s;
    tp_cu_result result = scope_enter(cuda_of(dev), &s);
    if (result == TP_CU_SUCCESS) result = api.cuEventCreate(&event, flags);
    scope_leave(&s);
    if (result != TP_CU_SUCCESS)
        return fail_as(error, TP_NO_HOST_MEMORY, result, "cuEventCreate");
    *out = event;
    return TP_OK;
}

static tp_status cuda_event_create(tp_device *dev, tp_event *out, tp_error *error) {
    return event_create(dev, TP_CU_EVENT_DISABLE_TIMING, out, error);
}

static tp_status cuda_event_create_timed(tp_device *dev, tp_event *out, tp_error *error) {
    if (api.cuEventElapsedTime_v2 == NULL)
        return tp_error_set(error, TP_UNSUPPORTED, "this driver has no cuEventElapsedTime_v2");
    return event_create(dev, 0, out, error);
}

static void cuda_event_destroy(tp_device *dev, tp_event event) {
    scope s;
    if (scope_enter(cuda_of(dev), &s) == TP_CU_SUCCESS) (void)api.cuEventDestroy_v2(event);
    scope_leave(&s);
}

/* The default stream is the one of the current context; any other stream knows its context. No
 * mode is exchanged: recording on a stream that is not captured is safe, and this is called
 * after every operator. */
static tp_status cuda_event_record(tp_device *dev, tp_event event, tp_stream stream,
                                   tp_error *error) {
    scope s = {0};
    tp_cu_result result = TP_CU_SUCCESS;
    if (stream == NULL) result = scope_context(cuda_of(dev), &s);
    if (result == TP_CU_SUCCESS) result = api.cuEventRecord(event, stream);
    scope_leave(&s);
    return check(error, result, "cuEventRecord");
}

static tp_status cuda_event_record_context(tp_device *dev, tp_event event, tp_error *error) {
    const cuda_device *cuda = cuda_of(dev);
    if (!dev->caps.context_marker) {
        return tp_error_set(error, TP_UNSUPPORTED, "this driver has no cuCtxRecordEvent");
    }
    return check(error, api.cuCtxRecordEvent(cuda->context, event), "cuCtxRecordEvent");
}

/* A query needs no context, but is unsafe during a capture. */
static tp_cu_result event_state(tp_event event) {
    scope s = {0};
    scope_relax(&s);
    const tp_cu_result result = api.cuEventQuery(event);
    scope_leave(&s);
    return result;
}

static tp_status cuda_event_query(tp_device *dev, tp_event event, bool *done, tp_error *error) {
    (void)dev;
    const tp_cu_result result = event_state(event);
    if (result != TP_CU_SUCCESS && result != TP_CU_NOT_READY) {
        return check(error, result, "cuEventQuery");
    }
    *done = result == TP_CU_SUCCESS;
    return TP_OK;
}

static tp_status cuda_event_elapsed(tp_device *dev, tp_event from, tp_event to, uint64_t *ns,
                                    tp_error *error) {
    (void)dev;
    float ms = 0;
    scope s = {0};
    scope_relax(&s);
    const tp_cu_result result = api.cuEventElapsedTime_v2(&ms, from, to);
    scope_leave(&s);
    if (result != TP_CU_SUCCESS) return check(error, result, "cuEventElapsedTime");
    *ns = ms > 0 ? (uint64_t)((double)ms * 1e6) : 0;
    return TP_OK;
}

/* Polls: the driver's own wait either spins or, with a blocking event, costs an interrupt
 * each. */
static tp_status cuda_event_sync(tp_device *dev, tp_event event, tp_error *error) {
    const struct timespec pause = {0, SYNC_POLL_NS};
    bool done = false;
    tp_status status = cuda_event_query(dev, event, &done, error);
    while (status == TP_OK && !done) {
        (void)nanosleep(&pause, NULL);
        status = cuda_event_query(dev, event, &done, error);
    }
    return status;
}

static tp_status cuda_stream_wait(tp_device *dev, tp_stream stream, tp_event event,
                                  tp_error *error) {
    scope s = {0};
    tp_cu_result result = TP_CU_SUCCESS;
    if (stream == NULL) result = scope_context(cuda_of(dev), &s);
    if (result == TP_CU_SUCCESS) result = api.cuStreamWaitEvent(stream, event, 0);
    scope_leave(&s);
    return check(error, result, "cuStreamWaitEvent");
}

static tp_status cuda_stream_capturing(tp_device *dev, tp_stream stream, bool *capturing,
                                       tp_error *error) {
    scope s = {0};
    tp_cu_capture_status capture = TP_CU_CAPTURE_STATUS_NONE;
    tp_cu_result result = TP_CU_SUCCESS;
    if (stream == NULL) result = scope_context(cuda_of(dev), &s);
    if (result == TP_CU_SUCCESS) result = api.cuStreamIsCapturing(stream, &capture);
    scope_leave(&s);
    /* The default stream may not be used either while a stream that synchronises with it is
     * captured: to the caller that is the same as being captured. */
    if (result != TP_CU_SUCCESS && result != TP_CU_CAPTURE_IMPLICIT) {
        return check(error, result, "cuStreamIsCapturing");
    }
    *capturing = result == TP_CU_CAPTURE_IMPLICIT || capture != TP_CU_CAPTURE_STATUS_NONE;
    return TP_OK;
}

static tp_status cuda_memory_info(tp_device *dev, size_t *free_bytes, size_t *total_bytes,
                                  tp_error *error) {
    size_t free_now = 0, total = 0;
    scope s;
    tp_cu_result result = scope_enter(cuda_of(dev), &s);
    if (result == TP_CU_SUCCESS) result = api.cuMemGetInfo_v2(&free_now, &total);
    scope_leave(&s);
    if (result != TP_CU_SUCCESS) return check(error, result, "cuMemGetInfo");
    *free_bytes = free_now;
    *total_bytes = total;
    return TP_OK;
}

/* ---- what the device can do -------------------------------------------------------------- */

/* The larger of the recommended and the minimum granularity; 0 if the driver does not say. */
static size_t granularity_at(tp_cu_location location) {
    const tp_cu_memory memory = memory_at(location);
    size_t least = 0, recommended = 0;
    if (api.cuMemGetAllocationGranularity(&least, &memory, TP_CU_GRANULARITY_MINIMUM) !=
            TP_CU_SUCCESS ||
        api.cuMemGetAllocationGranularity(&recommended, &memory,
                                          TP_CU_GRANULARITY_RECOMMENDED) != TP_CU_SUCCESS) {
        return 0;
    }
    return tp_max_size(least, recommended);
}

/* In a scope: whether a frame at that location can be made and mapped for the device. */
static bool host_location_works(const cuda_device *cuda, tp_cu_location location,
                                size_t bytes) {
    const tp_cu_memory memory = memory_at(location);
    tp_cu_pointer address = 0;
    tp_cu_handle handle = 0;
    bool works = false;
    if (api.cuMemAddressReserve(&address, bytes, bytes, 0, 0) != TP_CU_SUCCESS) return false;
    if (api.cuMemCreate(&handle, bytes, &memory, 0) == TP_CU_SUCCESS) {
        works = map_in_scope(cuda, address, bytes, handle) == TP_CU_SUCCESS;
        if (works) (void)api.cuMemUnmap(address, bytes);
        (void)api.cuMemRelease(handle);
    }
    (void)api.cuMemAddressFree(address, bytes);
    return works;
}

static int attribute_of(tp_cu_device device, tp_cu_attribute attribute, int otherwise) {
    int value = 0;
    const tp_cu_result result = api.cuDeviceGetAttribute(&value, attribute, device);
    return result == TP_CU_SUCCESS ? value : otherwise;
}

/* In a scope: finds the kind of location that host frames can have, nearest to the device
 * first, and raises the granularity to what it needs. */
static void host_location_find(cuda_device *cuda) {
    const int nearest = attribute_of(cuda->device, TP_CU_ATTRIBUTE_HOST_NUMA_ID, 0);
    const tp_cu_location candidates[] = {
        {.type = TP_CU_LOCATION_HOST_NUMA, .id = nearest < 0 ? 0 : nearest},
        {.type = TP_CU_LOCATION_HOST_NUMA, .id = 0},
        {.type = TP_CU_LOCATION_HOST, .id = 0},
    };
    for (size_t i = 0; i < sizeof candidates / sizeof candidates[0]; i++) {
        const size_t granularity = granularity_at(candidates[i]);
        const size_t bytes = tp_max_size(granularity, cuda->base.caps.granularity_bytes);
        if (granularity == 0 || !host_location_works(cuda, candidates[i], bytes)) continue;
        cuda->host = candidates[i];
        cuda->base.caps.host_frames = true;
        cuda->base.caps.granularity_bytes = bytes;
        return;
    }
}

/* ---- fingerprints ------------------------------------------------------------------------ */

static bool fingerprint_entries(void) {
    return api.cuModuleLoadDataEx != NULL && api.cuModuleUnload != NULL &&
           api.cuModuleGetFunction != NULL && api.cuLaunchKernel != NULL &&
           api.cuMemHostAlloc != NULL && api.cuMemHostGetDevicePointer_v2 != NULL &&
           api.cuMemFreeHost != NULL && api.cuStreamSynchronize != NULL;
}

/* In a scope: the kernel, and the memory for its results. */
static tp_cu_result fingerprint_load(cuda_device *cuda, const char **what) {
    *what = "cuModuleLoadDataEx";
    tp_cu_result result = api.cuModuleLoadDataEx(&cuda->module, fingerprint_ptx, 0, NULL, NULL);
    if (result != TP_CU_SUCCESS) {
        cuda->module = NULL;
        return result;
    }
    *what = "cuModuleGetFunction";
    result = api.cuModuleGetFunction(&cuda->kernel, cuda->module, "tp_fingerprint");
    if (result != TP_CU_SUCCESS) return result;
    *what = "cuMemHostAlloc";
    void *memory = NULL;
    result = api.cuMemHostAlloc(&memory, PLACES_BYTES + PROOF_BYTES,
                                TP_CU_HOST_PORTABLE | TP_CU_HOST_DEVICE_MAPPED);
    if (result != TP_CU_SUCCESS) return result;
    cuda->places = memory;
    *what = "cuMemHostGetDevicePointer";
    return api.cuMemHostGetDevicePointer_v2(&cuda->places_there, memory, 0);
}

/* In a scope: one fingerprint, of memory of the host, whose value is known. */
static tp_cu_result fingerprint_prove(cuda_device *cuda, bool *right) {
    unsigned char *bytes = (unsigned char *)cuda->places + PLACES_BYTES;
    for (int i = 0; i < PROOF_BYTES; i++) bytes[i] = (unsigned char)(i * 37 + i / 251);
    const tp_cu_stream stream = cuda->base.check_stream;
    tp_cu_result result =
        launch_fingerprint(cuda, stream, cuda->places_there + PLACES_BYTES, PROOF_BYTES, 1);
    if (result == TP_CU_SUCCESS) result = api.cuStreamSynchronize(stream);
    *right =
        result == TP_CU_SUCCESS && tp_fingerprint_same(cuda_fingerprint_read(&cuda->base, 1),
                                                       tp_fingerprint_of(bytes, PROOF_BYTES));
    return result;
}

static void fingerprint_unload(cuda_device *cuda) {
    if (cuda->places != NULL) (void)api.cuMemFreeHost(cuda->places);
    if (cuda->module != NULL) (void)api.cuModuleUnload(cuda->module);
    cuda->places = NULL;
    cuda->module = NULL;
}

/* In a scope, when the streams are there. Without fingerprints the device is still of use. */
static void fingerprint_open(cuda_device *cuda) {
    const char *what = "the driver lacks what launching a kernel needs";
    bool right = false;
    tp_cu_result result = TP_CU_NOT_SUPPORTED;
    if (fingerprint_entries()) {
        result = fingerprint_load(cuda, &what);
        if (result == TP_CU_SUCCESS) {
            what = "computing the first fingerprint";
            result = fingerprint_prove(cuda, &right);
        }
    }
    cuda->base.caps.fingerprints = right;
    cuda->base.caps.no_fingerprints = cuda->no_fingerprints;
    if (right) return;
    if (result == TP_CU_SUCCESS) {
        (void)snprintf(cuda->no_fingerprints, sizeof cuda->no_fingerprints,
                       "the first fingerprint was wrong");
    } else {
        (void)snprintf(cuda->no_fingerprints, sizeof cuda->no_fingerprints, "%s: %s (%u)", what,
                       result_text(result), result);
    }
    fingerprint_unload(cuda);
}

/* ---- life -------------------------------------------------------------------------------- */

static void cuda_destroy(tp_device *dev) {
    cuda_device *cuda = cuda_of(dev);
    tp_stream *const streams[] = {&dev->copy_stream[0], &dev->copy_stream[1],
                                  &dev->check_stream, &dev->print_stream};
    scope s;
    if (scope_enter(cuda, &s) == TP_CU_SUCCESS) {
        for (size_t i = 0; i < sizeof streams / sizeof streams[0]; i++) {
            if (*streams[i] != NULL) (void)api.cuStreamDestroy_v2(*streams[i]);
        }
        fingerprint_unload(cuda);
    }
    scope_leave(&s);
    (void)api.cuDevicePrimaryCtxRelease_v2(cuda->device);
    free(cuda);
}

static const tp_device_ops cuda_ops = {
    .destroy = cuda_destroy,
    .bind_thread = cuda_bind_thread,
    .reserve = cuda_reserve,
    .release = cuda_release,
    .frame_create = cuda_frame_create,
    .frame_destroy = cuda_frame_destroy,
    .map = cuda_map,
    .unmap = cuda_unmap,
    .protect = cuda_protect,
    .copy = cuda_copy,
    .fingerprint = cuda_fingerprint,
    .fingerprint_read = cuda_fingerprint_read,
    .event_create = cuda_event_create,
    .event_destroy = cuda_event_destroy,
    .event_record = cuda_event_record,
    .event_record_context = cuda_event_record_context,
    .event_create_timed = cuda_event_create_timed,
    .event_elapsed = cuda_event_elapsed,
    .event_query = cuda_event_query,
    .event_sync = cuda_event_sync,
    .stream_wait = cuda_stream_wait,
    .stream_capturing = cuda_stream_capturing,
    .memory_info = cuda_memory_info,
};

/* Answers without a context: the driver is there, the device exists and has virtual memory. */
static tp_status device_find(int ordinal, tp_cu_device *out, tp_error *error) {
    if (!api_ready()) return tp_error_set(error, TP_UNSUPPORTED, "%s", api.reason);
    tp_cu_result result = api.cuInit(0);
    if (result == TP_CU_NO_DEVICE) {
        return tp_error_set_driver(error, TP_UNSUPPORTED, (int64_t)result,
                                   "the driver sees no CUDA device");
    }
    if (result != TP_CU_SUCCESS) {
        (void)fail_as(error, TP_OUT_OF_MEMORY, result, "cuInit");
        return TP_UNSUPPORTED;
    }
    int count = 0;
    result = api.cuDeviceGetCount(&count);
    if (result != TP_CU_SUCCESS) return check(error, result, "cuDeviceGetCount");
    if (ordinal < 0 || ordinal >= count) {
        return tp_error_set(error, TP_UNSUPPORTED, "there is no CUDA device %d; %d are visible",
                            ordinal, count);
    }
    tp_cu_device device = 0;
    result = api.cuDeviceGet(&device, ordinal);
    if (result != TP_CU_SUCCESS) return check(error, result, "cuDeviceGet");
    if (attribute_of(device, TP_CU_ATTRIBUTE_VIRTUAL_MEMORY, 0) == 0) {
        return tp_error_set(error, TP_UNSUPPORTED,
                            "device %d or its driver has no virtual memory management",
                            ordinal);
    }
    *out = device;
    return TP_OK;
}

/* In a scope. */
static tp_cu_result stream_open(tp_stream *out) {
    tp_cu_stream stream = NULL;
    int least = 0, greatest = 0;
    tp_cu_result result = TP_CU_NOT_SUPPORTED;
    if (api.cuCtxGetStreamPriorityRange != NULL && api.cuStreamCreateWithPriority != NULL &&
        api.cuCtxGetStreamPriorityRange(&least, &greatest) == TP_CU_SUCCESS) {
        result = api.cuStreamCreateWithPriority(&stream, TP_CU_STREAM_NON_BLOCKING, greatest);
    }
    if (result != TP_CU_SUCCESS)
        result = api.cuStreamCreate(&stream, TP_CU_STREAM_NON_BLOCKING);
    if (result == TP_CU_SUCCESS) *out = stream;
    return result;
}

/* In a scope. */
static tp_status device_fill(cuda_device *cuda, tp_error *error) {
    tp_device_caps *caps = &cuda->base.caps;
    caps->name = "cuda";
    caps->shared_frames = true;
    caps->context_marker = api.cuCtxRecordEvent != NULL;
    caps->granularity_bytes = granularity_at(device_location(cuda));
    if (caps->granularity_bytes == 0) {
        return tp_error_set(error, TP_UNSUPPORTED, "the driver names no granularity of memory");
    }
    tp_cu_result result = api.cuDeviceTotalMem_v2(&caps->total_bytes, cuda->device);
    if (result != TP_CU_SUCCESS) return check(error, result, "cuDeviceTotalMem");
    host_location_find(cuda);
    tp_stream *const streams[] = {&cuda->base.copy_stream[0], &cuda->base.copy_stream[1],
                                  &cuda->base.check_stream, &cuda->base.print_stream};
    for (size_t i = 0; i < sizeof streams / sizeof streams[0]; i++) {
        result = stream_open(streams[i]);
        if (result != TP_CU_SUCCESS) return check(error, result, "cuStreamCreate");
    }
    fingerprint_open(cuda);
    return TP_OK;
}

tp_status tp_cuda_device_create(int ordinal, tp_device **out, tp_error *error) {
    tp_cu_device device = 0;
    tp_status status = device_find(ordinal, &device, error);
    if (status != TP_OK) return status;
    cuda_device *cuda = calloc(1, sizeof *cuda);
    if (cuda == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a device");
    cuda->base.ops = &cuda_ops;
    cuda->device = device;
    tp_cu_result result = api.cuDevicePrimaryCtxRetain(&cuda->context, device);
    if (result != TP_CU_SUCCESS) {
        free(cuda);
        return check(error, result, "cuDevicePrimaryCtxRetain");
    }
    scope s;
    result = scope_enter(cuda, &s);
    status = result == TP_CU_SUCCESS ? device_fill(cuda, error)
                                     : check(error, result, "making the context current");
    scope_leave(&s);
    if (status != TP_OK) {
        cuda_destroy(&cuda->base);
        return status;
    }
    *out = &cuda->base;
    return TP_OK;
}

/* ---- the probe --------------------------------------------------------------------------- */

/* Without a context: what the attributes say. A driver too old to know them is judged by
 * age. */
static bool host_frames_by_attribute(tp_cu_device device, int driver_version) {
    const int by_age = driver_version >= VERSION_HOST_NUMA ? 1 : 0;
    return attribute_of(device, TP_CU_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY, by_age) != 0 ||
           attribute_of(device, TP_CU_ATTRIBUTE_HOST_VIRTUAL_MEMORY, 0) != 0;
}

static void probe_reason(tp_cuda_probe *out, const char *reason) {
    if (out->reason[0] == '\0') (void)snprintf(out->reason, sizeof out->reason, "%s", reason);
}

/* What only an open device can answer. */
static void probe_open(int ordinal, tp_cuda_probe *out) {
    tp_device *dev = NULL;
    tp_error error = {0};
    if (tp_cuda_device_create(ordinal, &dev, &error) != TP_OK) {
        probe_reason(out, error.message);
        return;
    }
    out->host_frames = dev->caps.host_frames;
    out->granularity_bytes = dev->caps.granularity_bytes;
    dev->ops->destroy(dev);
}

void tp_cuda_probe_device(int ordinal, bool retain, tp_cuda_probe *out) {
    *out = (tp_cuda_probe){0};
    out->library = api_ready();
    if (out->library) {
        (void)api.cuDriverGetVersion(&out->driver_version);
        if (api.cuInit(0) == TP_CU_SUCCESS) (void)api.cuDeviceGetCount(&out->device_count);
        out->context_marker = api.cuCtxRecordEvent != NULL;
    }
    tp_cu_device device = 0;
    tp_error error = {0};
    if (out->device_count > 0 && ordinal >= 0 && ordinal < out->device_count &&
        api.cuDeviceGet(&device, ordinal) == TP_CU_SUCCESS) {
        (void)api.cuDeviceGetName(out->device_name, (int)sizeof out->device_name, device);
        (void)api.cuDeviceTotalMem_v2(&out->total_bytes, device);
    }
    if (device_find(ordinal, &device, &error) != TP_OK) {
        probe_reason(out, error.message);
        return;
    }
    out->virtual_memory = true;
    out->granularity_bytes =
        granularity_at((tp_cu_location){.type = TP_CU_LOCATION_DEVICE, .id = device});
    out->host_frames = host_frames_by_attribute(device, out->driver_version);
    if (retain) {
        out->host_frames = false;
        probe_open(ordinal, out);
    }
    if (!out->host_frames) probe_reason(out, "the driver cannot map host memory as frames");
    if (!out->context_marker)
        probe_reason(out, "the driver has no cuCtxRecordEvent (12.5 and later)");
}
