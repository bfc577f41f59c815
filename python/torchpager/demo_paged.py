"""The demo's training program inside torchpager's contexts, in a process of its own.

``python -m torchpager.demo_paged CONFIG RESULT`` trains exactly what ``demo_train`` trains,
with no budget or inside ``config["budget_bytes"]``. Beside the result of the training it writes
the counters, a timeline of memory sampled on another thread, and which kinds of tensors were
evicted.
"""

import json
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

import torchpager
from torchpager import _core, demo_train, testing
from torchpager.stats import Stats

KINDS = ("parameters", "gradients", "activations", "optimizer states")


class EvictionWitness:
    """Takes the counters, and finds out which kinds of tensors were evicted at least once.

    A block's count of evictions is read while the tensor it belongs to is alive. Parameters,
    gradients and optimizer states are known by their tensors. An activation is a block that did
    not exist when the forward pass began and is still alive when it has ended. Each kind is
    looked for until it was seen once, so that the later steps run undisturbed; without a budget
    (``looking`` false) not at all.
    """

    def __init__(self, slot: int, *, looking: bool) -> None:
        self.evicted_blocks = dict.fromkeys(KINDS, 0)
        self._missing = set(KINDS) if looking else set()
        self.counters: dict[str, Any] = {}
        self._slot = slot
        self._before: set[tuple[int, int]] = set()

    def _blocks(self) -> dict[tuple[int, int], dict[str, Any]]:
        return {
            (block["addr"], block["generation"]): block for block in _core.blocks(self._slot)
        }

    def forward_begins(self) -> None:
        """Remember what is alive before the activations are."""
        if "activations" in self._missing:
            self._before = set(self._blocks())

    def forward_done(self) -> None:
        """Count the activations that left the device during the forward pass."""
        if "activations" in self._missing:
            blocks = self._blocks()
            born = blocks.keys() - self._before
            self._count("activations", [blocks[key]["evicted_count"] for key in born])

    def step_done(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Count the parameters, gradients and optimizer states that were evicted so far."""
        self._look("parameters", model.parameters())
        self._look("gradients", (p.grad for p in model.parameters() if p.grad is not None))
        self._look("optimizer states", demo_train.optimizer_tensors(optimizer))

    def trained(self) -> None:
        """Take the counters before the results are read, which pages as well."""
        self.counters = read_counters(torchpager.stats())

    def _look(self, kind: str, tensors: Iterable[torch.Tensor]) -> None:
        if kind in self._missing:
            self._count(kind, [testing.state(tensor).evicted_extents for tensor in tensors])

    def _count(self, kind: str, evictions: Iterable[int]) -> None:
        count = sum(number > 0 for number in evictions)
        if count:
            self.evicted_blocks[kind] = count
            self._missing.discard(kind)


class Timeline:
    """Samples the core's figures on its own thread.

    Not through ``torchpager.stats()``: to build its snapshot takes ten times as long, and the
    training thread waits meanwhile.

    Parameters
    ----------
    slot
        The core's slot: a CUDA device index, or that of the simulated device.
    interval_s
        Time between samples.
    """

    def __init__(self, slot: int, interval_s: float) -> None:
        self.samples: list[tuple[float, int, int, int]] = []
        self.largest_held = 0
        self._slot = slot
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="timeline", daemon=True)

    def __enter__(self) -> "Timeline":
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stop.set()
        self._thread.join()

    def _native_reserved(self) -> int:
        if self._slot == _core.SIM_SLOT:
            return 0
        from torchpager import _torch_cuda

        return _torch_cuda.native_reserved(self._slot)

    def _run(self) -> None:
        while not self._stop.wait(self._interval_s):
            if not _core.is_open(self._slot):
                continue
            before, _ = _core.stats(self._slot)["reserved"]
            native = self._native_reserved()
            figures = _core.stats(self._slot)
            now, _ = figures["reserved"]
            # Two allocators, two readings: the sum means something only if nothing moved
            # between.
            if before == now:
                self.largest_held = max(self.largest_held, now + native)
            self.samples.append(
                (time.monotonic(), figures["resident"][0], figures["host"][0], now + native)
            )


def read_counters(stats: Stats) -> dict[str, Any]:
    """Return the figures of ``stats()`` that the demo reports as a JSON object."""
    gauges = ("allocated", "reserved", "resident", "host", "host_bytes", "held")
    tallies = ("fills", "write_backs", "evictions", "misses", "stalls")
    return {name: getattr(stats, name).peak for name in gauges} | {
        name: asdict(getattr(stats, name)) for name in tallies
    }


@contextmanager
def contexts(settings: dict[str, Any]) -> Iterator[None]:
    """Enter what the run asks for: the simulated device, the budget, paging."""
    paging = partial(torchpager.auto_offload, recompute=settings.get("recompute", False))
    with ExitStack() as stack:
        if settings["device"] == "cpu":
            stack.enter_context(
                torchpager.simulate(
                    settings["simulated_bytes"],
                    granularity=settings["large_min_bytes"],
                    large_min=settings["large_min_bytes"],
                    seed=settings["seed"],
                )
            )
        if settings.get("budget_bytes"):
            stack.enter_context(torchpager.budget(settings["budget_bytes"]))
            stack.enter_context(paging())
        elif settings["device"] == "cuda":
            stack.enter_context(paging())
        yield


def main(argv: list[str]) -> int:
    """Run one paged training; ``argv`` is the configuration's path and the result's path."""
    settings = json.loads(Path(argv[0]).read_text())
    config = demo_train.Config.from_json(settings)
    demo_train.prepare(config)
    demo_train.wait_for_watcher(config)
    on_gpu = config.device == "cuda"
    slot = torch.cuda.current_device() if on_gpu else _core.SIM_SLOT
    witness = EvictionWitness(slot, looking=bool(settings.get("budget_bytes")))
    watched = Timeline(slot, settings["sample_s"])
    with contexts(settings), watched:
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
        torchpager.reset_stats()
        result = demo_train.train(config, witness)
        result["peak_bytes"] = (
            torch.cuda.max_memory_allocated() if on_gpu else witness.counters["allocated"]
        )
        result["largest_held"] = torchpager.stats().held.peak
    result["counters"] = witness.counters
    result["evicted_blocks"] = witness.evicted_blocks
    result["largest_held_sampled"] = watched.largest_held
    result["timeline"] = watched.samples
    Path(argv[1]).write_text(json.dumps(result))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
