"""The roofline: how fast a step can be inside a budget, whatever the schedule.

Also ``python -m torchpager roofline TRACE``.
"""

import argparse
import importlib.util
import os
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from torchpager.sizes import Size, format_size, parse_size
from torchpager.trace import Step, Trace, load_trace

# Blocks smaller than this do not move.
LARGE_MIN_BYTES = 2 << 20
_SHARES = ("90%", "80%", "67%", "50%", "35%", "25%")
# Bytes are counted in about so many stretches of the step; more of them tighten it little.
_STRETCHES = 160


@dataclass(frozen=True)
class Link:
    """What the link between device and host moves, in bytes a second.

    Attributes
    ----------
    alone
        A copy in one direction, with the other one idle.
    both
        Both directions together.
    """

    alone: float = 55e9
    both: float = 101e9


@dataclass(frozen=True)
class Roofline:
    """A lower bound on a step's time.

    Attributes
    ----------
    budget_bytes, peak_bytes
        The budget, and what the program holds without one.
    native_ms
        The operators' time on the device, in all.
    roof_ms
        No schedule that runs the same operators over resident operands takes less. None: the
        operands of some operator do not fit.
    """

    budget_bytes: int
    peak_bytes: int
    native_ms: float
    roof_ms: float | None

    def efficiency(self, step_ms: float) -> float | None:
        """Return the bound over a measured time, at most 1. None: there is no bound."""
        return None if self.roof_ms is None else self.roof_ms / step_ms


def roofline(trace: Trace | Step, budget: Size, *, link: Link | None = None) -> Roofline:
    """Bound the time of a step inside a budget from below.

    Operators run one after another, so a step takes at least their time. At each moment the
    bytes alive beyond the budget are on the host: those that were written since an earlier
    moment have crossed the link since then, and those that are used before a later moment
    cross it until then. The bound is the longest chain of moments through the step; each
    stretch between two of them takes what its operators and its bytes in each direction take.

    Parameters
    ----------
    trace
        A trace, or one step of it.
    budget
        Bytes of device memory; a percentage is of the trace's peak.
    link
        Figures of the link; those of an H200 if left out.

    Raises
    ------
    TypeError, ValueError
        The budget is no size.

    Examples
    --------
    >>> import torchpager
    >>> from torchpager.trace import Step, StepBlock, StepOperator
    >>> weights = StepBlock(1 << 30, None, None)
    >>> first = StepOperator("aten::mm", "forward", 1_000_000, (0,), ())
    >>> second = StepOperator("aten::mm", "forward", 1_000_000, (1,), ())
    >>> step = Step((first, second), (weights, weights))
    >>> torchpager.roofline(step, "100%").roof_ms
    2.0
    >>> round(torchpager.roofline(step, "50%").roof_ms)
    39
    """
    step = trace if isinstance(trace, Step) else trace.step()
    peak = trace.peak_bytes
    budget_bytes = parse_size(budget, name="budget", total_bytes=peak)
    native_ms = step.device_ns / 1e6
    return Roofline(budget_bytes, peak, native_ms, roof_ms(step, budget_bytes, link=link))


@lru_cache(maxsize=64)
def roof_ms(
    step: Step,
    budget_bytes: int,
    *,
    link: Link | None = None,
    large_min_bytes: int = LARGE_MIN_BYTES,
) -> float | None:
    """Return the bound alone. None: the operands of some operator do not fit.

    Parameters
    ----------
    large_min_bytes
        Blocks smaller than this do not move.
    """
    chain = _chain(step, large_min_bytes)
    if chain.least_bytes > budget_bytes:
        return None
    return chain.longest_ns(budget_bytes, link or Link()) / 1e6


