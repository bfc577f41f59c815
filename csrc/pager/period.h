/* period: finds out after how many operators a program repeats itself, for programs that say
 * nothing of their steps (inference, generation).
 *
 * Each operator has a token (tp_record_op.token): its name, and which long-lived storages, its
 * weights, it uses. So the layers of a network differ, though their operators are the same, and
 * what repeats is the whole. When the last operators have been seen before, in the same order,
 * the distance is a candidate; once it has held for as many operators as it is long, and for a few
 * dozen, it is the period. Where no operator names anything long-lived it must hold longer, lest a
 * layer be taken for a step.
 *
 * Bounded, pure; expects the pager's lock. */
#ifndef TP_PAGER_PERIOD_H
#define TP_PAGER_PERIOD_H

#include <stdbool.h>
#include <stdint.h>

enum { TP_PERIOD_GRAM = 16, TP_PERIOD_PLACES = 1 << 16 };

typedef struct tp_period_place {
    uint32_t hash, op;
} tp_period_place;

typedef struct tp_period {
    tp_period_place *places;         /* TP_PERIOD_PLACES, by hash; NULL until it is needed */
    uint32_t tokens[TP_PERIOD_GRAM]; /* the last ones, by number modulo TP_PERIOD_GRAM */
    uint32_t rolling;                /* their hash */
    uint32_t count;                  /* operators since reset */
    uint32_t candidate, held_for;    /* a distance; for how many operators it has held */
    uint32_t gaps;                   /* of those, how many were not found at all */
    uint32_t weighted;               /* and how many named something long-lived */
} tp_period;

void tp_period_fini(tp_period *period);
/* Begins anew. False: host memory is short. */
bool tp_period_reset(tp_period *period);
/* An operator; `weighted`: it names something long-lived. Returns the period, or 0: not found. */
uint32_t tp_period_op(tp_period *period, uint32_t token, bool weighted);

#endif
