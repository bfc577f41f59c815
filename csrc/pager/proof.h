/* proof: that the host frame of a CLEAN extent holds what its device frame holds. Clean is verified,
 * not believed: a kernel that was launched by raw pointer, announced to nobody, may have written.
 *
 * An eviction that copies nothing compares two fingerprints (base/fingerprint.h), both computed on
 * the device: `print`, of what the host frame holds, and one of the device frame computed anew when
 * everything queued before the decision to evict has completed and nothing keeps the address from
 * being mapped elsewhere. They differ: an unseen write. The extent is DIRTY, is written back again,
 * and its eviction goes on.
 *
 * Where `print` comes from:
 *  - A write-back computes it *before* the copy, which waits for it, on a stream of its own: it runs
 *    while the copy before does. A write that nobody
 *    announced may fall anywhere: before the fingerprint, then both have it; between or during the
 *    two, then the second fingerprint finds something newer than `print` and the copy is made again,
 *    at worst for nothing; after the copy, likewise. Computed after the copy instead, a write
 *    between the two would be in the fingerprint and not in the host frame: lost in silence. What
 *    remains is a writer that changes bytes before the copy and puts back exactly what was there
 *    before the check, both unannounced.
 *  - A fill keeps the `print` of the write-back that filled the host frame: the bytes are the same.
 *    What has been written over HOST has none any more: then it is computed right behind the fill's
 *    copy, while no address maps the device frame, so that nobody can write to it.
 *  - No fingerprint, or one that is out of date, proves nothing: the extent is written back again.
 *
 * Nothing is exempt: what only autograd or operators should have touched is verified like the rest.
 * Blocks that are freed are not: their bytes are nobody's.
 *
 * Where the device computes no fingerprints CLEAN is not believed at all: each eviction copies, behind
 * the marker of its decision.
 *
 * Expects the lock; drops it never; waits for nothing. */
#ifndef TP_PAGER_PROOF_H
#define TP_PAGER_PROOF_H

#include "pager/pager.h"

typedef enum tp_proof {
    TP_PROOF_HOLDS,
    TP_PROOF_WAIT,    /* not known yet */
    TP_PROOF_BEGUN,   /* likewise; the device was asked just now */
    TP_PROOF_REFUSED, /* the device refuses */
    TP_PROOF_MISSING, /* nothing says that the host frame holds the same: to be written back again */
    TP_PROOF_DIFFERS /* somebody has written: likewise */
} tp_proof;

/* Whether a copy may be queued: there is a place for its fingerprint. */
bool tp_proof_room(tp_pager *pager);
/* Queues, on a stream of ours, the fingerprint of the extent's device frame that goes with a copy.
 * tp_proof_mark_copy says where it ends. */
TP_MUST_USE tp_status tp_proof_with_copy(tp_pager *pager, tp_extent *extent, tp_stream stream,
                                         tp_error *error);
/* `copy`: recorded behind both. */
void tp_proof_mark_copy(tp_pager *pager, const tp_extent *extent, tp_marker copy);
/* The copy has been seen to finish: its fingerprint becomes the extent's `print`. */
void tp_proof_end_copy(tp_pager *pager, tp_extent *extent);
/* Whether write-backs come with fingerprints of what they copy. */
bool tp_proof_before_copies(const tp_pager *pager);
/* Whether a write-back made now must come behind the marker of the decision to evict. */
bool tp_proof_by_copying(const tp_pager *pager);

/* Of a CLEAN extent whose mapping could change now. */
tp_proof tp_proof_step(tp_pager *pager, tp_extent *extent);
/* A fingerprint that is being computed is wanted no more. True if it has been computed, so that its
 * frame is free of it. */
bool tp_proof_drop(tp_pager *pager, tp_extent *extent);
/* The same, when the device has nothing in flight or is past caring. */
void tp_proof_forget(tp_pager *pager, tp_extent *extent);

#endif
