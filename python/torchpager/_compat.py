"""Whether this build of torchpager and the torch that is installed fit together."""

import importlib
import sys

_REBUILD = (
    "build it from its source tree with `make build`, or with "
    "`pip install --no-build-isolation .`"
)


def built_against() -> str | None:
    """Return the version of torch the glue was built against; None when it was never built."""
    try:
        build = importlib.import_module("torchpager._build")
    except ModuleNotFoundError:
        return None
    version: str = build.TORCH_VERSION
    return version


def minor_of(version: str) -> tuple[int, int]:
    """Return major and minor of a version such as ``2.14.1+cu130``."""
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def check() -> None:
    """Raise ImportError, with what to do about it, unless the extension can be used here."""
    built = built_against()
    if built is None:
        raise ImportError(f"torchpager's extension has not been built: {_REBUILD}")
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise ImportError(
            "torchpager needs PyTorch: `pip install torch`, then " + _REBUILD
        ) from error
    if minor_of(torch.__version__) != minor_of(built):
        raise ImportError(
            f"this build of torchpager is for torch {built}, and torch {torch.__version__} is "
            f"installed; install a matching torch, or {_REBUILD}"
        )
    try:
        importlib.import_module("torchpager._core")
    except ImportError as error:
        raise ImportError(
            f"torchpager's extension cannot be loaded ({error}): {_REBUILD}"
        ) from error


def is_command_line() -> bool:
    """Return whether this is ``python -m torchpager``, whose doctor needs no extension."""
    args = sys.orig_argv[1:]
    for index, arg in enumerate(args):
        if arg.startswith("-m"):
            module = arg[2:] or (args[index + 1] if index + 1 < len(args) else "")
            return module in ("torchpager", "torchpager.__main__")
        if not arg.startswith("-") and args[index - 1 : index] not in (["-W"], ["-X"]):
            return False
    return False
