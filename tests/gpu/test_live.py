"""The live benchmark on the GPU: native, a budget and a peer, seen from outside, same bits."""

import json
from pathlib import Path

import pytest
from conftest import Script

MIB = 1 << 20
# What the CUDA context and the libraries' code take beside tensors.
CONTEXT_BYTES = 2048 * MIB


@pytest.mark.long
@pytest.mark.limit(280)
def test_live_rows_have_native_bits_and_keep_their_budget(
    python: Script, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "live.json"
    printed = python(
        "benchmarks/live.py", "--workload", "gpt", "--device", "cuda", "--json", str(path),
        "--only", "native,ours-67%,checkpoint", "--minutes", "4", timeout_s=270, code=None,
    )  # fmt: skip
    with capfd.disabled():
        print(f"\n{printed}")
    rows = {row["row"]: row for row in json.loads(path.read_text())}
    native, ours, peer = rows["native"], rows["ours-67%"], rows["checkpoint"]
    for row in rows.values():
        assert row["failed"] is None, row["row"]
        assert row["bit_equal"], row["row"]
        assert row["sampled_by"] in ("NVML", "cudaMemGetInfo")
    # With the context: so what is seen is more than what is allocated, but not much.
    assert native["allocated_peak_bytes"] < native["true_peak_bytes"]
    assert peer["true_peak_bytes"] < native["true_peak_bytes"]
    assert ours["held_peak_bytes"] <= ours["budget_bytes"]
    assert ours["true_peak_bytes"] <= ours["budget_bytes"] + CONTEXT_BYTES
    assert ours["per_step"]["evictions.bytes"] > 0
    assert 0 < ours["efficiency"] < 1.2
