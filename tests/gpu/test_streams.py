"""Streams, threads and other processes' settings on a GPU, while memory is tight."""

import ctypes
import os
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from conftest import Script
from tight import MIB, NATIVE_SLACK, filled, holds, paging
from torch import nn
from torch.utils import data

import torchpager
from torchpager import testing

WIDTH, LAYERS, ROWS = 1024, 6, 1024
CYCLES = 60_000_000  # about 30 ms
# cuBLAS takes one for each pair of a thread and a stream; it is no tensor, so it stays.
WORKSPACE = 40 * MIB
Target = Callable[[], object]


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Bits of two runs are compared."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def net(seed: int) -> nn.Module:
    """Return a model of 24 MiB."""
    torch.manual_seed(seed)
    with torch.device("cuda"):
        return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))


def batch(seed: int) -> torch.Tensor:
    """Return 4 MiB of inputs."""
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed)).cuda()


def train(model: nn.Module, seed: int, steps: int = 4) -> list[torch.Tensor]:
    """Train; return losses and parameters, on the CPU. Synchronises at the end only."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    inputs = batch(seed)
    losses = []
    for step in range(steps):
        loss = (model(inputs) * (step + 1)).tanh().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [each.cpu() for each in (*losses, *(p.detach() for p in model.parameters()))]


# What one training needs is about 24 x 4 MiB of states and 60 of activations.
TIGHT = 80 * MIB


def equal(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    """Return whether all bits agree."""
    pairs = zip(one, other, strict=True)
    return all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in pairs)


def in_threads(*targets: Target) -> None:
    """Run functions at once, each in a thread; raise the first error of any."""
    errors: list[BaseException] = []

    def guarded(target: Target) -> None:
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


# -- streams -------------------------------------------------------------------------------


def test_tensors_used_on_alternating_side_streams_keep_their_values() -> None:
    streams = [torch.cuda.Stream() for _ in range(3)]
    with paging(64 * MIB):
        kept = [filled(i) for i in range(16)]
        torch.cuda.synchronize()
        for turn in range(6):
            stream = streams[turn % 3]
            stream.wait_stream(streams[(turn - 1) % 3])
            with torch.cuda.stream(stream):
                torch.cuda._sleep(CYCLES // 10)
                for tensor in kept:
                    tensor.add_(1)
        torch.cuda.synchronize()
        assert all(holds(tensor, i + 6) for i, tensor in enumerate(kept))
        del kept, tensor


def test_two_streams_may_read_one_tensor_at_once() -> None:
    one, other = torch.cuda.Stream(), torch.cuda.Stream()
    with paging(64 * MIB + 2 * WORKSPACE):
        weight = torch.eye(1024, device="cuda")
        inputs = [torch.full((1024, 1024), float(i), device="cuda") for i in range(40)]
        torch.cuda.synchronize()
        results: list[torch.Tensor] = []
        for index, each in enumerate(inputs):
            with torch.cuda.stream((one, other)[index % 2]):
                if index % 5 == 0:
                    torch.cuda._sleep(CYCLES // 10)
                results.append((each @ weight)[0].clone())
        torch.cuda.synchronize()
        assert [row[7].item() for row in results] == [float(i) for i in range(40)]
        del weight, inputs, each, results


def test_memory_of_a_producers_tensor_is_not_reused_before_its_consumer_has_read_it() -> None:
    producer, consumer = torch.cuda.Stream(), torch.cuda.Stream()
    with paging(64 * MIB):
        ballast = [filled(100 + i) for i in range(8)]
        sums = []
        for turn in range(10):
            with torch.cuda.stream(producer):
                made = filled(turn)
                made.add_(1)
                ready = producer.record_event()
            with torch.cuda.stream(consumer):
                consumer.wait_event(ready)
                torch.cuda._sleep(CYCLES // 3)
                sums.append(made.mean(dtype=torch.float64))
            made.record_stream(consumer)
            del made
            with torch.cuda.stream(producer):
                filled(-1), filled(-2)  # would take its place
            ballast[turn % 8].add_(1)
        torch.cuda.synchronize()
        assert [each.item() for each in sums] == [turn + 1.0 for turn in range(10)]
        torch.cuda.synchronize()
        del ballast, sums


def test_queued_copies_to_page_locked_memory_finish_before_the_source_moves() -> None:
    with paging(64 * MIB):
        sources = [filled(i) for i in range(12)]
        targets = [torch.empty(8 * MIB // 4, pin_memory=True) for _ in range(12)]
        torch.cuda._sleep(CYCLES)
        for source, target in zip(sources, targets, strict=True):
            target.copy_(source, non_blocking=True)
        for source in sources:
            source.add_(50)
        del source, sources
        more = [filled(-1) for _ in range(6)]
        torch.cuda.synchronize()
        assert [target.mean(dtype=torch.float64).item() for target in targets] == [
            float(i) for i in range(12)
        ]
        back = [target.to("cuda", non_blocking=True) for target in targets]
        assert all(holds(tensor, i) for i, tensor in enumerate(back))
        del more, back


def test_launching_thread_may_be_300_steps_ahead() -> None:
    model = net(1)
    plain = train(model, 1, steps=300)
    del model
    with paging(TIGHT):
        model = net(1)
        found = train(model, 1, steps=300)
        del model
    assert equal(found, plain)


# -- threads -------------------------------------------------------------------------------


def test_threads_with_a_stream_each_train_at_once_with_plain_bits() -> None:
    models = [net(i) for i in range(3)]
    plain = [train(model, i) for i, model in enumerate(models)]
    models.clear()
    found: list[list[torch.Tensor]] = [[]] * 3
    with paging(TIGHT + 3 * WORKSPACE):
        models += [net(i) for i in range(3)]
        torch.cuda.synchronize()

        def run(i: int) -> None:
            with torch.cuda.stream(torch.cuda.Stream()):
                found[i] = train(models[i], i)
                torch.cuda.current_stream().synchronize()

        in_threads(*(lambda i=i: run(i) for i in range(3)))
        models.clear()
    assert all(equal(one, other) for one, other in zip(found, plain, strict=True))


def test_backward_from_another_thread_has_plain_bits() -> None:
    def run() -> list[torch.Tensor]:
        model = net(2)
        loss = model(batch(2)).square().mean()
        in_threads(loss.backward)
        return [p.grad.cpu() for p in model.parameters() if p.grad is not None]

    plain = run()
    with paging(30 * MIB):
        found = run()
    assert len(found) == 2 * LAYERS
    assert equal(found, plain)


def test_inference_mode_has_plain_bits() -> None:
    def run() -> list[torch.Tensor]:
        model = net(3)
        with torch.inference_mode():
            x = batch(3)
            for _ in range(3):
                x = model(x).tanh_()
            return [x.cpu()]

    plain = run()
    with paging(16 * MIB):
        found = run()
    assert equal(found, plain)


# -- DataLoader ----------------------------------------------------------------------------


class Rows(data.Dataset):  # type: ignore[type-arg]
    """Rows of 1 MiB, on the CPU."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((MIB // 4,), float(index)), index


