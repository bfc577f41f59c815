"""Scenario 20: a tensor is evicted while a long kernel on a side stream writes it.

Source: memory was unmapped under queued work, since the allocator had waited for another stream
(https://github.com/pytorch/pytorch/issues/196258).

Setup: a long kernel on a side stream writes T; force the eviction of T at once.
Right: the eviction waits for that work, and not for what is queued after it was decided on;
T holds the kernel's result.

CPU tensors' operators are done when they return. On the simulated device tests/c/test_core.c
shows it under seeded schedules (switches ``TP_RULE_CONTEXT_MARKER`` and
``TP_RULE_WRITE_BACK_ORDER``).
"""

import threading
import time

import pytest
import torch
from places import MIB, Place

from torchpager import testing

CYCLES = 400_000_000  # about 0.2 s
LONGER = 10


def evict(tensor: torch.Tensor, errors: list[BaseException]) -> None:
    """Evict a tensor, on a thread of its own."""
    try:
        testing.evict(tensor)
    except BaseException as error:
        errors.append(error)


def test_eviction_waits_for_the_writer_and_for_nothing_later(place: Place) -> None:
    if place.simulated:
        pytest.skip("CPU tensors' operators are done when they return")
    size = 32 * MIB
    writer, later = torch.cuda.Stream(), torch.cuda.Stream()
    with place.paging(4 * size) as paging:
        tensor = torch.zeros(size // 4, device="cuda")
        other = torch.zeros(1, device="cuda")
        torch.cuda.synchronize()
        written = torch.cuda.Event()
        with torch.cuda.stream(writer):
            torch.cuda._sleep(CYCLES)
            tensor.fill_(20.0)
            written.record()
        errors: list[BaseException] = []

        thread = threading.Thread(target=evict, args=(tensor, errors))
        thread.start()
        time.sleep(0.05)
        assert thread.is_alive(), "it did not wait for the kernel"
        assert not written.query()
        done = torch.cuda.Event()
        with torch.cuda.stream(later):
            torch.cuda._sleep(LONGER * CYCLES)
            other.fill_(1.0)
            done.record()
        thread.join(30)
        assert not thread.is_alive()
        assert errors == []
        assert written.query()
        assert not done.query(), "it waited for work that was queued after the decision"
        assert testing.state(tensor).where == "host"
        torch.cuda.synchronize()
        assert tensor.min().item() == tensor.max().item() == 20.0
        paging.assert_paged()
        del tensor, other
