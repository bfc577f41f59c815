"""The contexts of the process: one stack, one lock, and what they leave behind at exit."""

import atexit
import gc
import logging
import os
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch._subclasses.fake_tensor import FakeTensor

from torchpager import _core
from torchpager.sizes import format_size

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger("torchpager")
logger.addHandler(logging.NullHandler())

# Held while a context is entered or left, and while anything else changes what is in force.
lock = threading.RLock()
_stack: list["Context"] = []
# The slot that a figure is meant for when nobody says which device.
_last_slot: int | None = None
Undo: TypeAlias = Callable[[], object]
_exit_callbacks: list[Callable[[], None]] = []
_fork_callbacks: list[Callable[[], None]] = []


class Context:
    """Something in force for the whole process between ``start()`` and ``stop()``.

    All contexts share one stack: each is left before those that were entered earlier. A context
    is active once at a time and may be started again after it was stopped.

    An interrupt (``KeyboardInterrupt``, or whatever a signal handler raises) may come after any
    call. One that comes within ``start()`` leaves everything as it was found; one within
    ``stop()`` passes on when everything has been left. What remains is the first instruction of
    ``__exit__``, before Python code of ours runs: the context is in force then, and ``stop()``
    leaves it.
    """

    def __init__(self) -> None:
        self._active = False
        self._forked = False
        self._undos: list[Undo] = []

    @property
    def active(self) -> bool:
        """Whether it is in force."""
        return self._active

    def start(self) -> "Self":
        """Put it in force.

        Raises
        ------
        RuntimeError
            It is active already.
        """
        begun = False
        try:
            with lock:
                if self._active:
                    raise RuntimeError(
                        f"{self!r} is active already; stop it first, or make another"
                    )
                begun = True
                self._forked = False
                self._undos[:] = [self._end]
                self._enter()
                _stack.append(self)
                self._active = True
            return self
        except BaseException:
            if begun:
                self._back_out()
            raise

    def stop(self) -> None:
        """Restore what ``start()`` found.

        Raises
        ------
        RuntimeError
            It is not active, or a context that was entered later still is. Nothing changes
            then.
        """
        with lock:
            if self._forked:  # the parent's context: nothing of it is in force in this process
                self._forked = False
                return
            if not self._active:
                raise RuntimeError(f"{self!r} is not active")
            if _stack[-1] is not self:
                raise RuntimeError(
                    f"{self!r} is left out of order: {_stack[-1]!r} was entered later, "
                    "leave it first"
                )
            try:
                failure = unwind(self._undos)
            except BaseException:  # an interrupt between two of them
                unwind(self._undos)
                raise
            try:
                if failure is not None:
                    raise failure
            finally:
                del failure  # else it would hold this frame, and this frame it

    def __enter__(self) -> "Self":
        return self.start()

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.stop()
        except Exception:
            if exc_type is None:
                raise
            # The body's own exception is what the caller must see.
            logger.exception("leaving %r failed", self)
        except BaseException:  # an interrupt, perhaps before anything was left
            if self._active:
                self.stop()
            raise

    def _enter(self) -> None:
        """Put it in force; hand ``_undo_later`` the undo of each act before the act."""
        raise NotImplementedError

    def _undo_later(self, undo: "Undo") -> None:
        """Have something done when the context is left; see :func:`unwind`."""
        self._undos.append(undo)

    def _end(self) -> None:
        self._active = False
        if self in _stack:
            _stack.remove(self)

    def _back_out(self) -> None:
        with lock:
            # Once the lock was given up, another thread's context may have come on top: then
            # this one stays in force, and active.
            if self not in _stack or _stack[-1] is self:
                back_out(self._undos)


def unwind(undos: list[Undo]) -> BaseException | None:
    """Do all undos, the last first; return the first exception that one of them raised.

    Whatever is raised, the others are done. An undo must be fit to be done when its act was
    not, and to be done twice: one that raised is tried once more, for that may have been an
    interrupt.
    """
    first: BaseException | None = None
    again = False
    while undos:
        try:
            undos[-1]()
            undos.pop()
            again = False
        except BaseException as error:
            first = error if first is None else first
            if again:
                undos.pop()
            again = not again
    return first


def back_out(undos: list[Undo]) -> None:
    """Do all undos while an exception is on its way: only an interrupt may take its place."""
    try:
        failure = unwind(undos)
    except BaseException:
        unwind(undos)
        raise
    if isinstance(failure, Exception):
        logger.error("undoing failed", exc_info=failure)
    elif failure is not None:
        raise failure


