/* tp.h: the façade, the one C interface above the layers. Everything that binds to torchpager
 * (CPython, PyTorch, the C tests) goes through it.
 *
 * A core is the allocator and pager of one device. It owns the address space, the frames, the block
 * cache and the pager's thread. It lives until the process ends once blocks of it may be alive.
 *
 * Locking: every function takes the core's lock itself; none may be called with it held. Functions
 * that may wait on the host say so; around each such wait, with no lock held, they call the hooks
 * wait_begin and wait_end (which release and take back the GIL). No function calls Python otherwise.
 *
 * Errors: see base/status.h. When the answer is TP_OUT_OF_MEMORY or TP_NO_HOST_MEMORY the figures
 * are in the tp_oom given (nullable), and in tp_core_last_oom. */
#ifndef TP_TP_H
#define TP_TP_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/stats.h"
#include "base/status.h"
#include "device/device.h"
#include "pager/plan.h" /* pure: a plan needs no core */
#include "pager/steps.h"
#include "pager/types.h"

#if defined(__GNUC__)
#define TP_API __attribute__((visibility("default")))
#else
#define TP_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef struct tp_core tp_core;

/* ---- life ------------------------------------------------------------------------------------ */

/* Takes ownership of `dev`, also on failure. */
TP_API TP_MUST_USE tp_status tp_core_create(const tp_config *config, tp_device *dev,
                                            tp_core **out, tp_error *error);
/* Waits for everything in flight, unmaps and frees everything, destroys the device. Live blocks
 * become invalid: the caller answers for it. May wait. */
TP_API void tp_core_destroy(tp_core *core);
/* Stops the pager's thread at process exit without freeing anything; afterwards every address stays
 * mapped as it is, allocations fail and frees do nothing. Bounded wait. */
TP_API void tp_core_abandon(tp_core *core);
TP_API const tp_device_caps *tp_core_caps(const tp_core *core);
TP_API tp_device *tp_core_device(tp_core *core);

/* ---- budgets --------------------------------------------------------------------------------- */

/* Sets both budgets. Lowering below what is held flushes caches and, with offload on, evicts; when
 * that is not enough nothing changes and the answer is TP_OUT_OF_MEMORY. May wait. */
TP_API TP_MUST_USE tp_status tp_core_set_budget(tp_core *core, size_t device_bytes,
                                                size_t host_bytes, tp_error *error);
TP_API void tp_core_get_budget(tp_core *core, size_t *device_bytes, size_t *host_bytes);
/* Switches paging on or off. Off: brings back what fits of the blocks seen as operands (the rest stays
 * in HOST, readable), disarms, and all blocks count as unseen. May wait. */
TP_API TP_MUST_USE tp_status tp_core_set_offload(tp_core *core, bool offload, tp_error *error);
/* Whether plans are made and followed; they are, unless this says otherwise. Without them bytes move
 * on demand. */
TP_API void tp_core_set_planning(tp_core *core, bool planning);
/* What may become of blocks of operators with recipes (tp_op.recipe) where a plan is followed: those that
 * it evicts are parked, and with `recompute` (which implies `park`) it drops others and counts on
 * their being made again. Neither, unless this says so. The hook `drop` tells of them, and
 * tp_op.keep_recipe says what may be asked for. Plans are made anew where either changes. */
TP_API void tp_core_set_recompute(tp_core *core, bool park, bool recompute);
TP_API void tp_core_set_hooks(tp_core *core, const tp_hooks *hooks);
/* Makes room in the budget for `bytes` more of the foreign allocator: gives up cached frames, then
 * evicts, then tells it through foreign_cap. *granted_cap_bytes: what it may hold now. May wait. */
TP_API TP_MUST_USE tp_status tp_core_yield_to_foreign(tp_core *core, size_t bytes,
                                                      size_t *granted_cap_bytes,
                                                      tp_error *error);
/* Gives every cached block and free frame back to the device, behind their markers. May wait. */
TP_API void tp_core_empty_cache(tp_core *core);

/* ---- blocks ---------------------------------------------------------------------------------- */

/* A block of at least `bytes` for use on `stream`. With offload on and no room, it is born in HOST.
 * Contents unspecified. May wait. bytes 0 is TP_INVALID. */
TP_API TP_MUST_USE tp_status tp_alloc(tp_core *core, size_t bytes, tp_stream stream,
                                      uint32_t flags, tp_addr *out, tp_oom *oom,
                                      tp_error *error);
