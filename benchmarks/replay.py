"""Replay the recorded traces under a virtual clock: what a plan makes of each at each budget.

    make replay
    python benchmarks/replay.py [TRACE...] [--budgets 0.9 0.5] [--jitter 0.2] [--check FILE]

Each trace is taken through five times at each budget.

*On demand* and *planned*: through the real pager, its recorder, planner and executor, and the
simulated device (csrc/bind/replay.c), as the operator hook would, for eight rounds, of which
the last three are averaged. Frames have no contents, so peaks of 36 GiB fit anywhere; the pager
has no thread, what it does is done while the host waits; time is the device's. The host may be
1,000 operators ahead. Launching, mapping, planning and host memory cost nothing. Operators over
operands in HOST take at least as long as the link needs for them, and copies stand still
meanwhile; what the kernels of a matrix product would lose there beyond that is not known here.
The recording's small storages (below 2 MiB) live in PyTorch's own allocator: their peak is
taken off the budget.

*Mapped*: as planned, but mappings take time as on an H200, and the host waits for them, since
the pager has no thread of its own here. The program of gpt-b16-fused, run on that GPU at 75,
66, 50 and 40% of its peak, took 2.09, 2.52, 3.46 and 4.37 times its plain step; so replayed, it
takes 2.05, 2.37, 3.58 and 4.53 times (67% instead of 66%). How those times divide between
device and host frames and between calls and bytes inside of a step has not been measured.

*Simulated*: the planner (csrc/pager/plan.c) is given the trace itself, and an event simulation
of one compute stream and one copy at a time in each direction carries its plan out. So these
figures say what the plans are worth, not what torchpager takes.

*Joint*: as simulated, but blocks that recipes.py lists may also be dropped and made again. The
pager takes no part: it does not carry out such plans yet. unroll.py turns the plan into a step
with reruns among its operators, and checks that no operator runs on anything but what it would
find without.

Everywhere the link carries 55 GB/s alone, 101 GB/s both ways together.

At last each trace goes through the pager once more, at half its peak, with all sizes divided
by 256 and with contents: every operator checks what its operands hold and writes something
new. Anything wrong fails.

The event simulation shares no code with the planner's model. Three steps follow one another;
the third is counted. The first begins with everything resident that fits, so the plan does not
apply to it: what an operator misses comes in at once, and what has to make room is what the
plan has on the host at that point, then the least recently used. Misses in the third step are
printed; there are some where the plan of a step does not end in the state in which it began.

Of bert-varlen, whose steps differ in length, each of the twelve steps has a plan of its own,
made as if it came again and again; they are carried out one after the other, twice, and the
second time is counted. So each length has been seen before, and none is known in advance.

It prints, for each trace and budget, step time over native and over the bound by linear
programming (benchmarks/traces/README.md), bytes in each direction, misses, and how many
operators waited for memory; and writes them to build/replay.json, those of the pager as
``demand_...``, ``pager_...`` and ``mapped_...``, those with drops as rows of their own (mode
"joint"). Of these it prints step time over an earlier simulation's as well. Everything is
deterministic.
"""

import argparse
import json
import os
import random
import sys
from array import array
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import repeat, takewhile
from pathlib import Path

from recipes import recipes_of
from unroll import unroll

import torchpager
from torchpager import _core
from torchpager.plan import Act, ActKind, Plan, columns, make_plan
from torchpager.roofline import Link
from torchpager.trace import Step, Trace

ROOT = Path(__file__).resolve().parents[1]
TRACES = ROOT / "benchmarks/traces"
BUDGETS = (0.9, 0.8, 0.67, 0.5, 0.35, 0.25)
STEPS = 3
# Through the pager: rounds, how many of them, the last ones, count, and how many operators the
# host may be ahead of the device.
ROUNDS = 8
COUNTED = 3
RUN_AHEAD = 1000
# On an H200, of 64 MiB while copies run: 0.3 ms for device memory, with making it anew; 0.7 ms
# for host memory. In proportion for other sizes.
MAP_DEVICE_NS_PER_MIB = 4500
MAP_HOST_NS_PER_MIB = 11000
# Where contents are checked: what sizes are divided by, rounds, and the share of the peak.
SHRINK = 256
CHECKED_ROUNDS = 3
CHECKED_SHARE = 0.5
GRANULARITY = 2 << 20
EXTENT_MAX = 64 << 20
FIGURES = (
    ("demand_ms", "on demand"),
    ("pager_ms", "planned"),
    ("mapped_ms", "planned, mappings taking time"),
    ("step_ms", "simulated"),
)
# A figure that got worse by more than this fails --check.
TOLERANCE = 0.02


