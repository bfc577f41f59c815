"""For the tests that need a GPU: they are skipped without one, and none can hang."""

import gc
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

# Deterministic matrix products; read by cuBLAS when it starts.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

import hang_guard
from hang_guard import (  # noqa: F401
    pytest_exception_interact,
    pytest_runtest_logreport,
    pytest_runtest_protocol,
    pytest_sessionfinish,
)

ROOT = Path(__file__).resolve().parents[2]


def pytest_configure(config: pytest.Config) -> None:
    hang_guard.pytest_configure(config)
    config.addinivalue_line("markers", "long: of make test-gpu-long, not of make test-gpu")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    hang_guard.pytest_collection_modifyitems(config, items)
    if torch.cuda.is_available():
        return
    for item in items:
        item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture(autouse=True)
def clean_device() -> Iterator[None]:
    """Give every test a device on which nothing of the one before is left."""
    # What libraries have made by now stays: collections that look through it take seconds.
    # After a failure the traceback is among it, and what that holds must go.
    if not hang_guard.failures:
        gc.freeze()
    yield
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


class Script:
    """Runs Python in a process of its own and returns what it printed."""

    def __call__(
        self, *arguments: str, code: int | None = 0, timeout_s: int = 80, **environment: str
    ) -> str:
        """Run ``python -X faulthandler ARGUMENTS``; None as ``code`` accepts any exit code."""
        done = subprocess.run(
            [sys.executable, "-X", "faulthandler", *arguments],
            cwd=ROOT,
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        if code is not None:
            assert done.returncode == code, done.stdout[-6000:]
        return done.stdout


@pytest.fixture
def python() -> Script:
    """Return the function that runs Python in a process of its own."""
    return Script()
