#include "pager/period.h"

#include <stdlib.h>
#include <string.h>

enum {
    HELD_OPS = 64,   /* for how long a period must hold at least */
    BLIND_OPS = 4096 /* and one in which no weight is named */
};

#define FACTOR 0x01000193u

/* FACTOR to the power of TP_PERIOD_GRAM: how the oldest token is taken out of the hash. */
static uint32_t oldest_factor(void) {
    uint32_t power = 1;
    for (int i = 0; i < TP_PERIOD_GRAM; i++) power *= FACTOR;
    return power;
}

void tp_period_fini(tp_period *period) {
    free(period->places);
    memset(period, 0, sizeof *period);
}

bool tp_period_reset(tp_period *period) {
    tp_period_place *places = period->places;
    if (places == NULL) places = malloc(TP_PERIOD_PLACES * sizeof *places);
    if (places == NULL) return false;
    memset(places, 0, TP_PERIOD_PLACES * sizeof *places);
    *period = (tp_period){.places = places};
    return true;
}

uint32_t tp_period_op(tp_period *period, uint32_t token, bool weighted) {
    const uint32_t now = ++period->count;
    uint32_t *oldest = &period->tokens[now % TP_PERIOD_GRAM];
    period->rolling = period->rolling * FACTOR + token - *oldest * oldest_factor();
    *oldest = token;
    if (now < TP_PERIOD_GRAM) return 0;
    const uint32_t hash = period->rolling * 0x9E3779B1u;
    tp_period_place *place = &period->places[hash >> 16];
    const uint32_t distance = place->op != 0 && place->hash == hash ? now - place->op : 0;
    *place = (tp_period_place){hash, now};
    /* What is not found may have lost its place to another: some of that proves nothing. */
    if (distance == 0) period->gaps++;
    const bool gap = distance == 0 && period->gaps < period->held_for / 4 + TP_PERIOD_GRAM;
    if (!gap && distance != period->candidate) {
        period->candidate = distance;
        period->held_for = period->weighted = period->gaps = 0;
        return 0;
    }
    if (period->candidate == 0) return 0;
    if (gap) return 0;
    period->held_for++;
    period->weighted += weighted;
    if (period->held_for < period->candidate || period->held_for < HELD_OPS) return 0;
    if (period->weighted == 0 && period->held_for < BLIND_OPS) return 0;
    return period->candidate;
}
