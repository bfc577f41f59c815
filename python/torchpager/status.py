"""What is in force, and why something is not."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from torchpager import _control, _core, recompute
from torchpager._targets import DeviceLike, Target, resolve, simulated
from torchpager.errors import UnavailableError
from torchpager.sizes import format_size

_MOST_OPERATORS = 8


@dataclass(frozen=True)
class Status:
    """What is in force on one device. Sizes in bytes; None is "no limit" or "unknown"."""

    active: bool
    """Whether a budget or paging is in force."""
    reasons: tuple[str, ...]
    """Why it is not active, why the promise about addresses does not hold, and why contents
    cannot be compared; else empty."""
    device: str | None = None
    door: str | None = None
    """How tensors are served: "wrapper", "pluggable" or "simulated"."""
    budget_bytes: int | None = None
    host_budget_bytes: int | None = None
    offload: bool = False
    """Whether paging is on."""
    armed: bool = False
    """Whether the operator hook is installed: only while held bytes are near the budget."""
    p4: bool | None = None
    """Whether a live tensor's address is always mapped, also while its bytes are in HOST."""
    verified: bool | None = None
    """Whether contents are compared before device memory is given up without a copy. If not,
    it is never given up without one."""
    native_bytes: int = 0
    """Bytes of native tensors, which count and stay: see :func:`torchpager.adopt`."""
    failed: bool = False
    """Whether a transfer failed in a way that leaves contents in doubt."""
    recompute: bool = False
    """Whether results may be given up and made again (``auto_offload(recompute=True)``)."""
    not_recomputed: tuple[str, ...] = ()
    """With ``recompute``: operators whose results stay or move instead, the largest first, and
    why. All of them: :func:`torchpager.recompute.by_operator`."""

    def __str__(self) -> str:
        lines = [f"torchpager: {'active' if self.active else 'not active'}"]
        if self.device is not None:
            lines.append(f"  device: {self.device}, door: {self.door or 'none'}")
        if self.active:
            paging = (
                "off" if not self.offload else "on, armed" if self.armed else "on, not needed"
            )
            lines += [
                f"  budget: {format_size(self.budget_bytes)}, "
                f"host budget: {format_size(self.host_budget_bytes)}",
                f"  paging: {paging}",
                f"  addresses always mapped (P4): {'yes' if self.p4 else 'no'}",
            ]
        if self.native_bytes:
            lines.append(
                f"  native: {format_size(self.native_bytes)} not adopted; they count and stay "
                "(torchpager.adopt)"
            )
        if self.failed:
            lines.append("  FAILED: a transfer failed and contents may be in doubt")
        if self.recompute:
            lines.append("  recomputing: on")
            lines += [f"    {reason}" for reason in self.not_recomputed]
        return "\n".join(lines + [f"  {reason}" for reason in self.reasons])


def status(device: DeviceLike = None) -> Status:
    """Return what is in force, and why something is not.

    Parameters
    ----------
    device
        As for :func:`torchpager.budget`.

    Returns
    -------
    Status
        ``print()`` it to read it.

    Examples
    --------
    >>> import torchpager
    >>> with torchpager.simulate("64 MiB"), torchpager.budget("32 MiB"):
    ...     torchpager.status().budget_bytes
    33554432
    """
    with _control.lock:
        try:
            target = resolve(device)
        except UnavailableError as error:
            return Status(active=False, reasons=(str(error),))
        return _of_target(target)


def _of_target(target: Target) -> Status:
    if not _core.is_open(target.slot):
        # Asking for the native allocator's figures must not initialise CUDA.
        cuda_in_use = target.door == "wrapper" and torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        native = target.native_bytes() if cuda_in_use else 0
        return Status(
            active=False,
            reasons=("no budget() and no auto_offload() is active on this device",),
            device=target.label,
            native_bytes=native,
        )
    figures = _core.stats(target.slot)
    device_bytes, host_bytes = _core.get_budget(target.slot)
    settings = target.settings
    # The pluggable door serves without any context, and may have a budget from torch's own
    # call.
    active = settings.door or target.door == "pluggable"
    p4, doubt = _always_mapped(target)
    reasons = [] if active else ["no budget() and no auto_offload() is active on this device"]
    if active and not p4:
        reasons.append(doubt)
    again = recompute.is_on(target.slot)
    caps = _core.caps(target.slot)
    if active and not caps["fingerprints"]:
        reasons.append(f"every eviction copies: {caps['no_fingerprints']}")
    return Status(
        active=active,
        reasons=tuple(reasons),
        device=target.label,
        door=target.door if active or target is simulated() else None,
        budget_bytes=device_bytes,
        host_budget_bytes=host_bytes,
        offload=settings.offload,
        armed=bool(figures["armed"]),
        p4=p4,
        verified=bool(caps["fingerprints"]),
        native_bytes=target.native_bytes(),
        failed=bool(figures["failed"]),
        recompute=again,
        not_recomputed=tuple(_not_recomputed()) if again else (),
    )


def _not_recomputed() -> Iterator[str]:
    kept = [row for row in recompute.by_operator() if row.kept or row.why_no_recipe]
    for row in kept[:_MOST_OPERATORS]:
        yield f"{row.name}: {'; '.join(row.reasons())}"


def _always_mapped(target: Target) -> tuple[bool, str]:
    """Return whether promise P4 holds on a device, and if not, why."""
    caps = _core.caps(target.slot)
    if not caps["host_frames"]:
        return False, "P4 is off: the driver cannot map host memory at a tensor's address"
    if target.strict:
        return False, "P4 is off: simulate(strict=True) leaves bytes in HOST unmapped"
    if target is not simulated() and _control.debug("strict"):
        return False, "P4 is off: TORCHPAGER_DEBUG=strict leaves bytes in HOST unmapped"
    return True, ""
