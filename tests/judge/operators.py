"""Runs PyTorch's own operator database under paging and says what comes out different.

``python operators.py`` runs every entry: functional, in place and with out=, forward and
backward, in two dtypes. Each call runs plainly and on a device where every storage of one byte
or more has extents of its own and everything is evicted before the call: the simulated device
in strict mode with granules of one OS page, or with ``--device cuda`` the GPU with granules of
2 MiB, with ``--strict`` in strict mode too (``TORCHPAGER_DEBUG=strict``). Results, gradients
and inputs must have the same bits. In strict mode an operator that reads what nobody announced
ends the process; one that writes what nobody announced is always found, by the fingerprints.

What is known is kept in build/judge, or where ``--results`` says, as soon as it is known. So a
run that was cut short, or was told to stop after ``--seconds``, goes on where it was;
``--fresh`` begins anew. An operator that ends the process is written down, and the run goes on
behind it. Exits with 0 when everything is as it should be, with 1 when an entry failed, and
with 3 when entries are left.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread, Timer
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import samples
import torch

import torchpager
from torchpager import _control, _core, _targets

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "judge"
# Entries for one process. On a GPU it takes 10 s to start.
CHUNK, CUDA_CHUNK = 36, 60
GROUP = 6  # of these, what runs plainly and then paged, so that it is known early
CHUNK_LIMIT_S = 900.0
SIMULATED_SAMPLES, CUDA_SAMPLES = 6, 4
LEFT_OVER = 3
MOST_EXCEPTIONS = 0.03

# Why an entry is not tested. Other bits are never a reason.
_SHAPE_ONLY = "no storage: it looks at its input's shape, and nothing reads the bytes"
_NO_KERNEL = "no kernel on this device"
_GPU_ONLY = "no kernel: PyTorch compiles it for a GPU only"
EXCEPTIONS = dict.fromkeys(
    (
        "empty_like", "full_like", "new_empty", "new_empty_strided", "new_full", "new_ones",
        "new_zeros", "ones_like", "rand_like", "randint_like", "randn_like", "zeros_like",
    ),
    _SHAPE_ONLY,
)  # fmt: skip
CPU_EXCEPTIONS = dict.fromkeys(
    (
        "jiterator_2inputs_2outputs", "jiterator_4inputs_with_extra_args", "jiterator_binary",
        "jiterator_binary_return_by_ref", "jiterator_unary",
    ),
    _GPU_ONLY,
)  # fmt: skip
CUDA_EXCEPTIONS = {"sparse.mm.reduce": _NO_KERNEL}

# Of operators that give other bits each time, even where deterministic ones were asked for.
NONDETERMINISTIC_WARNINGS = (
    "does not have a deterministic implementation", "defaults to a non-deterministic algorithm",
)  # fmt: skip
DEVICE_FAILED = 4  # exit code of a worker


@dataclass
class Tally:
    """What is known of one entry."""

    entry: str
    calls: int = 0
    misses: int = 0
    view_misses: int = 0
    """Of a result that is a view of an input, when it was read."""
    forms: dict[str, int] = field(default_factory=dict)
    """Calls that raised nothing, by form."""
    dtypes: list[str] = field(default_factory=list)
    has_kernel: bool = True
    has_bytes: bool = False
    nondeterministic: bool = False
    """PyTorch says that it has no deterministic implementation."""
    unrepeatable: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def verdict(self) -> str:
        """Return "tested", or why it does not count as that."""
        if self.problems:
            return "; ".join(self.problems[:3])
        if not any(self.forms.values()):
            return "nothing ran"
        if self.unrepeatable and not self.nondeterministic:
            return f"plain torch gives other bits each time: {self.unrepeatable[0]}"
        if self.has_bytes and not self.misses + self.view_misses:
            return "no miss"
        return "tested"


class Paging(samples.Watch):
    """The device of a worker, and what is counted there."""

    def __init__(self, device: str) -> None:
        self.slot = _core.SIM_SLOT if device == "cpu" else 0
        self._cuda = device == "cuda"
        self._begun: int | None = None
        self.call_misses = self.view_misses = 0

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """Give each storage of a byte or more extents of its own."""
        if self._cuda:
            with torchpager.auto_offload(), torchpager.budget("50%"):
                _targets.cuda_glue().enable(self.slot, True, 1)
                yield
            return
        device = torchpager.simulate(
            "64 MiB",
            granularity="4 KiB",
            large_min=1,
            strict=True,
            page_out_before_each_op=True,
        )
        with device, torchpager.auto_offload():
            yield

    def run(self, case: samples.Case) -> tuple[samples.Outcome, int]:
        """Run a case; return what came of it, and the unseen writes."""
        self._begun, self.call_misses, self.view_misses = None, 0, 0
        unseen = self._count("unseen_writes")
        outcome = case.run(self)
        self._page_out()
        return outcome, self._count("unseen_writes") - unseen

    def before_call(self, live: Any) -> None:
        """Evict what lives: these are tensors, whoever made them."""
        for tensor in samples.tensors_of(live):
            address = _control.tensor_address(tensor)
            if address and _core.owns(address) == self.slot:
                _core.mark_seen(address)
        self._page_out()
        if self._begun is None:
            self._begun = self._count("misses")

    def call_ended(self) -> None:
        """Count the misses of the calls."""
        self.call_misses = self._count("misses") - (self._begun or 0)

    def view_read(self) -> None:
        """Count those of reading a view."""
        self.view_misses = self._count("misses") - (self._begun or 0) - self.call_misses

    def _page_out(self) -> None:
        if self._cuda:
            torch.cuda.synchronize()
        _core.evict_all(self.slot)

    def _count(self, name: str) -> int:
        return int(_core.stats(self.slot)[name][0])


def is_attention(entry: str) -> bool:
    """Whether an entry may choose a kernel of attention whose backward adds in any order.

    PyTorch warns of these kernels, but the choice depends on the sample and the device.
    """
    return "attention" in entry


@dataclass
class Prepared:
    """A case, and what it gives without paging."""

    case: samples.Case
    plain: samples.Outcome
    repeats: bool = True
    """Else it has other bits each time: shapes and errors are compared."""


def plainly(case: samples.Case, tally: Tally) -> Prepared:
    """Run a case without paging, twice."""
    watch = samples.Watch()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        first = case.run(watch)
        second = case.run(watch)
    texts = [str(warning.message) for warning in seen]
    if any(known in text for text in texts for known in NONDETERMINISTIC_WARNINGS):
        tally.nondeterministic = True
    repeats = first == second
    if not repeats:
        tally.unrepeatable.append(case.label)
    return Prepared(case, first, repeats)


@contextmanager
def ending_with_the_device(device: str, entry: str) -> Iterator[None]:
    """End the process when a kernel of plain torch has failed on the device.

    From then on every call fails, whatever it is, and another process has to go on.
    """
    error: BaseException | None = None
    try:
        yield
    except RuntimeError as raised:
        error = raised
    if device == "cuda":
        try:
            torch.cuda.synchronize()
        except RuntimeError as raised:
            print(f"{entry}, plainly: {error or raised}", file=sys.stderr, flush=True)
            os._exit(DEVICE_FAILED)  # what would be tidied up is on the device
    if error is not None:
        raise error


def paged(prepared: Prepared, paging: Paging, tally: Tally) -> None:
    """Run a case under paging and compare."""
    case, plain = prepared.case, prepared.plain
    outcome, unseen = paging.run(case)
    tally.calls += 1 + outcome.backward
    tally.misses += paging.call_misses
    tally.view_misses += paging.view_misses
    tally.has_bytes |= outcome.has_bytes
    if outcome.error is None:
        for form in [case.form, *(["backward"] if outcome.backward else [])]:
            tally.forms[form] = tally.forms.get(form, 0) + 1
    shapes, plain_shapes = outcome.without_bits(), plain.without_bits()
    if not prepared.repeats:
        outcome, plain = shapes, plain_shapes
    for what in ("error", "backward", "result", "inputs"):
        if getattr(outcome, what) == getattr(plain, what):
            continue
        bits_only = (
            getattr(shapes, what) == getattr(plain_shapes, what) and tally.nondeterministic
        )
        found = tally.unrepeatable if bits_only else tally.problems
        found.append(f"{case.label}: other {what}")
    if unseen:
        tally.problems.append(f"{case.label}: wrote what it did not announce")


# -- a worker: a process that runs some entries ---------------------------------------------


def prepare(device: str, op: Any, tally: Tally) -> list[Prepared]:
    """Run an entry's cases plainly."""
    print(json.dumps({"at": tally.entry, "label": f"{tally.entry} plain"}), flush=True)
    tally.dtypes = [str(dtype)[6:] for dtype in samples.dtypes_of(op, device)]
    tally.has_kernel = bool(tally.dtypes)
    count = CUDA_SAMPLES if device == "cuda" else SIMULATED_SAMPLES
    found = []
    for case in samples.cases_of(op, device, count):
        with ending_with_the_device(device, case.label):
            found.append(plainly(case, tally))
            if not found[-1].repeats and found[-1].plain.backward:
                # As a rule it is the backward pass that does not.
                found.append(plainly(case.without_backward(), tally))
    # On one thread of the CPU everything is repeatable, whatever PyTorch warns of.
    tally.nondeterministic |= is_attention(tally.entry)
    tally.nondeterministic &= device == "cuda"
    return found


