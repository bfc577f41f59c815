#define _POSIX_C_SOURCE 200809L

#include "tp.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/bytes.h"
#include "base/check.h"
#include "base/glance.h"
#include "pager/access.h"
#include "pager/alloc.h"
#include "pager/arming.h"
#include "pager/drop.h"
#include "pager/extent.h"
#include "pager/learn.h"
#include "pager/name.h"
#include "pager/pager.h"
#include "pager/park.h"
#include "pager/reclaim.h"
#include "pager/region.h"
#include "pager/resize.h"
#include "pager/small.h"

#define EXTENT_BYTES_MAX (64 * TP_GIB) /* pools have a list for each size */

struct tp_core {
    tp_pager pager;
    tp_small small; /* used when config.serve_small */
    bool serve_small;
};

static tp_pager *enter(tp_core *core) {
    tp_lock_take(&core->pager.lock);
    return &core->pager;
}

/* Every public call ends here: the thread's regions close the gate again, and a debug build checks
 * everything. */
static void leave(tp_pager *pager) {
    tp_regions_go(pager);
#if TP_DEBUG > 1
    if (pager->failed == TP_OK) TP_ASSERT(tp_pager_check(pager, NULL) == TP_OK);
#endif
    tp_lock_drop(&pager->lock);
}

/* ---- life -------------------------------------------------------------------------------------- */

tp_status tp_core_create(const tp_config *config, tp_device *dev, tp_core **out,
                         tp_error *error) {
    tp_core *core = calloc(1, sizeof *core);
    if (core == NULL) {
        dev->ops->destroy(dev);
        return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for an allocator");
    }
    core->serve_small = config->serve_small;
    tp_small_init(&core->small);
    tp_status status = TP_OK;
    if (config->device_budget_bytes == 0 || config->extent_max_bytes > EXTENT_BYTES_MAX) {
        status = tp_error_set(error, TP_INVALID, "a budget of %zu bytes, extents of %zu bytes",
                              config->device_budget_bytes, config->extent_max_bytes);
    }
    if (status == TP_OK) status = tp_pager_init(&core->pager, config, dev, error);
    if (status != TP_OK) {
        dev->ops->destroy(dev);
        free(core);
        return status;
    }
    *out = core;
    return TP_OK;
}

void tp_core_destroy(tp_core *core) {
    tp_device *dev = core->pager.dev;
    tp_small_fini(&core->small);
    tp_pager_fini(&core->pager);
    dev->ops->destroy(dev);
    free(core);
}

void tp_core_abandon(tp_core *core) { tp_pager_abandon(&core->pager); }

const tp_device_caps *tp_core_caps(const tp_core *core) { return &core->pager.dev->caps; }

tp_device *tp_core_device(tp_core *core) { return core->pager.dev; }

/* leave(), after anything that may have changed what is held, offload or the budget. */
static void leave_arming(tp_core *core) {
    tp_arming_update(&core->pager);
    leave(&core->pager);
}

/* ---- budgets ----------------------------------------------------------------------------------- */

tp_status tp_core_set_budget(tp_core *core, size_t device_bytes, size_t host_bytes,
                             tp_error *error) {
    tp_pager *pager = enter(core);
    const tp_status status = tp_resize_budget(pager, device_bytes, host_bytes, error);
    if (!pager->offload && pager->armed) tp_arming_off(pager);
    leave_arming(core);
    return status;
}

void tp_core_get_budget(tp_core *core, size_t *device_bytes, size_t *host_bytes) {
    tp_pager *pager = enter(core);
    *device_bytes = pager->budget.limit_bytes;
    *host_bytes = pager->budget.host_limit_bytes;
    leave(pager);
}

tp_status tp_core_set_offload(tp_core *core, bool offload, tp_error *error) {
    tp_pager *pager = enter(core);
    const tp_status status = tp_resize_offload(pager, offload, error);
    if (!pager->offload) tp_arming_off(pager);
    leave_arming(core);
    return status;
}

void tp_core_set_planning(tp_core *core, bool planning) {
    tp_pager *pager = enter(core);
    pager->plans.off = !planning;
    if (!planning) tp_executor_stop(pager);
    leave(pager);
}

