"""The two devices of the scenarios. No scenario may hang or leave anything in force."""

import gc
from collections.abc import Iterator

import pytest
import torch
from places import Place

from hang_guard import (  # noqa: F401
    failures,
    pytest_collection_modifyitems,
    pytest_configure,
    pytest_exception_interact,
    pytest_runtest_logreport,
    pytest_runtest_protocol,
    pytest_sessionfinish,
)
from torchpager import _control, _core, _torch_cpu
from torchpager.simulate import _close_core as close_core

PLACES = [pytest.param("sim"), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    """Return the device to run on, with deterministic algorithms on."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    threads = torch.get_num_threads()
    # A sum depends on how it is split among threads.
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    yield Place(request.param)
    torch.use_deterministic_algorithms(False)
    torch.set_num_threads(threads)


@pytest.fixture
def sim(place: Place) -> Place:
    """Return the simulated device; on a GPU the scenario is skipped."""
    if not place.simulated:
        pytest.skip("shown on the simulated device")
    return place


@pytest.fixture(autouse=True)
def nothing_left_behind(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail a scenario that leaves a context, the door or a block behind."""
    for name in ("TORCHPAGER_BUDGET", "TORCHPAGER_HOST_BUDGET", "TORCHPAGER_AUTOSTART"):
        monkeypatch.delenv(name, raising=False)
    # What libraries have made by now stays: collections that look through it take seconds.
    # After a failure the traceback is among it, and what that holds must go.
    if not failures:
        gc.freeze()
    yield
    left = _control.active_contexts()
    for context in reversed(left):
        context.stop()
    assert not left, f"left in force: {left}"
    assert not _torch_cpu.installed()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    if _core.is_open(_core.SIM_SLOT):
        _core.check(_core.SIM_SLOT)
        assert close_core(), "tensors of the simulated device are alive"
