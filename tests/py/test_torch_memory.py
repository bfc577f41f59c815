"""PyTorch's interface to the memory of tensors, on tensors whose bytes are in HOST.

Strict mode: what reads memory that nobody has brought in crashes.
"""

import copy
import io

import pytest
import torch
from torch import nn

import torchpager
from torchpager import device_report, testing

COUNT = 32 << 10


@pytest.fixture(params=[True, False], ids=["strict", "mapped"])
def paging(request):
    device = torchpager.simulate(
        "64 MiB", granularity="4 KiB", strict=request.param, page_out_before_each_op=True
    )
    with device, torchpager.auto_offload():
        yield


def evicted(count=COUNT):
    """A tensor 0, 1, 2 ... whose bytes are in HOST."""
    x = torch.arange(count, dtype=torch.float32)
    testing.evict(x)
    assert testing.state(x).where == "host"
    return x


EXPECTED = torch.arange(COUNT, dtype=torch.float32)


def empty():
    return torch.empty(0)


def swapped(x):
    other = torch.zeros(8)
    torch.utils.swap_tensors(x, other)
    return other


def through_a_file(x, path, **options):
    torch.save({"x": x, "view": x[7:]}, path)
    loaded = torch.load(path, **options)
    assert torch.equal(loaded["view"], loaded["x"][7:])
    assert loaded["view"].data_ptr() == loaded["x"].data_ptr() + 28
    return loaded["x"]


def through_a_storage_file(x, path):
    with open(path, "wb") as file:
        x.untyped_storage()._write_file(file, True, False, 1)
    return torch.from_file(str(path), size=COUNT, dtype=torch.float32)


def shrunk_and_grown(x):
    x.untyped_storage().resize_(8 * COUNT)
    testing.evict(x)
    x.untyped_storage().resize_(4 * COUNT)
    return x


def with_data_of(x):
    y = nn.Parameter(torch.zeros(3))
    y.data = x
    return y.detach()


WAYS = {
    "to a dtype and back": lambda x, _: x.to(torch.float64).to(torch.float32),
    "to a copy": lambda x, _: x.to("cpu", copy=True),
    "cpu": lambda x, _: x.cpu(),
    "resize_ larger": lambda x, _: x.resize_(2 * COUNT)[:COUNT],
    "resize_ smaller and back": lambda x, _: x.resize_(10).resize_(COUNT),
    "resize_ of another": lambda x, _: empty().resize_(COUNT).copy_(x),
    "resize_as_": lambda x, _: empty().resize_as_(x).copy_(x),
    "set_ to a tensor": lambda x, _: empty().set_(x),
    "set_ to a storage": lambda x, _: empty().set_(x.untyped_storage(), 0, (COUNT,)),
    "storage resized": lambda x, _: shrunk_and_grown(x),
    "storage cloned": lambda x, _: empty().set_(x.untyped_storage().clone()),
    "storage copied": lambda x, _: empty().set_(
        torch.UntypedStorage(4 * COUNT).copy_(x.untyped_storage())
    ),
    "storage cpu": lambda x, _: empty().set_(x.untyped_storage().cpu()),
    "storage deepcopy": lambda x, _: empty().set_(copy.deepcopy(x.untyped_storage())),
    "typed storage": lambda x, _: torch.tensor(x.storage().tolist()),
    "deepcopy of a module": lambda x, _: copy.deepcopy(
        nn.ParameterList([nn.Parameter(x)])
    )[0].detach(),
    "share_memory_": lambda x, _: x.share_memory_(),
    "share_memory_ of a module": lambda x, _: nn.ParameterList(
        [nn.Parameter(x)]
    ).share_memory()[0].detach(),
    "data": lambda x, _: with_data_of(x),
    "swap_tensors": lambda x, _: swapped(x),
    "load_state_dict": lambda x, _: loaded_into_a_module(x),
    "DLPack": lambda x, _: torch.from_dlpack(x),
    "new_tensor": lambda x, _: x.new_tensor(x.tolist()),
    "buffer": lambda x, _: torch.frombuffer(memoryview(x.numpy()), dtype=torch.float32),
    "as_tensor of an array": lambda x, _: torch.as_tensor(x.numpy()),
    "save and load": through_a_file,
    "save and map": lambda x, path: through_a_file(x, path, mmap=True),
    "storage file": through_a_storage_file,
}  # fmt: skip


def loaded_into_a_module(x):
    module = nn.ParameterList([nn.Parameter(torch.zeros(COUNT))])
    module.load_state_dict({"0": x})
    testing.page_out_all()
    return module[0].detach()


@pytest.mark.usefixtures("paging")
@pytest.mark.parametrize("way", WAYS)
def test_bytes_are_right_and_stay_so_when_they_were_in_host(way, tmp_path):
    x = evicted()
    found = WAYS[way](x, tmp_path / "file")
    testing.page_out_all()
    assert torch.equal(found, EXPECTED)
    testing.page_out_all()
    assert torch.equal(found + 0, EXPECTED)