void tp_core_set_recompute(tp_core *core, bool park, bool recompute) {
    tp_pager *pager = enter(core);
    park = park || recompute;
    const bool changes = pager->plans.recompute != recompute || pager->plans.park != park;
    pager->plans.recompute = recompute;
    pager->plans.park = park;
    if (changes) pager->executor.drop_count = 0;
    if (changes) tp_plans_renew(pager);
    leave(pager);
}

void tp_core_set_hooks(tp_core *core, const tp_hooks *hooks) {
    tp_pager *pager = enter(core);
    pager->hooks = *hooks;
    pager->negotiated_ns = 0;
    leave(pager);
}

tp_status tp_core_yield_to_foreign(tp_core *core, size_t bytes, size_t *granted_cap_bytes,
                                   tp_error *error) {
    tp_pager *pager = enter(core);
    const tp_status status = tp_resize_yield(pager, bytes, granted_cap_bytes, error);
    leave(pager);
    return status;
}

void tp_core_empty_cache(tp_core *core) {
    tp_pager *pager = enter(core);
    if (core->serve_small) (void)tp_small_trim(&core->small, pager);
    tp_resize_flush(pager);
    leave(pager);
}

/* ---- blocks ------------------------------------------------------------------------------------ */

static bool is_small(const tp_core *core, size_t bytes) {
    return core->serve_small && bytes < core->pager.large_min_bytes;
}

static tp_status alloc(tp_core *core, size_t bytes, tp_stream stream, uint32_t flags,
                       bool small, tp_addr *out, tp_oom *oom, tp_error *error) {
    tp_pager *pager = &core->pager;
    const uint64_t waited_ns = tp_thread_waited_ns;
    const tp_status status =
        small ? tp_small_alloc(&core->small, pager, bytes, stream, out, oom, error)
              : tp_block_alloc(pager, bytes, stream, flags, out, oom, error);
    if (tp_thread_waited_ns != waited_ns && !pager->abandoned) tp_timing_resume(pager);
    return status;
}

static bool is_full(tp_status status) {
    return status == TP_OUT_OF_MEMORY || status == TP_NO_HOST_MEMORY;
}

/* Where it comes to the last bytes: slabs that hold nothing may be in the way, and a small request
 * may have a block of its own where a slab finds no room. */
static tp_status alloc_thrifty(tp_core *core, size_t bytes, tp_stream stream, uint32_t flags,
                               tp_addr *out, tp_oom *oom, tp_error *error) {
    const bool small = is_small(core, bytes);
    tp_status status = alloc(core, bytes, stream, flags, small, out, oom, error);
    if (is_full(status) && core->serve_small && tp_small_trim(&core->small, &core->pager)) {
        *error = (tp_error){0};
        status = alloc(core, bytes, stream, flags, small, out, oom, error);
    }
    if (is_full(status) && small) {
        *error = (tp_error){0};
        status = alloc(core, bytes, stream, flags, false, out, oom, error);
    }
    if (is_full(status)) core->pager.stats.ooms++;
    return status;
}

tp_status tp_alloc(tp_core *core, size_t bytes, tp_stream stream, uint32_t flags, tp_addr *out,
                   tp_oom *oom, tp_error *error) {
    tp_pager *pager = enter(core);
    tp_error first = {0};
    const tp_status status = alloc_thrifty(core, bytes, stream, flags, out, oom, &first);
    /* Its kernels may be launched when this returns, over operands that nothing pins. */
    if ((flags & TP_ALLOC_UNKNOWN) != 0) tp_arming_unknown(pager);
    leave_arming(core);
    if (status != TP_OK && error != NULL && error->status == TP_OK) *error = first;
    return status;
}

void tp_free(tp_core *core, tp_addr addr) {
    tp_pager *pager = enter(core);
    tp_block *block = tp_block_live(pager, addr);
    if (block != NULL && !pager->abandoned) {
        if (core->serve_small && tp_small_holds(&core->small, block->addr)) {
            tp_small_free(&core->small, pager, addr);
        } else if (block->addr == addr) {
            tp_block_free(pager, block);
        }
    }
    leave(pager);
}

