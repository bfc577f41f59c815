/* step_py: a recorded step as Python sees it (last_step in python/torchpager/_core.pyi). */
#ifndef TP_BIND_STEP_PY_H
#define TP_BIND_STEP_PY_H

#include "tp.h"

/* A new reference to a PyObject. NULL: a Python error is set. */
void *tp_bind_last_step(tp_core *core);

#endif
