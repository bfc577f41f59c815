"""Making tensors resident and immovable."""

from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from torchpager import _control, _core, _torch_cpu
from torchpager._pins import Pins
from torchpager.adopt import tensors_in
from torchpager.errors import translate, translated
from torchpager.sizes import kind_of

if TYPE_CHECKING:
    from typing_extensions import Self


class Pin:
    """What :func:`pin` returns: tensors stay where they are until ``unpin()``."""

    def __init__(self) -> None:
        self._pins = Pins()
        self._pinned_bytes = 0

    def __repr__(self) -> str:
        return f"<pin of {self._pinned_bytes} bytes>"

    @property
    def bytes(self) -> int:
        """Device memory held by this pin; 0 after ``unpin()``."""
        return self._pinned_bytes if self._pins else 0

    def unpin(self) -> None:
        """Let the tensors move again, unless another pin holds them. Twice is as once."""
        with translated("unpinning a tensor"):
            self._pins.release()

    def __enter__(self) -> "Self":
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            self.unpin()
        except BaseException:  # an interrupt, perhaps before it began
            self.unpin()
            raise

    def _add(self, block: dict[str, Any]) -> None:
        self._pins.take(block["addr"], block["generation"])
        self._pinned_bytes += block["bytes"]


def pin(thing: torch.Tensor | torch.nn.Module) -> Pin:
    """Bring a tensor, or the parameters and buffers of a module, to the device for good.

    Their addresses map device memory from then on, and nothing changes that until the handle's
    ``unpin()``, or until they are freed: a kernel that torchpager cannot see may use their
    addresses. Pins count: a tensor pinned twice moves after both were undone. Tensors that are
    not torchpager's (small, or native) do not move anyway, and are passed over.

    Parameters
    ----------
    thing
        A tensor (and its gradient) or a module (with its gradients).

    Returns
    -------
    Pin
        A handle with ``unpin()``, which is also a context manager. Dropping it does not unpin.

    Raises
    ------
    TypeError
        The thing is neither.
    torch.OutOfMemoryError
        The budget cannot hold this pin. Nothing is pinned by this call then.

    Examples
    --------
    >>> import torch, torchpager
    >>> with torchpager.simulate("64 MiB"), torchpager.auto_offload():
    ...     x = torch.zeros(1 << 20)
    ...     with torchpager.pin(x) as handle:
    ...         handle.bytes
    4194304
    """
    if not isinstance(thing, torch.Tensor | torch.nn.Module):
        raise TypeError(f"pin() takes a tensor or a module, not {kind_of(thing)}")
    handle = Pin()
    known: set[int] = set()
    try:
        for tensor in tensors_in([thing]):
            _torch_cpu.bring_back(tensor)
            address = _control.tensor_address(tensor)
            block = _core.block(address) if address else None
            if block is None or block["addr"] in known:
                continue
            known.add(block["addr"])
            handle._add(block)
        return handle
    except BaseException as error:
        _control.back_out([handle.unpin])
        if isinstance(error, _core.CoreError):
            raise translate(error, "pinning a tensor") from error
        raise
