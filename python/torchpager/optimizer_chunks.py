"""Operators over all parameters at once, presented in chunks while auto_offload() pages.

The foreach and fused optimizers name every parameter, gradient and state in one operator, the
foreach ones several times over. When those do not fit on the device together, each such
operator runs over HOST. So they get their lists piece by piece: chunks of parameters whose
operands take a share of the budget, one chunk after the other through the whole update. The
arithmetic of a parameter is its own, so the bits are the same, and each state comes in once.

Where it acts:

* the list kernels of the stock optimizers, ``torch.optim.adam._multi_tensor_adam`` and their
  like (``KERNELS``). ``Optimizer.step`` has run hooks and closure, has made the states and has
  chosen between foreach, fused and one parameter at a time when it calls them, and it calls
  them once for each parameter group, so nothing of that is done twice, and the groups are never
  touched. An optimizer that is not in the list, or couples parameters (LBFGS), is left whole;
  SparseAdam, Muon and the single mode take one parameter at a time anyway;
* gradient clipping, ``GradScaler.unscale_`` and ``zero_grad(set_to_none=False)``: the list
  operators that they call (``OPERATORS``).

Lists are left whole

* when everything fits, and during the capture of a CUDA graph;
* under torch.compile, whose graphs name their operands otherwise;
* when the rows of a list are not alike. A foreach operator chooses between two kernels by what
  all its operands have in common, and a part of the list might choose the other;
* when operands overlap: then the order of the operators matters.
"""

import functools
import importlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.nn.utils.clip_grad
from torch.overrides import TorchFunctionMode

from torchpager import _control, _core
from torchpager._replacements import Replacements


@dataclass(frozen=True)
class _Rules:
    """When a list may be divided, and how large a row is."""

    temporaries: int = 0
    """What the function makes on the way, in times of its first list."""
    one_dtype: bool = False
    """Whether rows of another dtype or device forbid it."""
    by_dims: bool = False
    """Whether vectors and matrices have states of their own, contiguous ones."""


# A chunk takes at most this share of what the budget leaves to movable tensors: while one is
# computed, others are written back and filled. More than the largest size gains nothing.
_SHARE = 8
_MAX_BYTES = 1 << 30

_FUSED = _Rules()
_FOREACH = _Rules(temporaries=2)
# It takes its smallest number from the first dtype it meets, for all others as well.
_ADAFACTOR = _Rules(temporaries=2, one_dtype=True, by_dims=True)
_OPERATOR = _Rules(one_dtype=True)

KERNELS = {
    "_adafactor": ("_multi_tensor_adafactor",),
    "adadelta": ("_multi_tensor_adadelta",),
    "adagrad": ("_multi_tensor_adagrad", "_fused_adagrad"),
    "adam": ("_multi_tensor_adam", "_fused_adam"),
    "adamax": ("_multi_tensor_adamax",),
    "asgd": ("_multi_tensor_asgd",),
    "nadam": ("_multi_tensor_nadam",),
    "radam": ("_multi_tensor_radam",),
    "rmsprop": ("_multi_tensor_rmsprop",),
    "rprop": ("_multi_tensor_rprop",),
    "sgd": ("_multi_tensor_sgd", "_fused_sgd"),
}
"""Names in modules of torch.optim: functions of lists in which each row is for itself."""

