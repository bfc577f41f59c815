"""Making bytes again instead of moving them: which contexts ask for it, and what came of it.

What may be made again, and how, is below: ``csrc/bind/torch_recompute.h``. Here it is switched
on for as long as any :func:`torchpager.auto_offload` with ``recompute=True`` is active.
"""

from dataclasses import dataclass

from torchpager import _core, _torch_cpu, patches

_OFF, _PLANNED, _FORCED, _PARKED = 0, 1, 2, 3

_active: dict[object, int] = {}
_mode = _PLANNED


def start(owner: object, slot: int) -> None:
    """Let plans of a device drop what can be made again, until ``stop(owner)``."""
    _active[owner] = slot
    if slot != _core.SIM_SLOT:
        patches.install_pointers()
    _core.set_recompute(slot, True)
    _torch_cpu.recompute_mode(_mode)


def stop(owner: object) -> None:
    """Undo ``start(owner)``. What is dropped comes back when nobody else asks for it."""
    slot = _active.pop(owner, None)
    if slot is not None and slot not in _active.values() and _core.is_open(slot):
        _core.set_recompute(slot, False)
    if not _active:
        _torch_cpu.recompute_mode(_OFF)
    if not set(_active.values()) - {_core.SIM_SLOT}:
        patches.uninstall_pointers()


def force(on: bool, *, park: bool = False) -> None:
    """For tests: everything that may be dropped is, or parked, as soon as it may be."""
    global _mode
    _mode = (_PARKED if park else _FORCED) if on else _PLANNED
    if _active:
        _torch_cpu.recompute_mode(_mode)


@dataclass(frozen=True)
class Recomputation:
    """What has come of drops in this process so far."""

    trials: int
    """Kinds of operator that were run beside a kept result before they were trusted."""
    failed_trials: int
    """Of those, the ones that made other bits, or failed: they are never dropped."""
    failed_reruns: int
    """Bytes that could not be made again: the operator that needed them raised."""
    refused_held: int
    """Drops not made, so far, because Python, or somebody unknown, could reach the tensor."""
    refused_inputs: int
    """Drops not made because what the operator needs is gone, or was written."""


def counts() -> Recomputation:
    """Return the counters."""
    return Recomputation(**_torch_cpu.recompute_counts())
