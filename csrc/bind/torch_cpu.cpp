/* The CPU door: an allocator that takes large CPU storages from the simulated device's core.
 *
 * Everything it hands out carries one deleter, which finds the owner of the pointer by its
 * address; so storages of either side may outlive the door, and raw_allocate's contract
 * holds. */
#include "bind/torch_glue.h"

#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Storage.h>

#include <atomic>
#include <mutex>

#include <pthread.h>

#include "bind/torch_announced.h"
#include "bind/torch_collectives.h"
#include "bind/torch_hook.h"
#include "bind/torch_recompute.h"

namespace torchpager {
namespace {

std::atomic<c10::DeleterFnPtr> native_deleter{nullptr};
std::atomic<bool> forked{false}; /* in a child process: blocks of ours are left alone */

void door_delete(void *ptr) {
    tp_core *core = tp_core_owning(addr_of(ptr));
    if (core == nullptr) {
        native_deleter.load(std::memory_order_relaxed)(ptr);
    } else if (!forked.load(std::memory_order_relaxed)) {
        tp_bind_free(core, addr_of(ptr));
    }
}

void fill_if_asked(void *ptr, size_t bytes) {
    if (C10_LIKELY(!tp_glance_asks())) return;
    const unsigned char byte = tp_bind_filler();
    if (C10_UNLIKELY(byte != 0) && ptr != nullptr) std::memset(ptr, byte, bytes);
}

class CpuDoor final : public c10::Allocator {
  public:
    c10::DataPtr allocate(size_t n) override {
        throw_if_memory_lacks();
        if (n >= large_min.load(std::memory_order_relaxed)) {
            tp_core *core = tp_core_at(TP_SLOT_SIM);
            if (core != nullptr) {
                void *ptr = alloc_or_throw(core, TP_SLOT_SIM, n, nullptr);
                fill_if_asked(ptr, n);
                return {ptr, ptr, &door_delete, c10::Device(c10::DeviceType::CPU)};
            }
        }
        c10::DataPtr data = native.load(std::memory_order_relaxed)->allocate(n);
        (void)data.compare_exchange_deleter(native_deleter.load(std::memory_order_relaxed),
                                            &door_delete);
        fill_if_asked(data.get(), n);
        return data;
    }
    bool is_simple_data_ptr(const c10::DataPtr &data) const override {
        return data.get() == data.get_context();
    }
    c10::DeleterFnPtr raw_deleter() const override { return &door_delete; }
    void copy_data(void *dest, const void *src, std::size_t count) const override {
        default_copy_data(dest, src, count);
    }