tp_status tp_drop(tp_core *core, tp_addr addr, tp_stream stream, tp_dropped **out,
                  tp_error *error) {
    tp_pager *pager = enter(core);
    const tp_status status = tp_block_drop(pager, addr, stream, out, error);
    leave(pager);
    return status;
}

void tp_bring_back(tp_core *core, tp_dropped *dropped, tp_addr addr, tp_stream stream) {
    tp_pager *pager = enter(core);
    tp_block_bring_back(pager, dropped, addr, stream);
    leave(pager);
}

tp_status tp_park(tp_core *core, tp_addr addr, tp_dropped **out, tp_error *error) {
    tp_pager *pager = enter(core);
    const tp_status status = tp_block_park(pager, addr, out, error);
    leave(pager);
    return status;
}

tp_status tp_unpark(tp_core *core, tp_dropped *dropped, tp_stream stream, bool now,
                    tp_addr *out, tp_oom *oom, tp_error *error) {
    tp_pager *pager = enter(core);
    const tp_status status = tp_block_unpark(pager, dropped, stream, now, out, oom, error);
    if (is_full(status)) pager->stats.ooms++;
    leave_arming(core);
    return status;
}

void tp_drop_end(tp_core *core, tp_dropped *dropped) {
    tp_pager *pager = enter(core);
    tp_dropped_end(pager, dropped);
    leave(pager);
}

void tp_record_stream(tp_core *core, tp_addr addr, tp_stream stream) {
    tp_pager *pager = enter(core);
    tp_block *block = tp_block_live(pager, addr);
    uint32_t lane = 0;
    if (block != NULL && core->serve_small && tp_small_holds(&core->small, block->addr)) {
        tp_small_record_stream(&core->small, pager, addr, stream);
    } else if (block != NULL) {
        const bool ok = tp_markers_lane(&pager->markers, stream, &lane, NULL) == TP_OK &&
                        tp_uses_add(&pager->markers, &block->uses, (tp_marker){lane, 0}, true,
                                    NULL) == TP_OK;
        if (!ok) tp_access_lose_use(pager, block);
    }
    leave(pager);
}

bool tp_owns(const tp_core *core, tp_addr addr) {
    return tp_space_owns(&core->pager.space, addr);
}

static void block_info(const tp_block *block, tp_block_info *out) {
    *out = (tp_block_info){
        .addr = block->addr,
        .requested_bytes = block->requested_bytes,
        .bytes = block->bytes,
        .extent_count = block->extent_count,
        .pin_count = block->op_pins + block->handle_pins,
        .seen = block->seen,
        .immovable = tp_block_immovable(block),
        .captured = block->captured,
        .stream = block->stream,
        .generation = block->generation,
        .evicted_count = block->evicted_count,
    };
    for (uint32_t i = 0; i < block->extent_count; i++) {
        const tp_extent *extent = &block->extents[i];
        const bool resident = tp_extent_resident(extent->state);
        out->resident_bytes += resident ? extent->bytes : 0;
        out->host_bytes += resident ? 0 : extent->bytes;
        out->dirty_count += extent->state == TP_EXTENT_DIRTY;
        out->clean_count += extent->state == TP_EXTENT_CLEAN;
        out->host_count += !resident;
        out->busy_count += extent->state == TP_EXTENT_WRITING ||
                           extent->state == TP_EXTENT_FILLING || extent->busy;
    }
}

bool tp_block_query(tp_core *core, tp_addr addr, tp_block_info *out) {
    tp_pager *pager = enter(core);
    const tp_block *block = tp_block_live(pager, addr);
    if (block != NULL) block_info(block, out);
    leave(pager);
    return block != NULL;
}

