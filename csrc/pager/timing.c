#include "pager/timing.h"

#include "pager/pager.h"

enum {
    ENOUGH_SAMPLES = 4, /* of a class; then one operator in SPARSE is sampled */
    SPARSE = 64
};

static uint64_t recorded_total(const tp_pager *pager) {
    return pager->steps.record.ops_before + pager->steps.record.op_count;
}

static bool wanted(const tp_pager *pager, const tp_op *op) {
    if (op->class_idx == 0) return false;
    return pager->steps.record.classes[op->class_idx].sample_count < ENOUGH_SAMPLES ||
           op->recorded_total % SPARSE == 0;
}

static bool provide(tp_pager *pager, tp_event *event) {
    if (*event != NULL) return true;
    const tp_status status = pager->dev->ops->event_create_timed(pager->dev, event, NULL);
    if (status == TP_UNSUPPORTED) pager->timing.off = true;
    return status == TP_OK;
}

static tp_timer *take(tp_pager *pager, uint32_t *number) {
    for (uint32_t i = 0; i < TP_TIMERS; i++) {
        tp_timer *timer = &pager->timing.timers[i];
        if (timer->state != TP_TIMER_FREE) continue;
        if (!provide(pager, &timer->begin) || !provide(pager, &timer->end)) return NULL;
        *number = i + 1;
        return timer;
    }
    return NULL;
}

void tp_timing_start(tp_pager *pager, tp_op *op) {
    op->timer = 0;
    op->started_ns = 0;
    if (op->record == 0 || !wanted(pager, op)) return;
    if (pager->host_kernels) {
        op->started_ns = tp_now_ns();
        return;
    }
    if (pager->dev->ops->event_create_timed == NULL || pager->timing.off) return;
    if (pager->capture_depth > 0) return;
    uint32_t number = 0;
    tp_timer *timer = take(pager, &number);
    if (timer == NULL) return;
    if (pager->dev->ops->event_record(pager->dev, timer->begin, op->stream, NULL) != TP_OK)
        return;
    timer->class_idx = op->class_idx;
    timer->state = TP_TIMER_RUNNING;
    op->timer = number;
}

void tp_timing_stop(tp_pager *pager, tp_op *op) {
    /* Others have begun meanwhile: it calls them, or they run at the same time. */
    const bool alone = op->record != 0 && recorded_total(pager) == op->recorded_total;
    if (op->started_ns != 0 && alone) {
        tp_record_sample(&pager->steps.record, op->class_idx, tp_now_ns() - op->started_ns);
    }
    op->started_ns = 0;
    if (op->timer == 0) return;
    tp_timer *timer = &pager->timing.timers[op->timer - 1];
    op->timer = 0;
    timer->state = TP_TIMER_FREE;
    if (!alone || pager->capture_depth > 0) return;
    if (pager->dev->ops->event_record(pager->dev, timer->end, op->stream, NULL) != TP_OK)
        return;
    timer->state = TP_TIMER_WAITING;
    if (++pager->timing.waiting_count > TP_TIMERS / 2) tp_pager_wake(pager);
}

void tp_timing_collect(tp_pager *pager) {
    if (pager->timing.waiting_count == 0) return;
    const tp_device_ops *ops = pager->dev->ops;
    for (uint32_t i = 0; i < TP_TIMERS; i++) {
        tp_timer *timer = &pager->timing.timers[i];
        if (timer->state != TP_TIMER_WAITING) continue;
        bool done = false;
        const tp_status status = ops->event_query(pager->dev, timer->end, &done, NULL);
        if (status == TP_OK && !done) continue;
        uint64_t ns = 0;
        if (status == TP_OK &&
            ops->event_elapsed(pager->dev, timer->begin, timer->end, &ns, NULL) == TP_OK)
            tp_record_sample(&pager->steps.record, timer->class_idx, ns);
        timer->state = TP_TIMER_FREE;
        pager->timing.waiting_count--;
    }
}

void tp_timing_fini(tp_pager *pager) {
    tp_device *dev = pager->dev;
    for (uint32_t i = 0; i < TP_TIMERS; i++) {
        const tp_timer *timer = &pager->timing.timers[i];
        if (timer->begin != NULL) dev->ops->event_destroy(dev, timer->begin);
        if (timer->end != NULL) dev->ops->event_destroy(dev, timer->end);
    }
}
