"""Tests that hang: where they hang is seen outside, whatever pytest captures."""

import os
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parents[1]
HANGS = """
def test_hangs(capfd):
    time.sleep(50)
"""
HANGS_AFTER_A_FAILURE = """
@pytest.fixture
def slow():
    yield
    time.sleep(50)

def test_hangs(slow):
    assert False, "on purpose"
"""


@pytest.mark.parametrize("program", [HANGS, HANGS_AFTER_A_FAILURE])
def test_stacks_of_a_test_that_hangs_are_printed_and_the_run_ends(
    program, tmp_path, run_python
):
    (tmp_path / "conftest.py").write_text(
        "import hang_guard\nfrom hang_guard import *\nhang_guard.TEARDOWN_S = 1.0\n"
    )
    file = tmp_path / "test_it.py"
    file.write_text(f"import pytest, time\npytestmark = pytest.mark.limit(1)\n{program}")
    environment = {**os.environ, "PYTHONPATH": str(TESTS)}
    command = ["-m", "pytest", "--rootdir", tmp_path, file]
    done = run_python(*command, check=False, timeout=40, cwd=tmp_path, env=environment)
    assert done.returncode == 1
    assert "Timeout" in done.stderr
    assert f'"{file}", line' in done.stderr
