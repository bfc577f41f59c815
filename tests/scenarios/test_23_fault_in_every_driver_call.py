"""Scenario 23: one driver call of an allocation fails, whichever it is.

Source: an allocation that failed half-way left handles behind
(https://github.com/invergent-ai/surogate/issues/117) or a range that could not be unmapped
(https://github.com/pytorch/pytorch/issues/188008).

Setup: a fault at the k-th driver call during one allocation, for every k, on the GPU too.
Right: a typed error, handles and addresses back to the baseline, the next allocation works.

The faults come from the C tests' fault device, which Python cannot reach. The scenario is in
tests/c/test_core_faults.c, ``fault_in_any_call_of_one_alloc_leaves_nothing_behind`` and, where
a block has to go to the host for it, ``..._that_evicts_leaves_nothing_behind``. On the
simulated device they run with the C tests, also under the sanitizers; on a GPU from here.
"""

import shutil
import subprocess
from pathlib import Path

import pytest
from places import Place

TESTS = Path(__file__).parents[1] / "c"
SOURCE = TESTS / "test_core_faults.c"


def test_every_fault_is_survived(place: Place) -> None:
    assert "one_alloc_leaves_nothing_behind_on_" in SOURCE.read_text(), "has it been renamed?"
    if place.simulated:
        pytest.skip("runs with the C tests")
    if shutil.which("make") is None or shutil.which("cc") is None:
        pytest.skip("no C compiler")
    command = [
        "make", "--no-print-directory", "-C", str(TESTS), "test", "TESTS=test_core_faults",
        "ARGS=*one_alloc*_on_cuda", "NO_SKIPS=1",
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
