"""Pins, and the testing helpers."""

import pytest
import torch
from torch import nn

import torchpager
from torchpager import testing

MIB = 1 << 20


@pytest.fixture(autouse=True)
def paging():
    with torchpager.simulate("64 MiB", granularity="64 KiB"), torchpager.auto_offload():
        yield


def test_pinned_tensor_does_not_move_until_unpinned():
    x = torch.ones(MIB)
    handle = torchpager.pin(x)
    assert handle.bytes == 4 * MIB
    assert testing.state(x).immovable
    with pytest.raises(RuntimeError):
        testing.evict(x)
    testing.page_out_all()
    assert testing.state(x).where == "resident"
    handle.unpin()
    assert handle.bytes == 0
    testing.evict(x)
    assert testing.state(x).where == "host"


def test_pinning_brings_a_tensor_back_from_host():
    x = torch.full((MIB,), 3.0)
    testing.evict(x)
    with torchpager.pin(x):
        assert testing.state(x).where == "resident"
        assert x.sum().item() == 3.0 * MIB
    testing.evict(x)


def test_pins_count_and_unpinning_twice_is_as_once():
    x = torch.ones(MIB)
    first, second = torchpager.pin(x), torchpager.pin(x)
    first.unpin()
    first.unpin()
    with pytest.raises(RuntimeError):
        testing.evict(x)
    second.unpin()
    testing.evict(x)


def test_module_is_pinned_whole_and_ties_once():
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    model[1].weight = model[0].weight
    with torchpager.pin(model) as handle:
        assert handle.bytes == 256 * 256 * 4
        assert testing.page_out_all() == 0
    assert testing.page_out_all() > 0


def test_pin_that_does_not_fit_raises_and_pins_nothing():
    with torchpager.budget("8 MiB"):
        tensors = nn.ParameterList([torch.ones(MIB) for _ in range(4)])
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
            torchpager.pin(tensors)
        assert not any(testing.state(t).immovable for t in tensors)
        assert torchpager.stats().pinned.current == 0
        testing.page_out_all()
        assert all(testing.state(t).where == "host" for t in tensors)
        del tensors


def test_pin_of_a_freed_tensor_is_gone_and_unpinning_is_harmless():
    x = torch.ones(MIB)
    handle = torchpager.pin(x)
    address = x.data_ptr()
    del x
    assert torchpager.stats().pinned.current == 0
    y = torch.ones(MIB)
    assert y.data_ptr() == address, "the block was meant to come back, with another generation"
    with torchpager.pin(y):
        handle.unpin()
        with pytest.raises(RuntimeError):
            testing.evict(y)


def test_pin_of_a_small_tensor_does_nothing():
    x = torch.ones(4)
    with torchpager.pin(x) as handle:
        assert handle.bytes == 0
        assert testing.state(x).where == "native"


def test_pin_of_something_else_raises_type_error():
    with pytest.raises(TypeError, match="a tensor or a module, not a list"):
        torchpager.pin([torch.ones(MIB)])


def test_state_tells_dirty_from_clean():
    x = torch.ones(MIB)
    assert testing.state(x).dirty_extents == testing.state(x).extents
    testing.evict(x)
    assert x.sum().item() == MIB
    state = testing.state(x)
    assert state.clean_extents == state.extents
    assert state.evicted_extents == state.extents
    x.add_(1)
    assert testing.state(x).dirty_extents == testing.state(x).extents


def test_looking_at_the_state_moves_nothing():
    x = torch.ones(MIB)
    testing.evict(x)
    fills = torchpager.stats().fills
    assert testing.state(x).where == "host"
    assert testing.state(x[5:]).where == "host"
    assert torchpager.stats().fills == fills


def test_evicting_a_native_tensor_raises_value_error():
    with pytest.raises(ValueError, match="not in torchpager's memory"):
        testing.evict(torch.ones(4))


def test_paging_everything_out_reaches_every_tensor():
    kept = [torch.full((MIB,), float(i)) for i in range(4)]
    assert testing.page_out_all() == 16 * MIB
    assert {testing.state(t).where for t in kept} == {"host"}
    assert [t.sum().item() for t in kept] == [i * MIB for i in range(4)]
