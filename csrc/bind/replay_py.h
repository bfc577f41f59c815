/* replay_py: bind/replay.h as Python sees it (replay in python/torchpager/_core.pyi). */
#ifndef TP_BIND_REPLAY_PY_H
#define TP_BIND_REPLAY_PY_H

#include "base/status.h"

/* `args` and `kwargs` are those of the call, borrowed PyObjects. NULL: a Python error is set or, if
 * not, *error says what the core answered. Releases the GIL while it runs. */
void *tp_bind_replay(void *args, void *kwargs, tp_error *error);

#endif
