#include "pager/small.h"

#include <stdlib.h>

#include "base/bytes.h"
#include "base/check.h"
#include "pager/access.h"
#include "pager/alloc.h"
#include "pager/learn.h"

enum { UNITS = 4096 }; /* pieces of a slab are multiples of slab bytes / UNITS */

typedef struct tp_slab {
    tp_link link;
    tp_addr addr;
    size_t bytes, unit_bytes;
    tp_stream stream;
    tp_suballoc sub;
    tp_span *spans[UNITS];  /* by first unit */
    tp_uses *shared[UNITS]; /* streams other than the slab's that use the piece, or NULL */
} tp_slab;

typedef struct tp_pending {
    tp_link link;
    tp_slab *slab;
    uint32_t unit;
} tp_pending;

void tp_small_init(tp_small *small) {
    tp_list_init(&small->slabs);
    tp_list_init(&small->pending);
}

static void slab_fini(tp_slab *slab) {
    tp_list_remove(&slab->link);
    for (uint32_t i = 0; i < UNITS; i++) free(slab->shared[i]);
    tp_suballoc_fini(&slab->sub);
    free(slab);
}

void tp_small_fini(tp_small *small) {
    while (!tp_list_empty(&small->pending)) {
        tp_pending *pending = TP_CONTAINER(small->pending.next, tp_pending, link);
        tp_list_remove(&pending->link);
        free(pending);
    }
    while (!tp_list_empty(&small->slabs)) {
        slab_fini(TP_CONTAINER(small->slabs.next, tp_slab, link));
    }
}

static tp_slab *slab_of(const tp_small *small, tp_addr addr) {
    for (tp_link *link = small->slabs.next; link != &small->slabs; link = link->next) {
        tp_slab *slab = TP_CONTAINER(link, tp_slab, link);
        if (addr - slab->addr < slab->bytes) return slab;
    }
    return NULL;
}

bool tp_small_holds(const tp_small *small, tp_addr block_addr) {
    return slab_of(small, block_addr) != NULL;
}

/* Two kinds of slab: small pieces in 2 MiB, larger ones (up to large_min) in 16 MiB. */
static size_t slab_bytes_for(const tp_pager *pager, size_t bytes) {
    const size_t small = tp_max_size(2 * TP_MIB, pager->space.granularity_bytes);
    return bytes <= small / 8 ? small : tp_max_size(16 * TP_MIB, 4 * pager->large_min_bytes);
}

static tp_status slab_new(tp_small *small, tp_pager *pager, size_t bytes, tp_stream stream,
                          tp_slab **out, tp_oom *oom, tp_error *error) {
    tp_slab *slab = calloc(1, sizeof *slab);
    if (slab == NULL) return tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a slab");
    tp_list_init(&slab->link);
    tp_status status = tp_suballoc_init(&slab->sub, UNITS, error);
    if (status != TP_OK) goto no_sub;
    status = tp_block_alloc(pager, bytes, stream, 0, &slab->addr, oom, error);
    if (status != TP_OK) goto no_block;
    tp_block *block = tp_block_live(pager, slab->addr);
    block->slab = true;
    tp_learn_forget(pager, block);
    slab->bytes = bytes;
    slab->unit_bytes = bytes / UNITS;
    slab->stream = stream;
    tp_list_push_back(&small->slabs, &slab->link);
    *out = slab;
    return TP_OK;
no_block:
    tp_suballoc_fini(&slab->sub);
no_sub:
    free(slab);
    return status;
}

static bool piece_take(tp_slab *slab, size_t bytes, tp_addr *out) {
    const uint64_t units = tp_round_up(bytes, slab->unit_bytes) / slab->unit_bytes;
    tp_span *span = tp_suballoc_take(&slab->sub, units);
    if (span == NULL) return false;
    slab->spans[span->start] = span;
    *out = slab->addr + span->start * slab->unit_bytes;
    return true;
}

static void piece_put(tp_slab *slab, uint32_t unit) {
    free(slab->shared[unit]);
    slab->shared[unit] = NULL;
    tp_suballoc_put(&slab->sub, slab->spans[unit]);
    slab->spans[unit] = NULL;
}