bool tp_block_visit(tp_core *core, void (*visit)(void *ctx, const tp_block_info *info),
                    void *ctx) {
    tp_pager *pager = enter(core);
    const size_t room = pager->stats.block_count;
    tp_block_info *infos = calloc(room == 0 ? 1 : room, sizeof *infos);
    size_t count = 0;
    if (infos != NULL) {
        for (tp_link *link = pager->live.next; link != &pager->live && count < room;
             link = link->next) {
            block_info(TP_CONTAINER(link, tp_block, lru), &infos[count++]);
        }
    }
    leave(pager);
    if (infos == NULL) return false;
    for (size_t i = 0; i < count; i++) visit(ctx, &infos[i]);
    free(infos);
    return true;
}

/* ---- operators --------------------------------------------------------------------------------- */

/* Tells of blocks that the plan drops. `accesses`: of the operator that begins. Drops the lock. */
static void tell_drops(tp_core *core, const tp_access *accesses, size_t count) {
    tp_pager *pager = &core->pager;
    tp_addr addrs[TP_DROPS_MAX];
    bool parks[TP_DROPS_MAX];
    const uint32_t taken = tp_executor_take_drops(pager, accesses, count, addrs, parks);
    const tp_hooks hooks = pager->hooks;
    if (taken == 0 || hooks.drop == NULL) return;
    leave(pager);
    for (uint32_t i = 0; i < taken; i++) hooks.drop(hooks.ctx, core, addrs[i], parks[i]);
    (void)enter(core);
}

void tp_op_begin(tp_core *core, tp_op *op, const tp_access *accesses, size_t count,
                 tp_stream stream) {
    op->core = core;
    tp_pager *pager = enter(core);
    if (pager->page_out_before_op && count > 0) {
        tp_regions_stand(pager);
        (void)tp_resize_evict_all(pager);
    }
    pager->rerun_count += op->rerun;
    tp_learn_begin(pager, op, accesses, count, stream);
    if (op->record != 0) tp_executor_begin(pager);
    op->keep_recipe = op->recipe && op->record != 0 && tp_executor_needs_recipe(pager);
    if (!tp_list_empty(&pager->wanted_parked) && !op->rerun)
        tp_park_bring_wanted(pager, stream);
    if (pager->executor.drop_count > 0 && !op->rerun) tell_drops(core, accesses, count);
    tp_access_begin(pager, op, accesses, count, stream);
    tp_learn_started(pager, op);
    leave(pager);
}

uint32_t tp_op_name(const char *name) { return tp_name_id(name); }

const char *tp_op_name_text(uint32_t name) { return tp_name_text(name); }

void tp_op_adopt(tp_op *op, tp_addr addr) {
    tp_pager *pager = enter(op->core);
    tp_access_adopt(pager, op, addr);
    leave(pager);
}

void tp_op_end(tp_op *op, const tp_addr *outputs, size_t output_count, tp_op *parent) {
    const bool detached = op->detached;
    tp_pager *pager = enter(op->core);
    tp_learn_end(pager, op, outputs, output_count);
    tp_access_end(pager, op, outputs, output_count, parent);
    if (op->rerun) pager->rerun_count--;
    if (detached) {
        /* Perhaps on a thread that waits in a function of ours: its regions go on standing. */
        tp_lock_drop(&pager->lock);
        return;
    }
    tp_verify_poll(pager);
    tp_executor_launched(pager);
    if (pager->executor.drop_count > 0 && !op->rerun) tell_drops(op->core, NULL, 0);
    tp_pager_catch_up(pager);
    leave(pager);
}

void tp_op_detach(tp_op *op, tp_op *parent) {
    tp_pager *pager = enter(op->core);
    tp_learn_end(pager, op, NULL, 0); /* its own stream has seen all of it */
    tp_access_detach(pager, op, parent);
    leave(pager);
}

void tp_op_export(tp_op *op) {
    tp_pager *pager = enter(op->core);
    tp_access_export_operands(pager, op);
    leave(pager);
}

void tp_op_fini(tp_op *op) {
    free(op->pins);
    memset(op, 0, sizeof *op);
}