def active_contexts() -> tuple[Context, ...]:
    """Return the contexts in force, the outermost first."""
    return tuple(_stack)


def use_slot(slot: int) -> None:
    """Remember which device figures are meant for when nobody says which."""
    global _last_slot
    _last_slot = slot


def last_slot() -> int | None:
    """Return the slot of the context entered last; None when there was none."""
    return _last_slot


def mark_tensors_seen(slot: int) -> None:
    """Tell the core which of its blocks are tensors.

    Only a block that was seen as a tensor may be evicted, and the operator hook sees none
    before it is armed. What Python can reach is found through the garbage collector; what only
    autograd's nodes hold is found later, by the hook.
    """
    for thing in gc.get_objects():
        # type(), not isinstance(): that would run the __class__ of lazy proxies.
        kind = type(thing)
        if issubclass(kind, torch.Tensor) and not issubclass(kind, FakeTensor):
            address = tensor_address(thing)
            if address and _core.owns(address) == slot:
                _core.mark_seen(address)


def tensor_address(tensor: torch.Tensor) -> int:
    """Return where a tensor's bytes are; 0 for one that has no memory of its own.

    Looking is not reading: this does not go through the patched ``data_ptr``.
    """
    try:
        return torch._C.TensorBase.data_ptr(tensor)
    except Exception:  # sparse, meta, functorch's wrappers, subclasses: each has its own error
        return 0


def on_first_paging(slot: int) -> None:
    """Say once that bytes have moved to the host."""
    if not _core.is_open(slot):  # this comes a little later, on the main thread
        return
    budget, host = _core.get_budget(slot)
    logger.info(
        "paging has begun on %s: budget %s, host budget %s (torchpager.stats() says more)",
        "the simulated device" if slot == _core.SIM_SLOT else f"cuda:{slot}",
        format_size(budget),
        format_size(host),
    )


def debug(what: str) -> bool:
    """Return whether ``TORCHPAGER_DEBUG``, a list with commas, asks for something.

    ``readonly``: what is unchanged since it was copied to the host is mapped read-only, so that
    a write that no operator announces faults where it stands. ``strict``: on a CUDA device what
    was evicted is mapped nowhere, so that any access that no operator announces does.
    ``ondemand``: no plans are made. ``park``: what plans move of what only autograd has is
    parked even if nothing is recomputed.
    """
    return what in os.environ.get("TORCHPAGER_DEBUG", "").split(",")


def on_unseen_write(slot: int) -> None:
    """Warn once that something writes without an operator."""
    if not _core.is_open(slot):
        return
    figures = _core.stats(slot)
    address, size = figures["unseen_addr"], format_size(figures["unseen_bytes"])
    warnings.warn(
        f"something has written to {_tensor_at(address)} ({size}) without an operator: through "
        "a raw pointer, as ctypes, a NumPy view or an extension module do. torchpager found it "
        "and copied the bytes again, nothing is lost. But such a write at the very moment its "
        "tensor is moved would be: torchpager.pin(tensor) keeps the tensor in place. Further "
        "ones are counted in torchpager.stats().unseen_writes.",
        UserWarning,
        stacklevel=2,
    )


def _tensor_at(block_address: int) -> str:
    """Say which tensor lies in a block."""
    for thing in gc.get_objects():
        if not issubclass(type(thing), torch.Tensor):
            continue
        address = tensor_address(thing)
        block = _core.block(address) if address else None
        if block is not None and block["addr"] == block_address:
            return f"a {type(thing).__name__} of shape {tuple(thing.shape)}, {thing.dtype}"
    return "a tensor"


def at_exit(close: Callable[[], None]) -> None:
    """Have a door closed before the cores are abandoned. ``close`` must not wait."""
    _exit_callbacks.append(close)


def after_fork(forget: Callable[[], None]) -> None:
    """Have ``forget`` called in every child of a fork."""
    _fork_callbacks.append(forget)


def _forget_in_child() -> None:
    """After fork: no context of the parent is in force in the child."""
    global lock
    lock = threading.RLock()  # another thread may have held it
    for context in _stack:
        context._active = False
        context._forked = True
        context._undos.clear()
    _stack.clear()
    for forget in _fork_callbacks:
        forget()


def _abandon() -> None:
    """At interpreter exit: nothing moves any more, nothing is waited for."""
    for close in _exit_callbacks:
        try:
            close()
        except Exception:
            logger.exception("at exit")
    _core.abandon_all()


_core.on_first_paging(on_first_paging)
_core.on_unseen_write(on_unseen_write)
os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_abandon)
