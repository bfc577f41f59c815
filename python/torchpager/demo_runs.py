"""Starts the demo's trainings, each in a process of its own, and watches them from outside."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from torchpager.watched import Gpu, OutsideSampler, SimulatedDevice, run_watched

PACKAGE = Path(__file__).resolve().parent

# The driver's own growth while kernels are loaded for the first time counts as used memory but
# is no frame and no tensor. What the outside reading may exceed a GPU budget by.
DRIVER_SLACK_BYTES = 64 << 20


@dataclass(frozen=True)
class Run:
    """One training, as it was found to be.

    Attributes
    ----------
    result
        What the training process wrote: losses, digests, times, and, when paged, counters.
    largest_outside
        Most device memory, in bytes, that another process saw held; None where nothing can be
        seen (the plain run on a CPU).
    seconds
        From start to end of the process.
    warm_steps
        Steps that do not count as times: they warm up.
    """

    name: str
    budget_bytes: int | None
    result: dict[str, Any]
    largest_outside: int | None
    seconds: float
    warm_steps: int = 2

    @property
    def median_step_s(self) -> float:
        """Median time, in seconds, of the steps behind those that warm up, if there are any."""
        times = self.result["step_seconds"]
        return float(median(times[self.warm_steps :] or times))

    def differences(self, other: "Run") -> list[str]:
        """Name what is not bit for bit the same in the two runs."""
        found = []
        if self.result["losses"] != other.result["losses"]:
            found.append("losses")
        mine, theirs = self.result["digests"], other.result["digests"]
        found += [kind for kind in mine if mine[kind] != theirs[kind]]
        return found


def budget_failures(run: Run) -> list[str]:
    """Say by whose reading a run exceeded its budget, one sentence a reading."""
    assert run.budget_bytes is not None
    slack = DRIVER_SLACK_BYTES if run.result["device_name"] != "cpu" else 0
    readings = (
        ("the counters", run.result["largest_held"], 0),
        ("the sampling thread", run.result["largest_held_sampled"], 0),
        ("another process", run.largest_outside, slack),
    )
    failures = []
    for who, held, allowance in readings:
        if not held:
            failures.append(f"{who} saw nothing held, so the budget was not checked")
        elif held > run.budget_bytes + allowance:
            over = held - run.budget_bytes
            failures.append(f"{run.name}: {over} bytes above the budget according to {who}")
    return failures


def sampler_for(pid: int, ready: dict[str, Any], paged: bool) -> OutsideSampler | None:
    """Return what watches a training that has said it is ready; None: nothing to see."""
    if ready["gpu_uuid"] is not None:
        gpu = Gpu(ready["gpu_uuid"])
        return OutsideSampler(gpu, gpu.used_bytes() - ready["reserved_bytes"])
    return OutsideSampler(SimulatedDevice(pid)) if paged else None


def execute(
    name: str,
    settings: dict[str, Any],
    *,
    paged: bool,
    on_step: Callable[[int, float], None] = lambda _step, _loss: None,
) -> Run:
    """Run one training in a process of its own and return what was found.

    Parameters
    ----------
    name
        What the run is called in tables and errors.
    settings
        The fields of ``demo_train.Config`` and, when paged, ``budget_bytes`` (0: none),
        ``simulated_bytes``, ``large_min_bytes`` and ``sample_s``.
    paged
        False: the plain training, which does not import torchpager.
    on_step
        Called after each step with its number, from 1, and its loss.

    Raises
    ------
    RunError
        The process ended without a result; the text has the end of what it said.
    """

    def on_event(event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            on_step(event["step"], event["loss"])

    what = ["-m", "torchpager.demo_paged"] if paged else [str(PACKAGE / "demo_train.py")]
    answer = run_watched(
        name,
        [sys.executable, *what],
        settings,
        device=settings["device"],
        sampler_of=lambda pid, ready: sampler_for(pid, ready, paged),
        on_event=on_event,
    )
    return Run(
        name=name,
        budget_bytes=settings.get("budget_bytes") or None,
        result=answer.result,
        largest_outside=answer.largest_outside,
        seconds=answer.seconds,
    )
