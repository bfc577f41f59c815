"""How much host memory there is, read from made-up /proc and cgroup trees."""

import importlib

import pytest
import torch

import torchpager
from torchpager import hostmem

budget_module = importlib.import_module("torchpager.budget")

GIB = 1 << 30


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


@pytest.fixture
def machine(tmp_path):
    """A machine with 100 GiB, 60 of them available, and no control group."""
    proc = tmp_path / "proc"
    write(
        proc / "meminfo",
        f"MemTotal: {100 * GIB // 1024} kB\nMemAvailable: {60 * GIB // 1024} kB\n",
    )
    return proc, tmp_path / "cgroup"


def put_group_v2(group, limit, current, reclaimable=0):
    write(group / "memory.max", f"{limit}\n")
    write(group / "memory.current", f"{current}\n")
    write(
        group / "memory.stat",
        f"anon 5\ninactive_file {reclaimable}\nactive_file 0\nslab_reclaimable 0\n",
    )


def test_cap_is_what_is_available_less_a_reserve_without_control_group(machine):
    host = hostmem.read(*machine)
    assert host.cgroup_room_bytes is None
    assert host.cap_bytes() == 55 * GIB


def test_cap_is_80_percent_of_ram_when_all_is_available(machine):
    proc, sysfs = machine
    write(proc / "meminfo", f"MemTotal: {100 * GIB // 1024} kB\nMemAvailable: {GIB // 10} kB\n")
    assert hostmem.read(proc, sysfs).cap_bytes() == 80 * GIB


def test_cap_keeps_its_own_frames_when_they_lowered_what_is_available(machine):
    assert hostmem.read(*machine).cap_bytes(held_bytes=10 * GIB) == 65 * GIB


@pytest.mark.parametrize(("charged", "expected"), [(False, 12 * GIB), (True, 22 * GIB)])
def test_cap_counts_held_frames_in_the_group_only_if_charged_to_it(machine, charged, expected):
    proc, sysfs = machine
    write(proc / "self/cgroup", "0::/job\n")
    put_group_v2(sysfs / "job", 32 * GIB, 22 * GIB, reclaimable=2 * GIB)
    assert hostmem.read(proc, sysfs).cap_bytes(10 * GIB, charged) == expected


def test_room_is_the_tightest_of_all_groups_above(machine):
    proc, sysfs = machine
    write(proc / "self/cgroup", "0::/outer/inner\n")
    put_group_v2(sysfs / "outer", 20 * GIB, 15 * GIB)
    put_group_v2(sysfs / "outer/inner", 30 * GIB, GIB)
    assert hostmem.read(proc, sysfs).cgroup_room_bytes == 5 * GIB


def test_room_is_none_when_no_group_has_a_limit(machine):
    proc, sysfs = machine
    write(proc / "self/cgroup", "0::/job\n")
    put_group_v2(sysfs / "job", "max", GIB)
    assert hostmem.read(proc, sysfs).cgroup_room_bytes is None


def test_room_is_that_of_the_mount_when_the_path_is_the_hosts(machine):
    proc, sysfs = machine
    write(proc / "self/cgroup", "0::/docker/abc\n")
    put_group_v2(sysfs, 8 * GIB, GIB)
    assert hostmem.read(proc, sysfs).cgroup_room_bytes == 7 * GIB


def test_room_is_read_from_version_1_when_memory_is_mounted_there(machine):
    proc, sysfs = machine
    write(proc / "self/cgroup", "9:cpu,cpuacct:/x\n4:memory:/job\n")
    group = sysfs / "memory" / "job"
    write(group / "memory.limit_in_bytes", f"{16 * GIB}\n")
    write(group / "memory.usage_in_bytes", f"{6 * GIB}\n")
    write(group / "memory.stat", f"cache 1\ntotal_inactive_file {2 * GIB}\n")
    assert hostmem.read(proc, sysfs).cgroup_room_bytes == 12 * GIB


def put_group_v1(group, limit, usage, reclaimable=0):
    write(group / "memory.limit_in_bytes", f"{limit}\n")
    write(group / "memory.usage_in_bytes", f"{usage}\n")
    write(group / "memory.stat", f"cache 1\ntotal_active_file {reclaimable}\n")