def work(device: str, names: list[str]) -> None:
    """Run entries and print what is known of each, as JSON."""
    warnings.simplefilter("ignore")
    torch.set_warn_always(True)  # else of some things only once in a process
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    entries = {samples.name_of(op): op for op in samples.database()}
    paging = Paging(device)
    for first in range(0, len(names), GROUP):
        tallies = [Tally(name) for name in names[first : first + GROUP]]
        group = [(tally, prepare(device, entries[tally.entry], tally)) for tally in tallies]
        with paging.in_force():
            for tally, found in group:
                for each in found:
                    print(json.dumps({"at": tally.entry, "label": each.case.label}), flush=True)
                    paged(each, paging, tally)
                print(json.dumps({"tally": asdict(tally)}), flush=True)


# -- the driver: processes, files, the table -----------------------------------------------


def build_of() -> str:
    """Return what the results depend on: torch, and our own build."""
    folder = ROOT / "python" / "torchpager"
    libraries = sorted(folder.glob("*.so"))
    if not torch.cuda.is_available():
        libraries = [path for path in libraries if "cuda" not in path.name]
    digest = hashlib.sha256()
    for path in [*libraries, Path(__file__), Path(samples.__file__)]:
        digest.update(path.read_bytes())
    mode = " strict" if _control.debug("strict") else ""
    return f"{torch.__version__} {digest.hexdigest()[:16]}{mode}"


