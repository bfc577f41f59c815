/* torch_recompute_table: what has come of making bytes again, by operator. For people: nothing is decided by
 * it.
 *
 * One row for each operator that was ever wanted to run again, or could not be. It has a mutex of its
 * own, taken last. What cannot be counted for want of host memory is not. */
#ifndef TP_BIND_TORCH_RECOMPUTE_TABLE_H
#define TP_BIND_TORCH_RECOMPUTE_TABLE_H

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace torchpager {

/* Why what an operator made kept its bytes, when it was their turn. */
enum class Kept : uint8_t {
    HELD,     /* somebody has a reference to it that autograd does not account for */
    INPUTS,   /* what the operator needs is gone, or was written */
    SEEN,     /* code that cannot be looked into has used it */
    SETTINGS, /* numeric settings are others than when it was made */
    TRIAL,    /* the operator made other bits when it was tried, or could not be tried */
    BUSY,     /* it was in use, or it could not move, as often as that was tried */
    COUNT
};
const char *kept_name(Kept why);

/* Why an operator has no recipe. */
enum class NoRecipe : uint8_t {
    NONE, /* it has one, if that is wanted */
    INSIDE, /* the operator around it stands for it; or it is part of a backward pass or a rerun */
    FOREIGN,
    WRITES,
    DIFFERS,
    STATISTICS,
    EMPTY,
    DATA,
    RANDOM,
    REGION,
    HOOKS,
    MODES,
    BENCHMARK,
    COUNT
};
/* A sentence without its subject, the operator. */
const char *no_recipe_text(NoRecipe why);

struct OperatorRow {
    std::string name; /* "aten::add.Tensor" */
    uint64_t drops = 0, dropped_bytes = 0, parks = 0, parked_bytes = 0;
    uint64_t reruns = 0; /* for others that need its result as well; trials are none */
    std::array<uint64_t, static_cast<size_t>(Kept::COUNT)> kept{};
    uint64_t kept_bytes = 0;
    NoRecipe why = NoRecipe::NONE; /* the last time */
    uint64_t without_recipe_bytes = 0;
};

void table_gave_up(const std::string &name, size_t bytes, bool parked) noexcept;
void table_ran_again(const std::string &name) noexcept;
void table_kept(const std::string &name, size_t bytes, Kept why) noexcept;
void table_has_no_recipe(const std::string &name, size_t bytes, NoRecipe why) noexcept;
/* May throw bad_alloc. */
std::vector<OperatorRow> table_rows();

} // namespace torchpager

#endif
