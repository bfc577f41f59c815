"""Pins that an interrupt cannot lose."""

from torchpager import _core


class Pins:
    """Blocks that are kept in place until ``release()``."""

    def __init__(self) -> None:
        self._blocks: list[tuple[int, int]] = []
        # One item for each block of the list above that was pinned, and unpinned. An interrupt
        # comes after a call, and a pin that nobody noted would stay: extend() over a map() of
        # a function of the core is a single call.
        self._taken: list[None] = []
        self._given: list[None] = []

    def __bool__(self) -> bool:
        return len(self._given) < len(self._taken)

    def take(self, address: int, generation: int) -> None:
        """Pin a block.

        Raises
        ------
        CoreError
            The pins do not fit, or there is no such block. What was taken before stays taken.
        """
        del self._blocks[len(self._taken) :]
        self._blocks.append((address, generation))
        self._taken.extend(map(_core.pin, (address,)))

    def release(self) -> None:
        """Undo every pin whose block is still there. Twice is as once.

        Interrupted, it may be called again.
        """
        while self:
            address, generation = self._blocks[len(self._given)]
            block = _core.block(address)
            # Freed, and perhaps another one is there now.
            if block is None or block["generation"] != generation:
                self._given.append(None)
                continue
            try:
                self._given.extend(map(_core.unpin, (address,)))
            except _core.CoreError as error:
                if error.status != "INVALID":  # freed by another thread since
                    raise
                self._given.append(None)
