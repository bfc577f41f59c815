/* types: what the façade shows of the pager: configuration, figures, operators in progress. */
#ifndef TP_PAGER_TYPES_H
#define TP_PAGER_TYPES_H

#include "base/list.h"
#include "base/stats.h"
#include "base/status.h"
#include "device/device.h"

#define TP_NO_LIMIT SIZE_MAX

typedef struct tp_core tp_core;
typedef struct tp_dropped tp_dropped;

/* What the core wants to be told of operators. */
typedef enum tp_arming {
    TP_ARM_OFF, /* nothing: there is plenty of room */
    TP_ARM_SAMPLE, /* the operands of those that follow an allocation (tp_mark_seen), so that there will
                      be something to evict if memory gets short */
    TP_ARM_FULL /* everything: mappings may change */
} tp_arming;

/* What the world outside the core does for it. Every pointer may be NULL. Called with no lock of
 * the core held. `ctx` is passed through. */
typedef struct tp_hooks {
    void *ctx;
    /* Around every wait on the host, in pairs, on the waiting thread. wait_begin's result is given
     * to wait_end. */
    void *(*wait_begin)(void *ctx);
    void (*wait_end)(void *ctx, void *token);
    /* Called once before an allocation fails: collect garbage if that is safe on this thread.
     * True: something may have been freed. */
    bool (*collect)(void *ctx);
    /* Held bytes passed a watermark, or offload was switched off. Until it has returned from being told
     * TP_ARM_FULL, and a little longer, no mapping of a live block changes. */
    void (*arm)(void *ctx, tp_arming level);
    /* Bytes moved to the host for the first time. On the pager's thread: must not wait for the GIL. */
    void (*first_paging)(void *ctx);
    /* For the first time a write was found that nobody had announced, to the block at `addr`. On the
     * pager's thread, as above. */
    void (*unseen_write)(void *ctx, tp_addr addr, size_t bytes);
    /* The plan that is followed drops the block at `addr`, which no operator uses now and which is
     * used again later: whoever can make its bytes again may let it go with tp_drop, now or later, or
     * leave it. With `park` it evicts it, and tp_park is meant. By the time of the call another block may be there. On the thread of an operator that
     * has ended or is about to begin, before anything is done for it; it may allocate, free and drop, but
     * not what that operator uses, nor what can only be made again of bytes that it writes; nor may it run
     * operators. */
    void (*drop)(void *ctx, tp_core *core, tp_addr addr, bool park);
    /* The other allocator that shares the budget (PyTorch's native one). Asks it never to hold more
     * than max(cap_bytes, what it holds now); returns the bound that is in force. */
    size_t (*foreign_cap)(void *ctx, size_t cap_bytes);
    /* Bytes it holds now. */
    size_t (*foreign_held)(void *ctx);
    /* Gives its unused cache back to the device. */
    void (*foreign_flush)(void *ctx);
} tp_hooks;

typedef struct tp_config {
    size_t device_budget_bytes; /* TP_NO_LIMIT: the device's total */
    size_t host_budget_bytes;   /* TP_NO_LIMIT: no bound */
    size_t large_min_bytes;     /* smallest request worth an own block; 0: 2 MiB */
    size_t extent_max_bytes;    /* 0: 64 MiB; rounded up to the granularity */
    size_t segment_bytes;       /* addresses reserved at once; 0: chosen from the device */
    bool offload;               /* may bytes move to the host */
    bool strict;                /* evicted extents map nothing (tests; promise P4 off) */
    bool
        host_kernels; /* kernels run on the calling thread while the operator is in progress (CPU
                          tensors): no marker covers one that began before the hook was armed, so
                          the hook is armed as soon as offload is on */
    bool
        readonly_clean; /* debugging: CLEAN extents are mapped read-only, so that a write nobody
                            announced faults where it stands. Slower */
    bool page_out_before_op; /* tests: everything evictable is evicted before each operator */
    /* Simulation: the pager has no thread; the one launching thread does its work while it waits
     * and behind each operator. Time is the device's (caps.virtual_clock), and everything that
     * happens is repeatable. */
    bool no_thread;
    bool serve_small;   /* requests below large_min share blocks (the pluggable door);
                                   else each gets a block of its own */
    uint32_t rules_off; /* debug builds: tp_rule bits switched off, to prove the tests */
    tp_hooks hooks;
} tp_config;

