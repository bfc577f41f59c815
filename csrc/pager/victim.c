#include "pager/victim.h"

#include "base/bytes.h"

/* How many of the oldest candidates hold `bytes` together. */
static size_t window(const tp_candidate *candidates, size_t count, size_t bytes) {
    size_t sum = 0, idx = 0;
    while (idx < count && sum < bytes) {
        sum += candidates[idx].clean_bytes + candidates[idx].dirty_bytes;
        idx++;
    }
    return idx;
}

size_t tp_victim_choose(tp_candidate *candidates, size_t count, size_t need_bytes) {
    const size_t near =
        window(candidates, count, need_bytes > SIZE_MAX / 2 ? SIZE_MAX : 2 * need_bytes);
    size_t got = 0;
    for (size_t i = 0; i < count; i++) {
        const size_t take =
            i < near ? tp_min_size(candidates[i].clean_bytes, tp_sub_floor(need_bytes, got))
                     : 0;
        candidates[i].take_clean_bytes = take;
        candidates[i].take_dirty_bytes = 0;
        got += take;
    }
    for (size_t i = 0; i < count && got < need_bytes; i++) {
        tp_candidate *it = &candidates[i];
        const size_t dirty = tp_min_size(it->dirty_bytes, need_bytes - got);
        it->take_dirty_bytes = dirty;
        got += dirty;
        const size_t clean =
            tp_min_size(it->clean_bytes - it->take_clean_bytes, tp_sub_floor(need_bytes, got));
        it->take_clean_bytes += clean;
        got += clean;
    }
    return got;
}
