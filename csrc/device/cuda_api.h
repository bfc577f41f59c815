/* cuda_api: what device_cuda.c uses of the CUDA driver's interface, declared here so that
 * building needs no CUDA header and running needs no CUDA library: every entry point is looked
 * up at run time. tests/c/test_cuda_api.c compares each declaration with cuda.h where that is
 * found.
 *
 * Names end in _v2 where the driver exports a changed function beside the first one; the plain
 * name is then the old, wrong one. */
#ifndef TP_DEVICE_CUDA_API_H
#define TP_DEVICE_CUDA_API_H

#include <stddef.h>

/* ---- types ------------------------------------------------------------------------------- */

typedef unsigned int tp_cu_result; /* 0: success */
typedef int tp_cu_device;
typedef unsigned long long tp_cu_pointer;
typedef unsigned long long tp_cu_handle; /* of physical memory */
typedef struct CUctx_st *tp_cu_context;
typedef struct CUstream_st *tp_cu_stream;
typedef struct CUevent_st *tp_cu_event;
typedef struct CUmod_st *tp_cu_module;
typedef struct CUfunc_st *tp_cu_function;
typedef unsigned int tp_cu_jit_option;
typedef unsigned int tp_cu_attribute;
typedef unsigned int tp_cu_granularity;
typedef unsigned int tp_cu_capture_status;
typedef unsigned int tp_cu_capture_mode;

/* Where memory is: a device or a host NUMA node. */
typedef struct tp_cu_location {
    unsigned int type; /* TP_CU_LOCATION_* */
    int id;
} tp_cu_location;

/* What physical memory to create. All fields that are not named by a use are zero. */
typedef struct tp_cu_memory {
    unsigned int type;         /* TP_CU_MEMORY_PINNED */
    unsigned int handle_types; /* 0: not exported */
    tp_cu_location location;
    void *win32_metadata;
    struct {
        unsigned char compression;
        unsigned char rdma_capable;
        unsigned short usage;
        unsigned char reserved[4];
    } flags;
} tp_cu_memory;

/* Who may access a mapped range. */
typedef struct tp_cu_access {
    tp_cu_location location;
    unsigned int flags; /* TP_CU_ACCESS_READ_WRITE */
} tp_cu_access;

/* ---- constants --------------------------------------------------------------------------- */

enum {
    TP_CU_SUCCESS = 0,
    TP_CU_INVALID_VALUE = 1,
    TP_CU_OUT_OF_MEMORY = 2,
    TP_CU_NO_DEVICE = 100,
    TP_CU_NOT_READY = 600,
    TP_CU_NOT_SUPPORTED = 801,
    TP_CU_CAPTURE_IMPLICIT = 906
};

enum {
    TP_CU_ATTRIBUTE_VIRTUAL_MEMORY = 102,
    TP_CU_ATTRIBUTE_HOST_NUMA_ID = 134,
    TP_CU_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY = 141,
    TP_CU_ATTRIBUTE_HOST_VIRTUAL_MEMORY = 145
};

enum {
    TP_CU_LOCATION_DEVICE = 1,
    TP_CU_LOCATION_HOST = 2,
    TP_CU_LOCATION_HOST_NUMA = 3,
    TP_CU_MEMORY_PINNED = 1,
    TP_CU_ACCESS_READ = 1,
    TP_CU_ACCESS_READ_WRITE = 3,
    TP_CU_GRANULARITY_MINIMUM = 0,
    TP_CU_GRANULARITY_RECOMMENDED = 1,
    TP_CU_STREAM_NON_BLOCKING = 1,
    TP_CU_EVENT_DISABLE_TIMING = 2,
    TP_CU_HOST_PORTABLE = 1,
    TP_CU_HOST_DEVICE_MAPPED = 2,
    TP_CU_CAPTURE_STATUS_NONE = 0,
    TP_CU_CAPTURE_MODE_RELAXED = 2
};

/* ---- entry points ------------------------------------------------------------------------ */

