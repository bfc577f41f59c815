/* drop: blocks whose bytes can be made again, and are not kept meanwhile.
 *
 * To drop a block is to free it: its frames serve others at once, as those of any freed block
 * do, and nothing is copied, mapped or unmapped. What stays is a note that the storage lives
 * on, for the recorder, which goes on to know it, and for the host budget, where room is kept to
 * put it should the device have none. Whoever makes the bytes again does so in a block of its
 * own, which then takes the place of the one that went: at another address. That costs no call
 * of the driver, where giving the old address new frames would cost 0.1 ms for each 64 MiB
 * there and as much back.
 *
 * That nobody looks at the old address meanwhile is the business of who drops.
 *
 * Expects the lock; never drops it. */
#ifndef TP_PAGER_DROP_H
#define TP_PAGER_DROP_H

#include "pager/pager.h"

struct tp_dropped {
    tp_identity identity; /* of the storage, in the recorder */
    size_t requested_bytes, bytes;
    tp_print print; /* of its bytes */
    tp_link link;   /* in tp_pager.dropped */

    /* Of a storage whose bytes are kept (pager/park.h). */
    uint8_t stage;            /* tp_park_stage */
    bool ended;               /* while a thread was looking for memory for it */
    struct tp_parked *parked; /* where they are; NULL: in the block, or nowhere */
    tp_block *block;          /* while it is GOING, and once it is BACK */
    tp_link want;             /* in tp_pager.wanted_parked */
};

/* Frees the block that begins at `addr`, used last on `stream`. TP_BUSY: it is in use, immovable or no tensor, or an
 * opaque region is open. TP_NO_HOST_MEMORY: no room could be kept. */
TP_MUST_USE tp_status tp_block_drop(tp_pager *pager, tp_addr addr, tp_stream stream,
                                    tp_dropped **out, tp_error *error);
/* The bytes are back, in the block at `addr`, which nobody has been told of; `stream` made them. Frees
 * `dropped`. */
void tp_block_bring_back(tp_pager *pager, tp_dropped *dropped, tp_addr addr, tp_stream stream);
/* The storage is gone. Frees `dropped`. */
void tp_dropped_end(tp_pager *pager, tp_dropped *dropped);

/* The core ends: frees what stands for dropped blocks. */
void tp_drop_fini(tp_pager *pager);

/* The block that begins at `addr`, whose storage may do without it. TP_INVALID: there is none. TP_BUSY: as
 * tp_block_drop. */
TP_MUST_USE tp_status tp_drop_find(tp_pager *pager, tp_addr addr, tp_block **out,
                                   tp_error *error);

/* Of the host budget, what is kept free for dropped blocks: nothing while one is made again. */
size_t tp_drop_reserve(const tp_pager *pager);

#endif
