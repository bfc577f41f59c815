"""``python -m torchpager demo``: a real training, plain and inside half its memory, compared.

A character-level GPT is trained on the text of the standard library three times, each time in a
process of its own: plain (torchpager is not imported), under torchpager without a limit (which
measures the peak), and inside a budget. Then one table says what was measured, and the command
fails unless losses, parameters, gradients and optimizer states are the same bit for bit, the
budget was never exceeded, and every kind of tensor has really been evicted.
"""

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchpager.demo_runs import Run, budget_failures, execute
from torchpager.sizes import parse_size
from torchpager.watched import RunError

MIB = 1 << 20
ON_CPU = {
    "layers": 6, "width": 256, "heads": 8, "context": 128, "batch": 4, "steps": 120,
    "chunk_bytes": 32 << 10, "text_bytes": 4 * MIB,
    "large_min_bytes": 64 << 10, "simulated_bytes": 4096 * MIB, "sample_s": 0.004,
}  # fmt: skip
ON_GPU = {
    "layers": 12, "width": 1536, "heads": 12, "context": 512, "batch": 8, "steps": 40,
    "chunk_bytes": 64 * MIB, "text_bytes": 16 * MIB, "autocast": True,
    "large_min_bytes": 0, "simulated_bytes": 0, "sample_s": 0.005,
}  # fmt: skip


@dataclass(frozen=True)
class Verdict:
    """What the three runs show.

    Attributes
    ----------
    equal
        Losses, parameters, gradients and optimizer states are the same bits in all three.
    failures
        Sentences, one for each condition that does not hold; empty when the demo succeeded.
    """

    equal: bool
    failures: list[str]


def judge(plain: Run, unlimited: Run, limited: Run) -> Verdict:
    """Check everything the demo promises."""
    failures = []
    if plain.result["pager_imported"]:
        failures.append("the plain run imported torchpager, so it is no reference")
    differences = {run.name: run.differences(plain) for run in (unlimited, limited)}
    for name, different in differences.items():
        if different:
            failures.append(
                f"other bits than plain in the run '{name}': {', '.join(different)}"
            )
    for kind, count in limited.result["evicted_blocks"].items():
        if count == 0:
            failures.append(
                f"no block of the {kind} was evicted: the budget was no test of them"
            )
    failures += budget_failures(limited)
    return Verdict(equal=not any(differences.values()), failures=failures)


# -- the table -----------------------------------------------------------------------------


def mib(value: int | None) -> str:
    """Show bytes as MiB."""
    return "-" if value is None else f"{value / MIB:,.1f}"


def row_of(run: Run, equal: str) -> list[str]:
    """Return one run's row of the table."""
    counters: dict[str, Any] = run.result.get("counters", {})
    return [
        run.name,
        mib(run.result.get("peak_bytes")),
        mib(run.budget_bytes),
        mib(run.result.get("largest_held")),
        mib(run.largest_outside),
        mib(counters.get("host")),
        f"{run.median_step_s * 1e3:,.0f}",
        f"{counters['write_backs']['bytes'] / 1e9:,.2f}" if counters else "-",
        f"{counters['fills']['bytes'] / 1e9:,.2f}" if counters else "-",
        f"{counters['misses']['count']:,}" if counters else "-",
        equal,
    ]


HEADINGS = [
    [
        "",
        "peak",
        "budget",
        "largest",
        "seen from",
        "in HOST",
        "step",
        "GB out",
        "GB in",
        "",
        "bit-",
    ],
    ["run", "MiB", "MiB", "held MiB", "outside", "MiB", "ms", "", "", "misses", "equal"],
]


