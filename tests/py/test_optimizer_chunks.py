"""Optimizers, clipping and loss scaling in chunks: the same bits, and fewer uses of HOST."""

import gc
import importlib
import pkgutil
import warnings

import pytest
import torch
from torch import nn

import torchpager
from torchpager import optimizer_chunks

COUNT = 48
STEPS = 3
GRANULE = 64 << 10


@pytest.fixture(autouse=True)
def one_thread():
    """Small operators only wait for each other's threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Case:
    """An optimizer with its options, and how many bytes of states it has for one of weights."""

    def __init__(self, name, states, list_mode=True, matrices=False, **options):
        self.make = getattr(torch.optim, name, None)
        self.states = states
        self.list_mode = list_mode
        self.matrices = matrices
        self.options = options
        self.id = "-".join([name, *(f"{key}={value}" for key, value in options.items())])

    def optimizer(self, parameters):
        half = len(parameters) // 3
        groups = [{"params": parameters[:half]}, {"params": parameters[half:], "lr": 3e-3}]
        return self.make(groups, **{"lr": 1e-2, **self.options})


CASES = [
    Case("Adam", 2, foreach=True),
    Case("Adam", 3, foreach=True, amsgrad=True, weight_decay=0.1),
    Case("Adam", 2, fused=True, maximize=True),
    Case("Adam", 2, list_mode=False, foreach=False),
    Case("AdamW", 2, foreach=True),
    Case("AdamW", 2, fused=True),
    Case("AdamW", 3, fused=True, amsgrad=True),
    Case("AdamW", 2, list_mode=False, foreach=False),
    Case("SGD", 1, foreach=True, momentum=0.9, nesterov=True, weight_decay=0.1),
    Case("SGD", 1, fused=True, momentum=0.9),
    Case("SGD", 0, foreach=True),
    Case("SGD", 1, list_mode=False, foreach=False, momentum=0.9),
    Case("Adagrad", 1, foreach=True, lr_decay=0.1),
    Case("Adagrad", 1, fused=True),
    Case("RMSprop", 3, foreach=True, momentum=0.9, centered=True),
    Case("RMSprop", 1, foreach=True),
    Case("NAdam", 2, foreach=True, decoupled_weight_decay=True, weight_decay=0.1),
    Case("RAdam", 2, foreach=True),
    Case("Adadelta", 2, foreach=True),
    Case("Adamax", 2, foreach=True),
    Case("ASGD", 1, foreach=True),
    Case("Rprop", 2, foreach=True),
    Case("Adafactor", 0, foreach=True),
    Case("Adafactor", 0, list_mode=False, foreach=False),
    Case("Muon", 1, list_mode=False, matrices=True, ns_steps=1),
]
all_cases = pytest.mark.parametrize("case", CASES, ids=[case.id for case in CASES])


def make_parameters(case):
    """Parameters of 64 to 192 KiB; unless all are matrices, with vectors and a scalar."""
    generator = torch.Generator().manual_seed(5)
    shapes = [(128 << (i % 2), 128 + 64 * (i % 2)) for i in range(COUNT)]
    if not case.matrices:
        shapes[3], shapes[20], shapes[-1] = (), (40000,), (16384,)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def give_gradients(parameters, step, leave_out=()):
    generator = torch.Generator().manual_seed(100 + step)
    for index, parameter in enumerate(parameters):
        parameter.grad = None
        gradient = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
        if index not in leave_out:
            parameter.grad = gradient


def working_set(case):
    weights = sum(p.nbytes for p in make_parameters(case))
    return (2 + case.states) * weights


def plain(case, parameters):
    """Step after step."""
    optimizer = case.optimizer(parameters)
    for step in range(STEPS):
        give_gradients(parameters, step)
        optimizer.step()
    return optimizer, []


def paged(case, program=plain, share=0.4):
    """The same inside a share of weights, gradients and states; and the figures."""
    device = torchpager.simulate("256 MiB", granularity=GRANULE, large_min=GRANULE)
    with device, torchpager.auto_offload():
        with torchpager.budget(int(working_set(case) * share)):
            torchpager.reset_stats()
            parameters = make_parameters(case)
            optimizer, shown = program(case, parameters)
            figures = torchpager.stats()
        found = kept(parameters, optimizer, shown)
        del parameters, optimizer, shown
        gc.collect()
    return found, figures


def kept(parameters, optimizer, shown):
    """All that a program has to show, in memory that is not the simulated device's."""
    found = {"groups": [len(g["params"]) for g in optimizer.param_groups]}
    found["shown"] = [float(x) for x in shown]
    for index, parameter in enumerate(parameters):
        found[f"{index}"] = bits(parameter)
        if parameter.grad is not None:
            found[f"{index} gradient"] = bits(parameter.grad)
    for index, state in optimizer.state_dict()["state"].items():
        for key, value in state.items():
            found[f"{index} {key}"] = bits(value)
    return found