@dataclass(eq=False)
class Extent:
    """A piece of a block, and where its bytes are."""

    block: int
    size: int
    resident: bool = False
    dirty: bool = False  # the device frame alone holds the bytes
    copying: bool = False
    leaving: bool = False  # to be evicted as soon as it is clean and idle
    coming: bool = False  # a fill has been asked for
    used_at: int = -1
    generation: int = 0  # of its block
    planned: bool = False  # whether the plan has it resident at this point


@dataclass(eq=False)
class Copy:
    """A copy in one direction, waiting or under way. Times in ns, sizes in bytes."""

    extent: Extent
    generation: int
    left: float
    claimed: bool = False  # fills: there is memory for it


@dataclass
class Outcome:
    """What a step took."""

    step_ms: float = 0.0
    in_bytes: int = 0
    out_bytes: int = 0
    misses: int = 0
    host_waits: int = 0  # operators that waited for memory
    peak_bytes: int = 0

    def plus(self, other: "Outcome") -> "Outcome":
        """Return what both took, one after the other."""
        return Outcome(
            self.step_ms + other.step_ms,
            self.in_bytes + other.in_bytes,
            self.out_bytes + other.out_bytes,
            self.misses + other.misses,
            self.host_waits + other.host_waits,
            max(self.peak_bytes, other.peak_bytes),
        )