def format_table(rows: list[list[str]]) -> str:
    """Lay out rows under the headings: the first column to the left, the others right."""
    everything = HEADINGS + rows
    widths = [max(len(row[i]) for row in everything) for i in range(len(HEADINGS[0]))]
    rule = "-" * (sum(widths) + 2 * (len(widths) - 1))

    def line(row: list[str]) -> str:
        cells = [row[0].ljust(widths[0])]
        cells += [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
        return "  ".join(cells).rstrip()

    return "\n".join([*map(line, HEADINGS), rule, *map(line, rows)])


# -- progress ------------------------------------------------------------------------------

Report = Callable[[int, float], None]


@contextmanager
def plain_progress(name: str, steps: int) -> Iterator[Report]:
    """Print a line at the start, then one about every ten seconds."""
    print(f"{name}: {steps} steps", flush=True)
    last = time.monotonic()

    def report(step: int, loss: float) -> None:
        nonlocal last
        if step == steps or time.monotonic() - last > 10:
            last = time.monotonic()
            print(f"{name}: step {step} of {steps}, loss {loss:.3f}", flush=True)

    yield report


@contextmanager
def rich_progress(name: str, steps: int) -> Iterator[Report]:
    """Draw a progress bar."""
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
    )

    columns = (
        TextColumn("{task.description:<24}"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TimeElapsedColumn(),
    )
    with Progress(*columns) as progress:
        task = progress.add_task(name, total=steps, loss="-")
        yield lambda step, loss: progress.update(task, completed=step, loss=f"{loss:.3f}")


def progress_style() -> Callable[[str, int], Any]:
    """Choose the bar where there is a terminal and the optional package ``rich``."""
    if not sys.stdout.isatty():
        return plain_progress
    try:
        import rich.progress  # noqa: F401
    except ImportError:
        return plain_progress
    return rich_progress


# -- command -------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Return the command's parser."""
    text = (__doc__ or "").split("\n\n")
    made = argparse.ArgumentParser(
        prog="python -m torchpager demo", description=" ".join(text[1].split())
    )
    made.add_argument(
        "--device",
        choices=("auto", "sim", "cuda"),
        default="auto",
        help="the first GPU, or the simulated device; auto: the GPU if there is one",
    )
    made.add_argument(
        "--budget", default="50%", help='share of the peak, or a size as "100 MiB"'
    )
    made.add_argument("--out", type=Path, default=Path("build"), help="folder of the picture")
    made.add_argument("--seed", type=int, default=1)
    for name in ("steps", "layers", "width", "heads", "context", "batch", "threads"):
        made.add_argument(f"--{name}", type=int, help="see demo_train.Config")
    return made


def choose_device(wanted: str) -> str:
    """Return "cuda" or "cpu"; raise RunError when a GPU was asked for and there is none."""
    if wanted == "sim":
        return "cpu"
    import torch

    if torch.cuda.is_available():
        return "cuda"
    if wanted == "cuda":
        raise RunError("PyTorch sees no CUDA device; --device sim needs none")
    print("No GPU here: the demo runs on the simulated device, with real PyTorch CPU tensors.")
    return "cpu"


def settings_from(arguments: argparse.Namespace, device: str) -> dict[str, Any]:
    """Return the settings of all three runs."""
    settings: dict[str, Any] = {"device": device, "seed": arguments.seed, "threads": 2}
    settings.update(ON_GPU if device == "cuda" else ON_CPU)
    for name in ("steps", "layers", "width", "heads", "context", "batch", "threads"):
        if getattr(arguments, name) is not None:
            settings[name] = getattr(arguments, name)
    if settings["steps"] < 3 or settings["width"] % settings["heads"] != 0:
        raise ValueError("needs at least 3 steps, and a width that is a multiple of the heads")
    return settings


def budget_from(text: str, peak_bytes: int, unit_bytes: int) -> int:
    """Return the budget in bytes: a share of the peak, or a size, in whole units."""
    budget = parse_size(text, name="budget", total_bytes=peak_bytes)
    return budget // unit_bytes * unit_bytes


def run_all(settings: dict[str, Any], budget: str) -> tuple[Run, Run, Run]:
    """Do the three runs, one after the other."""
    style = progress_style()

    def one(name: str, *, paged: bool, budget_bytes: int = 0) -> Run:
        with style(name, settings["steps"]) as report:
            return execute(
                name, settings | {"budget_bytes": budget_bytes}, paged=paged, on_step=report
            )

    plain = one("plain", paged=False)
    unlimited = one("torchpager, no limit", paged=True)
    unit = settings["large_min_bytes"] or 2 * MIB
    budget_bytes = budget_from(budget, unlimited.result["peak_bytes"], unit)
    limited = one(f"torchpager, {budget}", paged=True, budget_bytes=budget_bytes)
    return plain, unlimited, limited


def report(runs: tuple[Run, Run, Run], out: Path) -> int:
    """Print the table and the verdict, write the picture, and return the exit code."""
    plain, unlimited, limited = runs
    verdict = judge(*runs)
    answer = {True: "no", False: "yes"}
    rows = [row_of(plain, "reference")]
    rows += [row_of(run, answer[bool(run.differences(plain))]) for run in (unlimited, limited)]
    result = limited.result
    device = "simulated device" if result["device_name"] == "cpu" else result["device_name"]
    millions = result["parameter_count"] / 1e6, result["characters"] / 1e6
    what = (
        f"GPT, {millions[0]:.1f} M parameters, {millions[1]:.1f} M characters of the standard "
        f"library, torch {result['torch']}, {device}"
    )
    print(f"\n{what}\n\n{format_table(rows)}\n")
    print(f"loss {result['first_loss']:.3f} -> {result['last_loss']:.3f}")
    evicted = ", ".join(f"{kind} {n}" for kind, n in result["evicted_blocks"].items())
    print(f"blocks evicted when first looked at: {evicted}")
    equal = answer[not verdict.equal]
    print(f"bit-equal: {equal} (losses, {', '.join(result['digests'])})")
    write_picture(unlimited, limited, what, out)
    for failure in verdict.failures:
        print(f"failed: {failure}")
    return 1 if verdict.failures else 0


def write_picture(unlimited: Run, limited: Run, title: str, out: Path) -> None:
    """Write memory over time as a PNG, or say why there is none."""
    try:
        from torchpager.demo_plot import draw

        out.mkdir(parents=True, exist_ok=True)
        draw(unlimited, limited, title, out / "demo.png")
    except ImportError as error:
        print(f"no picture: {error.name} is not installed (pip install matplotlib)")
        return
    print(f"picture: {out / 'demo.png'}")


def main(argv: list[str] | None = None) -> int:
    """Run the demo.

    Parameters
    ----------
    argv
        Command line without the program's name; None: the process's own.

    Returns
    -------
    int
        0 when everything holds, 1 when something does not, 2 when it cannot run here.

    Examples
    --------
    >>> from torchpager.demo import main
    >>> main(["--device", "sim", "--steps", "30", "--out", "build"])  # doctest: +SKIP
    0
    """
    arguments = parser().parse_args(argv)
    try:
        settings = settings_from(arguments, choose_device(arguments.device))
        budget_from(arguments.budget, 1 << 50, 1)  # a bad size is said now, not after two runs
    except (RunError, ValueError) as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2
    try:
        return report(run_all(settings, arguments.budget), arguments.out)
    except RunError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 1
    except ValueError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
