"""Budgets that do not hold what a test uses, and tensors to fill them with."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

import torch

import torchpager

MIB = 1 << 20
# For tensors below 2 MiB; the native allocator takes 2 MiB at a time for those up to 1 MiB.
NATIVE_SLACK = 8 * MIB


@torch.enable_grad()
def own_workspaces() -> None:
    """Have the native allocator hold cuBLAS's workspaces of this stream, not the budget.

    They are made when a thread first multiplies on a stream; those of an earlier test may be in
    memory of ours, where they cannot be moved.
    """
    torch._C._cuda_clearCublasWorkspaces()
    a = torch.ones(64, 64, device="cuda", requires_grad=True)
    torch.nn.functional.linear(a, a, a[0]).sum().backward()  # also on autograd's thread
    torch.cuda.synchronize()


@contextmanager
def paging(size: int) -> Iterator[None]:
    """Enter paging in a budget of that many bytes beside what the native allocator holds."""
    gc.collect()
    torch.cuda.synchronize()
    own_workspaces()
    torch.cuda.empty_cache()
    size += torch.cuda.memory_reserved() + NATIVE_SLACK
    with torchpager.auto_offload(), torchpager.budget(size):
        torchpager.reset_stats()
        yield
        stats = torchpager.stats()
        assert stats.evictions.count > 0, "nothing was evicted"
        assert stats.held.peak <= size


def filled(value: float, mib: int = 8) -> torch.Tensor:
    """Return a tensor of one value."""
    return torch.full((mib * MIB // 4,), float(value), device="cuda")


def holds(tensor: torch.Tensor, value: float) -> bool:
    """Return whether every element is the value."""
    return tensor.min().item() == tensor.max().item() == float(value)
