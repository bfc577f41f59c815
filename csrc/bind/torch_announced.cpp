#include "bind/torch_announced.h"

#include <torch/csrc/autograd/python_variable.h>

#include <cstddef>
#include <vector>

#include <structmember.h>

#include "bind/torch_hook.h"

namespace torchpager {
namespace {

/* Not in the modes of the hook: the arguments of self.fn.arg_names that begin with "in_ptr" are
 * only read (Inductor's kernels). */
constexpr unsigned kNamesReads = 8;
constexpr int kDepth = 4; /* of containers among the arguments */

struct Announced {
    PyObject_HEAD PyObject *function;
    vectorcallfunc call;
    unsigned mode;
};

void collect(PyObject *value, bool write, int depth, std::vector<CallOperand> &out) {
    if (THPVariable_Check(value)) {
        out.push_back({THPVariable_Unpack(value), write});
        return;
    }
    if (depth == 0) return;
    if (PyTuple_Check(value) || PyList_Check(value)) {
        /* By index: the list may change its size while a tensor's class is looked up. */
        for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(value); i++) {
            collect(PySequence_Fast_GET_ITEM(value, i), write, depth - 1, out);
        }
        return;
    }
    if (value == Py_None || PyLong_Check(value) || PyFloat_Check(value) ||
        PyUnicode_Check(value) || PyCallable_Check(value)) {
        return;
    }
    /* Triton's descriptors and reinterpreted tensors carry theirs as an attribute. */
    PyObject *base = PyObject_GetAttrString(value, "base");
    if (base == nullptr) {
        PyErr_Clear();
        return;
    }
    collect(base, write, depth - 1, out);
    Py_DECREF(base);
}

/* Whether names[idx] begins with "in_ptr". */
bool only_read(PyObject *names, Py_ssize_t idx) {
    if (names == nullptr || !PyList_Check(names) || idx >= PyList_GET_SIZE(names)) return false;
    PyObject *name = PyList_GET_ITEM(names, idx);
    if (!PyUnicode_Check(name)) return false;
    PyObject *start = PyUnicode_FromString("in_ptr");
    const Py_ssize_t found =
        start != nullptr ? PyUnicode_Tailmatch(name, start, 0, PY_SSIZE_T_MAX, -1) : 0;
    Py_XDECREF(start);
    if (found < 0 || start == nullptr) PyErr_Clear();
    return found > 0;
}

/* self.fn.arg_names, or null without an exception. */
PyObject *argument_names(PyObject *self) {
    PyObject *fn = PyObject_GetAttrString(self, "fn");
    PyObject *names = fn != nullptr ? PyObject_GetAttrString(fn, "arg_names") : nullptr;
    Py_XDECREF(fn);
    if (names == nullptr) PyErr_Clear();
    return names;
}

std::vector<CallOperand> operands_of(unsigned mode, PyObject *const *args, Py_ssize_t count,
                                     Py_ssize_t positional) {
    std::vector<CallOperand> operands;
    PyObject *names =
        (mode & kNamesReads) != 0 && positional > 0 ? argument_names(args[0]) : nullptr;
    for (Py_ssize_t i = 0; i < count; i++) {
        const bool read = i > 0 && i < positional && only_read(names, i - 1);
        collect(args[i], !read, kDepth, operands);
    }
    Py_XDECREF(names);
    return operands;
}

PyObject *announced_call(PyObject *object, PyObject *const *args, size_t flagged,
                         PyObject *keywords) {
    auto *self = reinterpret_cast<Announced *>(object);
    if (!hook_watches()) return PyObject_Vectorcall(self->function, args, flagged, keywords);
    const Py_ssize_t positional = PyVectorcall_NARGS(flagged);
    const Py_ssize_t count =
        positional + (keywords != nullptr ? PyTuple_GET_SIZE(keywords) : 0);
    std::vector<CallOperand> operands;
    try {
        if ((self->mode & (kCallHolds | kCallGates)) != 0) {
            operands = operands_of(self->mode, args, count, positional);
        }
    } catch (const std::exception &) {
        return PyErr_NoMemory();
    }
    const HookCall call(self->mode, operands);
    operands.clear(); /* what the callee lets go is freed at once */
    return PyObject_Vectorcall(self->function, args, flagged, keywords);
}

PyObject *announced_get(PyObject *object, PyObject *instance, PyObject *) {
    if (instance == nullptr || instance == Py_None) return Py_NewRef(object);
    return PyMethod_New(object, instance);
}

/* __name__, __doc__, __signature__ and whatever else somebody asks for. */
PyObject *announced_getattro(PyObject *object, PyObject *name) {
    PyObject *function = reinterpret_cast<Announced *>(object)->function;
    for (const char *every_type_has : {"__doc__", "__module__"}) {
        if (PyUnicode_CompareWithASCIIString(name, every_type_has) == 0) {
            return PyObject_GetAttr(function, name);
        }
    }
    PyObject *own = PyObject_GenericGetAttr(object, name);
    if (own != nullptr || !PyErr_ExceptionMatches(PyExc_AttributeError)) return own;
    PyErr_Clear();
    return PyObject_GetAttr(function, name);
}

int announced_traverse(PyObject *object, visitproc visit, void *arg) {
    Py_VISIT(reinterpret_cast<Announced *>(object)->function);
    Py_VISIT(reinterpret_cast<PyObject *>(Py_TYPE(object)));
    return 0;
}

int announced_clear(PyObject *object) {
    Py_CLEAR(reinterpret_cast<Announced *>(object)->function);
    return 0;
}

void announced_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    PyObject_GC_UnTrack(object);
    (void)announced_clear(object);
    type->tp_free(object);
    Py_DECREF(reinterpret_cast<PyObject *>(type));
}