static void reap(tp_small *small, tp_pager *pager) {
    for (tp_link *link = small->pending.next, *next; link != &small->pending; link = next) {
        next = link->next;
        tp_pending *pending = TP_CONTAINER(link, tp_pending, link);
        tp_uses *uses = pending->slab->shared[pending->unit];
        if (!tp_uses_done(&pager->markers, uses)) continue;
        tp_list_remove(link);
        piece_put(pending->slab, pending->unit);
        free(pending);
    }
}

tp_status tp_small_alloc(tp_small *small, tp_pager *pager, size_t bytes, tp_stream stream,
                         tp_addr *out, tp_oom *oom, tp_error *error) {
    if (bytes == 0) return tp_error_set(error, TP_INVALID, "a block of 0 bytes was asked for");
    const size_t slab_bytes = slab_bytes_for(pager, bytes);
    reap(small, pager);
    for (tp_link *link = small->slabs.next; link != &small->slabs; link = link->next) {
        tp_slab *slab = TP_CONTAINER(link, tp_slab, link);
        if (slab->stream != stream || slab->bytes != slab_bytes) continue;
        if (piece_take(slab, bytes, out)) return TP_OK;
    }
    tp_slab *slab = NULL;
    const tp_status status = slab_new(small, pager, slab_bytes, stream, &slab, oom, error);
    if (status != TP_OK) return status;
    return piece_take(slab, bytes, out)
               ? TP_OK
               : tp_error_set(error, TP_NO_HOST_MEMORY, "no memory for a small block");
}

static bool piece_find(const tp_small *small, tp_addr addr, tp_slab **slab, uint32_t *unit) {
    *slab = slab_of(small, addr);
    if (*slab == NULL) return false;
    const uint64_t offset = addr - (*slab)->addr;
    *unit = (uint32_t)(offset / (*slab)->unit_bytes);
    return offset % (*slab)->unit_bytes == 0 && (*slab)->spans[*unit] != NULL;
}

void tp_small_free(tp_small *small, tp_pager *pager, tp_addr addr) {
    tp_slab *slab = NULL;
    uint32_t unit = 0;
    if (!piece_find(small, addr, &slab, &unit)) return;
    if (slab->shared[unit] == NULL) {
        piece_put(slab, unit);
        return;
    }
    /* Behind the other streams. What cannot be marked or remembered is never reused. */
    tp_pending *pending = calloc(1, sizeof *pending);
    if (pending == NULL || pager->capture_depth > 0 ||
        tp_uses_refresh(&pager->markers, slab->shared[unit], NULL) != TP_OK) {
        free(pending);
        return;
    }
    pending->slab = slab;
    pending->unit = unit;
    tp_list_push_back(&small->pending, &pending->link);
}

void tp_small_record_stream(tp_small *small, tp_pager *pager, tp_addr addr, tp_stream stream) {
    tp_slab *slab = NULL;
    uint32_t unit = 0, lane = 0;
    if (!piece_find(small, addr, &slab, &unit) || slab->stream == stream) return;
    if (slab->shared[unit] == NULL) slab->shared[unit] = calloc(1, sizeof(tp_uses));
    tp_uses *uses = slab->shared[unit];
    if (uses == NULL) {
        slab->spans[unit] = NULL; /* its free is forgotten: never reused */
    } else if (tp_markers_lane(&pager->markers, stream, &lane, NULL) != TP_OK ||
               tp_uses_add(&pager->markers, uses, (tp_marker){lane, 0}, true, NULL) != TP_OK) {
        tp_uses_lose(uses);
    }
}

bool tp_small_trim(tp_small *small, tp_pager *pager) {
    bool any = false;
    reap(small, pager);
    for (tp_link *link = small->slabs.next, *next; link != &small->slabs; link = next) {
        next = link->next;
        tp_slab *slab = TP_CONTAINER(link, tp_slab, link);
        if (!tp_suballoc_idle(&slab->sub)) continue;
        tp_block *block = tp_block_live(pager, slab->addr);
        slab_fini(slab);
        if (block != NULL) tp_block_free(pager, block);
        any = true;
    }
    return any;
}
