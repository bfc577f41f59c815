"""A simulated device for machines without a GPU: real PyTorch, real paging, on the CPU."""

import gc
import mmap
from dataclasses import asdict, dataclass

from torchpager import _control, _core, _targets, _torch_cpu, patches
from torchpager.errors import translated
from torchpager.sizes import Size, format_size, kind_of, parse_size
from torchpager.stats import retire

# A block moves in pieces of this many granules at most, as on a CUDA device (32 x 2 MiB).
_EXTENT_GRANULES = 32
_LARGEST_GRANULE = 1 << 40
_SLOWEST_LINK = 2 << 20  # slower ones cannot be planned for


@dataclass(frozen=True)
class _Options:
    """The arguments of ``_core.sim_open``."""

    device_bytes: int
    granularity: int
    large_min: int
    extent_max: int
    strict: bool
    page_out_before_op: bool
    seed: int
    readonly: bool
    link_bytes_per_s: int


class Simulation(_control.Context):
    """What :func:`simulate` returns: a context, with ``start()`` and ``stop()``."""

    # The options of the core that is open, which may outlive its context.
    _opened: _Options | None = None

    def __init__(
        self,
        device_bytes: Size,
        *,
        granularity: Size = "2 MiB",
        large_min: Size | None = None,
        strict: bool = False,
        page_out_before_each_op: bool = False,
        seed: int = 0,
        link: Size | None = None,
    ) -> None:
        super().__init__()
        granularity_bytes = parse_size(granularity, name="granularity")
        possible = mmap.PAGESIZE <= granularity_bytes <= _LARGEST_GRANULE
        if not possible or granularity_bytes & (granularity_bytes - 1):
            raise ValueError(
                f"granularity is {granularity!r}; possible are powers of two from "
                f"{mmap.PAGESIZE} bytes, this machine's OS page, to "
                f"{format_size(_LARGEST_GRANULE)}"
            )
        size = parse_size(device_bytes, name="device_bytes")
        size -= size % granularity_bytes
        if size == 0:
            raise ValueError(
                f"device_bytes is {device_bytes!r}, less than one granule of "
                f"{format_size(granularity_bytes)}"
            )
        link_bytes_per_s = 0 if link is None else parse_size(link, name="link")
        if link is not None and link_bytes_per_s < _SLOWEST_LINK:
            raise ValueError(
                f"link is {link!r}; possible are {format_size(_SLOWEST_LINK)} a second and more"
            )
        for name, flag in (
            ("strict", strict),
            ("page_out_before_each_op", page_out_before_each_op),
        ):
            if not isinstance(flag, bool):
                raise TypeError(f"{name} is {flag!r}; possible are True and False")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise TypeError(f"seed is {seed!r}, {kind_of(seed)}; it must be an int")
        if not 0 <= seed < 1 << 64:
            raise ValueError(f"seed is {seed}; possible are 0 to 2**64 - 1")
        self._options = _Options(
            device_bytes=size,
            granularity=granularity_bytes,
            large_min=(
                granularity_bytes
                if large_min is None
                else parse_size(large_min, name="large_min")
            ),
            extent_max=_EXTENT_GRANULES * granularity_bytes,
            strict=strict,
            page_out_before_op=page_out_before_each_op,
            seed=seed,
            readonly=_control.debug("readonly"),
            link_bytes_per_s=link_bytes_per_s,
        )

    def __repr__(self) -> str:
        return f"simulate({self._options.device_bytes})"

    def _enter(self) -> None:
        if _torch_cpu.installed():
            raise RuntimeError(
                "a simulate() is active already, and there is one simulated device"
            )
        self._undo_later(_close_core)
        self._open_core()
        self._undo_later(patches.uninstall)
        patches.install()
        self._undo_later(_paging_off)
        self._undo_later(_torch_cpu.uninstall)
        _torch_cpu.install(self._options.large_min)
        self._undo_later(_targets.simulation_ended)
        _targets.simulation_began(self._options.strict)
        _control.use_slot(_core.SIM_SLOT)

    def _open_core(self) -> None:
        if _core.is_open(_core.SIM_SLOT) and not _close_core():
            gc.collect()
            if not _close_core():
                if Simulation._opened == self._options:
                    return
                alive = _core.stats(_core.SIM_SLOT)["allocated"][0]
                raise RuntimeError(
                    f"{format_size(alive)} of tensors made inside an earlier simulate() are "
                    "alive; a simulate() with other options needs them deleted first"
                )
        Simulation._opened = self._options
        with translated("opening the simulated device"):
            _core.sim_open(**asdict(self._options))


def _paging_off() -> None:
    if _core.is_open(_core.SIM_SLOT):
        with translated("leaving simulate()"):
            _core.set_offload(_core.SIM_SLOT, False)


def _close_core() -> bool:
    """Destroy the simulated core if no tensor of it is alive, keeping its totals."""
    if not _core.is_open(_core.SIM_SLOT):
        return True
    totals = _core.stats(_core.SIM_SLOT)
    oom = _core.last_oom(_core.SIM_SLOT)
    if not _core.sim_close():
        return False
    retire(_core.SIM_SLOT, totals, oom)
    return True


def simulate(
    device_bytes: Size,
    *,
    granularity: Size = "2 MiB",
    large_min: Size | None = None,
    strict: bool = False,
    page_out_before_each_op: bool = False,
    seed: int = 0,
    link: Size | None = None,
) -> Simulation:
    """Return a simulated device, on which CPU tensors count as device memory.

    Inside it every CPU storage of at least ``large_min`` that any thread makes is device
    memory, and :func:`torchpager.budget`, :func:`torchpager.auto_offload` and the rest act on
    it. Real PyTorch runs: only what is below the driver is simulated, on host memory. Its
    figures say nothing about speed.

    Tensors made inside stay usable after it was left. There is one simulated device in a
    process; as long as such tensors are alive, it can only be entered again with the same
    options.

    Reading memory without an operator (``numpy()``, ``tolist()``, DLPack, storages, pickling)
    is patched while it is active; :mod:`torchpager.patches` says what that leaves open.

    Parameters
    ----------
    device_bytes
        Memory of the device, rounded down to the granularity.
    granularity
        Smallest size that is mapped: a power of two, at least one OS page.
    large_min
        Smallest storage that counts as device memory. Default: the granularity.
    strict
        For tests: bytes in HOST are not mapped, so an access that no operator announced crashes
        the process instead of being slow.
    page_out_before_each_op
        For tests: everything that may be evicted is evicted before each operator.
    seed
        Of the order in which simulated copies complete.
    link
        Bytes that plans expect a copy to move in a second. Default: those of a fast PCI Express
        link, "55 GB". At least "2 MiB".

    Returns
    -------
    Simulation
        A context manager with ``start()`` and ``stop()``.

    Raises
    ------
    ValueError, TypeError
        An argument is none of what is possible.
    RuntimeError
        On entry: a simulate() is active already, or tensors of an earlier one with other
        options are alive.

    Examples
    --------
    >>> import torch, torchpager
    >>> with torchpager.simulate("64 MiB"), torchpager.auto_offload():
    ...     tensors = [torch.full((4 << 20,), float(i)) for i in range(8)]
    >>> [t[0].item() for t in tensors[:3]]
    [0.0, 1.0, 2.0]
    """
    return Simulation(
        device_bytes,
        granularity=granularity,
        large_min=large_min,
        strict=strict,
        page_out_before_each_op=page_out_before_each_op,
        seed=seed,
        link=link,
    )
