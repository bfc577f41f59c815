#include "pager/arming.h"

#include "pager/access.h"
#include "pager/learn.h"

enum { WAIT_NS = 1000000 };

static tp_arming due(const tp_pager *pager) {
    if (pager->armed) return TP_ARM_FULL;
    return pager->watching ? TP_ARM_SAMPLE : TP_ARM_OFF;
}

/* One thread at a time tells, so that the last word is the truth. */
static void tell(tp_pager *pager) {
    while (!pager->telling && pager->told != due(pager)) {
        const tp_hooks hooks = pager->hooks;
        const tp_arming level = pager->told = due(pager);
        pager->telling = true;
        pager->heard_ns = 0;
        tp_pager_distrust(pager);
        tp_lock_drop(&pager->lock);
        if (hooks.arm != NULL) hooks.arm(hooks.ctx, level);
        tp_lock_take(&pager->lock);
        pager->telling = false;
        if (level == TP_ARM_FULL) pager->heard_ns = tp_pager_now(pager);
        tp_pager_wake(pager);
    }
}

bool tp_arming_full(tp_pager *pager) {
    if (pager->armed || !pager->offload) return false;
    /* What was used before is covered by a marker that the first write-backs wait for. */
    tp_marker before = {0};
    if (pager->capture_depth > 0 ||
        tp_marker_record_context(&pager->markers, &before, NULL) != TP_OK ||
        tp_marker_stream_wait(&pager->markers, pager->dev->copy_stream[TP_COPY_TO_HOST], before,
                              NULL) != TP_OK) {
        return false; /* later, then */
    }
    pager->armed = true;
    tp_learn_start(pager);
    tell(pager);
    return true;
}

void tp_arming_update(tp_pager *pager) {
    if (!pager->offload || pager->armed) return;
    const size_t held = pager->device_frames.created_bytes + pager->budget.foreign_cap_bytes;
    if (pager->page_out_before_op || pager->host_kernels || pager->stats.host.current > 0) {
        (void)tp_arming_full(pager);
    } else if (!pager->watching && held >= tp_budget_watch_bytes(&pager->budget)) {
        pager->watching = true;
        tell(pager);
    }
}

void tp_arming_unknown(tp_pager *pager) {
    if (!pager->armed) return;
    pager->heard_ns = tp_pager_now(pager);
    tp_pager_distrust(pager);
    tp_access_await_remaps(pager);
}

bool tp_arming_for_return(tp_pager *pager) {
    if (pager->capture_depth > 0) return false;
    pager->armed = true;
    tell(pager);
    while (tp_pager_gate_settling(pager) && !tp_pager_halted(pager)) {
        tp_pager_wake(pager);
        tp_pager_wait(pager, WAIT_NS);
    }
    return true;
}

void tp_arming_off(tp_pager *pager) {
    pager->armed = pager->watching = false;
    tp_learn_stop(pager);
    tp_executor_stop(pager);
    /* What is touched is told no more; armed again, all blocks count as unseen. */
    for (tp_link *link = pager->live.next; link != &pager->live; link = link->next) {
        TP_CONTAINER(link, tp_block, lru)->seen = false;
    }
    tell(pager);
}
