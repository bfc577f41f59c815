"""Recorded programs through the pager on the simulated device, in virtual time."""

import json
import random
from array import array
from itertools import pairwise

import pytest
from test_plan import BENCHMARKS, MIB, op, random_step, replay

import torchpager
from torchpager import _core
from torchpager.trace import Step, StepBlock, Trace


def load(name: str) -> Trace:
    return torchpager.load_trace(BENCHMARKS / f"traces/{name}.trace.gz")


@pytest.mark.parametrize("seed", range(10))
def test_program_that_fits_takes_the_time_of_its_operators(seed):
    step = random_step(random.Random(seed))
    outcome, wrong = replay.through_pager((step,), 3 * step.peak_bytes + 256 * MIB)
    assert wrong == 0
    assert outcome.step_ms == pytest.approx(step.device_ns / 1e6)
    assert (outcome.in_bytes, outcome.out_bytes) == (0, 0)


@pytest.mark.parametrize("seed", range(40))
def test_random_program_is_right_inside_the_budget_and_repeats(seed):
    source = random.Random(seed)
    step = random_step(source)
    budget = int(step.peak_bytes * source.uniform(0.3, 1.0)) + 16 * MIB
    outcome, wrong = replay.through_pager((step,), budget)
    assert wrong == 0
    assert outcome.peak_bytes <= budget
    assert outcome.step_ms * 1e6 >= step.device_ns * 0.999
    assert replay.through_pager((step,), budget) == (outcome, 0)
    for planning in (False, True):
        outcome, wrong = replay.through_pager((step,), budget, payload=True, planning=planning)
        assert wrong == 0
        assert outcome.peak_bytes <= budget
    planned = [replay.through_pager((step,), budget, planning=True) for _ in range(2)]
    assert planned[0] == planned[1]


@pytest.mark.parametrize(
    ("name", "share"), [("resnet50", 0.5), ("gpt-ckpt", 0.35), ("lstm", 0.25)]
)
def test_recorded_trace_pages_on_demand_no_faster_than_its_bound(name, share):
    bounds = json.loads((BENCHMARKS / "traces/bounds.json").read_text())
    roof = bounds[name]["paging_bound_ms"][str(share)]
    trace = load(name)
    budget = int(trace.peak_bytes * share)
    outcome, wrong = replay.through_pager(replay.steps_of(trace), budget)
    assert wrong == 0
    assert outcome.peak_bytes <= budget
    assert outcome.misses > 0
    assert outcome.host_waits > 0
    assert outcome.step_ms >= (roof or 0)
    # Bytes cannot move faster than the link.
    assert outcome.step_ms * 55e6 >= max(outcome.in_bytes, outcome.out_bytes) * 0.999


def test_steps_of_different_kinds_keep_what_lasts():
    weights = (StepBlock(64 * MIB, None, None),) * 4
    one = Step(
        (*(op(3, (at,)) for at in range(4)), op(3, (0,), (4,))),
        (*weights, StepBlock(64 * MIB, 4, 4)),
    )
    other = Step(
        (op(3, (), (4,)), op(3, (0, 4), (1,)), op(3, (2, 3))),
        (*weights, StepBlock(96 * MIB, 0, 1)),
    )
    assert replay.lasting_count((one, other)) == 4
    for payload in (False, True):
        outcome, wrong = replay.through_pager((one, other), 224 * MIB, payload=payload)
        assert wrong == 0
        assert outcome.in_bytes > 0


def test_operator_larger_than_the_budget_runs_over_the_link():
    step = Step((op(1, (0,)),), (StepBlock(550 * MIB, None, None),))
    outcome, wrong = replay.through_pager((step,), 64 * MIB)
    assert wrong == 0
    assert outcome.step_ms >= 550 * MIB * 0.8 / 55e6


def test_plan_carried_out_by_the_pager_is_faster_than_paging_on_demand():
    bounds = json.loads((BENCHMARKS / "traces/bounds.json").read_text())
    row = replay.row_of(load("gpt-ckpt"), 0.67, bounds, 0.0)
    assert row["demand_ms"] > 1.2 * row["pager_ms"]
    assert row["pager_ms"] > row["native_ms"]
    for figure in ("demand_ms", "pager_ms", "step_ms"):
        assert f"{row[figure]:.1f}" in replay.line_of(row)


def step_times_ms(name, share, *, planning):
    trace = load(name)
    budget = int(trace.peak_bytes * share)
    rows, wrong = replay.pager_rows((trace.step(),), budget, rounds=8, planning=planning)
    assert wrong == 0
    ends = [0, *(row["clock_ns"] for row in rows)]
    return [(end - begin) / 1e6 for begin, end in pairwise(ends)]


@pytest.mark.parametrize("share", [0.8, 0.5])
@pytest.mark.parametrize("name", ["gpt-b16-fused", "gpt-single", "resnet50", "vit"])
def test_plans_are_steady_by_the_fourth_step_and_never_slower_than_none(name, share):
    demand = step_times_ms(name, share, planning=False)
    planned = step_times_ms(name, share, planning=True)
    for with_plans, without in zip(planned, demand, strict=True):
        assert with_plans <= 1.01 * without
    assert planned[3] <= 1.08 * planned[-1]
    assert planned[-1] < 0.95 * demand[-1]


def test_check_names_paging_on_demand_that_got_worse(tmp_path):
    old = {"trace": "a", "budget": 0.5, "step_ms": 100.0, "demand_ms": 200.0}
    path = tmp_path / "old.json"
    path.write_text(json.dumps([old]))
    assert replay.regressions([old], path) == []
    (worse,) = replay.regressions([{**old, "demand_ms": 205.0}], path)
    assert "a at 50%, on demand" in worse


def test_contents_of_a_recorded_trace_are_right():
    assert replay.wrong_contents(["gpt-single", "resnet50"]) == []


def core_replay(steps, *, order=(0,), budget=64 * MIB, granularity=2 * MIB):
    return _core.replay(
        steps=steps,
        order=array("I", order).tobytes(),
        lasting_count=0,
        budget_bytes=budget,
        granularity_bytes=granularity,
        extent_max_bytes=64 * MIB,
        link_bytes_per_s=55 * 10**9,
        link_both_bytes_per_s=101 * 10**9,
        map_device_ns_per_mib=0,
        map_host_ns_per_mib=0,
        run_ahead_ops=0,
        payload=False,
        planning=True,
    )


def test_replay_refuses_what_makes_no_sense():
    step = Step((op(1, (0,)),), (StepBlock(4 * MIB, None, None),))
    good = replay.core_step(step, 1)
    assert core_replay([good])[1] == 0
    with pytest.raises(ValueError, match="there is no step 1"):
        core_replay([good], order=(0, 1))
    with pytest.raises(TypeError):
        core_replay([good[:-1]])
    with pytest.raises(ValueError, match="a name and a phase"):
        core_replay([(*good[:-2], [], good[-1])])
    with pytest.raises(ValueError, match="granularity"):
        core_replay([good], granularity=0)
    leads_nowhere = (*good[:3], array("I", (7,)).tobytes(), *good[4:])
    with pytest.raises(_core.CoreError):
        core_replay([leads_nowhere])


def test_budget_below_what_cannot_move_is_out_of_memory():
    blocks = (StepBlock(MIB, None, None),) * 64
    step = Step((op(1, tuple(range(64))),), blocks)
    with pytest.raises(_core.CoreError, match="cannot move"):
        core_replay([replay.core_step(step, 1)])
