"""Steps recorded as they run, against what a dispatch mode and the test itself have counted."""

import gc
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import torchpager
from torchpager import _core
from torchpager.plan import make_plan
from torchpager.trace import Operator, Storage

MIB = 1 << 20
WIDTH = 256
LAYERS = 4
BUDGET = 5 * MIB // 2


class Counting(TorchDispatchMode):
    """Notes the operators that have an operand of a block of its own, and those storages."""

    def __init__(self):
        super().__init__()
        self.names = Counter()
        self.sizes = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        inputs = torch.utils._pytree.tree_leaves((args, kwargs))
        blocks = [self._block(each) for each in inputs if isinstance(each, torch.Tensor)]
        result = func(*args, **(kwargs or {}))
        if any(blocks):
            name = func._schema.name + "." + func._schema.overload_name
            self.names[name] += 1
        for each in torch.utils._pytree.tree_leaves(result):
            if isinstance(each, torch.Tensor):
                self._block(each)
        return result

    def _block(self, tensor):
        block = _core.block(tensor.data_ptr())
        if block is not None:
            self.sizes[block["addr"], block["generation"]] = block["requested_bytes"]
        return block


class Program:
    """A small network and its optimizer."""

    def __init__(self, width=WIDTH, **options):
        torch.manual_seed(0)
        layers = [torch.nn.Linear(width, width, bias=False) for _ in range(LAYERS)]
        self.net = torch.nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(
            self.net.parameters(), lr=0.01, momentum=0.9, **options
        )
        self.data = torch.randn(width, width)

    def step(self):
        loss = self.net(self.data).square().mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def paging():
    with (
        torchpager.simulate("64 MiB", large_min="64 KiB"),
        torchpager.budget(BUDGET),
        torchpager.auto_offload(),
    ):
        yield
        gc.collect()


@pytest.mark.usefixtures("paging")
@pytest.mark.parametrize("ending", ["trace", "trace.gz"])
def test_saved_step_agrees_with_an_independent_count(tmp_path, ending):
    program = Program(foreach=False)
    program.step()
    counted = Counting()
    with counted:
        program.step()
    for _ in range(3):  # under the mode every operator is called twice
        program.step()
    torchpager.save_trace(tmp_path / f"step.{ending}")
    trace = torchpager.load_trace(tmp_path / f"step.{ending}")
    assert trace.name == "step"

    names = Counter(each.name for each in trace.events if type(each) is Operator)
    # What calls others that can be seen, and makes views, is not in the trace.
    leaves = {
        "aten::mm.": (4 + 3 + 4),  # forward; backward to inputs and to weights
        "aten::mul_.Tensor": LAYERS,
        "aten::add_.Tensor": 2 * LAYERS,  # momentum, parameters
    }
    for name, count in leaves.items():
        assert names[name] == counted.names[name] == count, name

    step = trace.step(chunk_bytes=None)
    big = WIDTH * WIDTH * 4
    lasting = [each for each in step.blocks if each.born is None]
    assert [each.size_bytes for each in lasting] == [big] * (2 * LAYERS + 1)
    # Layers' outputs; the square; gradients of the outputs and of the weights.
    in_step = Counter(each.size_bytes for each in step.blocks if each.born is not None)
    independent = Counter(counted.sizes.values())[big] - len(lasting)
    assert set(in_step) == {big}
    assert independent <= in_step[big] <= independent + 6  # operators' temporaries
    phases = [each.phase for each in step.operators]
    assert phases == sorted(phases, key=["forward", "backward", "optimizer"].index)
    assert step.device_ns > 0
    del program, counted


def test_saved_step_is_planned(tmp_path):
    budget = 40 * MIB
    with (
        torchpager.simulate("512 MiB"),
        torchpager.budget(budget),
        torchpager.auto_offload(),
    ):
        program = Program(width=1024, foreach=False)
        for _ in range(3):
            program.step()
        torchpager.save_trace(tmp_path / "step.trace")
        del program
        gc.collect()
    step = torchpager.load_trace(tmp_path / "step.trace").step(chunk_bytes=None)
    plan = make_plan(step, budget)
    assert plan.peak_bytes <= budget
    assert plan.in_bytes > 0
    assert step.peak_bytes > budget


@pytest.mark.usefixtures("paging")
def test_steps_of_inference_are_found_by_their_period(tmp_path):
    program = Program(foreach=False)
    with torch.no_grad():
        for _ in range(80):
            program.net(program.data).sum()
    torchpager.save_trace(tmp_path / "step.trace")
    step = torchpager.load_trace(tmp_path / "step.trace").step()
    assert sum(each.name == "aten::mm." for each in step.operators) == LAYERS
    del program


@pytest.mark.usefixtures("paging")
def test_a_step_that_is_asked_for_ends_there(tmp_path):
    program = Program(foreach=False)
    for _ in range(8):
        program.step()
        program.step()
        torchpager.step()
    torchpager.save_trace(tmp_path / "step.trace")
    step = torchpager.load_trace(tmp_path / "step.trace").step(chunk_bytes=None)
    assert sum(each.name == "aten::mm." for each in step.operators) == 2 * 11
    del program


@pytest.mark.usefixtures("paging")
def test_an_optimizer_that_raises_does_not_end_the_recording(tmp_path):
    program = Program(foreach=False)

    def closure():
        raise KeyError("a closure of the user's")

    for _ in range(2):
        program.step()
        with pytest.raises(KeyError):
            program.optimizer.step(closure)
    for _ in range(4):
        program.step()
    torchpager.save_trace(tmp_path / "step.trace")
    step = torchpager.load_trace(tmp_path / "step.trace").step(chunk_bytes=None)
    assert sum(each.name == "aten::mm." for each in step.operators) == 11
    del program


def test_without_a_complete_step_there_is_nothing_to_save(tmp_path):
    with torchpager.simulate("64 MiB"):
        torchpager.step()  # nothing pages: nothing happens
        with pytest.raises(torchpager.UnavailableError, match="no complete step"):
            torchpager.save_trace(tmp_path / "step.trace")
    assert not (tmp_path / "step.trace").exists()


@pytest.mark.usefixtures("paging")
def test_the_same_step_is_saved_in_the_same_bytes(tmp_path):
    program = Program(foreach=False)
    for _ in range(4):
        program.step()
    for name in ("one.trace.gz", "two.trace.gz"):
        torchpager.save_trace(tmp_path / name)
    assert (tmp_path / "one.trace.gz").read_bytes() == (tmp_path / "two.trace.gz").read_bytes()
    storages = [
        each
        for each in torchpager.load_trace(tmp_path / "one.trace.gz").events
        if type(each) is Storage
    ]
    assert len({each.ident for each in storages}) == len(storages)
    del program
