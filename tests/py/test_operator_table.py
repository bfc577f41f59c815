"""What the hook believes of operators, against what they do with PyTorch's own samples."""

from pathlib import Path

import pytest

SWEEP = Path(__file__).with_name("operator_sweep.py")
BATCH = 23  # three of them are a tenth of the list


@pytest.mark.parametrize("batch", range(3))
def test_sampled_operators_announce_what_they_touch(batch, run_python):
    pytest.importorskip("expecttest", reason="PyTorch's list of operators needs it")
    done = run_python("-X", "faulthandler", SWEEP, batch * BATCH, BATCH, check=False)
    lines = done.stdout.splitlines()
    last = next((line for line in reversed(lines) if line.startswith("at ")), "nothing ran")
    assert done.returncode == 0, f"{last}\n{done.stderr[-3000:]}"
    assert [line for line in lines if line.startswith(("differs ", "unseen "))] == []
    _, count, *_, misses, _ = lines[-1].split()
    assert int(count) >= 2 * BATCH
    assert int(misses) >= int(count)