def extents_of(block: int, size: int) -> list[Extent]:
    """Cut a block; small ones are not cut, and do not move."""
    if size < GRANULARITY:
        return []
    whole = -(-size // GRANULARITY) * GRANULARITY
    sizes = [EXTENT_MAX] * (whole // EXTENT_MAX)
    if whole % EXTENT_MAX:
        sizes.append(whole % EXTENT_MAX)
    return [Extent(block, each) for each in sizes]


@dataclass
class Machine:
    """A compute stream, a link and a device memory that carry out plans."""

    step: Step
    plan: Plan
    budget: int
    link: Link = field(default_factory=Link)
    times_ns: list[int] | None = None  # instead of the recorded ones

    def __post_init__(self) -> None:
        self._set_up()
        self.now = 0.0
        self.used = 0
        self.running: int | None = None
        self.over_link = False
        self.op_left = 0.0
        self.incoming: deque[Copy] = deque()  # in order of claims
        self.outgoing: deque[Copy] = deque()
        self.in_flight: Copy | None = None
        self.out_flight: Copy | None = None
        self.leaving: list[Extent] = []
        self.clock = 0
        self.outcome = Outcome()
        self.left: set[tuple[int, int]] = set()  # of the operator that comes next
        self._plan_begin()
        self._begin()
        self._issue_before(0)

    def _set_up(self) -> None:
        """Make what depends on the step and its plan."""
        count = len(self.step.operators)
        self.extents = [
            extents_of(at, each.size_bytes) for at, each in enumerate(self.step.blocks)
        ]
        self.small = [
            0 if self.extents[at] else each.size_bytes
            for at, each in enumerate(self.step.blocks)
        ]
        self.born: list[list[int]] = [[] for _ in range(count)]
        self.dead: list[list[int]] = [[] for _ in range(count)]
        for at, each in enumerate(self.step.blocks):
            if each.born is not None and each.dead is not None:
                self.born[each.born].append(at)
                self.dead[each.dead].append(at)
        self.acts: list[list[Act]] = [[] for _ in range(count)]
        for act in self.plan.acts:
            self.acts[act.operator].append(act)
        self.times = self.times_ns or [each.device_ns for each in self.step.operators]

    def follow(self, step: Step, plan: Plan) -> None:
        """Go on with another step, in which the blocks that last have the same indices."""
        old, old_blocks = self.extents, self.step.blocks
        self.step, self.plan = step, plan
        self._set_up()
        for at, (before, now) in enumerate(zip(old_blocks, step.blocks, strict=False)):
            if before.born is None and now.born is None:
                assert before.size_bytes == now.size_bytes
                self.extents[at] = old[at]
        self._plan_begin()
        self._issue_before(0)

    def _plan_begin(self) -> None:
        """Find out what the plan has resident where a step begins: as where it ends."""
        for extent in (each for extents in self.extents for each in extents):
            extent.planned = False
        left = {
            (act.operator, act.block) for act in self.plan.acts if act.kind is ActKind.LEAVE
        }
        for at, operator in enumerate(self.step.operators):
            for block in (*operator.reads, *operator.writes):
                for extent in self.extents[block]:
                    extent.planned = extent.planned or (at, block) not in left
        for acts, born, dead in zip(self.acts, self.born, self.dead, strict=True):
            for act in acts:
                if act.kind in (ActKind.FILL, ActKind.EVICT):
                    self.extents[act.block][act.extent].planned = act.kind is ActKind.FILL
            for blocks, planned in ((born, True), (dead, False)):
                for extent in (each for block in blocks for each in self.extents[block]):
                    extent.planned = planned

    def _begin(self) -> None:
        for at, each in enumerate(self.step.blocks):
            if each.born is None or (each.dead is not None and each.dead < each.born):
                self.used += self.small[at]
        for at, each in enumerate(self.step.blocks):
            if each.born is None or (each.dead is not None and each.dead < each.born):
                for extent in self.extents[at]:
                    if self.used + extent.size <= self.budget:
                        self.used += extent.size
                        extent.resident = extent.dirty = True

    # -- one step ------------------------------------------------------------------------------

    def run_step(self) -> Outcome:
        """Run all operators once."""
        self.outcome = Outcome()
        began = self.now
        count = len(self.step.operators)
        for at in range(count):
            self._start_when_possible(at)
            self._issue_before((at + 1) % count)
        while self.running is not None:
            self._settle()
            self._pass_time()
        self.outcome.step_ms = (self.now - began) / 1e6
        return self.outcome

    def _issue_before(self, at: int) -> None:
        """Issue what the plan says between the start of an operator and that of the next."""
        self.left = set()
        for act in self.acts[at]:
            if act.kind is ActKind.LEAVE:
                self.left.add((act.block, act.extent))
            else:
                self._issue(act)

    def _issue(self, act: Act) -> None:
        """Ask for what the plan says; what does not apply to the state is passed over."""
        extent = self.extents[act.block][act.extent]
        if act.kind in (ActKind.FILL, ActKind.EVICT):
            extent.planned = act.kind is ActKind.FILL
        if act.kind is ActKind.WRITE_BACK:
            self._ask_out(extent)
        elif act.kind is ActKind.EVICT:
            # One that is still coming leaves once it has come.
            if (extent.resident or extent.coming) and not extent.leaving:
                self._ask_out(extent)
                extent.leaving = True
                self.leaving.append(extent)
        elif act.kind is ActKind.FILL:
            self._ask_in(extent)
        self._settle()

    def _ask_out(self, extent: Extent) -> None:
        if extent.resident and extent.dirty and not extent.copying:
            extent.copying = True
            self.outgoing.append(Copy(extent, extent.generation, float(extent.size)))

    def _ask_in(self, extent: Extent, *, first: bool = False) -> None:
        # One that is still leaving comes back once it has left.
        if extent.coming and extent.leaving:
            self._stay(extent)
        if not extent.coming and (not extent.resident or extent.leaving):
            extent.coming = True
            copy = Copy(extent, extent.generation, float(extent.size))
            if first:
                self.incoming.appendleft(copy)
            else:
                self.incoming.append(copy)

    # -- operators -----------------------------------------------------------------------------

    def _operands(self, at: int) -> list[tuple[int, int, Extent]]:
        operator = self.step.operators[at]
        return [
            (block, number, extent)
            for block in dict.fromkeys((*operator.reads, *operator.writes))
            for number, extent in enumerate(self.extents[block])
        ]

    def _start_when_possible(self, at: int) -> None:
        born = self.born[at]
        births = sum(
            self.small[each] + sum(e.size for e in self.extents[each]) for each in born
        )
        needed = [
            extent
            for block, number, extent in self._operands(at)
            if block not in born and (block, number) not in self.left
        ]
        left = [
            extent
            for block, number, extent in self._operands(at)
            if (block, number) in self.left
        ]
        waited = False
        while True:
            self._settle()
            if self.running is None:
                for extent in needed:
                    if extent.leaving and not extent.copying:
                        self._stay(extent)
                absent = [each for each in needed if not each.resident or each.leaving]
                # What is left on the host must not be on its way here.
                absent += [each for each in left if each.coming]
                claims = any(not each.claimed for each in self.incoming)
                if not absent and not claims and self.used + births <= self.budget:
                    break
                missing = [each for each in absent if not each.coming and not each.leaving]
                for extent in missing:
                    self.outcome.misses += 1
                    self._ask_in(extent, first=True)
                self._settle()
                if not missing and not self._under_way():
                    self._rescue(needed, births)
                    self._settle()
                waited = waited or not absent
            self._pass_time()
        self.outcome.host_waits += waited
        self._start(at)

    def _stay(self, extent: Extent) -> None:
        extent.leaving = False
        self.leaving.remove(extent)

    def _start(self, at: int) -> None:
        self.clock += 1
        for block in self.born[at]:
            self.used += self.small[block]
            for extent in self.extents[block]:
                extent.generation += 1
                extent.resident = extent.dirty = extent.planned = True
                extent.copying = extent.leaving = extent.coming = False
                self.used += extent.size
        operator = self.step.operators[at]
        came = went = 0
        for block, number, extent in self._operands(at):
            extent.used_at = self.clock
            if not extent.resident:
                assert (block, number) in self.left
                came += extent.size  # also what is changed in place, listed as written only
                went += extent.size * (block in operator.writes)
            elif block in operator.writes:
                extent.dirty = True
        rate = (self.link.both / 2 if came and went else self.link.alone) / 1e9
        self.op_left = max(float(self.times[at]), max(came, went) / rate)
        self.over_link = came + went > 0
        self.outcome.in_bytes += came
        self.outcome.out_bytes += went
        self.running = at
        self.outcome.peak_bytes = max(self.outcome.peak_bytes, self.used)
        assert self.used <= self.budget

    def _end(self) -> None:
        at = self.running
        assert at is not None
        self.running = None
        self.over_link = False
        for block in self.dead[at]:
            self.used -= self.small[block]
            for extent in self.extents[block]:
                in_flight = self.out_flight is not None and self.out_flight.extent is extent
                if extent.resident and not (in_flight and extent.copying):
                    self.used -= extent.size
                if extent.leaving:
                    self._stay(extent)
                extent.generation += 1
                extent.resident = extent.copying = extent.coming = False

    # -- memory and copies ---------------------------------------------------------------------

    def _in_use(self, extent: Extent) -> bool:
        if self.running is None:
            return False
        operator = self.step.operators[self.running]
        return extent.block in operator.reads or extent.block in operator.writes

    def _settle(self) -> None:
        """Do what can be done now: evict what may go, claim memory in order, begin copies."""
        for extent in self.leaving[:]:
            if not extent.resident:
                continue
            if not extent.copying and extent.dirty:
                self._ask_out(extent)  # written since
            if not extent.copying and not extent.dirty and not self._in_use(extent):
                self._stay(extent)
                extent.resident = False
                self.used -= extent.size
        while (
            self.outgoing and self.outgoing[0].extent.generation != self.outgoing[0].generation
        ):
            self.outgoing.popleft()
        for copy in self.incoming:
            if copy.claimed:
                continue
            if copy.extent.resident or self.used + copy.extent.size > self.budget:
                break
            copy.claimed = True
            self.used += copy.extent.size
            self.outcome.peak_bytes = max(self.outcome.peak_bytes, self.used)
        if self.in_flight is None and self.incoming and self.incoming[0].claimed:
            self.in_flight = self.incoming.popleft()
        if (
            self.out_flight is None
            and self.outgoing
            and not self._in_use(self.outgoing[0].extent)
        ):
            self.out_flight = self.outgoing.popleft()
            self.out_flight.extent.dirty = False

    def _under_way(self) -> bool:
        return any((self.running is not None, self.in_flight, self.out_flight, self.outgoing))

    def _rescue(self, needed: list[Extent], births: int) -> None:
        """Make room when nothing else will: what the plan has on the host, then the oldest."""
        want = self.incoming[0].extent.size if self.incoming else births
        idle = [
            extent
            for extents in self.extents
            for extent in extents
            if extent.resident and extent not in needed and not extent.leaving
        ]
        if not idle:
            raise RuntimeError("the plan leaves no way to get memory")
        for extent in sorted(idle, key=lambda each: (each.planned, each.used_at, each.block)):
            if want <= 0:
                break
            self._ask_out(extent)
            extent.leaving = True
            self.leaving.append(extent)
            want -= extent.size

    # -- time ----------------------------------------------------------------------------------

    def _pass_time(self) -> None:
        incoming = self.in_flight if not self.over_link else None
        outgoing = self.out_flight if not self.over_link else None
        rate = (self.link.both / 2 if incoming and outgoing else self.link.alone) / 1e9
        ends = [each.left / rate for each in (incoming, outgoing) if each]
        if self.running is not None:
            ends.append(self.op_left)
        if not ends:
            return  # something will be asked for
        passed = min(ends)
        self.now += passed
        for copy in (incoming, outgoing):
            if copy:
                copy.left -= passed * rate
        if self.running is not None:
            self.op_left -= passed
        if outgoing and outgoing.left < 0.5:
            self._end_out(outgoing)
        if incoming and incoming.left < 0.5:
            self._end_in(incoming)
        if self.running is not None and self.op_left < 1e-6:
            self._end()

    def _end_out(self, copy: Copy) -> None:
        self.out_flight = None
        self.outcome.out_bytes += copy.extent.size
        if copy.extent.generation != copy.generation:
            self.used -= copy.extent.size  # its block is dead; the frame was kept for the copy
        else:
            copy.extent.copying = False

    def _end_in(self, copy: Copy) -> None:
        self.in_flight = None
        self.outcome.in_bytes += copy.extent.size
        copy.extent.coming = False
        copy.extent.resident = True
        copy.extent.dirty = False


def jittered(step: Step, jitter: float) -> list[int]:
    """Return times of a step's operators that differ from the recorded ones."""
    source = random.Random(0)
    return [
        round(each.device_ns * source.uniform(1 - jitter, 1 + jitter))
        for each in step.operators
    ]


def replay(step: Step, plan: Plan, budget: int, *, jitter: float = 0.0) -> Outcome:
    """Carry out a plan in consecutive steps; return what the last of them took."""
    machine = Machine(step, plan, budget, times_ns=jittered(step, jitter))
    return [machine.run_step() for _ in range(STEPS)][-1]


def replay_kinds(steps: Sequence[Step], plans: Sequence[Plan], budget: int) -> Outcome:
    """Carry out steps of different kinds, each with the plan of its own kind, twice over.

    No plan knows which kind comes next: each takes it for its own. Returns what the second time
    took.
    """
    machine = Machine(steps[0], plans[0], budget)
    total = Outcome()
    for counted in (False, True):
        for at, (step, plan) in enumerate(zip(steps, plans, strict=True)):
            if at or counted:
                machine.follow(step, plan)
            outcome = machine.run_step()
            if counted:
                total = total.plus(outcome)
    return total


def core_step(step: Step, shrink: int) -> tuple[bytes | list[str], ...]:
    """Return a step as the core replays it, its blocks divided by ``shrink``."""
    blocks = tuple(replace(each, size_bytes=each.size_bytes // shrink) for each in step.blocks)
    return (
        *columns(Step(step.operators, blocks)).values(),
        [each.name for each in step.operators],
        bytes(each.phase == "backward" for each in step.operators),
    )


def lasting_count(steps: Sequence[Step]) -> int:
    """Return how many blocks, the first ones, are the same in all steps."""
    rows = zip(*(each.blocks for each in steps), strict=False)
    return sum(
        1
        for _ in takewhile(
            lambda row: all(each == row[0] and each.born is None for each in row), rows
        )
    )


def pager_rows(
    steps: Sequence[Step],
    budget: int,
    *,
    rounds: int,
    payload: bool = False,
    planning: bool = False,
    mapping: bool = False,
) -> tuple[list[dict[str, int]], int]:
    """Take steps, one after the other and over again, through the pager.

    Returns what has been counted since the beginning at the end of each step, and how many
    operands were found wrong. As :func:`through_pager` else.
    """
    shrink = SHRINK if payload else 1
    link = Link()
    return _core.replay(
        steps=[core_step(each, shrink) for each in steps],
        order=array("I", list(range(len(steps))) * rounds).tobytes(),
        lasting_count=lasting_count(steps),
        budget_bytes=budget // shrink,
        granularity_bytes=GRANULARITY // shrink,
        extent_max_bytes=EXTENT_MAX // shrink,
        link_bytes_per_s=round(link.alone / shrink),
        link_both_bytes_per_s=round(link.both / shrink),
        map_device_ns_per_mib=MAP_DEVICE_NS_PER_MIB if mapping else 0,
        map_host_ns_per_mib=MAP_HOST_NS_PER_MIB if mapping else 0,
        run_ahead_ops=RUN_AHEAD,
        payload=payload,
        planning=planning,
    )


def through_pager(
    steps: Sequence[Step],
    budget: int,
    *,
    rounds: int = ROUNDS,
    counted: int = COUNTED,
    payload: bool = False,
    planning: bool = False,
    mapping: bool = False,
) -> tuple[Outcome, int]:
    """Take steps, one after the other and over again, through the pager.

    Returns what a round took, on average over the last ones, and how many operands were found
    wrong. With ``payload`` all sizes, the budget's too, are divided by ``SHRINK``, and the link
    is as much slower. With ``mapping`` mappings take time.
    """
    rows, wrong = pager_rows(
        steps, budget, rounds=rounds, payload=payload, planning=planning, mapping=mapping
    )
    last, before = rows[-1], rows[-1 - counted * len(steps)]
    took = {name: last[name] - before[name] for name in last}
    outcome = Outcome(
        step_ms=took["clock_ns"] / counted / 1e6,
        in_bytes=took["to_device_bytes"] // counted,
        out_bytes=took["to_host_bytes"] // counted,
        misses=took["miss_count"] // counted,
        host_waits=took["stall_count"] // counted,
        peak_bytes=last["frames_peak_bytes"],
    )
    return outcome, wrong


def steps_of(trace: Trace) -> tuple[Step, ...]:
    """Return the steps that stand for a program: one, or all where they vary."""
    steps, step = trace.steps(), trace.step()
    return steps if len(step.operators) > len(steps[-1].operators) else (step,)


def pager_columns(
    kind: str, steps: Sequence[Step], budget: int, *, planning: bool, mapping: bool = False
) -> dict:
    """Take steps through the pager; return columns of a row, named after ``kind``."""
    try:
        outcome, wrong = through_pager(steps, budget, planning=planning, mapping=mapping)
    except _core.CoreError as error:
        return {f"{kind}_ms": None, f"{kind}_reason": str(error)}
    assert wrong == 0, "an operand was not mapped"
    return {
        f"{kind}_ms": round(outcome.step_ms, 3),
        f"{kind}_in_bytes": outcome.in_bytes,
        f"{kind}_out_bytes": outcome.out_bytes,
        f"{kind}_misses": outcome.misses,
        f"{kind}_host_waits": outcome.host_waits,
        f"{kind}_held_bytes": outcome.peak_bytes,
    }


def rows_of(trace: Trace, share: float, bounds: dict, jitter: float) -> Iterator[dict]:
    """Replay one trace at one budget, without drops and with them."""
    page = row_of(trace, share, bounds, jitter)
    yield page
    yield joint_row_of(trace, share, bounds, jitter, page)


def replay_trace(name: str, budgets: Sequence[float], jitter: float) -> list[dict]:
    """Replay one trace at each budget."""
    bounds = json.loads((TRACES / "bounds.json").read_text())
    trace = torchpager.load_trace(TRACES / f"{name}.trace.gz")
    return [row for share in budgets for row in rows_of(trace, share, bounds, jitter)]


def simulated_columns(
    steps: Sequence[Step], plans: Sequence[Plan], budget: int, jitter: float
) -> dict:
    """Carry plans out in the event simulation; return columns of a row."""
    if len(steps) > 1:
        outcome = replay_kinds(steps, plans, budget)
    else:
        outcome = replay(steps[0], plans[0], budget, jitter=jitter)
    return {
        "step_ms": round(outcome.step_ms, 3),
        "in_bytes": outcome.in_bytes,
        "out_bytes": outcome.out_bytes,
        "planned_ms": round(sum(each.step_ms for each in plans), 3),
        "misses": outcome.misses,
        "host_waits": outcome.host_waits,
        "held_bytes": outcome.peak_bytes,
    }


def head_of(trace: Trace, share: float, bounds: dict, mode: str) -> dict:
    """Return the columns of a row that say what it is about; its figures are missing."""
    known = bounds.get(trace.name) or bounds[f"{trace.name}+chunk"]
    return {
        "trace": trace.name,
        "mode": mode,
        "budget": share,
        "peak_bytes": trace.peak_bytes,
        "native_ms": round(sum(each.device_ns for each in steps_of(trace)) / 1e6, 3),
        "roof_ms": known["paging_bound_ms"][str(share)],
        "step_ms": None,
        "in_bytes": None,
        "out_bytes": None,
    }


def row_of(trace: Trace, share: float, bounds: dict, jitter: float) -> dict:
    """Replay one trace at one budget."""
    steps, budget = steps_of(trace), int(trace.peak_bytes * share)
    row = head_of(trace, share, bounds, "page")
    row |= pager_columns("demand", steps, budget, planning=False)
    row |= pager_columns("pager", steps, budget, planning=True)
    row |= pager_columns("mapped", steps, budget, planning=True, mapping=True)
    try:
        plans = [make_plan(each, budget) for each in steps]
    except _core.CoreError as error:
        return row | {"reason": str(error)}
    return row | simulated_columns(steps, plans, budget, jitter)


def joint_row_of(
    trace: Trace, share: float, bounds: dict, jitter: float, page: dict | None = None
) -> dict:
    """Replay one trace at one budget, with drops. ``page``: its row without them."""
    steps, budget = steps_of(trace), int(trace.peak_bytes * share)
    row = head_of(trace, share, bounds, "joint")
    known = bounds.get(trace.name) or bounds[f"{trace.name}+chunk"]
    row["simulated_ms"] = known["joint_simulated_ms"].get(str(share))
    recipes = [recipes_of(each) for each in steps]
    try:
        plans = [
            make_plan(each, budget, recipes=its)
            for each, its in zip(steps, recipes, strict=True)
        ]
    except _core.CoreError as error:
        return row | {"reason": str(error)}
    row |= {
        "reruns": sum(each.reruns for each in plans),
        "rerun_ms": round(sum(each.rerun_ms for each in plans), 3),
        "dropped_bytes": sum(each.dropped_bytes for each in plans),
    }
    if page is not None and row["reruns"] == 0:
        same = ("step_ms", "in_bytes", "out_bytes", "planned_ms", "misses", "host_waits")
        return row | {name: page[name] for name in (*same, "held_bytes")}
    unrolled = [unroll(*each) for each in zip(steps, plans, recipes, strict=True)]
    new_steps, moves = zip(*unrolled, strict=True)
    return row | simulated_columns(new_steps, moves, budget, jitter)


def line_of(row: dict) -> str:
    """Format a row for people: on demand, planned, mapped, and by the event simulation."""
    parts = [f"{row['trace']:16} {row['budget']:>5.0%}"]
    kinds = [(name, f"{name}ms") for name in ("demand_", "pager_", "mapped_")]
    kinds.append(("", "step_ms"))
    for kind, figure in kinds if row["mode"] == "page" else kinds[-1:]:
        if row[figure] is None:
            parts.append(f"does not fit: {row[kind + 'reason']}")
        else:
            parts.append(figures_of(row, kind, row[figure]))
    if row["mode"] == "joint":
        parts.insert(1, "with drops")
        if row["step_ms"] is not None:
            parts.append(f"{row['reruns']} reruns, {row['rerun_ms']:.1f} ms")
        if row["step_ms"] is not None and row["simulated_ms"] is not None:
            parts.append(f"{row['step_ms'] / row['simulated_ms']:.3f} of the earlier figure")
    return " | ".join(parts)


def figures_of(row: dict, kind: str, step_ms: float) -> str:
    bound = f"{step_ms / row['roof_ms']:6.3f}" if row["roof_ms"] else f"{'-':>6}"
    return (
        f"{step_ms:7.1f} {step_ms / row['native_ms']:5.2f} {bound}"
        f" {row[kind + 'in_bytes'] / 1e9:5.1f} {row[kind + 'out_bytes'] / 1e9:5.1f}"
        f" {row[kind + 'misses']:4} {row[kind + 'host_waits']:4}"
    )


def _key(row: dict) -> tuple[str, str, float]:
    return row["trace"], row.get("mode", "page"), row["budget"]


def regressions(rows: list[dict], path: str) -> list[str]:
    """Return a sentence for each row that is worse than in an earlier file."""
    before = {_key(each): each for each in json.loads(Path(path).read_text())}
    found = []
    for row in rows:
        old = before.get(_key(row), {})
        for figure, kind in FIGURES:
            if old.get(figure) is None:
                continue
            if row[figure] is None or row[figure] > old[figure] * (1 + TOLERANCE):
                what = kind if _key(row)[1] == "page" else "with drops"
                found.append(
                    f"{row['trace']} at {row['budget']:.0%}, {what}:"
                    f" {row[figure]} ms, was {old[figure]}"
                )
    return found


def wrong_contents(names: Sequence[str]) -> list[str]:
    """Take traces through the pager with contents; return a sentence for each gone wrong."""
    found = []
    for name in names:
        trace = torchpager.load_trace(TRACES / f"{name}.trace.gz")
        outcome, wrong = through_pager(
            steps_of(trace),
            int(trace.peak_bytes * CHECKED_SHARE),
            rounds=CHECKED_ROUNDS,
            counted=1,
            payload=True,
            planning=True,
        )
        if wrong:
            found.append(f"{name}: {wrong} operands held something wrong")
        if outcome.in_bytes + outcome.out_bytes == 0:
            found.append(f"{name}: nothing was paged, so nothing was checked")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description="Replay recorded traces under a virtual clock."
    )
    parser.add_argument(
        "traces", nargs="*", help="file stems in benchmarks/traces; default: all"
    )
    parser.add_argument("--budgets", nargs="*", type=float, default=BUDGETS)
    parser.add_argument(
        "--jitter", type=float, default=0.0, help="operators take up to so much more or less"
    )
    parser.add_argument(
        "--check", metavar="FILE", help="fail if a figure is 2%% worse than there"
    )
    parser.add_argument(
        "--no-contents", action="store_true", help="leave out the run that checks contents"
    )
    parser.add_argument("--out", default=str(ROOT / "build/replay.json"))
    options = parser.parse_args()
    bounds = json.loads((TRACES / "bounds.json").read_text())
    names = options.traces or [key.removesuffix("+chunk") for key in bounds]
    text = f"{'ms':>7} {'/nat':>5} {'/bound':>6} {'GB in':>5} {'out':>5} {'miss':>4} wait"
    heads = ("on demand", "planned, through the pager", "plans, simulated")
    print(" | ".join([f"{'':22}", *(f"{each:{len(text)}}" for each in heads)]))
    print(" | ".join([f"{'trace':16} {'budget':>5}", *[text] * 3]))
    rows = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for its in pool.map(
            replay_trace, names, repeat(options.budgets), repeat(options.jitter)
        ):
            rows += its
            print(*map(line_of, its), sep="\n", flush=True)
    # Before the rows are written: it may be the same file.
    found = regressions(rows, options.check) if options.check else []
    found = [f"worse: {each}" for each in found]
    wrong = [] if options.no_contents else wrong_contents(names)
    if not options.no_contents:
        print(f"contents at {CHECKED_SHARE:.0%}, {len(names)} traces: {len(wrong)} wrong")
    found += [f"wrong: {each}" for each in wrong]
    Path(options.out).parent.mkdir(parents=True, exist_ok=True)
    Path(options.out).write_text(json.dumps(rows, indent=1) + "\n")
    for each in found:
        print(each, file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
