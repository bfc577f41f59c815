/* Compares csrc/device/cuda_api.h with the cuda.h of this machine, where there is one: every
 * layout and constant, and the exact type of every entry point at compile time, their names at
 * run time. */
#include <string.h>

#include "device/cuda_api.h"
#include "device/device_cuda.h"
#include "harness.h"

#if defined(__has_include)
#if __has_include(<cuda.h>)
#define HAVE_CUDA_H 1
#include <cuda.h>
#endif
#endif

#ifdef HAVE_CUDA_H

#define SAME_SIZE(ours, theirs)                                                                \
    _Static_assert(sizeof(ours) == sizeof(theirs) && _Alignof(ours) == _Alignof(theirs),       \
                   #theirs)
#define SAME_FIELD(ours, our_field, theirs, their_field)                                       \
    _Static_assert(offsetof(ours, our_field) == offsetof(theirs, their_field) &&               \
                       sizeof(((ours *)0)->our_field) == sizeof(((theirs *)0)->their_field),   \
                   #theirs "." #their_field)
#define SAME_VALUE(ours, theirs) _Static_assert((int)(ours) == (int)(theirs), #theirs)

SAME_SIZE(tp_cu_result, CUresult);
SAME_SIZE(tp_cu_device, CUdevice);
SAME_SIZE(tp_cu_pointer, CUdeviceptr);
SAME_SIZE(tp_cu_handle, CUmemGenericAllocationHandle);
SAME_SIZE(tp_cu_attribute, CUdevice_attribute);
SAME_SIZE(tp_cu_granularity, CUmemAllocationGranularity_flags);
SAME_SIZE(tp_cu_capture_status, CUstreamCaptureStatus);
SAME_SIZE(tp_cu_capture_mode, CUstreamCaptureMode);
SAME_SIZE(tp_cu_jit_option, CUjit_option);

SAME_SIZE(tp_cu_location, CUmemLocation);
SAME_FIELD(tp_cu_location, type, CUmemLocation, type);
SAME_FIELD(tp_cu_location, id, CUmemLocation, id);

SAME_SIZE(tp_cu_memory, CUmemAllocationProp);
SAME_FIELD(tp_cu_memory, type, CUmemAllocationProp, type);
SAME_FIELD(tp_cu_memory, handle_types, CUmemAllocationProp, requestedHandleTypes);
SAME_FIELD(tp_cu_memory, location, CUmemAllocationProp, location);
SAME_FIELD(tp_cu_memory, win32_metadata, CUmemAllocationProp, win32HandleMetaData);
SAME_FIELD(tp_cu_memory, flags, CUmemAllocationProp, allocFlags);
SAME_FIELD(tp_cu_memory, flags.compression, CUmemAllocationProp, allocFlags.compressionType);
SAME_FIELD(tp_cu_memory, flags.rdma_capable, CUmemAllocationProp,
           allocFlags.gpuDirectRDMACapable);
SAME_FIELD(tp_cu_memory, flags.usage, CUmemAllocationProp, allocFlags.usage);
SAME_FIELD(tp_cu_memory, flags.reserved, CUmemAllocationProp, allocFlags.reserved);

SAME_SIZE(tp_cu_access, CUmemAccessDesc);
SAME_FIELD(tp_cu_access, location, CUmemAccessDesc, location);
SAME_FIELD(tp_cu_access, flags, CUmemAccessDesc, flags);

SAME_VALUE(TP_CU_SUCCESS, CUDA_SUCCESS);
SAME_VALUE(TP_CU_INVALID_VALUE, CUDA_ERROR_INVALID_VALUE);
SAME_VALUE(TP_CU_OUT_OF_MEMORY, CUDA_ERROR_OUT_OF_MEMORY);
SAME_VALUE(TP_CU_NO_DEVICE, CUDA_ERROR_NO_DEVICE);
SAME_VALUE(TP_CU_NOT_READY, CUDA_ERROR_NOT_READY);
SAME_VALUE(TP_CU_NOT_SUPPORTED, CUDA_ERROR_NOT_SUPPORTED);
SAME_VALUE(TP_CU_CAPTURE_IMPLICIT, CUDA_ERROR_STREAM_CAPTURE_IMPLICIT);
SAME_VALUE(TP_CU_ATTRIBUTE_VIRTUAL_MEMORY,
           CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME_VALUE(TP_CU_LOCATION_DEVICE, CU_MEM_LOCATION_TYPE_DEVICE);
SAME_VALUE(TP_CU_MEMORY_PINNED, CU_MEM_ALLOCATION_TYPE_PINNED);
SAME_VALUE(TP_CU_ACCESS_READ, CU_MEM_ACCESS_FLAGS_PROT_READ);
SAME_VALUE(TP_CU_ACCESS_READ_WRITE, CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
SAME_VALUE(TP_CU_GRANULARITY_MINIMUM, CU_MEM_ALLOC_GRANULARITY_MINIMUM);
SAME_VALUE(TP_CU_GRANULARITY_RECOMMENDED, CU_MEM_ALLOC_GRANULARITY_RECOMMENDED);
SAME_VALUE(TP_CU_STREAM_NON_BLOCKING, CU_STREAM_NON_BLOCKING);
SAME_VALUE(TP_CU_EVENT_DISABLE_TIMING, CU_EVENT_DISABLE_TIMING);
SAME_VALUE(TP_CU_HOST_PORTABLE, CU_MEMHOSTALLOC_PORTABLE);
SAME_VALUE(TP_CU_HOST_DEVICE_MAPPED, CU_MEMHOSTALLOC_DEVICEMAP);
SAME_VALUE(TP_CU_CAPTURE_STATUS_NONE, CU_STREAM_CAPTURE_STATUS_NONE);
SAME_VALUE(TP_CU_CAPTURE_MODE_RELAXED, CU_STREAM_CAPTURE_MODE_RELAXED);
#if CUDA_VERSION >= 12030
SAME_VALUE(TP_CU_LOCATION_HOST, CU_MEM_LOCATION_TYPE_HOST);
SAME_VALUE(TP_CU_LOCATION_HOST_NUMA, CU_MEM_LOCATION_TYPE_HOST_NUMA);
SAME_VALUE(TP_CU_ATTRIBUTE_HOST_NUMA_ID, CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID);
#endif
#if CUDA_VERSION >= 13000
SAME_VALUE(TP_CU_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY,
           CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
SAME_VALUE(TP_CU_ATTRIBUTE_HOST_VIRTUAL_MEMORY,
           CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
#endif

/* The list of entry points once more, with our types replaced by CUDA's: each must then have
 * exactly the type that cuda.h gives the function of that name. */
#define tp_cu_result CUresult
#define tp_cu_device CUdevice
#define tp_cu_pointer CUdeviceptr
#define tp_cu_handle CUmemGenericAllocationHandle
#define tp_cu_context CUcontext
#define tp_cu_stream CUstream
#define tp_cu_event CUevent
#define tp_cu_module CUmodule
#define tp_cu_function CUfunction
#define tp_cu_jit_option CUjit_option
#define tp_cu_attribute CUdevice_attribute
#define tp_cu_granularity CUmemAllocationGranularity_flags
#define tp_cu_capture_status CUstreamCaptureStatus
#define tp_cu_capture_mode CUstreamCaptureMode
#define tp_cu_memory CUmemAllocationProp
#define tp_cu_access CUmemAccessDesc

#define SAME_PROTOTYPE(name, params)                                                           \
    _Static_assert(__builtin_types_compatible_p(__typeof__(&(name)), CUresult(*) params),      \
                   #name);
#if CUDA_VERSION >= 12080
TP_CUDA_ENTRY_POINTS(SAME_PROTOTYPE, SAME_PROTOTYPE)
#else
#define NOT_IN_THIS_HEADER(name, params)
TP_CUDA_ENTRY_POINTS(SAME_PROTOTYPE, NOT_IN_THIS_HEADER)
#endif

/* cuda.h renames functions that have a later version: a name that it renames is the old one. */
#define SPELLED(name) #name
#define SAME_NAME(name, params) EXPECT(strcmp(#name, SPELLED(name)) == 0);

TEST(declarations_agree_with_cuda_h) {
    /* Layouts, constants and prototypes agree, or this would not have compiled. */
    TP_CUDA_ENTRY_POINTS(SAME_NAME, SAME_NAME)
    EXPECT(sizeof(tp_cu_pointer) == sizeof(tp_addr));
    EXPECT(sizeof(tp_cu_handle) == sizeof(tp_handle));
}

#else

TEST(declarations_agree_with_cuda_h) { SKIP("no cuda.h on this machine"); }

#endif

TEST(probe_says_why_not) {
    tp_cuda_probe probe;
    memset(&probe, 0x5A, sizeof probe);
    tp_cuda_probe_device(0, false, &probe);
    const bool all =
        probe.library && probe.virtual_memory && probe.host_frames && probe.context_marker;
    EXPECT(all == (probe.reason[0] == '\0'));
    EXPECT(!probe.virtual_memory || (probe.device_count > 0 && probe.granularity_bytes > 0));
    if (!probe.library) {
        EXPECT(strstr(probe.reason, "driver") != NULL);
        EXPECT(probe.device_count == 0 && probe.total_bytes == 0 &&
               probe.device_name[0] == '\0');
    }
    tp_cuda_probe_device(9999, true, &probe);
    EXPECT(!probe.virtual_memory && probe.reason[0] != '\0');
    tp_device *dev = NULL;
    EXPECT_STATUS(tp_cuda_device_create(9999, &dev, &test_error), TP_UNSUPPORTED);
    EXPECT(test_error.message[0] != '\0' && dev == NULL);
}