    std::atomic<c10::Allocator *> native{nullptr};
    std::atomic<size_t> large_min{SIZE_MAX}; /* SIZE_MAX: the door is shut */
};

CpuDoor &door() {
    static auto *instance = new CpuDoor; /* storages point at it until the process ends */
    return *instance;
}

std::mutex install_mutex; /* never held while Python runs */
bool is_installed = false;
bool fork_handler_set = false;

bool registry_set(c10::Allocator *allocator) {
    return registry_swap(
        [](c10::Allocator *each, uint8_t priority) { c10::SetCPUAllocator(each, priority); },
        [] { return c10::GetCPUAllocator(); }, allocator);
}

/* A child process has no pager thread: it gives PyTorch's allocator back. */
void after_fork_in_child() {
    forked.store(true);
    door().large_min.store(SIZE_MAX);
    if (is_installed && c10::GetCPUAllocator() == &door()) registry_set(door().native.load());
    is_installed = false;
}

/* Null, or why the door cannot be installed. Needs install_mutex. */
const char *install_locked(size_t large_min) {
    if (forked.load()) return "torchpager does not work in a forked child process";
    if (is_installed) return "the CPU door is installed already";
    c10::Allocator *found = c10::GetCPUAllocator();
    const c10::DeleterFnPtr deleter = found->raw_deleter();
    const c10::DeleterFnPtr known = native_deleter.load();
    if (deleter == nullptr || (known != nullptr && known != deleter)) {
        return "another CPU allocator is installed that torchpager cannot wrap";
    }
    if (!fork_handler_set) {
        if (pthread_atfork(nullptr, nullptr, after_fork_in_child) != 0) return "out of memory";
        fork_handler_set = true;
    }
    native_deleter.store(deleter);
    door().native.store(found);
    if (!registry_set(&door())) return "PyTorch refused another CPU allocator";
    door().large_min.store(large_min);
    is_installed = true;
    return nullptr;
}

const char *uninstall_locked() {
    if (!is_installed) return nullptr;
    if (c10::GetCPUAllocator() != &door()) {
        return "another CPU allocator has been installed since; take that one out first";
    }
    door().large_min.store(SIZE_MAX);
    registry_set(door().native.load());
    is_installed = false;
    return nullptr;
}

/* ---- adopting ---------------------------------------------------------------------------- */

/* Null, or why the storage cannot be moved. */
const char *refuses(const c10::StorageImpl *storage, const c10::DataPtr &data) {
    const c10::DeleterFnPtr native = native_deleter.load();
    if (!data.device().is_cpu()) return "the tensor is not on the CPU";
    if (native == nullptr) return "the CPU door has never been installed";
    if (data.get() != data.get_context() ||
        (data.get_deleter() != native && data.get_deleter() != &door_delete)) {
        return "its memory does not belong to PyTorch (made from NumPy or a foreign buffer, "
               "shared with another process, mapped from a file, or a lazy copy): clone() it "
               "first";
    }
    if (!storage->resizable()) return "its storage has a fixed address";
    return nullptr;
}

/* Copies the storage into a block of `core` and swaps the memory under it. Throws. */
void move_storage(c10::StorageImpl *storage, tp_core *core) {
    c10::DataPtr &data = storage->_mutable_data_ptr_no_checks();
    const size_t bytes = storage->nbytes();
    void *ptr = alloc_or_throw(core, TP_SLOT_SIM, bytes, nullptr);
    c10::DataPtr moved(ptr, ptr, &door_delete, data.device());
    tp_error error{};
    if (tp_touch(core, addr_of(ptr), true, nullptr, &error) != TP_OK) {
        throw_alloc_error(TP_SLOT_SIM, tp_oom{}, error);
    }
    /* Not seen yet, so it does not move while it is filled. */
    std::memcpy(ptr, data.get(), bytes);
    storage->set_data_ptr_noswap(std::move(moved));
    storage->set_allocator(&door());
    tp_mark_seen(core, addr_of(ptr));
}

/* ---- the module -------------------------------------------------------------------------- */

PyObject *raise_runtime(const char *text) {
    PyErr_SetString(PyExc_RuntimeError, text);
    return nullptr;
}

PyObject *cpu_install(PyObject *, PyObject *args, PyObject *kwargs) {
    static char name[] = "large_min";
    static char *names[] = {name, nullptr};
    Py_ssize_t large_min = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "n", names, &large_min)) return nullptr;
    if (large_min <= 0) {
        PyErr_SetString(PyExc_ValueError, "large_min must be positive");
        return nullptr;
    }
    const std::lock_guard<std::mutex> guard(install_mutex);
    const char *problem = install_locked(static_cast<size_t>(large_min));
    if (problem != nullptr) return raise_runtime(problem);
    Py_RETURN_NONE;
}

PyObject *cpu_uninstall(PyObject *, PyObject *) {
    const std::lock_guard<std::mutex> guard(install_mutex);
    const char *problem = uninstall_locked();
    if (problem != nullptr) return raise_runtime(problem);
    Py_RETURN_NONE;
}

PyObject *cpu_installed(PyObject *, PyObject *) {
    const std::lock_guard<std::mutex> guard(install_mutex);
    return PyBool_FromLong(is_installed && c10::GetCPUAllocator() == &door());
}

PyObject *cpu_adopt(PyObject *, PyObject *object) {
    HANDLE_TH_ERRORS
    c10::StorageImpl *storage = storage_of(object);
    if (storage == nullptr) return nullptr;
    const c10::DataPtr &data = storage->_mutable_data_ptr_no_checks();
    if (data.get() == nullptr) return PyLong_FromLong(0);
    if (tp_core_owning(addr_of(data.get())) != nullptr) return PyLong_FromLong(0);
    if (storage->nbytes() < door().large_min.load()) return PyLong_FromLong(0);
    tp_core *core = tp_core_at(TP_SLOT_SIM);
    if (core == nullptr) return raise_runtime("no simulated device is open");
    if (const char *problem = refuses(storage, data)) return raise_runtime(problem);
    move_storage(storage, core);
    return PyLong_FromSize_t(storage->nbytes());
    END_HANDLE_TH_ERRORS
}

