"""The simulated device: real training under it gives the same bits, and what it refuses."""

import dataclasses
import time

import pytest
import torch
from torch import nn

import torchpager
from torchpager import _core, _torch_cpu, testing

MIB = 1 << 20


class Block(nn.Module):
    """One layer of a transformer, with everything that a real one has."""

    def __init__(self, width):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, time, 3, 4, width // 4).unbind(2)
        a = nn.functional.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(a.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(nn.functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, width=64, layers=2, vocabulary=96):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens):
        return self.head(self.blocks(self.embed(tokens)))


def mlp():
    return nn.Sequential(nn.Linear(96, 256), nn.Tanh(), nn.Dropout(0.1), nn.Linear(256, 96))


def train(make, steps, optimizer_class, **optimizer_options):
    """Train a small model; returns losses, parameters, gradients and optimizer states."""
    torch.manual_seed(3)
    model = make()
    optimizer = optimizer_class(model.parameters(), lr=1e-3, **optimizer_options)
    losses = []
    for step in range(steps):
        torch.manual_seed(100 + step)
        if isinstance(model, Transformer):
            tokens = torch.randint(0, 96, (4, 33))
            logits = model(tokens[:, :-1])
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        else:
            inputs = torch.randn(64, 96)
            loss = (model(inputs) - inputs).square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    states = [v for s in optimizer.state.values() for v in s.values() if torch.is_tensor(v)]
    tensors = [*model.parameters(), *(p.grad for p in model.parameters()), *states]
    return losses, [t.detach().clone() for t in tensors]


def assert_same_bits(plain, paged):
    assert paged[0] == plain[0]
    assert len(paged[1]) == len(plain[1])
    for expected, got in zip(plain[1], paged[1], strict=True):
        assert torch.equal(bits(expected), bits(got))


def bits(tensor):
    return tensor.flatten().view(torch.uint8)


@pytest.fixture(autouse=True)
def one_thread():
    """Keep the order of sums fixed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


OPTIMIZERS = [
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"foreach": True}),
    (torch.optim.SGD, {"momentum": 0.9}),
]


@pytest.mark.parametrize("strict", [False, True], ids=["mapped", "strict"])
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=["adamw", "foreach", "sgd"])
@pytest.mark.parametrize("make", [mlp, Transformer])
def test_training_gives_the_same_bits_in_half_its_memory(make, optimizer, options, strict):
    plain = train(make, 4, optimizer, **options)
    device = {"granularity": "4 KiB", "strict": strict, "seed": 11}
    with torchpager.simulate("256 MiB", **device), torchpager.auto_offload():
        torchpager.reset_stats()
        assert_same_bits(plain, train(make, 4, optimizer, **options))
        peak = torchpager.stats().allocated.peak
        assert torchpager.stats().evictions.count == 0
    budget = peak // 2
    if options.get("foreach") and strict:
        budget = peak * 9 // 10  # one operator names every tensor: they must all be mapped
    with (
        torchpager.simulate("256 MiB", **device),
        torchpager.budget(budget),
        torchpager.auto_offload(),
    ):
        torchpager.reset_stats()
        paged = train(make, 4, optimizer, **options)
        stats = torchpager.stats()
        assert_same_bits(plain, paged)
        assert stats.reserved.peak <= budget
        assert stats.evictions.count > 0
        del paged


@pytest.mark.parametrize("seed", range(3))
def test_training_gives_the_same_bits_when_everything_is_evicted_before_each_operator(seed):
    plain = train(mlp, 2, torch.optim.AdamW)
    with (
        torchpager.simulate(
            "256 MiB", granularity="4 KiB", strict=True, page_out_before_each_op=True, seed=seed
        ),
        torchpager.auto_offload(),
    ):
        torchpager.reset_stats()
        paged = train(mlp, 2, torch.optim.AdamW)
        evictions = torchpager.stats().evictions.count
        assert_same_bits(plain, paged)
        del paged
    assert evictions > 50


def test_training_goes_on_when_paging_begins_in_the_middle():
    torch.manual_seed(0)
    model = mlp()
    twin = mlp()
    twin.load_state_dict(model.state_dict())
    inputs = torch.randn(64, 96)

    def step(net, optimizer):
        optimizer.zero_grad()
        torch.manual_seed(1)
        net(inputs).square().mean().backward()
        optimizer.step()

    plain = torch.optim.AdamW(twin.parameters())
    for _ in range(6):
        step(twin, plain)
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer)
    for _ in range(2):
        with torchpager.simulate("64 MiB", granularity="4 KiB"), torchpager.auto_offload():
            torchpager.adopt(model, optimizer)
            step(model, optimizer)
            testing.page_out_all()
            step(model, optimizer)
    step(model, optimizer)
    for expected, got in zip(twin.parameters(), model.parameters(), strict=True):
        assert torch.equal(expected, got)
    del model, optimizer, got, step


@pytest.mark.parametrize("strict", [False, True], ids=["mapped", "strict"])
def test_tensors_stay_readable_when_the_device_was_left(strict):
    with (
        torchpager.simulate("16 MiB", granularity="64 KiB", strict=strict),
        torchpager.budget("8 MiB"),
        torchpager.auto_offload(),
    ):
        kept = [torch.full((MIB,), float(i)) for i in range(6)]
    assert not _torch_cpu.installed()
    assert [t.sum().item() for t in kept] == [i * MIB for i in range(6)]
    assert kept[3].numpy()[7] == 3.0
    kept[0].add_(1)
    assert kept[0].sum().item() == MIB
    assert torch.ones(MIB).sum().item() == MIB
    kept.clear()


def test_device_is_closed_when_no_tensor_is_left():
    with torchpager.simulate("16 MiB"):
        torch.ones(MIB)
    assert not _core.is_open(_core.SIM_SLOT)


def test_same_options_may_be_entered_again_while_tensors_are_alive():
    with torchpager.simulate("16 MiB"):
        kept = torch.full((MIB,), 3.0)
    with torchpager.simulate("16 MiB"), torchpager.auto_offload():
        testing.evict(kept)
        assert kept.sum().item() == 3.0 * MIB
        del kept


def test_other_options_are_refused_while_tensors_are_alive():
    with torchpager.simulate("16 MiB"):
        kept = torch.ones(MIB)
    with pytest.raises(RuntimeError, match=r"4\.00 MiB of tensors.*are alive"):
        torchpager.simulate("32 MiB").start()
    assert not _torch_cpu.installed()
    assert kept.sum().item() == MIB
    del kept
    with torchpager.simulate("32 MiB"), torchpager.budget("100%") as budget:
        assert budget.device_bytes == 32 * MIB


def test_tensors_in_reference_cycles_do_not_block_other_options():
    with torchpager.simulate("16 MiB"):
        cycle = [torch.ones(MIB)]
        cycle.append(cycle)
    del cycle
    with torchpager.simulate("32 MiB"):
        pass


def test_tensor_can_be_evicted_long_after_paging_was_switched_on():
    """Nothing happened since, so the pager's thread slept."""
    with torchpager.simulate("64 MiB", granularity="4 KiB", strict=True):
        x = torch.arange(32 << 10)
        with torchpager.auto_offload():
            time.sleep(1.2)
            testing.evict(x)
            assert testing.state(x).where == "host"
        del x


