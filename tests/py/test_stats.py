"""Counters and status."""

import dataclasses
import logging
import time

import pytest
import torch

import torchpager
from torchpager import _control, _core, recording, testing

MIB = 1 << 20


def simulation(**options):
    return torchpager.simulate("64 MiB", granularity="64 KiB", **options)


def page(tensors=6):
    """Move some bytes out and in."""
    kept = [torch.full((MIB,), float(i)) for i in range(tensors)]
    testing.page_out_all()
    assert [t.sum().item() for t in kept] == [i * MIB for i in range(tensors)]


def test_stats_are_zero_when_nothing_was_ever_active(run_python):
    done = run_python(
        "-c",
        "import torchpager\n"
        "s = torchpager.stats()\n"
        "print(s.resident.peak, s.fills.count, s.fills.bytes, s.stalls.ns, s.ooms)\n"
        "print(torchpager.last_oom(), torchpager.reset_stats())\n",
    )
    assert done.stdout == "0 0 0 0 0\nNone None\n"


def test_stats_count_what_is_held_and_what_moved():
    with simulation(), torchpager.auto_offload():
        torchpager.reset_stats()
        x = torch.ones(MIB + 1)
        stats = torchpager.stats()
        assert stats.allocated.current == 4 * MIB + 4
        assert stats.active.current == 4 * MIB + (64 << 10)
        assert stats.resident.current == stats.active.current
        testing.evict(x)
        stats = torchpager.stats()
        assert stats.resident.current == 0
        assert stats.host.current == stats.host_bytes.current == 4 * MIB + (64 << 10)
        assert stats.evictions.count >= 1
        assert stats.evictions.bytes == stats.write_backs.bytes == 4 * MIB + (64 << 10)
        assert x.sum().item() == MIB + 1
        stats = torchpager.stats()
        assert stats.misses.count >= 1
        assert stats.fills.bytes == 4 * MIB + (64 << 10)
        assert stats.host.peak == 4 * MIB + (64 << 10)
        del x
        assert torchpager.stats().allocated.current == 0


def test_stats_are_frozen_snapshots():
    before = torchpager.stats()
    with pytest.raises(dataclasses.FrozenInstanceError):
        before.ooms = 1
    with simulation(), torchpager.auto_offload():
        page()
    assert before.evictions.count == 0 or before != torchpager.stats()


def test_totals_are_kept_when_the_context_is_left_and_add_up_over_contexts():
    with simulation(), torchpager.auto_offload():
        torchpager.reset_stats()
        page()
        inside = torchpager.stats()
    after = torchpager.stats()
    assert after.evictions == inside.evictions
    assert after.resident.peak == inside.resident.peak > 0
    assert after.resident.current == 0
    with simulation(), torchpager.auto_offload():
        page()
    twice = torchpager.stats()
    assert twice.evictions.count == 2 * inside.evictions.count
    assert twice.evictions.bytes == 2 * inside.evictions.bytes
    torchpager.reset_stats()
    assert torchpager.stats() == torchpager.stats("cpu")
    assert torchpager.stats().evictions.count == torchpager.stats().resident.peak == 0


def test_reset_sets_peaks_to_what_is_held_now():
    with simulation(), torchpager.budget("32 MiB"):
        x = torch.ones(MIB)
        torch.ones(4 * MIB)
        assert torchpager.stats().allocated.peak >= 20 * MIB
        torchpager.reset_stats()
        assert torchpager.stats().allocated == torchpager.stats().allocated
        assert torchpager.stats().allocated.peak == 4 * MIB
        del x


def test_stats_print_their_figures():
    with simulation(), torchpager.auto_offload():
        torchpager.reset_stats()
        assert "nothing moved" in str(torchpager.stats())
        page()
        text = str(torchpager.stats())
    assert "resident" in text
    assert "evictions" in text


def test_last_oom_is_kept_when_the_context_is_left():
    with simulation(), torchpager.budget("8 MiB"):
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(4 * MIB)
        inside = torchpager.last_oom()
    assert inside.requested_bytes == 16 * MIB
    assert inside.offload is False
    assert torchpager.last_oom() == inside
    assert "16.00 MiB" in str(inside)
    with simulation():
        assert torchpager.last_oom() == inside