PyObject *cpu_is_door_storage(PyObject *, PyObject *object) {
    HANDLE_TH_ERRORS
    c10::StorageImpl *storage = storage_of(object);
    if (storage == nullptr) return nullptr;
    const void *ptr = storage->_mutable_data_ptr_no_checks().get();
    return PyBool_FromLong(tp_core_owning(addr_of(ptr)) != nullptr);
    END_HANDLE_TH_ERRORS
}

PyObject *cpu_hook_calls(PyObject *, PyObject *) {
    return PyLong_FromUnsignedLongLong(hook_call_count());
}

PyObject *cpu_hook_forced(PyObject *, PyObject *arg) {
    const long level = PyLong_AsLong(arg);
    if (level == -1 && PyErr_Occurred()) return nullptr;
    if (level < TP_ARM_OFF || level > TP_ARM_FULL) {
        PyErr_Format(PyExc_ValueError, "level is %ld; possible are 0 to %d", level,
                     static_cast<int>(TP_ARM_FULL));
        return nullptr;
    }
    hook_force(static_cast<tp_arming>(level));
    Py_RETURN_NONE;
}

PyObject *cpu_defer_collectives(PyObject *, PyObject *arg) {
    const long change = PyLong_AsLong(arg);
    if (change == -1 && PyErr_Occurred()) return nullptr;
    collectives_defer(change < 0 ? -1 : 1);
    Py_RETURN_NONE;
}

PyObject *cpu_recompute_mode(PyObject *, PyObject *arg) {
    const long mode = PyLong_AsLong(arg);
    if (mode == -1 && PyErr_Occurred()) return nullptr;
    if (mode < kRecomputeOff || mode > kRecomputeParked) {
        PyErr_Format(PyExc_ValueError, "mode is %ld; possible are 0 to %d", mode,
                     static_cast<int>(kRecomputeParked));
        return nullptr;
    }
    recompute_set_mode(static_cast<RecomputeMode>(mode));
    Py_RETURN_NONE;
}

PyObject *cpu_recompute_counts(PyObject *, PyObject *) {
    const RecomputeCounts counts = recompute_counts();
    return Py_BuildValue("{s:K,s:K,s:K,s:K,s:K}", "trials", counts.trials, "failed_trials",
                         counts.failed_trials, "failed_reruns", counts.failed_reruns,
                         "refused_held", counts.refused_held, "refused_inputs",
                         counts.refused_inputs);
}

/* A new reference, or null with an exception. */
PyObject *row_to_py(const OperatorRow &row) {
    PyObject *kept = PyDict_New();
    for (size_t i = 0; kept != nullptr && i < row.kept.size(); i++) {
        if (row.kept[i] == 0) continue;
        PyObject *count = PyLong_FromUnsignedLongLong(row.kept[i]);
        const bool set =
            count != nullptr &&
            PyDict_SetItemString(kept, kept_name(static_cast<Kept>(i)), count) == 0;
        Py_XDECREF(count);
        if (!set) Py_CLEAR(kept);
    }
    if (kept == nullptr) return nullptr;
    return Py_BuildValue("{s:s,s:K,s:K,s:K,s:K,s:K,s:N,s:K,s:s,s:K}", "name", row.name.c_str(),
                         "drops", row.drops, "dropped_bytes", row.dropped_bytes, "parks",
                         row.parks, "parked_bytes", row.parked_bytes, "reruns", row.reruns,
                         "kept", kept, "kept_bytes", row.kept_bytes, "why_no_recipe",
                         no_recipe_text(row.why), "without_recipe_bytes",
                         row.without_recipe_bytes);
}

