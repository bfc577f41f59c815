"""Reads and writes of CPU tensors that no operator announces, while simulate() is active.

The operator hook makes operands resident. Some methods of PyTorch go to memory without an
operator; they are wrapped here, so that the block they use is in place:

* for the length of the call: ``Tensor.tolist``, ``apply_``, ``map_`` and ``map2_``; of storages
  reading and writing an item, ``tolist``, ``resize_``, ``byteswap``, writing to and reading
  from files; and the writer that ``torch.save`` uses. Pickling and ``copy.deepcopy`` go through
  these, or through operators.
* touched, and taken as written: ``data_ptr``. A pointer stays valid when the block moves, and
  what is read through it stays right. What is *written* through it after the block has been
  moved once more may be lost: :func:`torchpager.pin` excludes that.
* for good: ``Tensor.numpy`` (so also ``__array__`` and ``numpy.asarray``) and DLPack. The
  memory is handed out to readers and writers we do not see, so the block becomes immovable for
  as long as it lives. DLPack's table of C functions is taken off the tensor class meanwhile, so
  that its users come through ``__dlpack__``.

All of them first make again what was dropped (:mod:`torchpager.recompute`). Where only that is
at stake, on CUDA devices, :func:`install_pointers` wraps what hands out pointers there.

What cannot be wrapped: methods called on ``torch._C.TensorBase`` and ``torch._C.StorageBase``,
which are immutable types; functions bound to a name before simulate() was entered; C++ code
that takes pointers itself (``torch.jit.save``, gloo's sends and receives, compiled CPU kernels,
pybind11 extensions, ctypes). Their reads are right, except with ``strict=True``; for their
writes the same holds as for ``data_ptr``.
"""

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.utils.dlpack

from torchpager import _control, _core, _torch_cpu
from torchpager._pins import Pins
from torchpager._replacements import MISSING, Replacements

_Method = Callable[..., Any]
_Wrapper = Callable[[_Method], _Method]
_Table = list[tuple[Any, tuple[str, ...], _Wrapper]]
_installed = Replacements()
_pointers = Replacements()


class _InPlace(threading.local):
    """What calls in progress on this thread hold already."""

    def __init__(self) -> None:
        self.addresses: set[int] = set()


_in_place = _InPlace()


def install() -> None:
    """Wrap everything in the list above, or raise and wrap nothing.

    Under ``_control.lock``, and only when it is not in force: what an interrupted call left
    comes out first.
    """
    _put(_installed, _wrapped())


def uninstall() -> None:
    """Restore what install() found. What somebody else has wrapped since is left alone.

    Interrupted, it may be called again.
    """
    _installed.undo()


def install_pointers() -> None:
    """Have dropped bytes made again before a pointer to them is handed out, or resized.

    Under ``_control.lock``. For CUDA devices: what :func:`install` wraps includes it.
    """
    _put(_pointers, _wrapped_pointers())


def uninstall_pointers() -> None:
    """Restore what install_pointers() found. Interrupted, it may be called again."""
    _pointers.undo()


def _put(replacements: Replacements, table: _Table) -> None:
    """Wrap what is in the table, and take DLPack's table of C functions off, or do nothing."""
    replacements.undo()
    try:
        for owner, names, wrapper in table:
            for name in names:
                if hasattr(owner, name):
                    replacements.put(owner, name, wrapper(getattr(owner, name)))
        for owner in _exchange_classes():
            replacements.put(owner, "__dlpack_c_exchange_api__", MISSING)
    except BaseException:
        replacements.undo()
        raise


def _wrapped() -> _Table:
    """Return which names of which owner get which wrapper."""
    tensor, storage = torch.Tensor, torch.UntypedStorage
    return [
        (tensor, ("numpy",), _exporting),
        (tensor, ("tolist", "const_data_ptr"), _reading),
        (tensor, ("apply_", "map_", "map2_"), _writing),
        (tensor, ("data_ptr",), _handing_out),
        (storage, ("__getitem__", "tolist", "_write_file"), _reading),
        (storage, ("__setitem__", "_set_from_file", "_byteswap", "byteswap"), _writing),
        (storage, ("resize_",), _resizing),
        (storage, ("copy_", "fill_", "_share_fd_cpu_", "_share_filename_cpu_"), _bringing_back),
        (storage, ("data_ptr",), _handing_out),
        (torch._C.PyTorchFileWriter, ("write_record",), _reading),
        (storage, ("is_shared", "is_pinned"), _bringing_back),
        (torch._C, ("_swap_tensor_impl",), _swapping),
        (torch._C, ("_to_dlpack", "_to_dlpack_versioned"), _exporting),
        (torch, ("to_dlpack",), _exporting),
        (torch.utils.dlpack, ("to_dlpack",), _exporting),
    ]


