/* record: the step that runs now, written down as it happens.
 *
 * One entry for each operator with operands of ours, one for each operand, one for each storage:
 * those alive when the recording began, and those born since, in order of birth. A storage is
 * found through its identity (memory/identity.h), never by searching. The arrays grow while
 * the first step is recorded, up to the limits, and stay: afterwards nothing is allocated. A step
 * that does not fit within the limits is not complete; the recording goes on with the next.
 *
 * Operators of the same name, phase and sizes of operands are alike: they share a class, which
 * knows how long they take. Operators without operands of ours are not written down. What they
 * take, and how long the device waits for its program, belongs to the pair of operators before and
 * behind: pairs of two classes are classes too.
 *
 * An operator that may be run again, as its caller says, leaves a recipe when it ends: the operators
 * from it to the last that it called, what it was announced to read, and what was born meanwhile and
 * is alive. One that is called by another with a recipe is part of that one. Where another thread
 * has told of anything meanwhile there is no recipe: what was born would be anybody's. 16 bytes for
 * each recipe, and 4 for each result.
 *
 * Pure: no device. Expects the pager's lock. */
#ifndef TP_PAGER_RECORD_H
#define TP_PAGER_RECORD_H

#include "memory/identity.h"
#include "pager/trace.h"

/* Where an operator stands; part of its kind. */
typedef enum tp_phase { TP_PHASE_FORWARD, TP_PHASE_BACKWARD, TP_PHASE_OPTIMIZER } tp_phase;

/* The kind of an operator: its name and its phase. */
static inline uint32_t tp_op_kind(uint32_t name, tp_phase phase) {
    return name | (uint32_t)phase << 16;
}
static inline uint32_t tp_kind_name(uint32_t kind) { return kind & 0xFFFFu; }
static inline tp_phase tp_kind_phase(uint32_t kind) { return (tp_phase)(kind >> 16); }

typedef struct tp_record_limits {
    uint32_t ops, uses, storages;
} tp_record_limits;

typedef struct tp_record_op {
    uint64_t began_ns;   /* of the host's clock */
    uint64_t live_bytes; /* of all storages, when it began */
    uint32_t kind;
    uint32_t like;    /* a hash of its kind and of its operands' sizes */
    uint32_t weights; /* the same of those operands that have been alive for long; 0: none */
    uint32_t token;   /* the same of its kind and of them */
    uint32_t class_idx;
    uint32_t gap_idx; /* class of what comes between it and the next; 0: not known */
    uint32_t use_begin, use_count; /* the operands it was announced with */
    uint32_t stream;               /* a small number */
} tp_record_op;

typedef struct tp_record_use {
    uint32_t op, storage;
    bool reads, writes;
} tp_record_use;

typedef struct tp_record_storage {
    tp_identity *owner; /* NULL: freed */
    uint64_t bytes;
    /* As in tp_trace_block; born TP_NO_OP: alive before; dead TP_NO_OP: alive still. */
    uint32_t born, dead;
} tp_record_storage;

/* Operators [op, last_op] make its results: storages of tp_record.outputs, from output_begin on. */
typedef struct tp_record_recipe {
    uint32_t op, last_op;
    uint32_t output_begin, output_count;
} tp_record_recipe;

typedef struct tp_op_class {
    uint32_t like; /* 0: a free place */
    uint32_t sample_count;
    uint32_t pending_count; /* samples on their way (pager/timing) */
    bool partly;            /* known from such samples alone (tp_record_sample) */
    uint64_t device_ns;     /* estimated from the samples */
    uint64_t bytes;         /* of the operands */
} tp_op_class;

enum { TP_CLASSES = 16384 };

