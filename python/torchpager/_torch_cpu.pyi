"""The CPU door and the operator hook (built against one torch minor)."""

from collections.abc import Callable
from typing import Any

TORCH_VERSION: str  # the torch it was built against, "2.14.1"

def install(large_min: int) -> None:
    """CPU storages of at least large_min bytes come from the core at SIM_SLOT from now on; the
    operator hook follows that core's arming. RuntimeError when already installed."""

def uninstall() -> None:
    """CPU allocations come from PyTorch's allocator again; blocks of ours still free into ours, and
    the hook stays for as long as the core is armed. Nothing when not installed."""

def installed() -> bool: ...
def adopt(tensor: object) -> int:
    """Move the storage of a CPU tensor into the core at SIM_SLOT (same tensor objects, views and ties);
    bytes moved, 0 when it is there already or too small. RuntimeError says why it cannot be."""

def is_door_storage(tensor: object) -> bool: ...
def hook_calls() -> int:
    """Operators the hook has seen on all threads."""

def hook_watches() -> bool:
    """Whether the operator hook tells of every operator now."""

def announced(function: Callable[..., Any], mode: int) -> Callable[..., Any]:
    """A callable, and a method of the class it is put in, that calls ``function`` and, while that
    is so, tells the pager around the call what it does. mode is a sum of: 1, it holds
    the tensors among its arguments, and what is allocated inside, in place; 2, it is an opaque
    region that uses them; 4, it announces everything it launches, so regions around it leave the
    gate open; 8, arguments that ``self.fn.arg_names`` calls "in_ptr..." are only read. All others
    count as written. Tensors are looked for in tuples and lists, and in ``base`` of other objects."""

def defer_collectives(change: int) -> None:
    """Between a call with 1 and one with -1, collectives only begin later what they are asked for:
    their operands become immovable."""

def recompute_mode(mode: int) -> None:
    """0: nothing is dropped, and what is comes back. 1: what plans say. 2: whatever may be."""

def recompute_counts() -> dict[str, int]:
    """Return the fields of recompute.Recomputation."""

def recompute_table() -> list[dict[str, Any]]:
    """Return the fields of recompute.OperatorRecomputation, in no order."""

def bring_back(thing: object, write: bool = False) -> bool:
    """The bytes of a tensor or storage are made again if they were dropped, and are not dropped any
    more. With write they are about to be written: so are those that are made of them. None: those
    of all, for once. Other things: nothing. False: some could not be made."""

def forget_tensor(thing: object) -> None:
    """Nothing refers to a tensor weakly any more, and its bytes are not dropped. Other things: nothing."""

def is_dropped(thing: object) -> bool:
    """Whether a tensor or storage has no bytes now."""

def recompute_rules_off(rules: int) -> None:
    """For tests: do without these, a sum of RecomputeRule (csrc/bind/torch_recompute.h)."""

def hook_forced(level: int) -> None:
    """Arm the hook regardless of watermarks (benchmarks and tests): 0 not, 1 for the
    operators that follow an allocation, 2 fully."""
