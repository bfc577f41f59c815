#include "pager/record.h"

#include <stdlib.h>
#include <string.h>

#include "base/check.h"
#include "base/lock.h"

enum {
    FIRST_CAPACITY = 1024,
    OLD_OPS = 4096, /* who has been known for so many operators is here to stay, it seems */
    BYTES_PER_NS = 1000,
    /* No more classes than this, and no more pairs once there are so many: they leave room. */
    CLASSES_MAX = TP_CLASSES / 4 * 3,
    PAIRS_UNTIL = TP_CLASSES / 2
};

void tp_record_init(tp_record *record, const tp_record_limits *limits) {
    memset(record, 0, sizeof *record);
    record->limits = *limits;
    tp_list_init(&record->known);
}

void tp_record_fini(tp_record *record) {
    tp_record_stop(record);
    free(record->ops);
    free(record->uses);
    free(record->storages);
    free(record->classes);
    free(record->recipes);
    free(record->outputs);
    record->ops = NULL;
    record->uses = NULL;
    record->storages = NULL;
    record->classes = NULL;
    record->recipes = NULL;
    record->outputs = NULL;
}

/* Room for one entry more. False: the step does not fit. */
static bool provide(void **array, uint32_t count, uint32_t *capacity, uint32_t limit,
                    size_t entry_bytes) {
    if (count < *capacity) return true;
    if (count >= limit) return false;
    uint32_t wanted = *capacity < FIRST_CAPACITY ? FIRST_CAPACITY : *capacity * 2;
    if (wanted > limit) wanted = limit;
    void *grown = realloc(*array, wanted * entry_bytes);
    if (grown == NULL) return false;
    *array = grown;
    *capacity = wanted;
    return true;
}

