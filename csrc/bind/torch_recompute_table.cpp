#include "bind/torch_recompute_table.h"

#include <mutex>
#include <unordered_map>

namespace torchpager {
namespace {

struct Table {
    std::mutex mutex;
    std::unordered_map<std::string, OperatorRow> rows;
};

Table &table() {
    static auto *instance = new Table; /* autograd's threads may outlive static objects */
    return *instance;
}

template <class Change> void change(const std::string &name, const Change &how) noexcept {
    try {
        Table &t = table();
        const std::lock_guard<std::mutex> guard(t.mutex);
        how(t.rows[name]);
    } catch (...) {
        return; /* not counted */
    }
}

} // namespace

const char *kept_name(Kept why) {
    switch (why) {
    case Kept::HELD: return "held";
    case Kept::INPUTS: return "inputs";
    case Kept::SEEN: return "seen";
    case Kept::SETTINGS: return "settings";
    case Kept::TRIAL: return "trial";
    case Kept::BUSY: return "busy";
    case Kept::COUNT: break;
    }
    return "";
}

const char *no_recipe_text(NoRecipe why) {
    switch (why) {
    case NoRecipe::FOREIGN: return "is not one of PyTorch's own";
    case NoRecipe::WRITES: return "writes to an operand, or returns one";
    case NoRecipe::DIFFERS: return "may make other bits each time";
    case NoRecipe::STATISTICS: return "updates statistics, or writes what it does not declare";
    case NoRecipe::EMPTY: return "makes no contents, others write them";
    case NoRecipe::DATA: return "makes a result whose size depends on data";
    case NoRecipe::RANDOM: return "draws random numbers";
    case NoRecipe::REGION: return "ran in code that cannot be looked into";
    case NoRecipe::HOOKS: return "ran while saved-tensor hooks were in force";
    case NoRecipe::MODES: return "ran under a dispatch mode or a function transform";
    case NoRecipe::BENCHMARK: return "chooses its algorithm by measuring (cudnn.benchmark)";
    case NoRecipe::NONE:
    case NoRecipe::INSIDE:
    case NoRecipe::COUNT: break;
    }
    return "";
}

void table_gave_up(const std::string &name, size_t bytes, bool parked) noexcept {
    change(name, [=](OperatorRow &row) {
        (parked ? row.parks : row.drops)++;
        (parked ? row.parked_bytes : row.dropped_bytes) += bytes;
    });
}

void table_ran_again(const std::string &name) noexcept {
    change(name, [](OperatorRow &row) { row.reruns++; });
}

void table_kept(const std::string &name, size_t bytes, Kept why) noexcept {
    change(name, [=](OperatorRow &row) {
        row.kept[static_cast<size_t>(why)]++;
        row.kept_bytes += bytes;
    });
}

void table_has_no_recipe(const std::string &name, size_t bytes, NoRecipe why) noexcept {
    change(name, [=](OperatorRow &row) {
        row.why = why;
        row.without_recipe_bytes += bytes;
    });
}

std::vector<OperatorRow> table_rows() {
    Table &t = table();
    const std::lock_guard<std::mutex> guard(t.mutex);
    std::vector<OperatorRow> rows;
    for (const auto &entry : t.rows) {
        rows.push_back(entry.second);
        rows.back().name = entry.first;
    }
    return rows;
}

} // namespace torchpager
