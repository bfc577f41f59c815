"""Writes that no operator announces: found before their bytes are given up, or marked."""

import ctypes
import os
import signal
import subprocess
import time
import warnings

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import torchpager
from torchpager import _core, optimizers, testing

MIB = 1 << 20
COUNT = 256 << 10  # floats in 1 MiB

UPDATE_C = """
#include <stddef.h>
/* An optimizer's inner loop as an extension module has it: in place, by raw pointers. */
void update(float *parameter, const float *gradient, float *moment, size_t count) {
    for (size_t i = 0; i < count; i++) {
        moment[i] = 0.5f * moment[i] + gradient[i];
        parameter[i] -= 0.125f * moment[i];
    }
}
"""


def address(tensor):
    """The pointer an extension gets: not through the patched ``data_ptr``."""
    return torch._C.TensorBase.data_ptr(tensor)


def brought_back(tensor):
    """Evict and read, so that both copies hold the same."""
    testing.evict(tensor)
    tensor.sum()
    assert testing.state(tensor).where == "resident"
    return tensor


def settle():
    """Wait until nothing moves: a blind write at the moment of an eviction is what remains."""
    before = None
    while before != (before := _core.stats(_core.SIM_SLOT)["evictions"]):
        time.sleep(0.05)


@pytest.fixture
def paging():
    device = torchpager.simulate("64 MiB", granularity="64 KiB")
    with device, torchpager.budget("8 MiB"), torchpager.auto_offload():
        torchpager.reset_stats()
        yield


@pytest.fixture(scope="module")
def update(tmp_path_factory):
    """The C function, compiled."""
    folder = tmp_path_factory.mktemp("update")
    (folder / "update.c").write_text(UPDATE_C)
    command = [os.environ.get("CC", "cc"), "-O1", "-ffp-contract=off", "-shared", "-fPIC"]
    subprocess.run([*command, "-o", folder / "update.so", folder / "update.c"], check=True)
    function = ctypes.CDLL(str(folder / "update.so")).update
    function.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t]

    def call(parameter, moment):
        function(
            address(parameter), address(parameter.grad), address(moment), parameter.numel()
        )

    return call


def zeroing_by_ctypes(tensor):
    pointer = address(tensor)
    return lambda: ctypes.memset(pointer, 0, MIB)


def zeroing_through_a_view(tensor):
    view = torch._C.TensorBase.numpy(tensor)
    return lambda: view.fill(0)


@pytest.mark.usefixtures("paging")
@pytest.mark.filterwarnings("ignore:something has written")
@pytest.mark.parametrize("zeroing", [zeroing_by_ctypes, zeroing_through_a_view])
def test_blind_write_to_a_clean_tensor_survives_its_eviction(zeroing):
    tensor = torch.ones(COUNT)
    write = zeroing(tensor)
    brought_back(tensor)
    write()
    copied = torchpager.stats().write_backs.bytes
    testing.evict(tensor)
    assert testing.state(tensor).where == "host"
    assert tensor.sum().item() == 0
    stats = torchpager.stats()
    assert stats.unseen_writes.count == 1
    assert stats.unseen_writes.bytes == MIB
    assert stats.write_backs.bytes == copied + MIB


