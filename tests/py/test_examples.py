"""The examples in docstrings run and say what they say."""

import doctest
import importlib

import pytest

MODULES = (
    "adopt",
    "budget",
    "offload",
    "pin",
    "plan",
    "pluggable",
    "roofline",
    "simulate",
    "sizes",
)
MODULES += ("stats", "status", "testing", "trace")


@pytest.mark.parametrize("name", ["torchpager", *(f"torchpager.{name}" for name in MODULES)])
def test_examples_in_docstrings_run(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    outcome = doctest.testmod(importlib.import_module(name))
    assert outcome.attempted > 0
    assert outcome.failed == 0