OPERATORS = (
    "_amp_foreach_non_finite_check_and_unscale_",
    "_foreach_clamp_max_",
    "_foreach_clamp_min_",
    "_foreach_mul_",
    "_foreach_norm",
    "_foreach_zero_",
)
"""Names in torch: operators whose result for a row is the same in any list of its kind."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_Function: TypeAlias = Callable[..., Any]
_Row: TypeAlias = tuple[Any, ...]
_Span: TypeAlias = tuple[int, int]

_installed = Replacements()
# Whose auto_offload() is in force, and on which device.
_slots: dict[object, int] = {}
_counts: dict[int, int] = {}
_count_lock = threading.Lock()


class _InProgress(threading.local):
    """Whether this thread is inside a list function that has been seen to."""

    def __init__(self) -> None:
        self.seen_to = False


_in_progress = _InProgress()


def start(owner: object, slot: int) -> None:
    """Present lists in chunks on a device, until ``stop(owner)``.

    Under ``_control.lock``.
    """
    if not _slots:
        _installed.undo()  # what an interrupted call left
        for place, name, wrapper in _wrapped():
            _installed.put(place, name, wrapper)
    _slots[owner] = slot


def stop(owner: object) -> None:
    """End what ``start`` began; nothing if it did not begin, or ended already."""
    _slots.pop(owner, None)
    if not _slots:
        _installed.undo()


def count(slot: int) -> int:
    """Return how many chunks were presented on a device."""
    return _counts.get(slot, 0)


def reset_count(slot: int) -> None:
    """Begin to count anew."""
    _counts.pop(slot, None)


def _wrapped() -> Iterator[tuple[Any, str, _Function]]:
    """Yield what to replace where, by what."""
    for module_name, names in KERNELS.items():
        module = importlib.import_module(f"torch.optim.{module_name}")
        for name in names:
            if hasattr(module, name):
                yield module, name, _wrapper(getattr(module, name), _kernel_in_chunks)
    clipping = importlib.import_module("torch.nn.utils.clip_grad")
    for owner, name in (
        (clipping, "_get_total_norm"),
        (clipping, "_clip_grads_with_norm_"),
        (clipping, "clip_grad_value_"),
        (torch.nn.utils, "get_total_norm"),
        (torch.nn.utils, "clip_grads_with_norm_"),
        (torch.nn.utils, "clip_grad_value_"),
        (torch.amp.GradScaler, "_unscale_grads_"),
    ):
        if hasattr(owner, name):
            yield owner, name, _wrapper(getattr(owner, name), _operators_in_chunks)
    zero_grad = torch.optim.Optimizer.zero_grad
    yield torch.optim.Optimizer, "zero_grad", _wrapper(zero_grad, _zero_grad_in_chunks)


@functools.cache
def _wrapper(function: _Function, in_chunks: _Function) -> _Function:
    """Return what to put in a function's place: always the same, for torch.compile's guards."""

    @functools.wraps(function)
    def seen_to(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or _in_progress.seen_to:
            return function(*args, **kwargs)
        try:
            _in_progress.seen_to = True
            return in_chunks(function, args, kwargs)
        finally:
            _in_progress.seen_to = False

    return seen_to


def _kernel_in_chunks(function: _Function, args: _Row, kwargs: dict[str, Any]) -> Any:
    rules = _FUSED if function.__name__.startswith("_fused") else _FOREACH
    if function.__name__ == "_multi_tensor_adafactor":
        rules = _ADAFACTOR
    return _run(function, args, kwargs, rules)


def _operators_in_chunks(function: _Function, args: _Row, kwargs: dict[str, Any]) -> Any:
    if all(_chunk_bytes(slot) is None for slot in set(_slots.values())):
        return function(*args, **kwargs)
    with _ListOperators():
        return function(*args, **kwargs)


def _zero_grad_in_chunks(function: _Function, args: _Row, kwargs: dict[str, Any]) -> Any:
    set_to_none = kwargs.get("set_to_none", args[1] if len(args) > 1 else True)
    if set_to_none:
        return function(*args, **kwargs)
    return _operators_in_chunks(function, args, kwargs)


class _ListOperators(TorchFunctionMode):
    """Runs the list operators that are called inside, on this thread, in chunks."""

    _operators = frozenset(getattr(torch, name) for name in OPERATORS if hasattr(torch, name))

    def __torch_function__(
        self,
        function: _Function,
        types: Any,
        args: _Row = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if function in self._operators:
            return _run(function, args, kwargs or {}, _OPERATOR)
        return function(*args, **(kwargs or {}))


def _run(function: _Function, args: _Row, kwargs: dict[str, Any], rules: _Rules) -> Any:
    """Call a function of lists once, or once for each chunk of them."""
    rows = _rows(args, kwargs)
    spans = _spans(rows, rules) if rows else []
    if len(spans) < 2:
        return function(*args, **kwargs)
    results: list[Any] = []
    kind: Any = None
    for begin, end in spans:
        _count(rows[begin][0].device)
        parts = [arg[begin:end] if isinstance(arg, list | tuple) else arg for arg in args]
        try:
            result = function(*parts, **kwargs)
        finally:
            # A kernel may put states that it has made into its lists.
            for arg, part in zip(args, parts, strict=True):
                if isinstance(arg, list):
                    arg[begin:end] = part
        if result is not None:
            kind = type(result)
            results.extend(result)
    return None if kind is None else kind(results)


def _count(device: torch.device) -> None:
    slot = _slot_of(device)
    with _count_lock:
        _counts[slot] = _counts.get(slot, 0) + 1


def _rows(args: _Row, kwargs: dict[str, Any]) -> list[_Row]:
    """Return what belongs together across the lists; [] if that cannot be told."""
    lists = [arg for arg in args if isinstance(arg, list | tuple)]
    if not lists or len(lists[0]) < 2:
        return []
    if any(len(other) not in (0, len(lists[0])) for other in lists):
        return []
    if any(isinstance(value, list | tuple) for value in kwargs.values()):
        return []
    return list(zip(*(other for other in lists if other), strict=True))


def _slot_of(device: torch.device) -> int:
    if device.type == "cpu":
        return _core.SIM_SLOT
    return device.index if device.type == "cuda" and device.index is not None else -1


def _chunk_bytes(slot: int, temporary_bytes: int = 0) -> int | None:
    """Return what a chunk on a device may take; None: no paging there, or everything fits."""
    if slot not in _slots.values():
        return None
    try:
        figures = _core.stats(slot)
        budget = _core.get_budget(slot)[0]
    except _core.CoreError:  # closed meanwhile
        return None
    if not figures["offload"] or budget is None:
        return None
    native = max(0, figures["held"][0] - figures["reserved"][0])
    live = figures["resident"][0] + figures["host"][0] + native
    if live + temporary_bytes <= budget and not figures["host"][0]:
        return None
    movable: int = budget - native - figures["pinned"][0]
    return max(0, min(movable // _SHARE, _MAX_BYTES))


def _spans(rows: list[_Row], rules: _Rules) -> list[_Span]:
    """Return begin and end of each chunk; [] when the lists are to be left whole."""
    devices = {row[0].device for row in rows if isinstance(row[0], torch.Tensor)}
    bounds = {}
    for device in devices:
        made = rules.temporaries * sum(row[0].nbytes for row in rows if row[0].device == device)
        bound = _chunk_bytes(_slot_of(device), made)
        if bound is not None:
            bounds[device] = bound
    if not bounds or not _alike(rows, rules) or _overlap(rows):
        return []
    if any(device.type == "cuda" for device in devices) and (
        torch.cuda.is_current_stream_capturing()
    ):
        return []
    return _split(rows, bounds, rules.temporaries)


def _split(rows: list[_Row], bounds: dict[torch.device, int], temporaries: int) -> list[_Span]:
    """Return consecutive spans of rows whose operands take at most a bound on each device.

    Or hold one parameter only. A scalar parameter stays with its neighbours: operators treat a
    list of nothing but scalars otherwise than one of tensors and scalars.
    """
    cuts = [0]
    used = dict.fromkeys(bounds, 0)
    filled = False
    for index, row in enumerate(rows):
        device, scalar = row[0].device, row[0].dim() == 0
        size = _row_bytes(row, temporaries)
        if device in used and used[device] + size > bounds[device] and filled and not scalar:
            cuts.append(index)
            used = dict.fromkeys(bounds, 0)
            filled = False
        if device in used:
            used[device] += size
        filled = filled or not scalar
    return list(itertools.pairwise([*cuts, len(rows)]))


def _row_bytes(row: _Row, temporaries: int) -> int:
    # None stands for a state that the kernel will make.
    own: int = row[0].nbytes
    return temporaries * own + sum(
        own if operand is None else operand.nbytes
        for operand in row
        if operand is None or isinstance(operand, torch.Tensor)
    )


def _alike(rows: Sequence[_Row], rules: _Rules) -> bool:
    """Return whether the operators treat all rows, and any part of them, the same way."""
    leader = rows[0][0]
    models: dict[bool, _Row] = {}
    for row in rows:
        if not _leads(row[0], rules):
            return False
        if rules.one_dtype and (row[0].dtype, row[0].device) != (leader.dtype, leader.device):
            return False
        model = models.setdefault(rules.by_dims and row[0].dim() > 1, row)
        if not all(map(_operand_alike, row, itertools.repeat(row[0]), model)):
            return False
    return True


def _leads(tensor: Any, rules: _Rules) -> bool:
    """Return whether a row's first operand, mostly a parameter, is of the usual kind."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return False
    if tensor.requires_grad and torch.is_grad_enabled():
        return False
    if tensor.numel() == 0:
        return False
    return tensor.is_contiguous() if rules.by_dims else _is_dense(tensor)


