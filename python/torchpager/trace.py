"""Traces: what the operators of a program touched, allocated and freed, and how long they took.

A trace file is text, often compressed with gzip, one event a line:

=============================================  ==============================================
``l ID BYTES``                                 storage alive when recording began
``a ID BYTES``                                 allocation
``f ID BYTES``                                 free
``o NAME GPU_US CPU_US r IDS... w IDS...``     an operator: its time on the device, the host
                                               time since the first operator, the storages it
                                               reads and writes
``m step N``, ``m phase NAME``, ``m end``      marks
=============================================  ==============================================

What an operator allocates follows its line; one whose outputs are allocated by operators that
it calls stands before them.
"""

import gzip
import os
import re
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from pathlib import Path
from typing import TypeAlias

# About how many bytes of parameters the operators of an optimizer are given at once.
OPTIMIZER_CHUNK_BYTES = 256 * 10**6
# Two steps are of one kind if this share of the device time is spent in like operators.
_SAME_KIND_SHARE = 0.9
_LIST_OPERATOR = re.compile(r"::_(foreach|fused)_")


@dataclass(frozen=True)
class Storage:
    """A storage that appears: alive at the start of the recording, or allocated."""

    ident: int
    size_bytes: int
    was_alive: bool


@dataclass(frozen=True)
class Free:
    """A storage that goes."""

    ident: int


@dataclass(frozen=True)
class Operator:
    """A call of an operator."""

    name: str
    device_us: float
    host_us: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class Mark:
    """The beginning of a step or of a phase, or the end."""

    kind: str
    value: str


Event: TypeAlias = Storage | Free | Operator | Mark


@dataclass(frozen=True)
class StepBlock:
    """A storage in a step.

    Attributes
    ----------
    size_bytes
        As requested.
    born, dead
        The operator that it is allocated just before, and the one that it is freed just after.
        None and None: it lives through the whole step. ``dead < born``: it lives across the
        step's boundary.
    """

    size_bytes: int
    born: int | None
    dead: int | None


@dataclass(frozen=True)
class StepOperator:
    """An operator in a step; operands are indices of blocks."""

    name: str
    phase: str
    device_ns: int
    reads: tuple[int, ...]
    writes: tuple[int, ...]


