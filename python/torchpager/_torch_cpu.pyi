"""The CPU door and the operator hook (built against one torch minor)."""

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

def hook_forced(level: int) -> None:
    """Arm the hook regardless of watermarks (benchmarks and tests): 0 not, 1 for the
    operators that follow an allocation, 2 fully."""
