"""What torchpager costs a program that fits: native, installed, with the operator hook sampling
(from half of the budget on; here it is told to), and armed (from the first eviction on).

Armed is the whole of it: a tensor of no use is evicted, and from then on steps are recorded,
learnt and planned for. Each time that takes some steps, which warm up.

They are timed in turns inside one process, on one model, so that clocks, caches and
fragmentation are the same for all; the figures are medians over the rounds, the ratios medians
of the ratios within a round. Nothing else is evicted.

    python benchmarks/overhead.py --json build/overhead.json

On a GPU: the GPT of benchmarks/gpt.py, bound by the GPU, and a small one, bound by launches.
Without a GPU: the small one on the simulated device.
"""

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import torchpager
from torchpager import _torch_cpu, testing
from torchpager.demo_train import GPT, Config, Silent, one_step, synchronize

MODES = ("native", "installed", "sampling", "armed")
# Steps until plans are made, if there is one to be made.
ARMED_WARM_STEPS = 8
SAMPLING = 1  # as hook_forced() counts
GPU_BLOCK = 32 << 20


@dataclass(frozen=True)
class Workload:
    """A model, how often a turn steps it before and while timing, and turns in a round.

    Armed, more steps come before.
    """

    name: str
    config: Config
    warm_steps: int
    timed_steps: int
    turns: int = 1


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
    turns=3,  # launches take longer now and shorter then; many short turns see less of that
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


def arm(device: str, size: int) -> None:
    """Have something evicted, as when memory has become tight."""
    of_no_use = torch.zeros(size, dtype=torch.uint8, device=device)
    testing.evict(of_no_use)


@contextmanager
def gpu_switch() -> Iterator[Switch]:
    """Yield what puts the process into a mode: outside or inside ``auto_offload()``."""
    active: list[Any] = []

    def switch(mode: str) -> None:
        _torch_cpu.hook_forced(SAMPLING if mode == "sampling" else 0)
        if active:  # also from armed to another mode: that disarms
            active.pop().stop()
        if mode != "native":
            active.append(torchpager.auto_offload())
            active[0].start()
        if mode == "armed":
            arm("cuda", GPU_BLOCK)

    yield switch
    switch("native")


@contextmanager
def cpu_switch(large_min: int) -> Iterator[Switch]:
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
        yield switch
        switch("installed")  # as it was found


def turn(workload: Workload, step: Callable[[], None], warm_steps: int) -> float:
    """Return the seconds of one step, after warming up."""
    for _ in range(warm_steps):
        step()
    synchronize(workload.config.device)
    begin = time.perf_counter()
    for _ in range(workload.timed_steps):
        step()
    synchronize(workload.config.device)
    return (time.perf_counter() - begin) / workload.timed_steps


def measure(workload: Workload, rounds: int, switch: Switch) -> Any:
    """Time the modes in turns and return figures as a JSON object."""
    rounds *= workload.turns
    step = stepper(workload.config)
    for _ in range(3):
        step()
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    evictions = 0
    seen_by_mode = dict.fromkeys(MODES, 0)
    for index in range(rounds):
        for shift in range(len(MODES)):
            mode = MODES[(index + shift) % len(MODES)]
            switch(mode)
            warm_steps = ARMED_WARM_STEPS if mode == "armed" else workload.warm_steps
            calls, before = _torch_cpu.hook_calls(), torchpager.stats().evictions.count
            times[mode].append(turn(workload, step, warm_steps))
            seen_by_mode[mode] += _torch_cpu.hook_calls() - calls
            evictions += torchpager.stats().evictions.count - before
    ratios = {
        mode: median(a / b for a, b in zip(times[mode], times["native"], strict=True))
        for mode in MODES
    }
    return {
        "name": workload.name,
        "rounds": rounds,
        "step_ms": {mode: median(times[mode]) * 1e3 for mode in MODES},
        "ratio": ratios,
        "hook_calls": seen_by_mode,
        "evictions": evictions,
    }


def on_gpu(rounds: int, workloads: Iterable[Workload]) -> list[Any]:
    """Measure through the wrapper door."""
    found = []
    for workload in workloads:
        with gpu_switch() as switch:
            found.append(measure(workload, rounds, switch))
        torch.cuda.empty_cache()
    return found


def on_cpu(rounds: int) -> list[Any]:
    """Measure a small workload through the CPU door."""
    torch.set_num_threads(1)
    workload = replace(
        SMALL, config=replace(SMALL.config, device="cpu", autocast=False), turns=1
    )
    with cpu_switch(64 << 10) as switch:
        return [measure(workload, rounds, switch)]


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
        for mode in MODES:
            print(
                f"{one['name']:<16}{mode:<12}{one['step_ms'][mode]:>10.3f} ms"
                f"{one['ratio'][mode]:>8.3f} x native"
            )
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
