"""PyTorch's own interface to memory, used on tensors that page."""

import copy
import gc
import io
import pickle
import queue
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from tight import MIB, filled, own_workspaces, paging

import torchpager
from torchpager import testing

COUNT = 2 * MIB  # float32 elements of one tensor of 8 MiB


def numbered() -> torch.Tensor:
    """Return a tensor 0, 1, 2 ... whose bytes are in HOST."""
    x = torch.arange(COUNT, dtype=torch.float32, device="cuda")
    testing.evict(x)
    assert testing.state(x).where == "host"
    return x


def pressed() -> list[torch.Tensor]:
    """Return tensors that a budget of 48 MiB does not hold."""
    return [filled(i) for i in range(10)]


EXPECTED = torch.arange(COUNT, dtype=torch.float32)


# -- figures -------------------------------------------------------------------------------


def test_statistics_have_the_same_names_and_count_what_is_allocated() -> None:
    from torchpager import _torch_cuda

    torch.cuda.init()  # before that there are none
    plain = torch.cuda.memory_stats()
    with paging(48 * MIB):
        kept = pressed()
        found = torch.cuda.memory_stats()
        assert found.keys() == plain.keys()
        assert found["allocated_bytes.all.current"] >= 80 * MIB
        # Workspaces are the native allocator's.
        paged = found["reserved_bytes.all.current"] - _torch_cuda.native_reserved(0)
        assert paged < 80 * MIB, "some of it is in HOST"
        nested = torch.cuda.memory_stats_as_nested_dict()
        assert nested["allocated_bytes"]["all"]["current"] >= 80 * MIB
        torch.cuda.reset_accumulated_memory_stats()
        assert torch.cuda.memory_stats()["allocated_bytes.all.allocated"] < 8 * MIB
        assert "CUDA" in torch.cuda.memory_summary(abbreviated=True)
        assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() >= 80 * MIB
        assert torch.cuda.get_allocator_backend() == "native"
        del kept


def test_accelerator_interface_gives_the_same_figures_as_cuda() -> None:
    interface = pytest.importorskip("torch.accelerator.memory")
    with paging(48 * MIB):
        kept = pressed()
        assert interface.memory_allocated() == torch.cuda.memory_allocated() >= 80 * MIB
        assert interface.memory_reserved() == torch.cuda.memory_reserved()
        assert interface.memory_stats()["allocated_bytes.all.current"] >= 80 * MIB
        del kept
        gc.collect()
        interface.reset_peak_memory_stats()
        assert interface.max_memory_allocated() == interface.memory_allocated()
        interface.empty_cache()
        interface.reset_accumulated_memory_stats()
        assert interface.get_memory_info()[1] == torch.cuda.mem_get_info()[1]


def test_device_memory_is_the_devices_own_by_default() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    real_total = torch.cuda.mem_get_info()[1]
    with torchpager.budget("1 GiB"), torchpager.auto_offload():
        free, found = torch.cuda.mem_get_info()
        assert found == real_total
        assert free <= total
        assert real_total > 1 << 30


def test_device_memory_is_the_budgets_when_that_is_asked_for() -> None:
    plain = torch.cuda.mem_get_info
    real_total = plain()[1]
    with torchpager.budget("1 GiB", report_as_device=True) as outer, torchpager.auto_offload():
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info()
        assert total == outer.device_bytes == 1 << 30
        assert free == total - torch.cuda.memory_reserved()
        tensor = filled(1, mib=64)
        assert torch.cuda.mem_get_info("cuda:0")[0] <= free - 64 * MIB
        assert torch.cuda.memory.mem_get_info(0)[1] == 1 << 30
        with torchpager.budget("512 MiB"):
            assert torch.cuda.mem_get_info(device=0)[1] == 512 * MIB
        assert torch.cuda.mem_get_info()[1] == 1 << 30
        if hasattr(torch.accelerator, "get_memory_info"):
            assert torch.accelerator.get_memory_info() == torch.cuda.mem_get_info()
        del tensor
    assert torch.cuda.mem_get_info is plain
    assert plain()[1] == real_total


def test_budget_of_the_process_is_measured_on_the_device_itself() -> None:
    with torchpager.budget("6 GiB", scope="process") as plain:
        expected = plain.device_bytes
    assert expected is not None
    with (
        torchpager.budget("8 GiB", report_as_device=True),
        torchpager.budget("6 GiB", scope="process") as inner,
    ):
        assert inner.device_bytes is not None
        assert abs(inner.device_bytes - expected) < 64 * MIB


# -- snapshots and history -----------------------------------------------------------------


