/* torch_collectives: operators of c10d, whose work goes on, on threads and streams of its own,
 * after the operator has returned. The hook gives them away to here when they end; their blocks
 * stay pinned until the work says that it is done.
 *
 * Nobody is told when that happens, so it is asked for: now and then by whoever runs operators
 * or allocates, and by every thread that waits for memory. */
#ifndef TP_BIND_TORCH_COLLECTIVES_H
#define TP_BIND_TORCH_COLLECTIVES_H

#include <ATen/core/ivalue.h>

#include <vector>

#include "tp.h"

namespace torchpager {

using CollectiveWork = c10::intrusive_ptr<torch::CustomClassHolder>;

/* True if `value` is a c10d::Work; *work is null where the backend had nothing to return: what
 * the operator asked for is ordered on the current stream. */
bool collective_work(const c10::IValue &value, CollectiveWork *work);
/* Whether the work is done. Never while a stream is captured: it may have to ask an event. */
bool collective_done(const CollectiveWork &work, tp_core *core);
/* Keeps the operators, which have been detached, until the work is done, and ends them then.
 * They and their pins are this module's from now on. Throws std::bad_alloc, and then they are
 * not. */
void collectives_hold(const CollectiveWork &work, std::vector<tp_op> &&ops);
/* Ends the operators whose work is done. Not `now`: only if it was not done just before. */
void collectives_settle(bool now);
/* The core is about to be destroyed; it has no live blocks. Not to be called with the GIL. */
void collectives_forget(tp_core *core);

/* Between a call with 1 and one with -1, anywhere in the process, the work of collectives begins
 * only later (NCCL's groups), and what it says of itself is not true. */
void collectives_defer(int change);
bool collectives_deferred();

} // namespace torchpager

#endif
