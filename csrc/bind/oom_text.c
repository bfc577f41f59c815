#include "bind/oom_text.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/bytes.h"

#define DEFAULT_PREFIX "CUDA out of memory."

static pthread_mutex_t prefix_mutex = PTHREAD_MUTEX_INITIALIZER;
static char prefix_text[96] = DEFAULT_PREFIX;

typedef struct writer {
    char *text;
    size_t size, length;
} writer;

TP_PRINTF(2, 3) static void put(writer *out, const char *fmt, ...) {
    if (out->length + 1 >= out->size) return;
    va_list args;
    va_start(args, fmt);
    const int count = vsnprintf(out->text + out->length, out->size - out->length, fmt, args);
    va_end(args);
    if (count > 0) out->length = tp_min_size(out->length + (size_t)count, out->size - 1);
}

/* "1.50 GiB (1610612736 bytes)". */
static void put_size(writer *out, const char *label, size_t bytes) {
    static const char *const units[] = {"bytes", "KiB", "MiB", "GiB", "TiB"};
    size_t unit = 0;
    double value = (double)bytes;
    for (; unit < 4 && value >= 1024.0; unit++) value /= 1024.0;
    if (unit == 0) {
        put(out, "%s%zu byte%s", label, bytes, bytes == 1 ? "" : "s");
    } else {
        put(out, "%s%.2f %s (%zu bytes)", label, value, units[unit], bytes);
    }
}

static void put_bound(writer *out, const char *label, size_t bytes) {
    if (bytes == TP_NO_LIMIT) {
        put(out, "%sunlimited", label);
    } else {
        put_size(out, label, bytes);
    }
}

static void put_device(writer *out, int slot) {
    if (slot == TP_SLOT_SIM) {
        put(out, " on the simulated device.");
    } else {
        put(out, " on GPU %d.", slot);
    }
}

static void put_figures(writer *out, const tp_oom *oom) {
    put_bound(out, " Budget ", oom->budget_bytes);
    put_size(out, "; resident ", oom->resident_bytes);
    put_size(out, ", of these pinned ", oom->pinned_bytes);
    /* Without offload nobody tells of operands. */
    if (oom->offload) put_size(out, " and never seen as an operand ", oom->unseen_bytes);
    put_size(out, "; free frames kept ", oom->cached_bytes);
    put_size(out, "; in HOST ", oom->host_bytes);
    put_size(out, "; host memory used ", oom->host_held_bytes);
    put_bound(out, ", its cap ", oom->host_budget_bytes);
    put_size(out, "; native memory that was not adopted ", oom->foreign_bytes);
    put(out, ".");
}

static void put_advice(writer *out, const tp_oom *oom) {
    if (oom->host_side) {
        put(out, " The host budget has no room: raise it, or the device budget.");
    } else if (!oom->offload) {
        put(out, " Offload is off: torchpager.auto_offload() lets tensors move to the host.");
    }
    if (oom->foreign_bytes > 0) {
        put(out, " torchpager.adopt(model, optimizer) brings native memory under the pager.");
    }
}

bool tp_oom_text(char *text, size_t size, int slot, const tp_oom *oom, const tp_error *error) {
    const bool short_of_memory =
        error->status == TP_OUT_OF_MEMORY || error->status == TP_NO_HOST_MEMORY;
    if (size == 0) return short_of_memory;
    writer out = {text, size, 0};
    text[0] = '\0';
    if (!short_of_memory) {
        put(&out, "torchpager: %s (%s)", error->message, tp_status_name(error->status));
        return false;
    }
    pthread_mutex_lock(&prefix_mutex);
    put(&out, "%s", prefix_text);
    pthread_mutex_unlock(&prefix_mutex);
    put_size(&out, " torchpager could not allocate ", oom->requested_bytes);
    put_device(&out, slot);
    put_figures(&out, oom);
    put_advice(&out, oom);
    if (error->message[0] != '\0') put(&out, " Cause: %s", error->message);
    return true;
}

void tp_oom_text_set_prefix(const char *prefix) {
    pthread_mutex_lock(&prefix_mutex);
    (void)snprintf(prefix_text, sizeof prefix_text, "%s",
                   prefix == NULL || prefix[0] == '\0' ? DEFAULT_PREFIX : prefix);
    pthread_mutex_unlock(&prefix_mutex);
}
