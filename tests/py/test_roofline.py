"""The roofline: a bound that no schedule beats, and close to the one by linear programming."""

import json
from pathlib import Path

import pytest

import torchpager
from torchpager.__main__ import main
from torchpager.roofline import Link, Roofline
from torchpager.trace import Step, StepBlock, StepOperator

TRACES = Path(__file__).resolve().parents[2] / "benchmarks/traces"
BOUNDS = json.loads((TRACES / "bounds.json").read_text())
GB = 10**9
MS = 10**6
LINK = Link(alone=10e9, both=16e9)  # 1 GB takes 100 ms


def op(ms: int, reads: tuple[int, ...] = (), writes: tuple[int, ...] = ()) -> StepOperator:
    return StepOperator("op", "", ms * MS, reads, writes)


def roof_ms(step: Step, budget: int) -> float | None:
    return torchpager.roofline(step, budget, link=LINK).roof_ms


def test_no_pressure_is_native_time():
    step = Step((op(3, (0,)), op(4, (1,))), (StepBlock(GB, None, None),) * 2)
    assert roof_ms(step, 2 * GB) == 7


def test_cycle_over_clean_weights_brings_in_what_does_not_fit():
    weights = (StepBlock(GB, None, None),) * 4
    step = Step(tuple(op(1, (each,)) for each in range(4)), weights)
    # Each time round, at least one GB that is not there has to come in.
    assert roof_ms(step, 3 * GB) == pytest.approx(100, abs=2)
    assert roof_ms(step, 2 * GB) == pytest.approx(200, abs=2)


def test_activations_go_out_before_the_peak_and_come_back_after_it():
    blocks = tuple(StepBlock(GB, at, 7 - at) for at in range(4))
    forward = tuple(op(10, (), (at,)) for at in range(4))
    backward = tuple(op(20, (3 - at,)) for at in range(4))
    step = Step(forward + backward, blocks)
    assert roof_ms(step, 4 * GB) == 120
    # One GB out, behind its writer, and one in: both while other operators run.
    assert roof_ms(step, 3 * GB) == pytest.approx(10 + 100 + 20 + 100 + 20, abs=20)
    assert roof_ms(step, 2 * GB) == pytest.approx(400, abs=50)


def test_states_written_in_each_step_cross_the_link_both_ways():
    states = (StepBlock(GB, None, None),) * 4
    step = Step(tuple(op(1, (each,), (each,)) for each in range(4)), states)
    # 2 GB in, 2 GB out, together at 16 GB/s.
    assert roof_ms(step, 2 * GB) == pytest.approx(4 * GB / 16e9 * 1e3, abs=2)


def test_operands_that_do_not_fit_have_no_roof():
    step = Step((op(1, (0, 1)),), (StepBlock(GB, None, None),) * 2)
    bound = torchpager.roofline(step, GB, link=LINK)
    assert bound.roof_ms is None
    assert bound.efficiency(5.0) is None
    assert torchpager.roofline(step, 2 * GB, link=LINK).roof_ms == 1


def test_small_blocks_stay():
    small = (StepBlock(1 << 20, None, None),) * 8
    step = Step((op(1, (0,)), op(1, (1,))), small)
    assert roof_ms(step, 8 << 20) == 2
    assert roof_ms(step, 7 << 20) is None


def test_budget_is_a_size_or_a_share_of_the_peak():
    step = Step((op(1, (0,)), op(1, (1,))), (StepBlock(GB, None, None),) * 2)
    assert torchpager.roofline(step, "50%").budget_bytes == GB
    assert torchpager.roofline(step, "1 GB").budget_bytes == GB
    with pytest.raises(ValueError, match="budget"):
        torchpager.roofline(step, "much")


def test_efficiency_is_the_bound_over_a_measured_time():
    assert Roofline(1, 2, 5.0, 8.0).efficiency(10.0) == 0.8


@pytest.mark.parametrize("key", BOUNDS)
def test_recorded_trace_is_close_to_its_bound_by_linear_programming(key):
    trace = torchpager.load_trace(TRACES / f"{key.removesuffix('+chunk')}.trace.gz")
    known = BOUNDS[key]
    last = 0.0
    for share, bound_ms in known["paging_bound_ms"].items():
        roof = torchpager.roofline(trace, int(known["peak_bytes"] * float(share))).roof_ms
        if bound_ms is None:
            assert roof is None
            continue
        assert roof is not None
        # The other bound looks at fewer moments and divides operators' operands there, so
        # this one is sometimes above it.
        assert 0.945 < roof / bound_ms < 1.02
        assert roof >= max(last, known["native_ms"] - 0.002)
        last = roof


def test_command_prints_a_row_for_each_budget(capsys):
    trace = str(TRACES / "lstm.trace.gz")
    assert (
        main(["roofline", trace, "--budget", "80%", "--budget", "2 GiB", "--budget", "30%"])
        == 0
    )
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "lstm: 27.5 ms a step, peak 3.03 GiB"
    assert "80%" in lines[2]
    assert lines[3].split()[:3] == ["2.00", "GiB", "66%"]
    assert lines[4].endswith("does not fit")


def test_command_says_what_is_wrong(capsys, tmp_path):
    assert main(["roofline", str(tmp_path / "none.trace")]) == 2
    assert "none.trace" in capsys.readouterr().err
    assert main(["roofline", str(TRACES / "lstm.trace.gz"), "--budget", "much"]) == 2
    assert "budget" in capsys.readouterr().err


def test_command_draws_a_plot(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "roof.png"
    assert main(["roofline", str(TRACES / "lstm.trace.gz"), "--plot", str(target)]) == 0
    assert target.read_bytes().startswith(b"\x89PNG")
    assert str(target) in capsys.readouterr().out


def test_command_without_matplotlib_names_the_extra(capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    assert main(["roofline", "x.trace", "--plot", "y.png"]) == 2
    assert "torchpager[plot]" in capsys.readouterr().err
