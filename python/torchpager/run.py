"""``python -m torchpager run``: an unmodified program inside a budget."""

import argparse
import io
import os
import pkgutil
import runpy
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from importlib.machinery import SourceFileLoader

import torch

from torchpager import _autostart
from torchpager.budget import BUDGET_VARIABLE, HOST_BUDGET_VARIABLE

_USAGE_ERROR = 2
_PROGRAM = "(SCRIPT | -m MODULE) ARGS..."


@dataclass(frozen=True)
class Program:
    """What is to run: a script's path or a module's name, and its arguments."""

    name: str
    is_module: bool
    args: tuple[str, ...]


def main(argv: list[str]) -> int:
    """Run a program as Python would, inside the contexts that ``argv`` asks for.

    Parameters
    ----------
    argv
        The arguments after ``run``.

    Returns
    -------
    int
        0 when the program ended by itself, 2 when it could not be started. What the program
        raises passes through, ``SystemExit`` and ``KeyboardInterrupt`` among it.
    """
    parser = _parser()
    options, program = _split(argv, parser)
    names = parser.parse_args(options)
    if program is None:
        parser.error(f"a program is missing: {_PROGRAM}")
    try:
        arming = _autostart.Arming(
            simulate=names.simulate,
            sim_options=dict(_name_and_value(text) for text in names.sim_option),
            budget=names.budget or os.environ.get(BUDGET_VARIABLE) or None,
            host_budget=names.host_budget or os.environ.get(HOST_BUDGET_VARIABLE) or None,
            offload=not names.no_offload,
        )
        simulation = arming.simulation()
        contexts = arming.contexts()
    except ValueError as error:
        parser.error(str(error))
    if simulation is None:
        if arming.sim_options:
            parser.error("--sim-option needs --simulate SIZE")
        if not contexts:
            parser.error("--no-offload without --budget leaves nothing to do")
        if torch.cuda.device_count() == 0:
            return _refuse(
                "no CUDA device is usable here: add --simulate SIZE to run on a simulated "
                "device, or see what is missing with `python -m torchpager doctor`"
            )
    if not program.is_module and not os.path.exists(program.name):
        return _refuse(f"can't open file {program.name!r}: no such file or directory")
    os.environ.update(_autostart.child_environment(arming))
    try:
        _autostart.arm(arming)
    except (ValueError, RuntimeError) as error:
        return _refuse(str(error))
    _run(program)
    return 0


def _refuse(sentence: str) -> int:
    print(f"torchpager run: {sentence}", file=sys.stderr)
    return _USAGE_ERROR


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m torchpager run",
        usage=f"%(prog)s [options] {_PROGRAM}",
        description="Run an unmodified program inside a budget of device memory.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--simulate", metavar="SIZE", help="run on a simulated device of this size, on the CPU"
    )
    parser.add_argument(
        "--sim-option",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="an option of torchpager.simulate(), such as large_min=64KiB; may be repeated",
    )
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        help=f"device memory, such as 8GiB or 50%% (default: {BUDGET_VARIABLE}, else what is "
        "free)",
    )
    parser.add_argument(
        "--host-budget",
        metavar="SIZE",
        help=f"host memory for what does not fit (default: {HOST_BUDGET_VARIABLE}, else what "
        "the machine has)",
    )
    parser.add_argument(
        "--no-offload",
        action="store_true",
        help="a hard cap: what does not fit is an out-of-memory error",
    )
    return parser


def _split(
    argv: list[str], parser: argparse.ArgumentParser
) -> tuple[list[str], Program | None]:
    """Separate our options from the program and its arguments, which may look like options."""
    valued = {
        option
        for action in parser._actions
        if action.nargs is None
        for option in action.option_strings
    }
    index = 0
    while index < len(argv):
        arg, rest = argv[index], argv[index + 1 :]
        if arg == "-m":
            program = Program(rest[0], True, tuple(rest[1:])) if rest else None
            return argv[:index], program
        if arg == "--":
            program = Program(rest[0], False, tuple(rest[1:])) if rest else None
            return argv[:index], program
        if not arg.startswith("-"):
            return argv[:index], Program(arg, False, tuple(rest))
        index += 2 if arg in valued else 1
    return argv, None


def _name_and_value(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"--sim-option {text!r} is not NAME=VALUE")
    return name.replace("-", "_"), value


def _run(program: Program) -> None:
    """Run the program as ``__main__``, with everything set up as Python does it."""
    ours = sys.modules["__main__"]
    sys.modules["__main__"] = types.ModuleType("__main__")
    if "__annotations__" in vars(ours):  # some versions of Python give it to every __main__
        vars(sys.modules["__main__"])["__annotations__"] = {}
    sys.orig_argv[:] = _argv_without_us(program)
    try:
        if program.is_module:
            sys.argv[:] = ["-m", *program.args]
            _execute(lambda: _run_module(program.name, True))
        elif pkgutil.get_importer(program.name) is not None:
            # A folder or an archive with a __main__ module.
            sys.argv[:] = [program.name, *program.args]
            _set_first_path(program.name)
            _execute(lambda: _run_module("__main__", False))
        else:
            sys.argv[:] = [program.name, *program.args]
            _set_first_path(os.path.dirname(os.path.realpath(program.name)))
            _execute(lambda: _run_script(program.name))
    finally:
        # Its functions are still on the stack: their module must not be collected.
        sys.modules.setdefault("torchpager.__main__", ours)


def _argv_without_us(program: Program) -> list[str]:
    """Return the program's own command line: some programs start themselves again."""
    before = sys.orig_argv[
        : next(i for i, arg in enumerate(sys.orig_argv) if arg.startswith("-m"))
    ]
    start = ["-m", program.name] if program.is_module else [program.name]
    return [*before, *start, *program.args]


def _set_first_path(path: str) -> None:
    if not getattr(sys.flags, "safe_path", False):
        sys.path[0] = path


def _run_module(name: str, alter_argv: bool) -> None:
    # What the interpreter itself calls for `python -m`: the public run_module() restores
    # sys.modules and clears the globals when the code ends, which threads and exit handlers
    # would notice.
    runpy._run_module_as_main(name, alter_argv)  # type: ignore[attr-defined]


def _run_script(path: str) -> None:
    absolute = os.path.join(os.getcwd(), path)  # not normalised: Python does not either
    with io.open_code(absolute) as file:
        code = pkgutil.read_code(file)
    if code is None:
        with io.open_code(absolute) as file:
            code = compile(file.read(), absolute, "exec", dont_inherit=True)
    names = vars(sys.modules["__main__"])
    names.update(
        __builtins__=sys.modules["builtins"],
        __file__=absolute,
        __cached__=None,
        __loader__=SourceFileLoader("__main__", absolute),
    )
    exec(code, names)


def _execute(run: Callable[[], None]) -> None:
    """Run the program; an exception that ends it is reported without our own frames."""
    try:
        run()
    except SystemExit:
        raise
    except BaseException:
        _report_without_us()
        raise


def _report_without_us() -> None:
    """Have the interpreter's report of the exception begin where the program begins."""
    hook = sys.excepthook  # the program may have its own

    def report(
        kind: type[BaseException], error: BaseException, traceback: types.TracebackType | None
    ) -> None:
        sys.excepthook = hook
        inner = traceback
        while traceback is not None:
            if traceback.tb_frame.f_code.co_filename == __file__:
                inner = traceback.tb_next
            traceback = traceback.tb_next
        sys.last_traceback = inner
        hook(kind, error.with_traceback(inner), inner)

    sys.excepthook = report
