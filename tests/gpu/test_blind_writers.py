"""Writes by raw pointer that nobody announces, and what finding them costs."""

import ctypes
import gc
import re
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torchpager
from torchpager import testing

MIB = 1 << 20
FINGERPRINT = Path(__file__).resolve().parents[2] / "csrc/device/fingerprint_ptx.h"

# add(float *p, const float *q, float factor, unsigned count): p[i] = q[i] * factor + p[i]
ADD_PTX = """
.version 6.3
.target sm_70
.address_size 64
.visible .entry add(.param .u64 p, .param .u64 q, .param .f32 factor, .param .u32 count) {
    .reg .pred %done;
    .reg .b32 %r<5>;
    .reg .b64 %d<4>;
    .reg .f32 %f<3>;
    ld.param.u64 %d0, [p];
    ld.param.u64 %d1, [q];
    ld.param.f32 %f0, [factor];
    ld.param.u32 %r0, [count];
    mov.u32 %r1, %ctaid.x;
    mov.u32 %r2, %ntid.x;
    mov.u32 %r3, %tid.x;
    mad.lo.u32 %r4, %r1, %r2, %r3;
    setp.ge.u32 %done, %r4, %r0;
    @%done ret;
    mul.wide.u32 %d2, %r4, 4;
    add.s64 %d0, %d0, %d2;
    add.s64 %d1, %d1, %d2;
    ld.global.f32 %f1, [%d0];
    ld.global.f32 %f2, [%d1];
    fma.rn.f32 %f1, %f2, %f0, %f1;
    st.global.f32 [%d0], %f1;
    ret;
}
"""


class Kernel:
    """A kernel of the driver, launched with nothing of PyTorch in between."""

    def __init__(self, ptx: str, name: str) -> None:
        torch.cuda.init()
        torch.empty(1, device="cuda")  # the context is current from here on
        self._driver = ctypes.CDLL("libcuda.so.1")
        module = ctypes.c_void_p()
        self._function = ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(module), ptx.encode())
        self._call("cuModuleGetFunction", ctypes.byref(self._function), module, name.encode())

    def _call(self, name: str, *args: Any) -> None:
        code = getattr(self._driver, name)(*args)
        assert code == 0, f"{name}: {code}"

    def __call__(self, blocks: int, threads: int, *args: Any) -> None:
        """Launch on the current stream; the arguments are ctypes values."""
        pointers = (ctypes.c_void_p * len(args))(
            *(ctypes.cast(ctypes.pointer(arg), ctypes.c_void_p) for arg in args)
        )
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        grid = (ctypes.c_uint(n) for n in (blocks, 1, 1, threads, 1, 1, 0))
        self._call("cuLaunchKernel", self._function, *grid, stream, pointers, None)


def address(tensor: torch.Tensor) -> int:
    """Return the pointer an extension gets, past anything that wraps ``data_ptr``."""
    return torch._C.TensorBase.data_ptr(tensor)