def _wrapped_pointers() -> _Table:
    """Return the same for what hands out pointers on a CUDA device."""
    owners: list[tuple[Any, tuple[str, ...]]] = [
        (torch.Tensor, ("data_ptr", "const_data_ptr")),
        (torch.UntypedStorage, ("data_ptr", "resize_", "copy_", "fill_", "_share_cuda_")),
        (torch._C, ("_to_dlpack", "_to_dlpack_versioned")),
        (torch, ("to_dlpack",)),
        (torch.utils.dlpack, ("to_dlpack",)),
    ]
    table: _Table = [(owner, names, _bringing_back) for owner, names in owners]
    return [*table, (torch._C, ("_swap_tensor_impl",), _swapping)]


def _exchange_classes() -> list[type]:
    """Return the classes that offer DLPack's table of C functions."""
    offered = [torch.Tensor, *vars(torch.utils.dlpack).values()]
    return [
        owner
        for owner in offered
        if isinstance(owner, type) and "__dlpack_c_exchange_api__" in vars(owner)
    ]


def _blocks_of(args: tuple[Any, ...], write: bool) -> list[int]:
    """Return the addresses of ours that the arguments stand for.

    What was dropped of them is made again first, and with ``write`` what was made of them.
    Where that fails the call itself says why.
    """
    addresses = []
    for arg in args:
        _torch_cpu.bring_back(arg, write)
        if isinstance(arg, torch.Tensor):
            address = _control.tensor_address(arg)
        elif isinstance(arg, torch.UntypedStorage):
            address = _storage_address(arg)
        else:
            continue
        if address and _core.owns(address) is not None:
            addresses.append(address)
    return addresses


def _storage_address(storage: torch.UntypedStorage) -> int:
    try:
        return torch._C.StorageBase.data_ptr(storage)  # type: ignore[attr-defined, no-any-return]
    except Exception:  # meta storages and the like have no memory
        return 0


def _hold(pins: Pins, address: int, write: bool) -> None:
    """Keep a block in place."""
    block = _core.block(address)
    if block is None:
        return
    try:
        pins.take(address, block["generation"])
    except _core.CoreError:  # the pins do not fit: the bytes can be used where they are
        _core.touch(address, write)
        return
    if write:
        _core.touch(address, True)


def _let_go(pins: Pins, addresses: list[int]) -> None:
    # The call itself may have freed the block (resize_).
    pins.release()
    _in_place.addresses.difference_update(addresses)


def _during(write: bool, function: _Method) -> _Method:
    @functools.wraps(function)
    def held(*args: Any, **kwargs: Any) -> Any:
        # A storage's tolist() reads item by item: what is in place already needs nothing more.
        addresses = [
            address for address in _blocks_of(args, write) if address not in _in_place.addresses
        ]
        if not addresses:
            return function(*args, **kwargs)
        pins = Pins()
        try:
            for address in addresses:
                _hold(pins, address, write)
            _in_place.addresses.update(addresses)
            return function(*args, **kwargs)
        finally:
            try:
                _let_go(pins, addresses)
            except BaseException:  # an interrupt, perhaps before it began
                _let_go(pins, addresses)
                raise

    return held


def _reading(function: _Method) -> _Method:
    return _during(False, function)


def _resizing(function: _Method) -> _Method:
    return _bringing_back(_reading(function))


def _bringing_back(function: _Method) -> _Method:
    @functools.wraps(function)
    def brought_back(*args: Any, **kwargs: Any) -> Any:
        for arg in args:
            _torch_cpu.bring_back(arg, True)
        return function(*args, **kwargs)

    return brought_back


def _swapping(function: _Method) -> _Method:
    """Let go of tensors that may not be referred to weakly."""

    @functools.wraps(function)
    def swapped(*args: Any) -> Any:
        for arg in args:
            _torch_cpu.forget_tensor(arg)
        return function(*args)

    return swapped


def _writing(function: _Method) -> _Method:
    return _during(True, function)


def _handing_out(function: _Method) -> _Method:
    @functools.wraps(function)
    def touched(*args: Any, **kwargs: Any) -> Any:
        for address in _blocks_of(args, True):
            _core.touch(address, True)
        return function(*args, **kwargs)

    return touched


def _exporting(function: _Method) -> _Method:
    @functools.wraps(function)
    def exported(*args: Any, **kwargs: Any) -> Any:
        for address in _blocks_of(args, True):
            _core.export(address)
        return function(*args, **kwargs)

    return exported


def _forget_in_child() -> None:
    """After fork nothing pages in the child."""
    uninstall()
    uninstall_pointers()


_control.after_fork(_forget_in_child)