def test_loader_with_workers_and_page_locked_batches_feeds_a_tight_budget() -> None:
    with paging(48 * MIB):
        kept = [filled(i) for i in range(8)]
        loader = data.DataLoader(Rows(), batch_size=8, num_workers=2, pin_memory=True)
        seen: list[int] = []
        for turn, (rows, indices) in enumerate(loader):
            assert rows.is_pinned()
            on_device = rows.to("cuda", non_blocking=True)
            kept[turn].add_(1)
            assert on_device.mean(1, dtype=torch.float64).tolist() == [
                float(i) for i in indices
            ]
            seen += indices.tolist()
        assert seen == list(range(48))
        assert all(holds(tensor, i + (i < 6)) for i, tensor in enumerate(kept))
        del kept, on_device, loader


# -- settings of other tools ---------------------------------------------------------------

PROGRAM = """
import torch, torchpager
def main(size):
    with torchpager.auto_offload(), torchpager.budget(size):
        kept = [torch.full((2 << 20,), float(i), device="cuda") for i in range(32)]
        small = [torch.full((1000,), float(i), device="cuda") for i in range(32)]
        for x in kept + small:
            x.add_(1)
        for tensors in kept, small:
            means = [x.mean(dtype=torch.float64).item() for x in tensors]
            assert means == [i + 1.0 for i in range(32)]
        stats = torchpager.stats()
        assert stats.evictions.count > 0, stats
        assert stats.held.peak <= size, stats
    print("right", torch.cuda.get_allocator_backend())
"""
WORKS = PROGRAM + "main(160 << 20)\n"
REFUSED = (
    PROGRAM
    + """
try:
    main(160 << 20)
except torchpager.UnavailableError as error:
    print("refused:", error)
x = torch.ones(1 << 20, device="cuda")
assert not torchpager.status().active
print(x.sum().item())
"""
)


