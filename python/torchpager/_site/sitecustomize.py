"""Runs at the start of every Python process below ``torchpager run``.

Imports nothing but what the interpreter has loaded already. It waits for the process to import
torch by itself; one that never does pays for this file only. Then it gives way to the site
customisation that the user had.
"""

import os
import sys


class _AfterTorch:
    """A finder that finds nothing itself: it adds one call to the end of torch's import."""

    def find_spec(self, name, path=None, target=None):
        """Return torch's own spec, with the call added; None for every other module."""
        if name != "torch" or self not in sys.meta_path:
            return None
        sys.meta_path.remove(self)
        # importlib.util is imported by nearly everything, but not by the interpreter itself.
        import importlib.util

        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)
            return spec
        execute = spec.loader.exec_module

        def execute_and_arm(module):
            del spec.loader.exec_module
            execute(module)
            _arm()

        spec.loader.exec_module = execute_and_arm
        return spec


def _arm():
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


def _here():
    return os.path.dirname(os.path.abspath(__file__))


def _give_way():
    """Run the sitecustomize that this one stands in front of."""
    here = _here()
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    ours = sys.modules.pop("sitecustomize", None)
    try:
        import sitecustomize  # noqa: F401
    except ModuleNotFoundError as error:
        if error.name != "sitecustomize":
            raise
        if ours is not None:
            sys.modules["sitecustomize"] = ours


if "TORCHPAGER_AUTOSTART" in os.environ:
    sys.meta_path.insert(0, _AfterTorch())
_give_way()
