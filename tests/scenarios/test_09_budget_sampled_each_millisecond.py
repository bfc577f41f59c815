"""Scenario 9: a UNet-like net, with the device's bytes sampled all the time.

Source: a process held more than the fraction of the device that it was given
(https://github.com/pytorch/pytorch/issues/58466, https://github.com/pytorch/pytorch/issues/69688).

Setup: train a UNet-like net at 48% of its peak and sample the device's bytes each millisecond.
Right: never above the budget, with the plain run's bits.
"""

import os
import threading

import torch
from places import MIB, Paging, Place, gradients
from torch import nn
from torch.nn import functional

from torchpager import _core

STEPS = 6


class UNet(nn.Module):
    """Two levels down and up, with skip connections that live long."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        c = channels

        def conv(inputs: int, outputs: int) -> nn.Module:
            return nn.Sequential(
                nn.Conv2d(inputs, outputs, 3, padding=1), nn.GroupNorm(4, outputs), nn.SiLU()
            )

        self.enter, self.down1, self.down2 = conv(3, c), conv(c, 2 * c), conv(2 * c, 4 * c)
        self.up1, self.up2 = conv(6 * c, 2 * c), conv(3 * c, c)
        self.leave = nn.Conv2d(c, 3, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        first = self.enter(image)
        second = self.down1(functional.avg_pool2d(first, 2))
        x = self.down2(functional.avg_pool2d(second, 2))
        x = self.up1(torch.cat([wider(x), second], 1))
        x = self.up2(torch.cat([wider(x), first], 1))
        return self.leave(x)


def wider(x: torch.Tensor) -> torch.Tensor:
    """Double height and width, by a deterministic operator."""
    return x.repeat_interleave(2, dim=2).repeat_interleave(2, dim=3)


class Sampler(threading.Thread):
    """Asks the operating system or the driver how much of the device is in use."""

    def __init__(self, paging: Paging) -> None:
        super().__init__(name="sampler")
        self.largest = 0
        self.samples = 0
        self.stop = threading.Event()
        self._simulated = paging.place.simulated
        self._base = 0
        if self._simulated:
            self._file = _core.sim_fd("device")
        else:
            # What the context, libraries and other processes take stays what it is now.
            self._base = self._used() - torch.cuda.memory_reserved()

    def _used(self) -> int:
        if self._simulated:
            return os.fstat(self._file).st_blocks * 512
        free, total = torch.cuda.mem_get_info()
        return total - free

    def run(self) -> None:
        while not self.stop.wait(0.001):
            self.largest = max(self.largest, self._used() - self._base)
            self.samples += 1


def train(place: Place) -> list[str]:
    torch.manual_seed(9)
    channels, batch, side = place.pick(sim=(8, 2, 32), cuda=(32, 8, 128))
    with place.device:
        model = UNet(channels)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    found = []
    for step in range(STEPS):
        generator = torch.Generator().manual_seed(step)
        image = torch.randn(batch, 3, side, side, generator=generator).to(place.device)
        loss = functional.mse_loss(model(image), image)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found += [loss.item().hex(), place.digest(gradients(model))]
    return [*found, place.digest(model.parameters())]


def test_device_bytes_never_exceed_the_budget(place: Place) -> None:
    budget = place.peak(lambda: train(place)) * 48 // 100
    plain = train(place)
    with place.paging(budget) as paging:
        sampler = Sampler(paging)
        sampler.start()
        try:
            paged = train(place)
        finally:
            sampler.stop.set()
            sampler.join()
        paging.assert_paged(evictions=STEPS, fills=STEPS)
    assert paged == plain
    assert sampler.samples >= 20
    assert sampler.largest > 0
    # On a GPU the driver's figure also moves when a library loads a kernel for the first time.
    assert sampler.largest <= paging.budget_bytes + place.pick(sim=0, cuda=32 * MIB)
