"""Several threads inside one budget: no deadlock, the same bits."""

import queue
import threading
import time

import pytest
import torch
from torch import nn
from torch.utils import data

import torchpager
from hang_guard import guard
from torchpager import _core, testing

MIB = 1 << 20
WIDTH = 256
LIMIT_S = 60


@pytest.fixture(autouse=True)
def no_hang(request):
    """Print every thread's stack and end the run instead of hanging."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    guard.open(request.config)
    with guard.within(LIMIT_S):
        yield
    torch.set_num_threads(threads)


def paging(budget, **options):
    """A device with a budget, as one context."""

    class Both:
        def __enter__(self):
            self.parts = [
                torchpager.simulate("64 MiB", granularity="64 KiB", **options).start(),
                torchpager.budget(budget).start(),
                torchpager.auto_offload().start(),
            ]
            torchpager.reset_stats()

        def __exit__(self, *_):
            for part in reversed(self.parts):
                part.stop()

    return Both()


def model(seed, layers=4):
    torch.manual_seed(seed)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))


def batch(seed, rows=512):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def train(net, seed, steps=4):
    """Train; the losses and, last, the parameters, as bytes."""
    optimizer = torch.optim.Adam(net.parameters(), lr=0.01)
    found = []
    for step in range(steps):
        loss = net(batch(100 * seed + step)).tanh().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item().hex())
    return [*found, *(p.detach().clone().numpy().tobytes() for p in net.parameters())]


def in_threads(*targets):
    """Run functions at once, each in a thread; raise the first error of any."""
    errors = []

    def guarded(target):
        try:
            target()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(target,)) for target in targets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("seed", range(2))
def test_models_of_three_threads_in_a_budget_for_one_of_them_are_bit_equal(seed):
    nets = [model(i) for i in range(3)]  # seeds are the process's: not in the threads
    plain = [train(net, i) for i, net in enumerate(nets)]
    found = [None] * 3
    # Parameters, gradients and moments of one are 4 MiB, its activations 2.5.
    with paging("7 MiB", seed=seed):
        nets = [model(i) for i in range(3)]

        def run(i):
            found[i] = train(nets[i], i)

        in_threads(*(lambda i=i: run(i) for i in range(3)))
        stats = torchpager.stats()
        nets.clear()
    assert found == plain
    assert stats.misses.count > 0
    assert stats.reserved.peak <= 7 * MIB


def test_threads_whose_working_sets_fill_the_budget_take_turns():
    sources = [torch.full((MIB // 4,), float(i)) for i in range(12)]
    with paging("4 MiB"):
        groups = [[sources[3 * i + k] * 1 for k in range(3)] for i in range(4)]

        def run(group):
            for _ in range(60):
                group[0].addcmul_(group[1], group[2], value=0.5)
                group[1].add_(group[0], alpha=0.001)

        in_threads(*(lambda g=group: run(g) for group in groups))
        found = [[x.clone() for x in group] for group in groups]
        stats = torchpager.stats()
        del groups
        found = [[x.numpy().copy() for x in group] for group in found]
    expected = [[sources[3 * i + k] * 1 for k in range(3)] for i in range(4)]
    for group in expected:
        run(group)
    for left, right in zip(found, expected, strict=True):
        assert [x.tobytes() for x in left] == [x.numpy().tobytes() for x in right]
    assert stats.misses.count > 0
    assert stats.reserved.peak <= 4 * MIB


# -- the GIL -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "ask",
    [lambda x: x.data_ptr(), lambda _: torch.empty(0).untyped_storage().resize_(2 * MIB)],
    ids=["pointer", "storage"],
)
def test_thread_that_waits_with_the_gil_held_lets_others_run_python(ask):
    """PyTorch holds the GIL in these calls, and there is no room for the bytes.

    What takes the room is pinned by an operator whose kernel is Python code.
    """
    started, go_on = threading.Event(), threading.Event()
    library = torch.library.Library("tp_threads", "DEF")
    library.define("slow(Tensor(a!) x) -> ()")

    def slow(x):
        started.set()
        assert go_on.wait(20)
        x.add_(1)

    library.impl("slow", slow, "CPU")
    ticks = []

    def tick():
        while not go_on.is_set():
            ticks.append(time.monotonic())
            time.sleep(0.001)

    try:
        with paging("4 MiB"):
            # 3 MiB, pinned while slow() runs, and 2 MiB.
            pair = [torch.zeros(MIB * 3 // 4), torch.ones(MIB // 2)]
            testing.evict(pair[1])

            def pins():
                torch.ops.tp_threads.slow(pair[0])

            def waits():
                assert started.wait(20)
                began = time.monotonic()
                ask(pair[1])
                ended = time.monotonic()
                go_on.set()
                assert ended - began > 0.02, "it was meant to wait"
                assert len([at for at in ticks if began < at < ended]) >= 5

            in_threads(pins, waits, tick)
            assert pair[0].sum().item() == MIB * 3 // 4
            assert pair[1].sum().item() == MIB // 2
            pair.clear()
    finally:
        go_on.set()
        library._destroy()


def test_allocation_that_waits_for_an_operator_in_python_ends():
    started, go_on = threading.Event(), threading.Event()

    class Slow(torch.autograd.Function):
        @staticmethod
        def forward(context, x):  # noqa: ARG004
            made = x * 2
            started.set()
            assert go_on.wait(20), "the other thread has kept the GIL"
            return made + 1

        @staticmethod
        def backward(context, grad):  # noqa: ARG004
            return grad * 2

    with paging("4 MiB"):
        kept = [torch.ones(MIB // 4, requires_grad=i == 3) for i in range(4)]
        found = []

        def slow():
            found.append(Slow.apply(kept[3]).sum().item())

        def allocates():
            assert started.wait(20)
            threading.Timer(0.2, go_on.set).start()
            for _ in range(20):
                found.append((kept[0] + kept[1]).add_(kept[2]).sum().item())

        in_threads(slow, allocates)
        assert found.count(3.0 * MIB / 4) == 21
        kept.clear()


# -- autograd ----------------------------------------------------------------------------------


def test_backward_from_another_thread_is_bit_equal():
    def run():
        net = model(1)
        loss = net(batch(1)).square().sum()
        in_threads(loss.backward)
        return [p.grad.clone().numpy().tobytes() for p in net.parameters()]

    plain = run()
    with paging("2 MiB"):
        assert run() == plain
        assert torchpager.stats().misses.count > 0


def test_two_threads_backward_through_one_graph_of_leaves():
    """Gradients of the same leaves accumulate from two threads; each step has one writer."""

    def run():
        shared = batch(7).requires_grad_()
        first, second = (shared * 2).sin().sum(), (shared * 3).cos().sum()
        lock = threading.Lock()

        def backward(loss):
            with lock:
                loss.backward()

        in_threads(lambda: backward(first))
        in_threads(lambda: backward(second))
        return shared.grad.clone().numpy().tobytes()

    plain = run()
    with paging("1 MiB", page_out_before_each_op=True, strict=True):
        assert run() == plain
        assert torchpager.stats().misses.count > 0


def test_backward_inside_backward_runs_on_autograds_threads():
    from torch.utils.checkpoint import checkpoint

    def run():
        net = model(2)
        x = batch(3).requires_grad_()
        for layer in net:
            x = checkpoint(lambda t, m=layer: m(t).tanh(), x, use_reentrant=True)
        found = []
        in_threads(lambda: found.append(x.sum().backward()))
        return [p.grad.clone().numpy().tobytes() for p in net.parameters()]

    plain = run()
    with paging("2 MiB", page_out_before_each_op=True, strict=True):
        assert run() == plain
        assert torchpager.stats().misses.count > 0


def test_graph_is_freed_by_another_thread_than_made_it():
    with paging("2 MiB"):
        for _ in range(5):
            net = model(1)
            graph = [net(batch(1)).sum()]
            in_threads(graph.clear)
            del net
        _core.check(_core.SIM_SLOT)
        assert torchpager.stats().allocated.current == 0


# -- hand-over ---------------------------------------------------------------------------------


def test_tensors_handed_from_producer_to_consumer_arrive_whole():
    with paging("2 MiB"):
        ballast = [torch.full((MIB // 8,), float(i)) for i in range(4)]  # the budget is full
        channel: queue.Queue = queue.Queue(maxsize=4)
        wrong = []

        def produce():
            for i in range(60):
                channel.put((i, torch.full((MIB // 8,), float(i)).mul_(2)))
            channel.put(None)

        def consume():
            while (item := channel.get()) is not None:
                i, tensor = item
                tensor.add_(ballast[i % 4]).sub_(ballast[i % 4]).add_(1)
                if tensor.sum().item() != (2 * i + 1) * MIB / 8:
                    wrong.append(i)

        in_threads(produce, consume)
        assert wrong == []
        stats = torchpager.stats()
        assert stats.misses.count > 0
        assert stats.reserved.peak <= 2 * MIB
        ballast.clear()


def test_threads_come_and_go_without_leaving_anything():
    kept_threads = threading.active_count()
    with paging("2 MiB"):
        kept = [torch.full((MIB // 8,), float(i)) for i in range(8)]
        for turn in range(40):
            in_threads(*(lambda x=x: x.add_(1) for x in kept[turn % 4 :: 4]))
        assert [int(x[5].item()) - i for i, x in enumerate(kept)] == [10] * 8
        assert all(each["pin_count"] == 0 for each in _core.blocks(_core.SIM_SLOT))
        del kept
    assert threading.active_count() == kept_threads


# -- DataLoader --------------------------------------------------------------------------------


class Rows(data.Dataset):
    """Makes its rows by operators, so that a worker allocates what would be a block of ours."""

    def __len__(self):
        return 24

    def __getitem__(self, index):
        return torch.full((MIB // 32,), float(index)).mul_(2), index


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_workers": 2},
        {"num_workers": 2, "persistent_workers": True, "prefetch_factor": 4},
        {"num_workers": 1, "pin_memory": True},
        {"pin_memory": True},
    ],
    ids=["none", "fork", "persistent", "fork-pin", "pin"],
)
@pytest.mark.filterwarnings("ignore")
def test_data_loader_gives_the_same_batches(options):
    with paging("2 MiB"):
        kept = [torch.full((MIB // 8,), float(i)) for i in range(8)]
        loader = data.DataLoader(Rows(), batch_size=4, **options)
        for _ in range(2):
            seen = []
            for rows, indices in loader:
                assert torch.equal(rows[:, 0], indices * 2.0)
                assert torch.equal(rows.sum(1), indices * 2.0 * MIB / 32)
                kept[len(seen) // 4].add_(1)
                seen += indices.tolist()
            assert seen == list(range(24))
        assert [int(x.mean().item()) - i for i, x in enumerate(kept)] == [2] * 6 + [0] * 2
        assert torchpager.stats().misses.count > 0
        del kept, loader, rows, indices


def test_worker_that_fails_raises_in_the_parent_and_leaves_it_usable():
    class Broken(Rows):
        def __getitem__(self, index):
            if index == 9:
                raise KeyError("no such row")
            return super().__getitem__(index)

    with paging("2 MiB"):
        loader = data.DataLoader(Broken(), batch_size=4, num_workers=2)
        with pytest.raises(KeyError, match="no such row"):
            list(loader)
        assert torch.ones(MIB // 8).sum().item() == MIB / 8
        _core.check(_core.SIM_SLOT)


def test_shared_memory_tensors_stay_pytorchs_own():
    """What goes to another process lies in shared memory, which never pages."""
    with paging("2 MiB"):
        x = torch.full((MIB // 4,), 3.0)
        x.share_memory_()
        assert testing.state(x).where == "native"
        y = torch.full((MIB // 4,), 1.0)
        testing.evict(y)
        assert x.add_(y).sum().item() == MIB
        del x, y


# -- collectives -------------------------------------------------------------------------------


def test_collective_in_progress_holds_its_operands(tmp_path):
    """gloo reads and writes by pointer, on threads of its own, after the operator returned."""
    from torch import distributed

    store = distributed.FileStore(str(tmp_path / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        with paging("2 MiB", strict=True, page_out_before_each_op=True):
            ballast = [torch.full((MIB // 8,), float(i)) for i in range(6)]
            gathered = [torch.zeros(MIB // 8)]
            x = torch.full((MIB // 8,), 5.0)
            for turn in range(5):
                testing.evict(ballast[0])
                works = [
                    distributed.all_reduce(x, async_op=True),
                    distributed.all_gather(gathered, x, async_op=True),
                    distributed.broadcast(ballast[5], 0, async_op=True),
                ]
                for each in ballast[:5]:
                    each.add_(1)
                for work in works:
                    work.wait()
                assert torch.equal(gathered[0], x)
                x.add_(1)
                assert x.mean().item() == 6.0 + turn
            assert ballast[4].mean().item() == 9.0
            assert torchpager.stats().misses.count > 0
            assert torchpager.stats().unseen_writes.count == 0
            del works, work, each
            del ballast, gathered, x
    finally:
        distributed.destroy_process_group()
