/* readahead: fills ahead of need, for programs that go through their memory in the order, or in the
 * reverse order, in which they used it last.
 *
 * A forward pass, a backward pass, an optimizer step and a decoding loop all do: what was used next
 * to the block missed now is needed next. The order of last use is the list of live blocks itself.
 * As operating systems tell sequential reads of several files apart, a miss belongs to the run whose
 * last miss was nearest in that order (an optimizer goes through parameters and through moments at
 * once), and a run's direction is the steady trend of its last misses. A block brought ahead counts as a
 * miss when it is touched, so that a run goes on; what a run brought and has passed by untouched, or when it
 * has ended, is forgotten and becomes an ordinary victim. Only memory that is free is used, and no more than a window of it.
 *
 * Runs: pure. The rest expects the lock and may drop it where said. */
#ifndef TP_PAGER_READAHEAD_H
#define TP_PAGER_READAHEAD_H

#include <stdbool.h>
#include <stdint.h>

#include "base/list.h"

enum { TP_RUNS_MAX = 4, TP_RUN_LAST = 4 };

/* The use clock at which the last blocks missed in a run had been used before. */
typedef struct tp_run {
    uint64_t stamps[TP_RUN_LAST];
    uint32_t count;     /* misses in it so far; 0: not in use */
    int trend;          /* how steadily they go up or down, -4 to 4 */
    uint64_t last_note; /* the note that was its last */
    uint64_t id;        /* of this run, not of its place */
} tp_run;

typedef struct tp_runs {
    tp_run at[TP_RUNS_MAX];
    uint64_t note_count, run_count;
} tp_runs;

/* Notes a miss of a block last used at `stamp`. The direction of its run: +1 later and later ones are
 * missed, -1 earlier and earlier ones, 0 not known yet. *run_id: which run it is. */
int tp_runs_note(tp_runs *runs, uint64_t stamp, uint64_t *run_id);
/* True if that run still goes on. */
bool tp_runs_alive(const tp_runs *runs, uint64_t run_id);

struct tp_pager;
struct tp_block;

/* Collects what an operator's touch of `block`, in HOST or brought ahead, says is needed next; to be
 * called once per operator, before the touch changes the block's place in the order. */
void tp_readahead_note(struct tp_pager *pager, struct tp_block *block);
/* Starts the fills collected. May drop the lock. */
void tp_readahead_start(struct tp_pager *pager);
/* The block is no longer ahead of its use: touched, evicted or freed. */
void tp_readahead_forget(struct tp_pager *pager, struct tp_block *block);

#endif
