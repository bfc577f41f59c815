"""What a context acts on: the simulated device, or a CUDA device through one of two doors."""

import gc
import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import ModuleType
from typing import TypeAlias

import torch

from torchpager import _control, _core, _torch_cpu, device_report, hostmem, pluggable
from torchpager.errors import UnavailableError, out_of_memory, translate, translated
from torchpager.sizes import format_size

DeviceLike: TypeAlias = int | str | torch.device | None

# What stays free without a budget: the driver and fragments need some.
_AUTO_SHARE_PERCENT = 95
# CUDA libraries load kernels and take workspace outside the allocator after the budget was
# entered.
PROCESS_MARGIN_BYTES = 256 << 20


@dataclass(frozen=True)
class Settings:
    """What is in force on one device. Sizes in bytes; None is "no limit"."""

    device_bytes: int | None = None
    host_bytes: int | None = None
    budgeted: bool = False
    """Whether ``device_bytes`` was asked for by a budget(), not derived by auto_offload()."""
    host_asked: bool = False
    offload: bool = False
    door: bool = False
    report: bool = False
    """Whether PyTorch's questions about the device are answered with ``device_bytes``."""

    @property
    def reported_bytes(self) -> int | None:
        """What is reported as the device's memory; None: what it really has."""
        return self.device_bytes if self.report else None


