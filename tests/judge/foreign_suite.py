"""Runs gpytorch's test suite, as its source distribution has it, plain and paged.

``python foreign_suite.py`` downloads the suite and what it needs into build/judge (once), runs
it under plain torch and then under ``python -m torchpager run --simulate``, and compares how
each test ended. Paged means: each storage of one byte or more has extents of its own of one OS
page, everything is evicted before each operator, and the budget is a few MiB. Exits with 1 when
a test ended in another way, or when there were no more misses than tests.

A run that was cut short goes on where it was; ``--fresh`` begins anew. A test that ends the
whole process is written down as a crash, and the run goes on behind it.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tarfile
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / "build" / "judge"
SUITE = "gpytorch==1.15.2"
NEEDS = (
    "linear_operator==0.6.1", "jaxtyping", "wadler-lindig", "scipy", "scikit-learn", "joblib",
    "cloudpickle", "threadpoolctl", "narwhals", "mpmath==1.3.0",
)  # fmt: skip
BUDGET = "4MiB"
LIMIT_S = 3 * 3600

# Under strict mode bytes in HOST are not mapped: what reads memory without an operator crashes.
STRICT_EXCEPTIONS: dict[str, str] = {}


def folder_of_suite() -> Path:
    """Return the unpacked source distribution, downloaded if it is not there."""
    name = SUITE.replace("==", "-")
    folder, site = WORK / name, WORK / "site"
    if not site.exists():
        part = WORK / "site.part"
        shutil.rmtree(part, ignore_errors=True)
        pip("install", "--no-deps", "--target", str(part), *NEEDS)
        part.rename(site)
    if not folder.exists():
        pip("download", "--no-deps", "--no-binary", ":all:", "-d", str(WORK), SUITE)
        with tarfile.open(WORK / f"{name}.tar.gz") as archive:
            archive.extractall(WORK, filter="data")
    return folder


def pip(*arguments: str) -> None:
    """Run pip, quietly."""
    WORK.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, "-m", "pip", "--quiet", *arguments], check=True)


def command(mode: str) -> list[str]:
    """Return the command line of a mode, up to pytest's arguments."""
    program = ["-m", "pytest"]
    if mode != "plain":
        options = ["granularity=4KiB", "large_min=1", "page_out_before_each_op=true"]
        options += ["strict=true"] if mode == "strict" else []
        sizes = ["--simulate", "64MiB", "--budget", BUDGET]
        each = [word for option in options for word in ("--sim-option", option)]
        program = ["-m", "torchpager", "run", *sizes, *each, *program]
    return [sys.executable, "-X", "faulthandler", *program]


class Mode:
    """One way of running the suite, and where it writes what it has seen."""

    def __init__(self, name: str, share: int, tests: list[str]) -> None:
        self.name = name
        self.share = share
        self.tests = tests

    def path(self, part: int) -> Path:
        """Return the file of one part."""
        return WORK / f"foreign-{self.name}-{self.share}-{part}.jsonl"

    def forget(self) -> None:
        """Remove what earlier runs have written."""
        for path in WORK.glob(f"foreign-{self.name}-{self.share}-*.jsonl"):
            path.unlink()

    def run_part(self, part: int, parts: int) -> None:
        """Run the tests of one part; after a crash, those behind it."""
        path = self.path(part)
        while True:
            wanted = {
                "path": str(path),
                "part": part,
                "parts": parts,
                "share": self.share,
                "skip": list(STRICT_EXCEPTIONS) if self.name == "strict" else [],
            }
            done = subprocess.run(
                # Its own configuration, which says nothing of pytest: else ours is found.
                [*command(self.name), *self.tests, "-q", "-c", "pyproject.toml", "-p",
                 "outcomes", "-p", "no:cacheprovider", "-W", "ignore", "--tb=short"],
                cwd=folder_of_suite(),
                env=environment(wanted),
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
                check=False,
            )  # fmt: skip
            path.with_suffix(".log").write_text(done.stdout)
            if done.returncode in (0, 1, 5):  # all passed, some failed, none left
                return
            records = read(path)
            if not records or "at" not in records[-1]:
                raise SystemExit(done.stdout[-3000:])
            crashed = {"test": records[-1]["at"], "outcome": "crashed", "misses": 0}
            with path.open("a") as file:
                file.write(json.dumps(crashed | {"text": done.stdout[-3000:]}) + "\n")

    def run(self, parts: int) -> dict[str, dict[str, Any]]:
        """Run it in so many processes; return what is known of each test."""
        begin = time.monotonic()
        with ThreadPoolExecutor(parts) as pool:
            for future in [pool.submit(self.run_part, part, parts) for part in range(parts)]:
                future.result()
        found = {
            record["test"]: record
            for part in range(parts)
            for record in read(self.path(part))
            if "test" in record
        }
        counts = Counter(record["outcome"] for record in found.values())
        misses = sum(record["misses"] for record in found.values())
        ended = ", ".join(f"{count} {outcome}" for outcome, count in sorted(counts.items()))
        print(
            f"{self.name}: {len(found)} tests, {ended}; {misses} misses; "
            f"{time.monotonic() - begin:.0f} s",
            flush=True,
        )
        return found


