/* torch_recompute: recipes of tensors, storages whose bytes have been dropped, and making them
 * again.
 *
 * A recipe is an operator with its arguments: tensors by storage and geometry, everything else
 * by value. Where a recipe is known for a storage, and nothing but autograd can reach it, its
 * bytes may be dropped: the core frees the block (tp_drop), the storage is left with no memory
 * and refuses to hand out a pointer. Before an operator, or anything else that is announced,
 * uses it, the recipe runs again, below autograd and autocast, and the storage gets the block
 * that this made.
 *
 * What the plan moves to the host instead is parked (tp_park) if it is such a storage: it loses its
 * memory in the same way, and its bytes are brought back by copying them.
 *
 * Nothing here throws, but what says so. */
#ifndef TP_BIND_TORCH_RECOMPUTE_H
#define TP_BIND_TORCH_RECOMPUTE_H

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/ivalue.h>

#include <atomic>
#include <memory>
#include <vector>

#include "bind/torch_recompute_table.h"
#include "tp.h"

namespace torchpager {

/* ---- which operators may run again --------------------------------------------------------- */

/* What an operator's schema and name say. */
struct Rerunnable {
    bool possible = false;
    NoRecipe why = NoRecipe::NONE;                    /* not possible */
    bool autocast_cuda = false, autocast_cpu = false; /* it has a kernel for autocast */
    size_t arguments = 0;
    int dropout = -1; /* the argument that has to be 0 */
    bool convolution = false;
};
/* One that writes what its schema does not say keeps statistics or the like, and one whose results
 * hold nothing has not made them. */
Rerunnable rerunnable(const c10::OperatorHandle &op, bool writes_unannotated, bool makes_empty);

/* What keeps a tensor's bytes where they are, or lets them be made again as they were. A test can take
 * each rule away; nothing else does. */
enum RecomputeRule : uint32_t {
    kRuleRandom = 1 << 0,     /* no operator that draws random numbers runs again */
    kRuleStatistics = 1 << 1, /* nor one that keeps statistics */
    kRuleNotTheSame = 1 << 2, /* nor one that makes other bits each time */
    kRuleTrial = 1 << 3,      /* each kind runs beside a kept result first */
    kRuleLeafWrite = 1 << 4,  /* before an input is written, what is made of it comes back */
    kRulePython = 1 << 5,     /* what Python has a reference to stays */
    kRuleHolders = 1 << 6,    /* and what somebody unknown has one to */
    kRuleRegion = 1 << 7,     /* and what code uses or makes that nobody can look into */
    kRuleHooks = 1 << 8,      /* and what is made while hooks are given what autograd saves */
    kRuleAutocast = 1 << 9,   /* an operator runs again below autocast */
    kRuleBackward = 1 << 10,  /* what a backward pass makes stays */
    kRuleNumerics = 1 << 11,  /* settings are those of the first time */
    kRuleForeign = 1 << 12,   /* no input is memory whose address was handed out */
    kRuleSaved = 1 << 13,     /* autograd holds what it has saved until its node has run */
    kRuleKernel = 1 << 14, /* nothing made inside of an operator with a kernel has a recipe */
    kRuleCounted = 1 << 15 /* what somebody has a reference to who is not autograd stays */
};
/* The sum of those that are taken away. hook_forget_operators() goes with it. */
void recompute_rules_off(uint32_t mask);

/* ---- recipes ----------------------------------------------------------------------------- */

class Recipe;

/* A storage among what an operator, or other code, is about to use. */
struct Touch {
    c10::StorageImpl *storage;
    bool write;
};

enum RecomputeMode {
    kRecomputeOff,
    kRecomputePlanned, /* recipes of what a plan will drop */
    kRecomputeForced,  /* everything is dropped as soon as it may be: for tests */
    kRecomputeParked   /* likewise, and its bytes are kept */
};
RecomputeMode recompute_mode();
/* Off: everything comes back first. May wait. */
void recompute_set_mode(RecomputeMode mode);

/* Storages with a recipe, with their bytes or without: nothing here has anything to do while
 * there are none. */
extern std::atomic<uint32_t> recompute_tracked;
inline bool recompute_tracks() {
    return recompute_tracked.load(std::memory_order_relaxed) != 0;
}

/* Whether an operator that begins now only casts for itself, below autocast. */
bool recompute_wraps(const Rerunnable &use);
/* Why an operator that begins now may not run again, which its schema allows; NONE: it may. */
NoRecipe recompute_refuses(const Rerunnable &use, c10::ArrayRef<const c10::IValue> inputs);
/* A block was born in an operator without a recipe. Counted if autograd may keep it. */
void recompute_note_born(const std::optional<c10::OperatorHandle> &op, tp_core *core,
                         tp_addr addr, NoRecipe why);
/* Its recipe; null: it has none. May throw bad_alloc. */
std::shared_ptr<Recipe> recompute_capture(const c10::OperatorHandle &op,
                                          c10::ArrayRef<const c10::IValue> inputs);
/* It has ended with `outputs`. Those of its storages that lie at one of `born` have a recipe
 * now. May throw bad_alloc. */
void recompute_captured(const std::shared_ptr<Recipe> &recipe,
                        c10::ArrayRef<c10::IValue> outputs, const std::vector<tp_addr> &born);
/* Tensors that share a storage: an operator has made a view. May throw bad_alloc. */
bool recompute_knows(c10::ArrayRef<const c10::IValue> inputs);
void recompute_note_views(c10::ArrayRef<c10::IValue> outputs);

/* What an operator leaves behind on its operands' tensors is what autograd has saved of them: a
 * reference that is not counted so belongs to code that nobody knows, which may use it anyhow. */
struct Counted {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    tp_addr addr;  /* of its storage */
    size_t before; /* references, without the operator's own */
};
/* An operator of PyTorch's begins that is not inside of another. `out` gets those of its operands
 * that may be parked or dropped one day. May throw bad_alloc. */
void recompute_count_before(c10::ArrayRef<const c10::IValue> inputs, std::vector<Counted> &out);
/* It has ended. May throw bad_alloc. */
void recompute_count_after(const std::vector<Counted> &counted,
                           c10::ArrayRef<c10::IValue> outputs);

/* ---- dropping and bringing back -------------------------------------------------------------- */

/* An operator begins that uses these: what is dropped of them comes back, and what was made of
 * those that are written. Tries drops that are due on others. False: something could not be made
 * again. May wait. */
bool recompute_before_operator(const std::vector<Touch> &touches);
bool recompute_any_dropped(const std::vector<Touch> &touches);
/* The same for code that cannot be looked into: they are never dropped from now on. */
bool recompute_before_region(const std::vector<Touch> &touches);
/* The tensor is about to be swapped with another, which takes that nobody has a weak reference. */
void recompute_forget_tensor(const at::Tensor &tensor);
/* Whether there is such code, as far as this file is asked. */
bool recompute_region_matters();
/* Likewise, whether operators keep those inside of them from having recipes. */
bool recompute_kernels_matter();
/* A node of autograd begins to run: what it has saved is its own no longer. */
void recompute_node_runs(uint64_t sequence, uint64_t thread);

/* Nobody can raise an exception before an operator. Where there is no memory to make again what it
 * uses, it gets one from every allocator of ours, until it has ended: this is its text, or null. */
const char *recompute_lacks_memory();
void recompute_forget_memory();
/* Between finding the addresses of operands and pinning them nothing is dropped. */
class RecomputeHold {
  public:
    RecomputeHold();
    ~RecomputeHold();
    RecomputeHold(const RecomputeHold &) = delete;
    RecomputeHold &operator=(const RecomputeHold &) = delete;

  private:
    bool counted_;
};
/* The plan says so: before one of the next operators, as soon as it may be. Runs nothing. `park`: the bytes
 * are kept. */
void recompute_drop(tp_core *core, tp_addr addr, bool park);
/* A block is freed. */
void recompute_freed(tp_addr addr);
/* Everything of one core comes back, or of all (null). False: something could not. May wait. */
bool recompute_bring_all_back(tp_core *core);

/* In a forked child there is nothing to run on. */
void recompute_disable_after_fork();

struct RecomputeCounts {
    uint64_t trials, failed_trials; /* kinds of recipe that were run beside the kept result */
    uint64_t failed_reruns;
    uint64_t refused_held,
        refused_inputs; /* drops not made: somebody may reach it; inputs gone */
};
RecomputeCounts recompute_counts();

} // namespace torchpager

#endif
