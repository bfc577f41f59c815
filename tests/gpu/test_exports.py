"""Tensors handed to other code while paging goes on: files, DLPack, CUDA array interface."""

import ctypes
from pathlib import Path
from typing import Any

import pytest
import torch
from tight import MIB, filled, paging
from torch.utils import dlpack

import torchpager
from torchpager import testing

DLPACK_CUDA = 2


def churn(kept: list[torch.Tensor]) -> None:
    """Have everything evicted once, by using more than the budget."""
    for tensor in kept:
        tensor.add_(1)
    torch.cuda.synchronize()


# -- files ---------------------------------------------------------------------------------


def llama() -> Any:
    """Return a small Llama with tied embeddings, about 100 MiB on the device."""
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=8000,
        hidden_size=1024,
        intermediate_size=2048,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    torch.manual_seed(5)
    with torch.device("cuda"):
        return transformers.LlamaForCausalLM(config)


def size_of(model: Any) -> int:
    """Return the bytes of a model's parameters, shared ones once."""
    return sum(p.numel() * p.element_size() for p in model.parameters())


def test_saved_model_is_right_and_nothing_is_left_immovable(tmp_path: Path) -> None:
    files = pytest.importorskip("safetensors.torch")
    model = llama()
    size = size_of(model)
    expected = {name: tensor.cpu() for name, tensor in model.state_dict().items()}
    del model
    with paging(size // 2):
        model = llama()
        for turn in range(2):
            folder = tmp_path / str(turn)
            model.save_pretrained(folder)
            assert torchpager.stats().pinned.current == 0
            assert testing.page_out_all() > size // 4, "what was looked at must still move"
        assert sum(testing.state(p).immovable for p in model.parameters()) == 0
        del model
    for turn in range(2):
        found: dict[str, torch.Tensor] = {}
        for path in (tmp_path / str(turn)).glob("*.safetensors"):
            found |= files.load_file(path)
        missing = set(expected) - set(found)
        assert missing <= {"lm_head.weight"}, "the tied head may be left out"
        assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())


def test_saved_and_loaded_state_is_right(tmp_path: Path) -> None:
    with paging(48 * MIB):
        kept = [filled(i) for i in range(12)]
        torch.save({str(i): tensor for i, tensor in enumerate(kept)}, tmp_path / "state.pt")
        assert torchpager.stats().pinned.current == 0
        churn(kept)
        loaded = torch.load(tmp_path / "state.pt", map_location="cuda")
        assert [tensor.mean(dtype=torch.float64).item() for tensor in loaded.values()] == [
            float(i) for i in range(12)
        ]
        assert [tensor.mean(dtype=torch.float64).item() for tensor in kept] == [
            i + 1.0 for i in range(12)
        ]
        del kept, loaded


def test_pointers_that_are_only_compared_freeze_nothing() -> None:
    with paging(48 * MIB):
        kept = [filled(i) for i in range(12)]
        pointers = {tensor.data_ptr() for tensor in kept}
        pointers |= {tensor.untyped_storage().data_ptr() for tensor in kept}
        assert len(pointers) == 12
        assert torchpager.stats().pinned.current == 0
        churn(kept)
        assert {tensor.data_ptr() for tensor in kept} == pointers
        assert [tensor.mean(dtype=torch.float64).item() for tensor in kept] == [
            i + 1.0 for i in range(12)
        ]
        del kept


# -- DLPack --------------------------------------------------------------------------------


def test_dlpack_consumer_in_torch_shares_memory_while_paging_goes_on() -> None:
    with paging(48 * MIB):
        kept = [filled(i) for i in range(10)]
        source = filled(3)
        shared = dlpack.from_dlpack(source)
        assert shared.data_ptr() == source.data_ptr()
        for turn in range(3):
            churn(kept)
            shared.add_(1)
            churn(kept)
            assert source.min().item() == source.max().item() == 4.0 + turn
        capsule = dlpack.to_dlpack(source)
        del source, shared
        churn(kept)
        again = dlpack.from_dlpack(capsule)
        assert again.min().item() == again.max().item() == 6.0
        del again, capsule, kept


