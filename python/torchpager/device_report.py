"""The figures of a budget in place of the device's, for ``budget(..., report_as_device=True)``.

PyTorch asks the driver how much memory the device has and how much of that is free. While a
budget is to be reported, ``torch.cuda.mem_get_info`` and ``torch.accelerator.get_memory_info``
answer with the budget instead. A name that a program bound to one of them before is not
covered, nor is ``get_device_properties().total_memory``, which describes the hardware.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.cuda._utils import _get_device_index

from torchpager import _control
from torchpager._replacements import Replacements

_Function = Callable[..., tuple[int, int]]


@dataclass(frozen=True)
class _Report:
    """What is reported of one device."""

    total_bytes: int
    held_bytes: Callable[[], int]


_reports: dict[int, _Report] = {}
_installed = Replacements()


def report(index: int, total_bytes: int | None, held_bytes: Callable[[], int]) -> None:
    """Report a budget as a CUDA device's memory; under ``_control.lock``.

    Parameters
    ----------
    index
        Of the device.
    total_bytes
        The budget; None: the device's own figures again.
    held_bytes
        Returns what counts against the budget now.
    """
    if total_bytes is None:
        _reports.pop(index, None)
        if not _reports:
            _installed.undo()
        return
    _reports[index] = _Report(total_bytes, held_bytes)
    if not _installed:
        try:
            for owner, name in _asked():
                _installed.put(owner, name, _instead_of(getattr(owner, name)))
        except BaseException:
            _installed.undo()
            raise


def _asked() -> list[tuple[Any, str]]:
    """Return the functions of PyTorch that ask for the device's memory."""
    owners: list[tuple[Any, str]] = [
        (torch.cuda, "mem_get_info"),
        (torch.cuda.memory, "mem_get_info"),
    ]
    for owner in (torch.accelerator, getattr(torch.accelerator, "memory", None)):
        if hasattr(owner, "get_memory_info"):  # not every supported torch has it
            owners.append((owner, "get_memory_info"))
    return owners


def _instead_of(function: _Function) -> _Function:
    @functools.wraps(function)
    def reported(*args: Any, **kwargs: Any) -> tuple[int, int]:
        free, total = function(*args, **kwargs)
        device = next(iter([*args, *kwargs.values()]), None)
        found = _reports.get(_get_device_index(device, optional=True))
        if found is None:
            return free, total
        return _free_bytes(found.total_bytes, found.held_bytes(), free), found.total_bytes

    return reported


def _free_bytes(budget: int, held: int, free: int) -> int:
    """Return what a budget leaves free: never more than the device itself has."""
    return max(0, min(budget - held, free))


def _forget_in_child() -> None:
    """After fork no budget is in force in the child."""
    _reports.clear()
    _installed.undo()


_control.after_fork(_forget_in_child)