PyObject *cpu_recompute_table(PyObject *, PyObject *) {
    HANDLE_TH_ERRORS
    const std::vector<OperatorRow> rows = table_rows();
    PyObject *list = PyList_New(0);
    for (size_t i = 0; list != nullptr && i < rows.size(); i++) {
        PyObject *row = row_to_py(rows[i]);
        if (row == nullptr || PyList_Append(list, row) != 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
    END_HANDLE_TH_ERRORS
}

/* Null: it has none of its own. */
c10::StorageImpl *any_storage_of(PyObject *object) {
    if (THPStorage_Check(object)) return THPStorage_Unpack(object).unsafeGetStorageImpl();
    if (!THPVariable_Check(object)) return nullptr;
    const c10::Storage &storage =
        THPVariable_Unpack(object).unsafeGetTensorImpl()->unsafe_storage();
    return storage ? storage.unsafeGetStorageImpl() : nullptr;
}

PyObject *cpu_bring_back(PyObject *, PyObject *args) {
    HANDLE_TH_ERRORS
    PyObject *object = nullptr;
    int write = 0;
    if (!PyArg_ParseTuple(args, "O|p", &object, &write)) return nullptr;
    if (object == Py_None) return PyBool_FromLong(recompute_bring_all_back(nullptr));
    c10::StorageImpl *storage = recompute_tracks() ? any_storage_of(object) : nullptr;
    if (storage == nullptr) Py_RETURN_TRUE;
    return PyBool_FromLong(recompute_before_region({{storage, write != 0}}));
    END_HANDLE_TH_ERRORS
}

PyObject *cpu_forget_tensor(PyObject *, PyObject *object) {
    HANDLE_TH_ERRORS
    if (recompute_tracks() && THPVariable_Check(object)) {
        recompute_forget_tensor(THPVariable_Unpack(object));
    }
    Py_RETURN_NONE;
    END_HANDLE_TH_ERRORS
}

PyObject *cpu_is_dropped(PyObject *, PyObject *object) {
    c10::StorageImpl *storage = any_storage_of(object);
    return PyBool_FromLong(storage != nullptr && recompute_any_dropped({{storage, false}}));
}

PyObject *cpu_recompute_rules_off(PyObject *, PyObject *arg) {
    const unsigned long mask = PyLong_AsUnsignedLong(arg);
    if (PyErr_Occurred() != nullptr) return nullptr;
    recompute_rules_off(static_cast<uint32_t>(mask));
    hook_forget_operators();
    Py_RETURN_NONE;
}

PyObject *cpu_hook_watches(PyObject *, PyObject *) { return PyBool_FromLong(hook_watches()); }

PyMethodDef methods[] = {
    {"announced", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(announced_new)),
     METH_VARARGS | METH_KEYWORDS, nullptr},
    {"hook_watches", cpu_hook_watches, METH_NOARGS, nullptr},
    {"install", reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(cpu_install)),
     METH_VARARGS | METH_KEYWORDS, nullptr},
    {"uninstall", cpu_uninstall, METH_NOARGS, nullptr},
    {"installed", cpu_installed, METH_NOARGS, nullptr},
    {"adopt", cpu_adopt, METH_O, nullptr},
    {"is_door_storage", cpu_is_door_storage, METH_O, nullptr},
    {"hook_calls", cpu_hook_calls, METH_NOARGS, nullptr},
    {"hook_forced", cpu_hook_forced, METH_O, nullptr},
    {"recompute_mode", cpu_recompute_mode, METH_O, nullptr},
    {"recompute_counts", cpu_recompute_counts, METH_NOARGS, nullptr},
    {"recompute_table", cpu_recompute_table, METH_NOARGS, nullptr},
    {"forget_tensor", cpu_forget_tensor, METH_O, nullptr},
    {"is_dropped", cpu_is_dropped, METH_O, nullptr},
    {"recompute_rules_off", cpu_recompute_rules_off, METH_O, nullptr},
    {"bring_back", cpu_bring_back, METH_VARARGS, nullptr},
    {"defer_collectives", cpu_defer_collectives, METH_O, nullptr},
    {nullptr, nullptr, 0, nullptr},
};

int module_exec(PyObject *module) {
    if (!check_torch_version("torchpager._torch_cpu")) return -1;
    if (!announced_ready()) return -1;
    hook_connect();
    return PyModule_AddStringConstant(module, "TORCH_VERSION", TP_TORCH_VERSION);
}

PyModuleDef_Slot module_slots[] = {
    {Py_mod_exec, reinterpret_cast<void *>(module_exec)},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED},
#endif
    {0, nullptr},
};

PyModuleDef module_def = {
    PyModuleDef_HEAD_INIT,
    "torchpager._torch_cpu",
    "The CPU door and the operator hook.",
    0,
    methods,
    module_slots,
    nullptr,
    nullptr,
    nullptr,
};

} // namespace
} // namespace torchpager

PyMODINIT_FUNC PyInit__torch_cpu(void) { return PyModuleDef_Init(&torchpager::module_def); }
