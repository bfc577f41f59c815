"""Scenario 12: what a step makes once it has been seen.

Source: page-locked memory was allocated in every step of a training, and that took a large part
of it (https://github.com/pytorch/pytorch/issues/124456).

Setup: train at 60% of the peak; after a warm-up look at what more steps make.
Right: no host frame, no page-locked memory, no stream; copies run while kernels do.

Frames are counted where they are asked of the device. Calls of the driver and the overlap of
copies with kernels are a GPU's to show; the clock of the simulated device is in
tests/c/test_sim.c.
"""

import pytest
import torch
from places import KIB, Place
from torch import nn
from workloads import Job, Transformer

import torchpager
from torchpager.stats import Stats

WARM_UP, MORE = 12, 8
# Parts of the names of runtime and driver calls that make page-locked memory or streams.
MADE = ("HostAlloc", "HostRegister", "MallocHost", "StreamCreate")


def equal_blocks(width: int) -> nn.Module:
    """Return a net whose weights and activations all have one size for ``width`` rows."""
    layers = [nn.Linear(width, width, bias=False) for _ in range(8)]
    return nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))


class Regression:
    """Trains a net step by step."""

    def __init__(self, place: Place, width: int) -> None:
        torch.manual_seed(12)
        with place.device:
            self.model = equal_blocks(width)
            self.inputs = torch.randn(width, width)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), foreach=False)

    def steps(self, count: int) -> None:
        """Do that many."""
        for _ in range(count):
            self.optimizer.zero_grad()
            self.model(self.inputs).square().mean().backward()
            self.optimizer.step()


def test_warm_steps_over_equal_blocks_make_no_frame_at_all(place: Place) -> None:
    width = place.pick(sim=64, cuda=1024)
    budget = place.peak(lambda: Regression(place, width).steps(2)) * 6 // 10
    with place.paging(budget) as paging:
        training = Regression(place, width)
        training.steps(WARM_UP)
        warm = paging.stats()
        training.steps(MORE)
        last = paging.assert_paged(evictions=MORE, fills=MORE)
        assert last.evictions.count - warm.evictions.count >= MORE
        assert last.frame_creates.count == warm.frame_creates.count
        assert last.frame_releases.count == warm.frame_releases.count
        del training


def test_warm_steps_of_a_transformer_make_no_host_frame(place: Place) -> None:
    place.coarser(16 * KIB)
    width = place.pick(sim=32, cuda=512)
    looks: list[Stats] = []

    def forward(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
        looks.append(torchpager.stats())
        return model(tokens)

    job = Job(place, lambda: Transformer(width, 4), WARM_UP + MORE, forward=forward)
    budget = job.peak() * 6 // 10
    looks.clear()
    with place.paging(budget) as paging:
        job.run()
        paging.assert_paged(evictions=MORE, fills=MORE)
    warm, *later = looks[WARM_UP:]
    assert later[-1].evictions.count - warm.evictions.count >= len(later)
    for look in later:
        assert look.host_bytes.peak == look.host_bytes.current == warm.host_bytes.current


def overlap_us(copies: list[tuple[float, float]], kernels: list[tuple[float, float]]) -> float:
    """Return how long copies and kernels ran at once; each list is of (start, end)."""
    total = 0.0
    for start, end in copies:
        for first, last in kernels:
            total += max(0.0, min(end, last) - max(start, first))
    return total


def test_copies_overlap_kernels_and_no_call_makes_anything(place: Place) -> None:
    if place.simulated:
        pytest.skip("CPU tensors' operators run on the calling thread")
    width = 2048
    budget = place.peak(lambda: Regression(place, width).steps(2)) * 6 // 10
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with place.paging(budget) as paging:
        training = Regression(place, width)
        training.steps(WARM_UP)
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profiler:
            training.steps(MORE)
            torch.cuda.synchronize()
        paging.assert_paged(evictions=MORE, fills=MORE)
        del training
    copies, kernels = [], []
    for event in profiler.events():
        made = [part for part in MADE if part in event.name]
        assert not made, f"{event.name} in a warm step"
        if event.device_type != torch.autograd.DeviceType.CUDA:
            continue
        times = (event.time_range.start, event.time_range.end)
        (copies if "Memcpy" in event.name else kernels).append(times)
    assert copies
    assert kernels
    assert overlap_us(copies, kernels) > 0
