"""What torchpager costs a program that fits: native, installed, with the operator hook sampling
(from half of the budget on; here it is told to), and armed (from the first eviction on).

Armed is the whole of it: a tensor of no use is evicted, and from then on steps are recorded,
learnt and planned for. Each time that takes some steps, which warm up.

They are timed in turns inside one process, on one model, so that clocks, caches and
fragmentation are the same for all; the figures are medians over the rounds, the ratios medians
of the ratios within a round. Nothing else is evicted.

Installed costs less than a machine that is shared changes its speed from one second to the
next. So it is timed against native in pairs, two steps by two, and all that auto_offload() has
put into a step's way is taken out and put back between them. With the median comes the interval
that has it in 95 of 100 runs, from the order of the pairs.

    python benchmarks/overhead.py --json build/overhead.json

On a GPU: the GPT of benchmarks/gpt.py, bound by the GPU, and a small one, bound by launches.
Without a GPU: the small one on the simulated device.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import comb
from pathlib import Path
from statistics import median
from typing import Any

import torch

import torchpager
from torchpager import _torch_cpu, optimizer_chunks, optimizers, regions, testing
from torchpager.demo_train import GPT, Config, Silent, one_step, synchronize

PAIRED = ("native", "installed")
MODES = ("native", "sampling", "armed")
# Of a pair's half.
PAIR_WARM_STEPS, PAIR_STEPS = 1, 2
# Steps until plans are made, if there is one to be made.
ARMED_WARM_STEPS = 8
SAMPLING = 1  # as hook_forced() counts
GPU_BLOCK = 32 << 20


@dataclass(frozen=True)
class Workload:
    """A model, how often a turn steps it before and while timing, turns and pairs in a round.

    Armed, more steps come before.
    """

    name: str
    config: Config
    warm_steps: int
    timed_steps: int
    turns: int = 1
    pairs: int = 1


BIG = Workload(
    name="gpt 16 x 2048",
    config=Config(
        device="cuda",
        layers=16,
        width=2048,
        heads=16,
        context=1024,
        batch=16,
        vocabulary=32768,
        autocast=True,
    ),
    warm_steps=2,
    timed_steps=1,
)
SMALL = Workload(
    name="gpt 4 x 128",
    config=Config(
        device="cuda",
        layers=4,
        width=128,
        heads=4,
        context=64,
        batch=4,
        vocabulary=16384,  # so that some blocks are large enough to be ours
        autocast=True,
    ),
    warm_steps=2,
    timed_steps=10,
    turns=2,  # launches take longer now and shorter then; many short turns see less of that
    pairs=20,
)


def stepper(config: Config) -> Callable[[], None]:
    """Build the model and return a function that does one step."""
    torch.manual_seed(1)
    with torch.device(config.device):
        model = GPT(config, config.vocabulary)
        shape = (config.batch, config.context)
        codes = torch.randint(0, config.vocabulary, shape)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=False)

    def step() -> None:
        one_step(config, model, optimizer, codes, codes, Silent())
        optimizer.zero_grad(set_to_none=True)

    return step


Switch = Callable[[str], None]


@dataclass(frozen=True)
class Switches:
    """What puts the process into a mode.

    ``between`` knows the paired ones only and changes nothing but what a step meets, quickly.
    """

    to: Switch
    between: Switch


def arm(device: str, size: int) -> None:
    """Have something evicted, as when memory has become tight."""
    of_no_use = torch.zeros(size, dtype=torch.uint8, device=device)
    testing.evict(of_no_use)


class InAndOut:
    """An ``auto_offload()`` whose parts in the process can be taken out and put back.

    The core stays, with its memory. Steps out of it are plain ones. Back in, nothing bounds the
    native allocator, which a program meets only where that allocator grows.
    """

    def __init__(self) -> None:
        self._context = torchpager.auto_offload()
        self._context.start()
        self._is_in = True

    def stop(self) -> None:
        """Leave it for good."""
        self.put(wanted=True)
        self._context.stop()

    def put(self, *, wanted: bool) -> None:
        """Put it in or out."""
        from torchpager import _torch_cuda

        if wanted == self._is_in:
            return
        self._is_in = wanted
        slot = torch.cuda.current_device()
        if wanted:
            regions.install(self._context)
            _torch_cuda.install()
            _torch_cuda.share_budget(slot, True)
            optimizer_chunks.start(self._context, slot)
            optimizers.watch(self._context, slot)
        else:
            optimizers.unwatch(self._context)
            optimizer_chunks.stop(self._context)
            _torch_cuda.share_budget(slot, False)
            _torch_cuda.uninstall()
            regions.uninstall(self._context)


@contextmanager
def gpu_switches() -> Iterator[Switches]:
    """Yield what puts the process into a mode: outside or inside ``auto_offload()``."""
    active: list[InAndOut] = []

    def between(mode: str) -> None:
        if not active:
            switch("installed")
        active[-1].put(wanted=mode == "installed")

    def switch(mode: str) -> None:
        _torch_cpu.hook_forced(SAMPLING if mode == "sampling" else 0)
        if active:  # also from armed to another mode: that disarms
            active.pop().stop()
        if mode != "native":
            active.append(InAndOut())
        if mode == "armed":
            arm("cuda", GPU_BLOCK)

    yield Switches(switch, between)
    switch("native")


@contextmanager
def cpu_switches(large_min: int) -> Iterator[Switches]:
    """Yield the same for CPU tensors, inside ``simulate()``."""
    active: list[Any] = []

    def switch(mode: str) -> None:
        _torch_cpu.hook_forced(SAMPLING if mode == "sampling" else 0)
        if active:
            active.pop().stop()
        if mode == "native" and _torch_cpu.installed():
            _torch_cpu.uninstall()
        if mode != "native" and not _torch_cpu.installed():
            _torch_cpu.install(large_min)
        # On CPU tensors auto_offload() arms the hook from the start.
        if mode == "armed":
            active.append(torchpager.auto_offload())
            active[0].start()
            arm("cpu", large_min)

    with torchpager.simulate("2 GiB", granularity=large_min, large_min=large_min):
        yield Switches(switch, switch)
        switch("installed")  # as it was found


class Timed:
    """The seconds of steps by mode, and what else happened in them."""

    def __init__(self, device: str, step: Callable[[], None]) -> None:
        self._device = device
        self._step = step
        self.seconds: dict[str, list[float]] = {}
        self.hook_calls: dict[str, int] = {}
        self.evictions = 0

    def turn(self, mode: str, warm_steps: int, timed_steps: int) -> None:
        """Time one step, as the mean of some, after warming up."""
        calls, evictions = _torch_cpu.hook_calls(), torchpager.stats().evictions.count
        for _ in range(warm_steps):
            self._step()
        synchronize(self._device)
        begin = time.perf_counter()
        for _ in range(timed_steps):
            self._step()
        synchronize(self._device)
        seconds = (time.perf_counter() - begin) / timed_steps
        self.seconds.setdefault(mode, []).append(seconds)
        seen = _torch_cpu.hook_calls() - calls
        self.hook_calls[mode] = self.hook_calls.get(mode, 0) + seen
        self.evictions += torchpager.stats().evictions.count - evictions

    def ratios(self, mode: str) -> list[float]:
        """Return what each turn took, as ratios to native's turn beside it, sorted."""
        pairs = zip(self.seconds[mode], self.seconds["native"], strict=True)
        return sorted(turn / native for turn, native in pairs)

    def milliseconds(self, mode: str) -> float:
        """Return the median step."""
        return median(self.seconds[mode]) * 1e3