tp_status tp_touch(tp_core *core, tp_addr addr, bool write, tp_stream stream, tp_error *error) {
    tp_pager *pager = enter(core);
    tp_status status = pager->failed;
    if (status == TP_OK && tp_block_live(pager, addr) == NULL) status = TP_INVALID;
    if (status == TP_OK) {
        tp_op op = {0};
        const tp_access access = {addr, write};
        tp_access_begin(pager, &op, &access, 1, stream);
        tp_access_end(pager, &op, NULL, 0, NULL);
        free(op.pins);
    }
    leave(pager);
    return status == TP_OK ? TP_OK
                           : tp_error_set(error, status, "no live block holds the address");
}

void tp_mark_written(tp_core *core, const tp_addr *addrs, size_t count, uint64_t since) {
    tp_pager *pager = enter(core);
    for (size_t i = 0; i < count && !pager->abandoned; i++) {
        tp_block *block = tp_block_live(pager, addrs[i]);
        if (block == NULL || block->written > since) continue;
        for (uint32_t k = 0; k < block->extent_count; k++) {
            /* A busy one has been verified: its mapping is what changes now. */
            tp_extent *extent = &block->extents[k];
            if (!extent->busy) tp_extent_mark_written(pager, extent);
        }
    }
    leave(pager);
}

uint64_t tp_use_clock(tp_core *core) {
    tp_pager *pager = enter(core);
    const uint64_t clock = pager->use_clock;
    leave(pager);
    return clock;
}

void tp_mark_step(tp_core *core, tp_step_mark mark) {
    tp_pager *pager = enter(core);
    tp_verify_poll(pager);
    tp_steps_mark(&pager->steps, mark);
    if (tp_steps_on(&pager->steps))
        tp_pager_wake(pager); /* for the plans; waking costs 10 us */
    leave(pager);
}

bool tp_last_step(tp_core *core, void (*visit)(void *ctx, const tp_step *step), void *ctx) {
    tp_pager *pager = enter(core);
    if (tp_steps_on(&pager->steps)) tp_steps_settle(&pager->steps);
    tp_step *step = tp_steps_last(&pager->steps);
    if (step != NULL) tp_steps_hold(step);
    leave(pager);
    if (step == NULL) return false;
    visit(ctx, step);
    pager = enter(core);
    tp_steps_give(step);
    leave(pager);
    return true;
}

void tp_mark_seen(tp_core *core, tp_addr addr) {
    tp_pager *pager = enter(core);
    tp_block *block = tp_block_live(pager, addr);
    if (block != NULL) tp_access_see(pager, block);
    leave(pager);
}

void tp_region_begin(tp_core *core, tp_region *region, const tp_access *accesses, size_t count,
                     tp_stream stream) {
    tp_pager *pager = enter(core);
    region->core = pager->abandoned ? NULL : core;
    if (region->core != NULL) {
        tp_learn_region(pager, accesses, count, stream);
        tp_regions_begin(pager, region, accesses, count, stream);
    }
    leave(pager);
}

void tp_region_end(tp_region *region) {
    if (region->core == NULL) return;
    tp_pager *pager = enter(region->core);
    tp_regions_end(pager, region);
    region->core = NULL;
    leave(pager);
}

void tp_region_fini(tp_region *region) {
    free(region->notes);
    memset(region, 0, sizeof *region);
}

void tp_region_lift(tp_core *core) {
    tp_pager *pager = enter(core);
    tp_regions_lift(pager);
    leave(pager);
}

void tp_region_unlift(tp_core *core) {
    tp_pager *pager = enter(core);
    tp_regions_unlift(pager);
    leave(pager);
}

void tp_capture_begin(tp_core *core) {
    tp_pager *pager = enter(core);
    pager->capture_depth++;
    pager->markers.capturing = true;
    leave(pager);
}

void tp_capture_end(tp_core *core) {
    tp_pager *pager = enter(core);
    TP_REQUIRE(pager->capture_depth > 0);
    pager->capture_depth--;
    pager->markers.capturing = pager->capture_depth > 0;
    tp_pager_wake(pager);
    leave(pager);
}

bool tp_capturing(tp_core *core) {
    tp_pager *pager = &core->pager;
    tp_lock_take(&pager->lock);
    const bool capturing = pager->capture_depth > 0;
    tp_lock_drop(&pager->lock);
    return capturing;
}

