"""The live benchmark: small programs on the simulated device, rows, bits, the plot."""

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from torchpager.watched import RunError, run_watched

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

live, live_peers, live_run, live_workloads, plot_live = map(
    import_module, ("live", "live_peers", "live_run", "live_workloads", "plot_live")
)
KIB, MIB = 1 << 10, 1 << 20


def bench(path: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Run the command on the simulated device; return its rows by name."""
    code = live.main(["--device", "sim", "--json", str(path), *arguments])
    assert code == 0
    return {row["row"]: row for row in json.loads(path.read_text())}


def check_ours(row: dict[str, Any], native: dict[str, Any]) -> None:
    """Check a row inside a budget that is a real one."""
    assert row["failed"] is None
    assert row["bit_equal"]
    assert row["differences"] == []
    assert set(row["bits"]) <= set(native["bits"])
    assert 0 < row["true_peak_bytes"] <= row["budget_bytes"]
    assert row["sampled_by"] == "memfd"
    assert 0 < row["held_peak_bytes"] <= row["budget_bytes"]
    assert row["per_step"]["fills.bytes"] > 0
    assert row["ratio"] == pytest.approx(row["step_s"] / native["step_s"])
    assert len(row["step_seconds"]) == row["warm_steps"] + row["timed_steps"]


# -- whole runs ----------------------------------------------------------------------------


def test_gpt_inside_half_its_peak_has_native_bits_and_is_not_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "live.json"
    rows = bench(path, "--workload", "gpt", "--only", "native,ours-50%")
    # Shares are of the peak, and here only a run without a limit has one.
    assert list(rows) == ["native", "ours", "ours-50%"]
    native, unlimited, half = rows.values()
    assert native["true_peak_bytes"] is None
    check_ours(half, native)
    assert half["budget_bytes"] <= unlimited["live_peak_bytes"] // 2
    assert half["true_peak_bytes"] < unlimited["true_peak_bytes"]
    assert half["per_step"]["write_backs.bytes"] > 0
    assert 0 < half["efficiency"] < 2
    for name in ("parameters", "gradients", "optimizer states", "outcomes"):
        assert len({json.dumps(row["bits"]["18"][name]) for row in rows.values()}) == 1
    assert set(native["bits"]) == {"5", "18"}
    for name in ("date", "machine", "driver", "torch", "sources", "workload"):
        assert half[name]
    assert "ours-50%" in capsys.readouterr().out

    def execute(*_: object) -> None:
        raise AssertionError("a known row was run again")

    monkeypatch.setattr(live.Session, "execute", execute)
    assert bench(path, "--workload", "gpt", "--only", "native,ours-50%") == rows


def test_generation_inside_a_budget_has_native_tokens(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "live.json"
    rows = bench(
        path, "--workload", "llama-generate", "--only", "native,ours-2.5MiB", "--budget",
        "2.5 MiB",
    )  # fmt: skip
    assert list(rows) == ["native", "ours-2.5MiB"]
    check_ours(rows["ours-2.5MiB"], rows["native"])
    tokens = rows["native"]["bits"]["32"]["outcomes"]
    assert len(tokens) == 32
    assert len(set(tokens)) > 1


# -- rows without runs ---------------------------------------------------------------------


def session() -> live.Session:
    """Return a session on the simulated device."""
    return live.Session(
        workload="gpt",
        settings=live.ON_CPU,
        machine=live.Machine("a machine", "-", "2.0"),
        sources="abc",
        commit=None,
        source=None,
        row_seconds=10.0,
    )


def answers(monkeypatch: pytest.MonkeyPatch, **results: dict[str, Any]) -> list[str]:
    """Give runs results instead of running them; returns the names of what is run."""
    run: list[str] = []

    def execute(self: live.Session, row: live.Row, budget_bytes: int) -> dict[str, Any]:
        run.append(row.name)
        usual, few = self.steps
        steps = few if row.slow else usual
        kinds = {"outcomes": ["1"], "parameters": "a"}
        result = {
            "step_seconds": [9.0] * steps.warm + [1.0] * steps.timed,
            "bits": dict.fromkeys(("5", "18") if row.name == "native" else ("18",), kinds),
            "live_peak_bytes": 10 * MIB,
        } | results.get(row.name.replace("-", "_").replace("%", ""), {})
        seen = {"true_peak_bytes": 5, "sampled_by": "memfd", "process_s": 1.0}
        return self.row(row, steps, budget_bytes, result) | seen

    monkeypatch.setattr(live.Session, "execute", execute)
    return run


def test_rows_are_budgets_of_the_native_peak_and_failures_are_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "live.json"
    run = answers(
        monkeypatch,
        ours_80={"step_seconds": [9.0] * 8 + [2.0] * 10},
        ours_35={"failed": "out of memory: so and so"},
    )
    made = live.Bench(session(), path, time.monotonic() + 100)
    rows = live.rows_of("gpt", "cpu")[:6]
    assert made.run(rows, None, again=False)
    assert run == ["native", "ours", "ours-80%", "ours-67%", "ours-50%", "ours-35%"]
    found = {row["row"]: row for row in live.load(path)}
    assert found["ours-80%"]["budget_bytes"] == 8 * MIB
    # Steps that warm up do not count.
    assert found["ours-80%"]["ratio"] == 2.0
    assert found["ours-35%"]["failed"].startswith("out of memory")
    assert found["ours-35%"]["step_s"] is None
    text = live.table(list(found.values()))
    assert "ours-35%" in text
    assert "out of memory: so and so" in text
    # What failed is tried once more, and then only when it is asked for.
    run.clear()
    live.Bench(session(), path, time.monotonic() + 100).run(rows, None, again=False)
    assert run == ["ours-35%"]
    run.clear()
    live.Bench(session(), path, time.monotonic() + 100).run(rows, None, again=False)
    assert run == []
    live.Bench(session(), path, time.monotonic() + 100).run(rows, "ours-3*", again=True)
    assert run == ["ours-35%"]
    # Other sources are another table.
    other = session()
    other.sources = "abd"
    live.Bench(other, path, time.monotonic() + 100).run(rows, "ours-50%", again=False)
    assert run == ["ours-35%", "native", "ours", "ours-50%"]


def test_no_run_is_begun_when_the_time_is_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = answers(monkeypatch)
    made = live.Bench(session(), tmp_path / "live.json", time.monotonic() + 100)
    rows = live.rows_of("gpt", "cpu")[:3]
    assert made.run(rows, "native,ours", again=False)
    late = live.Bench(session(), tmp_path / "live.json", time.monotonic() + 1)
    assert late.run(rows, None, again=False)
    assert late.left == ["ours-80%"]
    assert run == ["native", "ours"]


def test_other_bits_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers(
        monkeypatch,
        ours_50={"bits": {"18": {"outcomes": ["1"], "parameters": "b"}}},
        checkpoint={"pager_imported": True},
    )
    path = tmp_path / "live.json"
    arguments = ["--device", "sim", "--json", str(path), "--workload", "gpt"]
    assert live.main([*arguments, "--only", "native,ours-50%,checkpoint"]) == 1
    rows = {row["row"]: row for row in json.loads(path.read_text())}
    assert rows["ours-50%"]["differences"] == ["parameters"]
    assert not rows["ours-50%"]["bit_equal"]
    assert rows["checkpoint"]["failed"] is not None


def test_a_compiled_program_inside_a_budget_is_compared_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    its_own = {"bits": {"18": {"outcomes": ["2"], "parameters": "b"}}}
    answers(monkeypatch, **{"compile_0.2": its_own})
    path = tmp_path / "live.json"
    arguments = ["--device", "sim", "--json", str(path), "--workload", "gpt"]
    row = "ours-compile-0.2-45%"
    # What it must be like has not run.
    assert live.main([*arguments, "--only", f"native,{row}"]) == 0
    assert f"left for the next run, which goes on here: {row}" in capsys.readouterr().out
    answers(monkeypatch, **{"compile_0.2": its_own, "ours_compile_0.2_45": its_own})
    assert live.main([*arguments, "--only", f"native,compile-0.2,{row}"]) == 0
    assert "as compile-0.2" in capsys.readouterr().out
    answers(monkeypatch)  # native's bits are not its own
    assert live.main([*arguments, "--again", "--only", row]) == 1
    assert f"{row}: other bits than compile-0.2" in capsys.readouterr().err


def test_a_run_that_hangs_is_ended(tmp_path: Path) -> None:
    program = tmp_path / "hang.py"
    program.write_text("import time\ntime.sleep(60)\n")
    begin = time.monotonic()
    with pytest.raises(RunError, match="did not end within 1 s"):
        run_watched(
            "hanging",
            [sys.executable, str(program)],
            {},
            device="cpu",
            sampler_of=lambda _pid, _ready: None,
            timeout_s=1.0,
        )
    assert time.monotonic() - begin < 30


def test_a_row_that_takes_too_long_says_where_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(live, "STACKS_S", 3.0)  # of 10
    monkeypatch.setitem(live.STEPS, False, (live.Steps(10**6, 1), live.Steps(1, 1)))
    found = session().execute(live.Row("native"), 0)
    assert found["failed"].startswith("the run 'native' did not end within 10 s: File ")
    stacks = capsys.readouterr().err
    assert "most recent call first" in stacks
    assert "live_run.py" in stacks


def test_sources_are_named_by_their_contents(tmp_path: Path) -> None:
    for name in ("csrc/a.c", "python/torchpager/b.py", "benchmarks/c.py"):
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        path.write_text("1")
    first = live.sources(tmp_path)
    for name in ("benchmarks/results/live.json", "python/torchpager/_build.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("2")
    assert live.sources(tmp_path) == first
    (tmp_path / "csrc/a.c").write_text("2")
    second = live.sources(tmp_path)
    (tmp_path / "csrc/a.c").rename(tmp_path / "csrc/d.c")
    assert len({first, second, live.sources(tmp_path)}) == 3


def test_reasons_are_said_in_a_line() -> None:
    with pytest.raises(live_peers.NeedsGpuError) as needs:
        live_peers.make_peer("fsdp2+checkpoint", "cpu")
    assert live_run.reason(needs.value) == "NeedsGpuError: needs a GPU"
    absent = ModuleNotFoundError("No module named 'torchao'", name="torchao")
    assert live_run.reason(absent) == "torchao is not installed"
    error = torch.OutOfMemoryError("CUDA out of memory.\nTried")
    assert live_run.reason(error) == "out of memory: CUDA out of memory."


# -- peers and bits ------------------------------------------------------------------------


def steps_with(peer: str) -> tuple[list[str], dict[str, str]]:
    """Return what three steps of the small GPT give."""
    workload = live_workloads.WORKLOADS["gpt"]
    torch.manual_seed(1)
    program = workload.make(workload.small, "cpu", live_peers.make_peer(peer, "cpu"))
    outcomes = [program.step(number) for number in range(3)]
    fingerprint = live_workloads.Fingerprint(8 * KIB)
    return outcomes, {name: fingerprint.of(its) for name, its in program.compared().items()}


def test_peers_change_the_program_and_not_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    calls: list[str] = []
    real = live_peers.checkpoint
    monkeypatch.setattr(
        live_peers,
        "checkpoint",
        lambda *its, **options: calls.append("block") or real(*its, **options),
    )
    try:
        native = steps_with("")
        assert calls == []
        for peer, count in (("checkpoint", 12), ("checkpoint-75%", 9), ("selective", 12)):
            calls.clear()
            assert steps_with(peer) == native, peer
            assert len(calls) == count  # of four blocks, in three steps
        assert steps_with("save_on_cpu") == native
    finally:
        torch.set_num_threads(threads)


def test_fingerprint_shows_every_difference() -> None:
    fingerprint = live_workloads.Fingerprint(64)
    x = torch.arange(101, dtype=torch.int16)  # 202 bytes: four pieces, the last with a rest
    base = fingerprint.of([x])
    assert fingerprint.of([x.clone()]) == base
    assert fingerprint.of([torch.stack([x, x], 1)[:, 0]]) == base  # not contiguous
    assert fingerprint.of([torch.cat([x[:1], x])[1:]]) == base  # not aligned
    seen = {base}
    for at in (0, 3, 31, 32, 96, 100):
        other = x.clone()
        other[at] ^= 1 << 14
        seen.add(fingerprint.of([other]))
    swapped = x.clone()
    swapped[0:4], swapped[4:8] = x[4:8], x[0:4]
    seen |= {fingerprint.of([swapped]), fingerprint.of([x[:50], x[50:]])}
    seen |= {fingerprint.of([x.view(torch.float16)]), fingerprint.of([])}
    assert len(seen) == 11


# -- the plot ------------------------------------------------------------------------------


def plotted(name: str, kind: str, seconds: float | None, peak: int, **more: Any) -> dict:
    """Return a row as the plot reads it."""
    return {
        "workload": "gpt", "row": name, "kind": kind, "step_s": seconds, "failed": None,
        "true_peak_bytes": peak * MIB, "bit_equal": True, "machine": "m", "torch": "2",
        "sources": "a", "size": "small", "date": "2026-01-01T00:00:00",
    } | more  # fmt: skip


def test_plot_takes_the_newest_sources_and_the_last_row_of_a_name(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        plotted("native", "native", 1.0, 40),
        plotted("ours-50%", "ours", 9.0, 20),
        plotted("native", "native", 1.0, 40, sources="b", date="2026-01-02T00:00:00"),
        plotted("ours-50%", "ours", 3.0, 20, sources="b", date="2026-01-02T00:00:01"),
        plotted("ours-50%", "ours", 2.0, 20, sources="b", date="2026-01-02T00:00:02"),
        plotted("save_on_cpu", "peer", 8.0, 25, sources="b", bit_equal=False),
        plotted("torchao", "peer", None, 0, sources="b", failed="torchao is not installed"),
        plotted("ours-50%", "ours", 7.0, 20, sources="c", date="2026-01-03T00:00:00"),
        plotted("native", "native", 1.0, 40, workload="vit"),
    ]
    found = plot_live.newest(rows)
    assert list(found) == ["gpt", "vit"]
    assert [row["step_s"] for row in found["gpt"]] == [1.0, 2.0, 8.0, None]
    source, picture = tmp_path / "live.json", tmp_path / "out/live.png"
    source.write_text(json.dumps(rows))
    assert plot_live.main(["--json", str(source), "--out", str(picture)]) == 0
    assert picture.read_bytes().startswith(b"\x89PNG")