def test_version_1_limit_above_binds_and_the_huge_number_is_no_limit(machine):
    proc, sysfs = machine
    write(proc / "self/cgroup", "4:memory:/outer/inner\n")
    put_group_v1(sysfs / "memory/outer/inner", (1 << 63) - 4096, GIB)
    assert hostmem.read(proc, sysfs).cgroup_room_bytes is None
    put_group_v1(sysfs / "memory/outer", 8 * GIB, 6 * GIB, reclaimable=GIB)
    assert hostmem.read(proc, sysfs).cgroup_room_bytes == 3 * GIB


def test_version_1_in_a_container_reads_the_mount_when_the_path_is_the_hosts(machine):
    proc, sysfs = machine
    write(proc / "self/cgroup", "4:memory:/docker/abc\n0::/docker/abc\n")
    put_group_v1(sysfs / "memory", 4 * GIB, GIB)
    assert hostmem.read(proc, sysfs).cgroup_room_bytes == 3 * GIB


def test_both_versions_at_once_give_the_tighter_room(machine):
    proc, sysfs = machine
    write(proc / "self/cgroup", "4:memory:/job\n0::/job\n")
    put_group_v1(sysfs / "memory/job", 8 * GIB, GIB)
    put_group_v2(sysfs / "job", 5 * GIB, GIB)
    assert hostmem.read(proc, sysfs).cgroup_room_bytes == 4 * GIB


def test_room_is_what_memory_high_leaves_when_that_is_lower(machine):
    proc, sysfs = machine
    write(proc / "self/cgroup", "0::/job\n")
    put_group_v2(sysfs / "job", "max", GIB)
    write(sysfs / "job/memory.high", f"{4 * GIB}\n")
    assert hostmem.read(proc, sysfs).cgroup_room_bytes == 3 * GIB


@pytest.mark.parametrize("name", ["memory.current", "memory.stat"])
def test_limit_binds_when_another_file_of_the_group_cannot_be_read(machine, name):
    proc, sysfs = machine
    write(proc / "self/cgroup", "0::/job\n")
    put_group_v2(sysfs / "job", 4 * GIB, 0)
    (sysfs / "job" / name).unlink()
    assert hostmem.read(proc, sysfs).cgroup_room_bytes == 4 * GIB


@pytest.mark.parametrize("text", ["", "nonsense\n", "1:\n", "0::/../../elsewhere\n"])
def test_machine_can_be_read_when_the_list_of_groups_is_odd(machine, text):
    proc, sysfs = machine
    write(proc / "self/cgroup", text)
    assert hostmem.read(proc, sysfs).cgroup_room_bytes is None


def test_host_budget_is_what_the_control_group_leaves(machine, monkeypatch):
    proc, sysfs = machine
    read = hostmem.read
    write(proc / "self/cgroup", "0::/job\n")
    put_group_v2(sysfs / "job", 40 << 20, 24 << 20)
    for module in (hostmem, budget_module):
        name = "read" if module is hostmem else "read_host_memory"
        monkeypatch.setattr(module, name, lambda: read(proc, sysfs))
    with torchpager.simulate("64 MiB", granularity="64 KiB"), torchpager.auto_offload():
        torchpager.reset_stats()
        assert torchpager.status().host_budget_bytes == 16 << 20
        with torchpager.budget("8 MiB", host="1 GiB"):
            assert torchpager.status().host_budget_bytes == 16 << 20
            kept = [torch.ones(1 << 20) for _ in range(5)]
            with pytest.raises(torch.OutOfMemoryError, match=r"16\.00 MiB"):
                kept += [torch.ones(1 << 20) for _ in range(5)]
            assert torchpager.stats().host_bytes.peak <= 16 << 20
            assert all(x.sum().item() == 1 << 20 for x in kept)
            del kept


def test_room_is_zero_when_more_is_in_use_than_the_limit(machine):
    proc, sysfs = machine
    write(proc / "self/cgroup", "0::/job\n")
    put_group_v2(sysfs / "job", GIB, 2 * GIB)
    host = hostmem.read(proc, sysfs)
    assert host.cgroup_room_bytes == 0
    assert host.cap_bytes() == 0


def test_this_machine_can_be_read():
    host = hostmem.read()
    assert 0 < host.available_bytes <= host.ram_bytes
    assert 0 <= host.cap_bytes() <= host.ram_bytes
