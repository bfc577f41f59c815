/* cores: opens the cores of this process and joins them to the outside world.
 *
 * A core's tp_hooks come from several extension modules: the GIL and garbage collection from
 * the core library itself, the operator hook and the native allocator from the torch glue.
 * Each module hands in its part here, at any time and in any order; this file composes them,
 * slot by slot, and gives them to the cores that are open. It is also the one way in which
 * every door allocates.
 *
 * No lock is expected. Parts are process-wide, of static lifetime, and called with no lock
 * held. */
#ifndef TP_BIND_CORES_H
#define TP_BIND_CORES_H

#include "device/device_sim.h"
#include "tp.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where a thread stands when it allocates. */
typedef enum tp_bind_place {
    TP_BIND_OUTSIDE,  /* of every operator */
    TP_BIND_OPERATOR, /* in one that the hook knows */
    TP_BIND_RERUN,    /* in one that makes again what was dropped */
    TP_BIND_UNKNOWN   /* perhaps in one that began before the hook was armed */
} tp_bind_place;

/* What the operator hook supplies. */
typedef struct tp_bind_operators {
    tp_bind_place (*allocating)(void); /* before every allocation of the calling thread */
    /* A block was born, pinned, while one is. */
    void (*on_alloc)(tp_core *core, tp_addr addr, tp_stream stream);
    void (*arm)(int slot, tp_arming level); /* tp_hooks.arm */
    /* Ends the operators whose work is done; before every wait, and before an eviction that was
     * asked for. Also without the GIL. */
    void (*settle)(void);
    void (*forget)(tp_core *core); /* it is about to be destroyed. Without the GIL */
    void (*freed)(tp_addr addr);   /* before every tp_free */
    void (*drop)(tp_core *core, tp_addr addr, bool park); /* tp_hooks.drop */
    void (*bring_back)(tp_core *core);                    /* all that is dropped */
    /* Why this thread's operator cannot go on for want of memory; NULL: it can. */
    const char *(*lacks_memory)(void);
} tp_bind_operators;

/* The framework's own allocator on a device, which shares the core's budget (tp_hooks). */
typedef struct tp_bind_foreign {
    size_t (*cap)(int slot, size_t cap_bytes);
    size_t (*held)(int slot);
    void (*flush)(int slot);
} tp_bind_foreign;

/* Tells the new hook at once which open cores are armed, and how. */
TP_API void tp_bind_set_operators(const tp_bind_operators *operators);
/* NULL: the native allocator of that slot is no concern of the core. */
TP_API void tp_bind_set_foreign(int slot, const tp_bind_foreign *foreign);
/* The framework's current stream on a device; NULL function: the default stream. */
TP_API void tp_bind_set_current_stream(tp_stream (*current_stream)(int slot));
TP_API tp_stream tp_bind_current_stream(int slot);
/* `callback` must not wait for the GIL: it is called on a pager's thread. */
void tp_bind_set_first_paging(void (*callback)(int slot));
void tp_bind_set_unseen_write(void (*callback)(int slot));

/* Creates the core of CUDA device `slot` and registers it. TP_BUSY if there is one. Config:
 * only large_min_bytes, extent_max_bytes, serve_small, readonly_clean and strict are read. */
TP_MUST_USE tp_status tp_bind_open_cuda(int slot, const tp_config *config, tp_error *error);
/* The same for the simulated device, at TP_SLOT_SIM; page_out_before_op is read too. */
TP_MUST_USE tp_status tp_bind_open_sim(const tp_sim_options *options, const tp_config *config,
                                       tp_error *error);
/* Destroys the simulated core. False, and nothing done: blocks of it are alive. May wait. */
bool tp_bind_close_sim(void);

/* tp_alloc for a door: inside an operator the block is born pinned and belongs to the
 * operator. */
TP_API TP_MUST_USE tp_status tp_bind_alloc(tp_core *core, size_t bytes, tp_stream stream,
                                           tp_addr *out, tp_oom *oom, tp_error *error);

/* The doors ask from now on what follows; before this thread has reason to be asked. */
TP_API void tp_bind_ask(void);
/* Before a door allocates, here or natively: the text of the exception that is due; NULL: none. Valid
 * until this thread's operator ends. */
TP_API const char *tp_bind_lacks_memory(void);

/* While it is not 0, the doors fill with this byte what this thread allocates. */
TP_API void tp_bind_set_filler(unsigned char byte);
TP_API unsigned char tp_bind_filler(void);

/* tp_free for a door. */
TP_API void tp_bind_free(tp_core *core, tp_addr addr);

/* Everything that is dropped comes back; before a capture, on its stream. May wait. */
TP_API void tp_bind_bring_back(tp_core *core);

/* tp_bind_operators.settle, if there is a hook. */
void tp_bind_settle(void);

/* True if this thread holds the GIL of a running interpreter. */
bool tp_bind_holds_gil(void);
/* While it is so, an allocation of this thread that finds no memory collects no garbage: what that
 * runs would run without the thread's own autograd and modes. */
TP_API void tp_bind_keep_python_out(bool out);
/* Around a wait: lets go of the GIL if this thread holds it; NULL: it did not. */
TP_API void *tp_bind_release_gil(void);
TP_API void tp_bind_take_gil(void *token);

#ifdef __cplusplus
}
#endif

#endif