@pytest.mark.parametrize("variable", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
@pytest.mark.parametrize(
    "setting",
    ["expandable_segments:True", "max_split_size_mb:64,garbage_collection_threshold:0.8"],
)
def test_settings_of_the_native_allocator_work(
    python: Script, variable: str, setting: str
) -> None:
    assert "right native" in python("-c", WORKS, **{variable: setting})


def test_the_drivers_own_allocator_is_refused_and_stays_usable(python: Script) -> None:
    printed = python("-c", REFUSED, PYTORCH_CUDA_ALLOC_CONF="backend:cudaMallocAsync")
    assert "refused:" in printed
    assert "cudaMallocAsync" in printed
    assert printed.rstrip().endswith("1048576.0")


OTHER = r"""
#include <dlfcn.h>
#include <stddef.h>
#include <sys/types.h>
typedef int (*alloc_fn)(unsigned long long *, size_t);
typedef int (*free_fn)(unsigned long long);
static void *symbol(const char *name) {
    void *driver = dlopen("libcuda.so.1", RTLD_LAZY);
    return driver ? dlsym(driver, name) : NULL;
}
void *other_alloc(ssize_t size, int device, void *stream) {
    (void)device, (void)stream;
    unsigned long long address = 0;
    alloc_fn alloc = (alloc_fn)symbol("cuMemAlloc_v2");
    if (size > 0 && alloc) alloc(&address, (size_t)size);
    return (void *)address;
}
void other_free(void *address, ssize_t size, int device, void *stream) {
    (void)size, (void)device, (void)stream;
    free_fn release = (free_fn)symbol("cuMemFree_v2");
    if (address && release) release((unsigned long long)address);
}
"""
OTHER_FIRST = """
import torch
other = torch.cuda.memory.CUDAPluggableAllocator({path!r}, "other_alloc", "other_free")
torch.cuda.memory.change_current_allocator(other)
x = torch.ones(1 << 20, device="cuda")
"""


def test_another_tools_allocator_in_place_is_refused_and_stays_usable(
    python: Script, tmp_path: Path
) -> None:
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("no C compiler")
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    source.write_text(OTHER)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", library, source, "-ldl"], check=True)
    printed = python("-c", OTHER_FIRST.format(path=str(library)) + REFUSED)
    assert "refused:" in printed
    assert "allocator in place" in printed
    assert printed.rstrip().endswith("1048576.0")


def test_memory_fraction_of_the_user_is_in_force_inside_and_restored_exactly() -> None:
    total = torch.cuda.get_device_properties(0).total_memory
    try:
        for fraction in (0.3, 0.500000001, 0.7 - 1e-10, 0.9):
            torch.cuda.set_per_process_memory_fraction(fraction)
            before = torch.cuda.get_per_process_memory_fraction()
            for _ in range(20):
                with ExitStack() as stack:
                    stack.enter_context(torchpager.auto_offload())
                    stack.enter_context(torchpager.budget("4 GiB"))
                    assert torch.cuda.get_per_process_memory_fraction() == pytest.approx(before)
                assert torch.cuda.get_per_process_memory_fraction() == before
        torch.cuda.set_per_process_memory_fraction(0.01)
        with torchpager.auto_offload(), torchpager.budget("8 GiB"):
            torch.cuda.set_per_process_memory_fraction(0.8)
        found = torch.cuda.get_per_process_memory_fraction()
        assert found == pytest.approx(0.8, abs=1 / total * 10)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


VISIBLE = """
import torch, torchpager
print(torch.cuda.device_count(), torchpager.status().active)
try:
    torchpager.budget("1 GiB").start()
except torchpager.UnavailableError as error:
    print("unavailable:", error)
"""


def test_hidden_devices_are_not_there_and_visible_ones_are(python: Script) -> None:
    printed = python("-c", VISIBLE, CUDA_VISIBLE_DEVICES="")
    assert "unavailable: no CUDA device is usable here" in printed
    uuid = torch.cuda.get_device_properties(torch.cuda.current_device()).uuid
    assert "right" in python("-c", WORKS, CUDA_VISIBLE_DEVICES=f"GPU-{uuid}")
    last = str(torch.cuda.device_count() - 1)
    if "CUDA_VISIBLE_DEVICES" not in os.environ:
        assert "right" in python("-c", WORKS, CUDA_VISIBLE_DEVICES=last)


# -- out of memory -------------------------------------------------------------------------


def test_out_of_memory_caught_100_times_leaks_nothing() -> None:
    torch.cuda.empty_cache()
    size = torch.cuda.memory_reserved() + NATIVE_SLACK + 64 * MIB
    with torchpager.auto_offload(), torchpager.budget(size, host="128 MiB"):
        kept = filled(7, mib=32)
        errors = []
        before = None
        for _ in range(100):
            try:
                held = filled(1, mib=16)
                torch.empty(1 << 30, device="cuda")
            except torch.OutOfMemoryError as error:
                errors.append(error)
            del held
            stats = torchpager.stats()
            figures = (stats.allocated.current, stats.pinned.current)
            before = before or figures
            assert figures == before
        assert len(errors) == 100
        assert testing.state(kept).pins == 0
        assert holds(kept, 7)
        assert torchpager.stats().held.peak <= size
        del kept


# -- what a raw reader sees ----------------------------------------------------------------


def test_raw_driver_copy_from_a_block_in_host_finds_its_values() -> None:
    driver = ctypes.CDLL("libcuda.so.1")
    copy = driver.cuMemcpy
    copy.argtypes = (ctypes.c_uint64, ctypes.c_uint64, ctypes.c_size_t)
    with paging(48 * MIB):
        source = torch.arange(2 * MIB, dtype=torch.float32, device="cuda")
        kept = [filled(i) for i in range(8)]
        testing.evict(source)
        pointer = torch._C.TensorBase.data_ptr(source)
        target = torch.zeros(2 * MIB)
        assert copy(target.data_ptr(), pointer, source.nbytes) == 0
        assert testing.state(source).where == "host"
        assert torch.equal(target, torch.arange(2 * MIB, dtype=torch.float32))
        del source, kept
