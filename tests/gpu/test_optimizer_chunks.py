"""Stock optimizers at 40% of weights, gradients and states: native bits, in chunks."""

import gc
import statistics
import time
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import nn

import torchpager
from torchpager import optimizer_chunks

MIB = 1 << 20
STEPS = 3
ROWS = 32
Found = dict[str, torch.Tensor]
Program = Callable[[str, dict[str, Any], list[nn.Parameter]], tuple[Any, list[Any]]]

# Name, options, bytes of states for one of weights, whether it has a list form.
CASES: list[tuple[str, dict[str, Any], int, bool]] = [
    ("Adam", {"foreach": True}, 2, True),
    ("Adam", {"foreach": True, "amsgrad": True, "weight_decay": 0.1}, 3, True),
    ("Adam", {"foreach": True, "capturable": True}, 2, True),
    ("Adam", {"fused": True}, 2, True),
    ("Adam", {"fused": True, "capturable": True, "maximize": True}, 2, True),
    ("Adam", {"foreach": False}, 2, False),
    ("AdamW", {}, 2, True),
    ("AdamW", {"foreach": True, "maximize": True}, 2, True),
    ("AdamW", {"fused": True}, 2, True),
    ("AdamW", {"fused": True, "amsgrad": True}, 3, True),
    ("AdamW", {"foreach": False}, 2, False),
    ("SGD", {"foreach": True}, 0, True),
    ("SGD", {"foreach": True, "momentum": 0.9, "nesterov": True, "weight_decay": 0.1}, 1, True),
    ("SGD", {"fused": True, "momentum": 0.9}, 1, True),
    ("SGD", {"foreach": False, "momentum": 0.9}, 1, False),
    ("Adagrad", {"foreach": True, "lr_decay": 0.1}, 1, True),
    ("Adagrad", {"fused": True}, 1, True),
    ("Adagrad", {"foreach": False}, 1, False),
    ("RMSprop", {"foreach": True, "momentum": 0.9, "centered": True}, 3, True),
    ("RMSprop", {"foreach": True, "capturable": True}, 1, True),
    ("RMSprop", {"foreach": False}, 1, False),
    ("NAdam", {"foreach": True, "weight_decay": 0.1}, 2, True),
    ("NAdam", {"foreach": True, "capturable": True}, 2, True),
    ("NAdam", {"foreach": False}, 2, False),
    ("RAdam", {"foreach": True}, 2, True),
    ("RAdam", {"foreach": True, "capturable": True}, 2, True),
    ("RAdam", {"foreach": False}, 2, False),
    ("Adadelta", {"foreach": True}, 2, True),
    ("Adamax", {"foreach": True}, 2, True),
    ("ASGD", {"foreach": True}, 1, True),
    ("ASGD", {"foreach": True, "capturable": True}, 1, True),
    ("Rprop", {"foreach": True}, 2, True),
    ("Adafactor", {"foreach": True}, 0, True),
    ("Adafactor", {"foreach": False}, 0, False),
    ("Muon", {}, 1, False),
]
# A case takes 6 to 9 s, most of it on the CPU: make test-gpu runs them in several processes,
# and where it cannot, one of each optimizer.
SEVERAL_PROCESSES = find_spec("xdist") is not None
LIST_ADAM = [("AdamW", {"foreach": True}, 2, True), ("AdamW", {"fused": True}, 2, True)]


def case_id(value: Any) -> str | None:
    """Return the options as text, for pytest."""
    if isinstance(value, dict):
        return "-".join(f"{key}={each}" for key, each in value.items()) or "default"
    return None


def cases() -> list[Any]:
    """Return the cases, as parameters of a test."""
    seen: set[str] = set()
    found = []
    for case in CASES:
        name = case[0]
        usual = SEVERAL_PROCESSES or name not in seen
        found.append(pytest.param(*case, marks=() if usual else pytest.mark.long))
        seen.add(name)
    return found


