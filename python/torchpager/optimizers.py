"""Optimizer steps: where steps of the program end, and what was written without an operator.

An optimizer of an extension package may update parameters and states in place by a function of
its own that no operator hook sees. After each step of any ``torch.optim.Optimizer`` its
parameters and states therefore count as written, except those that operators were seen to write
during the step: PyTorch's own optimizers cost nothing more.
"""

from typing import Any

import torch
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from torchpager import _control, _core

# Who has switched paging on, and in which slot.
_watchers: dict[object, int] = {}
_handles: list[Any] = []
# The clocks of uses at the beginning of the steps in progress, by optimizer.
_begun: dict[int, dict[int, int]] = {}


def watch(owner: object, slot: int) -> None:
    """Mark what optimizers write in a slot. Under ``_control.lock``."""
    _watchers[owner] = slot
    if not _handles:
        _handles.append(register_optimizer_step_pre_hook(_before))
        _handles.append(register_optimizer_step_post_hook(_after))


def unwatch(owner: object) -> None:
    """Undo ``watch``, if it was done."""
    _watchers.pop(owner, None)
    if not _watchers:
        while _handles:
            _handles[-1].remove()
            _handles.pop()
        _begun.clear()


def slots() -> list[int]:
    """Return the slots in which somebody pages."""
    return [slot for slot in set(_watchers.values()) if _core.is_open(slot)]


def _before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    clocks = _begun[id(optimizer)] = {}
    for slot in slots():
        _core.mark_step(slot, _core.OPTIMIZER_BEGIN)
        if _core.armed(slot):
            clocks[slot] = _core.use_clock(slot)


def _after(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    if torch.compiler.is_compiling():
        return
    begun = _begun.pop(id(optimizer), {})
    addresses: list[int] | None = None
    for slot in slots():
        _core.mark_step(slot, _core.OPTIMIZER_END)
        if not _core.armed(slot):
            continue
        if addresses is None:
            addresses = _addresses(optimizer)
        # Armed during the step: some of it was not seen.
        _core.mark_written(slot, addresses, begun.get(slot, _core.use_clock(slot)))


def _addresses(optimizer: torch.optim.Optimizer) -> list[int]:
    """Return where the parameters are, and the tensors among their states."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            found.append(_control.tensor_address(parameter))
            state = optimizer.state.get(parameter)
            if isinstance(state, dict):
                found += [
                    _control.tensor_address(value)
                    for value in state.values()
                    if isinstance(value, torch.Tensor)
                ]
    return [address for address in found if address]


def _forget_in_child() -> None:
    """After fork nothing pages in the child."""
    for owner in list(_watchers):
        unwatch(owner)


_control.after_fork(_forget_in_child)
