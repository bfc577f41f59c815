"""Compiled programs, Triton kernels and CUDA graphs on a GPU: same bits."""

import gc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torchpager
from torchpager import _core, testing

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

MIB = 1 << 20
COUNT = 4 * MIB  # floats: 16 MiB


@triton.jit
def scale_kernel(source, target, count, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # noqa: N803
    """target = source * factor."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(source + at, mask=at < count)
    tl.store(target + at, value * factor, mask=at < count)


def scale(source: torch.Tensor, factor: float, *, blind: bool = False) -> torch.Tensor:
    """Return source * factor; blind: launched behind torchpager's back."""
    target = torch.empty_like(source)
    count = source.numel()
    grid = (triton.cdiv(count, 1024),)
    if blind:
        run = type(scale_kernel).run
        run = getattr(run, "__wrapped__", run)
        run(scale_kernel, source, target, count, factor, BLOCK=1024, grid=grid, warmup=False)
    else:
        scale_kernel[grid](source, target, count, factor, BLOCK=1024)
    return target


def figures(name: str) -> Any:
    """Return one figure of the core."""
    return _core.stats(0)[name]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    """Forget compiled code and its CUDA graphs, and look for regions left open."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    gc.collect()
    if _core.is_open(0):
        assert figures("regions_open") == 0
        assert figures("regions_closed") == 0


# -- Triton --------------------------------------------------------------------------------


def test_triton_kernel_gives_right_values_wherever_its_operands_are() -> None:
    with torchpager.auto_offload():
        source = torch.arange(COUNT, device="cuda", dtype=torch.float32)
        expected = source * 3
        for blind in (False, True):
            testing.evict(source)
            before = figures("region_count")
            result = scale(source, 3.0, blind=blind)
            # Nobody brought it in for a launch that was not announced.
            assert testing.state(source).where == ("host" if blind else "resident")
            assert (figures("region_count") > before) != blind
            assert torch.equal(result, expected)


def test_jiterator_kernel_gives_right_values_wherever_its_operands_are() -> None:
    code = "template <typename T> T weighted(T x, T y, T factor) { return factor * x + y; }"
    weighted = torch.cuda.jiterator._create_jit_fn(code, factor=2.0)
    with torchpager.auto_offload():
        x = torch.arange(COUNT, device="cuda", dtype=torch.float32)
        y = torch.ones_like(x)
        expected = 3 * x + y
        testing.evict(x)
        before = figures("misses")[0]
        result = weighted(x, y, factor=3.0)
        assert figures("misses")[0] > before
        assert testing.state(x).where == "resident"
        assert torch.equal(result, expected)


def test_triton_kernels_under_pressure_give_the_same_bits() -> None:
    def program() -> list[torch.Tensor]:
        tensors = [torch.full((COUNT,), float(i), device="cuda") for i in range(24)]
        for turn in range(3):
            tensors = [scale(t, 1.5 + turn) for t in tensors]
        return [t.double().sum().cpu() for t in tensors]

    plain = program()
    torch.cuda.empty_cache()
    with torchpager.budget("256 MiB"), torchpager.auto_offload():
        paged = program()
        assert figures("evictions")[0] > 0
    assert plain == paged


class Scaled(torch.autograd.Function):
    """A custom function whose kernels nobody announces."""

    @staticmethod
    def forward(_ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert not _core.is_open(0) or figures("regions_closed") == figures("armed")
        return scale(x, 1.25, blind=True)

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return scale(grad.contiguous(), 1.25, blind=True)


def test_blind_kernels_of_a_custom_function_give_the_same_bits() -> None:
    def program() -> torch.Tensor:
        x = torch.linspace(0, 1, COUNT, device="cuda", requires_grad=True)
        y = x
        total = torch.zeros((), device="cuda", dtype=torch.float64)
        for _ in range(16):
            y = Scaled.apply(y) * 0.75
            total = total + (y * y).double().mean()
        total.backward()
        assert x.grad is not None
        return x.grad.cpu()

    plain = program()
    torch.cuda.empty_cache()
    with torchpager.budget("256 MiB"), torchpager.auto_offload():
        paged = program()
        assert figures("evictions")[0] > 0
    assert torch.equal(plain, paged)


# -- torch.compile -------------------------------------------------------------------------


class Net(nn.Module):
    """A few layers, large enough that each weight is a block of its own."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1024) for _ in range(layers))
        self.norm = nn.LayerNorm(1024)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Run them."""
        for layer in self.layers:
            x = x + nn.functional.gelu(layer(self.norm(x)))
        return x


def train(
    compiled_of: Callable[[nn.Module], Callable[..., Any]],
    batches: tuple[int, ...],
    *,
    layers: int = 6,
    between: Callable[[], object] = lambda: None,
) -> list[torch.Tensor]:
    """Train a compiled model; return losses and parameters on the CPU."""
    torch.manual_seed(3)
    model = Net(layers).cuda()
    compiled = compiled_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    results = []
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        x = torch.randn(batch, 1024, device="cuda")
        loss = (compiled(x) - x.roll(1, 1)).square().mean()
        between()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.detach().cpu())
    with torch.no_grad():
        results.append(compiled(torch.ones(batches[0], 1024, device="cuda")).cpu())
    return results + [p.detach().cpu() for p in model.parameters()]


def peak_bytes(program: Callable[[], object]) -> int:
    """Return the most bytes that the program's tensors take inside torchpager."""
    with torchpager.auto_offload():
        torchpager.reset_stats("cuda")
        program()
        peak = torchpager.stats("cuda").allocated.peak
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    return peak


def assert_same_at_half(program: Callable[[], list[torch.Tensor]]) -> None:
    """Compare the bits at half the peak with those without torchpager."""
    plain = program()
    torch.compiler.reset()
    peak = peak_bytes(program)
    with torchpager.budget(max(peak // 2, 128 * MIB)), torchpager.auto_offload():
        torchpager.reset_stats("cuda")
        paged = program()
        assert figures("evictions")[0] > 0
        assert figures("regions_open") == 0
    assert len(plain) == len(paged)
    for expected, got in zip(plain, paged, strict=True):
        assert torch.equal(expected, got)


@pytest.mark.limit(120)
@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_compiled_training_gives_the_same_bits_at_half_its_peak(dynamic: bool) -> None:
    batches = (8192, 8192, 6144, 10240) if dynamic else (8192,) * 3
    assert_same_at_half(lambda: train(lambda m: torch.compile(m, dynamic=dynamic), batches))


@pytest.mark.limit(120)
def test_saved_tensors_of_a_compiled_forward_pass_may_be_evicted() -> None:
    def program(between: Callable[[], object] = lambda: None) -> list[torch.Tensor]:
        return train(lambda m: torch.compile(m, dynamic=False), (4096,) * 2, between=between)

    plain = program()
    torch.compiler.reset()
    with torchpager.auto_offload():
        paged = program(testing.page_out_all)
        assert figures("evictions")[0] > 0
    for expected, got in zip(plain, paged, strict=True):
        assert torch.equal(expected, got)


@pytest.mark.long
@pytest.mark.limit(180)
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune-no-cudagraphs"])
def test_other_modes_give_the_same_bits(mode: str) -> None:
    def program() -> list[torch.Tensor]:
        return train(
            lambda m: torch.compile(m, mode=mode, dynamic=False), (2048,) * 5, layers=2
        )

    plain = program()
    torch.compiler.reset()
    gc.collect()
    torch.cuda.empty_cache()
    with torchpager.budget("512 MiB"), torchpager.auto_offload():
        # Something else that has to go out and come back.
        ballast = [torch.full((COUNT,), float(i), device="cuda") for i in range(24)]
        paged = program()
        for i, tensor in enumerate(ballast):
            assert bool((tensor == float(i)).all())
        assert figures("evictions")[0] > 0
        del ballast, tensor
        torch.compiler.reset()
        gc.collect()
    for expected, got in zip(plain, paged, strict=True):
        assert torch.equal(expected, got)


# -- CUDA graphs ---------------------------------------------------------------------------


class Captured:
    """A graph that computes out = x @ w + 1, and what it should give."""

    def __init__(self) -> None:
        self.x = torch.rand(1024, 1024, device="cuda")
        self.w = torch.rand(1024, 1024, device="cuda")
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self.x @ self.w + 1
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.out = self.x @ self.w + 1

    def check(self, seed: int) -> None:
        """Replay with new contents."""
        generator = torch.Generator("cuda").manual_seed(seed)
        self.x.copy_(torch.rand(1024, 1024, device="cuda", generator=generator))
        self.graph.replay()
        assert torch.equal(self.out, self.x @ self.w + 1)


def churn() -> None:
    """Push everything movable out of a budget of 256 MiB."""
    tensors = [torch.full((COUNT,), float(i), device="cuda") for i in range(24)]
    for i, tensor in enumerate(tensors):
        assert bool((tensor == float(i)).all())


def test_captured_tensors_stay_put_and_replays_are_right() -> None:
    with torchpager.budget("256 MiB"), torchpager.auto_offload():
        churn()  # the hook is armed from here on
        captured = Captured()
        for seed in range(3):
            churn()
            testing.page_out_all()
            for tensor in (captured.x, captured.w):
                state = testing.state(tensor)
                assert state.immovable
                assert state.where == "resident"
            captured.check(seed)
        assert figures("evictions")[0] > 0
    captured.check(9)  # the context was left; the graph still replays
    with torchpager.budget("256 MiB"), torchpager.auto_offload():
        churn()
        captured.check(10)
    del captured


def test_graph_captured_outside_replays_inside_and_outside() -> None:
    captured = Captured()
    captured.check(1)
    with torchpager.budget("256 MiB"), torchpager.auto_offload():
        churn()
        captured.check(2)
        testing.page_out_all()
        captured.check(3)
    captured.check(4)
