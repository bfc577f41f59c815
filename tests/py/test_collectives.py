"""Collectives: their operands stay in place until the work is done, and no longer.

Two ranks of gloo in one process: what one of them was asked for goes on, on a thread of gloo's,
until the other is asked for its part.
"""

import threading
import time
from contextlib import contextmanager
from datetime import timedelta

import pytest
import torch
from torch import distributed

import torchpager
from torchpager import regions, testing
from torchpager.simulate import _close_core as close_core

MIB = 1 << 20
CPU = torch.device("cpu")


def filled(value):
    """Half a mebibyte."""
    return torch.full((MIB // 8,), float(value))


@contextmanager
def paging(size, **options):
    with (
        torchpager.simulate("64 MiB", granularity="64 KiB", **options),
        torchpager.budget(size),
        torchpager.auto_offload(),
    ):
        torchpager.reset_stats()
        yield


def make_rank(store, rank, out):
    backend = distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))
    group = distributed.ProcessGroup(store, rank, 2)
    group._register_backend(CPU, distributed.ProcessGroup.BackendType.GLOO, backend)
    out[rank] = group


@pytest.fixture(scope="module")
def ranks():
    """Both ranks of a group of two."""
    store = distributed.HashStore()
    groups = [None, None]
    threads = [
        threading.Thread(target=make_rank, args=(store, rank, groups)) for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    yield groups
    groups.clear()


def until_done(*works):
    end = time.monotonic() + 30
    while not all(work.is_completed() for work in works):
        assert time.monotonic() < end, "the collective does not end"
        time.sleep(0.001)


def churn(tensors, turns=3):
    """More than the budget, so that whatever may move does."""
    for _ in range(turns):
        for tensor in tensors:
            tensor.add_(1)


def test_operands_stay_while_the_work_goes_on_and_move_once_it_is_done(ranks):
    with paging("2 MiB", strict=True):
        ballast = [filled(i) for i in range(6)]
        x, y = filled(3), filled(4)
        where = x.data_ptr()
        work = ranks[0].allreduce([x])
        assert testing.state(x).pins > 0
        assert not testing.state(x).immovable
        with pytest.raises(RuntimeError):
            testing.evict(x)
        churn(ballast)
        assert testing.state(x).evicted_extents == 0
        other = ranks[1].allreduce([y])
        until_done(work, other)
        # Nobody has waited, nor ever will.
        testing.evict(x)
        testing.evict(y)
        assert x.data_ptr() == where
        assert torch.equal(x, filled(7))
        assert torch.equal(y, filled(7))
        assert not testing.state(x).immovable
        assert torchpager.stats().unseen_writes.count == 0
        del work, other, ballast, x, y


def test_operands_move_when_the_handle_was_dropped(ranks):
    with paging("2 MiB", strict=True):
        x, y = filled(1), filled(2)
        ranks[0].allreduce([x])
        assert testing.state(x).pins > 0
        ranks[1].allreduce([y]).wait()
        end = time.monotonic() + 30
        while testing.state(x).pins and time.monotonic() < end:
            filled(0).add_(1)
            time.sleep(0.001)
        testing.evict(x)
        assert torch.equal(x, filled(3))
        del x, y


def test_operand_that_is_in_host_is_written_there(ranks):
    """With no room for it the work runs over the host frame, which stays until it is done."""
    with paging("2 MiB", strict=True):
        x, y = filled(5), filled(6)
        ballast = [filled(i) for i in range(4)]
        handles = [torchpager.pin(each) for each in ballast]
        assert testing.state(x).where == "host"
        work = ranks[0].allreduce([x])
        for handle in handles:
            handle.unpin()
        churn(ballast)
        x.sum()
        assert testing.state(x).where == "host"
        ranks[1].allreduce([y]).wait()
        until_done(work)
        assert torch.equal(x, filled(11))
        assert testing.state(x).where == "resident"
        del work, ballast, handles, x, y


def test_memory_that_waits_for_a_collective_comes_when_it_is_done(ranks):
    """The thread that waits asks for itself, so that it need not give up."""
    with paging("2 MiB"):
        held = [filled(i) for i in range(3)]
        wanted = [filled(10 + i) for i in range(4)]
        for each in wanted:
            testing.evict(each)
        works = [ranks[0].allreduce([each]) for each in held]
        others = [filled(0).clone() for _ in held]
        assert all(testing.state(each).pins for each in held)

        def end_them(others):
            time.sleep(0.01)
            for each in others:
                ranks[1].allreduce([each])

        thread = threading.Thread(target=end_them, args=(others,))
        thread.start()
        total = torch.stack(wanted[:2]).sum().item()
        thread.join()
        until_done(*works)
        assert total == (10 + 11) * MIB / 8
        assert all(torch.equal(each, filled(i)) for i, each in enumerate(held))
        assert not any(testing.state(each).pins for each in held)
        del works, others, held, each, wanted


def test_sends_and_receives_stay_for_good(ranks):
    """gloo says that they are done only to who waits for them."""
    with paging("2 MiB"):
        x, y = filled(8), filled(0)
        works = [ranks[0].send([x], 1, 7), ranks[1].recv([y], 0, 7)]
        for work in works:
            work.wait()
        assert torch.equal(y, filled(8))
        assert testing.state(x).immovable
        assert testing.state(y).immovable
        del x, y, works, work


def test_collective_in_a_group_stays_for_good(ranks):
    """NCCL begins what a group asks for at its end, and until then says that it is done."""
    with paging("2 MiB"):
        x, y, z = filled(1), filled(2), filled(3)
        with pytest.raises(RuntimeError):  # gloo has no groups: this one has not begun
            ranks[0]._start_coalescing(CPU)
        ranks[0].allreduce([z])
        ranks[1].allreduce([filled(0)]).wait()
        filled(0).add_(1)
        assert not testing.state(z).immovable
        begins = regions._group_begins(lambda: None)
        ends = regions._group_ends(lambda: None)
        begins()
        work = ranks[0].allreduce([x])
        ends()
        ends()  # of a group that began before anyone looked
        ranks[1].allreduce([y]).wait()
        work.wait()
        assert testing.state(x).immovable
        y, z = filled(3), filled(3)
        work = ranks[0].allreduce([y])
        ranks[1].allreduce([z]).wait()
        until_done(work)
        testing.evict(y)
        assert torch.equal(y, filled(6))
        del x, y, z, work


def test_core_closes_when_a_finished_work_was_never_looked_at(ranks):
    with paging("2 MiB"):
        x, y = filled(1), filled(2)
        works = [ranks[0].allreduce([x]), ranks[1].allreduce([y])]
        del x, y
        until_done(*works)
        del works
    end = time.monotonic() + 30  # the thread of gloo's lets go of its tensors in its own time
    while not close_core():
        assert time.monotonic() < end
        time.sleep(0.001)
    with paging("2 MiB"):
        assert filled(1).sum().item() == MIB / 8


def test_functional_collective_pages_like_any_operator(tmp_path):
    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        name = distributed.group.WORLD.group_name
        with paging("2 MiB", strict=True, page_out_before_each_op=True):
            x = filled(4)
            reduced = torch.ops._c10d_functional.all_reduce(x, "sum", name)
            result = torch.ops._c10d_functional.wait_tensor(reduced)
            assert torch.equal(result, filled(4))
            for each in (x, result):
                assert not testing.state(each).immovable
                testing.evict(each)
            assert torch.equal(x, result)
            del x, reduced, result, each
    finally:
        distributed.destroy_process_group()
