#include "pager/name.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

typedef struct entry {
    bool streams;
    char text[];
} entry;

/* By hash, with open addressing. A place once taken stays. */
static _Atomic(entry *) table[TP_NAMES_MAX];
static atomic_uint count;

static bool starts_with(const char *text, const char *start) {
    return strncmp(text, start, strlen(start)) == 0;
}

/* Optimizers' lists, and what is done in place element by element. */
static bool streams(const char *name) {
    static const char *const in_place[] = {"add_",     "sub_",  "mul_",  "div_",
                                           "addcmul_", "lerp_", "sqrt_", "addcdiv_",
                                           "copy_",    "zero_", "fill_"};
    const char *colons = strstr(name, "::");
    if (colons == NULL) return false;
    const char *bare = colons + 2;
    if (starts_with(bare, "_foreach_") || starts_with(bare, "_fused_")) return true;
    const size_t length = strcspn(bare, ".");
    for (size_t i = 0; i < sizeof in_place / sizeof in_place[0]; i++) {
        if (strlen(in_place[i]) == length && strncmp(bare, in_place[i], length) == 0)
            return true;
    }
    return false;
}

static entry *entry_new(const char *name) {
    const size_t bytes = strlen(name) + 1;
    entry *made = malloc(sizeof *made + bytes);
    if (made == NULL) return NULL;
    made->streams = streams(name);
    memcpy(made->text, name, bytes);
    return made;
}

uint32_t tp_name_id(const char *name) {
    uint32_t hash = 2166136261u;
    for (const char *at = name; *at != '\0'; at++) hash = (hash ^ (uint8_t)*at) * 16777619u;
    for (uint32_t i = 0; i < TP_NAMES_MAX; i++) {
        const uint32_t place = (hash + i) % TP_NAMES_MAX;
        if (place == 0) continue; /* 0 is no number */
        entry *found = atomic_load(&table[place]);
        if (found == NULL) {
            /* Some places stay free, so that a search for what is not there ends. */
            if (atomic_load(&count) > TP_NAMES_MAX / 4 * 3) return 0;
            entry *made = entry_new(name);
            if (made == NULL) return 0;
            if (atomic_compare_exchange_strong(&table[place], &found, made)) {
                atomic_fetch_add(&count, 1);
                return place;
            }
            free(made); /* another thread was faster; `found` is what it put there */
        }
        if (strcmp(found->text, name) == 0) return place;
    }
    return 0;
}

const char *tp_name_text(uint32_t id) {
    const entry *found = id < TP_NAMES_MAX ? atomic_load(&table[id]) : NULL;
    return found == NULL ? "" : found->text;
}

bool tp_name_streams(uint32_t id) {
    const entry *found = id < TP_NAMES_MAX ? atomic_load(&table[id]) : NULL;
    return found != NULL && found->streams;
}
