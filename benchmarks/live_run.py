"""One run of the live benchmark, in a process of its own.

    python benchmarks/live_run.py SETTINGS RESULT

Both are JSON files; ``live.py`` writes the one and reads the other. Without paging nothing of
torchpager is imported. What goes wrong inside the run is a result too.
"""

import faulthandler
import gc
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from live_peers import make_peer
from live_workloads import WORKLOADS, Fingerprint, Program


def say(event: str, **values: object) -> None:
    """Write one event for the process that watches."""
    print(json.dumps({"event": event, **values}), flush=True)


def wait_until_watched() -> None:
    """Say that there is something to watch; go on when told to."""
    say("ready")
    sys.stdin.readline()


def synchronize(device: str) -> None:
    """Wait for the device, if there is one to wait for."""
    if device == "cuda":
        torch.cuda.synchronize()


def build(settings: dict[str, Any]) -> Program:
    """Make the program of the run from its seed."""
    workload = WORKLOADS[settings["workload"]]
    peer = make_peer(settings["peer"], settings["device"])
    torch.manual_seed(settings["seed"])
    sizes = getattr(workload, settings["size"])
    return workload.make(sizes, settings["device"], peer)


class Counters:
    """The pager's counters over the timed steps. Without paging there are none."""

    def __init__(self, paged: bool) -> None:
        self._paged = paged
        self._before: dict[str, Any] = {}

    def _read(self) -> dict[str, Any]:
        from torchpager import stats
        from torchpager.stats import Tally

        now = stats()
        tallies = {k: v for k, v in vars(now).items() if isinstance(v, Tally)}
        return {
            f"{name}.{part}": getattr(tally, part)
            for name, tally in tallies.items()
            for part in ("count", "bytes", "ns")
        } | {"planned_ops": now.planned_ops}

    def begin(self) -> None:
        """Count from here."""
        if self._paged:
            self._before = self._read()

    def figures(self, steps: int) -> dict[str, Any]:
        """Return what was counted since, for each step, and what holds for the whole run."""
        if not self._paged:
            return {}
        from torchpager import stats

        now, gauges = self._read(), stats()
        each = {name: (now[name] - self._before[name]) / steps for name in now}
        return {
            "per_step": {name: value for name, value in each.items() if value},
            "held_peak_bytes": gauges.held.peak,
            "host_peak_bytes": gauges.host_bytes.peak,
            "live_peak_bytes": gauges.allocated.peak,
            "efficiency": gauges.efficiency,
        }


def follow(program: Program, settings: dict[str, Any]) -> dict[str, Any]:
    """Run the steps; return times, outcomes, and bits where they are to be compared."""
    device, steps = settings["device"], settings["steps"]
    counters = Counters(settings["paged"])
    fingerprint = Fingerprint(settings["piece_bytes"])
    seconds: list[float] = []
    outcomes: list[str] = []
    bits: dict[str, Any] = {}
    found: dict[str, Any] = {}
    for number in range(steps):
        if number == settings["warm_steps"]:
            counters.begin()
        synchronize(device)
        begin = time.perf_counter()
        outcomes.append(program.step(number))
        synchronize(device)
        seconds.append(time.perf_counter() - begin)
        say("progress", step=number + 1)
        if number + 1 == steps:
            found = counters.figures(steps - settings["warm_steps"])
            if device == "cuda":
                found["allocated_peak_bytes"] = torch.cuda.max_memory_allocated()
        if number + 1 in settings["compare_after"]:
            told = {name: fingerprint.of(its) for name, its in program.compared().items()}
            bits[str(number + 1)] = {"outcomes": list(outcomes)} | told
    return {"step_seconds": seconds, "bits": bits} | found


@contextmanager
def inside(settings: dict[str, Any]) -> Iterator[None]:
    """Enter torchpager's contexts, if the run is paged."""
    if not settings["paged"]:
        yield
        return
    import torchpager
    from torchpager.demo_paged import contexts

    with contexts(settings):
        torchpager.reset_stats()
        yield


def run(settings: dict[str, Any]) -> dict[str, Any]:
    """Do the run."""
    device = settings["device"]
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(settings["threads"])
    # A peer's model is made on the device and then taken off it: that is not what it holds.
    made_before = bool(settings["peer"]) and not settings["paged"]
    if not made_before:
        wait_until_watched()
    with inside(settings):
        program = build(settings)
        if made_before:
            gc.collect()
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            wait_until_watched()
        result = follow(program, settings)
        del program
        gc.collect()
    result["pager_imported"] = any(
        name.partition(".")[0] == "torchpager" for name in sys.modules
    )
    return result


def reason(error: BaseException) -> str:
    """Say in a line why there is no figure."""
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed"
    if isinstance(error, torch.OutOfMemoryError):
        return f"out of memory: {str(error).strip().splitlines()[0]}"
    lines = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {lines[0]}"


def main(argv: list[str]) -> int:
    """Do the run that is described in one file and write what came of it to another."""
    settings = json.loads(Path(argv[0]).read_text())
    if "stacks" in settings:
        late = max(0.1, settings["stacks_at"] - time.time())
        faulthandler.dump_traceback_later(late, file=open(settings["stacks"], "w"))  # noqa: SIM115
    try:
        result = run(settings)
    except Exception as error:
        result = {"failed": reason(error)[:500]}
        if not isinstance(error, ModuleNotFoundError):
            import traceback

            traceback.print_exc()
    result["torch"] = torch.__version__
    if settings["device"] == "cuda":
        result["device_name"] = torch.cuda.get_device_name()
    Path(argv[1]).write_text(json.dumps(result))
    if not settings["paged"]:
        # What other tools leave running is not waited for.
        sys.stdout.flush()
        os._exit(0)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