def test_first_paging_is_logged_once(caplog):
    caplog.set_level(logging.INFO, logger="torchpager")
    _core.on_first_paging(_control.on_first_paging)  # a test of the core may have taken it out
    with simulation(), torchpager.auto_offload():
        page()
        page()
    lines = [r.message for r in caplog.records if "paging has begun" in r.message]
    assert len(lines) == 1
    assert "the simulated device" in lines[0]


def test_status_says_why_not_when_nothing_is_active():
    status = torchpager.status()
    assert not status.active
    assert status.reasons
    assert "torchpager: not active" in str(status)


def test_status_names_the_missing_context_inside_simulate():
    with simulation():
        status = torchpager.status()
        assert not status.active
        assert status.door == "simulated"
        assert "auto_offload" in status.reasons[0]


def test_status_tells_what_is_in_force():
    with simulation(), torchpager.budget("32 MiB", host="16 MiB"), torchpager.auto_offload():
        status = torchpager.status()
        assert status.active
        assert status.reasons == ()
        assert (status.budget_bytes, status.host_budget_bytes) == (32 * MIB, 16 * MIB)
        assert status.offload
        assert status.p4
        assert not status.failed
        assert "32.00 MiB" in str(status)


def test_status_says_that_p4_is_off_in_strict_mode():
    with simulation(strict=True), torchpager.auto_offload():
        status = torchpager.status()
        assert status.p4 is False
        assert "strict" in status.reasons[0]


def sum_up(weights, steps):
    """Add up tensors, over and over; a step lasts at least 30 ms. Returns seconds a step."""
    seconds = []
    for _ in range(steps):
        begin = time.perf_counter()
        assert [each.sum().item() for each in weights] == [float(MIB)] * len(weights)
        time.sleep(0.03)
        torchpager.step()
        seconds.append(time.perf_counter() - begin)
    return seconds


def test_efficiency_is_the_bound_over_what_the_last_step_took(tmp_path):
    with (
        torchpager.simulate("64 MiB"),
        torchpager.budget("16 MiB"),
        torchpager.auto_offload(),
    ):
        weights = [torch.ones(MIB) for _ in range(6)]  # 24 MiB
        seconds = sum_up(weights, 6)
        found = torchpager.stats().efficiency
        torchpager.save_trace(tmp_path / "sums.trace")
        del weights
    trace = torchpager.load_trace(tmp_path / "sums.trace")
    bound = torchpager.roofline(trace, "16 MiB").roof_ms
    # 8 MiB have to go and come in each step, at 55 GB/s.
    assert bound > (16 << 20) / 101e9 * 1e3
    # The last step that was followed by another; the time is taken between first operators.
    assert found == pytest.approx(bound / (seconds[-2] * 1e3), rel=0.1)


def test_there_is_no_efficiency_before_a_step_was_recorded_twice():
    assert torchpager.stats("cpu").efficiency is None
    with (
        torchpager.simulate("64 MiB"),
        torchpager.budget("16 MiB"),
        torchpager.auto_offload(),
    ):
        assert torchpager.stats().efficiency is None
        weights = [torch.ones(MIB) for _ in range(6)]
        sum_up(weights, 1)
        assert torchpager.stats().efficiency is None
        sum_up(weights, 4)
        assert 0 < torchpager.stats().efficiency < 1
        del weights


def test_efficiency_costs_nothing_unless_it_is_read(monkeypatch):
    calls = []
    real = recording.efficiency
    monkeypatch.setattr(recording, "efficiency", lambda slot: calls.append(slot) or real(slot))
    with (
        torchpager.simulate("64 MiB"),
        torchpager.budget("16 MiB"),
        torchpager.auto_offload(),
    ):
        weights = [torch.ones(MIB) for _ in range(6)]
        sum_up(weights, 5)
        stats = torchpager.stats()
        assert str(stats)
        assert calls == []
        recording._step_of.cache_clear()
        assert stats.efficiency == stats.efficiency
        assert calls == [_core.SIM_SLOT] * 2
        assert recording._step_of.cache_info().misses == 1
        del weights
