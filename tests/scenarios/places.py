"""Where a scenario runs: on the simulated device, under real CPU tensors, or on a GPU.

A scenario is written once, against a ``Place``. Its reference runs in the same process, outside
the contexts; what is compared are raw bytes.
"""

import gc
import hashlib
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

# Deterministic matrix products; read by cuBLAS when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch
from torch import nn

import torchpager
from torchpager import _control, _core
from torchpager.stats import Stats

KIB, MIB = 1 << 10, 1 << 20
Chosen = TypeVar("Chosen")

# What a budget on a GPU leaves PyTorch's native allocator for tensors that are too small to be
# paged: it takes segments of 2 MiB for those up to 1 MiB, and of 20 MiB for others.
NATIVE_SLACK_BYTES = 40 * MIB
SMALL_SLACK_BYTES = 8 * MIB


@dataclass
class Paging:
    """A budget with paging in force."""

    place: "Place"
    budget_bytes: int
    native_bytes: int
    """PyTorch's native reserved bytes on entry, on a GPU; part of the budget."""

    def stats(self) -> Stats:
        """Return the counters since the contexts were entered, also after they were left."""
        return torchpager.stats()

    def assert_paged(self, evictions: int = 1, fills: int = 1) -> Stats:
        """Fail unless bytes moved both ways and the budget was kept."""
        stats = self.stats()
        assert stats.evictions.count >= evictions, f"nothing was evicted: {stats}"
        assert stats.fills.count >= fills, f"nothing came back: {stats}"
        self.assert_within()
        return stats

    def assert_within(self) -> None:
        """Fail if more than the budget was ever held."""
        stats = self.stats()
        held = max(stats.held.peak, stats.reserved.peak)
        assert held <= self.budget_bytes, f"{held} bytes were held of {self.budget_bytes}"


@dataclass
class Place:
    """One of the two devices.

    Sizes differ: what is paged are storages of at least ``granule`` bytes.
    """

    name: str
    device: torch.device = field(init=False)
    granule: int = field(init=False)
    _staging: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.device = torch.device("cpu" if self.simulated else "cuda")
        self.granule = 4 * KIB if self.simulated else 2 * MIB
        # Made before the simulated device exists, so that it is no part of it.
        if self.simulated:
            self._staging = torch.empty(256 * KIB, dtype=torch.uint8)
        else:
            self._staging = torch.empty(16 * MIB, dtype=torch.uint8, pin_memory=True)

    @property
    def simulated(self) -> bool:
        """Whether it is the simulated device."""
        return self.name == "sim"

    @property
    def slot(self) -> int:
        """The core's slot."""
        return _core.SIM_SLOT if self.simulated else torch.cuda.current_device()

    def coarser(self, granule: int) -> None:
        """Make the simulated device map no less than that many bytes at once."""
        if self.simulated:
            self.granule = granule

    def pick(self, *, sim: Chosen, cuda: Chosen) -> Chosen:
        """Return the value for this place."""
        return sim if self.simulated else cuda

    # -- contexts --------------------------------------------------------------------------

    @contextmanager
    def paging(
        self,
        budget_bytes: int,
        *,
        host: int | str | None = None,
        native_slack: int = NATIVE_SLACK_BYTES,
    ) -> Iterator[Paging]:
        """Enter a device of its own, a budget of that many bytes, and paging.

        On a GPU what the native allocator holds already (workspaces) is added to the budget,
        and a little for tensors that are too small to be paged.
        """
        with ExitStack() as stack:
            native = self._enter_device(stack)
            if not self.simulated:
                budget_bytes += native + native_slack
            budget_bytes -= budget_bytes % self.granule
            stack.enter_context(torchpager.auto_offload())
            stack.enter_context(torchpager.budget(budget_bytes, host=host))
            torchpager.reset_stats()
            yield Paging(self, budget_bytes, native)

    def peak(self, work: object) -> int:
        """Return the most tensor bytes that ``work()`` needs at once when nothing is moved."""
        assert callable(work)
        if self.simulated:
            with ExitStack() as stack:
                self._enter_device(stack)
                stack.enter_context(torchpager.budget("100%"))
                torchpager.reset_stats()
                work()
                gc.collect()
                return torchpager.stats().active.peak
        work()  # loads what libraries keep, such as workspaces
        self.settle()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        work()
        return torch.cuda.max_memory_allocated() - before

    def _enter_device(self, stack: ExitStack) -> int:
        if self.simulated:
            stack.enter_context(torchpager.simulate("512 MiB", granularity=self.granule))
            return 0
        own_workspaces()
        self.settle()
        return torch.cuda.memory_reserved()

    # -- the device ------------------------------------------------------------------------

    def settle(self) -> None:
        """Wait for the device and give caches back."""
        gc.collect()
        if not self.simulated:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def synchronize(self) -> None:
        """Wait for the device."""
        if not self.simulated:
            torch.cuda.synchronize()

    def empty_cache(self) -> None:
        """Give caches back to the device."""
        if self.simulated:
            _core.empty_cache(self.slot)
        else:
            torch.cuda.empty_cache()

    def scribble(self, size: int) -> None:
        """Write over free device memory, in blocks of that many bytes.

        A frame that comes back to its old address would otherwise still hold the right bytes.
        """
        options = {"dtype": torch.uint8, "device": self.device}
        blocks = [torch.full((size,), 0xA5, **options) for _ in range(4)]
        self.synchronize()
        del blocks

    # -- bytes -----------------------------------------------------------------------------

    def digest(self, tensors: Iterable[torch.Tensor]) -> str:
        """Return a digest of the tensors' bytes, read by operators, in order.

        Reading memory directly would make it immovable.
        """
        total = hashlib.sha256()
        for tensor in tensors:
            raw = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
            for start in range(0, raw.numel(), self._staging.numel()):
                piece = raw[start : start + self._staging.numel()]
                copy = self._staging[: piece.numel()]
                copy.copy_(piece)
                total.update(copy.numpy().data)
        return total.hexdigest()


@torch.enable_grad()
def own_workspaces() -> None:
    """Have the native allocator hold cuBLAS's workspaces of this stream, not the budget.

    They are made when a thread first multiplies on a stream; those of an earlier scenario may
    be in memory of ours, where they cannot be moved.
    """
    torch._C._cuda_clearCublasWorkspaces()
    a = torch.ones(64, 64, device="cuda", requires_grad=True)
    nn.functional.linear(a, a, a[0]).sum().backward()  # also on autograd's thread
    torch.cuda.synchronize()


def address(tensor: torch.Tensor) -> int:
    """Return where a tensor's bytes are. Looking is not reading."""
    return _control.tensor_address(tensor)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    """Return the gradients that exist, in the order of the parameters."""
    return [p.grad for p in model.parameters() if p.grad is not None]


def states(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Return the tensors of the optimizer's state, in the order of the parameters."""
    found = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            found += [state[name] for name in sorted(state) if torch.is_tensor(state[name])]
    return found