class Target:
    """One device, with the settings in force on it. All calls under ``_control.lock``."""

    label: str
    door: str
    pages = True
    """Whether this door can move bytes to the host."""
    strict = False
    """Whether bytes in HOST are left unmapped (tests)."""

    def __init__(self, slot: int) -> None:
        self.slot = slot
        self.settings = Settings()

    def open(self) -> None:
        """Create the device's core if it is not there."""
        raise NotImplementedError

    def open_door(self) -> None:
        """Have tensors served by the core from now on."""

    def close_door(self) -> None:
        """Have tensors served as they were before ``open_door``."""

    def report(self, total_bytes: int | None) -> None:
        """Have PyTorch report that much as the device's memory; None: the real figures.

        On the simulated device there is nothing to do: PyTorch has no such figure for CPU
        tensors.
        """

    def flush(self) -> None:
        """Give caches back to the device."""
        _core.empty_cache(self.slot)

    def native_bytes(self) -> int:
        """Return the bytes of tensors that are not ours and count against the budget."""
        return 0

    def native_reserved_bytes(self) -> int:
        """Return the bytes that PyTorch's native allocator holds of the device."""
        return 0

    def outside_bytes(self) -> int:
        """Return what the process holds beside tensors: context and libraries."""
        return 0

    def total_bytes(self) -> int:
        """Return the memory of the device in all."""
        total: int = _core.caps(self.slot)["total_bytes"]
        return total

    def held_bytes(self) -> int:
        """Return what counts against a budget now: our frames and the native allocator's."""
        reserved: int = _core.stats(self.slot)["reserved"][0]
        return reserved + self.native_reserved_bytes()

    def auto_bytes(self) -> int:
        """Return the budget of auto_offload() alone: free plus held, less 5%."""
        free, _ = _core.memory_info(self.slot)
        return (free + self.held_bytes()) * _AUTO_SHARE_PERCENT // 100

    def host_cap_bytes(self) -> int:
        """Return the most host memory that frames of this device may take."""
        held: int = _core.stats(self.slot)["host_held"][0]
        return hostmem.read().cap_bytes(held, charged=self.slot == _core.SIM_SLOT)

    def change(self, new: Settings) -> None:
        """Put other settings in force.

        Raises
        ------
        torch.OutOfMemoryError
            More is held than the new budget, and it cannot be moved. Nothing changed.
        """
        old = self.settings
        undos: list[_control.Undo] = []
        try:
            if new.door and not old.door:
                undos.append(self.close_door)
                self.open_door()
            if new.offload and not old.offload:
                undos.append(partial(self._set_offload, False))
                self._set_offload(True)
            if (new.device_bytes, new.host_bytes) != (old.device_bytes, old.host_bytes):
                undos.append(
                    partial(_core.set_budget, self.slot, old.device_bytes, old.host_bytes)
                )
                self._set_budget(new)
            if new.reported_bytes != old.reported_bytes:
                undos.append(partial(self.report, old.reported_bytes))
                self.report(new.reported_bytes)
            if old.offload and not new.offload:
                undos.append(partial(self._set_offload, True))
                self._set_offload(False)
            # The door is closed last, and is open until that has succeeded.
            self.settings = replace(new, door=new.door or old.door)
        except BaseException:
            _control.back_out(undos)
            raise
        if old.door and not new.door:
            self.close_door()
            self.settings = new

    def restore(self, old: Settings) -> None:
        """Put back what a context found."""
        inner = self.settings
        try:
            self.change(old)
        except torch.OutOfMemoryError as error:
            # The outer bound is the tighter one, which only a derived bound can be.
            _control.logger.warning("%s keeps its budget: %s", self.label, error)
            kept = replace(old, device_bytes=inner.device_bytes, host_bytes=inner.host_bytes)
            self.change(kept)

    def _set_offload(self, offload: bool) -> None:
        with translated(f"switching paging {'on' if offload else 'off'} on {self.label}"):
            _core.set_offload(self.slot, offload)

    def _set_budget(self, new: Settings) -> None:
        if new.offload:
            _control.mark_tensors_seen(self.slot)
        if new.device_bytes is not None and self.held_bytes() > new.device_bytes:
            self.flush()
        try:
            _core.set_budget(self.slot, new.device_bytes, new.host_bytes)
            return
        except _core.CoreError as error:
            if error.status not in ("OUT_OF_MEMORY", "NO_HOST_MEMORY"):
                raise translate(error, f"setting the budget of {self.label}") from error
        gc.collect()
        self.flush()
        try:
            _core.set_budget(self.slot, new.device_bytes, new.host_bytes)
        except _core.CoreError as error:
            if error.status not in ("OUT_OF_MEMORY", "NO_HOST_MEMORY"):
                raise translate(error, f"setting the budget of {self.label}") from error
            if error.status == "NO_HOST_MEMORY":
                raise out_of_memory(self._over_host_budget_text(new)) from error
            raise out_of_memory(self._over_budget_text(new)) from error

    def _over_host_budget_text(self, new: Settings) -> str:
        stats = _core.stats(self.slot)
        return (
            f"A host budget of {format_size(new.host_bytes)} for {self.label} was asked for, "
            f"but host frames hold {format_size(stats['host_held'][0])}, "
            f"{format_size(stats['host'][0])} of them the only copy of bytes in HOST. Delete "
            "tensors, or leave them more room on the device. Nothing was changed."
        )

    def _over_budget_text(self, new: Settings) -> str:
        stats = _core.stats(self.slot)
        native = self.native_reserved_bytes()
        text = (
            f"A budget of {format_size(new.device_bytes)} on {self.label} "
            f"(host budget {format_size(new.host_bytes)}) was asked for, but "
            f"{format_size(self.held_bytes())} are held: resident "
            f"{format_size(stats['resident'][0])}, of them pinned "
            f"{format_size(stats['pinned'][0])}; native {format_size(native)}. "
        )
        if new.offload:
            text += (
                f"Paging is on; HOST holds {format_size(stats['host'][0])}; host memory used "
                f"{format_size(stats['host_held'][0])} of {format_size(new.host_bytes)}. "
            )
        else:
            text += "Paging is off: enter torchpager.auto_offload() first and they can move. "
        if native:
            text += (
                f"{format_size(self.native_bytes())} of native tensors are not adopted: "
                "torchpager.adopt() makes them movable. "
            )
        return text + "Nothing was changed."


class SimTarget(Target):
    """The simulated device, between start and stop of a simulate()."""

    label = "the simulated device"
    door = "simulated"

    def __init__(self, strict: bool) -> None:
        super().__init__(_core.SIM_SLOT)
        self.strict = strict

    def open(self) -> None:
        """Nothing to do: simulate() has opened it, with its door."""

    def auto_bytes(self) -> int:
        """Return 95% of ``device_bytes``."""
        return self.total_bytes() * _AUTO_SHARE_PERCENT // 100


