/* status: what every fallible function returns.
 *
 * A function that can fail returns a must-use tp_status and leaves its out-parameters untouched on
 * failure. The detail goes into a nullable tp_error, filled by whoever sees the failure first.
 * No lock expected. Never prints, never exits. */
#ifndef TP_BASE_STATUS_H
#define TP_BASE_STATUS_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__GNUC__)
#define TP_MUST_USE __attribute__((warn_unused_result))
#define TP_PRINTF(fmt_idx, args_idx) __attribute__((format(printf, fmt_idx, args_idx)))
#else
#define TP_MUST_USE
#define TP_PRINTF(fmt_idx, args_idx)
#endif

typedef enum tp_status {
    TP_OK = 0,
    TP_INVALID,        /* an argument breaks the contract of the call */
    TP_OUT_OF_MEMORY,  /* the budget, or the device itself, has no room */
    TP_NO_HOST_MEMORY, /* the host budget, or the host itself, has no room */
    TP_UNSUPPORTED,    /* this device or driver cannot do it */
    TP_DEVICE_ERROR,   /* a driver call failed; tp_error.driver_code says how */
    TP_BUSY,           /* not now: the thing asked about is in use */
    TP_NOT_THE_SAME,   /* bytes that were made again are others than those that were dropped */
    TP_FAILED          /* the pager is in FAILED: contents may be in doubt */
} tp_status;

typedef struct tp_error {
    tp_status status;
    int64_t driver_code; /* the driver's own code, 0 if none */
    char message[232];
} tp_error;

/* A constant name such as "OUT_OF_MEMORY". Never NULL. */
const char *tp_status_name(tp_status status);

/* Fills *error (nullable; kept if it already holds a failure) and returns `status`. */
tp_status tp_error_set(tp_error *error, tp_status status, const char *fmt, ...) TP_PRINTF(3, 4);

/* As tp_error_set, with the driver's own code. */
tp_status tp_error_set_driver(tp_error *error, tp_status status, int64_t driver_code,
                              const char *fmt, ...) TP_PRINTF(4, 5);

#endif
