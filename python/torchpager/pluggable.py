"""The pluggable door: torch's own interface for an allocator from a shared library."""

import ctypes
import importlib
from typing import Any

import torch

from torchpager import _core
from torchpager.errors import UnavailableError

# The setters of torch's pluggable allocator and our entry points for them. Which setters exist
# differs between minors of torch; those that do are set.
_SETTERS = {
    "set_init_fn": "tp_torch_init",
    "set_reset_fn": "tp_torch_reset",
    "set_memory_fraction_fn": "tp_torch_memory_fraction",
    "set_base_alloc_fn": "tp_torch_base_alloc",
    "set_record_stream_fn": "tp_torch_record_stream",
    "set_begin_allocate_to_pool": "tp_torch_begin_allocate_to_pool",
    "set_end_allocate_to_pool_fn": "tp_torch_end_allocate_to_pool",
    "set_release_pool": "tp_torch_release_pool",
}
# Made once: the allocator, and the object inside it that torch compares and calls.
_made: list[tuple[torch.cuda.memory.CUDAPluggableAllocator, Any]] = []


def pluggable_allocator() -> torch.cuda.memory.CUDAPluggableAllocator:
    """Return torchpager as an allocator for ``torch.cuda.memory.change_current_allocator``.

    It serves every CUDA allocation of the process, small ones too, and does not move bytes to
    the host. :func:`torchpager.budget` gives it a hard bound, before or after it is in place.
    It must be put in place before CUDA is used, as torch requires of every such allocator.

    Returns
    -------
    torch.cuda.memory.CUDAPluggableAllocator

    Raises
    ------
    UnavailableError
        This torch has no CUDA.

    Examples
    --------
    >>> import torch, torchpager
    >>> torch.cuda.memory.change_current_allocator(torchpager.pluggable_allocator())
    ... # doctest: +SKIP
    """
    if torch.version.cuda is None or not hasattr(torch._C, "_cuda_customAllocator"):
        raise UnavailableError("pluggable_allocator() needs a CUDA build of torch")
    if _made:
        return _made[0][0]
    try:
        glue = importlib.import_module("torchpager._torch_cuda")
    except ImportError as error:
        raise UnavailableError(
            f"this build of torchpager has no CUDA door ({error})"
        ) from error
    # Without it a failed allocation would hand torch a null pointer, which torch does not
    # check.
    glue.pluggable_install_thrower()
    path = _core.__file__
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        path, "tp_torch_malloc", "tp_torch_free"
    )
    inner: Any = allocator.allocator()  # type: ignore[no-untyped-call]
    library = ctypes.CDLL(path)
    for setter, symbol in _SETTERS.items():
        set_entry = getattr(inner, setter, None)
        if set_entry is not None:
            set_entry(ctypes.cast(getattr(library, symbol), ctypes.c_void_p).value)
    _made.append((allocator, inner))
    return allocator


def is_in_place() -> bool:
    """Return whether torch's CUDA allocator is ours through this door."""
    return bool(_made) and torch._C._cuda_getAllocator() is _made[0][1]