def read(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file; the last line may have been cut off."""
    records = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


def environment(wanted: dict[str, Any]) -> dict[str, str]:
    """Return the environment of a run: fixed seeds, one thread, no leftovers of ours."""
    inherited = os.environ.get("PYTHONPATH")
    paths = [str(Path(__file__).parent), str(WORK / "site"), str(ROOT / "python")]
    paths += [inherited] if inherited else []
    kept = {name: text for name, text in os.environ.items() if "TORCHPAGER" not in name}
    return kept | {
        "OUTCOMES": json.dumps(wanted),
        "PYTHONPATH": os.pathsep.join(paths),
        "PYTHONHASHSEED": "0",
        "OMP_NUM_THREADS": "1",
        "MKL_NUM_THREADS": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
    }


def compare(plain: dict[str, Any], other: dict[str, Any], name: str) -> bool:
    """Print the tests that ended in another way; return whether all is as it should be."""
    expected = dict(plain)
    if name == "strict":
        ends = tuple(STRICT_EXCEPTIONS) or ("\0",)
        expected = {test: seen for test, seen in plain.items() if not test.endswith(ends)}
    different = [
        test
        for test in sorted(expected.keys() | other.keys())
        if expected.get(test, {}).get("outcome") != other.get(test, {}).get("outcome")
    ]
    for test in different:
        left, right = expected.get(test, {}), other.get(test, {})
        print(f"differs {test}: {left.get('outcome')} plain, {right.get('outcome')} {name}")
        print("    " + str(right.get("text", ""))[-1500:].replace("\n", "\n    "))
    misses = sum(record["misses"] for record in other.values())
    enough = misses > len(other) > 0
    if not enough:
        print(f"{name}: {misses} misses in {len(other)} tests: this has tested nothing")
    return not different and enough


def main() -> int:
    """Run what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--jobs", type=int, default=2, help="processes at a time")
    parser.add_argument("--share", type=int, default=1, help="one test in so many")
    parser.add_argument("--strict", action="store_true", help="strict mode as well")
    parser.add_argument("--fresh", action="store_true", help="forget earlier runs")
    parser.add_argument("tests", nargs="*", default=["test"], help="of the suite; all")
    options = parser.parse_args()
    folder_of_suite()
    names = ["plain", "paged", *(["strict"] if options.strict else [])]
    found = {}
    for name in names:
        mode = Mode(name, options.share, options.tests)
        if options.fresh:
            mode.forget()
        found[name] = mode.run(options.jobs)
    good = [compare(found["plain"], found[name], name) for name in names[1:]]
    for name, reason in STRICT_EXCEPTIONS.items():
        print(f"not under strict mode: {name}: {reason}")
    print("foreign suite: " + ("same outcomes" if all(good) else "FAILED"))
    return 0 if all(good) else 1


if __name__ == "__main__":
    sys.exit(main())
