"""Runs programs in processes of their own and watches, from outside, what memory they hold.

The program reads its settings from one JSON file and writes its result to another; both names
are its last arguments. On standard output it reports, one JSON object a line: ``ready``, after
which it waits for a line of input, and whatever else it likes.
"""

import json
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

SAMPLE_S = 0.002


class RunError(RuntimeError):
    """A program ended without a result, or cannot be watched."""


@dataclass(frozen=True)
class Answer:
    """What a program was found to do.

    Attributes
    ----------
    result
        What it wrote.
    largest_outside
        Most device memory, in bytes, that this process saw held; None where nothing can be
        seen.
    seconds
        From start to end of the process.
    """

    result: dict[str, Any]
    largest_outside: int | None
    seconds: float


# -- looking from outside ------------------------------------------------------------------


class Source(Protocol):
    """Whoever can tell how much device memory is in use."""

    name: str

    def used_bytes(self) -> int | None:
        """Return the bytes in use; None: not known yet."""


class SimulatedDevice:
    """Counts the blocks of a process's device memfd."""

    name = "memfd"

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

    name = "NVML"

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


class GpuByRuntime:
    """Asks the CUDA runtime of this process, where there is no NVML. Makes a context here."""

    name = "cudaMemGetInfo"

    def __init__(self) -> None:
        import torch

        self._read = torch.cuda.mem_get_info
        self.used_bytes()  # the context, so that it is part of what was in use before

    def used_bytes(self) -> int:
        """Return the bytes in use, by whomever."""
        free, total = self._read()
        return int(total - free)


class OutsideSampler:
    """Reads device memory every few milliseconds, from this process, while another runs.

    Parameters
    ----------
    source
        Whom to ask.
    idle_bytes
        What is subtracted from each reading: in use before the program held anything.
    """

    def __init__(self, source: Source, idle_bytes: int = 0) -> None:
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


# What watches a program that has said that it is ready: its process, what it said. None:
# nothing can be seen.
SamplerOf = Callable[[int, dict[str, Any]], OutsideSampler | None]


# -- starting ------------------------------------------------------------------------------


def child_environment(device: str) -> dict[str, str]:
    """Return the environment of a program: this one's, made deterministic."""
    environment = {
        key: value for key, value in os.environ.items() if not key.startswith("TORCHPAGER_")
    }
    if device == "cuda":
        environment["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    return environment


@contextmanager
def started(
    command: Sequence[str], device: str, errors: IO[str]
) -> Iterator[subprocess.Popen[str]]:
    """Start a program; it does not outlive the block."""
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


class Deadline:
    """Kills a process that is still there after a while."""

    def __init__(self, process: subprocess.Popen[str], seconds: float | None) -> None:
        self.passed = False
        self._process = process
        self._timer = threading.Timer(seconds or 0, self._pass)
        self._timer.daemon = True
        if seconds is not None:
            self._timer.start()

    def _pass(self) -> None:
        self.passed = True
        self._process.kill()

    def cancel(self) -> None:
        """Let it be."""
        self._timer.cancel()


def follow(
    process: subprocess.Popen[str],
    sampler_of: SamplerOf,
    on_event: Callable[[dict[str, Any]], None],
) -> int | None:
    """Read a program's events until its output ends; return the largest outside reading."""
    assert process.stdin is not None
    assert process.stdout is not None
    sampler = None
    try:
        for line in process.stdout:
            if not line.startswith("{"):
                continue
            event = json.loads(line)
            if event["event"] == "ready":
                sampler = sampler_of(process.pid, event)
                if sampler is not None:
                    sampler.start()
                process.stdin.write("\n")
                process.stdin.flush()
            else:
                on_event(event)
    finally:
        if sampler is not None:
            sampler.stop()
    return None if sampler is None else sampler.largest


def run_watched(
    name: str,
    command: Sequence[str],
    settings: dict[str, Any],
    *,
    device: str,
    sampler_of: SamplerOf,
    on_event: Callable[[dict[str, Any]], None] = lambda _event: None,
    timeout_s: float | None = None,
) -> Answer:
    """Run a program in a process of its own and return what was found.

    Parameters
    ----------
    name
        What the run is called in errors.
    command
        The program and its arguments; the names of the two files are added.
    settings
        What it reads.
    device
        ``"cuda"`` or ``"cpu"``.
    sampler_of
        Makes what watches it, once it is ready.
    on_event
        Called with each later event.
    timeout_s
        The process is killed after so many seconds.

    Raises
    ------
    RunError
        The process ended without a result, or was killed; the text has the end of what it said.
    """
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/errors", "w+") as errors:
        config, answer = Path(folder, "config.json"), Path(folder, "result.json")
        config.write_text(json.dumps(settings))
        with started([*command, str(config), str(answer)], device, errors) as process:
            deadline = Deadline(process, timeout_s)
            try:
                largest = follow(process, sampler_of, on_event)
                code = process.wait()
            finally:
                deadline.cancel()
        if code != 0 or not answer.exists():
            errors.seek(0)
            how = (
                f"did not end within {timeout_s:.0f} s"
                if deadline.passed and timeout_s
                else (f"ended with code {code}")
            )
            raise RunError(f"the run '{name}' {how}:\n{errors.read()[-4000:]}")
        result = json.loads(answer.read_text())
    return Answer(result, largest, time.monotonic() - begin)
