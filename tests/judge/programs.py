"""Runs programs of several libraries plainly and inside half of their memory, and compares.

``python programs.py`` takes each program of real_programs.py, which knows nothing of
torchpager, and runs it plainly and then inside ``--share`` of its own peak, each time in a
process of its own. All that it has to show (losses, parameters, buffers, tokens) must have the
same bits. With ``--device cuda`` on a GPU, with large models, the peak being that of PyTorch's
allocator in the plain run; else on the simulated device, with small ones, and the peak is that
of a third run, without a limit. A program whose packages are missing is left out, and said so.

Where bits differ the plain program runs once more: a program that does not repeat its own bits
cannot be judged by them. Exits with 0 when everything is as it should be.
"""

import argparse
import hashlib
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import numpy as np
import torch
from real_programs import PROGRAMS

import torchpager

MIB = 1 << 20
SEED = 11
LIMIT_S = 170
SIMULATED = {"granularity": "4 KiB", "large_min": "4 KiB"}


@dataclass(frozen=True)
class Ran:
    """What came of one run."""

    digests: dict[str, str]
    peak: int
    """Bytes: allocated, at most."""
    held: int
    seconds: float
    evictions: int
    misses: int


# ---- one run, in a process of its own --------------------------------------------------------


def tensors(value: Any, name: str) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors and numbers of what a program shows."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from tensors(each, f"{name}.{key}")
    elif isinstance(value, list):
        yield name, torch.tensor(value, dtype=torch.float64)
    else:
        yield name, torch.as_tensor(value).detach()


def digest(tensor: torch.Tensor) -> str:
    """Return what stands for a tensor's dtype, shape and bits."""
    raw = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    head = f"{tensor.dtype} {tuple(tensor.shape)} ".encode()
    return hashlib.sha256(head + raw.tobytes()).hexdigest()


def run_here(name: str, device: str, budget: int | None, *, paged: bool) -> Ran:
    """Run a program; ``budget``: None is no limit."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    torch.use_deterministic_algorithms(True, warn_only=True)
    # The one attention on CUDA whose backward pass has other bits each time even so.
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    program = PROGRAMS[name][0]
    simulated = device == "cpu"
    with ExitStack() as stack:
        if paged and simulated:
            size = 1 << 30 if budget is None else max(4 * budget, 64 * MIB)
            stack.enter_context(torchpager.simulate(size, **SIMULATED))
        if paged and budget is not None:
            stack.enter_context(torchpager.budget(budget))
        if paged:
            stack.enter_context(torchpager.auto_offload())
        begin = time.monotonic()
        found = program(device, not simulated)
        if not simulated:
            torch.cuda.synchronize()
        seconds = time.monotonic() - begin
        stats = torchpager.stats()
        digests = {key: digest(tensor) for key, tensor in tensors(found, name)}
    peak = stats.allocated.peak if simulated else torch.cuda.max_memory_allocated()
    return Ran(
        digests, peak, stats.held.peak, seconds, stats.evictions.count, stats.misses.count
    )


# ---- all of them -----------------------------------------------------------------------------


def run_apart(name: str, device: str, how: str, budget: int | None = None) -> Ran | str:
    """Run a program in another process. Returns why, if it could not."""
    command = [sys.executable, "-X", "faulthandler", __file__, "--device", device]
    command += ["--run", name, how] + ([] if budget is None else [str(budget)])
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT_S} s"
    if done.returncode != 0:
        return f"exit code {done.returncode}: {done.stderr.strip()[-1500:]}"
    return Ran(**json.loads(done.stdout.splitlines()[-1]))


def missing(name: str) -> list[str]:
    """Return the packages that a program needs and that are not there."""
    return [package for package in PROGRAMS[name][1] if find_spec(package) is None]


def judge(name: str, device: str, share: float) -> tuple[dict[str, Any], str]:
    """Return a program's figures, and what is wrong with it; empty: nothing."""
    plain = run_apart(name, device, "plain")
    free = run_apart(name, device, "free") if device == "cpu" else plain
    if isinstance(plain, str) or isinstance(free, str):
        return {}, f"without a limit: {plain if isinstance(plain, str) else free}"
    budget = int(free.peak * share)
    paged = run_apart(name, device, "paged", budget)
    row = {"peak": free.peak, "budget": budget, "plain_s": plain.seconds}
    if isinstance(paged, str):
        return row, paged
    row |= asdict(paged) | {"peak": free.peak}
    del row["digests"]
    different = sorted(key for key, bits in plain.digests.items() if paged.digests[key] != bits)
    if different:
        again = run_apart(name, device, "plain")
        if not isinstance(again, str) and again.digests != plain.digests:
            return row, "it does not repeat its own bits"
        return row, f"other bits: {', '.join(different[:5])}"
    if paged.held > budget:
        return row, "above the budget"
    if paged.evictions == 0:
        return row, "nothing was evicted"
    return row, ""


def line(name: str, row: dict[str, Any], wrong: str) -> str:
    """Return a program's line of the table."""
    if "held" not in row:
        return f"{name:<12} {wrong}"
    sizes = "".join(f"{row[key] / MIB:>10,.1f}" for key in ("peak", "budget", "held"))
    times = f"{row['plain_s']:>9.1f}{row['seconds']:>9.1f}"
    counts = f"{row['evictions']:>11,}{row['misses']:>9,}"
    return f"{name:<12}{sizes}{times}{counts}  {wrong or 'equal'}"


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--share", type=float, default=0.5, help="of a program's peak")
    parser.add_argument("--only", nargs="+", choices=PROGRAMS, help="these programs")
    parser.add_argument("--jobs", type=int, default=1, help="programs that run at once")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.add_argument("--run", nargs="+", help=argparse.SUPPRESS)  # a process of its own
    options = parser.parse_args()
    if options.run is not None:
        name, how, *budget = options.run
        limit = int(budget[0]) if budget else None
        ran = run_here(name, options.device, limit, paged=how != "plain")
        print(json.dumps(asdict(ran)))
        return 0
    rows, failed = {}, 0
    print(f"{'':<12}{'peak':>10}{'budget':>10}{'held MiB':>10}{'plain s':>9}{'paged s':>9}"
          f"{'evictions':>11}{'misses':>9}  bits")  # fmt: skip
    with ThreadPoolExecutor(options.jobs) as jobs:
        begun = {
            name: jobs.submit(judge, name, options.device, options.share)
            for name in options.only or PROGRAMS
            if not missing(name)
        }
        for name in options.only or PROGRAMS:
            if name not in begun:
                print(f"{name:<12} left out: no {', '.join(missing(name))}", flush=True)
                continue
            row, wrong = begun[name].result()
            rows[name] = row | {"wrong": wrong}
            failed += bool(wrong)
            print(line(name, row, wrong), flush=True)
    if options.json is not None:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
