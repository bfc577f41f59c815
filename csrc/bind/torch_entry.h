/* torch_entry: the pluggable door, plain C functions with the signatures that
 * torch.cuda.memory.CUDAPluggableAllocator and its setters call. Links nothing of torch.
 *
 * The core of a device is opened at its first allocation, with small blocks served too. When an
 * allocation fails, the registered thrower is called with the text, no lock held; it does not
 * return. Without one the answer is NULL. */
#ifndef TP_BIND_TORCH_ENTRY_H
#define TP_BIND_TORCH_ENTRY_H

#include <sys/types.h>

#include "tp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* c10's pool identifier, a pair passed in registers by the C++ and the C calling convention. */
typedef struct tp_torch_pool {
    unsigned long long first, second;
} tp_torch_pool;

TP_API void *tp_torch_malloc(ssize_t size, int device, void *stream);
TP_API void tp_torch_free(void *ptr, ssize_t size, int device, void *stream);
TP_API void tp_torch_init(int device_count);
TP_API void tp_torch_reset(void);
TP_API void tp_torch_memory_fraction(double fraction, int device);
TP_API void *tp_torch_base_alloc(void *ptr, size_t *size);
TP_API void tp_torch_record_stream(void *ptr, void *stream);
/* `filter` is a C++ function object passed by reference; it is not used. */
TP_API void tp_torch_begin_allocate_to_pool(int device, tp_torch_pool pool, void *filter);
TP_API void tp_torch_end_allocate_to_pool(int device, tp_torch_pool pool);
TP_API void tp_torch_release_pool(int device, tp_torch_pool pool);

/* `thrower` leaves by an exception. NULL: none. */
TP_API void tp_torch_set_thrower(void (*thrower)(const char *text));

#ifdef __cplusplus
}
#endif

#endif
