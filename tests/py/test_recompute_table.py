"""What torchpager.recompute says of each operator: what was given up, what was not and why."""

import pytest
import torch
from recompute_programs import forced, operators
from test_recompute_rules import behind_rsqrt, kernel

import torchpager
from torchpager import _torch_cpu, recompute

MATRIX = 64 * 64 * 4


def row(name):
    """Return the row of an operator; zeros if it has none."""
    for each in recompute.by_operator():
        if each.name == name:
            return each
    return recompute.OperatorRecomputation(name, 0, 0, 0, 0, 0, {}, 0, "", 0)


def kept(name, why):
    """Return how often results of an operator were kept for a reason."""
    return row(name).kept.get(why, 0)


def test_drops_and_reruns_are_counted_by_operator():
    before = row("aten::sigmoid")
    with forced() as drops:
        trials = recompute.counts().trials
        x = torch.rand(64, 64, requires_grad=True)
        loss = torch.sigmoid(x).sum()
        operators()
        assert drops.count == 1
        loss.backward()
    after = row("aten::sigmoid")
    assert after.drops - before.drops == 1
    assert after.dropped_bytes - before.dropped_bytes == MATRIX
    assert after.reruns - before.reruns == 1  # however often it was tried before
    assert recompute.counts().trials - trials <= 1
    assert f"given up {after.drops} times" in str(after)


def test_inputs_that_died_are_rerun_for_others():
    before = row("aten::sin").reruns
    with forced() as drops:
        x, weight = torch.rand(64, 64), torch.rand(64, 64, requires_grad=True)
        loss = (torch.exp(torch.sin(x)) * weight).sum()  # nobody keeps the sine
        operators()
        assert drops.count == 1
        loss.backward()
    assert row("aten::sin").reruns - before == 1


def test_parks_are_counted_by_operator():
    before = row("aten::tanh")
    with forced(park=True):
        x = torch.rand(64, 64, requires_grad=True)
        loss = torch.tanh(x).sum()
        operators()
        loss.backward()
    after = row("aten::tanh")
    assert after.parks - before.parks == 1
    assert after.parked_bytes - before.parked_bytes == MATRIX
    assert after.reruns == before.reruns


def held():
    weight = torch.rand(64, 64, requires_grad=True)
    result = torch.tan(weight)
    loss = result.sum()
    operators()
    return loss, result


def written():
    x, weight = torch.rand(64, 64), torch.rand(64, 64, requires_grad=True)
    result = torch.tan(x)
    product = result * weight
    x.zero_()
    del result
    operators()
    return product.sum(), None


def seen():
    weight = torch.rand(64, 64, requires_grad=True)
    result = torch.tan(weight)
    loss = result.sum()
    _torch_cpu.forget_tensor(result)  # as before torch.utils.swap_tensors
    del result
    operators()
    return loss, None


def other_settings():
    weight = torch.rand(64, 64, requires_grad=True)
    result = torch.tan(weight)
    loss = result.sum()
    default = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium" if default != "medium" else "highest")
    try:
        del result
        operators()
    finally:
        torch.set_float32_matmul_precision(default)
    return loss, None


@pytest.mark.parametrize(
    ("why", "make"),
    [("held", held), ("inputs", written), ("seen", seen), ("settings", other_settings)],
)
def test_what_is_kept_is_counted_with_the_reason(why, make):
    before = row("aten::tan")
    with forced():
        loss, _result = make()
        loss.backward()
    after = row("aten::tan")
    assert after.kept[why] > before.kept.get(why, 0)
    assert after.kept_bytes > before.kept_bytes
    assert after.drops == before.drops
    assert any(f"kept {after.kept[why]} times" in each for each in after.reasons())


@pytest.mark.filterwarnings("ignore:.*rsqrt|.*kernel:UserWarning")
def test_operators_that_fail_their_trial_are_named():
    before = kept("aten::rsqrt", "trial")
    with kernel(lambda x, number: torch.exp(x) * number), forced() as drops:
        _weight, loss, _x = behind_rsqrt()
        loss.backward()
        assert drops.count == 0
        assert kept("aten::rsqrt", "trial") > before
        named = [each for each in torchpager.status().not_recomputed if "aten::rsqrt" in each]
        assert "other bits" in named[0]


@pytest.mark.parametrize(
    ("name", "make", "why"),
    [
        ("aten::rand_like", torch.rand_like, "draws random numbers"),
        ("aten::cumsum", lambda x: torch.cumsum(x, 0), "may make other bits each time"),
        ("aten::empty_like", torch.empty_like, "makes no contents"),
    ],
)
def test_operators_without_recipes_say_why(name, make, why):
    before = row(name).without_recipe_bytes
    x = torch.rand(64, 64)
    with forced():
        result = make(x)
        with torch.no_grad():
            made = row(name).without_recipe_bytes
            make(x)  # which autograd does not keep
            assert row(name).without_recipe_bytes == made
    assert result.numel() == x.numel()
    assert made - before == MATRIX
    assert why in row(name).why_no_recipe
    assert why in str(row(name))


def test_backward_passes_are_not_listed():
    x = torch.rand(64, 64, requires_grad=True)
    with forced():
        torch.sigmoid(x).sum().backward()
    assert not any("backward" in each.name for each in recompute.by_operator())


def test_status_says_whether_recomputing_is_on():
    with torchpager.simulate("64 MiB"):
        with torchpager.auto_offload():
            assert not torchpager.status().recompute
            assert "recomputing" not in str(torchpager.status())
        with torchpager.auto_offload(recompute=True):
            status = torchpager.status()
            assert status.recompute
            assert len(status.not_recomputed) <= 8
            assert "recomputing: on" in str(status)
        assert not torchpager.status().recompute


def test_largest_come_first():
    rows = recompute.by_operator()
    moved = [
        each.dropped_bytes + each.parked_bytes + each.kept_bytes + each.without_recipe_bytes
        for each in rows
    ]
    assert moved == sorted(moved, reverse=True)