/* required(name, (parameters)) or optional(name, (parameters)); all return tp_cu_result. */
/* clang-format off */
#define TP_CUDA_ENTRY_POINTS(required, optional)                                              \
    required(cuInit, (unsigned int flags))                                                    \
    required(cuDriverGetVersion, (int *version))                                              \
    required(cuGetErrorString, (tp_cu_result result, const char **text))                      \
    required(cuDeviceGetCount, (int *count))                                                  \
    required(cuDeviceGet, (tp_cu_device *device, int ordinal))                                \
    required(cuDeviceGetName, (char *name, int length, tp_cu_device device))                  \
    required(cuDeviceTotalMem_v2, (size_t *bytes, tp_cu_device device))                       \
    required(cuDeviceGetAttribute,                                                            \
             (int *value, tp_cu_attribute attribute, tp_cu_device device))                    \
    required(cuDevicePrimaryCtxRetain, (tp_cu_context *context, tp_cu_device device))         \
    required(cuDevicePrimaryCtxRelease_v2, (tp_cu_device device))                             \
    required(cuCtxGetCurrent, (tp_cu_context *context))                                       \
    required(cuCtxSetCurrent, (tp_cu_context context))                                        \
    required(cuCtxPushCurrent_v2, (tp_cu_context context))                                    \
    required(cuCtxPopCurrent_v2, (tp_cu_context *context))                                    \
    required(cuThreadExchangeStreamCaptureMode, (tp_cu_capture_mode *mode))                   \
    required(cuMemGetInfo_v2, (size_t *free_bytes, size_t *total_bytes))                      \
    required(cuMemGetAllocationGranularity,                                                   \
             (size_t *bytes, const tp_cu_memory *memory, tp_cu_granularity which))            \
    required(cuMemAddressReserve, (tp_cu_pointer *address, size_t bytes, size_t alignment,    \
                                   tp_cu_pointer wanted, unsigned long long flags))           \
    required(cuMemAddressFree, (tp_cu_pointer address, size_t bytes))                         \
    required(cuMemCreate, (tp_cu_handle *handle, size_t bytes, const tp_cu_memory *memory,    \
                           unsigned long long flags))                                         \
    required(cuMemRelease, (tp_cu_handle handle))                                             \
    required(cuMemMap, (tp_cu_pointer address, size_t bytes, size_t offset,                   \
                        tp_cu_handle handle, unsigned long long flags))                       \
    required(cuMemUnmap, (tp_cu_pointer address, size_t bytes))                               \
    required(cuMemSetAccess, (tp_cu_pointer address, size_t bytes, const tp_cu_access *access,\
                              size_t count))                                                  \
    required(cuMemcpyAsync, (tp_cu_pointer destination, tp_cu_pointer source, size_t bytes,   \
                             tp_cu_stream stream))                                            \
    required(cuStreamCreate, (tp_cu_stream *stream, unsigned int flags))                      \
    required(cuStreamDestroy_v2, (tp_cu_stream stream))                                       \
    required(cuStreamWaitEvent, (tp_cu_stream stream, tp_cu_event event, unsigned int flags)) \
    required(cuStreamIsCapturing, (tp_cu_stream stream, tp_cu_capture_status *status))        \
    required(cuEventCreate, (tp_cu_event *event, unsigned int flags))                         \
    required(cuEventDestroy_v2, (tp_cu_event event))                                          \
    required(cuEventRecord, (tp_cu_event event, tp_cu_stream stream))                         \
    required(cuEventQuery, (tp_cu_event event))                                               \
    optional(cuEventElapsedTime_v2, (float *ms, tp_cu_event from, tp_cu_event to))            \
    optional(cuCtxRecordEvent, (tp_cu_context context, tp_cu_event event)) /* from 12.5 on */ \
    optional(cuCtxGetStreamPriorityRange, (int *least, int *greatest))                        \
    optional(cuStreamCreateWithPriority,                                                      \
             (tp_cu_stream *stream, unsigned int flags, int priority))                        \
    optional(cuStreamSynchronize, (tp_cu_stream stream))                                      \
    optional(cuMemHostAlloc, (void **memory, size_t bytes, unsigned int flags))               \
    optional(cuMemHostGetDevicePointer_v2,                                                    \
             (tp_cu_pointer *address, void *memory, unsigned int flags))                      \
    optional(cuMemFreeHost, (void *memory))                                                   \
    optional(cuModuleLoadDataEx, (tp_cu_module *module, const void *image,                    \
                                  unsigned int option_count, tp_cu_jit_option *options,       \
                                  void **values))                                             \
    optional(cuModuleUnload, (tp_cu_module module))                                           \
    optional(cuModuleGetFunction,                                                             \
             (tp_cu_function *function, tp_cu_module module, const char *name))               \
    optional(cuLaunchKernel,                                                                  \
             (tp_cu_function function, unsigned int grid_x, unsigned int grid_y,              \
              unsigned int grid_z, unsigned int block_x, unsigned int block_y,                \
              unsigned int block_z, unsigned int shared_bytes, tp_cu_stream stream,           \
              void **parameters, void **extra))
/* clang-format on */

#endif
