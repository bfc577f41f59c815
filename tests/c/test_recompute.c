/* Plans that drop, carried out: a training program in miniature that keeps the recipes it is asked
 * to keep, lets blocks go when it is told, and makes them again right before they are used. Its bytes
 * are right whatever it does, and what is recorded of it is the same as without. */
#define _POSIX_C_SOURCE 200809L

#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/bytes.h"
#include "device/device_sim.h"
#include "harness.h"
#include "tp.h"

enum {
    GRANULE = 4096,
    EXTENT = 65536,
    LAYERS = 12,
    WEIGHT_BYTES = EXTENT,
    MIDDLE_BYTES = 2 * GRANULE, /* would be kept, if that could be */
    RESULT_BYTES = 4 * EXTENT,
    STRIDE = 4096,
    KERNEL_NS = 400,
    MIDDLE_NS = 1200,
    FIRST_MIDDLE = LAYERS,     /* storages: weights, middle results, results */
    FIRST_RESULT = 2 * LAYERS, /* those of a layer's second operator, which last */
    STORAGES = 3 * LAYERS,
    BUDGET = LAYERS * (WEIGHT_BYTES + RESULT_BYTES) / 2,
    INPUTS_MAX = 2
};

/* How its bytes were made. */
typedef struct recipe {
    bool kept;
    uint32_t inputs[INPUTS_MAX], input_count;
    uint64_t versions[INPUTS_MAX]; /* of the inputs */
} recipe;

typedef struct storage {
    tp_addr addr; /* 0: freed, or dropped */
    size_t bytes;
    uint64_t value, version; /* version: rises with each write and birth */
    bool alive;
    tp_dropped *dropped;
    bool parked; /* it is, and its bytes are kept */
    recipe recipe;
} storage;

typedef struct options {
    bool recompute, refuse, thread, no_plans;
    bool park;            /* of what moves: nobody can reach it */
    bool reads_more;      /* nested operators do, than is planned for */
    bool no_recipes;      /* it says of no operator any more that it could be run again */
    uint32_t switched_at; /* while that storage is made, recomputation goes off; 0: never */
    size_t budget_bytes;  /* 0: BUDGET */
} options;

typedef struct program {
    tp_device *dev;
    tp_core *core;
    tp_stream stream;
    storage storages[STORAGES];
    options options;
    uint64_t asked_count, dropped_count, made_again_count, kept_count, parked_count;
    uint64_t version;
    tp_addr beginning[INPUTS_MAX]; /* operands of the operator that begins; 0 */
    uint32_t written;              /* 1 + the storage that it writes; 0: none */
    atomic_uint wrong;
} program;

/* ---- kernels ----------------------------------------------------------------------------- */

typedef struct piece {
    tp_addr addr;
    size_t bytes;
    uint64_t found, left; /* 0: it is not read, or not written */
} piece;

typedef struct kernel {
    program *p;
    uint32_t count;
    piece pieces[INPUTS_MAX + 1];
} kernel;

static void kernel_run(tp_device *dev, void *arg) {
    kernel *k = arg;
    for (uint32_t i = 0; i < k->count; i++) {
        const piece *it = &k->pieces[i];
        for (size_t at = 0; at < it->bytes; at += STRIDE) {
            uint64_t word = 0;
            bool right = tp_sim_read(dev, it->addr + at, &word, sizeof word);
            if (it->found != 0) right = right && word == it->found + at;
            word = it->left + at;
            if (it->left != 0)
                right = right && tp_sim_write(dev, it->addr + at, &word, sizeof word);
            if (!right) atomic_fetch_add(&k->p->wrong, 1);
        }
    }
    free(k);
}

static void launch(program *p, const piece *pieces, uint32_t count) {
    kernel *k = malloc(sizeof *k);
    MUST(k != NULL);
    *k = (kernel){.p = p, .count = count};
    memcpy(k->pieces, pieces, count * sizeof *pieces);
    const bool makes_middle = pieces[count - 1].bytes == MIDDLE_BYTES;
    MUST_OK(tp_sim_launch(p->dev, p->stream, kernel_run, k,
                          makes_middle ? MIDDLE_NS : KERNEL_NS, &test_error));
}

/* What an operator makes of what it reads. */
static uint64_t result_of(const program *p, uint32_t idx, const recipe *it) {
    uint64_t value = (idx + 1) * 0x9E3779B97F4A7C15u;
    for (uint32_t i = 0; i < it->input_count; i++)
        value = (value ^ p->storages[it->inputs[i]].value) * 0xBF58476D1CE4E5B9u;
    return value | 1;
}

