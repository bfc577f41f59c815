"""The C core as Python sees it. Slots: CUDA device index, or SIM_SLOT for the simulated device.

Every call that can wait releases the GIL. Sizes are int bytes; None is "no limit". A failed call
raises CoreError (with .status, a name of base/status.h such as "OUT_OF_MEMORY"; .driver_code; and
.oom, a dict of the tp_oom figures or None) and changes nothing.
"""

from collections.abc import Callable
from typing import Any

SIM_SLOT: int
DEBUG: int  # the TP_DEBUG level of this build
STEP_ASKED: int
OPTIMIZER_BEGIN: int
OPTIMIZER_END: int

class CoreError(Exception):
    status: str
    driver_code: int
    oom: dict[str, int | bool | str] | None

# -- life: one core a slot; it stays registered until the process ends ------------------------------
def sim_open(
    *,
    device_bytes: int,
    granularity: int,
    large_min: int,
    extent_max: int,
    strict: bool,
    page_out_before_op: bool,
    seed: int,
    poison: bool = True,
    readonly: bool = False,
    link_bytes_per_s: int = 0,
) -> None:
    """Create the simulated device and its core at SIM_SLOT. CoreError("BUSY") if one is open."""

def sim_close() -> bool:
    """Destroy the simulated core if no block of it is alive. False: blocks are alive, it stays."""

def cuda_open(
    device: int,
    *,
    large_min: int = 0,
    extent_max: int = 0,
    serve_small: bool = False,
    readonly: bool = False,
    strict: bool = False,
) -> None:
    """Create the core of a CUDA device. CoreError("UNSUPPORTED") with the reason."""

def is_open(slot: int) -> bool: ...
def armed(slot: int) -> bool: ...
def abandon_all() -> None:
    """At interpreter exit: stop the pager threads, leave every mapping as it is."""

def caps(slot: int) -> dict[str, Any]:
    """name, granularity_bytes, total_bytes, host_frames, shared_frames, context_marker,
    fingerprints, and no_fingerprints: why there are none, or ""."""

def memory_info(slot: int) -> tuple[int, int]:
    """Device memory free and total as the driver reports them now, bytes."""

def cuda_probe(device: int = 0, retain: bool = False) -> dict[str, Any]:
    """tp_cuda_probe as a dict; never raises."""

# -- budgets -----------------------------------------------------------------------------------------
def set_budget(slot: int, device_bytes: int | None, host_bytes: int | None) -> None: ...
def get_budget(slot: int) -> tuple[int | None, int | None]: ...
def set_offload(slot: int, offload: bool) -> None: ...
def set_recompute(slot: int, park: bool, recompute: bool) -> None: ...
def set_planning(slot: int, planning: bool) -> None: ...
def empty_cache(slot: int) -> None: ...

# -- blocks (by any address inside one; an unknown address raises CoreError("INVALID")) ---------------
def owns(addr: int) -> int | None:
    """The slot whose core owns the address, or None."""

def block(addr: int) -> dict[str, Any] | None:
    """tp_block_info as a dict, or None when no live block holds the address."""

def blocks(slot: int) -> list[dict[str, Any]]: ...
def touch(addr: int, write: bool = False) -> None:
    """Resident if possible, readable in any case. An address we do not own: nothing."""

def export(addr: int) -> None:
    """Touched, then immovable for good. An address we do not own: nothing."""

def mark_seen(addr: int) -> None: ...
def use_clock(slot: int) -> int: ...
def mark_written(slot: int, addrs: list[int], since: int) -> None:
    """Written without an operator, unless one was seen to write since use_clock() was `since`."""

def mark_step(slot: int, mark: int) -> None:
    """One of STEP_ASKED, OPTIMIZER_BEGIN and OPTIMIZER_END: where steps end."""

