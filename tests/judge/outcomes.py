"""A pytest plugin that writes down how each test ended, for a suite that is left as it is.

Loaded with ``-p outcomes``. It seeds every generator before each test, chooses a share of the
tests, and leaves out those that an earlier run has written down. What it is to do comes in the
environment variable ``OUTCOMES``, as JSON; see :class:`Wanted`.
"""

import json
import os
import random
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

VARIABLE = "OUTCOMES"
SEED = 7


@dataclass(frozen=True)
class Wanted:
    """What one run is to do."""

    path: str
    """Gets a line of JSON with "at" when a test begins, and one with "test" when it ended."""
    part: int = 0
    parts: int = 1
    """Of so many parts of the tests, which."""
    share: int = 1
    """One test in so many, chosen by the seed."""
    skip: tuple[str, ...] = ()
    """Tests that are not to run, by the end of their names."""


class Outcomes:
    """The hooks; one object for a run."""

    def __init__(self, wanted: Wanted) -> None:
        self._wanted = wanted
        self._ended: dict[str, Any] = {}
        self._misses = 0

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave the tests of this part that are not known yet."""
        wanted, known = self._wanted, set()
        if os.path.exists(wanted.path):
            lines = Path(wanted.path).read_text().splitlines()
            known = {record.get("test") for record in map(json.loads, lines)}
        chosen = sorted(item.nodeid for item in items)
        random.Random(SEED).shuffle(chosen)
        chosen = chosen[: -(-len(chosen) // wanted.share)][wanted.part :: wanted.parts]
        mine = {name for name in chosen if name not in known}
        mine -= {name for name in mine if name.endswith(wanted.skip or ("\0",))}
        config.hook.pytest_deselected(items=[i for i in items if i.nodeid not in mine])
        items[:] = [item for item in items if item.nodeid in mine]

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        """Begin with the same random numbers, whatever ran before."""
        self._write({"at": item.nodeid})
        random.seed(SEED)
        np.random.seed(SEED)
        torch.manual_seed(SEED)
        self._misses = _misses()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Keep the worst of setup, call and teardown."""
        if report.when == "setup" or report.outcome != "passed":
            self._ended = {"test": report.nodeid, "outcome": "passed", "text": ""}
        if report.outcome != "passed":
            text = str(report.longrepr)
            self._ended |= {"outcome": report.outcome, "text": text[-2000:]}
        if report.when == "teardown":
            self._write(self._ended | {"misses": _misses() - self._misses})

    def _write(self, record: dict[str, Any]) -> None:
        with open(self._wanted.path, "a") as file:
            file.write(json.dumps(record) + "\n")


def _misses() -> int:
    """Return the misses so far; 0 in the run that torchpager has no part in."""
    torchpager = sys.modules.get("torchpager")
    return 0 if torchpager is None else int(torchpager.stats("cpu").misses.count)


def pytest_configure(config: pytest.Config) -> None:
    """Begin, if the environment asks for it."""
    text = os.environ.get(VARIABLE)
    if text is not None:
        options = json.loads(text)
        options["skip"] = tuple(options.get("skip", ()))
        config.pluginmanager.register(Outcomes(Wanted(**options)))
