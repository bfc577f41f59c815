"""Moving tensors that were made before the context."""

import pytest
import torch
from torch import nn

import torchpager
from torchpager import testing

MIB = 1 << 20


@pytest.fixture
def paging():
    with (
        torchpager.simulate("64 MiB", granularity="64 KiB"),
        torchpager.auto_offload() as offload,
    ):
        yield offload


def trained_model():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    model.register_buffer("table", torch.arange(64 << 10, dtype=torch.float32))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(8, 256)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_model_made_before_moves_with_gradients_buffers_and_states():
    model, optimizer = trained_model()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    objects = [id(p) for p in model.parameters()]
    with torchpager.simulate("64 MiB", granularity="64 KiB"), torchpager.auto_offload():
        weights = 2 * 256 * 256 * 4
        # Biases of 1 KiB are too small; weights, their gradients and both moments are not.
        assert torchpager.adopt(model) == 2 * weights + 256 * 1024
        assert torchpager.adopt(optimizer) == 2 * weights
        assert torchpager.adopt(model, optimizer) == 0
        assert [id(p) for p in model.parameters()] == objects
        for name, p in model.named_parameters():
            assert torch.equal(p, before[name])
        assert testing.state(model[0].weight).where == "resident"
        assert testing.state(model[0].bias).where == "native"
        testing.page_out_all()
        assert testing.state(model[0].weight).where == "host"
        model(torch.randn(8, 256)).sum().backward()
        optimizer.step()
        assert torch.equal(model.table, torch.arange(64 << 10, dtype=torch.float32))
        del model, optimizer, p, before


def test_views_and_ties_still_share_memory_after_adopting():
    base = torch.zeros(256 << 10)
    view, tied = base[1000:2000], base.view(512, 512)
    with torchpager.simulate("64 MiB", granularity="64 KiB"), torchpager.auto_offload():
        assert torchpager.adopt(view) == MIB
        assert torchpager.adopt(base, tied) == 0
        base[1500] = 42.0
        assert view[500].item() == tied.view(-1)[1500].item() == 42.0
        assert base.data_ptr() + 4000 == view.data_ptr()
        del base, view, tied


def test_leaf_keeps_its_place_in_autograd_after_adopting():
    x = torch.ones(256 << 10, requires_grad=True)
    y = (x * 3).sum()
    with torchpager.simulate("64 MiB", granularity="64 KiB"), torchpager.auto_offload():
        assert torchpager.adopt(x) == MIB
        testing.evict(x)
        y.backward()
        assert torch.equal(x.grad, torch.full((256 << 10,), 3.0))
        del x, y


def test_containers_of_tensors_are_searched():
    tensors = [torch.ones(MIB) for _ in range(4)]
    with torchpager.simulate("64 MiB", granularity="64 KiB"), torchpager.auto_offload():
        thing = {"a": tensors[0], "b": [tensors[1], {"c": (tensors[2],)}], "d": {tensors[3]}}
        assert torchpager.adopt(thing) == 16 * MIB
        assert sum(t.sum().item() for t in tensors) == 4 * MIB
        del tensors, thing


@pytest.mark.usefixtures("paging")
def test_thing_without_tensors_raises_type_error():
    for thing in (3, "model", object(), [1]):
        with pytest.raises(TypeError, match="possible are modules"):
            torchpager.adopt(thing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_adopting_without_a_context_raises_unavailable_error():
    with pytest.raises(torchpager.UnavailableError):
        torchpager.adopt(torch.ones(MIB))


def test_tensor_of_a_foreign_buffer_says_why_it_cannot_move():
    tensor = torch.frombuffer(bytearray(MIB), dtype=torch.uint8)
    with (
        torchpager.simulate("64 MiB", granularity="64 KiB"),
        torchpager.auto_offload(),
        pytest.raises(RuntimeError, match="clone"),
    ):
        torchpager.adopt(tensor)


def test_module_with_a_foreign_buffer_moves_the_rest(caplog):
    model = nn.Linear(512, 512)
    model.register_buffer("table", torch.frombuffer(bytearray(MIB), dtype=torch.uint8))
    with torchpager.simulate("64 MiB", granularity="64 KiB"), torchpager.auto_offload():
        assert torchpager.adopt(model) == MIB
        assert "stays native" in caplog.text
        caplog.clear()
        del model


def test_adopting_more_than_fits_raises_and_keeps_what_moved():
    tensors = [torch.full((MIB,), float(i)) for i in range(4)]
    with torchpager.simulate("64 MiB", granularity="64 KiB"), torchpager.budget("8 MiB"):
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory"):
            torchpager.adopt(tensors)
        assert [testing.state(t).where for t in tensors].count("resident") == 2
        assert [t.sum().item() for t in tensors] == [i * MIB for i in range(4)]
        del tensors


def test_adopting_more_than_the_budget_pages_when_paging_is_on():
    tensors = [torch.full((MIB,), float(i)) for i in range(4)]
    with (
        torchpager.simulate("64 MiB", granularity="64 KiB"),
        torchpager.budget("8 MiB"),
        torchpager.auto_offload(),
    ):
        assert torchpager.adopt(tensors) == 16 * MIB
        assert torchpager.stats().reserved.current <= 8 * MIB
        assert [t.sum().item() for t in tensors] == [i * MIB for i in range(4)]
        del tensors


def test_adopted_tensor_is_still_right_when_everything_was_left():
    tensor = torch.arange(MIB, dtype=torch.float32)
    with torchpager.simulate("64 MiB", granularity="64 KiB"), torchpager.auto_offload():
        torchpager.adopt(tensor)
        testing.evict(tensor)
    assert torch.equal(tensor, torch.arange(MIB, dtype=torch.float32))
    del tensor
