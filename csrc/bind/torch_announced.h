/* torch_announced: a callable around a Python function that launches kernels of its own
 * (Triton's and Inductor's launchers, compiled graphs): around each call the pager is told what
 * it uses. Part of the extension torchpager._torch_cpu. */
#ifndef TP_BIND_TORCH_ANNOUNCED_H
#define TP_BIND_TORCH_ANNOUNCED_H

#include <Python.h>

namespace torchpager {

/* announced(function, mode): see _torch_cpu.pyi. */
PyObject *announced_new(PyObject *module, PyObject *args, PyObject *kwargs);
/* Makes the type. False with an exception set. */
bool announced_ready();

} // namespace torchpager

#endif
