#include "base/status.h"

#include <stdarg.h>
#include <stdio.h>

const char *tp_status_name(tp_status status) {
    switch (status) {
    case TP_OK: return "OK";
    case TP_INVALID: return "INVALID";
    case TP_OUT_OF_MEMORY: return "OUT_OF_MEMORY";
    case TP_NO_HOST_MEMORY: return "NO_HOST_MEMORY";
    case TP_UNSUPPORTED: return "UNSUPPORTED";
    case TP_DEVICE_ERROR: return "DEVICE_ERROR";
    case TP_BUSY: return "BUSY";
    case TP_NOT_THE_SAME: return "NOT_THE_SAME";
    case TP_FAILED: return "FAILED";
    }
    return "UNKNOWN";
}

static void error_fill(tp_error *error, tp_status status, int64_t driver_code, const char *fmt,
                       va_list args) {
    if (error == NULL || error->status != TP_OK) return;
    error->status = status;
    error->driver_code = driver_code;
    (void)vsnprintf(error->message, sizeof error->message, fmt, args);
}

tp_status tp_error_set(tp_error *error, tp_status status, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    error_fill(error, status, 0, fmt, args);
    va_end(args);
    return status;
}

tp_status tp_error_set_driver(tp_error *error, tp_status status, int64_t driver_code,
                              const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    error_fill(error, status, driver_code, fmt, args);
    va_end(args);
    return status;
}
