"""For tests of programs that run under torchpager: move tensors, and see where they are.

>>> import torch, torchpager
>>> from torchpager import testing
>>> with torchpager.simulate("64 MiB"), torchpager.auto_offload():
...     x = torch.ones(1 << 20)
...     testing.evict(x)
...     testing.state(x).where
...     y = x + 1
...     testing.state(x).where
'host'
'resident'
"""

from dataclasses import dataclass
from typing import Literal

import torch

from torchpager import _control, _core, _torch_cpu
from torchpager._targets import DeviceLike, resolve
from torchpager.errors import translated


@dataclass(frozen=True)
class TensorState:
    """Where the storage of a tensor is. Sizes in bytes."""

    where: Literal["native", "resident", "host", "mixed", "dropped"]
    """"native": not torchpager's. "mixed": some extents are resident, some in HOST. "dropped":
    it has no bytes, and its operator runs again before they are used."""
    resident_bytes: int = 0
    host_bytes: int = 0
    extents: int = 0
    dirty_extents: int = 0
    """Resident, with no valid copy on the host."""
    clean_extents: int = 0
    """Resident, with the same bytes on the host."""
    busy_extents: int = 0
    pins: int = 0
    """Operators and :func:`torchpager.pin` handles that hold it now."""
    seen: bool = False
    """Known to be a tensor: only then may it be evicted."""
    immovable: bool = False
    """Its memory was handed out (NumPy, DLPack) or pinned."""
    evicted_extents: int = 0
    """Evictions of its extents since it was made."""


def evict(tensor: torch.Tensor) -> None:
    """Move a tensor's storage to HOST and wait until it is there.

    Parameters
    ----------
    tensor
        Any tensor on the storage.

    Raises
    ------
    ValueError
        The storage is not torchpager's.
    RuntimeError
        It cannot be moved: it is pinned, was handed out, or is in use; or paging is off.
    torch.OutOfMemoryError
        The host budget has no room for it.
    """
    _torch_cpu.bring_back(tensor)
    address = _control.tensor_address(tensor)
    if not address or _core.owns(address) is None:
        raise ValueError("the tensor's storage is not in torchpager's memory; it does not move")
    _core.mark_seen(address)
    with translated("evicting a tensor"):
        _core.evict(address)


def page_out_all(device: DeviceLike = None) -> int:
    """Move everything that may be moved to HOST and wait until it is there.

    Parameters
    ----------
    device
        As for :func:`torchpager.budget`.

    Returns
    -------
    int
        Bytes evicted.
    """
    target = resolve(device)
    if not _core.is_open(target.slot):
        return 0
    _control.mark_tensors_seen(target.slot)
    with translated("paging everything out"):
        return _core.evict_all(target.slot)


def state(tensor: torch.Tensor) -> TensorState:
    """Return where a tensor's storage is. Looking does not move it.

    Parameters
    ----------
    tensor
        Any tensor on the storage.

    Returns
    -------
    TensorState
    """
    if _torch_cpu.is_dropped(tensor):
        return TensorState(where="dropped")
    address = _control.tensor_address(tensor)
    block = _core.block(address) if address else None
    if block is None:
        return TensorState(where="native")
    where: Literal["resident", "host", "mixed"] = "mixed"
    if not block["host_bytes"]:
        where = "resident"
    elif not block["resident_bytes"]:
        where = "host"
    return TensorState(
        where=where,
        resident_bytes=block["resident_bytes"],
        host_bytes=block["host_bytes"],
        extents=block["extent_count"],
        dirty_extents=block["dirty_count"],
        clean_extents=block["clean_count"],
        busy_extents=block["busy_count"],
        pins=block["pin_count"],
        seen=block["seen"],
        immovable=block["immovable"],
        evicted_extents=block["evicted_count"],
    )
