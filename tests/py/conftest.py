"""Fixtures shared by the Python tests. No test may leave anything in force."""

import gc
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from torchpager import _control, _core, _torch_cpu
from torchpager.simulate import _close_core as close_core

MIB = 1 << 20
GRANULE = 64 << 10


@pytest.fixture(autouse=True)
def nothing_left_behind():
    """Fail a test that leaves a context, the door, a patch or a block behind."""
    numpy_method = torch.Tensor.numpy
    yield
    left = _control.active_contexts()
    for context in reversed(left):
        context.stop()
    assert not left, f"left in force: {left}"
    assert not _torch_cpu.installed()
    assert torch.Tensor.numpy is numpy_method
    if _core.is_open(_core.SIM_SLOT):
        _core.check(_core.SIM_SLOT)
        if not close_core():
            gc.collect()
            assert close_core(), "tensors of a simulated device are alive"


@pytest.fixture(autouse=True)
def mechanisms(monkeypatch):
    """Take away what ``make mechanisms`` does without in this run."""
    without = os.environ.get("TORCHPAGER_TEST_WITHOUT", "").split(",")
    rules = [name for name in without if name.startswith("kRule")]
    if rules:
        header = Path(__file__).resolve().parents[2] / "csrc" / "bind" / "torch_recompute.h"
        text = header.read_text(encoding="utf-8")
        bits = [int(re.search(rf"\b{name} = 1 << (\d+)", text)[1]) for name in rules]
        _torch_cpu.recompute_rules_off(sum(1 << bit for bit in bits))
    if "restore_on_exit" in without:
        unwind = _control.unwind

        def only_end(undos):
            del undos[1:]  # the first one takes the context off the stack
            return unwind(undos)

        monkeypatch.setattr(_control, "unwind", only_end)


@pytest.fixture(autouse=True)
def quiet_environment(monkeypatch):
    """Take the defaults out of the environment."""
    for name in (
        "TORCHPAGER_BUDGET",
        "TORCHPAGER_HOST_BUDGET",
        "TORCHPAGER_AUTOSTART",
        "TORCHPAGER_DEBUG",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def run_python():
    """Run Python in a process of its own; returns the finished process."""

    def run(*args, check=True, timeout=100, **options):
        done = subprocess.run(
            [sys.executable, *map(str, args)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            **options,
        )
        if check and done.returncode:
            pytest.fail(f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}")
        return done

    return run
