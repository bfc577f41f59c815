"""Scenario 13: a long run.

Source: with offloading on, host memory grew with every result until the machine had no more
(https://github.com/stepfun-ai/Step1X-Edit/issues/47).

Setup: 1,000 steps at 60% of the peak.
Right: reserved and host bytes stay what they were after the first ones; the process does not
grow.
"""

import resource

import torch
from places import KIB, MIB, SMALL_SLACK_BYTES, Place
from torch import nn

import torchpager
from torchpager import _core

STEPS, WARM_UP = 1000, 200


class Training:
    """A small net and its optimizer."""

    def __init__(self, place: Place) -> None:
        torch.manual_seed(13)
        width = place.pick(sim=64, cuda=2048)
        with place.device:
            layers = [nn.Linear(width, width) for _ in range(3)]
            self.model = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
            self.inputs = torch.randn(32, width)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=0.01, momentum=0.9, foreach=False
        )

    def step(self) -> None:
        """Do one step."""
        self.optimizer.zero_grad()
        (self.model(self.inputs) - self.inputs).square().mean().backward()
        self.optimizer.step()

    def steps(self, count: int) -> None:
        """Do several."""
        for _ in range(count):
            self.step()


def test_thousand_steps_hold_no_more_than_the_first_ones(place: Place) -> None:
    place.coarser(16 * KIB)
    budget = place.peak(lambda: Training(place).steps(2)) * 6 // 10
    with place.paging(budget, native_slack=SMALL_SLACK_BYTES) as paging:
        training = Training(place)
        training.steps(WARM_UP)
        warm = paging.stats()
        blocks = len(_core.blocks(place.slot))
        largest = max(block["bytes"] for block in _core.blocks(place.slot))
        process = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
        training.steps(STEPS - WARM_UP)
        last = paging.assert_paged(evictions=STEPS, fills=STEPS)
        assert last.reserved.peak == warm.reserved.peak
        # Which tensors are in HOST at once differs a little from step to step.
        assert last.host_bytes.peak <= warm.host_bytes.peak + 2 * largest
        assert last.host_bytes.peak <= last.active.peak
        assert len(_core.blocks(place.slot)) == blocks
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB - process
        assert grown < place.pick(sim=8, cuda=64) * MIB, f"the process grew by {grown} bytes"
        del training
    assert torchpager.stats().allocated.current == 0
