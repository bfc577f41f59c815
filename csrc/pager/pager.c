#include "pager/pager.h"

#include <errno.h>
#include <string.h>

#include "base/bytes.h"
#include "base/check.h"
#include "pager/alloc.h"
#include "pager/drop.h"
#include "pager/evict.h"
#include "pager/extent.h"
#include "pager/park.h"
#include "pager/reclaim.h"
#include "pager/region.h"

enum {
    POLL_NS = 20000, /* between two looks at work in flight */
    VIRTUAL_EPOCH_NS =
        2000000000,         /* where virtual time begins: nothing has happened for long */
    ABANDON_NS = 500000000, /* how long process exit waits for the thread */
    GRACE_NS = 20000000,    /* see hook_is_new */
    SETTLED_NS = 1000000000 /* a marker that could not be recorded by then never will */
};

_Thread_local uint64_t tp_thread_waited_ns;

void tp_pager_wake(tp_pager *pager) { tp_cond_broadcast(&pager->work); }

uint64_t tp_pager_now(const tp_pager *pager) {
    if (!pager->no_thread) return tp_now_ns();
    return VIRTUAL_EPOCH_NS + pager->dev->ops->clock_ns(pager->dev);
}

/* An operator that began on another thread before the hook was installed is unknown to us, and a
 * marker covers it only once it has launched its kernels. It is given ample time for that. */
static bool hook_is_new(const tp_pager *pager) {
    if (pager->hooks.arm == NULL) return false;
    return pager->heard_ns == 0 || tp_pager_now(pager) - pager->heard_ns < GRACE_NS;
}

bool tp_pager_gate_closed(const tp_pager *pager) {
    return pager->region_depth > 0 || pager->region_unmarked;
}

bool tp_pager_gate_settling(const tp_pager *pager) {
    return pager->region_unmarked && pager->region_depth == 0 && pager->capture_depth == 0 &&
           pager->heard_ns != 0 && tp_pager_now(pager) - pager->heard_ns < SETTLED_NS;
}

void tp_pager_mark_region_end(tp_pager *pager) {
    pager->region_unmarked =
        hook_is_new(pager) || pager->capture_depth > 0 ||
        tp_marker_record_context(&pager->markers, &pager->region_end, NULL) != TP_OK;
}

void tp_pager_fail(tp_pager *pager, tp_status status) {
    if (pager->failed == TP_OK) pager->failed = status;
    tp_cond_broadcast(&pager->changed);
}

/* ---- what the thread does ---------------------------------------------------------------------- */

/* Under pressure the thread keeps a little memory free ahead of the program, so that the launching
 * thread seldom waits for an eviction that begins only then. */
static bool reclaim_ahead(tp_pager *pager) {
    /* A plan makes room itself. */
    if (!pager->pressure || !pager->offload || pager->executor.following) return false;
    const size_t free_bytes = tp_reclaim_free_bytes(pager) + tp_reclaim_incoming(pager).bytes;
    if (free_bytes >= tp_budget_reclaim_start(&pager->budget)) return false;
    return tp_reclaim_start(pager, tp_budget_reclaim_stop(&pager->budget) - free_bytes,
                            pager->wanted_size) > 0;
}

/* True if it dropped the lock: somebody may have wanted to wake the thread meanwhile. */
static bool tell_first_paging(tp_pager *pager) {
    if (pager->paged || pager->stats.evictions.count == 0) return false;
    pager->paged = true;
    const tp_hooks hooks = pager->hooks;
    if (hooks.first_paging == NULL) return false;
    tp_lock_drop(&pager->lock);
    hooks.first_paging(hooks.ctx);
    tp_lock_take(&pager->lock);
    return true;
}

static bool tell_unseen_write(tp_pager *pager) {
    if (pager->told_unseen || pager->stats.unseen_addr == 0) return false;
    pager->told_unseen = true;
    const tp_hooks hooks = pager->hooks;
    if (hooks.unseen_write == NULL) return false;
    tp_lock_drop(&pager->lock);
    hooks.unseen_write(hooks.ctx, pager->stats.unseen_addr, pager->stats.unseen_bytes);
    tp_lock_take(&pager->lock);
    return true;
}