class _Moment:
    """The state while an operator runs. What may be on the host: all but its operands."""

    def __init__(self, point: int, at_ns: int, live_bytes: int) -> None:
        self.point = point
        self.at_ns = at_ns
        self.live_bytes = live_bytes
        self.idle_bytes = 0
        self._uses: list[tuple[int, int]] = []
        self._writes: list[tuple[int, int]] = []
        self._use_points: Sequence[int] = ()
        self._used_bytes: Sequence[int] = ()
        self._write_points: Sequence[int] = ()
        self._written_bytes: Sequence[int] = ()

    def add(self, size: int, next_use: int | None, last_write: int | None) -> None:
        """Count a block that may be on the host."""
        self.idle_bytes += size
        if next_use is not None:
            self._uses.append((next_use, size))
        if last_write is not None:
            self._writes.append((last_write, size))

    def finish(self) -> None:
        """Sum up what was added."""
        self._uses.sort()
        self._writes.sort()
        self._use_points = [point for point, _ in self._uses]
        self._used_bytes = [0, *accumulate(size for _, size in self._uses)]
        self._write_points = [point for point, _ in self._writes]
        self._written_bytes = [0, *accumulate(size for _, size in self._writes)]

    def bytes_in(self, until: int, budget_bytes: int) -> int:
        """Return what must come in until a later point so that operators find theirs."""
        soon = self._used_bytes[bisect_right(self._use_points, until)]
        return max(0, self.live_bytes - budget_bytes - (self.idle_bytes - soon))

    def bytes_out(self, since: int, budget_bytes: int) -> int:
        """Return what must have gone out since an earlier point."""
        early = self._written_bytes[bisect_left(self._write_points, since)]
        late = self._written_bytes[-1] - early
        return max(0, self.live_bytes - budget_bytes - (self.idle_bytes - late))


class _Chain:
    """The moments of one period, from the fullest to its return. Points count on."""

    def __init__(self, step: Step, large_min_bytes: int) -> None:
        self._step = step
        self._large_min_bytes = large_min_bytes
        self._before_ns = [0, *accumulate(each.device_ns for each in step.operators)]
        count = len(step.operators)
        self._uses: dict[int, list[int]] = {}
        self._writes: dict[int, list[int]] = {}
        held = [0] * count
        for at, operator in enumerate(step.operators):
            for block in {*operator.reads, *operator.writes}:
                if step.blocks[block].size_bytes >= large_min_bytes:
                    self._uses.setdefault(block, []).append(at)
                    held[at] += step.blocks[block].size_bytes
            for block in operator.writes:
                self._writes.setdefault(block, []).append(at)
        small = step.live_bytes_of(
            each for each in step.blocks if each.size_bytes < large_min_bytes
        )
        self.least_bytes = max((a + b for a, b in zip(held, small, strict=True)), default=0)
        self._moments = self._make_moments()

    def longest_ns(self, budget_bytes: int, link: Link) -> float:
        """Return the longest chain's time."""
        longest = [0.0] * len(self._moments)
        for later, end in enumerate(self._moments):
            for earlier, begin in enumerate(self._moments[:later]):
                came = begin.bytes_in(end.point, budget_bytes)
                went = end.bytes_out(begin.point, budget_bytes)
                least_ns = max(
                    end.at_ns - begin.at_ns,
                    max(came, went) / link.alone * 1e9,
                    (came + went) / link.both * 1e9,
                )
                longest[later] = max(longest[later], longest[earlier] + least_ns)
        return longest[-1]

    def _points(self) -> list[int]:
        """Return where most is alive in each stretch of time, and of operators."""
        live, count = self._step.live_bytes, len(self._step.operators)
        origin = max(range(count), key=lambda at: live[at])
        fullest: dict[tuple[str, int], int] = {}
        for point in range(origin, origin + count):
            passed_ns = (self._before_ns[point % count] - self._before_ns[origin]) % max(
                1, self._before_ns[-1]
            )
            time_share = passed_ns * _STRETCHES // max(1, self._before_ns[-1])
            operator_share = (point - origin) * _STRETCHES // count
            for stretch in (("time", time_share), ("operators", operator_share)):
                old = fullest.setdefault(stretch, point)
                if live[point % count] > live[old % count]:
                    fullest[stretch] = point
        return [*sorted({origin, *fullest.values()}), origin + count]

    def _make_moments(self) -> list[_Moment]:
        step, count = self._step, len(self._step.operators)
        if not count:
            return [_Moment(0, 0, 0)]
        moments = [
            _Moment(
                point,
                self._before_ns[point % count] + point // count * self._before_ns[-1],
                step.live_bytes[point % count],
            )
            for point in self._points()
        ]
        # A block alive at an operator is alive at the points one and two periods later.
        by_place = sorted((each.point % count, each) for each in moments[:-1])
        by_place = sorted(
            [*by_place, (moments[-1].point % count, moments[-1])],
            key=lambda each: (each[0], each[1].point),
        )
        places = [place for place, _ in by_place]
        for block, its in enumerate(step.blocks):
            if its.size_bytes < self._large_min_bytes:
                continue
            born, dead = its.born, its.dead
            if born is None or dead is None:
                spans = [(0, count - 1)]
            else:
                spans = [(born, dead)] if born <= dead else [(0, dead), (born, count - 1)]
            for first, last in spans:
                for at in range(bisect_left(places, first), bisect_right(places, last)):
                    self._add(by_place[at][1], block)
        for each in moments:
            each.finish()
        return moments

    def _add(self, moment: _Moment, block: int) -> None:
        """Count a block that is alive at a moment, unless it is an operand there."""
        count, its = len(self._step.operators), self._step.blocks[block]
        at = moment.point % count
        uses, writes = self._uses.get(block, []), self._writes.get(block, [])
        place = bisect_left(uses, at)
        if place < len(uses) and uses[place] == at:
            return
        ahead = back = None
        if uses:
            ahead = (uses[place] if place < len(uses) else uses[0] + count) - at
            if its.dead is not None and ahead > (its.dead - at) % count:
                ahead = None
        if writes:
            place = bisect_left(writes, at)
            back = at - (writes[place - 1] if place > 0 else writes[-1] - count)
        elif its.born is not None:
            back = (at - its.born) % count
        moment.add(
            its.size_bytes,
            None if ahead is None else moment.point + ahead,
            None if back is None else moment.point - back,
        )


