"""Real programs, live: native, inside shares of the native peak, and with other tools.

Each run is a process of its own with a timeout; native and peers do not import torchpager. Rows
are added to a file (``--json``; ``benchmarks/results/live.json``) as they come and printed as a
table; rows that the file has for the same sources are not run again, so a file that was taken
along is gone on with elsewhere. What does not work (a peer that is not installed, or runs out
of memory) is a row with its reason, and the next run tries it once more.

    python benchmarks/live.py --workload gpt
    python benchmarks/live.py --workload gpt --only 'native,ours-50%,save_on_cpu' --again

On a GPU the workloads have their full sizes and stay below 8 minutes. Without one they are
small and run on the simulated device: then figures say nothing about speed. The true peak is
what the driver says is in use, read every 2 ms from another process (this one), less what was
in use before the run began; so the CUDA context is in it.
"""

import argparse
import hashlib
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

from torchpager.sizes import check_size, parse_size
from torchpager.watched import (
    Gpu,
    GpuByRuntime,
    OutsideSampler,
    RunError,
    SimulatedDevice,
    Source,
    run_watched,
)

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/live.json"
GIB = 1 << 30
GRANULE = 2 << 20
# How long before the end of its time a run prints every thread's stack.
STACKS_S = 5.0
# What figures depend on.
SOURCES = ("csrc", "python", "benchmarks")
SUFFIXES = (".c", ".h", ".cpp", ".cu", ".py")
MADE = ("_build.py",)  # by setup.py; what it says of torch a row says too
# What is left of the time below which no further run is begun.
LEAST_S = 30.0
# A row that failed so often will fail again.
TRIES = 2
# By how much what is in use between runs may differ.
SETTLED_BYTES = 64 << 20
SHARES = ("80%", "67%", "50%", "35%")

