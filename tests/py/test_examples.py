"""The examples in docstrings run and say what they say."""

import doctest
import importlib

import pytest

MODULES = ("adopt", "budget", "offload", "pin", "pluggable", "simulate", "sizes", "stats")
MODULES += ("status", "testing")


@pytest.mark.parametrize("name", ["torchpager", *(f"torchpager.{name}" for name in MODULES)])
def test_examples_in_docstrings_run(name):
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0
