"""Names of other modules and classes that stand for something of ours for a while."""

from collections.abc import Iterator
from typing import Any

MISSING = object()
"""In place of a value: the owner's own dictionary has no such name."""


class Replacements:
    """What was put in place of what, and the way back.

    Used under ``_control.lock``. Interrupted anywhere, :meth:`undo` may be called again.
    """

    def __init__(self) -> None:
        # (owner, name, what was in the owner's own dictionary, what we put there)
        self._made: list[tuple[Any, str, Any, Any]] = []

    def __len__(self) -> int:
        return len(self._made)

    def __iter__(self) -> Iterator[tuple[Any, str, Any, Any]]:
        return iter(self._made)

    def put(self, owner: Any, name: str, ours: Any) -> None:
        """Let a name of a module or class stand for something else."""
        self._made.append((owner, name, vars(owner).get(name, MISSING), ours))
        _put(owner, name, ours)

    def undo(self) -> None:
        """Restore what was found. What somebody else has replaced since is left alone."""
        while self._made:
            owner, name, found, ours = self._made[-1]
            if vars(owner).get(name, MISSING) is ours:
                _put(owner, name, found)
            self._made.pop()


def _put(owner: Any, name: str, value: Any) -> None:
    if value is MISSING:
        delattr(owner, name)
    else:
        setattr(owner, name, value)