PyMemberDef members[] = {
    {"__wrapped__", T_OBJECT_EX, offsetof(Announced, function), READONLY, nullptr},
    {"__vectorcalloffset__", T_PYSSIZET, offsetof(Announced, call), READONLY, nullptr},
    {nullptr, 0, 0, 0, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_call, reinterpret_cast<void *>(PyVectorcall_Call)},
    {Py_tp_descr_get, reinterpret_cast<void *>(announced_get)},
    {Py_tp_getattro, reinterpret_cast<void *>(announced_getattro)},
    {Py_tp_traverse, reinterpret_cast<void *>(announced_traverse)},
    {Py_tp_clear, reinterpret_cast<void *>(announced_clear)},
    {Py_tp_dealloc, reinterpret_cast<void *>(announced_dealloc)},
    {Py_tp_members, members},
    {0, nullptr},
};

PyType_Spec spec = {
    "torchpager._torch_cpu.Announced",
    sizeof(Announced),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_HAVE_VECTORCALL |
        Py_TPFLAGS_METHOD_DESCRIPTOR,
    slots,
};

PyObject *announced_type = nullptr; /* for as long as the process lives */

} // namespace

bool announced_ready() {
    if (announced_type == nullptr) announced_type = PyType_FromSpec(&spec);
    return announced_type != nullptr;
}

PyObject *announced_new(PyObject *, PyObject *args, PyObject *kwargs) {
    static char function_name[] = "function", mode_name[] = "mode";
    static char *names[] = {function_name, mode_name, nullptr};
    PyObject *function;
    unsigned mode;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OI", names, &function, &mode)) {
        return nullptr;
    }
    if (!PyCallable_Check(function)) {
        PyErr_SetString(PyExc_TypeError, "the function must be callable");
        return nullptr;
    }
    auto *type = reinterpret_cast<PyTypeObject *>(announced_type);
    auto *self = reinterpret_cast<Announced *>(type->tp_alloc(type, 0));
    if (self == nullptr) return nullptr;
    self->function = Py_NewRef(function);
    self->call = announced_call;
    self->mode = mode;
    return reinterpret_cast<PyObject *>(self);
}

} // namespace torchpager
