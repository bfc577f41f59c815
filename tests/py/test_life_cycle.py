"""Life cycle of a budget: late, twice, crossed, cut short, forked, at the end of the process.

`docs/guide.md`, "Life cycle", says what is right in each case.
"""

import gc
import os
import signal
import threading
import time
import traceback

import pytest
import torch

import torchpager
from torchpager import _control, _core, testing

MIB = 1 << 20
PRELUDE = """
import os, sys, threading, torch, torchpager
from torchpager import testing
def enter(budget="8 MiB", **options):
    torchpager.simulate("64 MiB", granularity="64 KiB", **options).start()
    torchpager.budget(budget).start()
    torchpager.auto_offload().start()
def tensors(count=8):
    return [torch.full((1 << 20,), float(i)) for i in range(count)]
"""


@pytest.fixture
def device():
    with torchpager.simulate("64 MiB", granularity="64 KiB") as simulation:
        yield simulation


@pytest.fixture
def program(run_python):
    """Run a program below the prelude in a process of its own, which must end soon."""

    def run(text, **options):
        return run_python("-c", PRELUDE + text, timeout=60, **options)

    return run


def tensors(count=8):
    return [torch.full((MIB,), float(i)) for i in range(count)]


def sums(kept):
    return [x.sum().item() for x in kept]


def expected(count=8):
    return [float(i) * MIB for i in range(count)]


def budget_bytes():
    return _core.get_budget(_core.SIM_SLOT)[0]


# ---- the same context again, and crossed ones ------------------------------------------------


@pytest.mark.usefixtures("device")
def test_same_object_is_entered_again_with_tensors_alive_from_before():
    budget = torchpager.budget("8 MiB")
    with torchpager.auto_offload():
        with budget:
            kept = tensors()
        for _ in range(3):
            with budget:
                assert torchpager.stats().reserved.current <= 8 * MIB
                assert sums(kept) == expected()
        del kept


@pytest.mark.usefixtures("device")
def test_entering_twice_says_so_and_leaving_once_is_enough():
    budget = torchpager.budget("8 MiB")
    with budget:
        with pytest.raises(RuntimeError, match="active already"), budget:
            pass
        assert budget_bytes() == 8 * MIB
    assert budget_bytes() == 64 * MIB


@pytest.mark.usefixtures("device")
def test_with_blocks_left_in_the_wrong_order_say_which_and_can_be_left_in_the_right_one():
    outer, inner = torchpager.budget("32 MiB"), torchpager.budget("16 MiB")
    outer.__enter__()
    inner.__enter__()
    with pytest.raises(RuntimeError, match=r"'32 MiB'.*out of order.*'16 MiB'"):
        outer.__exit__(None, None, None)
    assert budget_bytes() == 16 * MIB
    inner.__exit__(None, None, None)
    outer.__exit__(None, None, None)
    assert budget_bytes() == 64 * MIB


@pytest.mark.usefixtures("device")
def test_budgets_of_two_threads_nest_as_they_were_entered():
    entered, leave = threading.Event(), threading.Event()
    errors = []

    def other():
        try:
            with torchpager.budget("16 MiB"):
                entered.set()
                leave.wait(10)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=other)
    with torchpager.budget("32 MiB") as outer:
        thread.start()
        assert entered.wait(10)
        # One budget for the process: the later one is in force here as well.
        assert budget_bytes() == 16 * MIB
        with pytest.raises(torch.OutOfMemoryError):
            torch.ones(5 * MIB)
        with pytest.raises(RuntimeError, match="out of order"):
            outer.stop()
        leave.set()
        thread.join(10)
        assert budget_bytes() == 32 * MIB
    assert errors == []


# ---- changing it while running ---------------------------------------------------------------