def test_only_storages_of_large_min_count():
    with torchpager.simulate("16 MiB", granularity="64 KiB", large_min="128 KiB"):
        below, above = torch.ones(32 * 1024 - 1), torch.ones(32 * 1024)
        assert testing.state(below).where == "native"
        assert testing.state(above).where == "resident"
        del above


def test_large_min_is_the_granularity_by_default():
    with torchpager.simulate("16 MiB", granularity="64 KiB"):
        assert testing.state(torch.ones(16 * 1024 - 1)).where == "native"
        assert testing.state(torch.ones(16 * 1024)).where == "resident"


def test_device_is_full_when_its_memory_is_held_without_a_budget():
    with torchpager.simulate("16 MiB", granularity="64 KiB"):
        kept = torch.ones(3 * MIB)
        with pytest.raises(torch.OutOfMemoryError, match=r"^CUDA out of memory\."):
            torch.ones(2 * MIB)
        del kept


def test_operator_runs_when_its_operands_do_not_fit():
    with (
        torchpager.simulate("16 MiB", granularity="64 KiB"),
        torchpager.budget("2 MiB"),
        torchpager.auto_offload(),
    ):
        a, b = torch.full((MIB,), 2.0), torch.full((MIB,), 3.0)
        c = a * b
        assert c.sum().item() == 6.0 * MIB
        assert torchpager.stats().reserved.peak <= 16 * MIB
        assert torchpager.stats().host.current > 0
        assert torchpager.stats().born_in_host > 0
        del a, b, c


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_bytes": 0}, "device_bytes is 0"),
        ({"device_bytes": "-1 GiB"}, "device_bytes"),
        ({"device_bytes": "50%"}, "percentage"),
        ({"device_bytes": "1 MiB"}, "less than one granule"),
        ({"device_bytes": "1 GiB", "granularity": "3 MiB"}, "powers of two"),
        ({"device_bytes": "1 GiB", "granularity": 512}, "powers of two"),
        ({"device_bytes": 1 << 62, "granularity": 1 << 61}, r"powers of two .*1\.00 TiB"),
        ({"device_bytes": "1 GiB", "large_min": 0}, "large_min is 0"),
        ({"device_bytes": "1 GiB", "seed": -1}, "seed is -1"),
        ({"device_bytes": "1 GiB", "seed": 1 << 64}, "seed"),
    ],
)
def test_bad_option_raises_value_error(options, words):
    with pytest.raises(ValueError, match=words):
        torchpager.simulate(**options)


@pytest.mark.parametrize(
    "options",
    [
        {"device_bytes": 1.5},
        {"device_bytes": "1 GiB", "strict": 1},
        {"device_bytes": "1 GiB", "page_out_before_each_op": "yes"},
        {"device_bytes": "1 GiB", "seed": "7"},
    ],
)
def test_option_of_the_wrong_type_raises_type_error(options):
    with pytest.raises(TypeError, match=r"a float|a str|True and False"):
        torchpager.simulate(**options)


def test_options_are_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        torchpager.simulate("16 MiB")._options.seed = 3


@pytest.mark.parametrize("link", ["1 MB", "2047 KiB"])
def test_links_that_nobody_could_plan_for_are_refused(link):
    with pytest.raises(ValueError, match="a second and more"):
        torchpager.simulate("64 MiB", link=link)
