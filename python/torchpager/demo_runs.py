"""Starts the demo's trainings, each in a process of its own, and watches them from outside."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PACKAGE = Path(__file__).resolve().parent

# The driver's own growth while kernels are loaded for the first time counts as used memory but
# is no frame and no tensor. What the outside reading may exceed a GPU budget by.
DRIVER_SLACK_BYTES = 64 << 20
SAMPLE_S = 0.002


class RunError(RuntimeError):
    """A training process ended without a result."""


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
    """

    name: str
    budget_bytes: int | None
    result: dict[str, Any]
    largest_outside: int | None
    seconds: float

    @property
    def median_step_s(self) -> float:
        """Median time of a step without the first two, which warm up."""
        times = sorted(self.result["step_seconds"][2:] or self.result["step_seconds"])
        return float(times[len(times) // 2])

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


# -- looking from outside ------------------------------------------------------------------


class SimulatedDevice:
    """Counts the blocks of a process's device memfd."""

    def __init__(self, pid: int) -> None:
        self._folder = Path(f"/proc/{pid}/fd")
        self._descriptor: Path | None = None

    def _find(self) -> Path | None:
        try:
            for entry in self._folder.iterdir():
                if "memfd:torchpager-device" in os.readlink(entry):
                    return entry
        except OSError:
            pass
        return None

    def used_bytes(self) -> int | None:
        """Return the bytes of device memory that exist; None before the device does."""
        if self._descriptor is None:
            self._descriptor = self._find()
        if self._descriptor is None:
            return None
        try:
            return os.stat(self._descriptor).st_blocks * 512
        except OSError:
            self._descriptor = None
            return None


class Gpu:
    """Asks the driver, through NVML, how much memory of a GPU is used, by whomever."""

    def __init__(self, uuid: str) -> None:
        try:
            import pynvml

            pynvml.nvmlInit()
            self._handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        except Exception as error:  # the package, the library or the GPU is missing
            raise RunError(f"NVML cannot watch the GPU: {error}") from error
        self._read = pynvml.nvmlDeviceGetMemoryInfo

    def used_bytes(self) -> int:
        """Return the bytes in use."""
        return int(self._read(self._handle).used)


class OutsideSampler:
    """Reads device memory every few milliseconds, from this process, while another runs.

    Parameters
    ----------
    source
        Whom to ask.
    idle_bytes
        What is subtracted from each reading: in use before the training held anything.
    """

    def __init__(self, source: SimulatedDevice | Gpu, idle_bytes: int = 0) -> None:
        self.largest: int | None = None
        self._source = source
        self._idle_bytes = idle_bytes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outside", daemon=True)

    def start(self) -> None:
        """Begin reading."""
        self._thread.start()

    def stop(self) -> None:
        """End. Harmless if it never began."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            used = self._source.used_bytes()
            if used is not None:
                self.largest = max(self.largest or 0, used - self._idle_bytes)


def sampler_for(pid: int, ready: dict[str, Any], paged: bool) -> OutsideSampler | None:
    """Return what watches a training that has said it is ready; None: nothing to see."""
    if ready["gpu_uuid"] is not None:
        gpu = Gpu(ready["gpu_uuid"])
        return OutsideSampler(gpu, gpu.used_bytes() - ready["reserved_bytes"])
    return OutsideSampler(SimulatedDevice(pid)) if paged else None


# -- starting ------------------------------------------------------------------------------


def child_environment(device: str) -> dict[str, str]:
    """Return the environment of a training process: this one's, made deterministic."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("TORCHPAGER_")
    }
    if device == "cuda":
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return environment


@contextmanager
def started(
    command: list[str], device: str, errors: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    """Start a training process; it does not outlive the block."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=errors,
        text=True,
        env=child_environment(device),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout):
            if stream is not None:
                stream.close()


def follow(
    process: subprocess.Popen[str], paged: bool, on_step: Callable[[int, float], None]
) -> int | None:
    """Read a training's events until its output ends; return the largest outside reading."""
    assert process.stdin is not None
    assert process.stdout is not None
    sampler = None
    try:
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            event = json.loads(line)
            if event["event"] == "ready":
                sampler = sampler_for(process.pid, event, paged)
                if sampler is not None:
                    sampler.start()
                process.stdin.write("\n")
                process.stdin.flush()
            elif event["event"] == "progress":
                on_step(event["step"], event["loss"])
    finally:
        if sampler is not None:
            sampler.stop()
    return None if sampler is None else sampler.largest


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
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/errors", "w+") as errors:
        config, answer = Path(folder, "config.json"), Path(folder, "result.json")
        config.write_text(json.dumps(settings))
        what = ["-m", "torchpager.demo_paged"] if paged else [str(PACKAGE / "demo_train.py")]
        command = [sys.executable, *what, str(config), str(answer)]
        with started(command, settings["device"], errors) as process:
            largest = follow(process, paged, on_step)
            code = process.wait()
        if code != 0 or not answer.exists():
            errors.seek(0)
            raise RunError(f"the run '{name}' ended with code {code}:\n{errors.read()[-4000:]}")
        result = json.loads(answer.read_text())
    return Run(
        name=name,
        budget_bytes=settings.get("budget_bytes") or None,
        result=result,
        largest_outside=largest,
        seconds=time.monotonic() - begin,
    )