static bool work_in_flight(const tp_pager *pager) {
    return !tp_list_empty(&pager->inflight) || !tp_list_empty(&pager->retiring) ||
           !tp_list_empty(&pager->homing);
}

/* One round of what the thread does. True: there may be more to do at once. May drop the lock. */
static bool work(tp_pager *pager) {
    if (pager->failed == TP_OK && pager->markers.broken != TP_OK) {
        tp_pager_fail(pager, pager->markers.broken);
    }
    if (pager->failed != TP_OK) return false;
    bool moved = tp_evict_step(pager);
    moved |= tp_block_unmap_retired(pager);
    if (pager->capture_depth == 0) {
        moved |= tp_block_free_deferred(pager);
        if (pager->region_unmarked) tp_pager_mark_region_end(pager);
    }
    moved |= tp_park_settle(pager);
    moved |= tp_executor_fill(pager);
    if (pager->no_thread && !pager->plans.off) moved |= tp_plans_step(pager);
    moved |= reclaim_ahead(pager);
    moved |= tell_first_paging(pager);
    moved |= tell_unseen_write(pager);
    moved |= tp_timing_collect(pager);
    return moved;
}

static bool work_all(tp_pager *pager) {
    bool any = false;
    while (!pager->stop && work(pager)) any = true;
    return any;
}

void tp_pager_catch_up(tp_pager *pager) {
    if (pager->no_thread) (void)work_all(pager);
}

/* ---- waits ------------------------------------------------------------------------------------- */

/* The only place where virtual time passes while somebody waits. */
static void wait_without_thread(tp_pager *pager, uint64_t timeout_ns) {
    if (work_all(pager)) return;
    tp_lock_drop(&pager->lock);
    pager->dev->ops->clock_advance(pager->dev, timeout_ns);
    tp_lock_take(&pager->lock);
    (void)work_all(pager);
}

void tp_pager_wait(tp_pager *pager, uint64_t timeout_ns) {
    tp_regions_stand(pager);
    tp_pager_wait_closed(pager, timeout_ns);
}

void tp_pager_wait_closed(tp_pager *pager, uint64_t timeout_ns) {
    const uint64_t began = tp_pager_now(pager);
    const tp_hooks hooks = pager->hooks;
    void *token = NULL;
    if (hooks.wait_begin != NULL) {
        tp_lock_drop(&pager->lock);
        token = hooks.wait_begin(hooks.ctx);
        tp_lock_take(&pager->lock);
    }
    if (pager->no_thread) {
        wait_without_thread(pager, timeout_ns);
    } else {
        (void)tp_cond_wait(&pager->changed, &pager->lock, timeout_ns);
    }
    if (hooks.wait_end != NULL) {
        tp_lock_drop(&pager->lock);
        hooks.wait_end(hooks.ctx, token);
        tp_lock_take(&pager->lock);
    }
    tp_thread_waited_ns += tp_pager_now(pager) - began;
}

/* ---- the thread -------------------------------------------------------------------------------- */

static void *run(void *arg) {
    tp_pager *pager = arg;
    const tp_status bound = pager->dev->ops->bind_thread(pager->dev, NULL);
    tp_lock_take(&pager->lock);
    if (bound != TP_OK) tp_pager_fail(pager, bound);
    while (!pager->stop) {
        if (work(pager)) continue;
        const bool poll = work_in_flight(pager) && pager->failed == TP_OK;
        (void)tp_cond_wait(&pager->work, &pager->lock, poll ? POLL_NS : 0);
    }
    pager->thread_ended = true;
    tp_cond_broadcast(&pager->changed);
    tp_lock_drop(&pager->lock);
    return NULL;
}

/* Of one step: about 40 MB of host memory at most, and as much for each that is remembered. */
static const tp_record_limits record_limits = {
    .ops = 1 << 17, .uses = 1 << 20, .storages = 1 << 17};

/* ---- life -------------------------------------------------------------------------------------- */

static size_t default_segment_bytes(const tp_device *dev) {
    const size_t wanted = tp_max_size(dev->caps.total_bytes, TP_GIB) * 4;
    return tp_min_size(wanted, 1024 * TP_GIB);
}

