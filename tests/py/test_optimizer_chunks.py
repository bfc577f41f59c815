"""Optimizers, clipping and loss scaling in chunks: the same bits, and fewer uses of HOST."""

import copy
import gc
import importlib
import warnings

import pytest
import torch
from torch import nn

import torchpager
from torchpager import optimizer_chunks

COUNT = 48
STEPS = 3
GRANULE = 64 << 10


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
    Case("Muon", 1, list_mode=False, matrices=True),
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
        gradient = torch.randn(parameter.shape, generator=generator)
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


def outcome(case, program=plain):
    """Run a program; return copies of all it has to show."""
    parameters = make_parameters(case)
    optimizer, shown = program(case, parameters)
    found = {"shown": shown, "groups": [len(g["params"]) for g in optimizer.param_groups]}
    with torch.no_grad():
        for index, parameter in enumerate(parameters):
            found[f"{index}"] = parameter.clone()
            if parameter.grad is not None:
                found[f"{index} gradient"] = parameter.grad.clone()
        for index, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                found[f"{index} {key}"] = copy.deepcopy(value)
    return found


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
    """What outcome() returns, in memory that does not belong to the simulated device."""
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
    assert whole.host_operators.count > 0
    assert chunked.host_operators.count < whole.host_operators.count / 2