@pytest.mark.usefixtures("paging")
def test_storage_that_was_emptied_takes_memory_again():
    x = evicted()
    x.untyped_storage().resize_(0)
    assert x.untyped_storage().nbytes() == 0
    x.untyped_storage().resize_(4 * COUNT)
    x.fill_(2)
    testing.evict(x)
    assert x.sum().item() == 2.0 * COUNT


@pytest.mark.usefixtures("paging")
def test_views_follow_the_storage_that_is_resized():
    x = evicted()
    view = x[100:200]
    x.untyped_storage().resize_(8 * COUNT)
    testing.page_out_all()
    view.add_(1)
    testing.page_out_all()
    assert torch.equal(x[100:200], EXPECTED[100:200] + 1)


@pytest.mark.usefixtures("paging")
def test_what_is_set_over_memory_of_ours_moves_with_it():
    x = evicted()
    window = empty().set_(x.untyped_storage(), 64, (10, 10), (10, 1))
    testing.page_out_all()
    window.mul_(2)
    testing.page_out_all()
    assert torch.equal(x[64:164], EXPECTED[64:164] * 2)


@pytest.mark.usefixtures("paging")
def test_page_locked_memory_is_refused_or_given_as_without_paging():
    x = evicted()
    try:
        expected = EXPECTED.pin_memory()
    except RuntimeError as error:
        with pytest.raises(type(error)):
            x.pin_memory()
    else:
        assert torch.equal(x.pin_memory(), expected)
    assert not x.is_pinned()


PROCESSES = """
import sys, torch, torchpager
import torch.multiprocessing as multiprocessing
from torchpager import testing

def add(inbox, outbox):
    tensor = inbox.get()
    tensor.add_(1)
    outbox.put(tensor.sum().item())

if __name__ == "__main__":
    context = multiprocessing.get_context(sys.argv[1])
    with torchpager.simulate("64 MiB", granularity="4 KiB", strict=True):
        with torchpager.auto_offload():
            x = torch.ones(32 << 10)
            testing.evict(x)
            inbox, outbox = context.Queue(), context.Queue()
            process = context.Process(target=add, args=(inbox, outbox))
            process.start()
            inbox.put(x)
            print(outbox.get(timeout=60), x.sum().item(), testing.state(x).where)
            process.join(60)
            print(process.exitcode)
"""


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_tensor_goes_to_another_process_and_is_shared_with_it(method, run_python, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROCESSES)
    printed = run_python(program, method).stdout
    assert printed == "65536.0 65536.0 native\n0\n"


def test_saved_bytes_are_those_of_a_plain_run():
    def saved():
        x = torch.arange(COUNT, dtype=torch.float32)
        buffer = io.BytesIO()
        torch.save({"x": x, "twice": x.view(2, -1)}, buffer)
        return buffer.getvalue()

    plain = saved()
    device = torchpager.simulate(
        "64 MiB", granularity="4 KiB", strict=True, page_out_before_each_op=True
    )
    with device, torchpager.auto_offload():
        assert saved() == plain


# -- the figures of a budget in place of the device's ------------------------------------------


@pytest.mark.parametrize(
    ("budget", "held", "free", "expected"),
    [(100, 30, 500, 70), (100, 30, 50, 50), (100, 130, 500, 0), (100, 0, 0, 0)],
)
def test_free_bytes_of_a_budget_are_never_more_than_the_device_has(
    budget, held, free, expected
):
    assert device_report._free_bytes(budget, held, free) == expected


def test_device_memory_is_reported_as_long_as_a_budget_asks_for_it():
    found = torch.cuda.mem_get_info
    device_report.report(0, 1 << 30, lambda: 0)
    try:
        assert torch.cuda.mem_get_info is not found
        assert torch.cuda.mem_get_info is not torch.cuda.memory.mem_get_info
        assert torch.cuda.mem_get_info.__wrapped__ is found
        device_report.report(1, 1 << 20, lambda: 0)
        device_report.report(0, None, lambda: 0)
        assert torch.cuda.mem_get_info is not found
    finally:
        device_report.report(1, None, lambda: 0)
        device_report.report(0, None, lambda: 0)
    assert torch.cuda.mem_get_info is torch.cuda.memory.mem_get_info is found


def test_budget_of_the_simulated_device_reports_nothing():
    found = torch.cuda.mem_get_info
    with torchpager.simulate("64 MiB"), torchpager.budget("1 MiB", report_as_device=True):
        assert torch.cuda.mem_get_info is found


def test_report_as_device_of_another_type_raises_type_error():
    with pytest.raises(TypeError, match="report_as_device is 'yes'"):
        torchpager.budget("1 MiB", report_as_device="yes")
