"""The parts of make test-gpu: each runs, whatever became of the others, and in time."""

import sys
import time
from pathlib import Path

import pytest

import gpu_parts

TESTS = Path(__file__).resolve().parents[1]


def part(name, program, share_s=5.0, **options):
    return gpu_parts.Part(name, share_s, (sys.executable, "-c", program), **options)


@pytest.fixture(autouse=True)
def little_grace(monkeypatch):
    monkeypatch.setattr(gpu_parts, "GRACE_S", 0.5)


def test_parts_run_after_one_that_failed_and_one_that_hangs(capfd):
    deaf = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(60)"
    parts = [
        part("first", "raise SystemExit(3)"),
        part("second", deaf, share_s=1.0),
        part("third", "print('third ran')"),
    ]
    begin = time.monotonic()
    ended = gpu_parts.run_all(parts, 7.0)
    assert time.monotonic() - begin < 6
    assert [(each.name, each.code, each.good) for each in ended] == [
        ("first", 3, False),
        ("second", None, False),
        ("third", 0, True),
    ]
    assert "third ran" in capfd.readouterr().out


def test_time_that_is_left_goes_to_those_who_come_later(capfd):
    later = part("later", "import time; time.sleep(1.5); print('at the end')", share_s=1.0)
    ended = gpu_parts.run_all([part("early", "", share_s=5.0), later], 6.0)
    assert all(each.good for each in ended)
    assert "at the end" in capfd.readouterr().out


def test_nothing_runs_when_what_is_needed_failed():
    parts = [part("build", "raise SystemExit(1)", needed=True), part("tests", "")]
    assert [each.name for each in gpu_parts.run_all(parts, 10.0)] == ["build"]


def test_what_a_part_has_started_ends_with_it(tmp_path):
    file = tmp_path / "late"
    child = f"import time; time.sleep(1); open({str(file)!r}, 'w')"
    program = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {child!r}])"
    assert gpu_parts.run(part("parent", program), 10.0).good
    time.sleep(1.5)
    assert not file.exists()


def test_part_goes_on_behind_a_test_that_ended_the_process(tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("PYTHONPATH", str(TESTS))
    (tmp_path / "conftest.py").write_text("from hang_guard import *\n")
    file = tmp_path / "test_it.py"
    file.write_text(
        "import os, pytest, time\n"
        "def test_1(): assert False\n"
        "def test_2(): os._exit(7)\n"
        "@pytest.mark.limit(1)\n"
        "def test_3(): time.sleep(50)\n"
        "def test_4(): pass\n"
    )
    made = gpu_parts.pytest_part("mine", 40.0, "--rootdir", str(tmp_path), "-v", str(file))
    (ended,) = gpu_parts.run_all([made], 40.0)
    assert not ended.good
    printed = capfd.readouterr().out
    assert "1 passed, 3 deselected" in printed
    assert printed.count("ended the process") == 2
    assert printed.count("test_4 PASSED") == 1


def test_every_file_has_a_part_and_all_parts_their_time(capsys):
    parts = gpu_parts.usual_parts()
    assert sum(each.share_s for each in parts) <= gpu_parts.TOTAL_S < 480
    words = [word for each in parts for word in each.command]
    for path in (TESTS / "gpu").glob("test_*.py"):
        assert words.count(f"tests/gpu/{path.name}") == 1, path.name
        if "mark.long" in path.read_text():
            assert path.stem.removeprefix("test_") in gpu_parts.LONG
    assert words.count(gpu_parts.MEASURED) == 2
    name = gpu_parts.MEASURED.partition("::")[2]
    assert f"def {name}(" in (TESTS / "gpu" / gpu_parts.CHUNKS).read_text()
    assert gpu_parts.main(["--long"]) == 2
    assert gpu_parts.main(["no such part"]) == 2
    assert "gpt_bits" in capsys.readouterr().err


def test_what_is_left_out_under_memcheck_is_there():
    (part,) = [each for each in gpu_parts.memcheck_parts() if each.name == "core"]
    assert gpu_parts.MEMCHECK[0] in part.command
    for name in gpu_parts.NOT_UNDER_MEMCHECK:
        file, _, test = name.partition("::")
        assert file in part.command
        assert f"def {test}(" in (TESTS.parent / file).read_text()
