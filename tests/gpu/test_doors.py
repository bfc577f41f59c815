"""The wrapper door on a GPU: in and out at any time, honest figures, honest failures."""

import gc
from contextlib import ExitStack
from typing import Any

import pytest
import torch

import torchpager
from torchpager import _core, demo_train, testing

MIB = 1 << 20
GIB = 1 << 30


def filled(value: int, mib: int = 64) -> torch.Tensor:
    """Return a tensor of that size, filled with one value."""
    return torch.full((mib * MIB // 4,), float(value), device="cuda")


def holds(tensor: torch.Tensor, value: int) -> bool:
    """Return whether every element is the value."""
    return bool((tensor == float(value)).all().item())


def is_ours(tensor: torch.Tensor) -> bool:
    """Return whether the storage is torchpager's."""
    return testing.state(tensor).where != "native"


def held_now() -> int:
    """Return the bytes that count against a budget."""
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def installed() -> bool:
    """Return whether the door is in place."""
    from torchpager import _torch_cuda

    return _torch_cuda.installed()


# -- in and out ----------------------------------------------------------------------------


def test_tensors_of_both_sides_survive_entering_and_leaving() -> None:
    native = filled(1)
    with torchpager.auto_offload():
        inside = filled(2)
        assert is_ours(inside)
        assert not is_ours(native)
        kept_native = filled(3, mib=1)
        assert not is_ours(kept_native), "a small block belongs to the native allocator"
        del native
    assert not installed()
    assert holds(inside, 2)
    assert holds(kept_native, 3)
    outside = filled(4)
    assert not is_ours(outside)
    with torchpager.auto_offload():
        again = filled(5)
        assert is_ours(again)
        assert is_ours(inside)
        del outside
        inside += 1
    assert holds(inside, 3)
    assert holds(again, 5)
    del inside, again, kept_native
    gc.collect()
    torch.cuda.empty_cache()
    assert torchpager.stats("cuda").allocated.current == 0


def test_thousand_blocks_are_freed_by_whoever_made_them() -> None:
    """Blocks of either side, freed on either side, in an order of their own."""
    before = torch.cuda.memory_allocated()
    generator = torch.Generator().manual_seed(7)
    alive: list[tuple[torch.Tensor, int]] = []
    for turn in range(10):
        with ExitStack() as stack:
            if turn % 2:
                stack.enter_context(torchpager.auto_offload())
            for index in range(100):
                value = turn * 100 + index
                alive.append((filled(value, mib=2 + value % 5), value))
                if len(alive) > 60:
                    victim = int(torch.randint(len(alive), (1,), generator=generator))
                    tensor, expected = alive.pop(victim)
                    assert holds(tensor, expected)
                    del tensor
    assert all(holds(tensor, value) for tensor, value in alive)
    alive.clear()
    gc.collect()
    assert torch.cuda.memory_allocated() == before
    assert torchpager.stats("cuda").allocated.current == 0


class Trainer:
    """A small GPT that can be stepped one step at a time."""

    config = demo_train.Config(
        device="cuda", layers=4, width=512, heads=8, context=256, batch=8, vocabulary=512,
    )  # fmt: skip

    def __init__(self) -> None:
        torch.manual_seed(3)
        with torch.device("cuda"):
            self.model = demo_train.GPT(self.config, self.config.vocabulary)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)
        generator = torch.Generator().manual_seed(4)
        shape = (8, self.config.batch, self.config.context)
        self.codes = torch.randint(512, shape, generator=generator).cuda()
        self.losses: list[float] = []

    def step(self) -> None:
        """Do one step."""
        codes = self.codes[len(self.losses) % 8]
        loss = demo_train.one_step(
            self.config, self.model, self.optimizer, codes, codes, demo_train.Silent()
        )
        self.optimizer.zero_grad(set_to_none=True)
        self.losses.append(loss.item())

    def digests(self) -> tuple[str, str]:
        """Return the digests of parameters and optimizer states."""
        return (
            demo_train.digest(self.model.parameters(), 64 * MIB),
            demo_train.digest(demo_train.optimizer_tensors(self.optimizer), 64 * MIB),
        )


@pytest.fixture
def deterministic() -> Any:
    """Switch deterministic algorithms on for one test."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("deterministic")
def test_training_goes_on_through_entering_and_leaving_with_the_same_bits() -> None:
    reference = Trainer()
    for _ in range(12):
        reference.step()
    expected = reference.losses, reference.digests()
    del reference
    gc.collect()
    trainer = Trainer()
    for turn in range(4):
        with ExitStack() as stack:
            if turn % 2:
                stack.enter_context(torchpager.auto_offload())
                if turn == 3:
                    torchpager.adopt(trainer.model, trainer.optimizer)
                    stack.enter_context(torchpager.budget(held_now() + 64 * MIB))
            for _ in range(3):
                trainer.step()
    assert installed() is False
    assert torchpager.stats("cuda").evictions.count > 0, "the last turn was meant to page"
    assert (trainer.losses, trainer.digests()) == expected


# -- figures -------------------------------------------------------------------------------


def test_memory_figures_of_torch_include_our_blocks() -> None:
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    with torchpager.auto_offload():
        tensor = filled(1, mib=256)
        assert is_ours(tensor)
        assert torch.cuda.memory_allocated() == base + 256 * MIB
        assert torch.cuda.max_memory_allocated() >= base + 256 * MIB
        assert torch.cuda.memory_reserved() >= torch.cuda.memory_allocated()
        assert torch.cuda.memory_stats()["allocated_bytes.all.current"] == base + 256 * MIB
        summary = torch.cuda.memory_summary()
        assert "Allocated memory" in summary
        del tensor
        assert torch.cuda.memory_allocated() == base
        assert torch.cuda.max_memory_allocated() >= base + 256 * MIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == base
        cached = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() <= cached - 256 * MIB
    assert torch.cuda.memory_allocated() == base


def test_empty_cache_gives_the_memory_back_to_the_driver() -> None:
    with torchpager.auto_offload():
        torch.cuda.empty_cache()
        free_before, _ = torch.cuda.mem_get_info()
        tensor = filled(1, mib=1024)
        torch.cuda.synchronize()
        free_between, _ = torch.cuda.mem_get_info()
        assert free_before - free_between >= 1024 * MIB
        del tensor
        torch.cuda.empty_cache()
        free_after, _ = torch.cuda.mem_get_info()
    assert free_after >= free_before - 64 * MIB


# -- a kernel that told nobody -------------------------------------------------------------

SUM_SOURCE = r"""
extern "C" __global__ void add_one(const float *in, float *out, unsigned long long count) {
    unsigned long long i = blockIdx.x * (unsigned long long)blockDim.x + threadIdx.x;
    if (i < count) out[i] = in[i] + 1.0f;
}
"""


def test_raw_kernel_reads_a_block_in_host_and_finds_its_values() -> None:
    cupy = pytest.importorskip("cupy")
    kernel = cupy.RawKernel(SUM_SOURCE, "add_one")
    with torchpager.auto_offload():
        count = 32 * MIB
        source = torch.arange(count, dtype=torch.float32, device="cuda")
        result = torch.empty_like(source)
        expected = source + 1
        pointers = [torch._C.TensorBase.data_ptr(tensor) for tensor in (source, result)]
        torch.cuda.synchronize()
        testing.evict(source)
        assert testing.state(source).where == "host"
        misses = torchpager.stats().misses.count
        arguments = (*map(cupy.uint64, pointers), cupy.uint64(count))
        kernel(((count + 255) // 256,), (256,), arguments)
        cupy.cuda.runtime.deviceSynchronize()
        assert testing.state(source).where == "host", "nobody was told, so nothing has moved"
        assert torchpager.stats().misses.count == misses
        assert torch.equal(result, expected)


# -- failures ------------------------------------------------------------------------------


def test_request_larger_than_budget_and_host_names_the_figures() -> None:
    with torchpager.auto_offload(), torchpager.budget(held_now() + 512 * MIB, host="768 MiB"):
        kept = filled(9, mib=128)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.empty(4 * GIB, dtype=torch.uint8, device="cuda")
        text = str(caught.value)
        assert text.startswith("CUDA out of memory.")
        for figure in ("4.00 GiB", "768.00 MiB", "resident", "HOST", "host memory", "udget"):
            assert figure in text, f"{figure} is not in: {text}"
        oom = torchpager.last_oom()
        assert oom is not None
        assert oom.requested_bytes == 4 * GIB
        assert oom.host_budget_bytes == 768 * MIB
        assert oom.budget_bytes is not None
        assert oom.budget_bytes >= 512 * MIB
        assert holds(filled(1, mib=4), 1)
        assert holds(kept, 9)


def test_budget_alone_never_moves_bytes() -> None:
    with torchpager.budget(held_now() + 256 * MIB):
        before = torchpager.stats().evictions.count
        kept = filled(1, mib=128)
        with pytest.raises(torch.OutOfMemoryError):
            filled(2, mib=256)
        assert torchpager.stats().evictions.count == before
        assert testing.state(kept).where == "resident"
        assert holds(kept, 1)


def test_block_larger_than_the_budget_is_born_in_host_and_usable() -> None:
    size = held_now() + 128 * MIB
    with torchpager.auto_offload(), torchpager.budget(size):
        torchpager.reset_stats()
        big = filled(3, mib=512)
        assert testing.state(big).host_bytes > 0
        assert torchpager.stats().born_in_host > 0
        big.mul_(2.0)
        # A mask of `big` would be a quarter of it: compare the extremes instead.
        assert big.min().item() == big.max().item() == 6.0
        assert torchpager.stats().held.peak <= size


BAD: list[tuple[str, dict[str, Any], type[Exception]]] = [
    ("zero", {"size": 0}, ValueError),
    ("negative", {"size": -1}, ValueError),
    ("no unit", {"size": "8 GB B"}, ValueError),
    ("more than all", {"size": "101%"}, ValueError),
    ("larger than the card", {"size": 1 << 50}, ValueError),
    ("host below zero", {"size": "1 GiB", "host": -1}, ValueError),
    ("not a size", {"size": 1.5}, TypeError),
    ("no such device", {"size": "1 GiB", "device": 99}, ValueError),
    ("not a CUDA device", {"size": "1 GiB", "device": "cpu"}, torchpager.UnavailableError),
]


@pytest.mark.parametrize(("_name", "arguments", "expected"), BAD, ids=[row[0] for row in BAD])
def test_bad_budget_raises_and_leaves_nothing_installed(
    _name: str, arguments: dict[str, Any], expected: type[Exception]
) -> None:
    fraction = torch.cuda.get_per_process_memory_fraction()
    with pytest.raises(expected), torchpager.budget(**arguments):
        pytest.fail("the body of a refused budget must not run")
    assert not installed()
    assert torch.cuda.get_per_process_memory_fraction() == fraction
    assert holds(filled(1), 1)


def test_budget_larger_than_the_outer_one_is_refused() -> None:
    with torchpager.budget("4 GiB"):
        with pytest.raises(ValueError, match="outer budget"), torchpager.budget("5 GiB"):
            pytest.fail("the body of a refused budget must not run")
        assert _core.get_budget(torch.cuda.current_device())[0] == 4 * GIB
    assert not installed()


def test_budget_below_what_is_held_raises_and_leaves_nothing_installed() -> None:
    kept = filled(1, mib=1024)
    with pytest.raises(torch.OutOfMemoryError), torchpager.budget("512 MiB"):
        pytest.fail("the body of a refused budget must not run")
    assert not installed()
    assert holds(kept, 1)


def test_contexts_left_out_of_order_raise_and_leave_the_rest_valid() -> None:
    outer = torchpager.auto_offload().start()
    inner = torchpager.budget("8 GiB").start()
    with pytest.raises(RuntimeError):
        outer.stop()
    assert is_ours(filled(1))
    inner.stop()
    outer.stop()
    assert not installed()


def test_pinned_tensor_stays_and_more_pins_than_budget_raise() -> None:
    with torchpager.auto_offload(), torchpager.budget(held_now() + 256 * MIB):
        pinned = filled(1, mib=160)
        other = filled(2, mib=160)
        with torchpager.pin(pinned):
            testing.page_out_all()
            assert testing.state(pinned).where == "resident"
            with pytest.raises(torch.OutOfMemoryError):
                torchpager.pin(other)
            assert holds(other, 2)
        testing.evict(pinned)
        assert testing.state(pinned).where == "host"
        assert holds(pinned, 1)


@pytest.mark.parametrize("size", [512 << 10, 1 << 20])
def test_small_tensors_may_fill_what_large_ones_leave_of_the_budget(size: int) -> None:
    budget = 512 * MIB
    with torchpager.budget(budget), torchpager.auto_offload():
        torchpager.reset_stats()  # the peak of the program so far
        large = [filled(i, mib=16) for i in range(40)]
        small = [torch.empty(size, dtype=torch.uint8, device="cuda") for _ in range(200)]
        assert sum(t.numel() for t in small) >= 200 * size
        assert torchpager.stats().held.peak <= budget
        assert torchpager.stats().evictions.count > 0
        assert all(holds(tensor, i) for i, tensor in enumerate(large))
        del large, small


def test_small_request_is_ours_where_the_native_allocator_finds_no_room() -> None:
    torch.cuda.empty_cache()
    budget = torch.cuda.memory_reserved() + 64 * MIB
    with torchpager.budget(budget), torchpager.auto_offload():
        torchpager.reset_stats()
        large = filled(9, mib=48)
        stays = torchpager.pin(large)
        # It would take a segment of 20 MiB from the driver for each sixteen of them.
        size = 1280 << 10
        small = [torch.full((size,), i, dtype=torch.uint8, device="cuda") for i in range(40)]
        assert any(is_ours(tensor) for tensor in small)
        assert [int(tensor.max()) for tensor in small] == list(range(40))
        stats = torchpager.stats()
        assert stats.evictions.count > 0, "what is ours can be moved"
        assert stats.held.peak <= budget
        stays.unpin()
        del large, small


def grow_for_ever(tensors: list[torch.Tensor]) -> None:
    """Make one small tensor after the other."""
    while True:
        tensors.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))


def test_budget_of_small_tensors_alone_is_used_to_the_last_segment() -> None:
    budget = 256 * MIB
    tensors: list[torch.Tensor] = []
    with torchpager.budget(budget):
        with pytest.raises(torch.OutOfMemoryError):
            grow_for_ever(tensors)
        assert budget - 4 * MIB <= torch.cuda.memory_reserved() <= budget
        tensors.clear()
