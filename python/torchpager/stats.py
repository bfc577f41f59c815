"""Counters: what is held, and what has been moved."""

from dataclasses import dataclass, field, replace
from typing import Any

from torchpager import _control, _core, optimizer_chunks, recording
from torchpager._targets import DeviceLike, resolve
from torchpager.errors import OutOfMemory, oom_from_figures
from torchpager.sizes import format_size


@dataclass(frozen=True)
class Gauge:
    """A size in bytes: now, and the most since the last reset."""

    current: int = 0
    peak: int = 0


@dataclass(frozen=True)
class Tally:
    """Something that happened: how often, to how many bytes, over how many nanoseconds."""

    count: int = 0
    bytes: int = 0
    ns: int = 0


@dataclass(frozen=True)
class Stats:
    """A snapshot of the counters of one device.

    Sizes are gauges with ``.current`` and ``.peak`` in bytes; events are tallies with
    ``.count``, ``.bytes`` and ``.ns``. Totals and peaks are since
    :func:`torchpager.reset_stats` or the start of the process.
    """

    allocated: Gauge = Gauge()
    """Requested by live tensors."""
    active: Gauge = Gauge()
    """The same, rounded up to the granularity."""
    reserved: Gauge = Gauge()
    """Device frames that exist; with the native reserved bytes they make up the budget."""
    resident: Gauge = Gauge()
    """Device frames mapped by live tensors."""
    host: Gauge = Gauge()
    """Live tensor bytes that are in HOST."""
    host_bytes: Gauge = Gauge()
    """Host frames that exist: what the host budget bounds."""
    pinned: Gauge = Gauge()
    """Live tensor bytes that were made immovable."""
    dropped: Gauge = Gauge()
    """Bytes of live tensors that are nowhere now, to be made again at their next use."""
    parked: Gauge = Gauge()
    """Of ``host``: live tensors that nobody can reach, and that have no address now."""
    held: Gauge = Gauge()
    """Reserved plus what the native allocator held, at our last change."""
    fills: Tally = Tally()
    """Copies from the host to the device."""
    write_backs: Tally = Tally()
    """Copies from the device to the host."""
    evictions: Tally = Tally()
    """Device memory given up in favour of a host frame."""
    misses: Tally = Tally()
    """Operators' accesses to bytes in HOST."""
    stalls: Tally = Tally()
    """Waits of a thread that launches operators."""
    host_operators: Tally = Tally()
    """Accesses that ran over operands in HOST because nothing could be evicted."""
    unseen_writes: Tally = Tally()
    """Bytes found changed though no operator announced a write: they were copied again."""
    unproven: Tally = Tally()
    """Unchanged as far as was known, and copied again because nothing could prove it."""
    fingerprints: Tally = Tally()
    """Contents looked at on the device, to know whether they have changed."""
    plans: Tally = Tally()
    """Plans made for kinds of step, and the time that took."""
    drops: Tally = Tally()
    """Tensors whose bytes were given up because they can be made again."""
    reruns: Tally = Tally()
    """Tensors whose bytes were made again, by running their operator once more."""
    parks: Tally = Tally()
    """Tensors that nobody could reach, moved to the host without keeping their address."""
    discards: Tally = Tally()
    """Freed bytes forgotten without a copy."""
    frame_creates: Tally = Tally()
    frame_releases: Tally = Tally()
    alloc_count: int = 0
    free_count: int = 0
    cache_hits: int = 0
    born_in_host: int = 0
    """Tensors made in HOST because the device had no room."""
    planned_ops: int = 0
    """Operators that began while a plan was carried out."""
    planned_drop_bytes: int = 0
    """What the last plan that was made gives up in one step, to make it again."""
    unverified_reruns: int = 0
    """Bytes made again that could not be compared with what they had been."""
    wrong_reruns: int = 0
    """Bytes made again that were not the same: the next allocation raises."""
    ooms: int = 0
    """Allocations that failed."""
    optimizer_chunks: int = 0
    """Chunks in which optimizers, clipping and loss scaling got what did not fit at once."""
    _slot: int | None = field(default=None, repr=False, compare=False)

    @property
    def efficiency(self) -> float | None:
        """How close the program is to what its budget allows: a bound over the measured time.

        The bound is :func:`torchpager.roofline` of the last complete step at the budget in
        force: no schedule that moves bytes can be faster. The time is that from the beginning
        of this step to that of the next, whatever the program did in it. Both are estimates
        where few operators have been timed. None while no step has been recorded twice:
        steps are recorded from when memory gets short.

        Unlike the counters it is worked out when it is read, for the step that is the last one
        then; for thousands of operators that takes some tenths of a second, once a step.
        """
        return None if self._slot is None else recording.efficiency(self._slot)

    def __str__(self) -> str:
        sizes = ", ".join(
            f"{name} {format_size(gauge.current)} (peak {format_size(gauge.peak)})"
            for name, gauge in vars(self).items()
            if isinstance(gauge, Gauge)
        )
        events = ", ".join(
            f"{name} {tally.count} ({format_size(tally.bytes)})"
            for name, tally in vars(self).items()
            if isinstance(tally, Tally) and tally.count
        )
        return f"{sizes}; {events or 'nothing moved'}"