/* ---- making again ------------------------------------------------------------------------ */

static bool can_make(const program *p, uint32_t idx) {
    const recipe *it = &p->storages[idx].recipe;
    if (!it->kept) return false;
    for (uint32_t i = 0; i < it->input_count; i++) {
        const storage *input = &p->storages[it->inputs[i]];
        if (input->version != it->versions[i]) return false;
        const bool there = input->alive && (input->dropped == NULL || input->parked);
        if (!there && !can_make(p, it->inputs[i])) return false;
    }
    return true;
}

static void ensure_there(program *p, uint32_t idx);

/* The bytes of a storage in a block of their own. */
static tp_addr make_again(program *p, uint32_t idx) {
    const storage *s = &p->storages[idx];
    const recipe *it = &s->recipe;
    tp_addr found[INPUTS_MAX] = {0}, addr = 0;
    piece pieces[INPUTS_MAX + 1];
    tp_access accesses[INPUTS_MAX];
    for (uint32_t i = 0; i < it->input_count; i++) {
        storage *input = &p->storages[it->inputs[i]];
        EXPECT_EQ(input->version, it->versions[i]);
        if (input->alive) ensure_there(p, it->inputs[i]);
        found[i] = input->alive ? input->addr : make_again(p, it->inputs[i]);
        accesses[i] = (tp_access){found[i], false};
        pieces[i] = (piece){found[i], input->bytes, input->value, 0};
    }
    EXPECT_EQ(result_of(p, idx, it), s->value);
    tp_op op = {.name = tp_op_name("test::forward"), .rerun = true};
    tp_op_begin(p->core, &op, accesses, it->input_count, p->stream);
    MUST_OK(tp_alloc(p->core, s->bytes, p->stream, TP_ALLOC_PINNED | TP_ALLOC_RERUN, &addr,
                     NULL, &test_error));
    tp_op_adopt(&op, addr);
    pieces[it->input_count] = (piece){addr, s->bytes, 0, s->value};
    launch(p, pieces, it->input_count + 1);
    tp_op_end(&op, &addr, 1, NULL);
    tp_op_fini(&op);
    for (uint32_t i = 0; i < it->input_count; i++)
        if (!p->storages[it->inputs[i]].alive) tp_free(p->core, found[i]);
    p->made_again_count++;
    return addr;
}

static void ensure_there(program *p, uint32_t idx) {
    storage *s = &p->storages[idx];
    if (s->dropped == NULL) return;
    if (s->parked) {
        MUST_OK(tp_unpark(p->core, s->dropped, p->stream, false, &s->addr, NULL, &test_error));
    } else {
        s->addr = make_again(p, idx);
        tp_bring_back(p->core, s->dropped, s->addr, p->stream);
    }
    s->dropped = NULL;
    s->parked = false;
}

static bool is_made_of(const program *p, uint32_t idx, uint32_t other) {
    const recipe *it = &p->storages[idx].recipe;
    if (!it->kept) return false;
    for (uint32_t i = 0; i < it->input_count; i++)
        if (it->inputs[i] == other || is_made_of(p, it->inputs[i], other)) return true;
    return false;
}

static void let_park(program *p, tp_addr addr) {
    for (uint32_t i = FIRST_MIDDLE; i < STORAGES && p->options.park; i++) {
        storage *s = &p->storages[i];
        if (!s->alive || s->addr != addr) continue;
        if (tp_park(p->core, addr, &s->dropped, NULL) != TP_OK) continue;
        s->parked = true;
        s->addr = 0;
        p->parked_count++;
    }
}

/* The hook. */
static void let_go(void *ctx, tp_core *core, tp_addr addr, bool park) {
    program *p = ctx;
    if (park) {
        let_park(p, addr);
        return;
    }
    p->asked_count++;
    for (uint32_t i = 0; i < INPUTS_MAX; i++) EXPECT(addr != p->beginning[i]);
    if (p->options.refuse) return;
    for (uint32_t i = 0; i < STORAGES; i++) {
        storage *s = &p->storages[i];
        if (!s->alive || s->addr != addr || !can_make(p, i)) continue;
        /* What is made of it came back before it began. */
        if (p->written != 0 && is_made_of(p, i, p->written - 1)) continue;
        if (tp_drop(core, addr, p->stream, &s->dropped, NULL) != TP_OK) continue;
        s->addr = 0;
        p->dropped_count++;
    }
}

