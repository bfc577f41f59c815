/* readahead: fills ahead of need, for programs that go through their memory in the order, or in the
 * reverse order, in which they used it last.
 *
 * A forward pass, a backward pass, an optimizer step and a decoding loop all do: what was used next
 * to the block missed now is needed next. The order of last use is the list of live blocks itself.
 * The direction is the trend of the last misses' positions, as operating systems detect sequential
 * reads; a block brought ahead counts as a miss when it is touched, so that a run goes on.
 * Only memory that is free is used, and no more than a window of blocks not touched yet is out.
 *
 * Trend: pure. The rest expects the lock and may drop it where said. */
#ifndef TP_PAGER_READAHEAD_H
#define TP_PAGER_READAHEAD_H

#include <stdint.h>

enum { TP_TREND_LAST = 4 };

/* The use clock at which the last missed blocks had been used before. */
typedef struct tp_trend {
    uint64_t stamps[TP_TREND_LAST];
    uint32_t count; /* misses seen */
} tp_trend;

/* Notes a miss of a block last used at `stamp`. +1: later and later ones, -1: earlier and earlier
 * ones are missed, 0: not known yet. */
int tp_trend_note(tp_trend *trend, uint64_t stamp);

struct tp_pager;
struct tp_block;

/* Collects what an operator's touch of `block`, in HOST or brought ahead, says is needed next; to be
 * called before the touch changes the block's place in the order. */
void tp_readahead_note(struct tp_pager *pager, struct tp_block *block);
/* Starts the fills collected. May drop the lock. */
void tp_readahead_start(struct tp_pager *pager);
/* The block is no longer ahead of its use: touched, evicted or freed. */
void tp_readahead_forget(struct tp_pager *pager, struct tp_block *block);

#endif
