"""Draws the demo's picture: memory over time, without a limit and inside the budget."""

from bisect import bisect_left
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchpager.demo_runs import Run

MIB = 1 << 20
RESIDENT = "#2f6db3"
HOST = "#e8a33d"
LIMIT = "#b3262b"
INK = "#333333"


def highest_of_each_step(run: Run) -> list[list[float]]:
    """Reduce a run's samples (time, resident, host, ...) to the fullest one of each step."""
    samples = run.result["timeline"]
    starts = run.result["step_starts"]
    begins = [bisect_left(samples, start, key=lambda sample: sample[0]) for start in starts]
    pieces = [samples[a:b] for a, b in pairwise([*begins, len(samples)])]
    fullest = [
        [start, *max(piece, key=lambda sample: sample[1] + sample[2])[1:]]
        for start, piece in zip(starts, pieces, strict=True)
        if piece
    ]
    end = starts[-1] + run.result["step_seconds"][-1]
    return [*fullest, [end, *fullest[-1][1:]]]


def steps_window(run: Run, count: int) -> tuple[float, float]:
    """Return begin and end of ``count`` steps in the middle of a run, in its own clock."""
    starts = run.result["step_starts"]
    first = max(0, len(starts) // 2 - count // 2)
    last = min(len(starts) - 1, first + count)
    return starts[first], starts[last]


def draw_memory(axes: Any, samples: list[list[float]], origin: float, unit: float) -> None:
    """Stack resident and HOST bytes over time."""
    times = [sample[0] - origin for sample in samples]
    resident = [sample[1] / unit for sample in samples]
    everything = [(sample[1] + sample[2]) / unit for sample in samples]
    axes.fill_between(times, resident, step="post", color=RESIDENT, linewidth=0)
    if any(sample[2] for sample in samples):
        axes.fill_between(times, resident, everything, step="post", color=HOST, linewidth=0)


def draw(unlimited: Run, limited: Run, title: str, path: Path) -> None:
    """Write the picture of two runs to ``path``.

    Left: the whole run, the fullest moment of each step. Right: three steps, every reading.
    Blue is device memory held by live tensors, orange what lives in host memory.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    assert limited.budget_bytes is not None
    budget = limited.budget_bytes
    peak = unlimited.result["peak_bytes"]
    unit, unit_name = (MIB, "MiB") if peak < 8192 * MIB else (1024 * MIB, "GiB")
    figure, rows = pyplot.subplots(
        2, 2, figsize=(11, 6.4), sharey=True, width_ratios=[3, 2], layout="constrained"
    )
    names = ("No limit", f"Budget {budget / unit:,.0f} {unit_name}")
    for row, run, name in zip(rows, (unlimited, limited), names, strict=True):
        samples = run.result["timeline"]
        origin = run.result["step_starts"][0]
        end = run.result["step_starts"][-1] + run.result["step_seconds"][-1]
        begin, finish = steps_window(run, 3)
        near = [sample for sample in samples if begin <= sample[0] <= finish]
        draw_memory(row[0], highest_of_each_step(run), origin, unit)
        draw_memory(row[1], near, begin, unit)
        row[0].set_xlim(0, end - origin)
        row[1].set_xlim(0, finish - begin)
        row[0].set_ylabel(unit_name)
        steps = len(run.result["step_starts"])
        row[0].set_title(
            f"{name}: the peak of each of {steps} steps", loc="left", fontsize=10, color=INK
        )
        row[1].set_title("three steps in full", loc="left", fontsize=10, color=INK)
    for axes in rows.flat:
        axes.axhline(budget / unit, color=LIMIT, linewidth=1.4, linestyle=(0, (5, 3)))
        axes.grid(axis="y", color="#dddddd", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.tick_params(labelsize=9, colors=INK)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.set_ylim(0, peak / unit * 1.12)
    for axes in rows[1]:
        axes.set_xlabel("seconds", fontsize=9)
    handles = [
        Patch(color=RESIDENT, label="on the device (resident)"),
        Patch(color=HOST, label="in host memory (HOST)"),
        Line2D([], [], color=LIMIT, linestyle=(0, (5, 3)), label="budget"),
    ]
    figure.legend(
        handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=9
    )
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, color=INK)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