/* ---- operators --------------------------------------------------------------------------- */

static void begin_op(program *p, tp_op *op, const tp_access *accesses, size_t count) {
    for (size_t i = 0; i < count; i++) p->beginning[i] = accesses[i].addr;
    tp_op_begin(p->core, op, accesses, count, p->stream);
    memset(p->beginning, 0, sizeof p->beginning);
}

static void give_back(program *p, uint32_t idx) {
    storage *s = &p->storages[idx];
    if (!s->alive) return;
    if (s->dropped != NULL) {
        tp_drop_end(p->core, s->dropped);
    } else {
        tp_free(p->core, s->addr);
    }
    s->addr = 0;
    s->dropped = NULL;
    s->parked = false;
    s->alive = false;
}

static void born(program *p, uint32_t idx, size_t bytes, uint32_t flags) {
    storage *s = &p->storages[idx];
    give_back(p, idx);
    *s = (storage){.bytes = bytes, .alive = true, .version = ++p->version};
    MUST_OK(tp_alloc(p->core, bytes, p->stream, flags, &s->addr, NULL, &test_error));
}

/* An operator that another one calls fills what that one has allocated. */
static void call_filler(program *p, const piece *pieces, uint32_t count, tp_op *parent) {
    const tp_access access = {pieces[count - 1].addr, true};
    tp_op op = {.name = tp_op_name("test::fill")};
    begin_op(p, &op, &access, 1);
    launch(p, pieces, count);
    tp_op_end(&op, NULL, 0, parent);
    tp_op_fini(&op);
}

static void call_reader(program *p, const storage *s, tp_op *parent) {
    const tp_access access = {s->addr, false};
    tp_op op = {.name = tp_op_name("test::odd")};
    begin_op(p, &op, &access, 1);
    tp_op_end(&op, NULL, 0, parent);
    tp_op_fini(&op);
}

static bool calls_another(uint32_t idx) { return idx % 4 != 0; }

/* Makes a storage of others, most of them by an operator that calls another. */
static void forward(program *p, uint32_t idx, uint32_t first, uint32_t second) {
    recipe it = {.inputs = {first, second}, .input_count = 2};
    tp_access accesses[INPUTS_MAX];
    piece pieces[INPUTS_MAX + 1];
    for (uint32_t i = 0; i < it.input_count; i++) ensure_there(p, it.inputs[i]);
    for (uint32_t i = 0; i < it.input_count; i++) {
        const storage *input = &p->storages[it.inputs[i]];
        it.versions[i] = input->version;
        accesses[i] = (tp_access){input->addr, false};
        pieces[i] = (piece){input->addr, input->bytes, input->value, 0};
    }
    tp_op op = {.name = tp_op_name("test::forward"), .recipe = true};
    /* The first one draws random numbers, say. */
    op.recipe = idx != FIRST_MIDDLE && !p->options.no_recipes;
    begin_op(p, &op, accesses, it.input_count);
    if (idx == p->options.switched_at) tp_core_set_recompute(p->core, false, false);
    it.kept = op.keep_recipe;
    p->kept_count += op.keep_recipe;
    born(p, idx, idx < FIRST_RESULT ? MIDDLE_BYTES : RESULT_BYTES, TP_ALLOC_PINNED);
    storage *s = &p->storages[idx];
    tp_op_adopt(&op, s->addr);
    s->recipe = it;
    s->value = result_of(p, idx, &it);
    pieces[it.input_count] = (piece){s->addr, s->bytes, 0, s->value};
    if (calls_another(idx)) {
        call_filler(p, pieces, it.input_count + 1, &op);
        if (p->options.reads_more) call_reader(p, s, &op);
    } else {
        launch(p, pieces, it.input_count + 1);
    }
    tp_op_end(&op, &s->addr, 1, NULL);
    tp_op_fini(&op);
}

/* Reads two storages. */
static void backward(program *p, uint32_t first, uint32_t second) {
    const uint32_t reads[] = {first, second};
    tp_access accesses[2];
    piece pieces[2];
    for (uint32_t i = 0; i < 2; i++) ensure_there(p, reads[i]);
    for (uint32_t i = 0; i < 2; i++) {
        const storage *s = &p->storages[reads[i]];
        accesses[i] = (tp_access){s->addr, false};
        pieces[i] = (piece){s->addr, s->bytes, s->value, 0};
    }
    tp_op op = {.name = tp_op_name("test::backward"), .backward = true};
    begin_op(p, &op, accesses, 2);
    launch(p, pieces, 2);
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
}

