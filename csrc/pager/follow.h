/* follow: where the program is in a remembered step, operator by operator.
 *
 * As long as each operator is of the kind that the trace has next, the position moves on. When
 * one is not, the program has left the trace: it skips operators, or runs others. Then nothing
 * moves until it is found again: near by, by the last three operators being alike in kind and
 * sizes; or anywhere, by the last eight being of the same kinds. Of several places the one where most of
 * them used the same weights, then the nearest ahead: the layers of a network are alike but for that.
 * It is also looked for when three in a row have other sizes, or two of those that use weights have
 * used others.
 *
 * Pure; expects the pager's lock. */
#ifndef TP_PAGER_FOLLOW_H
#define TP_PAGER_FOLLOW_H

#include "pager/step.h"

enum {
    TP_ASTRAY_MAX = 16, /* after so many operators that fit nowhere the program is lost */
    TP_SCORE_MAX = 32
};

/* The last TP_GRAM operators of the program, the newest last. */
typedef struct tp_recent {
    uint32_t kinds[TP_GRAM], likes[TP_GRAM], weights[TP_GRAM];
    uint32_t count; /* since the step began, at most TP_GRAM */
} tp_recent;

typedef struct tp_follow {
    uint32_t position; /* the operator that comes next; op_count: the step is over */
    uint32_t astray;   /* operators since the program left the trace; 0: it is on it */
    uint32_t score;    /* how well the last ones fitted, at most TP_SCORE_MAX */
    uint32_t loose;    /* of those, in a row, how many had operands of other sizes */
    uint32_t strange;  /* likewise, how many of those that have weights used other ones */
    bool from_start;   /* it has not left the trace in this step */
    bool exact;        /* nor had any operator operands of other sizes */
} tp_follow;

void tp_recent_push(tp_recent *recent, uint32_t kind, uint32_t like, uint32_t weights);

/* A step begins. `score`: more than 0 for the one that is expected. */
void tp_follow_begin(tp_follow *follow, uint32_t score);
/* It is not followed any more in this step, unless the program is found on it again. O(1). */
static inline void tp_follow_lose(tp_follow *follow) {
    if (follow->astray >= TP_ASTRAY_MAX) return;
    follow->astray = TP_ASTRAY_MAX;
    follow->score = 0;
    follow->from_start = follow->exact = false;
}
/* The program runs an operator, the newest in `recent`. True: it is the one before `position` now.
 * `search`: the trace may be searched, which takes longer. */
bool tp_follow_op(tp_follow *follow, const tp_step *step, const tp_recent *recent, bool search);

#endif