static void init_lists(tp_pager *pager) {
    tp_list_init(&pager->live);
    tp_list_init(&pager->cached);
    for (int i = 0; i < TP_SIZE_BINS; i++) tp_list_init(&pager->by_size[i]);
    tp_list_init(&pager->retiring);
    tp_list_init(&pager->deferred);
    tp_list_init(&pager->inflight);
    tp_list_init(&pager->dropped);
    tp_list_init(&pager->wanted_parked);
    tp_list_init(&pager->homing);
    tp_list_init(&pager->ahead_blocks);
    tp_list_init(&pager->regions);
}

static tp_status init_memory(tp_pager *pager, const tp_config *config, tp_error *error) {
    tp_device *dev = pager->dev;
    const size_t extent_max =
        tp_round_up(config->extent_max_bytes != 0 ? config->extent_max_bytes : 64 * TP_MIB,
                    dev->caps.granularity_bytes);
    const size_t segment =
        config->segment_bytes != 0 ? config->segment_bytes : default_segment_bytes(dev);
    tp_status status = tp_space_init(&pager->space, dev, segment, extent_max, error);
    if (status != TP_OK) return status;
    status = tp_frame_pool_init(&pager->device_frames, dev, TP_FRAME_DEVICE, extent_max, error);
    if (status != TP_OK) goto no_device_pool;
    status = tp_frame_pool_init(&pager->host_frames, dev, TP_FRAME_HOST, extent_max, error);
    if (status != TP_OK) goto no_host_pool;
    status = tp_markers_init(&pager->markers, dev, error);
    if (status != TP_OK) goto no_markers;
    return TP_OK;
no_markers:
    tp_frame_pool_fini(&pager->host_frames);
no_host_pool:
    tp_frame_pool_fini(&pager->device_frames);
no_device_pool:
    tp_space_fini(&pager->space);
    return status;
}

static void fini_memory(tp_pager *pager) {
    tp_markers_fini(&pager->markers);
    tp_frame_pool_fini(&pager->host_frames);
    tp_frame_pool_fini(&pager->device_frames);
    tp_space_fini(&pager->space);
}

tp_status tp_pager_init(tp_pager *pager, const tp_config *config, tp_device *dev,
                        tp_error *error) {
    if (config->no_thread && !dev->caps.virtual_clock) {
        return tp_error_set(error, TP_INVALID, "without a thread the device's clock is needed");
    }
    memset(pager, 0, sizeof *pager);
    pager->dev = dev;
    pager->hooks = config->hooks;
    if (pager->hooks.arm != NULL) tp_pager_distrust(pager);
    pager->large_min_bytes =
        config->large_min_bytes != 0 ? config->large_min_bytes : 2 * TP_MIB;
    pager->offload = config->offload && dev->caps.host_frames;
    pager->strict = config->strict;
    pager->readonly_clean = config->readonly_clean;
    pager->host_kernels = config->host_kernels;
    pager->page_out_before_op = config->page_out_before_op;
    pager->rules_off = config->rules_off;
    pager->budget.limit_bytes = config->device_budget_bytes == TP_NO_LIMIT
                                    ? dev->caps.total_bytes
                                    : config->device_budget_bytes;
    pager->budget.host_limit_bytes = config->host_budget_bytes;
    init_lists(pager);
    tp_steps_init(&pager->steps, &record_limits);
    tp_status status = tp_lock_init(&pager->lock, TP_RANK_CORE, error);
    if (status != TP_OK) return status;
    status = tp_cond_init(&pager->work, error);
    if (status != TP_OK) goto no_work;
    status = tp_cond_init(&pager->changed, error);
    if (status != TP_OK) goto no_changed;
    status = tp_plans_init(&pager->plans, error);
    if (status != TP_OK) goto no_plans;
    status = init_memory(pager, config, error);
    if (status != TP_OK) goto no_memory;
    pager->no_thread = pager->thread_ended = config->no_thread;
    if (pager->no_thread) return TP_OK;
    if (pthread_create(&pager->thread, NULL, run, pager) != 0) {
        status = tp_error_set(error, TP_NO_HOST_MEMORY, "the pager's thread cannot be started");
        goto no_thread;
    }
    pager->thread_started = true;
    return TP_OK;
no_thread:
    fini_memory(pager);
no_memory:
    tp_plans_fini(&pager->plans);
no_plans:
    tp_cond_fini(&pager->changed);
no_changed:
    tp_cond_fini(&pager->work);
no_work:
    tp_lock_fini(&pager->lock);
    return status;
}

