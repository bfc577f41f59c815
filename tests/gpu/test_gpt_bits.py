"""The 16-layer GPT inside 75%, 50% and 40% of its native peak: same bits, never above
budget."""

import json
from pathlib import Path

import pytest
from conftest import Script


@pytest.mark.long
@pytest.mark.limit(360)
def test_gpt_inside_shares_of_its_peak_has_native_bits(
    python: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    answer = tmp_path / "gpt.json"
    printed = python(
        "benchmarks/gpt.py", "--shares", "75,50,40", "--json", str(answer),
        timeout_s=350, code=None,
    )  # fmt: skip
    with capfd.disabled():
        print(f"\n{printed}")
    found = json.loads(answer.read_text())
    native, *shares = found["runs"]
    assert found["peak_bytes"] == native["peak_bytes"]
    assert [run["name"] for run in shares] == ["budget 75%", "budget 50%", "budget 40%"]
    for run in shares:
        assert run["differences"] == [], run["name"]
        assert run["exceeded"] == [], run["name"]
        assert run["largest_held"] <= run["budget_bytes"] < found["peak_bytes"]
        # The budget was a real one: something had to move.
        assert run["counters"]["evictions"]["count"] > 0, run["name"]
    # At 24 GiB (about two thirds of the peak) a blocking prototype took 0.80 s a step.
    assert shares[0]["step_s"] < 0.80
