"""Code that launches kernels of its own, while auto_offload() is active.

The operator hook sees what PyTorch's dispatcher runs, and the ranges in which custom autograd
functions, TorchScript and compiled code run. It does not see the kernels that Triton and
Inductor launch. Their launchers have one entry point each in Python, which is wrapped here, so
that the pager is told what a launch uses:

* Inductor's launcher: the tensors among its arguments stay in place for the length of the
  launch, as an operator's operands do. Its inputs count as read, the rest as written.
* Triton's launcher: the same, all of them written, and the launch is an opaque region as well:
  a kernel may reach more memory through a table of pointers than its arguments show.
* Jiterator (``torch.cuda.jiterator``): as Triton's, but for the region; its kernels reach
  nothing but their arguments.
* A graph that Inductor compiled. Where it launches through the launchers above, there is
  nothing left that nobody announces, so the regions around it leave the remap gate open. A
  graph behind C++ code (``cpp_wrapper``, AOTInductor) is an opaque region that uses its inputs.
  On the simulated device, where its kernels take raw pointers and run within the call, its
  inputs, its constants and what it allocates stay in place for the length of the call.

* Groups of collectives (``_coalescing_manager``, ``batch_isend_irecv``): NCCL begins what is
  asked for within one only at its end, so what an operator returns says nothing of its work.

* Autograd's engine. Its nodes are regions of their own where they need to be, on its own
  threads, so a region around the call (``torch.compile`` of a whole training step) leaves the
  gate open meanwhile.

While the hook is not installed each wrapper passes the call on. Modules that are not imported
yet are wrapped when they are.
"""

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torchpager import _control, _core, _torch_cpu
from torchpager._replacements import Replacements

_HOLDS, _GATES, _LIFTS, _NAMES_READS = 1, 2, 4, 8
_Function = Callable[..., Any]


@dataclass(frozen=True)
class _EntryPoint:
    """One function through which everything of its kind passes."""

    module: str
    owner: str | None
    """The class it is a method of; None: the module has it."""
    name: str
    wrap: Callable[[_Function], _Function]


def _launch(mode: int) -> Callable[[_Function], _Function]:
    return lambda found: _torch_cpu.announced(found, mode)


def _graph(found: _Function) -> _Function:
    """Wrap the call of a graph that Inductor compiled."""
    lifted = _torch_cpu.announced(found, _LIFTS)
    # A capture keeps its inputs for good where they are when it begins.
    captured = _torch_cpu.announced(found, _HOLDS | _LIFTS)

    def with_constants(graph: Any, inputs: Any, _constants: Any) -> Any:
        return found(graph, inputs)

    gated = _torch_cpu.announced(with_constants, _GATES)
    held = _torch_cpu.announced(with_constants, _HOLDS | _GATES)

    @functools.wraps(found)
    def call(self: Any, inputs: Any) -> Any:
        if not _torch_cpu.hook_watches():
            return found(self, inputs)
        constants = tuple((getattr(self, "constants", None) or {}).values())
        if "cpu" in getattr(self, "device_types", ()) and _core.is_open(_core.SIM_SLOT):
            return held(self, inputs, constants)
        options = getattr(self, "fx_kwargs", None) or {}
        if options.get("cpp_wrapper") or not hasattr(self, "device_types"):
            return gated(self, inputs, constants)
        return (captured if options.get("cudagraphs") else lifted)(self, inputs)

    return call


def _package(found: _Function) -> _Function:
    """Wrap the call of a model that AOTInductor compiled."""
    gated = _torch_cpu.announced(found, _GATES)
    held = _torch_cpu.announced(found, _HOLDS | _GATES)

    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not _torch_cpu.hook_watches():
            return found(*args, **kwargs)
        inside = held if _core.is_open(_core.SIM_SLOT) else gated
        return inside(*args, **kwargs)

    return call


def _group_begins(found: _Function) -> _Function:
    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        _torch_cpu.defer_collectives(1)
        try:
            return found(*args, **kwargs)
        except BaseException:
            _torch_cpu.defer_collectives(-1)
            raise

    return call