def launch_add(kernel: Kernel, p: torch.Tensor, q: torch.Tensor, factor: float) -> None:
    """Launch ``p += q * factor``."""
    count = p.numel()
    kernel(
        -(-count // 256),
        256,
        ctypes.c_uint64(address(p)),
        ctypes.c_uint64(address(q)),
        ctypes.c_float(factor),
        ctypes.c_uint32(count),
    )


@pytest.fixture(scope="module")
def add() -> Callable[[torch.Tensor, torch.Tensor, float], None]:
    """Return ``p += q * factor``, blind."""
    return partial(launch_add, Kernel(ADD_PTX, "add"))


@pytest.fixture
def paging() -> Iterator[None]:
    with torchpager.budget("1 GiB"), torchpager.auto_offload():
        torchpager.reset_stats()
        yield


def brought_back(tensor: torch.Tensor) -> torch.Tensor:
    """Evict and read, so that both copies hold the same."""
    testing.evict(tensor)
    tensor.sum()
    torch.cuda.synchronize()
    return tensor


@pytest.mark.usefixtures("paging")
def test_contents_can_be_compared_here() -> None:
    assert torchpager.status().verified, torchpager.status().reasons


@pytest.mark.usefixtures("paging")
@pytest.mark.filterwarnings("ignore:something has written")
def test_blind_write_to_a_clean_tensor_survives_its_eviction(
    add: Callable[[torch.Tensor, torch.Tensor, float], None],
) -> None:
    ones = torch.ones(40 * MIB, device="cuda")  # 160 MiB: three extents
    target = torch.zeros(40 * MIB, device="cuda")
    brought_back(target)
    add(target, ones, 3.0)
    testing.evict(target)
    assert bool((target == 3).all())
    assert torchpager.stats().unseen_writes.count == 3
    assert torchpager.stats().unseen_writes.bytes == 160 * MIB


@pytest.mark.usefixtures("paging")
@pytest.mark.filterwarnings("ignore:something has written")
def test_blind_write_still_queued_on_another_stream_survives_an_eviction(
    add: Callable[[torch.Tensor, torch.Tensor, float], None],
) -> None:
    ones = torch.ones(16 * MIB, device="cuda")
    target = torch.zeros(16 * MIB, device="cuda")
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        add(target, ones, 5.0)
    testing.evict(target)
    assert bool((target == 5).all())


@pytest.mark.usefixtures("paging")
def test_what_nobody_wrote_is_evicted_without_a_copy() -> None:
    target = torch.zeros(40 * MIB, device="cuda")
    brought_back(target)
    before = torchpager.stats()
    testing.evict(target)
    after = torchpager.stats()
    assert after.write_backs == before.write_backs
    assert after.fingerprints.count == before.fingerprints.count + 3
    assert after.unseen_writes.count == after.unproven.count == 0


def settle() -> None:
    """Wait until nothing moves: a blind write at the moment of an eviction is what remains."""
    before = None
    while before != (before := torchpager.stats().evictions):
        time.sleep(0.05)


class Blind(torch.optim.Optimizer):
    """Momentum by raw kernels, as an extension package has it."""

    def __init__(self, parameters: Any, add: Any) -> None:
        super().__init__(parameters, {})
        self._add = add
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["moment"] = torch.zeros_like(p)

    def step(self) -> None:  # type: ignore[override]
        settle()
        for group in self.param_groups:
            for p in group["params"]:
                self._add(self.state[p]["moment"], p.grad, 1.0)
                self._add(p, self.state[p]["moment"], -0.125)
        torch.cuda.synchronize()


def trained(add: Any) -> list[torch.Tensor]:
    """Return parameters and moments after some steps, on the CPU."""
    torch.manual_seed(5)
    layers = [nn.Linear(2048, 2048, device="cuda") for _ in range(16)]  # 256 MiB
    model = nn.Sequential(*layers)
    optimizer = Blind(model.parameters(), add)
    inputs = torch.linspace(-1, 1, 256 * 2048, device="cuda").reshape(256, 2048)
    for _ in range(4):
        optimizer.zero_grad()
        model(inputs).square().mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return [
        t.detach().cpu() for p in model.parameters() for t in (p, optimizer.state[p]["moment"])
    ]


@pytest.mark.filterwarnings("ignore:something has written")
def test_blind_optimizer_gives_the_same_bits_at_a_small_budget(
    add: Callable[[torch.Tensor, torch.Tensor, float], None],
) -> None:
    wanted = trained(add)  # 768 MiB of parameters, gradients and moments
    gc.collect()
    torch.cuda.empty_cache()
    with torchpager.budget("480 MiB"), torchpager.auto_offload():
        torchpager.reset_stats()
        found = trained(add)
        assert torchpager.stats().evictions.count > 0
    assert all(torch.equal(a, b) for a, b in zip(wanted, found, strict=True))


READONLY = """
import sys
import torch, torchpager
sys.path.insert(0, "tests/gpu")
from test_blind_writers import ADD_PTX, Kernel, brought_back, launch_add

with torchpager.budget("1 GiB"), torchpager.auto_offload():
    ones = torch.ones(1 << 24, device="cuda")
    target = brought_back(torch.zeros(1 << 24, device="cuda"))
    target.add_(1)  # announced: writable again
    torch.cuda.synchronize()
    brought_back(target)
    print("so far", flush=True)
    launch_add(Kernel(ADD_PTX, "add"), target, ones, 1.0)
    torch.cuda.synchronize()
"""


def test_debug_mode_stops_a_blind_kernel_where_it_stands(python: Callable[..., str]) -> None:
    out = python("-c", READONLY, code=None, TORCHPAGER_DEBUG="readonly")
    assert "so far" in out
    assert "illegal memory access" in out
    assert "illegal memory access" not in python("-c", READONLY, TORCHPAGER_DEBUG="")


STRICT = """
import sys
import torch, torchpager
sys.path.insert(0, "tests/gpu")
from test_blind_writers import ADD_PTX, Kernel, launch_add
from torchpager import testing

with torchpager.budget("1 GiB"), torchpager.auto_offload():
    target = torch.zeros(1 << 24, device="cuda")
    ones = torch.ones(1 << 24, device="cuda")
    testing.evict(ones)
    assert ones[:3].sum().item() == 3  # announced: brought back
    testing.evict(ones)
    print("so far", flush=True)
    launch_add(Kernel(ADD_PTX, "add"), target, ones, 1.0)
    torch.cuda.synchronize()
    assert target.sum().item() == 1 << 24
"""


def test_strict_debug_mode_stops_a_blind_reader_where_it_stands(
    python: Callable[..., str],
) -> None:
    out = python("-c", STRICT, code=None, TORCHPAGER_DEBUG="strict")
    assert "so far" in out
    assert "illegal memory access" in out
    assert "illegal memory access" not in python("-c", STRICT, TORCHPAGER_DEBUG="")


# -- cost ------------------------------------------------------------------------------------

BLOCKS = 264  # GRID_BLOCKS of device_cuda.c
IDLE_SHARE = 0.03
BUSY_SHARE = 0.20


def timed_us(work: Callable[[], None], stream: torch.cuda.Stream, rounds: int = 20) -> float:
    """Return the median time of some work on a stream, without that of launching it."""
    times = []
    with torch.cuda.stream(stream):
        for _ in range(rounds):
            begin, end = torch.cuda.Event(True), torch.cuda.Event(True)
            torch.cuda._sleep(1_000_000)  # half a millisecond: all is queued by then
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000)
    return statistics.median(times)


