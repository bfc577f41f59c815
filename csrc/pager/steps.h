/* steps: what the program has done, what it does now and what it will do next.
 *
 * It is told of every operator, birth and free while the hook is armed in full (pager/learn does
 * the telling), writes the step that runs into a record, finds where steps begin, keeps a small
 * number of complete steps, one for each kind, and follows the program along them.
 *
 * Where steps begin: torchpager.step() says so; or, unless that was ever called, the end of an
 * optimizer's step does; or, while neither has come for long, the period of the operators. An
 * optimizer's step ends with its last operator, so that two optimizers in a row are one step.
 *
 * Kinds: a step whose operators are of the same kinds in the same order as those of a remembered
 * one, on about as many bytes, is another run of it, and only refreshes its times; and, once they
 * have been others twice in a row, its recipes. Any other is
 * remembered in its own right. When there is no place left, or all together take more than
 * a bound, one that has run only once goes first: so an odd batch takes nothing away from the
 * steps that come again and again. A step takes about 70 bytes an operator, 20 an operand and 40 a
 * block: half a megabyte for one of 3,000 operators.
 *
 * ---- For the executor ---------------------------------------------------------------------
 *
 * Everything here expects the pager's lock, except reading a step's trace while holding it.
 *
 *   tp_steps_take_new   polled by the pager's thread: a step to plan for. It comes held: plan with
 *                       the lock dropped, then tp_steps_give.
 *   tp_steps_where      in tp_op_begin, after tp_learn_begin: where the program is.
 *   tp_steps_block      a live block's number in a step; tp_steps_live the reverse.
 *   tp_steps_next_use   when a block will be used next.
 *   tp_steps_expected   the step that will probably come after this one.
 *
 * Pure: no device. */
#ifndef TP_PAGER_STEPS_H
#define TP_PAGER_STEPS_H

#include "pager/follow.h"
#include "pager/period.h"
#include "pager/record.h"
#include "pager/step.h"

/* Who says that a step ends. */
typedef enum tp_step_mark {
    TP_STEP_ASKED,           /* torchpager.step() */
    TP_STEP_OPTIMIZER_BEGIN, /* an optimizer's step begins */
    TP_STEP_OPTIMIZER_END
} tp_step_mark;

/* Where the program is. */
typedef struct tp_position {
    tp_step *step; /* NULL: nothing is known of this step */
    /* The operator in progress, or, between two, the one that ran last; TP_NO_OP: the step has
     * not begun its first. While the program is astray: the last one that fitted. */
    uint32_t op;
    bool lost; /* it has been astray for so long that `op` means nothing */
    bool
        exact; /* the last operators had operands of the sizes in the trace, as far as it seems */
} tp_position;

typedef struct tp_steps {
    tp_record record;
    tp_step *at[TP_KINDS_MAX]; /* NULL: a free place */
    tp_follow follows[TP_KINDS_MAX];
    size_t bytes, bytes_max; /* that the remembered steps take, and may */
    uint32_t count;          /* places below it may be taken */
    uint32_t best;           /* the one that is followed; TP_KINDS_MAX: none */
    uint32_t last;           /* that ran last from its first to its last operator; likewise */
    bool matched;            /* the operator that was recorded last is on it */
    tp_recent recent;        /* operators */
    tp_period period;
    bool seeking;        /* for the period */
    uint32_t countdown;  /* 1 + operators until the step ends, by the period; 0: not known */
    uint32_t period_ops; /* the same for the step after it */
    uint64_t asked_count, optimizer_count; /* marks so far */
    uint64_t unmarked_ops;                 /* operators since the last mark that counted */
    uint64_t longest_ops;                  /* of a step that a mark ended */
    bool trains;                           /* a backward pass or an optimizer has been seen */
    bool in_optimizer, ending; /* ending: with the next operator outside of optimizers */
    uint64_t completed_count;  /* steps of all kinds */
    uint64_t number;           /* given last to a step */
    uint64_t ended_began_ns;   /* of the step that has just ended; 0: not known */
    uint64_t lost_count, resync_count; /* for tests and figures */
} tp_steps;

