"""Runs PyTorch's own operator samples under paging and says which of them go wrong.

``python operator_sweep.py FIRST COUNT [NAME]`` runs COUNT entries of the list in SEED's order,
beginning with entry FIRST, or only those of one name. Every sample runs twice, plainly and on a
simulated device that evicts everything before each operator and maps nothing where bytes are in
HOST. So an operator that reads what it did not announce crashes this process, and one that
writes what it did not announce is found out by the fingerprints. Outputs and inputs must have
the same bits.

The last line that begins with ``at `` names what ran when a crash came; lines that begin with
``differs `` and ``unseen `` name operators that went wrong.
"""

import os
import random
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

os.environ["PYTORCH_TEST_WITH_SLOW"] = "0"

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

import torchpager
from torchpager import testing

SEED = 20
SAMPLES = 6
LARGEST = 20_000
"""Elements of a sample's tensors; a larger sample is left out."""

# What these return depends on the run, or on memory that nobody has written.
NOT_REPEATABLE = {
    "empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided",
    "resize_", "resize_as_",
}  # fmt: skip


def order() -> list[Any]:
    """Return the entries in the order of the seed."""
    entries = [op for op in op_db if torch.float32 in op.dtypes]
    random.Random(SEED).shuffle(entries)
    return [op for op in entries if not op.name.startswith("jiterator")]  # needs a GPU


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the tensors in nested arguments or results."""
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def copied(value: Any, gradients: bool) -> Any:
    """Return the same arguments with memory of their own, made by operators."""

    def copy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if leaf.layout is torch.strided and not leaf.is_nested and not leaf.is_quantized:
            # The geometry too: the clone of an expanded or strided tensor is contiguous.
            flat = torch.empty(0, dtype=leaf.dtype).set_(leaf.detach().untyped_storage())
            own = flat.clone()
            made = own.as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
            made = made.conj() if leaf.is_conj() else made
            made = torch._neg_view(made) if leaf.is_neg() else made
        else:
            made = leaf.detach().clone()
        return made.requires_grad_(leaf.requires_grad and gradients)

    return pytree.tree_map(copy, value)


def bits(value: Any) -> list[Any]:
    """Return bytes and shapes of all tensors in a value, and other leaves as text."""
    found: list[Any] = []
    for leaf in pytree.tree_leaves(value):
        if not isinstance(leaf, torch.Tensor):
            found.append(repr(leaf) if isinstance(leaf, (int, float, bool, complex)) else None)
            continue
        plain = leaf.detach()
        if plain.layout is not torch.strided:
            plain = plain.to_dense()
        if plain.is_quantized:
            plain = plain.int_repr()
        flat = torch.empty(plain.numel(), dtype=plain.dtype).copy_(plain.reshape(-1))
        found.append(
            (tuple(plain.shape), plain.dtype, flat.view(torch.uint8).numpy().tobytes())
        )
    return found


def attempt(operator: Any, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
    """Run an operator and, where an input wants it, its backward; an error is a result too."""
    torch.manual_seed(1)
    try:
        result = operator(*arguments, **options)
        wanted = [leaf for leaf in tensors_of((arguments, options)) if leaf.requires_grad]
        roots = [leaf for leaf in tensors_of(result) if leaf.requires_grad]
        if not wanted or not roots:
            return result
        starts = [torch.ones_like(root) for root in roots]
        return result, torch.autograd.grad(roots, wanted, starts, allow_unused=True)
    except (RuntimeError, ValueError, TypeError, IndexError, NotImplementedError) as error:
        return type(error).__name__


def run(variant: Any, sample: Any, gradients: bool) -> tuple[list[Any], list[Any]]:
    """Run one sample on memory of its own; return its results and what its inputs are then."""
    arguments = copied((sample.input, *sample.args), gradients)
    options = copied(sample.kwargs, gradients)
    result = attempt(variant, arguments, options)
    return bits(result), bits((arguments, options))


def small(sample: Any) -> bool:
    """Return whether a sample is worth its time."""
    found = tensors_of((sample.input, sample.args, sample.kwargs))
    return all(tensor.numel() <= LARGEST for tensor in found)


def samples_of(op: Any) -> list[Any]:
    """Return a few of an operator's samples, evenly chosen."""
    torch.manual_seed(2)
    random.seed(2)
    try:
        found = [
            each
            for each in op.sample_inputs(
                "cpu", torch.float32, requires_grad=op.supports_autograd
            )
            if small(each)
        ]
    except (RuntimeError, ValueError, TypeError, ImportError, AssertionError, OSError):
        return []
    step = max(1, len(found) // SAMPLES)
    return found[::step][:SAMPLES]


@dataclass
class Case:
    """One sample of one variant of an operator, and what it gives without paging."""

    label: str
    variant: Any
    sample: Any
    gradients: bool
    plain: tuple[list[Any], list[Any]]


def cases(op: Any) -> Iterator[Case]:
    """Run an operator's samples without paging."""
    if op.name in NOT_REPEATABLE:
        return
    for index, sample in enumerate(samples_of(op)):
        for kind, variant in (("", op.op), ("_", op.inplace_variant)):
            if variant is None:
                continue
            gradients = not kind  # a leaf cannot be written to
            plain = run(variant, sample, gradients)
            if plain == run(variant, sample, gradients):
                label = f"{op.name}{kind} {op.variant_test_name} sample {index}"
                yield Case(label, variant, sample, gradients, plain)


def main() -> None:
    """Run what the command line names and print how many samples were run."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    entries = order()
    if len(sys.argv) > 3:
        entries = [op for op in entries if op.name == sys.argv[3]]
    else:
        first, count = int(sys.argv[1]), int(sys.argv[2])
        entries = entries[first : first + count]
    prepared = [case for op in entries for case in cases(op)]
    device = torchpager.simulate(
        "64 MiB", granularity="4 KiB", large_min=1, strict=True, page_out_before_each_op=True
    )
    with device, torchpager.auto_offload():
        for case in prepared:
            print(f"at {case.label}", flush=True)
            before = torchpager.stats().unseen_writes.count
            paged = run(case.variant, case.sample, case.gradients)
            pairs = zip(("result", "inputs"), case.plain, paged, strict=True)
            for what in [what for what, left, right in pairs if left != right]:
                print(f"differs {case.label} in {what}")
            testing.page_out_all()
            if torchpager.stats().unseen_writes.count != before:
                print(f"unseen {case.label} wrote what it did not announce")
    misses = torchpager.stats("cpu").misses.count
    print(f"ran {len(prepared)} samples of {len(entries)} operators, {misses} misses")


if __name__ == "__main__":
    main()
