"""Steps as they run: where they end, and the last one as a trace."""

import gzip
import os
from array import array
from collections import defaultdict
from collections.abc import Iterator
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any

from torchpager import _control, _core, optimizers
from torchpager._targets import DeviceLike, resolve
from torchpager.errors import UnavailableError
from torchpager.roofline import roof_ms
from torchpager.trace import Step, StepBlock, StepOperator

_NEVER = (1 << 32) - 1
_READS, _WRITES = 1, 2
_PHASES = ("forward", "backward", "optimizer")


def step() -> None:
    """Say that a step of the program ends here.

    A step is what a program repeats: a training iteration, a batch of inference, a token. While
    :func:`torchpager.auto_offload` pages, torchpager learns from one step what the next will
    need. It finds the ends of steps by itself: after optimizers' steps, or by the period of the
    operators. Call this once in each repetition where that does not say it well: when an
    optimizer steps several times in one, or never and the repetitions differ.

    Once it was called, only it counts. Without paging it does nothing.

    Examples
    --------
    >>> import torchpager
    >>> for batch in range(3):
    ...     torchpager.step()
    """
    for slot in optimizers.slots():
        _core.mark_step(slot, _core.STEP_ASKED)


def save_trace(path: str | os.PathLike[str], *, device: DeviceLike = None) -> None:
    """Write the last complete step to a file that :func:`torchpager.load_trace` reads.

    Steps are recorded while :func:`torchpager.auto_offload` pages, that is from when memory
    gets short. The step in which that happened does not count: it takes one more.

    Tensors too small for an address range of their own (below 2 MiB on CUDA) are not in it, nor
    are operators that use no others. Times on the device are estimates from samples; where
    there is none, the time in which the operands can be read once at 1 TB/s.

    Parameters
    ----------
    path
        The file; it is compressed if its name ends in ".gz".
    device
        As for :func:`torchpager.auto_offload`; None: the device that was paged last.

    Raises
    ------
    UnavailableError
        No step has been recorded from its beginning to its end.
    OSError
        The file cannot be written.

    Examples
    --------
    >>> import torch, torchpager
    >>> with (
    ...     torchpager.simulate("64 MiB"),
    ...     torchpager.budget("24 MiB"),
    ...     torchpager.auto_offload(),
    ... ):
    ...     weights = [torch.ones(4 << 20) for _ in range(2)]  # 32 MiB
    ...     for batch in range(3):
    ...         total = sum(weight.sum().item() for weight in weights)
    ...         torchpager.step()
    ...     torchpager.save_trace("sums.trace")
    ...     del weights
    >>> len(torchpager.load_trace("sums.trace").step().operators)
    2
    """
    slot = _control.last_slot() if device is None else resolve(device).slot
    columns = None
    if slot is not None and _core.is_open(slot):
        columns = _core.last_step(slot)
    if columns is None:
        raise UnavailableError(
            "no complete step has been recorded: that needs auto_offload(), a budget that is "
            "short, and at least one whole step from then on"
        )
    data = "".join(f"{line}\n" for line in _lines(columns)).encode()
    target = Path(path)
    # No date in it: the same step gives the same file.
    target.write_bytes(gzip.compress(data, mtime=0) if target.suffix == ".gz" else data)


def efficiency(slot: int) -> float | None:
    """Return a bound on the time of the last complete step over what it took.

    None while no step has been recorded twice, or nothing bounds the memory.
    """
    columns = _core.last_step(slot) if _core.is_open(slot) else None
    budget_bytes = _core.get_budget(slot)[0] if columns is not None else None
    if columns is None or budget_bytes is None or columns["step_ns"] == 0:
        return None
    step = _step_of(*(columns[name] for name in _STEP_COLUMNS))
    # Whatever is recorded has extents, and can move.
    bound = roof_ms(step, budget_bytes, large_min_bytes=1)
    return None if bound is None else bound * 1e6 / float(columns["step_ns"])


_STEP_COLUMNS = (
    "device_ns", "operand_end", "operand_block", "operand_flags", "block_bytes", "born", "dead",
)  # fmt: skip


@lru_cache(maxsize=2)
def _step_of(
    device_ns: bytes,
    operand_end: bytes,
    operand_block: bytes,
    operand_flags: bytes,
    block_bytes: bytes,
    born: bytes,
    dead: bytes,
) -> Step:
    """Return a recorded step, without the names of its operators."""
    operands = array("I", operand_block)
    ends = pairwise([0, *array("I", operand_end)])
    operators = tuple(
        StepOperator(
            "",
            "",
            ns,
            tuple(operands[i] for i in range(begin, end) if operand_flags[i] & _READS),
            tuple(operands[i] for i in range(begin, end) if operand_flags[i] & _WRITES),
        )
        for ns, (begin, end) in zip(array("Q", device_ns), ends, strict=True)
    )
    blocks = tuple(
        StepBlock(size, None, None) if first == _NEVER else StepBlock(size, first, last)
        for size, first, last in zip(
            array("Q", block_bytes), array("I", born), array("I", dead), strict=True
        )
    )
    return Step(operators, blocks)


def _lines(columns: dict[str, Any]) -> Iterator[str]:
    """Yield the lines of a trace file, without their ends."""
    sizes = array("Q", columns["block_bytes"])
    born, dead = array("I", columns["born"]), array("I", columns["dead"])
    births, deaths = defaultdict(list), defaultdict(list)
    # Who takes the place of another in each step has an identity of its own in the file.
    later: dict[int, int] = {}
    for block, (first, last) in enumerate(zip(born, dead, strict=True)):
        if first == _NEVER or last < first:
            yield f"l {block} {sizes[block]}"
        if first == _NEVER:
            continue
        if last < first:
            later[block] = len(sizes) + len(later)
            deaths[last].append(block)
            births[first].append(block)
        else:
            births[first].append(block)
            deaths[last].append(block)
    yield "m step 0"
    yield from _operator_lines(columns, births, deaths, later)
    yield "m end"


def _operator_lines(
    columns: dict[str, Any],
    births: dict[int, list[int]],
    deaths: dict[int, list[int]],
    later: dict[int, int],
) -> Iterator[str]:
    sizes = array("Q", columns["block_bytes"])
    operands, flags = array("I", columns["operand_block"]), columns["operand_flags"]
    times, began = array("Q", columns["device_ns"]), array("Q", columns["began_ns"])
    ends, phases = array("I", columns["operand_end"]), columns["phase"]
    last_operator = len(times) - 1
    ident = list(range(len(sizes)))
    phase, begin = None, 0
    for at, name in enumerate(columns["names"]):
        if phases[at] != phase:
            phase = phases[at]
            yield f"m phase {_PHASES[phase]}"
        for block in births.get(at, ()):
            ident[block] = later.get(block, block)
            yield f"a {ident[block]} {sizes[block]}"
        used = range(begin, ends[at])
        reads = [ident[operands[i]] for i in used if flags[i] == _READS]
        writes = [ident[operands[i]] for i in used if flags[i] & _WRITES]
        words = ["o", name or "?", f"{times[at] / 1000:.3f}", f"{began[at] / 1000:.3f}"]
        yield " ".join([*words, "r", *map(str, reads), "w", *map(str, writes)])
        for block in deaths.get(at, ()):
            # What is alive at the end of the step is alive at the end of the recording.
            if at != last_operator or block in later:
                yield f"f {ident[block]}"
        begin = ends[at]