/* Frees a block by its first address. Cannot fail, never waits. */
TP_API void tp_free(tp_core *core, tp_addr addr);
/* The block will also be used on `stream` (as PyTorch's record_stream). Unknown addresses: nothing. */
TP_API void tp_record_stream(tp_core *core, tp_addr addr, tp_stream stream);
/* True if `addr` lies in an address range of ours. Takes no lock; a few loads. */
TP_API bool tp_owns(const tp_core *core, tp_addr addr);

/* The bytes of the block that begins at `addr` can be made again, and go: the block, used last on
 * `stream`, is freed, with *out to stand for its storage. TP_BUSY: it is in use, immovable or not known to be a tensor, or an
 * opaque region is open. TP_NO_HOST_MEMORY: no room could be kept for it. Never waits. */
TP_API TP_MUST_USE tp_status tp_drop(tp_core *core, tp_addr addr, tp_stream stream,
                                     tp_dropped **out, tp_error *error);
/* They are back, in the block at `addr`, made with TP_ALLOC_RERUN, on `stream`. Frees `dropped`. When
 * they turn out to be other bytes the core fails with TP_NOT_THE_SAME. */
TP_API void tp_bring_back(tp_core *core, tp_dropped *dropped, tp_addr addr, tp_stream stream);
/* The storage of the block that begins at `addr` keeps its bytes, in host memory, and gives its address up, which
 * nobody may use any more: the block is freed once they have been copied, with *out to stand for it.
 * TP_BUSY, TP_NO_HOST_MEMORY: as tp_drop. Never waits. */
TP_API TP_MUST_USE tp_status tp_park(tp_core *core, tp_addr addr, tp_dropped **out,
                                     tp_error *error);
/* Its bytes are in the block at *out, for what `stream` holds next; if `now`, for anybody. Frees `dropped`, unless
 * it fails, with what tp_alloc fails with. May wait. */
TP_API TP_MUST_USE tp_status tp_unpark(tp_core *core, tp_dropped *dropped, tp_stream stream,
                                       bool now, tp_addr *out, tp_oom *oom, tp_error *error);
/* The storage, dropped or parked, is gone. Frees `dropped`. */
TP_API void tp_drop_end(tp_core *core, tp_dropped *dropped);

/* False: no live block holds that address. */
TP_API bool tp_block_query(tp_core *core, tp_addr addr, tp_block_info *out);
/* Calls `visit` for each live block, on a copy made under the lock. False: out of host memory. */
TP_API bool tp_block_visit(tp_core *core, void (*visit)(void *ctx, const tp_block_info *info),
                           void *ctx);

/* ---- operators ------------------------------------------------------------------------------- */

/* An operator is about to be launched on `stream`: pins its operands, all at once, makes them
 * resident or leaves them in HOST when that cannot be, marks written ones dirty. Sets
 * op->keep_recipe. May call the hook `drop`. May wait; never fails and never waits without bound. */
TP_API void tp_op_begin(tp_core *core, tp_op *op, const tp_access *accesses, size_t count,
                        tp_stream stream);
/* A block allocated (with TP_ALLOC_PINNED) while `op` is the innermost one on its thread: it stays
 * pinned until that operator ends, and then until `parent` does. */
TP_API void tp_op_adopt(tp_op *op, tp_addr addr);
/* The operator has been launched: records last-use markers, unpins. `outputs` are marked as seen.
 * Blocks adopted pass to `parent` (nullable). May call the hook `drop`. Never waits. */
TP_API void tp_op_end(tp_op *op, const tp_addr *outputs, size_t output_count, tp_op *parent);

/* The operator has returned, but its work goes on, on threads and streams we know nothing of, until
 * tp_op_end, which any thread may call: its operands, and what it adopted, stay pinned. What it adopted
 * also stays so until `parent` (nullable) ends. */
TP_API void tp_op_detach(tp_op *op, tp_op *parent);
/* Nobody will tell when its work is done: its operands become immovable, as by tp_export. May wait. */
TP_API void tp_op_export(tp_op *op);

/* Frees what the struct itself owns. */
TP_API void tp_op_fini(tp_op *op);

/* The number of "aten::add_.Tensor", for tp_op.name. Takes no lock. */
TP_API uint32_t tp_op_name(const char *name);
TP_API const char *tp_op_name_text(uint32_t name);

/* Where steps end (pager/steps.h). Never waits. */
TP_API void tp_mark_step(tp_core *core, tp_step_mark mark);
/* Calls `visit` with the last complete step that was recorded, and with no lock: it does not change
 * meanwhile. False: there is none yet. */