def interval(ordered: Sequence[float]) -> tuple[float, float]:
    """Return the ends of the interval that has the median in at least 95 of 100 samples.

    By the order of the sample alone: as many values are below the true median as heads come of
    so many throws of a coin. Of fewer than six values it is all that there can be.
    """
    count = len(ordered)
    outside, left_out = 0.5**count, 0
    while outside <= 0.025:
        left_out += 1
        outside += comb(count, left_out) * 0.5**count
    first = max(0, left_out - 1)
    return ordered[first], ordered[count - 1 - first]


def measure(workload: Workload, rounds: int, switches: Switches) -> Any:
    """Time the modes in turns and return figures as a JSON object."""
    step = stepper(workload.config)
    paired, turns = (Timed(workload.config.device, step) for _ in range(2))
    for mode in PAIRED:
        switches.between(mode)
        for _ in range(3):
            step()
    for index in range(rounds * workload.pairs):
        for mode in PAIRED if index % 2 == 0 else reversed(PAIRED):
            switches.between(mode)
            paired.turn(mode, PAIR_WARM_STEPS, PAIR_STEPS)
    for index in range(rounds * workload.turns):
        for shift in range(len(MODES)):
            mode = MODES[(index + shift) % len(MODES)]
            switches.to(mode)
            warm_steps = ARMED_WARM_STEPS if mode == "armed" else workload.warm_steps
            turns.turn(mode, warm_steps, workload.timed_steps)
    source = {"native": paired, "installed": paired, "sampling": turns, "armed": turns}
    return {
        "name": workload.name,
        "pairs": rounds * workload.pairs,
        "turns": rounds * workload.turns,
        "step_ms": {mode: timed.milliseconds(mode) for mode, timed in source.items()},
        "ratio": {mode: median(timed.ratios(mode)) for mode, timed in source.items()},
        "interval": {mode: interval(timed.ratios(mode)) for mode, timed in source.items()},
        "hook_calls": {mode: timed.hook_calls[mode] for mode, timed in source.items()},
        "evictions": paired.evictions + turns.evictions,
    }


def on_gpu(rounds: int, workloads: Iterable[Workload]) -> list[Any]:
    """Measure through the wrapper door."""
    found = []
    for workload in workloads:
        with gpu_switches() as switches:
            found.append(measure(workload, rounds, switches))
        torch.cuda.empty_cache()
    return found


def on_cpu(rounds: int) -> list[Any]:
    """Measure a small workload through the CPU door."""
    torch.set_num_threads(1)
    workload = replace(
        SMALL, config=replace(SMALL.config, device="cpu", autocast=False), turns=1, pairs=4
    )
    with cpu_switches(64 << 10) as switches:
        return [measure(workload, rounds, switches)]


def main() -> int:
    """Measure, print the ratios, write the JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--workload", choices=["small", "big", "both"], default="both")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    workloads = {"small": [SMALL], "big": [BIG], "both": [SMALL, BIG]}[arguments.workload]
    gpu = torch.cuda.is_available()
    found = on_gpu(arguments.rounds, workloads) if gpu else on_cpu(arguments.rounds)
    for one in found:
        for mode, ratio in one["ratio"].items():
            low, high = one["interval"][mode]
            print(
                f"{one['name']:<16}{mode:<12}{one['step_ms'][mode]:>10.3f} ms"
                f"{ratio:>8.3f} x native  ({low:.3f} to {high:.3f})"
            )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
