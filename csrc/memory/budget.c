#include "memory/budget.h"

#include "base/bytes.h"

size_t tp_budget_frame_cap(const tp_budget *budget) {
    return tp_sub_floor(budget->limit_bytes, budget->foreign_cap_bytes);
}

bool tp_budget_admits(const tp_budget *budget, size_t created_bytes, size_t bytes) {
    const size_t cap = tp_budget_frame_cap(budget);
    return created_bytes <= cap && bytes <= cap - created_bytes;
}

bool tp_budget_admits_host(const tp_budget *budget, size_t created_bytes, size_t bytes) {
    return created_bytes <= budget->host_limit_bytes &&
           bytes <= budget->host_limit_bytes - created_bytes;
}

size_t tp_budget_watch_bytes(const tp_budget *budget) { return budget->limit_bytes / 2; }

size_t tp_budget_foreign_target(const tp_budget *budget, size_t foreign_held_bytes) {
    const size_t room = tp_min_size(budget->limit_bytes / 64, 64 * TP_MIB);
    return tp_min_size(foreign_held_bytes + room, budget->limit_bytes);
}

size_t tp_budget_reclaim_start(const tp_budget *budget) {
    return tp_min_size(budget->limit_bytes / 32, 512 * TP_MIB);
}

size_t tp_budget_reclaim_stop(const tp_budget *budget) {
    return 2 * tp_budget_reclaim_start(budget);
}