/* The rules about mappings that a debug build can switch off one by one (csrc/README.md). */
typedef enum tp_rule {
    TP_RULE_CONTEXT_MARKER =
        1 << 0,            /* a live block's mapping changes only behind a context-wide
                                        marker recorded after deciding to change it */
    TP_RULE_PIN = 1 << 1,  /* a pinned block's mapping does not change */
    TP_RULE_GATE = 1 << 2, /* nor any live block's while an opaque region is open */
    TP_RULE_OLD_MAPPING =
        1 << 3, /* a freed block's mapping stays until its markers completed */
    TP_RULE_SAME_STREAM =
        1 << 4, /* its frames serve at once only the one stream that used it */
    TP_RULE_WRITE_BACK_ORDER =
        1 << 5,                  /* a write-back starts, on the device, after the last use */
    TP_RULE_FILL_ORDER = 1 << 6, /* a fill starts, on the device, after uses over HOST */
    TP_RULE_FILL_COMPLETE =
        1 << 7, /* an address maps a filled frame only after the copy is done */
    TP_RULE_WRITTEN_MEANWHILE = 1
                                << 8, /* a write during a write-back leaves the extent DIRTY */
    TP_RULE_BUSY_FRAME = 1 << 9,      /* a frame with a copy in flight serves nobody else */
    TP_RULE_FINGERPRINT = 1 << 10, /* an eviction that copies nothing compares contents first */
    TP_RULE_REGION_WAIT = 1 << 12, /* the gate opens in the waits of a region's own thread only
                                         behind a marker of what it has launched so far */
    TP_RULE_REGION_WRITES = 1 << 13, /* what a region is known to use counts as written */
    TP_RULE_REGION_ORDER = 1 << 14, /* copies wait, on the device, for the kernels of regions */
    TP_RULE_WAITING_PINS =
        1 << 15,                 /* pins of threads that wait for a fill do not keep it back */
    TP_RULE_TICKET = 1 << 16,    /* one thread at a time gathers frames */
    TP_RULE_WORKSPACE = 1 << 17, /* a block that was never a tensor is not evicted: a library's
                                       workspace */
    TP_RULE_RUN_AHEAD = 1 << 18, /* a thread that is ahead of the device waits for memory */
    TP_RULE_CAPTURE = 1 << 19,   /* what a captured stream used never moves again */
    TP_RULE_HOST_CAP = 1 << 20   /* host frames stay within their budget */
} tp_rule;

typedef struct tp_oom {
    size_t requested_bytes;
    size_t budget_bytes, resident_bytes, cached_bytes, foreign_bytes; /* device side */
    size_t pinned_bytes, unseen_bytes; /* resident, but immovable or never seen as an operand */
    size_t host_bytes, host_held_bytes,
        host_budget_bytes;   /* HOST extents; host frames; their cap */
    bool offload, host_side; /* host_side: it was the host budget that had no room */
    tp_status device_status; /* what the device itself answered, if it did */
} tp_oom;

typedef enum tp_alloc_flags {
    TP_ALLOC_PINNED = 1 << 0, /* born with a pin count of one: give it to an operator with
                                   tp_op_adopt. Small requests that share a block: nothing */
    TP_ALLOC_SEEN = 1 << 1,   /* known to be a tensor */
    TP_ALLOC_UNKNOWN =
        1 << 2, /* perhaps by an operator that began before the hook was armed, and goes
                                 on after this call */
    TP_ALLOC_RERUN = 1 << 3 /* for what a rerun makes: no part of the program */
} tp_alloc_flags;

typedef struct tp_block_info {
    tp_addr addr;
    size_t requested_bytes, bytes;     /* bytes: rounded to the granularity */
    size_t resident_bytes, host_bytes; /* extents by where the address maps */
    uint32_t extent_count, dirty_count, clean_count, host_count, busy_count;
    uint32_t pin_count; /* operators and handles */
    bool seen, immovable, captured;
    tp_stream stream;
    uint64_t generation, evicted_count; /* evicted_count: extents of it evicted since birth */
} tp_block_info;

typedef struct tp_access {
    tp_addr addr; /* any address inside the block; foreign ones are skipped */
    bool write;
} tp_access;

/* One operator in progress on one thread. Zero-initialise; the fields are the core's, but for the
 * first four. */