@lru_cache(maxsize=4)
def _chain(step: Step, large_min_bytes: int) -> _Chain:
    return _Chain(step, large_min_bytes)


def main(argv: Sequence[str]) -> int:
    """Print the roofline of a trace; with ``--plot``, draw it. Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m torchpager roofline",
        description="How fast a recorded step can be inside a budget, whatever the schedule.",
    )
    parser.add_argument("trace", help="a trace file, plain or compressed with gzip")
    parser.add_argument(
        "--budget",
        action="append",
        metavar="SIZE",
        help='bytes, "8 GiB", or a share of the peak such as "50%%"; may be repeated',
    )
    parser.add_argument(
        "--plot", metavar="FILE", help="draw step time over budget (.png, .svg)"
    )
    options = parser.parse_args(argv)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        print("--plot needs matplotlib: pip install 'torchpager[plot]'", file=sys.stderr)
        return 2
    try:
        trace = load_trace(options.trace)
        rows = [roofline(trace, each) for each in options.budget or _SHARES]
    except (OSError, ValueError) as error:
        print(f"roofline: {error}", file=sys.stderr)
        return 2
    print(_table(trace, rows))
    if options.plot:
        _plot(trace, rows, options.plot)
        print(f"drawn: {options.plot}")
    return 0


def _table(trace: Trace, rows: Sequence[Roofline]) -> str:
    peak = format_size(trace.peak_bytes)
    lines = [
        f"{trace.name}: {rows[0].native_ms:.1f} ms a step, peak {peak}",
        f"{'budget':>12} {'of peak':>8} {'at least ms':>12} {'over native':>12}",
    ]
    for row in rows:
        share = f"{row.budget_bytes / row.peak_bytes:.0%}" if row.peak_bytes else "-"
        ends = f"{'does not fit':>12}"
        if row.roof_ms is not None:
            ratio = f"{row.roof_ms / row.native_ms:.2f}" if row.native_ms else "-"
            ends = f"{row.roof_ms:>12.1f} {ratio:>12}"
        lines.append(f"{format_size(row.budget_bytes):>12} {share:>8} {ends}")
    return "\n".join(lines)


def _plot(trace: Trace, rows: Sequence[Roofline], path: str | os.PathLike[str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    curve = [
        roofline(trace, max(1, trace.peak_bytes * each // 100)) for each in range(10, 101, 2)
    ]
    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    for each, style in ((curve, "-"), (rows, "o")):
        fits = [
            (row.budget_bytes / 2**30, row.roof_ms) for row in each if row.roof_ms is not None
        ]
        axes.plot([gib for gib, _ in fits], [ms for _, ms in fits], style, color="C0")
    axes.axhline(rows[0].native_ms, color="C7", linestyle="--", label="without a budget")
    axes.set(
        xlabel="budget, GiB", ylabel="at least, ms a step", title=trace.name, ylim=(0, None)
    )
    axes.legend()
    figure.savefig(path)
    pyplot.close(figure)