# Optimizers on the CPU, of other tools, have all that there are.
ALL_THREADS = len(os.sched_getaffinity(0))
ON_GPU = {
    "size": "full", "device": "cuda", "threads": ALL_THREADS, "seed": 1,
    "piece_bytes": 64 << 20, "large_min_bytes": 0, "simulated_bytes": 0,
}  # fmt: skip
ON_CPU = {
    "size": "small", "device": "cpu", "threads": 1, "seed": 1, "piece_bytes": 8 << 10,
    "large_min_bytes": 16 << 10, "simulated_bytes": 4 << 30,
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """What is run for one row of the table.

    Attributes
    ----------
    name
        Its name in the table, in the file and for ``--only``.
    paged
        Inside torchpager.
    budget
        A size, or a share of the native peak; None: no limit.
    peer
        As ``live_peers.make_peer`` knows it; "": nothing is changed.
    slow
        A few steps have to do.
    recompute
        Inside torchpager, with ``auto_offload(recompute=True)``.
    like
        The row whose bits it must have; "": native. A compiled program has bits of its own.
    """

    name: str
    paged: bool = False
    budget: str | None = None
    peer: str = ""
    slow: bool = False
    recompute: bool = False
    like: str = ""


@dataclass(frozen=True)
class Steps:
    """How many steps warm up, and how many are timed after them."""

    warm: int
    timed: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.warm + self.timed


def ours(budget: str, peer: str = "", like: str = "") -> Row:
    """Return a row inside a budget."""
    parts = ["ours", *([peer] if peer else []), budget.replace(" ", "")]
    return Row("-".join(parts), paged=True, budget=budget, peer=peer, like=like)


def again(budget: str) -> Row:
    """Return a row inside a budget, where bytes may be made again instead of moved."""
    name = f"again-{budget.replace(' ', '')}"
    return Row(name, paged=True, budget=budget, recompute=True)


def peers(*names: str, slow: Sequence[str] = ()) -> tuple[Row, ...]:
    """Return the rows of other tools."""
    rows = [Row(name, peer=name) for name in names]
    return (*rows, *(Row(name, peer=name, slow=True) for name in slow))


FIRST = (Row("native"), Row("ours", paged=True), *map(ours, SHARES))
AGAIN_ROWS = tuple(map(again, SHARES))
ROWS: dict[str, tuple[Row, ...]] = {
    "gpt": (
        *FIRST,
        *AGAIN_ROWS,
        ours("24 GiB"),
        ours("16.4 GiB"),
        again("41%"),
        ours("14 GiB", "checkpoint"),
        *peers("selective", "checkpoint-75%", "checkpoint", "torchao", "torchao+checkpoint"),
        *peers("compile-0.5", "compile-0.2"),
        ours("45%", "compile-0.2", like="compile-0.2"),
        *peers(slow=("save_on_cpu", "fsdp2", "fsdp2+checkpoint")),
    ),
    "llama-generate": (*FIRST, *peers(slow=("dispatch-50%", "cpu_offload"))),
}
TRAINING = (
    *FIRST,
    *AGAIN_ROWS,
    *peers("selective", "checkpoint-50%", "checkpoint", slow=("save_on_cpu",)),
)
# By workload: steps of a row, and of a slow one.
# Plans are carried out from about the seventh step on.
STEPS = {False: (Steps(8, 10), Steps(2, 3)), True: (Steps(8, 24), Steps(2, 4))}
TOKENS = {"llama-generate"}


def rows_of(workload: str, device: str) -> tuple[Row, ...]:
    """Return a workload's rows; what is only meant for its full size, only there."""
    rows = ROWS.get(workload, TRAINING)
    if device == "cuda":
        return rows
    return tuple(each for each in rows if each.budget is None or "%" in each.budget)


# -- where this runs -----------------------------------------------------------------------


def commit_of() -> str | None:
    """Name the commit, and say if something differs from it; None: there is no repository."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(ROOT), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout

    try:
        changed = git("status", "--porcelain", "--", *SOURCES, ":!benchmarks/results")
        return git("rev-parse", "--short=10", "HEAD").strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def sources(root: Path = ROOT) -> str:
    """Name the sources by their contents, which are the same wherever they were copied to."""
    digest = hashlib.sha256()
    for path in sorted(path for top in SOURCES for path in (root / top).rglob("*")):
        if path.suffix in SUFFIXES and path.name not in MADE:
            name, text = path.relative_to(root).as_posix(), path.read_bytes()
            digest.update(f"{name} {len(text)}\n".encode() + text)
    return digest.hexdigest()[:12]


@dataclass(frozen=True)
class Machine:
    """Where a row was made."""

    name: str
    driver: str
    torch: str


def machine_of(device: str) -> Machine:
    """Describe this machine."""
    import torch

    if device != "cuda":
        return Machine(f"simulated device, {platform.machine()}", "-", torch.__version__)
    driver = "unknown"
    try:
        import pynvml

        pynvml.nvmlInit()
        driver = str(pynvml.nvmlSystemGetDriverVersion())
    except Exception:  # only the name of a driver
        pass
    return Machine(torch.cuda.get_device_name(), driver, torch.__version__)


def source_of(device: str) -> Source | None:
    """Return who tells how much of the GPU is in use; None: it is not a GPU."""
    if device != "cuda":
        return None
    import torch

    try:
        return Gpu(str(torch.cuda.get_device_properties(0).uuid))
    except RunError as error:
        print(f"{error}; cudaMemGetInfo is read instead")
        return GpuByRuntime()


# -- runs ----------------------------------------------------------------------------------


def innermost(stacks: str) -> str:
    """Return the innermost frame of the main thread, which comes last in a dump of stacks."""
    frames = stacks.rpartition("(most recent call first):\n")[2].splitlines()
    return frames[0].strip() if frames else ""


@dataclass
class Session:
    """What is the same for all rows of a run of this program."""

    workload: str
    settings: dict[str, Any]
    machine: Machine
    sources: str
    commit: str | None
    source: Source | None
    row_seconds: float
    least_used: int | None = None

    @property
    def steps(self) -> tuple[Steps, Steps]:
        """Steps of a row, and of a slow one."""
        return STEPS[self.workload in TOKENS]

    def is_mine(self, found: dict[str, Any]) -> bool:
        """Whether a row of the file is of this workload, these sources and this machine."""
        mine = {
            "workload": self.workload, "sources": self.sources, "machine": self.machine.name,
            "torch": self.machine.torch, "size": self.settings["size"],
        }  # fmt: skip
        return all(found.get(name) == value for name, value in mine.items())

    def idle_bytes(self) -> int:
        """Return what is in use now; what the last run held may take a moment to go."""
        if self.source is None:
            return 0
        used = self.source.used_bytes() or 0
        self.least_used = used if self.least_used is None else min(self.least_used, used)
        for _ in range(50):
            if used <= self.least_used + SETTLED_BYTES:
                break
            time.sleep(0.1)
            used = self.source.used_bytes() or 0
        return used

    def sampler_of(self, idle_bytes: int, pid: int, paged: bool) -> OutsideSampler | None:
        """Return what watches a run."""
        if self.source is not None:
            return OutsideSampler(self.source, idle_bytes)
        return OutsideSampler(SimulatedDevice(pid)) if paged else None

    def execute(self, row: Row, budget_bytes: int) -> dict[str, Any]:
        """Run a row in a process of its own and return what is written down."""
        usual, few = self.steps
        steps = few if row.slow else usual
        settings = self.settings | {
            "workload": self.workload, "paged": row.paged, "recompute": row.recompute,
            "peer": row.peer,
            "budget_bytes": budget_bytes, "steps": steps.total, "warm_steps": steps.warm,
            # Native is what both kinds of row are compared with.
            "compare_after": [few.total, usual.total] if row.name == "native"
            else [steps.total],
        }  # fmt: skip
        idle = self.idle_bytes()
        begin = time.monotonic()
        largest, sampled_by = None, self.source.name if self.source else SimulatedDevice.name
        with tempfile.NamedTemporaryFile("r") as stacks:
            # By the clock of all processes: a run that is late says where it is, and then ends.
            settings["stacks"] = stacks.name
            settings["stacks_at"] = time.time() + self.row_seconds - STACKS_S
            try:
                answer = run_watched(
                    row.name,
                    [sys.executable, str(ROOT / "benchmarks/live_run.py")],
                    settings,
                    device=settings["device"],
                    sampler_of=lambda pid, _: self.sampler_of(idle, pid, row.paged),
                    timeout_s=self.row_seconds,
                )
                result, largest = answer.result, answer.largest_outside
            except RunError as error:
                found = stacks.read()
                print(error, found, sep="\n", file=sys.stderr)
                lines = str(error).strip().splitlines()
                result = {"failed": f"{lines[0]} {innermost(found) or lines[-1]}"[:500]}
        return self.row(row, steps, budget_bytes, result) | {
            "true_peak_bytes": largest,
            "sampled_by": sampled_by,
            "process_s": round(time.monotonic() - begin, 1),
        }

    def row(
        self, row: Row, steps: Steps, budget_bytes: int, result: dict[str, Any]
    ) -> dict[str, Any]:
        """Return what one run says, without what is seen from outside."""
        found: dict[str, Any] = {
            "workload": self.workload,
            "row": row.name,
            "kind": "ours" if row.paged else "peer" if row.peer else "native",
            "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
            "machine": self.machine.name,
            "driver": self.machine.driver,
            "torch": self.machine.torch,
            "sources": self.sources,
            "commit": self.commit,
            "threads": self.settings["threads"],
            "size": self.settings["size"],
            "budget_bytes": budget_bytes or None,
            "warm_steps": steps.warm,
            "timed_steps": steps.timed,
            "failed": result.get("failed"),
            "step_s": None,
        }
        if result.get("pager_imported") and not row.paged:
            found["failed"] = "it imported torchpager, so it is no reference"
        if found["failed"] is None:
            found["step_s"] = median(result["step_seconds"][steps.warm :])
            found["step_seconds"] = [round(each, 5) for each in result["step_seconds"]]
            names = (
                "bits", "allocated_peak_bytes", "held_peak_bytes", "host_peak_bytes",
                "live_peak_bytes", "efficiency", "per_step",
            )  # fmt: skip
            found |= {name: result.get(name) for name in names}
        return found


def compare(
    row: dict[str, Any], native: dict[str, Any], like: dict[str, Any] | None = None
) -> None:
    """Add to a row what it is beside native: time, and bits after as many steps.

    Bits are those of ``like``, if there is such a row.
    """
    if row["failed"] is not None:
        return
    row["ratio"] = row["step_s"] / native["step_s"]
    row["bits_of"] = (like or native)["row"]
    different = []
    for after, mine in row["bits"].items():
        theirs = (like or native)["bits"][after]
        different += [name for name in theirs if mine.get(name) != theirs[name]]
    row["differences"] = sorted(set(different))
    row["bit_equal"] = not different


def budget_of(row: Row, peak_bytes: int | None, granule: int) -> int:
    """Return a row's budget in bytes; 0: none."""
    if row.budget is None:
        return 0
    size = parse_size(row.budget, name="budget", total_bytes=peak_bytes)
    return size // granule * granule


def peak_of(native: dict[str, Any], unlimited: dict[str, Any] | None) -> int | None:
    """Return the native peak; a CPU has no counter of it, the run without a limit has."""
    if native.get("allocated_peak_bytes"):
        return int(native["allocated_peak_bytes"])
    return None if unlimited is None else unlimited.get("live_peak_bytes")


# -- the file and the table ----------------------------------------------------------------


def load(path: Path) -> list[dict[str, Any]]:
    """Return the rows of the file."""
    return json.loads(path.read_text()) if path.exists() else []


def add(path: Path, row: dict[str, Any]) -> None:
    """Write a row behind the others."""
    rows = [*load(path), row]
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_suffix(".new")
    new.write_text("[\n" + ",\n".join(json.dumps(each) for each in rows) + "\n]\n")
    new.replace(path)


COLUMNS = (
    "run", "budget", "allocated", "true peak", "share", "step s", "x native", "bits", "misses",
    "stalls ms", "GB in", "GB out", "GB again", "effic.",
)  # fmt: skip
# Counters of bytes that were made again instead of moved, where there are any.
AGAIN = ("dropped.bytes", "drops.bytes", "reruns.bytes")


def cells(row: dict[str, Any], native: dict[str, Any]) -> list[str]:
    """Return a row of the table."""

    def gib(value: int | None) -> str:
        if value is None:
            return "-"
        unit = GIB if row["size"] == "full" else 1 << 20
        return f"{value / unit:.2f}"

    start = [row["row"], gib(row["budget_bytes"])]
    if row["failed"] is not None:
        return [*start, row["failed"][:100]]
    share = "-"
    if row["true_peak_bytes"] and native.get("true_peak_bytes"):
        share = f"{row['true_peak_bytes'] / native['true_peak_bytes']:.0%}"
    bits = ", ".join(row.get("differences", ["?"]))
    if row.get("bit_equal"):
        bits = "yes" if row["bits_of"] == "native" else f"as {row['bits_of']}"
    held = row.get("held_peak_bytes") or row.get("allocated_peak_bytes")
    return [
        *start, gib(held), gib(row["true_peak_bytes"]), share, f"{row['step_s']:.4f}",
        f"{row['ratio']:.3f}", "reference" if row["kind"] == "native" else bits,
        *moved(row),
    ]  # fmt: skip


def moved(row: dict[str, Any]) -> list[str]:
    """Return the last columns of the table: what the pager did in a step."""
    if row["kind"] != "ours":
        return ["-"] * 6
    each = row.get("per_step") or {}
    again = next((each[name] for name in AGAIN if name in each), 0)
    efficiency = row.get("efficiency")
    return [
        f"{each.get('misses.count', 0):.0f}",
        f"{each.get('stalls.ns', 0) / 1e6:.0f}",
        f"{each.get('fills.bytes', 0) / 1e9:.2f}",
        f"{each.get('write_backs.bytes', 0) / 1e9:.2f}",
        f"{again / 1e9:.2f}",
        "-" if efficiency is None else f"{efficiency:.2f}",
    ]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Lay the rows out: the first column to the left, the others right, reasons as they are."""
    native = next(each for each in rows if each["kind"] == "native")
    lines = [cells(each, native) for each in rows]
    whole = [line for line in (list(COLUMNS), *lines) if len(line) == len(COLUMNS)]
    widths = [max(len(line[i]) for line in whole) for i in range(len(COLUMNS))]
    widths[0] = max(widths[0], *(len(line[0]) for line in lines))
    widths[1] = max(widths[1], *(len(line[1]) for line in lines))

    def text(line: list[str]) -> str:
        parts = [line[0].ljust(widths[0])]
        for i, cell in enumerate(line[1:], start=1):
            parts.append(cell.rjust(widths[i]) if i < 2 or len(line) > 3 else cell)
        return "  ".join(parts).rstrip()

    unit = "GiB" if native["size"] == "full" else "MiB"
    steps = f"{native['warm_steps']} steps warm up, {native['timed_steps']} are timed"
    few = next((each for each in rows if each["timed_steps"] < native["timed_steps"]), None)
    if few:
        steps += f" ({few['warm_steps']} and {few['timed_steps']} where it is slow)"
    what = (native["workload"], native["machine"], f"driver {native['driver']}")
    version = f"sources {native['sources']} ({native['commit'] or 'no commit'})"
    head = ", ".join([*what, f"torch {native['torch']}", version, native["date"][:10]])
    how = (
        f"{steps}; sizes in {unit}, peaks from outside by {native['sampled_by']}; allocated: "
        "of ours, what its budget bounds"
    )
    return "\n".join([head, how, "", text(list(COLUMNS)), *map(text, lines)])


# -- command -------------------------------------------------------------------------------


def wanted(row: Row, only: str | None) -> bool:
    """Whether a row was asked for; patterns as in a shell, separated by commas."""
    return only is None or any(fnmatch(row.name, each) for each in only.split(","))


class Bench:
    """Runs the rows of a workload, one after the other, as long as there is time."""

    def __init__(self, session: Session, path: Path, deadline: float) -> None:
        self.left: list[str] = []
        self._session = session
        self._path = path
        self._deadline = deadline
        known = [row for row in load(path) if session.is_mine(row)]
        self.found = {row["row"]: row for row in known}
        self._failures = Counter(row["row"] for row in known if row["failed"] is not None)

    def run(self, rows: Sequence[Row], only: str | None, again: bool) -> bool:
        """Run what is asked for and not known. False: there is no reference."""
        reference, unlimited, *others = rows
        on_cpu = self._session.settings["device"] != "cuda"
        shares = any(wanted(each, only) and "%" in (each.budget or "") for each in others)
        for row in (reference, unlimited):
            # Ratios and bits are of native, and so are shares of the peak; a CPU has no counter
            # of that, and the run without a limit has.
            needed = row is reference or (on_cpu and shares)
            if needed or wanted(row, only):
                self._one(row, again and wanted(row, only))
        native = self.found.get("native")
        if native is None or native["failed"] is not None:
            return False
        peak = peak_of(native, self.found.get("ours"))
        for row in others:
            if not wanted(row, only):
                continue
            like = self.found.get(row.like, {"failed": "it has not run"})
            no_share = peak is None and "%" in (row.budget or "")
            if no_share or (row.like and like["failed"] is not None):
                self.left.append(row.name)  # what it is a share of, or like, is not known
            else:
                self._one(row, again, peak)
        return True

    def _one(self, row: Row, again: bool, peak_bytes: int | None = None) -> None:
        known = self.found.get(row.name)
        settled = known is not None and (
            known["failed"] is None or self._failures[row.name] >= TRIES
        )
        if settled and not again:
            return
        left_s = self._deadline - time.monotonic()
        if left_s < LEAST_S:
            self.left.append(row.name)
            return
        session = self._session
        granule = session.settings["large_min_bytes"] or GRANULE
        whole = session.row_seconds
        session.row_seconds = min(whole, left_s)
        found = session.execute(row, budget_of(row, peak_bytes, granule))
        if session.row_seconds < whole and found["process_s"] >= session.row_seconds:
            self.left.append(row.name)  # cut short by us: no finding
            return
        session.row_seconds = whole
        native = self.found.get("native", found) if row.name != "native" else found
        compare(found, native, self.found.get(row.like))
        add(self._path, found)
        self.found[row.name] = found
        took = "failed" if found["failed"] else f"{found['step_s']:.4f} s a step"
        print(f"{row.name}: {took}, {found['process_s']:.0f} s in all", flush=True)


def choose_device(wanted_device: str) -> str:
    """Return "cuda" or "cpu"."""
    if wanted_device == "auto":
        import torch

        return "cuda" if torch.cuda.is_available() else "cpu"
    return {"sim": "cpu", "cuda": "cuda"}[wanted_device]


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    made = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    names = ("gpt", "resnet50", "llama-generate", "vit", "llama-lora")
    made.add_argument("--workload", choices=names, default="gpt")
    made.add_argument("--device", choices=("auto", "sim", "cuda"), default="auto")
    made.add_argument("--only", metavar="NAME,...", help="these rows; patterns as in a shell")
    made.add_argument(
        "--budget", action="append", metavar="SIZE", default=[], help="one more row of ours"
    )
    made.add_argument("--again", action="store_true", help="also rows that are known")
    made.add_argument("--list", action="store_true", help="print the names of the rows")
    made.add_argument("--minutes", type=float, default=7.5, help="begin no row after that")
    made.add_argument("--row-seconds", type=float, default=100.0, help="timeout of a row")
    made.add_argument("--json", type=Path, default=RESULTS)
    return made


def missing(workload: str) -> list[str]:
    """Name the modules that a workload needs and that are not installed."""
    from live_workloads import WORKLOADS

    return [each for each in WORKLOADS[workload].needs if find_spec(each) is None]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rows and print the table. 1: other bits than native, or no reference."""
    begin = time.monotonic()
    arguments = parser().parse_args(argv)
    device = choose_device(arguments.device)
    rows = rows_of(arguments.workload, device)
    try:
        for each in arguments.budget:
            check_size(each, name="--budget")
            rows += (ours(each),)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if arguments.list:
        print(*(each.name for each in rows), sep="\n")
        return 0
    if absent := missing(arguments.workload):
        print(f"{arguments.workload} needs: {', '.join(absent)}", file=sys.stderr)
        return 2
    session = Session(
        workload=arguments.workload,
        settings=ON_GPU if device == "cuda" else ON_CPU,
        machine=machine_of(device),
        sources=sources(),
        commit=commit_of(),
        source=source_of(device),
        row_seconds=arguments.row_seconds,
    )
    bench = Bench(session, arguments.json, begin + arguments.minutes * 60)
    has_reference = bench.run(rows, arguments.only, arguments.again)
    if not has_reference:
        reason = bench.found.get("native", {}).get("failed", "there was no time for it")
        print(f"no native run: {reason}", file=sys.stderr)
        return 1
    known = [bench.found[each.name] for each in rows if each.name in bench.found]
    print(f"\n{table(known)}")
    if bench.left:
        print(f"left for the next run, which goes on here: {', '.join(bench.left)}")
    wrong = [
        f"{each['row']}: other bits than {each['bits_of']} ({', '.join(each['differences'])})"
        for each in known
        if each["kind"] == "ours" and each["failed"] is None and not each["bit_equal"]
    ]
    print(*wrong, sep="\n", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