static void stop_thread(tp_pager *pager) {
    tp_lock_take(&pager->lock);
    pager->stop = true;
    tp_pager_wake(pager);
    tp_lock_drop(&pager->lock);
    if (pager->thread_started) (void)pthread_join(pager->thread, NULL);
}

/* The last marker there is: everything queued on the device. */
static void wait_for_device(tp_pager *pager) {
    tp_device *dev = pager->dev;
    tp_event event = NULL;
    if (dev->ops->event_create(dev, &event, NULL) != TP_OK) return;
    for (uint32_t i = 1; i < pager->markers.lane_count; i++) {
        const tp_stream stream = tp_markers_stream(&pager->markers, i);
        if (dev->ops->event_record(dev, event, stream, NULL) != TP_OK) continue;
        (void)dev->ops->event_sync(dev, event, NULL);
    }
    dev->ops->event_destroy(dev, event);
}

static void unmap_list(tp_pager *pager, tp_link *list) {
    while (!tp_list_empty(list)) {
        tp_block *block = TP_CONTAINER(list->next, tp_block, lru);
        tp_list_remove(&block->lru);
        tp_list_remove(&block->size);
        tp_block_unmap_now(pager, block);
    }
}

void tp_pager_fini(tp_pager *pager) {
    tp_plans_stop(pager);
    stop_thread(pager);
    wait_for_device(pager);
    unmap_list(pager, &pager->live);
    unmap_list(pager, &pager->cached);
    unmap_list(pager, &pager->retiring);
    unmap_list(pager, &pager->deferred);
    tp_drop_fini(pager);
    tp_steps_fini(&pager->steps);
    tp_timing_fini(pager);
    fini_memory(pager);
    tp_plans_fini(&pager->plans);
    tp_cond_fini(&pager->changed);
    tp_cond_fini(&pager->work);
    tp_lock_fini(&pager->lock);
}

void tp_pager_abandon(tp_pager *pager) {
    tp_lock_take(&pager->lock);
    pager->abandoned = true;
    pager->stop = pager->plans.stop = true;
    tp_pager_wake(pager);
    const uint64_t until = tp_now_ns() + ABANDON_NS;
    while (!pager->thread_ended && tp_now_ns() < until) {
        (void)tp_cond_wait(&pager->changed, &pager->lock, 10000000);
    }
    tp_lock_drop(&pager->lock);
}

/* ---- fork ---------------------------------------------------------------------------------- */

/* Not tp_lock_take: several cores' locks are held at once here, in the order of their slots. */
void tp_pager_fork_prepare(tp_pager *pager) {
    (void)pthread_mutex_lock(&pager->lock.mutex);
    while (pager->remapping) {
        (void)pthread_cond_wait(&pager->changed.cond, &pager->lock.mutex);
    }
}

void tp_pager_fork_parent(tp_pager *pager) { (void)pthread_mutex_unlock(&pager->lock.mutex); }

bool tp_pager_fork_copies(const tp_pager *pager) {
    return pager->dev->ops->make_private != NULL && !tp_list_empty(&pager->live);
}

static void make_private(tp_pager *pager) {
    if (!tp_pager_fork_copies(pager)) return;
    for (tp_link *link = pager->live.next; link != &pager->live; link = link->next) {
        const tp_block *block = TP_CONTAINER(link, tp_block, lru);
        for (uint32_t i = 0; i < block->extent_count; i++) {
            const tp_extent *extent = &block->extents[i];
            const tp_frame *frame =
                tp_extent_resident(extent->state) ? extent->device : extent->host;
            pager->dev->ops->make_private(pager->dev, extent->addr, extent->bytes,
                                          frame->window);
        }
    }
}

