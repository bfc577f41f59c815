/* torch_glue: what the two glue modules share: error raising, storages, the version check.
 * C++ only, header only: each module is one small shared object. */
#ifndef TP_BIND_TORCH_GLUE_H
#define TP_BIND_TORCH_GLUE_H

#include <Python.h>

#include <c10/core/StorageImpl.h>
#include <c10/util/Exception.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <string>

#include "base/glance.h"
#include "bind/cores.h"
#include "bind/oom_text.h"

#ifndef TP_TORCH_VERSION
#error "setup.py defines TP_TORCH_VERSION, the torch that is built against, such as \"2.14.1\""
#endif

namespace torchpager {

/* Raises what PyTorch raises when memory is short; any other failure as a plain torch error. */
[[noreturn]] inline void throw_alloc_error(int slot, const tp_oom &oom, const tp_error &error) {
    const c10::SourceLocation where = {__func__, __FILE__, static_cast<uint32_t>(__LINE__)};
    char text[TP_OOM_TEXT_BYTES];
    if (tp_oom_text(text, sizeof text, slot, &oom, &error)) {
        throw c10::OutOfMemoryError(where, std::string(text));
    }
    throw c10::Error(where, std::string(text));
}

/* Before a door allocates: raises what this thread's operator is due. */
inline void throw_if_memory_lacks() {
    if (C10_LIKELY(!tp_glance_asks())) return;
    const char *text = tp_bind_lacks_memory();
    if (C10_LIKELY(text == nullptr)) return;
    throw c10::OutOfMemoryError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)},
                                std::string(text));
}

/* A block for a door, or the exception. */
inline void *alloc_or_throw(tp_core *core, int slot, size_t bytes, tp_stream stream) {
    tp_oom oom{};
    oom.requested_bytes = bytes;
    tp_error error{};
    tp_addr addr = 0;
    if (tp_bind_alloc(core, bytes, stream, &addr, &oom, &error) != TP_OK) {
        throw_alloc_error(slot, oom, error);
    }
    return reinterpret_cast<void *>(addr);
}

inline tp_addr addr_of(const void *ptr) { return reinterpret_cast<tp_addr>(ptr); }

/* The storage of a Python tensor with memory of its own; null with an exception set if it
 * has none. */
inline c10::StorageImpl *storage_of(PyObject *object) {
    if (!THPVariable_Check(object)) {
        PyErr_SetString(PyExc_TypeError, "a torch.Tensor was expected");
        return nullptr;
    }
    const at::Tensor &tensor = THPVariable_Unpack(object);
    const c10::Storage &storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
    if (!storage) {
        PyErr_SetString(
            PyExc_RuntimeError,
            "this tensor has no storage of its own (sparse, nested or wrapped): adopt the "
            "tensors it is made of");
        return nullptr;
    }
    return storage.unsafeGetStorageImpl();
}

/* Up to the second dot: "2.14" of "2.14.1+cu130". */
inline std::string minor_of(const char *version) {
    const char *dot = std::strchr(version, '.');
    const char *second = dot != nullptr ? std::strchr(dot + 1, '.') : nullptr;
    return second != nullptr ? std::string(version, second) : std::string(version);
}

/* False with ImportError set when the torch that is imported is of another minor. */
inline bool check_torch_version(const char *module_name) {
    PyObject *torch = PyImport_ImportModule("torch");
    if (torch == nullptr) return false;
    PyObject *version = PyObject_GetAttrString(torch, "__version__");
    Py_DECREF(torch);
    if (version == nullptr) return false;
    const char *found = PyUnicode_AsUTF8(version);
    const bool same = found != nullptr && minor_of(found) == minor_of(TP_TORCH_VERSION);
    if (found != nullptr && !same) {
        PyErr_Format(
            PyExc_ImportError,
            "%s was built against torch %s, but torch %s is installed: reinstall torchpager "
            "with this torch (pip install --no-build-isolation --force-reinstall --no-deps "
            "torchpager)",
            module_name, TP_TORCH_VERSION, found);
    }
    Py_DECREF(version);
    return same;
}

/* Installs `allocator` for a device type without changing anything else: the smallest
 * priority that the registry accepts is the one it holds. True if the registry took it. */
template <class Set, class Get>
bool registry_swap(Set set, Get get, c10::Allocator *allocator) {
    for (int priority = 0; priority <= 255; priority++) {
        set(allocator, static_cast<uint8_t>(priority));
        if (get() == allocator) return true;
    }
    return false;
}

} // namespace torchpager

#endif
