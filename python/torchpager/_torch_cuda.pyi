"""The wrapper door around PyTorch's CUDA allocator, and the error glue of the pluggable door."""

TORCH_VERSION: str

def install() -> None:
    """Put our allocator around the one in place (CUDA is initialised if it was not). Large blocks on
    devices whose core is open and enabled come from us. RuntimeError when already installed, or when
    the allocator in place is not PyTorch's native one (its name is in the text)."""

def uninstall() -> None:
    """Restore exactly what install() found. Blocks of ours still free into ours. RuntimeError when
    somebody else has installed an allocator since."""

def installed() -> bool: ...
def enable(device: int, on: bool, large_min: int = 2097152) -> None:
    """Whether blocks of that device of at least large_min bytes are served by its core while
    installed."""

def adopt(tensor: object) -> int: ...
def native_reserved(device: int) -> int: ...
def native_allocated(device: int) -> int: ...
def native_empty_cache() -> None: ...
def native_fraction(device: int) -> float: ...
def set_native_fraction(device: int, fraction: float) -> None: ...
def share_budget(device: int, on: bool) -> None:
    """Connect the core's budget to the native allocator's memory fraction (design, section 9);
    off restores the user's own fraction."""

def set_oom_prefix(text: str) -> None: ...
def pluggable_install_thrower() -> None:
    """Register the function that throws torch's out-of-memory error with the C entry points."""