class Results:
    """The file of what is known; lines of JSON, the first says for which build."""

    def __init__(self, path: Path, fresh: bool) -> None:
        self._path = path
        self._lock = Lock()
        self.tallies: dict[str, Tally] = {}
        build = {"build": build_of()}
        lines = path.read_text().splitlines() if path.exists() and not fresh else []
        if lines and json.loads(lines[0]) == build:
            for line in lines[1:]:
                try:
                    tally = Tally(**json.loads(line))
                except json.JSONDecodeError:  # cut off
                    continue
                self.tallies[tally.entry] = tally
        path.parent.mkdir(parents=True, exist_ok=True)
        known = [json.dumps(asdict(tally)) for tally in self.tallies.values()]
        path.write_text("".join(line + "\n" for line in [json.dumps(build), *known]))

    def add(self, tally: Tally) -> None:
        """Keep what is known of an entry."""
        with self._lock:
            self.tallies[tally.entry] = tally
            with self._path.open("a") as file:
                file.write(json.dumps(asdict(tally)) + "\n")


def run_worker(
    device: str, names: list[str], seconds: float, hear: Callable[[dict[str, Any]], None]
) -> tuple[int, str]:
    """Run entries in a process; return its exit code and the end of its errors."""
    command = [sys.executable, "-X", "faulthandler", __file__, "--device", device]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            [*command, "--entries", *names],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        guard = Timer(seconds, process.kill)
        guard.start()
        for line in process.stdout or ():
            if line.startswith("{"):
                hear(json.loads(line))
        code = process.wait()
        guard.cancel()
        errors.seek(0)
        return code, errors.read()[-2500:]


def run_chunk(device: str, names: list[str], results: Results, deadline: float) -> None:
    """Run entries in processes of their own; one that ends its process is a problem."""
    left = list(names)
    at: dict[str, str] = {}

    def hear(record: dict[str, Any]) -> None:
        if "tally" in record:
            tally = Tally(**record["tally"])
            results.add(tally)
            left.remove(tally.entry)
        else:
            at.update(record)

    while left and time.monotonic() < deadline:
        at.update({"at": left[0], "label": f"{left[0]} not begun"})
        seconds = max(1.0, min(CHUNK_LIMIT_S, deadline - time.monotonic()))
        code, errors = run_worker(device, left, seconds, hear)
        if code == 0 or time.monotonic() >= deadline:
            return
        problem = f"{at['label']}: the process ended with {code}\n{errors}"
        results.add(Tally(at["at"], problems=[problem]))
        left.remove(at["at"])