class WrapperTarget(Target):
    """A CUDA device through the wrapper door."""

    door = "wrapper"

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.label = f"cuda:{index}"
        self._glue = cuda_glue()
        self._enabled = False

    def open(self) -> None:
        """Create the core on the device's primary context.

        Raises
        ------
        UnavailableError
            The allocator in place is not the one that this door wraps. Others answer few
            questions, so nothing else is asked before.
        """
        backend = torch.cuda.get_allocator_backend()
        if backend != "native":
            raise UnavailableError(
                "torchpager wraps PyTorch's native CUDA allocator, but the allocator in place "
                f"is {backend!r}: take PYTORCH_ALLOC_CONF=backend:... or the other tool's "
                "change_current_allocator() out"
            )
        torch.cuda.init()  # type: ignore[no-untyped-call]
        _open_cuda(self.slot, self.label)

    def open_door(self) -> None:
        """Wrap the native allocator, and let the core's budget bound it."""
        if not self._glue.installed():
            try:
                self._glue.install()
            except RuntimeError as error:
                raise UnavailableError(str(error)) from error
        self._enabled = True
        self._glue.enable(self.slot, True)
        self._glue.share_budget(self.slot, True)

    def close_door(self) -> None:
        """Restore the native allocator once no device needs the door.

        Whatever part of ``open_door`` was done before it was interrupted.
        """
        if self._enabled:
            self._glue.share_budget(self.slot, False)
            self._glue.enable(self.slot, False)
            self._enabled = False
        others = (t for t in _wrappers.values() if t is not self)
        if not any(target.settings.door for target in others):
            self._glue.uninstall()

    def report(self, total_bytes: int | None) -> None:
        """Have PyTorch report that much as the device's memory; None: the real figures."""
        device_report.report(self.slot, total_bytes, self.held_bytes)

    def flush(self) -> None:
        """Give our caches and the native allocator's back to the device."""
        super().flush()
        self._glue.native_empty_cache()

    def native_bytes(self) -> int:
        """Return the bytes of native tensors; 0 when the allocator in place does not say."""
        if torch.cuda.get_allocator_backend() == "pluggable":
            return 0
        allocated: int = self._glue.native_allocated(self.slot)
        return allocated

    def native_reserved_bytes(self) -> int:
        """Return the native allocator's reserved bytes."""
        reserved: int = self._glue.native_reserved(self.slot)
        return reserved

    def adopt(self, tensor: torch.Tensor) -> int:
        """Move a native tensor's storage into our memory; return the bytes moved."""
        moved: int = self._glue.adopt(tensor)
        return moved

    def outside_bytes(self) -> int:
        """Return context and libraries, as NVML sees the process, with a margin."""
        used = process_used_bytes(self.slot)
        return max(0, used - self.held_bytes()) + PROCESS_MARGIN_BYTES


class PluggableTarget(Target):
    """A CUDA device whose allocator is ours altogether, changed in by the program."""

    door = "pluggable"
    pages = False

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.label = f"cuda:{index}"

    def open(self) -> None:
        """Create the core if no allocation has yet."""
        torch.cuda.init()  # type: ignore[no-untyped-call]
        _open_cuda(self.slot, self.label, serve_small=True)

    def report(self, total_bytes: int | None) -> None:
        """Have PyTorch report that much as the device's memory; None: the real figures."""
        device_report.report(self.slot, total_bytes, self.held_bytes)

    def outside_bytes(self) -> int:
        """Return context and libraries, as NVML sees the process, with a margin."""
        used = process_used_bytes(self.slot)
        return max(0, used - self.held_bytes()) + PROCESS_MARGIN_BYTES


def _open_cuda(slot: int, label: str, serve_small: bool = False) -> None:
    if _core.is_open(slot):
        return
    try:
        _core.cuda_open(
            slot,
            serve_small=serve_small,
            readonly=_control.debug("readonly"),
            strict=_control.debug("strict"),
        )
    except _core.CoreError as error:
        if error.status != "BUSY":  # opened meanwhile, by an allocation on another thread
            raise translate(error, f"opening {label}") from error


_simulated: SimTarget | None = None
_wrappers: dict[int, WrapperTarget] = {}
_pluggables: dict[int, PluggableTarget] = {}


def simulation_began(strict: bool) -> None:
    """Make the simulated device the one that contexts act on."""
    global _simulated
    _simulated = SimTarget(strict)


def simulation_ended() -> None:
    """Make contexts act on CUDA devices again."""
    global _simulated
    _simulated = None


def simulated() -> SimTarget | None:
    """Return the simulated device while a simulate() is active."""
    return _simulated