def live_bytes(segments: list[dict[str, Any]]) -> int:
    """Return the bytes of the blocks that are allocated, as memory_allocated() counts them."""
    return sum(
        block["size"]
        for segment in segments
        for block in segment["blocks"]
        if block["state"] == "active_allocated"
    )


def test_snapshot_holds_every_block_and_adds_up() -> None:
    with paging(48 * MIB):
        kept = pressed()
        segments = torch.cuda.memory_snapshot()
        addresses = {segment["address"] for segment in segments}
        assert {tensor.data_ptr() for tensor in kept} <= addresses
        assert live_bytes(segments) == torch.cuda.memory_allocated()
        assert all(segment["device"] == 0 for segment in segments)
        del kept


def test_history_can_be_recorded_and_dumped_while_tensors_page(tmp_path: Path) -> None:
    torch.cuda.memory._record_memory_history(max_entries=1000)
    try:
        with paging(48 * MIB):
            kept = pressed()
            small = torch.zeros(1000, device="cuda")
            address = kept[0].data_ptr()
            kept[0] = kept[1]
            path = tmp_path / "snapshot.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
            snapshot = pickle.loads(path.read_bytes())
            traces = snapshot["device_traces"][0]
            actions = {entry["action"] for entry in traces if entry["addr"] == address}
            assert {"alloc", "free_requested", "free_completed"} <= actions
            mine = [e for e in traces if e["addr"] == address and e["action"] == "alloc"]
            assert mine[0]["size"] == 8 * MIB
            assert any("filled" in frame["name"] for frame in mine[0]["frames"])
            times = [entry["time_us"] for entry in traces]
            assert times == sorted(times)
            del kept, small
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)


def test_observers_hear_of_an_allocation_that_failed() -> None:
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    if attach is None:
        pytest.skip("this torch has no observers")
    heard: list[tuple[int, int]] = []
    own_workspaces()
    gc.collect()
    torch.cuda.empty_cache()
    with torchpager.budget(torch.cuda.memory_reserved() + 64 * MIB):
        attach(lambda device, bytes_, *_: heard.append((device, bytes_)))
        with pytest.raises(torch.OutOfMemoryError):
            filled(1, mib=128)
    assert heard == [(0, 128 * MIB)]


# -- pools and raw allocations -------------------------------------------------------------


def test_tensors_of_a_pool_are_the_native_allocators_and_right() -> None:
    with paging(48 * MIB):
        kept = pressed()
        pool = torch.cuda.MemPool()
        with torch.cuda.use_mem_pool(pool):
            inside = filled(3)
        outside = filled(4)
        assert testing.state(inside).where == "native"
        assert testing.state(outside).where != "native"
        testing.page_out_all()
        assert bool((inside == 3).all())
        assert any(seg["address"] == inside.data_ptr() for seg in pool.snapshot())
        assert [tensor.mean().item() for tensor in kept] == [float(i) for i in range(10)]
        del inside, outside, pool, kept


def test_raw_allocations_are_served_and_freed() -> None:
    with paging(48 * MIB):
        kept = pressed()
        before = torch.cuda.memory_allocated()
        pointer = torch.cuda.caching_allocator_alloc(8 * MIB)
        assert torch.cuda.memory_allocated() == before + 8 * MIB
        torch.cuda.caching_allocator_delete(pointer)
        assert torch.cuda.memory_allocated() == before
        del kept


def test_convolutions_may_be_benchmarked_while_memory_is_tight() -> None:
    torch.manual_seed(1)
    with torch.device("cuda"):
        layers = torch.nn.Sequential(*[torch.nn.Conv2d(64, 64, 3, padding=1) for _ in range(6)])
        images = torch.randn(8, 64, 64, 64)
    with torch.no_grad():
        expected = layers(images)
    found = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        with paging(96 * MIB):
            kept = [filled(i) for i in range(14)]
            with torch.no_grad():
                result = layers(images.clone())
            torch.testing.assert_close(result, expected, rtol=1e-2, atol=1e-2)
            assert [tensor.mean().item() for tensor in kept] == [float(i) for i in range(14)]
            del result, kept
    finally:
        torch.backends.cudnn.benchmark = found


# -- storages and copies -------------------------------------------------------------------


def saved_and_loaded(x: torch.Tensor, **options: Any) -> torch.Tensor:
    """Return a tensor that has been through a file."""
    buffer = io.BytesIO()
    torch.save(x, buffer, **options)
    buffer.seek(0)
    loaded: torch.Tensor = torch.load(buffer)
    return loaded


