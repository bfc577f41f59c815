"""Scenario 17: a machine whose driver lacks what is needed, or fails.

Source: virtual memory calls that a platform does not have, or answers with errors
(https://github.com/NVIDIA/cuda-python/issues/1175).

Setup: a device without virtual memory management, one without host frames, a driver with a
failing call or without an entry point; a machine with every GPU hidden.
Right: refused at enable time, or without paging, with the reason.

The first kinds are a driver library of our own, which a process finds before the machine's.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from places import Place

from torchpager import _core

HERE = Path(__file__).parent
PACKAGE = HERE.parents[1] / "python"

# The core alone: it needs no torch.
LOOK = """
import importlib.util, json, sys
spec = importlib.util.spec_from_file_location("_core", sys.argv[1])
_core = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_core)
found = {"probe": _core.cuda_probe(0, True)}
try:
    _core.cuda_open(0)
    found["opened"] = True
    found["caps"] = _core.caps(0)
except _core.CoreError as error:
    found["opened"] = False
    found["open"] = [error.status, str(error)]
if found["opened"]:
    try:
        _core.set_offload(0, True)
        found["offload"] = ["OK", ""]
    except _core.CoreError as error:
        found["offload"] = [error.status, str(error)]
print(json.dumps(found))
"""

HIDDEN = """
import torchpager
for context in (torchpager.budget("1 GiB"), torchpager.auto_offload()):
    try:
        context.start()
    except torchpager.UnavailableError as error:
        print("refused:", error)
status = torchpager.status()
print("active:", status.active, "reasons:", len(status.reasons))
print(status.reasons[0])
import torch
print(torch.ones(3).sum().item())
"""


def python(code: str, *arguments: str, **environment: str) -> str:
    """Run code in a process of its own and return what it printed."""
    paths = [str(PACKAGE), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))} | environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a driver library that fails as it is told."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    folder = tmp_path_factory.mktemp("driver")
    sources = {"complete": [], "old": ["-DOLD"]}
    for name, options in sources.items():
        (folder / name).mkdir()
        command = [compiler, "-shared", "-fPIC", *options, "-o"]
        command += [str(folder / name / "libcuda.so.1"), str(HERE / "fake_driver.c")]
        subprocess.run(command, check=True, timeout=60)
    return folder


def look(folder: Path, fault: str) -> dict[str, Any]:
    """Return what torchpager found on a device with that fault."""
    path = folder / ("old" if fault == "old" else "complete")
    environment = {"LD_LIBRARY_PATH": str(path), "FAKE_DRIVER": fault}
    found: dict[str, Any] = json.loads(python(LOOK, _core.__file__, **environment))
    return found


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("no_virtual_memory", "no virtual memory management"),
        ("init_fails", "cuInit: initialization error"),
        ("old", "lacks cuMemCreate"),
        ("streams_fail", "cuStreamCreate"),
    ],
)
def test_device_that_cannot_is_refused_with_the_reason(
    sim: Place, driver: Path, fault: str, reason: str
) -> None:
    del sim
    found = look(driver, fault)
    assert not found["opened"]
    assert reason in found["open"][1]
    assert reason in found["probe"]["reason"]


@pytest.mark.parametrize("fault", ["no_host_frames", "reserve_fails"])
def test_device_without_host_frames_has_a_budget_but_no_paging(
    sim: Place, driver: Path, fault: str
) -> None:
    del sim
    found = look(driver, fault)
    assert found["opened"]
    assert found["caps"]["host_frames"] is False
    status, text = found["offload"]
    assert status == "UNSUPPORTED"
    assert "host" in text
    assert "host memory" in found["probe"]["reason"]


def test_complete_device_of_that_driver_is_accepted(sim: Place, driver: Path) -> None:
    del sim
    found = look(driver, "")
    assert found["opened"]
    assert found["caps"]["host_frames"] is True
    assert found["offload"] == ["OK", ""]


def test_hidden_devices_are_refused_with_the_reason_in_the_status(place: Place) -> None:
    del place
    printed = python(HIDDEN, CUDA_VISIBLE_DEVICES="")
    assert printed.count("refused: no CUDA device is usable here") == 2
    assert "active: False reasons: 1" in printed
    assert "simulate" in printed
    assert printed.endswith("3.0\n")