def test_fingerprint_costs_little_beside_the_copy(capsys: pytest.CaptureFixture[str]) -> None:
    lines = re.findall(r'"(.*)\\n"', FINGERPRINT.read_text())
    kernel = Kernel("\n".join(lines).replace('\\"', '"'), "tp_fingerprint")
    data = torch.ones(16 * MIB, device="cuda")  # 64 MiB
    host = torch.empty(16 * MIB, pin_memory=True)
    sums = torch.zeros(BLOCKS * 2, dtype=torch.int64, device="cuda")
    urgent = torch.cuda.Stream(priority=-100)

    def fingerprint() -> None:
        words = ctypes.c_uint64(64 * MIB // 16)
        kernel(
            BLOCKS, 512, ctypes.c_uint64(address(data)), words, ctypes.c_uint64(address(sums))
        )

    def copy() -> None:
        host.copy_(data, non_blocking=True)

    for work in (fingerprint, copy):
        timed_us(work, urgent, 3)
    copied = timed_us(copy, urgent)
    idle = timed_us(fingerprint, urgent)
    big = torch.ones(1 << 30, dtype=torch.uint8, device="cuda")
    left = torch.ones(8192, 8192, dtype=torch.bfloat16, device="cuda")
    beside: dict[str, float] = {}
    for name, load in (
        ("a streaming kernel", lambda: big.add_(1)),
        ("matrix products", lambda: left @ left),
    ):
        for _ in range(100):
            load()
        beside[name] = timed_us(fingerprint, urgent)
        torch.cuda.synchronize()
    with capsys.disabled():
        others = ", ".join(f"beside {name} {us:.0f}" for name, us in beside.items())
        print(f"\nfingerprint of 64 MiB: idle {idle:.0f} us, {others}; copy {copied:.0f} us")
    assert idle <= IDLE_SHARE * copied
    assert beside["a streaming kernel"] <= BUSY_SHARE * copied
