"""The judges of tests/judge: what they count as tested, and what they do not let pass."""

import dataclasses
import json
import re
import sys
import warnings
from pathlib import Path

import pytest
import torch

JUDGE = Path(__file__).resolve().parents[1] / "judge"


@pytest.fixture(scope="module")
def operators():
    sys.path.insert(0, str(JUDGE))
    try:
        import operators
    finally:
        sys.path.remove(str(JUDGE))
    return operators


@pytest.fixture(scope="module")
def foreign_suite():
    sys.path.insert(0, str(JUDGE))
    try:
        import foreign_suite
    finally:
        sys.path.remove(str(JUDGE))
    return foreign_suite


@pytest.mark.parametrize(
    ("known", "verdict"),
    [
        ({"forms": {"": 2}, "has_bytes": True, "misses": 3}, "tested"),
        ({"forms": {"": 2}, "has_bytes": True, "view_misses": 1}, "tested"),
        ({"forms": {"": 2}, "has_bytes": False}, "tested"),
        ({"forms": {"": 2}, "has_bytes": True}, "no miss"),
        ({"forms": {}, "has_bytes": True, "misses": 3}, "nothing ran"),
        ({"forms": {"": 2}, "misses": 3, "problems": ["add: other result"]}, "add: other"),
        ({"forms": {"": 2}, "misses": 3, "unrepeatable": ["add"]}, "plain torch gives other"),
        ({"forms": {"": 2}, "unrepeatable": ["x"], "nondeterministic": True}, "tested"),
    ],
)
def test_entry_counts_as_tested_when_it_ran_and_missed(operators, known, verdict):
    assert operators.Tally("add", **known).verdict().startswith(verdict)


@pytest.mark.parametrize(
    ("known", "excused", "code"),
    [
        ({"forms": {"": 1}, "misses": 1}, False, 0),
        ({"forms": {"": 1}, "has_bytes": True}, False, 1),
        ({"forms": {"": 1}, "has_bytes": True}, True, 0),
        ({"problems": ["add: other result"]}, True, 1),
        (None, False, 3),
    ],
)
def test_no_exception_excuses_other_bits(operators, known, excused, code, tmp_path):
    results = operators.Results(tmp_path / "known.jsonl", fresh=True)
    if known is not None:
        results.add(operators.Tally("add", **known))
    exceptions = {"add": "no storage"} if excused else {}
    assert operators.report(["add"], results, exceptions) == code


class Warned:
    """A case with other bits each time, of which PyTorch warns or not."""

    label = "warned"

    def __init__(self, text):
        self.text, self.count = text, 0

    def run(self, watch):
        assert watch is not None
        if self.text:
            warnings.warn(self.text, stacklevel=1)
        self.count += 1
        return self.count


@pytest.mark.parametrize(
    ("text", "flagged"),
    [
        ("cumsum_cuda_kernel does not have a deterministic implementation, but you", True),
        ("Flash Attention defaults to a non-deterministic algorithm. To explicitly", True),
        ("Something else.", False),
        (None, False),
    ],
)
def test_entry_is_flagged_when_pytorch_says_that_its_bits_differ(operators, text, flagged):
    tally = operators.Tally("add")
    assert not operators.plainly(Warned(text), tally).repeats
    assert tally.unrepeatable == ["warned"]
    assert tally.nondeterministic == flagged


class Sloppy:
    """A case whose paged run gives what it is told to."""

    label, form = "sloppy", ""

    def __init__(self, outcome):
        self.outcome = outcome

    def run(self, _):
        return self.outcome, 0

    call_misses = view_misses = 1


@pytest.mark.parametrize(
    ("repeats", "flagged", "changes", "verdict"),
    [
        (True, False, {}, "tested"),
        (True, False, {"result": [((2,), "float32", b"other")]}, "other result"),
        (True, True, {"result": [((2,), "float32", b"other")]}, "tested"),
        (True, True, {"result": [((3,), "float32", b"other")]}, "other result"),
        (True, True, {"error": "RuntimeError"}, "other error"),
        (False, True, {"result": [((2,), "float32", b"other")]}, "tested"),
        (False, True, {"result": [((2,), "float64", b"other")]}, "other result"),
        (False, True, {"inputs": []}, "other inputs"),
        (False, True, {"backward": False}, "other backward"),
    ],
)
def test_where_bits_do_not_repeat_shapes_must(operators, repeats, flagged, changes, verdict):
    plain = operators.samples.Outcome(
        result=[((2,), "float32", b"bits"), "1.5", None],
        inputs=[((1,), "float32", b"in")],
        error=None,
        backward=True,
        has_bytes=True,
    )
    changes = {
        name: [*value, "1.5", None] if name == "result" else value
        for name, value in changes.items()
    }
    paged = Sloppy(dataclasses.replace(plain, **changes))
    tally = operators.Tally("sloppy", nondeterministic=flagged)
    operators.paged(operators.Prepared(paged, plain, repeats), paged, tally)
    assert verdict in tally.verdict()


@pytest.mark.skipif(
    torch.version.cuda is None or torch.cuda.is_available(), reason="the device must fail"
)
def test_worker_ends_when_the_device_has_failed(run_python):
    program = (
        f"import sys; sys.path.insert(0, {str(JUDGE)!r})\n"
        "from operators import ending_with_the_device\n"
        "with ending_with_the_device({!r}, 'add float32 sample 0'):\n"
        "    {}\n"
    )
    for body in ("pass", "raise RuntimeError('device-side assert')"):
        done = run_python("-c", program.format("cuda", body), check=False)
        assert done.returncode == 4
        assert "add float32 sample 0, plainly" in done.stderr
    assert "device-side assert" in done.stderr
    done = run_python("-c", program.format("cpu", "raise RuntimeError('mine')"), check=False)
    assert done.returncode == 1
    assert "RuntimeError: mine" in done.stderr


def test_sweep_goes_on_where_it_was(run_python, tmp_path):
    path = tmp_path / "known.jsonl"
    command = [
        JUDGE / "operators.py",
        "--results",
        path,
        "--share",
        "351",
    ]  # two or three entries
    first = run_python(*command, timeout=300).stdout
    assert re.search(r"([23]) of \1 entries tested, 0 exceptions, 0 failed, 0 left", first)
    known = path.read_text()
    records = [json.loads(line) for line in known.splitlines()[1:]]
    assert len(records) in (2, 3)
    for record in records:
        assert record["misses"] + record["view_misses"] > 0 or not record["has_bytes"]
    assert run_python(*command).stdout == first
    assert path.read_text() == known
    other_build = known.replace('"build": "', '"build": "x')
    path.write_text(other_build)
    again = run_python(*command, "--seconds", "0", check=False)
    assert again.returncode == 3
    assert f"{len(records)} left" in again.stdout


def test_suite_is_judged_by_each_outcome_and_by_its_misses(foreign_suite, capsys):
    def seen(outcome, misses):
        return {"outcome": outcome, "misses": misses, "text": "why"}

    plain = {"a": seen("passed", 0), "b": seen("failed", 0)}
    same = {"a": seen("passed", 5), "b": seen("failed", 0)}
    assert foreign_suite.compare(plain, same, "paged")
    assert not foreign_suite.compare(plain, plain, "paged")
    assert "this has tested nothing" in capsys.readouterr().out
    for other in ({**same, "b": seen("passed", 1)}, {"a": seen("passed", 5)}):
        assert not foreign_suite.compare(plain, other, "paged")
        assert "differs b: failed plain" in capsys.readouterr().out