/* What is made of it comes back first. */
static void write(program *p, uint32_t idx) {
    storage *s = &p->storages[idx];
    for (uint32_t i = 0; i < STORAGES; i++)
        if (p->storages[i].dropped != NULL && !p->storages[i].parked && is_made_of(p, i, idx))
            ensure_there(p, i);
    ensure_there(p, idx);
    const tp_access access = {s->addr, true};
    tp_op op = {.name = tp_op_name("test::update_")};
    p->written = idx + 1;
    begin_op(p, &op, &access, 1);
    p->written = 0;
    const uint64_t before = s->value;
    s->value = (before * 3 + 1) | 1;
    s->version = ++p->version;
    const piece it = {s->addr, s->bytes, before, s->value};
    launch(p, &it, 1);
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
}

/* ---- programs ---------------------------------------------------------------------------- */

static void open_program(program *p, const options *o) {
    memset(p, 0, sizeof *p);
    p->options = *o;
    const tp_sim_options sim = {.device_bytes = 32 * TP_MIB,
                                .granularity_bytes = GRANULE,
                                .seed = 5,
                                .poison = true,
                                .time_ordered = !o->thread};
    MUST_OK(tp_sim_device_create(&sim, &p->dev, &test_error));
    MUST_OK(tp_sim_stream_create(p->dev, &p->stream, &test_error));
    const tp_config config = {.device_budget_bytes =
                                  o->budget_bytes != 0 ? o->budget_bytes : BUDGET,
                              .host_budget_bytes = TP_NO_LIMIT,
                              .large_min_bytes = GRANULE,
                              .extent_max_bytes = EXTENT,
                              .segment_bytes = 64 * TP_MIB,
                              .offload = true,
                              .no_thread = !o->thread,
                              .hooks = {.ctx = p, .drop = let_go}};
    MUST_OK(tp_core_create(&config, p->dev, &p->core, &test_error));
    tp_core_set_recompute(p->core, o->park, o->recompute);
    tp_core_set_planning(p->core, !o->no_plans);
    for (uint32_t i = 0; i < LAYERS; i++) {
        born(p, i, WEIGHT_BYTES, 0);
        p->storages[i].value = i + 1;
        const piece it = {p->storages[i].addr, WEIGHT_BYTES, 0, i + 1};
        const tp_access access = {it.addr, true};
        tp_op op = {.name = tp_op_name("test::init_")};
        tp_op_begin(p->core, &op, &access, 1, p->stream);
        launch(p, &it, 1);
        tp_op_end(&op, NULL, 0, NULL);
        tp_op_fini(&op);
    }
}

static void drain(program *p) {
    while (tp_sim_step(p->dev)) continue;
}

static void close_program(program *p) {
    for (uint32_t i = 0; i < STORAGES; i++)
        if (p->storages[i].alive) backward(p, i, i);
    drain(p);
    EXPECT_OK(tp_core_check(p->core, &test_error));
    EXPECT_EQ(atomic_load(&p->wrong), 0);
    tp_core_destroy(p->core);
}

static tp_stats stats_of(const program *p) {
    tp_stats stats;
    tp_core_stats(p->core, &stats);
    return stats;
}

/* So that the pager's threads have time for what kernels would take. */
static void rest(const program *p, long us) {
    const struct timespec pause = {.tv_nsec = us * 1000};
    if (p->options.thread) (void)nanosleep(&pause, NULL);
}

static void go_forward(program *p) {
    for (uint32_t i = 0; i < LAYERS; i++) {
        const uint32_t before = i == 0 ? 0 : FIRST_RESULT + i - 1;
        forward(p, FIRST_MIDDLE + i, before, i);
        forward(p, FIRST_RESULT + i, FIRST_MIDDLE + i, i);
        give_back(p, FIRST_MIDDLE + i);
        rest(p, 100);
    }
}

static void go_backward(program *p, uint32_t until) {
    for (uint32_t i = LAYERS; i-- > until;) {
        backward(p, FIRST_RESULT + i, i);
        give_back(p, FIRST_RESULT + i);
        rest(p, 100);
    }
}

static void train(program *p) {
    go_forward(p);
    go_backward(p, 0);
    for (uint32_t i = 0; i < LAYERS; i++) write(p, i);
    tp_mark_step(p->core, TP_STEP_ASKED);
    rest(p, 500);
}

