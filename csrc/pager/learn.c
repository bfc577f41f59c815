#include "pager/learn.h"

#include "pager/access.h"
#include "pager/park.h"

static bool learning(const tp_pager *pager) {
    return tp_steps_on(&pager->steps) && !pager->abandoned;
}

void tp_learn_start(tp_pager *pager) {
    if (tp_steps_on(&pager->steps) || !tp_steps_start(&pager->steps)) return;
    for (tp_link *link = pager->live.next; link != &pager->live; link = link->next) {
        tp_block *block = TP_CONTAINER(link, tp_block, lru);
        if (block->parking == NULL) tp_learn_born(pager, block, true); /* else see below */
    }
    for (tp_link *link = pager->dropped.next; link != &pager->dropped; link = link->next) {
        tp_dropped *it = TP_CONTAINER(link, tp_dropped, link);
        if (it->stage == TP_PARK_BACK) continue; /* its block stands for it */
        tp_steps_born(&pager->steps, &it->identity, it->requested_bytes);
        it->identity.dropped = true;
    }
}

void tp_learn_stop(tp_pager *pager) {
    if (tp_steps_on(&pager->steps)) tp_steps_stop(&pager->steps);
}

void tp_learn_born(tp_pager *pager, tp_block *block, bool told) {
    block->identity.serial = 0;
    if (!told || !learning(pager) || block->slab) return;
    tp_steps_born(&pager->steps, &block->identity, block->requested_bytes);
}

void tp_learn_freed(tp_pager *pager, tp_block *block) {
    if (learning(pager)) tp_steps_freed(&pager->steps, &block->identity);
}

void tp_learn_moved(tp_pager *pager, tp_identity *from, tp_identity *to, bool dropped) {
    tp_steps_moved(&pager->steps, from, to);
    to->dropped = dropped;
}

void tp_learn_gone(tp_pager *pager, tp_identity *identity) {
    if (learning(pager)) tp_steps_freed(&pager->steps, identity);
}

void tp_learn_forget(tp_pager *pager, tp_block *block) { tp_learn_freed(pager, block); }

void tp_learn_begin(tp_pager *pager, tp_op *op, const tp_access *accesses, size_t count,
                    tp_stream stream) {
    op->record = 0;
    if (count == 0 || op->rerun || !learning(pager)) return;
    tp_steps *steps = &pager->steps;
    bool begun = false;
    for (size_t i = 0; i < count; i++) {
        tp_block *block = tp_block_live(pager, accesses[i].addr);
        if (block == NULL || block->slab) continue;
        if (!begun) {
            uint32_t lane = 0;
            if (tp_markers_lane(&pager->markers, stream, &lane, NULL) != TP_OK) lane = 0;
            begun = tp_steps_op_begin(steps, op->name, op->backward, lane, tp_pager_now(pager));
            if (!begun) return;
        }
        tp_steps_operand(steps, &block->identity, accesses[i].write);
    }
    if (!begun) return;
    op->record = steps->record.number;
    op->recorded = steps->record.op_count - 1;
    op->recorded_total = steps->record.ops_before + steps->record.op_count;
    op->recorded_storages = steps->record.storage_count;
    op->recorded_turn = steps->record.turn;
    op->class_idx = tp_steps_op_ready(steps);
    tp_timing_reach(pager, op, stream);
}

void tp_learn_started(tp_pager *pager, tp_op *op) {
    if (op->record != 0 && learning(pager)) tp_timing_start(pager, op);
}

void tp_learn_end(tp_pager *pager, tp_op *op, const tp_addr *outputs, size_t output_count) {
    if (!pager->abandoned) tp_timing_stop(pager, op);
    if (op->record == 0) return;
    if (learning(pager)) {
        for (size_t i = 0; i < output_count; i++) {
            tp_block *block = tp_block_live(pager, outputs[i]);
            if (block == NULL || block->slab) continue;
            tp_steps_result(&pager->steps, op->recorded, op->record, &block->identity);
        }
        if (op->recipe && !op->detached)
            tp_steps_note_recipe(&pager->steps, op->recorded, op->record, op->recorded_storages,
                                 op->recorded_turn);
        tp_steps_op_end(&pager->steps, op->record);
    }
    op->record = 0;
}

void tp_learn_region(tp_pager *pager, const tp_access *accesses, size_t count,
                     tp_stream stream) {
    tp_op op = {.stream = stream};
    tp_learn_begin(pager, &op, accesses, count, stream);
    tp_learn_end(pager, &op, NULL, 0);
}
