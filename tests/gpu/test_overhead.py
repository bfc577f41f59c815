"""A program that fits pays almost nothing: medians of 20 rounds of turns."""

import json
from pathlib import Path

import pytest
from conftest import Script


@pytest.mark.long
@pytest.mark.limit(240)
def test_overhead_without_pressure_is_within_bounds(
    python: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = tmp_path / "overhead.json"
    printed = python(
        "benchmarks/overhead.py", "--rounds", "20", "--json", str(answer), timeout_s=220
    )
    with capfd.disabled():
        print(f"\n{printed}")
    small, big = json.loads(answer.read_text())
    for workload in (small, big):
        assert workload["evictions"] == 0
        # Otherwise they would be the same program.
        assert workload["hook_calls"]["armed"] > workload["hook_calls"]["sampling"] > 0
        assert workload["hook_calls"]["native"] == workload["hook_calls"]["installed"] == 0
        assert workload["ratio"]["installed"] <= 1.01, workload["name"]
    assert big["ratio"]["sampling"] <= 1.02
    assert big["ratio"]["armed"] <= 1.02
    assert small["ratio"]["sampling"] <= 1.08
    # A callback that does nothing, but wants the operands, takes 1.16 there.
    assert small["ratio"]["armed"] <= 1.25
