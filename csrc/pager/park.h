/* park: storages whose bytes wait in host memory, without a block.
 *
 * An evicted block keeps its address, which maps the host frame, for whoever has a pointer. That costs
 * the driver a millisecond for 64 MiB there and back, one mapping at a time, and the memory that
 * serves others meanwhile has to be mapped for them. A storage that nobody can reach needs no
 * address: its block is written back like any other, and then it is freed, so that its memory
 * serves the next block of its size as it is; the host frames stay with a note (tp_dropped). When
 * the bytes are needed they are copied into a new block, which takes the place of the one that
 * went. Who is about to use them waits for the copy on the device, not on the host.
 *
 *     GOING ──── written back, and proven ───▶ GONE ──── a block, and its copy queued ───▶ BACK
 *       └── given up, or unparked:                └── COMING: a thread is looking for memory ──┘
 *           the block is as it was, BACK
 *
 * While it is GOING the block is live for the pager, and for nobody else. That nobody has its
 * address is the business of who parks. Expects the lock; "may drop" as noted. */
#ifndef TP_PAGER_PARK_H
#define TP_PAGER_PARK_H

#include "pager/drop.h"

typedef enum tp_park_stage {
    TP_PARK_NONE, /* it is dropped: nothing is kept */
    TP_PARK_GOING,
    TP_PARK_GONE,
    TP_PARK_COMING,
    TP_PARK_BACK
} tp_park_stage;

/* The frames that a storage's bytes are in, by extent. */
typedef struct tp_parked {
    tp_link link;     /* in tp_pager.homing, until the copy out of them is complete */
    tp_marker copied; /* behind that copy */
    tp_marker left;   /* behind whoever may have written to them through the block's address */
    uint32_t count;
    tp_frame *frames[];
} tp_parked;

/* Begins to park the block that begins at `addr`. TP_BUSY: as tp_block_drop, or its mapping is being changed.
 * TP_NO_HOST_MEMORY: there is none for it. */
TP_MUST_USE tp_status tp_block_park(tp_pager *pager, tp_addr addr, tp_dropped **out,
                                    tp_error *error);
/* An extent of a block that is GOING has been written back, and proven to be. */
void tp_park_extent(tp_pager *pager, tp_extent *extent);
/* Not all of the block can go: it keeps its address, and what of it is being evicted goes by itself. */
void tp_park_give_up(tp_pager *pager, tp_block *block);
/* The bytes will be needed soon. */
void tp_park_want(tp_pager *pager, tp_dropped *dropped);
/* Brings what is wanted, in order, as far as there is memory, behind what `stream` holds. May drop the
 * lock. */
void tp_park_bring_wanted(tp_pager *pager, tp_stream stream);
/* The storage needs its block: *out is where it begins. `stream` waits for the bytes, or the calling thread if
 * `now`. Frees `dropped`, unless it fails. May drop the lock and wait. */
TP_MUST_USE tp_status tp_block_unpark(tp_pager *pager, tp_dropped *dropped, tp_stream stream,
                                      bool now, tp_addr *out, tp_oom *oom, tp_error *error);
/* The storage is gone. Frees `dropped`, at once or soon. */
void tp_park_end(tp_pager *pager, tp_dropped *dropped);
/* Puts frames back that have been copied. True: some. */
bool tp_park_settle(tp_pager *pager);
/* The device is idle, and the core ends: all frames go back. */
void tp_park_fini(tp_pager *pager);

#endif
