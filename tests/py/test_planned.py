"""Training by plans on the simulated device: the same bits, whatever the program does next."""

import gc
import time
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import torchpager
from torchpager import _core

KIB, MIB = 1 << 10, 1 << 20
WIDTH, LAYERS, ROWS = 96, 6, 64


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """A sum depends on how it is split among threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def net(seed: int) -> nn.Module:
    """Return a model of 220 KiB."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(WIDTH, WIDTH), nn.GELU()]
    return nn.Sequential(*layers)


def rows(seed: int, count: int = ROWS) -> torch.Tensor:
    """Return inputs."""
    return torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(seed))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> float:
    """Train once, and give the planner time for its work."""
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    time.sleep(0.005)
    return loss.item()


def steadily() -> list[float]:
    """The same step, over and over."""
    model = net(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    return [train_step(model, optimizer, rows(step)) for step in range(12)]


def with_evaluation() -> list[float]:
    """An evaluation after every third step."""
    model = net(2)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for step in range(15):
        losses.append(train_step(model, optimizer, rows(step)))
        if step % 3 == 2:
            with torch.no_grad():
                losses.append(model(rows(100 + step, 32)).square().mean().item())
    return losses


def with_lengths() -> list[float]:
    """Batches of three sizes, in no order."""
    model = net(3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    lengths = [64, 48, 64, 32, 32, 64, 48, 64, 32, 48, 48, 64, 32, 64, 48, 32]
    return [train_step(model, optimizer, rows(i, n)) for i, n in enumerate(lengths)]


def with_two_models() -> list[float]:
    """Two models in turn."""
    models = [net(4), net(5)]
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-2, momentum=0.9) for m in models]
    return [train_step(models[i % 2], optimizers[i % 2], rows(i)) for i in range(16)]


def peak_of(program: Callable[[], list[float]]) -> int:
    with torchpager.simulate("64 MiB", granularity=4 * KIB), torchpager.budget("100%"):
        torchpager.reset_stats()
        program()
        gc.collect()
        return torchpager.stats().active.peak


@pytest.mark.parametrize("program", [steadily, with_evaluation, with_lengths, with_two_models])
def test_program_has_plain_bits_by_plans(program: Callable[[], list[float]]) -> None:
    plain = program()
    peak = peak_of(program)
    with (
        torchpager.simulate("64 MiB", granularity=4 * KIB),
        torchpager.budget(peak // 2),
        torchpager.auto_offload(),
    ):
        torchpager.reset_stats()
        found = program()
        stats = torchpager.stats()
        _core.check(_core.SIM_SLOT)
        gc.collect()
    assert found == plain
    assert stats.held.peak <= peak // 2
    assert stats.evictions.count > 0
    assert stats.plans.count > 0
    assert stats.planned_ops > 100


def test_debugging_can_do_without_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    peak = peak_of(steadily)
    monkeypatch.setenv("TORCHPAGER_DEBUG", "ondemand")
    with (
        torchpager.simulate("64 MiB", granularity=4 * KIB),
        torchpager.budget(peak // 2),
        torchpager.auto_offload(),
    ):
        torchpager.reset_stats()
        found = steadily()
        stats = torchpager.stats()
        gc.collect()
    assert found == steadily()
    assert stats.evictions.count > 0
    assert stats.plans.count == stats.planned_ops == 0
