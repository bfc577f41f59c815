/* A driver library that has one device and does nothing, for the scenario of machines that cannot do
 * what torchpager needs. FAKE_DRIVER names what is wrong with it:
 *
 *     no_virtual_memory   the device cannot manage virtual memory
 *     no_host_frames      physical memory cannot be made on the host
 *     init_fails          cuInit fails
 *     streams_fail        no stream can be made
 *     reserve_fails       no addresses can be reserved
 *
 * Compiled with OLD it lacks an entry point. Everything else succeeds. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, NOT_SUPPORTED = 801 };
enum { ATTRIBUTE_VIRTUAL_MEMORY = 102, LOCATION_DEVICE = 1 };

static int is(const char *what) {
    const char *wanted = getenv("FAKE_DRIVER");
    return wanted != NULL && strcmp(wanted, what) == 0;
}

typedef struct memory_prop {
    int type, handle_types, location_type, location_id;
} memory_prop;

#define EXPORT __attribute__((visibility("default")))
#define SUCCEEDS(name)                                                                         \
    EXPORT int name(void) { return SUCCESS; }

EXPORT int cuInit(unsigned flags) {
    return flags != 0 || is("init_fails") ? NOT_INITIALIZED : SUCCESS;
}
EXPORT int cuGetErrorString(int error, const char **out) {
    *out = error == NOT_INITIALIZED ? "initialization error" : "some error";
    return SUCCESS;
}
EXPORT int cuDriverGetVersion(int *out) { return *out = 13000, SUCCESS; }
EXPORT int cuDeviceGetCount(int *out) { return *out = 1, SUCCESS; }
EXPORT int cuDeviceGet(int *out, int ordinal) { return *out = ordinal, SUCCESS; }
EXPORT int cuDeviceGetName(char *out, int length, int device) {
    (void)device;
    strncpy(out, "a fake device", (size_t)length);
    return SUCCESS;
}
EXPORT int cuDeviceTotalMem_v2(size_t *out, int device) {
    (void)device;
    return *out = (size_t)8 << 30, SUCCESS;
}
EXPORT int cuDeviceGetAttribute(int *out, int attribute, int device) {
    (void)device;
    *out = attribute == ATTRIBUTE_VIRTUAL_MEMORY ? !is("no_virtual_memory") : 0;
    return SUCCESS;
}
EXPORT int cuDevicePrimaryCtxRetain(void **out, int device) {
    (void)device;
    static int context;
    return *out = &context, SUCCESS;
}
EXPORT int cuCtxGetCurrent(void **out) { return *out = NULL, SUCCESS; }
EXPORT int cuCtxPopCurrent_v2(void **out) { return *out = NULL, SUCCESS; }
EXPORT int cuMemGetInfo_v2(size_t *free_bytes, size_t *total_bytes) {
    return *free_bytes = *total_bytes = (size_t)8 << 30, SUCCESS;
}
EXPORT int cuMemGetAllocationGranularity(size_t *out, const memory_prop *prop, int which) {
    (void)which;
    if (prop->location_type != LOCATION_DEVICE && is("no_host_frames")) return NOT_SUPPORTED;
    return *out = (size_t)2 << 20, SUCCESS;
}
EXPORT int cuMemAddressReserve(unsigned long long *out, size_t bytes, size_t alignment,
                               unsigned long long wanted, unsigned long long flags) {
    static unsigned long long next = 1ULL << 40;
    (void)alignment, (void)wanted, (void)flags;
    if (is("reserve_fails")) return OUT_OF_MEMORY;
    *out = next;
    next += bytes;
    return SUCCESS;
}
#ifndef OLD
EXPORT int cuMemCreate(unsigned long long *out, size_t bytes, const memory_prop *prop,
                       unsigned long long flags) {
    static unsigned long long next = 1;
    (void)bytes, (void)flags;
    if (prop->location_type != LOCATION_DEVICE && is("no_host_frames")) return NOT_SUPPORTED;
    return *out = next++, SUCCESS;
}
#endif
EXPORT int cuStreamCreate(void **out, unsigned flags) {
    (void)flags;
    if (is("streams_fail")) return NOT_INITIALIZED;
    return *out = malloc(1), SUCCESS;
}
EXPORT int cuEventCreate(void **out, unsigned flags) {
    (void)flags;
    return *out = malloc(1), SUCCESS;
}
EXPORT int cuStreamIsCapturing(void *stream, int *out) {
    (void)stream;
    return *out = 0, SUCCESS;
}

SUCCEEDS(cuDevicePrimaryCtxRelease_v2)
SUCCEEDS(cuCtxSetCurrent)
SUCCEEDS(cuCtxPushCurrent_v2)
SUCCEEDS(cuThreadExchangeStreamCaptureMode)
SUCCEEDS(cuMemAddressFree)
SUCCEEDS(cuMemRelease)
SUCCEEDS(cuMemMap)
SUCCEEDS(cuMemUnmap)
SUCCEEDS(cuMemSetAccess)
SUCCEEDS(cuMemcpyAsync)
SUCCEEDS(cuStreamDestroy_v2)
SUCCEEDS(cuStreamWaitEvent)
SUCCEEDS(cuEventDestroy_v2)
SUCCEEDS(cuEventRecord)
SUCCEEDS(cuEventQuery)
SUCCEEDS(cuCtxRecordEvent)