#define PROVIDE(record, name)                                                                  \
    provide((void **)&(record)->name##s, (record)->name##_count, &(record)->name##_capacity,   \
            (record)->limits.name##s, sizeof *(record)->name##s)

static void begin(tp_record *record) {
    record->ops_before += record->op_count;
    record->op_count = record->use_count = record->storage_count = 0;
    record->recipe_count = record->output_count = 0;
    record->moved_bytes = 0;
    record->overflown = false;
    record->number++;
}

bool tp_record_start(tp_record *record) {
    if (record->classes == NULL) {
        record->classes = calloc(TP_CLASSES, sizeof *record->classes);
        if (record->classes == NULL) return false;
    }
    record->number = record->first; /* numbers are never used twice */
    begin(record);
    record->first = record->number;
    record->partial = true;
    record->open_count = 0;
    record->live_bytes = 0;
    return true;
}

void tp_record_stop(tp_record *record) {
    while (!tp_list_empty(&record->known)) {
        tp_identity *it = TP_CONTAINER(record->known.next, tp_identity, link);
        tp_list_remove(&it->link);
        memset(it->bound, 0, sizeof it->bound);
        it->serial = 0;
    }
    if (record->number != 0) record->first = record->number;
    record->number = 0;
}

/* Its number in the recording; TP_NO_OP: there is no room. */
static uint32_t storage_add(tp_record *record, tp_identity *identity, uint32_t born) {
    if (!PROVIDE(record, storage)) {
        record->overflown = true;
        return TP_NO_OP;
    }
    record->storages[record->storage_count] = (tp_record_storage){
        .owner = identity, .bytes = identity->bytes, .born = born, .dead = TP_NO_OP};
    identity->record = record->number;
    identity->use = TP_NO_OP;
    identity->storage = record->storage_count;
    return record->storage_count++;
}

void tp_record_next(tp_record *record) {
    begin(record);
    record->partial = false;
    for (tp_link *link = record->known.next; link != &record->known; link = link->next) {
        (void)storage_add(record, TP_CONTAINER(link, tp_identity, link), TP_NO_OP);
    }
}

/* The operator in progress, or the one that comes next. */
static uint32_t birth_op(const tp_record *record) {
    if (record->partial && record->op_count == 0) return TP_NO_OP; /* tp_record_start */
    const bool inside = record->open_count > 0 && record->op_count > 0;
    return inside ? record->op_count - 1 : record->op_count;
}

static void hear(tp_record *record) {
    const uint64_t thread = tp_this_thread();
    record->turn += record->teller != thread;
    record->teller = thread;
}

void tp_record_born(tp_record *record, tp_identity *identity, uint64_t bytes) {
    memset(identity, 0, sizeof *identity);
    tp_list_init(&identity->link);
    if (!tp_record_on(record)) return;
    hear(record);
    identity->serial = ++record->serial;
    identity->bytes = bytes;
    identity->known_ops = record->ops_before + record->op_count;
    tp_list_push_back(&record->known, &identity->link);
    record->live_bytes += bytes;
    (void)storage_add(record, identity, birth_op(record));
}

void tp_record_moved(tp_record *record, tp_identity *from, tp_identity *to) {
    *to = *from;
    tp_list_init(&to->link);
    from->serial = 0;
    if (to->serial == 0) return;
    tp_list_push_back(&from->link, &to->link); /* in its place */
    tp_list_remove(&from->link);
    if (to->record == record->number) record->storages[to->storage].owner = to;
}

void tp_record_freed(tp_record *record, tp_identity *identity) {
    if (identity->serial == 0) return;
    tp_list_remove(&identity->link);
    identity->serial = 0;
    record->live_bytes -= identity->bytes;
    if (identity->record != record->number) return; /* there was no room for it */
    tp_record_storage *storage = &record->storages[identity->storage];
    storage->owner = NULL;
    storage->dead = record->op_count == 0 ? 0 : record->op_count - 1;
}

/* ---- operators --------------------------------------------------------------------------- */

bool tp_record_op_begin(tp_record *record, uint32_t kind, uint32_t stream, uint64_t now_ns) {
    if (!PROVIDE(record, op)) record->overflown = true;
    if (record->overflown) return false;
    hear(record);
    record->ops[record->op_count++] = (tp_record_op){
        .kind = kind,
        .stream = stream,
        .began_ns = now_ns,
        .live_bytes = record->live_bytes,
        .use_begin = record->use_count,
    };
    record->open_count++;
    return true;
}

static void use_add(tp_record *record, uint32_t op, tp_identity *identity, bool reads,
                    bool writes) {
    if (identity->serial == 0 || identity->record != record->number) return;
    if (!PROVIDE(record, use)) {
        record->overflown = true;
        return;
    }
    identity->use = record->use_count;
    record->uses[record->use_count++] = (tp_record_use){
        .op = op, .storage = identity->storage, .reads = reads, .writes = writes};
    record->moved_bytes += identity->bytes;
}

void tp_record_operand(tp_record *record, tp_identity *identity, bool write) {
    const tp_record_op *op = &record->ops[record->op_count - 1];
    const bool again = identity->record == record->number && identity->use != TP_NO_OP &&
                       identity->use >= op->use_begin;
    if (again) {
        record->uses[identity->use].writes |= write;
        return;
    }
    use_add(record, record->op_count - 1, identity, true, write);
}

static uint32_t mix(uint32_t hash, uint64_t value) {
    const uint64_t mixed = (hash ^ value) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(mixed >> 32) ^ (uint32_t)mixed;
}

/* The class of operators like this one; 0 when it is new, and there are more than `most`. */
static uint32_t class_of(tp_record *record, uint32_t like, uint64_t bytes, uint32_t most) {
    for (uint32_t i = 0; i < TP_CLASSES; i++) {
        const uint32_t place = (like + i) % TP_CLASSES;
        if (place == 0) continue;
        tp_op_class *found = &record->classes[place];
        if (found->like == like) return place;
        if (found->like != 0) continue;
        if (record->class_count > most) return 0;
        record->class_count++;
        *found = (tp_op_class){.like = like, .bytes = bytes};
        return place;
    }
    return 0;
}

/* An operator comes behind the one recorded before. */
static void note_pair(tp_record *record, uint32_t like) {
    uint32_t gap = 0;
    if (record->like != 0) {
        const uint32_t pair = mix(mix(1, record->like), like);
        gap = class_of(record, pair == 0 ? 1 : pair, 0, PAIRS_UNTIL);
    }
    if (record->op_count > 1)
        record->ops[record->op_count - 2].gap_idx = gap;
    else
        record->first_gap = gap;
    record->like = like;
}

tp_record_op *tp_record_op_ready(tp_record *record) {
    tp_record_op *op = &record->ops[record->op_count - 1];
    const uint64_t now = record->ops_before + record->op_count;
    uint64_t bytes = 0;
    op->use_count = record->use_count - op->use_begin;
    uint32_t like = mix(op->kind + 1, op->use_count), weights = 0;
    for (uint32_t i = op->use_begin; i < record->use_count; i++) {
        const tp_record_use *use = &record->uses[i];
        const tp_record_storage *storage = &record->storages[use->storage];
        like = mix(like, storage->bytes * 2 + use->writes);
        bytes += storage->bytes;
        const bool old = storage->born == TP_NO_OP || now - storage->owner->known_ops > OLD_OPS;
        if (old) weights = mix(weights + 1, storage->owner->serial);
    }
    op->like = like == 0 ? 1 : like;
    op->weights = weights;
    op->token = mix(weights + 1, op->kind);
    op->class_idx = class_of(record, op->like, bytes, CLASSES_MAX);
    note_pair(record, op->like);
    return op;
}

void tp_record_result(tp_record *record, uint32_t op, tp_identity *identity) {
    if (identity->serial == 0 || identity->record != record->number) return;
    /* It may have been born in an operator that this one called: then it is written there. */
    const uint32_t born = record->storages[identity->storage].born;
    if (born != TP_NO_OP && born > op) op = born;
    if (op >= record->op_count) return;
    use_add(record, op, identity, false, true);
}

/* ---- recipes ----------------------------------------------------------------------------- */

/* Whether it, or an operator that it called, wrote what was there before. */
static bool changes_others(const tp_record *record, uint32_t op, uint32_t storages) {
    for (uint32_t i = record->ops[op].use_begin; i < record->use_count; i++) {
        if (record->uses[i].writes && record->uses[i].storage < storages) return true;
    }
    return false;
}

static bool outputs_add(tp_record *record, uint32_t from) {
    for (uint32_t i = from; i < record->storage_count; i++) {
        if (record->storages[i].owner == NULL) continue;
        if (!provide((void **)&record->outputs, record->output_count, &record->output_capacity,
                     record->limits.storages, sizeof *record->outputs))
            return false;
        record->outputs[record->output_count++] = i;
    }
    return true;
}

static bool recipe_add(tp_record *record, uint32_t op, uint32_t storages) {
    const uint32_t begin = record->output_count;
    if (!outputs_add(record, storages) || record->output_count == begin) return false;
    if (!provide((void **)&record->recipes, record->recipe_count, &record->recipe_capacity,
                 record->limits.ops, sizeof *record->recipes))
        return false;
    record->recipes[record->recipe_count++] =
        (tp_record_recipe){.op = op,
                           .last_op = record->op_count - 1,
                           .output_begin = begin,
                           .output_count = record->output_count - begin};
    return true;
}

void tp_record_note_recipe(tp_record *record, uint32_t op, uint32_t storages, uint64_t turn) {
    if (turn != record->turn || changes_others(record, op, storages)) return;
    /* Those of operators that it called are part of it. */
    while (record->recipe_count > 0 && record->recipes[record->recipe_count - 1].op > op)
        record->output_count = record->recipes[--record->recipe_count].output_begin;
    const tp_record_recipe *before =
        record->recipe_count > 0 ? &record->recipes[record->recipe_count - 1] : NULL;
    if (before != NULL && before->last_op >= op)
        return; /* it began in the middle of that one */
    const uint32_t outputs = record->output_count;
    if (!recipe_add(record, op, storages)) record->output_count = outputs;
}

void tp_record_op_end(tp_record *record, uint64_t number) {
    if (number < record->first || record->open_count == 0) return;
    record->open_count--;
}

/* ---- times ------------------------------------------------------------------------------- */

void tp_record_sample(tp_record *record, uint32_t class_idx, uint64_t device_ns, bool partly) {
    if (class_idx == 0 || record->classes == NULL) return;
    tp_op_class *it = &record->classes[class_idx];
    if (it->like == 0) return;
    if (partly && it->sample_count > 0 && !it->partly) return;
    if (!partly && it->partly) it->sample_count = 0;
    it->partly = partly;
    it->sample_count++;
    /* What disturbs an operator makes it longer, never shorter: at once down, slowly up. */
    if (it->sample_count == 1 || device_ns < it->device_ns) {
        it->device_ns = device_ns;
    } else {
        it->device_ns += (device_ns - it->device_ns) / 16;
    }
}

uint64_t tp_record_op_ns(const tp_record *record, const tp_record_op *op) {
    if (op->class_idx != 0) return tp_record_class_ns(record, op->class_idx);
    uint64_t bytes = 0;
    for (uint32_t i = op->use_begin; i < op->use_begin + op->use_count; i++)
        bytes += record->storages[record->uses[i].storage].bytes;
    return bytes / BYTES_PER_NS;
}

uint64_t tp_record_class_ns(const tp_record *record, uint32_t class_idx) {
    if (class_idx == 0 || record->classes == NULL) return 0;
    const tp_op_class *it = &record->classes[class_idx];
    return it->sample_count > 0 ? it->device_ns : it->bytes / BYTES_PER_NS;
}