/* Until there is a plan that drops, or a plan at all. */
static void settle(program *p, bool drops) {
    for (int i = 0; i < (p->options.thread ? 60 : 8); i++) {
        const tp_stats stats = stats_of(p);
        if (stats.plans.count > 1 && (!drops || stats.planned_drop_bytes > 0)) break;
        train(p);
        rest(p, 5000);
    }
    EXPECT(stats_of(p).plans.count > 0);
    EXPECT_EQ(stats_of(p).planned_drop_bytes > 0, drops);
    for (int i = 0; i < 8; i++)
        train(p); /* it may have come in the middle, and others after it */
}

static void open_settled(program *p, const options *o) {
    open_program(p, o);
    settle(p, o->recompute);
}

typedef struct outcome {
    uint64_t moved_bytes, stall_ns, ns, drops, reruns, asked, kept, parks;
    uint64_t dropped_bytes, planned_drop_bytes; /* all of them; in one step */
} outcome;

static uint64_t moved_bytes(const program *p) {
    tp_sim_counts counts;
    tp_sim_get_counts(p->dev, &counts);
    return counts.bytes_to_host + counts.bytes_to_device;
}

static outcome now(const program *p) {
    const tp_stats stats = stats_of(p);
    return (outcome){.moved_bytes = moved_bytes(p),
                     .stall_ns = stats.stalls.ns,
                     .ns = tp_sim_clock_ns(p->dev),
                     .drops = stats.drops.count,
                     .reruns = p->made_again_count,
                     .asked = p->asked_count,
                     .kept = p->kept_count,
                     .parks = p->parked_count,
                     .dropped_bytes = stats.drops.bytes,
                     .planned_drop_bytes = stats.planned_drop_bytes};
}

static outcome run_steps(program *p, uint32_t count) {
    const outcome a = now(p);
    for (uint32_t i = 0; i < count; i++) train(p);
    drain(p);
    const outcome b = now(p);
    return (outcome){.moved_bytes = b.moved_bytes - a.moved_bytes,
                     .stall_ns = b.stall_ns - a.stall_ns,
                     .ns = b.ns - a.ns,
                     .drops = b.drops - a.drops,
                     .reruns = b.reruns - a.reruns,
                     .asked = b.asked - a.asked,
                     .kept = b.kept - a.kept,
                     .parks = b.parks - a.parks,
                     .dropped_bytes = b.dropped_bytes - a.dropped_bytes,
                     .planned_drop_bytes = b.planned_drop_bytes};
}

typedef struct digest {
    uint64_t hash;
    uint32_t ops, blocks, recipes;
} digest;

static void digest_step(void *ctx, const tp_step *step) {
    digest *it = ctx;
    *it = (digest){.ops = step->trace.op_count,
                   .blocks = step->trace.block_count,
                   .recipes = step->trace.recipe_count};
    for (uint32_t i = 0; i < step->trace.operand_count; i++)
        it->hash =
            it->hash * 31 + step->trace.operands[i].block * 4 + step->trace.operands[i].writes;
    for (uint32_t i = 0; i < step->trace.block_count; i++)
        it->hash = it->hash * 31 + step->trace.blocks[i].born_op * 3 +
                   step->trace.blocks[i].dead_op + step->trace.blocks[i].bytes;
    for (uint32_t i = 0; i < step->trace.recipe_block_count; i++)
        it->hash = it->hash * 31 + step->trace.recipe_blocks[i];
}

static outcome measure(const options *o, digest *recorded) {
    program p;
    open_settled(&p, o);
    const outcome found = run_steps(&p, 6);
    EXPECT(tp_last_step(p.core, digest_step, recorded));
    EXPECT_EQ(stats_of(&p).dropped.current, 0);
    (void)printf("  %s%s: %llu KiB moved, %llu us of stalls, %llu us in 6 steps, %llu drops, "
                 "%llu parks\n",
                 o->recompute ? "joint" : "paging", o->refuse ? ", refused" : "",
                 (unsigned long long)found.moved_bytes / 1024,
                 (unsigned long long)found.stall_ns / 1000, (unsigned long long)found.ns / 1000,
                 (unsigned long long)found.drops, (unsigned long long)found.parks);
    close_program(&p);
    return found;
}