typedef struct tp_record {
    tp_record_limits limits;
    tp_record_op *ops;
    tp_record_use *uses;
    tp_record_storage *storages;
    uint32_t op_count, op_capacity;
    uint32_t use_count, use_capacity;
    uint32_t storage_count, storage_capacity;
    tp_record_recipe *recipes; /* which do not overlap, in order */
    uint32_t *outputs;
    uint32_t recipe_count, recipe_capacity; /* within limits.ops */
    uint32_t output_count, output_capacity; /* within limits.storages */
    uint64_t teller, turn; /* the thread that told of something last; rises with each change */
    uint32_t open_count;   /* operators in progress, of this recording or an earlier one */
    uint64_t number;       /* of this recording; 0: nothing is recorded */
    uint64_t first;        /* number of the first recording since tp_record_start */
    uint64_t ops_before;   /* operators of earlier recordings */
    uint64_t live_bytes;   /* now */
    uint64_t moved_bytes;  /* of all operands: by how much steps differ */
    uint64_t serial;       /* given last */
    uint32_t like;         /* of the operator that was recorded last, in whatever recording */
    uint32_t first_gap;    /* class of what came before the first operator */
    bool partial;          /* it began in the middle of a step */
    bool overflown;        /* the step does not fit */
    tp_link known;         /* identities of all live blocks */
    tp_op_class *classes;  /* TP_CLASSES of them; [0] is everybody else's */
    uint32_t class_count;
} tp_record;

/* Nothing is allocated before tp_record_start. */
void tp_record_init(tp_record *record, const tp_record_limits *limits);
void tp_record_fini(tp_record *record);

/* Begins to record in the middle of a step; who calls it then tells of every live block with
 * tp_record_born. False, and nothing recorded: host memory is short. */
bool tp_record_start(tp_record *record);
/* Forgets every block, and the recording. What is known of times stays. */
void tp_record_stop(tp_record *record);
static inline bool tp_record_on(const tp_record *record) { return record->number != 0; }
/* The step has ended; the next one is recorded, over the arrays of the last. O(live blocks). */
void tp_record_next(tp_record *record);

/* A block. While nothing is recorded: nothing happens. */
void tp_record_born(tp_record *record, tp_identity *identity, uint64_t bytes);
void tp_record_freed(tp_record *record, tp_identity *identity);
/* From now on `to`, which is not known, stands for what `from` stood for, which is forgotten. */
void tp_record_moved(tp_record *record, tp_identity *from, tp_identity *to);

/* An operator: begin, its operands, ready, all without dropping the lock; when it has been
 * launched, its results and then end. begin: false, and nothing recorded, when the step does
 * not fit. */
bool tp_record_op_begin(tp_record *record, uint32_t kind, uint32_t stream, uint64_t now_ns);
void tp_record_operand(tp_record *record, tp_identity *identity, bool write);
/* The operator, as far as it is known now. */
tp_record_op *tp_record_op_ready(tp_record *record);
/* The class of what came before it. */
static inline uint32_t tp_record_gap(const tp_record *record) {
    return record->op_count > 1 ? record->ops[record->op_count - 2].gap_idx : record->first_gap;
}
/* `op` is its number in the recording, of which it must be. */
void tp_record_result(tp_record *record, uint32_t op, tp_identity *identity);
/* The operator, which is about to end, may be run again. `storages`, `turn`: how many storages there
 * were, and tp_record.turn, when it had begun. */
void tp_record_note_recipe(tp_record *record, uint32_t op, uint32_t storages, uint64_t turn);
/* `number`: of the recording that it began in. */
void tp_record_op_end(tp_record *record, uint64_t number);

/* An operator of that class took so long on the device; `partly`: or longer. Such samples count only
 * while there are no others. */
void tp_record_sample(tp_record *record, uint32_t class_idx, uint64_t device_ns, bool partly);
/* What one of them takes: measured, or else as long as its operands take at 1 TB/s. */
uint64_t tp_record_class_ns(const tp_record *record, uint32_t class_idx);
/* The same of an operator of the recording, which may have no class. */
uint64_t tp_record_op_ns(const tp_record *record, const tp_record_op *op);

#endif
