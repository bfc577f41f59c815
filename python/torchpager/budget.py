"""A hard budget of device memory."""

import os
from dataclasses import replace
from functools import partial
from typing import Literal

from torchpager import _control
from torchpager._targets import DeviceLike, Settings, Target, resolve
from torchpager.hostmem import read as read_host_memory
from torchpager.sizes import Size, check_size, format_size, parse_size

BUDGET_VARIABLE = "TORCHPAGER_BUDGET"
HOST_BUDGET_VARIABLE = "TORCHPAGER_HOST_BUDGET"
SCOPES = ("allocator", "process")


class Budget(_control.Context):
    """What :func:`budget` returns: a context, with ``start()`` and ``stop()``."""

    def __init__(
        self,
        size: Size | None = None,
        *,
        host: Size | None = None,
        device: DeviceLike = None,
        scope: Literal["allocator", "process"] = "allocator",
        report_as_device: bool = False,
    ) -> None:
        super().__init__()
        if size is None:
            size = os.environ.get(BUDGET_VARIABLE) or None
        if size is None:
            raise ValueError(
                f'budget() needs a size, such as "8 GiB", "50%" or int bytes, or '
                f"{BUDGET_VARIABLE} in the environment"
            )
        if scope not in SCOPES:
            raise ValueError(
                f"scope is {scope!r}; possible are {SCOPES[0]!r} and {SCOPES[1]!r}"
            )
        if not isinstance(report_as_device, bool):
            raise TypeError(
                f"report_as_device is {report_as_device!r}; possible are True and False"
            )
        check_size(size, name="budget")
        self._size = size
        self._host = host_size(host)
        self._device = device
        self._scope = scope
        self._report = report_as_device
        self._target: Target | None = None

    def __repr__(self) -> str:
        return f"budget({self._size!r})"

    @property
    def device_bytes(self) -> int | None:
        """The bound in bytes on torchpager's frames plus PyTorch's native reserved bytes.

        None while the budget is not active. With ``scope="process"`` what the context and the
        libraries take is deducted already.
        """
        return self._target.settings.device_bytes if self._active and self._target else None

    def _enter(self) -> None:
        target = resolve(self._device)
        target.open()
        found = target.settings
        device_bytes = self._resolve_size(target, found)
        host_bytes = resolve_host(self._host, target)
        self._target = target
        self._undo_later(partial(target.restore, found))
        target.change(
            replace(
                found,
                device_bytes=device_bytes,
                host_bytes=host_bytes,
                budgeted=True,
                host_asked=found.host_asked or self._host is not None,
                door=True,
                report=found.report or self._report,
            )
        )
        _control.use_slot(target.slot)

    def _resolve_size(self, target: Target, found: Settings) -> int:
        total = target.total_bytes()
        size = parse_size(self._size, name="budget", total_bytes=total)
        if size > total:
            raise ValueError(
                f"budget is {self._size!r}, larger than {target.label}, which has "
                f"{format_size(total)}"
            )
        if self._scope == "process":
            outside = target.outside_bytes()
            if outside >= size:
                raise ValueError(
                    f'budget is {self._size!r} with scope="process", and the CUDA context and '
                    f"libraries alone take {format_size(outside)}"
                )
            size -= outside
        if found.budgeted and found.device_bytes is not None and size > found.device_bytes:
            raise ValueError(
                f"budget is {self._size!r}, larger than the outer budget of "
                f"{format_size(found.device_bytes)}"
            )
        return size


def budget(
    size: Size | None = None,
    *,
    host: Size | None = None,
    device: DeviceLike = None,
    scope: Literal["allocator", "process"] = "allocator",
    report_as_device: bool = False,
) -> Budget:
    """Return a hard cap on device memory, for the whole process.

    Alone it never moves bytes to the host: what does not fit raises ``torch.OutOfMemoryError``,
    and the program goes on. Together with :func:`torchpager.auto_offload` what does not fit
    moves.

    Parameters
    ----------
    size
        ``int`` bytes, ``"8 GiB"``, ``"8 GB"``, or ``"50%"`` of the device's memory. Default:
        ``TORCHPAGER_BUDGET`` from the environment.
    host
        The most host memory that moved bytes may take; ``"50%"`` is of RAM. Default:
        ``TORCHPAGER_HOST_BUDGET``, else what an outer context allows, else what the machine
        has: 80% of RAM, what is available of it, and what the control group leaves. Never more
        than those.
    device
        A CUDA device; None: the simulated device inside :func:`torchpager.simulate`, else the
        current CUDA device.
    scope
        ``"allocator"``: torchpager's frames plus PyTorch's native reserved bytes.
        ``"process"``: the CUDA context and libraries count too. They are measured through NVML
        on entry, and 256 MiB are set aside for what libraries load later. In a container where
        NVML does not show this process, everything used on the device counts as its own. On the
        simulated device, which has no context, both scopes are the same.
    report_as_device
        Have ``torch.cuda.mem_get_info`` and ``torch.accelerator.get_memory_info`` answer with
        this budget and what it leaves free, for programs that size their work by it. They
        answer with the budget in force when a tighter one is entered inside. Default: the
        device's own figures. ``get_device_properties`` describes the hardware either way, and
        so does what a program bound to another name before. On the simulated device it does
        nothing: PyTorch has no such figure for CPU tensors.

    Returns
    -------
    Budget
        A context manager with ``start()`` and ``stop()``.

    Raises
    ------
    ValueError, TypeError
        The size is not one, or there is none. On entry: it is larger than the device, or than
        the budget around it.
    UnavailableError
        On entry: there is no device to act on.
    torch.OutOfMemoryError
        On entry: more is held than the budget, and it cannot be moved. Nothing was changed.

    Examples
    --------
    >>> import torch, torchpager
    >>> with torchpager.simulate("64 MiB"), torchpager.budget("16 MiB"):
    ...     x = torch.zeros(1 << 20)
    """
    return Budget(
        size, host=host, device=device, scope=scope, report_as_device=report_as_device
    )


def host_size(host: Size | None) -> Size | None:
    """Return the host budget asked for, by argument or environment, checked as text."""
    if host is None:
        host = os.environ.get(HOST_BUDGET_VARIABLE) or None
    if host is not None:
        check_size(host, name="host budget", zero_allowed=True)
    return host


def resolve_host(host: Size | None, target: Target) -> int:
    """Return the host budget in bytes: what was asked for, within what the machine has.

    Raises
    ------
    ValueError
        More was asked for than the outer context was.
    """
    found, cap = target.settings, target.host_cap_bytes()
    if host is None:
        return cap if found.host_bytes is None else found.host_bytes
    ram = read_host_memory().ram_bytes
    size = parse_size(host, name="host budget", total_bytes=ram, zero_allowed=True)
    if found.host_asked and found.host_bytes is not None and size > found.host_bytes:
        raise ValueError(
            f"host budget is {host!r}, larger than the outer host budget of "
            f"{format_size(found.host_bytes)}"
        )
    return min(size, cap)
