"""Draws what ``live.py`` has measured: seconds a step over true peak, a panel a workload.

    python benchmarks/plot_live.py --out docs/live.png

Of each workload the newest sources on one machine count, and of those the newest row of each
name. Filled marks have native's bits, hollow ones other bits. Needs matplotlib
(``pip install 'torchpager[plot]'``).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks/results/live.json"
OURS, AGAIN, PEERS, NATIVE = "#c1272d", "#1f6fb4", "#4f5b66", "#1b1b1b"
# From here on, slowest over fastest, a linear scale crowds what is fast.
LOG_FROM = 6.0
ORDER = ("gpt", "resnet50", "vit", "llama-lora", "llama-generate")


def group_of(row: dict[str, Any]) -> tuple[str, ...]:
    """Return what rows must share to be compared."""
    return tuple(row[name] for name in ("machine", "torch", "sources", "size"))


def newest(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows to be drawn, by workload."""
    found: dict[str, list[dict[str, Any]]] = {}
    for workload in sorted({row["workload"] for row in rows}, key=ORDER.index):
        its = [row for row in rows if row["workload"] == workload]
        # Sources without a native run do not count.
        native = [row for row in its if row["kind"] == "native" and row["failed"] is None]
        if not native:
            continue
        group = group_of(max(native, key=lambda row: (row["size"] == "full", row["date"])))
        last = {row["row"]: row for row in its if group_of(row) == group}
        found[workload] = list(last.values())
    return found


def is_drawn(row: dict[str, Any]) -> bool:
    """Whether a row has both figures."""
    return row["failed"] is None and bool(row["true_peak_bytes"])


def line_of(row: dict[str, Any]) -> str | None:
    """Return the line that a row is on: the plain program in budgets, of one kind; or None."""
    if row["kind"] != "ours" or "checkpoint" in row["row"]:
        return None
    return "again" if row["row"].startswith("again") else "ours"