TEST(dropped_blocks_are_made_again_instead_of_moved) {
    digest without = {0}, with = {0};
    const outcome page = measure(&(options){0}, &without);
    const outcome joint = measure(&(options){.recompute = true}, &with);
    EXPECT_EQ(page.drops + page.reruns + page.asked + page.kept, 0);
    EXPECT(joint.drops >= 6 && joint.reruns >= joint.drops);
    EXPECT_EQ(joint.drops, joint.asked);
    /* All that is planned, but for a step in which the plan may become another. */
    EXPECT(joint.dropped_bytes >= 5 * joint.planned_drop_bytes);
    EXPECT(joint.kept >= joint.drops);
    EXPECT(joint.kept < 6 * 2 * LAYERS); /* only what is needed */
    EXPECT(joint.moved_bytes < page.moved_bytes / 2);
    EXPECT(joint.stall_ns < page.stall_ns);
    EXPECT(joint.ns < page.ns);
    /* What is recorded is the program, not what is done for it. */
    EXPECT_EQ(with.hash, without.hash);
    EXPECT_EQ(with.ops, without.ops);
    EXPECT_EQ(with.blocks, without.blocks);
    EXPECT_EQ(with.recipes, 2 * LAYERS - 1);
    EXPECT_EQ(with.recipes, without.recipes);
}

/* More is to be moved than dropped: the budget is a third. */
TEST(parked_blocks_come_back_by_plan) {
    digest without = {0}, with = {0};
    const size_t budget = BUDGET * 2 / 3;
    const outcome joint =
        measure(&(options){.recompute = true, .budget_bytes = budget}, &without);
    const outcome parked =
        measure(&(options){.recompute = true, .park = true, .budget_bytes = budget}, &with);
    EXPECT_EQ(joint.parks, 0);
    EXPECT(parked.parks > 0);
    EXPECT(parked.ns <= joint.ns * 11 / 10);
    EXPECT_EQ(with.hash, without.hash);
    EXPECT_EQ(with.blocks, without.blocks);
}

TEST(drops_that_are_refused_cost_time_only) {
    digest ignored = {0};
    const outcome page = measure(&(options){0}, &ignored);
    const outcome joint = measure(&(options){.recompute = true, .refuse = true}, &ignored);
    EXPECT(joint.asked > 0);
    EXPECT_EQ(joint.drops + joint.reruns, 0);
    EXPECT(joint.ns < 4 * page.ns);
}

/* ---- programs that leave their plan ------------------------------------------------------ */

static void reset(program *p) {
    for (uint32_t i = FIRST_MIDDLE; i < STORAGES; i++) give_back(p, i);
}

/* Now and then something else than the step that is known, or part of it. */
static void wander(program *p, uint64_t *seed) {
    switch (test_random_below(seed, 8)) {
    case 0:
        go_forward(p);
        go_backward(p, (uint32_t)test_random_below(seed, LAYERS));
        reset(p);
        break;
    case 1: /* weights change before what was made of them is used */
        go_forward(p);
        for (int i = 0; i < 6; i++) write(p, (uint32_t)test_random_below(seed, LAYERS));
        go_backward(p, 0);
        tp_mark_step(p->core, TP_STEP_ASKED);
        break;
    case 2: /* in any order */
        go_forward(p);
        for (int i = 0; i < 20; i++)
            backward(p, FIRST_RESULT + (uint32_t)test_random_below(seed, LAYERS),
                     (uint32_t)test_random_below(seed, LAYERS));
        reset(p);
        tp_mark_step(p->core, TP_STEP_ASKED);
        break;
    case 3: (void)tp_evict_all(p->core); break;
    case 4: /* all over again, over what is there */
        for (int i = 0; i < 2; i++) go_forward(p);
        reset(p);
        break;
    default: train(p);
    }
}

static void disturb(program *p, uint64_t *seed) {
    const uint64_t choice = test_random_below(seed, 12);
    const size_t budget = BUDGET + test_random_below(seed, 8) * RESULT_BYTES;
    if (choice == 0) tp_core_set_recompute(p->core, false, test_random_below(seed, 2) == 0);
    if (choice == 1) tp_core_set_planning(p->core, test_random_below(seed, 2) == 0);
    if (choice == 2) p->options.refuse = test_random_below(seed, 3) == 0;
    if (choice == 3) EXPECT_OK(tp_core_set_budget(p->core, budget, TP_NO_LIMIT, &test_error));
    if (choice == 4) {
        EXPECT_OK(tp_core_set_budget(p->core, 4 * BUDGET, TP_NO_LIMIT, &test_error));
        EXPECT_OK(tp_core_set_offload(p->core, false, &test_error));
        go_forward(p);
        go_backward(p, LAYERS / 2);
        EXPECT_OK(tp_core_set_offload(p->core, true, &test_error));
        EXPECT_OK(tp_core_set_budget(p->core, budget, TP_NO_LIMIT, &test_error));
        reset(p);
    }
}