def last_step(slot: int) -> dict[str, Any] | None:
    """The last complete step that was recorded, or None.

    names: of the operators, a list. The rest are columns in the machine's byte order, named as for
    make_plan, and began_ns (u64: on the host, since the first operator) and phase (u8: 0 forward,
    1 backward, 2 optimizer). Numbers: number (of the trace as it is, its times included), completed_count
    (how often the step has run) and step_ns (from its first operator to that of the step after it, when
    it ran last; 0: nothing has followed it yet).
    """

def pin(addr: int) -> None: ...
def unpin(addr: int) -> None: ...
def evict(addr: int) -> None: ...
def evict_all(slot: int) -> int: ...
def check(slot: int) -> None: ...

# -- figures -----------------------------------------------------------------------------------------
def stats(slot: int) -> dict[str, Any]:
    """tp_stats: gauges as (current, peak), tallies as (count, bytes, ns), the rest as is."""

def reset_stats(slot: int, peaks: bool = True, totals: bool = True) -> None: ...
def last_oom(slot: int) -> dict[str, Any] | None: ...
def on_first_paging(callback: Callable[[int], None] | None) -> None:
    """callback(slot), once a slot, on the main thread, soon after bytes first moved to the host."""

def on_unseen_write(callback: Callable[[int], None] | None) -> None:
    """callback(slot), once a core, on the main thread: see unseen_addr in stats()."""

def sim_fd(kind: str) -> int:
    """The memfd of "device" or "host" frames of the simulated device."""

# -- planning: pure, no core needed -----------------------------------------------------------------
def make_plan(
    *,
    device_ns: bytes,
    operand_end: bytes,
    streams: bytes,
    operand_block: bytes,
    operand_flags: bytes,
    block_bytes: bytes,
    born: bytes,
    dead: bytes,
    recipe_ns: bytes,
    recipe_op: bytes,
    recipe_input_end: bytes,
    recipe_output_end: bytes,
    recipe_block: bytes,
    budget_bytes: int,
    link_bytes_per_s: int,
    link_both_bytes_per_s: int,
    no_keep: bool,
) -> tuple[bytes, int, int, int, int, int, int, int]:
    """Plan one step (csrc/pager/plan.h). The trace comes as columns in the machine's byte order.

    An entry for each operator: device_ns (u64), operand_end (u32; where its operands end), streams
    (u8). For each operand: operand_block (u32), operand_flags (u8; 1 reads, 2 writes). For each block:
    block_bytes (u64), born and dead (u32; 2**32 - 1 twice: it lives through the step). For each
    recipe, operators rising: recipe_ns (u64), recipe_op (u32), recipe_input_end and recipe_output_end
    (u32; where its inputs and its outputs end in recipe_block, u32). no_keep: bytes of dead blocks are
    not kept for reruns.
    Returns the acts, four u32 each (operator, block, extent, kind: tp_act_kind), the model's step_ns,
    in_bytes, out_bytes and peak_bytes, and the number of reruns, their ns and the dropped bytes.
    CoreError("OUT_OF_MEMORY") if the operands of an operator do not fit, "INVALID" for a trace that
    makes no sense.
    """

def replay(
    *,
    steps: list[tuple[bytes | list[str], ...]],
    order: bytes,
    lasting_count: int,
    budget_bytes: int,
    granularity_bytes: int,
    extent_max_bytes: int,
    link_bytes_per_s: int,
    link_both_bytes_per_s: int,
    map_device_ns_per_mib: int,
    map_host_ns_per_mib: int,
    run_ahead_ops: int,
    payload: bool,
    planning: bool,
) -> tuple[list[dict[str, int]], int]:
    """Take steps through a pager of their own in virtual time (csrc/bind/replay.h).

    A step: the columns of make_plan, in that order, the names of its operators ("": it only keeps
    others apart) and a byte for each that says whether it is part of a backward pass. order: u32,
    indices of steps. Returns tp_replay_row for each step run, figures since the beginning, and how
    many operands were not mapped or, with payload, held a wrong value. CoreError as the core
    answers.
    """
