"""The demo: it succeeds on the simulated device, and notices when it must not."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from torchpager import demo
from torchpager.demo_runs import Run

SMALL = ["--device", "sim", "--steps", "4", "--layers", "3", "--width", "128", "--batch", "2"]


def limited_run(**changes: Any) -> Run:
    """Return a run inside a budget of 100 bytes in which everything went well, but for
    changes."""
    result: dict[str, Any] = {
        "device_name": "cpu",
        "pager_imported": False,
        "losses": ["0x1.0p+0", "0x1.8p-1"],
        "digests": {"parameters": "a", "gradients": "b", "optimizer states": "c"},
        "evicted_blocks": {"parameters": 1, "gradients": 1, "activations": 1, "states": 1},
        "largest_held": 100,
        "largest_held_sampled": 98,
    }
    return Run("50%", 100, result | changes, 96, 1.0)


def failures(limited: Run) -> list[str]:
    """Return what the demo says against a run, compared with one where everything went well."""
    return demo.judge(limited_run(), limited_run(), limited).failures


@pytest.mark.smoke
def test_demo_on_the_simulated_device_is_bit_equal_and_draws(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([*SMALL, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "bit-equal: yes" in printed
    picture = tmp_path / "demo.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert picture.stat().st_size > 10_000


def test_demo_without_pressure_fails_because_nothing_was_evicted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([*SMALL, "--budget", "1 GiB", "--out", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "bit-equal: yes" in printed
    for kind in ("parameters", "gradients", "activations", "optimizer states"):
        assert f"failed: no block of the {kind} was evicted" in printed


@pytest.mark.parametrize("budget", ["0", "-1", "8 GB B", "101%", "many"])
def test_demo_refuses_a_bad_budget_at_once(
    budget: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert demo.main([*SMALL, f"--budget={budget}"]) == 2
    assert "budget" in capsys.readouterr().err


def test_judge_accepts_a_run_in_which_everything_holds() -> None:
    assert failures(limited_run()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"losses": ["0x1.0p+0", "0x1.8000000000001p-1"]}, "other bits than plain"),
        ({"largest_held": 101}, "1 bytes above the budget according to the counters"),
        ({"largest_held_sampled": 102}, "2 bytes above the budget according to the sampling"),
        ({"largest_held_sampled": 0}, "saw nothing held"),
        ({"evicted_blocks": {"gradients": 0}}, "no block of the gradients was evicted"),
    ],
)
def test_judge_objects(changes: dict[str, Any], said: str) -> None:
    found = failures(limited_run(**changes))
    assert len(found) == 1
    assert said in found[0]


def test_judge_objects_to_each_digest_that_differs() -> None:
    for kind in ("parameters", "gradients", "optimizer states"):
        digests = deepcopy(limited_run().result["digests"])
        digests[kind] = "other"
        (found,) = failures(limited_run(digests=digests))
        assert kind in found


def test_judge_objects_to_a_reference_that_imported_the_pager() -> None:
    plain = limited_run(pager_imported=True)
    assert len(demo.judge(plain, limited_run(), limited_run()).failures) == 1


def test_judge_objects_to_what_another_process_saw() -> None:
    run = limited_run()
    seen = Run(run.name, run.budget_bytes, run.result, 4196, run.seconds)
    (found,) = failures(seen)
    assert "4096 bytes above the budget according to another process" in found
