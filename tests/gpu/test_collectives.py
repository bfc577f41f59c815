"""Collectives on streams of their own, while memory is tight: one rank, so NCCL only copies."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tight import MIB, filled, holds, paging
from torch import distributed

import torchpager
from torchpager import testing

CYCLES = 60_000_000  # about 30 ms


@pytest.fixture(autouse=True)
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make the process a group of one rank."""
    if not distributed.is_nccl_available():
        pytest.skip("this torch has no NCCL")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")
    torch.use_deterministic_algorithms(True)
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("nccl", store=store, rank=0, world_size=1)
    yield
    distributed.destroy_process_group()
    torch.use_deterministic_algorithms(False)


def test_collective_on_its_own_stream_finds_its_operands_while_memory_is_tight() -> None:
    """With one rank NCCL still copies, on a stream of its own, from input to output."""
    with paging(64 * MIB):
        kept = [filled(100 + i) for i in range(8)]
        for turn in range(6):
            inputs, gathered = filled(turn), filled(-1)
            pieces = [filled(-2)]
            torch.cuda._sleep(CYCLES)  # what is queued now comes late
            works = [
                distributed.all_reduce(inputs, async_op=True),
                distributed.all_gather_into_tensor(gathered, inputs, async_op=True),
                distributed.all_gather(pieces, inputs, async_op=True),
            ]
            for tensor in kept:
                tensor.add_(1)
            for work in works:
                work.wait()
            assert holds(gathered, turn)
            assert holds(pieces[0], turn)
            assert holds(inputs, turn)
        assert all(holds(tensor, 106 + i) for i, tensor in enumerate(kept))
        del kept, tensor, inputs, gathered, pieces, works, work


def test_operands_of_a_collective_that_nobody_waits_for_move_once_it_is_done() -> None:
    """NCCL's event says so; a group of collectives has none of its own until it has ended."""
    with paging(64 * MIB):
        kept = [filled(i) for i in range(8)]  # more than the budget: everything is watched
        inputs, gathered, grouped = filled(3), filled(-1), filled(4)
        distributed.all_gather_into_tensor(gathered, inputs)
        torch.cuda._sleep(CYCLES)
        work = distributed.all_gather_into_tensor(gathered, inputs, async_op=True)
        assert testing.state(inputs).pins > 0
        end = time.monotonic() + 30
        while not work.is_completed():
            assert time.monotonic() < end
        for tensor in (inputs, gathered):
            testing.evict(tensor)
            assert not testing.state(tensor).immovable
        assert holds(gathered, 3)
        assert torchpager.stats().unseen_writes.count == 0
        with distributed._coalescing_manager(device=torch.device("cuda")):
            distributed.broadcast(grouped, 0)
        assert testing.state(grouped).immovable
        assert holds(grouped, 4)
        assert all(holds(tensor, i) for i, tensor in enumerate(kept))
        del kept, inputs, gathered, grouped, tensor, work