def bits(value):
    return value.detach().numpy().tobytes() if isinstance(value, torch.Tensor) else value


def native(case, program=plain):
    parameters = make_parameters(case)
    optimizer, shown = program(case, parameters)
    return kept(parameters, optimizer, shown)


def differences(one, other):
    assert list(one) == list(other)  # also the order of the states
    return [name for name in one if one[name] != other[name]]


def unchunked(monkeypatch):
    """Switch the chunks off."""
    monkeypatch.setattr(optimizer_chunks, "_chunk_bytes", lambda *_: None)


def compare(case, monkeypatch, program=plain):
    """Bits as without torchpager, chunks were presented, and HOST was used less."""
    if case.make is None:
        pytest.skip("not in this torch")
    expected = native(case, program)
    found, figures = paged(case, program)
    assert differences(expected, found) == []
    if not case.list_mode:
        return figures, None
    with monkeypatch.context() as patch:
        unchunked(patch)
        whole, figures_whole = paged(case, program)
    assert differences(expected, whole) == []
    assert figures_whole.optimizer_chunks == 0
    return figures, figures_whole


@all_cases
def test_optimizer_has_the_same_bits_at_40_percent(case, monkeypatch):
    chunked, whole = compare(case, monkeypatch)
    if not case.list_mode:
        assert chunked.optimizer_chunks == 0
        return
    assert chunked.optimizer_chunks >= 2 * 2 * STEPS  # groups, and more than one chunk of each
    assert chunked.host_operators.count == 0
    if case.id != "Adadelta-foreach=True":  # none of its operators has more than two lists
        assert whole.host_operators.count > 0


ADAM = Case("Adam", 2, foreach=True)
FUSED = Case("AdamW", 2, fused=True)
MOMENTUM = Case("SGD", 1, foreach=True, momentum=0.9, nesterov=True)
foreach_and_fused = pytest.mark.parametrize("case", [ADAM, FUSED], ids=["foreach", "fused"])


def assert_chunked(figures):
    chunked, whole = figures
    assert chunked.optimizer_chunks > 2 * STEPS
    assert chunked.host_operators.count < whole.host_operators.count


@foreach_and_fused
def test_closure_and_hooks_run_once_a_step_and_the_scheduler_counts_steps(case, monkeypatch):
    calls = []

    def program(case, parameters):
        optimizer = case.optimizer(parameters)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.5)
        before = [list(map(id, group["params"])) for group in optimizer.param_groups]

        def hook(name):
            def called(stepped, *_):
                calls.append(name)
                now = [list(map(id, group["params"])) for group in stepped.param_groups]
                assert now == before

            return called

        optimizer.register_step_pre_hook(hook("pre"))
        optimizer.register_step_post_hook(hook("post"))
        losses = []
        for step in range(STEPS):

            def closure(step=step):
                calls.append("closure")
                give_gradients(parameters, step)
                return torch.tensor(float(step))

            losses.append(optimizer.step(closure))
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                schedule.step()
        assert schedule.last_epoch == STEPS
        assert optimizer.param_groups[1]["lr"] == 3e-3 * 0.5**STEPS
        return optimizer, losses

    assert_chunked(compare(case, monkeypatch, program))
    assert calls == ["pre", "closure", "post"] * (3 * STEPS)


@foreach_and_fused
def test_scaler_skips_a_step_with_an_infinite_gradient(case, monkeypatch):
    def program(case, parameters):
        optimizer = case.optimizer(parameters)
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
        shown = []
        for step in range(4):
            scaler.scale(torch.ones(()))
            give_gradients(parameters, step)
            if step == 1:
                parameters[30].grad[5, 5] = float("inf")
            if step > 1:
                scaler.unscale_(optimizer)
                shown.append(nn.utils.clip_grad_norm_(parameters, 1.0))
            scaler.step(optimizer)
            scaler.update()
            shown.append(scaler.get_scale())
            assert not hasattr(optimizer, "grad_scale")
        assert shown[:2] == [8.0, 4.0]
        return optimizer, shown

    assert_chunked(compare(case, monkeypatch, program))


@pytest.mark.parametrize("norm", [2.0, 1.0, float("inf")])
def test_clipping_and_zeroing_have_the_same_bits(norm, monkeypatch):
    def program(case, parameters):
        optimizer = case.optimizer(parameters)
        shown = []
        for step in range(2):
            give_gradients(parameters, step)
            shown.append(nn.utils.clip_grad_norm_(parameters, 3.0, norm, foreach=True))
            shown.append(nn.utils.get_total_norm([p.grad for p in parameters], norm))
            nn.utils.clip_grads_with_norm_(parameters, 1.0, shown[-1])
            nn.utils.clip_grad_value_(parameters, 1e-3)
        before = torchpager.stats().optimizer_chunks
        optimizer.zero_grad(set_to_none=False)
        if torchpager.stats().optimizer_chunks > before:
            zeroed.append(True)
        assert not any(p.grad.any() for p in parameters)
        return optimizer, shown

    zeroed = []
    assert_chunked(compare(Case("SGD", -1, foreach=True), monkeypatch, program))
    assert zeroed == [True]