static void leave_plans(bool thread, bool park, unsigned rounds, uint64_t seed) {
    program p;
    const size_t budget = park ? BUDGET * 2 / 3 : BUDGET;
    open_settled(
        &p,
        &(options){.recompute = true, .thread = thread, .park = park, .budget_bytes = budget});
    for (unsigned i = 0; i < rounds; i++) {
        wander(&p, &seed);
        EXPECT_OK(tp_core_check(p.core, &test_error));
    }
    EXPECT(p.dropped_count > 0 && p.made_again_count > 0);
    EXPECT_EQ(p.parked_count > 0, park);
    for (unsigned i = 0; i < rounds; i++) {
        wander(&p, &seed);
        disturb(&p, &seed);
        EXPECT_OK(tp_core_check(p.core, &test_error));
    }
    close_program(&p);
}

TEST(program_that_leaves_its_plans_with_drops_has_right_bytes) {
    for (unsigned i = 0; i < test_rounds(10); i++)
        leave_plans(false, i % 2 != 0, 30, test_seed() + i);
}

TEST(program_that_leaves_its_plans_beside_the_pagers_threads_has_right_bytes) {
    leave_plans(true, false, test_rounds(20), test_seed());
    leave_plans(true, true, test_rounds(20), test_seed());
}

/* ---- one thing at a time ----------------------------------------------------------------- */

TEST(drops_wait_for_opaque_regions) {
    program p;
    open_settled(&p, &(options){.recompute = true});
    const uint64_t before = p.asked_count;
    tp_region region = {0};
    tp_region_begin(p.core, &region, NULL, 0, p.stream);
    go_forward(&p);
    EXPECT_EQ(p.asked_count, before);
    tp_region_end(&region);
    tp_region_fini(&region);
    go_backward(&p, 0);
    EXPECT(p.asked_count > before);
    close_program(&p);
}

/* Results of operators that call others: the plan drops them while those are in progress. */
static uint32_t nested_dropped(const program *p) {
    uint32_t count = 0;
    for (uint32_t i = FIRST_RESULT; i < STORAGES; i++)
        count += calls_another(i) && p->storages[i].dropped != NULL;
    return count;
}

TEST(block_that_is_used_again_at_once_stays) {
    program p;
    open_settled(&p, &(options){.recompute = true});
    go_forward(&p);
    EXPECT(nested_dropped(&p) > 1);
    go_backward(&p, 0);
    for (int i = 0; i < 2; i++) train(&p);
    p.options.reads_more = true;
    go_forward(&p);
    EXPECT_EQ(nested_dropped(&p), 0);
    reset(&p);
    close_program(&p);
}

TEST(block_that_is_gone_is_not_told_of) {
    program p;
    open_settled(&p, &(options){.recompute = true});
    const uint64_t before = p.asked_count;
    tp_region region = {0};
    tp_region_begin(p.core, &region, NULL, 0, p.stream);
    go_forward(&p);
    reset(&p);
    for (uint32_t i = FIRST_RESULT; i < FIRST_RESULT + 4; i++)
        born(&p, i, RESULT_BYTES, TP_ALLOC_SEEN);
    tp_region_end(&region);
    tp_region_fini(&region);
    for (uint32_t i = 0; i < 3; i++) write(&p, i); /* others are in their place now */
    EXPECT_EQ(p.asked_count, before);
    reset(&p);
    close_program(&p);
}

TEST(recipe_that_nobody_offers_is_not_asked_for) {
    program p;
    open_settled(&p, &(options){.recompute = true});
    p.options.no_recipes = true;
    const outcome found = run_steps(&p, 1);
    EXPECT_EQ(found.kept + found.drops, 0);
    EXPECT(found.asked > 0); /* to no avail */
    for (int i = 0; i < 3; i++) train(&p);
    EXPECT_EQ(stats_of(&p).planned_drop_bytes, 0); /* it has been learnt */
    p.options.no_recipes = false;
    for (int i = 0; i < 4; i++) train(&p);
    EXPECT(stats_of(&p).planned_drop_bytes > 0);
    close_program(&p);
}

