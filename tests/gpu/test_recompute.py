"""Bytes made again instead of moved, on a GPU: the same bits, and less that moves."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_models import PROGRAMS, Program, different, experts, train
from tight import own_workspaces
from torch import nn

import torchpager
from torchpager import recompute

MIB = 1 << 20
STEPS = 12
# From this step on plans are carried out; before it everything moves on demand.
PLANNED = 8


class Block(nn.Module):
    """Attention and a perceptron of four times the width, each with a norm before it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.norms[0](x)).view(batch, length, 3, self.heads, -1)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        seen = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(nn.functional.gelu(self.up(self.norms[1](x))))


def transformer(batch: int = 8) -> Program:
    """Return blocks under autocast, whose activations are most of the memory."""
    model = nn.Sequential(*[Block(1024, 16) for _ in range(8)])

    def loss(step: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(step)
        x = torch.randn(batch, 1024, 1024, generator=generator, device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            return model(x).float().square().mean()

    return model, loss


class Run:
    """A training inside a budget: what it leaves behind, and its counters, also by step."""

    def __init__(
        self, make: Callable[[], Program], limit: int, *, again: bool, steps: int
    ) -> None:
        self._last = (0, 0)
        self.filled: list[int] = []
        self.dropped: list[int] = []
        with torchpager.budget(limit), torchpager.auto_offload(recompute=again):
            torchpager.reset_stats()
            self.found = train(make, steps, self._note)
            self.stats: Any = torchpager.stats()

    def _note(self) -> None:
        now: Any = torchpager.stats()
        last, self._last = self._last, (now.fills.bytes, now.drops.bytes)
        self.filled.append(self._last[0] - last[0])
        self.dropped.append(self._last[1] - last[1])


def trained(
    make: Callable[[], Program], share: float, steps: int
) -> tuple[dict[str, torch.Tensor], Run, Run]:
    """Return what native gives, a run that moves and one that makes again."""
    own_workspaces()
    torch.use_deterministic_algorithms(True, warn_only=make is experts)
    try:
        train(make, steps=1)
        torch.cuda.reset_peak_memory_stats()
        native = train(make, steps)
        limit = int(torch.cuda.max_memory_allocated() * share)
        moving = Run(make, limit, again=False, steps=steps)
        dropping = Run(make, limit, again=True, steps=steps)
    finally:
        torch.use_deterministic_algorithms(False)
    return native, moving, dropping


def in_mib(sizes: list[int]) -> str:
    """Return sizes in MiB, as text."""
    return " ".join(str(size // MIB) for size in sizes)


@pytest.mark.limit(90)
def test_transformer_drops_its_activations(capfd: pytest.CaptureFixture[str]) -> None:
    # Bound by the GPU: where it waits for the host anyway, moving is free.
    native, moving, dropping = trained(partial(transformer, batch=24), 0.5, STEPS)
    with capfd.disabled():
        print(
            f"\nMiB filled in each step, all moved: {in_mib(moving.filled)}; with drops: "
            f"{in_mib(dropping.filled)}; dropped: {in_mib(dropping.dropped)}; "
            f"{dropping.stats.drops.count} drops, {recompute.counts()}"
        )
    assert different(native, moving.found) == different(native, dropping.found) == []
    assert all(dropping.dropped[PLANNED:])
    assert sum(dropping.filled[PLANNED:]) < sum(moving.filled[PLANNED:]) * 2 // 3
    assert dropping.stats.wrong_reruns == 0
    assert dropping.stats.unverified_reruns == 0


@pytest.mark.long
@pytest.mark.limit(120)
@pytest.mark.parametrize("make", [transformer, *PROGRAMS])
def test_model_trains_with_the_same_bits(make: Callable[[], Program]) -> None:
    native, moving, dropping = trained(make, 0.5, PLANNED)
    assert different(native, moving.found) == different(native, dropping.found) == []
    assert dropping.stats.wrong_reruns == 0


@pytest.mark.limit(60)
def test_forced_drops_keep_the_bits() -> None:
    own_workspaces()
    torch.use_deterministic_algorithms(True)
    try:
        native = train(transformer, steps=3)
        recompute.force(True)
        # Half of what a step needs, so that the first one drops already.
        with torchpager.budget("2 GiB"), torchpager.auto_offload(recompute=True):
            made = train(transformer, steps=3)
            stats = torchpager.stats()
    finally:
        recompute.force(False)
        torch.use_deterministic_algorithms(False)
    assert different(native, made) == []
    assert stats.drops.count > 0