def test_gradients_accumulated_by_a_real_model_have_the_same_bits(monkeypatch):
    def program(_, __):
        torch.manual_seed(1)
        model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(24)))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
        losses = []
        for step in range(STEPS):
            optimizer.zero_grad()
            for part in range(2):
                torch.manual_seed(10 * step + part)
                loss = model(torch.randn(4, 128)).square().mean()
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
        with torch.no_grad():
            losses += [p.double().sum().item() for p in model.parameters()]
        return optimizer, losses

    assert compare(ADAM, monkeypatch, program)[0].optimizer_chunks > 0


def test_state_that_only_some_parameters_have_is_made_as_without_chunks(monkeypatch):
    def program(case, parameters):
        optimizer = case.optimizer(parameters)
        for step, without in enumerate([range(10, 30), (), range(5)]):
            give_gradients(parameters, step, without)
            optimizer.step()
            counts.append(torchpager.stats().optimizer_chunks)
        return optimizer, []

    counts = []
    compare(MOMENTUM, monkeypatch, program)
    chunks = counts[STEPS : 2 * STEPS]  # native, in chunks, whole
    # A list in which some buffers are missing takes another way through the kernel: whole.
    assert 0 < chunks[0] == chunks[1] < chunks[2]


def test_loaded_states_are_stepped_with_the_same_bits(monkeypatch):
    def program(case, parameters):
        optimizer, _ = plain(case, parameters)
        other = case.optimizer(parameters)
        other.load_state_dict(optimizer.state_dict())
        give_gradients(parameters, 9)
        other.step()
        return other, []

    assert_chunked(compare(FUSED, monkeypatch, program))


def under_pressure(case=ADAM, share=0.4):
    """Contexts in which the case does not fit."""
    device = torchpager.simulate("256 MiB", granularity=GRANULE, large_min=GRANULE)
    return device, torchpager.auto_offload(), torchpager.budget(int(working_set(case) * share))


@pytest.fixture
def tight():
    device, offload, budget = under_pressure()
    with device, offload, budget:
        torchpager.reset_stats()
        yield
        gc.collect()


@pytest.mark.usefixtures("tight")
def test_groups_are_as_before_when_a_chunk_raises(monkeypatch):
    parameters = make_parameters(ADAM)
    optimizer = ADAM.optimizer(parameters)
    give_gradients(parameters, 0)
    groups = optimizer.param_groups
    before = [(id(g), id(g["params"]), list(map(id, g["params"])), g["lr"]) for g in groups]
    stock, calls = torch._foreach_lerp_, []

    def fails_later(*args):
        calls.append(args)
        if len(calls) == 3:
            raise RuntimeError("in the third chunk")
        return stock(*args)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "_foreach_lerp_", fails_later)
        with pytest.raises(RuntimeError, match="third chunk"):
            optimizer.step()
    assert optimizer.param_groups is groups
    now = [(id(g), id(g["params"]), list(map(id, g["params"])), g["lr"]) for g in groups]
    assert now == before
    chunks = torchpager.stats().optimizer_chunks
    optimizer.step()  # chunks again, not left in progress
    assert torchpager.stats().optimizer_chunks > chunks + 3


def left_whole(optimizer, parameters):
    give_gradients(parameters, 0)
    optimizer.step()
    return torchpager.stats().optimizer_chunks == 0


@pytest.mark.usefixtures("tight")
def test_lists_that_are_not_alike_or_overlap_are_left_whole():
    def adam(parameters):
        return torch.optim.Adam(parameters, foreach=True)

    kept = make_parameters(ADAM)
    with torch.no_grad():
        odd = nn.Parameter(torch.randn(300, 200).t())  # its gradient lies otherwise
        tied = nn.Parameter(kept[0][:64])
    torchpager.reset_stats()
    for extra in (odd, tied, nn.Parameter(torch.empty(0)), Subclass(torch.ones(4, 4))):
        parameters = [*kept, extra]
        assert left_whole(adam(parameters), parameters), extra.shape
    # Adafactor's smallest number depends on the first dtype that it meets.
    mixed = [*kept, nn.Parameter(torch.ones(128, 128, dtype=torch.bfloat16))]
    assert left_whole(torch.optim.Adafactor(mixed, foreach=True), mixed)
    assert not left_whole(adam(mixed), mixed)