@dataclass(frozen=True)
class StepRecipe:
    """How blocks of a step can be made again.

    Attributes
    ----------
    operator
        The operator behind which its outputs are complete.
    device_ns
        What a rerun takes on the device, nested operators included.
    inputs, outputs
        Indices of blocks. The outputs are all that it allocates and that outlive it.
    """

    operator: int
    device_ns: int
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Step:
    """The repeating period of a program: operators and the lives of what they touch."""

    operators: tuple[StepOperator, ...]
    blocks: tuple[StepBlock, ...]

    @cached_property
    def device_ns(self) -> int:
        """The operators' time on the device, in all."""
        return sum(each.device_ns for each in self.operators)

    @cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes alive while each operator runs."""
        return self.live_bytes_of(self.blocks)

    def live_bytes_of(self, blocks: Iterable[StepBlock]) -> tuple[int, ...]:
        """Return the bytes of some of its blocks that are alive while each operator runs."""
        count = len(self.operators)
        change = [0] * (count + 1)
        always = 0
        for block in blocks:
            born = 0 if block.born is None else block.born
            dead = count - 1 if block.dead is None else block.dead
            if dead < born:
                always += block.size_bytes
                change[dead + 1] -= block.size_bytes
                change[born] += block.size_bytes
            else:
                change[born] += block.size_bytes
                change[dead + 1] -= block.size_bytes
        live = []
        for each in change[:count]:
            always += each
            live.append(always)
        return tuple(live)

    @property
    def peak_bytes(self) -> int:
        """Most bytes alive at once."""
        return max(self.live_bytes, default=0)


@dataclass(frozen=True, eq=False)
class Trace:
    """What a program did, in order.

    Attributes
    ----------
    name
        The file's name without its endings.
    events
        Storages that appear, frees, operators and marks.
    """

    name: str
    events: tuple[Event, ...]

    @cached_property
    def sizes(self) -> dict[int, int]:
        """Bytes of each storage."""
        return {each.ident: each.size_bytes for each in self.events if type(each) is Storage}

    @cached_property
    def peak_bytes(self) -> int:
        """Most requested bytes alive at once."""
        held = peak = 0
        for event in self.events:
            if type(event) is Storage:
                held += event.size_bytes
                peak = max(peak, held)
            elif type(event) is Free:
                held -= self.sizes[event.ident]
        return peak

    def step(self, *, chunk_bytes: int | None = OPTIMIZER_CHUNK_BYTES) -> Step:
        """Return the period that stands for the program.

        That is the last recorded step. If it is not like the one before, or there is only one,
        it is everything from the first step to the end.

        Parameters
        ----------
        chunk_bytes
            Runs of operators on lists of parameters are split into chunks of about so many
            bytes of parameters, which go through the whole run one after another. None: they
            are left whole.
        """
        return _build_step(self, chunk_bytes)

    def steps(self, *, chunk_bytes: int | None = OPTIMIZER_CHUNK_BYTES) -> tuple[Step, ...]:
        """Return every recorded step.

        Blocks that live through all of them come first in each, and have the same index.
        """
        return _build_steps(self, chunk_bytes)


def load_trace(path: str | os.PathLike[str]) -> Trace:
    r"""Read a recorded trace.

    Parameters
    ----------
    path
        A text file in the format of this module, plain or compressed with gzip.

    Raises
    ------
    OSError
        The file cannot be read.
    ValueError
        The file is no trace; the message names the line.

    Examples
    --------
    >>> import torchpager
    >>> from pathlib import Path
    >>> text = "l 0 4096\nm step 0\no aten::add. 2.5 0 r 0 w 1\na 1 4096\nm end\n"
    >>> _ = Path("small.trace").write_text(text)
    >>> torchpager.load_trace("small.trace").peak_bytes
    8192
    """
    data = Path(path).read_bytes()
    name = Path(path).name
    for ending in (".gz", ".trace"):
        name = name.removesuffix(ending)
    try:
        if data[:2] == b"\x1f\x8b":
            data = gzip.decompress(data)
        text = data.decode()
    except (EOFError, UnicodeDecodeError, gzip.BadGzipFile, zlib.error) as error:
        raise ValueError(f"{os.fspath(path)} is not a trace: {error}") from None
    return Trace(name, tuple(_parse(text.splitlines(), os.fspath(path))))


def _parse(lines: Iterable[str], path: str) -> Iterator[Event]:
    alive: set[int] = set()
    known: set[int] = set()
    for number, line in enumerate(lines, start=1):
        try:
            event = _parse_line(line.split())
            if type(event) is Storage:
                if event.ident in known:
                    raise ValueError(f"storage {event.ident} appears twice")
                known.add(event.ident)
                alive.add(event.ident)
            elif type(event) is Free:
                if event.ident not in alive:
                    raise ValueError(f"storage {event.ident} is not alive")
                alive.remove(event.ident)
        except (IndexError, ValueError) as error:
            raise ValueError(f"{path}, line {number}: {error}") from None
        yield event


def _parse_line(words: Sequence[str]) -> Event:
    kind = words[0] if words else ""
    if kind in ("l", "a"):
        size = int(words[2])
        if size < 0:
            raise ValueError(f"a storage of {size} bytes")
        return Storage(int(words[1]), size, kind == "l")
    if kind == "f":
        return Free(int(words[1]))
    if kind == "m":
        return Mark(words[1], words[2] if len(words) > 2 else "")
    if kind == "o":
        if words[4:5] != ["r"] or "w" not in words:
            raise ValueError("an operator's operands are given as: r IDS... w IDS...")
        writes = words.index("w")
        device_us, host_us = float(words[2]), float(words[3])
        if not (0 <= device_us < 1e12 and 0 <= host_us < 1e15):
            raise ValueError(f"an operator's times are {words[2]} and {words[3]} us")
        return Operator(
            words[1],
            device_us,
            host_us,
            tuple(map(int, words[5:writes])),
            tuple(map(int, words[writes + 1 :])),
        )
    raise ValueError(f"{' '.join(words)[:40]!r} is not an event")


# What makes operators alike: name, phase, sizes of what they read and write.
_Kind: TypeAlias = tuple[str, str, tuple[int, ...], tuple[int, ...]]


def _kinds(trace: Trace) -> dict[int, _Kind]:
    """Return the kind of each operator, by its place among the events."""
    phase, kinds = "", {}
    for at, event in enumerate(trace.events):
        if type(event) is Mark and event.kind == "phase":
            phase = event.value
        elif type(event) is Operator:
            reads = tuple(trace.sizes.get(each, 0) for each in event.reads)
            writes = tuple(trace.sizes.get(each, 0) for each in event.writes)
            kinds[at] = (event.name, phase, reads, writes)
    return kinds


def _lower_medians(trace: Trace, kinds: dict[int, _Kind]) -> dict[_Kind, int]:
    """Return the time of each kind of operator, in ns."""
    times: dict[_Kind, list[float]] = defaultdict(list)
    for at, kind in kinds.items():
        event = trace.events[at]
        assert isinstance(event, Operator)
        times[kind].append(event.device_us)
    return {
        kind: round(sorted(each)[(len(each) - 1) // 2] * 1000) for kind, each in times.items()
    }


def _marks(trace: Trace) -> tuple[list[int], int]:
    """Return the events at which steps begin, and the one at which the recording ends.

    Without marks of steps there is one step: everything behind what was alive at first.
    """
    events = trace.events
    ends = [at for at, each in enumerate(events) if type(each) is Mark and each.kind == "end"]
    end = ends[-1] if ends else len(events)
    starts = [
        at for at, each in enumerate(events[:end]) if type(each) is Mark and each.kind == "step"
    ]
    if starts:
        return starts, end
    first = next((at for at, each in enumerate(events) if type(each) is not Storage), end)
    return [first], end


def _bounds(trace: Trace, kinds: dict[int, _Kind], times: dict[_Kind, int]) -> tuple[int, int]:
    """Return the bounds, among the events, of the period that stands for the program."""
    starts, end = _marks(trace)
    if len(starts) < 2:
        return starts[0], end
    before, last = (
        Counter(kinds[at] for at in range(*each) if at in kinds)
        for each in list(pairwise([*starts, end]))[-2:]
    )
    like = sum(times[kind] * count for kind, count in (before & last).items())
    in_all = sum(times[kind] * count for kind, count in last.items())
    return (starts[-1] if like >= _SAME_KIND_SHARE * in_all else starts[0]), end


@dataclass
class _Draft:
    """A step in the making; storages still have their identity in the trace."""

    operators: list[StepOperator]
    born: dict[int, int]
    dead: dict[int, int]


@lru_cache(maxsize=4)
def _build_step(trace: Trace, chunk_bytes: int | None) -> Step:
    kinds = _kinds(trace)
    times = _lower_medians(trace, kinds)
    start, end = _bounds(trace, kinds, times)
    return _cut(trace, kinds, times, start, end, chunk_bytes)


@lru_cache(maxsize=4)
def _build_steps(trace: Trace, chunk_bytes: int | None) -> tuple[Step, ...]:
    kinds = _kinds(trace)
    times = _lower_medians(trace, kinds)
    starts, end = _marks(trace)
    return tuple(
        _cut(trace, kinds, times, each, after, chunk_bytes)
        for each, after in pairwise([*starts, end])
    )


def _lasting(trace: Trace) -> set[int]:
    """Return the storages that are alive from the first step to the end."""
    (start, *_), end = _marks(trace)
    alive = {each.ident for each in trace.events[:start] if type(each) is Storage}
    return alive - {each.ident for each in trace.events[:end] if type(each) is Free}


def _cut(
    trace: Trace,
    kinds: dict[int, _Kind],
    times: dict[_Kind, int],
    start: int,
    end: int,
    chunk_bytes: int | None,
) -> Step:
    """Make a step of the events in [start, end)."""
    before: set[int] = set()
    for event in trace.events[:start]:
        if type(event) is Storage:
            before.add(event.ident)
        elif type(event) is Free:
            before.remove(event.ident)
    draft = _place(trace, kinds, times, start, end)
    if chunk_bytes is not None:
        draft = _chunk(trace, draft, chunk_bytes)
    return _finish(trace, draft, before)


def _place(
    trace: Trace, kinds: dict[int, _Kind], times: dict[_Kind, int], start: int, end: int
) -> _Draft:
    """Put each operator behind the allocations of what it writes.

    Where a free follows an allocation with no operator between, an operator that does nothing
    keeps them apart.
    """
    draft = _Draft([], {}, {})
    unborn = {each.ident for each in trace.events[start:end] if type(each) is Storage}
    waiting: list[tuple[StepOperator, set[int]]] = []
    phase, allocated = "", False
    for at in range(start, end):
        event = trace.events[at]
        if type(event) is Mark and event.kind == "phase":
            phase = event.value
        elif type(event) is Operator:
            kind = kinds[at]
            lacks = {each for each in event.writes if each in unborn}
            placed = StepOperator(event.name, phase, times[kind], event.reads, event.writes)
            if lacks:
                waiting.append((placed, lacks))
            else:
                draft.operators.append(placed)
                allocated = False
        elif type(event) is Storage:
            unborn.discard(event.ident)
            draft.born[event.ident] = len(draft.operators)
            ready = [each for each, lacks in waiting if lacks <= {event.ident}]
            waiting = [
                (each, lacks - {event.ident})
                for each, lacks in waiting
                if not lacks <= {event.ident}
            ]
            draft.operators += ready
            allocated = not ready
        elif type(event) is Free:
            if allocated or not draft.operators:
                draft.operators.append(StepOperator("", phase, 0, (), ()))
                allocated = False
            draft.dead[event.ident] = len(draft.operators) - 1
    if allocated or not draft.operators:
        draft.operators.append(StepOperator("", phase, 0, (), ()))
    return draft


def _chunk(trace: Trace, draft: _Draft, chunk_bytes: int) -> _Draft:
    """Split runs of list operators, so that each chunk goes through the whole run at once."""
    operators = draft.operators
    result = _Draft([], {}, {})
    # Where each place of the old order begins in the new one, and where it ends.
    begin: dict[int, int] = {}
    ends: dict[int, int] = {}
    moved: dict[int, tuple[int, int]] = {}  # storages that live for one chunk only
    at = 0
    while at < len(operators):
        stop = at
        while stop < len(operators) and _is_of_list(operators[stop]):
            stop += 1
        first = len(result.operators)
        pieces = _chunks_of(trace, operators[at:stop], chunk_bytes) if stop > at else []
        if len(pieces) < 2:
            stop = max(stop, at + 1)
            for place in range(at, stop):
                begin[place] = ends[place] = len(result.operators)
                result.operators.append(operators[place])
        else:
            for piece in pieces:
                head = len(result.operators)
                result.operators += piece
                for operator in piece:
                    for ident in (*operator.reads, *operator.writes):
                        lo, _ = moved.get(ident, (head, 0))
                        moved[ident] = (lo, len(result.operators) - 1)
            last = len(result.operators) - 1
            begin |= dict.fromkeys(range(at, stop), first)
            ends |= dict.fromkeys(range(at, stop), last)
        at = stop
    return _carry_lives(draft, result, begin, ends, moved)


def _carry_lives(
    draft: _Draft,
    result: _Draft,
    begin: dict[int, int],
    ends: dict[int, int],
    moved: dict[int, tuple[int, int]],
) -> _Draft:
    """Bring births and deaths into the new order."""
    for ident, place in draft.born.items():
        split = begin[place] != ends[place]
        result.born[ident] = moved[ident][0] if split and ident in moved else begin[place]
    for ident, place in draft.dead.items():
        split = begin[place] != ends[place]
        result.dead[ident] = moved[ident][1] if split and ident in moved else ends[place]
    return result


def _is_of_list(operator: StepOperator) -> bool:
    """Return whether an operator may stand in a run of list operators."""
    return not operator.name or _LIST_OPERATOR.search(operator.name) is not None


def _chunks_of(
    trace: Trace, run: Sequence[StepOperator], chunk_bytes: int
) -> list[list[StepOperator]]:
    """Split a run of list operators; one chunk: it is left whole."""
    # The lists are as long as there are parameters; scalars such as step counts come as well.
    lengths = [
        len(each) for op in run for each in (op.reads, op.writes) if op.name and len(each) > 1
    ]
    if not lengths:
        return [list(run)]
    count = min(length for length in lengths if length > max(lengths) // 8)
    weights = [0] * count
    for operator in run:
        for lane, ident in _lanes(operator.writes, count):
            weights[lane] = max(weights[lane], trace.sizes.get(ident, 0))
    groups: list[set[int]] = [set()]
    held = 0
    for lane, size in enumerate(weights):
        if held + size > chunk_bytes and groups[-1]:
            groups.append(set())
            held = 0
        groups[-1].add(lane)
        held += size
    in_all = sum(weights) or 1
    shares = [sum(weights[lane] for lane in group) / in_all for group in groups]
    return [
        [_part(operator, group, count, share) for operator in run if operator.name]
        for group, share in zip(groups, shares, strict=True)
    ]


def _lanes(idents: Sequence[int], count: int) -> Iterator[tuple[int, int]]:
    """Yield the parameter that each operand belongs to: lists follow one another.

    What is left over in front of the lists belongs to the first parameter.
    """
    spare = len(idents) % count
    for at, ident in enumerate(idents):
        yield ((at - spare) % count if at >= spare else 0), ident


def _part(operator: StepOperator, group: set[int], count: int, share: float) -> StepOperator:
    return StepOperator(
        operator.name,
        operator.phase,
        round(operator.device_ns * share),
        tuple(ident for lane, ident in _lanes(operator.reads, count) if lane in group),
        tuple(ident for lane, ident in _lanes(operator.writes, count) if lane in group),
    )


def _finish(trace: Trace, draft: _Draft, before: set[int]) -> Step:
    """Give the blocks their numbers.

    A storage that replaces another of its size in each step is one block with it.
    """
    replaced: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for ident, dead in draft.dead.items():
        if ident in before:
            replaced[trace.sizes[ident]].append((ident, dead))
    blocks: list[StepBlock] = []
    number: dict[int, int] = {}

    def add(ident: int, born: int | None, dead: int | None) -> None:
        number[ident] = len(blocks)
        blocks.append(StepBlock(trace.sizes[ident], born, dead))

    # What lives through the whole recording first: then it has one number in all steps.
    lasting = _lasting(trace)
    for ident in sorted(
        before - draft.dead.keys(), key=lambda each: (each not in lasting, each)
    ):
        add(ident, None, None)
    last = len(draft.operators) - 1
    for ident, born in draft.born.items():
        partners = replaced[trace.sizes[ident]]
        if ident in draft.dead:
            add(ident, born, draft.dead[ident])
        elif partners and partners[0][1] < born:
            old, dead = partners.pop(0)
            number[old] = len(blocks)
            add(ident, born, dead)
        else:
            add(ident, born, last)
    for partners in replaced.values():
        for ident, _ in partners:
            # Nothing takes its place: it is there in each step, as far as this one can tell.
            add(ident, None, None)
    operators = tuple(
        StepOperator(
            each.name,
            each.phase,
            each.device_ns,
            tuple(dict.fromkeys(number[ident] for ident in each.reads if ident in number)),
            tuple(dict.fromkeys(number[ident] for ident in each.writes if ident in number)),
        )
        for each in draft.operators
    )
    return Step(operators, tuple(blocks))
