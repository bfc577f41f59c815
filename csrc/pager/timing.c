#include "pager/timing.h"

#include "pager/pager.h"

enum {
    ENOUGH_SAMPLES = 4, /* of a class; then one operator in SPARSE is sampled */
    SPARSE = 64,
    INNER_MAX = 64 /* who calls more operators than this does little by itself */
};

static uint64_t recorded_total(const tp_pager *pager) {
    return pager->steps.record.ops_before + pager->steps.record.op_count;
}

/* What the operators take that have begun since this one did. False: that is not known, or they
 * may have run at the same time. */
static bool inner_time(const tp_pager *pager, const tp_op *op, uint64_t *ns) {
    const tp_record *record = &pager->steps.record;
    *ns = 0;
    if (op->record != record->number) return recorded_total(pager) == op->recorded_total;
    if (record->op_count - op->recorded > INNER_MAX) return false;
    for (uint32_t i = op->recorded + 1; i < record->op_count; i++) {
        const tp_record_op *inner = &record->ops[i];
        const bool known = inner->class_idx != 0 &&
                           record->classes[inner->class_idx].sample_count > 0 &&
                           inner->stream == record->ops[op->recorded].stream;
        if (!known) return false;
        *ns += tp_record_class_ns(record, inner->class_idx);
    }
    return true;
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
        op->started_ns = tp_pager_now(pager);
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
    if (op->timer == 0 && op->started_ns == 0) return;
    uint64_t inner_ns = 0;
    const bool known = inner_time(pager, op, &inner_ns);
    if (op->started_ns != 0 && known) {
        const uint64_t ns = tp_pager_now(pager) - op->started_ns;
        tp_record_sample(&pager->steps.record, op->class_idx,
                         ns > inner_ns ? ns - inner_ns : 0);
    }
    op->started_ns = 0;
    if (op->timer == 0) return;
    tp_timer *timer = &pager->timing.timers[op->timer - 1];
    op->timer = 0;
    timer->state = TP_TIMER_FREE;
    timer->inner_ns = inner_ns;
    if (!known || pager->capture_depth > 0) return;
    if (pager->dev->ops->event_record(pager->dev, timer->end, op->stream, NULL) != TP_OK)
        return;
    timer->state = TP_TIMER_WAITING;
    timer->turn = ++pager->timing.turn_count;
    if (++pager->timing.waiting_count > TP_TIMERS / 2) tp_pager_wake(pager);
}

static tp_timer *waiting_longest(tp_timing *timing) {
    tp_timer *found = NULL;
    for (uint32_t i = 0; i < TP_TIMERS && timing->waiting_count > 0; i++) {
        tp_timer *timer = &timing->timers[i];
        if (timer->state != TP_TIMER_WAITING) continue;
        if (found == NULL || timer->turn < found->turn) found = timer;
    }
    return found;
}

void tp_timing_collect(tp_pager *pager) {
    const tp_device_ops *ops = pager->dev->ops;
    tp_timer *timer = NULL;
    while ((timer = waiting_longest(&pager->timing)) != NULL) {
        bool done = false;
        const tp_status status = ops->event_query(pager->dev, timer->end, &done, NULL);
        if (status == TP_OK && !done) return;
        uint64_t ns = 0;
        if (status == TP_OK &&
            ops->event_elapsed(pager->dev, timer->begin, timer->end, &ns, NULL) == TP_OK)
            tp_record_sample(&pager->steps.record, timer->class_idx,
                             ns > timer->inner_ns ? ns - timer->inner_ns : 0);
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
