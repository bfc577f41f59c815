"""Runs the tests of a GPU machine in parts, one after the other, in less than 8 minutes
(with ``--product`` 10).

    python tests/gpu_parts.py                 # every part of make test-gpu
    python tests/gpu_parts.py new scenarios   # these
    python tests/gpu_parts.py --long live gpt_bits -- -x
    python tests/gpu_parts.py --memcheck      # the core of them, under compute-sanitizer
    python tests/gpu_parts.py --product       # the main job and what it costs, with its tests

Every part runs, whatever became of those before it: it has its share of the time for sure, and
what they have left as well. A part that takes longer is interrupted, so that it can say what it
knows, and then ended with all its processes. A test that ends the process of its part, by a
crash or by its limit, is a failure, and the part goes on behind it. What comes after ``--`` is
for pytest. Exits with 1 when a part failed.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

import hang_guard

ROOT = Path(__file__).resolve().parents[1]
TOTAL_S = 475.0
PRODUCT_S = 585.0
# Of a part's time, what it has to end in after it was interrupted.
GRACE_S = 8.0
NO_TESTS = 5  # of pytest: every test was left out
PROCESSES = 6

# What has run least comes first.
NEW = ("test_recompute.py", "test_torch_memory.py", "test_collectives.py")
CHUNKS = "test_optimizer_chunks.py"
# A measurement: nothing may run beside it.
MEASURED = f"tests/gpu/{CHUNKS}::test_step_time_of_200_million_parameters"
# It compiles programs.
LAST = ("test_regions.py",)
# Of make test-gpu-long, by file; those of CHUNKS are only there where there is no xdist.
LONG = ("live", "recompute", "gpt_bits", "models", "overhead", "regions", "optimizer_chunks")

# Under it a program takes several times as long; an access outside of what is allocated fails.
MEMCHECK = (
    "compute-sanitizer",
    "--tool=memcheck",
    "--report-api-errors=no",  # tests have the driver refuse things
    "--show-backtrace=device",  # the host's keep Python's frames, with tensors
    "--error-exitcode=99",
)
CORE = ("test_doors.py", "test_pluggable.py", "test_blind_writers.py")
# An access that must fail, and a measurement.
NOT_UNDER_MEMCHECK = (
    "tests/gpu/test_blind_writers.py::test_debug_mode_stops_a_blind_kernel_where_it_stands",
    "tests/gpu/test_blind_writers.py::test_strict_debug_mode_stops_a_blind_reader_where_it_stands",
    "tests/gpu/test_blind_writers.py::test_fingerprint_costs_little_beside_the_copy",
)


@dataclass(frozen=True)
class Part:
    """A command, and the seconds that it has in any case."""

    name: str
    share_s: float
    command: tuple[str, ...]
    needed: bool = False
    """Without it there is nothing to run."""
    is_pytest: bool = False


@dataclass(frozen=True)
class Ended:
    """What became of a part."""

    name: str
    seconds: float
    code: int | None
    """None: its time was over."""

    @property
    def good(self) -> bool:
        """Whether nothing failed."""
        return self.code in (0, NO_TESTS)

    def __str__(self) -> str:
        what = "ok" if self.good else "time is over" if self.code is None else "FAILED"
        return f"{self.name:<18}{self.seconds:>6.0f} s  {what}"


def program_part(name: str, share_s: float, *arguments: str) -> Part:
    """Return a part that runs Python."""
    return Part(name, share_s, (sys.executable, "-X", "faulthandler", *arguments))


def pytest_part(name: str, share_s: float, *arguments: str) -> Part:
    """Return a part that runs pytest."""
    made = program_part(name, share_s, "-m", "pytest", "--durations=8", *arguments)
    return replace(made, is_pytest=True)


def build_part() -> Part:
    """Return what comes before everything."""
    command = (sys.executable, "setup.py", "--quiet", "build_ext", "--inplace")
    return Part("build", 90, command, needed=True)


def rest_of_files() -> list[str]:
    """Return the files of tests/gpu that have no part of their own."""
    found = sorted(path.name for path in (ROOT / "tests/gpu").glob("test_*.py"))
    found = [name for name in found if name not in (*NEW, *LAST, CHUNKS)]
    return [f"tests/gpu/{name}" for name in (*found, *LAST)]


def usual_parts() -> list[Part]:
    """Return the parts of make test-gpu."""
    short = ("-m", "not long")
    split = ("-n", str(PROCESSES)) if find_spec("xdist") else ()
    contract = ("make", "-C", "tests/c", f"-j{os.cpu_count() or 1}", "test-cuda")
    return [
        build_part(),
        Part("contract", 50, contract),
        pytest_part("new", 100, *short, *(f"tests/gpu/{name}" for name in NEW)),
        pytest_part(
            "chunks", 80, *short, *split, f"tests/gpu/{CHUNKS}", "--deselect", MEASURED
        ),
        pytest_part("rest", 80, *short, MEASURED, *rest_of_files()),
        pytest_part("scenarios", 70, "-m", "gpu", "tests/scenarios"),
    ]


def long_parts(names: Sequence[str]) -> list[Part]:
    """Return those of make test-gpu-long."""
    share_s = (TOTAL_S - 90) / max(1, len(names))
    return [
        build_part(),
        *(
            pytest_part(name, share_s, "-m", "long", f"tests/gpu/test_{name}.py")
            for name in names
        ),
    ]


def product_parts() -> list[Part]:
    """Return those of make test-gpu-product."""
    overhead = ("benchmarks/overhead.py", "--rounds", "20", "--workload")
    tests = ("tests/gpu/test_doors.py", "tests/gpu/test_pluggable.py", "-m", "not long")
    return [
        build_part(),
        program_part("small", 95, *overhead, "small"),
        program_part("big", 110, *overhead, "big"),
        program_part("demo", 80, "-m", "torchpager", "demo"),
        program_part(
            "gpt", 140, "benchmarks/gpt.py", "--steps", "8", "--shares", "75,66,50,40"
        ),
        pytest_part("doors", 50, *tests),
        Part("contract", 15, ("make", "-C", "tests/c", "test-cuda")),
    ]


def memcheck_parts() -> list[Part]:
    """Return those of make test-gpu-memcheck."""
    contract = ("make", "-C", "tests/c", "test-cuda", f"RUN={' '.join(MEMCHECK)}")
    left_out = [word for name in NOT_UNDER_MEMCHECK for word in ("--deselect", name)]
    files = [f"tests/gpu/{name}" for name in CORE]
    pytest = pytest_part("core", 170, "-m", "not long", *left_out, *files)
    under = ("env", f"{hang_guard.PATIENCE}=2", *MEMCHECK)
    return [
        build_part(),
        Part("contract", 60, contract),
        replace(pytest, command=(*under, *pytest.command)),
    ]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End what a part has left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def run(part: Part, seconds: float, **environment: str) -> Ended:
    """Run a part in a process group of its own."""
    print(f"\n== {part.name}: {seconds:.0f} s at most", flush=True)
    begin = time.monotonic()
    # This make's own settings are not for another make.
    found = {key: os.environ[key] for key in os.environ if not key.startswith("MAKE")}
    found |= environment
    found["PYTHONUNBUFFERED"] = "1"  # what a part has said is seen if it is killed
    process = subprocess.Popen(part.command, cwd=ROOT, env=found, start_new_session=True)
    code = None
    try:
        with suppress(subprocess.TimeoutExpired):
            code = process.wait(max(0.0, seconds - GRACE_S))
        if code is None:
            process.send_signal(signal.SIGINT)
            with suppress(subprocess.TimeoutExpired):
                process.wait(GRACE_S)
    finally:
        end_group(process)
        process.wait()
    return Ended(part.name, time.monotonic() - begin, code)


def run_through(part: Part, seconds: float) -> Ended:
    """Run a part of one process; behind a test that has ended the process go on."""
    begin = time.monotonic()
    worst: int | None = 0
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "begun")
        file.touch()
        while True:
            known = len(file.read_text())
            left = seconds - (time.monotonic() - begin)
            ended = run(part, left, **{hang_guard.BEGUN: str(file)})
            worst = ended.code if worst in (0, NO_TESTS) or ended.code is None else worst
            begun = file.read_text()
            if ended.code is None or len(begun) == known or hang_guard.AT_THE_END in begun:
                break
            print(f"{begun.splitlines()[-1]}: ended the process, {ended.code}", flush=True)
            worst = ended.code or 1
    return Ended(part.name, time.monotonic() - begin, worst)


def run_all(parts: Sequence[Part], total_s: float) -> list[Ended]:
    """Run the parts; return what became of each."""
    end = time.monotonic() + total_s
    ended: list[Ended] = []
    for index, part in enumerate(parts):
        left = end - time.monotonic()
        later = sum(each.share_s for each in parts[index + 1 :])
        seconds = min(left, max(part.share_s, left - later))
        alone = part.is_pytest and "-n" not in part.command  # else xdist does it
        ended.append((run_through if alone else run)(part, seconds))
        if part.needed and not ended[-1].good:
            break
    return ended


def main(argv: Sequence[str]) -> int:
    """Run the parts that were asked for and say what became of them."""
    split = argv.index("--") if "--" in argv else len(argv)
    own, for_pytest = argv[:split], argv[split + 1 :]
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--long", action="store_true", help=f"parts: {', '.join(LONG)}")
    parser.add_argument(
        "--memcheck", action="store_true", help=f"{', '.join(CORE)} under compute-sanitizer"
    )
    parser.add_argument("--product", action="store_true", help="the main job and its costs")
    parser.add_argument("part", nargs="*", help="these only")
    options = parser.parse_args(own)
    usual = usual_parts()
    if options.memcheck or options.product:
        usual = memcheck_parts() if options.memcheck else product_parts()
    possible = LONG if options.long else [each.name for each in usual[1:]]
    wrong = [name for name in options.part if name not in possible]
    if wrong or (options.long and not options.part):
        print(f"PART is one or several of: {' '.join(possible)}", file=sys.stderr)
        return 2
    parts = long_parts(options.part) if options.long else usual
    wanted = [part for part in parts if part.needed or part.name in (options.part or possible)]
    wanted = [
        replace(part, command=(*part.command, *for_pytest)) if part.is_pytest else part
        for part in wanted
    ]
    ended = run_all(wanted, PRODUCT_S if options.product else TOTAL_S)
    print("", *ended, sep="\n")
    return 0 if all(each.good for each in ended) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
