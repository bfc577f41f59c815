"""Interrupts while a context is entered or left: all or nothing, and the next use works.

The interpreter runs signal handlers when a Python function begins, when a call of a C function
has returned, and when a loop jumps back. Each of these places in the package's own code gets an
exception in turn.
"""

import gc
import importlib
import linecache
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.utils.dlpack
from torch._inductor import output_code

import torchpager
from torchpager import (
    _autostart,
    _control,
    _core,
    _targets,
    _torch_cpu,
    optimizer_chunks,
    patches,
    regions,
    testing,
)

MIB = 1 << 20
PACKAGE = str(Path(torchpager.__file__).parent)
# A loop is interrupted in its first rounds only.
VISITS = 20
PATCHED = [torch.Tensor, torch.UntypedStorage, torch._C, torch, torch.utils.dlpack]
PATCHED += [torch._C.PyTorchFileWriter, output_code.CompiledFxGraph]
PATCHED += [torch.optim.Optimizer, torch.amp.GradScaler, torch.nn.utils]
PATCHED += [importlib.import_module(f"torch.optim.{name}") for name in optimizer_chunks.KERNELS]


class Interrupt(KeyboardInterrupt):
    """Not pytest's to handle."""


class Places:
    """Raises at the n-th place where an interrupt may come; counts the places."""

    def __init__(self, at):
        self.at = at
        self.count = 0
        self._visits = {}

    def __enter__(self):
        sys.settrace(self._trace)
        sys.setprofile(self._profile)

    def __exit__(self, *_):
        sys.setprofile(None)
        sys.settrace(None)

    def _counts(self, frame):
        ours = frame.f_code.co_filename.startswith(PACKAGE)
        return ours or isinstance(frame.f_locals.get("self"), FakeGlue)

    def _arrived(self, frame, what):
        place = (frame.f_code, frame.f_lineno, what)
        self._visits[place] = self._visits.get(place, 0) + 1
        if self._visits[place] <= VISITS:
            self.count += 1
        if self.count == self.at:
            raise Interrupt

    def _profile(self, frame, event, called):
        if event in ("call", "c_return") and self._counts(frame):
            self._arrived(frame, getattr(called, "__name__", None))

    def _trace(self, frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        if event == "line":
            line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
            if line.startswith(("for ", "while ")):
                self._arrived(frame, event)
        return self._trace


def interrupted_everywhere(prepare, act, check):
    """Interrupt ``act(prepare())`` at each place in turn; ``check(it, number)`` after each."""
    number = 0
    while True:
        number += 1
        subject = prepare()
        places = Places(number)
        try:
            with places:
                act(subject)
        except Interrupt:
            check(subject, number)
        else:
            assert places.count < number, "an interrupt was swallowed"
            return number - 1


@pytest.fixture(autouse=True)
def few_objects(monkeypatch):
    """Entering a context looks at all objects; that would be too many places."""
    monkeypatch.setattr(gc, "get_objects", list)


def in_force():
    opened = _core.is_open(_core.SIM_SLOT)
    simulated = _targets.simulated()
    return (
        opened and _core.get_budget(_core.SIM_SLOT),
        opened and _core.stats(_core.SIM_SLOT)["offload"],
        simulated and simulated.settings,
        _torch_cpu.installed(),
        [dict(vars(owner)) for owner in PATCHED],
        (list(regions._installed), regions._FINDER in sys.meta_path, set(regions._users)),
        _control.active_contexts(),
    )


def simulation():
    return torchpager.simulate("64 MiB", granularity="64 KiB")


def start(context):
    context.start()


def stop(context):
    context.stop()


def uses_simulation():
    with simulation(), torchpager.auto_offload():
        x = torch.zeros(MIB // 4)
        testing.evict(x)
        x.apply_(lambda value: value + 1)
        testing.evict(x)
        assert x[5].item() == 1.0


@pytest.fixture
def device():
    with simulation() as context:
        yield context


def test_simulate_is_not_in_force_when_its_start_is_interrupted():
    before = in_force()

    def check(context, number):
        assert not context.active
        assert in_force() == before, number
        if number % 40 == 0:
            uses_simulation()

    def act(context):
        context.start()
        sys.setprofile(None)
        sys.settrace(None)
        context.stop()

    assert interrupted_everywhere(simulation, act, check) > 200
    uses_simulation()


def test_simulate_is_left_altogether_when_its_stop_is_interrupted():
    before = in_force()

    def check(context, number):
        if number == 1:  # before stop() began
            context.stop()
        assert not context.active
        assert in_force() == before, number

    assert interrupted_everywhere(lambda: simulation().start(), stop, check) > 50
    uses_simulation()


def test_exit_is_tried_again_when_stop_was_interrupted_before_it_began(device):
    def leave(context):
        context.__exit__(None, None, None)

    def check(context, number):
        if number == 1:  # before __exit__() began
            context.stop()
        assert not context.active

    interrupted_everywhere(lambda: torchpager.budget("32 MiB").start(), leave, check)
    assert _control.active_contexts() == (device,)


CONTEXTS = {
    "budget": lambda: torchpager.budget("8 MiB", host="40 MiB"),
    "auto_offload": lambda: torchpager.auto_offload(host="30 MiB"),
}


@pytest.fixture
def tensors(device):  # noqa: ARG001
    """More than the budgets of this module; paging is on around them."""
    with torchpager.auto_offload():
        kept = [torch.full((MIB,), float(i)) for i in range(4)]
        yield kept
        assert [x[7].item() for x in kept] == [0.0, 1.0, 2.0, 3.0]
        kept.clear()


@pytest.mark.usefixtures("tensors")
@pytest.mark.parametrize("make", CONTEXTS.values(), ids=CONTEXTS)
def test_context_is_not_in_force_when_its_start_is_interrupted(make):
    before = in_force()

    def check(context, number):
        assert not context.active
        assert in_force() == before, number

    def act(context):
        context.start()
        sys.setprofile(None)
        sys.settrace(None)
        context.stop()

    assert interrupted_everywhere(make, act, check) > 50


@pytest.mark.usefixtures("tensors")
@pytest.mark.parametrize("make", CONTEXTS.values(), ids=CONTEXTS)
def test_context_is_left_altogether_when_its_stop_is_interrupted(make):
    before = in_force()

    def check(context, number):
        if number == 1:
            context.stop()
        assert not context.active
        assert in_force() == before, number

    assert interrupted_everywhere(lambda: make().start(), stop, check) > 10


@pytest.mark.usefixtures("device")
def test_paging_is_switched_off_again_when_its_start_or_stop_is_interrupted():
    before = in_force()

    def check(context, _):
        if context.active:
            context.stop()
        assert in_force() == before

    def start_and_stop(context):
        context.start()
        context.stop()

    interrupted_everywhere(torchpager.auto_offload, start_and_stop, check)


def test_contexts_of_run_are_left_when_one_of_them_is_interrupted():
    before = in_force()
    wanted = _autostart.Arming(simulate="64 MiB", budget="16 MiB")
    contexts = []

    def prepare():
        contexts[:] = [wanted.simulation(), *wanted.contexts()]
        return contexts

    def check(_, number):
        assert in_force() == before, number

    def act(_):
        # Every place of patches.install() was tried above.
        _autostart._start_all(contexts)
        sys.setprofile(None)
        sys.settrace(None)
        for context in reversed(contexts):
            context.stop()

    with quick_patches():
        interrupted_everywhere(prepare, act, check)


@contextmanager
def quick_patches():
    wrapped = patches._wrapped
    patches._wrapped = lambda: wrapped()[:1]
    try:
        yield
    finally:
        patches._wrapped = wrapped


def pin_count(tensor):
    return testing.state(tensor).pins


def test_no_pin_is_left_when_pinning_is_interrupted(tensors):
    def check(*_):
        assert [pin_count(x) for x in tensors] == [0] * 4
        assert torchpager.stats().pinned.current == 0

    def act(module):
        handle = torchpager.pin(module)
        sys.setprofile(None)
        sys.settrace(None)
        assert pin_count(tensors[0]) == 1
        handle.unpin()

    module = torch.nn.ParameterList(tensors[:2])
    assert interrupted_everywhere(lambda: module, act, check) > 10
    check()


def test_no_pin_is_left_when_the_end_of_a_pin_is_interrupted(tensors):
    def check(handle, number):
        if number == 1:  # before __exit__() began
            handle.unpin()
        assert [pin_count(x) for x in tensors] == [0] * 4
        handle.unpin()
        assert handle.bytes == 0

    module = torch.nn.ParameterList(tensors[:2])

    def leave(handle):
        handle.__exit__(None, None, None)

    interrupted_everywhere(lambda: torchpager.pin(module), leave, check)


@pytest.mark.usefixtures("device")
def test_method_without_operator_leaves_nothing_held_when_it_is_interrupted():
    with torchpager.auto_offload():
        x, y = torch.zeros(MIB // 16), torch.zeros(MIB // 16)

        def prepare():
            testing.evict(x)

        def check(*_):
            assert pin_count(x) == pin_count(y) == 0
            assert not patches._in_place.addresses

        interrupted_everywhere(prepare, lambda _: x.map_(y, max), check)
        testing.evict(x)
        x.apply_(lambda _: 3.0)
        testing.evict(x)
        assert x.sum().item() == 3.0 * x.numel()


@pytest.mark.usefixtures("device")
def test_adopting_moves_a_tensor_or_does_not_when_it_is_interrupted():
    with torchpager.auto_offload():

        def prepare():
            return torch.nn.Linear(256, 256)

        def check(model, _):
            torchpager.adopt(model)
            assert testing.state(model.weight).where == "resident"
            assert torch.isfinite(model(torch.ones(256))).all()

        interrupted_everywhere(prepare, torchpager.adopt, check)


class FakeGlue:
    """The functions of the wrapper door's extension that open and close the door."""

    def __init__(self):
        self.state = {"installed": False, "enabled": False, "shared": False}

    def _set(self, name, on):
        self.state[name] = on
        return len(name)  # a C function: a place where an interrupt may come

    def installed(self):
        return self.state["installed"]

    def install(self):
        self._set("installed", True)

    def uninstall(self):
        self._set("installed", False)

    def enable(self, _, on):
        self._set("enabled", on)

    def share_budget(self, _, on):
        assert self.state["installed"], "the door has never been installed"
        self._set("shared", on)


def test_wrapper_door_is_open_or_shut_when_a_change_is_interrupted(monkeypatch):
    glue = FakeGlue()
    monkeypatch.setattr(_targets, "cuda_glue", lambda: glue)
    target = _targets.WrapperTarget(0)
    shut, opened = _targets.Settings(), _targets.Settings(door=True)

    def is_shut(*_):
        assert set(glue.state.values()) == {False}
        assert target.settings == shut

    def open_it(_):
        target.change(opened)
        sys.setprofile(None)
        sys.settrace(None)
        assert set(glue.state.values()) == {True}
        target.restore(shut)

    def shuts_in_the_end(*_):
        target.restore(shut)  # what leaving a context does after an interrupt
        is_shut()

    interrupted_everywhere(lambda: None, open_it, is_shut)
    interrupted_everywhere(
        lambda: target.change(opened), lambda _: target.restore(shut), shuts_in_the_end
    )
    is_shut()


def test_every_undo_is_done_when_one_of_them_fails(caplog):
    done = []

    def fails():
        done.append("fails")
        raise ValueError("undo")

    undos = [lambda: done.append("first"), fails, lambda: done.append("last")]
    failure = _control.unwind(undos)
    assert isinstance(failure, ValueError)
    assert (done, undos) == (["last", "fails", "fails", "first"], [])
    _control.back_out([fails])
    assert "undo" in caplog.text


def test_interrupt_takes_the_place_of_the_exception_that_is_being_undone():
    def interrupted():
        raise Interrupt

    with pytest.raises(Interrupt):
        _control.back_out([interrupted])