typedef struct tp_op {
    uint32_t name; /* tp_op_name; 0: it has none */
    bool backward; /* it is part of a backward pass */
    bool rerun;    /* it makes dropped bytes again: no part of the program */
    /* It could be run again, by whoever sets this: it is a function of its operands alone, changes
     * none of them, makes the same bytes each time, and allocates its results. Operators that it
     * calls are part of it. */
    bool recipe;
    /* Answered by tp_op_begin: the plan that is followed drops something that this operator makes,
     * or has it made again for something else. Never without tp_core_set_recompute. */
    bool keep_recipe;
    tp_core *core;
    struct tp_op_pin *pins;
    uint32_t pin_count, pin_capacity;
    tp_stream stream;
    bool detached;   /* it has returned, and its work goes on: its pins are no thread's */
    uint64_t record; /* the recording that it is in (pager/record.h); 0: none */
    uint32_t recorded, class_idx; /* its number there; its class */
    uint32_t timer;               /* 1 + what times it (pager/timing.h); 0: nothing */
    uint64_t waited_ns;           /* tp_thread_waited_ns when its time began */
    uint64_t recorded_total,
        started_ns; /* operators recorded until it began; when it started */
    uint32_t recorded_storages;
    uint64_t recorded_turn; /* see tp_record_note_recipe */
} tp_op;

/* An opaque region: code on one thread whose kernels we cannot see. Zero-initialise; the fields are
 * the core's. */
typedef struct tp_region {
    tp_core *core;
    tp_link link; /* in the pager's list while open */
    uint64_t thread;
    uint32_t lift_count; /* calls of tp_region_lift in force since it began */
    bool standing; /* its thread stands in a function of ours, and the gate is open for it */
    struct tp_region_note *notes; /* the blocks it is known to use */
    uint32_t note_count, note_capacity;
} tp_region;

typedef struct tp_stats {
    tp_gauge allocated; /* bytes requested by live blocks */
    tp_gauge active;    /* their sizes, rounded */
    tp_gauge reserved;  /* device frames that exist */
    tp_gauge resident;  /* device frames mapped by live blocks */
    tp_gauge host; /* live bytes whose address maps a host frame or, in strict mode, nothing */
    tp_gauge host_held; /* host frames that exist */
    tp_gauge parked;    /* of `host`: sizes of storages that have no block meanwhile */
    tp_gauge pinned;    /* live bytes made immovable by tp_pin or tp_export */
    tp_gauge held;      /* reserved + foreign, as of the last look at either */
    tp_tally fills, write_backs, evictions, misses, stalls;
    /* misses: operators' accesses to extents in HOST, whose fill had not been asked for; stalls: waits of a launching thread for memory or for a fill;
       evictions.ns and fills.ns: time spent changing the mapping */
    tp_tally memory_stalls; /* of the stalls, those for memory */
    tp_tally
        host_operators; /* accesses run over HOST operands because nothing could be evicted */
    tp_tally
        unseen_writes; /* extents found to differ from their copy though no write was announced:
                               they were copied again */
    tp_tally unproven; /* CLEAN extents copied again because nothing proved them equal */
    tp_tally fingerprints;       /* asked of the device */
    tp_tally plans;              /* made for kinds of step; ns: the time it took */
    uint64_t planned_ops;        /* operators that began while a plan was followed */
    uint64_t planned_drop_bytes; /* in one step, by the plan that was made last */
    tp_gauge dropped; /* bytes of live storages that are to be made again; in no other gauge */
    uint64_t wrong_reruns,
        unverified_reruns;  /* what came back was something else; not compared */
    tp_tally drops, reruns; /* blocks whose bytes went, and came back */
    tp_tally parks;         /* blocks that were to go, with their bytes kept */
    tp_tally discards;      /* freed extents forgotten without a copy */
    tp_tally frame_creates, frame_releases;
    uint64_t alloc_count, free_count, cache_hits, born_in_host, ooms;
    uint64_t block_count, live_peak_count;
    uint64_t regions_open,
        regions_closed;    /* opaque regions now, and those that close the gate */
    uint64_t region_count; /* begun */
    uint64_t region_waits; /* times the gate opened for a wait inside one */
    tp_addr
        unseen_addr; /* the block of the first unseen write, and what was requested for it; 0: */
    uint64_t unseen_bytes; /* there was none */
    size_t device_budget, host_budget, foreign_cap;
    bool armed, offload, failed;
} tp_stats;

#endif