def run_all(options: argparse.Namespace, names: list[str], results: Results) -> None:
    """Run the entries that are not known yet, in chunks, until the time is over."""
    left = [name for name in names if name not in results.tallies]
    chunks: SimpleQueue[list[str]] = SimpleQueue()
    size = CUDA_CHUNK if options.device == "cuda" else CHUNK
    for first in range(0, len(left), size):
        chunks.put(left[first : first + size])
    deadline = time.monotonic() + options.seconds

    def serve() -> None:
        while time.monotonic() < deadline:
            try:
                chunk = chunks.get_nowait()
            except Empty:
                return
            run_chunk(options.device, chunk, results, deadline)

    threads = [Thread(target=serve) for _ in range(options.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def report(names: list[str], results: Results, exceptions: dict[str, str]) -> int:
    """Print the table; return the exit code."""
    known = [results.tallies[name] for name in names if name in results.tallies]
    failed, excepted = [], []
    print(f"{'entry':52} {'calls':>6} {'misses':>7} {'of views':>8}  forms")
    for tally in sorted(known, key=lambda each: each.entry):
        verdict = tally.verdict()
        forms = " ".join(f"{form or 'functional'}:{n}" for form, n in tally.forms.items())
        if not tally.has_kernel:
            exceptions = {**exceptions, tally.entry: _NO_KERNEL}
        line = f"{tally.entry:52} {tally.calls:6} {tally.misses:7} {tally.view_misses:8}"
        note = "" if verdict == "tested" else f"  <- {verdict.splitlines()[0][:90]}"
        print(f"{line}  {forms}{note}")
        if verdict != "tested":
            (excepted if tally.entry in exceptions and not tally.problems else failed).append(
                tally
            )
    for tally in failed:
        print(f"FAILED {tally.entry}: {tally.verdict()}")
    for tally in excepted:
        print(f"exception {tally.entry}: {exceptions[tally.entry]}")
    for tally in known:
        if tally.nondeterministic:
            print(f"non-deterministic {tally.entry}: PyTorch has no deterministic kernel")
    forms = Counter(form for tally in known for form in tally.forms)
    shares = ", ".join(f"{form or 'functional'} {n}" for form, n in sorted(forms.items()))
    tested = len(known) - len(failed) - len(excepted)
    print(
        f"operators: {tested} of {len(names)} entries tested, {len(excepted)} exceptions, "
        f"{len(failed)} failed, {len(names) - len(known)} left; "
        f"{sum(tally.calls for tally in known)} calls, "
        f"{sum(tally.misses + tally.view_misses for tally in known)} misses; entries by form: "
        f"{shares}"
    )
    if failed:
        return 1
    if len(excepted) > MOST_EXCEPTIONS * len(samples.database()):
        print(f"operators: more than {MOST_EXCEPTIONS:.0%} of the entries are exceptions")
        return 1
    return LEFT_OVER if len(known) < len(names) else 0


def parsed() -> argparse.Namespace:
    """Return the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--jobs", type=int, help="processes at a time; 2, on a GPU 1")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="then stop")
    parser.add_argument("--part", default="1/1", help="K/N: the K-th of N parts of the entries")
    parser.add_argument("--results", type=Path, help="the file of what is known")
    parser.add_argument("--strict", action="store_true", help="on a GPU too")
    parser.add_argument("--share", type=int, default=1, help="one entry in so many")
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs")
    parser.add_argument("--only", nargs="+", metavar="ENTRY", help="run these anew")
    parser.add_argument("--entries", nargs="+", help=argparse.SUPPRESS)  # a worker's
    return parser.parse_args()


def main() -> int:
    """Run what the command line asks for."""
    options = parsed()
    if options.entries is not None:
        work(options.device, options.entries)
        return 0
    options.jobs = options.jobs or (2 if options.device == "cpu" else 1)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("no CUDA device is usable here")
        return 2
    names = [samples.name_of(op) for op in samples.database()]
    part, parts = map(int, options.part.split("/"))
    names = options.only or names[: -(-len(names) // options.share)][part - 1 :: parts]
    strict = options.strict and options.device == "cuda"
    if strict:  # the workers', too
        os.environ["TORCHPAGER_DEBUG"] = "strict"
    mode = "-strict" if strict else ""
    path = options.results or WORK / f"operators-{options.device}{mode}.jsonl"
    results = Results(path, options.fresh)
    for name in options.only or []:
        results.tallies.pop(name, None)
    run_all(options, names, results)
    ours = CUDA_EXCEPTIONS if options.device == "cuda" else CPU_EXCEPTIONS
    return report(names, results, EXCEPTIONS | ours)


if __name__ == "__main__":
    sys.exit(main())
