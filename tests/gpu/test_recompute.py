"""Bytes made again instead of moved, on a GPU: the same bits, and less that moves."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_models import Program, convolutions, decoder, different, encoder, experts, train
from tight import own_workspaces
from torch import nn

import torchpager
from torchpager import recompute

MIB = 1 << 20
STEPS = 8


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


def transformer() -> Program:
    """Return blocks under autocast, whose activations are most of the memory."""
    model = nn.Sequential(*[Block(1024, 16) for _ in range(8)])

    def loss(step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(8, 1024, 1024, generator=generator).cuda()
        with torch.autocast("cuda", torch.bfloat16):
            return model(x).float().square().mean()

    return model, loss


def run(make: Callable[[], Program], limit: int, again: bool) -> tuple[dict[str, Any], Any]:
    """Return what a training leaves behind, and the counters of it."""
    with torchpager.budget(limit), torchpager.auto_offload(recompute=again):
        torchpager.reset_stats()
        found = train(make, steps=STEPS)
        stats = torchpager.stats()
    return found, stats


def trained(make: Callable[[], Program], share: float) -> tuple[list[str], list[str], Any, Any]:
    """Return what differs from native, paged and made again, and both counters."""
    own_workspaces()
    torch.use_deterministic_algorithms(True, warn_only=make is experts)
    try:
        train(make, steps=1)
        torch.cuda.reset_peak_memory_stats()
        native = train(make, steps=STEPS)
        limit = int(torch.cuda.max_memory_allocated() * share)
        paged, moved = run(make, limit, again=False)
        made, less = run(make, limit, again=True)
    finally:
        torch.use_deterministic_algorithms(False)
    return different(native, paged), different(native, made), moved, less


@pytest.mark.limit(120)
def test_transformer_drops_its_activations(capfd: pytest.CaptureFixture[str]) -> None:
    paged, made, moved, less = trained(transformer, 0.5)
    with capfd.disabled():
        print(
            f"\nmoved {moved.fills.bytes // MIB} MiB in; with drops {less.fills.bytes // MIB}, "
            f"{less.drops.count} drops of {less.drops.bytes // MIB} MiB, {recompute.counts()}"
        )
    assert paged == made == []
    assert less.drops.count > 0
    assert less.fills.bytes < moved.fills.bytes * 2 // 3
    assert less.wrong_reruns == 0
    assert less.unverified_reruns == 0


@pytest.mark.long
@pytest.mark.limit(120)
@pytest.mark.parametrize("make", [decoder, encoder, convolutions, experts])
def test_model_trains_with_the_same_bits(make: Callable[[], Program]) -> None:
    paged, made, _, less = trained(make, 0.5)
    assert paged == made == []
    assert less.wrong_reruns == 0


@pytest.mark.limit(60)
def test_forced_drops_keep_the_bits() -> None:
    own_workspaces()
    torch.use_deterministic_algorithms(True)
    try:
        native = train(transformer, steps=2)
        recompute.force(True)
        with torchpager.budget("4 GiB"), torchpager.auto_offload(recompute=True):
            made = train(transformer, steps=2)
            stats = torchpager.stats()
    finally:
        recompute.force(False)
        torch.use_deterministic_algorithms(False)
    assert different(native, made) == []
    assert stats.drops.count > 0