def _operand_alike(operand: Any, leader: torch.Tensor, model: Any) -> bool:
    """Return whether an operand is like those of other rows, and lies like its row's first."""
    if operand is None or model is None:
        return operand is model
    if type(operand) not in _PLAIN or type(model) not in _PLAIN:
        return False
    if operand.device.type != model.device.type or operand.layout is not torch.strided:
        return False
    if operand.shape != leader.shape:  # a step counter, a factor of a variance
        return _is_dense(operand)
    return operand.dtype == leader.dtype and _same_strides(operand, leader)


def _same_strides(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.stride() == other.stride():
        return True
    return all(
        size == 1 or here == there
        for size, here, there in zip(one.shape, one.stride(), other.stride(), strict=True)
    )


def _is_dense(tensor: torch.Tensor) -> bool:
    """Return whether a tensor's elements fill a piece of memory, in any order, once each."""
    if tensor.is_contiguous():
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def _overlap(rows: Sequence[_Row]) -> bool:
    """Return whether two operands, all of them dense, share memory."""
    ranges = []
    for row in rows:
        for operand in row:
            if isinstance(operand, torch.Tensor):
                address = _control.tensor_address(operand)
                if not address:
                    return True  # no memory of its own to look at
                ranges.append((address, address + operand.nbytes))
    ranges.sort()
    return any(end > begin for (_, end), (begin, _) in itertools.pairwise(ranges))


def _forget_in_child() -> None:
    """After fork no context is in force in the child."""
    _slots.clear()
    _installed.undo()


_control.after_fork(_forget_in_child)