def make_parameters(name: str, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return parameters of 2.5 to 8 MiB; unless all are matrices, with vectors and a scalar."""
    generator = torch.Generator("cuda").manual_seed(5)
    shapes: list[tuple[int, ...]] = [(1024, 640 << (i % 2)) for i in range(ROWS)]
    if name != "Muon":
        shapes[3], shapes[9], shapes[20] = (), (2 * MIB,), (1000,)
    return [
        nn.Parameter(torch.randn(shape, generator=generator, device="cuda", dtype=dtype))
        for shape in shapes
    ]


def give_gradients(parameters: list[nn.Parameter], step: int) -> None:
    """Give every parameter the gradient that belongs to the step."""
    generator = torch.Generator("cuda").manual_seed(100 + step)
    for p in parameters:
        p.grad = None
        p.grad = torch.randn(p.shape, generator=generator, device="cuda", dtype=p.dtype)


def make_optimizer(
    name: str, options: dict[str, Any], parameters: list[nn.Parameter]
) -> torch.optim.Optimizer:
    """Return an optimizer of two groups."""
    groups = [{"params": parameters[:10]}, {"params": parameters[10:], "lr": 3e-3}]
    made: torch.optim.Optimizer = getattr(torch.optim, name)(groups, lr=1e-2, **options)
    return made


def plain(
    name: str, options: dict[str, Any], parameters: list[nn.Parameter]
) -> tuple[Any, list[Any]]:
    """Step after step."""
    optimizer = make_optimizer(name, options, parameters)
    for step in range(STEPS):
        give_gradients(parameters, step)
        optimizer.step()
    return optimizer, []


def scaled(
    name: str, options: dict[str, Any], parameters: list[nn.Parameter]
) -> tuple[Any, list[Any]]:
    """Loss scaling with a step to skip, clipping, accumulation, and zeroed gradients."""
    optimizer = make_optimizer(name, options, parameters)
    scaler = torch.amp.GradScaler("cuda", init_scale=8.0, growth_interval=2)
    shown: list[Any] = []
    for step in range(4):
        scaler.scale(torch.ones((), device="cuda"))
        give_gradients(parameters, step)
        for p in parameters:
            assert p.grad is not None
            p.grad.add_(p.detach(), alpha=0.5)
        if step == 1:
            assert parameters[15].grad is not None
            parameters[15].grad[5, 5] = float("inf")
        if step > 1:
            scaler.unscale_(optimizer)
            for norm in (2.0, 1.0, float("inf")):
                shown.append(nn.utils.clip_grad_norm_(parameters, 100.0, norm))
            nn.utils.clip_grad_value_(parameters, 0.01)
        scaler.step(optimizer)
        scaler.update()
        shown.append(scaler.get_scale())
    optimizer.zero_grad(set_to_none=False)
    return optimizer, shown


def scheduled(
    name: str, options: dict[str, Any], parameters: list[nn.Parameter]
) -> tuple[Any, list[Any]]:
    """A scheduler, and a closure that counts its calls."""
    optimizer = make_optimizer(name, options, parameters)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
    shown: list[Any] = []
    for step in range(STEPS):

        def closure(step: int = step) -> torch.Tensor:
            shown.append(step)
            give_gradients(parameters, step)
            return torch.ones((), device="cuda")

        optimizer.step(closure)
        scheduler.step()
    shown.append(optimizer.param_groups[1]["lr"])
    return optimizer, shown


def copied(parameters: list[nn.Parameter], optimizer: Any, shown: list[Any]) -> Found:
    """Return all that a program has to show, in host memory."""
    found = {f"shown {i}": torch.as_tensor(value).cpu() for i, value in enumerate(shown)}
    for index, parameter in enumerate(parameters):
        found[f"{index}"] = parameter.detach().cpu()
        if parameter.grad is not None:
            found[f"{index} gradient"] = parameter.grad.cpu()
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            found[f"{index} {key}"] = torch.as_tensor(value).cpu()
    return found


def native(
    name: str, options: dict[str, Any], program: Program, dtype: torch.dtype
) -> tuple[Found, int]:
    """Return what the program shows without torchpager, and the bytes of its weights."""
    parameters = make_parameters(name, dtype)
    optimizer, shown = program(name, options, parameters)
    return copied(parameters, optimizer, shown), sum(p.nbytes for p in parameters)


def paged(
    name: str, options: dict[str, Any], program: Program, dtype: torch.dtype, limit: int
) -> tuple[Found, Any]:
    """Return the same inside a budget, and the figures."""
    with torchpager.budget(limit), torchpager.auto_offload():
        torchpager.reset_stats()
        parameters = make_parameters(name, dtype)
        optimizer, shown = program(name, options, parameters)
        figures = torchpager.stats()
        found = copied(parameters, optimizer, shown)
    return found, figures


def different(one: Found, other: Found) -> list[str]:
    """Return the names of what is not the same bit for bit."""
    assert list(one) == list(other)
    return [
        name
        for name, tensor in one.items()
        if not torch.equal(
            tensor.contiguous().view(-1).view(torch.uint8),
            other[name].contiguous().view(-1).view(torch.uint8),
        )
    ]


def compare(
    name: str,
    options: dict[str, Any],
    states: int,
    program: Program = plain,
    dtype: torch.dtype = torch.float32,
) -> Any:
    """Compare at 40% of weights, gradients and states; return the figures."""
    if not hasattr(torch.optim, name):
        pytest.skip("not in this torch")
    try:
        expected, weights = native(name, options, program, dtype)
    except RuntimeError as error:
        if "fused" not in str(error):
            raise
        pytest.skip("no fused form on this device")
    gc.collect()
    torch.cuda.empty_cache()
    limit = int((2 + states) * weights * 0.4)
    found, figures = paged(name, options, program, dtype, limit)
    assert different(expected, found) == []
    assert figures.held.peak <= limit
    assert figures.evictions.count > 0
    return figures


@pytest.mark.parametrize(("name", "options", "states", "listed"), cases(), ids=case_id)
def test_optimizer_has_native_bits_at_40_percent(
    name: str, options: dict[str, Any], states: int, listed: bool
) -> None:
    figures = compare(name, options, states)
    if listed:
        assert figures.optimizer_chunks >= 2 * 2 * STEPS
    else:
        assert figures.optimizer_chunks == 0


@pytest.mark.parametrize(("name", "options", "states", "listed"), LIST_ADAM, ids=case_id)
@pytest.mark.parametrize("program", [scaled, scheduled])
def test_training_loop_around_it_has_native_bits(
    name: str,
    options: dict[str, Any],
    states: int,
    listed: bool,
    program: Program,
) -> None:
    assert listed
    assert compare(name, options, states, program).optimizer_chunks > 2 * STEPS


@pytest.mark.parametrize(("name", "options", "states", "listed"), LIST_ADAM, ids=case_id)
def test_bfloat16_has_native_bits(
    name: str, options: dict[str, Any], states: int, listed: bool
) -> None:
    assert listed
    figures = compare(name, options, states, dtype=torch.bfloat16)
    assert figures.optimizer_chunks > 2 * STEPS


def test_lists_are_left_whole_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [(torch.ones(1024, device="cuda"),) for _ in range(4)]
    monkeypatch.setattr(optimizer_chunks, "_chunk_bytes", lambda *_: 4096)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        spans = optimizer_chunks._spans(rows, optimizer_chunks._FUSED)
        rows[0][0].add_(1)
    assert spans == []
    assert len(optimizer_chunks._spans(rows, optimizer_chunks._FUSED)) == 4


def step_seconds(options: dict[str, Any], limit: int | None) -> tuple[float, Any]:
    """Return the median time of an AdamW step of 200 M parameters, and the figures."""

    def measure() -> float:
        parameters = [nn.Parameter(torch.ones(2048, 2048, device="cuda")) for _ in range(48)]
        optimizer = torch.optim.AdamW(parameters, **options)
        for p in parameters:
            p.grad = torch.full_like(p, 0.01)
        times = []
        for _ in range(7):
            torch.cuda.synchronize()
            began = time.perf_counter()
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - began)
        return statistics.median(times[2:])

    if limit is None:
        return measure(), None
    with torchpager.budget(limit), torchpager.auto_offload():
        torchpager.reset_stats()
        seconds = measure()
        return seconds, torchpager.stats()


@pytest.mark.limit(60)
@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}], ids=case_id)
def test_step_time_of_200_million_parameters(
    options: dict[str, Any],
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    limit = int(48 * 2048 * 2048 * 16 * 0.4)
    stock, _ = step_seconds(options, None)
    gc.collect()
    torch.cuda.empty_cache()
    chunked, figures = step_seconds(options, limit)
    gc.collect()
    torch.cuda.empty_cache()
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_chunks, "_chunk_bytes", lambda *_: None)
        whole, figures_whole = step_seconds(options, limit)
    with capfd.disabled():
        print(
            f"\nAdamW {options}, 201 M parameters, budget {limit // MIB} MiB: native "
            f"{stock * 1e3:.1f} ms a step, in chunks {chunked * 1e3:.1f} "
            f"({figures.optimizer_chunks} chunks in 7 steps, in {figures.fills.bytes // MIB} "
            f"MiB, out {figures.write_backs.bytes // MIB}), whole {whole * 1e3:.1f} "
            f"({figures_whole.host_operators.count} operands over HOST, in "
            f"{figures_whole.fills.bytes // MIB} MiB, out "
            f"{figures_whole.write_backs.bytes // MIB})"
        )
    assert figures.optimizer_chunks > 7
    assert figures_whole.optimizer_chunks == 0
    assert figures.host_operators.count < figures_whole.host_operators.count
