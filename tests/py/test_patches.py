"""Memory that is read or written without an operator. Strict mode: a miss is a crash here."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from torch import nn

import torchpager
from torchpager import patches, testing

COUNT = 32 << 10


@pytest.fixture(params=[True, False], ids=["strict", "mapped"])
def paging(request):
    device = torchpager.simulate("64 MiB", granularity="64 KiB", strict=request.param)
    with device, torchpager.auto_offload():
        yield request.param


def evicted():
    """A tensor 0, 1, 2 ... whose bytes are in HOST."""
    x = torch.arange(COUNT, dtype=torch.float32)
    testing.evict(x)
    assert testing.state(x).where == "host"
    return x


EXPECTED = np.arange(COUNT, dtype=np.float32)


@pytest.mark.usefixtures("paging")
@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.numpy(),
        lambda x: np.asarray(x),
        lambda x: x.__array__(np.float64),
        lambda x: np.from_dlpack(x),
        lambda x: torch.from_dlpack(x).clone(),
        lambda x: torch.utils.dlpack.from_dlpack(torch.utils.dlpack.to_dlpack(x)).clone(),
        lambda x: x.tolist(),
        lambda x: x[100:].tolist() and x.tolist(),
        lambda x: copy.deepcopy(x),
        lambda x: copy.copy(x),
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: saved_and_loaded(x),
        lambda x: saved_and_loaded(x, _use_new_zipfile_serialization=False),
        lambda x: copy.deepcopy(nn.Parameter(x)).detach(),
        lambda x: torch.tensor([], dtype=torch.float32).set_(x.untyped_storage().clone()),
        lambda x: np.frombuffer(bytes(x.untyped_storage().tolist()), dtype=np.float32),
        lambda x: torch.tensor(next(iter(x.view(-1, 512))).tolist() + x[512:].tolist()),
    ],
)
def test_reading_is_right_when_the_bytes_are_in_host(read):
    x = evicted()
    assert np.array_equal(np.asarray(read(x)), EXPECTED)


def saved_and_loaded(x, **options):
    buffer = io.BytesIO()
    torch.save({"x": x}, buffer, **options)
    buffer.seek(0)
    return torch.load(buffer)["x"]


@pytest.mark.usefixtures("paging")
def test_storage_items_are_right_when_the_bytes_are_in_host():
    x = evicted()
    storage = x.untyped_storage()
    assert bytes(storage[4 * i] for i in range(3)) == EXPECTED.view(np.uint8)[0:12:4].tobytes()
    testing.evict(x)
    storage[0:4] = 255
    testing.evict(x)
    assert storage[3] == 255


@pytest.mark.usefixtures("paging")
def test_written_storage_items_are_kept_when_the_block_moves():
    x = evicted()
    assert x.sum().item() > 0
    testing.page_out_all()
    x.untyped_storage()[0] = 7
    testing.evict(x)
    assert x.untyped_storage()[0] == 7


@pytest.mark.usefixtures("paging")
def test_elementwise_python_functions_see_and_keep_the_bytes():
    x, y = evicted(), evicted()
    x.apply_(lambda value: value + 1)
    testing.evict(x)
    assert x[10].item() == 11.0
    testing.evict(x)
    x.map_(y, lambda a, b: a * 2 + b)
    testing.evict(x)
    assert x[10].item() == 32.0


@pytest.mark.usefixtures("paging")
def test_storage_that_is_resized_keeps_its_bytes():
    x = evicted()
    x.untyped_storage().resize_(8 * COUNT)
    assert torch.equal(x, torch.from_numpy(EXPECTED))
    testing.evict(x)
    assert torch.equal(x, torch.from_numpy(EXPECTED))


@pytest.mark.usefixtures("paging")
def test_numpy_view_is_live_in_both_directions_while_all_else_moves():
    x = evicted()
    view = x.numpy()
    testing.page_out_all()
    assert testing.state(x).immovable
    x.add_(1)
    testing.page_out_all()
    assert np.array_equal(view, EXPECTED + 1)
    view[:] = 5
    testing.page_out_all()
    assert x.sum().item() == 5.0 * COUNT


@pytest.mark.usefixtures("paging")
def test_data_ptr_brings_the_bytes_in():
    x = evicted()
    x.data_ptr()
    assert testing.state(x).where == "resident"
    testing.evict(x)
    x.untyped_storage().data_ptr()
    assert testing.state(x).where == "resident"
    assert not testing.state(x).immovable


def test_pointer_taken_before_an_eviction_reads_right_values(run_python):
    program = (
        "import ctypes, sys, torch, torchpager\n"
        "from torchpager import testing\n"
        "strict = sys.argv[1] == 'strict'\n"
        "with torchpager.simulate('64 MiB', granularity='64 KiB', strict=strict):\n"
        "    with torchpager.auto_offload():\n"
        "        x = torch.full((1 << 20,), 2.5)\n"
        "        pointer = x.data_ptr()\n"
        "        testing.evict(x)\n"
        "        read = ctypes.cast(pointer, ctypes.POINTER(ctypes.c_float))\n"
        "        print(read[0], read[(1 << 20) - 1], testing.state(x).where, flush=True)\n"
    )
    assert run_python("-c", program, "mapped").stdout == "2.5 2.5 host\n"
    strict = run_python("-c", program, "strict", check=False)
    assert strict.returncode == -11
    assert strict.stdout == ""


def test_reading_works_when_the_pins_do_not_fit():
    with (
        torchpager.simulate("64 MiB", granularity="64 KiB"),
        torchpager.auto_offload(),
        torchpager.budget("2 MiB"),
    ):
        fixed = torch.ones(COUNT)
        x = torch.arange(2 * COUNT, dtype=torch.float32)
        with torchpager.pin(fixed):
            testing.evict(x)
            last = [2 * COUNT - 3 + i for i in range(3)]
            assert x[-3:].tolist() == x.tolist()[-3:] == last
        del x, fixed


def test_every_patch_is_taken_out_exactly():
    owners = [torch.Tensor, torch.UntypedStorage, torch._C, torch, torch.utils.dlpack]
    owners += [torch._C.PyTorchFileWriter]
    before = [dict(vars(owner)) for owner in owners]
    with torchpager.simulate("64 MiB"):
        assert vars(torch.Tensor) != before[0]
        assert not hasattr(torch.Tensor, "__dlpack_c_exchange_api__")
    for owner, found in zip(owners, before, strict=True):
        assert dict(vars(owner)) == found


def test_patch_that_somebody_wrapped_is_left_alone():
    original = torch.Tensor.tolist
    with torchpager.simulate("64 MiB"):
        ours = torch.Tensor.tolist

        def theirs(self):
            return ours(self)

        torch.Tensor.tolist = theirs
    assert torch.Tensor.tolist is theirs
    assert torch.ones(2).tolist() == [1.0, 1.0]
    del torch.Tensor.tolist
    assert torch.Tensor.tolist is original


@pytest.mark.usefixtures("paging")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.ones(3).to_sparse(),
        lambda: torch.ones(3, device="meta"),
        lambda: torch.ones(0),
        lambda: torch.ones(3),
    ],
)
def test_patched_methods_pass_other_tensors_through(make):
    for name in ("data_ptr", "tolist", "numpy"):
        outcomes = []
        for method in (getattr(torch.Tensor, name), getattr(torch._C.TensorBase, name)):
            try:
                outcomes.append(str(method(make()))[:2])
            except Exception as error:
                outcomes.append(type(error))
        assert outcomes[0] == outcomes[1]


def test_documentation_lists_every_patched_name():
    for _, names, _ in patches._wrapped():
        for name in names:
            public = name.strip("_").split("_")[0]
            assert public in patches.__doc__ or "DLPack" in patches.__doc__