@pytest.mark.usefixtures("paging")
@pytest.mark.filterwarnings("ignore:something has written")
def test_blind_writes_to_many_tensors_survive_a_small_budget():
    tensors = [torch.full((COUNT,), float(i)) for i in range(20)]  # 20 MiB in 8
    pointers = [address(t) for t in tensors]
    for value in (1.0, 2.0):
        for t in tensors:
            t.sum()
        settle()
        number = ctypes.c_float(value)
        for pointer in pointers:
            for place in (0, COUNT // 2, COUNT - 1):
                ctypes.memmove(pointer + 4 * place, ctypes.byref(number), 4)
        settle()
        for i, t in enumerate(tensors):
            assert t[0].item() == t[-1].item() == t[COUNT // 2].item() == value
            assert t[1].item() == t[-2].item() == i
    assert torchpager.stats().unseen_writes.count > 0


@pytest.mark.usefixtures("paging")
def test_what_nobody_wrote_is_evicted_without_a_copy():
    tensor = brought_back(torch.ones(COUNT))
    before = torchpager.stats()
    testing.evict(tensor)
    after = torchpager.stats()
    assert after.write_backs == before.write_backs
    assert after.fingerprints.count == before.fingerprints.count + 1
    assert after.unseen_writes.count == after.unproven.count == 0


@pytest.mark.usefixtures("paging")
def test_status_says_whether_contents_are_compared(monkeypatch):
    status = torchpager.status()
    assert status.verified
    assert status.reasons == ()
    caps = _core.caps(_core.SIM_SLOT) | {"fingerprints": False, "no_fingerprints": "too old"}
    monkeypatch.setattr(_core, "caps", lambda _: caps)
    status = torchpager.status()
    assert not status.verified
    assert status.reasons == ("every eviction copies: too old",)


def test_first_unseen_write_is_named_in_one_warning():
    with torchpager.simulate("64 MiB"), torchpager.auto_offload():
        tensor = torch.ones(8, 128 << 10)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for value in (1, 2):
                brought_back(tensor)
                ctypes.memset(address(tensor), value, 100)
                testing.evict(tensor)
            until = time.monotonic() + 10
            while not caught and time.monotonic() < until:
                time.sleep(0.01)
        assert torchpager.stats().unseen_writes.count >= 2
        assert len(caught) == 1
        text = str(caught[0].message)
        assert "a Tensor of shape (8, 131072), torch.float32" in text
        assert "(4.00 MiB)" in text
        assert "torchpager.pin" in text


READONLY = """
import ctypes, sys, torch, torchpager
from torchpager import testing

with torchpager.simulate("64 MiB", granularity="64 KiB"), torchpager.auto_offload():
    x = torch.ones(1 << 18)
    pointer = torch._C.TensorBase.data_ptr(x)
    testing.evict(x)
    x.sum()
    x.add_(1)  # announced
    ctypes.memset(pointer, 0, 8)
    testing.evict(x)
    assert x.sum().item() == 2 * ((1 << 18) - 2)  # clean again
    print("so far", flush=True)
    if sys.argv[1] == "blind":
        ctypes.memset(pointer, 0, 8)
    else:
        x.zero_()
    print("done", flush=True)
    del x
"""


@pytest.mark.parametrize(
    ("debug", "who", "code"),
    [
        ("readonly", "blind", -signal.SIGSEGV),
        ("readonly", "announced", 0),
        ("", "blind", 0),
    ],
)
def test_debug_mode_stops_a_blind_writer_where_it_stands(run_python, debug, who, code):
    environment = os.environ | {"TORCHPAGER_DEBUG": debug}
    done = run_python("-c", READONLY, who, check=False, env=environment)
    assert done.returncode == code, done.stderr
    assert done.stdout == ("so far\n" if code else "so far\ndone\n")


# -- optimizers --------------------------------------------------------------------------------


def network():
    torch.manual_seed(3)
    return nn.Sequential(*(nn.Linear(512, 512) for _ in range(6)))  # 6 MiB


class Extension(torch.optim.Optimizer):
    """As an extension package has it: one pass over everything, by raw pointers."""

    def __init__(self, parameters, update):
        super().__init__(parameters, {})
        self.update = update

    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p]["moment"] = torch.zeros_like(p)
                self.update(p, self.state[p]["moment"])


def trained(update, steps=4):
    """The network after some steps; with ``update`` in C, or by operators in the same order."""
    model = network()
    optimizer = Extension(model.parameters(), update)
    inputs = torch.linspace(-1, 1, 64 * 512).reshape(64, 512)
    for _ in range(steps):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()
        if torchpager.status().active:
            settle()
        optimizer.step()
    return [t.clone() for p in model.parameters() for t in (p, optimizer.state[p]["moment"])]


def by_operators(parameter, moment):
    with torch.no_grad():
        moment.mul_(0.5).add_(parameter.grad)
        parameter.sub_(moment * 0.125)


@pytest.mark.filterwarnings("ignore:something has written")
def test_optimizer_that_writes_in_c_gives_the_same_bits_at_a_small_budget(update):
    wanted = trained(update)
    device = torchpager.simulate("64 MiB", granularity="64 KiB")
    with device, torchpager.budget("10 MiB"), torchpager.auto_offload():
        torchpager.reset_stats()
        found = trained(update)
        assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))
        assert torchpager.stats().evictions.count > 0
        del found


@pytest.mark.usefixtures("paging")
def test_step_marks_parameters_and_states_as_written(update):
    model = nn.Linear(512, 512)
    optimizer = Extension(model.parameters(), update)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()  # makes the state
    moment = optimizer.state[model.weight]["moment"]
    for t in (model.weight, moment):
        brought_back(t)
        assert _core.block(address(t))["dirty_count"] == 0
    optimizer.step()
    for t in (model.weight, moment):
        assert _core.block(address(t))["clean_count"] == 0
    before = moment.clone(), model.weight.detach().clone()
    testing.page_out_all()
    assert torch.equal(moment, before[0])
    assert torch.equal(model.weight, before[1])
    assert torchpager.stats().unseen_writes.count == 0


@pytest.mark.usefixtures("paging")
def test_step_leaves_alone_what_operators_were_seen_to_write():
    model = nn.Linear(512, 512)
    optimizer = Extension(model.parameters(), by_operators)
    model(torch.ones(1, 512)).sum().backward()
    optimizer.step()

    def update_and_write_back(parameter, moment):
        by_operators(parameter, moment)
        if parameter is model.weight:
            brought_back(parameter)

    optimizer.update = update_and_write_back
    optimizer.step()
    assert _core.block(address(model.weight))["dirty_count"] == 0


def test_hooks_are_gone_when_paging_ends():
    found = dict(_global_optimizer_post_hooks)
    with torchpager.simulate("64 MiB"), torchpager.auto_offload():
        with torchpager.auto_offload():
            assert len(_global_optimizer_post_hooks) == len(found) + 1
        assert len(_global_optimizer_post_hooks) == len(found) + 1
    assert found == _global_optimizer_post_hooks
    assert not optimizers._watchers
