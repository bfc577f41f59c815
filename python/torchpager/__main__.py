"""``python -m torchpager run | doctor | demo | roofline``."""

import importlib
import sys

from torchpager import _compat

_COMMANDS = {
    "run": "run an unmodified program inside a budget",
    "doctor": "say what this machine supports, and what to do about each no",
    "demo": "train a small GPT inside half its memory and compare the bits",
    "roofline": "say how fast a recorded step can be inside a budget",
}


def _usage() -> str:
    lines = [f"  {name:10}{what}" for name, what in _COMMANDS.items()]
    return "\n".join(["usage: python -m torchpager COMMAND ...", "", *lines])


def main(argv: list[str]) -> int:
    """Run a command; ``argv`` begins with its name."""
    if argv[:1] in (["-h"], ["--help"]):
        print(_usage())
        return 0
    if not argv or argv[0] not in _COMMANDS:
        print(_usage(), file=sys.stderr)
        return 2
    if argv[0] != "doctor":
        try:
            _compat.check()
        except ImportError as error:
            print(f"torchpager: {error}", file=sys.stderr)
            return 2
    code: int = importlib.import_module(f"torchpager.{argv[0]}").main(argv[1:])
    return code


if __name__ == "__main__":
    # A program run by `run` must find sys.exit() as Python has it: nothing is raised on
    # success.
    _code = main(sys.argv[1:])
    if _code:
        sys.exit(_code)
