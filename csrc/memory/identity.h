/* identity: how the recorder of steps knows a block again, from one operator to the next and from
 * one step to the next. It is part of the block, so that both ways cost one load.
 *
 * Written by pager/record and pager/step; expects the owner's lock. */
#ifndef TP_MEMORY_IDENTITY_H
#define TP_MEMORY_IDENTITY_H

#include "base/list.h"

#include <stdbool.h>
#include <stdint.h>

/* Kinds of step that are remembered. Each takes 4 bytes here, of every block; what else it takes is bounded
 * in pager/steps. */
enum { TP_KINDS_MAX = 32 };

typedef struct tp_identity {
    uint64_t
        serial; /* one for each birth, never used twice; 0: the recorder does not know it */
    uint64_t bytes;
    uint64_t record;    /* the recording in which `storage` and `use` mean something */
    uint32_t storage;   /* its number there */
    uint32_t use;       /* its last use there */
    uint64_t known_ops; /* operators that had been recorded in all when it became known */
    bool dropped;       /* part of no block: its storage has no bytes now (pager/drop.h) */
    uint32_t bound[TP_KINDS_MAX]; /* for each kind of step: 1 + its block there; 0: none */
    tp_link link;                 /* among all that the recorder knows */
} tp_identity;

#endif
