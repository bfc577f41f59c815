"""Runs at the start of every Python process below ``torchpager run``.

Imports nothing but what the interpreter has loaded already. It waits for the process to import
torch by itself; one that never does pays for this file only. Then it gives way to the site
customisation that the user had.
"""

import os
import sys

TYPE_CHECKING = False  # as typing has it, without its import
if TYPE_CHECKING:
    from importlib.abc import Loader
    from importlib.machinery import ModuleSpec
    from types import ModuleType


class _AfterTorch:
    """A finder that finds nothing itself: it adds one call to the end of torch's import."""

    def find_spec(self, name: str, *_: object) -> "ModuleSpec | None":
        """Return torch's own spec, with the call added; None for every other module."""
        if name != "torch" or self not in sys.meta_path:
            return None
        # Nearly everything imports importlib.util, but the interpreter itself does not.
        import importlib.util

        # Programs also look for torch without importing it: stay for the next time.
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        if spec is not None and spec.loader is not None:
            self._arm_after(spec.loader)
        return spec

    def _arm_after(self, loader: "Loader") -> None:
        execute = loader.exec_module

        def execute_and_arm(module: "ModuleType") -> None:
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
                _arm()

        loader.exec_module = execute_and_arm  # type: ignore[method-assign]


def _arm() -> None:
    # The package may be importable in the parent only through its working directory.
    package_parent = os.path.dirname(os.path.dirname(_here()))
    try:
        from torchpager import _autostart
    except ModuleNotFoundError:
        sys.path.append(package_parent)
        try:
            from torchpager import _autostart
        finally:
            sys.path.remove(package_parent)
    _autostart.arm_child()


def _here() -> str:
    return os.path.dirname(os.path.abspath(__file__))


def _give_way() -> None:
    """Run the sitecustomize that this one stands in front of."""
    here = _here()
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        __import__("sitecustomize")
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


if "TORCHPAGER_AUTOSTART" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
_give_way()
