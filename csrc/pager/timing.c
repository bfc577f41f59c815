#include "pager/timing.h"

#include "base/bytes.h"
#include "pager/access.h"
#include "pager/pager.h"

enum {
    ENOUGH_SAMPLES = 4,  /* of a class; then one operator in SPARSE is sampled */
    PARTLY_SAMPLES = 64, /* likewise, while all of them are too long, perhaps */
    SPARSE = 64,
    LOST_GAPS = 8192,   /* in a row, all of which are timed */
    COLLECTED_MAX = 32, /* in one round: the lock is held */
    INNER_MAX = 64      /* who calls more operators than this does little by itself */
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

/* Those that are on their way count, too: else a program that is far ahead would time the same few
 * over and over. */
static bool class_wanted(const tp_pager *pager, const tp_op *op, uint32_t class_idx) {
    if (class_idx == 0) return false;
    const tp_op_class *it = &pager->steps.record.classes[class_idx];
    if (it->sample_count + it->pending_count < ENOUGH_SAMPLES) return true;
    const bool better = it->partly && it->sample_count < PARTLY_SAMPLES;
    return (better && it->pending_count == 0) || op->recorded_total % SPARSE == 0;
}

static bool provide(tp_pager *pager, tp_event *event) {
    if (*event != NULL) return true;
    const tp_status status = pager->dev->ops->event_create_timed(pager->dev, event, NULL);
    if (status == TP_UNSUPPORTED) pager->timing.off = true;
    return status == TP_OK;
}

/* TP_TIMERS: there is none. */
static uint32_t take(tp_pager *pager) {
    tp_timing *timing = &pager->timing;
    if (timing->free_count > 0) return timing->free[--timing->free_count];
    if (timing->made_count == TP_TIMERS) return TP_TIMERS;
    tp_timer *timer = &timing->timers[timing->made_count];
    if (!provide(pager, &timer->begin) || !provide(pager, &timer->end)) return TP_TIMERS;
    return timing->made_count++;
}

static void put(tp_timing *timing, uint32_t number) {
    timing->free[timing->free_count++] = (uint16_t)number;
}

void tp_timing_start(tp_pager *pager, tp_op *op) {
    op->timer = 0;
    op->started_ns = 0;
    if (op->record == 0 || !class_wanted(pager, op, op->class_idx)) return;
    if (pager->host_kernels) {
        op->started_ns = tp_pager_now(pager);
        op->waited_ns = tp_thread_waited_ns;
        return;
    }
    if (pager->dev->ops->event_create_timed == NULL || pager->timing.off) return;
    if (pager->capture_depth > 0) return;
    const uint32_t number = take(pager);
    if (number == TP_TIMERS) return;
    tp_timer *timer = &pager->timing.timers[number];
    if (pager->dev->ops->event_record(pager->dev, timer->begin, op->stream, NULL) != TP_OK) {
        put(&pager->timing, number);
        return;
    }
    timer->class_idx = op->class_idx;
    timer->thread = &tp_thread_waited_ns;
    timer->stream = op->stream;
    timer->partly = false;
    timer->running = true;
    pager->timing.running_count++;
    pager->steps.record.classes[op->class_idx].pending_count++;
    op->timer = number + 1;
}

void tp_timing_resume(tp_pager *pager) {
    if (pager->timing.running_count == 0) return;
    for (uint32_t i = 0; i < pager->timing.made_count; i++) {
        tp_timer *timer = &pager->timing.timers[i];
        if (!timer->running || timer->thread != &tp_thread_waited_ns) continue;
        /* One that cannot be begun anew counts the wait too: no worse than not to know. */
        (void)pager->dev->ops->event_record(pager->dev, timer->begin, timer->stream, NULL);
        timer->partly = true;
    }
}

/* The device had come to where the time begins before its kernels were launched: it may have waited for them,
 * so that they take less than what will be found. */
static bool is_starved(tp_pager *pager, const tp_timer *timer) {
    bool done = true;
    const tp_status status =
        pager->dev->ops->event_query(pager->dev, timer->begin, &done, NULL);
    return status != TP_OK || done;
}

/* The timer waits for the device, or there is no sample. */
static void end_timer(tp_pager *pager, uint32_t number, bool counts) {
    tp_timing *timing = &pager->timing;
    tp_timer *timer = &timing->timers[number];
    timer->running = false;
    timer->partly = timer->partly || is_starved(pager, timer);
    if (counts && pager->capture_depth == 0 &&
        pager->dev->ops->event_record(pager->dev, timer->end, timer->stream, NULL) == TP_OK) {
        const uint32_t place = timing->waiting_first + timing->waiting_count++;
        timing->waiting[place % TP_TIMERS] = (uint16_t)number;
        if (timing->waiting_count == TP_TIMERS / 2) tp_pager_wake(pager);
        return;
    }
    pager->steps.record.classes[timer->class_idx].pending_count--;
    put(timing, number);
}

/* Whether what comes behind the operator that was recorded last is to be timed, as far as it is known
 * what comes. A program that repeats nothing never gets so far. */
static bool gap_wanted(tp_pager *pager, const tp_op *op) {
    tp_timing *timing = &pager->timing;
    const tp_position where = tp_steps_where(&pager->steps);
    if (where.step == NULL || where.lost || where.op >= where.step->trace.op_count) {
        if (timing->lost_gaps < LOST_GAPS) timing->lost_gaps++;
        return timing->lost_gaps < LOST_GAPS || op->recorded_total % SPARSE == 0;
    }
    timing->lost_gaps = 0;
    return class_wanted(pager, op, where.step->gap_idx[where.op]);
}

static void start_gap(tp_pager *pager, const tp_op *op) {
    tp_timing *timing = &pager->timing;
    const uint64_t total = recorded_total(pager);
    if (timing->gap != 0 || op->recorded_total != total || !gap_wanted(pager, op)) return;
    if (pager->dev->ops->event_create_timed == NULL || timing->off || pager->capture_depth > 0)
        return;
    const uint32_t number = take(pager);
    if (number == TP_TIMERS) return;
    tp_timer *timer = &timing->timers[number];
    if (pager->dev->ops->event_record(pager->dev, timer->begin, op->stream, NULL) != TP_OK) {
        put(timing, number);
        return;
    }
    timer->stream = op->stream;
    timer->thread = &tp_thread_waited_ns;
    timer->partly = false;
    timer->inner_ns = 0;
    timer->class_idx = 0;
    timing->gap = number + 1;
    timing->gap_after = total;
    timing->gap_waited_ns = tp_thread_waited_ns;
}

void tp_timing_reach(tp_pager *pager, const tp_op *op, tp_stream stream) {
    tp_timing *timing = &pager->timing;
    if (timing->gap == 0) return;
    const uint32_t number = timing->gap - 1;
    tp_timer *timer = &timing->timers[number];
    timing->gap = 0;
    timer->class_idx = tp_record_gap(&pager->steps.record);
    pager->steps.record.classes[timer->class_idx].pending_count++;
    end_timer(pager, number,
              timer->class_idx != 0 && op->recorded_total == timing->gap_after + 1 &&
                  timer->stream == stream && timer->thread == &tp_thread_waited_ns &&
                  timing->gap_waited_ns == tp_thread_waited_ns);
}

void tp_timing_stop(tp_pager *pager, tp_op *op) {
    if (op->record != 0 && !pager->host_kernels) start_gap(pager, op);
    if (op->timer == 0 && op->started_ns == 0) return;
    uint64_t inner_ns = 0;
    /* Over HOST it takes what the link takes. */
    const bool known = inner_time(pager, op, &inner_ns) && !tp_access_over_host(op);
    if (op->started_ns != 0 && known) {
        const uint64_t ns = tp_pager_now(pager) - op->started_ns;
        const uint64_t other_ns = inner_ns + (tp_thread_waited_ns - op->waited_ns);
        tp_record_sample(&pager->steps.record, op->class_idx, tp_sub_floor(ns, other_ns),
                         false);
    }
    op->started_ns = 0;
    if (op->timer == 0) return;
    const uint32_t number = op->timer - 1;
    op->timer = 0;
    pager->timing.running_count--;
    pager->timing.timers[number].inner_ns = inner_ns;
    end_timer(pager, number, known);
}

/* In order, so that it asks for one that is not complete at most: they mostly end in order. */
bool tp_timing_collect(tp_pager *pager) {
    tp_timing *timing = &pager->timing;
    const tp_device_ops *ops = pager->dev->ops;
    for (uint32_t i = 0; timing->waiting_count > 0; i++) {
        if (i == COLLECTED_MAX) return true;
        const uint32_t number = timing->waiting[timing->waiting_first];
        const tp_timer *timer = &timing->timers[number];
        bool done = false;
        const tp_status status = ops->event_query(pager->dev, timer->end, &done, NULL);
        if (status == TP_OK && !done) return false;
        uint64_t ns = 0;
        if (status == TP_OK &&
            ops->event_elapsed(pager->dev, timer->begin, timer->end, &ns, NULL) == TP_OK)
            tp_record_sample(&pager->steps.record, timer->class_idx,
                             tp_sub_floor(ns, timer->inner_ns), timer->partly);
        pager->steps.record.classes[timer->class_idx].pending_count--;
        timing->waiting_first = (timing->waiting_first + 1) % TP_TIMERS;
        timing->waiting_count--;
        put(timing, number);
    }
    return false;
}

void tp_timing_fini(tp_pager *pager) {
    tp_device *dev = pager->dev;
    for (uint32_t i = 0; i < TP_TIMERS; i++) {
        const tp_timer *timer = &pager->timing.timers[i];
        if (timer->begin != NULL) dev->ops->event_destroy(dev, timer->begin);
        if (timer->end != NULL) dev->ops->event_destroy(dev, timer->end);
    }
}