/* Behind an operator whose recipe is needed. */
static void expect_odd_keeps_nothing(program *p, uint32_t idx) {
    ensure_there(p, idx);
    const tp_access access = {p->storages[idx].addr, false};
    tp_op op = {.name = tp_op_name("test::odd"), .recipe = true, .keep_recipe = true};
    begin_op(p, &op, &access, 1);
    EXPECT(!op.keep_recipe);
    tp_op_end(&op, NULL, 0, NULL);
    tp_op_fini(&op);
}

TEST(operator_that_is_not_in_the_plan_keeps_no_recipe) {
    program p;
    open_settled(&p, &(options){.recompute = true});
    uint32_t found = 0;
    for (uint32_t i = 0; i < LAYERS; i++) {
        forward(&p, FIRST_MIDDLE + i, i == 0 ? 0 : FIRST_RESULT + i - 1, i);
        forward(&p, FIRST_RESULT + i, FIRST_MIDDLE + i, i);
        give_back(&p, FIRST_MIDDLE + i);
        if (!p.storages[FIRST_RESULT + i].recipe.kept) continue;
        found++;
        expect_odd_keeps_nothing(&p, i);
    }
    EXPECT(found > 1); /* the program is found again after each */
    close_program(&p);
}

TEST(parking_alone_drops_nothing) {
    digest with;
    const outcome moved = measure(&(options){0}, &with);
    const outcome parked = measure(&(options){.park = true}, &with);
    EXPECT_EQ(moved.parks, 0);
    EXPECT(parked.parks > 0);
    EXPECT_EQ(parked.asked + parked.drops + parked.planned_drop_bytes, 0);
    EXPECT(parked.kept > 0);                 /* what is parked is known by its recipe */
    EXPECT(parked.ns <= moved.ns * 11 / 10); /* mapping takes no time on this device */
}

/* ---- switching --------------------------------------------------------------------------- */

TEST(switching_makes_plans_anew) {
    program p;
    open_settled(&p, &(options){0});
    EXPECT_EQ(run_steps(&p, 2).asked, 0);
    tp_core_set_recompute(p.core, false, true);
    train(&p);
    train(&p);
    EXPECT(stats_of(&p).planned_drop_bytes > 0);
    EXPECT(run_steps(&p, 2).drops > 0);
    tp_core_set_recompute(p.core, false, false);
    const outcome after = run_steps(&p, 2);
    EXPECT_EQ(after.asked + after.kept + after.parks, 0);
    EXPECT_EQ(stats_of(&p).planned_drop_bytes, 0);
    close_program(&p);
}

TEST(switched_off_in_mid_step_it_drops_nothing_more) {
    for (uint32_t i = 1; i < LAYERS; i++) {
        program p;
        open_program(&p, &(options){.recompute = true});
        settle(&p, true);
        /* In an operator behind which the layer before it may be dropped. */
        p.options.switched_at = FIRST_MIDDLE + i;
        uint64_t asked = 0;
        for (uint32_t k = 0; k < LAYERS; k++) {
            if (k == i) asked = p.asked_count;
            forward(&p, FIRST_MIDDLE + k, k == 0 ? 0 : FIRST_RESULT + k - 1, k);
            forward(&p, FIRST_RESULT + k, FIRST_MIDDLE + k, k);
            give_back(&p, FIRST_MIDDLE + k);
        }
        EXPECT_EQ(p.asked_count, asked);
        go_backward(&p, 0);
        close_program(&p);
    }
}

TEST(what_is_dropped_comes_back_whatever_is_switched_off_meanwhile) {
    program p;
    open_settled(&p, &(options){.recompute = true});
    for (int i = 0; i < 3; i++) {
        go_forward(&p);
        EXPECT(stats_of(&p).dropped.current > 0);
        if (i == 0) tp_core_set_planning(p.core, false);
        if (i == 1) tp_core_set_recompute(p.core, false, false);
        if (i == 2) {
            EXPECT_OK(tp_core_set_budget(p.core, 4 * BUDGET, TP_NO_LIMIT, &test_error));
            EXPECT_OK(tp_core_set_offload(p.core, false, &test_error));
        }
        go_backward(&p, 0);
        EXPECT_EQ(stats_of(&p).dropped.current, 0);
        for (uint32_t k = 0; k < LAYERS; k++) write(&p, k);
        tp_mark_step(p.core, TP_STEP_ASKED);
        tp_core_set_planning(p.core, true);
        tp_core_set_recompute(p.core, false, true);
        for (int k = 0; k < 3; k++) train(&p);
    }
    close_program(&p);
}
