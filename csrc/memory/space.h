/* space: every address we own on a device, and what lies there.
 *
 * Segments are contiguous reserved ranges; a table per segment leads from a granule to the block
 * that covers it, so an operand's address becomes its block in a few loads. A block is what one
 * storage got; it is cut into extents, each backed by one frame. This module hands out addresses and
 * answers look-ups; it maps nothing and knows no states.
 *
 * Expects the owner's lock, except tp_space_owns, which takes none: segments are only ever added. */
#ifndef TP_MEMORY_SPACE_H
#define TP_MEMORY_SPACE_H

#include <stdatomic.h>

#include "base/list.h"
#include "device/marker.h"
#include "memory/frame.h"
#include "memory/identity.h"
#include "memory/suballoc.h"

enum { TP_SEGMENTS_MAX = 16 };

/* Where an extent's bytes are. csrc/README.md draws the diagram; pager/extent.c has the table. */
typedef enum tp_extent_state {
    TP_EXTENT_EMPTY,   /* no frame: being born, or gone */
    TP_EXTENT_DIRTY,   /* device frame only */
    TP_EXTENT_WRITING, /* device frame; a write-back into the host frame is in flight */
    TP_EXTENT_CLEAN,   /* both frames hold the same bytes; the address maps the device frame */
    TP_EXTENT_HOST,    /* host frame only */
    TP_EXTENT_FILLING, /* host frame mapped; a fill into the device frame is in flight */
    TP_EXTENT_STATE_COUNT
} tp_extent_state;

typedef struct tp_block tp_block;

typedef struct tp_extent {
    tp_block *block;
    tp_addr addr;
    size_t bytes;
    tp_extent_state state;
    tp_frame *device, *host;
    tp_frame
        *mapped; /* the frame the address maps now; NULL: nothing (strict mode, being born) */
    bool busy;   /* its mapping is being changed, with the lock released */
    bool held;   /* being prepared with the lock released: its block may not retire */
    bool evict;  /* to be evicted as soon as the rules allow */
    bool write_back;   /* to be written back, and stay */
    uint32_t leave;    /* 1 + the operator of the plan that runs over it in HOST; 0: none */
    bool written;      /* written while WRITING */
    bool abandon;      /* the fill's copy is to be forgotten */
    bool guarded;      /* its address is mapped read-only (tp_config.readonly_clean) */
    tp_marker copy;    /* the copy in flight */
    bool copying;      /* it has not been seen complete */
    tp_marker decided; /* context-wide, recorded after deciding to change the mapping */
    tp_marker wanted;  /* likewise, after asking for the write-back; the block's stamp then */
    uint64_t wanted_stamp;
    tp_fingerprint print; /* with `printed`: of what the host frame holds (pager/proof.h) */
    bool printed;
    bool differed; /* an unseen write was found during this eviction */
    uint8_t place; /* 1 + where a fingerprint of the device frame is left; 0: none is made */
    tp_marker copied_behind; /* the decision for which the last write-back was made */
    tp_marker copied_region; /* the pager's region_end at that time */
    bool parked; /* written back and proven, for a block that is being parked (pager/park.h) */
    tp_link inflight; /* in the pager's list while WRITING, FILLING, `evict` or in a place */
} tp_extent;

typedef enum tp_block_life {
    TP_BLOCK_NONE, /* a node in the spare list */
    TP_BLOCK_BORN, /* being mapped by the allocating thread; nobody else sees it */
    TP_BLOCK_LIVE,
    TP_BLOCK_CACHED,   /* freed, whole, resident: serves the same size again */
    TP_BLOCK_RETIRING, /* freed; its mappings go away behind its markers */
    TP_BLOCK_UNMAPPING /* the pager is unmapping it, with the lock released */
} tp_block_life;

struct tp_block {
    tp_addr addr;
    size_t bytes, requested_bytes; /* bytes: a multiple of the granularity */
    tp_extent *extents;
    uint32_t extent_count, extent_capacity;
    tp_block_life life;
    uint64_t generation; /* raised when the block is freed: a stale reference can tell */
    tp_stream stream;    /* allocated for */
    tp_uses uses;
    uint32_t op_pins;      /* by operators in progress */
    uint32_t waiting_pins; /* of those, by threads that wait for its fill and launch nothing */
    uint32_t handle_pins;  /* by tp_pin */
    tp_marker remade;      /* its bytes were made again, up to here (pager/drop.h); seq 0: no */
    bool unmarked;         /* freed with no marker recorded: only its own stream may have it */
    bool seen;             /* was a tensor operand or output since the hook was armed */
    bool tensor;           /* was one ever */
    bool exported;         /* immovable for good */
    bool captured;         /* touched during a stream capture: immovable */
    bool slab;             /* shared by small requests: its mapping never changes */
    bool ahead;            /* filled, or being filled, ahead of its use: in the pager's list */
    tp_link ahead_link;
    uint64_t ahead_run; /* the run of misses that brought it */
    uint64_t stamp;     /* the use clock at its last use */
    uint64_t written;   /* the same, at its last announced write */
    uint64_t evicted_count;
    struct tp_dropped *parking; /* it is GOING (pager/park.h) */
    tp_identity identity;       /* the recorder's */
    struct tp_segment *segment;
    tp_span *span;
    tp_link lru;  /* live: least recently used first. cached, retiring: in that list */
    tp_link size; /* cached: among blocks of its size */
};

typedef struct tp_segment {
    tp_addr base;
    size_t bytes;
    tp_suballoc sub;  /* units: granules */
    tp_block **table; /* by granule */
} tp_segment;

typedef struct tp_space {
    tp_device *dev;
    size_t granularity_bytes, extent_max_bytes, segment_bytes;
    tp_segment segments[TP_SEGMENTS_MAX];
    atomic_uint segment_count;
    tp_link spare; /* block nodes not in use */
} tp_space;

TP_MUST_USE tp_status tp_space_init(tp_space *space, tp_device *dev, size_t segment_bytes,
                                    size_t extent_max_bytes, tp_error *error);
/* Nothing is mapped any more. Frees all nodes. */
void tp_space_fini(tp_space *space);

/* Addresses for a block of `bytes` (rounded up), cut into EMPTY extents, in life BORN. May reserve a
 * segment: one driver call under the lock, once per segment. */
TP_MUST_USE tp_status tp_space_take(tp_space *space, size_t bytes, tp_block **out,
                                    tp_error *error);
/* Gives the addresses back; they map nothing. The node is kept for reuse. */
void tp_space_put(tp_space *space, tp_block *block);
/* The block covering `addr`, whatever its life, or NULL. */
tp_block *tp_space_find(const tp_space *space, tp_addr addr);
bool tp_space_owns(const tp_space *space, tp_addr addr);
TP_MUST_USE tp_status tp_space_check(const tp_space *space, tp_error *error);

#endif
