/* torch_hook: the operator hook, one global at::RecordFunction callback (torch_hook.cpp). It
 * is part of the extension torchpager._torch_cpu and reaches the doors through cores.h. */
#ifndef TP_BIND_TORCH_HOOK_H
#define TP_BIND_TORCH_HOOK_H

#include <ATen/core/TensorBody.h>

#include <cstdint>
#include <vector>

#include "pager/types.h"

namespace torchpager {

/* Joins the hook to the cores. Once a process. */
void hook_connect();
/* The hook is armed as far as any core wants it, and at least to `level`. */
void hook_force(tp_arming level);
/* Operators seen so far, on all threads. */
uint64_t hook_call_count();
/* What is known of operators by name is found out anew. */
void hook_forget_operators();
/* True while the callback is told of every operator. */
bool hook_watches();

/* What code outside the dispatcher does. */
enum CallMode : unsigned {
    kCallHolds = 1, /* as an operator: what it names, and what is allocated inside, stays */
    kCallGates = 2, /* it is an opaque region */
    kCallReruns =
        16, /* it makes again what was dropped: as kCallHolds, but no part of the program */
    kCallLifts = 4 /* it announces everything it launches: regions around it open the gate */
};

struct CallOperand {
    at::Tensor tensor;
    bool write;
};

/* Such code in progress: from construction to destruction, on one thread. Does nothing
 * while hook_watches() is false. May wait. */
class HookCall {
  public:
    HookCall(unsigned mode, const std::vector<CallOperand> &operands);
    ~HookCall();
    HookCall(const HookCall &) = delete;
    HookCall &operator=(const HookCall &) = delete;

  private:
    void *frame_ = nullptr;
    void *regions_ = nullptr;
    std::vector<int> lifted_; /* slots */
};

} // namespace torchpager

#endif
