"""How much host memory torchpager may hold: RAM, what is free of it, and the control group."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_RAM_SHARE = 0.8
# What MemAvailable must keep for the rest of the machine.
_RESERVE_SHARE = 0.05
_NO_LIMIT_V1 = 1 << 60  # cgroup v1 writes a huge number, not a word, for "no limit"


@dataclass(frozen=True)
class HostMemory:
    """Host memory as the kernel reports it, in bytes."""

    ram_bytes: int
    available_bytes: int
    cgroup_room_bytes: int | None
    """The control group's limit less what is in use and not reclaimable; None: no limit."""

    def cap_bytes(self, held_bytes: int = 0, charged: bool = False) -> int:
        """Return the most that host frames may take in all.

        Parameters
        ----------
        held_bytes
            Host frames that exist already. They have lowered ``available_bytes``, and may go on
            existing.
        charged
            Whether they are charged to the control group: those of the simulated device are,
            those that the CUDA driver allocates are not.
        """
        reserve = int(self.ram_bytes * _RESERVE_SHARE)
        caps = [
            int(self.ram_bytes * _RAM_SHARE),
            self.available_bytes - reserve + held_bytes,
        ]
        if self.cgroup_room_bytes is not None:
            caps.append(self.cgroup_room_bytes + (held_bytes if charged else 0))
        return max(0, min(caps))


def read(proc: Path = Path("/proc"), sysfs: Path = Path("/sys/fs/cgroup")) -> HostMemory:
    """Return what the kernel reports now.

    Parameters
    ----------
    proc, sysfs
        Where those file systems are mounted.
    """
    info = _table(proc / "meminfo")
    total = info["MemTotal"] * 1024
    available = info.get("MemAvailable", info.get("MemFree", 0)) * 1024
    rooms = list(_cgroup_rooms(proc / "self" / "cgroup", sysfs))
    return HostMemory(total, available, min(rooms) if rooms else None)


def _table(path: Path) -> dict[str, int]:
    """Return the name and the first number of each line of a file such as meminfo."""
    table = {}
    for line in path.read_text().splitlines():
        fields = line.replace(":", " ").split()
        if len(fields) >= 2 and fields[1].isdigit():
            table[fields[0]] = int(fields[1])
    return table


def _cgroup_rooms(membership: Path, sysfs: Path) -> Iterator[int]:
    """Yield the room that is left in every limited group this process is in."""
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        return
    for line in lines:
        fields = line.split(":", 2)
        if len(fields) < 3:
            continue
        _, controllers, path = fields
        if not controllers:
            yield from _rooms_up(sysfs, path, _RoomV2)
        elif "memory" in controllers.split(","):
            yield from _rooms_up(sysfs / "memory", path, _RoomV1)


def _rooms_up(mount: Path, path: str, room_of: "type[_Room]") -> Iterator[int]:
    """Yield the rooms of a group and of all above it; a limit binds everything below.

    In a container the path may be one of the host's, which is not there: the mount point itself
    is the container's group then.
    """
    group = mount / path.lstrip("/")
    if not group.is_dir():
        group = mount
    while True:
        room = room_of(group).bytes()
        if room is not None:
            yield room
        if group == mount or mount not in group.parents:
            return
        group = group.parent


class _Room:
    """The room left in one group; the file names differ between the two versions."""

    limits: tuple[str, ...] = ()
    usage = ""
    reclaimable: tuple[str, ...] = ()

    def __init__(self, group: Path) -> None:
        self._group = group

    def bytes(self) -> int | None:
        """Return the bytes, or None without a limit."""
        limits = [limit for limit in map(self._number, self.limits) if limit is not None]
        if not limits or min(limits) >= _NO_LIMIT_V1:
            return None
        # A limit binds also where the rest cannot be read.
        usage = self._number(self.usage) or 0
        try:
            stat = _table(self._group / "memory.stat")
        except OSError:
            stat = {}
        unreclaimable = usage - sum(stat.get(name, 0) for name in self.reclaimable)
        return max(0, min(limits) - max(0, unreclaimable))

    def _number(self, name: str) -> int | None:
        try:
            return int((self._group / name).read_text())
        except (OSError, ValueError):  # not there, or "max"
            return None


class _RoomV2(_Room):
    # Beyond memory.high nothing is killed, but everything is slowed down to make it reclaim.
    limits, usage = ("memory.max", "memory.high"), "memory.current"
    reclaimable = ("inactive_file", "active_file", "slab_reclaimable")


class _RoomV1(_Room):
    limits, usage = ("memory.limit_in_bytes",), "memory.usage_in_bytes"
    reclaimable = ("total_inactive_file", "total_active_file")
