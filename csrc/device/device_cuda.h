/* device_cuda: the device contract over the CUDA driver, loaded with dlopen at run time. */
#ifndef TP_DEVICE_DEVICE_CUDA_H
#define TP_DEVICE_DEVICE_CUDA_H

#include "device/device.h"

/* What the driver on this machine offers. Filled as far as the probe got. */
typedef struct tp_cuda_probe {
    bool library;       /* libcuda.so.1 was loaded with every required entry point */
    int driver_version; /* as cuDriverGetVersion reports it: 13000 is 13.0 */
    int device_count;
    bool virtual_memory; /* of the device asked for */
    bool host_frames;
    bool context_marker;
    size_t granularity_bytes;
    size_t total_bytes;
    char device_name[96];
    char reason[232]; /* why the first "no" is a no; empty when everything is a yes */
} tp_cuda_probe;

/* Never fails: what is missing is said in the probe. Creates no context when `retain` is false
 * (then host_frames is answered from attributes alone). */
void tp_cuda_probe_device(int ordinal, bool retain, tp_cuda_probe *out);

/* Opens device `ordinal` (as the CUDA driver numbers visible devices) on its primary context, which
 * the CUDA runtime and PyTorch use too. TP_UNSUPPORTED when the driver or its virtual memory is
 * missing. The caller destroys it through ops->destroy. */
TP_MUST_USE tp_status tp_cuda_device_create(int ordinal, tp_device **out, tp_error *error);

#endif