@pytest.mark.usefixtures("tight")
def test_list_operator_of_two_dtypes_is_left_whole():
    kept = [torch.ones(128, 128) for _ in range(300)]
    with optimizer_chunks._ListOperators():
        torch._foreach_mul_([*kept, torch.ones(9).bfloat16()], 2.0)
        assert torchpager.stats().optimizer_chunks == 0
        torch._foreach_mul_(kept, 2.0)
        assert torchpager.stats().optimizer_chunks > 3
    assert all((x == 4.0).all() for x in kept)


def test_no_chunk_of_tensors_and_scalars_holds_scalars_only():
    rows = [(torch.ones(()) if i in (0, 1, 5, 6, 11) else torch.ones(4),) for i in range(12)]
    spans = optimizer_chunks._split(rows, {torch.device("cpu"): 20}, 0)
    assert spans == [(0, 3), (3, 4), (4, 7), (7, 8), (8, 9), (9, 10), (10, 12)]


class Subclass(nn.Parameter):
    """Not one of the types whose operators are known."""


@pytest.mark.usefixtures("tight")
def test_optimizer_that_couples_parameters_or_is_unknown_is_left_whole():
    class Own(torch.optim.Optimizer):
        @torch.no_grad()
        def step(self):
            parameters = self.param_groups[0]["params"]
            torch._foreach_mul_(parameters, 0.5)
            torch._foreach_add_(parameters, [p.grad for p in parameters])

    parameters = make_parameters(ADAM)
    assert left_whole(Own(parameters, {"lr": 1.0}), parameters)
    give_gradients(parameters, 0)
    lbfgs = torch.optim.LBFGS(parameters, max_iter=1, history_size=1)
    lbfgs.step(lambda: torch.ones(()))
    assert torchpager.stats().optimizer_chunks == 0


@pytest.mark.usefixtures("tight")
def test_compiled_optimizer_is_left_whole():
    parameters = make_parameters(ADAM)
    optimizer = ADAM.optimizer(parameters)
    step = torch.compile(optimizer.step, backend="eager")
    give_gradients(parameters, 0)
    step()
    assert torchpager.stats().optimizer_chunks == 0
    optimizer.step()
    assert torchpager.stats().optimizer_chunks > 0
    torch._dynamo.reset()


def test_nothing_is_divided_when_everything_fits():
    device, offload, budget = under_pressure(share=2)
    with device, offload, budget:
        torchpager.reset_stats()
        plain(ADAM, make_parameters(ADAM))
        assert torchpager.stats().optimizer_chunks == 0
        gc.collect()


def test_chunk_holds_what_a_share_of_the_budget_allows(monkeypatch):
    sizes = []
    stock = optimizer_chunks._run

    def _fused_adam(*args, **kwargs):
        lists = [arg for arg in args if isinstance(arg, list)]
        sizes.append(sum(x.nbytes for each in lists for x in each))
        return kernel(*args, **kwargs)

    def watched(function, *args):
        nonlocal kernel
        kernel = function
        return stock(_fused_adam, *args)

    kernel = None
    monkeypatch.setattr(optimizer_chunks, "_run", watched)
    device, offload, budget = under_pressure(FUSED)
    with device, offload, budget:
        plain(FUSED, make_parameters(FUSED))
        gc.collect()
    largest_row = max(4 * p.nbytes for p in make_parameters(FUSED))
    assert max(sizes) <= max(working_set(FUSED) * 0.4 / 8, largest_row) + 64
    assert len(sizes) > 2 * 2 * STEPS


def replaced():
    owners = [torch.nn.utils, torch.nn.utils.clip_grad, torch.optim.Optimizer]
    owners += [torch.amp.GradScaler]
    owners += [importlib.import_module(f"torch.optim.{n}") for n in optimizer_chunks.KERNELS]
    return [dict(vars(owner)) for owner in owners]


def test_every_name_is_restored_when_the_last_context_is_left():
    with torchpager.simulate("64 MiB"):
        found = replaced()
        outer, inner = torchpager.auto_offload(), torchpager.auto_offload()
        with outer:
            in_force = replaced()
            assert in_force != found
            with inner:
                assert replaced() == in_force
            assert replaced() == in_force
        assert replaced() == found


def test_every_list_kernel_of_torch_is_known():
    found = {
        (module.name, name)
        for module in pkgutil.iter_modules(torch.optim.__path__)
        for name, value in vars(importlib.import_module(f"torch.optim.{module.name}")).items()
        if name.startswith(("_multi_tensor_", "_fused_"))
        and getattr(value, "__module__", None) == f"torch.optim.{module.name}"
    }
    assert found == {
        (module, name) for module, names in optimizer_chunks.KERNELS.items() for name in names
    }
    for name in optimizer_chunks.OPERATORS:
        assert callable(getattr(torch, name))