void tp_pager_fork_child(tp_pager *pager) {
    if (!pager->abandoned) make_private(pager);
    pager->abandoned = pager->stop = pager->thread_ended = true;
    pager->plans.thread_started = false; /* it is the parent's */
    pager->page_out_before_op = false;
    (void)pthread_mutex_unlock(&pager->lock.mutex);
}

/* ---- invariants -------------------------------------------------------------------------------- */

static tp_status check_extent(const tp_extent *extent, tp_error *error) {
    const bool resident = tp_extent_resident(extent->state);
    const bool host_bytes =
        extent->state == TP_EXTENT_WRITING || extent->state == TP_EXTENT_CLEAN ||
        extent->state == TP_EXTENT_HOST || extent->state == TP_EXTENT_FILLING;
    const bool device_bytes = resident || extent->state == TP_EXTENT_FILLING;
    int broken = 0;
    if (device_bytes && extent->device == NULL) broken = 1;
    if (host_bytes && extent->host == NULL) broken = 2;
    if (!extent->busy && resident && extent->mapped != extent->device) broken = 3;
    if (!extent->busy && !resident && extent->mapped != NULL &&
        extent->mapped != extent->host) {
        broken = 4;
    }
    const bool moving =
        extent->state == TP_EXTENT_WRITING || extent->state == TP_EXTENT_FILLING;
    const bool listed = tp_link_in_list(&extent->inflight);
    const bool wanted = extent->evict || extent->write_back || extent->differed;
    if ((moving || wanted || extent->place != 0) && !listed) broken = 5;
    if (extent->mapped != NULL && extent->mapped->map_count == 0) broken = 6;
    if (!extent->busy && extent->guarded && extent->state != TP_EXTENT_CLEAN) broken = 12;
    if (broken == 0) return TP_OK;
    return tp_error_set(error, TP_FAILED, "invariant %d is broken by an extent in %s", broken,
                        tp_extent_state_name(extent->state));
}

static tp_status check_gauges(const tp_pager *pager, size_t resident, size_t host, size_t bytes,
                              tp_error *error) {
    const tp_stats *stats = &pager->stats;
    if (stats->resident.current != resident ||
        stats->host.current != host + stats->parked.current || stats->active.current != bytes) {
        return tp_error_set(error, TP_FAILED, "invariant 7: gauges differ from the extents");
    }
    if (pager->device_frames.created_bytes > tp_budget_frame_cap(&pager->budget) &&
        pager->ticket_serving == pager->ticket_next) {
        return tp_error_set(error, TP_FAILED, "invariant 8: frames exceed the budget");
    }
    if (pager->host_frames.created_bytes > pager->budget.host_limit_bytes) {
        return tp_error_set(error, TP_FAILED, "invariant 9: host frames exceed their budget");
    }
    return TP_OK;
}

tp_status tp_pager_check(tp_pager *pager, tp_error *error) {
    tp_status status = tp_space_check(&pager->space, error);
    size_t resident = 0, host = 0, bytes = 0;
    uint64_t pins = 0;
    for (tp_link *link = pager->live.next; status == TP_OK && link != &pager->live;
         link = link->next) {
        const tp_block *block = TP_CONTAINER(link, tp_block, lru);
        bytes += block->bytes;
        pins += block->op_pins;
        for (uint32_t i = 0; status == TP_OK && i < block->extent_count; i++) {
            const tp_extent *extent = &block->extents[i];
            status = check_extent(extent, error);
            resident += tp_extent_resident(extent->state) ? extent->bytes : 0;
            host += extent->state == TP_EXTENT_HOST || extent->state == TP_EXTENT_FILLING
                        ? extent->bytes
                        : 0;
        }
    }
    if (status != TP_OK) return status;
    if (pins != pager->op_pin_total) {
        return tp_error_set(error, TP_FAILED, "invariant 10: pins do not add up");
    }
    if (!tp_regions_agree(pager)) {
        return tp_error_set(error, TP_FAILED,
                            "invariant 11: the gate disagrees with its regions");
    }
    return check_gauges(pager, resident, host, bytes, error);
}