@pytest.mark.usefixtures("device")
def test_budget_may_shrink_below_what_is_resident_while_another_thread_computes():
    stop = threading.Event()
    wrong = []

    def compute():
        while not stop.is_set():
            x = torch.full((MIB // 2,), 3.0)
            if (x + x).sum().item() != 3.0 * MIB:
                wrong.append(x)

    with torchpager.auto_offload():
        kept = tensors()
        thread = threading.Thread(target=compute)
        thread.start()
        try:
            for size in ("24 MiB", "16 MiB", "12 MiB", "24 MiB", "12 MiB"):
                with torchpager.budget(size) as budget:
                    assert torchpager.stats().reserved.current <= budget.device_bytes
                    assert sums(kept) == expected()
        finally:
            stop.set()
            thread.join()
        assert not wrong
        del kept


@pytest.mark.usefixtures("device")
def test_step_goes_on_when_the_budget_is_left_and_another_entered_before_backward():
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    data = torch.randn(1024, 256)

    def gradients(between):
        model.zero_grad()
        loss = model(data).square().sum()
        between()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    alone = gradients(lambda: None)
    with torchpager.auto_offload():
        budget = torchpager.budget("4 MiB").start()

        def change():
            budget.stop()
            with torchpager.budget("3 MiB"):
                pass
            budget.start()

        changed = gradients(change)
        budget.stop()
    late = gradients(lambda: None)
    for found in (changed, late):
        assert all(torch.equal(a, b) for a, b in zip(alone, found, strict=True))


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("outer", ["budget", "auto_offload"])
def test_what_is_in_host_comes_home_whichever_context_is_left_last(outer):
    contexts = [torchpager.budget("8 MiB"), torchpager.auto_offload()]
    if outer == "auto_offload":
        contexts.reverse()
    with contexts[0], contexts[1]:
        kept = tensors(10)
        assert torchpager.stats().host.current > 0
    assert {testing.state(x).where for x in kept} == {"resident"}
    assert sum(testing.state(x).clean_extents for x in kept) == 0
    assert torchpager.stats().host.current == 0
    assert sums(kept) == expected(10)


class Held(torch.autograd.Function):
    """A region that stays open until it is told to end."""

    @staticmethod
    def forward(_ctx, x, begun, end):
        begun.set()
        assert end.wait(60)
        return x + 1


@pytest.mark.usefixtures("device")
def test_leaving_beside_an_open_region_does_not_wait_at_each_block():
    begun, end = threading.Event(), threading.Event()
    held = threading.Thread(target=lambda: Held.apply(torch.ones(8), begun, end))
    with torchpager.budget("100%"):
        with torchpager.auto_offload(), torchpager.budget("4 MiB"):
            kept = [torch.full((1 << 19,), float(i)) for i in range(24)]
            held.start()
            assert begun.wait(60)
            began = time.monotonic()
        took = time.monotonic() - began
    end.set()
    held.join()
    assert torchpager.stats().host.current > 0
    assert took < 0.8, f"{took:.1f} s for {len(kept)} blocks"
    assert [x[0].item() for x in kept] == [float(i) for i in range(24)]


@pytest.mark.usefixtures("device")
def test_two_models_in_turn_each_with_its_own_budget():
    torch.manual_seed(0)
    models = [torch.nn.Linear(1024, 1024) for _ in range(2)]
    data = torch.randn(8, 1024)
    alone = [model(data).detach() for model in models]
    with torchpager.auto_offload():
        for _ in range(3):
            for model, before in zip(models, alone, strict=True):
                with torchpager.budget("6 MiB"), torch.inference_mode():
                    assert torch.equal(model(data), before)
    del models, data, alone, model, before


# ---- cut short -------------------------------------------------------------------------------


@pytest.mark.usefixtures("device")
def test_out_of_memory_caught_100_times_leaks_nothing():
    with torchpager.budget("8 MiB"):
        kept, errors = torch.ones(MIB), []
        before = None
        for _ in range(100):
            try:
                held = torch.ones(MIB // 2)
                torch.ones(2 * MIB)
            except torch.OutOfMemoryError as error:
                errors.append(error)
            del held
            before = before or torchpager.stats()
        assert len(errors) == 100
        now = torchpager.stats()
        assert now.allocated.current == before.allocated.current == 4 * MIB
        assert now.reserved.current == before.reserved.current
        assert torch.ones(MIB).sum().item() == MIB
        del kept


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("where", ["forward", "backward", "inside an operator"])
def test_out_of_memory_in_a_step_caught_100_times_leaks_nothing_while_paging(where):
    torch.manual_seed(0)
    layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(4)))
    small = torch.randn(256, 256)

    def step(layers, small):
        if where == "forward":
            layers(torch.ones(8 * MIB // 1024, 256)).sum().backward()
        elif where == "backward":
            x = small.clone().requires_grad_()
            # What the backward makes is as large as what expand() only pretends to be.
            x.expand(160, 256, 256).square().sum().backward()
        else:
            torch.cdist(torch.ones(4096, 64), torch.ones(4096, 64) + small[0, 0])

    kept = tensors(2)
    errors = []
    with torchpager.auto_offload(), torchpager.budget("8 MiB", host="8 MiB"):
        torchpager.reset_stats()
        before = None
        for _ in range(100):
            with pytest.raises(torch.OutOfMemoryError) as caught:
                step(layers, small)
            # The frames of the program itself may hold tensors, as they do without us.
            traceback.clear_frames(caught.value.__traceback__)
            errors.append(caught.value)
            del caught
            layers.zero_grad()
            files = len(os.listdir("/proc/self/fd"))
            blocks = {each["addr"]: each for each in _core.blocks(_core.SIM_SLOT)}
            assert [each for each in blocks.values() if each["pin_count"]] == []
            stats = torchpager.stats()
            figures = (len(blocks), stats.allocated.current, stats.pinned.current, files)
            before = before or figures
            assert figures == before
        assert len(errors) == 100
        assert torchpager.stats().ooms >= 100
        assert torchpager.stats().reserved.peak <= 8 * MIB
        assert torchpager.stats().host_bytes.peak <= 8 * MIB
        assert sums(kept) == expected(2)
        assert not torch.isnan(layers(small)).any()
    del kept, layers, small


@pytest.mark.usefixtures("device")
def test_keyboard_interrupt_in_a_step_leaves_the_contexts_and_the_next_use_works():
    kept = tensors()
    before = budget_bytes(), _core.stats(_core.SIM_SLOT)["offload"]

    def steps(kept, seconds):
        with torchpager.auto_offload(), torchpager.budget("8 MiB"):
            signal.setitimer(signal.ITIMER_REAL, seconds)
            end = time.monotonic() + 10
            while time.monotonic() < end:
                for x in kept:
                    x.add_(1).sub_(1)

    def interrupt(*_):
        raise KeyboardInterrupt

    found = signal.signal(signal.SIGALRM, interrupt)
    try:
        for i in range(5):
            with pytest.raises(KeyboardInterrupt):
                steps(kept, 0.02 + 0.013 * i)
            assert len(_control.active_contexts()) == 1
            assert (budget_bytes(), _core.stats(_core.SIM_SLOT)["offload"]) == before
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, found)
    # An operator that was interrupted half way has been done, or not: in-place steps of 1.
    assert all(0 <= x[0].item() - i <= 5 for i, x in enumerate(kept))
    _core.check(_core.SIM_SLOT)
    del kept


@pytest.mark.usefixtures("device")
@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_nested_contexts_are_left_by_any_exception(error):
    before = budget_bytes(), _core.stats(_core.SIM_SLOT)["offload"]
    kept = []

    def body():
        with (
            torchpager.budget("16 MiB"),
            torchpager.auto_offload(),
            torchpager.budget("8 MiB"),
        ):
            kept.extend(tensors())
            raise error

    with pytest.raises(error):
        body()
    assert (budget_bytes(), _core.stats(_core.SIM_SLOT)["offload"]) == before
    assert sums(kept) == expected()
    kept.clear()


# ---- what outlives it ------------------------------------------------------------------------


def test_tensors_outlive_budget_and_device_and_are_freed_in_any_order():
    with torchpager.simulate("64 MiB", granularity="64 KiB"), torchpager.auto_offload():
        with torchpager.budget("8 MiB"):
            kept = tensors()
            views = [x[::2] for x in kept]
        assert sums(kept) == expected()
    del kept[1::2], views[::2]
    gc.collect()
    assert [x[3].item() for x in kept] == [0.0, 2.0, 4.0, 6.0]
    assert [view[3].item() for view in views] == [1.0, 3.0, 5.0, 7.0]
    for x in kept:
        x.add_(1)
    with torchpager.simulate("64 MiB", granularity="64 KiB"), torchpager.auto_offload():
        testing.page_out_all()
        assert [x[3].item() for x in kept] == [1.0, 3.0, 5.0, 7.0]
    del kept, views, x


def test_tensors_outlive_the_interpreter(program):
    done = program(
        "enter()\n"
        "import builtins\n"
        "class Late:\n"
        "    def __init__(self):\n"
        "        self.kept = tensors()\n"
        "    def __del__(self):\n"
        "        self.kept.clear()\n"
        "builtins.late, builtins.kept = Late(), tensors()\n"
        "print('end')\n"
    )
    assert (done.stdout, done.stderr) == ("end\n", "")


@pytest.mark.parametrize("where", ["'message'", "3", ""])
def test_sys_exit_with_transfers_in_flight_keeps_the_exit_code(program, where):
    done = program(
        "with torchpager.simulate('64 MiB', granularity='64 KiB'):\n"
        "    with torchpager.auto_offload(), torchpager.budget('8 MiB'):\n"
        "        kept = tensors()\n"
        "        for x in kept: x.add_(1)\n"
        f"        sys.exit({where})\n",
        check=False,
    )
    assert done.returncode == {"'message'": 1, "3": 3, "": 0}[where]
    assert done.stderr == ("message\n" if where == "'message'" else "")


def test_sys_exit_while_another_thread_computes_waits_for_it_and_keeps_the_exit_code(program):
    # A daemon thread that computes at exit aborts plain PyTorch as well.
    done = program(
        "enter()\n"
        "kept = tensors()\n"
        "def compute():\n"
        "    for _ in range(20):\n"
        "        for x in kept: x.add_(1)\n"
        "    print(kept[7].sum().item() / (1 << 20))\n"
        "threading.Thread(target=compute).start()\n"
        "sys.exit(4)\n",
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (4, "27.0\n", "")


def test_exit_handlers_of_the_program_can_still_read(program):
    done = program(
        "import atexit\n"
        "enter()\n"
        "kept = tensors()\n"
        "atexit.register(lambda: print(kept[3].sum().item() / (1 << 20)))\n"
    )
    assert (done.stdout, done.stderr) == ("3.0\n", "")


@pytest.mark.parametrize("ending", ["os._exit(5)", "os.kill(os.getpid(), 15)"])
def test_hard_end_leaves_no_process_behind(program, ending):
    done = program(f"enter()\nkept = tensors()\n{ending}\n", check=False)
    assert done.returncode in (5, -15)
    assert done.stderr == ""


# ---- forked children -------------------------------------------------------------------------


def test_fork_inside_leaves_the_parent_paging_and_the_child_without(program):
    done = program(
        "torch.set_num_threads(1)\n"  # OpenMP's threads are not there in a child
        "enter()\n"
        "kept = tensors()\n"
        "child = os.fork()\n"
        "if child == 0:\n"
        "    assert not torchpager.status().active\n"
        "    assert [x[5].item() for x in kept] == [float(i) for i in range(8)]\n"
        "    kept[0].fill_(9.0)\n"
        "    y = torch.ones(1 << 20)\n"
        "    assert testing.state(y).where == 'native'\n"
        "    print('child', kept[0][5].item(), flush=True)\n"
        "    os._exit(0)\n"
        "code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n"
        "for x in kept: x.add_(1)\n"
        "print('parent', code, [x[5].item() for x in kept], torchpager.status().active)\n"
    )
    assert done.stdout.splitlines()[-1] == (
        "parent 0 [1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0] True"
    )
    assert done.stderr == ""


def test_fork_while_another_thread_enters_contexts_leaves_a_child_that_ends(program):
    done = program(
        "enter('32 MiB')\n"
        "stop = threading.Event()\n"
        "def cross():\n"
        "    while not stop.is_set():\n"
        "        with torchpager.budget('16 MiB'): pass\n"
        "thread = threading.Thread(target=cross)\n"
        "thread.start()\n"
        "codes = []\n"
        "for _ in range(10):\n"
        "    child = os.fork()\n"
        "    if child == 0:\n"
        "        try:\n"
        "            torchpager.budget('1 MiB').start()\n"
        "        except torchpager.UnavailableError:\n"
        "            os._exit(7)\n"
        "        os._exit(1)\n"
        "    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))\n"
        "stop.set()\n"
        "thread.join()\n"
        "print(set(codes))\n"
    )
    assert done.stdout == "{7}\n"


def test_worker_processes_of_a_loader_work_inside(program):
    done = program(
        "enter()\n"
        "data = torch.utils.data.TensorDataset(torch.arange(64.0).view(64, 1))\n"
        "loader = torch.utils.data.DataLoader(data, batch_size=8, num_workers=2)\n"
        "kept = tensors()\n"
        "total = sum(batch.sum().item() for (batch,) in loader)\n"
        "print(total, [x[0].item() for x in kept][-1])\n"
    )
    assert done.stdout == "2016.0 7.0\n"


def test_context_of_the_parent_can_be_stopped_in_the_child(device):
    budget = torchpager.budget("8 MiB").start()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            budget.stop()
            device.stop()
            os.write(write, str(budget.active).encode())
        finally:
            os._exit(0)
    os.close(write)
    assert os.read(read, 10) == b"False"
    os.close(read)
    os.waitpid(child, 0)
    assert budget.active
    budget.stop()