def resized(x: torch.Tensor) -> torch.Tensor:
    """Return what is left when the storage has grown and shrunk again."""
    x.untyped_storage().resize_(16 * COUNT)
    x.untyped_storage().resize_(4 * COUNT)
    return x


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.cpu(),
        lambda x: x.to("cpu"),
        lambda x: x.to(torch.float64).to(torch.float32),
        lambda x: torch.empty(COUNT, pin_memory=True).copy_(x),
        lambda x: copy.deepcopy(x),
        lambda x: copy.copy(x),
        lambda x: copy.deepcopy(torch.nn.Parameter(x)).detach(),
        saved_and_loaded,
        lambda x: saved_and_loaded(x, _use_new_zipfile_serialization=False),
        lambda x: pickle.loads(pickle.dumps(x)),
        lambda x: torch.from_dlpack(x).clone(),
        lambda x: torch.empty(0, device="cuda").set_(x),
        lambda x: torch.empty(0, device="cuda").set_(x.untyped_storage(), 0, (COUNT,)),
        lambda x: x.untyped_storage().clone().cpu() and x,
        lambda x: torch.empty(0, device="cuda").set_(x.untyped_storage().clone()),
        lambda x: x.resize_(2 * COUNT)[:COUNT],
        lambda x: x.resize_(COUNT // 2).resize_(COUNT),
        lambda x: torch.empty(0, device="cuda").resize_as_(x).copy_(x),
        resized,
        lambda x: x.share_memory_(),
    ],
)
def test_reading_is_right_when_the_bytes_are_in_host(
    read: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    with paging(48 * MIB):
        kept = pressed()
        x = numbered()
        found = read(x)
        for tensor in kept:
            tensor.add_(1)
        assert torch.equal(found.detach().cpu(), EXPECTED)
        assert torch.cuda.memory_allocated() > 0
        del x, found, kept


def test_write_through_a_resized_storage_is_kept_when_the_block_moves() -> None:
    with paging(48 * MIB):
        kept = pressed()
        x = numbered()
        x.resize_(2 * COUNT).fill_(3)
        testing.evict(x)
        assert x.sum(dtype=torch.float64).item() == 6.0 * COUNT
        x.untyped_storage().resize_(0)
        assert x.untyped_storage().nbytes() == 0
        x.untyped_storage().resize_(8 * COUNT)
        x.fill_(2)
        testing.evict(x)
        assert x.sum(dtype=torch.float64).item() == 4.0 * COUNT
        del x, kept


def test_copies_between_page_locked_memory_and_evicted_tensors_are_right() -> None:
    with paging(48 * MIB):
        kept = pressed()
        source = torch.arange(COUNT, dtype=torch.float32).pin_memory()
        x = filled(0)
        testing.evict(x)
        x.copy_(source, non_blocking=True)
        testing.evict(x)
        target = torch.empty(COUNT, pin_memory=True)
        target.copy_(x, non_blocking=True)
        for tensor in kept:
            tensor.add_(1)
        torch.cuda.synchronize()
        assert torch.equal(target, EXPECTED)
        del x, kept


# -- other processes -----------------------------------------------------------------------


def serve(inbox: Any, outbox: Any) -> None:
    """Add one to what comes, in place, and answer with its sum (in a process of its own)."""
    tensor = inbox.get()
    tensor.add_(1)
    torch.cuda.synchronize()
    outbox.put(tensor.sum(dtype=torch.float64).item())
    inbox.get()  # the sender has looked


def answer_of(process: Any, outbox: Any, seconds: float) -> Any:
    """Return what the process answers; fail at once when it is gone."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            return outbox.get(timeout=0.5)
        except queue.Empty:
            assert process.is_alive(), f"the process ended with {process.exitcode}"
    pytest.fail(f"no answer in {seconds:.0f} s")


def test_tensor_that_is_not_ours_can_be_sent_to_another_process() -> None:
    context = torch.multiprocessing.get_context("spawn")
    inbox, outbox = context.Queue(), context.Queue()
    process = context.Process(target=serve, args=(inbox, outbox), daemon=True)
    process.start()
    native = filled(1)
    with paging(48 * MIB):
        kept = pressed()
        inbox.put(native)
        assert answer_of(process, outbox, 40.0) == 2.0 * COUNT
        assert native.sum(dtype=torch.float64).item() == 2.0 * COUNT
        inbox.put(None)
        process.join(20)
        assert process.exitcode == 0
        del kept


def test_tensor_of_ours_is_refused_with_a_way_out() -> None:
    with paging(48 * MIB):
        kept = pressed()
        with pytest.raises(RuntimeError, match=r"torchpager.*another process.*clone"):
            torch.multiprocessing.reductions.reduce_tensor(kept[2])
        testing.page_out_all()
        assert bool((kept[2] == 2).all())
        assert not testing.state(kept[2]).immovable
        del kept
