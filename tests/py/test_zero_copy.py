"""When an operator runs over operands that stay in HOST: when they do not fit, and only then.

A matrix product, attention or a convolution reads its operands many times over, which is many
times slower over the link than one fill. An operator that streams through its operands reads
them once, and that is what lets one larger than the whole budget run at all.
"""

from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional

import torchpager
from torchpager import testing

MIB = 1 << 20
BUDGET = 8 * MIB
RE_READS = ("addmm", "bmm", "attention", "convolution", "convolution_backward")


@contextmanager
def paging(budget=BUDGET):
    with (
        torchpager.simulate("64 MiB", granularity="64 KiB"),
        torchpager.budget(budget),
        torchpager.auto_offload(),
    ):
        yield


def inputs_of(kind):
    """With the result and what the kernels need besides, less than the budget."""
    generator = torch.Generator().manual_seed(1)

    def made(*shape):
        return torch.randn(*shape, generator=generator)

    if kind == "addmm":
        return made(512, 768), made(512, 1024), made(1024, 768)
    if kind == "bmm":
        return made(8, 256, 256), made(8, 256, 256)
    if kind == "attention":
        return made(1, 8, 512, 64), made(1, 8, 512, 64), made(1, 8, 512, 64)
    return made(2, 32, 64, 64), made(64, 32, 3, 3)


def apply(kind, operands):
    if kind == "addmm":
        return torch.addmm(*operands)
    if kind == "bmm":
        return torch.bmm(*operands)
    if kind == "attention":
        return functional.scaled_dot_product_attention(*operands)
    if kind == "convolution":
        return functional.conv2d(*operands, padding=1)
    shape = (2, 64, 64, 64)
    image, weight = operands
    return torch.nn.grad.conv2d_weight(image, weight.shape, torch.ones(shape), padding=1)


def evict(tensors):
    for each in tensors:
        testing.evict(each)


@pytest.mark.parametrize("where", ["all in HOST", "beside what fills the budget"])
@pytest.mark.parametrize("kind", RE_READS)
def test_operator_that_reads_again_never_runs_over_host_when_it_fits(kind, where):
    expected = apply(kind, inputs_of(kind))
    with paging():
        operands = inputs_of(kind)
        rest = [torch.ones(MIB // 4) for _ in range(8)]
        for _ in range(3):
            if where == "all in HOST":
                testing.page_out_all()
            else:
                torch._foreach_add_(rest[:4], 1)
                torch._foreach_add_(rest[4:], 1)
                evict(operands)
            torchpager.reset_stats()
            found = apply(kind, operands)
            stats = torchpager.stats()
            assert stats.misses.count > 0
            assert stats.host_operators.count == 0
            assert stats.born_in_host == 0
            assert torch.equal(found, expected)
            del found
        del operands, rest


def test_whole_step_that_fits_operator_by_operator_never_runs_over_host():
    """A model twice the budget, forward, backward and update."""
    with paging():
        torch.manual_seed(0)
        model = torch.nn.Sequential(*(torch.nn.Linear(640, 640) for _ in range(6)))
        batch = torch.randn(640, 640)
        for _ in range(2):
            torchpager.reset_stats()
            model(batch).square().mean().backward()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.sub_(parameter.grad, alpha=1e-3)
            model.zero_grad()
            stats = torchpager.stats()
            assert stats.evictions.count > 0
            assert stats.host_operators.count == 0
            assert stats.born_in_host == 0
        del model, batch, parameter


STREAMS = {
    "elementwise": lambda a, b: torch.add(a, b),
    "in place": lambda a, b: a.mul_(b).clone(),
    "reduction": lambda a, b: torch.stack([a.sum(), b.amax()]),
    "list update": lambda a, b: torch._foreach_add_([a, b], 1.0)[0] + b,
}


@pytest.mark.parametrize("kind", list(STREAMS))
def test_streaming_operator_larger_than_the_budget_runs_over_host(kind):
    def pair():
        count = 6 * MIB // 4
        return torch.arange(count, dtype=torch.float32), torch.full((count,), 2.0)

    expected = STREAMS[kind](*pair())
    with paging():
        a, b = pair()
        torchpager.reset_stats()
        found = STREAMS[kind](a, b)
        stats = torchpager.stats()
        over = kind != "reduction"  # each of its operators has one operand, which fits
        assert (stats.host_operators.count + stats.born_in_host > 0) == over
        assert stats.reserved.peak <= BUDGET
        assert torch.equal(found, expected)
        del a, b, found


def test_optimizer_update_larger_than_the_budget_runs_over_host():
    """One parameter with its gradient and moments; nothing that could be divided."""

    def update():
        parameter = torch.nn.Parameter(torch.linspace(0, 1, 3 * MIB // 4))
        optimizer = torch.optim.AdamW([parameter], fused=True)
        for step in range(3):
            parameter.grad = torch.full_like(parameter, 0.1 * step)
            optimizer.step()
        state = optimizer.state[parameter]
        return [each.clone() for each in (parameter.detach(), state["exp_avg"])]

    expected = update()
    with paging():
        torchpager.reset_stats()
        found = update()
        assert torchpager.stats().host_operators.count > 0
        assert all(map(torch.equal, found, expected))
        del found


def test_reduction_of_more_than_the_budget_runs_over_host():
    count = 12 * MIB // 4
    expected = torch.full((count,), 3.0).sum()
    with paging():
        a = torch.full((count,), 3.0)
        torchpager.reset_stats()
        assert torch.equal(a.sum(), expected)
        assert torchpager.stats().host_operators.count > 0
        assert testing.state(a).where in ("mixed", "host")
        del a
