"""Bytes that only autograd keeps: parked without an address, or made again instead of moved.

What may be, and how, is below: ``csrc/bind/torch_recompute.h``. Here both are switched on for
as long as any :func:`torchpager.auto_offload` with ``recompute=True`` is active, and parking
alone while one asks for that.
"""

from dataclasses import dataclass

from torchpager import _core, _torch_cpu, patches

_OFF, _PLANNED, _FORCED, _PARKED = 0, 1, 2, 3

# Slot, and whether bytes may be made again, for each context.
_active: dict[object, tuple[int, bool]] = {}
_mode = _PLANNED


def start(owner: object, slot: int, *, again: bool) -> None:
    """Let plans of a device park, and with ``again`` drop, until ``stop(owner)``."""
    _active[owner] = slot, again
    if slot != _core.SIM_SLOT:
        patches.install_pointers()
    _set(slot)
    _torch_cpu.recompute_mode(_mode)


def stop(owner: object) -> None:
    """Undo ``start(owner)``. What is dropped comes back when nobody else asks for it."""
    slot, _ = _active.pop(owner, (None, False))
    if slot is not None and _core.is_open(slot):
        _set(slot)
    if not _active:
        _torch_cpu.recompute_mode(_OFF)
    if all(where == _core.SIM_SLOT for where, _ in _active.values()):
        patches.uninstall_pointers()


def _set(slot: int) -> None:
    wanted = [again for where, again in _active.values() if where == slot]
    _core.set_recompute(slot, bool(wanted), any(wanted))


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
