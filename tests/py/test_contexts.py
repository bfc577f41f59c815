"""Rules of contexts: nesting, order, restoring, and what happens in a child process."""

import contextlib
import os
import threading

import pytest
import torch

import torchpager
from torchpager import _control, _core, _torch_cpu

MIB = 1 << 20


def simulation(**options):
    return torchpager.simulate("64 MiB", granularity="64 KiB", **options)


def in_force():
    """Everything a context may change on the simulated device."""
    return (
        _core.get_budget(_core.SIM_SLOT),
        _core.stats(_core.SIM_SLOT)["offload"],
        _torch_cpu.installed(),
        torch.Tensor.numpy,
        _control.active_contexts(),
    )


def test_everything_is_as_found_when_contexts_are_left():
    with simulation():
        before = in_force()
        with torchpager.budget("32 MiB", host="48 MiB"):
            outer = in_force()
            assert outer[0] == (32 * MIB, 48 * MIB)
            with torchpager.auto_offload():
                assert in_force()[:2] == (outer[0], True)
                with torchpager.budget("16 MiB", host="8 MiB"):
                    assert _core.get_budget(_core.SIM_SLOT) == (16 * MIB, 8 * MIB)
            assert in_force() == outer
        assert in_force() == before


def test_everything_is_as_found_when_the_body_raises():
    numpy_method = torch.Tensor.numpy
    with pytest.raises(KeyError), simulation(), torchpager.budget("32 MiB"):
        raise KeyError("body")
    assert not _torch_cpu.installed()
    assert torch.Tensor.numpy is numpy_method
    assert _control.active_contexts() == ()


def test_start_and_stop_do_what_with_does():
    device = simulation().start()
    budget = torchpager.budget("32 MiB")
    assert budget.start() is budget
    assert budget.active
    assert budget.device_bytes == 32 * MIB
    budget.stop()
    assert not budget.active
    assert budget.device_bytes is None
    device.stop()


def test_paging_works_when_entered_before_the_budget():
    with simulation(), torchpager.auto_offload(), torchpager.budget("8 MiB"):
        tensors = [torch.full((MIB,), float(i)) for i in range(6)]
        assert [t.sum().item() for t in tensors] == [i * MIB for i in range(6)]
        assert torchpager.stats().reserved.peak <= 64 * MIB
        assert torchpager.stats().reserved.current <= 8 * MIB
        del tensors


def test_paging_works_when_entered_after_the_budget():
    with simulation(), torchpager.budget("8 MiB"), torchpager.auto_offload():
        tensors = [torch.full((MIB,), float(i)) for i in range(6)]
        assert [t.sum().item() for t in tensors] == [i * MIB for i in range(6)]
        del tensors


def test_auto_offload_alone_takes_95_percent_of_a_simulated_device():
    with simulation(), torchpager.auto_offload():
        assert torchpager.status().budget_bytes == 64 * MIB * 95 // 100


def test_budget_inside_auto_offload_may_exceed_what_that_derived():
    with simulation(), torchpager.auto_offload():
        with torchpager.budget("100%"):
            assert torchpager.status().budget_bytes == 64 * MIB
        assert torchpager.status().budget_bytes == 64 * MIB * 95 // 100


def test_entering_twice_raises_and_the_first_stays_in_force():
    with simulation():
        budget = torchpager.budget("32 MiB")
        with budget:
            with pytest.raises(RuntimeError, match="active already"):
                budget.start()
            assert torchpager.status().budget_bytes == 32 * MIB
        with budget:
            assert torchpager.status().budget_bytes == 32 * MIB


def test_stopping_what_is_not_active_raises():
    with pytest.raises(RuntimeError, match="not active"):
        torchpager.budget("32 MiB").stop()


def test_leaving_out_of_order_raises_and_leaves_the_rest_usable():
    device = simulation().start()
    outer = torchpager.budget("32 MiB").start()
    inner = torchpager.budget("16 MiB").start()
    for early in (device, outer):
        with pytest.raises(RuntimeError, match="out of order"):
            early.stop()
        assert early.active
    assert torchpager.status().budget_bytes == 16 * MIB
    x = torch.ones(MIB)
    assert x.sum().item() == MIB
    del x
    inner.stop()
    assert torchpager.status().budget_bytes == 32 * MIB
    outer.stop()
    device.stop()


def test_the_bodys_exception_passes_when_leaving_fails_too(caplog):
    with simulation():
        outer, inner = torchpager.budget("32 MiB"), torchpager.budget("16 MiB")

        def body():
            with outer:
                inner.start()
                raise KeyError("body")

        with pytest.raises(KeyError, match="body"):
            body()
        assert "out of order" in caplog.text
        inner.stop()
        outer.stop()


def test_nested_simulate_raises_and_the_outer_stays_in_force():
    with simulation():
        with pytest.raises(RuntimeError, match="active already"):
            torchpager.simulate("32 MiB").start()
        with torchpager.budget("100%") as budget:
            assert budget.device_bytes == 64 * MIB


def test_contexts_are_shared_by_all_threads():
    figures = []
    with simulation(), torchpager.budget("32 MiB"):

        def other():
            x = torch.ones(MIB)
            figures.append((torchpager.stats().allocated.current, x.sum().item()))

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert figures == [(4 * MIB, MIB)]


def test_contexts_entered_by_many_threads_are_all_restored():
    errors = []
    with simulation():

        def enter():
            for _ in range(20):
                budget = torchpager.budget("64 MiB")
                try:
                    budget.start()
                    budget.stop()
                except RuntimeError as error:  # another thread's came between
                    if "out of order" not in str(error):
                        errors.append(error)
                    while budget.active:
                        with contextlib.suppress(RuntimeError):
                            budget.stop()
                except Exception as error:
                    errors.append(error)

        threads = [threading.Thread(target=enter) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert errors == []
        assert _core.get_budget(_core.SIM_SLOT) == (64 * MIB, None)


def test_forked_child_has_no_context_in_force_and_can_leave_its_copies():
    with simulation(), torchpager.budget("32 MiB"), torchpager.auto_offload():
        x = torch.full((MIB,), 7.0)
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            text = "failed"
            try:
                assert not _torch_cpu.installed()
                assert _control.active_contexts() == ()
                assert x.numpy()[5] == 7.0
                with pytest.raises(torchpager.UnavailableError):
                    torchpager.budget("1 MiB").start()
                text = "fine"
            finally:
                os.write(write, text.encode())
                os._exit(0)
        os.close(write)
        assert os.read(read, 10) == b"fine"
        os.close(read)
        os.waitpid(child, 0)
        assert x.sum().item() == 7.0 * MIB
        del x


def test_forked_child_leaves_with_blocks_silently(run_python):
    done = run_python(
        "-c",
        "import os, torchpager\n"
        "with torchpager.simulate('64 MiB'), torchpager.budget('32 MiB'):\n"
        "    child = os.fork()\n"
        "if child:\n"
        "    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n",
    )
    assert done.stdout == "0\n"
    assert done.stderr == ""


def test_process_exits_at_once_when_contexts_and_tensors_are_left(run_python):
    done = run_python(
        "-c",
        "import torch, torchpager\n"
        "torchpager.simulate('64 MiB', granularity='64 KiB').start()\n"
        "torchpager.budget('8 MiB').start()\n"
        "torchpager.auto_offload().start()\n"
        "kept = [torch.ones(1 << 20) for _ in range(6)]\n"
        "print(kept[0].sum().item())\n",
        timeout=30,
    )
    assert done.stdout == f"{float(MIB)}\n"
    assert done.stderr == ""
