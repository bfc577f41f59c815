"""Bytes that only autograd keeps: parked without an address, or made again instead of moved.

What may be, and how, is below: ``csrc/bind/torch_recompute.h``. Here both are switched on for
as long as any :func:`torchpager.auto_offload` with ``recompute=True`` is active, and parking
alone while one asks for that.
"""

from dataclasses import dataclass

from torchpager import _core, _torch_cpu, patches
from torchpager.sizes import format_size

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


def is_on(slot: int) -> bool:
    """Return whether plans of a device may drop."""
    return any(again for where, again in _active.values() if where == slot)


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


_KEPT = {
    "held": "something besides autograd has a reference to them",
    "inputs": "what it needs was gone, or had been written",
    "seen": "code that cannot be looked into had used them",
    "settings": "numeric settings had changed",
    "trial": "it made other bits when it was tried, or there was no memory to try it",
    "busy": "they were in use each time, or could not move",
}


@dataclass(frozen=True)
class OperatorRecomputation:
    """What has come of the results of one operator in this process so far.

    ``str()`` of it is a line to read.
    """

    name: str
    """The operator and its overload: ``aten::add.Tensor``."""
    drops: int
    """Results that were given up."""
    dropped_bytes: int
    parks: int
    """Results that were moved to the host without an address."""
    parked_bytes: int
    reruns: int
    """How often it ran again: once for all of its results, and for others that need them."""
    kept: dict[str, int]
    """Results that were to go and did not, by reason: ``held`` (something besides autograd has
    a reference), ``inputs`` (what the operator needs is gone, or was written), ``seen`` (code
    that cannot be looked into has used it), ``settings`` (numeric settings have changed),
    ``trial`` (the operator makes other bits each time, or could not be tried), ``busy``."""
    kept_bytes: int
    why_no_recipe: str
    """Why it was not even noted how some of its results are made: "draws random numbers"; else
    empty. Only of results in forward passes."""
    without_recipe_bytes: int
    """Bytes of those, in memory of torchpager."""

    def __str__(self) -> str:
        parts = []
        if self.drops:
            parts.append(f"given up {self.drops} times ({format_size(self.dropped_bytes)})")
        if self.reruns:
            parts.append(f"run again {self.reruns} times")
        if self.parks:
            parts.append(f"parked {self.parks} times ({format_size(self.parked_bytes)})")
        parts += self.reasons()
        return f"{self.name}: {'; '.join(parts)}"

    def reasons(self) -> list[str]:
        """Return sentences that say why results of it stay or move instead."""
        found = [
            f"kept {count} times: {_KEPT[why]}" for why, count in sorted(self.kept.items())
        ]
        if self.why_no_recipe:
            size = format_size(self.without_recipe_bytes)
            found.append(f"it {self.why_no_recipe}, so {size} could not be given up")
        return found


def by_operator() -> list[OperatorRecomputation]:
    """Return what has come of drops, by operator: those with the most bytes first.

    Operators are listed as soon as something they made was to be given up or parked, or could
    not be because nothing says how to make it again. Nothing is noted without
    ``recompute=True``.
    """
    rows = [OperatorRecomputation(**row) for row in _torch_cpu.recompute_table()]

    def moved(row: OperatorRecomputation) -> int:
        return row.dropped_bytes + row.parked_bytes + row.kept_bytes + row.without_recipe_bytes

    return sorted(rows, key=lambda row: (-moved(row), row.name))