TP_API bool tp_last_step(tp_core *core, void (*visit)(void *ctx, const tp_step *step),
                         void *ctx);

/* One access outside any operator: resident (or readable in HOST), and, with write, dirty. */
TP_API TP_MUST_USE tp_status tp_touch(tp_core *core, tp_addr addr, bool write, tp_stream stream,
                                      tp_error *error);
/* Blocks have been written by somebody who announced nothing, since the clock of uses was `since`:
 * what an operator has been seen to write later than that is left as it is. Addresses that are not
 * ours: nothing. Moves nothing; never waits. */
TP_API void tp_mark_written(tp_core *core, const tp_addr *addrs, size_t count, uint64_t since);
TP_API uint64_t tp_use_clock(tp_core *core);
/* Marks a block as seen: it is a tensor, in use just now. */
TP_API void tp_mark_seen(tp_core *core, tp_addr addr);

/* Code begins on this thread whose kernels we cannot see: until it ends no live block's mapping
 * changes, except while this thread stands in a function of ours and no region of another thread is
 * open. What it is known to use (`accesses`, as in tp_op_begin) is brought in, but may be evicted in
 * such a moment: then it is used in HOST. Together with what is allocated inside it counts as written.
 * Nestable. May wait. */
TP_API void tp_region_begin(tp_core *core, tp_region *region, const tp_access *accesses,
                            size_t count, tp_stream stream);
/* Its kernels have been launched. On any thread; regions need not end in order. Never waits. */
TP_API void tp_region_end(tp_region *region);
/* Frees what the struct itself owns. */
TP_API void tp_region_fini(tp_region *region);
/* Between these, everything that this thread launches is announced (as operators or regions of its
 * own): the regions open on it leave the gate open. In pairs, on one thread. unlift may wait. */
TP_API void tp_region_lift(tp_core *core);
TP_API void tp_region_unlift(tp_core *core);
/* A stream capture begins or ends somewhere in the process. */
TP_API void tp_capture_begin(tp_core *core);
TP_API void tp_capture_end(tp_core *core);
TP_API bool tp_capturing(tp_core *core);

/* Makes the block resident and immovable. TP_OUT_OF_MEMORY when the budget cannot hold it.
 * Pins count. May wait. */
TP_API TP_MUST_USE tp_status tp_pin(tp_core *core, tp_addr addr, tp_oom *oom, tp_error *error);
TP_API TP_MUST_USE tp_status tp_unpin(tp_core *core, tp_addr addr, tp_error *error);
/* Immovable where it is, for good (a consumer we cannot see holds its address). */
TP_API void tp_export(tp_core *core, tp_addr addr);

/* ---- for tests and tools --------------------------------------------------------------------- */

/* Evicts one block and waits until it is in HOST. TP_BUSY: pinned, unseen, or in use. May wait. */
TP_API TP_MUST_USE tp_status tp_evict(tp_core *core, tp_addr addr, tp_error *error);
/* Evicts everything evictable, waits, returns the bytes evicted. May wait. */
TP_API size_t tp_evict_all(tp_core *core);
/* With tp_config.no_thread: waits once, as an allocation does. The pager does what there is to be
 * done; if nothing is, virtual time passes until an item of queued work ends, most_ns (not 0) at
 * most. */
TP_API void tp_core_pass_time(tp_core *core, uint64_t most_ns);
/* Walks every structure; traps in debug builds on the first broken invariant, else says which. */
TP_API TP_MUST_USE tp_status tp_core_check(tp_core *core, tp_error *error);

TP_API void tp_core_stats(tp_core *core, tp_stats *out);
TP_API void tp_core_reset_stats(tp_core *core, bool peaks, bool totals);
/* The figures for a request that somebody else could not serve within the budget. */
TP_API void tp_core_oom_figures(tp_core *core, size_t requested_bytes, tp_oom *out);
/* The figures of the last allocation that failed. False: none has. */
TP_API bool tp_core_last_oom(tp_core *core, tp_oom *out);

/* ---- the process's cores --------------------------------------------------------------------- */

/* Cores are registered by slot: CUDA device index, or TP_SLOT_SIM. */
enum { TP_SLOT_MAX = 65, TP_SLOT_SIM = 64 };
TP_API TP_MUST_USE tp_status tp_register(int slot, tp_core *core, tp_error *error);
TP_API void tp_unregister(int slot);
TP_API tp_core *tp_core_at(int slot);         /* NULL: none */
TP_API tp_core *tp_core_owning(tp_addr addr); /* NULL: none. Takes no lock */

#ifdef __cplusplus
}
#endif

#endif