tp_status tp_pin(tp_core *core, tp_addr addr, tp_oom *oom, tp_error *error) {
    tp_pager *pager = enter(core);
    const tp_status status = tp_access_pin(pager, addr, error);
    if (status == TP_OUT_OF_MEMORY) {
        const tp_block *block = tp_block_live(pager, addr);
        tp_oom_fill(pager, block == NULL ? 0 : block->bytes, &pager->last_oom);
        pager->has_last_oom = true;
        if (oom != NULL) *oom = pager->last_oom;
    }
    leave(pager);
    return status;
}

tp_status tp_unpin(tp_core *core, tp_addr addr, tp_error *error) {
    tp_pager *pager = enter(core);
    const tp_status status = tp_access_unpin(pager, addr, error);
    leave(pager);
    return status;
}

void tp_export(tp_core *core, tp_addr addr) {
    tp_pager *pager = enter(core);
    tp_access_export(pager, addr);
    leave(pager);
}

/* ---- tests and tools --------------------------------------------------------------------------- */

tp_status tp_evict(tp_core *core, tp_addr addr, tp_error *error) {
    tp_pager *pager = enter(core);
    tp_regions_stand(pager);
    const tp_status status = tp_resize_evict(pager, addr, error);
    leave_arming(core);
    return status;
}

size_t tp_evict_all(tp_core *core) {
    tp_pager *pager = enter(core);
    tp_regions_stand(pager);
    const size_t bytes = tp_resize_evict_all(pager);
    leave_arming(core);
    return bytes;
}

void tp_core_pass_time(tp_core *core, uint64_t most_ns) {
    tp_pager *pager = enter(core);
    TP_REQUIRE(pager->no_thread);
    tp_pager_wait(pager, most_ns);
    leave(pager);
}

tp_status tp_core_check(tp_core *core, tp_error *error) {
    tp_lock_take(&core->pager.lock);
    const tp_status status = tp_pager_check(&core->pager, error);
    tp_lock_drop(&core->pager.lock);
    return status;
}

void tp_core_stats(tp_core *core, tp_stats *out) {
    tp_pager *pager = enter(core);
    tp_verify_poll(pager);
    *out = pager->stats;
    out->device_budget = pager->budget.limit_bytes;
    out->host_budget = pager->budget.host_limit_bytes;
    out->foreign_cap = pager->budget.foreign_cap_bytes;
    out->armed = pager->armed;
    out->offload = pager->offload;
    out->failed = pager->failed != TP_OK;
    out->regions_closed = pager->region_depth;
    leave(pager);
}

void tp_core_reset_stats(tp_core *core, bool peaks, bool totals) {
    tp_pager *pager = enter(core);
    tp_stats *stats = &pager->stats;
    if (peaks) {
        tp_gauge *const gauges[] = {&stats->allocated, &stats->active, &stats->reserved,
                                    &stats->resident,  &stats->host,   &stats->host_held,
                                    &stats->pinned,    &stats->held,   &stats->parked};
        for (size_t i = 0; i < sizeof gauges / sizeof gauges[0]; i++)
            tp_gauge_reset_peak(gauges[i]);
        stats->live_peak_count = stats->block_count;
    }
    if (totals) {
        tp_tally *const tallies[] = {
            &stats->fills,          &stats->write_backs,  &stats->evictions,
            &stats->misses,         &stats->stalls,       &stats->host_operators,
            &stats->memory_stalls,  &stats->discards,     &stats->unseen_writes,
            &stats->unproven,       &stats->fingerprints, &stats->frame_creates,
            &stats->frame_releases, &stats->plans,        &stats->drops,
            &stats->reruns,         &stats->parks};
        for (size_t i = 0; i < sizeof tallies / sizeof tallies[0]; i++)
            *tallies[i] = (tp_tally){0};
        stats->alloc_count = stats->free_count = stats->cache_hits = 0;
        stats->born_in_host = stats->ooms = stats->planned_ops = 0;
        stats->region_count = stats->region_waits = 0;
    }
    leave(pager);
}

