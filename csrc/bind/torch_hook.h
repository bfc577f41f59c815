/* torch_hook: the operator hook, one global at::RecordFunction callback (torch_hook.cpp). It
 * is part of the extension torchpager._torch_cpu and reaches the doors through cores.h. */
#ifndef TP_BIND_TORCH_HOOK_H
#define TP_BIND_TORCH_HOOK_H

#include <cstdint>

#include "pager/types.h"

namespace torchpager {

/* Joins the hook to the cores. Once a process. */
void hook_connect();
/* The hook is armed as far as any core wants it, and at least to `level`. */
void hook_force(tp_arming level);
/* Operators seen so far, on all threads. */
uint64_t hook_call_count();
/* In a forked child: nothing of ours is touched any more. */
void hook_disable_after_fork();

} // namespace torchpager

#endif
