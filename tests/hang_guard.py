"""Hooks of pytest: no test hangs, and what failed is said at once.

A conftest takes them over by importing them, and then they are for the tests of its folder.
With the name of a file in TORCHPAGER_TESTS_BEGUN they write down there which tests have begun,
and leave out those that had begun before: so a run goes on behind one that ended the process.
Limits are multiplied by TORCHPAGER_TESTS_PATIENCE, for tools that slow everything down.
"""

import faulthandler
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest

BEGUN = "TORCHPAGER_TESTS_BEGUN"
PATIENCE = "TORCHPAGER_TESTS_PATIENCE"
AT_THE_END = "all have ended"

LIMIT_S = 90
# After a failed test its teardown gets at least that long.
TEARDOWN_S = 10.0

failures: list[str] = []


class Guard:
    """Prints every thread's stack and ends the process when something takes too long."""

    def __init__(self) -> None:
        self._errors: int | None = None
        self._end: float | None = None

    def open(self, config: pytest.Config) -> None:
        """Keep a copy of the process's error output.

        While a test runs pytest has put a file of its own in the place of descriptor 2, and
        what is written there is lost when the process ends at once.
        """
        if self._errors is None:
            capture = config.pluginmanager.getplugin("capturemanager")
            with capture.global_and_fixture_disabled() if capture else nullcontext():
                self._errors = os.dup(2)

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """End the process if the block takes longer."""
        self._end = time.monotonic() + seconds
        self._arm(seconds)
        try:
            yield
        finally:
            self._end = None
            faulthandler.cancel_dump_traceback_later()

    def arm_again(self) -> None:
        """Go on watching, after somebody else has put an end to it."""
        if self._end is not None:
            self._arm(max(TEARDOWN_S, self._end - time.monotonic()))

    def _arm(self, seconds: float) -> None:
        assert self._errors is not None
        faulthandler.dump_traceback_later(seconds, exit=True, file=self._errors)


guard = Guard()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line(
        "markers", f"limit(seconds): at most that long instead of {LIMIT_S} s"
    )
    guard.open(config)


def note(line: str) -> None:
    """Write a line to the file of what has begun, if there is one."""
    if BEGUN in os.environ:
        with open(os.environ[BEGUN], "a") as file:
            file.write(f"{line}\n")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what had begun before."""
    path = Path(os.environ.get(BEGUN, ""))
    begun = set(path.read_text().splitlines()) if path.is_file() else set()
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in begun])
    items[:] = [item for item in items if item.nodeid not in begun]


def pytest_sessionfinish() -> None:
    """Note that no test has ended the process."""
    note(AT_THE_END)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Watch a test with its setup and its teardown."""
    note(item.nodeid)
    mark = item.get_closest_marker("limit")
    limit_s = mark.args[0] if mark else LIMIT_S
    with guard.within(limit_s * float(os.environ.get(PATIENCE, "1"))):
        return (yield)


@pytest.hookimpl(trylast=True)
def pytest_exception_interact() -> None:
    """Watch the teardown of a failed test: pytest's own plugin has just stopped the clock."""
    guard.arm_again()


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Say at once what failed: a run that is cut short has no summary."""
    if not report.failed:
        return
    failures.append(report.nodeid)
    if "PYTEST_XDIST_WORKER" not in os.environ:  # there the one who started it says it
        print(
            f"\n{report.nodeid}\n{report.longreprtext[-3000:]}", file=sys.__stderr__, flush=True
        )
