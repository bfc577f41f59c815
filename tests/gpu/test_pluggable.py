"""The pluggable door: everything under a hard budget, in processes of their own."""

import json
from pathlib import Path

from conftest import Script

# The demo's model, small enough for a budget of 2 GiB, which it needs about half of.
TRAIN = """
import json, sys
import torch
import torchpager
from torchpager import demo_train
if {door}:
    torch.cuda.memory.change_current_allocator(torchpager.pluggable_allocator())
    torchpager.budget({budget!r}).start()
config = demo_train.Config(
    device="cuda", layers=4, width=768, heads=12, context=256, batch=8, steps=6, autocast=True,
    text_bytes=1 << 20, chunk_bytes=64 << 20,
)
demo_train.prepare(config)
result = demo_train.train(config, demo_train.Silent())
result["stats"] = {{
    "allocated": torchpager.stats("cuda").allocated.peak,
    "reserved": torchpager.stats("cuda").reserved.peak,
    "allocations": torchpager.stats("cuda").alloc_count,
}}
with open({answer!r}, "w") as file:
    json.dump(result, file)
"""

OVERFLOW = """
import torch
import torchpager
torch.cuda.memory.change_current_allocator(torchpager.pluggable_allocator())
torchpager.budget("256 MiB").start()
kept = torch.full((32 << 20,), 7, dtype=torch.uint8, device="cuda")
small = torch.full((100,), 3.0, device="cuda")
for _ in range(3):
    try:
        torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        print("caught", error)
    else:
        raise SystemExit("no error: a tensor over a null pointer, or a broken budget")
again = torch.full((64 << 20,), 5, dtype=torch.uint8, device="cuda")
assert bool((kept == 7).all())
assert bool((again == 5).all())
assert small.sum().item() == 300.0
assert torchpager.stats("cuda").reserved.peak <= 256 << 20, torchpager.stats("cuda")
print("went on")
"""


def train(
    python: Script, answer: Path, *, door: bool, budget: str = "2 GiB"
) -> dict[str, object]:
    """Train in a process of its own and return what it found."""
    code = TRAIN.format(door=door, budget=budget, answer=str(answer))
    python("-c", code)
    found: dict[str, object] = json.loads(answer.read_text())
    return found


def test_training_under_a_budget_that_fits_has_native_bits(
    python: Script, tmp_path: Path
) -> None:
    native = train(python, tmp_path / "native.json", door=False)
    inside = train(python, tmp_path / "inside.json", door=True)
    assert inside["losses"] == native["losses"]
    assert inside["digests"] == native["digests"]
    figures = inside["stats"]
    assert isinstance(figures, dict)
    assert 0 < figures["allocated"] <= figures["reserved"] <= 2 << 30
    assert figures["allocations"] > 1000, "small blocks must come through this door as well"


def test_training_under_a_budget_that_does_not_fit_ends_in_torchs_error(
    python: Script, tmp_path: Path
) -> None:
    code = TRAIN.format(door=True, budget="192 MiB", answer=str(tmp_path / "none.json"))
    printed = python("-c", code, code=1)
    assert "OutOfMemoryError: CUDA out of memory." in printed
    assert not (tmp_path / "none.json").exists()


def test_request_beyond_the_budget_raises_and_the_program_goes_on(python: Script) -> None:
    printed = python("-c", OVERFLOW)
    assert printed.count("caught CUDA out of memory.") == 3
    assert "went on" in printed
