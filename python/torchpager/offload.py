"""Paging: what does not fit on the device moves to the host and back by itself."""

from dataclasses import replace
from functools import partial

from torchpager import _control, _core, optimizer_chunks, optimizers, recompute, regions
from torchpager._targets import DeviceLike, resolve
from torchpager.budget import host_size, resolve_host
from torchpager.errors import UnavailableError
from torchpager.sizes import Size


class AutoOffload(_control.Context):
    """What :func:`auto_offload` returns: a context, with ``start()`` and ``stop()``."""

    def __init__(
        self, *, host: Size | None = None, device: DeviceLike = None, recompute: bool = False
    ) -> None:
        super().__init__()
        if not isinstance(recompute, bool):
            raise TypeError(f"recompute is {recompute!r}; possible are True and False")
        self._host = host_size(host)
        self._device = device
        self._recompute = recompute

    def __repr__(self) -> str:
        return "auto_offload()"

    def _enter(self) -> None:
        target = resolve(self._device)
        if not target.pages:
            raise UnavailableError(
                "paging needs the wrapper door; with torchpager.pluggable_allocator() in place "
                "there is only a hard budget"
            )
        target.open()
        _core.set_planning(target.slot, not _control.debug("ondemand"))
        found = target.settings
        device_bytes = found.device_bytes
        self._undo_later(partial(regions.uninstall, self))
        regions.install(self)
        self._undo_later(partial(target.restore, found))
        target.change(
            replace(
                found,
                device_bytes=target.auto_bytes() if device_bytes is None else device_bytes,
                host_bytes=resolve_host(self._host, target),
                host_asked=found.host_asked or self._host is not None,
                offload=True,
                door=True,
            )
        )
        self._undo_later(partial(optimizer_chunks.stop, self))
        optimizer_chunks.start(self, target.slot)
        _control.mark_tensors_seen(target.slot)
        _control.use_slot(target.slot)
        self._undo_later(partial(optimizers.unwatch, self))
        optimizers.watch(self, target.slot)
        if self._recompute or _control.debug("park"):
            self._undo_later(partial(recompute.stop, self))
            recompute.start(self, target.slot, again=self._recompute)


def auto_offload(
    *, host: Size | None = None, device: DeviceLike = None, recompute: bool = False
) -> AutoOffload:
    """Return paging, for the whole process; entered before or after a budget().

    Tensors that do not fit in the budget live in host memory and come back when an operator
    uses them. Without a :func:`torchpager.budget` the budget is what is free on the device on
    entry plus what the process holds there, less 5%; on the simulated device 95% of
    ``device_bytes``.

    After it was left nothing moves any more: what fits has come back, and what does not stays
    in host memory, where it can be used, slowly.

    Parameters
    ----------
    host
        The most host memory that moved bytes may take; see :func:`torchpager.budget`.
    device
        A CUDA device; None: the simulated device inside :func:`torchpager.simulate`, else the
        current CUDA device.
    recompute
        Whether bytes may be given up instead of moved, where making them again takes less time:
        results of operators that are functions of their operands alone, that only autograd
        keeps. Their operator runs once more before the next use, with the same bits.

    Returns
    -------
    AutoOffload
        A context manager with ``start()`` and ``stop()``.

    Raises
    ------
    TypeError
        ``recompute`` is no bool.
    UnavailableError
        On entry: there is no device to act on, or the pluggable allocator is in place.

    Examples
    --------
    >>> import torch, torchpager
    >>> with torchpager.simulate("64 MiB"), torchpager.auto_offload():
    ...     tensors = [torch.zeros(4 << 20) for _ in range(8)]  # 128 MiB
    """
    return AutoOffload(host=host, device=device, recompute=recompute)
