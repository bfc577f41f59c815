"""Scenario 16: a tensor handed to a side stream, freed, and its bytes reused.

Source: a tensor used by a collective on another stream was freed, and its memory reused before
the collective had read it (https://github.com/pytorch/pytorch/pull/18465,
https://github.com/pytorch/pytorch/issues/188655).

Setup: code outside the dispatcher queues a late copy of a tensor on a side stream and says
record_stream; the tensor is freed and its bytes are wanted at once, at a tight budget.
Right: the consumer sees the tensor's data.

CPU tensors have no streams. On the simulated device tests/c/test_core.c shows it under seeded
schedules (switches ``TP_RULE_OLD_MAPPING`` and ``TP_RULE_SAME_STREAM``).
"""

import ctypes
from collections.abc import Callable

import pytest
import torch
from places import MIB, Place

ROUNDS = 8
CYCLES = 40_000_000  # about 20 ms
DEVICE_TO_DEVICE = 3


def raw_copy() -> Callable[[int, int, int, int], int]:
    """Return cudaMemcpyAsync, as a C extension would call it."""
    major = str(torch.version.cuda).partition(".")[0]
    runtime = ctypes.CDLL(f"libcudart.so.{major}")  # loaded by torch already
    copy = runtime.cudaMemcpyAsync
    copy.argtypes = (
        ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p,
    )  # fmt: skip

    def call(target: int, source: int, size: int, stream: int) -> int:
        return copy(target, source, size, DEVICE_TO_DEVICE, stream)

    return call


def test_consumer_on_another_stream_sees_the_data(place: Place) -> None:
    if place.simulated:
        pytest.skip("CPU tensors have no streams")
    size = 8 * MIB
    copy = raw_copy()
    side = torch.cuda.Stream()
    # Native, so that they stay where they are: nobody is told that they are written.
    targets = [torch.zeros(size // 4, device="cuda") for _ in range(ROUNDS)]
    with place.paging(12 * size) as paging:
        ballast = [torch.full((size // 4,), float(i), device="cuda") for i in range(16)]
        for turn, target in enumerate(targets):
            source = torch.full((size // 4,), 100.0 + turn, device="cuda")
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(CYCLES)
            addresses = target.data_ptr(), source.data_ptr()
            assert copy(*addresses, size, side.cuda_stream) == 0
            source.record_stream(side)
            del source
            reused = [torch.full((size // 4,), -1.0, device="cuda") for _ in range(3)]
            del reused
            ballast[turn].add_(1)
        torch.cuda.synchronize()
        for turn, target in enumerate(targets):
            assert target.min().item() == target.max().item() == 100.0 + turn
        for index, tensor in enumerate(ballast):
            value = index + (1.0 if index < ROUNDS else 0.0)
            assert tensor.min().item() == tensor.max().item() == value
        paging.assert_paged()
        del ballast, tensor
