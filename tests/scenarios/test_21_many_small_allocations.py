"""Scenario 21: thousands of small allocations in a step.

Source: allocators plugged in from outside cost more than PyTorch's own on each small block
(https://github.com/rapidsai/rmm/pull/1407 has the figures of one).

Setup: a step with 2,500 allocations and frees of 2 KiB to 1 MiB on one stream.
Right: within 1.1x of stock.

The figures of the simulated device say nothing about speed.
"""

import random
import statistics
import time

import pytest
import torch
from places import KIB, MIB, Place

import torchpager

COUNT, ROUNDS = 2500, 15


def step_seconds(sizes: list[int]) -> float:
    """Allocate and free in a fixed order, with 200 blocks alive, and return the time."""
    alive: list[torch.Tensor] = []
    torch.cuda.synchronize()
    start = time.perf_counter()
    for size in sizes:
        alive.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
        if len(alive) > 200:
            del alive[size % 200]
    alive.clear()
    torch.cuda.synchronize()
    return time.perf_counter() - start


def test_small_allocations_cost_what_they_cost_without(place: Place) -> None:
    if place.simulated:
        pytest.skip("its figures say nothing about speed")
    source = random.Random(21)
    sizes = [int(2 * KIB * 512 ** source.random()) for _ in range(COUNT)]
    assert max(sizes) <= MIB
    for _ in range(3):
        step_seconds(sizes)
    stock, inside = [], []
    # Alternating: what else the machine does hits both.
    for _ in range(ROUNDS):
        stock.append(step_seconds(sizes))
        with torchpager.auto_offload(), torchpager.budget("4 GiB"):
            step_seconds(sizes)
            inside.append(step_seconds(sizes))
    ratio = statistics.median(inside) / statistics.median(stock)
    assert ratio <= 1.1, f"{ratio:.3f} times stock"