void tp_steps_init(tp_steps *steps, const tp_record_limits *limits);
/* No step may be held. */
void tp_steps_fini(tp_steps *steps);

/* ---- telling: called by pager/learn, in this order for each operator --------------------------- */

/* Begins to record, in the middle of a step; what is remembered stays. Every live block is told
 * of next, with tp_steps_born. False: host memory is short. */
bool tp_steps_start(tp_steps *steps);
void tp_steps_stop(tp_steps *steps);
static inline bool tp_steps_on(const tp_steps *steps) { return tp_record_on(&steps->record); }

/* O(1); binds the block if it is the one that the step has next. */
void tp_steps_born(tp_steps *steps, tp_identity *identity, uint64_t bytes);
void tp_steps_freed(tp_steps *steps, tp_identity *identity);
/* From now on `to` stands for what `from` stood for, which is forgotten. O(TP_KINDS_MAX). */
void tp_steps_moved(tp_steps *steps, tp_identity *from, tp_identity *to);
/* An operator begins: may end the step first, in O(live blocks), or O(operands) for a step that
 * is new. Then its operands. Then ready, which moves the position on: O(TP_KINDS_MAX + operands).
 * begin: false, no operands and no ready, when the step is too long to be recorded. */
bool tp_steps_op_begin(tp_steps *steps, uint32_t name, bool backward, uint32_t stream,
                       uint64_t now_ns);
void tp_steps_operand(tp_steps *steps, tp_identity *identity, bool write);
/* Returns the operator's class. */
uint32_t tp_steps_op_ready(tp_steps *steps);
/* `op`, `number`: of the record, when it began. */
void tp_steps_result(tp_steps *steps, uint32_t op, uint64_t number, tp_identity *identity);
/* As tp_record_note_recipe. */
void tp_steps_note_recipe(tp_steps *steps, uint32_t op, uint64_t number, uint32_t storages,
                          uint64_t turn);
void tp_steps_op_end(tp_steps *steps, uint64_t number);
void tp_steps_mark(tp_steps *steps, tp_step_mark mark);
/* Ends the step that an optimizer has ended, without waiting for the next operator. */
void tp_steps_settle(tp_steps *steps);

/* ---- asking: for the executor ------------------------------------------------------------ */

/* A step whose trace nobody has seen: complete, new or with other times than before. NULL: none.
 * It is held; `fresh` is taken from it. The caller gives it back. O(TP_KINDS_MAX). */
tp_step *tp_steps_take_new(tp_steps *steps);
/* All of them count as new: their traces are as before. */
void tp_steps_renew(tp_steps *steps);
/* While a step is held its trace does not change and it is not forgotten. O(1). */
void tp_steps_hold(tp_step *step);
void tp_steps_give(tp_step *step);
/* A step as it was numbered, or NULL if it is forgotten or has other times now. O(TP_KINDS_MAX). */
tp_step *tp_steps_find(const tp_steps *steps, uint64_t number);

/* O(1). */
tp_position tp_steps_where(const tp_steps *steps);
/* The step that follows `step` as a rule; NULL: not known. O(TP_KINDS_MAX). */
tp_step *tp_steps_expected(const tp_steps *steps, const tp_step *step);
/* The last complete step, NULL: there is none yet. */
tp_step *tp_steps_last(const tp_steps *steps);

/* The block of the step's trace that a live block stands for; TP_NO_OP: none is known. O(1). */
static inline uint32_t tp_steps_block(const tp_step *step, const tp_identity *identity) {
    return identity->bound[step->slot] - 1u; /* 0 becomes TP_NO_OP */
}
/* The live block that stands for a block of the trace; NULL: it is not born, or none is known.
 * The identity is part of a tp_block. O(1). */
static inline tp_identity *tp_steps_live(const tp_step *step, uint32_t block) {
    return step->live[block];
}
/* The first operator from `op` on that uses the block. At or above op_count: it is used no more in
 * this step, but by operator (answer - op_count) of the next of its kind, for which it must live
 * on. TP_NO_OP: never. O(log uses). */
uint32_t tp_steps_next_use(const tp_step *step, uint32_t block, uint32_t op);

#endif