# Our name of a counter, where it is not the core's.
_CORE_NAMES = {"host_bytes": "host_held"}
_NOT_OF_THE_CORE = {"optimizer_chunks", "_slot"}
# What cores that were closed had counted, and their last failure.
_retired: dict[int, Stats] = {}
_retired_ooms: dict[int, dict[str, Any]] = {}


def stats(device: DeviceLike = None) -> Stats:
    """Return the counters of a device.

    Parameters
    ----------
    device
        A CUDA device, or "cpu" for the simulated one. None: the device of the context entered
        last, also after it was left.

    Returns
    -------
    Stats
        All zeros when nothing was ever active there.

    Examples
    --------
    >>> import torch, torchpager
    >>> with torchpager.simulate("64 MiB"), torchpager.budget("32 MiB"):
    ...     torchpager.reset_stats()
    ...     x = torch.zeros(1 << 20)
    >>> torchpager.stats().resident.peak
    4194304
    """
    slot = _slot(device)
    if slot is None:
        return Stats()
    chunks = optimizer_chunks.count(slot)
    return replace(_of_cores(slot), optimizer_chunks=chunks, _slot=slot)


def _of_cores(slot: int) -> Stats:
    """Return what the cores of a device have counted, this one and those that are gone."""
    retired = _retired.get(slot, Stats())
    if not _core.is_open(slot):
        return retired
    try:
        figures = _core.stats(slot)
    except _core.CoreError:  # closed between the two calls, by another thread
        return _retired.get(slot, Stats())
    return _sum(retired, _from_core(figures))


def reset_stats(device: DeviceLike = None) -> None:
    """Set the totals of a device to zero, and its peaks to what is held now.

    Parameters
    ----------
    device
        As for :func:`stats`.
    """
    slot = _slot(device)
    if slot is None:
        return
    _retired.pop(slot, None)
    optimizer_chunks.reset_count(slot)
    if _core.is_open(slot):
        _core.reset_stats(slot)


def last_oom(device: DeviceLike = None) -> OutOfMemory | None:
    """Return the figures of the last allocation that failed on a device.

    Parameters
    ----------
    device
        As for :func:`stats`.

    Returns
    -------
    OutOfMemory or None
        None: no allocation has failed.
    """
    slot = _slot(device)
    if slot is None:
        return None
    figures = _core.last_oom(slot) if _core.is_open(slot) else None
    if figures is None:
        figures = _retired_ooms.get(slot)
    return None if figures is None else oom_from_figures(figures)


def retire(slot: int, figures: dict[str, Any], oom: dict[str, Any] | None) -> None:
    """Keep what a core had counted; it is being closed."""
    _retired[slot] = _sum(_retired.get(slot, Stats()), _from_core(figures), closed=True)
    if oom is not None:
        _retired_ooms[slot] = oom


def _slot(device: DeviceLike) -> int | None:
    if device is None:
        last = _control.last_slot()
        if last is not None:
            return last
        # The pluggable door opens cores without a context.
        return next((slot for slot in range(_core.SIM_SLOT + 1) if _core.is_open(slot)), None)
    if str(device).startswith("cpu"):
        return _core.SIM_SLOT
    return resolve(device).slot


def _from_core(figures: dict[str, Any]) -> Stats:
    values: dict[str, Any] = {}
    for name, its in Stats.__dataclass_fields__.items():
        if name in _NOT_OF_THE_CORE:
            continue
        figure = figures[_CORE_NAMES.get(name, name)]
        if isinstance(its.default, Gauge):
            values[name] = Gauge(*figure)
        elif isinstance(its.default, Tally):
            values[name] = Tally(*figure)
        else:
            values[name] = figure
    return Stats(**values)


def _sum(before: Stats, now: Stats, closed: bool = False) -> Stats:
    """Add the totals of a core that is gone to those of its successor."""
    values: dict[str, Any] = {}
    for name in Stats.__dataclass_fields__:
        if name in _NOT_OF_THE_CORE:
            continue
        old, new = getattr(before, name), getattr(now, name)
        if isinstance(new, Gauge):
            values[name] = Gauge(0 if closed else new.current, max(old.peak, new.peak))
        elif isinstance(new, Tally):
            values[name] = Tally(old.count + new.count, old.bytes + new.bytes, old.ns + new.ns)
        else:
            values[name] = old + new
    return Stats(**values)
