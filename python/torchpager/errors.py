"""What torchpager raises: torch's own out-of-memory error, and one of its own."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from torchpager import _core
from torchpager.sizes import format_size

# Programs match on these words, so they stand at the beginning on every device.
OOM_PREFIX = "CUDA out of memory. "
_NO_LIMIT = (1 << 63) - 1


class UnavailableError(RuntimeError):
    """The machine, or the allocator in place, cannot do what was asked."""


@dataclass(frozen=True)
class OutOfMemory:
    """The figures of an allocation that failed. Sizes in bytes; None is "no limit"."""

    requested_bytes: int
    budget_bytes: int | None
    resident_bytes: int
    """Device frames mapped by live tensors."""
    cached_bytes: int
    """Device frames that no live tensor maps."""
    foreign_bytes: int
    """What PyTorch's native allocator holds; not adopted, so it counts and stays."""
    pinned_bytes: int
    unseen_bytes: int
    """Resident, but never seen as a tensor: library workspaces."""
    host_bytes: int
    """Tensor bytes in HOST."""
    host_held_bytes: int
    """Host frames that exist."""
    host_budget_bytes: int | None
    offload: bool
    host_side: bool
    """Whether it was the host budget that had no room."""

    def __str__(self) -> str:
        paging = "on" if self.offload else "off (torchpager.auto_offload() switches it on)"
        text = (
            f"Tried to allocate {format_size(self.requested_bytes)}. "
            f"Budget {format_size(self.budget_bytes)}: "
            f"resident {format_size(self.resident_bytes)} "
            f"(pinned {format_size(self.pinned_bytes)}, never seen as a tensor "
            f"{format_size(self.unseen_bytes)}), cached {format_size(self.cached_bytes)}, "
            f"native {format_size(self.foreign_bytes)}. "
            f"HOST {format_size(self.host_bytes)}; host memory used "
            f"{format_size(self.host_held_bytes)} of {format_size(self.host_budget_bytes)}. "
            f"Paging is {paging}."
        )
        if self.foreign_bytes:
            text += (
                f" {format_size(self.foreign_bytes)} are native and not adopted: "
                "torchpager.adopt() moves tensors that were made before the context."
            )
        return text


def oom_from_figures(figures: dict[str, Any]) -> OutOfMemory:
    """Return the record of the core's figures."""
    names = OutOfMemory.__dataclass_fields__
    return OutOfMemory(**{name: _limit(figures.get(name)) for name in names})


def _limit(value: Any) -> Any:
    """Return a figure with the core's "no limit" as None."""
    if isinstance(value, int) and not isinstance(value, bool) and value > _NO_LIMIT:
        return None
    return value


def out_of_memory(text: str) -> torch.OutOfMemoryError:
    """Return torch's out-of-memory error with the words that programs match on."""
    return torch.OutOfMemoryError(text if text.startswith(OOM_PREFIX) else OOM_PREFIX + text)


def translate(error: _core.CoreError, doing: str) -> Exception:
    """Return the exception that users see for an error of the core.

    Parameters
    ----------
    error
        What the core raised.
    doing
        What was being done, as in "pinning a tensor".
    """
    if error.status in ("OUT_OF_MEMORY", "NO_HOST_MEMORY"):
        if error.oom is not None:
            return out_of_memory(f"While {doing}: {oom_from_figures(error.oom)}")
        return out_of_memory(f"While {doing}: {error}.")
    text = f"{doing}: {error}"
    if error.status == "INVALID":
        return ValueError(text)
    if error.status == "UNSUPPORTED":
        return UnavailableError(f"{text} (`python -m torchpager doctor` says more)")
    return RuntimeError(text)


@contextmanager
def translated(doing: str) -> Iterator[None]:
    """Turn the core's errors into those that users see."""
    try:
        yield
    except _core.CoreError as error:
        raise translate(error, doing) from error