def test_dlpack_consumer_in_cupy_reads_and_writes_while_paging_goes_on() -> None:
    cupy = pytest.importorskip("cupy")
    with paging(48 * MIB):
        kept = [filled(i) for i in range(10)]
        source = filled(3)
        shared = cupy.from_dlpack(source)
        churn(kept)
        assert float(shared.min()) == float(shared.max()) == 3.0
        shared += 2
        cupy.cuda.runtime.deviceSynchronize()
        assert source.min().item() == source.max().item() == 5.0
        churn(kept)
        assert float(shared.min()) == float(shared.max()) == 5.0
        del shared, source, kept


# -- the CUDA array interface --------------------------------------------------------------


def read(interface: dict[str, Any]) -> torch.Tensor:
    """Copy what an array interface describes to the CPU, by a driver call of our own."""
    copy = ctypes.CDLL("libcuda.so.1").cuMemcpy
    copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t)
    assert interface["typestr"] == "<f4"
    assert interface["strides"] is None
    target = torch.empty(interface["shape"])
    assert copy(target.data_ptr(), interface["data"][0], target.nbytes) == 0
    return target


def test_array_interface_leads_to_the_values_wherever_they_are() -> None:
    with paging(48 * MIB):
        kept = [filled(i) for i in range(10)]
        source = torch.arange(2 * MIB, dtype=torch.float32, device="cuda")
        interface = source.__cuda_array_interface__
        assert interface["data"][0] == source.data_ptr()
        expected = torch.arange(2 * MIB, dtype=torch.float32)
        for turn in range(3):
            churn(kept)
            assert torch.equal(read(interface), expected + turn)
            source.add_(1)
            torch.cuda.synchronize()
        del source, kept


def test_array_interface_consumer_in_numba_reads_and_writes() -> None:
    cuda = pytest.importorskip("numba.cuda")
    with paging(48 * MIB):
        kept = [filled(i) for i in range(10)]
        source = filled(3)
        view = cuda.as_cuda_array(source)
        churn(kept)
        assert float(view.copy_to_host().min()) == 3.0
        source.add_(1)
        torch.cuda.synchronize()
        assert float(view.copy_to_host().max()) == 4.0
        del view, source, kept


def test_array_interface_of_another_producer_becomes_a_tensor_that_stays_native() -> None:
    class Producer:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.tensor = tensor
            self.__cuda_array_interface__ = tensor.__cuda_array_interface__

    with paging(48 * MIB):
        kept = [filled(i) for i in range(10)]
        source = filled(3)
        view = torch.as_tensor(Producer(source), device="cuda")
        assert view.data_ptr() == source.data_ptr()
        churn(kept)
        # Another storage over the same block: operators on either touch it.
        view.add_(1)
        churn(kept)
        assert source.min().item() == source.max().item() == 4.0
        del view, source, kept


# -- storages ------------------------------------------------------------------------------


def test_tensor_sent_to_another_process_is_refused_or_copied_not_lost() -> None:
    """CUDA IPC needs memory of the native allocator; what we hold has no handle for it."""
    with paging(48 * MIB):
        kept = [filled(i) for i in range(10)]
        with pytest.raises((RuntimeError, ValueError)):
            kept[3].untyped_storage()._share_cuda_()
        churn(kept)
        assert [tensor.mean(dtype=torch.float64).item() for tensor in kept] == [
            i + 1.0 for i in range(10)
        ]
        del kept


def test_dlpack_device_and_version_are_torchs_own() -> None:
    with torchpager.auto_offload():
        tensor = filled(1)
        assert tensor.__dlpack_device__()[0] == DLPACK_CUDA
        del tensor