def _group_ends(found: _Function) -> _Function:
    @functools.wraps(found)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return found(*args, **kwargs)
        finally:
            _torch_cpu.defer_collectives(-1)

    return call


_ENTRY_POINTS: tuple[_EntryPoint, ...] = (
    _EntryPoint(
        "torch._inductor.runtime.triton_heuristics",
        "CachingAutotuner",
        "run",
        _launch(_HOLDS | _NAMES_READS),
    ),
    _EntryPoint("triton.runtime.jit", "JITFunction", "run", _launch(_HOLDS | _GATES)),
    _EntryPoint("torch.cuda.jiterator", "_JittedFunction", "__call__", _launch(_HOLDS)),
    _EntryPoint("torch._inductor.output_code", "CompiledFxGraph", "__call__", _graph),
    _EntryPoint("torch._inductor.output_code", "CompiledAOTI", "__call__", _graph),
    _EntryPoint("torch.export.pt2_archive._package", "AOTICompiledModel", "__call__", _package),
)
# The engine's name in the modules that call it.
_ENTRY_POINTS += tuple(
    _EntryPoint(module, None, "_engine_run_backward", _launch(_LIFTS))
    for module in ("torch.autograd", "torch.autograd.graph")
)
# Where NCCL gathers collectives; a torch without one lacks the class.
_ENTRY_POINTS += tuple(
    _EntryPoint("torch._C._distributed_c10d", owner, name, wrap)
    for owner, prefix, suffix in (
        ("ProcessGroup", "", "_coalescing"),
        ("ProcessGroupNCCL", "_group", ""),
    )
    for name, wrap in (
        (f"{prefix}_start{suffix}", _group_begins),
        (f"{prefix}_end{suffix}", _group_ends),
    )
)
_MODULES = frozenset(point.module for point in _ENTRY_POINTS)

_installed = Replacements()
# Who wants them wrapped.
_users: set[int] = set()


def install(user: object) -> None:
    """Wrap the entry points for as long as it has a user. Under ``_control.lock``."""
    _users.add(id(user))
    for name in sorted(_MODULES):
        module = sys.modules.get(name)
        if module is not None:
            _wrap_in(module)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


def uninstall(user: object) -> None:
    """Restore what install() found, when this was the last user. Again: nothing.

    What somebody else has wrapped since is left alone.
    """
    _users.discard(id(user))
    if not _users:
        _restore()


def _restore() -> None:
    if _FINDER in sys.meta_path:
        sys.meta_path.remove(_FINDER)
    _installed.undo()


def _wrap_in(module: ModuleType) -> None:
    for point in _ENTRY_POINTS:
        if point.module != module.__name__:
            continue
        owner: Any = module if point.owner is None else getattr(module, point.owner, None)
        if owner is None or point.name not in vars(owner):
            continue
        if (owner, point.name) in [(known, name) for known, name, _, _ in _installed]:
            continue
        _installed.put(owner, point.name, point.wrap(vars(owner)[point.name]))


class _Loader(importlib.abc.Loader):
    """Loads a module as its own loader does, then wraps what is in it."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        created: ModuleType | None = self._inner.create_module(spec)
        return created

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is not None:  # whoever asks the module for its loader gets the real one
            spec.loader = self._inner
        module.__loader__ = self._inner
        self._inner.exec_module(module)
        with _control.lock:
            if _users:
                _wrap_in(module)


class _Finder(importlib.abc.MetaPathFinder):
    """Lets the other finders find our modules, and lends them its loader."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in _MODULES:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec: importlib.machinery.ModuleSpec | None = finder.find_spec(name, path, target)
            if spec is not None:
                if hasattr(spec.loader, "exec_module"):
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


_FINDER = _Finder()


def _forget_in_child() -> None:
    """After fork nothing pages in the child."""
    _users.clear()
    _restore()


_control.after_fork(_forget_in_child)