def lines_of(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each line, from left to right."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda row: row["true_peak_bytes"] or 0):
        if name := line_of(row):
            found.setdefault(name, []).append(row)
    return found


def color_of(row: dict[str, Any]) -> str:
    """Return the colour of a row's mark and name."""
    if line_of(row) == "again":
        return AGAIN
    return {"ours": OURS, "native": NATIVE}.get(row["kind"], PEERS)


def unit_of(rows: Sequence[dict[str, Any]]) -> tuple[int, str]:
    """Return the unit of sizes."""
    return (1 << 30, "GiB") if rows[0]["size"] == "full" else (1 << 20, "MiB")


def draw_mark(axes: Any, row: dict[str, Any], unit: int, marker: str, color: str) -> None:
    """Draw a row's mark: filled if it has native's bits."""
    filled = row["kind"] == "native" or (
        row.get("bit_equal") and row.get("bits_of", "native") == "native"
    )
    axes.plot(
        row["true_peak_bytes"] / unit,
        row["step_s"],
        marker,
        markersize=14 if marker == "*" else 7,
        markerfacecolor=color if filled else "white",
        markeredgecolor=color,
        zorder=3,
    )


def label_of(row: dict[str, Any]) -> str:
    """Return what stands beside a mark."""
    name = str(row["row"])
    if line := line_of(row):
        name = name.removeprefix(f"{line}-")
    return "no limit" if name == "ours" else name


# A rectangle in pixels: left, bottom, right, top.
Box = tuple[float, float, float, float]
# Where a name may stand, in points from its mark, best first.
PLACES = ((10, -4), (0, 10), (0, -18), (9, 7), (9, -15), (-10, -4), (-9, 7), (-9, -15))


def overlap(one: Box, other: Box) -> float:
    """Return the area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)


def along(points: Sequence[tuple[float, float]]) -> list[Box]:
    """Return small boxes along a line through points in pixels."""
    found = []
    for (x0, y0), (x1, y1) in pairwise(points):
        count = max(1, int(max(abs(x1 - x0), abs(y1 - y0)) / 4))
        for k in range(count + 1):
            x, y = x0 + (x1 - x0) * k / count, y0 + (y1 - y0) * k / count
            found.append((x - 2, y - 2, x + 2, y + 2))
    return found


def write_label(axes: Any, row: dict[str, Any], unit: int, taken: Sequence[Box]) -> Box:
    """Write a name beside its mark, where it covers least."""
    frame = axes.bbox
    color = color_of(row)
    found = []
    for dx, dy in PLACES:
        text = axes.annotate(
            label_of(row), (row["true_peak_bytes"] / unit, row["step_s"]), (dx, dy),
            textcoords="offset points", fontsize=8, color=color, zorder=4,
            ha="left" if dx > 0 else "right" if dx < 0 else "center",
        )  # fmt: skip
        its = text.get_window_extent()
        box = (its.x0, its.y0, its.x1, its.y1)
        inside = overlap(box, (frame.x0, frame.y0, frame.x1, frame.y1))
        outside = (box[2] - box[0]) * (box[3] - box[1]) - inside
        covered = sum(overlap(box, each) for each in taken) + 10 * outside
        found.append((covered, text, box))
    _, best, box = min(found, key=lambda each: each[0])
    for _, text, _ in found:
        if text is not best:
            text.remove()
    return box


def write_labels(axes: Any, rows: Sequence[dict[str, Any]], unit: int) -> None:
    """Write names beside marks, each where it covers no mark, no line and no other name."""
    axes.figure.canvas.draw()

    def pixels(row: dict[str, Any]) -> tuple[float, float]:
        x, y = axes.transData.transform((row["true_peak_bytes"] / unit, row["step_s"]))
        return float(x), float(y)

    taken = [(x - 8, y - 8, x + 8, y + 8) for x, y in map(pixels, rows)]
    for line in lines_of(rows).values():
        taken += along([pixels(row) for row in line])
    for row in rows:
        if row["kind"] == "native":
            level = pixels(row)[1]
            taken += along([(axes.bbox.x0, level), (axes.bbox.x1, level)])
    for row in rows:
        taken.append(write_label(axes, row, unit, taken))


def draw_workload(axes: Any, workload: str, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a panel."""
    unit, unit_name = unit_of(rows)
    drawn = [row for row in rows if is_drawn(row)]
    for line in lines_of(drawn).values():
        axes.plot(
            [row["true_peak_bytes"] / unit for row in line],
            [row["step_s"] for row in line],
            "-",
            color=color_of(line[0]),
            linewidth=1.8,
        )
    native = next(row for row in rows if row["kind"] == "native")
    axes.axhline(native["step_s"], color=NATIVE, linewidth=0.8, linestyle=":")
    for row in drawn:
        marker = {"native": "*", "ours": "o"}.get(row["kind"], "s")
        draw_mark(axes, row, unit, marker, color_of(row))
    times = [row["step_s"] for row in drawn] or [1.0]
    if max(times) > LOG_FROM * min(times):
        axes.set_yscale("log")
        axes.set_ylim(min(times) / 1.4, max(times) * 1.4)
        ticks = [n * 10.0**e for e in range(-4, 3) for n in (1, 2, 5)]
        low, high = axes.get_ylim()
        axes.set_yticks([tick for tick in ticks if low <= tick <= high])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.minorticks_off()
    else:
        axes.set_ylim(0, max(times) * 1.12)
    largest = max([row["true_peak_bytes"] / unit for row in drawn] or [1.0])
    axes.set_xlim(0, largest * 1.12)
    what = "token" if workload == "llama-generate" else "step"
    axes.set(xlabel=f"true peak, {unit_name}", ylabel=f"seconds a {what}")
    axes.set_title(f"{workload}: {native['machine']}, {native['date'][:10]}", fontsize=10)
    axes.grid(True, color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    left_out = [row["row"] for row in rows if row["failed"] is not None]
    if left_out:
        axes.text(
            0.99, 0.98, f"no figure: {', '.join(left_out)}", transform=axes.transAxes,
            fontsize=7, ha="right", va="top", color=PEERS, wrap=True,
        )  # fmt: skip
    write_labels(axes, sorted(drawn, key=lambda row: row["kind"] != "native"), unit)


def add_legend(figure: Any, columns: int) -> None:
    """Say what the marks mean."""
    from matplotlib.lines import Line2D

    def mark(marker: str, color: str, filled: bool, label: str, line: str = "") -> Line2D:
        style = {"marker": marker, "color": color, "linestyle": line, "label": label}
        return Line2D([], [], markerfacecolor=color if filled else "white", **style)

    handles = [
        mark("*", NATIVE, True, "native"),
        mark("o", OURS, True, "torchpager, the program unchanged", "-"),
        mark("o", AGAIN, True, "the same, recompute=True", "-"),
        mark("s", PEERS, True, "other tools, native's bits"),
        mark("s", PEERS, False, "other bits"),
    ]
    figure.legend(handles=handles, fontsize=9, loc="outside lower center", ncols=columns)


def draw(rows: Sequence[dict[str, Any]], out: Path) -> list[str]:
    """Write the picture; return the workloads in it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    by_workload = newest(rows)
    count = len(by_workload)
    columns = 1 if count == 1 else 2
    lines = -(-count // columns)
    figure, grid = pyplot.subplots(
        lines, columns, figsize=(8 * columns, 5 * lines), layout="constrained", squeeze=False
    )
    add_legend(figure, 3 if columns == 1 else 5)
    panels = list(grid.flat)
    for axes, (workload, its) in zip(panels, by_workload.items(), strict=False):
        draw_workload(axes, workload, its)
    for axes in panels[count:]:
        axes.axis("off")
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=130)
    pyplot.close(figure)
    return list(by_workload)


def main(argv: Sequence[str] | None = None) -> int:
    """Draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument("--out", type=Path, default=ROOT / "build/live.png")
    parser.add_argument("--workload", action="append", help="only this one; may be repeated")
    arguments = parser.parse_args(argv)
    if find_spec("matplotlib") is None:
        print("it needs matplotlib: pip install 'torchpager[plot]'", file=sys.stderr)
        return 2
    try:
        rows = json.loads(arguments.json.read_text())
    except OSError as error:
        print(f"no results: {error}", file=sys.stderr)
        return 2
    if arguments.workload:
        rows = [row for row in rows if row["workload"] in arguments.workload]
    drawn = draw(rows, arguments.out)
    if not drawn:
        print("no workload has a native run", file=sys.stderr)
        return 2
    print(f"{arguments.out}: {', '.join(drawn)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
