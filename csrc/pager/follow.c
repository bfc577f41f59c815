#include "pager/follow.h"

#include <string.h>

enum {
    NEAR = 3,     /* operators in a row that must be alike to be found near by */
    WINDOW = 128, /* how far ahead near is */
    BEHIND = 32,  /* and how far back, for who has run on along operators of the same kind */
    TRY_AGAIN = 32,
    STRANGE =
        2, /* operators on other weights in a row, after which their layer is looked for */
    CHAIN_MAX = 64,
    FITS_EXACTLY = 2, /* what an operator adds to the score */
    FITS = 1
};

static void push(uint32_t list[TP_GRAM], uint32_t newest) {
    memmove(list, list + 1, (TP_GRAM - 1) * sizeof *list);
    list[TP_GRAM - 1] = newest;
}

void tp_recent_push(tp_recent *recent, uint32_t kind, uint32_t like, uint32_t weights) {
    push(recent->kinds, kind);
    push(recent->likes, like);
    push(recent->weights, weights);
    if (recent->count < TP_GRAM) recent->count++;
}

void tp_follow_begin(tp_follow *follow, uint32_t score) {
    *follow = (tp_follow){.score = score, .from_start = true, .exact = true};
}

/* How many of the last `count` operators are alike to those that end at `op`. */
static uint32_t alike(const tp_step *step, const tp_recent *recent, uint32_t op,
                      uint32_t count) {
    uint32_t same = 0;
    for (uint32_t i = 0; i < count && i <= op; i++)
        same += step->likes[op - i] == recent->likes[TP_GRAM - 1 - i];
    return same;
}

/* How many of the last operators were of the same kinds, on the same weights, as those that end at
 * `op`. */
static uint32_t same_weights(const tp_step *step, const tp_recent *recent, uint32_t op) {
    uint32_t same = 0;
    for (uint32_t i = 0; i < recent->count && i <= op; i++) {
        const uint32_t at = TP_GRAM - 1 - i;
        same += step->kinds[op - i] == recent->kinds[at] &&
                step->weights[op - i] == recent->weights[at];
    }
    return same;
}

static uint32_t find_near(const tp_follow *follow, const tp_step *step,
                          const tp_recent *recent) {
    if (recent->count < NEAR) return TP_NO_OP;
    const uint32_t like = recent->likes[TP_GRAM - 1];
    const uint32_t begin = follow->position > BEHIND ? follow->position - BEHIND : 0;
    uint32_t end = follow->position + WINDOW;
    if (end > step->trace.op_count) end = step->trace.op_count;
    uint32_t found = TP_NO_OP, most = 0;
    for (uint32_t op = begin; op < end; op++) {
        if (step->likes[op] != like || alike(step, recent, op, NEAR) != NEAR) continue;
        const uint32_t same = same_weights(step, recent, op);
        const bool nearer = found == TP_NO_OP || found < follow->position;
        if (same < most || (same == most && !nearer)) continue;
        found = op;
        most = same;
    }
    return found;
}

/* Among the places where the last operators were of these kinds: the one where most were of these
 * sizes too, and used these weights; of equals the nearest ahead, else the first. */
static uint32_t find_anywhere(const tp_follow *follow, const tp_step *step,
                              const tp_recent *recent) {
    if (recent->count < TP_GRAM) return TP_NO_OP;
    const uint32_t chain = tp_step_gram(recent->kinds) & step->gram_mask;
    uint32_t best = TP_NO_OP, best_same = 0, left = CHAIN_MAX;
    for (uint32_t op = step->gram_head[chain]; op != TP_NO_OP && left > 0;
         op = step->gram_next[op], left--) {
        const uint32_t first = op - (TP_GRAM - 1);
        if (memcmp(&step->kinds[first], recent->kinds, sizeof recent->kinds) != 0) continue;
        const uint32_t same =
            alike(step, recent, op, TP_GRAM) + 2 * same_weights(step, recent, op);
        const bool nearer = best < follow->position && op >= follow->position;
        if (best == TP_NO_OP || same > best_same || (same == best_same && nearer)) {
            best = op;
            best_same = same;
        }
    }
    return best;
}

static void fits(tp_follow *follow, const tp_step *step, uint32_t like) {
    const bool exactly = step->likes[follow->position] == like;
    follow->exact = follow->exact && exactly;
    follow->loose = exactly ? 0 : follow->loose + 1;
    follow->score += exactly ? FITS_EXACTLY : FITS;
    if (follow->score > TP_SCORE_MAX) follow->score = TP_SCORE_MAX;
    follow->position++;
}

static void move_to(tp_follow *follow, uint32_t op) {
    follow->position = op + 1;
    follow->loose = follow->strange = 0;
    follow->from_start = follow->exact = false;
}

/* Some operators have fitted, but for their sizes: perhaps others of their kind are meant. */
static void look_around(tp_follow *follow, const tp_step *step, const tp_recent *recent) {
    const uint32_t found = find_near(follow, step, recent);
    if (found != TP_NO_OP) move_to(follow, found);
}

/* Or but for their weights: another layer may be meant. */
static void look_for_weights(tp_follow *follow, const tp_step *step, const tp_recent *recent) {
    const uint32_t now = same_weights(step, recent, follow->position - 1);
    uint32_t found = find_near(follow, step, recent);
    if (found == TP_NO_OP || same_weights(step, recent, found) <= now)
        found = find_anywhere(follow, step, recent);
    if (found != TP_NO_OP && same_weights(step, recent, found) > now) move_to(follow, found);
}

static void note_weights(tp_follow *follow, const tp_step *step, const tp_recent *recent) {
    const uint32_t weights = recent->weights[TP_GRAM - 1];
    const uint32_t own = step->weights[follow->position - 1];
    if (weights == 0 || own == 0) return;
    follow->strange = weights == own ? 0 : follow->strange + 1;
}

bool tp_follow_op(tp_follow *follow, const tp_step *step, const tp_recent *recent,
                  bool search) {
    const uint32_t kind = recent->kinds[TP_GRAM - 1], like = recent->likes[TP_GRAM - 1];
    const bool on = follow->astray == 0 && follow->position < step->trace.op_count;
    if (on && step->kinds[follow->position] == kind) {
        fits(follow, step, like);
        note_weights(follow, step, recent);
        if (search && follow->loose % TRY_AGAIN == NEAR) look_around(follow, step, recent);
        if (search && follow->strange % TRY_AGAIN == STRANGE)
            look_for_weights(follow, step, recent);
        return true;
    }
    follow->from_start = follow->exact = false;
    follow->score /= 2;
    if (follow->astray < UINT32_MAX) follow->astray++;
    if (!search) return false;
    uint32_t found = find_near(follow, step, recent);
    if (found == TP_NO_OP) found = find_anywhere(follow, step, recent);
    if (found == TP_NO_OP) return false;
    follow->position = found;
    follow->astray = follow->strange = 0;
    fits(follow, step, like);
    follow->exact = false;
    return true;
}