def resolve(device: DeviceLike = None) -> Target:
    """Return the target that a device argument names.

    Parameters
    ----------
    device
        None: the simulated device inside simulate(), else the current CUDA device. A CUDA
        index, or anything ``torch.device`` accepts; "cpu" is the simulated device.

    Raises
    ------
    UnavailableError
        There is no such device here.
    ValueError
        The index is not one of the devices.
    """
    kind, index = _kind_and_index(device)
    if kind in (None, "cpu") and _simulated is not None:
        return _simulated
    if kind == "cpu":
        raise UnavailableError(
            "the CPU is a device of torchpager only inside torchpager.simulate()"
        )
    if kind not in (None, "cuda"):
        raise UnavailableError(f"torchpager has no door to devices of type {kind!r}")
    if not torch.cuda.is_available():
        raise UnavailableError(
            "no CUDA device is usable here; torchpager.simulate(device_bytes) gives a "
            "simulated one, and `python -m torchpager doctor` says what is missing"
        )
    count = torch.cuda.device_count()
    if index is None:
        index = torch.cuda.current_device()
    if not 0 <= index < count:
        raise ValueError(f"device is cuda:{index}; this machine has cuda:0 to cuda:{count - 1}")
    if pluggable.is_in_place():
        return _pluggables.setdefault(index, PluggableTarget(index))
    if index not in _wrappers:
        _wrappers[index] = WrapperTarget(index)
    return _wrappers[index]


def any_door() -> bool:
    """Return whether tensors of some device are served by us now."""
    return (
        _simulated is not None
        or pluggable.is_in_place()
        or any(target.settings.door for target in _wrappers.values())
    )


def mover(device: torch.device) -> Callable[[torch.Tensor], int] | None:
    """Return what moves native tensors of a device to us; None: no door to it is open."""
    if device.type == "cpu" and _simulated is not None:
        return _torch_cpu.adopt
    if device.type == "cuda" and device.index in _wrappers:
        target = _wrappers[device.index]
        return target.adopt if target.settings.door else None
    return None


def _kind_and_index(device: DeviceLike) -> tuple[str | None, int | None]:
    if device is None:
        return None, None
    if isinstance(device, int) and not isinstance(device, bool):
        return "cuda", device
    try:
        parsed = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"device is {device!r}, which is not a torch device") from error
    return parsed.type, parsed.index


def cuda_glue() -> ModuleType:
    """Return the wrapper door's extension.

    Raises
    ------
    UnavailableError
        This build has none.
    """
    try:
        return importlib.import_module("torchpager._torch_cuda")
    except ImportError as error:
        raise UnavailableError(
            f"this build of torchpager has no CUDA door ({error}); install a CUDA build of "
            "torch and build torchpager again"
        ) from error


def process_used_bytes(index: int) -> int:
    """Return the device memory of this process as NVML reports it.

    Inside a container NVML may list processes under the host's ids, or none. Then this process
    cannot be told apart, and everything used on the device is taken to be its own: right when
    it is alone there, too much (so: on the safe side of a budget) when it is not.

    Raises
    ------
    UnavailableError
        NVML's Python package, or NVML itself, is missing.
    """
    try:
        pynvml = importlib.import_module("pynvml")
    except ImportError as error:
        raise UnavailableError(
            'scope="process" needs NVML: `pip install nvidia-ml-py`'
        ) from error
    try:
        pynvml.nvmlInit()
        uuid = torch.cuda.get_device_properties(index).uuid
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")
        for process in pynvml.nvmlDeviceGetComputeRunningProcesses(handle):
            if process.pid == os.getpid() and process.usedGpuMemory:
                return int(process.usedGpuMemory)
    except pynvml.NVMLError as error:
        raise UnavailableError(f'scope="process" needs NVML, which says: {error}') from error
    free, total = _core.memory_info(index)
    return total - free


def _forget_in_child() -> None:
    """After fork: no door is open and no settings are in force in the child."""
    simulation_ended()
    _wrappers.clear()
    _pluggables.clear()


def _close_at_exit() -> None:
    for target in _wrappers.values():
        if target.settings.door:
            cuda_glue().enable(target.slot, False)


_control.after_fork(_forget_in_child)
_control.at_exit(_close_at_exit)
