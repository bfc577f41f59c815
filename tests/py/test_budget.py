"""The hard budget: what it bounds, and what is refused with nothing half-installed."""

import pytest
import torch

import torchpager
from torchpager import _control, _core

MIB = 1 << 20


@pytest.fixture
def device():
    with torchpager.simulate("64 MiB", granularity="64 KiB") as simulation:
        yield simulation


@pytest.mark.usefixtures("device")
def test_budget_is_never_exceeded_and_the_program_goes_on():
    torchpager.reset_stats()
    with torchpager.budget("16 MiB"):
        kept = [torch.ones(MIB) for _ in range(3)]
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(2 * MIB)
        small = torch.ones(MIB // 2)
        assert small.sum().item() == MIB // 2
        assert torchpager.stats().reserved.peak <= 16 * MIB
        assert torchpager.stats().evictions.count == 0
        del kept, small


@pytest.mark.usefixtures("device")
def test_budget_alone_never_moves_bytes():
    torchpager.reset_stats()
    with torchpager.budget("16 MiB"):
        for _ in range(20):
            torch.ones(2 * MIB)
        stats = torchpager.stats()
    assert stats.write_backs.count == stats.evictions.count == stats.host.peak == 0


@pytest.mark.usefixtures("device")
def test_out_of_memory_text_names_every_figure():
    with torchpager.budget("16 MiB", host="4 MiB"), torchpager.auto_offload():
        kept = torch.ones(2 * MIB)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.ones(8 * MIB)
        text = str(caught.value)
        assert text.startswith("CUDA out of memory.")
        for word in ("Budget", "resident", "HOST", "host memory used", "cap"):
            assert word in text
        oom = torchpager.last_oom()
        assert oom.requested_bytes == 32 * MIB
        assert oom.budget_bytes == 16 * MIB
        assert oom.host_budget_bytes == 4 * MIB
        small = torch.ones(MIB)
        assert small.sum().item() == MIB
        del kept, small


@pytest.mark.usefixtures("device")
def test_percentage_is_of_the_simulated_device():
    with torchpager.budget("50%") as budget:
        assert budget.device_bytes == 32 * MIB


@pytest.mark.usefixtures("device")
def test_scope_process_is_the_same_on_the_simulated_device():
    with torchpager.budget("32 MiB", scope="process") as budget:
        assert budget.device_bytes == 32 * MIB


@pytest.mark.usefixtures("device")
def test_size_comes_from_the_environment_when_none_is_given(monkeypatch):
    monkeypatch.setenv("TORCHPAGER_BUDGET", "24 MiB")
    monkeypatch.setenv("TORCHPAGER_HOST_BUDGET", "12 MiB")
    with torchpager.budget():
        assert _core.get_budget(_core.SIM_SLOT) == (24 * MIB, 12 * MIB)
    with torchpager.budget("16 MiB", host="6 MiB"):
        assert _core.get_budget(_core.SIM_SLOT) == (16 * MIB, 6 * MIB)


def test_size_is_required_when_the_environment_has_none():
    with pytest.raises(ValueError, match=r"needs a size.*TORCHPAGER_BUDGET"):
        torchpager.budget()


@pytest.mark.parametrize("size", [0, -1, "-1 GiB", "8 GB B", "", "0%", "101%"])
def test_bad_budget_raises_value_error_before_anything_is_entered(size):
    with pytest.raises(ValueError, match="budget is"):
        torchpager.budget(size)


@pytest.mark.parametrize("size", [8.5, True, b"8 GiB"])
def test_wrong_type_raises_type_error(size):
    with pytest.raises(TypeError, match="budget is"):
        torchpager.budget(size)


@pytest.mark.parametrize("host", [-1, "-1 GiB", "8 GB B"])
def test_bad_host_budget_raises_value_error(host):
    with pytest.raises(ValueError, match="host budget is"):
        torchpager.budget("8 GiB", host=host)
    with pytest.raises(ValueError, match="host budget is"):
        torchpager.auto_offload(host=host)


def test_unknown_scope_raises_value_error():
    with pytest.raises(ValueError, match=r"scope is 'gpu'.*'allocator'.*'process'"):
        torchpager.budget("8 GiB", scope="gpu")


def assert_nothing_installed():
    assert [repr(c) for c in _control.active_contexts()] == [
        repr(_control.active_contexts()[0])
    ]
    assert _core.get_budget(_core.SIM_SLOT) == (64 * MIB, None)
    assert not _core.stats(_core.SIM_SLOT)["offload"]
    assert not torchpager.status().active


@pytest.mark.usefixtures("device")
def test_budget_larger_than_the_device_raises_and_installs_nothing():
    with pytest.raises(
        ValueError, match=r"larger than the simulated device, which has 64\.00 MiB"
    ):
        torchpager.budget("65 MiB").start()
    assert_nothing_installed()


@pytest.mark.usefixtures("device")
def test_nested_budget_larger_than_the_outer_raises_and_the_outer_stays():
    with torchpager.budget("32 MiB", host="16 MiB"):
        with pytest.raises(ValueError, match=r"larger than the outer budget of 32\.00 MiB"):
            torchpager.budget("33 MiB").start()
        with pytest.raises(ValueError, match="larger than the outer host budget"):
            torchpager.budget("8 MiB", host="17 MiB").start()
        assert _core.get_budget(_core.SIM_SLOT) == (32 * MIB, 16 * MIB)
        with torchpager.budget("32 MiB"):
            assert _core.get_budget(_core.SIM_SLOT) == (32 * MIB, 16 * MIB)
    assert_nothing_installed()


@pytest.mark.usefixtures("device")
def test_host_budget_is_never_more_than_the_machine_has():
    with torchpager.budget("32 MiB", host="1000 TiB"):
        _, host = _core.get_budget(_core.SIM_SLOT)
        assert 0 < host < 1 << 50


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("make", [lambda: torchpager.budget("1 GiB"), torchpager.auto_offload])
def test_no_device_raises_unavailable_error_that_says_what_to_do(make):
    with pytest.raises(torchpager.UnavailableError, match=r"simulate\(.*doctor") as caught:
        make().start()
    assert isinstance(caught.value, RuntimeError)
    assert _control.active_contexts() == ()


@pytest.mark.usefixtures("device")
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_cuda_device_raises_unavailable_error_inside_simulate_without_one():
    with pytest.raises(torchpager.UnavailableError):
        torchpager.budget("1 MiB", device="cuda:0").start()
    assert_nothing_installed()


@pytest.mark.usefixtures("device")
def test_cpu_device_is_the_simulated_one_inside_simulate_only():
    with torchpager.budget("16 MiB", device="cpu") as budget:
        assert budget.device_bytes == 16 * MIB


def test_cpu_device_raises_unavailable_error_outside_simulate():
    with pytest.raises(torchpager.UnavailableError, match="simulate"):
        torchpager.budget("16 MiB", device="cpu").start()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("device_name", ["nonsense", "cuda:x"])
def test_device_that_is_none_raises_value_error(device_name):
    with pytest.raises(ValueError, match="not a torch device"):
        torchpager.budget("16 MiB", device=device_name).start()


@pytest.mark.usefixtures("device")
def test_budget_below_what_is_held_raises_and_installs_nothing_without_paging():
    kept = [torch.ones(MIB) for _ in range(4)]
    with pytest.raises(
        torch.OutOfMemoryError, match=r"^CUDA out of memory\. A budget of 8.00 MiB"
    ):
        torchpager.budget("8 MiB").start()
    assert_nothing_installed()
    assert torch.ones(MIB).sum().item() == MIB
    del kept


@pytest.mark.usefixtures("device")
def test_budget_below_what_is_held_pages_when_paging_is_on():
    kept = [torch.full((MIB,), float(i)) for i in range(8)]
    with torchpager.auto_offload():
        with torchpager.budget("8 MiB"):
            assert torchpager.stats().reserved.current <= 8 * MIB
            assert [t.sum().item() for t in kept] == [i * MIB for i in range(8)]
        assert torchpager.status().budget_bytes == 64 * MIB * 95 // 100
    del kept


@pytest.mark.usefixtures("device")
def test_budget_below_what_is_held_frees_caches_first():
    torch.ones(8 * MIB)
    with torchpager.budget("8 MiB"):
        assert torchpager.stats().reserved.current <= 8 * MIB


@pytest.mark.usefixtures("device")
def test_budget_below_what_is_held_collects_garbage_before_it_gives_up():
    cycle = [torch.ones(4 * MIB)]
    cycle.append(cycle)
    del cycle
    with torchpager.budget("8 MiB") as budget:
        assert budget.device_bytes == 8 * MIB


@pytest.mark.usefixtures("device")
def test_budget_below_what_is_held_raises_when_the_host_has_no_room():
    kept = [torch.ones(MIB) for _ in range(8)]
    with torchpager.auto_offload(host="4 MiB"):
        before = _core.get_budget(_core.SIM_SLOT)
        with pytest.raises(torch.OutOfMemoryError):
            torchpager.budget("8 MiB").start()
        assert _core.get_budget(_core.SIM_SLOT) == before
        assert [t.sum().item() for t in kept] == [MIB] * 8
    del kept


@pytest.mark.usefixtures("device")
def test_host_budget_below_what_host_frames_hold_names_the_host_figures():
    kept = [torch.full((MIB,), float(i)) for i in range(8)]
    with torchpager.auto_offload(), torchpager.budget("8 MiB"):
        assert [t.sum().item() for t in kept] == [i * MIB for i in range(8)]
        before, held = _core.get_budget(_core.SIM_SLOT), torchpager.stats().host.current
        assert held >= 24 * MIB
        for context in (
            torchpager.budget("8 MiB", host="1 MiB"),
            torchpager.auto_offload(host="1 MiB"),
        ):
            with pytest.raises(
                torch.OutOfMemoryError,
                match=r"^CUDA out of memory\. A host budget of 1\.00 MiB .* host frames hold "
                r"[23]\d\.\d\d MiB.*Nothing was changed",
            ) as caught:
                context.start()
            assert "A budget of" not in str(caught.value)
            assert not context.active
            assert _core.get_budget(_core.SIM_SLOT) == before
        assert [t[9].item() for t in kept] == [float(i) for i in range(8)]
    del kept


@pytest.mark.parametrize("size", [1 << 63, 1 << 64, -(1 << 64), "9999999 PiB"])
def test_size_beyond_any_machine_raises_value_error_wherever_one_is_given(size, monkeypatch):
    for make in (
        torchpager.budget,
        torchpager.simulate,
        lambda size: torchpager.budget("8 GiB", host=size),
        lambda size: torchpager.auto_offload(host=size),
        lambda size: torchpager.simulate("8 MiB", granularity=size),
        lambda size: torchpager.simulate("8 MiB", large_min=size),
    ):
        with pytest.raises(ValueError, match=r"is .*8 GiB"):
            make(size)
    monkeypatch.setenv("TORCHPAGER_BUDGET", str(size))
    monkeypatch.setenv("TORCHPAGER_HOST_BUDGET", str(size))
    for make in (torchpager.budget, torchpager.auto_offload):
        with pytest.raises(ValueError, match=r"budget is .*8 GiB"):
            make()


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("size", [(1 << 63) - 1, "8191 PiB"])
def test_largest_size_is_larger_than_the_device(size):
    with pytest.raises(ValueError, match="larger than the simulated device"):
        torchpager.budget(size).start()
    with torchpager.budget("8 MiB", host=size):
        assert _core.get_budget(_core.SIM_SLOT)[1] < 1 << 50


def test_percentage_beyond_100_names_no_size():
    with pytest.raises(ValueError, match=r"^budget is '101%'; .*at most 100%$"):
        torchpager.budget("101%")
    with pytest.raises(ValueError, match=r"^host budget is '101%'; .*at most 100%$"):
        torchpager.auto_offload(host="101%")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_pluggable_allocator_without_a_device_can_be_made_but_gives_no_device():
    if torch.version.cuda is None:
        with pytest.raises(torchpager.UnavailableError, match="CUDA build"):
            torchpager.pluggable_allocator()
    else:
        allocator = torchpager.pluggable_allocator()
        assert allocator is torchpager.pluggable_allocator()
        with pytest.raises(torchpager.UnavailableError):
            torchpager.budget("1 MiB").start()


OTHER_ALLOCATOR = """
import torch, torchpager
from torchpager import _core, _targets
# Any library with two functions will do: what matters is that it was there first.
names = _core.__file__, "tp_torch_malloc", "tp_torch_free"
other = torch.cuda.memory.CUDAPluggableAllocator(*names)
torch.cuda.memory.change_current_allocator(other)
try:
    _targets.WrapperTarget(0).open()
except torchpager.UnavailableError as error:
    print(error)
print(torchpager.status().active)
"""


@pytest.mark.skipif(torch.version.cuda is None, reason="needs a CUDA build of torch")
def test_another_tools_allocator_in_place_is_refused_before_it_is_asked_anything(run_python):
    printed = run_python("-c", OTHER_ALLOCATOR).stdout
    assert "but the allocator in place is 'pluggable'" in printed
    assert printed.rstrip().endswith("False")
