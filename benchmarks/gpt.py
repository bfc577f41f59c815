"""A GPT inside shares of its native peak: bits, budget, step time, bytes moved.

On a GPU: 16 layers, width 2048, batches of 16 x 1024 characters, bfloat16 autocast, AdamW
without foreach, deterministic algorithms. Each run is a process of its own; the native one does
not import torchpager. The budgets are shares of the native run's ``max_memory_allocated``.

    python benchmarks/gpt.py --shares 75,50,40 --json build/gpt.json

A step's time is the median of those behind the first six, in which plans are made. Exits with 1
when a bit differs from native or a budget was exceeded.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from torchpager.demo import ON_CPU, format_table, row_of
from torchpager.demo_runs import Run, budget_failures, execute

ON_GPU: dict[str, Any] = {
    "device": "cuda", "layers": 16, "width": 2048, "heads": 16, "context": 1024, "batch": 16,
    "vocabulary": 32768, "autocast": True, "steps": 14, "learning_rate": 1e-4,
    "chunk_bytes": 256 << 20, "text_bytes": 8 << 20, "threads": 2, "seed": 1,
    "large_min_bytes": 0, "simulated_bytes": 0, "sample_s": 0.001,
}  # fmt: skip
# Until then bytes move on demand.
WARM_STEPS = 6


def figures(run: Run, native: Run) -> dict[str, Any]:
    """Return what is written to the JSON file about one run."""
    counters = run.result.get("counters", {})
    differences = run.differences(native)
    exceeded = budget_failures(run) if run.budget_bytes else []
    return {
        "name": run.name,
        "budget_bytes": run.budget_bytes,
        "peak_bytes": run.result.get("peak_bytes"),
        "largest_held": run.result.get("largest_held"),
        "largest_held_sampled": run.result.get("largest_held_sampled"),
        "largest_outside": run.largest_outside,
        "step_s": run.median_step_s,
        "ratio": run.median_step_s / native.median_step_s,
        "step_seconds": run.result["step_seconds"],
        "counters": counters,
        "evicted_blocks": run.result.get("evicted_blocks"),
        "differences": differences,
        "exceeded": exceeded,
    }


def reference(settings: dict[str, Any]) -> tuple[Run, int]:
    """Return the native run and its peak in bytes.

    A CPU has no counter of its peak: there the peak is that of a run without a limit.
    """
    native = execute("native", settings, paged=False)
    if settings["device"] == "cuda":
        return native, native.result["peak_bytes"]
    unlimited = execute("no limit", settings | {"budget_bytes": 0}, paged=True)
    return native, unlimited.result["peak_bytes"]


def report(run: Run) -> None:
    """Say how a run went, before the next one begins."""
    steps = " ".join(f"{seconds * 1e3:.0f}" for seconds in run.result["step_seconds"])
    print(f"{run.name}: {run.seconds:.0f} s, steps of {steps} ms", flush=True)


def main() -> int:
    """Run native and every share, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "sim"), default="cuda")
    parser.add_argument("--shares", default="75,50,40", help="budgets in percent of the peak")
    parser.add_argument("--steps", type=int, default=ON_GPU["steps"])
    parser.add_argument("--recompute", action="store_true", help="make again what is cheaper")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    settings = ON_GPU if arguments.device == "cuda" else {"device": "cpu", "seed": 1} | ON_CPU
    settings = settings | {"steps": arguments.steps, "recompute": arguments.recompute}
    native, peak = reference(settings)
    runs = [native]
    report(native)
    unit = settings["large_min_bytes"] or 2 << 20
    for share in map(int, arguments.shares.split(",")):
        budget = peak * share // 100 // unit * unit
        runs.append(
            execute(f"budget {share}%", settings | {"budget_bytes": budget}, paged=True)
        )
        report(runs[-1])
    runs = [replace(run, warm_steps=WARM_STEPS) for run in runs]
    found = [figures(run, runs[0]) for run in runs]
    equal = ["reference", *("no" if one["differences"] else "yes" for one in found[1:])]
    print(format_table([row_of(run, word) for run, word in zip(runs, equal, strict=True)]))
    for one in found:
        print(
            f"{one['name']}: step {one['step_s'] * 1e3:.0f} ms, {one['ratio']:.2f} x native "
            f"(behind the first {WARM_STEPS})"
        )
    failures = [text for one in found for text in one["exceeded"]]
    failures += [f"{one['name']}: other {kind}" for one in found for kind in one["differences"]]
    print(*failures, sep="\n")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"peak_bytes": peak, "runs": found}, indent=1))
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