void tp_core_oom_figures(tp_core *core, size_t requested_bytes, tp_oom *out) {
    tp_pager *pager = enter(core);
    tp_oom_fill(pager, requested_bytes, out);
    leave(pager);
}

bool tp_core_last_oom(tp_core *core, tp_oom *out) {
    tp_pager *pager = enter(core);
    const bool has = pager->has_last_oom;
    if (has) *out = pager->last_oom;
    leave(pager);
    return has;
}

/* ---- the process's cores ----------------------------------------------------------------------- */

static _Atomic(tp_core *) cores[TP_SLOT_MAX];
static _Atomic int cores_used; /* one more than the highest index ever used */

/* The simulated device first, so that a look-up passes few empty places. */
static int place_of(int slot) { return (slot + 1) % TP_SLOT_MAX; }

/* Around a fork every core's lock is held, so that the child finds nothing half done. In the child
 * the pager's thread is gone: the cores are abandoned there, addresses stay as they are. */
static void for_each_core(void (*visit)(tp_pager *pager)) {
    const int used = atomic_load(&cores_used);
    for (int i = 0; i < used; i++) {
        tp_core *core = atomic_load(&cores[i]);
        if (core != NULL) visit(&core->pager);
    }
}

/* The child says through this pipe that it has its copies; until then the parent keeps the locks. */
static int fork_pipe[2] = {-1, -1};

static void pipe_close(int end) {
    if (fork_pipe[end] >= 0) (void)close(fork_pipe[end]);
    fork_pipe[end] = -1;
}

static void open_pipe_if_copying(tp_pager *pager) {
    if (fork_pipe[0] >= 0 || !tp_pager_fork_copies(pager)) return;
    if (pipe(fork_pipe) != 0)
        fork_pipe[0] = fork_pipe[1] = -1; /* then it copies as fast as it can */
}

static void fork_prepare(void) {
    for_each_core(tp_pager_fork_prepare);
    for_each_core(open_pipe_if_copying);
}

static void fork_parent(void) {
    pipe_close(1);
    char done = 0;
    /* End of file, when the child has died or there is none, will do as well. */
    while (fork_pipe[0] >= 0 && read(fork_pipe[0], &done, 1) < 0 && errno == EINTR) continue;
    pipe_close(0);
    for_each_core(tp_pager_fork_parent);
}

static void fork_child(void) {
    for_each_core(tp_pager_fork_child);
    pipe_close(0);
    pipe_close(1); /* which tells the parent */
}

static void watch_forks(void) { (void)pthread_atfork(fork_prepare, fork_parent, fork_child); }

tp_status tp_register(int slot, tp_core *core, tp_error *error) {
    tp_core *none = NULL;
    if (slot < 0 || slot >= TP_SLOT_MAX || core == NULL) {
        return tp_error_set(error, TP_INVALID, "slot %d cannot be", slot);
    }
    if (!atomic_compare_exchange_strong(&cores[place_of(slot)], &none, core)) {
        return tp_error_set(error, TP_BUSY, "slot %d has an allocator already", slot);
    }
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, watch_forks);
    int used = atomic_load(&cores_used);
    const int place = place_of(slot);
    while (used <= place && !atomic_compare_exchange_weak(&cores_used, &used, place + 1))
        continue;
    return TP_OK;
}

void tp_unregister(int slot) {
    if (slot >= 0 && slot < TP_SLOT_MAX) atomic_store(&cores[place_of(slot)], NULL);
}

tp_core *tp_core_at(int slot) {
    return slot >= 0 && slot < TP_SLOT_MAX ? atomic_load(&cores[place_of(slot)]) : NULL;
}

tp_core *tp_core_owning(tp_addr addr) {
    if (!tp_glance_may_own(addr)) return NULL;
    const int used = atomic_load_explicit(&cores_used, memory_order_acquire);
    for (int i = 0; i < used; i++) {
        tp_core *core = atomic_load_explicit(&cores[i], memory_order_acquire);
        if (core != NULL && tp_owns(core, addr)) return core;
    }
    return NULL;
}
